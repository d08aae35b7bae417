"""The reference is float64, and it is the same whether a batch fits into memory or has to be computed in chunks."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from playground.judge.oracle import IN_HOST_MEMORY, PROMOTED, FloatOutputs, NotSeparable, Oracle
from playground.judge.precision import RoundedOperands
from playground.judge.probes import Probe
from playground.judge.sample import ALL
from playground.judge.tolerance import Reference
from tests.kernels import apart

CPU = torch.device("cpu")


class Fits(nn.Module):
    """`model`, on a device that has memory for `largest` samples."""

    def __init__(self, model, largest):
        super().__init__()
        self.model = model
        self.largest = largest

    def forward(self, x, *more):
        if x.shape[0] > self.largest:
            raise torch.OutOfMemoryError(f"no memory for {x.shape[0]} samples")
        return self.model(x, *more)


class Function(nn.Module):
    """A model without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Remembers(nn.Module):
    """Adds a tensor that is a mere attribute, and changes it in each call."""

    def __init__(self):
        super().__init__()
        self.offset = torch.full((3,), 0.1)

    def forward(self, x):
        self.offset = self.offset + 1
        return torch.cat([x, self.offset])


def probe(*inputs, upstream=None):
    wanted = tuple(i for i, value in enumerate(inputs) if value.is_floating_point())
    return Probe("test", list(inputs), upstream, wanted if upstream else ())


def assert_same(outcome, expected):
    assert outcome.gradients.keys() == expected.gradients.keys()
    everything = zip(
        [*outcome.outputs, *outcome.gradients.values()], [*expected.outputs, *expected.gradients.values()], strict=True
    )
    for value, wanted in everything:
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=1e-13)


def test_truth_is_float64_by_hand():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, 1e8]]))
        model.bias.fill_(0.3)
    x = torch.tensor([[0.7, 1.0], [0.2, -1.0]])
    (w0, w1), b = model.weight[0].tolist(), model.bias.item()
    expected = torch.tensor([[w0 * r0 + w1 * r1 + b] for r0, r1 in x.tolist()], dtype=torch.float64)
    oracle = Oracle(model, CPU)
    (truth,) = oracle.reference(probe(x)).outputs
    (eager,) = oracle.eager(probe(x)).outputs
    assert truth.dtype == torch.float64 and eager.dtype == torch.float32
    torch.testing.assert_close(truth, expected, rtol=1e-15, atol=0)
    assert torch.equal(eager, torch.tensor([[1e8], [-1e8]])), "float32 has no room for the small terms"
    assert model.weight.dtype == torch.float32, "the model itself stays as it was"
    assert oracle.ways == set(), "the usual way is not mentioned"


def test_gradients_by_hand():
    model = nn.Linear(2, 1)
    x, upstream = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0], [100.0]])
    gradients = Oracle(model, CPU).reference(probe(x, upstream=[upstream])).gradients
    assert gradients["weight"].tolist() == [[310.0, 420.0]]
    assert gradients["bias"].tolist() == [110.0]
    assert torch.equal(gradients["input0"], upstream.double() * model.weight.detach().double())


def test_few_outputs_are_rounded_in_several_ways_whose_errors_are_of_one_size():
    torch.manual_seed(0)
    oracle, made = Oracle(nn.Linear(512, 3), CPU), probe(torch.randn(4, 512))
    truth = oracle.reference(made).outputs[0]
    errors = torch.stack([(outcome.outputs[0] - truth).square().mean().sqrt() for outcome in oracle.rounded_operands(made)])
    assert len(errors) == len(set(errors.tolist())) == 24
    assert 0 < errors.max() < 3 * errors.min()


@pytest.mark.parametrize("samples", [1, 3, 100])
def test_another_rounding_is_right_however_few_outputs_show_it(samples):
    """Sums over all channels and places: one rounding of the weights moves all outputs the same way."""
    wrong = 0
    for seed in range(20):
        torch.manual_seed(seed)
        model = Function(nn.Sequential(nn.Conv2d(8, 16, 3), nn.Sigmoid(), nn.Flatten(), Function(lambda x: x.sum(1))))
        oracle, made = Oracle(model, CPU, emulated=True), probe(torch.rand(samples, 8, 8, 8))
        truth, permitted = oracle.reference(made).outputs[0], oracle.rounded_operands(made)
        reference = Reference(truth, truth.float(), *(outcome.outputs[0] for outcome in permitted))
        another = oracle._in_float64(made, RoundedOperands(seed=1000 + seed)).outputs[0]
        wrong += reference.compare("the output", another.float()).complaint is not None
    assert wrong == 0


@pytest.mark.parametrize("precision, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("layer", ["norm", "softmax"])
def test_a_layer_in_half_precision_may_be_computed_step_by_step(precision, dtype, layer):
    """Each result of which is rounded: of a norm the mean, which may be much larger than what varies."""

    def norm(x):
        centred = x - x.mean(1, keepdim=True)
        return centred * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()

    def softmax(x):
        each = (x - x.amax(1, keepdim=True)).exp()
        return each / each.sum(1, keepdim=True)

    original, by_hand = {"norm": (nn.LayerNorm(180), norm), "softmax": (nn.Softmax(1), softmax)}[layer]
    wrong = 0
    for seed in range(20):
        torch.manual_seed(seed)
        made = probe((torch.linspace(-0.3, 0.3, 180) + torch.randn(12, 1)).to(dtype))
        oracle = Oracle(original.to(dtype), CPU)
        truth, eager, permitted = oracle.reference(made), oracle.eager(made), oracle.permitted(made, precision)
        reference = Reference(truth.outputs[0], eager.outputs[0], *(outcome.outputs[0] for outcome in permitted))
        wrong += reference.compare("the output", by_hand(*made.inputs)).complaint is not None
    assert wrong == 0


def test_integer_inputs_stay_integers():
    embedding = nn.Embedding(5, 3)
    indices = torch.tensor([[0, 4], [2, 2]])
    (truth,) = Oracle(embedding, CPU).reference(probe(indices)).outputs
    assert torch.equal(truth, embedding.weight.detach().double()[indices])


def network():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(3 * 4 * 5, 2))


@pytest.mark.parametrize("largest", [2, 6])
def test_chunks_give_the_same_as_the_whole(largest):
    model, x, upstream = network(), torch.randn(7, 2, 6, 7), torch.randn(7, 2)
    for what in ("reference", "eager", "rounded"):

        def run(model, what=what):
            oracle, made = Oracle(model, CPU), probe(x, upstream=[upstream])
            return oracle.rounded_operands(made)[0] if what == "rounded" else getattr(oracle, what)(made)

        whole, chunked = run(model), run(Fits(model, largest))
        chunked.gradients = {name.removeprefix("model."): value for name, value in chunked.gradients.items()}
        if what == "eager":  # in float32 the order of the additions shows
            assert chunked.gradients.keys() == whole.gradients.keys()
            for name in whole.gradients:
                torch.testing.assert_close(chunked.gradients[name], whole.gradients[name], rtol=1e-4, atol=1e-5)
        else:
            assert_same(chunked, whole)


def test_every_input_of_the_batch_is_split_and_the_others_are_not():
    model = Fits(Function(lambda x, y, table: {"sum": x + y, "looked up": table.sum() * x}), 2)
    x, y, table = torch.randn(5, 3), torch.randn(5, 3), torch.randn(4)
    outcome = Oracle(model, CPU).reference(probe(x, y, table))
    assert_same(outcome, Oracle(model.model, CPU).reference(probe(x, y, table)))


def test_an_output_that_depends_on_nothing_has_no_gradient():
    model = Fits(Function(lambda x, y: 2 * x), 2)
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    gradients = Oracle(model, CPU).reference(probe(x, y, upstream=[torch.ones(3, 2)])).gradients
    assert gradients["input1"] is None
    assert torch.equal(gradients["input0"], torch.full((3, 2), 2.0, dtype=torch.float64))


SAMPLES_MEET = {
    "batch norm": nn.Sequential(nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1)),
    "batch norm, which refuses a single value": nn.BatchNorm1d(3),
    "mean over the batch": Function(lambda x: x.mean(0)),
    "mean over the batch, kept": Function(lambda x: x.mean(0, keepdim=True)),
    "distance from the mean": Function(lambda x: x - x.mean(0)),
    "a loss": Function(lambda x: x.square().mean()),
    "batch as the second dimension": Function(lambda x: x.T.softmax(1)),
    "similarity of samples": Function(lambda x: x @ x.T),
}


@pytest.mark.parametrize("model", SAMPLES_MEET.values(), ids=SAMPLES_MEET.keys())
def test_a_model_whose_samples_meet_is_not_chunked(model):
    x = torch.randn(6, 3)
    Oracle(Fits(model, 6), CPU).reference(probe(x))
    with pytest.raises(NotSeparable, match="--set"):
        Oracle(Fits(model, 3), CPU).reference(probe(x))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system says itself that there is no memory")
def test_host_memory_that_does_not_hold_the_whole_batch():
    """Linux would end the process; with a limit of its own it computes in chunks."""
    program = """
import os
import torch
from playground.judge.oracle import Oracle
from playground.judge.probes import Probe
from playground.machine import memory

model = torch.nn.Sequential(*[torch.nn.Sigmoid() for _ in range(6)])
x = torch.linspace(-3, 3, 64 << 18).view(64, -1)
probe = Probe("own", [x], upstream=[torch.ones_like(x)], wanted_inputs=(0,))
memory.free_on_host = lambda: 1 << 30  # in float64 the seven tensors of a forward pass take 0.9 GiB, of a backward pass more
whole = Oracle(model, torch.device("cpu")).reference(probe)
memory.limit(os.getpid(), 0.6)
chunked = Oracle(model, torch.device("cpu")).reference(probe)
assert torch.equal(whole.outputs[0], chunked.outputs[0])
(name,) = chunked.gradients
assert torch.equal(whole.gradients[name], chunked.gradients[name])
try:
    torch.empty(1 << 30)
except RuntimeError:
    pass
else:
    raise SystemExit("not limited")
"""
    apart.run(program)


def test_batch_norm_in_evaluation_is_chunked():
    model, x = nn.BatchNorm1d(3).eval(), torch.randn(6, 3)
    assert_same(Oracle(Fits(model, 2), CPU).reference(probe(x)), Oracle(model, CPU).reference(probe(x)))


@pytest.mark.parametrize("largest", [0, 1])
def test_two_samples_must_fit(largest):
    """A chunk is one sample at least, and whether samples meet is seen on two."""
    with pytest.raises(torch.OutOfMemoryError):
        Oracle(Fits(nn.Linear(3, 2), largest), CPU).reference(probe(torch.randn(4, 3)))


class NeedsHostMemory(nn.Module):
    """A linear layer for which a device other than the host has no memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        if x.device.type != "cpu":
            raise torch.OutOfMemoryError("no memory")
        return self.linear(x)


def test_what_does_not_fit_into_the_device_even_one_by_one_is_computed_in_host_memory():
    model, made = NeedsHostMemory(), probe(torch.randn(5, 3))
    oracle = Oracle(model, torch.device("meta"))  # a device that every machine has
    assert_same(oracle.reference(made), Oracle(model, CPU).reference(made))
    assert oracle.ways == {IN_HOST_MEMORY}
    with pytest.raises(torch.OutOfMemoryError):
        Oracle(Fits(model, 0), CPU).reference(made)


def test_tf32_permits_what_rounding_gives_and_strict_what_perturbations_give():
    oracle, made = Oracle(nn.Linear(8, 3), CPU), probe(torch.randn(4, 8))
    assert len(oracle.permitted(made, "fp32")) == 6
    truth = oracle.reference(made).outputs[0]
    for outcome in oracle.permitted(made, "fp32"):
        assert 1e-8 < (outcome.outputs[0] - truth).abs().max() < 1e-5
    for outcome in oracle.lowered(made, "bf16"):
        assert 1e-4 < (outcome.outputs[0] - truth).abs().max() < 1e-1


NEAR, CLEAR = 1 + 2e-7, 1 + 1e-4  # times another value: as near as rounding in float32, and a thousand times as far


def test_the_gradient_of_a_cumulative_product_is_computed_at_once():
    """Element by element, as PyTorch does under a dispatch mode, that of 32,768 columns takes minutes on a GPU."""

    class Counting(RoundedOperands):
        calls = 0

        def __torch_dispatch__(self, *arguments):
            self.calls += 1
            return super().__torch_dispatch__(*arguments)

    x = torch.rand(2, 300) + 0.5
    x[0, 7] = x[1, 100] = x[1, 200] = 0
    oracle = Oracle(Function(lambda x: torch.cumprod(x, dim=1)), CPU)
    made = probe(x, upstream=[torch.rand(2, 300)])
    with Counting() as counting:
        found = oracle.reference(made)
    assert counting.calls < 100
    assert_same(found, oracle.reference(made))
    for outcome in oracle.permitted(made, "fp32"):
        torch.testing.assert_close(outcome.gradients["input0"].double(), found.gradients["input0"], rtol=1e-3, atol=1e-3)


def decided(function, *values):
    """(truth, Oracle.decisions) of the gradients of `function` at `values`, under the upstream gradient 5."""
    x = torch.tensor([values])
    made = probe(x, upstream=[torch.full_like(function(x), 5.0)])
    oracle = Oracle(Function(function), CPU)
    truth = oracle.reference(made)
    return truth.gradients["input0"], oracle.decisions(made, truth)["input0"]


def test_decisions_that_are_as_near_as_rounding_are_found():
    """The window (2, 3) is clear, (5, 5 NEAR) is not: its gradient, 5, may go to either."""
    truth, moved = decided(lambda x: nn.functional.max_pool1d(3 * x, 2), 2.0, 3.0, 5.0, 5 * NEAR)
    assert truth.tolist() == [[0, 15, 0, 15]]
    torch.testing.assert_close(moved, torch.tensor([[0.0, 0, 15, 15]], dtype=torch.float64), atol=1e-8, rtol=1e-4)


def test_a_step_at_zero_is_a_decision():
    truth, moved = decided(lambda x: torch.relu(x[:, ::2] - x[:, 1::2]), 1.0, NEAR, 1.0, CLEAR, CLEAR, 1.0)
    assert truth.tolist() == [[0, 0, 0, 0, 5, -5]]
    torch.testing.assert_close(moved, torch.tensor([[5.0, 5, 0, 0, 0, 0]], dtype=torch.float64), atol=1e-8, rtol=1e-4)


@pytest.mark.parametrize(
    "function", [lambda x: nn.functional.max_pool1d(3 * x, 2), lambda x: torch.sin(x) / x, lambda x: x.softmax(-1)]
)
def test_what_follows_smoothly_is_no_decision(function):
    _, moved = decided(function, 5.0, 5 * CLEAR, 0.3, 0.4)
    assert moved.abs().max() < 1e-9


def test_decisions_of_a_gradient_that_is_not_finite_move_nothing():
    truth, moved = decided(lambda x: x.sqrt(), 0.0, 4.0)
    assert torch.isinf(truth[0, 0]) and moved[0, 0] == 0


def test_mutated_models_are_copies():
    model = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    oracle, made = Oracle(model, CPU), probe(torch.randn(6, 3))
    doubled = oracle.eager(made, lambda copy: lambda x: 2 * copy(x)).outputs[0]
    torch.testing.assert_close(doubled, 2 * oracle.reference(made).outputs[0].float())
    assert oracle.reference(made, lambda copy: copy).outputs[0].dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_families_in_use():
    assert Oracle(network(), CPU).uses(probe(torch.randn(2, 2, 6, 7))) == {"convolution", "product"}
    assert Oracle(nn.Sigmoid(), CPU).uses(probe(torch.randn(2, 2))) == set()


def test_attributes_are_in_float64_too_and_no_call_changes_the_model():
    oracle, given = Oracle(Remembers(), CPU), probe(torch.zeros(3))
    for _ in range(2):
        (eager,), (truth,) = oracle.eager(given).outputs, oracle.reference(given).outputs
        assert (eager.dtype, truth.dtype) == (torch.float32, torch.float64)
        assert torch.equal(eager, truth.float()) and eager[-1] == torch.tensor(1.1)


def test_what_the_original_makes_in_float32_is_made_in_float64():
    oracle = Oracle(Function(lambda x: x @ torch.full((3, 3), 0.1, dtype=torch.float32)), CPU)
    x = torch.rand(4, 3)
    truth = oracle.reference(Probe("own", [x])).outputs[0]
    assert truth.dtype == torch.float64 and oracle.ways == {PROMOTED}
    torch.testing.assert_close(truth, x.double() @ torch.full((3, 3), 0.1, dtype=torch.float64), rtol=1e-15, atol=0)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_what_the_original_multiplies_in_16_bits_is_exact_in_the_truth(low):
    layer, x = nn.Linear(3, 2).to(low), torch.rand(4, 3)
    oracle = Oracle(nn.Sequential(Function(lambda x: x.to(low)), layer), CPU)
    truth = oracle.reference(Probe("own", [x])).outputs[0]
    assert truth.dtype == torch.float64 and oracle.ways == {PROMOTED}
    torch.testing.assert_close(truth, layer.double()(x.double()))


def test_an_original_that_writes_to_its_input_writes_to_a_copy():
    given = torch.linspace(-1, 1, 6)
    probe = Probe("own", [given.clone()])
    oracle = Oracle(Function(lambda x: nn.functional.leaky_relu_(x, 0.5)), CPU)
    eager, truth = oracle.eager(probe), oracle.reference(probe)
    assert torch.equal(probe.inputs[0], given)
    torch.testing.assert_close(eager.outputs[0].double(), truth.outputs[0])


def test_the_first_reference_draws_what_eager_drew():
    probe = Probe("own", [torch.zeros(2, 50)])
    oracle = Oracle(Function(lambda x: x + torch.randn_like(x)), CPU)
    whole = oracle.whole(probe)
    torch.testing.assert_close(oracle.reference(probe).outputs[0], whole.outputs[0].double())


def test_a_gradient_depends_on_what_was_drawn():
    x = torch.linspace(-2, -1, 5000)
    probe = Probe("own", [x], [torch.ones(5000)], (0,))
    oracle = Oracle(Function(lambda x: nn.functional.rrelu(x, training=True)), CPU)
    oracle.eager(probe)  # shows that it draws
    outcome = oracle.reference(probe)
    torch.testing.assert_close(outcome.gradients["input0"], outcome.outputs[0] / x.double(), rtol=1e-6, atol=0)


def test_float_outputs_are_of_float32_and_gradients_of_the_models_own_type():
    model, x = torch.nn.Linear(8, 4).half(), torch.randn(3, 8).half()
    oracle = FloatOutputs(model, CPU, False, ALL, "fp16")
    probe = Probe("own", [x], upstream=[torch.randn(3, 4)], wanted_inputs=(0,))
    found, usual = oracle.eager(probe), Oracle(model, CPU).eager(probe)
    assert torch.equal(found.outputs[0], copy.deepcopy(model).float()(x.float()).detach())
    assert all(torch.equal(found.gradients[name], usual.gradients[name]) for name in ("weight", "bias", "input0"))
    for each in (*oracle.permitted(probe, "fp32"), *oracle.lowered(probe, "bf16"), *oracle.reordered(probe)):
        assert each.outputs[0].dtype.itemsize > 2 and each.gradients["weight"].shape == (4, 8)
    assert oracle.eager(replace(probe, upstream=None), mutate=lambda model: model).gradients == {}
