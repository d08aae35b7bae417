"""What well-tuned library calls reach on this machine, measured in this run: reading and copying memory, matrix products."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from playground.record import Ceilings

from .memory import free_on_host

MIB = 2**20
CPU_MATRIX = 2048
CUDA_MATRIX = 8192


def measure(device: str | torch.device) -> Ceilings:
    """Measure the ceilings of `device`, 'cpu' (torch.get_num_threads() threads) or 'cuda', in about 3 seconds.

    A sum over n float32 values reads 4 n bytes, a copy moves 8 n, with n far beyond the caches; a product of m x m matrices of
    random values (constants draw less power) takes 2 m^3 FLOPs, on the CPU also as a convolution by oneDNN.
    """
    device = torch.device(device)
    return _measure_cpu(device) if device.type == "cpu" else _measure_cuda(device)


def _measure_cpu(device: torch.device) -> Ceilings:
    beyond_cache = max(256 * MIB, 32 * MIB * torch.get_num_threads())  # last-level caches have up to 12 MiB a core
    tensor_bytes = min(beyond_cache, free_on_host() // 8)
    read, copy = _memory_rates(device, tensor_bytes)
    matmul, conv = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    with _setting(matmul, "fp32_precision", "ieee"), _setting(conv, "fp32_precision", "ieee"):
        fp32 = max(_product_rate(device, CPU_MATRIX), _convolution_rate(CPU_MATRIX))
    return Ceilings(read, copy, fp32, None)


def _measure_cuda(device: torch.device) -> Ceilings:
    free = torch.cuda.mem_get_info()[0]
    tensor_bytes = min(4096 * MIB, free // 8)  # so large that a launch's few microseconds do not count
    size = CUDA_MATRIX if free > 2048 * MIB else CUDA_MATRIX // 2
    tf32, fp16, matmul = None, None, torch.backends.cuda.matmul
    try:
        read, copy = _memory_rates(device, tensor_bytes)
        torch.cuda.empty_cache()  # or the product's workspace, which stays, would lie in a segment of such a tensor's size
        with _setting(matmul, "fp32_precision", "ieee"):
            fp32 = _product_rate(device, size)
        if torch.cuda.get_device_capability() >= (8, 0):
            with _setting(matmul, "fp32_precision", "tf32"):
                tf32 = _product_rate(device, size)
        if torch.cuda.get_device_capability() >= (7, 0):
            with _setting(matmul, "allow_fp16_reduced_precision_reduction", False):  # not even parts of a sum
                fp16 = _product_rate(device, size, torch.float16)
    finally:
        torch.cuda.empty_cache()
    return Ceilings(read, copy, fp32, tf32, fp16)


def _memory_rates(device: torch.device, tensor_bytes: int) -> tuple[float, float]:
    """Bytes a second of a sum over float32 values, and of their copy (see `measure`)."""
    source = torch.ones(tensor_bytes // 4, device=device, dtype=torch.float32)
    target = torch.ones_like(source)
    read = _seconds(lambda: source.sum())
    copy = _seconds(lambda: target.copy_(source))
    return source.nbytes / read, 2 * source.nbytes / copy


def _product_rate(device: torch.device, size: int, dtype: torch.dtype = torch.float32) -> float:
    """FLOPs a second of a product of two square matrices (see `measure`), in the precision that is set for float32."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.rand(size, size, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out))


def _convolution_rate(size: int) -> float:
    """FLOPs a second of that product as a convolution of `size` positions with a kernel of 1 x 1, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, size, size // 32, 32, generator=generator).to(memory_format=torch.channels_last)
    weight = torch.rand(size, size, 1, 1, generator=generator).to(memory_format=torch.channels_last)
    with torch.no_grad():
        return 2 * size**3 / _seconds(lambda: torch.conv2d(x, weight))


@contextlib.contextmanager
def _setting(place, name: str, value) -> Iterator[None]:
    """Set a flag of PyTorch's, of precision `fp32_precision` (older ones cannot be put back), and put back what was set."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _seconds(run: Callable) -> float:
    """The median time of as many runs as take 0.4 s, which also lets a GPU's clock rise: an idle one starts low."""
    from torch.utils import benchmark  # with setuptools, which commands that time nothing need not wait for

    timer = benchmark.Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.4).median
