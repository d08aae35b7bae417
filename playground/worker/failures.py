"""What went wrong, in one line, and where in the user's file."""

import os
import re
import subprocess
import sysconfig
import traceback
from pathlib import Path
from shutil import which

import cuda_emulator
from cuda_emulator import line_map, lines_of_file
from playground import catalog
from playground.judge.failure import JUDGE_BROKE
from playground.sweep import COMPILED

# "main.cpp:8:1: error: ..." of GCC and clang, "cuda.cu(8): error: ..." of nvcc
COMPILER_ERROR = re.compile(
    r"(?P<file>[^\s:(]+\.(?:cpp|cu|cuh|h|cc))[:(](?P<line>\d+)(?:[:,](?P<column>\d+))?\)?\s*:\s*(?:fatal )?error\b[^:]*:"
    r"\s*(?P<text>.*)"
)


OURS = f"{Path(__file__).parents[1]}{os.sep}"  # the folder of the playground
EMULATOR = f"{Path(cuda_emulator.__file__).parent}{os.sep}"
GIVEN = (f"{catalog.MODELS}{os.sep}", f"{catalog.KERNELS}{os.sep}")  # of a wheel they lie within
OTHERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
FRAME = re.compile(r' *File "(?P<file>[^"\n]+)", line (?P<line>\d+) in (?P<function>.+)')  # as faulthandler writes it
CALLS_OF_COMPILED = f"{OURS}judge{os.sep}work.py"
CRASH = "Fatal Python error: "
JUDGE = (f"{OURS}judge{os.sep}", f"{OURS}worker{os.sep}")
LIBRARIES = {name.lower(): name for name in ("cuDNN", "cuBLAS", "cuFFT", "cuSPARSE", "cuSOLVER", "cuRAND")}
WANTS_GPU = "Torch not compiled with CUDA enabled|Found no NVIDIA driver"
WITHOUT_GPU = "; it asks for a GPU, and there is none here: leave the device out, or run it where there is one"


def describe(exception):
    """Return (reason, details): a line for the table, and FILE:LINE with a traceback of the user's frames."""
    if is_of_judge(exception):
        return internal_error(exception)
    if type(exception).__name__ == "EmulatorError":  # of a text, in whose lines it says all there is
        given, _, rest = str(exception).partition("\n")
        first = _at_users_line(given, exception)
        place = re.match(r"(.+?):(\d+): ", first)
        line = place and _line_of(place[1], int(place[2]))
        source = f"\n{int(place[2]):5} | {line}" if line else ""  # the line that it names
        return _reason(exception), first + (f"\n{rest}" if rest and first == given else source)
    if "Error building extension" in str(exception):
        return _reason(exception), _source_line(exception) + str(exception)
    if isinstance(exception, SyntaxError) and exception.filename:
        told = "".join(traceback.format_exception_only(exception))
        return _reason(exception), f"{_reason(exception)}\n{told}"
    told = traceback.TracebackException.from_exception(exception)
    frames = [frame for frame in told.stack if is_of_user(frame.filename)]
    if not frames:
        if told.stack and told.stack[-1].filename.startswith(OURS) and (told.stack[-1].line or "").startswith("raise "):
            return _reason(exception), ""  # the playground says what it expected of the file
        return _reason(exception), "".join(told.format())
    _strip(told)
    place = f"{frames[-1].filename}:{frames[-1].lineno}: in {frames[-1].name}\n"
    return _reason(exception), place + "".join(told.format())


def internal_error(exception):
    """Return (reason, details) of an exception of the judge's or the driver's own."""
    return JUDGE_BROKE + _reason(exception), "".join(traceback.format_exception(exception))


def is_of_judge(exception):
    """Return whether a line of the judge's failed, and no code of the user's, in another way than by raise or RuntimeError."""
    if not isinstance(exception, Exception) or isinstance(exception, (RuntimeError, MemoryError, OSError)):
        return False
    frames = traceback.extract_tb(exception.__traceback__)
    is_ours = bool(frames) and frames[-1].filename.startswith(JUDGE) and not (frames[-1].line or "").startswith("raise ")
    return is_ours and not any(is_of_user(frame.filename) for frame in frames)


def is_of_user(file):
    """Return whether a file is neither the playground's nor the emulator's nor Python's nor a package's."""
    return file.startswith(GIVEN) or not file.startswith(("<", OURS, EMULATOR, *OTHERS))


def _strip(told):
    """Take the playground's frames out of a TracebackException, and out of those that led to it."""
    last = told.stack[-1:]
    kept = [frame for frame in told.stack if not frame.filename.startswith(OURS) or frame.filename.startswith(GIVEN)]
    if last and last[0].filename == CALLS_OF_COMPILED:
        kept.append(traceback.FrameSummary(COMPILED, 0, "a call from Python", lookup_line=False, line="what it has built"))
    told.stack = traceback.StackSummary.from_list(kept)
    for earlier in (told.__cause__, told.__context__):
        if earlier:
            _strip(earlier)


def crash_place(output):
    """Return 'forward, FILE:LINE', the user's innermost function in faulthandler's report in `output`; None without."""
    _, _, report = output.rpartition(CRASH)
    frames = [match for match in FRAME.finditer(report) if is_of_user(match["file"])]
    return f"{frames[0]['function']}, {frames[0]['file']}:{frames[0]['line']}" if frames else None


def without_our_frames(output):
    """Return what a process printed, its faulthandler's report without the playground's frames and the list of modules."""
    before, found, report = output.rpartition(CRASH)
    lines = [line for line in report.splitlines(keepends=True) if not line.startswith("Extension modules: ")]
    theirs = [line for line in lines if not (match := FRAME.match(line)) or is_of_user(match["file"])]
    return before + found + "".join(theirs) if found else output


def _reason(exception):
    name = type(exception).__name__
    if isinstance(exception, SyntaxError):
        place = f"{exception.filename}:{exception.lineno}: " if exception.filename and exception.lineno else ""
        return f"{place}{name}: {exception.msg}"
    if isinstance(exception, SystemExit):
        return f"the file called sys.exit({exception.code!r})"
    is_full = name == "OutOfMemoryError" or isinstance(exception, MemoryError)
    if is_full or "DefaultCPUAllocator: can't allocate" in str(exception):
        return f"out of memory: {_first_line(exception)}"
    if "Error building extension" in str(exception):
        return f"does not compile: {_compiler_error(exception)}"
    if name == "WrongArguments" and (caller := _caller(exception)):
        return f"{caller.filename}:{caller.lineno}: {_first_line(exception)}"
    if undefined := re.search(r"undefined symbol: (_Z\w+)", str(exception)):
        return _undefined(undefined[1], exception)
    if name == "EmulatorError":
        return _at_users_line(_first_line(exception), exception)
    if name in ("CatalogError", "Finding", "InternalLimit", "NoRoom", "WrongInterface"):
        return _first_line(exception)
    hint = WITHOUT_GPU if re.match(WANTS_GPU, str(exception)) else ""
    return f"{name}: {_first_line(exception)}{hint}"


def _undefined(symbol, exception):
    """What is wrong where a library lacks a function: its declaration and what is defined of that name, with their lines."""
    signature = symbol
    if symbol.startswith("_Z") and which("c++filt"):
        signature = subprocess.run(["c++filt", symbol], capture_output=True, text=True).stdout.strip()
    name, caller = re.split(r"[(<]", signature)[0].split("::")[-1], _caller(exception)
    if not caller:
        return f"{signature} is declared and not defined"
    text = "\n".join(lines_of_file(caller.filename))
    heads = re.finditer(rf"^.*?\b({re.escape(name)}\s*\([^;{{}}()]*\))\s*(?:const\s*)?([;{{])", text, re.MULTILINE)
    found = {end: (text.count("\n", 0, head.start(1)) + 1, " ".join(head[1].split())) for head in heads for end in head[2]}
    if ";" not in found:
        return f"{caller.filename}:{caller.lineno}: {signature} is declared and not defined"
    defined = f"defined in line {found['{'][0]} as {found['{'][1]}" if "{" in found else "not defined"
    return f"{caller.filename}:{found[';'][0]}: {found[';'][1]} is declared here, and {defined}"


def _first_line(exception):
    lines = [line.strip() for line in str(exception).splitlines() if line.strip()]
    return lines[0][:400] if lines else "no message"


def _compiler_error(exception):
    text = str(exception)
    match, file, line = _first_error(exception)
    if match:
        return f"{file}:{line}: error: {match['text']}"[:400]
    lines = [line.strip() for line in text.splitlines()]
    if undefined := next(filter(None, (re.search(r"undefined reference to [`'‘](.+?)['’]$", line) for line in lines)), None):
        return _undefined(undefined[1], exception)
    errors = [line for line in lines if re.search(r"\bld: (?!.*warning)|\berror\b\s*[:#]|: error", line)]
    errors = [line for line in errors if not line.startswith("collect2: ")] or errors
    command = r"(Error building extension '[^']*': )?\[\d+/\d+\] |FAILED:|ninja:|/\S+/(g\+\+|c\+\+|nvcc) "
    without_command = [line for line in lines if line and not re.match(command, line)]
    return next(iter(errors or without_command or lines))[:300]


def _first_error(exception):
    """(match, file, line) of a compiler's first error, in the text or at its call; the match is None without one."""
    lines = str(exception).splitlines()
    match = next(filter(None, (COMPILER_ERROR.match(line.strip()) for line in lines)), None)
    if not match:
        return None, None, 0
    file, line = match["file"], int(match["line"])
    if caller := _caller(exception):
        try:
            found = line_map(Path(file).read_text(errors="replace"), lines_of_file(caller.filename))[line - 1]
        except (OSError, IndexError):  # gone
            found = None
        file, line = caller.filename, found or caller.lineno
    return match, file, _line_without_semicolon(file, line, match["text"])


def _source_line(exception):
    match, file, line = _first_error(exception)
    if not match:
        return ""
    text, column = _line_of(file, line), int(match["column"] or 0)
    if text is None:
        return ""
    is_same = column and _line_of(match["file"], int(match["line"])) == text
    blanks = re.sub(r"[^\t]", " ", text[: column - 1])
    return f"{line:5} | {text}\n" + (f"      | {blanks}^\n" if is_same else "")


def _line_of(file, line):
    lines = lines_of_file(file)
    return lines[line - 1] if 1 <= line <= len(lines) else None


def _caller(exception):
    frames = traceback.extract_tb(exception.__traceback__)
    return next((frame for frame in reversed(frames) if is_of_user(frame.filename)), None)


def _at_users_line(complaint, exception):
    """A complaint of the emulator's about a text, at the line of the Python file: that of the call where the text has none."""
    caller = _caller(exception)
    if caller and (match := re.match(r"<[^>]*: (\w+)>:(\d+): (.*)", complaint, re.DOTALL)):
        return f"{caller.filename}:{caller.lineno}: {match[3]} (line {match[2]} of {match[1]}, as load_inline completes it)"
    if match := re.match(rf"(.+?): the emulator does not support (\b({'|'.join(LIBRARIES)})\w*)", complaint):
        return f"{match[1]}: calls {LIBRARIES[match[3]]} ({match[2]}), which the emulator lacks: judge the file on a GPU"
    if match := re.match(r"(?P<file>.+?):(?P<line>\d+): (?P<text>error: .*)", complaint, re.DOTALL):
        line = _line_without_semicolon(match["file"], int(match["line"]), match["text"])
        return f"{match['file']}:{line}: {match['text'].replace(' before ‘::’ token', '')}"  # of a launch, as it was rewritten
    return complaint


def _line_without_semicolon(file, line, complaint):
    """The line that lacks the semicolon that a compiler expected, where it names that of the next token."""
    lines = lines_of_file(file)
    match = re.search(r"expected (?:a |.,. or )?.?;.?(?: before .(?P<next>[^\s\u2019']+))?", complaint)
    following = "" if match and match["next"] == "::" else (match and match["next"]) or ""  # of a launch, as it was rewritten
    if not match or not 1 < line <= len(lines) or not lines[line - 1].strip().startswith(following):
        return line
    for number in range(line - 1, 0, -1):
        if code := re.sub(r"//.*", "", lines[number - 1]).strip():
            may_lack = re.search(r"[\w)\]\"']$", code) and not re.match(r"(if|for|while|else|do|switch)\b", code)
            return number if may_lack else line
    return line
