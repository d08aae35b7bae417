"""What the two commands accept."""

import argparse
from pathlib import Path

DEVICES = ("auto", "cuda", "cpu", "emulator")
EXIT_STATUS = """Exit status: 0 all that ran passed; 1 something failed; 2 the command line is wrong or the machine cannot do
    it. Results go to stdout, progress to stderr."""


def run_all_parser():
    parser = argparse.ArgumentParser(
        prog="run_all.py",
        usage="run_all.py [options]",
        description="Judge and time every variant of every model.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument("--models", metavar="A,B", help="only these models, by name or path")
    _add_common(parser)
    return parser


def compare_parser():
    parser = argparse.ArgumentParser(
        prog="compare.py",
        usage="""compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] [options]
       compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] --profile
       compare.py --explain VARIANT
       compare.py --diff V1 V2
       compare.py --new MODEL NAME""",
        description="Judge and time the variants of one model, in depth; or look at one, or begin a new one.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a model's name, or a file in KernelBench's format")
    parser.add_argument(
        "--variant",
        nargs="+",
        action="extend",
        metavar="NAME_OR_PATH",
        help="only these variants, by name or path; default all",
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="change a constant of the model"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="run the CUDA kernels under NVIDIA's compute-sanitizer, on a GPU"
    )
    _add_extras(parser)
    _add_common(parser)
    return parser


def beside(parser, given, taken):
    """The options of the command line, but for those in `taken`, that were given something else than their default."""
    return [
        action.option_strings[-1]
        for action in parser._actions
        if action.dest in given and getattr(given, action.dest) != action.default and not taken & set(action.option_strings)
    ]


def _add_extras(parser):
    group = parser.add_argument_group("look at a variant, or begin one; a VARIANT is a name, MODEL/NAME or a path")
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="VARIANT",
        help="print why this variant is faster, from its docstring, and run nothing; without a name: run, and show what every "
        "check found",
    )
    either.add_argument(
        "--diff", nargs=2, metavar=("V1", "V2"), help="show what V2 changed over V1, function by function; nothing runs"
    )
    either.add_argument(
        "--profile", action="store_true", help="show what Nsight Compute measures of the variants' kernels, on a GPU"
    )
    either.add_argument(
        "--new", nargs=2, metavar=("MODEL", "NAME"), help="write a new variant NAME that is right, to start from; nothing runs"
    )


def _add_common(parser):
    parser.add_argument("--training", "--grad", action="store_true", help="time training steps as well")
    parser.add_argument("--quick", action="store_true", help="shorter timings, without torch.compile")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to run; auto: the GPU where there is one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there, each as soon as it is known")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with plots, explanations and sources there")
    parser.add_argument(
        "--resume", metavar="FILE", type=Path, help="take over what the JSON of an interrupted run has, and do the rest"
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=V1,V2,...",
        help="measure at each of these values of a constant of the model; several constants: at every combination",
    )
    parser.add_argument(
        "--against", metavar="FILE", type=Path, help="say what is faster, the same or slower than in an earlier run's JSON"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="with --sweep: draw times and speed-ups (.svg, .png, .pdf)")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="SECONDS", help="for each step of a variant (default %(default)g)"
    )
    parser.add_argument(
        "--precision",
        choices=("default", "strict"),
        default="default",
        help="strict: PyTorch may use TF32 nowhere, neither judged nor timed; default: where its settings permit it",
    )
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help="add torch.compile's max-autotune to the baselines; it compiles for minutes",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="build for the emulator without optimisation, and tell how to step through a kernel",
    )
