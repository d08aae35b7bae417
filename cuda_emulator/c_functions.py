"""Functions of the built libraries that are called through ctypes: no C++ exception gets through it.

A finding is kept while such a function runs (cudaGetLastError says so meanwhile), and raised when it returns.
"""

import ctypes

from . import runtime

FLAGS = (
    "-DEMULATOR_C_LIBRARY",
)  # for a text without PyTorch: whoever calls it otherwise, cffi for example, keeps findings, too


class Watch:
    """While in force, functions of the `libraries` (paths) that ctypes opens call `raise_kept` as they return."""

    def __init__(self, libraries, raise_kept):
        self.libraries, self.raise_kept = libraries, raise_kept

    def begin(self):
        watch, self.original = self, ctypes.CDLL.__init__

        def init(library, *args, **kwargs):
            watch.original(library, *args, **kwargs)
            if str(library._name) in watch.libraries:
                library._FuncPtr = watch._watched(library._FuncPtr)

        self.replacement = ctypes.CDLL.__init__ = init

    def end(self):
        if ctypes.CDLL.__init__ is self.replacement:
            ctypes.CDLL.__init__ = self.original

    def _watched(self, kind):
        watch = self

        class Function(kind):
            _flags_, _restype_ = kind._flags_, kind._restype_

            def __call__(self, *args):
                runtime.library().emulator_keep_findings(1)
                try:
                    return super().__call__(*args)
                finally:
                    runtime.library().emulator_keep_findings(-1)
                    watch.raise_kept()

        return Function
