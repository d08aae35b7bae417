"""load_inline as PyTorch's users call it: again under a name, from files, with headers for kernels."""

import re

from tests.emulator import apart

OPERATOR = r"""
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("answer() -> int", [] { return int64_t(ANSWER); }); }
"""
BUILDS = r"""
import torch
import cuda_emulator as emulator
emulator.install(mode="check")
from torch.utils.cpp_extension import load_inline

CUDA = '''
__global__ void run(float* x) { x[threadIdx.x] = BODY; }
at::Tensor go(at::Tensor x) { run<<<1, 4>>>(x.data_ptr<float>()); return x; }
'''

def built(body, name="again", **flags):
    return load_inline(name, "at::Tensor go(at::Tensor x);", CUDA.replace("BODY", body), functions=["go"], **flags)

def result(module):
    return module.go(torch.zeros(4))[3].item()
"""


def test_another_text_under_a_name_is_another_module():
    apart.run(
        BUILDS
        + """
three, five = built("3"), built("5")
seven = built("SEVEN", extra_cuda_cflags=["-DSEVEN=7"])
eight = built("SEVEN", extra_cuda_cflags=["-DSEVEN=8"])
assert [result(m) for m in (three, five, seven, eight, built("5"), three)] == [3, 5, 7, 8, 5, 3]
assert [m.__name__ for m in (three, five, seven, built("3"))] == ["again", "again_v1", "again_v2", "again"]
assert result(built("6", name="other")) == 6 and result(five) == 5
"""
    )


def test_another_text_under_a_name_registers_other_operators():
    apart.run(
        BUILDS
        + f"""
OPERATOR = {OPERATOR!r}
for answer in ("1", "2", "1"):
    load_inline("ops_again", "#include <torch/library.h>" + OPERATOR.replace("ANSWER", answer), is_python_module=False)
assert (torch.ops.ops_again.answer(), torch.ops.ops_again_v1.answer()) == (1, 2)
"""
    )


def test_a_librarys_code_of_the_cpp_library_is_its_own(tmp_path):
    """By nm, as of programs: a vector's code, instrumented for the kernel's text, is not for PyTorch to find."""
    listing = tmp_path / "listing"
    apart.run(
        BUILDS
        + f"""
import subprocess
CUDA = CUDA.replace("return x;", "std::vector<long> v(x.sizes().begin(), x.sizes().end()); v.push_back(1); return x.view(v);")
module = built("1", name="with_vector")
assert module.go(torch.zeros(4)).shape == (4, 1)
open({str(listing)!r}, "w").write(subprocess.run(["nm", "-D", "--defined-only", module.__file__], stdout=-1, text=True).stdout)
"""
    )
    listed = listing.read_text()
    assert "PyInit_with_vector" in listed
    assert not re.findall(r"^\w+ [TtWuVv] _Z(?:Z|GV|TV)*(?:NK?)?S[tabdios].*", listed, re.M)
