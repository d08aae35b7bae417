"""The figures that are asked for, by their names in Nsight Compute, what they mean, and how its CSV gives them.

Names and meanings are those of NVIDIA's documentation (https://docs.nvidia.com/nsight-compute/ProfilingGuide, "Metrics
Reference" and "Statistical Sampler"; `ncu --query-metrics --chip gh100` lists the names). Shares of a peak are over all cycles
that a kernel takes ("elapsed"), but for issue slots and occupancy, which are over those in which an SM has work.
"""

import csv
import math
import re

from playground.emulator import counting

TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"

# Key -> the metric; percentages, to be averaged over launches by the time that each takes.
SHARES = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "matrix": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
}

# What the emulator counts, too: (transactions, requests) of warps, to be summed over launches.
_DEVICE = ("l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum")
_SHARED = ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum", "smsp__sass_inst_executed_op_shared_{}.sum")
PER_REQUEST = {
    f"{memory} memory {done}": tuple(name.format(operation) for name in names)
    for memory, names in (("device", _DEVICE), ("shared", _SHARED))
    for done, operation in (("read", "ld"), ("written", "st"))
}
TRANSACTIONS = {name: "sectors" if name.startswith("device") else "wavefronts" for name in PER_REQUEST}

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SELECTED = "selected"  # the warp issues: no stall, but a part of the cycles that all of them are shares of

# Why a warp that is resident does not issue an instruction in a cycle.
STALLS = {
    "barrier": "waits for the other warps at __syncthreads",
    "branch_resolving": "waits for a branch target",
    "dispatch_stall": "the dispatcher holds the instruction back",
    "drain": "waits for its stores at its end",
    "gmma": "waits for wgmma to be ready (Hopper)",
    "imc_miss": "waits for constant memory",
    "lg_throttle": "the queue of device-memory instructions is full",
    "long_scoreboard": "waits for a value from device memory or a cache",
    "math_pipe_throttle": "the arithmetic unit it needs is busy",
    "membar": "waits at a memory fence",
    "mio_throttle": "the queue of shared-memory and special instructions is full",
    "misc": "another reason of the hardware",
    "no_instruction": "waits for instructions to be fetched",
    "not_selected": "is ready, but another warp was chosen",
    "short_scoreboard": "waits for a value from shared memory or a special function",
    "sleeping": "sleeps (nanosleep)",
    "tex_throttle": "the queue of texture instructions is full",
    "wait": "waits a fixed number of cycles for its last instruction",
}

ALL = (
    TIME,
    REGISTERS,
    *SHARES.values(),
    *(metric for pair in PER_REQUEST.values() for metric in pair),
    *(STALL.format(reason) for reason in (*STALLS, SELECTED)),
)

MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}


def launches(text):
    """Return [{"kernel": name, metric: number or None}] of the raw page as CSV, in the order of the launches.

    Its lines are names, units, and each launch. Lines before them, Nsight Compute's own or the program's, are skipped. [] where
    there is no such table.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    start = next((index for index, line in enumerate(lines) if line.startswith(('"ID"', "ID,"))), len(lines))
    units, *rows = list(csv.DictReader(lines[start:])) or [{}]
    numbers = [{metric: _number(row.get(metric), units.get(metric)) for metric in ALL} for row in rows]
    return [{"kernel": row["Kernel Name"]} | found for row, found in zip(rows, numbers, strict=True) if "Kernel Name" in row]


def _number(text, unit):
    """A figure, times in microseconds; None for "n/a", for an empty place and for several numbers in one place."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value * MICROSECONDS.get(unit, 1.0) if math.isfinite(value) else None


def kernels(launched):
    """Return [{"kernel", "launches", "microseconds", "registers", "shares", "per_request", "stalls"}], one for each kernel.

    "shares" are percentages by the keys of SHARES, "per_request" {where: transactions a request} and "stalls" {reason:
    share of the time that warps are resident}, the largest first. What the device does not tell is None, or missing.
    """
    groups = {}
    for launch in launched:
        groups.setdefault(short_name(launch["kernel"]), []).append(launch)
    return [_kernel(name, group) for name, group in groups.items()]


def short_name(kernel):
    """Return 'fused_tail<1024>' of 'void fused_tail<1024>(const float *, ...)': no type, parameters or namespaces."""
    text = kernel.removeprefix("void ").replace("(anonymous namespace)", "").replace("<unnamed>", "")
    text = re.sub(r"\((?:int|unsigned int|bool|long)\)", "", text)  # of template arguments: fused_tail<(int)1024>
    text = text.split("(")[0].strip()
    base, bracket, arguments = text.partition("<")
    return base.rpartition("::")[2] + bracket + arguments


def base_name(kernel):
    """Return 'fused_tail' from 'fused_tail<1024>'."""
    return short_name(kernel).partition("<")[0]


def _kernel(name, group):
    stalls = {reason: _mean(group, STALL.format(reason)) for reason in (*STALLS, SELECTED)}
    cycles = sum(filter(None, stalls.values()))
    shares = {reason: value / cycles for reason, value in stalls.items() if value and reason != SELECTED}
    per_request = {where: _ratio(group, *pair) for where, pair in PER_REQUEST.items()}
    return {
        "kernel": name,
        "launches": len(group),
        "microseconds": _sum(group, TIME),
        "registers": max((launch[REGISTERS] for launch in group if launch[REGISTERS]), default=None),
        "shares": {key: _mean(group, metric) for key, metric in SHARES.items()},
        "per_request": {where: value for where, value in per_request.items() if value is not None},
        "stalls": dict(sorted(shares.items(), key=lambda item: -item[1])),
    }


def _sum(group, metric):
    values = [launch[metric] for launch in group if launch[metric] is not None]
    return sum(values) if values else None


def _mean(group, metric):
    """The mean over launches, weighted by the time that each takes."""
    known = [(launch[metric], launch[TIME] or 1.0) for launch in group if launch[metric] is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _ratio(group, above, below):
    numerator, denominator = _sum(group, above), _sum(group, below)
    return numerator / denominator if numerator is not None and denominator else None


def counted(model, variant):
    """Return {"settings": {name: text}, "kernels": {name: {where: {"per_request", "least"}}}} of the forward pass.

    "per_request" are transactions a request of a warp, "least" what the same bytes would cost at least.

    None for a problem that has no size for the emulator: at its own it would take hours. Raises RuntimeError when counting
    fails.
    """
    if not model.settings("counted"):
        return None
    found = counting.measure_apart(model, variant)
    kernels = {name: {} for name in found["forward"]}
    for name, figures in found["forward"].items():
        for where, unit in TRANSACTIONS.items():
            if where in figures:
                requests, total, least = (figures[where][key] for key in ("requests", unit, f"{unit} at least"))
                kernels[name][where] = {"per_request": total / requests, "least": least / requests}
    return {"settings": found["settings"], "kernels": kernels}


def of_kernel(name, measured_names, counts):
    """Return the counted figures of the kernel that Nsight Compute calls `name`; {} where it cannot be told which they are.

    The emulator knows a kernel by the name in its launch: with template parameters in place of their values, or that of a
    pointer. One that is left over on either side is the other's counterpart.
    """
    by_base = {base_name(each): figures for each, figures in counts.items()}
    if base_name(name) in by_base:
        return by_base[base_name(name)]
    measured = {base_name(each) for each in measured_names}
    left = [figures for each, figures in by_base.items() if each not in measured]
    return left[0] if len(left) == 1 and len(measured - by_base.keys()) == 1 else {}
