"""What the emulator counts of a variant's forward pass, in the figures that Nsight Compute has, too."""

from playground.emulator import counting
from playground.nvidia import metrics


def counted(model, variant):
    """Return {"settings": {name: text}, "kernels": {name: {where: {"per_request", "least"}}}} of the forward pass.

    None for a problem that has no size for the emulator: at its own it would take hours. Raises RuntimeError when counting
    fails.
    """
    if not model.settings("counted"):
        return None
    found = counting.measure_apart(model, variant)
    return {"settings": found["settings"], "kernels": {name: _per_request(each) for name, each in found["forward"].items()}}


def _per_request(figures):
    """Transactions a request of a warp, and the least that the same bytes would cost, for each kind of memory that is used."""
    result = {}
    for where, unit in metrics.TRANSACTIONS.items():
        if where in figures:
            requests = figures[where]["requests"]
            result[where] = {
                "per_request": figures[where][unit] / requests,
                "least": figures[where][f"{unit} at least"] / requests,
            }
    return result


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
