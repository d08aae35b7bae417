"""Index arithmetic beyond 2^31 elements, of tensors that take no memory: 32 bits wrap, and show; 64 do not."""

import ctypes

import pytest
import torch

from cuda_emulator import Finding, runtime
from cuda_emulator.kernels import KernelLibrary
from playground import catalog
from playground.emulator import extents

TEXT = """
template <class Index>
__global__ void fill(float* out, long long n) {
    const Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 1;  // below zero after a wrap
}
extern "C" void fill_int(float* out, long long n) { fill<int><<<(n + 255) / 256, 256>>>(out, n); }
extern "C" void fill_long(float* out, long long n) { fill<long long><<<(n + 255) / 256, 256>>>(out, n); }
"""
ELEMENTS = (1 << 31) + 1000


@pytest.fixture
def library():
    library = KernelLibrary(TEXT, "check", "extents")
    runtime.library().emulator_extents(1)
    yield library
    runtime.library().emulator_extents(0)
    library.close()


def test_32_bits_wrap(library):
    with pytest.raises(Finding, match="global memory out of bounds"):
        library.call("fill_int", torch.empty(ELEMENTS), ctypes.c_longlong(ELEMENTS), time_limit=60)


def test_64_bits_do_not(library):
    out = torch.empty(ELEMENTS)
    library.call("fill_long", out, ctypes.c_longlong(ELEMENTS), time_limit=60)
    assert out[0] == out[-1] == 1  # the first and the last block have run
    assert out[1 << 20] == 0  # most have not


@pytest.mark.full
@pytest.mark.parametrize("broken", [False, True])
def test_the_command_on_a_kernel_of_the_project(broken, tmp_path, capsys):
    """At a batch of which the input has more than 2^31 elements: as it is, and with its offsets computed in 32 bits."""
    variant = catalog.find_variant(catalog.find_model("conv_pool_sigmoid_sum"), "v3_box_sums").path
    if broken:
        text, variant = variant.read_text(), tmp_path / "narrow.py"
        wide = "image.x + ((int64_t)sample * IN_CHANNELS + slice.c) * plane"
        assert wide in text
        variant.write_text(text.replace(wide, "image.x + (int)((sample * IN_CHANNELS + slice.c) * plane)"))
    status = extents.main(["--model", "conv_pool_sigmoid_sum", "--variant", str(variant), "--set", "batch_size=2048"])
    out = capsys.readouterr().out
    assert status == int(broken)
    assert ("narrow.py:" in out and "global memory out of bounds" in out) if broken else "2 launches: nothing found" in out


GATHERS = '''
import torch
from torch.utils.cpp_extension import load_inline

CUDA = """
__global__ void pick(const float* table, const long long* rows, float* out, unsigned width) {
    const unsigned from = (unsigned)rows[blockIdx.x] * width + threadIdx.x;  // wraps, and lands within the table
    out[blockIdx.x * blockDim.x + threadIdx.x] = table[from];
}
at::Tensor pick(at::Tensor table, at::Tensor rows) {
    at::Tensor out = at::empty({rows.size(0), 64}, table.options());
    const auto* index = (const long long*)rows.data_ptr<int64_t>();
    pick<<<rows.size(0), 64>>>(table.data_ptr<float>(), index, out.data_ptr<float>(), 1 << 17);
    return out;
}
"""
module = load_inline("gathers", "at::Tensor pick(at::Tensor table, at::Tensor rows);", CUDA, functions=["pick"])

class ModelNew(torch.nn.Module):
    def forward(self, table, rows):
        return module.pick(table, rows)
'''
TABLE = """
import torch

class Model(torch.nn.Module):
    def forward(self, table, rows):
        return table[rows, :64]

rows = 40

def get_inputs():
    return [torch.rand(rows, 1 << 17), torch.arange(rows)]

def get_init_inputs():
    return []
"""


@pytest.mark.full
def test_what_lands_within_a_tensor_is_not_known(tmp_path, capsys):
    (tmp_path / "table.py").write_text(TABLE)
    (tmp_path / "gathers.py").write_text(GATHERS)
    command = ["--model", str(tmp_path / "table.py"), "--variant", str(tmp_path / "gathers.py"), "--set", "rows=40000"]
    assert extents.main(command) == 0
    out = capsys.readouterr().out
    assert "Not checked: the other blocks; an index in 32 bits" in out
