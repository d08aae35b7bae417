"""The host compiler, and a cache of what it made.

Everything is kept under a hash of all that it depends on, is made in a temporary place and is renamed into its own. Of several
processes that need the same thing at once one makes it.
"""

import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .errors import EmulatorError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"
RUNTIME = ROOT / "runtime"
# How all that is linked keeps its own instances of the C++ library's templates: those of a program are instrumented.
OWN_SYMBOLS = f"-Wl,--version-script={RUNTIME / 'exports.map'}"
LIGHT_HEADERS = INCLUDE / "light" / "torch"  # the part of PyTorch's that most texts need
CACHE_VARIABLE, MADE_VARIABLE = "CUDA_EMULATOR_CACHE", "CUDA_EMULATOR_MADE"  # of the environment
MADE_OF_ITS_OWN = ("runtime", "headers")  # the folders of the cache for what no judged text is part of
LIBRARIES = "libraries"  # the folder of the cache for what is linked
MAKING = "making-"  # begins the name of a folder in which something is made
MOST_PARTS = 4  # of the runtime: its files share headers, which a compiler reads once for each part
KEPT_HEADERS = 5  # precompiled: those of a judged file take three, plain programs one
JUST_MADE = 5.0  # seconds: younger ones may not be held yet
DIGITS = 32  # of the digest that begins a cached file's name


def cache_folder():
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuda-emulator"
    return Path(folder)


def own_folders():
    """Return the folders of the cache for what no judged text is part of."""
    return [cache_folder() / kind for kind in MADE_OF_ITS_OWN]


@functools.cache
def compiler():
    """The command of the compiler and its version's text."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not shutil.which(command[0]):
        raise EmulatorError(f"the emulator needs a C++ compiler; {command[0]!r} is not on PATH (install g++, or set CXX)")
    return command, subprocess.run([*command, "--version"], capture_output=True, text=True).stdout


def compiler_name():
    """Return the first line of what the compiler says of its version, without the distribution's remarks."""
    return compiler()[1].splitlines()[0]


@functools.cache
def machine_flags():
    """Instructions for the conversions and contractions that a GPU has in hardware."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    present = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    wide = ("-mcx16",) if "cx16" in present else ()  # atomic operations of 16 bytes
    return ("-mavx2", "-mfma", "-mf16c", *wide) if {"avx2", "fma", "f16c"} <= present else wide


@functools.cache
def digest_of(*folders):
    """A digest of the emulator's own sources in some folders."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def torch_version():
    """Return what the module torch.version has (__version__, cuda, hip), without importing PyTorch, which takes seconds."""
    return types.SimpleNamespace(**runpy.run_path(str(torch_folder() / "version.py")))


def torch_folder():
    """Return where PyTorch is installed."""
    return Path(importlib.util.find_spec("torch").origin).absolute().parent


@functools.cache
def torch_flags():
    """What a text that includes PyTorch's headers is compiled with, and what it is linked with."""
    folder = torch_folder()
    version = tuple(int(part) for part in torch_version().__version__.split("+")[0].split(".")[:2] if part.isdigit())
    says = folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    old_strings = version < (2, 7) and says.exists() and "CXX11_ABI=0" in says.read_text()
    flags = [
        "-std=c++20" if version >= (2, 12) else "-std=c++17",
        *(f"-isystem{folder / path}" for path in ("include", "include/torch/csrc/api/include")),
        f"-isystem{sysconfig.get_path('include')}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(not old_strings)}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
    ]
    libraries = folder / "lib"
    return flags, [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{libraries}"]


@functools.cache
def torch_identity():
    return torch_version().__version__, sys.version_info[:3]


def kept(kind, suffix, key, make):
    """The cached file for `key`; `make(path)` writes it if it is not there."""
    own = digest_of(INCLUDE, RUNTIME) if kind == "runtime" else digest_of(INCLUDE)
    digest = hashlib.sha256(repr((key, own, compiler())).encode()).hexdigest()[:DIGITS]
    folder = cache_folder() / kind
    path = folder / (digest + suffix)
    made = os.environ.get(MADE_VARIABLE)  # a second cache, which cannot be written to
    if made and kind in MADE_OF_ITS_OWN and (Path(made) / kind / path.name).exists():
        return Path(made) / kind / path.name
    if path.exists():
        return path
    if _makes_nothing.get():
        raise NotMade
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(path), tempfile.TemporaryDirectory(dir=folder, prefix=MAKING) as temporary, held(temporary):
        if not path.exists():
            made = Path(temporary) / path.name
            make(made)
            made.replace(path)
    return path


_makes_nothing = contextvars.ContextVar("makes_nothing", default=False)


class NotMade(Exception):
    """The cache lacks a file, and nothing is to be made."""


@contextlib.contextmanager
def making_nothing():
    """Have `kept` raise NotMade in this thread where it would make something."""
    token = _makes_nothing.set(True)
    try:
        yield
    finally:
        _makes_nothing.reset(token)


def sweep():
    """Remove the folders in which a process was making something when it was killed."""
    for kind in entries(cache_folder()):
        remove_unheld(kind, MAKING)


def remove_unheld(parent, prefix):
    """Remove the folders below `parent` whose names begin so and that no process holds, as far as this user may."""
    for folder in [path for path in entries(parent) if path.name.startswith(prefix)]:
        with contextlib.suppress(OSError):
            if fcntl and time.time() - folder.stat().st_mtime > JUST_MADE:
                with held(folder, without_waiting=True):
                    remove_folder(folder)


def remove_folder(folder):
    """Whatever modes and depths it has."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def held(folder, without_waiting=False):
    """Hold a lock on a folder, which ends with this process. Raises OSError where another holds it and nobody is to wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if without_waiting:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif fcntl:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def entries(folder):
    """The paths in a folder; none where it does not exist, or no longer, or is a file."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _one_at_a_time(path):
    """Hold the lock of a file that is to be made. It ends with its holder; without it the file is made twice, and is right."""
    lock = path.with_name(path.name + ".lock")
    with lock.open("w") as file:
        if fcntl:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def compile_command(flags, source, output):
    return [*compiler()[0], *flags, "-c", str(source), "-o", str(output)]


class Build:
    """The compilers of one build, which end together: what is wrong with one text is said without waiting for the others."""

    current = contextvars.ContextVar("build", default=None)  # the Build that a thread compiles for

    def __init__(self):
        self.running, self.is_over, self._lock = [], False, threading.Lock()

    def start(self, command):
        """Return the process of a compiler. Raises Stopped in a build that is over."""
        with self._lock:
            if self.is_over:
                raise Stopped
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            self.running.append(subprocess.Popen(command, process_group=0, **pipes))
            return self.running[-1]

    def stop(self):
        """End the compilers that still run."""
        with self._lock:
            self.is_over = True
            for process in self.running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)


class Stopped(Exception):
    """Another text of the same build has failed."""


def run_compiler(command, explain=None):
    """Run it; `explain` turns the compiler's messages into an exception. Raises Stopped in a Build that ends meanwhile."""
    build = Build.current.get()
    if explain and build:
        with build.start(command) as process:
            messages = process.communicate()[1]
        status = process.returncode
        if status and build.is_over:
            raise Stopped
    else:
        run = subprocess.run(command, capture_output=True, text=True)
        status, messages = run.returncode, run.stderr
    if status:
        raise explain(messages) if explain else EmulatorError(f"{shlex.join(command)}\n{messages}")


def compile_text(text, suffix, flags, explain=None, uses_torch=False):
    """The cached object file of a text."""
    flags = tuple(flags)

    def make(path):
        source = path.with_suffix(suffix)
        source.write_text(text)
        run_compiler(compile_command(flags, source, path), explain)

    return kept("objects", ".o", (text, flags, torch_identity() if uses_torch else None), make)


def precompiled_header(name, flags, uses_torch=True):
    """What to `-include` in front of a text that is compiled with these flags: costly headers, parsed beforehand.

    `name` is that of a file in include/ which includes them. GCC takes the precompiled one beside the file that is named, or
    that file itself where it cannot.
    """
    header = INCLUDE / name

    def make(path):
        run_compiler([*compiler()[0], *flags, "-x", "c++-header", str(header), "-o", str(path)])

    made = kept("headers", ".h.gch", (name, tuple(flags), torch_identity() if uses_torch else None), make)
    named = made.with_suffix("")
    if not named.exists():
        named.write_text(f'#include "{header}"\n')
    with contextlib.suppress(OSError):  # the second cache is not ours
        os.utime(made)
    remove_old_headers()
    return named


def remove_old_headers():
    """Keep the precompiled headers that were used last; each has some 350 MB. A compiler that has one open keeps it."""
    made = {}
    for path in entries(cache_folder() / "headers"):
        if path.suffix == ".gch":
            with contextlib.suppress(OSError):  # another process has removed it
                made[path] = path.stat().st_mtime
    for path in sorted(made, key=made.get)[:-KEPT_HEADERS]:
        with contextlib.suppress(OSError):
            path.unlink()


def names_in_torch_headers():
    """The words of everything that torch/extension.h includes, macros too."""
    flags = torch_flags()[0]

    def make(path):
        command = [*compiler()[0], *flags, "-E", "-dD", "-P", "-x", "c++", "-include", "torch/extension.h", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
        path.write_text("\n".join(sorted(set(re.findall(r"[A-Za-z_]\w*", text)))))

    return set(kept("headers", ".names", ("names", tuple(flags), torch_identity()), make).read_text().split())


def runtime_library():
    """The emulator's own runtime, compiled once for all copies of the same sources, wherever they are installed."""
    flags = ["-std=c++17", "-O2", *LINES_ONLY, "-fPIC", *machine_flags()]
    shown = {"scheduler.cpp": ["-g2"]}  # a block's and a thread's state, for a debugger

    sources = sorted(RUNTIME.glob("*.cpp"))  # in this order their static variables begin
    ends = list(itertools.accumulate(source.stat().st_size for source in sources))
    count = min(os.cpu_count() or 1, MOST_PARTS)
    parts = [[] for _ in range(count)]
    for source, end in zip(sources, ends, strict=True):
        parts[(end - 1) * count // ends[-1]].append(source)
    names = [[source.name for source in part] for part in parts]

    def make(path):
        def compile_part(number):
            text = path.with_name(f"part{number}.cpp")
            text.write_text("".join(f'#include "{source}"\n' for source in parts[number]))
            more = [flag for source in parts[number] for flag in shown.get(source.name, [])]
            run_compiler(compile_command([*flags, f"-I{INCLUDE}", *more], text, text.with_suffix(".o")))
            return str(text.with_suffix(".o"))

        with ThreadPoolExecutor(len(parts)) as pool:
            objects = list(pool.map(compile_part, range(len(parts))))
        own = ["-Wl,-Bsymbolic-functions", OWN_SYMBOLS]
        run_compiler([*compiler()[0], "-shared", *own, *objects, "-o", str(path), "-lpthread", "-ldl"])

    return kept("runtime", "-libemulator.so", ("runtime", flags, shown, names), make)


def torch_glue_library():
    """The part of the runtime that knows PyTorch: exceptions, and the guarded allocator."""
    return _library_with_torch("glue", "-libemulator_torch.so")


def bindings_library():
    """pybind11's code for the usual functions of load_inline."""
    return _library_with_torch("bindings", "-libemulator_bindings.so", f"-I{INCLUDE / 'light'}", "-DLIGHT_PYBIND")


def _library_with_torch(name, suffix, *own):
    flags, link = torch_flags()

    def make(path):
        how = [*own, "-O1", "-fPIC", "-shared", OWN_SYMBOLS, f"-I{INCLUDE}"]
        run_compiler([*compiler()[0], *how, *flags, str(RUNTIME / "torch" / f"{name}.cpp"), "-o", str(path), *link])

    return kept("runtime", suffix, (name, torch_identity()), make)


# Lines are wanted, values of variables are not: following those takes a third of the time.
LINES_ONLY = ("-g1", "-fno-var-tracking")

# DWARF 4: in version 5 the first file of the line table is the generated one, whatever #line says.
KERNEL_FLAGS = (
    *LINES_ONLY,
    "-gdwarf-4",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-fstack-clash-protection",  # a large frame meets the end of its stack, and does not step over it
    "-ffp-contract=fast",
    "-D__assert_fail=emulator_assertion_failed",
)


# Checked kernels spend their time in the runtime: with -O2 they take up to twice as long to compile and run no faster. But
# those that are counted are to load each value as seldom as nvcc's do, which takes -O2.
OPTIMISATION = {"fast": "-O3", "check": "-O1", "count": "-O2"}


def kernel_flags(mode, debug):
    """How kernel text is compiled: nvcc contracts a * b + c, so this does."""
    flags = [*KERNEL_FLAGS, *machine_flags(), f"-I{INCLUDE}"]
    flags += ["-O0", "-g3", "-gdwarf-4"] if debug else [OPTIMISATION[mode]]
    if mode != "fast":
        # Only the calls that it puts at loads and stores are wanted; they lead to the emulator's runtime. Functions that are
        # equal stay apart, or one would be reported under the other's lines. Frame pointers lead from a barrier to its callers.
        flags += ["-fsanitize=thread", "-fno-ipa-icf", "--param=tsan-distinguish-volatile=1", "-fno-omit-frame-pointer"]
        # The sanitizer passes over a struct that is an argument, or a call's result: this makes a copy of each, which it sees.
        flags += ["-fno-elide-constructors", "-DEMULATOR_CHECKED"]
    if mode == "check":
        # A local variable that nothing was written to holds what shows. What indexes an array beyond its type is reported, but
        # that costs optimised kernels up to a third of their speed.
        flags += ["-ftrivial-auto-var-init=pattern", *(["-fsanitize=bounds"] if debug else [])]
    if mode == "fast":
        # GCC 12 can take half a minute to choose the induction variables of an unrolled tile that it has vectorised.
        flags += ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"]
    return tuple(flags)


def link(objects, output_name, extra=()):
    """The cached library of some object files."""
    runtime = runtime_library()

    def make(path):
        run_compiler(
            [
                *compiler()[0],
                "-shared",
                *map(str, objects),
                "-o",
                str(path),
                str(runtime),
                f"-Wl,-rpath,{runtime.parent}",
                "-Wl,-Bsymbolic",
                OWN_SYMBOLS,
                *extra,
            ]
        )

    return kept(LIBRARIES, f"-{output_name}.so", (tuple(map(str, objects)), tuple(extra), str(runtime)), make)


def libraries_named(output_name):
    """The cached libraries that `link` made under a name, or under NAME_v1 and so on."""
    named = re.compile(re.escape(f"-{output_name}") + r"(_v\d+)?\.so")
    return [path for path in entries(cache_folder() / LIBRARIES) if named.fullmatch(path.name[DIGITS:])]
