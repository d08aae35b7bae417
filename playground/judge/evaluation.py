"""The checks of one variant under both standards: what is asked of which process, and what each answer is a complaint about."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from playground.judge import checks, classes
from playground.judge.case import FIGURES, Case, is_its_own
from playground.judge.checks import AT_OWN_SIZE, DROP_IN, EVAL, FORWARD, REQUIRED, check_of, size_of
from playground.judge.classes import APPROXIMATE, AS_PYTORCH, FLOAT32, WRONG, named, names_one
from playground.judge.failure import WorkerFailure, remove
from playground.judge.verdict import conclude, failed, with_shapes
from playground.record import FAIL, Accuracy, Entry, Errors, GradientErrors, Judgment, OwnCheck, OwnWork, Probe, Unsupported

if TYPE_CHECKING:
    from playground.worker import WorkerProcess
    from playground.worker.referee_client import RefereeClient
    from playground.worker.replies import Differentiated, Loaded, Ran, TriedOut

REFUSES = "refuses: "  # begins the note of a probe on which the variant raises an exception
OF_MUTANTS = ("own", "within")  # the probes on which an accepted error has to be told from a wrong version
DRAWS = "the original draws random numbers: each call began with the same seed, so the same numbers in the same order are right"
FLOAT_OUTPUTS = (
    "give ModelNew an attribute out_dtype, None at first, and return that type where it is torch.float32: the sums, not rounded"
)
STATE = "cannot be judged: what the original returns depends on the calls before"
OF_GRADIENTS = ("no-gradient", "wrong-gradient")


class Judged(NamedTuple):
    """A judgment, what the forward pass took of memory, the worker that is alive in the end, and what ended it early."""

    judgment: Judgment
    peak_mib: float | None
    worker: WorkerProcess
    failure: WorkerFailure | None


def judge(
    worker: WorkerProcess,
    referee: RefereeClient,
    place: str,
    loaded: Loaded,
    file: Path | None = None,
    renew: Callable[[], WorkerProcess] | None = None,
    accept: float | None = None,
    first: str | None = None,
    tell: Callable[[str | None], None] | None = None,
    borrowed: Sequence[str] = (),
    with_mutants: bool = True,
) -> Judged:
    """Run every check of the variant that `worker` has loaded at a `place`, with the reply `loaded`. Returns a Judged.

    `renew()` gives a worker that has loaded the `file` again, after a crash. `accept` is the error, of the spread, that the
    caller accepts; `tell(complaint or None)` is called after the `first` probe; `borrowed` are names from the problem's file.
    `with_mutants` counts, too, how many wrong versions of the original fail the probes.
    """
    case, stop = Evaluation(worker, referee, place, loaded, file, renew, accept), None
    if referee.float_outputs and not loaded.out_dtype:
        case.complain("not-judged", f"cannot be judged: {referee.float_outputs}; {FLOAT_OUTPUTS}", FORWARD)
        return Judged(conclude(case.known(), case.complaints), None, worker, None)
    if borrowed:
        text = f"the file uses {', '.join(borrowed)}, which only the problem's file defines"
        case.complain("uses-problem-names", text, DROP_IN)
    try:
        if first and case.takes(first):
            case.try_probe(first)
            if tell:
                tell(case.probes[first].complaint)
        case.evaluate()
        if with_mutants and not any(each.costs == FORWARD for each in case.complaints):
            case.count_mutants()
    except WorkerFailure as failure:
        has_failed = any(each.costs == FORWARD and each.tag != "not-judged" for each in case.complaints)
        if not has_failed or failure.is_finding or not is_its_own(failure):
            stop = failure
        else:
            case.crashed(failure)
    finally:
        remove(case.outputs.held)
    known = case.known()
    judgment = failed(known, with_shapes(stop, referee)) if stop else conclude(known, case.complaints)
    if judgment.verdict == FAIL and case.diagnosis:
        judgment = replace(judgment, details="\n".join(case.diagnosis))
    return Judged(judgment, case.peak_mib, case.worker, stop)


class Evaluation(Case):
    """The checks, in their order."""

    def try_probe(self, probe: str) -> None:
        """Outputs and gradients on a probe, if they are not known yet."""
        if probe in self.probes:
            return
        if probe in REQUIRED:
            self._probe(probe)
            return
        check = check_of(probe)
        if not self._survive(check.caveat.tag, check.said, lambda: self._probe(probe)):
            self._note_probe(probe, None, complaint=self.complaints[-1].text)

    def evaluate(self) -> None:
        """Make all checks that were not made yet; none follows outputs that are wrong on the problem's own inputs."""
        if self._referee.float_outputs:
            self.complain("out-dtype", f"what is judged is the float32 result: {self._referee.float_outputs}", None)
        if "random state" in self._referee.side_effects:
            self.complain("random", DRAWS, None)
        if self._is_by_seed:
            self.complain("weights-by-seed", f"{self._weights_differ}, so the same seed made both", DROP_IN)
        for probe in filter(self.takes, REQUIRED):
            self.try_probe(probe)
        if any(map(self._is_wrong, REQUIRED)):
            return
        if self._referee.tells_nothing:
            self.complain("not-judged", f"cannot be judged: {self._referee.tells_nothing}", FORWARD)
        else:
            self._probe_further()
            self._look_for_work()
            self._try_out_all()

    def _probe_further(self) -> None:
        """The probes that can only cost drop-in, at the own size where the reduced one does not suit the variant."""
        changes_parameters = "weights unchanged" in self._referee.side_effects
        for probe in (name for name in checks.PROBE_NAMES if name not in REQUIRED):
            if check_of(probe).parameters and (self._is_by_seed or changes_parameters):
                others = "variant's parameters are not the original's"
                why = others if self._is_by_seed else "original changes its parameters in a call"
                self._note_probe(probe, f"not run: the {why}")
            elif probe != EVAL or EVAL in self._referee.side_effects:
                self.try_probe(probe + AT_OWN_SIZE if self._rejects_reduced and size_of(probe) == "reduced" else probe)
                if probe == "normal" and self._rejects_reduced:
                    self.try_probe(probe + AT_OWN_SIZE)

    @property
    def _rejects_reduced(self) -> bool:
        note = self.probes["normal"].note if "normal" in self.probes else None
        return (note or "").startswith(REFUSES) or self._is_wrong("normal") or "normal" in self._left

    def _probe(self, probe: str) -> None:
        """Outputs on one probe, and gradients where it has any. All but those of the problem's own inputs may be refused."""
        prepared = self._referee.prepared(probe)
        if prepared["unusable"]:
            return self._note_probe(probe, f"not run: {prepared['unusable']}")
        required = probe in REQUIRED
        ran: Ran = self._ask_on("run", probe, poison=probe != "own", may_refuse=not required)
        if ran.refused:
            return self._note_probe(probe, f"{REFUSES}{ran.refused}")
        if probe == "own":
            self.peak_mib, self._works = ran.peak_mib, bool(ran.handed_memory)
        if self._works and ran.handed_memory == 0 and not required:
            self._leave(probe)
        complaints = dict(ran.complaints)
        if not required and (why := complaints.pop("launch", None)):
            self.complain(check_of(probe).caveat.tag, _under(probe, why), DROP_IN)
        for check, reason in complaints.items():
            if check not in self._referee.side_effects:  # what the original does, too, is no complaint
                self._behaved(check, reason, None)
        if probe == "own" and self._referee.checks_itself:
            self._own_check = OwnCheck(**self._ask_referee("own_check", probe))
        if required and ran.form != prepared["form"]:
            complaint = _under(probe, f"returns {ran.form} where the original returns {prepared['form']}")
            self._note_probe(probe, None, complaint=complaint)
            return self.complain("outputs", complaint, FORWARD)
        compared = self._compare("outputs", probe)
        if compared["uniform"]:
            self._uniform.add(probe)
        compared = self._graded(probe, compared) if required else self._reordered(probe, compared)
        complaint = compared["complaint"] and _under(probe, compared["complaint"])
        self.probes[probe] = Probe(**_figures(compared), note=compared.get("note"), complaint=complaint)
        self.diagnosis = self.diagnosis or compared.get("diagnosis")
        if required:
            self._worst = _worse(self._worst, Errors(**_figures(compared)))
            if complaint:
                complaint += self._cause_in_strides(probe)
                self.probes[probe] = replace(self.probes[probe], complaint=complaint)
                tag = "outputs" if self._accuracy and self._accuracy.kind == WRONG else "accuracy"
                if self._is_by_seed and tag == "outputs" and not compared.get("related"):
                    complaint = f"{self._weights_differ}, so its weights may not be the original's: {complaint}"
                if "state" in self._referee.side_effects:
                    return self.complain("not-judged", f"{STATE}; {complaint}", FORWARD)
                return self.complain("not-judged" if compared["unjudged"] else tag, complaint, FORWARD)
        elif complaint:
            return self.complain(self._tag_of_outputs(probe, compared), complaint, DROP_IN)
        if compared["decided"] and not self._has("accuracy"):
            self.complain("accuracy", _under(probe, "near ties of rounding are rounded the other way"), None)
        if compared["small"]:
            self.complain("small-values", _under(probe, compared["small"]), DROP_IN)
        if compared["swallowed"]:
            self.complain("nan", _under(probe, f"the output {compared['swallowed']}"), DROP_IN)
        if prepared["differentiable"] and not self._has(*OF_GRADIENTS):
            self._survive("no-gradient", "when a gradient is wanted", lambda: self._differentiate(probe))
        return None

    def _leave(self, probe: str) -> None:
        """Say, once a size, that PyTorch computes it: no fault, and no work of the variant's."""
        if size_of(probe) not in map(size_of, self._left):
            said = {"batch 1": "at batch size 1", "odd": "at odd sizes"}.get(size_of(probe), f"at the {size_of(probe)} size")
            self.complain("sizes", f"PyTorch computes it {said}", None)
        self._left.add(probe)

    def _cause_in_strides(self, probe: str) -> str:
        """'; ...' where the outputs are right once the file's own code is given contiguous tensors; "" where they are not."""
        if probe != "own":
            return ""
        try:
            strided = self._ask_on("made_contiguous", probe).strided
        except WorkerFailure:  # the verdict is that on the outputs, whatever comes after them
            return ""
        if not strided or self._compare("outputs", probe, remark=False)["complaint"]:
            return ""
        return f"; {strided} is not contiguous, and its data_ptr is read as if it were: right with .contiguous()"

    def _graded(self, probe: str, compared: dict[str, Any]) -> dict[str, Any]:
        """The comparison on an own probe; keeps the class of accuracy, and permits what that or `accept` does."""
        worst = self._accuracy
        figures = {"error": compared["max_error"], "limit": compared["allowed"]}
        found = self._class_of(probe, compared) if compared["complaint"] else self._declared or AS_PYTORCH
        if worst is None or (compared["complaint"] and classes.CLASSES.index(found) > classes.CLASSES.index(worst.kind)):
            self._accuracy = Accuracy(kind=str(found), **figures, accepted=worst.accepted if worst else None)
        if not compared["complaint"]:
            if worst and worst.kind == AS_PYTORCH and figures["error"] > worst.error:
                self._accuracy = replace(worst, **figures)
            return compared
        complaint, error = compared["complaint"], compared["max_error"]
        if found != WRONG and not compared.get("related") and not names_one(complaint):
            complaint += f" (accuracy: {named(str(found))})"
        if self._declared is None and found == FLOAT32:
            self._declared = FLOAT32
        elif self._accept is not None and self._declared != self._accept and error is not None and error <= self._accept:
            if lost := self._lost_by_accepting():
                return compared | {"complaint": f"{complaint}; accepting it would accept '{lost}', too"}
            self._declared = self._accept
            self._accuracy = replace(self._accuracy, accepted=self._accept) if self._accuracy else None
        else:
            return compared | {"complaint": complaint}
        self.complain("accuracy", _under(probe, complaint), DROP_IN)
        return self._compare("outputs", probe)

    def _class_of(self, probe: str, compared: dict[str, Any]) -> str:
        found: str = self._ask_referee("grade", probe)["class"]
        if found not in classes.PRECISIONS or self._suspects is None or found in self._suspects:
            return found
        return next((f"approximate to {limit:g}" for limit in APPROXIMATE if compared["max_error"] <= limit), WRONG)

    def _reordered(self, probe: str, compared: dict[str, Any]) -> dict[str, Any]:
        """The comparison on another probe, where float32 in another order of adding costs no more than exactness."""
        error = compared["max_error"]
        if not compared["complaint"] or self._declared or error is None or error > APPROXIMATE[-1]:
            return compared
        if self._ask_referee("grade", probe)["class"] != FLOAT32:
            return compared
        self._declared = FLOAT32
        self.complain("accuracy", _under(probe, f"{compared['complaint']} (accuracy: {FLOAT32})"), DROP_IN)
        return self._compare("outputs", probe)

    def _lost_by_accepting(self) -> str | None:
        """The name of a wrong version, not a look-alike, that could not be told from the original any more, or None."""
        probes = tuple(probe for probe in OF_MUTANTS if not self._referee.prepared(probe)["unusable"])
        strict, accepting = (self._referee.mutants(probes, False, limit)["survivors"] for limit in (None, self._accept))
        return next((name for name in accepting if name not in strict and classes.LOOK_ALIKE not in name), None)

    def _tag_of_outputs(self, probe: str, compared: dict[str, Any]) -> str:
        if compared["stale"]:
            return "stale-weights"
        if compared["leaked"]:
            return "nan"
        tag = check_of(probe).caveat.tag
        by_values = self._is_wrong("scaled") or (size_of(probe) == "own" and tag == "sizes")
        return "values" if by_values or tag in ("nan", "stale-weights") else tag

    def _differentiate(self, probe: str) -> None:
        answer: Differentiated = self._ask_on("differentiate", probe)
        if refused := answer.unsupported:
            if self._gradients is None:
                self._gradients = Unsupported(refused)
            elif self._gradients != Unsupported(refused):
                self._note(probe, f"no gradients: {refused}")
            return None
        if answer.failed:
            return self.complain("no-gradient", f"the backward raises {answer.failed}", DROP_IN)
        for complaint in answer.complaints:
            self.complain("wrong-gradient", complaint, DROP_IN)
        if not self._are_gradients_right(probe):
            return None
        if not {"run to run", "state"} & {*self._referee.side_effects}:
            for complaint in answer.in_part:
                self.complain("wrong-gradient", complaint, DROP_IN)
        in_training = self._compare("outputs", probe)["complaint"]
        if in_training:
            return self.complain("wrong-gradient", _under(probe, f"when a gradient is wanted, {in_training}"), DROP_IN)
        if self._works and not self._asked_for_backward and probe not in self._left:
            self._asked_for_backward = True
            if self._ask_on("backward_work", probe).own is False:
                self.complain("gradient", "PyTorch computes the gradients", None)
        return None

    def _are_gradients_right(self, probe: str) -> bool:
        gradients = self._compare("gradients", probe, shared=self._is_by_seed)
        decided = [name for name, comparison in gradients.items() if comparison["decided"]]
        if decided and not self.probes[probe].note:
            self._note(probe, f"near ties, such as of a maximum, move the gradient of {', '.join(decided)}")
        if reordered := [name for name, comparison in gradients.items() if comparison.get("class") == FLOAT32]:
            text = f"the gradient of {', '.join(reordered)} is float32 in another order of adding, less exact than PyTorch's"
            self.complain("accuracy", _under(probe, text), DROP_IN)
        unjudged = [comparison["complaint"] for comparison in gradients.values() if comparison["unjudged"]]
        found = [comparison["complaint"] for comparison in gradients.values() if comparison["complaint"]]
        wrong = [complaint for complaint in found if complaint not in unjudged]
        if unjudged:
            self.complain("not-judged", _under(probe, unjudged[0]) + _and_more(unjudged), None)
        if self._gradients is None or wrong:
            kept = (*FIGURES, "complaint")
            self._gradients = {name: GradientErrors(**{key: each[key] for key in kept}) for name, each in gradients.items()}
        if wrong and "outputs" in gradients:
            self.complain("no-gradient", wrong[0], DROP_IN)
        elif wrong:
            where = wrong[0] if size_of(probe) == "own" else _under(probe, wrong[0])
            if probe.startswith("normal"):  # see Candidate.differentiate
                circumstance = "with another forward pass before the backward, from gradients that are not contiguous"
                where = f"on normal inputs, {circumstance} (a kernel needs .contiguous()): {wrong[0]}"
            has_backward = self._text is None or self._text.line_of(checks.CAVEATS["wrong-gradient"].line)
            is_cut = not has_backward and all(complaint.endswith(" is missing") for complaint in wrong)
            self.complain("no-gradient" if is_cut else "wrong-gradient", where + _and_more(wrong), DROP_IN)
        return not wrong

    def _look_for_work(self) -> None:
        probe = next(each for each in OF_MUTANTS[::-1] if not self._referee.prepared(each)["unusable"])
        found: OwnWork = self._ask_on("work", probe)
        reached = f"its own function calls {', '.join(found.reached)}" if found.reached else None
        if reached:
            self.complain("pytorch-inside", reached, None)
        if reached and not found.writes and not found.own_share:
            self._work = replace(found, note=reached)
            return
        wrong = self._decoration(found, probe)
        own = found.builds or found.opened or (found.own_calls and found.own_share)
        label = None if own else "Triton" if found.triton else "no kernel of its own"
        self._work = replace(found, note=wrong or label)
        if wrong:
            self.complain("not-its-own-work", wrong, FORWARD)

    def _decoration(self, found: OwnWork, probe: str) -> str | None:
        if not found.own_calls:
            unbuilt = "the file holds kernels of its own, and none of them was built" if found.means_to_build else None
            return "its own kernels were never called" if found.builds or found.opened else unbuilt
        if found.spoiled and self._compare("outputs", probe, remark=False)["complaint"] is None:
            return "its own kernels do not account for the result, which is right without them"
        return None

    def _probes_to_repeat(self) -> list[str]:
        """Two probes of one size that the variant passed, reduced or else own; uniform outputs come last."""
        names = ("normal", "ramp", "impulse", "large")
        reduced = [name for name in names if name in self._passed and name not in self._left]
        own = [name for name in (*(name + AT_OWN_SIZE for name in names), *checks.FORWARD_PROBES) if name in self._passed]
        pairs = [sorted(group, key=self._uniform.__contains__)[:2] for group in (reduced, own) if len(group) > 1]
        return min(pairs, key=lambda pair: len(self._uniform & set(pair)))

    def _try_out_all(self) -> None:
        first, second = self._probes_to_repeat()
        step = next((name for name in ("step", "step" + AT_OWN_SIZE) if name in self._passed), None)
        for trial in checks.STRESS_TESTS:
            if trial.name == "out_dtype" and not self._referee.float_outputs:
                continue
            after = step if trial.parameters else second
            if after is None:
                self._behaved(trial.name, None, "not run: it takes the probe of an optimiser's step")
                continue
            call = functools.partial(self._try_out, trial.name, {"first": first, "second": after})
            if trial.costs == FORWARD:
                call()
            elif not self._survive(trial.caveat.tag, trial.name, call):
                self._behaviour[trial.name] = Entry(complaint=self.complaints[-1].text)

    def count_mutants(self) -> None:
        """How many wrong versions of the original fail the probes that this variant passed."""
        gradients = bool(self._gradients) and not isinstance(self._gradients, Unsupported)
        skipped = (*checks.FRESH, checks.OF_SEEDS, *(name + size for name in ("autocast", EVAL) for size in ("", AT_OWN_SIZE)))
        probes = tuple(name for name in self._passed if name not in skipped)
        score = self._referee.mutants(probes, gradients and not self._has(*OF_GRADIENTS), self._declared)
        rejected = f"{score['rejected']}/{score['counted']}"
        self._mutants = {"mutants_rejected": rejected, "mutants_survived": score["survivors"]}

    def _try_out(self, trial: str, probes: dict[str, str]) -> None:
        files = {position: self._referee.inputs(probe) for position, probe in probes.items()}
        done: TriedOut = self._ask("try_out", trial=trial, **files)
        if trial == "a CUDA graph" and (done.note or "").startswith("raises") and self._renew:
            self.worker = self._renew()  # where a capture failed, torch's generator draws other numbers from a seed
        title = checks.SHOWN.get(trial, trial)
        complaint = done.complaint and f"{title}: {done.complaint}"
        if done.of in probes and not complaint:
            compared = self._compare("outputs", probes[done.of])
            complaint = compared["complaint"] and f"{title}: {compared['complaint']}"
            if compared["unjudged"]:
                self.complain("not-judged", complaint, None)
                return self._behaved(trial, None, compared["complaint"])
            if complaint and trial == "a CUDA graph":
                if self._has("default-stream"):  # its memory is as the last call left it
                    return self._behaved(trial, None, f"{compared['complaint']}: it holds no launches on the default stream")
                if self._compare("outputs", probes["first"])["complaint"] is None:
                    return self.complain("remembers", f"{trial}: a replay gives the result of an earlier call", FORWARD)
        elif trial in self._referee.side_effects:
            reason = "bits differ, as the original's do" if trial == "run to run" else "the original does not run either"
            return self._behaved(trial, None, reason if complaint else done.note)
        self._behaved(trial, complaint, done.note)


def _under(probe: str, complaint: str) -> str:
    circumstance = check_of(probe).said
    return f"{circumstance}: {complaint}" if circumstance else complaint


def _and_more(complaints: Sequence[str]) -> str:
    return f", and {len(complaints) - 1} more" if len(complaints) > 1 else ""


def _figures(comparison: dict[str, Any]) -> dict[str, Any]:
    return {key: comparison[key] for key in FIGURES}


def _worse(one: Errors, other: Errors) -> Errors:
    def share(errors: Errors) -> float:
        return math.inf if errors.max_error is None else errors.max_error / (errors.allowed or 1)

    return other if one.max_error is None or share(other) >= share(one) else one
