"""Whether a class and the problem fit together: what a constructor and `forward` take, what they are given, what comes back."""

import contextlib
import inspect
import re
import traceback
import types

from playground.judge.classes import PRECISIONS
from playground.worker.failures import is_of_user


class WrongInterface(Exception):
    """A class does not take what the problem gives, declares what there is not, or has other parameters than the original."""


@contextlib.contextmanager
def fitting(kind, name, given, source):
    """Raise WrongInterface where a class's method does not take what the problem's function `source` gives, under `with`."""
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        raise misfit(error, kind, name, given, source) or error from None


def misfit(error, kind, name, given, source):
    """Return that WrongInterface; None where another cause is seen: the method was entered, or fits, or there is no class."""
    entered = any(is_of_user(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    function = _own_method(kind, name)
    if entered or not isinstance(kind, type):
        return None
    gives = f"{source} gives {len(given) or 'none'}"
    if function is None:
        return WrongInterface(f"{source_line(kind, name)}{kind.__name__} has no {name}; {gives}")
    with contextlib.suppress(ValueError):  # of what is no function of Python's
        signature = inspect.signature(function)
        try:
            signature.bind(None, *given)
        except TypeError:
            takes = str(signature.replace(parameters=list(signature.parameters.values())[1:]))[1:-1] or "no arguments"
            return WrongInterface(f"{source_line(kind, name)}{name} takes {takes}; {gives}")
    return None


def source_line(kind, name):
    """Return 'FILE:LINE: ', where a class has its method of that name, or else begins; "" where that is not known."""
    try:
        found = inspect.unwrap(_own_method(kind, name) or next(iter(_users_classes(kind)), kind))
        return f"{inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]}: "
    except (OSError, TypeError, ValueError):
        return ""


def _own_method(kind, name):
    return next((vars(each)[name] for each in _users_classes(kind) if name in vars(each)), None)


def _users_classes(kind):
    others = ("playground.worker.candidate", "torch.nn.modules.module", "builtins")
    return [each for each in getattr(kind, "__mro__", (kind,)) if not each.__module__.startswith(others)]


def kept(problem):
    """What a problem's module has now: a variant that replaces its functions there changes nothing here."""
    names = "get_inputs", "get_init_inputs", "model_new_of", "converted_to"
    return types.SimpleNamespace(**{name: getattr(problem, name, None) for name in names})


def declared_precision(cls):
    """The class attribute `precision` of a variant that computes in less than float32; None where it declares none."""
    declared = getattr(cls, "precision", "fp32")
    if declared not in ("fp32", *PRECISIONS):
        raise WrongInterface(f"ModelNew.precision is {declared!r}; expected 'fp32' or one of {', '.join(PRECISIONS)}")
    return None if declared == "fp32" else declared


def copy_weights(model, weights):
    """Load weights by name, strictly. Raises WrongInterface, which says how the parameters differ."""
    own = model.state_dict()
    complaints = [f"lacks {name}" for name in weights if name not in own]
    complaints += [f"has {name}, which the original lacks" for name in own if name not in weights]
    shapes = {name: (tuple(own[name].shape), tuple(value.shape)) for name, value in weights.items() if name in own}
    complaints += [f"{name} is {mine} instead of {theirs}" for name, (mine, theirs) in shapes.items() if mine != theirs]
    if complaints:
        raise WrongInterface(f"ModelNew's parameters differ from the original's: it {some(complaints)}")
    model.load_state_dict(weights)


def some(complaints, most=4):
    more = [f"{len(complaints) - most} more"] if len(complaints) > most else []
    return "; ".join([*complaints[:most], *more])


def undeclared(given):
    """Return (name, what is wrong) of load_inline's `functions` that its cpp_sources do not declare; None without one."""
    functions, declared = given.get("functions"), joined(given.get("cpp_sources"))
    names = [functions] if isinstance(functions, str) else list(functions or [])
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", declared, flags=re.DOTALL)
    if "##" in code or re.search(r'#\s*include\s*"', code):  # it may make names, or have them from elsewhere
        return None
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", code):
            found = re.findall(r"\b(\w+)\s*\([^;{}]*\)\s*[;{]", code)
            return name, f"functions names {name}; cpp_sources declares {', '.join(dict.fromkeys(found)) or 'no function'}"
    return None


def joined(sources):
    """Return load_inline's sources, a text or several, as one text."""
    return sources if isinstance(sources, str) else "\n".join(sources or [])
