"""One clock for everything: CUDA events with a flushed cache, or a monotonic clock.

The functions that a clock uses are bound when it is made, which is before a judged file is loaded: a file that replaces them
in their modules changes nothing here. What it can still do to its own process is seen from outside
(playground/driver/timing.py).
"""

import collections
import ctypes
import math
import platform
import time
from pathlib import Path

import torch

from playground import tensors

CUDA_FLUSH_BYTES = 256 << 20  # or four times the L2 cache, where that is more
CPU_FLUSH_BYTES = 128 << 20
LONG_MS = 12.0  # of flushes in a row: several of the turns, about 2 ms each, that processes on one GPU take
CYCLES_PER_MS = 1_700_000  # of a GPU, about
# Before a call the GPU waits for as long as the host may take to launch all of it, within these bounds.
HEAD_START_MS, LONGEST_HEAD_START_MS = 0.3, 1.0
HEAD_START_SHARE = 1.5  # of the longest of the process's last LAUNCHES
LAUNCHES = 10
LATE_MS, LATE_SHARE = 0.005, 0.02  # after the stream's end: beyond both the device was busy on others
MOST_LAG_MS = 0.03  # of a host that sees late that the device is idle: beyond it, where it waited for the device, it was work
CUDA_ERROR_NOT_SUPPORTED = 801
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
_glibc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def clock_for(device):
    """A CudaClock or a CpuClock."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


def is_late(late, on_stream):
    """Whether the device was busy on other streams for `late` ms after a stream that took `on_stream` ms."""
    return late > max(LATE_MS, LATE_SHARE * on_stream)


class CpuClock:
    """`flush()` and `time(step)` with a monotonic clock."""

    settling_calls = 0

    def __init__(self):
        self._now = time.perf_counter_ns
        self._buffer = None

    def flush(self):
        """Write, then read more than the caches hold, so that a call finds neither its inputs nor dirty lines there."""
        if self._buffer is None:
            self._buffer = torch.empty(CPU_FLUSH_BYTES // 4)
        began = self._now()
        self._buffer.zero_()
        self._buffer.sum()
        self._flush_ms = (self._now() - began) / 1e6

    def flush_ms(self):
        """What the last flush took."""
        return self._flush_ms

    def time(self, step):
        """(milliseconds, the same, a copy of the result) of step().

        The copy is made at once: what another thread would write after the step returned is not in it.
        """
        start = self._now()
        result = step()
        elapsed = (self._now() - start) / 1e6
        return elapsed, elapsed, _copy(result)

    def keep_memory(self):
        """Have glibc keep what is freed, as torch's CUDA allocator does.

        Otherwise large tensors come from the kernel, or not, as the heap happens to lie, and the page faults of those that do
        can take longer than the work: two processes that run the same code then differ by a third.
        """
        if _glibc:
            _glibc.mallopt(M_MMAP_MAX, 0)
            _glibc.mallopt(M_TRIM_THRESHOLD, -1)

    def wait(self):
        """Until what was started is done: on the CPU it is."""


class CudaClock:
    """`flush()` and `time(step)` with CUDA events on the stream that is current when the step begins.

    The GPU waits a moment before the first event, so that the host has launched all of a short step when it begins: what takes
    4 us on the device would otherwise take anything up to 50, as fast as the host happens to be. It waits longer where the host
    was slower of late: on a busy one the same eight launches take 0.1 ms or 0.5.
    """

    settling_calls = 1  # after another process had the GPU, caches of code and of addresses are cold

    def __init__(self):
        self._event = torch._C._CudaEventBase  # torch.cuda.Event's, whose own methods are Python and can be replaced
        self._record, self._elapsed = self._event.record, self._event.elapsed_time
        self._current_stream = torch.cuda.current_stream
        self._now = time.perf_counter_ns
        self._synchronize, self._wait_for = torch._C._cuda_synchronize, self._event.synchronize
        self._sleep = torch._C._cuda_sleep
        self._reset_persisting = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache
        self._buffer = None
        self._launches_ms = collections.deque([0.0], maxlen=LAUNCHES)

    def flush(self):
        """Reset what was set to persist in L2, then write and read several times what L2 holds."""
        if self._buffer is None:
            cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._buffer = torch.empty(max(CUDA_FLUSH_BYTES, 4 * cache) // 4, device="cuda")
        if (status := self._reset_persisting()) not in (0, CUDA_ERROR_NOT_SUPPORTED):
            raise RuntimeError(f"cuCtxResetPersistingL2Cache failed with CUDA error {status}")
        self._flush_events = self._timed_flushes(1)

    def _give_head_start(self, milliseconds=HEAD_START_MS):
        self._sleep(round(milliseconds * CYCLES_PER_MS))

    def _timed_flushes(self, count):
        """The events before and after them."""
        stream = self._current_stream()
        start, end = (self._event(enable_timing=True) for _ in range(2))
        self._give_head_start()
        self._record(start, stream)
        for _ in range(count):
            self._buffer.zero_()
            self._buffer.sum()
        self._record(end, stream)
        return start, end

    def flush_ms(self):
        """What the last flush took, on a device that is idle by now."""
        return self._elapsed(*self._flush_events)

    def flush_in_a_row(self, flush_ms):
        """What each of as many flushes takes as fill LONG_MS where one takes `flush_ms`.

        A single one fits between the turns of another process on this GPU; these hold such turns.
        """
        count = math.ceil(LONG_MS / flush_ms)
        start, end = self._timed_flushes(count)
        self._synchronize()
        return self._elapsed(start, end) / count

    def time(self, step):
        """(milliseconds on the stream, milliseconds until the whole device was idle, result) of step().

        The second time holds the work on every stream, which on another one may begin while this one waits: where there is any,
        the wait is part of it. There is none where the host, after the stream's end, did not have to wait for the device.
        What the host takes to see that the device is idle, which differs by 15 us between two processes, is measured without a
        step and subtracted.
        """
        waits, start = (self._event(enable_timing=True) for _ in range(2))
        stream = self._current_stream()
        self._synchronize()  # or work on another stream would begin during the flush
        self._record(waits, stream)
        self._give_head_start(min(LONGEST_HEAD_START_MS, max(HEAD_START_MS, HEAD_START_SHARE * max(self._launches_ms))))
        self._record(start, stream)
        began = self._now()
        result = step()
        self._launches_ms.append((self._now() - began) / 1e6)
        end, idle, waited_ms = self._end_and_idle(stream)
        self._give_head_start()
        lag = self._elapsed(*self._end_and_idle(stream)[:2])
        on_stream = self._elapsed(start, end)
        late = max(0.0, self._elapsed(end, idle) - min(lag, MOST_LAG_MS))
        if not is_late(min(late, waited_ms), on_stream):
            return on_stream, on_stream, result
        return on_stream, on_stream + late + self._elapsed(waits, start), result

    def _end_and_idle(self, stream):
        """Events of the end of what the stream was given, and of an idle device as the host saw it.

        And the milliseconds that the host waited for the device when the stream was done: beyond twice what it takes, right
        after that, where there is nothing to wait for.
        """
        end, idle = (self._event(enable_timing=True) for _ in range(2))
        self._record(end, stream)
        self._wait_for(end)
        stream_done = self._now()
        self._synchronize()
        device_idle = self._now()
        self._record(idle, stream)
        self._synchronize()
        began = self._now()
        self._synchronize()
        for_nothing = self._now() - began
        return end, idle, (device_idle - stream_done - 2 * for_nothing) / 1e6

    def keep_memory(self):
        """torch's allocator keeps what is freed."""

    def wait(self):
        """Until the device is idle."""
        self._synchronize()


class Timed:
    """A workload under a clock, in the process that runs it."""

    def __init__(self, workload, device, clock):
        self._workload = workload
        self._device = device
        self._clock = clock
        self._content = None
        self._result = None
        self._held = []

    def start(self, seeds):
        """Warm up with a call for each seed. {"milliseconds": of making content, flushing and calling, "peak_mib"}."""
        for seed in seeds:
            began = time.perf_counter()
            content = self._workload.fresh(seed)
            self._clock.flush()
            _, peak_mib = peak_memory(lambda content=content: self._workload(content), self._device)
            self._clock.wait()
            milliseconds = (time.perf_counter() - began) * 1e3
        return {"milliseconds": milliseconds, "peak_mib": peak_mib}

    def time(self, seeds):
        """Times one call for each seed, each on content of its own, and keeps the last one's result.

        {"samples_ms", "idle_ms", "flush_ms"}: see the clocks. The first `settling_calls` of them are for settling.
        """
        samples, flushes = [], []
        for seed in seeds:
            self._result = None
            self._content = content = self._workload.fresh(seed)
            self._clock.flush()
            *times, self._result = self._clock.time(lambda content=content: self._workload(content))
            tensors.require_plain(self._result)
            samples.append(times)
            flushes.append(self._clock.flush_ms())
        on_stream, until_idle = map(list, zip(*samples, strict=True))
        return {"samples_ms": on_stream, "idle_ms": until_idle, "flush_ms": flushes}

    def result(self):
        """(result of the last timed call, names of the gradients, None where it is no list of such)."""
        return self._result, self._workload.names(self._content)

    def hold(self, seeds):
        """Make the contents that `repeat` uses."""
        self._held = [self._workload.fresh(seed) for seed in seeds]
        self._clock.wait()

    def repeat(self, count):
        """Call `count` times, back to back, without a clock: the driver holds one outside."""
        for call in range(count):
            self._workload(self._held[call % len(self._held)])
        self._clock.wait()

    def forget(self):
        """Let go of contents and results."""
        self._content = self._result = None
        self._held = []


def _copy(result):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), result)


def peak_memory(step, device):
    """(result of step(), MiB that it took at its peak on top of what was in use), None where that cannot be measured.

    On CUDA what torch's allocator handed out; on Linux the growth of the process's resident memory (VmHWM, reset through
    clear_refs as proc(5) describes), which leaves out memory that the allocator already held.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step()
        torch.cuda.synchronize()
        return result, (torch.cuda.max_memory_allocated() - before) / 2**20
    if _glibc:
        _glibc.malloc_trim(0)  # or memory that was freed but kept would be taken without a trace
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_kib("VmRSS")
    except OSError:
        return step(), None
    result = step()
    return result, (_resident_kib("VmHWM") - before) / 2**10


def _resident_kib(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}")
