"""How exact an output is, in names and numbers as people read them."""

import re

PRECISIONS = ("tf32", "fp16", "bf16")  # lower than float32's, from the most exact one
AS_PYTORCH, FLOAT32, WRONG = "as PyTorch", "float32", "wrong"
APPROXIMATE = (1e-3, 1e-2)  # of the spread
HALF = "half precision"  # the name of both, which the size of an error does not tell apart
CLASSES = (AS_PYTORCH, FLOAT32, *PRECISIONS, *(f"approximate to {limit:g}" for limit in APPROXIMATE), WRONG)
OPERANDS, SIZE_OF = "it is what operands in", "an error of this size is that of"
LOOK_ALIKE = "replaced by a look-alike"  # the mutant of an activation


def named(found: str) -> str:
    """Return a class as people read it: fp16 and bf16 are half precision."""
    return HALF if found in ("fp16", "bf16") else found


def names_one(complaint: str) -> bool:
    """Return whether a complaint has a remark on the precision already."""
    return OPERANDS in complaint or SIZE_OF in complaint


def two_digits(value: float) -> str:
    """Return 3.8, 0.0012 or 6.8e-6, as numbers stand in sentences."""
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].strip("+"), f"{value:.2g}")


def deviations(value: float) -> str:
    """Return '3.8 standard deviations', which are the outputs'."""
    return f"{two_digits(value)} standard deviations"
