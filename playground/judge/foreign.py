"""Calls from Python into libraries by ctypes and cffi: whose function is called, and what its arguments point to."""

import _ctypes
import array
import contextlib
import ctypes
import functools
import gc
import os
import re
import site
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch

import cuda_emulator
from playground.tensors import DTYPES, bytes_at

LEAST = 1 << 16  # an address; what is smaller is a size, or an index
SCANNED = 4096  # bytes of a buffer that may hold further addresses
DEPTH = 4  # of buffers that point to buffers
SYSTEM = re.compile(
    r"(/usr(/local)?)?/(lib|lib32|lib64|libexec|bin)/|/usr/local/cuda|/opt/(cuda|nvidia|intel|rocm)|/System/|.*/torchinductor_[^/]+/"
)
# Of what compilers of Python make.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "NUMBA_CACHE_DIR")

_Plain = _ctypes.CFuncPtr
_CData = _Plain.__mro__[1]  # what all values of ctypes are
_made_of_python = set()  # the addresses of callbacks, which are no library's


class _Symbol(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]


_dladdr = ctypes.CDLL(None).dladdr
_dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]


class Function(_Plain):
    """What ctypes makes from now on for a function. Only while calls are watched does it have a __call__ of its own."""

    _flags_ = _ctypes.FUNCFLAG_CDECL  # classes below it say theirs

    def __new__(cls, *args):
        made = super().__new__(cls, *args)
        if args and callable(args[0]):
            _made_of_python.add(_address_of(made))
        return made


def install():
    """Have ctypes make Functions, also of prototypes whose form it has seen before. To be called before a file is loaded."""
    if ctypes._CFuncPtr is not Function:
        ctypes._CFuncPtr = Function
        ctypes._c_functype_cache.clear()


@contextlib.contextmanager
def watched(run):
    """Have run(function, args, kwargs) make each call of an own library's function through ctypes while this is active."""

    def call(function, *args, **kwargs):
        def plain(*args, **kwargs):
            return _Plain.__call__(function, *args, **kwargs)

        return run(plain, args, kwargs) if is_own(_address_of(function)) else plain(*args, **kwargs)

    Function.__call__ = call
    try:
        yield
    finally:
        del Function.__call__


def strided_at(value):
    """Return the live tensor that is not contiguous and begins at an address, an int or a c_void_p; None without one."""
    address = value.value if isinstance(value, ctypes.c_void_p) else value
    if type(address) is not int or address < LEAST:
        return None
    live = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    strided = (each for each in live if each.layout == torch.strided and not each.is_contiguous())
    return next((each for each in strided if each.data_ptr() == address), None)


def watch_cffi(run):
    """Have functions of libraries that cffi opens from now on be called as run(function, args, kwargs)."""
    try:
        import cffi
    except ImportError:
        return
    for name in ("dlopen", "verify"):
        original = getattr(cffi.FFI, name)
        original = getattr(original, "plain", original)

        @functools.wraps(original)
        def opened(*args, original=original, **kwargs):
            return _with_watched_functions(original(*args, **kwargs), run)

        opened.plain = original
        setattr(cffi.FFI, name, opened)


def _with_watched_functions(library, run):
    """A library as cffi makes it in Python, whose functions are called by `run` where they are a file's own."""
    kept = {}

    def get(self, name):
        value = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(value):
            return value
        if name not in kept:
            kept[name] = watched_function(value, run)
        return kept[name]

    type(library).__getattribute__ = get
    return library


def watched_function(function, run):
    """Return a function in the place of one of cffi's, called by `run` where it is a file's own."""
    address = _of_cffi(function)
    if address is not None and not is_own(address):
        return function

    def call(*args):
        return run(function, args, {})

    return call


class Library:
    """In the place of a library in C that cffi has compiled: its functions are called by `run`."""

    def __init__(self, library, run):
        self._library = library._library if isinstance(library, Library) else library
        self._run = run

    def __getattr__(self, name):
        value = getattr(self._library, name)
        if callable(value):
            value = watched_function(value, self._run)
            setattr(self, name, value)
        return value

    def __dir__(self):
        return dir(self._library)


def is_library_of_cffi(value):
    return type(value).__module__ == "_cffi_backend" and type(value).__name__ == "Lib"


def _address_of(function):
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def is_own(address):
    """Return whether the code at an address is neither the system's, nor that of Python and its packages."""
    symbol = _Symbol()
    if address in _made_of_python:
        return False
    if not _dladdr(address, ctypes.byref(symbol)):
        return address >= LEAST  # machine code that a file has made in memory
    return is_own_library(os.fsdecode(symbol.file or b""))


@functools.cache
def is_own_library(path):
    """Return whether a library is none of the system's, of Python's and its packages', of CUDA's or a Python compiler's."""
    if "/" not in path:
        return False  # the program itself
    spellings = Path(path).absolute(), Path(path).resolve()
    return not any(SYSTEM.match(str(each)) or any(each.is_relative_to(root) for root in _of_others()) for each in spellings)


@functools.cache
def _of_others():
    roots = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), site.getusersitepackages()]
    roots += [Path(torch.__file__).parent, Path(np.__file__).parent, *map(os.environ.get, ("CUDA_HOME", "CUDA_PATH", *CACHES))]
    roots += cuda_emulator.own_folders()
    roots += [Path.home() / ".triton", Path.home() / ".cupy"]
    paths = [path for root in filter(None, roots) for path in (Path(root).absolute(), Path(root).resolve())]
    return [path for path in dict.fromkeys(paths) if path not in (Path("/"), Path.home())]


def opened():
    """Return the names of own libraries that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    found = set(re.findall(r" r-xp .*? (/\S.*?\.so[.\d]*)(?: \(deleted\))?$", maps.read_text(), re.M))
    return {path for path in found if is_own_library(path)}


def tensors_at(args):
    """Return the memory that the arguments of a call point to, as flat tensors.

    What an address points to is looked for among live tensors, NumPy's arrays and other buffers, what malloc or CUDA has handed
    out, and, in a small buffer, at what it points to. Where the arguments name no memory, it is all live tensors.
    """
    memory = _Memory()
    return memory.pointed_to(args) or list(memory.tensors.values())


def gives_memory(args):
    """Return whether there is an address among the arguments of a call, or a number as large as one."""
    return any(address >= LEAST for address in _addresses(args))


def tensors_of_result(result):
    """Return tensors_at the pointer that a function gave; nothing for what is no pointer, or points to unknown memory."""
    if not isinstance(result, ctypes._Pointer | ctypes.c_void_p) and _of_cffi(result) is None:
        return []
    return _Memory().pointed_to([result])


def _addresses(values):
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
            yield ctypes.addressof(value)
            yield from _words(ctypes.addressof(value), ctypes.sizeof(value))
        elif (address := _of_cffi(value)) is not None:
            yield address
        elif isinstance(value, list | tuple):
            yield from _addresses(value)
        else:
            with contextlib.suppress(TypeError, ValueError, BufferError):
                yield ctypes.addressof(ctypes.c_char.from_buffer(value))


def _words(start, size):
    """The words in a small piece of memory, each of which may be an address."""
    count = size // 8 if size <= SCANNED and start % 8 == 0 else 0
    return list((ctypes.c_uint64 * count).from_address(start)) if count else []


def _of_cffi(value):
    """The address in one of cffi's pointers, arrays or functions; None of anything else."""
    if not _cffi() or not isinstance(value, _cffi()._CDataBase):
        return None
    try:
        return int(_ffi().cast("uintptr_t", value))
    except (TypeError, ValueError, OverflowError):  # a number, or a struct
        return None


def _cffi():
    return sys.modules.get("_cffi_backend")


@functools.cache
def _ffi():
    return _cffi().FFI()


class _Memory:
    def __init__(self):
        objects = gc.get_objects()
        live = (value for value in _of_kinds(objects, (torch.Tensor,)) if not hasattr(value, "is_a_view_of_memory"))
        self.tensors = _spans(map(_flat, live))

    def pointed_to(self, values):
        """Return flat tensors of what the addresses among the values of a call point to."""
        found = {}
        for address in _addresses(values):
            self._gather(address, found)
        return list(found.values())

    def _gather(self, address, found, depth=0):
        """Add {start: flat tensor} of what holds the address, and of what that points to where it is small."""
        if address < LEAST or address >= 1 << 63:
            return
        span = _holding(address, self.tensors)
        if span is None and (page := _page_of(address)):
            span = _holding(address, self._buffers)
            if span is None and depth == 0 and (chunk := _allocated(address, page[1])):
                self._buffers[chunk] = _viewed(*chunk)
                span = chunk
        if span is None and depth == 0 and (chunk := _on_a_gpu(address)) is not None:
            span = address, address + chunk.numel()
            self.tensors[span] = chunk
        if span is None or span[0] in found:
            return
        flat = found[span[0]] = self.tensors[span] if span in self.tensors else self._buffers[span]
        if flat.device.type == "cpu" and depth < DEPTH:
            for word in _words(span[0], span[1] - span[0]):
                self._gather(word, found, depth + 1)

    @functools.cached_property
    def _buffers(self):
        """{(start, end): flat tensor} of arrays and buffers, in variables of running functions and in what lives."""
        held = [value for frame in _frames() for value in frame.f_locals.values()]
        kinds = np.ndarray, bytearray, array.array, _CData, *([_cffi()._CDataBase] if _cffi() else [])
        return _spans(
            _of_buffer(value) for value in [*_of_kinds(held, kinds), *_of_kinds(gc.get_referents(*gc.get_objects()), kinds)]
        )


def _frames():
    """Those of running functions, but for this module's: one that held itself would outlive its call, with what it holds."""
    for frame in sys._current_frames().values():
        while frame:
            if frame.f_globals is not globals():
                yield frame
            frame = frame.f_back


def _of_kinds(objects, kinds):
    """Those of these classes. A proxy that says it is of another is not asked."""
    known = {}
    for value in objects:
        kind = type(value)
        if kind not in known:
            known[kind] = issubclass(kind, kinds)
        if known[kind]:
            yield value


def _spans(flats):
    """{(start, end): flat tensor}; of those that share memory, the one of a floating-point type."""
    found = {}
    for flat in flats:
        if flat is not None and flat.nbytes:
            span = flat.data_ptr(), flat.data_ptr() + flat.nbytes
            if span not in found or flat.is_floating_point():
                found[span] = flat
    return found


def _holding(address, spans):
    return next((span for span in spans if span[0] <= address < span[1]), None)


def _flat(tensor):
    """All of a tensor's storage, in one dimension; None where it has none."""
    try:
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        flat = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage, 0, (count,), (1,))
        # A fake tensor, such as torch.compile leaves behind, has no memory: it raises.
        return flat if flat.data_ptr() and flat.device.type in ("cpu", "cuda") else None
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ReferenceError):
        return None


def _of_buffer(value):
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        is_one = value.flags.c_contiguous or value.flags.f_contiguous
        return _viewed(value.ctypes.data, value.ctypes.data + value.nbytes, value.dtype.name) if is_one else None
    if isinstance(value, _CData):
        is_memory = isinstance(value, ctypes.Array | ctypes.Structure | ctypes._SimpleCData)
        return _viewed(ctypes.addressof(value), ctypes.addressof(value) + ctypes.sizeof(value)) if is_memory else None
    if _of_cffi(value) is not None:
        size = len(_ffi().buffer(value)) if " owning " in repr(value) else 0
        return _viewed(_of_cffi(value), _of_cffi(value) + size)
    with contextlib.suppress(TypeError, ValueError, BufferError):
        whole = memoryview(value).cast("B")
        start = ctypes.addressof(ctypes.c_char.from_buffer(value))
        return _viewed(start, start + whole.nbytes)
    return None


def _viewed(start, end, dtype="float32"):
    """The memory as a flat tensor: of floats, where nothing is known of it."""
    dtype = DTYPES.get(f"torch.{dtype}", torch.uint8)
    size = end - start
    dtype = dtype if size % dtype.itemsize == 0 and start % dtype.itemsize == 0 else torch.uint8
    if not size:
        return None
    view = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=dtype)
    view.is_a_view_of_memory = True  # which may be gone once the call is over
    return view


def _page_of(address):
    """(start, end) of the mapping that an address can be read and written in; None where there is none."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        bounds, mode = line.split(None, 2)[:2]
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return (start, end) if mode.startswith("rw") else None
    return None


def _allocated(address, end):
    """(start, end) of what glibc's malloc has handed out at an address; None where that does not look so."""
    if address % 16 or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    field = ctypes.c_uint64.from_address(address - 8).value
    size, is_mapped = field & ~7, field & 2
    beyond = address - 16 + size
    if not 32 <= size <= end - address + 16 or (not is_mapped and beyond + 16 > end):
        return None
    if not is_mapped and not ctypes.c_uint64.from_address(beyond + 8).value & 1:  # the next says that this one is in use
        return None
    return address, address + size - (16 if is_mapped else 8)


def _on_a_gpu(address):
    """What CUDA has handed out at an address, from there on, as a tensor; None where that is nothing."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    driver, start, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_size_t()
    if driver.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)):
        return None
    left = start.value + size.value - address
    return bytes_at(address, left // 4 * 4).view(torch.float32 if left >= 4 else torch.uint8)
