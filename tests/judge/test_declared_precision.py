"""A variant that says it computes in less than float32 is labelled. One that does not say so: the exhibit `float16_inside`."""

import pytest
from judged import judged, one_worker

from playground.worker import WorkerFailure, WorkerProcess
from tests.conftest import TINY_SOLUTION

VARIANT = TINY_SOLUTION.replace("    def __init__", '    precision = "{declared}"\n\n    def __init__').format(
    declared="{declared}",
    forward="return torch.tanh((x.{dtype}().float() @ self.linear.weight.{dtype}().float().T + self.linear.bias).contiguous())",
)


@pytest.fixture(scope="module")
def results(tiny_problem, write_variant):
    """{(precision declared, type computed in): result}."""
    cases = [("bf16", "bfloat16"), ("fp16", "bfloat16"), ("bf16", "half"), ("fp16", "half")]
    files = []
    for i, (declared, dtype) in enumerate(cases):
        files.append(write_variant(f"declared_{i}", VARIANT.format(declared=declared, dtype=dtype)).path)
    with one_worker() as worker:
        return dict(zip(cases, judged(worker, tiny_problem, files), strict=True))


@pytest.mark.parametrize("declared, dtype", [("bf16", "bfloat16"), ("fp16", "half")])
def test_declared_it_passes_with_a_label(results, declared, dtype):
    result = results[declared, dtype]
    assert (result["verdict"], result["reason"], result["variant_precision"]) == ("pass", None, declared)


def test_other_than_declared_fails(results):
    """bf16 has fewer digits than fp16, and fp16 has less range than bf16."""
    assert "off by" in results["fp16", "bfloat16"]["reason"]
    assert "on inputs of about" in results["bf16", "half"]["reason"]


SEES = """
import torch
seen = [torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision]
class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        raise RuntimeError(f"sees {seen}")
"""


def test_an_unknown_precision_is_refused_and_under_precision_strict_variants_see_strict_settings(tiny_problem, write_variant):
    unknown = write_variant("int4", VARIANT.format(declared="int4", dtype="float"))
    original = {"problem": str(tiny_problem), "settings": {}, "place": "cpu", "seed": 1, "weights": None}
    with WorkerProcess("candidate", 60) as worker:
        with pytest.raises(WorkerFailure, match="is 'int4'; expected 'fp32' or one of tf32, fp16, bf16"):
            worker.ask("load", **original, variant=str(unknown.path))
        with pytest.raises(WorkerFailure, match=r"sees \['ieee', 'ieee'\]"):
            worker.ask("load", **original, variant=str(write_variant("sees", SEES).path), strict=True)
