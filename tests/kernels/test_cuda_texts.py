"""Every CUDA text, as the model's own constants make it, for every compute capability that docs/commands.md claims: it compiles
without a warning and spills no register."""

import re

import nvcc
import project_variants
import pytest
import torch

from playground import catalog
from playground.machine import ptxas

NVCC = ptxas.find_nvcc()

NEEDS_NVCC = pytest.mark.skipif(NVCC is None, reason="needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")
CLAIMS = re.findall(r"^\| (\w[\w, ]*) \| (\d[\d., ]*) \|$", (catalog.ROOT / "docs/commands.md").read_text(), re.MULTILINE)
# PTX: what is made from it. GPUs of one generation share it, which takes half of the time.
TARGETS = {"sm_75": ["sm_75"], "sm_80": ["sm_80", "sm_86", "sm_89"], "sm_90a": ["sm_90a"], "sm_100": ["sm_100", "sm_120"]}

# What nvcc 13.0 spills for Blackwell, in bytes. The first calls a 64-bit division, whose caller saves registers there.
SPILLED = {
    ("conv_pool_sigmoid_sum/v1_fused_tail", "sm_100", "fused_tail"): 8,
    ("conv_pool_sigmoid_sum/v2_single_kernel", "sm_120", "sum_sigmoids"): 48,  # bounded: faster on an H200 than without
    ("conv_pool_sigmoid_sum/v3_box_sums", "sm_100", "sum_sigmoids"): 4,
    ("conv_pool_sigmoid_sum/training_tensor_core", "sm_120", "conv_pool_sum<true, true, true>"): 4,  # strict
}


def claimed(variant):
    """The targets of ptxas that docs/commands.md claims: sm_75, ..."""
    kind = variant.name.partition("_")[0] if variant.name.startswith("v") else variant.name
    claims = [claim for kinds, claim in CLAIMS if kind in kinds.split(", ")]
    assert claims, f"say in docs/commands.md where {variant.name} runs"
    return ["sm_" + each.replace(".", "").replace("90", "90a") for each in claims[0].split(", ")]


def cases():
    """Each text for all of its targets in the full tier, of which .ci/run runs these; by default those of Hopper alone."""
    for param in project_variants.variants("cuda"):
        targets = claimed(param.values[1])
        marks = [] if targets == ["sm_90a"] else [pytest.mark.full]
        yield pytest.param(*param.values, targets, torch.float32, id=param.id, marks=marks)
        if "ELEMENTS" in project_variants.text_of(param.values[1]):
            for dtype in torch.float16, torch.bfloat16:
                yield pytest.param(*param.values, targets, dtype, id=f"{param.id}-{str(dtype)[6:]}", marks=marks)


@NEEDS_NVCC
@pytest.mark.parametrize("model, variant, targets, dtype", [*cases()])
def test_text(model, variant, targets, dtype, tmp_path):
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"].get(model.name))
    recipe = nvcc.recipe(variant.path, problem, dtype)
    assert recipe.text, f"{variant.name} has no CUDA text"
    assert recipe.architectures in ((), tuple(claimed(variant))), "its own flags name other targets than docs/commands.md"

    name = f"{model.name}/{variant.name}"
    wanted = {ptx: [each for each in made if each in targets] for ptx, made in TARGETS.items()}
    found, complaints = ptxas.compile_text(NVCC, recipe, {ptx: made for ptx, made in wanted.items() if made}, tmp_path)
    assert all(found.values()), f"no kernel in the text of {name}"
    for target, kernels in found.items():
        for kernel in kernels:
            if kernel.spill_stores != SPILLED.get((name, target, demangled(kernel.name)), 0):
                complaints.append(f"{target}: {kernel.name} spills {kernel.spill_stores} bytes")
    assert not complaints, "\n".join(complaints)


def demangled(name):
    """The toolkit's demangler, where there is one, says (int)1024 and (bool)1."""
    return name.replace("(int)", "").replace("(bool)1", "true").replace("(bool)0", "false")


@NEEDS_NVCC
def test_spills_and_warnings_are_seen(tmp_path):
    """The parser against a kernel that must spill, with an unused variable."""
    values = 64
    text = f"""
    template <int N> __global__ void __launch_bounds__(1024) hungry(float* p) {{
        int unused;
        float v[N];
        #pragma unroll
        for (int i = 0; i < N; ++i) v[i] = p[i * 1024 + threadIdx.x];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < N; ++i) p[i * 1024 + threadIdx.x] = v[i] * v[(i * 7 + 1) % N];
    }}
    __global__ void modest(float* p) {{ __shared__ float s[32]; s[threadIdx.x] = p[threadIdx.x]; p[0] = s[31 - threadIdx.x]; }}
    void launch(float* p) {{ hungry<{values * 2}><<<1, 1024>>>(p); modest<<<1, 32>>>(p); }}
    """
    kernels, warnings = ptxas.compile_text(NVCC, ptxas.DeviceCode(text), {"sm_80": ["sm_80", "sm_86"]}, tmp_path)
    assert any("unused" in warning for warning in warnings)
    for architecture in "sm_80", "sm_86":
        by_name = {demangled(kernel.name): kernel for kernel in kernels[architecture]}
        assert by_name["hungry<128>"].spill_stores
        assert not by_name["modest"].spill_stores and by_name["modest"].shared == 128


@NEEDS_NVCC
def test_products_that_wait_for_one_another_are_seen(tmp_path):
    """A product reads registers until it is waited for; where they change before, ptxas waits, and says so by the by."""
    text = r"""
    #include <cstdint>
    __device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
    __global__ void __launch_bounds__(128) kernel(float* out, const uint32_t* in, uint64_t b) {
        float d[4] = {};
        uint32_t a[4] = {in[threadIdx.x], in[128 + threadIdx.x], in[256 + threadIdx.x], in[384 + threadIdx.x]};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll 1
        for (int k = 0; k < 8; ++k) {
            multiply(d, a, b);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            WAIT
            for (int i = 0; i < 4; ++i) a[i] = in[k * 512 + i * 128 + threadIdx.x];
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        for (int i = 0; i < 4; ++i) out[i * 128 + threadIdx.x] = d[i];
    }
    """
    wait = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'
    for waits, expected in ("", True), (wait, False):
        code = ptxas.DeviceCode(text.replace("WAIT", waits))
        _, warnings = ptxas.compile_text(NVCC, code, {"sm_90a": ["sm_90a"]}, tmp_path)
        assert any("serialized" in warning for warning in warnings) == expected, warnings
