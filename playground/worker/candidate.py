"""The worker's role that runs a variant: load it, run it on the inputs it is given, time it."""

import contextlib
import functools
import itertools
import math
import os
from pathlib import Path

import torch
from torch.utils import _pytree

import cuda_emulator as emulator
from cuda_emulator import devices
from playground import catalog, modes, tensors
from playground.clock.clocked import Clocked
from playground.clock.workload import fresh_inputs
from playground.judge import behaviour, foreign, global_state, probes, sizing, work
from playground.judge.checks import BY_NAME
from playground.judge.precision import forbid_tf32
from playground.judge.text import Text
from playground.machine import build_locks
from playground.machine.peak_memory import peak_memory
from playground.room import NoRoom
from playground.tensors import Results
from playground.worker.builds import BuildWatch
from playground.worker.failures import describe, is_of_judge
from playground.worker.interface import WrongInterface, copy_weights, declared_precision, fitting, kept, some, source_line

IN_PART = 0.05  # of a gradient's norm: more than rounding and near ties do to it
REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)  # of torch, or of a file, where there is no GPU


class Candidate(Clocked):
    """A ModelNew in this process."""

    size_up = staticmethod(sizing.size_up)  # to be asked before `load`

    def load(self, variant, weights, debug=False, builds=None, content=None, borrowed=(), **original):
        """Make a ModelNew of the variant's file and give it the weights in the file `weights` (its own when None).

        Returns {"precision": the declared one or None, "weights": "by name" or, where names or shapes differ, "by seed",
        "difference", "out_dtype": whether it has that attribute}. Without a `variant` the `original` is taken, see Clocked.
        `debug`: without optimisation under the emulator. `builds` is the folder of its extensions, `content` the file's bytes,
        as latin-1, `borrowed` names from the problem. Raises CatalogError, WrongInterface and whatever the file raises.
        """
        if builds:
            os.environ["TORCH_EXTENSIONS_DIR"] = str(build_locks.extensions_root() / builds)
        self._take(**original)
        is_emulated = original["place"] == "emulator"
        self.emulator = emulator.install(mode="check", source_file=variant, debug=debug) if is_emulated else None
        if self.emulator:
            emulator.obey_call_off()
        self.schedules = itertools.cycle(("forward", "reversed", "random"))
        self.builds = BuildWatch(emulated=is_emulated)
        self.opened_before = foreign.opened()
        self.problem = kept(self._problem())
        if self.strict:  # whatever the problem's file has set
            forbid_tf32()
        content = content and content.encode("latin-1")
        self.text = Text(variant or self.path, content)
        self.emulates_device = False  # "cuda" stands for the emulator's memory, in all that the model does
        self.form = None  # of the last result
        flags = global_state.flags()
        if variant:
            tensors.known_classes_only()  # those that the problem's file has made, too
        fresh = catalog.load_problem(self.path, self.settings) if borrowed or not variant else None
        names = {name: vars(fresh)[name] for name in borrowed if name in vars(fresh)}
        self.kind = self._loaded_class(variant, content, names, self.problem.model_new_of) if variant else fresh.Model
        self.model = self._made(self.seed)
        self.first_weights = {} if weights is None else tensors.load(weights)
        difference = None if weights is None else self._take_weights(self.first_weights)
        self.first_buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        self.state = None if weights is None else self.first_weights.keys()  # the original's
        self.changed_by_loading = global_state.complaints_about_flags(flags, global_state.flags())
        came_by = "by seed" if difference else "by name"
        answer = {"precision": declared_precision(self.kind), "weights": came_by, "difference": difference}
        return answer | {"out_dtype": hasattr(self.model, "out_dtype")}

    def _take_weights(self, original):
        try:
            copy_weights(self.model, original)
        except WrongInterface as complaint:
            own = self.model.state_dict()
            shared = [name for name, value in original.items() if name in own and own[name].shape == value.shape]
            others = [name for name in shared if not torch.equal(own[name].cpu(), original[name])]
            return f"{complaint}; from the same seed it draws other values of {some(others)}" if others else str(complaint)
        return None

    def _loaded_class(self, *file):
        """ModelNew of the file, which under the emulator may put tensors on "cuda" as it is loaded."""
        self.host_constants = []  # the file's tensors that it has made on the CPU as it was loaded
        try:
            module = catalog.load_variant(*file)
        except REFUSALS as refusal:
            if isinstance(refusal, emulator.EmulatorError) or not self._may_emulate_device:
                raise
            return devices.emulated(catalog.load_variant)(*file).ModelNew
        own = _pytree.tree_leaves([value for name, value in vars(module).items() if not name.startswith("__")])
        self.host_constants = [value for value in own if isinstance(value, torch.Tensor)]
        return module.ModelNew

    def _made(self, seed):
        try:
            with fitting(self.kind, "__init__", self.problem.get_init_inputs(), "get_init_inputs"):
                made = tensors.make_model(self.problem, self.kind, seed, self.device)
        except REFUSALS:
            if not self._may_emulate_device:
                raise
            self._emulate_device()
            made = tensors.make_model(self.problem, self.kind, seed, self.device)
        if self.float_outputs and hasattr(made, "out_dtype"):
            made.out_dtype = torch.float32
        return made

    @property
    def _may_emulate_device(self):
        return self.emulator and self.text.names_cuda and not self.emulates_device

    def _emulate_device(self):
        """From now on construct and call the class where "cuda" is the emulated GPU."""

        class ModelNew(self.kind):
            @devices.emulated
            def __init__(self, *args):
                super().__init__(*args)

            @devices.emulated
            def forward(self, *args):
                return super().forward(*args)

        self.kind, self.emulates_device = ModelNew, True

    def build(self, seed):
        """Run forward once, where need be with "cuda" emulated, so that everything is built. Returns {"seconds", "built"}."""
        given = fresh_inputs(self.problem, seed, self.device)
        try:
            self._forward(given)
            is_done = not (self._may_emulate_device and self.text.cuda_kernels) or emulator.launches()
        except REFUSALS:
            if not self._may_emulate_device:
                raise
            is_done = False
        if not is_done:
            self._emulate_device()
            self.model = self._made(self.seed)  # the constructor may have asked for a GPU, too
            self._take_weights(self.first_weights)
            self._forward(given)
        if self.emulator and emulator.launches():
            self._look_for_host_memory(given)
        return {"seconds": self.builds.seconds if self.builds.names else None, "built": self.builds.built}

    def _look_for_host_memory(self, given):
        """Call a model as beside a GPU, where what names no device is on the CPU. Raises the Finding of a CPU tensor."""
        moves_tensors = functools.partial(getattr, self.emulator.builder, "moves_tensors")
        kept = self.model
        devices.put_on_host(self.host_constants)
        try:
            self.model = tensors.make_model(self.problem, devices.watched(self.kind, moves_tensors), self.seed, self.device)
            devices.put_on_device(self.model)
            self.model.load_state_dict(kept.state_dict(), strict=False)
            devices.watched(self._forward, moves_tensors)(given)
        except emulator.Finding as finding:
            if finding.kind == "host memory":
                raise
        except Exception as exception:
            if is_of_judge(exception):
                raise
        finally:
            self.model = kept
            devices.put_on_host(self.host_constants, False)

    def device_code(self):
        """Return {"texts": [{"text", "flags"}] that load_inline was given, "capability": the GPU's, such as "9.0", or None}."""
        on_gpu = self.device.type == "cuda"
        capability = ".".join(map(str, torch.cuda.get_device_capability(self.device))) if on_gpu else None
        return {"texts": self.builds.device_code, "capability": capability}

    def accepted_races(self):
        """Return {"lines": {line of the variant's file: races that the emulator found there and its text calls benign}}."""
        return {"lines": {str(line): count for line, count in emulator.accepted_races().items()} if self.emulator else {}}

    def run(self, inputs, outputs, poison, may_refuse):
        """Run forward on the probe in one file; the outputs go to another.

        Returns {"peak_mib", "complaints": {check: reason}, "refused": an exception's reason, with `may_refuse`, "form",
        "handed_memory": calls of its own code that were given tensors, None where not all would be seen}. With `poison`,
        uninitialised memory is NaN.
        """
        self._next_schedule()
        probe = self.probe_in(inputs)
        given = tensors.to(probe["inputs"], self.device)
        answer = {"peak_mib": None, "complaints": {}, "refused": None, "form": None, "handed_memory": None}
        own = self.builds.own
        with self._under(probe, poison), own.counted():
            tensors.seed_draws()
            effects = behaviour.SideEffects(self.model, given, state=self.state)
            forward = functools.partial(self._forward, given, probe["evaluates"])
            try:
                result, answer["peak_mib"] = peak_memory(forward, self.device)
            except Exception as exception:
                if not may_refuse:
                    raise
                answer["refused"] = self._refusal(exception)
                return answer
            pending = self._complaints()  # first, or else what compares on the GPU raises the error of a failed launch
            answer["complaints"], answer["form"] = effects.complaints(result) | pending, self.form
        answer["handed_memory"] = own.handed_memory if own.hears_all() else None
        tensors.save_results(Results(tensors.in_float32(result) if probe["autocast"] else result), outputs)
        return answer

    def try_out(self, trial, first, second, outputs):
        """Run a trial of behaviour.StressTests on the probes in two files.

        Returns {"of": whose outputs there are, "complaint", "note"}.
        """
        self._next_schedule()
        given = [self.probe_in(file) for file in (first, second)]
        inputs = [tensors.to(each["inputs"], self.device) for each in given]
        declared = getattr(type(self.model), "deterministic", None)

        def another():
            made = self._made(self.seed)
            made.load_state_dict(self.model.state_dict())
            probes.take_step(made, given[1]["step"])
            return made

        try:
            done = behaviour.StressTests(self.model, *inputs, self.device, declared, another).run(trial)
        except Exception as exception:
            said = "note" if BY_NAME[trial].may_raise else "complaint"
            return {"of": None, "complaint": None, "note": None} | {said: f"raises {self._refusal(exception)}"}
        if done.outputs is not None:
            tensors.save_results(Results(done.outputs), outputs)
        return {"of": done.of if done.outputs is not None else None, "complaint": done.complaint, "note": done.note}

    def work(self, inputs, outputs):
        """Watch the variant's own code in one call, and make another in which all that it gives is random numbers.

        Returns a record.OwnWork's values and "spoiled": whether there are outputs of the second call, which go to a file. Where
        its kernels ran and no function was called, what was written counts as calls.
        """
        given = tensors.to(self.probe_in(inputs)["inputs"], self.device)
        own = self.builds.own
        own.calls = 0
        written = work.WrittenBetween(own)
        with own.watched(), written:
            written.check(self._forward(given))
        opened = sorted(Path(path).name for path in foreign.opened() - self.opened_before)
        answer = {"builds": self.builds.names, "opened": opened, "means_to_build": self.text.means_to_build}
        answer |= {"triton": bool(self.text.triton_kernels), "own_calls": own.calls, "spoiled": False}
        answer |= {"kernels": [], "own_share": None}
        if self.device.type == "cuda":
            with work.kernels_launched() as answer["kernels"]:
                self._forward(given)
            answer["own_share"] = self._own_share(answer["kernels"])
        if own.calls or answer["own_share"]:
            with contextlib.suppress(Exception), written:  # memory that is used again holds the results of other inputs
                written.check(self._forward([behaviour.other_content(value) for value in given]))
            answer |= {"writes": written.count, "reached": sorted(written.reached)}
            written.count, written.spoiling = 0, True
            answer["spoiled"] = self._without(own.watched(spoiling=True), written, given, outputs)
            answer["own_calls"] = answer["own_calls"] or written.count
            if answer["spoiled"] and not (own.spoiled or written.count):  # the result is a whole number's, or nothing's
                written.with_data = True
                answer["spoiled"] = self._without(own.watched(spoiling=True, with_integers=True), written, given, outputs)
        return answer

    def _own_share(self, kernels):
        return work.own_share(kernels, self.builds.kernels | self.text.cuda_kernels | self.text.triton_kernels)

    def made_contiguous(self, inputs, outputs):
        """Return {"strided": the first tensor that is not contiguous, or None}, and outputs with all contiguous in a file."""
        given = tensors.to(self.probe_in(inputs)["inputs"], self.device)
        own = self.builds.own
        with own.watched(contiguous=True):
            tensors.seed_draws()
            try:
                tensors.save_results(Results(self._forward(given)), outputs)
            except REFUSALS:
                return {"strided": None}
        return {"strided": own.strided}

    def _without(self, numbers, memory, given, outputs):
        tensors.seed_draws()
        try:
            with modes.uninitialised_is_nan(), numbers, memory:
                results = self._forward(given)
                memory.check(results)
                tensors.save_results(Results(results), outputs)
            return True
        except Exception as exception:  # random numbers may well be refused
            if isinstance(exception, NoRoom) or is_of_judge(exception):
                raise
            return False

    def _complaints(self):
        found = {check: f"{line} when it is loaded" for check, line in self.changed_by_loading.items()}
        if self.builds.failure:
            found["build"] = f"its CUDA did not compile, and the file went on without it: {self.builds.failure}"
        if self.device.type == "cuda" and (error := work.pending_cuda_error()):
            found["launch"] = f"a launch failed and nobody looked: {error}"
        return found

    @contextlib.contextmanager
    def _under(self, probe, poison):
        usual = self.model
        if probe["model_seed"] is not None:
            self.model = self._made(probe["model_seed"])
        if probe["evaluates"]:  # what earlier calls have added to running statistics is not in the original's
            for name, value in self.model.named_buffers():
                first = self.first_buffers.get(name, value)  # one that is made in a call is a workspace
                value.copy_(first if first.shape == value.shape else value)
        kept = {name: value.detach().clone() for name, value in self.model.named_parameters()} if probe["step"] else {}
        probes.take_step(self.model, probe["step"])
        try:
            poisoned = modes.uninitialised_is_nan() if poison and not self.emulator else contextlib.nullcontext()
            with poisoned, torch.autocast(self.device.type, enabled=probe["autocast"]):
                yield
        finally:
            with torch.no_grad():
                for name, value in self.model.named_parameters():
                    if name in kept:
                        value.copy_(kept[name])
            self.model = usual

    def _refusal(self, exception):
        """The one line of an exception by which the variant says no. Faults, findings and the judge's are raised again."""
        self._synchronize()  # raises where the GPU is lost
        if type(exception).__name__ in ("Finding", "OutOfMemoryError") or self.builds.failure or is_of_judge(exception):
            raise exception
        return describe(getattr(exception, "inner_exception", exception))[0]  # torch.compile wraps what went wrong

    def differentiate(self, inputs, outputs):
        """Run forward and backward on the inputs and upstream gradients in one file; the gradients go to another.

        Returns {"unsupported": a NotImplementedError's text, "failed": another exception's, "complaints" of the two passes,
        "in_part" of passes for the parameters or the inputs alone}.
        """
        self._next_schedule()
        given = self.probe_in(inputs)
        values, upstream = (tensors.to(given[each], self.device) for each in ("inputs", "upstream"))
        is_normal, wanted = given["name"].startswith("normal"), given["wanted_inputs"]
        if is_normal:  # in every second place of memory: the backward of a sum or a slice does not pass on an array either
            upstream = [g if g is None else g.new_full((*g.shape, 2), math.nan)[..., 0].copy_(g) for g in upstream]
        effects, is_cut, answer = None, False, {"unsupported": None, "failed": None, "complaints": [], "in_part": []}

        def between(outputs):
            nonlocal effects, is_cut
            if is_normal:  # another forward pass between these, as in a network that calls a layer twice
                others = tensors.flatten(self.model(*map(behaviour.other_content, values)))
                is_cut = any(each.requires_grad for each in outputs) and not any(each.requires_grad for each in others)
            effects = behaviour.SideEffects(self.model, values, upstream, self.state)

        tensors.seed_draws()
        try:
            differentiated = devices.emulated(tensors.gradients) if self.emulates_device else tensors.gradients
            results, gradients = differentiated(self.model, values, upstream, wanted, between)
        except NotImplementedError as refusal:
            return answer | {"unsupported": (str(refusal).strip() or "without a message").splitlines()[0]}
        except Exception as exception:
            return answer | {"failed": self._refusal(exception)}
        self._synchronize()
        if is_cut and any(gradients.get(name) is not None for name, _ in self.model.named_parameters()):
            answer["complaints"].append("where no input needs a gradient, no parameter gets one")
        if written := effects and effects.writes():
            answer["complaints"].append(f"the backward pass {written}")
        detached = not any(result.requires_grad for result in results)
        tensors.save_results(Results(results, gradients, detached), outputs)
        if is_normal and not is_cut:
            again = functools.partial(differentiated, self.model, values, upstream)
            answer["in_part"] = self._in_part(again, wanted, gradients)
        return answer

    def backward_work(self, inputs, outputs):
        """Return {"own": whether the variant's own code runs in a backward pass; None where it might without being seen}."""
        given = self.probe_in(inputs)
        values, upstream = (tensors.to(given[each], self.device) for each in ("inputs", "upstream"))
        own, before = self.builds.own, 0
        with own.counted(), contextlib.ExitStack() as stack:

            def between(outputs):
                nonlocal before, kernels
                own.handed_memory, before = 0, len(emulator.launches()) if self.emulator else 0
                kernels = stack.enter_context(work.kernels_launched()) if self.device.type == "cuda" else []

            kernels = []
            tensors.gradients(self.model, values, upstream, given["wanted_inputs"], between)
            self._synchronize()
        launched = self._own_share(kernels) or (self.emulator and len(emulator.launches()) > before)
        seen = bool(own.handed_memory or launched)
        is_seen = own.hears_all() or self.emulator or self.device.type == "cuda"
        return {"own": seen if seen or is_seen else None}

    def _in_part(self, differentiated, wanted, gradients):
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not (parameters and wanted):  # then all is a part
            return []
        complaints = []
        for where, inputs, is_frozen in (("no input", (), False), ("no parameter", wanted, True)):
            for parameter in parameters:
                parameter.requires_grad_(not is_frozen)
            tensors.seed_draws()
            try:
                _, others = differentiated(inputs)
            except NotImplementedError:
                continue
            except Exception as exception:
                complaints.append(f"where {where} needs a gradient, the backward raises {self._refusal(exception)}")
                continue
            finally:
                for parameter in parameters:
                    parameter.requires_grad_(True)
            for name, other in others.items():
                of_all = gradients[name]
                if of_all is None or not torch.isfinite(of_all).all():
                    continue
                if other is None or not (of_all - other).norm() <= IN_PART * of_all.norm():
                    fault = "missing" if other is None else "not the same as where all need one"
                    complaints.append(f"where {where} needs a gradient, the gradient of {name} is {fault}")
                    break
        return complaints

    def probe_in(self, file):
        """Return the probe in a file, or as the file says how to draw it; for a GPU it is mapped, being copied there anyway."""
        content = tensors.load(file, mapped=self.device.type == "cuda")
        if "drawing" in content:
            return vars(probes.Drawing(**content["drawing"]).make(self.problem, self.device))
        return content

    def _subject(self, side):
        return self.problem, self.model, None, None

    def _circumstances(self, side):
        return contextlib.nullcontext()

    def _next_schedule(self):
        """Under the emulator every run has its threads in another order, so that a race has more chances to show."""
        if self.emulator:
            self.emulator.configure(schedule=next(self.schedules))

    def _forward(self, inputs, evaluates=False):
        with torch.no_grad(), fitting(self.kind, "forward", inputs, "get_inputs"):
            result = probes.in_eval(self.model, *inputs) if evaluates else self.model(*inputs)
        self._synchronize()
        try:
            if result is None:
                raise TypeError("forward returns None: end it with `return`, and its result")
            flat, self.form = tensors.flatten(result), tensors.form(result)
        except TypeError as complaint:
            raise WrongInterface(f"{source_line(self.kind, 'forward')}{complaint}") from None
        return flat

    def _synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.emulator:
            self.emulator.raise_kept()
