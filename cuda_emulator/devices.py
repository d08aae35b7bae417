"""What "cuda" means to a file that names that device: memory of the emulated GPU, which is the CPU's, and its one stream."""

import contextlib
import functools
import os
import re
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_emulator

from . import runtime
from .errors import EmulatorError

# As torch.cuda.get_device_properties gives them; include/emulator/host_device.h says the same to host code.
PROPERTIES = SimpleNamespace(
    name="CUDA emulator",
    major=9,
    minor=0,
    total_memory=16 << 30,
    multi_processor_count=4,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
)


class EmulatedDevice(TorchFunctionMode):
    """While active, tensors that are asked for on "cuda" are made on the CPU, and say that they are on a GPU.

    What is asked for without a device, or on "cpu", is on the CPU as it would be beside a GPU: in check mode such tensors, and
    what is computed from them alone, say so, and are moved by `cuda` and `to`.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return _moved(args[0], args[0], to_host=False)
        if function == torch.Tensor.cpu:
            return _moved(args[0], args[0], to_host=True)
        if function == torch.Tensor.is_cuda.__get__:  # a new object each time
            return not is_on_host(args[0])
        if function == torch.Tensor.is_cpu.__get__:
            return is_on_host(args[0])
        if function == torch.Tensor.device.__get__:
            return torch.device("cpu") if is_on_host(args[0]) else Stream.device
        if function is torch.device:
            return function(*args, **kwargs)
        given = _pytree.tree_leaves((args, kwargs))
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        on_cpu, as_keywords = _pytree.tree_map(_on_cpu, (args, kwargs))
        result = function(*on_cpu, **as_keywords)
        if function == torch.Tensor.to:
            named = [each for each in [*args[1:], *kwargs.values()] if isinstance(each, (str, torch.device, torch.Tensor))]
            to_host = _is_host_device(named[0]) if named else is_on_host(args[0])
            return _moved(args[0], result, to_host)
        if kwargs.get("device") is not None:
            to_host = _is_host_device(kwargs["device"])
            return _moved(tensors[0], result, to_host) if tensors else _marked(result, to_host)
        if not tensors:
            return _marked(result, _default_is_host() if function in _FACTORIES else False)
        return _following(tensors, result)


def _on_cpu(value):
    named = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return torch.device("cpu") if named and torch.device(value).type == "cuda" else value


def _is_host_device(named):
    """Whether a device, its name or number, or a tensor is on the CPU."""
    if isinstance(named, torch.Tensor):
        return is_on_host(named)
    return not isinstance(named, int) and torch.device(named).type == "cpu"


def _default_is_host():
    return torch.get_default_device().type == "cpu"


# What makes a tensor on the default device.
_FACTORIES = {
    *(torch.arange, torch.as_tensor, torch.complex, torch.empty, torch.empty_strided, torch.eye, torch.full, torch.linspace),
    *(torch.logspace, torch.normal, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm, torch.scalar_tensor),
    *(torch.tensor, torch.tril_indices, torch.triu_indices, torch.zeros),
}


def _address(tensor):
    """That of a tensor's storage; 0 where it has none of the CPU's, as a FakeTensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or not tensor.is_cpu:
        return 0
    return tensor.untyped_storage().data_ptr()


def is_on_host(tensor):
    """Return whether a tensor would be on the CPU beside a GPU. Known in check mode, of what was made while emulated."""
    return _kind_of(_address(tensor)) == 1


def _kind_of(address):
    """1 for the address of a CPU tensor, 0 of one of the device, -1 of other memory; None where there is no check mode."""
    is_checked = cuda_emulator.active and cuda_emulator.active.mode != "fast"
    return runtime.library().emulator_is_pageable(address) if address and is_checked else None


def put_on_device(module):
    """Have the parameters and buffers of a module be the device's, as after `to`."""
    for tensor in [*module.parameters(), *module.buffers()]:
        _marked(tensor, False)


def put_on_host(tensors, on_host=True):
    """Have tensors be on the CPU beside the GPU, or the device's again."""
    _marked(list(tensors), on_host)


def _marked(result, on_host):
    for tensor in _pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor) and _kind_of(address := _address(tensor)) is not None:
            runtime.library().emulator_set_pageable(address, on_host)
    return result


def _moved(tensor, result, to_host):
    """What came of moving a tensor: a copy if it was in the other memory."""
    is_same, kind = _address(result) == _address(tensor), _kind_of(_address(tensor))
    if kind is None or (is_same and (kind == to_host or (to_host and kind == -1))):
        return result
    return _marked(result.clone() if is_same else result, to_host)


def _following(tensors, result):
    """A result where the tensors that it was computed from are."""
    known = {_address(each) for each in tensors}
    fresh = [each for each in _pytree.tree_leaves(result) if isinstance(each, torch.Tensor) and _address(each) not in known]
    if fresh and all(map(is_on_host, tensors)):
        _marked(fresh, True)
    return result


class _MadeInCpp(TorchDispatchMode):
    """While active, what host code in C++ makes without naming a device is known to be on the CPU.

    `moves_tensors()`: whether the code may move tensors between devices, which is not seen here: then nothing is certain.
    """

    def __init__(self, moves_tensors):
        super().__init__()
        self.moves_tensors = moves_tensors

    @classmethod
    def _should_skip_dynamo(cls):
        """Guarding against torch.compile would import torch._dynamo, for a second."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # EmulatedDevice, which answers for the file
            result = function(*args, **kwargs)
            tensors = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            takes_device = any(argument.name == "device" for argument in function._schema.arguments)
            if kwargs.get("device") == COPIED_TO_CPU or (takes_device and not tensors and kwargs.get("device") is None):
                return result if self.moves_tensors() else _marked(result, True)
            return _following(tensors, result) if tensors else result


COPIED_TO_CPU = torch.device("cpu", 0)  # what `cpu()` in C++ asks for: include/emulator/torch_overrides.h


class Stream:
    """Every stream is the one of the emulated GPU, on which all is done when a call returns; see CUDAStream.h."""

    cuda_stream = stream_id = device_index = priority = 0
    device = torch.device("cuda", 0)

    def __init__(self, device=None, priority=0, **kwargs):
        _number_of(device)

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Its times are the host's, as those of cudaEventElapsedTime are under the emulator."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._is_timed, self._seconds = enable_timing, None

    def record(self, stream=None):
        self._seconds = time.monotonic()

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass

    def elapsed_time(self, end_event):
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if None in (self._seconds, end_event._seconds):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end_event._seconds - self._seconds)


def _number_of(device):
    """0, the number of the only device: named, or that of a tensor, which is on the CPU."""
    number = device if isinstance(device, int) or device is None else torch.device(device).index
    if number not in (None, 0, -1):
        raise RuntimeError(f"CUDA error: invalid device ordinal: the emulated GPU is number 0, there is no number {number}")
    return 0


def _for_device(answer):
    """A function of torch.cuda's that may be asked about a device, and gives that answer."""
    return lambda device=None: (_number_of(device), answer)[1]


def _refused(name):
    def refuse(*args, **kwargs):
        raise EmulatorError(f"torch.cuda.{name} is not emulated")

    return refuse


class _Device(contextlib.nullcontext):
    def __init__(self, device=None):
        super().__init__(_number_of(device))


STREAM = Stream()
REFUSED = ("CUDAGraph", "ExternalStream", "graph", "graph_pool_handle", "make_graphed_callables", "mem_get_info")
OF_CUDA = {
    "Event": Event,
    "Stream": Stream,
    "current_device": lambda: 0,
    "current_stream": _for_device(STREAM),
    "default_stream": _for_device(STREAM),
    "device": _Device,
    "device_count": lambda: 1,
    "device_of": lambda tensor: _Device(),
    "get_device_capability": _for_device((PROPERTIES.major, PROPERTIES.minor)),
    "get_device_name": _for_device(PROPERTIES.name),
    "get_device_properties": _for_device(PROPERTIES),
    "init": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "set_device": _for_device(None),
    "set_stream": lambda stream: None,
    "stream": contextlib.nullcontext,
    "synchronize": _for_device(None),
}
# What stands in the place of torch's own.
EMULATED = {
    torch.cuda: OF_CUDA | {name: _refused(name) for name in REFUSED},
    torch.nn.Module: {"cuda": lambda module, device=None: module.to("cuda")},
    torch.Tensor: {"record_stream": lambda tensor, stream: None},
}


@contextlib.contextmanager
def _standing_in(owner, replacements):
    """While active, the owner has these; what somebody else puts there meanwhile stays."""
    originals = {name: getattr(owner, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, replacement in replacements.items():
            if getattr(owner, name) is replacement:
                setattr(owner, name, originals[name])


def emulated(function):
    """The function as it is called while "cuda" is the emulated GPU; modules that it moves there stay where they are."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        if any(isinstance(mode, EmulatedDevice) for mode in _get_current_function_mode_stack()):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for owner, replacements in EMULATED.items():
                stack.enter_context(_standing_in(owner, replacements))
            stack.enter_context(EmulatedDevice())
            return function(*args, **kwargs)

    return called


def watched(function, moves_tensors):
    """The function as `emulated` has it, where a kernel that is given a CPU tensor is a finding (check mode).

    `moves_tensors()` says whether the C++ code that was built so far may move tensors between devices.
    """
    emulated_function = emulated(function)

    @functools.wraps(function)
    def called(*args, **kwargs):
        runtime.library().emulator_refuse_pageable(1)
        try:
            with _MadeInCpp(moves_tensors):
                return emulated_function(*args, **kwargs)
        finally:
            runtime.library().emulator_refuse_pageable(0)

    return called


QUESTIONS = ("current_device", "device_count", "get_device_capability", "get_device_name", "get_device_properties")
QUESTIONS += ("is_available", "is_bf16_supported")
COMPILES = re.compile(r"(?:\S*/)?nvcc\b(?!\s+(?:-V|-h|--version|--help)\s*$)")  # a command; to ask for the version is no build
BY_HAND = "calls nvcc itself, and what that builds needs a GPU: judge the file on one, or build by load_inline or load"
VERSION = "13.0"  # as CUDA_VERSION in include/cuda.h says


class Answers:
    """What torch says of a GPU to code of one file: that there is the emulated one. Everybody else is told the truth."""

    def __init__(self, file):
        self.file = file

    def begin(self):
        answers = {torch.cuda: {name: OF_CUDA[name] for name in QUESTIONS} | {"get_arch_list": lambda: ["sm_90"]}}
        answers[torch.backends.cuda] = {"is_built": lambda: True}
        self.kept = contextlib.ExitStack()
        for owner, named in answers.items():
            replaced = {name: self._asked(getattr(owner, name), answer) for name, answer in named.items()}
            self.kept.enter_context(_standing_in(owner, replaced))
        answer, own = self, torch.version.cuda

        class Version(ModuleType):
            cuda = property(lambda module: VERSION if answer.is_for_caller(2) else own)

        torch.version.__class__ = Version
        self.kept.enter_context(_standing_in(os, {"system": self._refusing(os.system, at=0)}))
        self.kept.enter_context(_standing_in(subprocess.Popen, {"__init__": self._refusing(subprocess.Popen.__init__, at=1)}))

    def _refusing(self, own, at):
        """The function, whose argument number `at` is a command; one of the file's that compiles with nvcc is refused."""

        @functools.wraps(own)
        def run(*args, **kwargs):
            command = args[at] if len(args) > at else kwargs.get("args", kwargs.get("command"))
            if COMPILES.match(" ".join(map(str, command)) if isinstance(command, (list, tuple)) else str(command)):
                frame = sys._getframe(1)
                while frame and frame.f_code.co_filename != self.file:
                    frame = frame.f_back
                if frame:
                    raise EmulatorError(f"{self.file}:{frame.f_lineno}: {BY_HAND}")
            return own(*args, **kwargs)

        return run

    def end(self):
        torch.version.__class__ = ModuleType
        self.kept.close()

    def is_for_caller(self, depth):
        return sys._getframe(depth).f_code.co_filename == self.file

    def _asked(self, own, emulated):
        @functools.wraps(own)
        def asked(*args, **kwargs):
            return (emulated if self.is_for_caller(2) else own)(*args, **kwargs)

        return asked
