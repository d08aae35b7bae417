"""Small kernels, each with one planted mistake, and for each its right twin.

A pair is one text with a gap: `...` alone on a line, or several, which `wrong` and `right` fill. The line or lines that the
finding must name end in `// here`. Every text defines `run(out, in, n)`, which launches.
"""

from dataclasses import dataclass
from pathlib import Path

import hopper

ALL = ("forward", "reversed", "random")
LINES = Path(__file__).read_text().splitlines()


@dataclass
class Pair:
    name: str
    kind: str  # of the finding; several between bars where it depends on the schedule
    text: str
    wrong: str
    right: str
    schedules: tuple = ALL  # in which the mistake shows


PAIRS = [
    Pair(
        "missing_barrier",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[64];
    row[threadIdx.x] = threadIdx.x;  // here
    GAP
    out[threadIdx.x] = row[63 - threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "write_after_read",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[64];
    float sum = 0;
    for (int i = 0; i < 2; ++i) {
        row[threadIdx.x] = i;  // here
        __syncthreads();
        sum += row[63 - threadIdx.x];  // here
        GAP
    }
    out[threadIdx.x] = sum;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "race_within_a_warp",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[32];
    row[threadIdx.x] = threadIdx.x;  // here
    GAP
    out[threadIdx.x] = row[31 - threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="",
        right="__syncwarp();",
    ),
    Pair(
        "shuffle_orders_no_memory",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[32];
    row[threadIdx.x] = threadIdx.x;  // here
    float v = __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
    GAP
    out[threadIdx.x] = v + row[31 - threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="",
        right="__syncwarp();",
    ),
    Pair(
        "syncwarp_for_a_block",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[64];
    row[threadIdx.x] = threadIdx.x;  // here
    GAP
    out[threadIdx.x] = row[63 - threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="__syncwarp();",
        right="__syncthreads();",
    ),
    Pair(
        "all_write_one_word",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ int winner;
    GAP winner = threadIdx.x;  // here
    __syncthreads();
    out[threadIdx.x] = winner;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="if (threadIdx.x == 0)",
    ),
    Pair(
        "double_buffer",
        "shared memory race",
        r"""
__global__ void kernel(float* out, const float* in) {
    __shared__ float buffer[2][64];
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
        GAP
        tile[threadIdx.x] = in[threadIdx.x] + i;  // here
        __syncthreads();
        sum += tile[63 - threadIdx.x];  // here
    }
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="float* tile = buffer[0];",
        right="float* tile = buffer[i % 2];",
    ),
    Pair(
        "neighbouring_bytes",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ unsigned char flags[64];
    flags[GAP] = threadIdx.x;  // here
    __syncthreads();
    out[threadIdx.x] = flags[threadIdx.x / 2];
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="threadIdx.x / 2",
        right="threadIdx.x",
    ),
    Pair(
        "plain_beside_atomic",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    GAP  // here
    __syncthreads();
    out[threadIdx.x] = count;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="if (threadIdx.x < 32) atomicAdd(&count, 1); else count = count + 1;",
        right="atomicAdd(&count, 1);",
    ),
    Pair(
        "counter_not_reset_in_time",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;  // here
    GAP
    atomicAdd(&count, 1);  // here
    __syncthreads();
    out[threadIdx.x] = count;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "uninitialised_shared",
        "uninitialised shared read",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[64];
    GAP row[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="if (threadIdx.x != 63)",
        right="",
    ),
    Pair(
        "left_by_an_earlier_block",
        "uninitialised shared read",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[64];
    GAP row[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = row[threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<2, 64>>>(out); }
""",
        wrong="if (blockIdx.x == 0)",
        right="",
    ),
    Pair(
        "global_write_one_too_far",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (GAP) out[i] = i;  // here
}
void run(float* out, float*, int n) { kernel<<<(n + 64) / 64, 64>>>(out, n); }
""",
        wrong="i <= n",
        right="i < n",
    ),
    Pair(
        "global_read_before_the_start",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out, const float* in, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = in[i] - (GAP ? in[i - 1] : 0);  // here
}
void run(float* out, float* in, int n) { kernel<<<(n + 63) / 64, 64>>>(out, in, n); }
""",
        wrong="true",
        right="i > 0",
    ),
    Pair(
        "stencil_past_the_end",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out, const float* in, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = in[i] + (i + 1 GAP n ? in[i + 1] : 0);  // here
}
void run(float* out, float* in, int n) { kernel<<<(n + 63) / 64, 64>>>(out, in, n); }
""",
        wrong="<=",
        right="<",
    ),
    Pair(
        "shared_one_too_far",
        "shared memory out of bounds",
        r"""
__global__ void kernel(float* out) {
    __shared__ float a[GAP], b[64];
    b[threadIdx.x] = 2;
    a[threadIdx.x + 1] = 1;  // here
    __syncthreads();
    out[threadIdx.x] = a[threadIdx.x + 1] + b[threadIdx.x];
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="64",
        right="65",
    ),
    Pair(
        "dynamic_shared_too_small",
        "shared memory out of bounds",
        r"""
__global__ void kernel(float* out) {
    extern __shared__ float row[];
    row[threadIdx.x] = 1;  // here
    __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];
}
void run(float* out, float*, int) { kernel<<<1, 64, GAP>>>(out); }
""",
        wrong="64 * sizeof(float) - 1",
        right="64 * sizeof(float)",
    ),
    Pair(
        "misaligned_vector",
        "misaligned access",
        r"""
__global__ void kernel(float* out, const float* in, int n) {
    const int i = threadIdx.x;
    if (i >= n / 4 - 1) return;
    const float4 v = *reinterpret_cast<const float4*>(in + 4 * i + GAP);  // here
    out[i] = v.x + v.y + v.z + v.w;
}
void run(float* out, float* in, int n) { kernel<<<1, 64>>>(out, in, n); }
""",
        wrong="1",
        right="4",
    ),
    Pair(
        "misaligned_shared_vector",
        "misaligned access",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(16) float tile[8][GAP];
    for (int i = threadIdx.x; i < 8 * 33; i += 32) tile[i / 33][i % 33] = i;
    __syncthreads();
    if (threadIdx.x < 8) {
        const float2 v = *reinterpret_cast<float2*>(&tile[threadIdx.x][2]);  // here
        out[threadIdx.x] = v.x + v.y;
    }
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="33",
        right="34",
    ),
    Pair(
        "diverging_barriers",
        "barrier divergence",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x < GAP) {
        __syncthreads();  // here
        out[threadIdx.x] = 1;
    } else {
        out[threadIdx.x] = 2;
        __syncthreads();  // here
    }
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="32",
        right="64",
    ),
    Pair(
        "early_exit",
        "early exit before a barrier",
        r"""
__global__ void kernel(float* out, int n) {
    __shared__ float row[64];
    if (threadIdx.x >= GAP) return;
    row[threadIdx.x] = 1;
    __syncthreads();  // here
    out[threadIdx.x] = row[threadIdx.x];
}
void run(float* out, float*, int n) { kernel<<<1, 64>>>(out, n); }
""",
        wrong="63",
        right="64",
    ),
    Pair(
        "barrier_in_a_loop_of_unequal_length",
        "early exit before a barrier",
        r"""
__global__ void kernel(float* out) {
    for (int i = 0; i < GAP; ++i)
        __syncthreads();  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="int(threadIdx.x / 32 + 1)",
        right="2",
    ),
    Pair(
        "shuffle_in_a_branch",
        "warp lanes never arrive",
        r"""
__global__ void kernel(float* out) {
    float v = threadIdx.x;
    if (threadIdx.x < GAP)
        v += __shfl_down_sync(0xffffffffu, v, 1);  // here
    __syncthreads();  // here
    out[threadIdx.x] = v;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="16",
        right="32",
    ),
    Pair(
        "shuffle_after_an_exit",
        "shuffle from absent lane",
        r"""
__global__ void kernel(float* out) {
    float v = threadIdx.x;
    if (threadIdx.x >= GAP) return;
    v += __shfl_xor_sync(0xffffffffu, v, 1);  // here
    out[threadIdx.x] = v;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="31",
        right="32",
    ),
    Pair(
        "shuffle_from_outside_the_mask",
        "shuffle from absent lane",
        r"""
__global__ void kernel(float* out) {
    float v = threadIdx.x;
    if (threadIdx.x < 16)
        v = __shfl_sync(0x0000ffffu, v, GAP);  // here
    out[threadIdx.x] = v;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="16",
        right="15",
    ),
    Pair(
        "lane_not_in_its_mask",
        "lane not in mask",
        r"""
__global__ void kernel(float* out) {
    float v = threadIdx.x;
    if (threadIdx.x < 16)
        v += __shfl_xor_sync(GAP, v, 1);  // here
    out[threadIdx.x] = v;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="0xffff0000u",
        right="0x0000ffffu",
    ),
    Pair(
        "different_operations_of_one_warp",
        "warp divergence",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x < GAP)
        out[threadIdx.x] = __any_sync(0xffffffffu, 1);  // here
    else
        out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="16",
        right="32",
    ),
    Pair(
        "blocks_write_one_element",
        "race between blocks",
        r"""
__global__ void kernel(float* out) {
    out[GAP] = blockIdx.x;  // here
}
void run(float* out, float*, int) { kernel<<<2, 64>>>(out); }
""",
        wrong="threadIdx.x",
        right="blockIdx.x * 64 + threadIdx.x",
    ),
    Pair(
        "blocks_overlap_by_one",
        "race between blocks",
        r"""
__global__ void kernel(float* out) {
    for (int i = threadIdx.x; i < GAP; i += 32)
        out[blockIdx.x * 64 + i] = i;  // here
}
void run(float* out, float*, int) { kernel<<<2, 32>>>(out); }
""",
        wrong="65",
        right="64",
    ),
    Pair(
        "sum_without_atomics",
        "race between blocks",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x == 0)
        GAP;  // here
}
void run(float* out, float*, int) { cudaMemset(out, 0, 4); kernel<<<4, 32>>>(out); }
""",
        wrong="out[0] += 1",
        right="atomicAdd(out, 1)",
    ),
    Pair(
        "read_what_another_block_writes",
        "race between blocks",
        r"""
__global__ void kernel(float* out, const float* in, int n) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i + 1 < n) out[i] = in[i] + (threadIdx.x == 63 ? GAP[i + 1] : 0);  // here
}
void run(float* out, float* in, int n) { cudaMemset(out, 0, n * 4); kernel<<<(n + 63) / 64, 64>>>(out, in, n); }
""",
        wrong="out",
        right="in",
    ),
    Pair(
        "last_block_without_a_fence",
        "race between blocks",
        r"""
__device__ unsigned finished;
__global__ void kernel(float* out, float* partial) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = blockIdx.x;  // here
        GAP
        last = atomicAdd(&finished, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += 32) sum += partial[i];  // here
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) finished = 0;
}
void run(float* out, float* in, int) {
    const unsigned zero = 0;
    cudaMemcpyToSymbol(finished, &zero, 4);
    kernel<<<8, 32>>>(out, in);
}
""",
        wrong="",
        right="__threadfence();",
    ),
    Pair(
        "scratch_in_global_memory",
        "global memory race",
        r"""
__global__ void kernel(float* out, float* scratch) {
    scratch[threadIdx.x] = threadIdx.x;  // here
    GAP
    out[threadIdx.x] = scratch[63 - threadIdx.x];  // here
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "scratch_not_filled",
        "uninitialised global read",
        r"""
__global__ void fill(float* scratch) {
    if (threadIdx.x < GAP) scratch[threadIdx.x] = 1;
}
__global__ void kernel(float* out, const float* scratch) {
    out[threadIdx.x] = scratch[threadIdx.x];  // here
}
void run(float* out, float*, int) {
    float* scratch;
    cudaMalloc(&scratch, 64 * sizeof(float));
    fill<<<1, 64>>>(scratch);
    kernel<<<1, 64>>>(out, scratch);
    cudaFree(scratch);
}
""",
        wrong="63",
        right="64",
    ),
    Pair(
        "used_after_it_was_freed",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out, float* scratch) {
    scratch[threadIdx.x] = 1;  // here
    out[threadIdx.x] = scratch[threadIdx.x];
}
void run(float* out, float*, int) {
    float* scratch;
    cudaMalloc(&scratch, 64 * sizeof(float));
    GAP
    kernel<<<1, 64>>>(out, scratch);
}
""",
        wrong="cudaFree(scratch);",
        right="",
    ),
    Pair(
        "host_memory",
        "host memory",
        r"""
__global__ void kernel(float* out, const float* in) {
    out[threadIdx.x] = in[threadIdx.x];
}
void run(float* out, float* in, int) {
    float host[64] = {};
    kernel<<<1, 64>>>(out, GAP);  // here
}
""",
        wrong="host",
        right="in",
    ),
    Pair(
        "asynchronous_copy_without_a_wait",
        "asynchronous copy not waited for",
        r"""
__device__ void copy(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__global__ void kernel(float* out, const float* in) {
    __shared__ float row[64];
    copy(&row[threadIdx.x], in + threadIdx.x);
    GAP
    __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];  // here
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="",
        right="wait<0>();",
    ),
    Pair(
        "asynchronous_copy_waited_for_too_late",
        "asynchronous copy not waited for",
        r"""
__device__ void copy(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\ncp.async.commit_group;"
                 ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
template <int N>
__device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__global__ void kernel(float* out, const float* in) {
    __shared__ float row[2][64];
    float sum = 0;
    copy(&row[0][threadIdx.x], in + threadIdx.x);
    for (int i = 0; i < 4; ++i) {
        if (i < 3) copy(&row[(i + 1) % 2][threadIdx.x], in + threadIdx.x);
        wait<GAP>();
        if (i == 3) wait<0>();
        __syncthreads();
        sum += row[i % 2][63 - threadIdx.x];  // here
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="2",
        right="1",
    ),
    Pair(
        "wait_behind_the_barrier",
        "shared memory race|asynchronous copy not waited for",
        r"""
__device__ void copy(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\ncp.async.commit_group;"  // here
                 ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__global__ void kernel(float* out, const float* in) {
    __shared__ float row[32];
    copy(&row[threadIdx.x], in + threadIdx.x);  // here
    GAP
    __syncwarp();
    out[threadIdx.x] = row[31 - threadIdx.x];  // here
}
void run(float* out, float* in, int) { kernel<<<1, 32>>>(out, in); }
""",
        wrong="__syncwarp(); wait(); if (threadIdx.x > 64)",
        right="wait();",
    ),
    Pair(
        "overwritten_while_it_is_read",
        "shared memory race|asynchronous copy not waited for",
        r"""
__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}
__device__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ void expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ void wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
        ::"r"(address(barrier)), "r"(parity) : "memory");
}
__device__ void load(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"  // here
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}
__global__ void kernel(float* out, const float* in) {
    __shared__ alignas(128) float row[32];
    __shared__ uint64_t full, empty;
    if (threadIdx.x == 0) {
        init(&full, 1);
        init(&empty, 32);
        publish();
    }
    __syncthreads();
    if (threadIdx.x == 32) {
        for (int i = 0; i < 4; ++i) {
            if (i > 0) wait(&empty, (i - 1) & 1);
            expect(&full, 128);
            load(row, in + 32 * i, 128, &full);  // here
        }
    } else if (threadIdx.x < 32) {
        float sum = 0;
        for (int i = 0; i < 4; ++i) {
            wait(&full, i & 1);
            GAP  // here
        }
        out[threadIdx.x] = sum;
    }
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="arrive(&empty); sum += row[31 - threadIdx.x];",
        right="sum += row[31 - threadIdx.x]; arrive(&empty);",
    ),
    Pair(
        "named_barrier_of_the_wrong_size",
        "barrier never completes",
        r"""
__device__ void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }  // here
__global__ void kernel(float* out) {
    __shared__ float row[128];
    row[threadIdx.x] = threadIdx.x;
    const int group = threadIdx.x / 64;
    sync(1 + group, GAP);  // here
    out[threadIdx.x] = row[group * 64 + 63 - threadIdx.x % 64];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="96",
        right="64",
    ),
    Pair(
        "named_barriers_mixed_up",
        "shared memory race",
        r"""
__device__ void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__global__ void kernel(float* out) {
    __shared__ float row[128];
    row[threadIdx.x] = threadIdx.x;  // here
    const int group = threadIdx.x / 64;
    sync(1 + group, 64);
    out[threadIdx.x] = row[(GAP) * 64 + 63 - threadIdx.x % 64];  // here
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="1 - group",
        right="group",
    ),
    Pair(
        "too_much_shared_memory",
        "invalid launch",
        r"""
__global__ void kernel(float* out) {
    extern __shared__ float row[];
    row[threadIdx.x] = 1;
    out[threadIdx.x] = row[threadIdx.x];
}
void run(float* out, float*, int) {
    GAP
    kernel<<<1, 64, 64 << 10>>>(out);  // here
}
""",
        wrong="",
        right="cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10);",
    ),
    Pair(
        "too_many_threads",
        "invalid launch",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x < 64) out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, GAP>>>(out); }  // here
""",
        wrong="1025",
        right="1024",
    ),
    Pair(
        "grid_too_high",
        "invalid launch",
        r"""
__global__ void kernel(float* out) {
    out[blockIdx.y % 64 * 0 + (blockIdx.x | blockIdx.y)] = 1;
}
void run(float* out, float*, int) { kernel<<<dim3(1, GAP), 1>>>(out); }  // here
""",
        wrong="65536",
        right="64",
    ),
    Pair(
        "endless_loop",
        "endless wait",
        r"""
__global__ void kernel(float* out) {
    volatile float* v = out;
    v[threadIdx.x] = 0;
    while (v[threadIdx.x] == GAP) continue;  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="0",
        right="1",
    ),
    Pair(
        "flag_that_nobody_sets",
        "endless wait",
        r"""
__device__ int flag;
__global__ void kernel(float* out) {
    if (blockIdx.x == 0 && threadIdx.x == 0)
        while (atomicAdd(&flag, 0) != 1) continue;  // here
    if (blockIdx.x == GAP && threadIdx.x == 0) atomicExch(&flag, 1);
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}
void run(float* out, float*, int) {
    const int zero = 0;
    cudaMemcpyToSymbol(flag, &zero, 4);
    kernel<<<3, 32>>>(out);
}
""",
        wrong="3",
        right="2",
    ),
    Pair(
        "product_without_a_proxy_fence",
        "missing proxy fence",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    GAP
    __syncthreads();
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    product_wait();
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="",
        right="proxy_fence();",
    ),
    Pair(
        "accumulator_used_too_early",
        "matrix product not waited for",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);
    product_commit();
    GAP
    out[threadIdx.x] = d[0];  // here
    product_wait();
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="product_wait<1>();",
        right="product_wait();",
    ),
    Pair(
        "product_never_waited_for",
        "matrix product not waited for",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    GAP
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="",
        right="product_wait();",
    ),
    Pair(
        "product_without_its_fence",
        "missing wgmma.fence",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    GAP
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    product_wait();
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="",
        right="product_fence();",
    ),
    Pair(
        "operand_overwritten_before_the_wait",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    GAP
    b[threadIdx.x % 64] = 0;  // here
    product_wait();
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="if (threadIdx.x < 64)",
        right="product_wait(); __syncthreads(); if (threadIdx.x < 64)",
    ),
    Pair(
        "operand_overwritten_with_no_barrier",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    product_wait();
    GAP
    if (threadIdx.x < 64) b[threadIdx.x] = 0;  // here
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "operand_never_written",
        "uninitialised shared read",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < GAP; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    product_wait();
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="384",
        right="512",
    ),
    Pair(
        "operand_written_with_no_barrier",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;  // here
    proxy_fence();
    GAP
    float d[4];
    product_fence();
    product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), 0);  // here
    product_commit();
    product_wait();
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="__syncwarp();",
        right="__syncthreads();",
    ),
    Pair(
        "warp_that_does_not_come",
        "warpgroup divergence",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x < GAP) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="96",
        right="128",
    ),
    Pair(
        "register_count_that_is_no_multiple_of_8",
        "invalid register count",
        r"""
__global__ void kernel(float* out) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GAP));  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="100",
        right="104",
    ),
    Pair(
        "registers_that_nobody_gives_up",
        "registers that no warpgroup gives up",
        r"""
__global__ void __launch_bounds__(384, 1) kernel(float* out) {
    if (threadIdx.x >= 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GAP));  // here
    if (threadIdx.x < 128) out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 384>>>(out); }
""",
        wrong="208",
        right="200",
    ),
    Pair(
        "tensor_copy_not_waited_for",
        "asynchronous copy not waited for|shared memory race",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) init(&full, 1), publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, 512);
        load_2d(tile, &map, 0, 0, &full);  // here
    }
    GAP
    out[threadIdx.x] = tile[threadIdx.x];  // here
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="",
        right="wait(&full, 0);",
    ),
    Pair(
        "copy_that_nobody_waits_for",
        "asynchronous copy not waited for",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        init(&full, 1);
        publish();
        expect(&full, 512);
        load_2d(tile, &map, 0, 0, &full);  // here
        GAP
    }
    out[threadIdx.x] = 1;
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="",
        right="wait(&full, 0);",
    ),
    Pair(
        "announced_bytes_that_do_not_come",
        "barrier never completes",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) init(&full, 1), publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, GAP);
        load_2d(tile, &map, 0, 0, &full);
    }
    asm volatile("{\n.reg .pred p;\nL1:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra L1;\n}"  // here
                 ::"r"(address(&full)) : "memory");
    out[threadIdx.x] = tile[threadIdx.x];
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="528",
        right="512",
    ),
    Pair(
        "tensor_map_with_a_bad_address",
        "invalid tensor map",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) init(&full, 1), publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, 512);
        load_2d(tile, &map, 0, 0, &full);  // here
    }
    wait(&full, 0);
    out[threadIdx.x] = tile[threadIdx.x];
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in + GAP, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="1",
        right="4",
    ),
    Pair(
        "tensor_map_larger_than_the_tensor",
        "global memory out of bounds",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) init(&full, 1), publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, 512);
        load_2d(tile, &map, 0, 0, &full);  // here
    }
    wait(&full, 0);
    out[threadIdx.x] = tile[threadIdx.x];
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in + GAP, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="32",
        right="20",
    ),
    Pair(
        "tensor_copy_to_a_misaligned_place",
        "misaligned access",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[256];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) init(&full, 1), publish();
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, 512);
        load_2d(tile + GAP, &map, 0, 0, &full);  // here
    }
    wait(&full, 0);
    out[threadIdx.x] = tile[GAP + threadIdx.x];
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="16",
        right="32",
    ),
    Pair(
        "stage_loaded_before_it_is_free",
        "invalid barrier|shared memory race",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[2][32];
    __shared__ uint64_t full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) init(&full[s], 1), init(&empty[s], 1);
        publish();
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
        const int s = i & 1;
        if (threadIdx.x == 32) {
            GAP
            expect(&full[s], 128);  // here
            load_2d(tile[s], &map, 0, i, &full[s]);  // here
        } else if (threadIdx.x < 32) {
            wait(&full[s], i / 2);
            sum += tile[s][31 - threadIdx.x];  // here
            __syncwarp();
            if (threadIdx.x == 0) arrive(&empty[s]);
        }
    }
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 1, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 64>>>(map, out);
}
""",
        wrong="",
        right="wait(&empty[s], i / 2 + 1 & 1);",
    ),
    Pair(
        "store_without_a_proxy_fence",
        "missing proxy fence",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    tile[threadIdx.x] = threadIdx.x;
    GAP
    __syncthreads();
    if (threadIdx.x == 0) {
        store_2d(&map, 0, 0, tile);  // here
        store_commit();
        store_wait();
    }
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, out, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="",
        right="proxy_fence();",
    ),
    Pair(
        "store_never_waited_for",
        "asynchronous copy not waited for",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    tile[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        store_2d(&map, 0, 0, tile);  // here
        store_commit();
        GAP
    }
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, out, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="",
        right="store_wait();",
    ),
    Pair(
        "staged_values_overwritten",
        "shared memory race",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    tile[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        store_2d(&map, 0, 0, tile);  // here
        store_commit();
        GAP
    }
    __syncthreads();
    tile[127 - threadIdx.x] = 0;  // here
    if (threadIdx.x == 0) store_wait();
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, out, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="",
        right="store_wait();",
    ),
    Pair(
        "device_variable_out_of_bounds",
        "global memory out of bounds",
        r"""
__device__ int squares[32], cubes[32];
__global__ void kernel(float* out) {
    squares[threadIdx.x GAP] = threadIdx.x * threadIdx.x;  // here
    out[threadIdx.x] = cubes[threadIdx.x];
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="+ 1",
        right="",
    ),
    Pair(
        "device_variable_race",
        "race between blocks",
        r"""
__device__ int total = 5;
__global__ void kernel(float* out) {
    if (threadIdx.x == 0) GAP  // here
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<4, 32>>>(out); }
""",
        wrong="total += 1;",
        right="atomicAdd(&total, 1);",
    ),
    Pair(
        "one_lane_arrives_for_its_warp",
        "shared memory race",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[32];
    __shared__ uint64_t full, empty;
    if (threadIdx.x == 0) init(&full, 1), init(&empty, 1), publish();
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 3; ++i) {
        if (threadIdx.x == 32) {
            if (i > 0) wait(&empty, i + 1 & 1);
            expect(&full, 128);
            load_2d(tile, &map, 0, i, &full);  // here
        } else if (threadIdx.x < 32) {
            wait(&full, i & 1);
            sum += tile[31 - threadIdx.x];  // here
            GAP
            if (threadIdx.x == 0) arrive(&empty);
        }
    }
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 1, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 64>>>(map, out);
}
""",
        wrong="",
        right="__syncwarp();",
    ),
    Pair(
        "half_a_warp_synchronised",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[32];
    row[threadIdx.x] = threadIdx.x;  // here
    __syncwarp(GAP);
    out[threadIdx.x] = row[31 - threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u",
        right="~0u",
    ),
    Pair(
        "one_lane_counts_for_its_warp",
        "race between blocks",
        r"""
__device__ unsigned finished;
__global__ void kernel(float* out, float* partial) {
    partial[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;  // here
    GAP
    unsigned before = 0;
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(&finished, 1);
        __threadfence();
    }
    before = __shfl_sync(~0u, before, 0);
    if (before != gridDim.x - 1) return;
    __syncwarp();
    float sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += partial[block * 32 + threadIdx.x];  // here
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) {
    const unsigned zero = 0;
    cudaMemcpyToSymbol(finished, &zero, 4);
    kernel<<<4, 32>>>(out, in);
}
""",
        wrong="",
        right="__syncwarp();",
    ),
    Pair(
        "accumulators_changed_without_a_fence",
        "missing wgmma.fence",
        r"""
__global__ void kernel(float* out) {
    __shared__ alignas(128) float a[512];
    __shared__ alignas(128) float b[64];
    for (int i = threadIdx.x; i < 512; i += 128) a[i] = 1;
    if (threadIdx.x < 64) b[threadIdx.x] = threadIdx.x;
    proxy_fence();
    __syncthreads();
    float d[4];
    for (int i = 0; i < 2; ++i) {
        if (i == 0) product_fence();
        for (int k = 0; i && k < 4; ++k) d[k] *= 2;
        GAP
        product_8(d, descriptor(address(a), 1024, 128, 0), descriptor(address(b), 128, 128, 0), i);  // here
        product_commit();
        product_wait();
    }
    out[threadIdx.x] = d[0];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="",
        right="product_fence();",
    ),
    Pair(
        "launch_from_device_code",
        "not supported",
        r"""
__global__ void other(float* out) { out[threadIdx.x] = 1; }
__global__ void kernel(float* out) {  // here
    GAP
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="other<<<1, 32>>>(out);",
        right="",
    ),
    Pair(
        "assertion_that_does_not_hold",
        "assertion failed",
        r"""
__global__ void kernel(float* out) {
    assert(threadIdx.x < GAP);  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="31",
        right="32",
    ),
    Pair(
        "trap",
        "trap",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x == GAP) __trap();  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="31",
        right="32",
    ),
    Pair(
        "last_block_without_fences_before_the_barrier",
        "race between blocks",
        r"""
__device__ unsigned finished;
__global__ void kernel(float* out, float* partial) {
    __shared__ bool last;
    partial[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;  // here
    GAP
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&finished, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += partial[block * 32 + threadIdx.x];  // here
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) {
    const unsigned zero = 0;
    cudaMemcpyToSymbol(finished, &zero, 4);
    kernel<<<4, 32>>>(out, in);
}
""",
        wrong="if (threadIdx.x == 0) __threadfence();",
        right="__threadfence();",
    ),
    Pair(
        "written_behind_the_fence",
        "race between blocks",
        r"""
__device__ unsigned finished;
__global__ void kernel(float* out, float* partial) {
    __shared__ bool last;
    GAP  // here
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&finished, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += partial[block * 32 + threadIdx.x];  // here
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) {
    const unsigned zero = 0;
    cudaMemcpyToSymbol(finished, &zero, 4);
    kernel<<<4, 32>>>(out, in);
}
""",
        wrong="__threadfence(); partial[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;",
        right="partial[blockIdx.x * 32 + threadIdx.x] = threadIdx.x; __threadfence();",
    ),
    Pair(
        "flag_in_shared_memory",
        "shared memory race",
        r"""
__global__ void kernel(float* out, const float* in) {
    __shared__ float row[32];
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        row[threadIdx.x] = in[threadIdx.x];  // here
        __syncwarp();
        if (threadIdx.x == 0) {
            GAP
            flag = 1;
        }
    } else {
        if (threadIdx.x == 32) {
            while (flag == 0) continue;
            __threadfence_block();
        }
        __syncwarp();
        out[threadIdx.x - 32] = row[63 - threadIdx.x];  // here
    }
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="",
        right="__threadfence_block();",
    ),
    Pair(
        "flag_in_shared_memory_by_ptx",
        "shared memory race",
        r"""
__global__ void kernel(float* out, const float* in) {
    __shared__ float value;
    __shared__ int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        GAP  // here
        atomicExch(&flag, 1);
    } else if (threadIdx.x == 32) {
        while (atomicAdd(&flag, 0) == 0) continue;
        asm volatile("membar.cta;" ::: "memory");
        out[0] = value;  // here
    }
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong='asm volatile("fence.acq_rel.cta;" ::: "memory"); value = in[0];',
        right='value = in[0]; asm volatile("fence.acq_rel.cta;" ::: "memory");',
    ),
    Pair(
        "fence_of_the_block_between_blocks",
        "race between blocks",
        r"""
__device__ unsigned finished;
__global__ void kernel(float* out, float* partial) {
    if (threadIdx.x != 0) return;
    partial[blockIdx.x] = blockIdx.x;  // here
    GAP
    if (atomicAdd(&finished, 1) != gridDim.x - 1) return;
    __threadfence();
    float sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += partial[block];  // here
    out[0] = sum;
}
void run(float* out, float* in, int) {
    const unsigned zero = 0;
    cudaMemcpyToSymbol(finished, &zero, 4);
    kernel<<<4, 32>>>(out, in);
}
""",
        wrong="__threadfence_block();",
        right="__threadfence();",
    ),
    Pair(
        "last_block_that_reads_without_a_fence",
        "race between blocks",
        r"""
__device__ unsigned finished;
__global__ void kernel(float* out, float* partial) {
    __shared__ bool last;
    partial[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;  // here
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicInc(&finished, gridDim.x - 1) == gridDim.x - 1;
        GAP
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += partial[block * 32 + threadIdx.x];  // here
    out[threadIdx.x] = sum;
}
void run(float* out, float* in, int) {
    const unsigned zero = 0;
    cudaMemcpyToSymbol(finished, &zero, 4);
    kernel<<<4, 32>>>(out, in);
}
""",
        wrong="",
        right="__threadfence();",
    ),
    Pair(
        "lock_taken_without_a_fence",
        "race between blocks",
        r"""
__device__ int locked;
__global__ void kernel(float* out, float* total) {
    if (threadIdx.x != 0) return;
    while (atomicExch(&locked, 1) == 1) continue;
    GAP
    total[0] = total[0] + blockIdx.x;  // here
    __threadfence();
    atomicExch(&locked, 0);
    out[blockIdx.x] = 1;
}
void run(float* out, float* in, int) {
    const int no = 0;
    cudaMemcpyToSymbol(locked, &no, 4);
    kernel<<<6, 32>>>(out, in);
}
""",
        wrong="__threadfence_block();",
        right="__threadfence();",
    ),
    Pair(
        "flag_seen_without_a_fence",
        "shared memory race",
        r"""
__global__ void kernel(float* out, const float* in) {
    __shared__ float value;
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 40) {
        value = in[1];  // here
        __threadfence_block();
        flag = 1;
    } else if (threadIdx.x == 7) {
        while (!flag) continue;
        GAP
        out[0] = value;  // here
    }
}
void run(float* out, float* in, int) { kernel<<<1, 64>>>(out, in); }
""",
        wrong="",
        right="__threadfence_block();",
    ),
    Pair(
        "syncwarp_in_one_branch",
        "warp lanes never arrive",
        r"""
__global__ void kernel(float* out, const float* in) {
    __shared__ float row[32];
    if (threadIdx.x < 16) {
        row[threadIdx.x] = in[threadIdx.x];
        __syncwarp();  // here
    } else {
        row[threadIdx.x] = 2 * in[threadIdx.x];
        GAP
    }
    __syncthreads();  // here
    out[threadIdx.x] = row[31 - threadIdx.x];
}
void run(float* out, float* in, int) { kernel<<<1, 32>>>(out, in); }
""",
        wrong="",
        right="__syncwarp();",
    ),
    Pair(
        "different_shuffles_in_both_branches",
        "warp divergence",
        r"""
__global__ void kernel(float* out, const float* in) {
    float v = in[threadIdx.x];
    if (threadIdx.x < 16)
        v += __shfl_xor_sync(~0u, v, 16);  // here
    else
        v = 2 * GAP(~0u, v, 16);  // here
    out[threadIdx.x] = v;
}
void run(float* out, float* in, int) { kernel<<<1, 32>>>(out, in); }
""",
        wrong="__shfl_up_sync",
        right="__shfl_xor_sync",
    ),
    Pair(
        "different_votes_in_both_branches",
        "warp divergence",
        r"""
__global__ void kernel(float* out, const float* in) {
    int v;
    if (threadIdx.x < 16)
        v = __any_sync(~0u, in[threadIdx.x] > 0.5f);  // here
    else
        v = GAP(~0u, in[threadIdx.x] > 0.5f);  // here
    out[threadIdx.x] = v;
}
void run(float* out, float* in, int) { kernel<<<1, 32>>>(out, in); }
""",
        wrong="__all_sync",
        right="__any_sync",
    ),
    Pair(
        "different_reductions_in_both_branches",
        "warp divergence",
        r"""
__global__ void kernel(float* out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16)
        v = __reduce_add_sync(~0u, v);  // here
    else
        v = GAP(~0u, v);  // here
    out[threadIdx.x] = v;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="__reduce_max_sync",
        right="__reduce_add_sync",
    ),
    Pair(
        "try_wait_without_a_loop",
        "shared memory race|asynchronous copy not waited for",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) init(&full, 1), publish();
    __syncthreads();
    if (threadIdx.x == 64) {
        expect(&full, 512);
        load_2d(tile, &map, 0, 0, &full);  // here
    }
    int done = 0;
    GAP (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(address(&full)) : "memory");
    out[threadIdx.x] = tile[threadIdx.x];  // here
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="if",
        right="while",
    ),
    Pair(
        "counter_read_by_the_last_lane",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);  // here
    GAP
    if (threadIdx.x == blockDim.x - 1) out[0] = count;  // here
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "mbarrier_used_before_its_init_is_known",
        "shared memory race",
        r"""
__global__ void kernel(float* out) {
    __shared__ uint64_t done;
    if (threadIdx.x == 0) init(&done, 64);  // here
    GAP
    arrive(&done);  // here
    wait(&done, 0);  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "named_barrier_of_half_a_warp",
        "invalid barrier",
        r"""
__device__ void sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }  // here
__global__ void kernel(float* out) {
    __shared__ float row[128];
    row[threadIdx.x] = threadIdx.x;
    if (threadIdx.x >= GAP) return;
    sync(1, GAP);
    out[threadIdx.x] = row[GAP - 1 - threadIdx.x];
}
void run(float* out, float*, int) { kernel<<<1, 128>>>(out); }
""",
        wrong="48",
        right="64",
    ),
    Pair(
        "host_copies_too_much",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out) { out[threadIdx.x] += 1; }
void run(float* out, float* in, int n) {
    cudaMemcpyAsync(out, in, n * sizeof(GAP), cudaMemcpyDeviceToDevice, 0);  // here
    kernel<<<1, 64>>>(out);
}
""",
        wrong="double",
        right="float",
    ),
    Pair(
        "host_fills_too_much",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out, const float* scratch) { out[threadIdx.x] = scratch[threadIdx.x]; }
void run(float* out, float*, int) {
    float* scratch;
    cudaMalloc(&scratch, 64 * sizeof(float));
    cudaMemset(scratch, 0, 64 * sizeof(GAP));  // here
    kernel<<<1, 64>>>(out, scratch);
    cudaFree(scratch);
}
""",
        wrong="double",
        right="float",
    ),
    Pair(
        "rows_copied_on_top_of_each_other",
        "global memory race",
        r"""
__global__ void kernel(float* out, const float* in) {
    memcpy(out + GAP * threadIdx.x, in, 3 * sizeof(float));  // here
}
void run(float* out, float* in, int) { kernel<<<1, 8>>>(out, in); }
""",
        wrong="2",
        right="3",
    ),
    Pair(
        "filled_in_part",
        "uninitialised shared read",
        r"""
__global__ void kernel(float* out) {
    __shared__ float row[64];
    if (threadIdx.x == 0) std::memset(row, 0, GAP * sizeof(float));
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x];  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="60",
        right="64",
    ),
    Pair(
        "moved_past_the_end",
        "global memory out of bounds",
        r"""
__global__ void kernel(float* out, int n) {
    out[0] = threadIdx.x;
    memmove(out + 1, out, (n - GAP) * sizeof(float));  // here
}
void run(float* out, float* in, int n) { kernel<<<1, 1>>>(in, n); }
""",
        wrong="0",
        right="1",
    ),
    Pair(
        "struct_copied_past_the_end",
        "global memory out of bounds",
        r"""
struct Row { float values[7]; };
__global__ void kernel(Row* out, const Row* in, int rows) {
    if (threadIdx.x GAP rows) out[threadIdx.x] = in[threadIdx.x];  // here
}
void run(float* out, float* in, int n) { kernel<<<1, 64>>>((Row*)out, (const Row*)in, n / 7); }
""",
        wrong="<=",
        right="<",
    ),
    Pair(
        "local_memory",
        "local memory exceeded",
        r"""
__global__ void kernel(float* out, int n) {  // here
    float table[GAP];
    for (int i = 0; i < n; ++i) table[i * (GAP / 150)] = i;
    out[threadIdx.x] = table[threadIdx.x * (GAP / 150)];
}
void run(float* out, float*, int n) { kernel<<<1, 32>>>(out, n); }
""",
        wrong="400000",
        right="120000",
    ),
    Pair(
        "division_by_zero",
        "integer division",
        r"""
__global__ void kernel(float* out, int n) {
    out[threadIdx.x] = n / (int)(threadIdx.x + GAP);  // here
}
void run(float* out, float*, int n) { kernel<<<1, 32>>>(out, n); }
""",
        wrong="0",
        right="1",
    ),
    Pair(
        "null_function",
        "invalid call",
        r"""
__device__ void set(float* out) { *out = 1; }
__device__ void (*function)(float*) = GAP;
__global__ void kernel(float* out) {
    function(out + threadIdx.x);  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="nullptr",
        right="set",
    ),
    Pair(
        "index_asked_for_on_the_host",
        "device code on the host",
        r"""
__host__ __device__ int index() { return threadIdx.x; }  // here
__global__ void kernel(float* out) { out[index()] = 1; }
void run(float* out, float*, int) {
    const int offset = GAP;
    kernel<<<1, 32>>>(out + offset);
}
""",
        wrong="index()",
        right="0",
    ),
    Pair(
        "more_threads_than_the_launch_bounds",
        "invalid launch",
        r"""
template <int MOST>
__global__ void __launch_bounds__(MOST, 2) kernel(float* out) {
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<64><<<1, GAP>>>(out); }  // here
""",
        wrong="96",
        right="64",
    ),
    Pair(
        "copy_completes_at_a_fresh_mbarrier",
        "missing proxy fence",
        r"""
__global__ void kernel(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        init(&full, 1);
        GAP
    }
    __syncthreads();
    if (threadIdx.x == 64) {
        expect(&full, 512);
        load_2d(tile, &map, 0, 0, &full);  // here
    }
    wait(&full, 0);
    out[threadIdx.x] = tile[threadIdx.x];
}
void run(float* out, float* in, int) {
    CUtensorMap map{};
    encode_2d(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in, 4, 32, 4, 32, CU_TENSOR_MAP_SWIZZLE_NONE);
    kernel<<<1, 128>>>(map, out);
}
""",
        wrong="",
        right="publish();",
    ),
    Pair(
        "one_barrier_through_two_calls",
        "barrier divergence",
        r"""
__device__ void synchronise() { __syncthreads(); }
__global__ void kernel(float* out) {
    if (threadIdx.x < GAP)
        synchronise();  // here
    else {
        out[threadIdx.x] = 1;
        synchronise();  // here
    }
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="32",
        right="64",
    ),
    Pair(
        "two_barriers_in_one_line",
        "barrier divergence",
        r"""
#define EITHER(condition) if (condition) __syncthreads(); else __syncthreads();
__global__ void kernel(float* out) {
    out[threadIdx.x] = 1;
    EITHER(threadIdx.x < GAP)  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="32",
        right="64",
    ),
    Pair(
        "symbol_too_small",
        "global memory out of bounds",
        r"""
__constant__ float factors[32];
__global__ void kernel(float* out) { out[threadIdx.x] = factors[threadIdx.x]; }
void run(float* out, float*, int) {
    const float values[64] = {1};
    cudaMemcpyToSymbol(factors, values, GAP * sizeof(float));  // here
    kernel<<<1, 32>>>(out);
}
""",
        wrong="64",
        right="32",
    ),
    Pair(
        "constant_written",
        "write to constant memory",
        r"""
__constant__ float seen, counts[32];
__global__ void kernel(float* out) {
    auto* to = threadIdx.x < 32 ? &GAP[threadIdx.x] : out;
    *to = counts[threadIdx.x % 32] + 1;  // here
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="counts",
        right="out",
    ),
    Pair(
        "phase_that_never_ends",
        "endless wait",
        r"""
__device__ __forceinline__ bool has_ended(uint64_t* barrier, int parity) {
    int ended;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(ended) : "r"(address(barrier)), "r"(parity) : "memory");
    return ended;
}
__global__ void kernel(float* out) {
    __shared__ uint64_t done;
    if (threadIdx.x == 0) init(&done, GAP);
    __syncthreads();
    arrive(&done);
    while (!has_ended(&done, 0)) continue;  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="65",
        right="64",
    ),
    Pair(
        "counted_wait",
        "endless wait",
        r"""
__global__ void kernel(float* out) {
    volatile float* flag = out + 100;
    *flag = 0;
    for (int tries = 0; *flag == 0 && tries < 5000; GAP) continue;  // here
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 1>>>(out); }
""",
        wrong="tries += 0",
        right="tries += 1",
    ),
    Pair(
        "wait_for_one_who_works_first",
        "endless wait",
        r"""
__global__ void kernel(float* out) {
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    int sum = 0;
    if (threadIdx.x < 32) {
        for (int i = 0; i < 500; ++i) sum = __shfl_xor_sync(~0u, sum + 1, 1);
        GAP
    } else {
        while (flag == 0) continue;  // here
    }
    out[threadIdx.x] = sum;
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong='asm volatile("bar.sync 1, 64;");',
        right="if (threadIdx.x == 0) flag = 1;",
    ),
    Pair(
        "lane_that_counts_how_often_another_has_looked",
        "endless wait",
        r"""
__global__ void kernel(float* out) {
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    int tries = 0;
    while (__shfl_sync(~0u, tries, 0) < 5000) {
        int seen = 0;
        if (threadIdx.x == 31) seen = flag, seen = flag;  // here
        if (__any_sync(~0u, seen)) break;
        if (threadIdx.x == 0) GAP;
    }
    out[threadIdx.x] = 1;
}
void run(float* out, float*, int) { kernel<<<1, 32>>>(out); }
""",
        wrong="tries = 1",
        right="++tries",
    ),
    Pair(
        "warp_that_waits_for_a_later_block",
        "endless wait",
        r"""
__device__ volatile int flag;
__global__ void kernel(float* out) {
    if (blockIdx.x == 0)
        while (!__any_sync(~0u, threadIdx.x == 5 ? flag : 0)) continue;  // here
    GAP
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}
void run(float* out, float*, int) {
    const int zero = 0;
    cudaMemcpyToSymbol(flag, &zero, sizeof zero);
    kernel<<<2, 32>>>(out);
}
""",
        wrong="",
        right="if (threadIdx.x == 5) flag = 1;",
    ),
    Pair(
        "lock_that_nobody_gives_back",
        "endless wait",
        r"""
__device__ int lock;
__global__ void kernel(float* out) {
    while (atomicCAS(&lock, 0, 1)) continue;  // here
    __threadfence();
    out[0] = threadIdx.x;
    __threadfence();
    GAP
}
void run(float* out, float*, int) {
    const int zero = 0;
    cudaMemcpyToSymbol(lock, &zero, 4);
    kernel<<<2, 16>>>(out);
}
""",
        wrong="",
        right="atomicExch(&lock, 0);",
    ),
    Pair(
        "half_the_grid_ends_before_its_barrier",
        "early exit before a barrier",
        r"""
__global__ void kernel(float* out) {
    if (threadIdx.x >= GAP) return;
    cooperative_groups::this_grid().sync();  // here
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}
void run(float* out, float*, int) {
    void* arguments[] = {&out};
    cudaLaunchCooperativeKernel((void*)kernel, dim3(2), dim3(32), arguments, 0, 0);
}
""",
        wrong="16",
        right="32",
    ),
    Pair(
        "struct_passed_by_value",
        "shared memory race",
        r"""
struct Best { double value; int index; };  // with padding, which nothing writes
__device__ __noinline__ Best better(Best a, Best b) { return a.value > b.value ? a : b; }
__global__ void kernel(float* out) {
    __shared__ Best best[64];
    best[threadIdx.x].value = threadIdx.x;  // here
    best[threadIdx.x].index = threadIdx.x;
    GAP
    out[threadIdx.x] = better(best[threadIdx.x], best[63 - threadIdx.x]).index;  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
    ),
    Pair(
        "virtual_call",
        "shared memory race",
        r"""
struct Shape { virtual __device__ float area() const { return 0; } };
struct Square : Shape {
    float side;
    __device__ Square(float side) : side(side) {}
    __device__ float area() const override { return side * side; }
};
__global__ void kernel(float* out) {
    __shared__ alignas(8) char memory[sizeof(Square)];
    if (threadIdx.x == 0) new (memory) Square(3);  // here
    GAP
    out[threadIdx.x] = ((const Shape*)memory)->area();  // here
}
void run(float* out, float*, int) { kernel<<<1, 64>>>(out); }
""",
        wrong="",
        right="__syncthreads();",
        schedules=("forward",),  # in others a thread finds no object
    ),
]


def first_line(pair):
    """Of the pair, in this file."""
    return 1 + LINES.index(f'        "{pair.name}",')


def text_of(pair, which):
    """One half of a pair in a namespace of its own, with a function for ctypes."""
    body = pair.text.replace("GAP", getattr(pair, which))
    name = f"{pair.name}_{which}"
    return (
        f"#line {first_line(pair) + 2}\nnamespace of_{name} {{{body}}}\n"
        f'extern "C" void {name}(float* out, float* in, int n) {{ of_{name}::run(out, in, n); }}\n'
    )


def whole_text():
    wrappers = hopper.WRAPPERS + hopper.product("product_8", 8, "tf32", 8, "ss")
    return f"#line 100000\n#include <assert.h>\n#include <cooperative_groups.h>\n#include <cstring>\n{wrappers}\n" + "".join(
        text_of(pair, which) for pair in PAIRS for which in ("wrong", "right")
    )


def lines_marked(pair):
    """The lines of this file that a finding about the pair may name."""
    start = first_line(pair)
    end = next(i for i in range(start, len(LINES)) if LINES[i].strip().startswith("wrong="))
    return {i + 1 for i in range(start, end) if LINES[i].rstrip().endswith("// here")}
