"""How fast a GPU's clock runs, and why it is held back, as nvidia-smi tells."""

import os
import subprocess
from dataclasses import asdict, dataclass

# The bits of clocks_event_reasons.active (NVML's nvmlClocksEventReasons) that take speed away. The others say that the GPU is
# idle (0x1), or that somebody set its clocks (0x2, 0x10, 0x100).
SLOWDOWNS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
FIELDS = "clocks.sm,clocks.max.sm,temperature.gpu,{}.active"
NAMES_OF_REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")  # drivers since 535, and before
DROP = 0.05


@dataclass(frozen=True)
class Clocks:
    """SM clock and its maximum in MHz, temperature in degrees Celsius, and what slows the GPU down."""

    sm_mhz: int
    max_sm_mhz: int
    celsius: int
    slowdowns: tuple


def sample():
    """The Clocks of the GPU that torch calls cuda:0; None where nvidia-smi is missing or does not tell."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    for reasons in NAMES_OF_REASONS:
        command = ["nvidia-smi", "-i", gpu, f"--query-gpu={FIELDS.format(reasons)}", "--format=csv,noheader,nounits"]
        try:
            printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=True)
            return parse(printed.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
    return None


def parse(line):
    """Clocks from nvidia-smi's line, such as "1980, 1980, 41, 0x0000000000000004". Raises ValueError for "[N/A]"."""
    sm, highest, celsius, reasons = (field.strip() for field in line.strip().split(","))
    active = int(reasons, 16)
    return Clocks(int(sm), int(highest), int(celsius), tuple(word for bit, word in SLOWDOWNS.items() if active & bit))


def record(before, after):
    """{"before", "after"} for the JSON document, or None where nothing could be sampled."""
    if before is None or after is None:
        return None
    return {"before": asdict(before), "after": asdict(after)}


def notes(before, after):
    """What is worth saying about a timing that began and ended with these: slowdowns, and a clock that changed."""
    if before is None or after is None:
        return []
    found = []
    if slowdowns := sorted({*before.slowdowns, *after.slowdowns}):
        found.append(f"the GPU was slowed down while it was timed: {', '.join(slowdowns)}")
    if abs(before.sm_mhz - after.sm_mhz) > DROP * before.sm_mhz:
        found.append(f"the SM clock went from {before.sm_mhz} to {after.sm_mhz} MHz while it was timed")
    return found
