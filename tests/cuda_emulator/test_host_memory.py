"""A kernel that is given memory of the host is refused, wherever that comes from; the right twins run."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

import cuda_emulator as emulator
from cuda_emulator import devices
from tests.kernels import apart

KERNEL = """
__global__ void twice(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * x[i];
}
"""
C_TEXT = (
    KERNEL
    + """
extern "C" void run(const float* in, float* out, int n) { twice<<<(n + 31) / 32, 32>>>(in, out, n); }
"""
)
TORCH_TEXT = (
    KERNEL
    + """
void run(at::Tensor x, at::Tensor y) { twice<<<1, 32>>>(x.data_ptr<float>(), y.data_ptr<float>(), (int)x.numel()); }
at::Tensor made(at::Tensor x, int64_t how) {
    at::Tensor y = how == 0   ? torch::empty({x.size(0)}, torch::kFloat32)
                   : how == 1 ? torch::empty({x.size(0)}, x.options())
                   : how == 2 ? torch::zeros({x.size(0)}, torch::device(torch::kCUDA))
                              : torch::empty_like(x);
    run(how == 4 ? x.cpu() : x.cuda(), y);
    return y;
}
"""
)


class Table(nn.Module):
    """Has a tensor that moves with it, or not."""

    def __init__(self, is_buffer):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        if is_buffer:
            self.register_buffer("table", torch.arange(8.0))
        else:
            self.table = torch.arange(8.0)


# What a file may do with its input, on a GPU: (whether a kernel gets host memory, what it is given).
IN_PYTHON = {
    "the input": (False, lambda x, model: x),
    "a parameter": (False, lambda x, model: model.weight),
    "a buffer": (False, lambda x, model: model.table if model.is_buffer else x),
    "no buffer": (True, lambda x, model: torch.arange(8.0)),
    "a weight on the CPU": (True, lambda x, model: model.weight.detach().cpu()),
    "to cpu": (True, lambda x, model: x.to("cpu")),
    "without a device": (True, lambda x, model: torch.zeros(8)),
    "computed from such": (True, lambda x, model: torch.zeros(8) * 2 + 1),
    "a view of such": (True, lambda x, model: torch.zeros(16)[8:].view(8)),
    "on the input's device": (False, lambda x, model: torch.zeros(8, device=x.device)),
    "on cuda": (False, lambda x, model: torch.tensor([1.0] * 8, device="cuda")),
    "moved to cuda": (False, lambda x, model: torch.zeros(8).cuda()),
    "moved to the input": (False, lambda x, model: torch.zeros(8).to(x)),
    "there and back": (False, lambda x, model: x.cpu().to(x.device, torch.float32)),
    "new_zeros": (False, lambda x, model: x.new_zeros(8)),
    "mixed with a number": (False, lambda x, model: x * torch.tensor(2.0)),
    "a factory within a device": (False, lambda x, model: within_cuda()),
    "like the input": (False, lambda x, model: torch.randn_like(x)),
    "NumPy's, moved": (False, lambda x, model: torch.from_numpy(np.ones(8, np.float32)).to(x.device)),
}


def within_cuda():
    with torch.device("cuda"):
        return torch.zeros(8)


def check_python():
    with emulator.install(mode="check"):
        path = cpp_extension.load_inline("host_c", "", C_TEXT, is_python_module=False, no_implicit_headers=True)
        run = ctypes.CDLL(path).run

        def call(given, y):
            run(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(y.data_ptr()), 8)

        def forward(name, model):
            given = IN_PYTHON[name][1](x, model)
            assert given.is_cuda != IN_PYTHON[name][0]
            call(given, torch.empty_like(x))

        x = torch.rand(8)
        for is_buffer in (False, True):
            model = devices.watched(Table, lambda: False)(is_buffer)
            model.is_buffer = is_buffer
            devices.put_on_device(model)
            for name, (is_refused, _) in IN_PYTHON.items():
                try:
                    devices.watched(forward, lambda: False)(name, model)
                    assert not is_refused, name
                except emulator.Finding as finding:
                    assert is_refused, (name, str(finding))
                    assert "host memory: in is a CPU tensor, and a kernel gets its pointer; kernel twice" in str(finding)
        table = devices.watched(lambda: Table(False).table, lambda: False)()
        with pytest.raises(emulator.Finding, match="in is a CPU tensor"):
            devices.watched(call, lambda: False)(table, x)
        with pytest.raises(emulator.Finding, match="in is memory of the host"):
            run(np.ones(8, np.float32).ctypes.data_as(ctypes.c_void_p), ctypes.c_void_p(x.data_ptr()), 8)
        call(table, x)  # nobody watches: the CPU is the device


def check_cpp():
    with emulator.install(mode="check") as installed:
        declared = "void run(at::Tensor x, at::Tensor y); at::Tensor made(at::Tensor x, int64_t how);"
        module = cpp_extension.load_inline("host_torch", declared, TORCH_TEXT, functions=["run", "made"])

        def moves_tensors():
            return False  # it calls cuda() for the input alone

        assert installed.builder.moves_tensors
        x = torch.rand(8)
        for how, name in enumerate(("y", None, None, None, "x")):
            made = devices.watched(module.made, moves_tensors)
            if name is None:
                assert torch.equal(made(x, how), 2 * x)
                continue
            with pytest.raises(emulator.Finding) as caught:
                made(x, how)
            line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.startswith("void run("))
            expected = f"{__file__}:{line}: host memory: {name} is a CPU tensor, and a kernel gets its pointer"
            assert str(caught.value).startswith(expected), caught.value
        assert torch.equal(module.made(x, 0), 2 * x)


def test_of_python():
    apart.run(check_python)


@pytest.mark.full
def test_of_cpp():
    apart.run(check_cpp)
