"""How fast this machine can be at most, measured in this run: reading and copying memory, and multiplying matrices.

They are what well-tuned library calls reach, not what a data sheet promises: a kernel that reaches one is as good as those.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from . import requirements

MIB = 2**20
CPU_MATRIX = 2048
CUDA_MATRIX = 8192


@dataclass(frozen=True)
class Ceilings:
    """Rates a second, each from the median time of several runs; None where the hardware has no TF32 or no fast fp16."""

    read_bytes_per_second: float
    copy_bytes_per_second: float
    fp32_flops: float
    tf32_flops: float | None
    fp16_flops: float | None = None  # summed in float32


def measure(device: str | torch.device) -> Ceilings:
    """The ceilings of `device`, 'cpu' (with torch.get_num_threads() threads) or a CUDA device, in 3 seconds at most or so.

    Bytes: a sum over n float32 values reads 4 n bytes; a copy of them reads 4 n and writes 4 n, 8 n in all. n is far larger
    than the caches. FLOPs: a product of two matrices of m x m takes m multiplications and m additions for each of its m^2
    elements (the first addition counted as the others), 2 m^3 in all, on random values: constants draw less power, so
    that a GPU would run faster than it does on real data. On the CPU the same product is also computed as a convolution with
    a kernel of 1 x 1, by another library (oneDNN), and the faster one counts.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _measure_cpu()
    if device.type != "cuda":
        raise ValueError(f"ceilings are measured on 'cpu' and 'cuda', not on {str(device)!r}")
    if missing := requirements.missing_gpu():
        raise RuntimeError(str(missing))
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(f"there is no {str(device)!r}: this machine has {torch.cuda.device_count()} GPU(s)")
    with torch.cuda.device(device):
        return _measure_cuda()


def _measure_cpu() -> Ceilings:
    beyond_cache = max(256 * MIB, 32 * MIB * torch.get_num_threads())  # last-level caches have up to 12 MiB a core
    tensor_bytes = min(beyond_cache, psutil.virtual_memory().available // 8)
    device = torch.device("cpu")
    read, copy = _memory_rates(device, tensor_bytes, _cpu_seconds)
    onednn = torch.backends.mkldnn
    with _fp32_precision(onednn.matmul, "ieee"), _fp32_precision(onednn.conv, "ieee"):
        fp32 = max(_product_rate(device, CPU_MATRIX, _cpu_seconds), _convolution_rate(CPU_MATRIX))
    return Ceilings(read, copy, fp32, None)


def _measure_cuda() -> Ceilings:
    free = torch.cuda.mem_get_info()[0]
    device = torch.device("cuda", torch.cuda.current_device())
    tensor_bytes = min(4096 * MIB, free // 8)  # so large that a launch's few microseconds do not count
    size = CUDA_MATRIX if free > 2048 * MIB else CUDA_MATRIX // 2
    tf32 = fp16 = None
    try:
        read, copy = _memory_rates(device, tensor_bytes, _cuda_seconds)
        torch.cuda.empty_cache()  # or the product's workspace, which stays, would lie in a segment of such a tensor's size
        with _fp32_precision(torch.backends.cuda.matmul, "ieee"):
            fp32 = _product_rate(device, size, _cuda_seconds)
        if torch.cuda.get_device_capability() >= (8, 0):
            with _fp32_precision(torch.backends.cuda.matmul, "tf32"):
                tf32 = _product_rate(device, size, _cuda_seconds)
        if torch.cuda.get_device_capability() >= (7, 0):
            with _fp16_products_summed_in_fp32():
                fp16 = _product_rate(device, size, _cuda_seconds, torch.float16)
    finally:
        torch.cuda.empty_cache()
    return Ceilings(read, copy, fp32, tf32, fp16)


def _memory_rates(device: torch.device, tensor_bytes: int, seconds: Callable) -> tuple[float, float]:
    """Bytes a second of a sum over float32 values, and of their copy (see `measure`)."""
    source = torch.ones(tensor_bytes // 4, device=device, dtype=torch.float32)
    target = torch.ones_like(source)
    read = seconds(lambda: source.sum())
    copy = seconds(lambda: target.copy_(source))
    return source.nbytes / read, 2 * source.nbytes / copy


def _product_rate(device: torch.device, size: int, seconds: Callable, dtype: torch.dtype = torch.float32) -> float:
    """FLOPs a second of a product of two square matrices (see `measure`), in the precision that is set for float32."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.rand(size, size, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out))


def _convolution_rate(size: int) -> float:
    """FLOPs a second of that product as a convolution of `size` positions with a kernel of 1 x 1, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, size, size // 32, 32, generator=generator).to(memory_format=torch.channels_last)
    weight = torch.rand(size, size, 1, 1, generator=generator).to(memory_format=torch.channels_last)
    with torch.no_grad():
        return 2 * size**3 / _cpu_seconds(lambda: torch.conv2d(x, weight))


@contextlib.contextmanager
def _fp16_products_summed_in_fp32() -> Iterator[None]:
    """Without PyTorch's permission to add parts of a product's sums in fp16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before


@contextlib.contextmanager
def _fp32_precision(matmul, precision: str) -> Iterator[None]:
    """Set how float32 products are computed ('ieee', 'tf32'), and put back what was set.

    Through `fp32_precision`, because the older flags (allow_tf32, set_float32_matmul_precision) cannot be put back: each
    changes the other, and reading one raises after `fp32_precision` was set.
    """
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _cpu_seconds(run: Callable) -> float:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return _median(timed)


def _cuda_seconds(run: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return _median(timed)


def _median(timed: Callable[[], float]) -> float:
    """The median of at least 3 runs, and of as many more as start within 0.4 s, after one that is not counted.

    The time also lets a GPU's clock rise: an idle one starts low.
    """
    timed()
    times = []
    deadline = time.perf_counter() + 0.4
    while len(times) < 3 or time.perf_counter() < deadline:
        times.append(timed())
    return statistics.median(times)
