"""What load_inline and load do in this process: how long they take, what they build, whether they compile or fail."""

import contextlib
import functools
import importlib.machinery
import inspect
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import _pytree

import cuda_emulator
from playground.judge import foreign, work
from playground.machine import build_locks
from playground.room import NO_ROOM, NoRoom, is_full
from playground.worker import light_headers
from playground.worker.failures import describe, is_of_user
from playground.worker.interface import WrongInterface, joined, undeclared


class BuildWatch:
    """Wrap torch's two build functions from the moment it is made.

    `seconds` were spent in them; `built` says whether any of it compiled; `names` are the extensions, `kernels` their
    __global__ functions, `own` what was built, `device_code` the CUDA texts, [{"text", "flags"}]. `failure` is the last build's
    reason, or None.
    """

    def __init__(self, emulated=False):
        from torch.utils import cpp_extension

        self._emulated = emulated
        self.seconds, self.built, self.failure = 0.0, False, None
        self.names, self.device_code, self.kernels = [], [], set()
        self.own = work.OwnCode()
        for function in ("load_inline", "load"):
            setattr(cpp_extension, function, self._watched(inspect.unwrap(getattr(cpp_extension, function))))
        self._watch_opening(importlib.machinery.ExtensionFileLoader, "exec_module")
        self._watch_opening(torch.ops, "load_library")

    def _watch_opening(self, owner, name):
        original = inspect.unwrap(getattr(owner, name))

        @functools.wraps(original)
        def opened(*args):
            operators = work.all_operators()
            result = original(*args)
            library = args[-1]
            path = getattr(library, "__file__", None) or str(library)
            if foreign.is_own_library(path):
                self._knows(library, operators)
            return result

        setattr(owner, name, opened)

    def _knows(self, library, operators):
        self.own.operators |= work.all_operators() - operators
        if isinstance(library, ModuleType):
            self.own.wrap_module(library)

    def _watched(self, function):
        @functools.wraps(function)
        def watched(name, *args, **kwargs):
            start, wall_clock = time.perf_counter(), time.time()
            operators = work.all_operators()
            self.kernels.update(*map(cuda_emulator.kernel_names, _texts((args, kwargs))))
            given = {}
            with contextlib.suppress(TypeError):  # of a call that is wrong, which the call itself will say
                given = dict(inspect.signature(function).bind(name, *args, **kwargs).arguments)
            if text := joined(given.get("cuda_sources")):
                implicit = "" if given.get("no_implicit_headers") else "#include <torch/types.h>\n"
                flags = [str(flag) for flag in given.get("extra_cuda_cflags") or []]
                self.device_code.append({"text": implicit + text, "flags": flags})
            if found := undeclared(given):
                raise WrongInterface(f"{_place_of_word(found[0])}{found[1]}")
            if given.get("verbose") and not self._emulated:  # the compiler's output would not be in the exception
                given, args, kwargs = given | {"verbose": False}, (), {**given, "verbose": False}
                kwargs.pop("name")
            try:
                library = self._built(function, given, (name, *args), kwargs)
                self.failure, self.built = None, self.built or self._is_new(library, name, wall_clock)
                self._knows(library, operators)
                return library
            except BaseException as exception:
                failure = self._no_room() if is_full(exception) else exception
                self.failure, _ = describe(failure)
                if failure is not exception:
                    raise failure from None
                raise
            finally:
                self.seconds += time.perf_counter() - start
                self.names.append(name)

        return watched

    def _built(self, function, given, args, kwargs):
        light = None
        if given.get("cuda_sources") and not self._emulated:
            texts = joined(given.get("cpp_sources")), joined(given["cuda_sources"])
            binds, implicit = given.get("functions") is not None, not given.get("no_implicit_headers")
            light = light_headers.folder_for(build_locks.extensions_root(), *texts, binds, implicit)
        if light is None:
            return function(*args, **kwargs)
        from torch.utils import cpp_extension

        versions = cpp_extension.JIT_EXTENSION_VERSIONER.entries
        before = versions.get(args[0])
        try:
            return function(**given | {"extra_include_paths": [str(light), *(given.get("extra_include_paths") or [])]})
        except Exception:  # whatever it is: the build with all headers decides, under the same name
            light_headers.refuse(light)
            versions.pop(args[0], None)
            if before is not None:
                versions[args[0]] = before
            return function(*args, **kwargs)

    def _no_room(self):
        folder, variable = build_locks.extensions_root(), "TORCH_EXTENSIONS_DIR"
        if self._emulated:
            folder, variable = cuda_emulator.cache_folder(), cuda_emulator.CACHE_VARIABLE
        where = f"in {folder} or in that of temporary files"
        return NoRoom(f"{NO_ROOM}for builds, {where}: make some, or set {variable} or TMPDIR to a folder that has it")

    def _is_new(self, library, name, wall_clock):
        """Whether what a build of this name gave was written since `wall_clock`, while others are built side by side."""
        own = [Path(getattr(library, "__file__", None) or str(library))]
        file_system_resolution = 1.0  # seconds; some file systems round modification times
        for file in cuda_emulator.libraries_named(name) if self._emulated else own:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it since it was listed
                if file.stat().st_mtime >= wall_clock - file_system_resolution:
                    return True
        return False


def _place_of_word(word):
    """'FILE:LINE: ' of a word in quotes at or behind the line of the innermost call of the user's; "" without one."""
    frame = sys._getframe()
    while frame and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    if not frame:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    lines = cuda_emulator.lines_of_file(file)[line - 1 : line + 30]
    behind = (at for at, text in enumerate(lines) if re.search(rf"""["']{re.escape(word)}["']""", text))
    return f"{file}:{line + next(behind, 0)}: "


def _texts(arguments):
    texts = []
    for leaf in _pytree.tree_leaves(arguments):
        if isinstance(leaf, (str, os.PathLike)):
            is_file = "\n" not in str(leaf) and str(leaf).endswith((".cu", ".cuh", ".cpp", ".cc"))
            texts.append(Path(leaf).read_text(errors="replace") if is_file and Path(leaf).is_file() else str(leaf))
    return texts
