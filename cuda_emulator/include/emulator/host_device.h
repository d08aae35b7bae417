// The emulated device, as host code sees it: few multiprocessors, so that persistent kernels loop; the limits of compute
// capability 9.0.
#pragma once
#include <emulator/host_status.h>
#include <emulator/runtime_api.h>
#include <string.h>

enum cudaComputeMode {
    cudaComputeModeDefault,
    cudaComputeModeExclusive,
    cudaComputeModeProhibited,
    cudaComputeModeExclusiveProcess
};
struct cudaDeviceProp {
    char name[256] = "CUDA emulator";
    size_t totalGlobalMem = (size_t)16 << 30, sharedMemPerBlock = 48 << 10, sharedMemPerBlockOptin = 227 << 10,
           sharedMemPerMultiprocessor = 228 << 10, reservedSharedMemPerBlock = 1024, totalConstMem = 64 << 10,
           memPitch = 2147483647, textureAlignment = 512, texturePitchAlignment = 32, surfaceAlignment = 512;
    int major = 9, minor = 0, multiProcessorCount = 4, warpSize = 32, maxThreadsPerBlock = 1024,
        maxThreadsPerMultiProcessor = 2048, maxBlocksPerMultiProcessor = 32, regsPerBlock = 65536,
        regsPerMultiprocessor = 65536, l2CacheSize = 50 << 20, persistingL2CacheMaxSize = 0, clockRate = 1000000,
        memoryClockRate = 1000000, memoryBusWidth = 64, asyncEngineCount = 1, concurrentKernels = 0,
        computeMode = cudaComputeModeDefault, integrated = 0, ECCEnabled = 0, tccDriver = 0, deviceOverlap = 1,
        kernelExecTimeoutEnabled = 0, canMapHostMemory = 1, unifiedAddressing = 1, managedMemory = 1,
        concurrentManagedAccess = 0, pageableMemoryAccess = 0, hostNativeAtomicSupported = 0, cooperativeLaunch = 1,
        cooperativeMultiDeviceLaunch = 0, streamPrioritiesSupported = 1, globalL1CacheSupported = 1, localL1CacheSupported = 1,
        computePreemptionSupported = 0, memoryPoolsSupported = 0, isMultiGpuBoard = 0, pciDomainID = 0, pciBusID = 0,
        pciDeviceID = 0;
    int maxGridSize[3] = {2147483647, 65535, 65535}, maxThreadsDim[3] = {1024, 1024, 64};
    int maxTexture1D = 131072, maxTexture2D[2] = {131072, 65536}, maxTexture3D[3] = {16384, 16384, 16384},
        maxTexture1DLayered[2] = {32768, 2048}, maxTexture2DLayered[3] = {32768, 32768, 2048}, maxTexture1DLinear = 268435456,
        maxTexture2DLinear[3] = {131072, 65000, 2097120};
};

// name, number, value
#define EMULATOR_DEVICE_ATTRIBUTES(X)                                     \
    X(MaxThreadsPerBlock, 1, p.maxThreadsPerBlock)                        \
    X(MaxBlockDimX, 2, p.maxThreadsDim[0])                                \
    X(MaxBlockDimY, 3, p.maxThreadsDim[1])                                \
    X(MaxBlockDimZ, 4, p.maxThreadsDim[2])                                \
    X(MaxGridDimX, 5, p.maxGridSize[0])                                   \
    X(MaxGridDimY, 6, p.maxGridSize[1])                                   \
    X(MaxGridDimZ, 7, p.maxGridSize[2])                                   \
    X(MaxSharedMemoryPerBlock, 8, p.sharedMemPerBlock)                    \
    X(TotalConstantMemory, 9, p.totalConstMem)                            \
    X(WarpSize, 10, 32)                                                   \
    X(MaxPitch, 11, p.memPitch)                                           \
    X(MaxRegistersPerBlock, 12, p.regsPerBlock)                           \
    X(ClockRate, 13, p.clockRate)                                         \
    X(TextureAlignment, 14, p.textureAlignment)                           \
    X(GpuOverlap, 15, p.deviceOverlap)                                    \
    X(MultiProcessorCount, 16, p.multiProcessorCount)                     \
    X(KernelExecTimeout, 17, p.kernelExecTimeoutEnabled)                  \
    X(Integrated, 18, p.integrated)                                       \
    X(CanMapHostMemory, 19, p.canMapHostMemory)                           \
    X(ComputeMode, 20, p.computeMode)                                     \
    X(MaxTexture1DWidth, 21, p.maxTexture1D)                              \
    X(MaxTexture2DWidth, 22, p.maxTexture2D[0])                           \
    X(MaxTexture2DHeight, 23, p.maxTexture2D[1])                          \
    X(ConcurrentKernels, 31, p.concurrentKernels)                         \
    X(EccEnabled, 32, p.ECCEnabled)                                       \
    X(PciBusId, 33, p.pciBusID)                                           \
    X(PciDeviceId, 34, p.pciDeviceID)                                     \
    X(TccDriver, 35, p.tccDriver)                                         \
    X(MemoryClockRate, 36, p.memoryClockRate)                             \
    X(GlobalMemoryBusWidth, 37, p.memoryBusWidth)                         \
    X(L2CacheSize, 38, p.l2CacheSize)                                     \
    X(MaxThreadsPerMultiProcessor, 39, p.maxThreadsPerMultiProcessor)     \
    X(AsyncEngineCount, 40, p.asyncEngineCount)                           \
    X(UnifiedAddressing, 41, p.unifiedAddressing)                         \
    X(PciDomainId, 50, p.pciDomainID)                                     \
    X(ComputeCapabilityMajor, 75, p.major)                                \
    X(ComputeCapabilityMinor, 76, p.minor)                                \
    X(StreamPrioritiesSupported, 78, p.streamPrioritiesSupported)         \
    X(MaxSharedMemoryPerMultiprocessor, 81, p.sharedMemPerMultiprocessor) \
    X(MaxRegistersPerMultiprocessor, 82, p.regsPerMultiprocessor)         \
    X(ManagedMemory, 83, p.managedMemory)                                 \
    X(IsMultiGpuBoard, 84, p.isMultiGpuBoard)                             \
    X(HostNativeAtomicSupported, 86, p.hostNativeAtomicSupported)         \
    X(PageableMemoryAccess, 88, p.pageableMemoryAccess)                   \
    X(ConcurrentManagedAccess, 89, p.concurrentManagedAccess)             \
    X(ComputePreemptionSupported, 90, p.computePreemptionSupported)       \
    X(CanUseHostPointerForRegisteredMem, 91, 0)                           \
    X(CooperativeLaunch, 95, p.cooperativeLaunch)                         \
    X(CooperativeMultiDeviceLaunch, 96, p.cooperativeMultiDeviceLaunch)   \
    X(MaxSharedMemoryPerBlockOptin, 97, p.sharedMemPerBlockOptin)         \
    X(HostRegisterSupported, 99, 0)                                       \
    X(MaxBlocksPerMultiprocessor, 106, p.maxBlocksPerMultiProcessor)      \
    X(ReservedSharedMemoryPerBlock, 111, p.reservedSharedMemPerBlock)     \
    X(MemoryPoolsSupported, 115, p.memoryPoolsSupported)                  \
    X(ClusterLaunch, 120, 1)

#define EMULATOR_ENUMERATOR(NAME, NUMBER, VALUE) cudaDevAttr##NAME = NUMBER,
enum cudaDeviceAttr { EMULATOR_DEVICE_ATTRIBUTES(EMULATOR_ENUMERATOR) };
#undef EMULATOR_ENUMERATOR

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// There is one device, 0. -1 is what get_device() of a tensor in host memory says, which stands for one on the device here.
inline cudaError_t cudaSetDevice(int device) { return device == 0 || device == -1 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaChooseDevice(int* device, const cudaDeviceProp*) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    return *properties = cudaDeviceProp{}, cudaSetDevice(device);
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    const cudaDeviceProp p;
#define EMULATOR_CASE(NAME, NUMBER, VALUE) \
    case NUMBER:                           \
        return *value = (int)(VALUE), cudaSetDevice(device);
    switch (int(attribute)) { EMULATOR_DEVICE_ATTRIBUTES(EMULATOR_CASE) }
#undef EMULATOR_CASE
    return cudaErrorInvalidValue;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
#define cudaDeviceScheduleAuto 0
#define cudaDeviceScheduleSpin 1
#define cudaDeviceScheduleYield 2
#define cudaDeviceScheduleBlockingSync 4
#define cudaDeviceBlockingSync 4
#define cudaDeviceMapHost 8
inline cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceReset() { return cudaSuccess; }
inline cudaError_t cudaThreadExit() { return cudaSuccess; }
inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorInvalidDevice; }
inline cudaError_t cudaDeviceDisablePeerAccess(int) { return cudaErrorPeerAccessNotEnabled; }

enum cudaLimit { cudaLimitStackSize, cudaLimitPrintfFifoSize, cudaLimitMallocHeapSize };
inline cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit limit) {  // a device's values before any is set
    return *value = limit == cudaLimitStackSize ? 1024 : limit == cudaLimitPrintfFifoSize ? 1 << 20 : 8 << 20, cudaSuccess;
}
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaSharedMemConfig { cudaSharedMemBankSizeDefault, cudaSharedMemBankSizeFourByte, cudaSharedMemBankSizeEightByte };
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetCacheConfig(cudaFuncCache* config) { return *config = cudaFuncCachePreferNone, cudaSuccess; }
inline cudaError_t cudaDeviceSetSharedMemConfig(cudaSharedMemConfig) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetSharedMemConfig(cudaSharedMemConfig* config) {
    return *config = cudaSharedMemBankSizeFourByte, cudaSuccess;
}

// ---- kernels
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14
};
enum cudaSharedCarveout {
    cudaSharedmemCarveoutDefault = -1,
    cudaSharedmemCarveoutMaxL1 = 0,
    cudaSharedmemCarveoutMaxShared = 100
};
template <class F>
inline cudaError_t cudaFuncSetAttribute(F* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > cudaDeviceProp{}.sharedMemPerBlockOptin) return cudaErrorInvalidValue;
    return ::emulator::set_kernel_shared_limit((const void*)kernel, value), cudaSuccess;
}
template <class F>
inline cudaError_t cudaFuncSetCacheConfig(F*, cudaFuncCache) {
    return cudaSuccess;
}
template <class F>
inline cudaError_t cudaFuncSetSharedMemConfig(F*, cudaSharedMemConfig) {
    return cudaSuccess;
}
// What a compiler for the device decides is not known here and 0: registers, and static shared and local memory.
struct cudaFuncAttributes {
    size_t sharedSizeBytes = 0, constSizeBytes = 0, localSizeBytes = 0;
    int maxThreadsPerBlock = 1024, numRegs = 0, ptxVersion = 90, binaryVersion = 90, cacheModeCA = 0,
        maxDynamicSharedSizeBytes = 48 << 10, preferredShmemCarveout = cudaSharedmemCarveoutDefault;
};
template <class F>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, F* kernel) {
    *attributes = cudaFuncAttributes{};
    attributes->maxDynamicSharedSizeBytes = (int)::emulator::kernel_shared_limit((const void*)kernel);
    return cudaSuccess;
}

// ---- occupancy, by threads and dynamic shared memory alone
#define cudaOccupancyDefault 0
#define cudaOccupancyDisableCachingOverride 1
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int threads, size_t shared_bytes) {
    const cudaDeviceProp p;
    const int by_threads = p.maxThreadsPerMultiProcessor / (threads > 0 ? (threads + 31) / 32 * 32 : 1);
    const int by_shared = (int)(p.sharedMemPerMultiprocessor / (shared_bytes + p.reservedSharedMemPerBlock));
    const int least = by_threads < by_shared ? by_threads : by_shared;
    return *blocks = least < p.maxBlocksPerMultiProcessor ? least : p.maxBlocksPerMultiProcessor, cudaSuccess;
}
template <class F>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, F kernel, int threads,
                                                                          size_t shared_bytes, unsigned) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared_bytes);
}
// The largest block that reaches the highest occupancy, and the fewest blocks that fill the device.
template <class F, class S>
inline cudaError_t cudaOccupancyMaxPotentialBlockSizeVariableSMem(int* blocks, int* threads, F kernel, S shared_bytes_of,
                                                                  int limit = 0) {
    const cudaDeviceProp p;
    int best = 0;
    for (int size = limit > 0 && limit < p.maxThreadsPerBlock ? limit : p.maxThreadsPerBlock; size >= 32; size -= 32) {
        int resident;
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, size, shared_bytes_of(size));
        if (resident * size <= best) continue;
        best = resident * size, *threads = size, *blocks = resident * p.multiProcessorCount;
    }
    return best ? cudaSuccess : cudaErrorInvalidValue;
}
template <class F>
inline cudaError_t cudaOccupancyMaxPotentialBlockSize(int* blocks, int* threads, F kernel, size_t shared_bytes = 0,
                                                      int limit = 0) {
    return cudaOccupancyMaxPotentialBlockSizeVariableSMem(blocks, threads, kernel, [=](int) { return shared_bytes; }, limit);
}
template <class F>
inline cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, F, int blocks, int) {
    const cudaDeviceProp p;
    const size_t share = p.sharedMemPerMultiprocessor / (blocks > 0 ? blocks : 1);
    return *bytes = share > p.reservedSharedMemPerBlock ? share - p.reservedSharedMemPerBlock : 0, cudaSuccess;
}
