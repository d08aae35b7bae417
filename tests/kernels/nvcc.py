"""The CUDA text of a variant, taken before anything is built."""

from unittest import mock

import torch
from torch.utils import cpp_extension

from playground.machine.ptxas import DeviceCode


class _Recorded(BaseException):
    """Raised in place of a build. Not an Exception, so that nothing takes it for a failed build and carries on."""


def recipe(model, inputs):
    """The DeviceCode that model(*inputs) would build: load_inline is replaced by a recorder."""
    recorded = []

    def record(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=(), **options):
        recorded.append(DeviceCode(cuda_sources, tuple(extra_cuda_cflags)))
        raise _Recorded

    with mock.patch.object(cpp_extension, "load_inline", record), torch.no_grad():
        try:
            model(*inputs)
        except _Recorded:
            return recorded[0]
    raise AssertionError(f"{type(model).__module__} called no load_inline in its first forward")
