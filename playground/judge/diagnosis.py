"""Which lower precision an error looks like."""

import torch

OPERANDS, SIZE_OF = "it is what operands in", "an error of this size is that of"
NAMES = {"tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
ALIKE = 1.5  # precisions whose errors are within this factor of the nearest one's cannot be told apart
SIZE = 3.0  # an error within this factor of a precision's own could be that precision's
QUANTILES = (0.25, 0.5, 0.75)  # of the errors of single elements
SPREAD = 10.0  # the factor within which a precision's own have them: a mistake leaves most elements right, or a few far off
MOST = 1 << 20  # elements whose quantiles are taken: more would take long


def likely_precision(truth, actual, lowered):
    """A remark on the error of `actual`, such as "its error is that of operands in bf16"; None where it resembles nothing.

    `lowered` is {precision: [results in float64 with operands, or everything, rounded to it]}. A result that is nearer to one
    of them than to the truth was computed in that precision; otherwise the sizes of the errors are compared, where they lie on
    all elements as those of rounding do.
    """
    finite = torch.isfinite(truth) & torch.isfinite(actual)
    if not truth.is_floating_point() or not finite.any():
        return None

    def rms(difference):
        return torch.where(finite, difference, 0.0).square().mean().sqrt().item()

    error = rms(actual.double() - truth)
    distance, ratio = {}, {}
    for name, results in lowered.items():
        for result in results:
            own = rms(result.double() - truth)
            if own > 0 and error > 0 and torch.isfinite(torch.tensor(own)):
                nearness = rms(actual.double() - result.double()) / error
                distance[name] = min(nearness, distance.get(name, nearness))
                factor = max(error / own, own / error)
                if factor < SIZE and _is_alike((actual.double() - truth)[finite], (result.double() - truth)[finite]):
                    ratio[name] = min(factor, ratio.get(name, factor))
    if distance and min(distance.values()) < 0.5:
        return f"{OPERANDS} {_names(distance)} give"
    if ratio:
        return f"{SIZE_OF} {_names(ratio)}"
    return None


def names_one(complaint):
    """Return whether a complaint has a remark on the precision already."""
    return OPERANDS in complaint or SIZE_OF in complaint


def _is_alike(errors, others):
    """Whether errors are spread over the elements as others are."""
    profiles = []
    for each in errors, others:
        each = each.abs().flatten()
        each = each[torch.linspace(0, len(each) - 1, min(len(each), MOST), dtype=torch.float64).long()]
        profiles.append(torch.quantile(each, each.new_tensor(QUANTILES)))
    found, expected = profiles
    return bool(((found <= SPREAD * expected) & (expected <= SPREAD * found)).all())


def _names(measure):
    nearest = min(measure.values())
    return " or ".join(NAMES[name] for name, value in measure.items() if value <= ALIKE * nearest)
