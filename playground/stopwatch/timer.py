"""One clock for everything: CUDA events with a flushed cache, or a monotonic clock."""

import time
from pathlib import Path

import torch

WARM_UP_CALLS = 3
MIN_REPETITIONS, MAX_REPETITIONS = 7, 200
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 128 << 20}  # several times the last-level caches


def measure(step, device, seconds):
    """{"samples_ms": [...], "peak_mib": ...} of calling `step` for about `seconds`, after a warm-up.

    The cache is flushed before every call: a buffer larger than it is written, then read, so that no call finds its inputs
    or dirty lines there. On CUDA a call lasts from an event before it to an event after it on the current stream.
    """
    for _ in range(WARM_UP_CALLS - 1):
        step()
    _, peak_mib = peak_memory(step, device)
    flush = torch.empty(FLUSH_BYTES[device.type] // 4, device=device)
    clock = _cuda_call if device.type == "cuda" else _cpu_call
    samples, deadline = [], time.perf_counter() + seconds
    while len(samples) < MIN_REPETITIONS or (time.perf_counter() < deadline and len(samples) < MAX_REPETITIONS):
        flush.zero_()
        flush.sum()
        samples.append(clock(step))
    return {"samples_ms": samples, "peak_mib": peak_mib}


def _cuda_call(step):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = step()
    end.record()
    torch.cuda.synchronize()
    del result  # only now: freeing it earlier is not part of the call
    return start.elapsed_time(end)


def _cpu_call(step):
    start = time.perf_counter_ns()
    result = step()
    elapsed = time.perf_counter_ns() - start
    del result
    return elapsed / 1e6


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
