"""Exhibits, wrong and dishonest files: each is rejected for its own reason. Honest files that look like them pass.

The first lines of a case in exhibits/cases.py say what is expected: "Verdict: fail: <regular expression of the reason>", and
what it needs. One that is "forward only" names its caveats, too, in their order: "Caveat: <tag>, <tag>"; so may one that
passes. Those that need a GPU, or two, are run by hand, and recorded:

    python -m pytest tests/judge/test_exhibits.py -k on_a_gpu --record results/exhibits/<GPU>.json
"""

import contextlib
import functools
import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from exhibits import cases
from judged import LIMIT, court

from playground import catalog
from playground.machine import environment, requirements
from playground.report.document import write_whole
from playground.worker import WorkerProcess

PROBLEM = Path(__file__).parent / "exhibits" / "problem.py"
RECORDS = catalog.ROOT / "results" / "exhibits"
NO_COMPILER = requirements.missing_for("cpu")
# Each takes a process of its own, a build or seconds; a faster test, or a case like it, notices the same fault of the judge.
OF_THE_FULL_TIER = {
    *("default_device", "default_dtype", "grad_mode", "threads", "benchmark_flag"),  # precision_flag, test_behaviour.py
    *("forges_a_type", "forges_a_pass"),  # forges_a_reply, worker/test_replies.py
    "patched_timer",  # patched_check
    *("decorative_times_zero", "decorative_by_ctypes"),  # decorative, own_library_by_ctypes, test_work.py
    *("falls_back", "falls_back_at_its_own_size", "opens_and_never_calls"),  # falls_back_when_it_runs, builds_and_never_calls
    "remembers_by_content_whole",  # remembers_by_content
    "ring_of_results",  # reuses_its_output
    *("builds_again_without_a_flag", "leaves_sizes_and_gradient_to_pytorch"),  # own_kernel, own_library_by_ctypes
    "own_cuda_library",  # decorative_cuda_library, test_work.py
}


@dataclass(frozen=True)
class Exhibit:
    """A case. `needs` is "", "a process of its own", "a compiler", "the emulator", "a GPU" or "two GPUs".

    `caveats` are the tags, each once, of what is said besides.
    """

    path: Path
    verdict: str
    reason: str
    needs: str
    caveats: tuple

    @property
    def name(self):
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def gpus(self):
        """How many it needs."""
        return ("a GPU", "two GPUs").index(self.needs) + 1 if "GPU" in self.needs else 0


@functools.cache
def exhibits():
    """All of them, those in wrong/ first."""
    found = []
    for name in sorted(cases.CASES, key=lambda name: (not name.startswith("wrong/"), name)):
        stated = dict(re.findall(r"^(Verdict|Needs|Caveat): (.*)$", cases.description(name), re.M))
        verdict, _, reason = stated["Verdict"].partition(": ")
        tags = tuple(stated["Caveat"].split(", ")) if "Caveat" in stated else ()
        found.append(Exhibit(cases.folder() / f"{name}.py", verdict, reason, stated.get("Needs", ""), tags))
    return found


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """judged(exhibit, place) -> its result. Files that leave nothing behind share a process, and equal texts what is built.

    The processes have one thread, enough for what is tiny.
    """
    requirements.prepare_environment()
    builds, courts = str(tmp_path_factory.mktemp("builds")), {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("OMP_NUM_THREADS", "1")
        shared = stack.enter_context(WorkerProcess("candidate", LIMIT))

        def judge(exhibit, place):
            if place not in courts:
                drawn = secrets.randbits(31), secrets.randbits(53)
                courts[place] = stack.enter_context(court(PROBLEM, place, seeds=drawn, builds=builds))
            with contextlib.nullcontext(shared) if not exhibit.needs else WorkerProcess("candidate", LIMIT) as worker:
                return courts[place](worker, exhibit.path)

        yield judge


def expect(result, exhibit):
    assert (result["verdict"] or "pass") == exhibit.verdict, (result["reason"], result["details"])
    if exhibit.reason:
        assert re.match(exhibit.reason, result["reason"]), result["reason"]
        assert "\n" not in result["reason"]
    costly = dict.fromkeys(caveat["tag"] for caveat in result["caveats"] if caveat["costs"])
    if exhibit.verdict == "forward only":
        assert tuple(costly) == exhibit.caveats
    if exhibit.verdict == "pass" and exhibit.caveats:
        assert tuple(dict.fromkeys(caveat["tag"] for caveat in result["caveats"])) == exhibit.caveats and not costly
    by_standard = {name: found["verdict"] for name, found in result["standards"].items()}
    meets = {"pass": ("pass", "pass"), "forward only": ("pass", "fail")}
    forward, drop_in = meets.get(exhibit.verdict, (exhibit.verdict, exhibit.verdict))
    assert by_standard == {"forward": forward, "drop_in": drop_in}


def hashes(exhibit):
    """Of all that its verdict is about: the file but for its empty lines, and the model."""
    code = "\n".join(filter(str.strip, exhibit.path.read_text().splitlines()))
    return {"code_sha256": hashlib.sha256(code.encode()).hexdigest(), "problem_sha256": catalog.sha256(PROBLEM)}


@pytest.fixture(scope="module")
def record(request):
    """A function (exhibit, result) that keeps what came out on a GPU for the file that --record names."""
    file = request.config.getoption("--record")
    if file and not torch.cuda.is_available():
        pytest.fail("--record needs an NVIDIA GPU", pytrace=False)
    kept = {}

    def keep(exhibit, result):
        verdict = {key: result[key] for key in ("reason", "findings", "standards", "caveats")}
        kept[exhibit.name] = hashes(exhibit) | {"verdict": result["verdict"] or "pass", **verdict}

    yield keep
    if file:
        text = {"environment": environment.describe(), "exhibits": dict(sorted(kept.items()))}
        write_whole(file, json.dumps(text, indent=1).replace(str(Path.home()), "~") + "\n")


def tiered(exhibit):
    identifier = exhibit.name.replace("/", "-") + ("-on_a_gpu" if exhibit.gpus else "")
    return pytest.param(exhibit, marks=[pytest.mark.full] if exhibit.path.stem in OF_THE_FULL_TIER else [], id=identifier)


@pytest.mark.parametrize("exhibit", [tiered(exhibit) for exhibit in exhibits()])
def test_the_verdict_and_its_reason(judged, record, exhibit):
    if exhibit.gpus > torch.cuda.device_count():
        pytest.skip(f"needs {exhibit.needs}, of NVIDIA")
    if exhibit.needs in ("a compiler", "the emulator") and NO_COMPILER:
        pytest.skip(f"needs a C++ compiler: {NO_COMPILER}")
    result = judged(exhibit, "cuda" if exhibit.gpus else "emulator" if exhibit.needs == "the emulator" else "cpu")
    if exhibit.gpus:
        record(exhibit, result)
    expect(result, exhibit)


def complaint_about_records(exhibit, entries):
    """Why what was recorded of an exhibit that needs a GPU does not count; None where it does."""
    now = hashes(exhibit)
    current = [entry for entry in entries if {key: entry[key] for key in now} == now]
    if not current:
        return "it has changed since it was recorded" if entries else "it was never recorded"
    for entry in current:
        if entry["verdict"] != exhibit.verdict or not re.match(exhibit.reason, entry["reason"] or ""):
            return f"recorded is {entry['verdict']}: {entry['reason']}"
    return None


def test_what_needs_a_gpu_was_run_on_one():
    records = [json.loads(path.read_text())["exhibits"] for path in sorted(RECORDS.glob("*.json"))]
    entries = {each: [record[each.name] for record in records if each.name in record] for each in exhibits() if each.gpus}
    wrong = {each.name: complaint for each, of_it in entries.items() if (complaint := complaint_about_records(each, of_it))}
    command = "python -m pytest tests/judge/test_exhibits.py -k on_a_gpu --record results/exhibits/<GPU>.json"
    assert entries and not wrong, f"on a machine with two GPUs run: {command}"


@pytest.mark.full
@pytest.mark.parametrize("name", ["decorative_kernel", "own_cuda_kernel", "whole_blocks"])
@pytest.mark.skipif(NO_COMPILER is not None, reason="needs a C++ compiler")
def test_kernels_under_the_emulator(judged, name):
    (exhibit,) = [exhibit for exhibit in exhibits() if exhibit.path.stem == name]
    result = judged(exhibit, "emulator")
    expect(result, exhibit)
    if name == "whole_blocks":  # what the emulator finds at other sizes is a caveat, and the rest is judged
        assert result["findings"] and not any(each["complaint"] for each in result["check"]["behaviour"].values())
        assert not result["check"]["mutants_rejected"].startswith("0/")
