"""How long load_inline and load take in this process, and whether they compiled or found a finished build."""

import functools
import os
import time
from pathlib import Path

from playground.emulator import toolchain


class BuildWatch:
    """Wraps torch's two build functions from the moment it is made.

    `seconds` is the time spent in them so far; `built` says whether any of it compiled; `names` are the extensions.
    """

    def __init__(self, emulated=False):
        from torch.utils import cpp_extension

        self._emulated = emulated
        self.seconds = 0.0
        self.built = False
        self.names = []
        for function in ("load_inline", "load"):
            setattr(cpp_extension, function, self._watched(getattr(cpp_extension, function)))

    def _watched(self, function):
        @functools.wraps(function)
        def watched(name, *args, **kwargs):
            start, wall_clock = time.perf_counter(), time.time()
            try:
                return function(name, *args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.names.append(name)
                self.built |= self._has_new_library(name, wall_clock)

        return watched

    def _has_new_library(self, name, wall_clock):
        from torch.utils import cpp_extension

        if self._emulated:
            libraries = toolchain.cache_folder().rglob("*.so")
        else:
            root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
            libraries = root.rglob(f"{name}/*.so")
        file_system_resolution = 1.0  # seconds; some file systems round modification times
        return any(file.stat().st_mtime >= wall_clock - file_system_resolution for file in libraries)
