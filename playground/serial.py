"""Dataclasses as JSON and back, strictly: what is missing, unknown or of another type is refused, with its path.

A field is a key of the JSON, unless its metadata names another `key`; one without a default must be there. Annotations are
dataclasses, plain types, Any, Literal, unions, lists, tuples and dicts of such, or Annotated with a Rule. A dataclass may have
a method `verify(where)`.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")
LONGEST = 60  # characters of a value that an error quotes
OMITTED = {"omitted": True}  # of a field whose key is left out of the JSON while it is None


class DocumentError(ValueError):
    """A document that has not the form of `Document`, or no document at all. `where` is the path of what is wrong."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.where = where


@dataclass(frozen=True)
class Rule:
    """What a value must be besides its type: in words, and whether one is that."""

    expected: str
    holds: Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a number of a float's size, a NaN or an infinity."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def is_amount(value: Any) -> bool:
    """Return whether it is a number, neither negative nor infinite."""
    return is_number(value) and 0 <= value < math.inf


Number = Annotated[float, Rule("a number", is_number)]
Amount = Annotated[float, Rule("a number that is not negative", is_amount)]
Count = Annotated[int, Rule("a number that is not negative", is_amount)]
Text = Annotated[str, Rule("a text", lambda value: isinstance(value, str) and bool(value.strip()))]


def values(record: Any) -> dict[str, Any]:
    """Return {field: value} of a record."""
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}


def dump(value: Any) -> Any:
    """Return a value as JSON can hold it; what a record that was read lacked is left out again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        absent = value.__dict__.get("_absent", _form_of(type(value)).omitted)
        own = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        keys = _form_of(type(value)).keys
        return {keys[name]: dump(each) for name, each in own.items() if name not in absent or each != _default(value, name)}
    if isinstance(value, Mapping):
        return {key: dump(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load(form: type[T], value: Any, where: str = "", strict: bool = True) -> T:
    """Return a value of JSON in a `form`; `strict` refuses more keys. Raises DocumentError, with the path."""
    return typing.cast(T, _load(form, value, where, strict))


def shown(name: str) -> str:
    """Return a name, which may be of an untrusted file, as it stands in an error of one line."""
    return repr(name)[1:-1][:LONGEST]


def require(holds: bool, where: str, expected: str, value: Any) -> None:
    """Raise DocumentError, with what was expected at the path `where`, and what came, unless it `holds`."""
    if not holds:
        text = repr(value)
        came = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
        raise DocumentError(f"{where.lstrip('.') or 'document'}: expected {expected}, got {came}", where)


@dataclass(frozen=True)
class _Form:
    """Of a dataclass: {field: annotation}, {field: key}, the fields without a default, and those that may be left out."""

    hints: dict[str, Any]
    keys: dict[str, str]
    required: set[str]
    omitted: set[str]


@functools.cache
def _form_of(kind: Any) -> _Form:
    fields = dataclasses.fields(kind)
    return _Form(
        hints=typing.get_type_hints(kind, include_extras=True),
        keys={each.name: each.metadata.get("key", each.name) for each in fields},
        required={each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING},
        omitted={each.name for each in fields if each.metadata.get("omitted")},
    )


def _default(kind: Any, name: str) -> Any:
    default = kind.__dataclass_fields__[name]
    return default.default if default.default_factory is dataclasses.MISSING else default.default_factory()


PLAIN = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}


def _load(form: Any, value: Any, where: str, strict: bool) -> Any:
    kind, arguments = typing.get_origin(form) or form, typing.get_args(form)
    if kind is Any:
        return value
    if kind is Annotated:
        rule = arguments[1]
        require(rule.holds(value), where, rule.expected, value)
        return value
    if kind is Literal:
        require(isinstance(value, str) and value in arguments, where, " or ".join(arguments), value)
        return value
    if kind in (typing.Union, types.UnionType):
        return _load_one_of([each for each in arguments if each is not types.NoneType], value, where, strict, arguments)
    if kind in (list, tuple):
        require(isinstance(value, list), where, "a list", value)
        return kind(_load(arguments[0], each, f"{where}[{index}]", strict) for index, each in enumerate(value))
    if kind is dict:
        require(isinstance(value, dict), where, "an object", value)
        return {key: _load(arguments[1], each, f"{where}.{shown(key)}", strict) for key, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return _load_object(kind, value, where, strict)
    wanted = (int, float) if kind is float else kind
    require(isinstance(value, wanted) and (kind is bool or not isinstance(value, bool)), where, PLAIN[kind], value)
    return value


def _load_one_of(forms: list[Any], value: Any, where: str, strict: bool, arguments: tuple[Any, ...]) -> Any:
    """A value of the first of several forms that it has; where it has none the error is of that which it has to the deepest."""
    if value is None and types.NoneType in arguments:
        return None
    errors = []
    for form in forms:
        try:
            return _load(form, value, where, strict)
        except DocumentError as error:
            errors.append(error)
    raise max(errors, key=lambda error: len(error.where))


def _load_object(kind: Any, value: Any, where: str, strict: bool) -> Any:
    require(isinstance(value, dict), where, "an object", value)
    form = _form_of(kind)
    keys = {key: name for name, key in form.keys.items()}
    for name in form.keys:
        if name in form.required and form.keys[name] not in value:
            raise DocumentError(f"{where.lstrip('.') or 'document'}: '{form.keys[name]}' is missing", where)
    if strict and (unknown := [key for key in value if key not in keys]):
        raise DocumentError(f"{where.lstrip('.') or 'document'}: unknown key '{shown(unknown[0])}'", where)
    given = {keys[key]: each for key, each in value.items() if key in keys}
    made = kind(**{name: _load(form.hints[name], each, f"{where}.{form.keys[name]}", strict) for name, each in given.items()})
    object.__setattr__(made, "_absent", form.keys.keys() - given.keys())
    if hasattr(made, "verify"):
        made.verify(where)
    return made


def described(kinds: Iterable[type[Any]]) -> Iterator[str]:
    """Yield the lines that say the form of dataclasses: of each what it is, its keys, and what stands there."""
    for kind in [each for each in kinds if dataclasses.is_dataclass(each)]:
        form, own = _form_of(kind), kind.__dict__.get("__doc__", "")
        yield from ("", kind.__name__, *(f"  {line.strip()}" for line in own.splitlines() if line.strip()))
        for name, key in form.keys.items():
            yield f"    {key:24}{_in_words(form.hints[name])}{'' if name in form.required else ', may be missing'}"


def _in_words(form: Any) -> str:
    kind, arguments = typing.get_origin(form) or form, typing.get_args(form)
    if kind is Annotated:
        return str(arguments[1].expected).removeprefix("a ")
    if kind is Literal:
        return " | ".join(arguments)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(map(_in_words, arguments))
    if kind in (list, tuple):
        return f"[{_in_words(arguments[0])}, ...]"
    if kind is dict:
        return f"{{name: {_in_words(arguments[1])}}}"
    plain = {types.NoneType: "null", Any: "anything", **PLAIN}
    return plain[kind].removeprefix("a ") if kind in plain else kind.__name__
