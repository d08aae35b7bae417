"""The emulator tests' texts on a real GPU, under the interface of KernelLibrary."""

import ctypes
import shutil
import subprocess

import pytest
import torch


class DeviceLibrary:
    """A text compiled by nvcc for the GPU at hand. Skips the test where there is no Hopper GPU or no nvcc."""

    def __init__(self, text, folder):
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no GPU of compute capability 9.0")
        if not shutil.which("nvcc"):
            pytest.skip("no nvcc on PATH")
        source, library = folder / "text.cu", folder / "text.so"
        source.write_text(text)
        options = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
        subprocess.run(["nvcc", *options, source, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))

    def call(self, function, *arguments, **settings_of_the_emulator):
        """Tensors are copied to the GPU and back."""
        on_device = {i: a.cuda() for i, a in enumerate(arguments) if torch.is_tensor(a)}
        values = [
            ctypes.c_void_p(on_device[i].data_ptr()) if i in on_device else ctypes.c_float(a) if isinstance(a, float) else a
            for i, a in enumerate(arguments)
        ]
        returned = getattr(self.library, function)(*values)
        torch.cuda.synchronize()
        for i, tensor in on_device.items():
            arguments[i].copy_(tensor)
        return returned

    def close(self):
        """Nothing to give back."""
