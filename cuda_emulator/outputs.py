"""Elements of an operator's results that no kernel has written."""

import sys

from . import runtime
from .errors import Finding, FindingData


def tensors_in(value):
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def check(results, file, lines, before):
    """Raises a Finding if a tensor among `results` has an element that was never written. The last launch is blamed.

    `before` is how many launches there were before the call that gave the results.
    """
    import torch

    for tensor in tensors_in(results):
        traced = type(tensor) not in (torch.Tensor, torch.nn.Parameter)  # a FakeTensor, for example, which has no memory
        if traced or not tensor.is_cpu or tensor.layout != torch.strided:
            continue
        at, count = runtime.unwritten(tensor)
        if not count:
            continue
        index = index_of(at // tensor.element_size(), tensor)
        message = f"element {index} of a result of shape {tuple(tensor.shape)} was never written"
        message += f", nor were {count - 1} others" * (count > 1)
        launched = runtime.launches()[before:]
        if not launched:
            message += ": the call launched no kernel"
            raise Finding(FindingData("output never written", message, "", file, line_of_call(file)))
        kernel = launched[-1].kernel
        definition = lines.get(kernel.split("<")[0].split("::")[-1])
        raise Finding(FindingData("output never written", message, kernel, file, definition))


def index_of(offset, tensor):
    """The indices of the element at an offset, in elements, of a dense tensor: [0, 80]."""
    index = [0] * tensor.dim()
    for axis in sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)):
        if tensor.shape[axis] > 1:
            index[axis], offset = divmod(offset, tensor.stride(axis))
    return index


def line_of_call(file):
    """The line of a file in which the innermost of its functions that are running is; None where none is."""
    frame = sys._getframe()
    while frame and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame and frame.f_lineno


class OperatorWatch:
    """While in force, results of operators are checked as they return: of those in the namespace of a library that it built.

    A library `name` or `name_...` belongs to the namespace `name`.
    """

    def __init__(self, builder):
        self.builder = builder

    def begin(self):
        from torch._ops import OpOverloadPacket

        self.original = original = OpOverloadPacket.__call__
        builder = self.builder

        def call(packet, /, *args, **kwargs):
            before = len(runtime.launches())
            result = original(packet, *args, **kwargs)
            namespace = packet._qualified_op_name.split("::")[0]
            built = [file for name, file in builder.namespaces.items() if f"{name}_".startswith(f"{namespace}_")]
            if built:
                check(result, built[-1], builder.kernel_lines, before)
            return result

        OpOverloadPacket.__call__ = call

    def end(self):
        from torch._ops import OpOverloadPacket

        OpOverloadPacket.__call__ = self.original

    def wrap_module(self, module, functions, file):
        """The same for the functions of a pybind module."""
        for name in functions:
            function = getattr(module, name)

            def call(*args, function=function, **kwargs):
                before = len(runtime.launches())
                result = function(*args, **kwargs)
                check(result, file, self.builder.kernel_lines, before)
                return result

            call.__wrapped__ = function
            setattr(module, name, call)
