"""Which wrong answers does a problem's own test let pass, and what else keeps it from telling solutions apart?

The test is KernelBench's (torch.allclose with one tolerance for the precision) or the problem's own check_outputs, on fresh
draws of the problem's inputs. What is tried: zeros, a constant, the result of another draw, the original in fewer bits, each
operator skipped, and the judge's mutants.
"""

import math
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from playground import catalog, tensors
from playground.judge import domain, mutants, sizing
from playground.judge.behaviour import copies, same
from playground.judge.oracle import Oracle
from playground.judge.sizes import BATCH_NAMES, REDUCED_BATCH

TOLERANCE = {None: 1e-4, "fp16": 1e-2, "bf16": 1e-2}  # KernelBench's get_tolerance_for_precision, absolute and relative
DRAWS = 2
WEIGHTS = 1 << 24  # elements of parameters: with more they shrink, too
SLOW = 5.0  # seconds: a model that takes longer on shapes, as a recurrent one does, shrinks by its inputs alone
WIDTH = 64  # a smaller constant is no width of a layer, but its kernel, or how many there are
MOST = 1 << 28  # elements of a problem's inputs: with more it is not examined
LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
ZEROS, CONSTANT, ANOTHER = "zeros", "a constant", "the result of another draw"
BYTES_PER_SECOND, FLOPS_PER_SECOND = 3.35e12, 4e14  # an H100's memory, and its tensor cores in TF32
SHORT = 5e-6  # seconds: what a launch takes
SAME = 0.1  # the exponent of a constant with which outputs grow: below it they stay


def examine(path, settings, precision, elements, seconds, seed, with_mutants=True, only=None):
    """Return what came of a problem's test, as JSON: see report/lint.py. `only` are the names of answers to try; None: all.

    The problem runs on the CPU at `settings`, with its constants made smaller until its inputs have so many elements, and
    mutants are tried for so many seconds.
    """
    own = tensors.in_precision(catalog.load_problem(path, settings), precision)
    size, began, floor = sizing.measure(own, by_running=False), time.monotonic(), _floor(own)
    changes = shrink(path, settings, elements, runs=time.monotonic() - began < SLOW)
    try:
        case = Case(tensors.in_precision(catalog.load_problem(path, settings | changes), precision), precision, seed)
    except Exception:  # a size that makes no sense to the file, which shapes did not show
        changes, case = {}, Case(own, precision, seed)
    notes = list(case.notes())
    if floor is not None and floor < SHORT:
        notes.append(f"too small to time: an H100 needs {1e6 * floor:.2g} us")
    largest = expected = case.largest
    item = torch.tensor([], dtype=LOWER.get(precision, torch.float32)).element_size()
    own_elements, used = size.inputs // item, sum(value.numel() for value in case.inputs[0] if torch.is_tensor(value))
    if changes and case.tolerance and math.isfinite(largest) and largest:
        expected *= _growth(path, settings, precision, seed, changes, case.magnitude)
    passes = [name for name, answer in case.answers() if (only is None or name in only) and case.accepts(answer)]
    if case.tolerance and ZEROS not in passes and expected <= case.tolerance < largest:
        passes.insert(0, f"{ZEROS} (expected at the own size)")
    found = {"settings": changes, "elements": used, "own_elements": own_elements, "floor_us": floor and 1e6 * floor}
    found |= {"largest": largest, "expected_largest": expected, "passes": passes, "notes": notes}
    found["mutants"] = case.mutants(time.monotonic() + seconds, only) if with_mutants else None
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()}


def shrink(path, settings, elements, runs=True):
    """Return {constant: value} with which neither inputs nor, if it runs, outputs have more elements; the batch first.

    Weights stay as they are, unless they have more than WEIGHTS elements, and constants change that: then they shrink first.
    Raises CatalogError where no constant makes inputs and outputs small enough to try.
    """
    problem, changes = own = catalog.load_problem(path, settings), {}
    names = [name for name in catalog.constants(path) if _size(getattr(problem, name, None)) > 1]
    batch = next((name for usual in BATCH_NAMES for name in names if name.lower() == usual), None)
    shapes = _shapes(problem, runs)
    for of_weights in (True, False):
        weights, stuck = _weights(problem), {batch} if of_weights else set()
        while shapes[2] > WEIGHTS if of_weights else _elements(shapes) > elements:
            values = {name: getattr(problem, name) for name in names}
            values = {name: value for name, value in values.items() if _size(value) > (WIDTH if of_weights else 1)}
            alone = {name: value for name, value in values.items() if name not in stuck}
            name = batch if batch in alone else max(alone, key=lambda name: _size(alone[name]), default=None)
            halved = {each: _half(value, each == batch) for each, value in values.items() if name in (None, each)}  # or all
            try:
                changed = catalog.load_problem(path, settings | changes | halved)
                found = _shapes(changed, runs)
                if of_weights:
                    fits = found[2] < shapes[2] and _elements(found) <= _elements(shapes)
                else:
                    fits = _weights(changed) == weights and _elements(found) < _elements(shapes)
            except Exception:  # the file's own, at a size that makes no sense to it
                fits = False
            if fits:
                problem, shapes, changes = changed, found, changes | halved
            elif name is None:
                break
            else:
                stuck.add(name)
        if of_weights and shapes[2] > WEIGHTS:
            (problem, changes), shapes = own, _shapes(own[0], runs)
    if _elements(shapes) > MOST:
        raise catalog.CatalogError(f"internal limit: no constant makes its {_elements(shapes):.1e} elements few enough to try")
    return changes


def _elements(shapes):
    return max(sum(map(math.prod, each)) for each in shapes[:2])


def _size(value):
    """The largest number of a constant, an integer or several of them; 0 of others."""
    if isinstance(value, tuple | list) and value and all(type(each) is int for each in value):
        return max(value)
    return value if type(value) is int else 0


def _half(value, is_batch=False):
    if isinstance(value, tuple | list):
        return type(value)(max(1, each // 2) for each in value)
    return min(value, max(REDUCED_BATCH, value // 2)) if is_batch else max(1, value // 2)


def _weights(problem):
    torch.manual_seed(0)
    return repr(problem.get_init_inputs())


def _shapes(problem, runs=True):
    """The shapes of inputs and, if it runs, of outputs, and how many elements the parameters have.

    Nothing has values where the file needs none. The model's exceptions come through.
    """
    try:
        with torch.device("meta"):
            inputs = tensors.make_inputs(problem, 0)
    except Exception:  # it asks for values
        inputs = tensors.make_inputs(problem, 0)
    parameters = 0
    try:
        with torch.device("meta"), torch.no_grad():
            model = tensors.make_model(problem, problem.Model, 0, "meta")
            parameters = sum(value.numel() for value in model.parameters())
            outputs = tensors.flatten(model(*tensors.to(inputs, "meta"))) if runs else []
    except RuntimeError as complaint:  # NotImplementedError among them
        if "meta" not in str(complaint).lower():
            raise
        outputs = []  # it asks for values, or for an operator that has no shapes
    shapes = [[tuple(value.shape) for value in values if torch.is_tensor(value)] for values in (inputs, outputs)]
    return *shapes, parameters


def _floor(problem):
    """The seconds that an H100 needs for what no pass can avoid; None where the original does not run on shapes."""
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model, inputs = tensors.make_model(problem, problem.Model, 0, "meta"), tensors.make_inputs(problem, 0)
            outputs = tensors.flatten(model(*tensors.to(inputs, "meta")))
    except Exception:
        return None
    moved = [*(value for value in inputs if isinstance(value, torch.Tensor)), *outputs, *model.parameters()]
    size = sum(value.numel() * value.element_size() for value in moved)
    return max(size / BYTES_PER_SECOND, counter.get_total_flops() / FLOPS_PER_SECOND)


def _growth(path, settings, precision, seed, changes, magnitude):
    """By what factor outputs are larger at the own size: a power of each changed constant, whose exponent halving it tells."""
    own, growth = catalog.load_problem(path, settings), 1.0
    for name, value in changes.items():
        half = _half(value)
        try:
            smaller = catalog.load_problem(path, settings | changes | {name: half})
            there = Case(tensors.in_precision(smaller, precision), precision, seed).magnitude
        except Exception:  # the file's own, at a size that makes no sense to it
            continue
        exponent = math.log(magnitude / there) / math.log(_size(value) / _size(half)) if there > 0 else 0.0
        if math.isfinite(exponent) and abs(exponent) > SAME:
            growth *= (_size(getattr(own, name)) / _size(value)) ** exponent
    return growth


class Case:
    """A problem at one size: its inputs and outputs on each of some draws, and its own test."""

    def __init__(self, problem, precision, seed):
        self.problem, self.precision, self._seed = problem, precision, seed
        self._check = getattr(problem, "check_outputs", None)
        self.tolerance = None if self._check else TOLERANCE[precision]
        self.model = tensors.make_model(problem, problem.Model, seed)
        self.inputs = [tensors.make_inputs(problem, seed + number) for number in range(DRAWS)]
        self.outputs = [self.call(self.model, inputs) for inputs in self.inputs]

    def call(self, model, inputs, draws=None):
        """Return the outputs of a copy of the model on copies of the inputs."""
        tensors.seed_draws(draws)
        with torch.no_grad():
            return tensors.flatten(tensors.copy_model(model)(*copies(inputs)))

    def floats(self, draw):
        return [value.float() for value in self.outputs[draw] if value.is_floating_point()]

    @property
    def magnitude(self):
        """Return the root mean square of the floating-point outputs."""
        count = sum(value.numel() for value in self.floats(0))
        return math.sqrt(sum(value.double().square().sum().item() for value in self.floats(0)) / max(1, count))

    @property
    def largest(self):
        """Return the largest magnitude of the first draw's floating-point outputs; NaN without any."""
        return max((value.abs().max().item() for value in self.floats(0) if value.numel()), default=math.nan)

    def accepts(self, answer):
        """Return whether the problem's own test takes `answer(draw)`, a list of outputs, on each draw; None is no answer."""
        for draw, (inputs, expected) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            found = answer(draw)
            if found is None or [value.shape for value in found] != [value.shape for value in expected]:
                return False
            if self._check:
                if self._check(copies(inputs), found) is not None:
                    return False
            elif not all(
                torch.allclose(*pair, atol=self.tolerance, rtol=self.tolerance) for pair in self._pairs(expected, found)
            ):
                return False
        return True

    @staticmethod
    def _pairs(expected, found):
        return [(one, other.to(one.dtype)) for one, other in zip(expected, found, strict=True)]

    def answers(self):
        """Yield (name, function of a draw) of each wrong answer but mutants."""
        yield ZEROS, lambda draw: [torch.zeros_like(value) for value in self.outputs[draw]]
        yield CONSTANT, lambda draw: [self._constant(value) for value in self.outputs[draw - 1]]
        yield ANOTHER, lambda draw: self.outputs[draw - 1]
        floats = [value for value in (*self.inputs[0], *self.outputs[0]) if tensors.differentiable(value)]
        step = max((torch.finfo(value.dtype).eps for value in floats), default=math.inf)
        for name, kind in LOWER.items():
            if torch.finfo(kind).eps > step:
                yield name, lambda draw, kind=kind: self._in(kind, draw)

    @staticmethod
    def _constant(value):
        """The mean of a result everywhere; of integers the nearest."""
        mean = value.double().mean() if value.numel() else 0.0
        return torch.full_like(value, float(mean) if value.is_floating_point() else round(float(mean)))

    def _in(self, kind, draw):
        """The outputs of the original in another precision; None where it has no such operator."""

        def converted(values):
            return [value.to(kind) if tensors.differentiable(value) else value for value in values]

        try:
            found = self.call(tensors.copy_model(self.model).to(kind), converted(self.inputs[draw]))
        except (RuntimeError, NotImplementedError):
            return None
        return [value.to(true.dtype) for value, true in zip(found, self.outputs[draw], strict=False)]

    def notes(self):
        """Yield what else keeps the problem from telling solutions apart, in words."""
        if domain.is_unchanging(self.problem, self._seed):
            yield "the inputs never vary"
        floats = self.floats(0)
        if any(not torch.isfinite(value).all() for value in floats):
            yield "outputs are not finite"
        drawn = [value for draw in range(DRAWS) for value in self.floats(draw)]
        if drawn and all(value.numel() > 1 and value.min() == value.max() for value in drawn):
            yield "outputs say nothing: all are equal"
        if not same(self.outputs[0], self.call(self.model, self.inputs[0])):
            yield "the reference is not deterministic"
        elif not same(self.outputs[0], self.call(self.model, self.inputs[0], draws=self._seed + DRAWS)):
            yield "the reference draws random numbers"

    def mutants(self, end, only=None):
        """Return {"counted", "passed"}: of those that differ from the original in float64 the ones that the test takes."""
        oracle = Oracle(self.model, torch.device("cpu"))
        made = [*mutants.skipping(self.model, self.inputs[0]), *mutants.mutants_of(self.model, self.inputs[0], False)]
        made = [mutant for mutant in made if only is None or mutant.name in only]
        fresh, counted, passed = None, 0, []
        kept = domain.learn(self.problem, self._seed)  # of a symmetric matrix the transposed one is as right
        for number, mutant in enumerate(made):
            if time.monotonic() > end:
                return {"counted": counted, "passed": passed, "untried": len(made) - number}
            run = mutant.make()
            try:
                if self.accepts(lambda draw, run=run: self._of(run, draw)):
                    fresh = fresh or mutants.fresh(self.problem, oracle, self._seed + DRAWS, False, kept)
                    if mutants.differs(mutant, oracle, fresh):
                        passed.append(mutant.name)
                    else:
                        continue  # equivalent to the original
                counted += 1
            except Exception:  # the mutation does not fit this call, in one of many ways
                continue
        return {"counted": counted, "passed": passed, "untried": 0}

    def _of(self, run, draw):
        tensors.seed_draws()
        with torch.no_grad():
            return tensors.flatten(run(tensors.copy_model(self.model), copies(self.inputs[draw])))
