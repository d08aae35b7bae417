"""The part of the referee that makes: the original, probes with their inputs, and the references of each."""

import functools
from dataclasses import replace

import torch

from playground import catalog, tensors
from playground.clock import timer
from playground.clock.workload import fresh_inputs, upstream_for
from playground.judge import behaviour, checks, domain, probes, special
from playground.judge.classes import deviations
from playground.judge.oracle import PERTURBATIONS, FloatOutputs, Oracle, is_few
from playground.judge.precision import forbid_tf32
from playground.judge.references import beside, references_of
from playground.judge.sample import Sample
from playground.judge.sizes import Sizes
from playground.judge.tolerance import SLACK, Reference
from playground.machine import environment
from playground.serial import dump
from playground.worker.failures import describe, is_of_judge
from playground.worker.interface import WrongInterface, fitting, source_line

OTHER_INPUTS = 4
FASTER_BY_FILE = 1 << 26  # bytes of inputs: more are drawn again on a GPU, in less time than they are copied there


class Preparing:
    """The original, and its float64 reference on each probe."""

    def environment(self):
        """Return the Environment of a report, as JSON."""
        return dump(environment.describe())

    def load(self, problem, settings, place, weights, seed, strict=False, precision=None, share=1.0, secret=0):
        """Make the original and save its weights to the file `weights`. `strict` forbids TF32; `precision` is one of HALF.

        At the problem's own size a `share` of large results is compared, drawn from the seed `secret`. Returns {"inputs":
        [shape, ...], "precision": the given one, or that of HALF in which all tensors are, "tf32" where PyTorch permits it to
        an operator of the model, or "fp32"; "domain", "varied": whether contents that no draw changes were changed, "unvaried":
        why they cannot be, "checks_itself", "has_layouts": whether a tensor has 4 or 5 dimensions, "smaller": {constant:
        value}, "float_outputs": why outputs have to be float32, or None}.
        """
        self.device = torch.device(tensors.PLACES[place])
        timer.clock_for(self.device).keep_memory()  # or page faults would take as long as the reference itself
        self.problem = tensors.in_precision(catalog.load_problem(problem, settings), precision)
        if strict:
            forbid_tf32()
        self.model = tensors.make_model(self.problem, self.problem.Model, seed, self.device)
        tensors.save(self.model.state_dict(), weights)
        self.emulated = place == "emulator"
        self.sample = Sample(share, secret)
        self.float_outputs_of = None  # the precision of a model whose outputs are to be float32
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
        tf32 = self.oracle.tf32_families
        own = tensors.made_on(self.device, lambda: probes.own(self.problem, seed))
        given = [value for value in (*own.inputs, *self.model.parameters()) if isinstance(value, torch.Tensor)]
        types = {value.dtype for value in given if tensors.differentiable(value)}
        of_type = precision or next((name for name, kind in tensors.HALF.items() if types == {kind}), None)
        is_all_in = precision or (of_type and not self.oracle.uses_wider(own, tensors.HALF[of_type]))
        in_float32 = "tf32" if tf32 and tf32 & self.oracle.uses(own) else "fp32"
        why = self._says_nothing(own, precision) if precision else None
        if why:
            self.float_outputs_of = precision
            self.oracle = self._oracle(self.model)
        self.precision = of_type if is_all_in and not why else in_float32  # by whose limits outputs are judged
        inputs = [list(value.shape) if isinstance(value, torch.Tensor) else value for value in own.inputs]
        told = {"inputs": inputs, "smaller": self.sizes.settings("reduced"), "precision": of_type or self.precision}
        told |= {"varied": varies and not unvaried, "unvaried": unvaried, "float_outputs": why, "domain": self.domain.texts}
        told["has_layouts"] = any(value.dim() in (4, 5) for value in given)
        return told | {"checks_itself": bool(getattr(self.problem, "check_outputs", None))}

    def _says_nothing(self, own, precision):
        in_float32 = Oracle(tensors.copy_model(self.model).float(), self.device, self.emulated, self.sample)
        wide = replace(own, inputs=tensors.in_float32(own.inputs))
        steps = in_float32.rounded_at_each_step(wide, PERTURBATIONS, tensors.HALF[precision])
        for i, output in enumerate(in_float32.eager(wide).outputs):
            if not tensors.differentiable(output):
                continue
            rounded = Reference(output.double(), output.to(tensors.HALF[precision]), *(each.outputs[i] for each in steps))
            if rounded.is_nowhere_finite:
                return f"in {precision} the original's outputs are finite nowhere"
            if rounded.is_blunt:
                moved = deviations(rounded.allowed_rms / SLACK)
                return f"rounding to {precision} alone moves the original's outputs by {moved}"
        return None

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
            raise WrongInterface(f"{source_line(module.Model, 'forward')}{complaint}") from None
        return {}

    def side_effects(self):
        """Return {"side_effects": [check, ...] of the original itself, "state", EVAL, and where it does not run}."""
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
            side_effects.append(checks.EVAL)
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
        """Make a probe of checks.PROBES at a size ("own", "reduced", ...), save it to the file `inputs`, compute its reference.

        Returns {"differentiable", "unusable": why it teaches nothing, or None, "form" and "shapes" of the outputs, "ways" in
        which references were computed other than in float64 on the device, at once}.
        """
        problem = self.sizes.problem(size)
        why = self.domain.forbids(probe.removesuffix(checks.AT_OWN_SIZE))
        if problem is None:
            why = "the model's file has no constants for it"
        elif not why and probe.endswith(checks.AT_OWN_SIZE) and self.sample.is_part:
            why = "the own size takes too much host memory for more probes than its own"
        if why:
            return {"differentiable": False, "unusable": why}
        is_of_forward = probe in checks.REQUIRED
        try:
            differentiable = self._prepare(probe, problem, seed, inputs)
        except Exception as exception:  # what the original does not run on is no probe
            if is_of_judge(exception) or (is_of_forward and probe != checks.WITHIN):
                raise
            return {"differentiable": False, "unusable": f"the original does not run: {describe(exception)[0]}"}
        unusable = None if is_of_forward else special.unusable(self.references[probe][0])
        has_to_be_finite = probe == checks.WITHIN or not (is_of_forward or unusable or self.probes[probe].clean)

        def is_finite(name):
            return all(reference.is_finite for reference in self.references[name][0])

        if has_to_be_finite and not is_finite(probe) and is_finite("own"):
            unusable = "the original's own result is not finite"
        shapes = [list(each.float64.shape) for each in self.references[probe][0]]
        ways = sorted(self.oracle.ways | ({self.sample.text} if self.sample.is_part else set()))
        of_outputs = {"form": self.forms[probe], "shapes": shapes}
        return {"differentiable": differentiable, "unusable": unusable, "ways": ways, **of_outputs}

    def tells_nothing(self):
        """Return {"why": the outputs on the problem's own inputs tell no model from a constant or no operation; or None}."""
        names = [name for name in checks.FORWARD_PROBES if name in self.references]
        outputs = {name: self.references[name][0] for name in names}
        own = [reference.float64 for reference in outputs["own"]]
        if own and all(reference.is_nowhere_finite for reference in outputs["own"]):
            return {"why": f"the problem's own outputs are finite nowhere in {self.precision}, so a constant would be right"}

        def are(given, name):
            return all(reference.takes(value) for reference, value in zip(outputs[name], given, strict=True))

        def are_inputs(name):
            inputs = [tensors.as_real(value) for value in self._with_inputs(name).inputs if tensors.differentiable(value)]
            return all(any(map(reference.takes, inputs)) for reference in outputs[name])

        is_whole = not self.sample.is_part
        uniform = all(is_uniform(reference.float64) for name in names for reference in outputs[name])
        if uniform or (is_whole and all(are(own, name) for name in names)):
            return {"why": "the problem's own outputs are the same for all of its inputs, so a constant would be right"}
        if is_whole and all(map(are_inputs, names)):
            return {"why": "the problem's own outputs are its inputs, so no operation at all would be right"}
        return {"why": None}

    def _prepare(self, probe, problem, seed, inputs):
        drawing, made, oracle, eager = self._made(probe, problem, seed)
        if probe in checks.FRESH:
            reference, eager = oracle.reference(made), oracle.sampled(made, eager)
            ties = self._later(Oracle.ties, probe, reference)
            self._keep(made, drawing, inputs)
            self.references[probe] = beside(self.references["own"], reference, eager, ties=ties)
            return False
        has_gradients = any(tensors.differentiable(output) for output in eager.outputs)
        if has_gradients and checks.check_of(probe).gradients:
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
        near = (self._later(find, probe, reference) for find in (Oracle.decisions, Oracle.ties))
        self.references[probe] = references_of(reference, eager, permitted, others, *near)
        if made.clean:
            clean = oracle.reference(replace(made, inputs=made.clean))
            self.references[probe] = special.references(reference, clean, eager, permitted, made.inputs), {}
        return bool(eager.gradients)

    def _keep(self, probe, drawing, file):
        """Save a probe for the variant, or how it is drawn: what the file holds, of a large one in the same memory, is kept."""
        is_own = checks.size_of(probe.name) == "own" and not probe.name.endswith(checks.AT_OWN_SIZE)
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
        """(its Drawing, the probe, the oracle of its weights, whole eager Results), positive where the original needs it."""
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
            self.shapes[probe], self.forms[probe] = shapes_of(made, eager.outputs), eager.form
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

    def _later(self, find, probe, reference):
        def found():
            made = self._with_inputs(probe)
            return find(self.oracle_of(made), made, reference)

        return functools.cache(found)

    def prepare_timed(self, probe, mode, seed):
        """Add the reference on the content of a timed call, which follows from its seed, as a further probe, called `probe`."""
        self._prepare_timed(probe, mode, seed, is_beside=self.timed.setdefault(mode, probe) != probe)
        return {}

    def _prepare_timed(self, probe, mode, seed, is_beside):
        """`is_beside`: what is allowed is what was for the first of its mode, and twice as much."""
        made, eager, outputs = self._timed_probe(probe, mode, seed)
        self.shapes[probe] = shapes_of(made, outputs)
        reference = self.oracle.reference(made)
        later = [self._later(find, probe, reference) for find in (Oracle.decisions, Oracle.ties)]
        self.drawn_again[probe] = lambda: self._timed_probe(probe, mode, seed)[0]
        if is_beside:
            references = beside(self.references[self.timed[mode]], reference, eager, *later)
        else:
            references = references_of(reference, eager, self.oracle.permitted(made, self.precision), (), *later)
        self.probes[probe], self.references[probe] = replace(made, inputs=[], upstream=None), references

    def _timed_probe(self, name, mode, seed):
        probe = probes.Probe(name, fresh_inputs(self.problem, seed, self.device))
        eager = self.oracle.whole(probe)
        if mode == "forward":
            return probe, self.oracle.sampled(probe, eager), eager.outputs
        probe.upstream = upstream_for(eager.outputs, seed, self.device)
        if mode == "weights_and_input":
            probe.wanted_inputs = tuple(i for i, value in enumerate(probe.inputs) if tensors.differentiable(value))
        return probe, self.oracle.eager(probe), eager.outputs

    def _with_inputs(self, probe):
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
        given = model, self.device, self.emulated, self.sample
        return FloatOutputs(*given, self.float_outputs_of) if self.float_outputs_of else Oracle(*given)

    def _runs(self, problem):
        model = tensors.copy_model(self.model)  # a call may change it, such as running statistics
        with torch.no_grad():
            model(*tensors.to(tensors.inputs_of(problem), self.device))
        return True


def is_uniform(values):
    """Whether it has one value everywhere, which a single number is not taken for, unless it is zero."""
    return values.numel() == 0 or bool(values.min() == values.max() and (values.numel() > 1 or values.flatten()[0] == 0))


def shapes_of(probe, outputs):
    """{name: shape} of a probe's inputs and outputs, under the names of gradients and complaints."""
    named = {f"input{i}": value for i, value in enumerate(probe.inputs) if isinstance(value, torch.Tensor)}
    return {name: value.shape for name, value in (named | {f"output {i}": each for i, each in enumerate(outputs)}).items()}
