"""What the host compiler says of a broken text, as the line in its author's file and the first error there."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from .sourcemap import lines_of_file

INCLUDE = Path(__file__).parent / "include"
UNSUPPORTED = "the emulator does not support "
ERROR = re.compile(r"(?P<file>[^\n]+?):(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<text>.*)")
UNDEFINED = re.compile(r"(?:[^\n]*: )?(?P<file>[^\n:]+):(?P<line>\d+): (?P<text>undefined reference to .*)")
DEFINED_TWICE = re.compile(r"(?:[^\n]*: )?(?P<file>[^\n:]+):(?P<line>\d+): (?P<text>multiple definition of `[^\n]*'); ")
UNDEFINED_SOMEWHERE = re.compile(r"[^\n]*: (?P<text>undefined reference to .*)")
# Lines that lead from an error in a header to the text: instantiations and includes stand before it, macros behind.
BEFORE = re.compile(
    r"(?P<file>[^\n]+?):(?P<line>\d+):(?:\d+:)?\s+required (?:from|by)|In file included from (?P<from>[^\n]+?):(?P<at>\d+)"
)
BEHIND = re.compile(r"(?P<file>[^\n]+?):(?P<line>\d+):(?:\d+:)? note: in (?:definition|expansion) of macro")
WARNING = re.compile(r"[^\n]+?:\d+:(?:\d+:)? warning: ")
# CUDA's libraries by the beginnings of their names. What the compiler does not know of them, the emulator does not have.
CUDA_NAME = re.compile(
    r"(?:cuda|cu(?:blas|rand|fft|solver|sparse|dnn|tensor)|nvrtc|nvtx|nvml|nccl)[A-Z_]\w*|CU[a-z]\w+|cu[A-Z][a-z]\w*|__nv_fp\w+|__(?:nv_)?cvt_\w*fp8\w*"
    r"|(?:cub|thrust|cute|cutlass|nvcuda|cudnn_frontend|nvtx3)"
)
# Of CUDA 8, gone with independent thread scheduling.
WITHOUT_SYNC = {"__shfl", "__shfl_up", "__shfl_down", "__shfl_xor", "__ballot", "__any", "__all"}
UNKNOWN = "was not declared|does not name a type|has not been declared|is not a member of|is not a namespace-name|No such file"
UNKNOWN = re.compile(UNKNOWN)
UNKNOWN_NAME = re.compile(rf"[‘'](?:[^’']*\W)?(?P<name>\w+)[’'][^’']*(?:{UNKNOWN.pattern})")
NO_MEMBER = re.compile(r"has no member named [‘'](?P<name>\w+)")
NO_MATCH = re.compile(r"no matching function for call to [‘'](?:[^(’']*\W)?(?P<name>\w+)(?:<[^(]*>)?\(")
CONVERSION = re.compile(r"cannot convert|invalid conversion|could not convert|invalid operands|no match for ‘operator")
SYNTAX = re.compile(r"expected|stray|unterminated|missing terminating")
MACRO = re.compile(r"\b((?:TORCH|AT|C10|PYBIND11)_[A-Z]\w*)\s*\(")
LIGHT_MACROS = {"TORCH_CHECK", "TORCH_CHECK_EQ", "TORCH_INTERNAL_ASSERT", "TORCH_WARN", "AT_DISPATCH_FLOATING_TYPES"}
LIGHT_MACROS |= {"AT_DISPATCH_FLOATING_TYPES_AND_HALF", "PYBIND11_MODULE"}  # those that the light headers define
PYTORCH = re.compile(r"\b(?:torch|at|c10|caffe2|py|pybind11|PyObject)\b|\b(?:TORCH|AT|C10|PYBIND11)_[A-Z]")
GLOBAL_NAME = re.compile(r"[A-Z_][A-Z_0-9]*|_\w+|\w+_t|Py\w+|std(?:in|out|err)|errno|std|torch|at|c10|py|pybind11")
QUOTED = re.compile(r"[‘'`]([^’'`]+)[’']")


@dataclass
class Diagnostic:
    """One error. `file` and `line` are the compiler's, of the text where it leads there; None where it does not."""

    text: str
    file: str | None = None
    line: int = 0
    column: int | None = None  # where the error is in the text itself

    @property
    def names(self):
        """What stands in quotes."""
        return QUOTED.findall(self.text)


def errors_in(messages, is_own):
    """The Diagnostics of the compiler's output. `is_own` tells of a file's name whether it is the text's."""
    found, leading, last_is_foreign = [], None, False
    for message in messages.splitlines():
        if match := ERROR.match(message) or UNDEFINED.match(message) or DEFINED_TWICE.match(message):
            place = match.groupdict()
            last_is_foreign = not is_own(place["file"])
            if not last_is_foreign:
                column = place.get("column")
                found.append(Diagnostic(place["text"], place["file"], int(place["line"]), int(column) if column else None))
            else:
                found.append(Diagnostic(place["text"], *(leading or ())))
            leading = None
        elif WARNING.match(message):
            leading, last_is_foreign = None, False
        elif match := UNDEFINED_SOMEWHERE.match(message):
            found.append(Diagnostic(match["text"]))
        elif match := BEFORE.match(message):
            file, line = match["file"] or match["from"], match["line"] or match["at"]
            leading = (file, int(line)) if is_own(file) else leading
        elif (match := BEHIND.match(message)) and last_is_foreign and found[-1].file is None and is_own(match["file"]):
            found[-1].file, found[-1].line = match["file"], int(match["line"])
    return found


def of_the_text(errors, names, text):
    """Return those of the Diagnostics that stay with all of PyTorch's headers; `names` are all words in these.

    All do where the first is a mistake of syntax, far from a macro that `text`, the broken one, may get from these headers.
    """
    if errors and SYNTAX.match(errors[0].text):
        lines = lines_of_file(errors[0].file or "") or text.split("\n")
        if not _has_heavy_macro("\n".join(lines[max(0, errors[0].line - 2) : errors[0].line])):
            return errors
    return [error for error in errors if not _is_for_want_of_a_header(error, names, text)]


def _has_heavy_macro(text):
    return any(macro not in LIGHT_MACROS for macro in MACRO.findall(text))


def _is_for_want_of_a_header(error, names, text):
    if SYNTAX.match(error.text):
        return _has_heavy_macro(text)
    for pattern in (NO_MEMBER, NO_MATCH, UNKNOWN_NAME):
        if match := pattern.search(error.text):
            return match["name"] in names and (pattern is not UNKNOWN_NAME or _may_be_global(match["name"], error.text, text))
    if CONVERSION.search(error.text):
        return False
    return any(PYTORCH.search(name) for name in error.names)


def _may_be_global(name, told, text):
    """Whether a name without a qualifier, that is not known, may be one of the headers': else it is a variable's, or a typo.

    PyTorch's own are in namespaces: without a `using` they are found only of what is called, by its arguments.
    """
    if not re.search(rf"[‘']{name}[’'] (?:was not declared in this scope|does not name a type)", told):
        return True
    is_global = GLOBAL_NAME.fullmatch(name) or re.search(r"\busing\s+(?:namespace\s+)?(?:torch|at|c10)\b", text)
    return bool(is_global or re.search(rf"(?<![\w.:>]){name}\s*[(<]", text))


def describe(errors, place, column_holds=lambda line: True, text_lines=()):
    """The first error that has a line, with that line, as a text whose first line is `FILE:LINE: error: MESSAGE`.

    `place` maps the compiler's line to (file, line). `column_holds` tells of the compiler's line whether its column is that of
    the file, too, because the line was compiled as it is. `text_lines` are the text's, for one that is in no file.
    """
    error = next((error for error in errors if error.file), errors[0])
    same_line = [each for each in errors if each.file and (each.file, each.line) == (error.file, error.line)]
    error = next((each for each in same_line if unknown_of_cuda(each)), error)
    more = f"\n(and {len(errors) - 1} more error{'s' * (len(errors) > 2)})" if len(errors) > 1 else ""
    if not error.file:
        return f"error: {error.text}{more}"
    file, line = place(error.line)
    missing = unknown_of_cuda(error)
    told = told_of(error, missing)
    shown = [f"{file}:{line}: {told}"]
    lines = lines_of_file(str(file)) or text_lines
    if 1 <= line <= len(lines):
        source = lines[line - 1]
        shown.append(f"{line:5} | {source}")
        column = error.column if error.column and column_holds(error.line) else column_of_a_name(error.names, source)
        if column and column <= len(source) + 1:
            shown.append(" " * 5 + " | " + "".join("\t" if c == "\t" else " " for c in source[: column - 1]) + "^")
    return "\n".join(shown) + more


def unknown_of_cuda(error):
    """The name of CUDA's that the compiler does not know by an error; None where it is about something else."""
    return next((name for name in error.names if CUDA_NAME.fullmatch(name)), None) if UNKNOWN.search(error.text) else None


def told_of(error, missing):
    """What to say of an error; `missing` is the name of CUDA's that the compiler does not know."""
    if missing and any(re.search(rf"\b{missing}\b", path.read_text()) for path in INCLUDE.rglob("*") if path.is_file()):
        return f"error: {missing} is not declared here: cuda_runtime.h, or the header that has it, is not included"
    if missing:
        return f"{UNSUPPORTED}{missing}"
    if UNKNOWN.search(error.text) and (old := WITHOUT_SYNC.intersection(error.names)):
        (name,) = old
        return f"error: {name} was removed in CUDA 9; use {name}_sync(mask, ...), whose mask names the lanes"
    if size := re.search(r"emulator_constant_size_of_(\w+)|variable length array [‘'](?:\w+ )?emulator_type_(\w+)", error.text):
        return f"error: the size of the shared array {size[1] or size[2]} is not a constant; extern __shared__ takes any size"
    if array := re.search(r"variable length array [‘'](\w+)", error.text):
        return f"error: the size of the array {array[1]} is not a constant; a thread's own arrays have constant sizes"
    if twice := re.search(r"conflicting declaration [^‘]*‘.*emulator_dynamic_(\w+)", error.text):
        return f"error: extern __shared__ {twice[1]} is declared with two types; one name has one type in all of a program"
    if twice := re.search(r"multiple definition of `(.*)'", error.text):
        return f"error: {twice[1]} is defined in another of the program's files, too"
    error = replace(
        error, text=re.sub(r"; did you mean [‘'](?:emulator|(?:at|c10|torch)::_ops)::[^?]*\?", "", error.text)
    )  # names of others
    return re.sub(r"^error: (#error |static assertion failed: )?(?=the emulator does not support )", "", f"error: {error.text}")


def column_of_a_name(names, source):
    """Where the first of the names that stands in the line just once begins, counted from 1; None where none does."""
    for name in names:
        found = [match.start() + 1 for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", source)]
        if len(found) == 1:
            return found[0]
    return None


def unexplained(messages):
    """For output in which no error was found: its beginning."""
    return "the compiler failed:\n" + "\n".join(messages.strip().splitlines()[:4])
