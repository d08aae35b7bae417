"""The worker's role that runs the original alone: it makes the inputs and compares raw outputs with float64."""

import contextlib
import functools
import math
import re
import time
from dataclasses import replace

import torch

from playground import tensors
from playground.clock import referee as clock
from playground.clock import step_of
from playground.clock.memory import Unshareable
from playground.clock.workload import Workload
from playground.judge import accuracy, behaviour, checks, classes, diagnosis, lint, mutants, sizing, special
from playground.judge.classes import deviations, two_digits
from playground.judge.oracle import gradients_of
from playground.judge.precision import CUT, LOWER
from playground.judge.references import references_of
from playground.judge.sample import SMALL
from playground.judge.tolerance import Reference, largest_difference, worst, wrong
from playground.worker.failures import describe
from playground.worker.preparing import Preparing, is_uniform

SECONDS_FOR_MUTANTS = 5.0  # in which a wrong version is looked for that gives the variant's result
FROM_EAGER = 4.0  # times what is allowed: eager's largest error where no reference is kept is a little more than the sample's
BYTES_OF_ELEMENT, SLACK = 32, 64 << 20  # of a file of results: more than these, for each element of the reference, is not read


class Referee(Preparing):
    """The original, its float64 reference on each probe, and the comparison with it."""

    size_up = staticmethod(sizing.size_up)
    lint = staticmethod(lint.examine)

    def load(self, *given, **named):
        """Make the original anew: see Preparing.load."""
        self.outer = None
        self._wider = functools.cache(self._widen)
        self._lowered = functools.cache(self._lower)
        self._before_step = functools.cache(self._leave_unstepped)
        return super().load(*given, **named)

    def outer_open(self, side, shared, mode, declared, calls):
        """Prepare the outer clock of a mode for a side, and return what the side has to know; see clock.referee."""
        if not self.outer:
            step = step_of(mode)
            references = self._permitting(self.timed[step], declared)
            named = {f"{clock.OUTPUT}{i}": output for i, output in enumerate(references[0])} | references[1]
            in_full = functools.partial(self._in_full, declared)
            workload = Workload(self.problem, tensors.copy_model(self.model), step, self.device)
            drawn = clock.Drawn(workload, named, in_full, calls, step != mode)
            self.outer = (clock.OnGpu if self.device.type == "cuda" else clock.OnCpu)(drawn)
        return self.outer.open(side, shared)

    def _in_full(self, declared, drawn, call, results):
        """What is wrong with a call's results under the outer clock, by a reference of its own; None where nothing is."""
        outputs, gradients = drawn.named(results)
        probe, given = f"outer {call.seed}", tensors.Results(outputs, gradients)
        try:
            with tensors.drawing_from(call.draws):
                self._prepare_timed(probe, drawn.step, call.seed, is_beside=False)
                compared = [self.compare_outputs(probe, given, declared, remark=False)]
                compared += self.compare_gradients(probe, given, declared).values() if gradients else []
        finally:
            for known in (self.probes, self.references, self.shapes, self.drawn_again):
                known.pop(probe, None)
            self._wider.cache_clear()
            self._lowered.cache_clear()
        if any(each.get("note") or each["unjudged"] or each.get("class") == classes.FLOAT32 for each in compared):
            raise Unshareable("a result that cannot be told from a wrong one")
        return next((each["complaint"] for each in compared if each["complaint"]), None)

    def outer_close(self):
        """Give back the outer clock's memory and files."""
        if self.outer:
            self.outer.close()
        self.outer = None
        return {}

    def _leave_unstepped(self, probe, stale):
        """References of the outputs on a probe of which the parameters named in `stale` do not take the step."""
        made = self._with_inputs(probe)
        made = replace(made, step={name: change for name, change in made.step.items() if name not in stale})
        oracle = self.oracle_of(made)
        return references_of(oracle.reference(made), oracle.eager(made), oracle.permitted(made, self.precision))[0]

    def compare_outputs(self, probe, file, declared=None, remark=True, suspects=None):
        """Return {"max_error", "allowed", "eager_error", "permitted_error", "complaint", "note", ...} of the outputs in a file.

        "stale": right without the probe's step; "related": something simple relates wrong outputs to right ones; "swallowed",
        "leaked": finite where the original is not, or the reverse; "small": small values are lost; "uniform": the original's
        are the same everywhere; "decided": right for near ties alone. For `declared` see _permitting. With `remark` a complaint
        ends with where and how it is wrong, in one of the precisions `suspects`, and "diagnosis" has the lines of a picture.
        """
        expected, _ = self._permitting(probe, declared)
        uniform = all(is_uniform(reference.float64) for reference in expected)
        unseen = {"note": None, "stale": False, "uniform": uniform, "diagnosis": None, "small": None}
        if isinstance(declared, str) and probe not in checks.REQUIRED and special.unusable(expected):
            note = f"not judged: {declared} itself is too inexact, or overflows, on these inputs"
            return vars(wrong(None)) | unseen | {"note": note}
        try:
            whole = self._results(probe, file)
        except tensors.NotTensors as complaint:
            return vars(wrong(str(complaint))) | unseen
        actual = self._sampled(probe, whole).outputs
        if len(actual) != len(expected):
            return vars(wrong(f"returns {len(actual)} tensors instead of {len(expected)}")) | unseen
        names = ["the output"] if len(expected) == 1 else [f"output {i}" for i in range(len(expected))]
        pairs = zip(expected, names, actual, strict=True)
        each = [reference.compare(name, value) for reference, name, value in pairs]
        found = worst(each)
        actual = [value.cpu() for value in actual] if found.complaint else actual
        found, lines, related = self._with_remark(found, each, probe, actual, suspects) if remark else (found, None, False)
        compared = vars(found)
        if self.sample.is_part and not found.complaint:
            compared = compared | {"complaint": self._far_from_eager(probe, expected, names, whole.outputs)}
        stale = self._stale_weights(probe, actual) if compared["complaint"] else None
        if stale:
            compared = compared | {"complaint": f"the output is that of {stale} before the step"}
        swallowed = next((every.swallowed for every in each if every.swallowed), None)
        leaked = any(every.leaked for every in each)
        seen = {"stale": bool(stale), "swallowed": swallowed, "leaked": leaked, "diagnosis": lines, "related": related}
        seen["decided"] = any(every.decided for every in each)
        if probe in checks.REQUIRED and not compared["complaint"] and not isinstance(declared, float):
            seen["small"] = self._lost_small_values(probe, expected, names, actual)
        return compared | unseen | seen

    def _lost_small_values(self, probe, references, names, actual):
        if not any(map(Reference.lost, references, actual)):
            return None
        for i, (reference, name, value) in enumerate(zip(references, names, actual, strict=True)):
            reordered = (each.outputs[i] for each in self._lowered(probe, classes.FLOAT32))
            if lost := reference.permitting(*reordered).lost(value):
                share, given, true = lost
                said = f"{share:.0%} of {name} are small values without a right digit"
                return f"{said}, such as {given:.3g} instead of {true:.3g}"
        return None

    def own_check(self, probe, file):
        """Return {"complaint": what the problem's own check_outputs(inputs, outputs) says of outputs in a file, or None}."""
        try:
            whole = self._results(probe, file).outputs
        except tensors.NotTensors as complaint:
            return {"complaint": str(complaint)}
        inputs = tensors.to(behaviour.copies(self._with_inputs(probe).inputs), self.device)
        try:
            with torch.no_grad():
                return {"complaint": self.problem.check_outputs(inputs, tensors.to(whole, self.device))}
        except Exception as exception:
            reason, details = describe(exception)
            place = re.match(r"(/.*?:\d+): in ", details)
            return {"complaint": f"it raises {reason}" + (f" ({place[1]})" if place else "")}

    def _results(self, probe, file):
        """What a variant's process wrote, a few times the reference's length at most, or the Results. Raises NotTensors."""
        outputs, gradients = self.references[probe]
        elements = sum(reference.float64.numel() for reference in (*outputs, *gradients.values())) / self.sample.share
        most = BYTES_OF_ELEMENT * elements + SLACK
        try:
            is_file = not isinstance(file, tensors.Results)
            given = tensors.load_results(file, most, self.device if elements > SMALL else "cpu") if is_file else file
        except (torch.OutOfMemoryError, tensors.NotTensors):  # the latter, too, where there is no room: of pinned memory
            given = tensors.load_results(file, most)
        if not self.sample.is_part:
            return given
        shapes = self.shapes[probe] | {name: value.shape for name, value in self.model.named_parameters()}
        actual = {f"output {i}": value for i, value in enumerate(given.outputs)} | given.gradients
        for name, value in actual.items():
            if value is not None and value.shape != shapes.get(name, value.shape):
                raise tensors.NotTensors(f"{name} has the shape {tuple(value.shape)} instead of {tuple(shapes[name])}")
        return given

    def _sampled(self, probe, results):
        return self.oracle.sampled(self.probes[probe], results) if self.sample.is_part else results

    def _far_from_eager(self, probe, references, names, actual):
        """What is wrong with large outputs, NaN and infinities apart, compared with eager where no reference is kept."""
        made = self._with_inputs(probe)
        whole = [] if made.clean else self.oracle_of(made).whole(made).outputs
        for reference, name, eager, given in zip(references, names, whole, actual, strict=not made.clean):
            limit = FROM_EAGER * reference.allowed
            if given.numel() <= SMALL or reference.is_blunt:
                continue
            if not (far := largest_difference(given, eager) / reference.spread) <= limit:
                return f"{name} is off by {deviations(far)} from eager PyTorch's (allowed {two_digits(limit)})"
        return None

    def _stale_weights(self, probe, actual):
        step = self.probes[probe].step
        matrices = frozenset(name for name, change in step.items() if change.dim() > 1)
        for stale in dict.fromkeys(filter(None, (frozenset(step), matrices, frozenset(step) - matrices))):
            expected = self._before_step(probe, stale)
            if not any(reference.compare("", value).complaint for reference, value in zip(expected, actual, strict=False)):
                return "the weights" if len(stale) == len(step) else ", ".join(sorted(stale))
        return None

    def compare_gradients(self, probe, file, declared=None, shared=False):
        """Return {name: comparison} of the gradients in a file; with `shared` of those with names and shapes of both."""
        _, expected = self._permitting(probe, declared)
        try:
            given = self._sampled(probe, self._results(probe, file))
        except tensors.NotTensors as complaint:
            return {"results": vars(wrong(str(complaint)))}
        found = given.gradients
        if given.detached:
            return {"outputs": vars(wrong("no backward: loss.backward() would silently skip this layer"))}
        if shared:
            shapes = {name: value.shape for name, value in found.items() if value is not None}
            expected = {name: each for name, each in expected.items() if each.float64.shape == shapes.get(name)}
        inputs = self._with_inputs(probe).inputs if self.domain.texts else []
        for i in self.probes[probe].wanted_inputs if inputs else ():  # where the input cannot vary is nobody's business
            free, actual = self.domain.free(i, inputs[i]), found.get(f"input{i}")
            free = free if free is None else self.sample.of(free, probe).cpu()
            if free is not None and actual is not None and actual.shape == free.shape and f"input{i}" in expected:
                true = expected[f"input{i}"].float64.to(actual)
                found[f"input{i}"] = torch.where(free.to(actual.device), actual, true)
        return {name: self._graded_gradient(probe, name, reference, found.get(name)) for name, reference in expected.items()}

    def _graded_gradient(self, probe, name, reference, actual):
        """The comparison of a gradient, with its "class" where it is less exact than the limit, or than TF32 in any way."""
        compared = reference.compare(f"the gradient of {name}", actual)
        if not compared.complaint or compared.unjudged or compared.max_error is None:
            return vars(compared) | {"class": None}
        ways = {classes.AS_PYTORCH: [CUT, "tf32"]} if self.precision == "tf32" else {}
        ways |= {classes.FLOAT32: [classes.FLOAT32]}
        for found, names in ways.items():
            more = [gradient for way in names for gradient in gradients_of(self._lowered(probe, way), name)]
            wider = reference.permitting(*more).compare(f"the gradient of {name}", actual)
            if not wider.complaint:
                return vars(wider) | {"class": found}
        told = self._diagnosed(reference, probe, actual, compared.allowed)
        told = f"{compared.complaint}; {told.sentence}" if told else compared.complaint
        return vars(compared) | {"class": classes.WRONG, "complaint": told}

    def grade(self, probe, file):
        """Return {"class": one of classes.CLASSES} of the outputs in a file, which are not as exact as PyTorch's."""
        references, _ = self.references[probe]
        try:
            whole = self._results(probe, file)
        except tensors.NotTensors:
            return {"class": classes.WRONG}
        actual = self._sampled(probe, whole).outputs
        found = accuracy.grade(references, actual, lambda name: self._lowered(probe, name), [self.precision])
        if self.sample.is_part and found in (classes.AS_PYTORCH, classes.FLOAT32):
            expected, _ = self._permitting(probe, classes.FLOAT32)
            found = classes.WRONG if self._far_from_eager(probe, expected, [""] * len(expected), whole.outputs) else found
        return {"class": found}

    def _permitting(self, probe, declared):
        """The references of a probe for a `declared` precision, "float32" in any order, or error that the caller accepts."""
        outputs, gradients = self.references[probe]
        if isinstance(declared, float):
            accepted = {name: reference.accepting(declared) for name, reference in gradients.items()}
            return [reference.accepting(declared) for reference in outputs], accepted
        return self._wider(probe, declared) if declared else (outputs, gradients)

    def _widen(self, probe, to):
        (outputs, gradients), lowered = self.references[probe], self._lowered(probe, to)
        wider = [reference.permitting(*(each.outputs[i] for each in lowered)) for i, reference in enumerate(outputs)]
        return wider, {name: reference.permitting(*gradients_of(lowered, name)) for name, reference in gradients.items()}

    def _lower(self, probe, to):
        """Outcomes of a probe in a lower precision, or in "float32" with other orders of adding."""
        made = self._with_inputs(probe)
        oracle = self.oracle_of(made)
        if to == CUT:
            return oracle.rounded_operands(made, to, oracle.tf32_families)
        return oracle.reordered(made) if to == classes.FLOAT32 else oracle.lowered(made, to)

    def _with_remark(self, comparison, each, probe, actual, suspects):
        """(The comparison, its complaint with where the result is wrong and how; a picture's lines; whether it says how)."""
        if not comparison.complaint or self.probes[probe].autocast:
            return comparison, None, False
        i = each.index(comparison)
        found = self._diagnosis(each[i], i, probe, actual[i], comparison.allowed)
        remark = found and found.sentence
        if "off by" in comparison.complaint and not (found and found.how):
            remark = self._precision_of(probe, i, actual[i], suspects) or remark
        told = replace(comparison, complaint=f"{comparison.complaint}; {remark}") if remark else comparison
        return told, list(found.picture) if found else None, bool(found and found.how)

    def _precision_of(self, probe, i, actual, suspects):
        names = [name for name in LOWER if name != self.precision and (suspects is None or name in suspects)]
        lowered = {name: [tensors.as_real(each.outputs[i]) for each in self._lowered(probe, name)] for name in names}
        return accuracy.likely_precision(self.references[probe][0][i].float64, tensors.as_real(actual), lowered)

    def _diagnosis(self, comparison, i, probe, actual, allowed):
        reference = self.references[probe][0][i]
        found = self._diagnosed(reference, probe, actual, allowed)
        if not found or found.how:
            return found
        like = self._mutant_like(i, probe, tensors.as_real(actual), allowed * reference.spread)
        return replace(found, how=f"this is what the original gives with '{like}'") if like else found

    def _diagnosed(self, reference, probe, actual, allowed):
        actual = tensors.as_real(actual) if isinstance(actual, torch.Tensor) else None
        if allowed is None or self.sample.is_part or actual is None or actual.shape != reference.float64.shape:
            return None
        shapes = [shape for name, shape in self.shapes[probe].items() if name.startswith("input")]
        return diagnosis.diagnose(actual, reference.float64, allowed * reference.spread, shapes)

    def _mutant_like(self, i, probe, actual, allowed):
        made = replace(self._with_inputs(probe), upstream=None, wanted_inputs=())
        oracle, latest = self.oracle_of(made), time.monotonic() + SECONDS_FOR_MUTANTS
        inputs = tensors.to(made.inputs, self.device)
        for mutant in mutants.mutants_of(tensors.copy_model(self.model), inputs, differentiable=False):
            if time.monotonic() > latest:
                return None
            with contextlib.suppress(Exception):  # the mutation does not fit this call, in one of many ways
                output = tensors.as_real(mutants.outputs_of(mutant, oracle, made)[i]).cpu().double()
                if output.shape == actual.shape and bool(((output - actual.cpu().double()).abs() <= allowed).all()):
                    return mutant.name
        return None

    def mutants(self, probes, gradients, declared, seed):
        """Run wrong versions of the original through these probes, with `gradients` or without. See judge.mutants.score."""
        exams = []
        for name in probes:
            expected, of_gradients = self._permitting(name, declared)
            elements = sum(math.prod(shape) for key, shape in self.shapes[name].items() if key.startswith("input"))
            draw, oracle = functools.partial(self._with_inputs, name), self.oracle_of(self.probes[name])
            exams.append(mutants.Exam(draw, elements, oracle, expected, of_gradients if gradients else {}))
        with_gradients = any(exam.gradients for exam in exams)
        fresh = mutants.fresh(self.sizes.problem("reduced"), self.oracle, seed, with_gradients, self.domain)
        inputs = tensors.to(fresh[0][0].inputs, self.device)
        made = mutants.mutants_of(tensors.copy_model(self.model), inputs, bool(fresh[0][1].gradients))
        return mutants.score(made, exams, self.oracle, fresh)
