"""What the two commands accept: one table of options, each with the things to do that it goes with."""

import argparse
import contextlib
import dataclasses
import difflib
from pathlib import Path

from playground import catalog
from playground.driver.task import CHOICES, MOST_ACCEPTED, Options
from playground.record import MINE, NOBODY

COMPARE = catalog.COMPARE.removeprefix("python ")
RUN_ALL = "run_all.py" if catalog.IS_CLONE else "kernel-playground run"
EXIT_STATUS = """Exit status: 0 all that ran passed; 1 something failed; 2 the command line is wrong or the machine cannot do
    it. Results go to stdout, progress to stderr."""
USAGE = """compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] [options]
       compare.py --model NAME_OR_PATH [--variant NAME_OR_PATH ...] --watch [options]
       compare.py --suite PROBLEMS --solutions RUN [--cluster WHERE] [--eval-results FILE] [options]
       compare.py --lint PROBLEMS [--precision fp16|bf16] [--quick] [--json FILE]
       compare.py --explain VARIANT
       compare.py --diff V1 V2
       compare.py --new MODEL NAME
       compare.py --copy NAME|examples"""
ALL = "all"  # what run_all.py does without --list
# Options that choose what compare.py does -> how the error about an option that does not go with one begins.
NOTHING_RUNS = "{} judges and times nothing"
DOES = {"--suite": "{} names its problems and solutions itself", "--lint": "{} takes problems alone"}
DOES |= dict.fromkeys(("--list", "--new", "--copy", "--diff"), NOTHING_RUNS)
DOES |= {"--explain": NOTHING_RUNS.format("--explain VARIANT")}
DOES |= {"--watch": "{} shows each judgement on the screen and keeps none"}
MODEL = "--model"  # what it does without any of these: judge variants of a model
EVERYWHERE = [MODEL, "--watch", "--suite"]  # all that judges
ENDS = [MODEL, "--suite"]  # what has an end, at which files are written


class _Parser(argparse.ArgumentParser):
    """What is wrong is the first line, and the only one: the usage of so many options would push it off the screen."""

    def error(self, message):
        _, found, names = message.partition("unrecognized arguments: ")
        first = names.partition(" ")[0]
        if found and self.prog == RUN_ALL and first in compare_parser()._option_string_actions:
            message += f" ({COMPARE} has it)"
        elif found:
            near = difflib.get_close_matches(first, self._option_string_actions, n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")

    def option(self, does, *names, completer=None, group=None, **how):
        """Add an option that goes with what compare.py does, some of DOES; of a `group` only one can be given."""
        action = (group or self).add_argument(*names, **how)
        action.does, action.completer = does, completer


def run_all_parser():
    about = "Judge and time every variant of every model."
    parser = _Parser(prog=RUN_ALL, usage=f"{RUN_ALL} [options]", description=about, epilog=EXIT_STATUS)
    parser.option([], "--models", metavar="A,B", help="only these models, by name or path", completer=_models)
    _add_common(parser)
    return parser


def compare_parser():
    about = "Judge and time the variants of one model, in depth; or look at one, or begin a new one."
    parser = _Parser(prog=COMPARE, usage=USAGE.replace("compare.py", COMPARE), description=about, epilog=EXIT_STATUS)
    parser.set_defaults(models=None)  # run_all.py's alone
    name, several = {"metavar": "NAME_OR_PATH"}, {"nargs": "+", "action": "extend"}
    runs = [MODEL, "--watch"]
    about = "a model's name, or a file in KernelBench's format"
    parser.option([*runs, "--explain", "--diff", "--list"], MODEL, **name, help=about, completer=_models)
    about = "only these variants, by name or path; default all"
    parser.option(runs, "--variant", **several, **name, help=about, completer=_variants)
    parser.option(runs, "--set", **several, default=[], metavar="NAME=VALUE", help="change a constant of the model")
    parser.option(EVERYWHERE, "--verbose", action="store_true", help="show all that a compiler or a traceback says")
    about = "run the CUDA kernels under NVIDIA's compute-sanitizer, on a GPU"
    parser.option(ENDS, "--sanitize", action="store_true", help=about)
    about = "judge again whenever a file is saved, and say what has changed; Ctrl-C ends it"
    parser.option(["--watch"], "--watch", action="store_true", help=about)
    about = "many pairs: a folder of problems in KernelBench's layout (level1/3_Name.py), or a JSON list of pairs "
    about += '[{"problem": FILE, "solution": FILE}, ...]'
    parser.option(["--suite"], "--suite", metavar="PROBLEMS", type=Path, help=about)
    about = "examine problems alone: which wrong answers their own tests let pass, and what else is wrong with them; a folder "
    about += "as with --suite, or a problem's file"
    parser.option(["--lint"], "--lint", metavar="PROBLEMS", type=Path, help=about)
    about = "the folder of their solutions, named as KernelBench does (level_1_problem_3_sample_0_kernel.py)"
    parser.option(["--suite"], "--solutions", metavar="RUN", type=Path, help=about)
    about = "share the pairs among GPUs: 'local', this machine's; or the address of a Dask scheduler"
    parser.option(["--suite"], "--cluster", metavar="WHERE", help=about)
    about = "write KernelBench's eval_results.json as well; one file a level"
    parser.option(["--suite"], "--eval-results", metavar="FILE", type=Path, help=about)
    about = "write a line for each workload and solution there, as FlashInfer-Bench's and SOL-ExecBench's traces"
    parser.option(ENDS, "--trace", metavar="FILE", type=Path, help=about)
    about = "print why this variant (a name, MODEL/NAME or a path) is faster, from its docstring, and run nothing; without a "
    about += "name: run, and show what every check found"
    one = parser.add_mutually_exclusive_group()
    does = [MODEL, "--watch", "--explain"]
    parser.option(does, "--explain", group=one, nargs="?", const="", metavar="VARIANT", help=about)
    about = "show what V2 changed over V1, function by function; nothing runs"
    parser.option(["--diff"], "--diff", group=one, nargs=2, metavar=("V1", "V2"), help=about)
    about = "write a new variant NAME that is right, to start from; nothing runs"
    parser.option(["--new"], "--new", group=one, nargs=2, metavar=("MODEL", "NAME"), help=about)
    about = "copy a model's or a variant's file, by name, or the folder `examples` to the working folder; nothing runs"
    parser.option(["--copy"], "--copy", group=one, metavar="NAME", help=about)
    about = "whose speed-ups are measured alone (mine), or also proved by a clock that the file cannot reach (nobody); the "
    about += "sandbox stays as --sandbox says; default: mine, with --suite nobody"
    parser.option(EVERYWHERE, "--trust", choices=CHOICES["trust"], help=about)
    _add_common(parser)
    return parser


def _add_common(parser):
    def flag(does, *names, about):
        parser.option(does, *names, action="store_true", help=about)

    def file(does, name, about):
        parser.option(does, name, metavar="FILE", type=Path, help=about)

    flag(["--list"], "--list", about="print the models and variants, a line each, and run nothing")
    flag(EVERYWHERE, "--training", "--grad", about="time training steps as well")
    flag([*EVERYWHERE, "--lint"], "--quick", about="shorter timings, without torch.compile; with --lint: without mutants")
    flag(EVERYWHERE, "--check-only", about="judge, and time nothing")
    about = "only what did not meet its standard in an earlier run's JSON; the input on which it failed comes first"
    file(EVERYWHERE, "--failed", about)
    about = "where to run; auto: the GPU where there is one"
    parser.option(EVERYWHERE, "--device", choices=CHOICES["device"], default="auto", help=about)
    file([*ENDS, "--lint"], "--json", "write the results there, each as soon as it is known; -: to standard output")
    file(ENDS, "--html", "write a page with plots, explanations and sources there")
    file(ENDS, "--junit", "write a case for each variant there, with the reason where it fails, as JUnit's XML")
    file(ENDS, "--sarif", "write findings, faults and caveats there, each at its file and line, as SARIF 2.1.0")
    file(ENDS, "--resume", "take over what the JSON of an interrupted run has, and do the rest")
    about = "measure at each of these values of a constant of the model; several constants: at every combination"
    parser.option([MODEL], "--sweep", nargs="+", action="extend", default=[], metavar="NAME=V1,V2,...", help=about)
    file(ENDS, "--against", "say what is faster, the same or slower than in an earlier run's JSON")
    about = "with --against: exit with 1 also where something is slower than in that run, or was right there and is not now"
    flag(ENDS, "--fail-on-regression", about=about)
    file([MODEL], "--plot", "with --sweep: draw times and speed-ups (.svg, .png, .pdf)")
    about = "for each step of a variant (default %(default)g)"
    does = [*EVERYWHERE, "--lint"]
    parser.option(does, "--time-limit", type=_seconds, default=300.0, metavar="SECONDS", help=about)
    about = "strict: PyTorch may use TF32 nowhere, neither judged nor timed; fp16, bf16: models and inputs are converted to "
    about += "it, those of the baselines, too; default: TF32 where PyTorch's settings permit it"
    does = [*EVERYWHERE, "--lint"]
    parser.option(does, "--precision", choices=CHOICES["precision"], default="default", help=about)
    about = "what a variant has to meet for exit status 0 and the means; both are judged and shown. forward: right on the "
    about += "problem's own inputs, by its own work; drop-in: gradients, other sizes and values, streams and graphs as well; "
    about += "default: drop-in for the project's variants, forward for files given by path"
    parser.option(EVERYWHERE, "--standard", choices=CHOICES["standard"][1:], help=about)
    about = "time what is off by up to X standard deviations of its output (1e-3, for example) where less is allowed; it is "
    about += "labelled, and no more than forward"
    parser.option(EVERYWHERE, "--accept", type=_accuracy, metavar="accuracy=X", help=about)
    about = "auto: files given by path are built and run under bubblewrap where it is installed, without network and with two "
    about += "folders to write to; require: everything is, or nothing runs; off: with this user's rights"
    parser.option(EVERYWHERE, "--sandbox", choices=CHOICES["sandbox"], default="auto", help=about)
    flag(EVERYWHERE, "--max-autotune", about="add torch.compile's max-autotune to the baselines; it compiles for minutes")
    flag([MODEL], "--debug", about="build for the emulator without optimisation, and tell how to step through a kernel")


def parse(command, arguments=None):
    """Return the arguments of "run_all" or "compare" (those of the command line where they are None) as a namespace.

    `does` says what is to be done, MODEL, ALL or one of DOES, `options` are the run's Options. Exits with status 2 where
    options do not go together.
    """
    if command == "run_all":
        given = run_all_parser().parse_args(arguments)
        does = "--list" if given.list else ALL
        given = argparse.Namespace(**vars(compare_parser().parse_args([])) | vars(given))
    else:
        parser = compare_parser()
        given = parser.parse_args(arguments)
        does = next((name for name in DOES if getattr(given, name.strip("-"))), MODEL)
        _require_fitting(parser, does, given)
    given.does, names = does, {each.name for each in dataclasses.fields(Options)}
    same = {name: value for name, value in vars(given).items() if name in names}
    trust = given.trust or (NOBODY if given.suite else MINE)
    given.options = Options(**same | {"trust": trust, "ptxas": given.html is not None})
    return given


def _require_fitting(parser, does, given):
    chosen = [action for action in parser._actions if getattr(given, action.dest, action.default) != action.default]
    if wrong := [action.option_strings[-1] for action in chosen if does not in action.does]:
        names = ", ".join(wrong)
        parser.error(f"{names} goes with --suite" if does == MODEL else f"{DOES[does].format(does)}: leave out {names}")
    if does in (MODEL, "--watch") and not given.model:
        parser.error("the following arguments are required: --model")


def _models(prefix, **_):
    return [model.name for model in catalog.models()] if "/" not in prefix else _files(prefix)


def _variants(prefix, parsed_args, **_):
    if "/" in prefix:
        return _files(prefix)
    return [each.name for model in catalog.models() if model.name == parsed_args.model for each in catalog.variants(model)]


def _files(prefix):
    folder = prefix[: prefix.rindex("/") + 1]
    return [f"{folder}{path.name}{'/' if path.is_dir() else ''}" for path in Path(folder).glob("*")]


def _accuracy(text):
    name, _, limit = text.partition("=")
    with contextlib.suppress(ValueError):
        if name == "accuracy" and 0 < float(limit) <= MOST_ACCEPTED:
            return float(limit)
    raise argparse.ArgumentTypeError(f"takes accuracy=X, an X up to {MOST_ACCEPTED:g}, such as accuracy=1e-3; got {text!r}")


def _seconds(text):
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, got {text!r}")
