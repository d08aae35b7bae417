"""The pairs of a suite: folders as KernelBench keeps problems and solutions of a run, or a JSON list of pairs."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from playground.catalog import CatalogError, natural_order
from playground.subject import Case, PairFacts

LEVEL = re.compile(r"level(\d+)")
PROBLEM = re.compile(r"(\d+)_.*\.py")
SOLUTION = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)_kernel\.py")
NUMBERS = ("level", "problem_id", "sample_id")
LISTED = ("problem", "solution", "origin", "claimed_speedup", "settings", *NUMBERS)  # the keys of a pair in a JSON list
KINDS = {"origin": str, "claimed_speedup": int | float, "settings": dict, **dict.fromkeys(NUMBERS, int)}
LIST_FORM = '[{"problem": "a.py", "solution": "b.py"}, ...]'


@dataclass(frozen=True)
class Pair:
    """A problem and a solution of it, by their paths and the names under which they are reported.

    `level`, `problem_id` and `sample_id` are KernelBench's or None; `origin` and `claimed_speedup` are the list's words.
    `broken` is why it cannot be judged, `skipped` why it is not tried here. `case` and `workload` say which of several sizes
    this is. What is not `timed` is only judged.
    """

    problem: Path
    solution: Path
    problem_name: str
    solution_name: str
    level: int | None = None
    problem_id: int | None = None
    sample_id: int | None = None
    origin: str | None = None
    claimed_speedup: float | None = None
    settings: dict = field(default_factory=dict)
    broken: str | None = None
    skipped: str | None = None
    case: Case | None = None
    workload: dict | None = None
    timed: bool = True

    def facts(self):
        """Return what the JSON document says of the pair."""
        kept = {name: getattr(self, name) for name in (*NUMBERS, "origin", "claimed_speedup", "case", "workload")}
        return PairFacts(problem=self.problem_name, solution=self.solution_name, **kept)


@dataclass(frozen=True)
class Suite:
    """The `pairs` in the order in which they are judged; `unsolved` are problems of the same levels without a solution."""

    pairs: tuple[Pair, ...]
    unsolved: tuple[str, ...] = ()

    @property
    def levels(self):
        """Return KernelBench's levels among the pairs, sorted."""
        return sorted({pair.level for pair in self.pairs if pair.level is not None})


def read(problems, solutions=None):
    """Return the Suite in two folders, or in a JSON list; what is wrong with one pair breaks it alone. Raises CatalogError."""
    problems = Path(problems)
    if problems.is_dir() and solutions is None:
        raise CatalogError(f"--suite {problems} is a folder of problems: name that of their solutions with --solutions RUN")
    if problems.is_dir():
        return _from_folders(problems, Path(solutions))
    if solutions is not None and not problems.exists():
        raise CatalogError(f"--suite: no such folder: {problems}")
    if solutions is not None:
        raise CatalogError(f"--solutions goes with a folder of problems, and --suite {problems} is none")
    return _from_list(problems)


def _from_folders(problems, solutions):
    if not solutions.is_dir():
        raise CatalogError(f"--solutions {solutions}: there is no such folder")
    known = problems_in(problems)
    if not known:
        raise CatalogError(f"--suite {problems}: no problem such as level1/3_Name.py is in there")
    pairs = []
    for file in sorted(solutions.iterdir(), key=lambda file: natural_order(file.name)):
        if named := SOLUTION.fullmatch(file.name):
            level, number, sample = map(int, named.groups())
            problem = known.get((level, number))
            broken = None if problem else f"{problems} has no problem {number} of level {level}"
            path = problem or problems / f"level{level}" / f"{number}_.py"
            known_as = _name(path, problems), file.stem, level, number, sample
            pairs.append(Pair(path, file, *known_as, broken=broken or _unreadable(file)))
    if not pairs:
        raise CatalogError(f"--solutions {solutions}: no solution such as level_1_problem_3_sample_0_kernel.py is in there")
    solved, levels = {pair.problem for pair in pairs}, {pair.level for pair in pairs}
    unsolved = [_name(path, problems) for (level, _), path in sorted(known.items()) if level in levels and path not in solved]
    return Suite(tuple(pairs), tuple(unsolved))


def problems_in(folder):
    """Return {(level, number): path} of the problems below a folder that holds level1, level2, ..., or is one of them."""
    found = {}
    for each in [folder.absolute(), *sorted(folder.absolute().iterdir())]:
        if (level := LEVEL.fullmatch(each.name)) and each.is_dir():
            for file in each.iterdir():
                if named := PROBLEM.fullmatch(file.name):
                    found[int(level[1]), int(named[1])] = folder / file.relative_to(folder.absolute())
    return found


def _from_list(file):
    """Paths in a list are relative to the list's folder."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"--suite {file}: {error.strerror}") from None
    except ValueError as error:
        raise CatalogError(f"--suite {file} is neither a folder of problems nor a JSON list of pairs: {error}") from None
    if not isinstance(listed, list) or not listed:
        got = "an empty list" if listed == [] else type(listed).__name__
        raise CatalogError(f"--suite {file}: expected {LIST_FORM}, got {got}")
    return Suite(tuple(_listed(each, number, file) for number, each in enumerate(listed)))


def _listed(entry, number, file):
    """The pair of one entry. An entry that names no pair at all is a mistake in the list: raises CatalogError."""
    entry = dict(zip(("problem", "solution"), entry, strict=True)) if isinstance(entry, list) and len(entry) == 2 else entry
    where = f"--suite {file}: entry {number}"
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("problem", "solution")):
        raise CatalogError(f"{where} names no problem and solution: expected {LIST_FORM}")
    if unknown := entry.keys() - set(LISTED):
        raise CatalogError(f"{where} has unknown keys {', '.join(sorted(unknown))}; known: {', '.join(LISTED)}")
    for key, kind in KINDS.items():
        if entry.get(key) is not None and (not isinstance(entry[key], kind) or isinstance(entry[key], bool)):
            raise CatalogError(f"{where}: {key} is {entry[key]!r}, no {getattr(kind, '__name__', 'number')}")
    problem, solution = (file.parent / entry[key] for key in ("problem", "solution"))
    numbers = _numbers(problem, solution) | {name: entry[name] for name in NUMBERS if entry.get(name) is not None}
    names = [_name(path, file.parent) for path in (problem, solution)]
    said = {key: entry.get(key) for key in ("origin", "claimed_speedup")} | {"settings": entry.get("settings") or {}}
    return Pair(problem, solution, *names, **numbers, **said, broken=_unreadable(problem) or _unreadable(solution))


def _numbers(problem, solution):
    """KernelBench's numbers as far as the two names tell them."""
    if named := SOLUTION.fullmatch(solution.name):
        return dict(zip(NUMBERS, map(int, named.groups()), strict=True))
    level, number = LEVEL.fullmatch(problem.parent.name), PROBLEM.fullmatch(problem.name)
    return {"level": int(level[1]), "problem_id": int(number[1])} if level and number else {}


def _name(path, folder):
    path = path.relative_to(folder) if path.is_relative_to(folder) else path
    return path.with_suffix("").as_posix()


def _unreadable(file):
    try:
        with file.open("rb"):
            return None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return f"{file}: {getattr(error, 'strerror', error)}"
