"""All checks of a variant: what each looks at, its caveat, and the standard that it costs, also for the page's tables."""

from dataclasses import dataclass
from typing import Final

FORWARD: Final = "forward"
DROP_IN: Final = "drop-in"
OWN, REDUCED, ONE, ODD = "own", "reduced", "batch 1", "odd"  # sizes at which a probe runs
SHOWN = {"a late producer": "stream ordering"}  # names that people read otherwise than in the JSON, where they stay


@dataclass(frozen=True)
class Caveat:
    """A tag, what would remove the caveat, and what stands in the line of the file of which it is said (a pattern)."""

    tag: str
    remedy: str | None = None
    line: str | None = None


@dataclass(frozen=True)
class Check:
    """`costs` is FORWARD (which fails drop-in, too), DROP_IN or None: it is said and costs nothing.

    Of a probe `said` begins a complaint, `function` makes it at a `size`; `gradients` are compared on it, or it changes the
    `parameters`. Where a circumstance `may_raise`, an exception is a remark.
    """

    name: str
    said: str
    caveat: Caveat
    costs: str | None = DROP_IN
    function: str | None = None
    size: str | None = None
    gradients: bool = False
    parameters: bool = False
    may_raise: bool = False

    @property
    def about(self) -> str:
        return self.said or "on the first inputs that the problem draws"


OUTPUTS = Caveat("outputs")
SIZES = Caveat("sizes", "compute these sizes, too, or raise an exception for them")
VALUES = Caveat("values", "compute these values, too, or raise an exception for them")
NAN = Caveat("nan", "let NaN and infinity through as the original does (fmaxf(NAN, 0) is 0)")
STALE_WEIGHTS = Caveat("stale-weights", "read the weights in each call")
AUTOCAST = Caveat("autocast", "keep to float32, or raise an exception under autocast")
OBEY = "obey `training`, and keep running statistics as the original does, or raise an exception in eval mode"
IN_EVAL = Caveat("eval", OBEY)
SETS_BENCHMARK = Caveat("sets-cudnn-benchmark", "leave torch.backends.cudnn.benchmark to the caller", r"cudnn\.benchmark\s*=")
PERMITS = r"(allow_tf32\s*=|fp32_precision\s*=|set_float32_matmul_precision\()"
SETS_TF32 = Caveat("sets-tf32", "leave the precision of PyTorch's products to the caller", PERMITS)
CHANGES_WEIGHTS = Caveat("changes-weights")
REMEMBERS = Caveat("remembers")
RANDOM_BITS = Caveat("not-deterministic", "add in a fixed order, or say deterministic = False in the class")
INFERENCE = Caveat("inference-mode", "use nothing that torch.inference_mode forbids")
ONE_STREAM = Caveat("default-stream", "launch on the current stream, c10::cuda::getCurrentCUDAStream()", r"<<<")
ONE_DEVICE = Caveat("second-device", "guard the device, launch on the input's, or raise an exception")
GRAPH_BREAKS = Caveat("fullgraph", "give the operator a fake kernel that fits, or raise an exception")
ONLY_FLOAT32 = Caveat("double", "compute in float64, or raise an exception for it")
OUT_DTYPE = Caveat("out-dtype", "round the float32 result to the input's type where out_dtype is None")
INSTANCES = Caveat("instances", "keep weights, buffers and what follows from them in the instance")
NO_GRAPH = Caveat("no-graph", "do nothing on the host that depends on the inputs")
REFUSE = "raise NotImplementedError when a gradient is wanted"
NO_GRADIENT = Caveat("no-gradient", f"{REFUSE}, or write the backward", r"\s*def forward\(")
WRONG_GRADIENT = Caveat("wrong-gradient", f"mend the backward, or {REFUSE}", r"\s*def backward\(")
INEXACT = Caveat("accuracy", "add in several partial sums, or declare the class attribute `precision`")
SMALL_VALUES = Caveat("small-values", "compute them as exactly as float32 can")
BY_SEED = Caveat("weights-by-seed", "give the parameters the original's names and shapes", r"class ModelNew\b")
BORROWS = Caveat("uses-problem-names", "define them in the file, or take them from the inputs")
NOT_ITS_OWN_WORK = Caveat("not-its-own-work")

# Complaints too long for their rows.
APART = "where the samples differ more, within the range of the problem's own inputs"
SHARE = "elements of a result share memory where the original's do not"
KEPT = "the result was remembered, not computed"
IDLE = "its own kernels are not built, not called, or do not account for the result"

# In the order in which they run.
PROBES = (
    Check("own", "", OUTPUTS, FORWARD, "own", OWN),
    Check("fresh", "on fresh inputs", OUTPUTS, FORWARD, "own", OWN),
    Check("fresh again", "on fresh inputs", OUTPUTS, FORWARD, "own", OWN),
    Check("within", APART, OUTPUTS, FORWARD, "within", OWN),
    Check("other weights", "with the weights of another seed", OUTPUTS, FORWARD, "reseeded", OWN),
    Check("scaled", "on normal inputs of another scale for each sample", VALUES, DROP_IN, "scaled", OWN, gradients=True),
    Check("normal", "on normal inputs", SIZES, DROP_IN, "normal", REDUCED, gradients=True),
    Check("impulse", "with one non-zero element", VALUES, DROP_IN, "impulse", REDUCED),
    Check("ramp", "on a ramp", VALUES, DROP_IN, "ramp", REDUCED),
    Check("large", "on inputs of about 100000 (float16: 250)", VALUES, DROP_IN, "large", REDUCED),
    Check("small", "on inputs of about 0.001", VALUES, DROP_IN, "small", REDUCED),
    Check("nan", "with a NaN, or minus infinity, in a sample", NAN, DROP_IN, "nan", REDUCED),
    Check("infinity", "with an infinity in one sample and only zeros in another", NAN, DROP_IN, "infinity", REDUCED),
    Check("batch 1", "at batch size 1", SIZES, DROP_IN, "normal", ONE),
    Check("odd sizes", "at odd sizes", SIZES, DROP_IN, "normal", ODD, gradients=True),
    Check("step", "after an optimiser's step", STALE_WEIGHTS, DROP_IN, "step", REDUCED, parameters=True),
    Check("weights", "with weights 8 times as large", VALUES, DROP_IN, "weights", REDUCED, parameters=True),
    Check("autocast", "under autocast", AUTOCAST, DROP_IN, "autocast", REDUCED),
    Check("eval", "in eval mode", IN_EVAL, DROP_IN, "evaluated", REDUCED),
)

# What a call does besides.
SIDE_EFFECTS = (
    Check("global state", "a call changes a flag of PyTorch's, a timer or a check", Caveat("global-state"), FORWARD),
    Check("cudnn.benchmark", "a call sets torch.backends.cudnn.benchmark", SETS_BENCHMARK),
    Check("TF32", "a call permits TF32", SETS_TF32),
    Check("random state", "a call draws random numbers", Caveat("random-state"), FORWARD),
    Check("memory of its own", "a call returns the memory of an input or a weight", Caveat("returns-its-input"), FORWARD),
    Check("an element's own memory", SHARE, Caveat("overlapping-result"), FORWARD),
    Check("inputs unchanged", "a call writes to its inputs", Caveat("changes-inputs"), FORWARD),
    Check("weights unchanged", "a call writes to the weights", CHANGES_WEIGHTS, FORWARD),
    Check("buffers unchanged", "a call writes to a buffer of the original's", CHANGES_WEIGHTS, FORWARD),
)

# What is watched while the variant is built and called on a GPU.
WATCHED = (
    Check("build", "its kernel fails to build, and it goes on without it", NOT_ITS_OWN_WORK, FORWARD),
    Check("launch", "a kernel's launch fails, and nothing is raised", Caveat("failed-launch"), FORWARD),
)

# Calls under all sorts of circumstances, in the order in which they are made.
STRESS_TESTS = (
    Check("an earlier output", "a later call writes to it", Caveat("overwrites-results"), FORWARD, "earlier_output"),
    Check("new content in the same memory", "the result is that of the old content", REMEMBERS, FORWARD, "new_content"),
    Check("the same content in new memory", KEPT, REMEMBERS, FORWARD, "same_content", may_raise=True),
    Check("a late producer", "the call does not wait for its inputs", Caveat("unjoined-stream"), FORWARD, "stream_order"),
    Check("run to run", "two equal calls differ in bits", RANDOM_BITS, DROP_IN, "run_to_run"),
    Check("inference_mode", "the call raises, or its result is wrong", INFERENCE, DROP_IN, "inference_mode"),
    Check("a side stream", "the launch is on the default stream", ONE_STREAM, DROP_IN, "side_stream"),
    Check("a second device", "the result is wrong there", ONE_DEVICE, DROP_IN, "second_device", may_raise=True),
    Check("torch.compile", "the result is wrong under fullgraph=True", GRAPH_BREAKS, DROP_IN, "compiled", may_raise=True),
    Check("double()", "the result is wrong after it", ONLY_FLOAT32, DROP_IN, "double", may_raise=True),
    Check("out_dtype", "the result in 16 bits is not that in float32, rounded", OUT_DTYPE, FORWARD, "out_dtype"),
    # After all others but a graph: what the two share may be another's from then on.
    Check("two instances", "one spoils the other's results", INSTANCES, DROP_IN, "two_instances", parameters=True),
    Check("the second of two instances", "its results are wrong", INSTANCES, DROP_IN, "second_instance", parameters=True),
    # Last: a capture that fails may leave the process in a state of its own.
    Check("a CUDA graph", "a replay gives a wrong result", NO_GRAPH, DROP_IN, "cuda_graph", may_raise=True),
)

# What is seen in the answers to all of these.
SEEN = (
    Check("gradients", "missing, or the backward raises", NO_GRADIENT),
    Check("gradients", "wrong", WRONG_GRADIENT),
    Check("accuracy", "less exact than PyTorch", INEXACT),
    Check("small values", "values that are small beside others have no right digit", SMALL_VALUES),
    Check("parameters", "names or shapes are not the original's: one seed made both models", BY_SEED),
    Check("names", "the file uses names that only the problem's file defines", BORROWS),
    Check("gradients", "PyTorch computes them: the file's own code runs in the forward pass alone", Caveat("gradient"), None),
    Check("left to PyTorch", "its own kernels are not called at another size than the problem's", SIZES, None),
    Check("work", IDLE, NOT_ITS_OWN_WORK, FORWARD),
    Check("PyTorch inside", "its own function calls operators of PyTorch's", Caveat("pytorch-inside"), None),
    Check("process", "crashes", Caveat("crash"), FORWARD),
    Check("random numbers", "the original draws them", Caveat("random"), None),
    Check("16 bits", "what is judged is the float32 result: rounded to 16 bits it would say nothing", OUT_DTYPE, None),
    Check("limit", "rounding moves the result too far to judge it", Caveat("not-judged"), None),
)

ALL = (*PROBES, *SIDE_EFFECTS, *WATCHED, *STRESS_TESTS, *SEEN)
BY_NAME = {check.name: check for check in ALL}
PROBE_NAMES = tuple(check.name for check in PROBES)
EVAL = "eval"  # the probe of models that give something else in eval mode, and what the referee calls that
OF_SEEDS = "other weights"  # the probe of a variant whose weights come from a seed, and not from the original
FORWARD_PROBES = tuple(check.name for check in PROBES if check.costs == FORWARD and check.name != OF_SEEDS)
REQUIRED = (*FORWARD_PROBES, OF_SEEDS)  # all of the problem's own inputs
WITHIN = "within"  # the range of the problem's own inputs, where an original may not run all the same
FRESH = ("fresh", "fresh again")  # further draws of the problem's own inputs
AT_OWN_SIZE = " at its own size"  # ends the name of a probe that a variant would not take at the reduced size
CAVEATS = {check.caveat.tag: check.caveat for check in ALL}


def check_of(name: str) -> Check:
    """Return the check that the probe of that name is for."""
    return BY_NAME[name.removesuffix(AT_OWN_SIZE)]


def size_of(name: str) -> str:
    """Return the size at which the probe of that name runs."""
    return OWN if name.endswith(AT_OWN_SIZE) else str(check_of(name).size)
