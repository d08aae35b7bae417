# ruff: noqa: B023, E501, RUF010
"""Temporary: each variant as it was at 5b6e9d1 (frozen.zip) beside that of now, on a GPU or else under the emulator.

    python tests/kernels/old_and_new.py --out FOLDER MODEL/VARIANT... [MODEL/NEW=OLD]

Prints a line a check and writes them to FOLDER/old_and_new.json; exit status 1 where one differs. A check compares bits where
both have the same, else errors beside float64; exceptions by their class. Times are of old and new in turn.
"""

import argparse
import contextlib
import copy
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from playground import catalog  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# (arguments of the model, shape of an image batch): small, odd, in slices; large only on a GPU
CASES = {
    "conv_pool_sigmoid_sum": {
        "small": [
            ((8, 64, 3, 4), (2, 8, 14, 32)),
            ((8, 64, 3, 4), (1, 8, 20, 64)),
            ((8, 64, 3, 4), (3, 8, 45, 61)),
            ((3, 5, 3, 2), (2, 3, 17, 35)),
            ((1, 1, 1, 1), (2, 1, 5, 4)),
            ((4, 20, 5, 3), (2, 4, 19, 40)),
            ((17, 70, 2, 4), (1, 17, 13, 32)),
            ((2, 6, 3, 9), (2, 2, 24, 33)),
            ((2, 3, 7, 2), (1, 2, 40, 36)),
            ((1, 2, 1, 40), (2, 1, 83, 90)),
        ],
        "large": [((8, 64, 3, 4), (128, 8, 384, 384)), ((8, 64, 3, 4), (7, 8, 250, 320)), ((16, 96, 3, 2), (4, 16, 100, 131))],
        "timed": ((8, 64, 3, 4), (8, 384, 384)),
    },
    "alexnet_conv1": {  # arguments: of a layer in the place of conv1
        "small": [
            ((), (1, 3, 67, 67)),
            ((), (2, 3, 35, 47)),
            ((2, 5, 5, 4, 1, 1, 1, False), (2, 2, 15, 19)),
            ((5, 100, (3, 5), (1, 2), (1, 0)), (2, 5, 9, 31)),
            ((2, 7, (2, 3), (5, 4), (0, 1)), (3, 2, 14, 40)),
            ((1, 3, (20, 20), (4, 4), (2, 2)), (1, 1, 40, 44)),
            ((3, 64, 7, 2, 3), (1, 3, 20, 24)),
            ((3, 130, (11, 6), (2, 4), (2, 3)), (1, 3, 21, 34)),
            ((4, 40, 3, 1, 1), (2, 4, 12, 13)),
        ],
        "large": [((), (32, 3, 224, 224)), ((), (2, 3, 64, 9001)), ((), (2, 3, 1203, 31)), ((3, 96, 24, 4, 2), (4, 3, 224, 224)),
                  ((16, 96, 11, 4, 2), (4, 16, 224, 224)), ((3, 64, 7, 2, 3), (8, 3, 224, 224)), ((3, 64, 3, 1, 1), (4, 3, 224, 224)),
                  ((3, 768, 32, 32, 0), (8, 3, 224, 224))],
        "timed": ((), (3, 224, 224)),
    },
    "conv3d_div_max_gap_bias_sum": {
        "small": [((8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (2, 8, 6, 10, 12)),
                  ((8, 16, (3, 3, 3), -3.0, (2, 2, 2), (16, 1, 1, 1), 1), (1, 8, 7, 9, 70)),
                  ((3, 5, 3, 2, 2, (5, 1, 1, 1), 0), (2, 3, 7, 9, 11)),
                  ((8, 16, 3, 2.0, 2, (16, 1, 2, 3), None), (2, 8, 5, 6, 8)),
                  ((1, 1, 3, 0.5, 2, (1,), -4), (3, 1, 4, 4, 4)),
                  ((19, 70, 3, 2.0, 2, (70, 1, 1, 1), 1), (1, 19, 5, 6, 9)),
                  ((2, 3, (2, 5, 3), -1.5, (1, 3, 2), (3, 1, 1, 1), 1), (2, 2, 4, 12, 9)),
                  ((3, 4, 1, 2.0, 1, (4, 1, 1, 1), (1,)), (2, 3, 2, 3, 4)),
                  ((2, 3, 2, 2.0, 7, (3, 1, 1, 1), 1), (1, 2, 15, 9, 10))],
        "large": [((8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64)),
                  ((8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (7, 8, 11, 45, 130)),
                  ((8, 16, 3, -2.0, 2, (1,), 0), (5, 8, 40, 33, 62)),
                  ((16, 32, 3, 2.0, 2, (32, 1, 1, 1), 1), (8, 16, 16, 32, 32))],
        "timed": ((8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (8, 16, 64, 64)),
    },
}  # fmt: skip


class Pair:
    def __init__(self, model, new, old, folder):
        self.model, self.name = model, f"{model}/{new}"
        self.problem = catalog.load_problem(catalog.find_model(model).path)
        self.new = catalog.load_variant(ROOT / "kernels" / model / f"{new}.py").ModelNew
        self.old = catalog.load_variant(Path(folder) / model / f"{old}.py").ModelNew
        self.on_cpu = new.startswith("cpu_")
        self.device = "cpu" if self.on_cpu else DEVICE
        self.rows = []

    def note(self, check, old, new, fine):
        self.rows.append({"file": self.name, "check": check, "old": str(old)[:300], "new": str(new)[:300], "fine": bool(fine)})
        print(f"{'ok ' if fine else 'BAD'} {self.name:45.45} {check:58.58} {str(old):>38.38} | {str(new):38.38}", flush=True)

    def models(self, arguments):
        """(old, new, the original in float64), of the same weights."""
        made = []
        for kind in (self.old, self.new, self.problem.Model):
            torch.manual_seed(0)
            if self.model != "alexnet_conv1":
                made.append(kind(*arguments))
            else:
                made.append(kind())
                torch.manual_seed(0)
                made[-1].conv1 = torch.nn.Conv2d(*arguments) if arguments else made[-1].conv1
            made[-1].to(self.device)
        return made[0], made[1], made[2].double()

    def eager(self, exact):
        return copy.deepcopy(exact).float()

    def input(self, shape, seed=1):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


def attempt(function):
    """The result, or the exception."""
    try:
        result = function()
        if ON_GPU:
            torch.cuda.synchronize()
        return result
    except Exception as error:
        return error


def words(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def compare(pair, check, old, new, exact=None, eager=None):
    """Notes whether the outcomes agree: tensors, lists of them or exceptions. A gradient may err as much as eager PyTorch's."""
    had_none = isinstance(old, NotImplementedError) or type(old).__name__ == "Finding"  # the emulator's, of the old file
    if had_none and not isinstance(new, Exception) and exact is not None:
        old = new if eager is None else eager  # a gradient where there was none
    if isinstance(old, Exception) or isinstance(new, Exception):
        say = [words(each) if isinstance(each, Exception) else "no error" for each in (old, new)]
        both = isinstance(old, Exception) and isinstance(new, Exception)
        return pair.note(check, *say, both and (isinstance(new, type(old)) or isinstance(old, type(new))))
    old, new = ([each] if isinstance(each, torch.Tensor) else list(each) for each in (old, new))
    if old[0].is_meta or new[0].is_meta:
        return pair.note(
            check, *[f"{side[0].device} {tuple(side[0].shape)}" for side in (old, new)], old[0].device == new[0].device
        )
    same = all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
               and torch.equal(a.isnan(), b.isnan()) for a, b in zip(old, new, strict=True))  # fmt: skip
    if same:
        return pair.note(check, "bits", "the same", True)
    masks = all(a.shape == b.shape and torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(old, new, strict=True))
    if exact is None or not masks:
        worst = max(((a - b).abs() / b.abs().clamp_min(1e-30)).nan_to_num().max().item() if a.numel() else 0
                    for a, b in zip(old, new, strict=True))  # fmt: skip
        return pair.note(check, "other bits", f"by {worst:.1e}, finite alike: {masks}", masks and worst < 1e-4)
    exact = [exact] if isinstance(exact, torch.Tensor) else exact
    sides = [old, new, *[eager] * (eager is not None)]
    errors = [
        [((a.double() - e).norm() / e.norm().clamp_min(1e-30)).item() for a, e in zip(side, exact, strict=True)]
        for side in sides
    ]
    limits = [max(3e-6, 1.2 * errors[0][k], 1.2 * errors[-1][k] if eager is not None else 0) for k in range(len(exact))]
    fine = all(error <= limit for error, limit in zip(errors[1], limits, strict=True))
    return pair.note(check, *[" ".join(f"{e:.1e}" for e in side) for side in errors[:2]], fine)


@contextlib.contextmanager
def precision(strict):
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not strict
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def forward(model, x):
    with torch.no_grad():
        return model(x)


def gradients(model, x, which="all", upstream=None):
    x = x.detach().clone().requires_grad_(which != "parameters")
    out = model(x)
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device, dtype=out.dtype).reshape(out.shape)
    wanted = ([x] if which != "parameters" else []) + (list(model.parameters()) if which != "input" else [])
    return torch.autograd.grad((out * weights).sum(), wanted)


def second(model, x):
    """Gradients of a gradient's square: they need create_graph."""
    x = x.detach().clone().requires_grad_()
    parameters = list(model.parameters())
    first = torch.autograd.grad(model(x).square().sum(), [x, *parameters], create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), [x, *parameters])


def check_values(pair, cases, tag):
    for arguments, shape in cases:
        old, new, exact = pair.models(arguments)
        x = pair.input(shape)
        large = x.numel() > 2**26

        def wanted(batch=x, exact=exact):
            parts = batch.split(8) if large else [batch]
            return forward(exact, x.double()) if len(parts) == 1 else torch.cat([forward(exact, p.double()) for p in parts])

        has_strict = not pair.on_cpu and (ON_GPU or "tensor_core" in pair.name or "hopper" in pair.name)
        for strict in (False, True) if has_strict else (False,):
            with precision(strict):
                name = f"{arguments} {shape}{' strict' if strict else ''}"
                compare(pair, f"forward {name}", *(attempt(lambda m=m: forward(m, x)) for m in (old, new)), wanted())
                if not large:
                    found = [attempt(lambda m=m: gradients(m, x)) for m in (old, new)]
                    eager = gradients(pair.eager(exact), x)
                    compare(pair, f"gradients {name}", *found, gradients(exact, x.double()), eager)
        if tag == "small" and shape == cases[0][1]:
            for which in ("input", "parameters"):
                found = [attempt(lambda m=m, w=which: gradients(m, x, w)) for m in (old, new)]
                eager = gradients(pair.eager(exact), x, which)
                compare(pair, f"gradients of {which}", *found, gradients(exact, x.double(), which), eager)
            with precision(has_strict):  # else a maximum may be at another position
                result = attempt(lambda n=new: second(n, x))
            if isinstance(result, Exception):
                pair.note("second derivatives", "", words(result), isinstance(result, NotImplementedError))
            else:
                expected = second(exact, x.double())
                error = max(((a - b).norm() / b.norm()).item() for a, b in zip(result, expected, strict=True))
                pair.note("second derivatives beside float64", "", f"{error:.1e}", error < 2e-2)
        del old, new, exact


def check_special(pair, arguments, shape):
    old, new, exact = pair.models(arguments)
    x = pair.input(shape)
    contents = {"zeros": torch.zeros_like(x), "NaN": x.clone(), "inf": x.clone(), "-inf": x.clone(), "1e30": x * 1e30,
                "1e-30": x * 1e-30}  # fmt: skip
    middle = tuple(n // 2 for n in shape)
    contents["NaN"][middle], contents["inf"][middle], contents["-inf"][middle] = float("nan"), float("inf"), float("-inf")
    for name, content in contents.items():
        compare(pair, f"values: {name}", *(attempt(lambda m=m, c=content: forward(m, c)) for m in (old, new)))
    views = {
        "every second column": pair.input((*shape[:-1], 2 * shape[-1]))[..., ::2],
        "transposed": pair.input((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2),
        "one sample expanded": x[:1].expand(3, *shape[1:]),
        "negative": torch._neg_view(x),
        "no sample": x[:0],
        "offset of one float": pair.input((x.numel() + 1,))[1:].view(shape),
        "float16": x.half(), "float64": x.double(), "int": x.int(), "another device": torch.empty(shape, device="meta"),
        "three dimensions less": x[0, 0], "a channel less": x[:, :-1], "too small": x[..., :1, :1],
    }  # fmt: skip
    if ON_GPU and not pair.on_cpu:
        views["on the CPU"] = x.cpu()
    eager = pair.eager(exact)
    for name, view in views.items():
        results = [attempt(lambda m=m, v=view: forward(m, v)) for m in (old, new, eager)]
        as_eager = isinstance(results[2], Exception) and isinstance(results[1], type(results[2]))
        compare(pair, f"input: {name}", results[1] if as_eager else results[0], results[1])
    found = [attempt(lambda m=m: gradients(m, torch._neg_view(x))) for m in (old, new)]
    eager = gradients(pair.eager(exact), -x)
    compare(pair, "input: negative, gradients", *found, gradients(exact, -x.double()), eager)
    with torch.autocast(pair.device):
        compare(pair, "autocast", *(attempt(lambda m=m: forward(m, x)) for m in (old, new)))
    with torch.inference_mode():
        compare(pair, "inference mode", *(attempt(lambda m=m: m(x)) for m in (old, new)))
    if not shape[0] or pair.model == "conv3d_div_max_gap_bias_sum":
        return
    for model in (old, new):
        model.double()
    compare(pair, "float64 weights", *(attempt(lambda m=m: forward(m, x)) for m in (old, new)))


def check_ways(pair, arguments, shape):
    """Compiled, in threads, on another stream, device or in a graph: the same bits as without."""
    old, new, _ = pair.models(arguments)
    x = pair.input(shape)
    expected, first = forward(new, x), gradients(new, x)
    torch._dynamo.reset()
    backend = "inductor" if ON_GPU else "aot_eager"
    compiled = torch.compile(new, fullgraph=True, backend=backend)
    compare(pair, "compiled beside eager", expected, attempt(lambda: forward(compiled, x)))
    compare(
        pair, "compiled beside eager, gradients", first, attempt(lambda: gradients(compiled, x)), [f.double() for f in first]
    )
    compiled = torch.compile(new, fullgraph=True, backend=backend, dynamic=True)
    compare(pair, "compiled, dynamic", expected, attempt(lambda: forward(compiled, x)))
    if pair.model != "conv3d_div_max_gap_bias_sum":
        found = (
            attempt(lambda: torch.func.grad(lambda t: new(t).sum())(x)),
            attempt(lambda: torch.func.grad(lambda t: old(t).sum())(x)),
        )
        compare(pair, "torch.func.grad", found[1], found[0])
    answers = [None] * 4

    def ask(index):
        answers[index] = attempt(lambda: forward(new, x))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4 if ON_GPU or pair.on_cpu else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers[: len(threads)]:
        compare(pair, "from a thread", expected, answer)
    if not ON_GPU or pair.on_cpu:
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = x * 0
        torch.cuda._sleep(20_000_000)
        late += x
        answer = attempt(lambda: forward(new, late))
    compare(pair, "on another stream, behind its input", expected, answer)
    graph, given = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        answer = forward(new, given)
    given.copy_(x * 2)
    graph.replay()
    compare(pair, "in a CUDA graph, on other values", forward(new, x * 2), attempt(lambda: answer))
    if torch.cuda.device_count() > 1:
        moved = pair.models(arguments)[1].to("cuda:1")
        compare(pair, "on the second GPU", expected.cpu(), attempt(lambda: forward(moved, x.to("cuda:1")).cpu()))
        compare(pair, "weights on the second GPU", *(attempt(lambda m=m: forward(m.to("cuda:1"), x)) for m in pair.models(arguments)[:2]))  # fmt: skip


def check_batches(pair, arguments, shape):
    old, new, exact = pair.models(arguments)
    different = []
    batches = range(1, 201) if ON_GPU or pair.on_cpu else (1, 5, 9)
    for batch in batches:
        x = pair.input((batch, *shape[1:]), batch)
        a, b = forward(old, x), forward(new, x)
        if not torch.equal(a, b):
            error = [((each.double() - forward(exact, x.double())).norm() / a.norm()).item() for each in (a, b)]
            different += [(batch, *error)] if error[1] > max(1.2 * error[0], 3e-6) else []
    pair.note(f"batches {batches}", "", f"worse: {different[:3]}", not different)


def times(functions, rounds, calls):
    """Median microseconds of each, in turn."""
    taken = [[] for _ in functions]
    for _ in range(rounds):
        for own, function in zip(taken, functions, strict=True):
            function()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            own.append((time.perf_counter() - begin) / calls * 1e6)
            torch.cuda.synchronize()
    return [statistics.median(own) for own in taken]


def gpu_times(functions, rounds=15, calls=10):
    """Median milliseconds of each on the GPU, in turn: whole calls, so many that the host is ahead where it can be."""
    taken = [[] for _ in functions]
    for _ in range(rounds):
        for own, function in zip(taken, functions, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            function()
            begin.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) / calls)
    return [statistics.median(own) for own in taken]


def check_times(pair, arguments, sizes):
    def step(model, x):
        def one():
            model.zero_grad(set_to_none=True)
            x.grad = None
            model(x).sum().backward()

        return one

    if not ON_GPU:
        return
    old, new, _ = pair.models(arguments)
    small = pair.input((1, *CASES[pair.model]["small"][0][1][1:]))
    with torch.no_grad():
        a, b = times([lambda: old(small), lambda: new(small)], 15, 200)
    pair.note("host us, no gradient", f"{a:.1f}", f"{b:.1f}", b <= 1.03 * a)
    given = small.clone().requires_grad_()
    a, b = times([step(old, given), step(new, given)], 15, 100)
    pair.note("host us, forward and backward", f"{a:.1f}", f"{b:.1f}", b <= 1.03 * a)
    a, b = times([lambda: old(given), lambda: new(given)], 15, 100)
    pair.note("host us, forward with gradient", f"{a:.1f}", f"{b:.1f}", b <= 1.03 * a)
    if pair.on_cpu:
        return
    for batch, strict in itertools.product((1, 8, 32, 128), (False, True)):
        with precision(strict), torch.no_grad():
            x = torch.rand((batch, *sizes), device="cuda")
            a, b = gpu_times([lambda: old(x), lambda: new(x)])
            peaks = []
            for model in (old, new):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model(x)
                peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            name = f"batch {batch}{' strict' if strict else ''}"
            pair.note(f"ms, forward, {name}", f"{a:.4f}", f"{b:.4f}", b <= 1.02 * a)
            pair.note(f"peak MiB, forward, {name}", *[f"{p:.1f}" for p in peaks], peaks[1] <= 1.02 * peaks[0] + 2)
            if "training" in pair.name:
                with torch.enable_grad():
                    needing = x.requires_grad_()
                    a, b = gpu_times([step(old, needing), step(new, needing)], 9, 5)
                    pair.note(f"ms, training, {name}", f"{a:.4f}", f"{b:.4f}", b <= 1.02 * a)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", help="of: values special ways batches times", default="values special ways batches times")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    warnings.simplefilter("ignore")
    rows = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        zipfile.ZipFile(Path(__file__).with_name("frozen.zip")).extractall(folder)
        if not ON_GPU and not all("/cpu_" in file for file in options.files):
            import cuda_emulator as emulator

            stack.enter_context(emulator.install(mode="check"))
        for file in options.files:
            model, names = file.split("/")
            new, _, old = names.partition("=")
            pair = Pair(model, new, old or new, folder)
            cases = CASES[model]
            arguments, shape = cases["small"][0]
            kinds = {
                "values": lambda p=pair, c=cases: [
                    check_values(p, c[size], size) for size in ("small", "large")[: 1 + (ON_GPU and not p.on_cpu)]
                ],
                "special": lambda p=pair, a=arguments, s=shape: check_special(p, a, s),
                "ways": lambda p=pair, a=arguments, s=shape: check_ways(p, a, s),
                "batches": lambda p=pair, a=arguments, s=shape: check_batches(p, a, s),
                "times": lambda p=pair, c=cases: check_times(p, *c["timed"]),
            }
            for kind in options.only.split():
                failure = attempt(kinds[kind])
                if isinstance(failure, Exception):
                    pair.note(f"{kind} ended early", "", words(failure), False)
            rows += pair.rows
    Path(options.out).mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if ON_GPU else "emulator"
    Path(options.out, "old_and_new.json").write_text(
        json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
    )
    bad = [row for row in rows if not row["fine"]]
    print(f"{len(rows)} checks on {device}, {len(bad)} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
