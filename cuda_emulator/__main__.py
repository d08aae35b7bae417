"""Builds a plain CUDA program for the CPU and runs it: every kernel under check mode, its host code as it is.

python -m cuda_emulator FILE.cu [FILE ...] [-I FOLDER] [-D NAME[=VALUE]] [-std=c++20] [--junit FILE] [--sarif FILE]
                        [-- ARGUMENT ...]

The exit status is the program's own; 1, too, where a mistake was found or the program could not be built; 2: the command line
is wrong, or a file cannot be written; 128 and the signal's number where one has ended the program.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from . import ci_files, runtime
from .errors import EmulatorError
from .program import STANDARDS, Program


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cuda_emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the program's .cu and .cpp files")
    parser.add_argument("-I", dest="folders", action="append", default=[], type=Path, metavar="FOLDER", help="of its headers")
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]", help="a macro")
    parser.add_argument("-std", "--std", choices=STANDARDS, default="c++17", help="the version of C++, as nvcc takes it")
    parser.add_argument("--mode", choices=["check", "fast"], default="check", help="fast: no checks, all processors")
    parser.add_argument("--schedule", choices=list(runtime.SCHEDULES), default="forward", help="in which order threads run")
    parser.add_argument("--seed", type=int, default=1, help="of the random schedule")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write there whether it ended well, as JUnit's XML")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="write there what was found, as SARIF 2.1.0")
    before, program = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        before, program = arguments[:at], arguments[at + 1 :]
    given = parser.parse_args(before)
    for path in given.files:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    for folder in given.folders:
        if not folder.is_dir():
            parser.error(f"-I {folder}: no such folder")
    for option, path in (("--junit", given.junit), ("--sarif", given.sarif)):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")
    return given, program


def main(arguments=None):
    given, arguments = parse(sys.argv[1:] if arguments is None else arguments)
    began = time.monotonic()
    try:
        status, told, notices = run(given, arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if told:
        print(told, file=sys.stderr)
    names = given.files[0].stem, "cuda_emulator"
    outcome = ci_files.FAILURE if notices else ci_files.ERROR if status else ci_files.PASSED
    case = ci_files.Case(*names, outcome, told or f"exit status {status}", "", time.monotonic() - began, tuple(notices))
    texts = {"--junit": (given.junit, lambda: ci_files.junit("cuda_emulator", [case]))}
    texts["--sarif"] = given.sarif, lambda: ci_files.sarif("cuda_emulator", [case], Path.cwd())
    for option, (path, text) in texts.items():
        try:
            if path:
                path.write_text(text(), encoding="utf-8")
        except OSError as error:
            print(f"{option} {path}: {error.strerror or error}", file=sys.stderr)
            return 2
    return status


def run(given, arguments):
    """Return (exit status, what is to be said of it, the ci_files.Notices of what was found)."""
    try:
        program = Program(given.files, given.folders, given.defines, standard=given.std).read()
        executable = program.build(given.mode)
        status, finding = program.run(executable, arguments, given.mode, given.schedule, given.seed)
    except EmulatorError as error:
        file, line, text = ci_files.at_line(str(error))
        return 1, str(error), [ci_files.Notice("build", text, "error", file or given.files[0], line)]
    if finding:
        return 1, str(finding), [ci_files.Notice(finding.kind, str(finding), "error", finding.file, finding.line)]
    for (file, line), count in program.accepted_races.items():
        print(f"{file}:{line}: {count} race{'s' if count > 1 else ''} accepted (emulator: benign race)", file=sys.stderr)
    if status < 0:
        return 128 - status, f"the program was ended by {signal.Signals(-status).name}", []
    return status, "", []


if __name__ == "__main__":
    sys.exit(main())
