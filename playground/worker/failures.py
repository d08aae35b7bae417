"""What went wrong, in one line."""

import re
import traceback


def describe(exception):
    """(reason, details): one line for the table, and the traceback for whoever wants it."""
    details = "".join(traceback.format_exception(exception))
    return _reason(exception), details


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
        return f"does not compile: {_compiler_error(str(exception))}"
    if name in ("CatalogError", "Finding"):
        return _first_line(exception)
    return f"{name}: {_first_line(exception)}"


def _first_line(exception):
    lines = [line.strip() for line in str(exception).splitlines() if line.strip()]
    return lines[0][:400] if lines else "no message"


def _compiler_error(text):
    """The compiler's first error; ninja's own lines and the command lines are noise."""
    errors = [line.strip() for line in text.splitlines() if re.search(r"\berror\b\s*[:#]|: error|undefined", line)]
    return errors[0][:300] if errors else text.splitlines()[0][:300]
