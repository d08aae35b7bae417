// Memory as host code asks for it. Device memory is host memory, so copies are plain copies; the runtime library makes them
// and checks them (host_memory.cpp).
#pragma once
#include <emulator/host_status.h>
#include <emulator/runtime_api.h>
#include <stddef.h>
#include <string.h>

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

namespace emulator {
// Rows of `width` bytes, of which there are `rows`. False if check mode has reported a mistake.
bool host_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, int kind,
               const char* function, int line);
bool host_fill(void* to, size_t pitch, int value, size_t width, size_t rows, const char* function, int line);
bool host_release(void* pointer, const char* function, int line);
bool symbol_holds(size_t symbol_bytes, size_t offset, size_t bytes, const char* function, int line);
void memory_info(size_t* available, size_t* total);
int memory_type(const void* pointer);  // a cudaMemoryType
// Host memory that is pinned where it lies. False: a part is pinned already; nothing is pinned at this beginning.
bool host_register(void* begin, size_t bytes);
bool host_unregister(void* begin);
inline cudaError_t status(bool succeeded) { return succeeded ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t allocated(const void* pointer, size_t bytes) {
    return pointer || !bytes ? cudaSuccess : cudaErrorMemoryAllocation;
}
}  // namespace emulator

#define EMULATOR_LINE_OF_CALL int line = __builtin_LINE()

// ---- allocation
template <class T>
inline cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    return ::emulator::allocated(*pointer = (T*)::emulator::device_allocate(bytes), bytes);
}
template <class T>
inline cudaError_t cudaMallocAsync(T** pointer, size_t bytes, cudaStream_t) {
    return cudaMalloc(pointer, bytes);
}
inline cudaError_t cudaFree(void* pointer, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_release(pointer, "cudaFree", line));
}
inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t, EMULATOR_LINE_OF_CALL) { return cudaFree(pointer, line); }

#define cudaMemAttachGlobal 1
#define cudaMemAttachHost 2
#define cudaMemAttachSingle 4
#define cudaHostAllocDefault 0
#define cudaHostAllocPortable 1
#define cudaHostAllocMapped 2
#define cudaHostAllocWriteCombined 4
#define cudaHostRegisterDefault 0
#define cudaHostRegisterPortable 1
#define cudaHostRegisterMapped 2
// Managed and pinned memory: both sides use it.
template <class T>
inline cudaError_t cudaMallocManaged(T** pointer, size_t bytes, unsigned = cudaMemAttachGlobal) {
    return ::emulator::allocated(*pointer = (T*)::emulator::device_allocate(bytes, ::emulator::Owner::managed), bytes);
}
template <class T>
inline cudaError_t cudaHostAlloc(T** pointer, size_t bytes, unsigned) {
    return ::emulator::allocated(*pointer = (T*)::emulator::device_allocate(bytes, ::emulator::Owner::host), bytes);
}
template <class T>
inline cudaError_t cudaMallocHost(T** pointer, size_t bytes, unsigned flags = cudaHostAllocDefault) {
    return cudaHostAlloc(pointer, bytes, flags);
}
inline cudaError_t cudaFreeHost(void* pointer, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_release(pointer, "cudaFreeHost", line));
}
template <class T>
inline cudaError_t cudaHostGetDevicePointer(T** device, void* host, unsigned) {
    return *device = (T*)host, cudaSuccess;
}
// Copies take it; in check mode kernels cannot, for want of a shadow, and are told so.
inline cudaError_t cudaHostRegister(void* begin, size_t bytes, unsigned) {
    if (!begin || !bytes) return cudaErrorInvalidValue;
    return ::emulator::host_register(begin, bytes) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
inline cudaError_t cudaHostUnregister(void* begin) {
    return ::emulator::host_unregister(begin) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

struct cudaMemLocation {
    int type, id;
};
enum { cudaMemLocationTypeInvalid, cudaMemLocationTypeDevice, cudaMemLocationTypeHost };
#define cudaCpuDeviceId (-1)
enum cudaMemoryAdvise {
    cudaMemAdviseSetReadMostly = 1,
    cudaMemAdviseUnsetReadMostly,
    cudaMemAdviseSetPreferredLocation,
    cudaMemAdviseUnsetPreferredLocation,
    cudaMemAdviseSetAccessedBy,
    cudaMemAdviseUnsetAccessedBy
};
inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t = nullptr) {
    return cudaSuccess;
}
inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }
inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) { return cudaSuccess; }
template <class T>
inline cudaError_t cudaStreamAttachMemAsync(cudaStream_t, T*, size_t = 0, unsigned = cudaMemAttachSingle) {
    return cudaSuccess;
}

inline cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    return ::emulator::memory_info(available, total), cudaSuccess;
}
enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    const auto type = (cudaMemoryType)::emulator::memory_type(pointer);
    void* const p = const_cast<void*>(pointer);
    *attributes = {type, 0, type == cudaMemoryTypeUnregistered ? nullptr : p, type == cudaMemoryTypeDevice ? nullptr : p};
    return cudaSuccess;
}

// ---- copies
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_copy(to, bytes, from, bytes, bytes, 1, kind, "cudaMemcpy", line));
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr,
                                   EMULATOR_LINE_OF_CALL) {
    return ::emulator::in_stream(stream, [=] {
        return ::emulator::status(::emulator::host_copy(to, bytes, from, bytes, bytes, 1, kind, "cudaMemcpyAsync", line));
    });
}
// Of one device: the numbers that are given must be its own.
inline cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                       cudaStream_t stream = nullptr, EMULATOR_LINE_OF_CALL) {
    if (to_device || from_device) return cudaErrorInvalidDevice;
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream, line);
}
inline cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                  EMULATOR_LINE_OF_CALL) {
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, nullptr, line);
}
inline cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                                cudaMemcpyKind kind, EMULATOR_LINE_OF_CALL) {
    if (rows && (width > to_pitch || width > from_pitch)) return cudaErrorInvalidPitchValue;
    return ::emulator::status(::emulator::host_copy(to, to_pitch, from, from_pitch, width, rows, kind, "cudaMemcpy2D", line));
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                                     cudaMemcpyKind kind, cudaStream_t stream = nullptr, EMULATOR_LINE_OF_CALL) {
    return ::emulator::in_stream(stream, [=] { return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, rows, kind, line); });
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_fill(to, bytes, value, bytes, 1, "cudaMemset", line));
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr, EMULATOR_LINE_OF_CALL) {
    return ::emulator::in_stream(stream, [=] { return cudaMemset(to, value, bytes, line); });
}
inline cudaError_t cudaMemset2D(void* to, size_t pitch, int value, size_t width, size_t rows, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_fill(to, pitch, value, width, rows, "cudaMemset2D", line));
}
inline cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t rows,
                                     cudaStream_t stream = nullptr, EMULATOR_LINE_OF_CALL) {
    return ::emulator::in_stream(stream, [=] { return cudaMemset2D(to, pitch, value, width, rows, line); });
}

// Rows begin at multiples of 512 bytes.
template <class T>
inline cudaError_t cudaMallocPitch(T** pointer, size_t* pitch, size_t width, size_t rows) {
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc(pointer, *pitch * rows);
}
struct cudaExtent {
    size_t width, height, depth;
};
struct cudaPos {
    size_t x, y, z;
};
struct cudaPitchedPtr {
    void* ptr;
    size_t pitch, xsize, ysize;
};
inline cudaExtent make_cudaExtent(size_t width, size_t height, size_t depth) { return {width, height, depth}; }
inline cudaPos make_cudaPos(size_t x, size_t y, size_t z) { return {x, y, z}; }
inline cudaPitchedPtr make_cudaPitchedPtr(void* pointer, size_t pitch, size_t width, size_t rows) {
    return {pointer, pitch, width, rows};
}
inline cudaError_t cudaMalloc3D(cudaPitchedPtr* pointer, cudaExtent extent) {
    pointer->xsize = extent.width, pointer->ysize = extent.height;
    return cudaMallocPitch(&pointer->ptr, &pointer->pitch, extent.width, extent.height * extent.depth);
}

// ---- symbols
template <class T>
inline cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyHostToDevice, EMULATOR_LINE_OF_CALL) {
    if (!::emulator::symbol_holds(sizeof(T), offset, bytes, "cudaMemcpyToSymbol", line)) return cudaErrorInvalidValue;
    return ::emulator::status(::emulator::host_copy((char*)&symbol + offset, bytes, from, bytes, bytes, 1, cudaMemcpyDefault,
                                                    "cudaMemcpyToSymbol", line));
}
template <class T>
inline cudaError_t cudaMemcpyToSymbolAsync(T& symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind kind,
                                           cudaStream_t stream = nullptr, EMULATOR_LINE_OF_CALL) {
    return ::emulator::in_stream(stream, [=, &symbol] { return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind, line); });
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                        cudaMemcpyKind kind = cudaMemcpyDeviceToHost, EMULATOR_LINE_OF_CALL) {
    if (!::emulator::symbol_holds(sizeof(T), offset, bytes, "cudaMemcpyFromSymbol", line)) return cudaErrorInvalidValue;
    return ::emulator::status(::emulator::host_copy(to, bytes, (const char*)&symbol + offset, bytes, bytes, 1,
                                                    cudaMemcpyDefault, "cudaMemcpyFromSymbol", line));
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbolAsync(void* to, const T& symbol, size_t bytes, size_t offset, cudaMemcpyKind kind,
                                             cudaStream_t stream = nullptr, EMULATOR_LINE_OF_CALL) {
    return ::emulator::in_stream(stream, [=, &symbol] { return cudaMemcpyFromSymbol(to, symbol, bytes, offset, kind, line); });
}
template <class P, class T>
inline cudaError_t cudaGetSymbolAddress(P** pointer, T& symbol) {
    return *pointer = (P*)&symbol, cudaSuccess;
}
template <class T>
inline cudaError_t cudaGetSymbolSize(size_t* bytes, const T&) {
    return *bytes = sizeof(T), cudaSuccess;
}
#undef EMULATOR_LINE_OF_CALL
