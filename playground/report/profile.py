"""What Nsight Compute measured of a variant's kernels, beside what the emulator counts of them."""

from playground.nvidia import metrics
from playground.report.layout import INDENT, print_folded, print_prose, print_rows
from playground.report.text import NOTHING, significant, with_unit

FIGURES = ("kernel", "launches", "us", "DRAM", "matrix units", "issue slots", "occupancy", "registers")
REQUESTS = ("kernel", "a warp's request", "measured", "emulator", "least")
STALLS_SHOWN = 2
EXPLANATION = (
    "DRAM and matrix units: of their peak, while the kernel runs. Issue slots: cycles in which a scheduler issues, of "
    "those with work. Occupancy: resident warps, of the most that the kernel's registers, shared memory and block allow. "
    "Transactions: 32-byte sectors of device memory, wavefronts of shared memory; what TMA and "
    "asynchronous copies move is not in them. Caches are flushed before each kernel, and the clocks are as they are: for "
    "times, run without --profile."
)


def show(found, console):
    """Print the figures of variants' kernels, then how to read them.

    `found` are (variant, its kernels, counts), the last what playground.nvidia.metrics.counted gives, or None.
    """
    for variant, kernels, counts in found:
        console.print()
        print_folded(console, variant.name, style="bold")
        print_rows(console, [_figures(kernel) for kernel in kernels], FIGURES[:1])
        print_prose(console, ("kernel", "of warps' time", "stall"), [row for kernel in kernels for row in _stalls(kernel)])
        print_rows(console, [row for kernel in kernels for row in _requests(kernel, kernels, counts)], REQUESTS[:2])
        if counts:
            sizes = ", ".join(f"{name} {value}" for name, value in counts["settings"].items()) or "the original's size"
            print_folded(console, f"The emulator counted at its own size: {sizes}.", INDENT, style="dim")
    if found:
        console.print()
        print_folded(console, EXPLANATION, style="dim")


def _figures(kernel):
    share = {key: with_unit(value, "%") for key, value in kernel["shares"].items()}
    occupancy = f"{share['occupancy']} of {share['occupancy_limit']}"
    registers = NOTHING if kernel["registers"] is None else f"{kernel['registers']:.0f}"
    first = kernel["kernel"], kernel["launches"], significant(kernel["microseconds"])
    return dict(zip(FIGURES, (*first, share["dram"], share["matrix"], share["issue"], occupancy, registers), strict=True))


def _stalls(kernel):
    for reason, share in list(kernel["stalls"].items())[:STALLS_SHOWN]:
        yield kernel["kernel"], with_unit(100 * share, "%"), f"{reason.replace('_', ' ')}: {metrics.STALLS[reason]}"


def _requests(kernel, kernels, counts):
    """Transactions a request, wherever one of the two knows them."""
    counted = metrics.of_kernel(kernel["kernel"], [each["kernel"] for each in kernels], counts["kernels"]) if counts else {}
    for where, unit in metrics.TRANSACTIONS.items():
        measured, emulated = kernel["per_request"].get(where), counted.get(where) or {}
        if measured is not None or emulated:
            numbers = map(significant, (measured, emulated.get("per_request"), emulated.get("least")))
            yield dict(zip(REQUESTS, (kernel["kernel"], f"{where}, {unit}", *numbers), strict=True))
