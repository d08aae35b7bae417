"""Where a wrong result is wrong, and what relates it to the right one.

A relation is named only if it holds to rounding on all that it is said of: a random error has none.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

AXES = {1: ("element",), 2: ("row", "column"), 3: ("sample", "row", "column"), 4: ("sample", "channel", "row", "column")}
AXES[5] = ("sample", "channel", "slice", "row", "column")
FILLED = 0.9  # of a region's values are wrong: some are right by chance
FEW = 16  # values: a relation of fewer may hold by chance
CLEAR = 4  # times what is allowed: an error below it is too small to say how it came about
MOST = 1 << 22  # values of which relations are looked for: the first samples of larger results
SHADES = " ░▒▓█"
PICTURE = (7, 48)  # lines and columns at most

ACTIVATIONS = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "abs": torch.abs,
    "reciprocal": torch.reciprocal,
}
GELUS = {
    "GELU by tanh in the place of erf": lambda x: F.gelu(x, approximate="tanh"),
    "GELU by sigmoid(1.702 x) in the place of erf": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclass(frozen=True)
class Diagnosis:
    """`where` and `first`, such as "first wrong [0, 80]: 0 instead of -1.7"; `how`, or None where nothing relates the two."""

    where: str
    first: str
    how: str | None
    picture: tuple = ()  # lines of characters, below a heading; none where nearly all is wrong

    @property
    def sentence(self):
        is_vague = not self.picture or self.where.endswith("scattered")
        return "; ".join(filter(None, (None if self.how and is_vague else self.where, self.how, self.first)))


def diagnose(actual, right, allowed, shapes=()):
    """Return the Diagnosis of a result of the right shape; None where no value differs by more than `allowed`, in its units.

    `shapes` are those of the inputs: sizes that a factor may come from.
    """
    actual, right = actual.detach().cpu().double(), right.detach().cpu().double()
    wrong = _is_wrong(actual, right, allowed)
    if not actual.numel() or not wrong.any():
        return None
    actual, right, wrong = (each.reshape(each.shape or (1,)) for each in (actual, right, wrong))
    region, is_all = _region(wrong)
    values, how = actual[wrong], None
    if values.isnan().all() or (values == values[0]).all():
        told = _short(values[0])
        elsewhere = "elsewhere " * region.startswith("right only")
        region += f" ({elsewhere}{told}{', as if never computed' * (told in ('nan', '0'))})"
    else:
        kept = max(1, MOST // max(1, right[0].numel()))
        how = _relation(actual[:kept], right[:kept], wrong[:kept], allowed, _sizes([right.shape, *shapes]))
    at = tuple(wrong.nonzero()[0].tolist())
    first = f"first wrong {list(at)}: {' instead of '.join(_distinct(actual[at], right[at]))}"
    is_all = is_all or wrong.sum() >= FILLED * wrong.numel()
    return Diagnosis(region, first, how, () if is_all else tuple(_picture(wrong)))


def _is_wrong(actual, right, allowed):
    both = torch.isfinite(actual) & torch.isfinite(right)
    same = (actual == right) | (actual.isnan() & right.isnan())
    return torch.where(both, (actual - right).abs() > allowed, ~same)


def _short(value, digits=3):
    return f"{float(value):.{digits}g}"


def _distinct(one, other):
    """Both values, in as many digits as tell them apart."""
    return next(
        (pair for n in (3, 5, 7) if len(set(pair := (_short(one, n), _short(other, n)))) == 2),
        (_short(one, 9), _short(other, 9)),
    )


# ---- where


def _region(wrong):
    """(where it is, in words, and whether that is everywhere)."""
    count, total = int(wrong.sum()), wrong.numel()
    box = _box(wrong)
    if _fill(count, box) >= FILLED:
        told = _said(box, wrong.shape)
        return (f"wrong only in {told}", False) if told else ("wrong everywhere", True)
    if line := _stretch(wrong.flatten().nonzero().flatten(), total):
        return f"wrong only in {line}", False
    box = _box(~wrong)
    if _fill(total - count, box) >= 1 - (1 - FILLED) / 10 and (told := _said(box, wrong.shape)):
        if (width := _margin(box, wrong.shape)) and wrong.dim() > 2:
            return f"wrong only in the border of each image, {width} wide", False
        return f"right only in {told}", False
    return f"wrong in {count} of {total} values ({100 * count / total:.2g}%), scattered", False


def _said(box, shape):
    names = AXES.get(len(shape)) or tuple(f"index {axis} " for axis in range(len(shape)))
    return ", ".join(filter(None, map(_indices, names, box, shape)))


def _margin(box, shape):
    """How far a box stays away from each end of the last two axes, the same of all; 0 without such a margin."""
    ends = {int(end) for each, size in zip(box[-2:], shape[-2:], strict=True) for end in (each[0], size - 1 - each[-1])}
    return ends.pop() if len(ends) == 1 and all(len(each) == size for each, size in zip(box[:-2], shape, strict=False)) else 0


def _box(mask):
    """For each axis the indices at which the mask holds anywhere."""
    axes = range(mask.dim())
    found = (mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1) for axis in axes)
    return [each.nonzero().flatten() for each in found]


def _fill(count, box):
    return count / max(1, math.prod(len(each) for each in box))


def _indices(name, found, size):
    """The indices of one axis in words; "" for all of them."""
    if len(found) == size:
        return ""
    first, last, count = int(found[0]), int(found[-1]), len(found)
    if count == 1:
        return f"{name} {first}" + " (the last)" * (first == size - 1)
    step = (last - first) // (count - 1)
    if bool((found.diff() == step).all()):
        if step > 1 and count == 2:
            return f"{name}s {first} and {last}"
        return f"{name}s {first}-{last}" if step == 1 else f"every {_th(step)} {name} from {first}"
    return f"{count} of {size} {name}s ({', '.join(map(str, found[:3].tolist()))}, ...)"


def _th(number):
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _stretch(flat, total):
    """What is wrong in the order of memory; None where that is neither one stretch nor every k-th value."""
    first, last, count = int(flat[0]), int(flat[-1]), len(flat)
    if count / (last - first + 1) >= FILLED:
        place = "the last" if last == total - 1 else "the first" if first == 0 else None
        return f"{place} {last - first + 1} values in memory" if place else f"values {first}-{last} in memory"
    step = (last - first) // max(1, count - 1)
    return f"every {_th(step)} value in memory from {first}" if count > 2 and bool((flat.diff() == step).all()) else None


def _picture(wrong):
    """The last two axes, all others together, in characters: the darker, the more of the values are wrong."""
    image = wrong.reshape(-1, *wrong.shape[-2:]).double().mean(0) if wrong.dim() > 1 else wrong.double()[None]
    size = [min(most, have) for most, have in zip(PICTURE, image.shape, strict=True)]
    shares = F.adaptive_max_pool2d(image[None], size)[0]
    names = AXES.get(wrong.dim()) or [f"index {axis}" for axis in range(wrong.dim())]
    down = f"{names[-2]}s 0-{wrong.shape[-2] - 1} down, " if wrong.dim() > 1 else ""
    yield f"where it is wrong: {down}{names[-1]}s 0-{wrong.shape[-1] - 1} across"
    for row in shares.tolist():
        yield "|" + "".join(SHADES[math.ceil(share * (len(SHADES) - 1))] for share in row) + "|"


# ---- how


def _sizes(shapes):
    """Sizes of axes, and products of neighbouring ones."""
    runs = (shape[i:j] for shape in shapes for i, j in itertools.combinations(range(len(shape) + 1), 2))
    return sorted({math.prod(run) for run in runs} - {0, 1})


def _relation(actual, right, wrong, allowed, sizes):
    if not (torch.isfinite(actual).all() and torch.isfinite(right).all()):
        return None
    error = (actual - right).abs().max().item()
    if error < CLEAR * allowed or right.numel() < FEW:
        return None
    if right.max() - right.min() <= CLEAR * allowed:
        return None  # one value everywhere: any relation would hold
    if (actual - actual.flatten()[0]).abs().max() <= allowed:
        return None

    def holds(made, expected=actual, scale=1.0):
        """Whether two are the same but for rounding, which grows with what it is multiplied by."""
        return bool(((made - expected).abs() <= allowed * max(1.0, scale)).all())

    if told := _by_activation(actual.flatten(), right.flatten(), allowed):
        return told
    a, r = (each[wrong] for each in (actual, right))
    if len(a) >= FEW and r.max() - r.min() > CLEAR * allowed:
        where = "every value" if len(a) >= FILLED * right.numel() else "each of these"
        if told := _by_value(a, r, allowed, sizes):
            return told.format(each=where)
    return _by_axis(actual, right, allowed, holds) or _by_place(actual, right, holds)


def _by_value(a, r, allowed, sizes):
    """A relation of each value with the right one; {each} stands for what it is said of."""

    def holds(made, expected, scale=1.0):
        return bool(((made - expected).abs() <= allowed * max(1.0, scale)).all())

    factor = (a @ r / (r @ r)).item() if r.any() else 0.0
    if holds(-r, a):
        return "{each} has the wrong sign"
    for name, value in _named_factors(sizes):
        if factor and abs(factor / value - 1) < 0.05 and holds(value * r, a, value):
            return f"{{each}} is {factor:.4g} times the right one, {name}"
    if factor and holds(factor * r, a, abs(factor)):
        return f"{{each}} is {factor:.4g} times the right one"
    offset = (a - r).mean().item()
    if holds(r + offset, a):
        return f"{{each}} is the right one {'+' if offset > 0 else '-'} {abs(offset):.3g}"
    centred = r - r.mean()
    slope = (a @ centred / (centred @ centred)).item()
    shift = (a - slope * r).mean().item()
    if slope and holds(slope * r + shift, a, abs(slope)):
        return f"{{each}} is {slope:.4g} times the right one {'+' if shift > 0 else '-'} {abs(shift):.3g}"
    return None


def _by_activation(a, r, allowed):
    for name, function in ACTIVATIONS.items():
        if _is_same(function(a), r, allowed):
            return f"right once {name} is applied, as if that were left out"
        if _is_same(function(r), a, allowed):
            return f"every value is {name} of the right one"
    return next((name for name, function in GELUS.items() if _is_other_gelu(a, r, function, allowed)), None)


def _named_factors(sizes):
    for n in sizes:
        if n >= FEW:  # a small number may be any factor
            yield f"as if {n} values were summed and not averaged", float(n)
            yield f"as if it were divided by {n} once more", 1 / n
            yield f"the square root of {n}, as if a scale were left out", math.sqrt(n)
            yield f"1 / sqrt({n}), as if a scale were applied once more", 1 / math.sqrt(n)
        for power, root in ((1.0, "{}"), (0.5, "sqrt({})")):
            yield f"{root.format('(n - 1) / n')} for n = {n}: n - 1 and n are exchanged", ((n - 1) / n) ** power
            yield f"{root.format('n / (n - 1)')} for n = {n}: n - 1 and n are exchanged", (n / (n - 1)) ** power


def _is_same(made, expected, allowed):
    return bool(torch.isfinite(made).all()) and bool(((made - expected).abs() <= allowed).all())


def _is_other_gelu(a, r, other, allowed):
    """Whether a is `other` of what r is the GELU of: of one of two values where that is negative."""
    bend = -0.7517915246935645  # where GELU is smallest
    low = float(F.gelu(torch.tensor(bend, dtype=torch.float64)))
    if r.min() < low - allowed:
        return False
    r = r.clamp(min=low)

    def inverse(begin, end):
        low_end, high_end = torch.full_like(r, begin), torch.full_like(r, end)
        for _ in range(60):
            middle = (low_end + high_end) / 2
            above = (F.gelu(middle) > r) == (begin >= bend)
            low_end, high_end = torch.where(above, low_end, middle), torch.where(above, middle, high_end)
        return (low_end + high_end) / 2

    largest = float(r.max().clamp(min=1)) + 1
    right_branch = (other(inverse(bend, largest)) - a).abs() <= allowed
    left_branch = ((other(inverse(-40.0, bend)) - a).abs() <= allowed) & (r < 0)
    return bool((right_branch | left_branch).all())


def _by_axis(actual, right, allowed, holds):
    names = AXES.get(right.dim()) or tuple(f"index {axis}" for axis in range(right.dim()))
    for axis, name in enumerate(names):
        others = [each for each in range(right.dim()) if each != axis]
        if right.dim() < 2 or math.prod(right.shape[each] for each in others) < FEW or right.shape[axis] < 2:
            continue
        offset = (actual - right).mean(others, keepdim=True)
        if holds(right + offset):
            return f"each {name} is off by a constant of its own, as by a wrong bias"
        factor = (actual * right).sum(others, keepdim=True) / right.square().sum(others, keepdim=True)
        if torch.isfinite(factor).all() and holds(factor * right, scale=factor.abs().max().item()):
            return f"each {name} is multiplied by a factor of its own, as by a wrong scale"
    for axis, name in enumerate(names):
        if right.dim() > 1 and right.shape[axis] >= FEW:
            factor = (actual * right).sum(axis, keepdim=True) / right.square().sum(axis, keepdim=True)
            if torch.isfinite(factor).all() and holds(factor * right, scale=factor.abs().max().item()):
                return f"along each {name} all values have one wrong factor, as by a wrong normalisation"
    return None


def _by_place(actual, right, holds):
    """Right values at wrong places."""
    names = AXES.get(right.dim()) or tuple(f"index {axis}" for axis in range(right.dim()))
    flat = actual.flatten()
    for i, j in itertools.combinations(range(right.dim()), 2):
        if right.shape[i] > 1 and right.shape[j] > 1 and holds(right.transpose(i, j).flatten(), flat):
            return f"{names[i]}s and {names[j]}s are swapped"
    for axis, name in enumerate(names):
        size = right.shape[axis]
        first = right.narrow(axis, 0, 1).expand_as(right)
        if size > 1 and holds(first):
            return f"every {name} holds what belongs to the first"
        if size < 3:
            continue
        if holds(right.flip(axis)):
            return f"the {name}s are in reverse order"
        for by in (1, -1):
            here, there = (actual.narrow(axis, max(0, -by), size - 1), right.narrow(axis, max(0, by), size - 1))
            if holds(there, here):
                return f"{name} i holds what belongs to {name} i {'+' if by > 0 else '-'} 1"
    if holds(right.flatten().sort().values, flat.sort().values):
        return "these are the right values in another order"
    return None
