"""The inner clock: CUDA events with a flushed cache, or a monotonic clock.

The functions that a clock uses are bound when it is made, which is before a judged file is loaded: a file that replaces them
in their modules changes nothing here. What it can still do to its own process is seen from outside.
"""

import collections
import ctypes
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

CUDA_FLUSH_BYTES = 256 << 20  # or four times the L2 cache, where that is more
CPU_FLUSH_BYTES = 128 << 20
LONG_MS = 12.0  # of flushes in a row: several of the turns, about 2 ms each, that processes on one GPU take
CYCLES_PER_MS = 1_700_000  # of a GPU, about
# Before a call the GPU waits for as long as the host may take to launch all of it, within these bounds.
HEAD_START_MS, LONGEST_HEAD_START_MS = 0.3, 1.0
HEAD_START_SHARE = 1.5  # of the longest of the process's last LAUNCHES
LAUNCHES = 10
LATE_MS, LATE_SHARE = 0.005, 0.02  # after the stream's end: beyond both the device was busy on others
HOST_LAG_MS = 0.1  # of a host that has to say when the device is idle
CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED = 0, 801
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
_glibc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def clock_for(device: torch.device | str) -> "CudaClock | CpuClock":
    """Return a CudaClock or a CpuClock."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


class CpuClock:
    """`flush()`, which takes `flush_ms`, and `time(step)` with a monotonic clock; `between` two moments of `now()`."""

    launch_ms, flush_ms = 0.0, 0.0  # the host does all of a call itself

    def __init__(self) -> None:
        self._now, self._buffer = time.perf_counter_ns, torch.empty(0)

    def now(self) -> int:
        """Return a moment, for `between`."""
        return self._now()

    def between(self, began: int, ended: int) -> float:
        """Return the milliseconds between two moments."""
        return (ended - began) / 1e6

    def flush(self) -> None:
        """Write, then read more than the caches hold, so that a call finds neither its inputs nor dirty lines there."""
        if not len(self._buffer):
            self._buffer = torch.empty(CPU_FLUSH_BYTES // 4)
        began = self.now()
        self._buffer.zero_()
        self._buffer.sum()
        self.flush_ms = self.between(began, self.now())

    def time(self, step: Callable[[], Any]) -> tuple[float, bool, Any]:
        """Return (milliseconds, False, a copy of the result) of step().

        The copy is made at once: what another thread would write after the step returned is not in it.
        """
        began = self.now()
        result = step()
        elapsed = self.between(began, self.now())
        return elapsed, False, torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), result)

    def keep_memory(self) -> None:
        """Have glibc keep what is freed, as torch's CUDA allocator does.

        Page faults of large tensors can take longer than the work: two processes with the same code then differ by a third.
        """
        if _glibc:
            _glibc.mallopt(M_MMAP_MAX, 0)
            _glibc.mallopt(M_TRIM_THRESHOLD, -1)

    def wait(self) -> None:
        """Do nothing: on the CPU, what was started is done."""


class CudaClock:
    """`flush()` and `time(step)` with CUDA events on the current stream; `between` two events of `now()`; `wait()` for all.

    The GPU waits a moment before the first event, so that the host has launched all of a short step when it begins: what takes
    4 us on the device would otherwise take up to 50. It waits longer where the host was slower of late. Other streams wait with
    it, and are waited for, on the device alone (`_AllStreams`; without one, before CUDA 12.5, by the host).
    """

    def __init__(self) -> None:
        self._event = torch._C._CudaEventBase  # torch.cuda.Event's, whose own methods are Python and can be replaced
        self._record, self._elapsed = self._event.record, self._event.elapsed_time
        self._current_stream = torch.cuda.current_stream
        self._now, self._sleep, self.wait = time.perf_counter_ns, torch._C._cuda_sleep, torch._C._cuda_synchronize
        driver = ctypes.CDLL("libcuda.so.1")
        self._reset_persisting = driver.cuCtxResetPersistingL2Cache
        self._all_streams = _AllStreams(driver) if hasattr(driver, "cuCtxRecordEvent") else None
        self._buffer: Any = None
        self._launches_ms = collections.deque([0.0], maxlen=LAUNCHES)

    def now(self, stream: Any = None) -> Any:
        """Return an event that it records on a stream, or on the current one."""
        event = self._event(enable_timing=True)
        self._record(event, stream or self._current_stream())
        return event

    def between(self, began: Any, ended: Any) -> float:
        """Return the milliseconds between two events that are over."""
        return self._elapsed(began, ended)

    def flush(self) -> None:
        """Reset what was set to persist in L2, then write and read several times what L2 holds."""
        if self._buffer is None:
            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._buffer = torch.empty(max(CUDA_FLUSH_BYTES, 4 * cache) // 4, device="cuda")
        if (status := self._reset_persisting()) != CUDA_ERROR_NOT_SUPPORTED:
            _succeed("cuCtxResetPersistingL2Cache", status)
        self._flush_events = self._timed_flushes(1)

    def _timed_flushes(self, count: int) -> tuple[Any, Any]:
        """The events before and after them."""
        self._sleep(round(HEAD_START_MS * CYCLES_PER_MS))
        start = self.now()
        for _ in range(count):
            self._buffer.zero_()
            self._buffer.sum()
        return start, self.now()

    @property
    def flush_ms(self) -> float:
        """Return what the last flush took, on a device that is idle by now."""
        return self.between(*self._flush_events)

    @property
    def launch_ms(self) -> float:
        """Return what the host took to launch the last call."""
        return self._launches_ms[-1]

    def flush_in_a_row(self, flush_ms: float) -> float:
        """Return what each of as many flushes takes as fill LONG_MS where one takes `flush_ms`.

        A single one fits between the turns of another process on this GPU; these hold such turns.
        """
        count = math.ceil(LONG_MS / flush_ms)
        events = self._timed_flushes(count)
        self.wait()
        return self.between(*events) / count

    def time(self, step: Callable[[], Any]) -> tuple[float, bool, Any]:
        """Return (milliseconds, whether other streams were busy after the current one, result) of step().

        The milliseconds are until the current stream is done, or all of them are where that is later.
        """
        stream = self._current_stream()
        self.wait()  # or, with an old driver, work on another stream would begin during the flush
        head_start = min(LONGEST_HEAD_START_MS, max(HEAD_START_MS, HEAD_START_SHARE * max(self._launches_ms)))
        self._sleep(round(head_start * CYCLES_PER_MS))
        start = self.now()
        if self._all_streams:
            self._all_streams.wait_for(start)
        began = self._now()
        result = step()
        self._launches_ms.append((self._now() - began) / 1e6)
        end = self.now(stream)
        if self._all_streams:
            self._all_streams.awaited_by(stream)
        else:
            self.wait()
        idle = self.now(stream)
        self.wait()
        on_stream, late = self.between(start, end), self.between(end, idle)
        least = LATE_MS if self._all_streams else HOST_LAG_MS
        if late <= max(least, LATE_SHARE * on_stream):
            return on_stream, False, result
        return on_stream + late, True, result

    def keep_memory(self) -> None:
        """Do nothing: torch's allocator keeps what is freed."""


class _AllStreams:
    """What a context is given, on any of its streams, as one: the driver's cuCtxWaitEvent and cuCtxRecordEvent, CUDA 12.5."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        torch.cuda.synchronize()  # from here on there is a context
        self._context = ctypes.c_void_p()
        _succeed("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._wait, self._record = driver.cuCtxWaitEvent, driver.cuCtxRecordEvent
        self._done = torch._C._CudaEventBase()
        self._done.record(torch.cuda.current_stream())  # which makes it
        self._let_wait = self._done.wait

    def wait_for(self, event: Any) -> None:
        """Have nothing that is given to a stream from now on begin before the event."""
        _succeed("cuCtxWaitEvent", self._wait(self._context, ctypes.c_void_p(event.cuda_event)))

    def awaited_by(self, stream: Any) -> None:
        """Have the stream wait until everything is done that any stream was given."""
        _succeed("cuCtxRecordEvent", self._record(self._context, ctypes.c_void_p(self._done.cuda_event)))
        self._let_wait(stream)


def _succeed(function: str, status: int) -> None:
    if status != CUDA_SUCCESS:
        raise RuntimeError(f"{function} failed with CUDA error {status}")
