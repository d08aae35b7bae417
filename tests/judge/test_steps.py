"""Numbers that were rounded to steps (integers, float8), and problems in 16 bits: what is right, and what it is called."""

import pytest
import torch
from judged import judged_texts, referee_of
from problems import pairs

from playground import catalog, tensors
from playground import compare as compare_in_python
from playground.judge.precision import Nudged
from playground.judge.tolerance import Reference

QUANTISE = """
class Model(nn.Module):
    def forward(self, x):
        scale = x.abs().amax(dim=-1, keepdim=True) / 127.0
        return torch.clamp(torch.round(x / scale), -128, 127).to(torch.int8), scale

def get_inputs():
    return [torch.randn(256, 1024)]
"""
# By the reciprocal of the scale, as is usual: one number in a hundred thousand is rounded the other way.
RECIPROCAL = QUANTISE.replace("x / scale", "x * (1.0 / scale)")
FLOAT8 = """
class Model(nn.Module):
    def forward(self, x):
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

def get_inputs():
    return [torch.randn(16, 128, dtype=torch.bfloat16)]
"""
HALF = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(512) + 0.5)
        self.to(torch.float16)

    def forward(self, x):
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)
        return f.to(x.dtype) * self.weight

def get_inputs():
    return [torch.randn(8, 512, dtype=torch.float16)]
"""
# Each partial sum is kept in float16, as __hadd does it: beyond 65504 it is infinite.
HALF_SUMS = HALF.replace(
    "f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-5)",
    """t = f.pow(2).to(x.dtype)
        while t.shape[-1] > 1:
            t = (t[..., ::2].float() + t[..., 1::2].float()).to(x.dtype)
        f = f * torch.rsqrt(t.float() / 512 + 1e-5)""",
)


def variant(text):
    return text.partition("def get_inputs")[0].replace("class Model(", "class ModelNew(")


@pytest.fixture(scope="module")
def judged(worker, tmp_path_factory):
    """judged(problem, variant's text) -> the result in JSON."""
    return lambda problem, text: judged_texts(worker, tmp_path_factory.mktemp("case"), problem, variant(text))[0]


def tags(result):
    return {each["tag"]: each for each in result["caveats"]}


def test_one_unit_where_rounding_decides_is_a_caveat(judged):
    found = judged(QUANTISE, RECIPROCAL)
    assert found["verdict"] in ("pass", "forward only"), found["reason"]
    assert not any(each["costs"] for tag, each in tags(found).items() if tag == "accuracy")


def test_a_unit_elsewhere_is_wrong_and_said_in_units(judged):
    found = judged(QUANTISE, QUANTISE.replace("torch.round(x / scale)", "torch.floor(x / scale + 0.4999)"))
    assert found["verdict"] == "fail"
    assert "is off by up to 1 in" in found["reason"] and "whole numbers" in found["reason"], found["reason"]


COUNTS = """
class Model(nn.Module):
    def forward(self, x):
        y = x / x.max()
        return torch.bincount((y * 100).floor().clamp(0, 99).long(), minlength=100)

def get_inputs():
    return [torch.rand(1 << 18)]
"""
FLOORS = """
class Model(nn.Module):
    def forward(self, x):
        above = (x > 0.5).float()
        return torch.div(x, 0.037, rounding_mode="floor").int(), above.sum(-1).int()

def get_inputs():
    return [torch.randn(64, 512)]
"""


def test_a_count_may_differ_by_ties_and_by_nothing_else(judged):
    found = judged(COUNTS, COUNTS.replace("x / x.max()", "x * (1.0 / x.max())"))
    assert found["verdict"] in ("pass", "forward only"), found["reason"]
    own = "y = torch.bincount((y * 100).int().clamp(0, 99), minlength=100); y[3] += 1; y[4] -= 1\n        return y"
    found = judged(COUNTS, COUNTS.replace("return torch.bincount((y * 100).floor().clamp(0, 99).long(), minlength=100)", own))
    assert found["verdict"] == "fail" and "off by up to 1 in 2 of 100" in found["reason"], found["reason"]


FIRST = """
class Model(nn.Module):
    def forward(self, x):
        return x.argmax(-1)

def get_inputs():
    return [torch.randn(128, 1024, dtype=torch.bfloat16)]
"""


def test_of_equal_inputs_the_original_s_is_the_index(judged):
    own = "places = torch.arange(x.shape[-1]); return torch.where(x == x.amax(-1, keepdim=True), places, {}).{}(-1)"
    assert judged(FIRST, FIRST.replace("return x.argmax(-1)", own.format(1 << 20, "amin")))["verdict"] == "pass"
    found = judged(FIRST, FIRST.replace("return x.argmax(-1)", own.format(-1, "amax")))
    assert found["verdict"] == "fail" and "whole numbers" in found["reason"], found["reason"]


def test_whole_floats_are_not_cut_by_their_conversion(judged):
    found = judged(FLOORS, FLOORS.replace("above.sum(-1).int()", "(x > 0.5).sum(-1).int()"))
    assert found["verdict"] == "pass", found["reason"]
    for right, wrong in (('"floor"', '"trunc"'), ("above.sum", "above[:, 1:].sum")):
        found = judged(FLOORS, FLOORS.replace(right, wrong))
        assert found["verdict"] == "fail" and "whole numbers" in found["reason"], found["reason"]


def test_float8_outputs_are_compared(judged):
    assert judged(FLOAT8, FLOAT8)["verdict"] == "pass"
    found = judged(FLOAT8, FLOAT8.replace("/ scale)", "/ scale * 1.07)"))
    assert found["verdict"] == "fail" and "off by" in found["reason"]
    found = judged(FLOAT8, FLOAT8.replace("float8_e4m3fn", "float8_e5m2"))
    assert found["verdict"] == "fail" and "float8_e5m2 instead of torch.float8_e4m3fn" in found["reason"]


def test_a_problem_in_16_bits_says_its_type(tmp_path, judged):
    assert judged(HALF, HALF)["verdict"] == "pass"
    made = {name: tmp_path / name for name in ("half", "all")}
    for folder in made.values():
        folder.mkdir()
    half = referee_of(made["half"], HALF)
    assert half.precision == "fp32", "computed in float32 between: by its limits"
    everything = referee_of(made["all"], HALF.replace("f = x.float()", "f = x"))
    assert everything.precision == "fp16"


def test_sums_that_overflow_16_bits_are_found(judged):
    found = judged(HALF, HALF_SUMS)
    assert found["verdict"] != "pass"
    assert "large" in {name for name, probe in found["check"]["probes"].items() if probe["complaint"]}, found["reason"]


CHANGES_SIZE = """
class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def get_inputs():
    return [torch.randn(int(torch.randint(5, 50, ())), 16)]
"""


def test_sizes_that_change_from_draw_to_draw_are_judged(judged):
    assert judged(CHANGES_SIZE, CHANGES_SIZE)["verdict"] in ("pass", "forward only")
    keeps = CHANGES_SIZE.replace("return torch.tanh(x)", "self.y = getattr(self, 'y', torch.tanh(x)); return self.y")
    assert judged(CHANGES_SIZE, keeps)["verdict"] == "fail"


@pytest.mark.parametrize(
    "result, given, says",
    [
        ("x.to_sparse()", "torch.randn(4, 8)", "torch.sparse_coo"),
        ("a @ x", "torch.randn(4, 8).relu().to_sparse_csr(), torch.rand(8, 3)", "torch.sparse_csr"),
        ("torch.nested.nested_tensor([x[:2], x[2:]])", "torch.randn(5, 8)", "that are nested"),
        ("x.view(torch.float4_e2m1fn_x2)", "torch.zeros(4, 8, dtype=torch.uint8)", "torch.float4_e2m1fn_x2"),
    ],
)
def test_what_the_judge_cannot_compare_is_its_own_limit(tmp_path, compare, result, given, says):
    takes = "a, x" if "a @" in result else "x"
    text = f"class Model(nn.Module):\n    def forward(self, {takes}):\n        return {result}\n"
    problem = tmp_path / "problem.py"
    problem.write_text(pairs.whole(f"{text}\ndef get_inputs():\n    return [{given}]\n"))
    (tmp_path / "own.py").write_text(pairs.IMPORTS + text.replace("Model", "ModelNew"))
    status, _, err = compare("--model", problem, "--variant", tmp_path / "own.py", "--device", "cpu", "--check-only")
    (complaint,) = [line for line in err.splitlines() if "internal limit" in line]
    assert status == 2 and complaint.startswith("internal limit: the judge cannot compare tensors") and says in complaint
    with pytest.raises(catalog.CatalogError, match=r"^internal limit: "):
        compare_in_python(problem, tmp_path / "own.py", device="cpu", check_only=True)


def reference(true, eager, *permitted, **more):
    return Reference(true.double() if true.is_floating_point() else true, eager, *permitted, **more)


def test_where_16_bits_overflow_on_the_way_both_are_right():
    true = torch.tensor([1.0, 2.0, 300.0, 1e9])
    eager = torch.tensor([1.0, 2.0, torch.inf, torch.inf], dtype=torch.float16)
    found = reference(true, eager)
    assert found.compare("it", eager).complaint is None
    assert found.compare("it", true.half()).complaint is None, "300 is right, 1e9 is infinite in float16"
    assert "not inf" in found.compare("it", torch.tensor([1.0, 2.0, 200.0, torch.inf]).half()).complaint
    assert "not inf" in found.compare("it", torch.tensor([1.0, 2.0, 300.0, 6e4]).half()).complaint
    wide = reference(true, eager.float())
    assert "not inf" in wide.compare("it", true).complaint, "float32 has no such excuse"


def test_ties_excuse_so_many_units_and_no_more():
    true = torch.tensor([1, 2, 3], dtype=torch.int8)
    found = reference(true, true, decisions=lambda: torch.tensor([0, 1, 0]))
    assert found.compare("it", torch.tensor([1, 3, 3], dtype=torch.int8)).decided
    assert found.compare("it", true).decided is False
    for wrong in ([1, 4, 3], [2, 3, 3]):
        complaint = found.compare("it", torch.tensor(wrong, dtype=torch.int8)).complaint
        assert complaint and "whole numbers" in complaint


def test_what_seldom_moves_excuses_no_other():
    true = torch.zeros(1000, dtype=torch.int8)
    one, other = true.clone(), true.clone()
    one[3], other[4] = 1, 1
    of_fresh = reference(true, true).beside(true, true, lambda: one)
    for found in (reference(true, one), reference(true, true, one), of_fresh):
        assert found.compare("it", one).decided
        assert "off by up to 1 in 1 of 1000 whole numbers" in found.compare("it", other).complaint


def test_what_rounding_moves_in_many_is_excused_only_where_no_tie_says_which():
    true = torch.zeros(1000, dtype=torch.int8)
    many, other = true.clone(), true.clone()
    many[:20], other[500] = 1, 1
    assert reference(true, many).compare("it", other).complaint is None, "as in 16 bits"
    of_ties = reference(true, many, decisions=lambda: many)
    assert of_ties.compare("it", many).decided and of_ties.compare("it", other).complaint
    far = reference(true, many * 100, decisions=lambda: other)
    assert far.is_blunt and not far.compare("it", other).unjudged and far.compare("it", true + 1).unjudged


def test_a_mask_has_ties_and_a_large_number_has_its_last_digit():
    true, other = torch.tensor([True, False, True]), torch.tensor([True, True, True])
    assert reference(true, true, decisions=lambda: torch.tensor([0, 1, 0])).compare("it", other).decided
    assert reference(true, true, decisions=lambda: torch.tensor([0, 0, 1])).compare("it", other).complaint
    large = torch.tensor([1 << 62, 5])
    assert reference(large, large, decisions=lambda: torch.zeros(2)).compare("it", large + 1).complaint


def test_what_is_rounded_is_nudged_before_and_not_behind():
    x = torch.linspace(-3, 3, 1000, dtype=torch.float64)
    with Nudged(0, 24):
        rounded, squared = x.round().clamp(-2, 2).int(), x * x
    assert torch.equal(rounded, x.round().clamp(-2, 2).int()) and not torch.equal(squared, x * x)


def test_which_values_are_steps():
    kinds = {
        torch.int8: True,
        torch.int64: True,
        torch.uint8: True,
        torch.float8_e5m2: True,
        torch.bool: True,
        torch.half: False,
    }
    assert {kind: tensors.in_steps(torch.zeros(2).to(kind)) for kind in kinds} == kinds
    assert tensors.as_real(torch.tensor([3.0]).to(torch.float8_e4m3fn)).dtype == torch.float32
    assert all(tensors.as_real(torch.tensor([3]).to(kind)).max() == 3 for kind in (torch.uint16, torch.uint32, torch.uint64))
