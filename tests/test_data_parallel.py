"""Gradients under DistributedDataParallel on two GPUs are those of one process that has the whole batch."""

import contextlib
import os
import socket

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from playground import catalog, tensors
from playground.judge.oracle import Oracle, gradients_of
from playground.judge.probes import Probe
from playground.judge.tolerance import Reference
from tests.kernels.project_variants import variants

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

GPUS, SEED = 2, 20240229
WARM_UP = 11  # steps before a capture: what DistributedDataParallel needs, by PyTorch's notes on CUDA graphs
ROUNDS = ("as it is", "compiled", "accumulated", "both", "in a CUDA graph")


@pytest.mark.parametrize("model, variant", variants("cuda"))
def test_gradients(model, variant):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(examine, (port, model, variant), GPUS)  # raises what a process raises


def examine(rank, port, model, variant):
    """Compare the gradients of this rank's process in every way. Raises AssertionError."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog asks for events, which a capture does not allow
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("nccl", address, rank=rank, world_size=GPUS, device_id=device)
    problem = catalog.load_problem(model.path, model.settings("cuda"))
    original = tensors.make_model(problem, problem.Model, SEED).to(device)
    inputs = tensors.to(tensors.make_inputs(problem, SEED + 1), device)
    torch.manual_seed(SEED + 2)
    with torch.no_grad():
        upstream = torch.randn(original(*inputs).shape).to(device)
    module = catalog.load_variant(variant.path)

    def fresh():
        new = tensors.make_model(problem, module.ModelNew, SEED).to(device)
        new.load_state_dict(original.state_dict())
        return new

    allowed = allowed_differences(original, inputs, upstream)
    expected = gradients(fresh(), [(inputs, upstream)])
    own = part(inputs, upstream, rank, GPUS)
    own = own[0], GPUS * own[1]  # DistributedDataParallel averages
    for way in ROUNDS:
        found = in_a_graph(fresh, own) if way == "in a CUDA graph" else parallel(fresh(), own, way)
        for name, most in allowed.items():
            assert (found[name] - expected[name]).abs().max().item() <= most, f"{way}: {name}"
    torch.distributed.destroy_process_group()


def part(inputs, upstream, number, count):
    """The `number`-th of `count` equal parts of the samples."""
    return [value.tensor_split(count)[number] for value in inputs], upstream.tensor_split(count)[number]


def allowed_differences(original, inputs, upstream):
    """{parameter: how far two right gradients of it may be apart}, by the judge's rule for one."""
    probe = Probe("the whole batch", inputs, [upstream])
    oracle = Oracle(original, inputs[0].device)
    mode = "tf32" if oracle.uses(probe) & oracle.tf32_families else "fp32"
    truth, eager, permitted = oracle.reference(probe), oracle.eager(probe), oracle.permitted(probe, mode)
    found = {}
    for name, gradient in truth.gradients.items():
        if gradient is not None:
            reference = Reference(gradient, eager.gradients[name], *gradients_of(permitted, name))
            found[name] = reference.allowed * reference.spread
    assert found
    return found


def gradients(model, batches, wait=lambda last: contextlib.nullcontext(), run=None):
    """{parameter: gradient in float64} after a backward pass of each batch, under `wait(whether it is the last)`."""
    for number, (inputs, upstream) in enumerate(batches):
        with wait(number == len(batches) - 1):
            (run or model)(*inputs).backward(upstream)
    return {name.removeprefix("module."): value.grad.double().cpu() for name, value in model.named_parameters()}


def parallel(model, own, way):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.compiler.reset()
    run = torch.compile(wrapped) if way in ("compiled", "both") else wrapped
    halves = [part(*own, half, 2) for half in range(2)] if way in ("accumulated", "both") else [own]
    return gradients(wrapped, halves, lambda last: contextlib.nullcontext() if last else wrapped.no_sync(), run)


def in_a_graph(make, own):
    """As PyTorch's notes on CUDA graphs have it, DistributedDataParallel is made on the stream on which steps are warmed up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = DistributedDataParallel(make(), gradient_as_bucket_view=True)
        for _ in range(WARM_UP):
            model.zero_grad()
            gradients(model, [own])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        model.zero_grad(set_to_none=False)
        model(*own[0]).backward(own[1])
    graph.replay()
    return {name.removeprefix("module."): value.grad.double().cpu() for name, value in model.named_parameters()}
