"""What the two commands accept."""

import argparse
import difflib
from pathlib import Path

from playground import catalog

DEVICES = ("auto", "cuda", "cpu", "emulator")
HALF = ("fp16", "bf16")
EXIT_STATUS = """Exit status: 0 all that ran passed; 1 something failed; 2 the command line is wrong or the machine cannot do
    it. Results go to stdout, progress to stderr."""


class _Parser(argparse.ArgumentParser):
    """What is wrong is the first line, and the only one: the usage of so many options would push it off the screen."""

    def error(self, message):
        _, found, names = message.partition("unrecognized arguments: ")
        if found and self.prog == "run_all.py" and names.split()[0] in compare_parser()._option_string_actions:
            message += " (compare.py has it)"
        elif found:
            near = difflib.get_close_matches(names.split()[0], self._option_string_actions, n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


def run_all_parser():
    parser = _Parser(
        prog="run_all.py",
        usage="run_all.py [options]",
        description="Judge and time every variant of every model.",
        epilog=EXIT_STATUS,
    )
    parser.add_argument("--models", metavar="A,B", help="only these models, by name or path").completer = _models
    _add_common(parser)
    return parser


def compare_parser():
    parser = _Parser(
        prog="compare.py",
        usage="""compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] [options]
       compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] --watch [options]
       compare.py --suite PROBLEMS --solutions RUN [--eval-results FILE] [options]
       compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] --profile
       compare.py --explain VARIANT
       compare.py --diff V1 V2
       compare.py --new MODEL NAME""",
        description="Judge and time the variants of one model, in depth; or look at one, or begin a new one.",
        epilog=EXIT_STATUS,
    )
    model = parser.add_argument("--model", metavar="NAME_OR_PATH", help="a model's name, or a file in KernelBench's format")
    model.completer = _models
    variant = parser.add_argument(
        "--variant",
        nargs="+",
        action="extend",
        metavar="NAME_OR_PATH",
        help="only these variants, by name or path; default all",
    )
    variant.completer = _variants
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="change a constant of the model"
    )
    parser.add_argument("--verbose", action="store_true", help="show all that a compiler or a traceback says")
    parser.add_argument(
        "--sanitize", action="store_true", help="run the CUDA kernels under NVIDIA's compute-sanitizer, on a GPU"
    )
    parser.add_argument(
        "--watch", action="store_true", help="judge again whenever a file is saved, and say what has changed; Ctrl-C ends it"
    )
    _add_suite(parser)
    _add_extras(parser)
    _add_common(parser)
    return parser


def _models(prefix, **_):
    """What argcomplete offers: names, or files where a path was begun."""
    return [model.name for model in catalog.models()] if "/" not in prefix else _files(prefix)


def _variants(prefix, parsed_args, **_):
    if "/" in prefix:
        return _files(prefix)
    return [each.name for model in catalog.models() if model.name == parsed_args.model for each in catalog.variants(model)]


def _files(prefix):
    folder = prefix[: prefix.rindex("/") + 1]
    return [f"{folder}{path.name}{'/' if path.is_dir() else ''}" for path in Path(folder).glob("*")]


def _accuracy(text):
    """0.001 of 'accuracy=1e-3'."""
    from playground.driver.plan import LEAST_ACCURACY  # it imports PyTorch, for which a shell's completion does not wait

    name, _, limit = text.partition("=")
    try:
        if name == "accuracy" and 0 < float(limit) <= LEAST_ACCURACY:
            return float(limit)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"takes accuracy=X, an X up to {LEAST_ACCURACY:g}, such as accuracy=1e-3; got {text!r}")


def _seconds(text):
    """More than none: 0.5 of '0.5'."""
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, got {text!r}")


def beside(parser, given, taken):
    """The options of the command line, but for those in `taken`, that were given something else than their default."""
    return [
        action.option_strings[-1]
        for action in parser._actions
        if action.dest in given and getattr(given, action.dest) != action.default and not taken & set(action.option_strings)
    ]


def _add_suite(parser):
    group = parser.add_argument_group("many solutions, each of a problem of its own")
    group.add_argument(
        "--suite",
        metavar="PROBLEMS",
        type=Path,
        help="a folder of problems in KernelBench's layout (level1/3_Name.py), or a JSON list of pairs "
        '[{"problem": FILE, "solution": FILE}, ...]',
    )
    group.add_argument(
        "--solutions",
        metavar="RUN",
        type=Path,
        help="the folder of their solutions, named as KernelBench does (level_1_problem_3_sample_0_kernel.py)",
    )
    group.add_argument(
        "--cluster",
        metavar="WHERE",
        help="share the pairs among GPUs: 'local', those of this machine; or the address of a running Dask scheduler",
    )
    group.add_argument(
        "--eval-results", metavar="FILE", type=Path, help="write KernelBench's eval_results.json as well; one file a level"
    )


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
    parser.add_argument("--list", action="store_true", help="print the models and variants, a line each, and run nothing")
    parser.add_argument("--training", "--grad", action="store_true", help="time training steps as well")
    parser.add_argument("--quick", action="store_true", help="shorter timings, without torch.compile")
    parser.add_argument("--check-only", action="store_true", help="judge, and time nothing")
    parser.add_argument(
        "--failed",
        metavar="FILE",
        type=Path,
        help="only what did not meet its standard in an earlier run's JSON; the input on which it failed comes first",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to run; auto: the GPU where there is one")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the results there, each as soon as it is known; -: to standard output"
    )
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
        "--time-limit", type=_seconds, default=300.0, metavar="SECONDS", help="for each step of a variant (default %(default)g)"
    )
    parser.add_argument(
        "--precision",
        choices=("default", "strict", *HALF),
        default="default",
        help="strict: PyTorch may use TF32 nowhere, neither judged nor timed; fp16, bf16: models and inputs are converted to "
        "it, those of the baselines, too; default: TF32 where PyTorch's settings permit it",
    )
    parser.add_argument(
        "--standard",
        choices=("drop-in", "forward"),
        help="what a variant has to meet for exit status 0 and the means; both are judged and shown. forward: right on the "
        "problem's own inputs, by its own work; drop-in: gradients, other sizes and values, streams and graphs as well; "
        "default: drop-in for the project's variants, forward for files given by path",
    )
    parser.add_argument(
        "--accept",
        type=_accuracy,
        metavar="accuracy=X",
        help="time what is off by up to X of its output's spread (1e-3, for example) though the precision permits less; it is "
        "labelled, and no more than forward",
    )
    parser.add_argument(
        "--sandbox",
        choices=("auto", "require", "off"),
        default="auto",
        help="auto: files given by path are built and run under bubblewrap where it is installed, without network and with two "
        "folders to write to; require: everything is, or nothing runs; off: with this user's rights",
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
