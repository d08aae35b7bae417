"""CUDA text without a binding: its host functions called with tensors through ctypes. For tests and measurements."""

import ctypes

from . import runtime
from .errors import parse_finding
from .extension import Builder


class KernelLibrary:
    """A text whose host functions are declared `extern "C"`. A finding is raised when the function has returned."""

    def __init__(self, text, mode="fast", name="kernels", source_file=None, debug=False):
        self.mode = mode
        self.builder = Builder(mode, debug, source_file)
        self.debug = debug
        if mode != "fast":
            runtime.torch_glue().emulator_torch_guard_tensors(1)
        runtime.configure(mode, "forward", 1, 0, None)  # the text's __device__ variables are made as it is loaded
        self.library = ctypes.CDLL(str(self.builder.load_kernels(text, name, source_file)))

    def call(self, function, *arguments, schedule="forward", seed=1, processors=0, time_limit=None):
        """Tensors are passed as pointers, numbers as int or float; a ctypes value as it is. Returns the function's int."""
        runtime.configure(self.mode, schedule, seed, processors, time_limit)
        runtime.library().emulator_debug(self.debug)
        values = [
            ctypes.c_void_p(a.data_ptr()) if hasattr(a, "data_ptr") else ctypes.c_float(a) if isinstance(a, float) else a
            for a in arguments
        ]
        returned = getattr(self.library, function)(*values)
        report = runtime.take_finding()
        if report:
            raise parse_finding(report, self.builder.file_of_library)
        return returned

    def close(self):
        """Give PyTorch its own allocator back."""
        if self.mode != "fast":
            runtime.torch_glue().emulator_torch_guard_tensors(0)
