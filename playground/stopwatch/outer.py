"""GPU memory, gates, layouts and a page of flags: what the outer clock is made of, on both of its sides.

One side is the referee, which owns the inputs and the clock (worker/outer_referee.py). The other is whoever is timed
(worker/clocked.py). A gate is a word of GPU memory: a stream waits on the device until it has a value (`cuStreamWaitValue32`),
and takes no multiprocessor meanwhile. Memory is shared through CUDA IPC, which works between a sandbox and the outside.
docs/how_times_are_taken.md has the protocol.
"""

import ctypes
import json
import os
import time

import torch

from playground import untrusted
from playground.tensors import bytes_at

ALIGNED = 512  # bytes: where each tensor begins, as torch's allocator aligns them
RELEASE, DONE = 0, 64  # bytes from the start of a block: the gates of the inputs, and of the result
HEADER = 4096  # bytes of a block in front of its tensors
SHARED_ALONE = 2 << 20  # bytes: of less, CUDA IPC shares the block of other allocations, too (cudaIpcGetMemHandle's page)
WAIT_GEQ, BUFFER_ID = 0, 7  # cuda.h: CU_STREAM_WAIT_VALUE_GEQ, CU_POINTER_ATTRIBUTE_BUFFER_ID
PAGE, TEXT = 1 << 16, 256  # bytes of the page of flags; where its text begins
# Words of the page: the call that may begin, the call whose work is queued, the text's length, the seed of a call's draws.
CALL, QUEUED, LENGTH, DRAWS = 0, 1, 2, 3
LOOK_SECONDS = 2e-5  # between looks at a flag, once it has been waited for in vain
SPIN_SECONDS = 2e-3  # of looking without a pause
ADDRESSES = 1 << 48  # what a process may say of places is less

DTYPES = {str(each): each for each in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)}
DTYPES |= {str(each): each for each in (torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)}


class Unshareable(Exception):
    """What cannot be shared between processes; the text says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def form_of(tensor):
    """Return what a place says of a tensor, but for where it is."""
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "stride": list(tensor.stride())}


def extent(tensor):
    """Return the bytes from a tensor's first element to the end of its last."""
    return _extent(tensor.dtype, tensor.shape, tensor.stride())


def extent_of(place):
    """Return the same of a place that is claimed, see `placed`. Raises Unshareable where it is none."""
    return _extent(*_form(place, "address")[:3])


def _extent(dtype, shape, stride):
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize if all(shape) else 0


def _form(place, where):
    """(dtype, shape, stride, what it says under `where`) of a place. Raises Unshareable where one is none."""
    try:
        dtype, shape, stride, start = DTYPES[place["dtype"]], place["shape"], place["stride"], place[where]
        numbers = [*shape, *stride, start]
        if len(shape) != len(stride) or not all(type(each) is int and 0 <= each < ADDRESSES for each in numbers):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise Unshareable("a result without a place") from None
    return dtype, shape, stride, start


class Memory:
    """GPU memory of this process and of others, by CUDA IPC. Raises Unshareable."""

    def __init__(self):
        torch.cuda.synchronize()  # from here on there is a context
        self._library = ctypes.CDLL("libcuda.so.1")
        self._opened = {}  # handle -> (address, bytes)
        self._handles = {}  # number of an allocation -> handle
        self._allocated = []

    def _driver(self, function, *arguments):
        if status := getattr(self._library, function)(*arguments):
            raise Unshareable(f"{function} failed with CUDA error {status}")

    def allocate(self, count):
        """Return the address of `count` new bytes, zeros; whoever opens them sees no others."""
        address, count = ctypes.c_uint64(), -(-count // SHARED_ALONE) * SHARED_ALONE
        self._driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        self._allocated.append(address.value)
        bytes_at(address.value, count).zero_()
        torch.cuda.synchronize()
        return address.value

    def free(self):
        """Free what was allocated here, and close what others' memory was opened."""
        torch.cuda.synchronize()
        for address in self._allocated:
            self._driver("cuMemFree_v2", ctypes.c_uint64(address))
        for address, _ in self._opened.values():
            self._driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._allocated, self._opened = [], {}

    def exported(self, address):
        """Return (handle as hexadecimal digits, offset) with which another process finds an address of this one's."""
        base, _ = self._range(address)
        which = ctypes.c_uint64()  # of all allocations that this process ever made: an address may have been another's
        self._driver("cuPointerGetAttribute", ctypes.byref(which), BUFFER_ID, ctypes.c_uint64(base))
        if which.value not in self._handles:
            handle = _Handle()
            self._driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
            self._handles[which.value] = bytes(handle).hex()
        return self._handles[which.value], address - base

    def opened(self, handle):
        """Return (address, bytes) of another process's allocation."""
        if handle not in self._opened:
            raw, address = _Handle.from_buffer_copy(bytes.fromhex(handle)), ctypes.c_uint64()
            self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, 1)
            self._opened[handle] = address.value, self._range(address.value)[1]
        return self._opened[handle]

    def _range(self, address):
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def wait_for(self, address, value):
        """Have the current stream wait on the device until the word at an address is `value` or more."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._driver("cuStreamWaitValue32_v2", stream, ctypes.c_uint64(address), ctypes.c_uint32(value), WAIT_GEQ)

    def write(self, address, value):
        """Have the current stream write `value` to the word at an address, after all that it was given before."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._driver("cuStreamWriteValue32_v2", stream, ctypes.c_uint64(address), ctypes.c_uint32(value), 0)


class Layout:
    """Where tensors lie in a block of shared memory: [{"offset", "shape", "stride", "dtype"}, ...], and its bytes in all.

    What is no tensor is None there. Raises Unshareable for tensors that overlap themselves or have a dtype of their own.
    """

    def __init__(self, tensors):
        self.places, at = [None for _ in tensors], 0
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            if str(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
                raise Unshareable(f"inputs of {tensor.dtype}, {tensor.layout}")
            if extent(tensor) > tensor.numel() * tensor.element_size():
                tensor = tensor.contiguous()
            self.places[i] = form_of(tensor) | {"offset": at}
            at += -(-extent(tensor) // ALIGNED) * ALIGNED
        self.bytes = max(at, ALIGNED)


def placed(block, place):
    """Return the tensor at a place of a Layout, or of a result, in a tensor of bytes. Raises Unshareable if it does not fit."""
    dtype, shape, stride, offset = _form(place, "offset")
    end = offset + _extent(dtype, shape, stride)
    if offset % dtype.itemsize or end > block.numel():
        raise Unshareable("a result beyond its memory")
    return block[offset:end].view(dtype).as_strided(shape, stride)


class Page:
    """A file of flags and one text that both processes read and write. What is in it is believed of nobody: see `text`.

    It is not mapped, since a process that has cut the file short would end another one that reads it so.
    """

    def __init__(self, path, create=False):
        self._file = untrusted.opened(path, os.O_RDWR | (os.O_CREAT if create else 0))
        if create:
            os.pwrite(self._file, bytes(PAGE), 0)

    def get(self, word):
        """Return the value of a flag."""
        return int.from_bytes(os.pread(self._file, 4, 4 * word), "little")

    def set(self, word, value):
        """Give a flag a value."""
        os.pwrite(self._file, value.to_bytes(4, "little"), 4 * word)

    def say(self, value):
        """Write a value as the page's text, in JSON. Raises Unshareable where it is too long."""
        text = json.dumps(value).encode()
        if len(text) > PAGE - TEXT:
            raise Unshareable("it returns too many tensors")
        os.pwrite(self._file, text, TEXT)
        self.set(LENGTH, len(text))

    def text(self):
        """Return the value of the page's text. Raises Unshareable where it is no JSON."""
        try:
            return json.loads(os.pread(self._file, min(self.get(LENGTH), PAGE - TEXT), TEXT))
        except (ValueError, RecursionError):
            raise Unshareable("it has written something else than the places of its results") from None

    def wait(self, word, value, seconds):
        """Return whether a flag has reached a value within `seconds`."""
        began = time.perf_counter()
        while self.get(word) < value:
            waited = time.perf_counter() - began
            if waited > seconds:
                return False
            if waited > SPIN_SECONDS:
                time.sleep(LOOK_SECONDS)
        return True

    def close(self):
        """Close the file."""
        os.close(self._file)
