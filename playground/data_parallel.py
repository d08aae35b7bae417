"""Training on several devices: are a variant's gradients under DistributedDataParallel those of one process?

    torchrun --standalone --nproc-per-node=2 -m playground.data_parallel [--model NAME ...] [--variant NAME ...] [--json FILE]

Each rank takes its part of the batch. Four ways are compared with one process that has the whole: DistributedDataParallel as
it is, compiled by torch.compile, with gradients accumulated over two halves of the part, and both at once; on GPUs a step
replayed in a CUDA graph is a fifth. They may differ from the one process's by what the judge allows one gradient
(playground/judge/tolerance.py); the rank that is furthest off counts. What a variant raises on one rank is its verdict on all.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from rich.text import Text
from torch.nn.parallel import DistributedDataParallel

from playground import catalog, tensors
from playground.driver import torchrun
from playground.judge.oracle import Oracle, gradients_of
from playground.judge.probes import Probe
from playground.judge.tolerance import Reference
from playground.machine import environment, requirements
from playground.report.document import write_whole
from playground.report.figures import one_line, scientific
from playground.report.layout import make_console, print_rows, verdict
from playground.worker.failures import describe

SEED = 20240229
GRAPH_WARM_UP = 11  # steps before a capture: what DistributedDataParallel needs, by PyTorch's notes on CUDA graphs
COMPILED, ACCUMULATED = {"compiled", "both"}, {"accumulated", "both"}
WAYS = ("as it is", "compiled", "accumulated", "both", "in a CUDA graph")


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

    def scaled(self, factor):
        """With the gradients of the outputs, and so those of the parameters, so many times as large."""
        return Batch(self.inputs, [factor * gradient for gradient in self.upstream])

    @property
    def on_gpu(self):
        return self.inputs[0].is_cuda

    def backward(self, model):
        """Add to the parameters' gradients."""
        pairs = list(zip(tensors.flatten(model(*self.inputs)), self.upstream, strict=True))
        pairs = [(output, gradient.to(output)) for output, gradient in pairs if output.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))


class VariantFailed(Exception):
    """The variant raised something on some rank. It is raised on all of them; the text is the reason.

    `refuses` says that it was NotImplementedError, wherever anything was raised.
    """

    def __init__(self, reason, refuses):
        super().__init__(reason)
        self.refuses = refuses


def main(arguments=None):
    """Returns the exit status: 0 where every gradient is right."""
    given = _arguments(arguments)
    rank = torchrun.current_rank()
    if rank is None:
        print("start it with torchrun --standalone --nproc-per-node=N -m playground.data_parallel ...", file=sys.stderr)
        return 2
    requirements.prepare_environment()
    on_gpu = given.device == "cuda"
    device = torch.device(given.device, rank.local_rank if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog asks for events, which a capture does not allow
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        rows = []
        for model, variants in _chosen(given):
            case = _case(model, given, device)
            for variant in variants:
                rows.append(_examine(case, variant))
                if rank.rank == 0 and given.json:
                    _write(rows, rank, device, given.json)
        if rank.rank == 0:
            _show(rows)
        torch.distributed.barrier()  # torchrun would end rank 0 before it has written, were another to fail earlier
    except catalog.CatalogError as complaint:
        print(complaint, file=sys.stderr)
        return 2
    finally:
        torch.distributed.destroy_process_group()
    return 0 if all(row["verdict"] in ("pass", "skipped") for row in rows) else 1


def _arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m playground.data_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", metavar="NAME_OR_PATH", help="default: all")
    parser.add_argument(
        "--variant", nargs="+", action="extend", metavar="NAME_OR_PATH", help="default: all of a model that run on the device"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser.parse_args(arguments)


def _chosen(given):
    """(model, variants) of each model with variants that run on the device."""
    found = []
    for model in map(catalog.find_model, given.model) if given.model else catalog.models():
        named = [catalog.find_variant(model, name) for name in given.variant or []]
        found.append((model, [each for each in named or catalog.variants(model) if each.backend in (given.device, "any")]))
    found = [(model, variants) for model, variants in found if variants]
    if not found:
        raise catalog.CatalogError(f"none of these variants runs on --device {given.device}")
    return found


def _name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass
class Case:
    """A model with its weights and a batch, by which all of its variants are examined."""

    model: catalog.Model
    settings: dict
    problem: object
    original: torch.nn.Module
    batch: Batch

    @functools.cached_property
    def allowed(self):
        return _allowed(self.original, self.batch)

    def fresh(self, module):
        """A ModelNew with the original's weights, on the device."""
        new = tensors.make_model(self.problem, module.ModelNew, SEED).to(self.batch.inputs[0].device)
        new.load_state_dict(self.original.state_dict())
        return new


def _case(model, given, device):
    settings = model.settings(given.device) | catalog.parse_settings(given.set)
    problem = catalog.load_problem(model.path, settings)
    original = tensors.make_model(problem, problem.Model, SEED).to(device)
    return Case(model, settings, problem, original, _batch(problem, original, device))


def _examine(case, variant):
    """A row of the JSON document. "errors" are shares of what is allowed; one that is no finite number is None."""
    row = {"model": case.model.name, "variant": variant.name, "settings": case.settings, "verdict": "pass", "reason": None}
    row |= {"errors": {}, "source_sha256": catalog.sha256(variant.path), "code_sha256": catalog.code_sha256(variant.path)}
    row |= {"kernels_sha256": catalog.kernels_sha256(variant.path), "model_sha256": catalog.sha256(case.model.path)}
    if not case.allowed:
        return row | {"verdict": "skipped", "reason": "no parameter of the original gets a gradient"}
    try:
        single = _in_one_process(case, variant)
    except VariantFailed as failure:
        return row | {"verdict": "skipped" if failure.refuses else "error", "reason": str(failure)}
    try:
        return row | _judged(case, single)
    except VariantFailed as failure:
        return row | {"verdict": "error", "reason": str(failure)}


class _OneProcess:
    """A variant with the whole batch, without an exchange. Raises what the variant raises.

    `gradients` are its own by parameter; `has_unused` says whether there are parameters that get none; `make()` gives a fresh
    ModelNew.
    """

    def __init__(self, case, variant):
        self.make = functools.partial(case.fresh, catalog.load_variant(variant.path))
        model = self.make()
        self.gradients = _gradients(model, case.batch)
        trained = {name for name, value in model.named_parameters() if value.requires_grad}
        self.has_unused = trained != set(self.gradients)


def _in_one_process(case, variant):
    """A _OneProcess by which all ranks take the same path. Raises VariantFailed."""
    single = _agreed(lambda: _OneProcess(case, variant))
    single.has_unused = any(_of_all_ranks(single.has_unused))
    return single


def _judged(case, single):
    """{"verdict", "reason", "errors"} of a variant's gradients. Raises VariantFailed."""
    missing = set().union(*_of_all_ranks(set(case.allowed) - set(single.gradients)))
    if missing:
        return {"verdict": "fail", "reason": f"by itself it gives no gradient to {', '.join(sorted(missing))}"}
    errors = {}
    for way in _ways(case.batch, single):
        found = _in_parallel(way, single, case.batch)
        shares = [_share(found.get(name), single.gradients[name], allowed) for name, allowed in case.allowed.items()]
        worst = _largest_of_ranks(max(shares), case.batch.inputs[0].device)
        errors[way] = worst if math.isfinite(worst) else None
    wrong = [way for way, share in errors.items() if share is None or share > 1]
    reason = f"gradients of {', '.join(wrong)} are not those of one process with the whole batch" if wrong else None
    return {"verdict": "fail" if wrong else "pass", "reason": reason, "errors": errors}


def _ways(batch, single):
    """A capture does not allow DistributedDataParallel to ask the other ranks which parameters they did not use."""
    return WAYS if batch.on_gpu and not single.has_unused else WAYS[:-1]


def _share(found, expected, allowed):
    """Infinite where there is no gradient at all."""
    return math.inf if found is None else share_of_allowed(found - expected, allowed)


def _batch(problem, original, device):
    inputs = tensors.to(tensors.make_inputs(problem, SEED + 1), device)
    with torch.no_grad():
        outputs = tensors.flatten(original(*inputs))
    torch.manual_seed(SEED + 2)
    return Batch(inputs, [torch.randn(output.shape).to(device) for output in outputs])


def _of(model):
    """{parameter: its gradient}, of those that have one."""
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {name: gradient.detach().double().cpu() for name, gradient in found.items()}


def _gradients(model, batch):
    batch.backward(model)
    return _of(model)


def _allowed(original, batch):
    """{parameter: how far two right gradients of it may be apart}, by the judge's rule for one. Those without have no entry.

    Near decisions are not looked for: a difference that they make counts.
    """
    probe = Probe("the whole batch", batch.inputs, batch.upstream)
    oracle = Oracle(original, batch.inputs[0].device)
    mode = "tf32" if oracle.uses(probe) & oracle.tf32_families else "fp32"
    truth, eager, permitted = oracle.truth(probe), oracle.eager(probe), oracle.permitted(probe, mode)
    allowed = {}
    for name, gradient in truth.gradients.items():
        if gradient is None:
            continue
        reference = Reference(gradient, eager.gradients[name], *gradients_of(permitted, name))
        allowed[name] = reference.allowed * reference.spread
    return allowed


def _largest(value):
    return value.abs().max().item()


def share_of_allowed(difference, allowed):
    """Of two gradients; infinite where one of them is no number, which no comparison would notice otherwise."""
    largest = _largest(difference)
    if largest == 0:
        return 0.0
    return largest / allowed if math.isfinite(largest) and allowed > 0 else math.inf


def _largest_of_ranks(value, device):
    found = torch.tensor(value, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.item()


def _agreed(call):
    """What `call()` gives, when it has given something on every rank. Raises VariantFailed on all where it raises on one.

    Whatever a variant may raise is called by this: a rank that went on alone would wait for the others without end in the next
    exchange.
    """
    result = failure = None
    try:
        result = call()
    except (Exception, SystemExit) as exception:
        refuses = isinstance(exception, NotImplementedError)
        failure = (one_line(exception) if refuses else describe(exception)[0]), refuses
    failures = {rank: each for rank, each in enumerate(_of_all_ranks(failure)) if each}
    if failures:
        rank = min(failures, key=lambda rank: failures[rank][1])  # an error says more than a refusal
        reason, refuses = failures[rank]
        everywhere = len(failures) == torch.distributed.get_world_size()
        raise VariantFailed(reason if everywhere else f"on rank {rank}: {reason}", refuses)
    return result


def _of_all_ranks(value):
    """The list of what each rank gives here."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _in_parallel(way, single, batch):
    """Gradients under DistributedDataParallel, which averages those of the ranks: hence the factor. Raises VariantFailed.

    First each rank does the same without it: what a variant raises, it then raises in front of an exchange, not within. (What
    some ranks alone raise under it alone, for want of memory for example, still leaves the others waiting.)
    """
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = batch.part(rank, ranks).scaled(ranks)
    _agreed(lambda: _gradients_by(way, single.make(), own, lambda model: model))
    return _agreed(lambda: _gradients_by(way, single.make(), own, lambda model: _parallel(model, single.has_unused)))


def _gradients_by(way, model, batch, wrap):
    """The model's gradients when what is run is `wrap(model)`: itself, or DistributedDataParallel."""
    if way == "in a CUDA graph":
        _graphed(lambda: wrap(model), batch)()
        return _of(model)
    wrapped = wrap(model)
    run = wrapped
    if way in COMPILED:
        torch.compiler.reset()  # code that was compiled for one that is not wrapped would be taken
        run = torch.compile(wrapped)
    halves = [batch.part(half, 2) for half in range(2)] if way in ACCUMULATED else [batch]
    for number, half in enumerate(halves):
        exchanges = number == len(halves) - 1 or wrapped is model
        with contextlib.nullcontext() if exchanges else wrapped.no_sync():
            half.backward(run)
    return _of(model)


def _parallel(model, unused):
    """Without device_ids, which would only move inputs: they are on the rank's device already.

    `unused` says that there are parameters without a gradient, for which it would wait otherwise.
    """
    return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=unused)


def _step(model, batch):
    """A function that makes a step."""

    def step():
        model.zero_grad()
        batch.backward(model)

    return step


def _graphed(make, batch):
    """A function that replays a step of the model that `make` makes, captured in a CUDA graph.

    As PyTorch's notes on CUDA graphs have it, DistributedDataParallel is made on the stream on which steps are warmed up.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = make()
        for _ in range(GRAPH_WARM_UP):
            _step(model, batch)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # where the parameters' gradients are accumulated
        model.zero_grad(set_to_none=False)
        batch.backward(model)
    return graph.replay


def _write(rows, rank, device, file):
    found = {"kind": "data_parallel", "ranks": rank.world_size, "device": _name(device)}
    found |= {"environment": environment.describe(), "results": rows}
    write_whole(file, json.dumps(found, indent=1, allow_nan=False) + "\n")


def _show(rows):
    ways = {way: f"{way}, of allowed" for way in WAYS if any(way in row["errors"] for row in rows)}
    table = []
    for row in rows:
        errors = {head: Text(scientific(row["errors"].get(way))) for way, head in ways.items()}
        name = {"variant": Text(f"{row['model']} {row['variant']}"), "verdict": verdict(row["verdict"])}
        table.append(name | errors)
    console = make_console()
    print_rows(console, table, {"variant", "verdict"})
    for row in rows:
        if row["reason"]:
            console.print(f"{row['variant']}: {row['reason']}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
