"""The checks of one variant, from the driver's side: what is asked of which worker, and what verdict follows."""

from pathlib import Path

from playground.judge.behaviour import Conduct, Trials
from playground.judge.probes import AT_OWN_SIZE, PROBES, size_of

FIGURES = ("max_error", "allowed", "eager_error", "permitted_error")  # of a comparison
REFUSES = "refuses: "  # begins the note of a probe on which the variant raises an exception
# How a complaint about a probe begins; those of the problem's own size need no such words.
CIRCUMSTANCES = {
    "normal": "on normal inputs",
    "impulse": "with one non-zero element",
    "ramp": "on a ramp",
    "large": "on inputs of about 100000",
    "small": "on inputs of about 0.001",
    "nan": "with a NaN in one sample",
    "infinity": "with an infinity in one sample",
    "batch 1": "at batch size 1",
    "odd sizes": "at odd sizes",
    "step": "after an optimiser's step",
    "weights": "with weights 8 times as large",
    "autocast": "under autocast",
}


def judge(worker, truth, result, limit):
    """Every check of the variant that `worker` has loaded. Sets the verdict in `result` when something is wrong."""
    result["check"] = blank_check()
    case = _Case(worker, truth, result, limit)
    try:
        for check in (case.probe_all, case.look_for_work, case.try_out_all, case.count_mutants):
            check()
            if result["verdict"]:
                return
    finally:
        case.close()


def blank_check():
    """What is known before anything was checked."""
    figures = dict.fromkeys((*FIGURES, "gradients", "mutants_rejected"))
    return figures | {"probes": {}, "behaviour": {}, "work": None}


class _Case:
    """One variant before the court."""

    def __init__(self, worker, truth, result, limit):
        self._worker = worker
        self._truth = truth
        self._result = result
        self._check = result["check"]
        self._limit = limit
        self._declared = result["variant_precision"]
        self._outputs = str(truth.folder / f"outputs-{worker.pid}")
        watched = ("build", "launch") if result["ran_on"] == "cuda" else ("build",)
        for check in (*Conduct.CHECKS, *watched):
            self._check["behaviour"][check] = {"complaint": None, "note": None}

    def close(self):
        Path(self._outputs).unlink(missing_ok=True)

    def _ask(self, what, **arguments):
        Path(self._outputs).unlink(missing_ok=True)  # what an earlier call wrote is no answer
        return self._worker.ask(f"candidate.{what}", self._limit, outputs=self._outputs, **arguments)

    def _compare(self, what, probe, **more):
        return self._truth.compare(what, probe, self._outputs, self._declared, **more)

    def _fail(self, reason):
        give(self._result, "fail", reason)

    def probe_all(self):
        for probe in PROBES:
            if self._refuses_reduced and size_of(probe) == "reduced":
                probe += AT_OWN_SIZE
            self._probe(probe, probe in ("own", "scaled"))
            if probe == "normal" and self._refuses_reduced:
                self._probe(probe + AT_OWN_SIZE, False)
            if self._result["verdict"]:
                return

    @property
    def _refuses_reduced(self):
        return ((self._check["probes"].get("normal") or {}).get("note") or "").startswith(REFUSES)

    def _probe(self, probe, required):
        """Outputs on one probe, and gradients where it has any. A probe that is not required may be refused."""
        prepared, inputs = self._truth.prepared(probe), self._truth.inputs(probe)
        if prepared["unusable"]:
            return self._note_probe(probe, f"not run: {prepared['unusable']}")
        ran = self._ask("run", inputs=inputs, poison=probe != "own", may_refuse=not required)
        if ran["refused"]:
            return self._note_probe(probe, f"{REFUSES}{ran['refused']}")
        if required:
            self._result["peak_mib"] = ran["peak_mib"]
        self._heed(ran["complaints"])
        compared = self._compare("outputs", probe)
        entry = self._check["probes"][probe] = _figures(compared) | {"note": compared.get("note")}
        entry["complaint"] = compared["complaint"] and _under(probe, compared["complaint"])
        if required:
            _keep_worst(self._check, compared)
        if entry["complaint"] and not self._result["verdict"]:
            return self._fail(entry["complaint"])
        if prepared["differentiable"] and not self._result["verdict"]:
            return self._differentiate(probe)
        return None

    def _note_probe(self, probe, note):
        self._check["probes"][probe] = dict.fromkeys((*FIGURES, "complaint")) | {"note": note}

    def _heed(self, complaints):
        """What a call did besides, unless the original does it too."""
        for check, reason in complaints.items():
            if check not in self._truth.habits:
                self._behaved(check, reason, None)

    def _behaved(self, check, complaint, note):
        if self._check["behaviour"].get(check, {}).get("complaint"):
            return
        self._check["behaviour"][check] = {"complaint": complaint, "note": note}
        if complaint and not self._result["verdict"]:
            self._fail(complaint)

    def _differentiate(self, probe):
        answer = self._ask("differentiate", inputs=self._truth.inputs(probe))
        if answer["unsupported"]:
            if self._check["gradients"] is None:
                self._check["gradients"] = {"unsupported": answer["unsupported"]}
            else:
                self._check["probes"][probe]["note"] = f"no gradients: {answer['unsupported']}"
            return
        gradients = self._compare("gradients", probe)
        decided = [name for name, comparison in gradients.items() if comparison.pop("decided")]
        if decided and not self._check["probes"][probe]["note"]:
            self._check["probes"][probe]["note"] = f"near decisions move the gradient of {', '.join(decided)}"
        if self._check["gradients"] is None or any(comparison["complaint"] for comparison in gradients.values()):
            self._check["gradients"] = gradients
        in_training = self._compare("outputs", probe)
        for comparison in [*gradients.values(), in_training]:
            if comparison["complaint"]:
                return self._fail(_under(probe, comparison["complaint"]))

    def look_for_work(self):
        """Whether code of the variant's own runs, and accounts for the result, at the size at which it is timed."""
        probe = "scaled"
        found = self._ask("work", inputs=self._truth.inputs(probe))
        wrong = self._decoration(found, probe)
        own = found["builds"] or found["own_share"]
        label = None if own else "Triton" if found["triton"] else "no kernel of its own"
        self._check["work"] = found | {"note": wrong or label}
        if wrong:
            self._fail(wrong)

    def _decoration(self, found, probe):
        """Why the variant's kernels are for show; None where they are not, or where it has none."""
        if not found["builds"] and not found["own_share"]:
            return "the file holds kernels of its own, and none of them was built" if found["means_to_build"] else None
        if found["builds"] and not found["own_calls"]:
            return "its own kernels were never called"
        if found["spoiled"] and self._compare("outputs", probe, remark=False)["complaint"] is None:
            return "its own kernels do not account for the result: it is right without theirs, too"
        return None

    def _probe_to_repeat(self, but=None):
        """A probe at the reduced size that the variant passed, else one of the problem's own size."""
        passed = [name for name, entry in self._check["probes"].items() if entry["max_error"] is not None]
        likely = [name + ending for ending in ("", AT_OWN_SIZE) for name in ("normal", "ramp", "impulse")]
        reduced = [name for name in likely if name in passed and name != but]
        return reduced[0] if reduced else next(name for name in ("own", "scaled") if name in passed and name != but)

    def try_out_all(self):
        first = self._probe_to_repeat()
        second = self._probe_to_repeat(but=first)
        for trial in Trials.NAMES:
            self._try_out(trial, {"first": first, "second": second})
            if self._result["verdict"]:
                return

    def count_mutants(self):
        """How many wrong versions of the original fail the probes that this variant passed."""
        passed = [name for name, entry in self._check["probes"].items() if entry["max_error"] is not None]
        gradients = bool(self._check["gradients"]) and "unsupported" not in self._check["gradients"]
        probes = tuple(name for name in passed if not name.startswith("autocast"))
        score = self._truth.mutants(probes, gradients, self._declared)
        self._check["mutants_rejected"] = f"{score['rejected']}/{score['counted']}"
        self._check["mutants_survived"] = score["survivors"]

    def _try_out(self, trial, probes):
        files = {position: self._truth.inputs(probe) for position, probe in probes.items()}
        done = self._ask("try_out", trial=trial, **files)
        complaint = done["complaint"] and f"{trial}: {done['complaint']}"
        if done["of"] in probes and not complaint:
            compared = self._compare("outputs", probes[done["of"]])
            complaint = compared["complaint"] and f"{trial}: {compared['complaint']}"
        elif trial in self._truth.habits:
            return self._behaved(trial, None, "bits differ, as the original's do" if complaint else done["note"])
        self._behaved(trial, complaint, done["note"])


def _under(probe, complaint):
    circumstance = CIRCUMSTANCES.get(probe.removesuffix(AT_OWN_SIZE))
    return f"{circumstance}: {complaint}" if circumstance else complaint


def _figures(comparison):
    return {key: comparison[key] for key in FIGURES}


def _keep_worst(check, comparison):
    """The probe of the problem's own size that is nearest to (or furthest over) what is allowed counts."""

    def share(errors):
        return errors["max_error"] / errors["allowed"] if errors["allowed"] else errors["max_error"]

    if check["max_error"] is None or comparison["max_error"] is None or share(comparison) >= share(check):
        check.update(_figures(comparison))


def give(result, verdict, reason, details=""):
    """Set the verdict of a result."""
    result.update(verdict=verdict, reason=reason, details=details)


def give_failure(result, failure):
    """A variant that ends a request without a result has an error; one in which the emulator finds a mistake has failed."""
    if failure.is_finding:
        give_findings(result, [str(failure)])
    else:
        give(result, "error", str(failure), failure.details)


def give_findings(result, findings):
    """Mistakes that were seen in the variant's kernels, one line each, are the verdict."""
    result["findings"] += findings
    result["check"] = result["check"] or blank_check()
    give(result, "fail", findings[0])


def give_examination(result, examination):
    """Keep what compute-sanitizer saw; what it found is the verdict."""
    result["sanitizer"] = examination.as_dict()
    if examination.findings:
        give_findings(result, examination.findings)


def give_doubt(result):
    """A variant that was to be sanitized and could not be has an error, however right its results are."""
    problem = (result["sanitizer"] or {}).get("problem")
    if problem:
        give(result, "error", f"compute-sanitizer: {problem}")
