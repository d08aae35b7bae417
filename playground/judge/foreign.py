"""Calls from Python into libraries by ctypes and cffi: whose function is called, and what its arguments point to."""

import _ctypes
import contextlib
import ctypes
import functools
import gc
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cuda_emulator

LEAST = 1 << 16  # an address; what is smaller is a size, or an index
SCANNED = 4096  # bytes of a buffer that may hold further addresses
SYSTEM = re.compile(
    r"(/usr(/local)?)?/(lib|lib32|lib64|libexec|bin)/|/usr/local/cuda|/opt/(cuda|nvidia|intel|rocm)|/System/|.*/torchinductor_[^/]+/"
)
# Of what compilers of Python make.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR")

Run = Callable[[Any, Any, Any], Any]  # makes a call: function, args, kwargs

_Plain = _ctypes.CFuncPtr
_ctypes_module: Any = ctypes  # with names that it does not export
_CData: Any = _Plain.__mro__[1]  # what all values of ctypes are
_made_of_python: set[int] = set()  # the addresses of callbacks, which are no library's


class _Symbol(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]


_dladdr = ctypes.CDLL(None).dladdr
_dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]


class Function(_ctypes.CFuncPtr):
    """What ctypes makes from now on for a function. Only while calls are watched does it have a __call__ of its own."""

    _flags_ = _ctypes.FUNCFLAG_CDECL  # classes below it say theirs

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls, *args)
        if args and callable(args[0]):
            _made_of_python.add(_address_of(made))
        return made


def install() -> None:
    """Have ctypes make Functions, also of prototypes whose form it has seen before. To be called before a file is loaded."""
    if _ctypes_module._CFuncPtr is not Function:
        _ctypes_module._CFuncPtr = Function
        _ctypes_module._c_functype_cache.clear()


@contextlib.contextmanager
def watched(run: Run) -> Iterator[None]:
    """Have run(function, args, kwargs) make each call of an own library's function through ctypes while this is active."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        def plain(*args: Any, **kwargs: Any) -> Any:
            return _Plain.__call__(function, *args, **kwargs)

        return run(plain, args, kwargs) if is_own(_address_of(function)) else plain(*args, **kwargs)

    setattr(Function, "__call__", call)  # noqa: B010
    try:
        yield
    finally:
        del Function.__call__


def strided_at(value: Any) -> torch.Tensor | None:
    """Return the live tensor that is not contiguous and begins at an address, an int or a c_void_p; None without one."""
    address = value.value if isinstance(value, ctypes.c_void_p) else value
    if type(address) is not int or address < LEAST:
        return None
    live = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    strided = (each for each in live if each.layout == torch.strided and not each.is_contiguous())
    return next((each for each in strided if each.data_ptr() == address), None)


def watch_cffi(run: Run) -> None:
    """Have functions of libraries that cffi opens from now on be called as run(function, args, kwargs)."""
    try:
        import cffi
    except ImportError:
        return
    for name in ("dlopen", "verify"):
        original = getattr(cffi.FFI, name)
        original = getattr(original, "plain", original)

        @functools.wraps(original)
        def opened(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            return _with_watched_functions(original(*args, **kwargs), run)

        vars(opened).update(plain=original)
        setattr(cffi.FFI, name, opened)


def _with_watched_functions(library: Any, run: Run) -> Any:
    """A library as cffi makes it in Python, whose functions are called by `run` where they are a file's own."""
    kept = {}

    def get(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name not in kept and not name.startswith("_") and callable(value):
            kept[name] = watched_function(value, run)
        return kept.get(name, value)

    setattr(type(library), "__getattribute__", get)  # noqa: B010
    return library


def watched_function(function: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Return a function in the place of one of cffi's, called by `run` where it is a file's own."""
    address = _of_cffi(function)
    if address is not None and not is_own(address):
        return function

    def call(*args: Any) -> Any:
        return run(function, args, {})

    return call


class Library:
    """In the place of a library in C that cffi has compiled: its functions are called by `run`."""

    def __init__(self, library: Any, run: Run) -> None:
        self._library: Any = library._library if isinstance(library, Library) else library
        self._run = run

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._library, name)
        if callable(value):
            value = watched_function(value, self._run)
            setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return dir(self._library)


def is_library_of_cffi(value: Any) -> bool:
    return type(value).__module__ == "_cffi_backend" and type(value).__name__ == "Lib"


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def is_own(address: int) -> bool:
    """Return whether the code at an address is neither the system's, nor that of Python and its packages."""
    symbol = _Symbol()
    if address in _made_of_python:
        return False
    if not _dladdr(address, ctypes.byref(symbol)):
        return address >= LEAST  # machine code that a file has made in memory
    return is_own_library(os.fsdecode(symbol.file or b""))


@functools.cache
def is_own_library(path: str) -> bool:
    """Return whether a library is none of the system's, of Python's and its packages', of CUDA's or a Python compiler's."""
    if "/" not in path:
        return False  # the program itself
    spellings = Path(path).absolute(), Path(path).resolve()
    return not any(SYSTEM.match(str(each)) or any(each.is_relative_to(root) for root in _of_others()) for each in spellings)


@functools.cache
def _of_others() -> list[Path]:
    roots: list[str | Path | None] = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), site.getusersitepackages()]
    roots += [Path(torch.__file__).parent, Path(np.__file__).parent, *map(os.environ.get, ("CUDA_HOME", "CUDA_PATH", *CACHES))]
    roots += cuda_emulator.own_folders()
    roots += [Path.home() / ".triton", Path.home() / ".cupy"]
    paths = [path for root in roots if root for path in (Path(root).absolute(), Path(root).resolve())]
    return [path for path in dict.fromkeys(paths) if path not in (Path("/"), Path.home())]


def opened() -> set[str]:
    """Return the names of own libraries that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    found = set(re.findall(r" r-xp .*? (/\S.*?\.so[.\d]*)(?: \(deleted\))?$", maps.read_text(), re.M))
    return {path for path in found if is_own_library(path)}


def gives_memory(args: Iterable[Any]) -> bool:
    """Return whether there is an address among the arguments of a call, or a number as large as one."""
    return any(address >= LEAST for address in _addresses(args))


def _addresses(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        value = getattr(value, "_as_parameter_", value)
        is_reference = type(value).__name__ == "CArgObject"  # of byref
        value = value._obj if is_reference else value
        if isinstance(value, bool | float | str | bytes) or value is None:
            continue
        if isinstance(value, int):
            yield value
        elif isinstance(value, torch.Tensor):
            yield value.data_ptr()
        elif isinstance(value, np.ndarray):
            yield value.__array_interface__["data"][0]
        elif isinstance(value, ctypes._Pointer | _Plain) and not is_reference:
            yield ctypes.cast(value, ctypes.c_void_p).value or 0
        elif isinstance(value, ctypes._SimpleCData) and not is_reference:  # a number
            yield from _addresses([value.value])
        elif isinstance(value, _CData):
            start, size = ctypes.addressof(value), ctypes.sizeof(value)
            yield start
            if size <= SCANNED and start % 8 == 0:  # a word in a small piece of memory may be an address
                yield from (ctypes.c_uint64 * (size // 8)).from_address(start)
        elif (address := _of_cffi(value)) is not None:
            yield address
        elif isinstance(value, list | tuple):
            yield from _addresses(value)
        else:
            with contextlib.suppress(TypeError, ValueError, BufferError):
                yield ctypes.addressof(ctypes.c_char.from_buffer(value))


def _of_cffi(value: Any) -> int | None:
    """The address in one of cffi's pointers, arrays or functions; None of anything else."""
    cffi: Any = sys.modules.get("_cffi_backend")
    if not cffi or not isinstance(value, cffi._CDataBase):
        return None
    try:
        return int(cffi.FFI().cast("uintptr_t", value))
    except (TypeError, ValueError, OverflowError):  # a number, or a struct
        return None
