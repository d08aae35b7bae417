"""Results and documents as the driver writes them: JSON, of which `read` makes what the reports take."""

from playground.report import suite
from playground.run_record import load_document, load_result
from playground.serial import dump

RATIOS = {"eager": 79.6, "channels_last": 64.3, "compile": 49.37, "eager_fp32": 79.6, "compile_fp32": 50.2}
# What there is not of a result that was not timed.
UNTIMED = dict.fromkeys(("time_ms", "speedup", "training", "peak_mib", "outcome"))
UNTIMED |= dict.fromkeys(("rounds", "calls", "rechecked", "back_to_back_ms")) | {"baselines_ms": {}}


def read(document):
    """The run_record.Document of a document in JSON."""
    return load_document(dump(document))


def read_result(result):
    return load_result(dump(result))


def summarised(document, unsolved=()):
    """The "suite" of a document of pairs, in JSON."""
    return dump(suite.summarise(read(document), unsolved))


def own_work(**known):
    """What a check says of a variant's own work."""
    found = {"builds": [], "opened": [], "means_to_build": True, "triton": False, "own_calls": 1, "spoiled": True}
    return found | {"kernels": [], "own_share": None, "note": None} | known


def spread(median):
    return {"median": median, "p20": 0.99 * median, "p80": 1.02 * median}


def timings(median, peak_mib, scale=1.0):
    """What is known of forward, or of a training mode. The best baseline is torch.compile."""
    best = scale * RATIOS["compile"]
    return {
        "outcome": {
            "verdict": "win" if best > 1 else "loss",
            "against": "compile",
            **{"ratio": best, "low": 0.99 * best, "high": 1.01 * best},
            "precise": True,
            "any_precision": None,
            "reason": None,
        },
        "control": {"ratio": 1.0, "low": 0.99, "high": 1.01},
        **{"rounds": 9, "calls": 41, "rechecked": 2, "back_to_back_ms": 0.9 * median},
        "clocks": None,
        "notes": [],
        "time_ms": spread(median),
        "peak_mib": peak_mib,
        **{"speedup_proof": None, "outer": None},
        "speedup": {
            name: {"ratio": scale * ratio, "low": 0.99 * scale * ratio, "high": 1.01 * scale * ratio}
            for name, ratio in RATIOS.items()
        },
        "baselines_ms": {name: spread(scale * ratio * median) for name, ratio in RATIOS.items()},
    }


def error(max_error, allowed=2.4e-5, eager_error=1.2e-5):
    return {"max_error": max_error, "allowed": allowed, "eager_error": eager_error}


def of_gradient(max_error):
    is_right = max_error is not None and max_error <= 2.4e-5
    return error(max_error) | {"complaint": None if is_right else "the gradient is off"}


def make_passed(model, variant, median=0.142, inputs=(128, 8, 384, 384), settings=None, ran_on="cuda"):
    return {
        "model": model,
        "variant": variant,
        "backend": "cpu" if variant.startswith("cpu_") else "cuda",
        "ran_on": ran_on,
        "precision": "tf32",
        "variant_precision": None,
        "shape": {"inputs": [list(inputs)], "settings": settings or {}},
        "verdict": "pass",
        "reason": None,
        "details": "",
        "standard": "drop-in",
        "standards": {name: {"verdict": "pass", "reasons": []} for name in ("forward", "drop_in")},
        "caveats": [],
        "accuracy": {"class": "as PyTorch", "error": 1.1e-5, "limit": 2.4e-5},
        "weights": "by name",
        "weights_differ": None,
        "printed": "",
        "accepted_races": {},
        "findings": [],
        "source_sha256": "0" * 64,
        "check": {
            **error(1.1e-5),
            "gradients": {"conv.weight": of_gradient(3.21e-6), "conv.bias": of_gradient(0.0), "input0": of_gradient(2.2e-5)},
            "mutants_rejected": None,
        },
        "build_seconds": 6.7,
        "built": True,
        **timings(median, 613.25),
        "baselines_unavailable": {},
        "floor_ms": 0.139,
        "floor_bound": "memory",
        "graphed": None,
        **{"ptxas": None, "work": None, "ceilings": None},
        "training": {"weights": timings(4.567, 1230.0, scale=0.11), "weights_and_input": timings(5.1, 2400.0, scale=0.1)},
    }


def not_passed(verdict, reason, **changes):
    result = make_passed(**changes)
    result.update(UNTIMED, verdict=verdict, reason=reason)
    if verdict == "fail":
        result["check"].update(max_error=0.123456, gradients={"conv.weight": of_gradient(0.5), "conv.bias": of_gradient(None)})
    else:
        result.update(check=None, build_seconds=None, built=False, floor_ms=None, floor_bound=None)
    return result


def make_environment():
    return {
        "date": "2026-11-20T12:34:56+00:00",
        "gpu": "NVIDIA H200",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "driver": "580.95.05",
    }


def document_of(*results, **environment):
    return {"schema": 1, "environment": make_environment() | environment, "results": list(results)}
