"""What "cuda" means to a file that names that device: memory of the emulated GPU, which is the CPU's."""

import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree


class EmulatedDevice(TorchFunctionMode):
    """While active, tensors that are asked for on "cuda" are made on the CPU, and say that they are on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function == torch.Tensor.is_cuda.__get__:  # a new object each time
            return True
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        args, kwargs = _pytree.tree_map(_on_cpu, (args, kwargs or {}))
        return function(*args, **kwargs)


def _on_cpu(value):
    named = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return torch.device("cpu") if named and torch.device(value).type == "cuda" else value


def emulated(function):
    """The function as it is called while an EmulatedDevice is active; modules that it moves to "cuda" stay where they are."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        original = torch.nn.Module.cuda
        torch.nn.Module.cuda = lambda module, device=None: module
        try:
            with EmulatedDevice():
                return function(*args, **kwargs)
        finally:
            torch.nn.Module.cuda = original

    return called
