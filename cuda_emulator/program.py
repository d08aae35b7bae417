"""Plain CUDA programs: .cu files with a main(), built into an executable that runs under the emulator, without PyTorch."""

import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from . import runtime, toolchain
from .declarations import ACCEPTED_RACE, find_kernels
from .diagnostics import describe, errors_in, unexplained
from .errors import EmulatorError, parse_finding
from .rewrite import Rewritten, rewrite
from .sides import Sides, macros_with_qualifiers, sides_of
from .text import UnsupportedError, as_read, tokens_of

INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', re.M)
OPENMP = re.compile(r"^[ \t]*#[ \t]*(?:pragma[ \t]+omp\b|include[ \t]*<omp\.h>)", re.M)
CUDA_SUFFIXES = {".cu", ".cuh"}
PLAIN_SUFFIXES = {".c"}  # for the C compiler, as it is
# The lines of a program's files have one numbering, so that a line alone names its file: those of the second file begin here.
LINES_OF_A_FILE = 1 << 20
STANDARDS = ("c++03", "c++11", "c++14", "c++17", "c++20")  # that nvcc 13 takes
ACCEPTED = "accepted races\n"  # begins what a program tells at its end, if it has accepted any
PROGRAM_HEADER = "emulator/program.h"  # stands in front of each file
MIRROR = "sources"  # the folder of the rewritten files, each under its whole path


@dataclass
class SourceFile:
    path: Path
    text: str
    first_line: int
    rewritten: str = ""
    waiting: tuple = ()  # lines, in the program's numbering
    made: Rewritten | None = None  # None: the file is C
    includes: list = field(default_factory=list)  # resolved paths


@dataclass
class Program:
    """The own files of a program: those that are compiled, then what they include."""

    compiled: list
    folders: list  # of -I
    defines: list = field(default_factory=list)  # of -D
    standard: str = "c++17"  # what nvcc takes by itself
    first_index: int = 0  # of its files in the numbering of lines
    files: list = field(default_factory=list)
    accepted_races: dict = field(default_factory=dict)

    def read(self):
        """Find and rewrite the files. Raises EmulatorError for one that cannot be read or has what is not supported."""
        known, waiting = set(), list(self.compiled)
        while waiting:
            path = waiting.pop(0)
            if path.resolve() in known:
                continue
            known.add(path.resolve())
            try:
                text = as_read(path.read_text(errors="replace"))
            except OSError as error:
                raise EmulatorError(f"{path}: {error.strerror or error}") from None
            self.files.append(SourceFile(path, text, (self.first_index + len(self.files)) * LINES_OF_A_FILE + 1))
            found = list(self.included(path, text))
            self.files[-1].includes = [each.resolve() for each in found]
            waiting += found
        kernels = {}
        try:
            for file in self.files:
                for name, found in find_kernels(tokens_of(file.text, file.first_line)).items():
                    kernels.setdefault(name, []).extend(found)
            macros, sides_for = self.sides()
            for file in self.files:
                if file.path.suffix in CUDA_SUFFIXES or file.path.suffix not in PLAIN_SUFFIXES:
                    others = {"program": (macros, sides_for(file)), "is_own_header": self.is_own_header}
                    made = rewrite(file.text, file.first_line, kernels, **others)
                    file.rewritten, file.waiting, file.made = made.text, made.waiting_lines, made
                else:
                    file.rewritten = file.text
        except UnsupportedError as error:
            path, line = self.place(error.line)
            raise EmulatorError(f"{path}:{line}: {error.told}") from None
        return self

    def sides(self):
        """The qualifiers that macros stand for, and a function from a file to the Sides of what it may see.

        Those are its own and its headers' and, for a header, those of the .cu files that include it. What another file keeps
        to itself may have the name of a device function.
        """
        read = {}
        for file in self.files:
            if file.path.suffix not in PLAIN_SUFFIXES:
                read[file.path] = tokens_of(file.text, file.first_line)
        macros, own = {}, {}
        for tokens in read.values():
            for name, qualifiers in macros_with_qualifiers(tokens).items():
                macros.setdefault(name, set()).update(qualifiers)
        for path, tokens in read.items():
            try:
                own[path] = sides_of(tokens, macros)
            except UnsupportedError:  # its brackets do not match
                return macros, lambda file: Sides()
        within = {Path(name).name for sides in own.values() for name in sides.inner}

        includes = {file.path.resolve(): file.includes for file in self.files}

        def reached(path):
            found, waiting = set(), [path.resolve()]
            while waiting:
                found.add(path := waiting.pop())
                waiting += [each for each in includes[path] if each not in found]
            return found

        units = {path: reached(path) for path in self.compiled if path.suffix in CUDA_SUFFIXES}

        def seen_by(file):
            seen = reached(file.path)
            for unit in units.values() if file.path not in self.compiled else ():
                seen |= unit if file.path.resolve() in unit else set()
            whole = Sides()
            for path, found in own.items():
                if path.resolve() in seen and path.name not in within:
                    whole.add(found)
            return whole

        return macros, seen_by

    def is_own_header(self, header):
        """Whether a header of this name is one of the files, below a folder of one of them or of -I."""
        folders = [*self.folders, *(file.path.parent for file in self.files)]
        return any((folder / header).is_file() for folder in folders)

    def included(self, path, text):
        """The files that a file includes from beside it or from the program's folders; the rest is the compiler's to find."""
        for kind, name in INCLUDED.findall(text):
            beside = [path.parent] if kind == '"' else []
            found = next((f / name for f in [*beside, *self.folders] if (f / name).is_file()), None)
            if found and not (kind == "<" and (toolchain.INCLUDE / name).is_file()):
                yield found

    def place(self, line):
        """(file, line) of a line in the program's numbering."""
        index, line = divmod(line, LINES_OF_A_FILE)
        return self.files[index - self.first_index].path, line

    @property
    def names(self):
        """Of its files, without their folders."""
        return {file.path.name for file in self.files}

    def build(self, mode):
        """The cached executable."""
        folders = [folder.resolve() for folder in self.folders]
        standard = "-std=gnu++20" if self.standard == "c++20" else "-std=gnu++17"  # which the emulator's own headers take
        flags = [standard, *toolchain.kernel_flags(mode, debug=False), *(f"-D{define}" for define in self.defines)]
        openmp = ["-fopenmp"] if any(OPENMP.search(file.text) for file in self.files) else []
        flags += openmp  # nvcc is asked for it by -Xcompiler
        units = self.files[: len({path.resolve() for path in self.compiled})]
        library = toolchain.runtime_library()

        def make(path):
            mirror = path.parent / MIRROR
            self.write(mirror)
            includes = [f"-I{in_mirror(mirror, folder)}" for folder in folders] + [f"-I{folder}" for folder in folders]
            front = ["-include", str(toolchain.INCLUDE / PROGRAM_HEADER)]
            if not (openmp or self.defines):
                front[1] = str(toolchain.precompiled_header(PROGRAM_HEADER, flags, uses_torch=False))
            objects = []
            for unit in units:
                objects.append(str(path.parent / f"{len(objects)}.o"))
                own = front if unit.path.suffix in CUDA_SUFFIXES else []
                how = [*own, *flags, *includes, "-x", "c++"]
                if unit.path.suffix in PLAIN_SUFFIXES:
                    how = [flag for flag in flags if not flag.startswith("-std=")] + includes
                    how += ["-x", "c", "-std=gnu17"]
                command = toolchain.compile_command(how, in_mirror(mirror, unit.path), objects[-1])
                toolchain.run_compiler(command, self.explain)
            libraries = [*openmp, str(library), f"-Wl,-rpath,{library.parent}", "-lpthread", "-ldl"]
            # Its own symbols are exported, so that a kernel launched through a pointer has a name.
            exported = ["-rdynamic", toolchain.OWN_SYMBOLS]
            toolchain.run_compiler([*toolchain.compiler()[0], *exported, *objects, "-o", str(path), *libraries], self.explain)

        texts = [(str(file.path), file.rewritten) for file in self.files]
        return toolchain.kept(
            "programs",
            f"-{units[0].path.stem}",
            (texts, [str(unit.path) for unit in units], flags, folders, str(library)),
            make,
        )

    def write(self, mirror):
        """Write the rewritten files below a folder."""
        for file in self.files:
            copy = in_mirror(mirror, file.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(numbered(file))

    @property
    def accepted_lines(self):
        """The lines whose races are accepted, in the program's numbering."""
        return [
            file.first_line + at
            for file in self.files
            for at, line in enumerate(file.text.split("\n"))
            if ACCEPTED_RACE.search(line)
        ]

    def explain(self, messages):
        own = {str(file.path) for file in self.files}
        errors = errors_in(messages, own.__contains__)
        return EmulatorError(describe(errors, self.place, self.is_compiled_as_it_is) if errors else unexplained(messages))

    def is_compiled_as_it_is(self, line):
        index, at = divmod(line, LINES_OF_A_FILE)
        index -= self.first_index
        texts = (self.files[index].text, self.files[index].rewritten)
        before, after = (text.split("\n")[at - 1 : at] for text in texts)
        return before == after

    def run(self, executable, arguments, mode="check", schedule="forward", seed=1, limit=None, **streams):
        """Run it on this process's own input and output, or on `streams`, as Popen takes them.

        Returns (exit status, the Finding that ended it or None); `accepted_races` are then {(file, line): how often}. After
        `limit` seconds the finding says where a kernel was; subprocess.TimeoutExpired is raised where none was under way.
        """
        reading, writing = os.pipe()
        told = f"{runtime.MODES[mode]} {runtime.SCHEDULES[schedule]} {seed} {writing} {int(runtime.CALL_OFF)}"
        accepted = " ".join(map(str, self.accepted_lines))
        waiting = " ".join(str(line) for file in self.files for line in sorted(file.waiting))
        environment = os.environ | {
            "EMULATOR_PROGRAM": told,
            "EMULATOR_ACCEPTED_RACES": accepted,
            "EMULATOR_WAITING_LINES": waiting,
        }
        try:
            process = subprocess.Popen([str(executable), *arguments], env=environment, pass_fds=[writing], **streams)
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            try:
                status = ended(process, limit)
            except KeyboardInterrupt:  # the terminal has sent it to the program, too
                status = process.wait()
                if status == -signal.SIGINT:
                    raise
            os.set_blocking(pipe.fileno(), False)  # what the program has started may hold it open
            report = (pipe.read() or b"").decode(errors="replace")
        if report.startswith(ACCEPTED):
            counts = (map(int, line.split()) for line in report.removeprefix(ACCEPTED).splitlines())
            self.accepted_races = {self.place(line): count for line, count in counts}
            return status, None
        finding = parse_finding(report, lambda library: self.files[0].path, self) if report else None
        return status, finding


def ended(process, limit):
    """The exit status of a process, which is called off after `limit` seconds, and then killed (TimeoutExpired)."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(runtime.CALL_OFF)
    try:
        return process.wait(runtime.SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def numbered(file):
    """A file's rewritten text under the program's numbering of lines."""
    name = str(file.path).replace("\\", "\\\\").replace('"', '\\"')
    return f'#line {file.first_line} "{name}"\n{file.rewritten}'


def in_mirror(mirror, path):
    return mirror / str(path.resolve()).lstrip("/")
