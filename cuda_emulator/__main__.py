"""Builds a plain CUDA program for the CPU and runs it: every kernel under check mode, its host code as it is.

python -m cuda_emulator FILE.cu [FILE ...] [-I FOLDER] [-D NAME[=VALUE]] [-std=c++20] [-- ARGUMENT ...]

The exit status is the program's own; 1, too, where a mistake was found or the program could not be built; 2: the command line
is wrong; 128 and the signal's number where one has ended the program.
"""

import argparse
import signal
import sys
from pathlib import Path

from . import runtime
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
    return given, program


def main(arguments=None):
    given, arguments = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        program = Program(given.files, given.folders, given.defines, standard=given.std).read()
        executable = program.build(given.mode)
        status, finding = program.run(executable, arguments, given.mode, given.schedule, given.seed)
    except EmulatorError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if finding:
        print(finding, file=sys.stderr)
        return 1
    for (file, line), count in program.accepted_races.items():
        print(f"{file}:{line}: {count} race{'s' if count > 1 else ''} accepted (emulator: benign race)", file=sys.stderr)
    if status < 0:
        print(f"the program was ended by {signal.Signals(-status).name}", file=sys.stderr)
        return 128 - status
    return status


if __name__ == "__main__":
    sys.exit(main())
