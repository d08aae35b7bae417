"""What "cuda" means to a file that names that device: memory of the emulated GPU, which is the CPU's, and its one stream."""

import contextlib
import functools
import time
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

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
    """While active, tensors that are asked for on "cuda" are made on the CPU, and say that they are on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function == torch.Tensor.is_cuda.__get__:  # a new object each time
            return True
        if function == torch.Tensor.device.__get__:
            return Stream.device
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        args, kwargs = _pytree.tree_map(_on_cpu, (args, kwargs or {}))
        return function(*args, **kwargs)


def _on_cpu(value):
    named = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return torch.device("cpu") if named and torch.device(value).type == "cuda" else value


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
    torch.nn.Module: {"cuda": lambda module, device=None: module},
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
        with contextlib.ExitStack() as stack:
            for owner, replacements in EMULATED.items():
                stack.enter_context(_standing_in(owner, replacements))
            stack.enter_context(EmulatedDevice())
            return function(*args, **kwargs)

    return called
