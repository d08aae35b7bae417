"""The least bytes and operations of each model, by hand, and the time they take."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from playground import catalog
from playground.floor.bound import floor, impossible
from playground.floor.work import as_written, certain_bytes, count_work
from playground.record import Ceilings, Work


def on_meta(name):
    """(one of our models as it stands, its inputs), without any memory."""
    problem = catalog.load_problem(catalog.find_model(name).path)
    with torch.device("meta"):
        return problem.Model(*problem.get_init_inputs()), problem.get_inputs()


def at_full_size(name, mode="forward"):
    model, inputs = on_meta(name)
    return count_work(name, model, inputs, [model(*inputs)], mode)


# Bytes: input, parameters, output, 4 each. Operations: 2 for each product.
WORK = {
    # 95 x 95 pooled positions, 64 channels, one product of size 8 * 3 * 3 each: pooling moved in front of the weights
    "conv_pool_sigmoid_sum": Work(4 * (128 * 8 * 384 * 384 + 64 * 8 * 9 + 64 + 128), 2 * 128 * 95 * 95 * 64 * 8 * 9),
    # 7 x 31 x 31 windows of 2 x 2 x 2 places of the convolution, for each of which F(2,3) needs 4 x 4 x 4 products a channel
    "conv3d_div_max_gap_bias_sum": Work(
        4 * (128 * 8 * 16 * 64 * 64 + 16 * 8 * 27 + 16 + 16 + 128), 2 * 128 * 7 * 31 * 31 * 16 * 8 * 64
    ),
    # 11 taps at stride 4 are 3 + 3 + 3 + 2 at stride 1: 4 + 4 + 4 + 3 = 15 products for 2 outputs, 225 for 4
    "alexnet_conv1": Work(
        4 * (256 * 3 * 224 * 224 + 96 * 363 + 96 + 256 * 96 * 55 * 55), 2 * 256 * 96 * 55 * 55 * 3 * 225 // 4
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_work_of_our_models(name):
    assert at_full_size(name) == WORK[name]


# Over forward: a gradient of the output read, one of each parameter written, one of the input written. Operations: as many
# again for the weights and for the input; where a maximum passes on one place in 8, directly, 27 * 2 for each place.
IN_TRAINING = {
    "conv_pool_sigmoid_sum": (4 * (128 + 64 * 72 + 64), 4 * 128 * 8 * 384 * 384, 2 * 128 * 95 * 95 * 64 * 8 * 9),
    "conv3d_div_max_gap_bias_sum": (
        4 * (128 + 16 * 8 * 27 + 16 + 16),
        4 * 128 * 8 * 16 * 64 * 64,
        2 * 128 * 7 * 31 * 31 * 16 * 8 * 27,
    ),
    "alexnet_conv1": (4 * (256 * 96 * 55 * 55 + 96 * 363 + 96), 4 * 256 * 3 * 224 * 224, 2 * 256 * 96 * 55 * 55 * 3 * 225 // 4),
}


@pytest.mark.parametrize("name", WORK)
def test_work_of_training_steps(name):
    of_weights, of_input, flops = IN_TRAINING[name]
    forward = WORK[name]
    assert at_full_size(name, "weights") == Work(forward.bytes + of_weights, forward.flops + flops)
    assert at_full_size(name, "weights_and_input") == Work(forward.bytes + of_weights + of_input, forward.flops + 2 * flops)


def test_floor_by_hand():
    ceilings = Ceilings(read_bytes_per_second=1e9, copy_bytes_per_second=2e9, fp32_flops=2e9, tf32_flops=4e9)
    assert floor(Work(bytes=2_000_000, flops=500_000), ceilings, "fp32") == (1.0, "memory")
    assert floor(Work(bytes=2_000_000, flops=8_000_000), ceilings, "fp32") == (4.0, "compute")
    assert floor(Work(bytes=2_000_000, flops=8_000_000), ceilings, "tf32") == (2.0, "compute")
    with_fp16 = replace(ceilings, fp16_flops=6e9)
    assert floor(Work(bytes=2_000_000, flops=12_000_000), with_fp16, "tf32") == (2.0, "compute")
    assert floor(Work(bytes=2_000_000, flops=12_000_000), with_fp16, "fp32") == (6.0, "compute"), "three products"


def test_pooling_windows_that_are_not_square():
    problem = catalog.load_problem(
        catalog.find_model("conv_pool_sigmoid_sum").path,
        {"batch_size": 2, "height": 20, "width": 30, "kernel_size": (3, 5), "pool_kernel_size": (4, 7)},
    )
    model, inputs = problem.Model(*problem.get_init_inputs()), problem.get_inputs()
    work = count_work("conv_pool_sigmoid_sum", model, inputs, [model(*inputs)], "forward")
    assert work.flops == 2 * 2 * (18 // 4) * (26 // 7) * 64 * 8 * 3 * 5


def test_a_model_that_is_not_ours_counts_as_written():
    model, x = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Tanh()), torch.ones(3, 10)
    work = count_work("linear", model, [x], [model(x)], "forward")
    assert work == Work(4 * (30 + 200 + 60), 2 * 3 * 10 * 20)
    training = count_work("linear", model, [x], [model(x)], "weights_and_input")
    assert training == Work(4 * (30 + 200 + 60 + 60 + 200 + 30), 3 * 2 * 3 * 10 * 20)
    assert next(model.parameters()).device.type == "cpu", "the model stays where it is"


class Scaled(nn.Module):
    def forward(self, x, indices, factor):
        return factor * x[indices]


def test_inputs_that_are_no_float_tensors():
    x, indices = torch.ones(3, 10), torch.zeros(2, dtype=torch.int64)
    work = count_work("scaled", Scaled(), [x, indices, 0.5], [x[indices]], "forward")
    assert work == Work(4 * 30 + 8 * 2 + 4 * 20, 0)


def test_what_eager_does_operator_by_operator():
    """A product of 5 x 8 and 8 x 4 with a bias, then relu, then a view, which moves nothing, then a sum."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return torch.relu(self.linear(x)).view(20).sum()

    done = as_written(Model(), [torch.rand(5, 8)], "forward")
    linear, relu, total = 5 * 8 + 8 * 4 + 4 + 5 * 4, 2 * 5 * 4, 5 * 4 + 1
    assert done == Work(4 * (linear + relu + total), 2 * 5 * 8 * 4)
    training = as_written(Model(), [torch.rand(5, 8)], "weights")
    assert training.flops == 2 * done.flops and training.bytes > 2 * done.bytes


def test_what_eager_does_is_never_less_than_the_least():
    for name in WORK:
        done = as_written(*on_meta(name), "forward")
        assert done.bytes >= WORK[name].bytes and done.flops >= WORK[name].flops


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((catalog.ROOT / "results").rglob("*.json"))
        if path.name.startswith(("nvidia", "cpu")) and path.parent.name != "published"  # of others' solutions
    ],
    ids=lambda path: path.relative_to(catalog.ROOT).as_posix(),
)
def test_nothing_that_was_recorded_is_faster_than_its_floor(path):
    for result in json.loads(path.read_text()).get("results", []):
        for timed in (result, *(result.get("training") or {}).values()):
            for each in (timed, timed.get("graphed") or {}):
                if each.get("time_ms") and each.get("floor_ms"):
                    assert each["floor_ms"] <= each["time_ms"]["median"], (result["model"], result["variant"])


class Gather(nn.Module):
    def forward(self, x):
        return torch.relu(x[:, :2])


def test_what_must_move_is_what_the_outputs_depend_on():
    x = torch.rand(100, 8) + 1
    assert certain_bytes(Gather(), [x], [Gather()(x)]) == 4 * (200 + 200)
    assert certain_bytes(nn.Identity(), [torch.arange(5)], [torch.arange(5)]) == 8 * 5


def test_a_time_in_which_its_bytes_cannot_move_is_impossible():
    assert impossible(0.10, 604_000_000, 4.35e12, on_cpu=False) is None
    said = impossible(0.09, 604_000_000, 4.35e12, on_cpu=False)
    assert "0.09 ms a call, which is impossible: reading and writing 604 MB" in said and "takes 0.139 ms" in said
    assert impossible(1e-6, 500_000_000, 3e10, on_cpu=True) is None  # the caches may hold it
    assert impossible(1.0, 5_000_000_000, 3e10, on_cpu=True)
