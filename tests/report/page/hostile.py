"""A document and files full of hostile texts, each place with a number of its own."""

import copy
import itertools

from made import UNTIMED, document_of, make_passed, own_work

MARKUP = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>]]></style></pre></svg><!-- {{ 7 * 7 }} {% raw %} &amp; $\\frac{"
)
INVISIBLE = "\x00\x07\x1b[31m\u202e\u2066\u200b\ufeff\ud800"


class Canaries:
    """Hostile texts that can be told from each other."""

    def __init__(self):
        self._numbers = itertools.count(1)
        self.names = []

    def text(self):
        name = f"canary{next(self._numbers)}."
        self.names.append(name)
        return f"{name}{MARKUP}{INVISIBLE}"


def document():
    """(document, names of all canaries in it)."""
    canaries = Canaries()
    right = make_passed(canaries.text(), canaries.text())
    text = canaries.text
    right["check"]["gradients"] = {text(): right["check"]["gradients"]["conv.bias"]}
    right["check"]["probes"] = {
        text(): {"max_error": 1e-5, "eager_error": 1e-5, "allowed": 2e-5, "note": text(), "complaint": None}
    }
    right["check"]["behaviour"] = {text(): {"note": None, "complaint": text()}}
    right["check"]["work"] = own_work(own_share=0.5, kernels=[{"name": text(), "calls": 1, "microseconds": 1.0}])
    right["check"].update(mutants_rejected="1/2", mutants_survived=[text()])
    right["notes"] = [text()]
    right["baselines_unavailable"] = {"compile": text()}
    right["shape"]["settings"] = {"batch_size": text()}
    right["ptxas"] = {
        "sm_90a": [{"name": text(), "registers": 1, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0}]
    }
    right["work"] = {kind: {"bytes": 1e6, "flops": 1e9} for kind in ("least", "as_written")}
    right["ceilings"] = dict.fromkeys(("read_bytes_per_second", "copy_bytes_per_second", "fp32_flops"), 1e12) | {
        "tf32_flops": None
    }
    wrong = copy.deepcopy(right) | {"variant": text(), "verdict": "fail", "reason": text(), "details": text()}
    wrong |= {"findings": [text()], "ptxas": {"unknown": text()}, "precision": text(), "work": None} | UNTIMED
    surroundings = {"gpu": text(), "git": {"commit": text()}, "gpus": [{"name": text()}]}
    return document_of(right, wrong, **surroundings), canaries.names
