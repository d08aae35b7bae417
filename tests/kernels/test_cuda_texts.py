"""Every CUDA text, as the model's own constants make it: it compiles without a warning and spills no register."""

import nvcc
import project_variants
import pytest

from playground import catalog, tensors
from playground.machine import ptxas

NVCC = ptxas.find_nvcc()


@pytest.mark.skipif(NVCC is None, reason="needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")
@pytest.mark.parametrize("model, variant", project_variants.variants("cuda"))
def test_text(model, variant, tmp_path, capsys):
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"].get(model.name))
    new = tensors.make_model(problem, catalog.load_variant(variant.path).ModelNew, seed=0)
    recipe = nvcc.recipe(new, problem.get_inputs())
    assert recipe.text, f"{variant.name} has no CUDA text"

    whole_name, complaints = f"{model.name}/{variant.name}", []
    for architecture in recipe.architectures or ptxas.ARCHITECTURES:
        kernels, warnings = ptxas.compile_cubin(NVCC, recipe, architecture, tmp_path)
        assert kernels, f"no kernel in the text of {whole_name}"
        with capsys.disabled():
            print(f"\n{whole_name}, {architecture}")
            print(f"  {'kernel':40} {'registers':>9} {'stack':>6} {'spilled':>8} {'loaded':>7} {'static shared':>14}  (bytes)")
            for k in kernels:
                print(f"  {k.name:40} {k.registers:9} {k.stack:6} {k.spill_stores:8} {k.spill_loads:7} {k.shared:14}")
        complaints += [f"{architecture}: {warning}" for warning in warnings]
        spilling = [kernel for kernel in kernels if kernel.spills]
        complaints += [f"{architecture}: {kernel.name} spills {kernel.spill_stores} bytes" for kernel in spilling]
    assert not complaints, "\n".join(complaints)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")
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
    kernels, warnings = ptxas.compile_cubin(NVCC, ptxas.DeviceCode(text), "sm_80", tmp_path)
    by_name = {kernel.name: kernel for kernel in kernels}
    assert any("unused" in warning for warning in warnings)
    assert by_name["hungry<128>"].spills or by_name["hungry<(int)128>"].spills
    assert not by_name["modest"].spills and by_name["modest"].shared == 128
    refused = ptxas.DeviceCode("int undeclared() { return undeclared_thing; }")
    with pytest.raises(ptxas.Refused, match="undeclared_thing"):
        ptxas.compile_cubin(NVCC, refused, "sm_80", tmp_path)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")
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
    flags = ["-gencode=arch=compute_90a,code=sm_90a"]
    wait = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'
    for waits, expected in ("", True), (wait, False):
        _, warnings = ptxas.compile_cubin(NVCC, ptxas.DeviceCode(text.replace("WAIT", waits), flags), "sm_90a", tmp_path)
        assert any("serialized" in warning for warning in warnings) == expected, warnings
