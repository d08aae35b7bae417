"""Plain CUDA programs: .cu files with a main(), built into an executable that runs under the emulator, without PyTorch."""

import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from . import runtime, toolchain
from .declarations import ACCEPTED_RACE
from .diagnostics import describe, errors_in, unexplained
from .errors import EmulatorError, parse_finding
from .rewrite import find_kernels, rewrite
from .text import UnsupportedError, tokens_of

INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]+)[">]', re.M)
CUDA_SUFFIXES = {".cu", ".cuh"}
# The lines of a program's files have one numbering, so that a line alone names its file: those of the second file begin here.
LINES_OF_A_FILE = 1 << 20
FLAGS = ("-std=gnu++17",)  # as nvcc 13 has it
ACCEPTED = "accepted races\n"  # begins what a program tells at its end, if it has accepted any
MIRROR = "sources"  # the folder of the rewritten files, each under its whole path


@dataclass
class SourceFile:
    path: Path
    text: str
    first_line: int
    rewritten: str = ""


@dataclass
class Program:
    """The own files of a program: those that are compiled, then what they include."""

    compiled: list
    folders: list  # of -I
    defines: list = field(default_factory=list)  # of -D
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
                text = path.read_text(errors="replace")
            except OSError as error:
                raise EmulatorError(f"{path}: {error.strerror or error}") from None
            self.files.append(SourceFile(path, text, len(self.files) * LINES_OF_A_FILE + 1))
            waiting += self.included(path, text)
        kernels = {}
        try:
            for file in self.files:
                for name, found in find_kernels(tokens_of(file.text, file.first_line)).items():
                    kernels.setdefault(name, []).extend(found)
            for file in self.files:
                file.rewritten = rewrite(file.text, file.first_line, kernels).text
        except UnsupportedError as error:
            path, line = self.place(error.line)
            raise EmulatorError(f"{path}:{line}: the emulator does not support {error.construct}") from None
        return self

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
        return self.files[index].path, line

    @property
    def names(self):
        """Of its files, without their folders."""
        return {file.path.name for file in self.files}

    def build(self, mode):
        """The cached executable."""
        folders = [folder.resolve() for folder in self.folders]
        flags = [*FLAGS, *toolchain.kernel_flags(mode, debug=False), *(f"-D{define}" for define in self.defines)]
        units = self.files[: len({path.resolve() for path in self.compiled})]
        library = toolchain.runtime_library()

        def make(path):
            mirror = path.parent / MIRROR
            for file in self.files:
                copy = in_mirror(mirror, file.path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                name = str(file.path).replace("\\", "\\\\").replace('"', '\\"')
                copy.write_text(f'#line {file.first_line} "{name}"\n{file.rewritten}')
            includes = [f"-I{in_mirror(mirror, folder)}" for folder in folders] + [f"-I{folder}" for folder in folders]
            front = ["-include", str(toolchain.INCLUDE / "emulator" / "program.h")]
            objects = []
            for unit in units:
                objects.append(str(path.parent / f"{len(objects)}.o"))
                own = front if unit.path.suffix in CUDA_SUFFIXES else []
                command = toolchain.compile_command(
                    [*own, *flags, *includes, "-x", "c++"], in_mirror(mirror, unit.path), objects[-1]
                )
                toolchain.run_compiler(command, self.explain)
            libraries = [str(library), f"-Wl,-rpath,{library.parent}", "-lpthread", "-ldl"]
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

    def explain(self, messages):
        own = {str(file.path) for file in self.files}
        errors = errors_in(messages, own.__contains__)
        return EmulatorError(describe(errors, self.place, self.is_compiled_as_it_is) if errors else unexplained(messages))

    def is_compiled_as_it_is(self, line):
        index, at = divmod(line, LINES_OF_A_FILE)
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
        accepted = " ".join(
            str(file.first_line + at)
            for file in self.files
            for at, line in enumerate(file.text.split("\n"))
            if ACCEPTED_RACE.search(line)
        )
        environment = os.environ | {"EMULATOR_PROGRAM": told, "EMULATOR_ACCEPTED_RACES": accepted}
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


def in_mirror(mirror, path):
    return mirror / str(path.resolve()).lstrip("/")
