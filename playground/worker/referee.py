"""The worker's role that has the reference: it makes the inputs and compares raw outputs with float64.

It runs the original alone. No candidate's file is ever loaded into this process.
"""

import contextlib
import functools
import math
import re
import time
from dataclasses import replace

import torch

from playground import catalog, tensors
from playground.clock import referee as clock
from playground.clock.memory import Unshareable
from playground.judge import accuracy, behaviour, diagnosis, domain, footprint, lint, mutants, probes, special
from playground.judge.oracle import Oracle, gradients_of, is_few
from playground.judge.precision import CUT, LOWER, forbid_tf32
from playground.judge.sample import SMALL, Sample
from playground.judge.sizes import Sizes
from playground.judge.tolerance import Reference, deviations, largest_difference, two_digits, worst, wrong
from playground.machine import environment
from playground.serial import dump
from playground.stopwatch import timer
from playground.stopwatch.workload import fresh_inputs, step_of, upstream_for
from playground.worker.failures import describe, is_of_judge
from playground.worker.interface import WrongInterface, fitting, place_of

OTHER_INPUTS = 4
FASTER_BY_FILE = 1 << 26  # bytes of inputs: more are drawn again on a GPU, in less time than they are copied there
SECONDS_FOR_MUTANTS = 5.0  # in which a wrong version is looked for that gives the variant's result
FROM_EAGER = 4.0  # times what is allowed: eager's largest error where no reference is kept is a little more than the sample's
BYTES_OF_ELEMENT, SLACK = 32, 64 << 20  # of a file of results: more than these, for each element of the reference, is not read


class Referee:
    """The original, its float64 reference on each probe, and the comparison with it."""

    size_up = staticmethod(footprint.size_up)
    lint = staticmethod(lint.examine)

    def environment(self):
        """Return the Environment of a report, as JSON."""
        return dump(environment.describe())

    def load(self, problem, settings, place, weights, seed, strict=False, precision=None, share=1.0, secret=0):
        """Make the original and save its weights to the file `weights`. `strict` forbids TF32; `precision` is one of HALF.

        At the problem's own size a `share` of large results is compared, drawn from the seed `secret`.

        Returns {"inputs": [shape, ...], "precision": "tf32", "fp32" or one of HALF, "domain": what all inputs have in common,
        "varied": whether the contents are others than the problem's own, which are the same in each draw, "unvaried": why they
        cannot be where they would have to, "checks_itself": whether the file has a check of its own, "has_layouts": whether an
        input or a parameter has 4 or 5 dimensions}. The precision is `precision` where given; else that of HALF in which all
        inputs and parameters are, where there are any; else "tf32" where PyTorch's settings permit it to an operator that the
        model has. What is in 16 bits, and computed in float32 between, is judged by the limits of the latter.
        """
        self.device = torch.device(tensors.PLACES[place])
        self.outer = None
        timer.clock_for(self.device).keep_memory()  # or page faults would take as long as the reference itself
        self.problem = tensors.in_precision(catalog.load_problem(problem, settings), precision)
        if strict:
            forbid_tf32()
        self.model = tensors.make_model(self.problem, self.problem.Model, seed, self.device)
        tensors.save(self.model.state_dict(), weights)
        self.emulated = place == "emulator"
        self.sample = Sample(share, secret)
        self.shapes = {}  # probe -> {name: shape} of all inputs and outputs
        self.forms = {}  # probe -> how the outputs are made up
        self.timed = {"forward": "own"}  # mode -> the probe beside which timed calls are: of others the first of these
        self.oracle = self._oracle(self.model)
        self.sizes = Sizes(problem, settings, place, self._runs, precision)
        varies = domain.is_unchanging(self.sizes.problem("reduced"), seed)
        unvaried = (domain.vary(self.problem) or self.sizes.vary()) if varies else None
        self.domain = domain.learn(self.sizes.problem("reduced"), seed)
        self.probes, self.references = {}, {}
        self.drawn_again = {}  # probe -> a function that makes it, of those whose inputs no file holds
        self._wider = functools.cache(self._widen)
        self._lowered = functools.cache(self._lower)
        self._before_step = functools.cache(self._leave_unstepped)
        tf32 = self.oracle.tf32_families
        own = tensors.made_on(self.device, lambda: probes.own(self.problem, seed))
        given = [value for value in (*own.inputs, *self.model.parameters()) if isinstance(value, torch.Tensor)]
        types = {value.dtype for value in given if tensors.differentiable(value)}
        of_type = precision or next((name for name, kind in tensors.HALF.items() if types == {kind}), None)
        is_all_in = precision or (of_type and not self.oracle.uses_wider(own, tensors.HALF[of_type]))
        in_float32 = "tf32" if tf32 and tf32 & self.oracle.uses(own) else "fp32"
        self.precision = of_type if is_all_in else in_float32  # by whose limits it is judged
        return {
            "inputs": [list(value.shape) if isinstance(value, torch.Tensor) else value for value in own.inputs],
            "has_layouts": any(value.dim() in (4, 5) for value in given),
            "precision": of_type or self.precision,
            "domain": self.domain.texts,
            "varied": varies and not unvaried,
            "unvaried": unvaried,
            "checks_itself": bool(getattr(self.problem, "check_outputs", None)),
        }

    def try_out(self, problem, settings, place, precision=None):
        """Make the original and call it once on inputs of its own. What is wrong with its file raises."""
        device = torch.device(tensors.PLACES[place])
        module = tensors.in_precision(catalog.load_problem(problem, settings), precision)
        with fitting(module.Model, "__init__", module.get_init_inputs(), "get_init_inputs"):
            model = tensors.make_model(module, module.Model, 0, device)
        inputs = tensors.to(tensors.make_inputs(module, 0), device)
        with torch.no_grad(), fitting(module.Model, "forward", inputs, "get_inputs"):
            outputs = model(*inputs)
        try:
            tensors.require_judgeable(tensors.flatten(outputs))
        except TypeError as complaint:
            raise WrongInterface(f"{place_of(module.Model, 'forward')}{complaint}") from None
        return {}

    def side_effects(self):
        """Return what the original itself does in a call, so that a variant may do it, too: {"side_effects": [check, ...]}.

        And "state", where its result depends on the calls before, probes.EVAL, where it is another one in eval mode, and
        "inference_mode" and "double()", where it does not run in that.
        """
        inputs = tensors.to(tensors.make_inputs(self.sizes.problem("reduced"), 0), self.device)
        content = behaviour.copies(inputs)  # the original may change them
        model, unused = tensors.copy_model(self.model), tensors.copy_model(self.model)

        def called(model, inputs=None):
            tensors.seed_draws()
            with torch.no_grad():
                outputs = tensors.flatten(model(*(behaviour.copies(content) if inputs is None else inputs)))
            tensors.require_judgeable(outputs)
            return outputs

        tensors.seed_draws()
        effects = behaviour.SideEffects(model, inputs)
        outputs = called(model, inputs)
        side_effects = list(effects.complaints(outputs))
        if not behaviour.same(outputs, called(tensors.copy_model(self.model).eval())):
            side_effects.append(probes.EVAL)
        for name in ("inference_mode", "double()"):
            try:
                behaviour.StressTests(tensors.copy_model(self.model), behaviour.copies(content), [], self.device).run(name)
            except Exception:
                side_effects.append(name)
        if not behaviour.same(outputs, called(model)):
            side_effects.append("run to run")
            if behaviour.same(outputs, called(unused)):
                side_effects.append("state")
        return {"side_effects": side_effects}

    def prepare(self, probe, size, seed, inputs):
        """Make a probe of probes.PROBES at a size ("own", "reduced", ...), save it to the file `inputs`, compute its reference.

        The scaled and the normal probe also get upstream gradients where the original has any. Returns {"differentiable",
        "unusable", "form", "shapes", "ways"}: why nothing can be learned from the probe, or None; of the outputs, on the
        problem's own inputs, tensors.form and the shapes; the ways in which references were computed where they could not be in
        float64, on the device, at once.
        """
        problem = self.sizes.problem(size)
        why = self.domain.forbids(probe.removesuffix(probes.AT_OWN_SIZE))
        if problem is None:
            why = "the model's file has no constants for it"
        elif not why and probe.endswith(probes.AT_OWN_SIZE) and self.sample.is_part:
            why = "the own size takes too much host memory for more probes than its own"
        if why:
            return {"differentiable": False, "unusable": why}
        is_of_forward = probe in probes.REQUIRED
        try:
            differentiable = self._prepare(probe, problem, seed, inputs)
        except Exception as exception:  # what the original does not run on is no probe
            if is_of_judge(exception) or (is_of_forward and probe != probes.WITHIN):
                raise
            return {"differentiable": False, "unusable": f"the original does not run: {describe(exception)[0]}"}
        unusable = None if is_of_forward else special.unusable(self.references[probe][0])
        has_to_be_finite = probe == probes.WITHIN or not (is_of_forward or unusable or self.probes[probe].clean)

        def is_finite(name):
            return all(reference.is_finite for reference in self.references[name][0])

        if has_to_be_finite and not is_finite(probe) and is_finite("own"):
            unusable = "the original's own result is not finite"
        shapes = [list(each.float64.shape) for each in self.references[probe][0]]
        ways = sorted(self.oracle.ways | ({self.sample.text} if self.sample.is_part else set()))
        of_outputs = {"form": self.forms[probe], "shapes": shapes}
        return {"differentiable": differentiable, "unusable": unusable, "ways": ways, **of_outputs}

    def tells_nothing(self):
        """Return {"why": the outputs on the problem's own inputs tell no model from a constant, or from no operation; or None}.

        Where only samples of them are kept, they are compared within one probe.
        """
        names = [name for name in probes.FORWARD_PROBES if name in self.references]
        outputs = {name: self.references[name][0] for name in names}
        own = [reference.float64 for reference in outputs["own"]]
        if own and all(reference.is_nowhere_finite for reference in outputs["own"]):
            return {"why": f"the problem's own outputs are finite nowhere in {self.precision}, so a constant would be right"}

        def are(given, name):
            """Whether these tensors would pass for the outputs on a probe."""
            return all(reference.takes(value) for reference, value in zip(outputs[name], given, strict=True))

        def are_inputs(name):
            """Whether each output would be one of the inputs."""
            inputs = [tensors.as_real(value) for value in self._with_inputs(name).inputs if tensors.differentiable(value)]
            return all(any(map(reference.takes, inputs)) for reference in outputs[name])

        is_whole = not self.sample.is_part
        uniform = all(_is_uniform(reference.float64) for name in names for reference in outputs[name])
        if uniform or (is_whole and all(are(own, name) for name in names)):
            return {"why": "the problem's own outputs are the same for all of its inputs, so a constant would be right"}
        if is_whole and all(map(are_inputs, names)):
            return {"why": "the problem's own outputs are its inputs, so no operation at all would be right"}
        return {"why": None}

    def _prepare(self, probe, problem, seed, inputs):
        """Whether the probe has gradients."""
        drawing, made, oracle, eager = self._made(probe, problem, seed)
        if probe in probes.FRESH:
            self.references[probe] = _beside(self.references["own"], oracle.reference(made), oracle.sampled(made, eager))
            self._keep(made, drawing, inputs)
            return False
        has_gradients = any(tensors.differentiable(output) for output in eager.outputs)
        if has_gradients and probes.check_of(probe).gradients:
            with_upstream = tensors.made_on(self.device, lambda: probes.with_upstream(made, eager.outputs, seed))
            try:
                differentiated = oracle.eager(with_upstream)
                if any(gradient is not None for gradient in differentiated.gradients.values()):
                    drawing = replace(drawing, outputs=[[each.shape, each.dtype] for each in eager.outputs])
                    made, eager = with_upstream, differentiated
            except RuntimeError as error:  # where it writes to inputs that want a gradient, the original has none
                if "a leaf Variable that requires grad is being used in an in-place operation" not in str(error):
                    raise
        eager = eager if made.upstream else oracle.sampled(made, eager)
        reference = oracle.reference(made)
        permitted = oracle.permitted(made, self.precision)
        if made.autocast:
            with torch.autocast(self.device.type):
                eager = oracle.eager(made)
            eager = replace(eager, outputs=tensors.in_float32(eager.outputs))
            # A variant may have other operators than the original, and autocast lowers some and not others.
            permitted += oracle.rounded_at_each_step(made, len(permitted), torch.get_autocast_dtype(self.device.type))
        others = self._of_other_inputs(made, problem, drawing, reference)
        self._keep(made, drawing, inputs)
        ties = self._ties(probe, reference)
        self.references[probe] = _references(reference, eager, permitted, others, self._decisions(probe, reference), ties)
        if made.clean:
            clean = oracle.reference(replace(made, inputs=made.clean))
            self.references[probe] = special.references(reference, clean, eager, permitted, made.inputs), {}
        return bool(eager.gradients)

    def _keep(self, probe, drawing, file):
        """Save a probe for the variant, or how it is drawn: what the file holds, of a large one in the same memory, is kept."""
        is_own = probes.size_of(probe.name) == "own" and not probe.name.endswith(probes.AT_OWN_SIZE)
        given = sum(value.nbytes for value in probe.inputs if isinstance(value, torch.Tensor))
        is_slow = self.sample.is_part or (self.device.type == "cuda" and given > FASTER_BY_FILE)
        if is_own and is_slow and drawing.gives(probe, self.problem, self.device):
            tensors.save({"drawing": vars(drawing)}, file)
            self.drawn_again[probe.name] = lambda: drawing.make(self.problem, self.device)
            self.probes[probe.name] = replace(probe, inputs=[], upstream=None)
        else:
            tensors.save(vars(probe), file)
            self.probes[probe.name] = probes.Probe(**tensors.load(file, mapped=True))

    def _made(self, probe, problem, seed):
        """(its Drawing, the probe, the oracle of its weights, the whole Results in eager PyTorch).

        Values stay positive where the problem's are and the original has no finite result, or raises, otherwise.
        """
        for positive in (False, True) if self.domain.is_positive else (False,):
            drawing = probes.Drawing(probe, seed, positive, self.domain.plain)
            made = drawing.make(problem, self.device, dict(self.model.named_parameters()))  # a billion take seconds on a CPU
            oracle = self.oracle_of(made)
            try:
                eager = oracle.whole(made)
            except Exception:
                if positive or not self.domain.is_positive:
                    raise
                continue
            self.shapes[probe], self.forms[probe] = _shapes(made, eager.outputs), eager.form
            if made.clean or all(torch.isfinite(tensors.as_real(output)).all() for output in eager.outputs):
                break
        return drawing, made, oracle, eager

    def _of_other_inputs(self, made, problem, drawing, reference):
        """Eager outputs for more inputs of the probe's kind, where its outputs are few: what varying inputs do to them."""
        if made.clean or not is_few(reference.outputs):
            return []
        oracle, parameters = self.oracle_of(made), dict(self.model.named_parameters())
        seeds = range(drawing.seed + 1, drawing.seed + 1 + OTHER_INPUTS)
        more = [replace(drawing, seed=seed, outputs=None).make(problem, self.device, parameters).inputs for seed in seeds]
        return [oracle.eager(replace(made, inputs=inputs, upstream=None)).outputs for inputs in more]

    def _decisions(self, probe, reference):
        """A function that gives Oracle.decisions on the probe of that name, looked for when it is first called."""

        def decisions():
            made = self._with_inputs(probe)
            return self.oracle_of(made).decisions(made, reference)

        return functools.cache(decisions)

    def _ties(self, probe, reference):
        """A function that gives Oracle.ties on the probe of that name, looked for when it is first called."""

        def ties():
            made = self._with_inputs(probe)
            return self.oracle_of(made).ties(made, reference)

        return functools.cache(ties)

    def prepare_timed(self, probe, mode, seed):
        """Add the reference on the content of a timed call, which follows from its seed, as a further probe, called `probe`."""
        self._prepare_timed(probe, mode, seed, is_beside=self.timed.setdefault(mode, probe) != probe)
        return {}

    def _prepare_timed(self, probe, mode, seed, is_beside):
        """`is_beside`: what is allowed is what was for the first of its mode, and twice as much."""
        made, eager, outputs = self._timed_probe(probe, mode, seed)
        self.shapes[probe] = _shapes(made, outputs)
        reference = self.oracle.reference(made)
        decisions = self._decisions(probe, reference)
        self.drawn_again[probe] = lambda: self._timed_probe(probe, mode, seed)[0]
        if is_beside:
            references = _beside(self.references[self.timed[mode]], reference, eager, decisions)
        else:
            references = _references(reference, eager, self.oracle.permitted(made, self.precision), decisions=decisions)
        self.probes[probe], self.references[probe] = replace(made, inputs=[], upstream=None), references

    def _timed_probe(self, name, mode, seed):
        """(the probe with the content that workload.Workload makes of `seed` in `mode`, its Results in eager PyTorch, all of
        the outputs).
        """
        probe = probes.Probe(name, fresh_inputs(self.problem, seed, self.device))
        eager = self.oracle.whole(probe)
        if mode == "forward":
            return probe, self.oracle.sampled(probe, eager), eager.outputs
        probe.upstream = upstream_for(eager.outputs, seed, self.device)
        if mode == "weights_and_input":
            probe.wanted_inputs = tuple(i for i, value in enumerate(probe.inputs) if tensors.differentiable(value))
        return probe, self.oracle.eager(probe), eager.outputs

    def outer_open(self, side, shared, mode, declared, calls):
        """Prepare the outer clock of a mode for a side, with up to so many calls a turn. Returns what the side has to know.

        See clock.referee.OnGpu and OnCpu, which answer further requests; `shared` is the path of a process's own memory, for a
        CPU; `declared` is what the variant is permitted, as in compare_outputs.
        """
        if not self.outer:
            step = step_of(mode)
            references = self._permitting(self.timed[step], declared)
            named = {f"{clock.OUTPUT}{i}": output for i, output in enumerate(references[0])} | references[1]
            in_full = functools.partial(self._in_full, declared)
            drawn = clock.Drawn(self.problem, self.model, step, self.device, named, in_full, calls, step != mode)
            self.outer = (clock.OnGpu if self.device.type == "cuda" else clock.OnCpu)(drawn)
        return self.outer.open(side, shared)

    def _in_full(self, declared, drawn, call, results):
        """What is wrong with a call's results under the outer clock, by a reference of its own; None where nothing is."""
        outputs, gradients = drawn.named(results)
        probe, given = f"outer {call.seed}", tensors.Results(outputs, gradients)
        try:
            with tensors.drawing_from(call.draws):
                self._prepare_timed(probe, drawn.step, call.seed, is_beside=False)
                compared = [self.compare_outputs(probe, given, declared)]
                compared += self.compare_gradients(probe, given, declared).values() if gradients else []
        finally:
            for known in (self.probes, self.references, self.shapes, self.drawn_again):
                known.pop(probe, None)
            self._wider.cache_clear()
            self._lowered.cache_clear()
        if any(each.get("note") or each["unjudged"] for each in compared):
            raise Unshareable("a result that nobody can tell from a wrong one")
        return next((each["complaint"] for each in compared if each["complaint"]), None)

    def outer_close(self):
        """Give back the outer clock's memory and files."""
        if self.outer:
            self.outer.close()
        self.outer = None
        return {}

    def _with_inputs(self, probe):
        """The probe of that name; inputs that no file holds are drawn again."""
        return self.drawn_again.get(probe, lambda: self.probes[probe])()

    def oracle_of(self, probe):
        """Return the oracle of the original with the weights of a probe."""
        if probe.model_seed is not None:
            return self._oracle(tensors.make_model(self.problem, self.problem.Model, probe.model_seed, self.device))
        if not probe.step:
            return self.oracle
        model = tensors.copy_model(self.model)
        probes.take_step(model, probe.step)
        return self._oracle(model)

    def _oracle(self, model):
        return Oracle(model, self.device, self.emulated, self.sample)

    def _leave_unstepped(self, probe, stale):
        """References of the outputs on a probe of which the parameters named in `stale` do not take the step."""
        made = self._with_inputs(probe)
        made = replace(made, step={name: change for name, change in made.step.items() if name not in stale})
        oracle = self.oracle_of(made)
        return _references(oracle.reference(made), oracle.eager(made), oracle.permitted(made, self.precision))[0]

    def _runs(self, problem):
        """Whether the original runs on the problem's inputs; what it raises comes through."""
        model = tensors.copy_model(self.model)  # a call may change it, such as running statistics
        with torch.no_grad():
            model(*tensors.to(tensors.inputs_of(problem), self.device))
        return True

    def compare_outputs(self, probe, file, declared=None, remark=True, suspects=None):
        """Return {"max_error", "allowed", "eager_error", "permitted_error", "complaint", "note", ...} of the outputs in a file.

        "stale" says that they are those of the weights before the probe's step, "swallowed" where they are finite and the
        original's are not, "leaked" that the opposite is where it must not be, "small" that small values are lost, "uniform"
        that each of the original's is the same everywhere, "decided" that one is right for near ties of rounding alone.

        `declared` is the precision that the variant says it computes in, or what else is permitted: see _permitting. With
        `remark` a complaint ends with where the result is wrong and how that came about, which takes several further
        references; "diagnosis" are the lines of a picture. `suspects` are the precisions that the variant may have
        computed in; None: any.
        """
        expected, _ = self._permitting(probe, declared)
        uniform = all(_is_uniform(reference.float64) for reference in expected)
        unseen = {"note": None, "stale": False, "uniform": uniform, "diagnosis": None, "small": None}
        if isinstance(declared, str) and probe not in probes.REQUIRED and special.unusable(expected):
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
        found, lines = self._with_remark(found, each, probe, actual, suspects) if remark else (found, None)
        compared = vars(found)
        if self.sample.is_part and not found.complaint:
            compared = compared | {"complaint": self._far_from_eager(probe, expected, names, whole.outputs)}
        stale = self._stale_weights(probe, actual) if compared["complaint"] else None
        if stale:
            compared = compared | {"complaint": f"the output is that of {stale} before the step"}
        swallowed = next((every.swallowed for every in each if every.swallowed), None)
        leaked = any(every.leaked for every in each)
        seen = {"stale": bool(stale), "swallowed": swallowed, "leaked": leaked, "diagnosis": lines}
        seen["decided"] = any(every.decided for every in each)
        if probe in probes.REQUIRED and not compared["complaint"] and not isinstance(declared, float):
            seen["small"] = self._lost_small_values(probe, expected, names, actual)
        return compared | unseen | seen

    def _lost_small_values(self, probe, references, names, actual):
        """What is wrong with small values of right outputs, which float32 keeps in any order of adding; None without any."""
        if not any(map(Reference.lost, references, actual)):
            return None
        for i, (reference, name, value) in enumerate(zip(references, names, actual, strict=True)):
            reordered = (each.outputs[i] for each in self._lowered(probe, accuracy.FLOAT32))
            if lost := reference.permitting(*reordered).lost(value):
                share, given, true = lost
                return f"{share:.0%} of {name} are small values without a right digit: {given:.3g} instead of {true:.3g}, say"
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
        """What a variant's process wrote, a few times as long as the reference at most, or the Results. Raises NotTensors.

        What is large is on the device where there is room.
        """
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
        """What is wrong with large outputs where no reference is kept. They are compared with eager PyTorch, less exactly.

        Not so of a NaN or an infinity: how far one may reach is known of the sample alone.
        """
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
        """The weights of which the outputs are right without the probe's step, in words; None where there are none.

        All of them, or those that are packed as a rule, the matrices, or the others alone.
        """
        step = self.probes[probe].step
        matrices = frozenset(name for name, change in step.items() if change.dim() > 1)
        for stale in dict.fromkeys(filter(None, (frozenset(step), matrices, frozenset(step) - matrices))):
            expected = self._before_step(probe, stale)
            if not any(reference.compare("", value).complaint for reference, value in zip(expected, actual, strict=False)):
                return "the weights" if len(stale) == len(step) else ", ".join(sorted(stale))
        return None

    def compare_gradients(self, probe, file, declared=None, shared=False):
        """Return {name: {"max_error", "allowed", "eager_error", "complaint", "decided"}} of the gradients in a file.

        `declared` is as above; with `shared` only those count whose name and shape both models have; "decided" says that a
        gradient is right for near decisions alone (see tolerance.py).
        """
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
        """The comparison of a gradient, with its "class" where it is not as exact as the limit asks; None where it is.

        TF32 that is rounded in another way, or cut, is what PyTorch's own libraries give where they may: as PyTorch.
        """
        compared = reference.compare(f"the gradient of {name}", actual)
        if not compared.complaint or compared.unjudged or compared.max_error is None:
            return vars(compared) | {"class": None}
        ways = {accuracy.AS_PYTORCH: [CUT, "tf32"]} if self.precision == "tf32" else {}
        ways |= {accuracy.FLOAT32: [accuracy.FLOAT32]}
        for found, names in ways.items():
            more = [gradient for way in names for gradient in gradients_of(self._lowered(probe, way), name)]
            wider = reference.permitting(*more).compare(f"the gradient of {name}", actual)
            if not wider.complaint:
                return vars(wider) | {"class": found}
        told = self._diagnosed(reference, probe, actual, compared.allowed)
        told = f"{compared.complaint}; {told.sentence}" if told else compared.complaint
        return vars(compared) | {"class": accuracy.WRONG, "complaint": told}

    def grade(self, probe, file):
        """Return {"class": one of accuracy.CLASSES} of the outputs in a file, which are not as exact as PyTorch's."""
        references, _ = self.references[probe]
        try:
            whole = self._results(probe, file)
        except tensors.NotTensors:
            return {"class": accuracy.WRONG}
        actual = self._sampled(probe, whole).outputs
        found = accuracy.grade(references, actual, lambda name: self._lowered(probe, name), [self.precision])
        if self.sample.is_part and found in (accuracy.AS_PYTORCH, accuracy.FLOAT32):
            expected, _ = self._permitting(probe, accuracy.FLOAT32)
            found = accuracy.WRONG if self._far_from_eager(probe, expected, [""] * len(expected), whole.outputs) else found
        return {"class": found}

    def _permitting(self, probe, declared):
        """The references of a probe for a variant of which more than the strict limit is permitted.

        `declared` is the precision that it says it computes in, "float32" for any order of adding, or the error that the
        caller accepts.
        """
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
        return oracle.reordered(made) if to == accuracy.FLOAT32 else oracle.lowered(made, to)

    def _with_remark(self, comparison, each, probe, actual, suspects):
        """(The comparison, its complaint with where the result is wrong and how; the lines of a picture, or None)."""
        if not comparison.complaint or self.probes[probe].autocast:
            return comparison, None
        i = each.index(comparison)
        found = self._diagnosis(each[i], i, probe, actual[i], comparison.allowed)
        remark = found and found.sentence
        if "off by" in comparison.complaint and not (found and found.how):
            remark = self._precision_of(probe, i, actual[i], suspects) or remark
        told = replace(comparison, complaint=f"{comparison.complaint}; {remark}") if remark else comparison
        return told, list(found.picture) if found else None

    def _precision_of(self, probe, i, actual, suspects):
        names = [name for name in LOWER if name != self.precision and (suspects is None or name in suspects)]
        lowered = {name: [tensors.as_real(each.outputs[i]) for each in self._lowered(probe, name)] for name in names}
        return accuracy.likely_precision(self.references[probe][0][i].float64, tensors.as_real(actual), lowered)

    def _diagnosis(self, comparison, i, probe, actual, allowed):
        """The Diagnosis of output `i` of a probe; None where it has another form, or where only a sample of it is kept."""
        reference = self.references[probe][0][i]
        found = self._diagnosed(reference, probe, actual, allowed)
        like = (
            self._mutant_like(i, probe, tensors.as_real(actual), allowed * reference.spread)
            if found and not found.how
            else None
        )
        return replace(found, how=f"this is what the original gives with '{like}'") if like else found

    def _diagnosed(self, reference, probe, actual, allowed):
        """The Diagnosis of what is to be as a reference of a probe; None where there is none, as above."""
        actual = tensors.as_real(actual) if isinstance(actual, torch.Tensor) else None
        if allowed is None or self.sample.is_part or actual is None or actual.shape != reference.float64.shape:
            return None
        shapes = [shape for name, shape in self.shapes[probe].items() if name.startswith("input")]
        return diagnosis.diagnose(actual, reference.float64, allowed * reference.spread, shapes)

    def _mutant_like(self, i, probe, actual, allowed):
        """The name of the wrong version of the original that gives this output, to rounding; None without one."""
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
        """Run wrong versions of the original through these probes: {"counted", "rejected", "survivors": [name, ...]}.

        `gradients` says whether theirs are compared; `seed` is of the inputs that tell which ones differ.
        """
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


def _is_uniform(values):
    """Whether it has one value everywhere, which a single number is not taken for, unless it is zero."""
    return values.numel() == 0 or bool(values.min() == values.max() and (values.numel() > 1 or values.flatten()[0] == 0))


def _shapes(probe, outputs):
    """{name: shape} of a probe's inputs and outputs, under the names of gradients and complaints."""
    named = {f"input{i}": value for i, value in enumerate(probe.inputs) if isinstance(value, torch.Tensor)}
    return {name: value.shape for name, value in (named | {f"output {i}": each for i, each in enumerate(outputs)}).items()}


def _beside(checked, reference, eager, decisions=None):
    """What `_references` gives, for other inputs, beside what the check allowed for `checked`, which are such."""
    outputs, gradients = checked
    beside = [each.beside(*pair) for each, *pair in zip(outputs, reference.outputs, eager.outputs, strict=True)]
    return beside, {
        name: each.beside(reference.gradients[name], eager.gradients[name], lambda name=name: decisions()[name])
        for name, each in gradients.items()
        if reference.gradients.get(name) is not None
    }


def _references(reference, eager, permitted, others=(), decisions=None, ties=None):
    """(list for the outputs, {name: Reference} for the gradients that the original has).

    `decisions()` gives how far near decisions move each gradient, by name, and `ties()` how far near ties of rounding do each
    output that is in steps.
    """
    outputs = []
    for i, (true, in_eager) in enumerate(zip(reference.outputs, eager.outputs, strict=True)):
        moved = ties and tensors.in_steps(true) and (lambda i=i: ties()[i])
        more = {"others": [other[i] for other in others], "decisions": moved or None}
        outputs.append(Reference(true, in_eager, *(outcome.outputs[i] for outcome in permitted), **more))
    gradients = {}
    for name, true in reference.gradients.items():
        if true is not None:
            moved = decisions and (lambda name=name: decisions()[name])
            gradients[name] = Reference(true, eager.gradients[name], *gradients_of(permitted, name), decisions=moved)
    return outputs, gradients
