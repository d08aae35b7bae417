"""CUDA kernels on the CPU: runs CUDA programs, and the CUDA text given to load_inline, and finds their mistakes.

    import cuda_emulator

    with cuda_emulator.install(mode="check"):
        output = model(x)              # CPU tensors; torch.utils.cpp_extension.load_inline is the emulator's
    print(cuda_emulator.launches())

`fast` only computes, on all processors. `check` also looks for races, accesses out of bounds, uninitialised reads and
barriers that do not meet, and raises a Finding. `count` counts memory transactions, too. A process uses one mode: libraries
built for one cannot serve another. `python -m cuda_emulator FILE.cu` runs a plain program.

The names in __all__ are what others may use. Nothing here needs PyTorch before `install`, or `devices`, is used.
"""

import ctypes
import importlib
import sys
from pathlib import Path

from . import c_functions, ci_files
from .counters import Counts, Traffic, counts, reset_counts
from .debugging import first_kernel, recipe
from .declarations import kernel_names
from .errors import EmulatorError, Finding, Party, parse_finding
from .extension import Builder, compile_ahead, is_made, make_own
from .program import Program
from .runtime import (
    CALL_OFF,
    SECONDS_TO_ANSWER,
    Launch,
    accepted_races,
    launches,
    obey_call_off,
    reset_launches,
    without_values,
)
from .sourcemap import SourceMap, line_map, lines_of_file
from .toolchain import (
    CACHE_VARIABLE,
    LIGHT_HEADERS,
    MADE_VARIABLE,
    cache_folder,
    compiler_name,
    entries,
    held,
    libraries_named,
    own_folders,
    remove_folder,
    remove_unheld,
    sweep,
    torch_folder,
    torch_version,
)

__all__ = [
    "CACHE_VARIABLE",
    "CALL_OFF",
    "LIGHT_HEADERS",
    "MADE_VARIABLE",
    "SECONDS_TO_ANSWER",
    "Counts",
    "EmulatorError",
    "Finding",
    "Launch",
    "Party",
    "Program",
    "SourceMap",
    "Traffic",
    "accepted_races",
    "active",
    "cache_folder",
    "ci_files",
    "compile_ahead",
    "compiler_name",
    "counts",
    "devices",
    "entries",
    "first_kernel",
    "held",
    "install",
    "is_made",
    "kernel_names",
    "launches",
    "libraries_named",
    "line_map",
    "lines_of_file",
    "make_own",
    "obey_call_off",
    "own_folders",
    "recipe",
    "remove_folder",
    "remove_unheld",
    "reset_counts",
    "reset_launches",
    "sweep",
    "torch_folder",
    "torch_version",
    "uninstall",
    "without_values",
]

active = None  # the Installation in force


class Installation:
    """What install() has changed, and how to change it back."""

    def __init__(self, mode, schedule, seed, processors, time_limit, debug, source_file):
        from . import runtime

        if mode not in runtime.MODES:
            raise ValueError(f"mode is one of {', '.join(runtime.MODES)}, not {mode!r}")
        if schedule not in runtime.SCHEDULES:
            raise ValueError(f"schedule is one of {', '.join(runtime.SCHEDULES)}, not {schedule!r}")
        self.mode = mode
        self.builder = Builder(mode, debug, source_file)
        self.debug = debug
        self.settings = schedule, seed, processors, time_limit
        self.source_file, self.answers = source_file, None

    def begin(self):
        from torch.utils import cpp_extension

        from . import runtime

        self.builder.make_shared()
        runtime.configure(self.mode, *self.settings)
        runtime.library().emulator_debug(self.debug)
        self.to_exception = lambda report: parse_finding(report, self.builder.file_of_library, self.builder.numbered)
        runtime.torch_glue().emulator_torch_raise_with(ctypes.py_object(self.to_exception))
        if self.mode != "fast":
            from .outputs import OperatorWatch

            runtime.torch_glue().emulator_torch_guard_tensors(1)
            self.builder.watch = OperatorWatch(self.builder)
            self.builder.watch.begin()
        self.original, self.replacement = cpp_extension.load_inline, self.builder.load_inline
        _replace("load_inline", self.original, self.replacement)
        self.c_functions = c_functions.Watch(self.builder.files, self.raise_kept)
        self.c_functions.begin()
        self.load = cpp_extension.load
        self.loading = _with_cuda(self.load, self.builder.load)
        _replace("load", self.load, self.loading)
        if self.source_file:
            from .devices import Answers

            self.answers = Answers(str(self.source_file))
            self.answers.begin()

    def end(self):
        from torch.utils import cpp_extension

        from . import runtime

        if self.answers:
            self.answers.end()
        self.c_functions.end()
        cpp_extension.load_inline = self.original  # whoever has wrapped it meanwhile
        _replace("load_inline", self.replacement, self.original)
        _replace("load", cpp_extension.load, self.load)
        if self.builder.watch:
            self.builder.watch.end()
            runtime.torch_glue().emulator_torch_guard_tensors(0)
        runtime.torch_glue().emulator_torch_raise_with(None)

    def raise_kept(self):
        """Raise the Finding of a launch through which it could not be thrown, if there is one that nobody has taken."""
        from . import runtime

        if report := runtime.take_finding():
            raise self.to_exception(report)

    def configure(self, schedule="forward", seed=1, processors=0, time_limit=None):
        """Change how launches run from now on."""
        from . import runtime

        runtime.configure(self.mode, schedule, seed, processors, time_limit)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        uninstall()


def _replace(name, old, new):
    """In every module that has it: a notebook's may have imported it before."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _with_cuda(load, emulated):
    """PyTorch's load for files without CUDA, the emulator's for the rest.

    No functools.wraps: who undoes other wrappers (inspect.unwrap) would take PyTorch's for all.
    """

    def loading(name, sources, *args, **kwargs):
        files = [sources] if isinstance(sources, (str, Path)) else sources
        is_cuda = any(str(file).endswith((".cu", ".cuh")) for file in files)
        return (emulated if is_cuda else load)(name, sources, *args, **kwargs)

    return loading


def __getattr__(name):
    if name == "devices":  # it needs PyTorch
        return importlib.import_module(".devices", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install(mode="fast", *, schedule="forward", seed=1, processors=0, time_limit=None, debug=False, source_file=None):
    """Replace load_inline by the emulator's. `source_file` names the file to report lines of, if it is not the caller's.

    Code of that file is told that there is a GPU.
    """
    global active
    uninstall()
    installation = Installation(mode, schedule, seed, processors, time_limit, debug, source_file)
    installation.begin()
    active = installation
    return installation


def uninstall():
    """Put everything back. Libraries that are loaded stay loaded."""
    global active
    if active:
        active.end()
        active = None
