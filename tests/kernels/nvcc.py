"""The CUDA text of a variant, taken before anything is built."""

import contextlib
from unittest import mock

import torch
from torch.utils import cpp_extension

from playground import catalog, tensors
from playground.machine.ptxas import DeviceCode


class _Recorded(BaseException):
    """Raised in place of a build. Not an Exception, so that nothing takes it for a failed build and carries on."""


def recipe(path, problem, dtype=torch.float32):
    """The DeviceCode that the file's ModelNew would build for a problem's inputs, of this type, with PyTorch's own flags for
    nvcc: load_inline is replaced by a recorder."""
    recorded = []

    def record(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=(), **options):
        recorded.append(DeviceCode(cuda_sources, (*cpp_extension.COMMON_NVCC_FLAGS, *extra_cuda_cflags)))
        raise _Recorded

    record.emulates_cuda = True  # the inputs are on the CPU
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cpp_extension, "load_inline", record))
        stack.enter_context(torch.no_grad())
        namespaces = [each for each in vars(torch.ops).values() if isinstance(each, torch._ops._OpNamespace)]
        for operators in [each for each in namespaces if vars(each).get("registered")]:
            stack.enter_context(mock.patch.object(operators, "registered", False))  # built earlier in this process
        model = tensors.make_model(problem, catalog.load_variant(path).ModelNew, seed=0).to(dtype)
        try:
            model(*(each.to(dtype) for each in problem.get_inputs()))
        except _Recorded:
            return recorded[0]
    raise AssertionError(f"{path} called no load_inline in its first forward")
