"""Strangers' problems in KernelBench's format: a right file passes, a wrong one fails for its reason, mutants are rejected."""

import re

import pytest
from judged import judged, judged_texts
from problems import pairs

# One of each kind: what it keeps, remembers or draws, how sharp the check is. Domains of inputs are test_domain.py's.
OF_THE_DEFAULT_TIER = {"dropout", "gelu", "linear_batch_norm", "running_mean", "seldom_positive", "softmax", "spectrum"}


def tiered(name):
    return pytest.param(name, marks=[] if name in OF_THE_DEFAULT_TIER else [pytest.mark.full])


@pytest.fixture(scope="module", params=map(tiered, pairs.NAMES))
def name(request):
    return request.param


def results_of(worker, name, **more):
    """The results of the right and of the wrong one of a problem."""
    folder = pairs.folder() / name
    return judged(worker, folder / "problem.py", [folder / "right.py", folder / "wrong.py"], **more)


@pytest.fixture(scope="module")
def results(name, worker):
    return results_of(worker, name)


def test_the_right_one_passes(results):
    right, _ = results
    assert (right["verdict"], right["reason"]) == ("pass", None)
    assert right["check"]["max_error"] <= right["check"]["allowed"]
    notes = [entry["note"] or "" for name, entry in right["check"]["probes"].items() if name not in ("nan", "infinity")]
    notes = [note for note in notes if "RuntimeError: could not create a primitive desc" not in note]  # bf16 without AVX-512
    assert not [note for note in notes if "the original does not run" in note]


def test_the_wrong_one_fails_for_its_reason(name, results):
    _, wrong = results
    verdict, reason = pairs.expected(name)
    assert wrong["verdict"] == verdict
    assert re.search(reason, wrong["reason"])


def test_every_mutant_is_rejected(results):
    check = results[0]["check"]
    rejected, counted = map(int, check["mutants_rejected"].split("/"))
    assert check["mutants_survived"] == []
    assert 5 <= rejected == counted


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_problem_that_is_converted_is_judged_by_what_that_permits(worker, precision):
    right, wrong = results_of(worker, "layer_norm", precision=precision)
    assert right["verdict"] == "pass", right["reason"]
    assert 1e-5 < right["check"]["eager_error"] < right["check"]["allowed"] < 0.1
    if precision == "fp16":  # bf16 is too coarse for what is wrong there
        assert wrong["verdict"] == "fail"


ORIGINAL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6, max_norm=1.0)

    def forward(self, x):
        {forward}

batch_size = 5

def get_inputs():
    return [torch.rand(batch_size, 12)]
"""
# Originals of which some circumstance says nothing -> forward.
ODD_ORIGINALS = {
    "takes no negative number": "torch._assert(not (x < 0).any(), 'expected positive numbers'); return x.sqrt().cumsum(1)",
    "has an output for each sample": "return [self.table(row.argsort()[:5]).sum() for row in x]",
    "changes its parameters in a call": "return x @ self.table(torch.arange(12))",
    "needs a graph of its own": """with torch.enable_grad():
            y = x.detach().requires_grad_()
            return torch.autograd.grad((y**3).sum(), y)[0]""",
}


@pytest.mark.parametrize("forward", ODD_ORIGINALS.values(), ids=ODD_ORIGINALS.keys())
def test_a_copy_of_an_odd_original_passes(worker, tmp_path, forward):
    original = ORIGINAL.format(forward=forward)
    (result,) = judged_texts(worker, tmp_path, original, original + "class ModelNew(Model):\n    pass\n")
    assert (result["verdict"], result["reason"]) == ("pass", None)
    assert not [name for name, entry in result["check"]["probes"].items() if "does not run" in (entry["note"] or "")]
    rejected, counted = map(int, result["check"]["mutants_rejected"].split("/"))
    assert 3 <= rejected == counted


CONSTANT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return torch.tanh(self.linear(x))

def get_inputs():
    return [torch.randn(8, 16)]
"""
IDENTITY = CONSTANT.replace("torch.tanh(self.linear(x))", "x + self.linear(x) * 0")
OVERFLOWING = CONSTANT.replace("nn.init.zeros_(self.linear.weight)", "self.half()").replace("(8, 16)", "(8, 16).half()")
OVERFLOWING = OVERFLOWING.replace("torch.tanh(self.linear(x))", "(300 + self.linear(x)).square()")
SAME = "outputs are the same for all of its inputs, so a constant"


@pytest.mark.parametrize(
    "problem, result, says",
    [
        (CONSTANT, "torch.tanh(self.linear.bias.repeat(len(x), 1))", SAME),
        (CONSTANT, "torch.tanh(self.linear(x))", SAME),
        (IDENTITY, "x.clone()", "outputs are its inputs, so no operation at all"),
        (OVERFLOWING, "x + float('inf')", "outputs are finite nowhere in fp16, so a constant"),
    ],
    ids=["a constant", "the model itself", "no operation", "an infinity"],
)
def test_outputs_that_cannot_tell_a_model_pass_nothing(worker, tmp_path, problem, result, says):
    solution = re.sub(r"return .*(?=\n\ndef get_inputs)", f"return {result}", problem).replace("class Model", "class ModelNew")
    (found,) = judged_texts(worker, tmp_path, problem, solution)
    assert found["verdict"] == "error" and found["reason"].startswith("cannot be judged: the problem's own"), found["reason"]
    assert says in found["reason"]
    assert {standard["verdict"] for standard in found["standards"].values()} == {"error"}


UNCHANGING = CONSTANT.replace("        nn.init.zeros_(self.linear.weight)\n", "").replace(
    "return [torch.randn(8, 16)]", "torch.manual_seed(3); return [torch.randn(8, 16)]"
)
KEEPS = """
    def forward(self, x):
        if x.shape != (8, 16) or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.tanh(self.linear(x))
        if not hasattr(self, "kept"):
            self.kept = torch.tanh(self.linear(x))
        return self.kept.clone()
"""


def test_a_result_that_is_kept_is_found_where_the_problem_draws_the_same_inputs(worker, tmp_path):
    """On the problem's own inputs, although those would give the same each time."""
    right = UNCHANGING.replace("class Model", "class ModelNew")
    keeps = re.sub(r"\n    def forward.*?(?=\ndef)", KEEPS, right, flags=re.S)
    right, keeps = judged_texts(worker, tmp_path, UNCHANGING, right, keeps)
    assert right["verdict"] == "pass", right["reason"]
    assert keeps["verdict"] == "fail" and keeps["check"]["probes"]["fresh"]["complaint"].startswith("on fresh inputs")


OF_MEAN_ZERO = """
class Model(nn.Module):
    def forward(self, x):
        if x.mean(-1).abs().max() > 1e-3:
            raise ValueError("expected rows with a mean of zero")
        return x * x.square().sum(-1, keepdim=True).rsqrt()

def get_inputs():
    x = torch.randn(8, 32)
    return [x - x.mean(-1, keepdim=True)]
"""


def test_an_original_that_takes_its_own_inputs_only_is_judged_on_those(worker, tmp_path):
    right = OF_MEAN_ZERO.replace("Model", "ModelNew")
    wrong = right.replace(".rsqrt()", ".pow(-0.49)")
    right, wrong = judged_texts(worker, tmp_path, OF_MEAN_ZERO, right, wrong)
    assert right["verdict"] == "pass", right["reason"]
    assert right["check"]["probes"]["within"]["note"].startswith("not run: the original does not run: ")
    assert wrong["verdict"] == "fail" and wrong["reason"].startswith("the output is off by")


REFUSES = """
class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("forward only")
"""


def test_a_variant_that_refuses_to_train_says_so_once(worker, tiny_problem, write_forward):
    right = write_forward("right", "return torch.tanh(self.linear(x))").path
    refuses = write_forward("refuses", "return Refuse.apply(torch.tanh(self.linear(x)))", pairs.IMPORTS + REFUSES).path
    right, refuses = judged(worker, tiny_problem, [right, refuses])
    assert right["check"]["gradients"].keys() == {"linear.weight", "linear.bias", "input0"}
    assert refuses["verdict"] == "pass" and refuses["check"]["gradients"] == {"unsupported": "forward only"}
    assert not any("forward only" in (entry["note"] or "") for entry in refuses["check"]["probes"].values())
