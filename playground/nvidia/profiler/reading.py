"""Nsight Compute's raw page as CSV: a line of names, a line of units, and a line for each launch of a kernel."""

import csv
import math
import re

from . import metrics

# Units in which a figure may come, over those that are used here: microseconds, bytes, plain numbers.
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
UNITS |= {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


class NoTable(ValueError):
    """A text in which there is no table; what else it says is for the caller to find out."""


def launches(text):
    """[{"kernel": name, "device": text, metric: number or None}] of the CSV in `text`, in the order of the launches.

    Lines before the table, which may be Nsight Compute's own or the program's, are skipped. Raises NoTable.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    start = next((index for index, line in enumerate(lines) if line.startswith(('"ID"', "ID,"))), None)
    if start is None:
        raise NoTable("there is no line of column names that begins with ID")
    head, *rows = csv.reader(lines[start:])
    if "Kernel Name" not in head or not rows:
        raise NoTable("there is no column called Kernel Name, or no line of units")
    units, *rows = rows
    return [_launch(dict(zip(head, row, strict=False)), dict(zip(head, units, strict=False))) for row in rows]


def _launch(row, units):
    found = {metric: _number(row.get(metric), units.get(metric, "")) for metric in metrics.ALL}
    return {"kernel": row["Kernel Name"], "device": row.get("Device", "")} | found


def _number(text, unit):
    """A figure in the units used here; None for "n/a", for an empty place and for several numbers in one place."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value * UNITS.get(unit.split("/")[0], 1.0) if math.isfinite(value) else None


def kernels(launched):
    """[{"kernel", "launches", "microseconds", "registers", "shares", "per_request", "stalls"}], a figure for each kernel.

    "shares" are percentages by the keys of metrics.SHARES, "per_request" {where: transactions a request} and "stalls" {reason:
    share of the time that warps are resident}, the largest first. What the device does not tell is None, or missing.
    """
    groups = {}
    for launch in launched:
        groups.setdefault(short_name(launch["kernel"]), []).append(launch)
    return [_kernel(name, group) for name, group in groups.items()]


def short_name(kernel):
    """'fused_tail<1024>' from 'void fused_tail<1024>(const float *, ...)': no result type, no parameters, no namespaces."""
    text = kernel.removeprefix("void ").replace("(anonymous namespace)", "").replace("<unnamed>", "")
    text = re.sub(r"\((?:int|unsigned int|bool|long)\)", "", text)  # of template arguments: fused_tail<(int)1024>
    text = text.split("(")[0].strip()
    base, bracket, arguments = text.partition("<")
    return base.rpartition("::")[2] + bracket + arguments


def base_name(kernel):
    """'fused_tail' from 'fused_tail<1024>'."""
    return short_name(kernel).partition("<")[0]


def _kernel(name, group):
    stalls = {reason: _mean(group, metrics.STALL.format(reason)) for reason in (*metrics.STALLS, metrics.SELECTED)}
    cycles = sum(filter(None, stalls.values()))
    shares = {reason: value / cycles for reason, value in stalls.items() if value and reason != metrics.SELECTED}
    per_request = {where: _ratio(group, *pair) for where, pair in metrics.PER_REQUEST.items()}
    return {
        "kernel": name,
        "launches": len(group),
        "microseconds": _sum(group, metrics.TIME),
        "registers": max((launch[metrics.REGISTERS] for launch in group if launch[metrics.REGISTERS]), default=None),
        "shares": {key: _mean(group, metric) for key, metric in metrics.SHARES.items()},
        "per_request": {where: value for where, value in per_request.items() if value is not None},
        "stalls": dict(sorted(shares.items(), key=lambda item: -item[1])),
    }


def _sum(group, metric):
    values = [launch[metric] for launch in group if launch[metric] is not None]
    return sum(values) if values else None


def _mean(group, metric):
    """The mean over launches, weighted by the time that each takes."""
    known = [(launch[metric], launch[metrics.TIME] or 1.0) for launch in group if launch[metric] is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _ratio(group, above, below):
    numerator, denominator = _sum(group, above), _sum(group, below)
    return numerator / denominator if numerator is not None and denominator else None
