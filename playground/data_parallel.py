"""Training on several devices: are a variant's gradients under DistributedDataParallel those of one process?

    torchrun --standalone --nproc-per-node=2 -m playground.data_parallel [--model NAME ...] [--variant NAME ...] [--time]

Each rank takes its part of the batch. Three ways are compared with one process that has the whole: DistributedDataParallel as
it is, compiled by torch.compile, and with gradients accumulated over two halves of the part. They may differ from the one
process's by twice the error of the original in eager PyTorch against float64. With --time a rank has the model's whole batch
for itself (weak scaling), and a step is timed with and without the other ranks.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from rich.text import Text
from torch.nn.parallel import DistributedDataParallel

from playground import catalog, distributed, tensors
from playground.machine import requirements
from playground.report.figures import one_line, scientific, significant
from playground.report.layout import make_console, print_rows, verdict

SEED = 20240229
STEPS, WARM_UP = 20, 5
ROUNDING = 16 * torch.finfo(torch.float32).eps  # of the largest gradient: what another order of additions may change
WAYS = ("as it is", "compiled", "accumulated")


@dataclass
class Batch:
    """A model's inputs, and the gradient of each of its outputs, of which the first dimension is the sample."""

    inputs: list
    upstream: list

    def part(self, number, count):
        """The `number`-th of `count` parts of the samples, which are as equal as can be."""

        def share(value):
            return value.tensor_split(count)[number] if isinstance(value, torch.Tensor) and value.dim() else value

        return Batch([share(value) for value in self.inputs], [share(value) for value in self.upstream])

    def backward(self, model, factor=1.0):
        """Add to the parameters' gradients."""
        outputs = tensors.flatten(model(*self.inputs))
        torch.autograd.backward(outputs, [factor * g.to(o) for o, g in zip(outputs, self.upstream, strict=True)])


def main(arguments=None):
    """Returns the exit status: 0 where every gradient is right."""
    given = _arguments(arguments)
    rank = distributed.current_rank()
    if rank is None:
        print("start it with torchrun --standalone --nproc-per-node=N -m playground.data_parallel ...", file=sys.stderr)
        return 2
    requirements.prepare_environment()
    device = torch.device(given.device, rank.local_rank if given.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rows = [_examine(*each, given, device) for each in _chosen(given)]
    except catalog.CatalogError as complaint:
        print(complaint, file=sys.stderr)
        return 2
    finally:
        torch.distributed.destroy_process_group()
    if rank.rank == 0:
        _show(rows)
        if given.json:
            given.json.write_text(
                json.dumps({"ranks": rank.world_size, "device": _name(device), "results": rows}, indent=1) + "\n"
            )
    return 0 if all(row["verdict"] != "fail" for row in rows) else 1


def _arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m playground.data_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", metavar="NAME_OR_PATH", help="default: all")
    parser.add_argument("--variant", nargs="+", metavar="NAME_OR_PATH", help="default: all of a model that run on the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--time", action="store_true", help="time a step, too: a rank then has the model's whole batch")
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser.parse_args(arguments)


def _chosen(given):
    """(model, variant) of each variant that runs on the device."""
    found = []
    for model in map(catalog.find_model, given.model) if given.model else catalog.models():
        named = [catalog.find_variant(model, name) for name in given.variant or []]
        found += [(model, variant) for variant in named or catalog.variants(model)]
    return [(model, variant) for model, variant in found if variant.backend == given.device]


def _name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _examine(model, variant, given, device):
    """{"model", "variant", "verdict", "reason", "errors", "step_ms", "alone_ms"}; errors as shares of what is allowed."""
    settings = catalog.SETTINGS[given.device].get(model.name, {}) | catalog.parse_settings(given.set)
    problem = catalog.load_problem(model.path, settings)
    row = {"model": model.name, "variant": variant.name, "settings": settings, "verdict": "pass", "reason": None}
    row |= {"errors": {}, "step_ms": None, "alone_ms": None}
    module = catalog.load_variant(variant.path)
    original = tensors.make_model(problem, problem.Model, SEED).to(device)
    batch = _batch(problem, original, device)
    try:
        alone = _gradients(_fresh(problem, module, original, device), batch)
    except NotImplementedError as refusal:
        return row | {"verdict": "skipped", "reason": one_line(refusal)}
    allowed = _allowed(original, batch)
    for way in WAYS:
        found = _in_parallel(way, _fresh(problem, module, original, device), batch)
        row["errors"][way] = max(_largest(found[name] - alone[name]) / allowed[name] for name in allowed)
    wrong = [way for way, share in row["errors"].items() if not share <= 1]
    if wrong:
        reason = f"gradients of {', '.join(wrong)} are not those of one process with the whole batch"
        return row | {"verdict": "fail", "reason": reason}
    if given.time:
        for key, parallel in (("alone_ms", False), ("step_ms", True)):
            row[key] = _milliseconds(_fresh(problem, module, original, device), batch, parallel)
    return row


def _batch(problem, original, device):
    inputs = tensors.to(tensors.make_inputs(problem, SEED + 1), device)
    with torch.no_grad():
        outputs = tensors.flatten(original(*inputs))
    torch.manual_seed(SEED + 2)
    return Batch(inputs, [torch.randn(output.shape).to(device) for output in outputs])


def _fresh(problem, module, original, device):
    new = tensors.make_model(problem, module.ModelNew, SEED).to(device)
    new.load_state_dict(original.state_dict())
    return new


def _of(model):
    return {name: value.grad.detach().double().cpu() for name, value in model.named_parameters()}


def _gradients(model, batch):
    batch.backward(model)
    return _of(model)


def _allowed(original, batch):
    """{parameter: how far two right gradients of it may be apart}."""
    eager = _gradients(original, batch)
    original.zero_grad()
    double = original.double()
    samples = batch.inputs[0].shape[0]
    whole = Batch([v.double() if tensors.differentiable(v) else v for v in batch.inputs], batch.upstream)
    for number in range(samples):  # one at a time, so that it needs little memory
        whole.part(number, samples).backward(double)
    truth = _of(double)
    original.zero_grad()
    original.float()
    return {name: 2 * _largest(eager[name] - true) + ROUNDING * _largest(true) for name, true in truth.items()}


def _largest(value):
    return value.abs().max().item()


def _in_parallel(way, model, batch):
    """Gradients under DistributedDataParallel, which averages those of the ranks: hence the factor."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parallel = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if batch.inputs[0].is_cuda else None)
    run = torch.compile(parallel) if way == "compiled" else parallel
    own = batch.part(rank, ranks)
    halves = [own.part(half, 2) for half in range(2)] if way == "accumulated" else [own]
    for number, half in enumerate(halves):
        last = number == len(halves) - 1
        with contextlib.nullcontext() if last else parallel.no_sync():
            half.backward(run, factor=ranks)
    return _of(model)


def _milliseconds(model, batch, parallel):
    """The median over steps of the slowest rank's time for forward, backward and the exchange of gradients."""
    run = DistributedDataParallel(model) if parallel else model
    samples = []
    for _ in range(WARM_UP + STEPS):
        model.zero_grad()
        _wait(batch)
        torch.distributed.barrier()
        began = time.perf_counter()
        batch.backward(run)
        _wait(batch)
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=batch.inputs[0].device)
        torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX)
        samples.append(1e3 * took.item())
    return statistics.median(samples[WARM_UP:])


def _wait(batch):
    if batch.inputs[0].is_cuda:
        torch.cuda.synchronize()


def _show(rows):
    ways = {way: f"{way}, of allowed" for way in WAYS}
    table = [
        {
            "variant": Text(f"{row['model']} {row['variant']}"),
            "verdict": verdict(row["verdict"]),
            **{head: Text(scientific(row["errors"].get(way))) for way, head in ways.items()},
            "alone ms": Text(significant(row["alone_ms"])),
            "step ms": Text(significant(row["step_ms"])),
        }
        for row in rows
    ]
    console = make_console()
    plan = tuple((name,) for name in table[0])
    stacked = (("variant", "verdict"), tuple(ways.values()), ("alone ms", "step ms"))
    print_rows(console, (plan, stacked), table, {"variant", "verdict"})
    for row in rows:
        if row["reason"]:
            console.print(f"{row['variant']}: {row['reason']}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
