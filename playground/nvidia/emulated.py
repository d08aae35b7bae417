"""What the emulator counts of a variant's forward pass, in the figures that Nsight Compute has, too."""

from playground.emulator import counting
from playground.nvidia import metrics


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
        for where, unit in metrics.TRANSACTIONS.items():
            if where in figures:
                requests, total, least = (figures[where][key] for key in ("requests", unit, f"{unit} at least"))
                kernels[name][where] = {"per_request": total / requests, "least": least / requests}
    return {"settings": found["settings"], "kernels": kernels}


def of_kernel(name, measured_names, counts):
    """Return the counted figures of the kernel that Nsight Compute calls `name`; {} where it cannot be told which they are.

    The emulator knows a kernel by the name in its launch: with template parameters in place of their values, or that of a
    pointer. One that is left over on either side is the other's counterpart.
    """
    by_base = {metrics.base_name(each): figures for each, figures in counts.items()}
    if metrics.base_name(name) in by_base:
        return by_base[metrics.base_name(name)]
    measured = {metrics.base_name(each) for each in measured_names}
    left = [figures for each, figures in by_base.items() if each not in measured]
    return left[0] if len(left) == 1 and len(measured - by_base.keys()) == 1 else {}
