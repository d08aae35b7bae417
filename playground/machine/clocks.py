"""How fast a GPU's clock runs, and why it is held back, as nvidia-smi tells."""

import contextlib

from playground.record import Clocks, ClocksAround

from . import requirements

# The bits of clocks_event_reasons.active (NVML's nvmlClocksEventReasons) that take speed away. The others say that the GPU is
# idle (0x1), or that somebody set its clocks (0x2, 0x10, 0x100).
SLOWDOWNS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "temperature (software)", 0x40: "temperature (hardware)"}
SLOWDOWNS |= {0x80: "power brake"}
# Fields that count the microseconds in which a GPU was slowed down since its driver was loaded, and for which of these.
COUNTED = {"sw_power_cap": 0x4, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80}
COUNTERS = {f"clocks_event_reasons_counters.{name}": SLOWDOWNS[bit] for name, bit in COUNTED.items()}
FIELDS = ("clocks.sm", "clocks.max.sm", "temperature.gpu")
# What to ask a driver for, as far as it knows it: recent ones, those since 535, and those before.
QUERIES = [
    (*FIELDS, f"clocks_{kind}_reasons.active", *more) for kind, more in (("event", COUNTERS), ("event", ()), ("throttle", ()))
]
DROP = 0.05
SLOWED_US = 10_000  # that may pass unmentioned in a timing, which takes seconds


def sample() -> Clocks | None:
    """Return the Clocks of the GPU that torch calls cuda:0; None where nvidia-smi is missing or does not tell."""
    for query in QUERIES:
        with contextlib.suppress(ValueError):  # of "[N/A]", and of another number of fields
            # As "1980, 1980, 41, 0x0000000000000004", with or without counters behind it.
            sm, highest, celsius, reasons, *counters = (requirements.ask_gpu(*query) or "").split(",")
            slowdowns = tuple(word for bit, word in SLOWDOWNS.items() if int(reasons, 16) & bit)
            slowed = dict(zip(COUNTERS.values(), map(int, counters), strict=True)) if counters else None
            return Clocks(int(sm), int(highest), int(celsius), slowdowns, slowed)
    return None


def record(before: Clocks | None, after: Clocks | None) -> ClocksAround | None:
    """Return the ClocksAround of a timing, or None where nothing could be sampled."""
    return ClocksAround(before, after) if before and after else None


def notes(before: Clocks | None, after: Clocks | None) -> list[str]:
    """Return what is worth saying about a timing that began and ended with these: slowdowns, and a clock that changed."""
    if before is None or after is None:
        return []
    found = []
    causes = dict.fromkeys(sorted({*before.slowdowns, *after.slowdowns}), "")
    if before.slowed_us and after.slowed_us:  # in between, too
        for word, since in before.slowed_us.items():
            if (slowed := after.slowed_us[word] - since) > SLOWED_US:
                causes[word] = f" for {slowed / 1e6:.2f} s"
    if causes:
        said = ", ".join(f"{word}{how_long}" for word, how_long in causes.items())
        found.append(f"the GPU was slowed down while it was timed: {said}")
    if abs(before.sm_mhz - after.sm_mhz) > DROP * before.sm_mhz:
        found.append(f"the SM clock went from {before.sm_mhz} to {after.sm_mhz} MHz while it was timed")
    return found
