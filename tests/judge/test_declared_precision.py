"""A variant that says it computes in less than float32 is labelled. One that does not say so: the exhibit `float16_inside`.

Where outputs in 16 bits would say nothing, its float32 result is judged.
"""

import pytest
from judged import judged, judged_texts

from playground.worker import WorkerFailure, WorkerProcess
from tests.conftest import TINY_SOLUTION

VARIANT = TINY_SOLUTION.replace("    def __init__", '    precision = "{declared}"\n\n    def __init__').format(
    declared="{declared}",
    forward="return torch.tanh((x.{dtype}().float() @ self.linear.weight.{dtype}().float().T + self.linear.bias).contiguous())",
)


@pytest.fixture(scope="module")
def results(worker, tiny_problem, write_variant):
    """{(precision declared, type computed in): result}."""
    cases = [("bf16", "bfloat16"), ("fp16", "bfloat16"), ("bf16", "half"), ("fp16", "half")]
    files = []
    for i, (declared, dtype) in enumerate(cases):
        files.append(write_variant(f"declared_{i}", VARIANT.format(declared=declared, dtype=dtype)).path)
    return dict(zip(cases, judged(worker, tiny_problem, files), strict=True))


@pytest.mark.parametrize("declared, dtype", [("bf16", "bfloat16"), ("fp16", "half")])
def test_declared_it_passes_with_a_label(results, declared, dtype):
    result = results[declared, dtype]
    assert (result["verdict"], result["reason"], result["variant_precision"]) == ("pass", None, declared)


def test_other_than_declared_fails(results):
    """bf16 has fewer digits than fp16, and fp16 has less range than bf16."""
    assert "off by" in results["fp16", "bfloat16"]["reason"]
    assert "on inputs of about" in results["bf16", "half"]["reason"]


SUM = """
class {kind}(nn.Module):
    {attribute}
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)
    def forward(self, x):
        {body}
"""
OF_PYTORCH = "return (256 * torch.sigmoid(self.linear(x))).sum(dim=(1, 2))"
IN_FLOAT = (
    "y = nn.functional.linear(x.float(), self.linear.weight.float(), self.linear.bias.float())\n"
    "        total = (256 * torch.sigmoid(y{rows})).sum(dim=(1, 2))\n        return {result}"
)
SUMS = (
    SUM.format(kind="Model", attribute="", body=OF_PYTORCH)
    + """
def get_inputs():
    return [torch.rand(4, 64, 16)]
def get_init_inputs():
    return []
"""
)
AS_ASKED = "total if self.out_dtype else total.to(x.dtype)"
OF_SUMS = (  # right; of no choice; rounded otherwise; a row left out
    ("out_dtype = None", IN_FLOAT.format(rows="", result=AS_ASKED)),
    ("", OF_PYTORCH),
    ("out_dtype = None", IN_FLOAT.format(rows="", result=f"{AS_ASKED} * 0")),
    ("out_dtype = None", IN_FLOAT.format(rows="[:, 1:]", result=AS_ASKED)),
)


@pytest.mark.parametrize(
    "precision, why", [("fp16", "in fp16 the original's outputs are finite nowhere"), ("bf16", "rounding")]
)
def test_what_16_bits_would_not_show_is_judged_in_float32(worker, tmp_path, precision, why):
    solutions = [SUM.format(kind="ModelNew", attribute=attribute, body=body) for attribute, body in OF_SUMS]
    found = judged_texts(worker, tmp_path, SUMS, *solutions, precision=precision)
    right, of_no_choice, rounded_otherwise, row_left_out = found
    assert (right["verdict"], right["reason"]) == ("pass", None)
    assert any(each["tag"] == "out-dtype" and why in each["text"] for each in right["caveats"])
    rejected, counted = right["check"]["mutants_rejected"].split("/")
    assert rejected == counted != "0"
    assert of_no_choice["verdict"] == "error" and why in of_no_choice["reason"]
    assert "give ModelNew an attribute out_dtype" in of_no_choice["reason"]
    assert "is not the float32 one, rounded" in rounded_otherwise["reason"]
    assert "off by" in row_left_out["reason"]


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
