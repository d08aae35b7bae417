"""How much memory a judgement takes, from shapes alone: it is known before anything is computed."""

import math
from dataclasses import dataclass

from playground.judge.sample import LEAST, MOST

GIB = 1 << 30
OWN_PROBES, REPEATED = 6, 8  # of the problem's own size; those that are repeated there for a variant that takes no other
TIMED = 3  # further references of that size, for timed calls
PROCESSES = 4  # referee, candidate, baselines, control
HOST_BYTES = {"cuda": 3 * GIB // 2, "cpu": GIB // 2, "emulator": GIB // 2}  # of a process that has loaded torch
DEVICE_BYTES = {"cuda": 5 * GIB // 8, "cpu": 0, "emulator": 0}  # of a CUDA context


@dataclass(frozen=True)
class Footprint:
    """Bytes of a problem in its own precision; `results` are those of all its operators together."""

    inputs: int
    parameters: int
    outputs: int
    results: int

    def of_judgement(self, place: str, share: float = 1.0) -> dict[str, int]:
        """Return {"host", "files", "device" (float64 with a backward)}: the bytes to compare a `share` of all results."""
        in_part = share < 1.0
        own = OWN_PROBES + (0 if in_part else REPEATED)
        files = (0 if in_part else own * self.inputs) + 2 * self.outputs
        whole = PROCESSES * HOST_BYTES[place] + files + 13.5 * self.parameters
        if not (in_part and place == "cuda"):
            whole += 5 * self.inputs + 2 * self.outputs
        compared = (own + TIMED) * 2.5 * self.outputs + 8 * self.outputs + 9.5 * self.inputs
        computed = 5 * self.inputs + 7 * self.outputs + 8 * self.parameters + 4 * self.results + PROCESSES * DEVICE_BYTES[place]
        host, on_gpu = int(whole + share * compared), place == "cuda"
        return {"host": host if on_gpu else host + computed, "files": files, "device": computed if on_gpu else 0}

    def of_baselines(self, place: str) -> dict[str, int]:
        """Return the same for PyTorch's ways to run the original, a judgement's processes counted there."""
        computed = 3 * self.inputs + 2 * (self.parameters + self.outputs + self.results)
        return {"host": 0 if place == "cuda" else computed, "files": 0, "device": computed if place == "cuda" else 0}

    def of_call(self, place: str) -> dict[str, int]:
        """Return the same for one call of a variant that was just built."""
        bytes_of_call = self.inputs + self.parameters + self.outputs
        on_device = bytes_of_call + DEVICE_BYTES[place] if place == "cuda" else 0
        return {"host": 2 * bytes_of_call + HOST_BYTES[place], "files": 0, "device": on_device}

    def share_for(self, place: str, host: float, most: float = math.inf) -> float:
        """Return the share of all results for which so many bytes of host memory, and the time for `most` bytes of one, do."""
        largest = max(self.inputs, self.outputs, self.parameters)
        if largest > most:
            return min(self.share_for(place, host), max(LEAST, min(MOST, most / largest)))
        if self.of_judgement(place)["host"] <= host:
            return 1.0
        none, nearly_all = (self.of_judgement(place, share)["host"] for share in (0.0, MOST))
        return min(MOST, max(LEAST, MOST * (host - none) / (nearly_all - none)))
