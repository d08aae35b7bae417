"""What went wrong, in one line."""

import re
import traceback
from pathlib import Path

from playground.emulator.sourcemap import line_map, lines_of_file

# "main.cpp:8:1: error: ..." of GCC and clang, "cuda.cu(8): error: ..." of nvcc
COMPILER_ERROR = re.compile(
    r"(?P<file>[^\s:(]+\.(?:cpp|cu|cuh|h|cc))[:(](?P<line>\d+)(?:[:,]\d+)?\)?\s*:\s*(?:fatal )?error\b[^:]*:\s*(?P<text>.*)"
)


def describe(exception):
    """(reason, details): one line for the table, and the traceback for whoever wants it."""
    if type(exception).__name__ == "EmulatorError":  # of a text, in whose lines it says all there is
        return _reason(exception), str(exception)
    return _reason(exception), "".join(traceback.format_exception(exception))


def _reason(exception):
    name = type(exception).__name__
    if isinstance(exception, SyntaxError):
        return f"{name} in line {exception.lineno}: {exception.msg}"
    if isinstance(exception, SystemExit):
        return f"the file called sys.exit({exception.code!r})"
    if (
        name == "OutOfMemoryError"
        or isinstance(exception, MemoryError)
        or "DefaultCPUAllocator: can't allocate" in str(exception)
    ):
        return f"out of memory: {_first_line(exception)}"
    if "Error building extension" in str(exception):
        return f"does not compile: {_compiler_error(exception)}"
    if name in ("CatalogError", "Finding", "EmulatorError"):
        return _first_line(exception)
    return f"{name}: {_first_line(exception)}"


def _first_line(exception):
    lines = [line.strip() for line in str(exception).splitlines() if line.strip()]
    return lines[0][:400] if lines else "no message"


def _compiler_error(exception):
    """The compiler's first error, with the line of the Python file that holds the text; all else in the output is noise."""
    text = str(exception)
    for line in text.splitlines():
        if match := COMPILER_ERROR.match(line.strip()):
            return f"{_place(match['file'], int(match['line']), exception)}: error: {match['text']}"[:400]
    errors = [line.strip() for line in text.splitlines() if re.search(r"\berror\b\s*[:#]|: error|undefined", line)]
    return errors[0][:300] if errors else text.splitlines()[0][:300]


def _place(file, line, exception):
    """FILE:LINE of the Python file that called load_inline, or of the compiled text where it does not hold the line."""
    frames = [frame.filename for frame in traceback.extract_tb(exception.__traceback__)]
    callers = [name for name in frames if "/torch/" not in name and not name.startswith(str(Path(__file__).parents[1]))]
    try:
        found = line_map(Path(file).read_text(errors="replace"), lines_of_file(callers[-1]))[line - 1]
    except (OSError, IndexError):  # gone, or of nobody
        found = None
    return f"{callers[-1]}:{found}" if found else f"{file}:{line}"
