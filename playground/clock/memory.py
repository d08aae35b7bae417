"""Memory that the referee owns and a timed process writes to, gates in it, and where tensors lie there.

On a GPU the two share it through CUDA IPC, which works between a sandbox and the outside. A gate is a word of GPU memory: a
stream waits on the device until it has a value (`cuStreamWaitValue32`), and takes no SM meanwhile. On a CPU it is memory
without a name (memfd) that the timed process was born with; nobody can shorten it, so that the referee may map it.

No address, handle or place that a timed process says is ever used: it is told where its inputs and its results lie.
"""

import ctypes
import mmap
import os
import time

import torch

from playground import tensors
from playground.tensors import bytes_at

# Bound before a judged file is loaded, which may replace them in their modules.
_now, _Event, _current_stream = time.perf_counter, torch._C._CudaEventBase, torch.cuda.current_stream
_synchronize = getattr(torch._C, "_cuda_synchronize", None)  # a build of PyTorch for CPUs has none

ALIGNED = 512  # bytes: where each tensor begins, as torch's allocator aligns them
RELEASE, DONE = 0, 64  # bytes from the start of the inputs: the gates of the inputs, and of the results
HEADER = 4096  # bytes in front of the inputs
SHARED_ALONE = 2 << 20  # bytes: of less, CUDA IPC shares the block of other allocations, too (cudaIpcGetMemHandle's page)
WAIT_GEQ = 0  # cuda.h: CU_STREAM_WAIT_VALUE_GEQ


class Unshareable(Exception):
    """What cannot be shared between processes, or not be judged; the text says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def extent(tensor):
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def laid_out(values, begin=0):
    """Return (where tensors lie in a block, from the byte `begin` on; the first byte behind them).

    A place is {"dtype", "shape", "stride", "offset"}; None of what is no tensor. Raises Unshareable for what is not dense.
    """
    places, at = [], begin
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


def placed(block, place):
    """Return the tensor at a place in a tensor of bytes; None for None."""
    if place is None:
        return None
    dtype = tensors.DTYPES[place["dtype"]]
    whole = torch.empty_strided(place["shape"], place["stride"], dtype=dtype, device="meta")
    return block[place["offset"] : place["offset"] + extent(whole)].view(dtype).as_strided(place["shape"], place["stride"])


class Gpu:
    """GPU memory of this process and of others, by CUDA IPC, and gates there. Raises Unshareable."""

    def __init__(self):
        torch.cuda.synchronize()  # from here on there is a context
        self._library = ctypes.CDLL("libcuda.so.1")
        self._opened, self._allocated, self._gates = {}, [], None

    def _driver(self, function, *arguments):
        if status := getattr(self._library, function)(*arguments):
            raise Unshareable(f"{function} failed with CUDA error {status}")

    def allocate(self, count):
        """Return (a tensor of `count` new bytes, zeros; what `opened` takes in another process)."""
        address, whole, handle = ctypes.c_uint64(), -(-count // SHARED_ALONE) * SHARED_ALONE, _Handle()
        self._driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
        self._allocated.append(address.value)
        self._driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        block = bytes_at(address.value, count)
        block.zero_()
        torch.cuda.synchronize()
        return block, {"handle": bytes(handle).hex(), "bytes": count}

    def opened(self, told):
        """Return the tensor of another process's bytes."""
        if told["handle"] not in self._opened:
            raw, address = _Handle.from_buffer_copy(bytes.fromhex(told["handle"])), ctypes.c_uint64()
            self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, 1)
            self._opened[told["handle"]] = address.value
        return bytes_at(self._opened[told["handle"]], told["bytes"])

    def wait_for(self, block, gate, value):
        """Have the current stream wait on the device until a gate of a block of inputs is `value` or more."""
        self._driver("cuStreamWaitValue32_v2", *self._at(block, gate, value), WAIT_GEQ)

    def write(self, block, gate, value):
        """Have the current stream write `value` to a gate, after all that it was given before."""
        self._driver("cuStreamWriteValue32_v2", *self._at(block, gate, value), 0)

    @staticmethod
    def _at(block, gate, value):
        stream = ctypes.c_void_p(_current_stream().cuda_stream)
        return stream, ctypes.c_uint64(block.data_ptr() + gate), ctypes.c_uint32(value)

    def now(self):
        """Return a moment of the current stream, for `between`."""
        event = _Event(enable_timing=True)
        event.record(_current_stream())
        return event

    def between(self, began, ended):
        """Return the milliseconds between two moments that are over."""
        return _Event.elapsed_time(began, ended)

    def over(self, moment):
        """Return whether the stream has reached a moment."""
        return moment.query()

    def elsewhere(self):
        """Return a context whose current stream does not wait for what this one waits for."""
        return torch.cuda.stream(torch.cuda.Stream())

    def synchronize(self):
        """Wait until the device is idle."""
        _synchronize()

    def free(self):
        """Free what was allocated here, and close what others' memory was opened."""
        _synchronize()
        for address in self._allocated:
            self._driver("cuMemFree_v2", ctypes.c_uint64(address))
        for address in self._opened.values():
            self._driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._allocated, self._opened = [], {}


class Host:
    """Memory without a name, of a process that stands still while the referee uses it: there are no gates.

    `path` is under which the referee opens that of a timed process, `descriptor` what that process itself was born with.
    """

    def __init__(self, descriptor=None):
        self._descriptor, self._maps = descriptor, {}

    def mapped(self, path, count):
        """Return a tensor of the first `count` bytes of a timed process's memory, which becomes as long if it is shorter."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._map(descriptor, count)
        finally:
            os.close(descriptor)

    def opened(self, told):
        """Return the part of this process's memory that it is told of."""
        end = told["begin"] + told["bytes"]
        if end not in self._maps:
            self._maps[end] = self._map(self._descriptor, end)
        return self._maps[end][told["begin"] : end]

    @staticmethod
    def _map(descriptor, count):
        if os.fstat(descriptor).st_size < count:
            os.ftruncate(descriptor, count)
        return torch.frombuffer(mmap.mmap(descriptor, count), dtype=torch.uint8)

    def wait_for(self, block, gate, value):
        """Do nothing: the inputs are there when the process goes on."""

    def write(self, block, gate, value):
        """Do nothing: the process stands still after its reply."""

    def now(self):
        """Return a moment, for `between`."""
        return _now()

    def between(self, began, ended):
        """Return the milliseconds between two moments."""
        return (ended - began) * 1e3

    def synchronize(self):
        """Do nothing: what was started is done."""

    def free(self):
        """Let go of the memory."""
        self._maps = {}
