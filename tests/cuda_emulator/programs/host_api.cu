// The parts of the runtime that host code calls.
#include "expect.h"

#include <string>

__global__ void add(int* p, int n, int value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += value;
}
__global__ void add_2d(char* p, size_t pitch, int width) {
    ((int*)(p + threadIdx.y * pitch))[threadIdx.x] += threadIdx.y * width;
}
__managed__ int managed_count = 3;
__device__ int device_values[4] = {1, 2, 3, 4};
__global__ void count() { atomicAdd(&managed_count, device_values[threadIdx.x]); }

static void managed_and_pinned() {
    int *managed, *pinned, *seen;
    EXPECT(cudaMallocManaged(&managed, 64) == cudaSuccess);
    for (int i = 0; i < 16; ++i) managed[i] = i;
    add<<<1, 16>>>(managed, 16, 10);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    for (int i = 0; i < 16; ++i) EXPECT(managed[i] == i + 10);
    EXPECT(cudaHostAlloc(&pinned, 64, cudaHostAllocMapped) == cudaSuccess);
    for (int i = 0; i < 16; ++i) pinned[i] = 0;
    EXPECT(cudaHostGetDevicePointer(&seen, pinned, 0) == cudaSuccess);
    add<<<1, 16>>>(seen, 16, 1);
    EXPECT(pinned[15] == 1);
    cudaPointerAttributes about;
    EXPECT(cudaPointerGetAttributes(&about, pinned) == cudaSuccess && about.devicePointer == pinned);
    EXPECT(cudaMemPrefetchAsync(managed, 64, 0) == cudaSuccess);
    EXPECT(cudaFree(managed) == cudaSuccess && cudaFreeHost(pinned) == cudaSuccess);
    EXPECT(cudaMallocHost(&pinned, 64) == cudaSuccess && cudaFreeHost(pinned) == cudaSuccess);
    int pages[16] = {1, 2, 3}, *on_device;
    EXPECT(cudaHostRegister(pages, sizeof pages, cudaHostRegisterDefault) == cudaSuccess);
    EXPECT(cudaPointerGetAttributes(&about, pages + 15) == cudaSuccess && about.type == cudaMemoryTypeHost);
    EXPECT(cudaHostRegister(pages + 8, 4, cudaHostRegisterDefault) == cudaErrorHostMemoryAlreadyRegistered);
    EXPECT(cudaMalloc(&on_device, sizeof pages) == cudaSuccess);
    EXPECT(cudaMemcpyAsync(on_device, pages, sizeof pages, cudaMemcpyHostToDevice) == cudaSuccess);
    add<<<1, 16>>>(on_device, 16, 1);
    EXPECT(cudaMemcpyAsync(pages, on_device, sizeof pages, cudaMemcpyDeviceToHost) == cudaSuccess && pages[2] == 4);
    EXPECT(cudaHostUnregister(pages + 1) == cudaErrorHostMemoryNotRegistered);
    EXPECT(cudaHostUnregister(pages) == cudaSuccess && cudaFree(on_device) == cudaSuccess);
    EXPECT(cudaHostUnregister(pages) == cudaErrorHostMemoryNotRegistered);
    count<<<1, 4>>>();
    EXPECT(managed_count == 13);
}

static void pitched_copies() {
    const int width = 5, rows = 3;
    int from[rows][8], to[rows][width];
    for (int y = 0; y < rows; ++y)
        for (int x = 0; x < 8; ++x) from[y][x] = x;
    char* device;
    size_t pitch;
    EXPECT(cudaMallocPitch(&device, &pitch, width * sizeof(int), rows) == cudaSuccess && pitch >= width * sizeof(int));
    EXPECT(cudaMemcpy2D(device, pitch, from, sizeof from[0], sizeof to[0], rows, cudaMemcpyHostToDevice) == cudaSuccess);
    add_2d<<<1, dim3(width, rows)>>>(device, pitch, 100);
    EXPECT(cudaMemcpy2D(to, sizeof to[0], device, pitch, sizeof to[0], rows, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (int y = 0; y < rows; ++y)
        for (int x = 0; x < width; ++x) EXPECT(to[y][x] == x + 100 * y);
    EXPECT(cudaMemcpy2D(to, 4, device, pitch, sizeof to[0], rows, cudaMemcpyDeviceToHost) == cudaErrorInvalidPitchValue);
    EXPECT(cudaMemset2D(device, pitch, 0, width * sizeof(int), rows) == cudaSuccess);
    cudaFree(device);
}

static void symbols() {
    int values[4] = {5, 6, 7, 8}, back[2];
    EXPECT(cudaMemcpyToSymbol(device_values, values, sizeof values) == cudaSuccess);
    EXPECT(cudaMemcpyFromSymbol(back, device_values, sizeof back, 8) == cudaSuccess && back[0] == 7 && back[1] == 8);
    size_t bytes;
    EXPECT(cudaGetSymbolSize(&bytes, device_values) == cudaSuccess && bytes == sizeof values);
}

static void device_and_occupancy() {
    int value, blocks, threads;
    cudaDeviceProp device;
    EXPECT(cudaGetDeviceProperties(&device, 0) == cudaSuccess && device.major == 9 && device.warpSize == 32);
    EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
    EXPECT(value == device.multiProcessorCount);
    EXPECT(cudaSetDevice(1) == cudaErrorInvalidDevice);
    EXPECT(std::string(cudaGetErrorName(cudaErrorInvalidDevice)) == "cudaErrorInvalidDevice");
    EXPECT(cudaOccupancyMaxPotentialBlockSize(&blocks, &threads, add) == cudaSuccess);
    EXPECT(threads == 1024 && blocks == 2 * device.multiProcessorCount);
    EXPECT(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 128, 100 << 10) == cudaSuccess && blocks == 2);
    cudaFuncAttributes about;
    EXPECT(cudaFuncGetAttributes(&about, add) == cudaSuccess && about.maxThreadsPerBlock == 1024);
    EXPECT(cudaFuncSetAttribute(add, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) == cudaSuccess);
    EXPECT(cudaFuncSetAttribute(add, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10) == cudaSuccess);
    EXPECT(cudaFuncGetAttributes(&about, add) == cudaSuccess && about.maxDynamicSharedSizeBytes == 64 << 10);
    size_t before, after, total;
    void* some;
    EXPECT(cudaMemGetInfo(&before, &total) == cudaSuccess && total == device.totalGlobalMem);
    EXPECT(cudaMalloc(&some, 1 << 20) == cudaSuccess && cudaMemGetInfo(&after, &total) == cudaSuccess);
    EXPECT(after <= before - (1 << 20));
    EXPECT(cudaFree(some) == cudaSuccess && cudaMalloc(&some, total) == cudaErrorMemoryAllocation);
}

static void streams_and_events() {
    int least, greatest, priority, called = 0;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    EXPECT(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess && greatest < least);
    EXPECT(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest) == cudaSuccess);
    EXPECT(cudaStreamGetPriority(stream, &priority) == cudaSuccess && priority == greatest);
    EXPECT(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreateWithFlags(&end, cudaEventBlockingSync) == cudaSuccess);
    EXPECT(cudaEventRecord(begin, stream) == cudaSuccess);
    EXPECT(cudaLaunchHostFunc(stream, [](void* p) { ++*(int*)p; }, &called) == cudaSuccess && called == 1);
    EXPECT(cudaEventRecord(end, stream) == cudaSuccess && cudaEventQuery(end) == cudaSuccess);
    EXPECT(cudaStreamQuery(stream) == cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess);
    float milliseconds = -1;
    EXPECT(cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess && milliseconds >= 0);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
}

int main() {
    managed_and_pinned();
    pitched_copies();
    symbols();
    device_and_occupancy();
    streams_and_events();
    EXPECT(cudaDeviceReset() == cudaSuccess);
}
