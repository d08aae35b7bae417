// cuda::, cooperative groups' copies and tiles of several warps, and cuBLAS's products.
#include "expect.h"

#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cublas_v2.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;
using barrier = cuda::barrier<cuda::thread_scope_block>;

const int THREADS = 64, TILE = 64, TILES = 5;

// Each tile is copied to shared memory, and each thread adds what its neighbour's copy has brought.
__global__ void by_barrier(float* out, const float* in) {
    __shared__ alignas(16) float tile[TILE];
    __shared__ barrier full;
    const cg::thread_block block = cg::this_thread_block();
    if (block.thread_rank() == 0) init(&full, block.size());
    block.sync();
    float sum = 0;
    for (int t = 0; t < TILES; ++t) {
        cuda::memcpy_async(block, tile, in + t * TILE, cuda::aligned_size_t<16>(sizeof tile), full);
        full.arrive_and_wait();
        sum += tile[(threadIdx.x + 1) % TILE];
        barrier::arrival_token token = full.arrive();
        full.wait(std::move(token));  // before the next tile overwrites this one
    }
    out[threadIdx.x] = sum;
}
__global__ void by_pipeline(float* out, const float* in) {
    const int STAGES = 2;
    __shared__ alignas(16) float tiles[STAGES][TILE];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES> state;
    const cg::thread_block block = cg::this_thread_block();
    cuda::pipeline pipe = cuda::make_pipeline(block, &state);
    float sum = 0;
    for (int t = 0, ahead = 0; t < TILES; ++t) {
        for (; ahead < TILES && ahead < t + STAGES; ++ahead) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, tiles[ahead % STAGES], in + ahead * TILE, cuda::aligned_size_t<16>(sizeof tiles[0]), pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        sum += tiles[t % STAGES][(threadIdx.x + 1) % TILE];
        pipe.consumer_release();
    }
    out[threadIdx.x] = sum;
}
__global__ void by_a_threads_pipeline(float* out, const float* in) {
    __shared__ float tiles[2][TILE];
    cuda::pipeline<cuda::thread_scope_thread> pipe = cuda::make_pipeline();
    float sum = 0;
    for (int t = 0, ahead = 0; t < TILES; ++t) {
        for (; ahead < TILES && ahead < t + 2; ++ahead) {
            pipe.producer_acquire();
            cuda::memcpy_async(&tiles[ahead % 2][threadIdx.x], in + ahead * TILE + threadIdx.x, sizeof(float), pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        __syncthreads();
        sum += tiles[t % 2][(threadIdx.x + 1) % TILE];
        __syncthreads();
        if (t % 2) pipe.consumer_release();  // changes nothing: a thread's own stage is released by its wait
    }
    out[threadIdx.x] = sum;
}
__global__ void by_group(float* out, const float* in) {
    __shared__ float tile[TILE];
    const cg::thread_block block = cg::this_thread_block();
    float sum = 0;
    for (int t = 0; t < TILES; ++t) {
        cg::memcpy_async(block, tile, in + t * TILE, sizeof tile);
        cg::wait(block);
        sum += tile[(threadIdx.x + 1) % TILE];
        block.sync();
    }
    out[threadIdx.x] = sum;
}
// A message by acquire and release, one elected thread a warp, and every way to add.
__global__ void by_atomics(int* out) {
    __shared__ int message;
    __shared__ cuda::atomic<int, cuda::thread_scope_block> flag;
    if (threadIdx.x == 0) flag.store(0, cuda::memory_order_relaxed);
    __syncthreads();
    if (threadIdx.x == 0) {
        message = 42;
        flag.store(1, cuda::memory_order_release);
    }
    if (threadIdx.x == 32) {
        while (flag.load(cuda::memory_order_acquire) == 0) {
        }
        out[1] = message;
    }
    cuda::std::atomic_ref<int> total(out[0]);
    total.fetch_add(1, cuda::memory_order_relaxed);
    const cg::thread_block_tile<32> warp = cg::tiled_partition<32>(cg::this_thread_block());
    cg::invoke_one(warp, [&] { atomicAdd(out + 2, 1); });
    const int rank = cg::invoke_one_broadcast(warp, [&] { return (int)warp.meta_group_rank(); });
    atomicAdd(out + 3, rank);
}

// Tiles of two warps, and tiles of theirs. What a thread writes is read by others of its tile behind the tile's barrier.
__global__ void by_tiles(int* out) {
    __shared__ cg::block_tile_memory<4 * THREADS> scratch;
    __shared__ int values[4 * THREADS];
    const cg::thread_block block = cg::this_thread_block(scratch);
    const auto tile = cg::tiled_partition<THREADS>(block);
    const auto part = cg::tiled_partition<16>(tile);
    const int i = block.thread_rank();
    values[i] = i;
    tile.sync();
    const int last = values[tile.meta_group_rank() * THREADS + THREADS - 1 - tile.thread_rank()];
    out[i] = cg::reduce(tile, last, cg::plus<int>());
    out[4 * THREADS + i] = 100 * tile.shfl(i, 5) + 10 * part.meta_group_rank() + part.meta_group_size();
    out[8 * THREADS + i] = 10 * tile.any(i == 70) + tile.all(i < 128);
}

static void copies() {
    float host[TILES * TILE], back[THREADS], *in, *out;
    for (int i = 0; i < TILES * TILE; ++i) host[i] = i;
    cudaMalloc(&in, sizeof host);
    cudaMalloc(&out, sizeof back);
    cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
    for (auto kernel : {by_barrier, by_pipeline, by_a_threads_pipeline, by_group}) {
        kernel<<<1, THREADS>>>(out, in);
        cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
        for (int i = 0; i < THREADS; ++i) EXPECT(back[i] == TILES * ((i + 1) % TILE) + TILE * (TILES * (TILES - 1) / 2));
    }
}
static void atomics() {
    int *out, back[4];
    cudaMalloc(&out, sizeof back);
    cudaMemset(out, 0, sizeof back);
    by_atomics<<<1, 64>>>(out);
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    EXPECT(back[0] == 64 && back[1] == 42 && back[2] == 2 && back[3] == 32);
}
static void tiles() {
    const int threads = 4 * THREADS;
    int *out, back[12 * THREADS];
    cudaMalloc(&out, sizeof back);
    by_tiles<<<1, threads>>>(out);
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    for (int i = 0; i < threads; ++i) {
        const int first = i / THREADS * THREADS;
        EXPECT(back[i] == THREADS * first + THREADS * (THREADS - 1) / 2);
        EXPECT(back[threads + i] == 100 * (first + 5) + 10 * (i % THREADS / 16) + THREADS / 16);
        EXPECT(back[2 * threads + i] == 10 * (i / THREADS == 1) + (i < 128));
    }
}
static void products() {
    const float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {1, 0, 1, 0, 1, 1}, one = 1, two = 2;  // by columns: 2 x 3, 3 x 2
    float c[4] = {1, 1, 1, 1}, *da, *db, *dc;
    cudaMalloc(&da, sizeof a), cudaMalloc(&db, sizeof b), cudaMalloc(&dc, sizeof c);
    cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice), cudaMemcpy(db, b, sizeof b, cudaMemcpyHostToDevice);
    cudaMemcpy(dc, c, sizeof c, cudaMemcpyHostToDevice);
    cublasHandle_t handle;
    EXPECT(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    EXPECT(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 3, &two, da, 2, db, 3, &one, dc, 2) == CUBLAS_STATUS_SUCCESS);
    cudaMemcpy(c, dc, sizeof c, cudaMemcpyDeviceToHost);
    EXPECT(c[0] == 13 && c[1] == 17 && c[2] == 17 && c[3] == 21);
    EXPECT(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 3, &two, da, 1, db, 3, &one, dc, 2) == CUBLAS_STATUS_INVALID_VALUE);
    EXPECT(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
}

int main() {
    copies();
    atomics();
    tiles();
    products();
}
