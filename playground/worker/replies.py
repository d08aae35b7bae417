"""What a reply to a request must look like. A judged file runs in the process that answers, and can write to the pipe, too."""

from dataclasses import dataclass
from typing import Any

from playground.record import Ceilings, OwnWork, Works
from playground.serial import Amount, Number, load


@dataclass(frozen=True)
class Loaded:
    """Declared precision, how it came by its weights, what differs, whether the type of outputs can be chosen."""

    precision: str | None
    weights: str
    difference: str | None
    out_dtype: bool = False


@dataclass(frozen=True)
class Built:
    """The seconds that it took, and whether anything was built."""

    seconds: Amount | None
    built: bool


@dataclass(frozen=True)
class DeviceText:
    """A CUDA text and its flags."""

    text: str
    flags: list[str]


@dataclass(frozen=True)
class DeviceCode:
    """What the variant handed to load_inline, and the GPU's compute capability."""

    texts: list[DeviceText]
    capability: str | None


@dataclass(frozen=True)
class AcceptedRaces:
    """How often each line had a race that the text calls benign."""

    lines: dict[str, int]


@dataclass(frozen=True)
class Ran:
    """What came of a call: {side effect: complaint}, why it was refused, the form of the results."""

    peak_mib: Amount | None
    complaints: dict[str, str]
    refused: str | None
    form: str | None
    handed_memory: Amount | None


@dataclass(frozen=True)
class BackwardWork:
    """Whether the variant's own code is given tensors in its backward; None where it has no code of its own."""

    own: bool | None


@dataclass(frozen=True)
class MadeContiguous:
    """Which tensors were not contiguous before."""

    strided: str | None


@dataclass(frozen=True)
class Differentiated:
    """Why there is no gradient, or what is wrong with it."""

    unsupported: str | None
    failed: str | None
    complaints: list[str]
    in_part: list[str]


@dataclass(frozen=True)
class TriedOut:
    """What came of a stress test; `of` says which probe's results were written."""

    of: str | None
    complaint: str | None
    note: str | None


@dataclass(frozen=True)
class Started:
    """The milliseconds of a call, and what it takes of memory."""

    milliseconds: Number
    peak_mib: Amount | None


@dataclass(frozen=True)
class Times:
    """Of each call the milliseconds, whether the device was busy on other streams after it, the flush and the launch."""

    samples_ms: list[Number]
    late: list[bool]
    flush_ms: list[Number]
    launch_ms: list[Number]


@dataclass(frozen=True)
class Compiled:
    """Why a text does not compile, None where nothing is said against it."""

    reason: str | None
    details: str


FORMS = {
    "compiler.compile": Compiled,
    **{"candidate.load": Loaded, "candidate.build": Built, "candidate.device_code": DeviceCode},
    **{"candidate.accepted_races": AcceptedRaces, "candidate.run": Ran, "candidate.backward_work": BackwardWork},
    **{"candidate.made_contiguous": MadeContiguous, "candidate.differentiate": Differentiated, "candidate.try_out": TriedOut},
    **{"candidate.work": OwnWork, "candidate.start": Started, "candidate.time": Times},
    **{"baselines.start": Started, "baselines.time": Times, "baselines.ceilings": Ceilings, "baselines.work": Works},
}


def read(request: str, result: dict[str, Any]) -> Any:
    """Return the record that the result of a request is; the result itself where no form is known. Raises DocumentError."""
    form = FORMS.get(request)
    return load(form, result, f"its reply to {request}", strict=False) if form else result
