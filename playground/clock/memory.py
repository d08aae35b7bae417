"""Memory that the referee owns and a timed process writes to, gates in it, and where tensors lie there.

On a GPU the two share it through CUDA IPC, which works between a sandbox and the outside. A gate is a word of GPU memory: a
stream waits on the device until it has a value (`cuStreamWaitValue32`), and takes no SM meanwhile. On a CPU it is memory
without a name (memfd) that the timed process was born with; nobody can shorten it, so that the referee may map it.

No address, handle or place that a timed process says is ever used: it is told where its inputs and its results lie. It says
in which order the elements of a result do.
"""

import ctypes
import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from playground import tensors
from playground.tensors import bytes_at

_current_stream = torch.cuda.current_stream  # bound before a judged file is loaded, which may replace it in its module

ALIGNED = 512  # bytes: where each tensor begins, as torch's allocator aligns them
RELEASE, DONE = 0, 64  # bytes from the start of the inputs: the gates of the inputs, and of the results
HEADER = 4096  # bytes in front of the inputs
SHARED_ALONE = 2 << 20  # bytes: of less, CUDA IPC shares the block of other allocations, too (cudaIpcGetMemHandle's page)
WAIT_GEQ = 0  # cuda.h: CU_STREAM_WAIT_VALUE_GEQ

Place = dict[str, Any] | None


class Unshareable(Exception):
    """What cannot be shared between processes, or not be judged; the text says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def laid_out(values: Iterable[Any], begin: int = 0) -> tuple[list[Place], int]:
    """Return (where tensors lie in a block, from the byte `begin` on; the first byte behind them).

    A place is {"dtype", "shape", "stride", "offset"}; None of what is no tensor. Raises Unshareable for what is not dense.
    """
    places, at = list[Place](), begin
    for value in values:
        if not isinstance(value, torch.Tensor):
            places.append(None)
            continue
        if value.layout != torch.strided or value.is_quantized:
            raise Unshareable(f"inputs of {value.dtype}, {value.layout}")
        if extent(value) != value.numel() * value.element_size():  # it has gaps, or elements share memory
            value = value.contiguous()
        form = {"dtype": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
        places.append(form | {"offset": at})
        at += -(-extent(value) // ALIGNED) * ALIGNED
    return places, at


def placed(block: torch.Tensor, place: Place) -> Any:
    """Return the tensor at a place in a tensor of bytes; None for None."""
    if place is None:
        return None
    dtype = tensors.DTYPES[place["dtype"]]
    whole = torch.empty_strided(place["shape"], place["stride"], dtype=dtype, device="meta")
    return block[place["offset"] : place["offset"] + extent(whole)].view(dtype).as_strided(place["shape"], place["stride"])


def lying_as(place: Any, stride: Any) -> Any:
    """Return the place of a tensor that lies by a process's strides; as it is where those leave gaps or overlap."""
    shape = place["shape"]
    if not isinstance(stride, list) or len(stride) != len(shape):
        return place
    if not all(type(each) is int and 0 <= each < 1 << 63 for each in stride):
        return place
    steps = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1)
    is_dense = all(step == math.prod(size for _, size in steps[:inner]) for inner, (step, _) in enumerate(steps))
    return place | {"stride": stride} if is_dense else place


class Gpu:
    """GPU memory of this process and of others, by CUDA IPC, and gates there. Raises Unshareable."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # from here on there is a context
        self._library = ctypes.CDLL("libcuda.so.1")
        self._opened, self._allocated = dict[str, int](), list[int]()

    def _driver(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise Unshareable(f"{function} failed with CUDA error {status}")

    def allocate(self, count: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return (a tensor of `count` new bytes, zeros; what `opened` takes in another process)."""
        address, whole, handle = ctypes.c_uint64(), -(-count // SHARED_ALONE) * SHARED_ALONE, _Handle()
        self._driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
        self._allocated.append(address.value)
        self._driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        block = bytes_at(address.value, count)
        block.zero_()
        torch.cuda.synchronize()
        return block, {"handle": bytes(handle).hex(), "bytes": count}

    def opened(self, told: dict[str, Any]) -> torch.Tensor:
        """Return the tensor of another process's bytes."""
        if told["handle"] not in self._opened:
            raw, address = _Handle.from_buffer_copy(bytes.fromhex(told["handle"])), ctypes.c_uint64()
            self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, 1)
            self._opened[told["handle"]] = address.value
        return bytes_at(self._opened[told["handle"]], told["bytes"])

    def wait_for(self, block: torch.Tensor, gate: int, value: int) -> None:
        """Have the current stream wait on the device until a gate of a block of inputs is `value` or more."""
        self._at("cuStreamWaitValue32_v2", block, gate, value, WAIT_GEQ)

    def write(self, block: torch.Tensor, gate: int, value: int) -> None:
        """Have the current stream write `value` to a gate, after all that it was given before."""
        self._at("cuStreamWriteValue32_v2", block, gate, value, 0)

    def _at(self, function: str, block: torch.Tensor, gate: int, value: int, flag: int) -> None:
        stream, address = ctypes.c_void_p(_current_stream().cuda_stream), ctypes.c_uint64(block.data_ptr() + gate)
        self._driver(function, stream, address, ctypes.c_uint32(value), flag)

    def elsewhere(self) -> Any:
        """Return a context whose current stream does not wait for what this one waits for."""
        return torch.cuda.stream(torch.cuda.Stream())

    def free(self) -> None:
        """Free what was allocated here, and close what others' memory was opened, when the device is idle."""
        torch._C._cuda_synchronize()
        for address in self._allocated:
            self._driver("cuMemFree_v2", ctypes.c_uint64(address))
        for address in self._opened.values():
            self._driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._allocated, self._opened = [], {}


class Host:
    """Memory without a name, `descriptor` in the process that was born with it: which stands still while the referee uses it,
    so that there are no gates.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor, self._maps = descriptor, dict[int, torch.Tensor]()

    def mapped(self, path: Path | str, count: int) -> torch.Tensor:
        """Return a tensor of the first `count` bytes of a timed process's memory, which becomes as long if it is shorter."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._map(descriptor, count)
        finally:
            os.close(descriptor)

    def opened(self, told: dict[str, Any]) -> torch.Tensor:
        """Return the part of this process's memory that it is told of."""
        end = told["begin"] + told["bytes"]
        if end not in self._maps:
            self._maps[end] = self._map(self._descriptor, end)
        return self._maps[end][told["begin"] : end]

    @staticmethod
    def _map(descriptor: int, count: int) -> torch.Tensor:
        if os.fstat(descriptor).st_size < count:
            os.ftruncate(descriptor, count)
        return torch.frombuffer(mmap.mmap(descriptor, count), dtype=torch.uint8)

    def wait_for(self, block: torch.Tensor, gate: int, value: int) -> None:
        """Do nothing: the inputs are there when the process goes on, and it stands still after its reply."""

    write = wait_for

    def free(self) -> None:
        """Let go of the memory."""
        self._maps = {}
