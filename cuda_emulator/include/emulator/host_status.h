// Errors, streams and events of the CUDA runtime. Every stream is in order with the host, so waiting is done at once.
#pragma once
#include <stddef.h>
#include <time.h>

// name, number, text
#define EMULATOR_ERRORS(X)                                                                                  \
    X(Success, 0, "no error")                                                                               \
    X(ErrorInvalidValue, 1, "invalid argument")                                                             \
    X(ErrorMemoryAllocation, 2, "out of memory")                                                            \
    X(ErrorInitializationError, 3, "initialization error")                                                  \
    X(ErrorCudartUnloading, 4, "driver shutting down")                                                      \
    X(ErrorInvalidConfiguration, 9, "invalid configuration argument")                                       \
    X(ErrorProfilerDisabled, 5, "profiler disabled while using external profiling tool")                    \
    X(ErrorInvalidPitchValue, 12, "invalid pitch argument")                                                 \
    X(ErrorInvalidSymbol, 13, "invalid device symbol")                                                      \
    X(ErrorInvalidDevicePointer, 17, "invalid device pointer")                                              \
    X(ErrorInvalidTexture, 18, "invalid texture reference")                                                 \
    X(ErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                                 \
    X(ErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version")          \
    X(ErrorMissingConfiguration, 52, "__global__ function call is not configured")                          \
    X(ErrorInvalidDeviceFunction, 98, "invalid device function")                                            \
    X(ErrorNoDevice, 100, "no CUDA-capable device is detected")                                             \
    X(ErrorInvalidDevice, 101, "invalid device ordinal")                                                    \
    X(ErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device")         \
    X(ErrorPeerAccessUnsupported, 217, "peer access is not supported between these two devices")            \
    X(ErrorInvalidResourceHandle, 400, "invalid resource handle")                                           \
    X(ErrorIllegalState, 401, "the operation cannot be performed in the present state")                     \
    X(ErrorSymbolNotFound, 500, "named symbol not found")                                                   \
    X(ErrorNotReady, 600, "device not ready")                                                               \
    X(ErrorIllegalAddress, 700, "an illegal memory access was encountered")                                 \
    X(ErrorLaunchOutOfResources, 701, "too many resources requested for launch")                            \
    X(ErrorLaunchTimeout, 702, "the launch timed out and was terminated")                                   \
    X(ErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                                 \
    X(ErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                                   \
    X(ErrorAssert, 710, "device-side assert triggered")                                                     \
    X(ErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped") \
    X(ErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region")       \
    X(ErrorMisalignedAddress, 716, "misaligned address")                                                    \
    X(ErrorLaunchFailure, 719, "unspecified launch failure")                                                \
    X(ErrorCooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch")                         \
    X(ErrorNotPermitted, 800, "operation not permitted")                                                    \
    X(ErrorNotSupported, 801, "operation not supported")                                                    \
    X(ErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")               \
    X(ErrorUnknown, 999, "unknown error")

#define EMULATOR_ENUMERATOR(NAME, NUMBER, TEXT) cuda##NAME = NUMBER,
enum cudaError { EMULATOR_ERRORS(EMULATOR_ENUMERATOR) };
#undef EMULATOR_ENUMERATOR
using cudaError_t = cudaError;

inline const char* cudaGetErrorName(cudaError_t error) {
#define EMULATOR_CASE(NAME, NUMBER, TEXT) \
    case NUMBER:                          \
        return "cuda" #NAME;
    switch (int(error)) { EMULATOR_ERRORS(EMULATOR_CASE) }
#undef EMULATOR_CASE
    return "unrecognized error code";
}
inline const char* cudaGetErrorString(cudaError_t error) {
#define EMULATOR_CASE(NAME, NUMBER, TEXT) \
    case NUMBER:                          \
        return TEXT;
    switch (int(error)) { EMULATOR_ERRORS(EMULATOR_CASE) }
#undef EMULATOR_CASE
    return "unrecognized error code";
}
// What goes wrong in a launch or a copy is a finding, which is raised at once. Where it is kept, for a caller in C, every
// question answers that there is one.
extern "C" int emulator_finding_pending();
inline cudaError_t cudaGetLastError() { return emulator_finding_pending() ? cudaErrorLaunchFailure : cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaGetLastError(); }

// ---- streams
struct CUstream_st {
    unsigned flags = 0;
    int priority = 0;
    unsigned capture = 0;  // the number of the last capture that it took part in
};
using cudaStream_t = CUstream_st*;
struct CUevent_st {
    timespec time;
    unsigned capture = 0;
};
struct CUgraph_st;
using cudaEvent_t = CUevent_st*;
#define cudaStreamLegacy ((cudaStream_t)1)
#define cudaStreamPerThread ((cudaStream_t)2)
#define cudaStreamDefault 0
#define cudaStreamNonBlocking 1

namespace emulator {
// What host code does that orders the work of streams (streams.cpp).
enum class Order {
    stream_made,
    stream_synchronised,
    stream_waits,
    all_synchronised,
    event_made,
    event_recorded,
    event_synchronised
};
void order(Order what, cudaStream_t stream = nullptr, cudaEvent_t event = nullptr);
void work_in_stream(int change);  // while these add up to more than 0, what is asked for does not wait for the device
inline bool is_made_by_create(cudaStream_t stream) { return stream > cudaStreamPerThread; }
CUgraph_st* capture_of(cudaStream_t stream);  // the graph that it is being captured to, or null
bool record_work(cudaStream_t stream, void (*work)(void*), const void* data, size_t bytes);
// Calls work(), or leaves it to the graph to which the stream is being captured.
template <class F>
inline cudaError_t in_stream(cudaStream_t stream, F work) {
    const bool is_recorded =
        is_made_by_create(stream) && record_work(stream, [](void* p) { (*static_cast<F*>(p))(); }, &work, sizeof work);
    if (is_recorded) return cudaSuccess;
    work_in_stream(1);
    const cudaError_t status = work();
    return work_in_stream(-1), status;
}
}  // namespace emulator

inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    *stream = new CUstream_st{flags, priority, 0};
    return ::emulator::order(::emulator::Order::stream_made, *stream), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!::emulator::is_made_by_create(stream)) return cudaErrorInvalidResourceHandle;
    return delete stream, cudaSuccess;
}
inline cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return *priority = ::emulator::is_made_by_create(stream) ? stream->priority : 0, cudaSuccess;
}
inline cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
    return *flags = ::emulator::is_made_by_create(stream) ? stream->flags : 0, cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (::emulator::capture_of(stream)) return cudaErrorStreamCaptureUnsupported;
    return ::emulator::order(::emulator::Order::stream_synchronised, stream), cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return ::emulator::order(::emulator::Order::stream_synchronised, stream), cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    if (event->capture && ::emulator::is_made_by_create(stream)) stream->capture = event->capture;
    return ::emulator::order(::emulator::Order::stream_waits, stream, event), cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return ::emulator::order(::emulator::Order::all_synchronised), cudaSuccess; }
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
#define CUDART_CB
#define CUDARTAPI
using cudaHostFn_t = void (*)(void*);
using cudaStreamCallback_t = void (*)(cudaStream_t, cudaError_t, void*);
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return ::emulator::in_stream(stream, [=] { return function(data), cudaSuccess; });
}
inline cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    return callback(stream, cudaSuccess, data), cudaSuccess;
}

// ---- events
#define cudaEventDefault 0
#define cudaEventBlockingSync 1
#define cudaEventDisableTiming 2
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new CUevent_st{};
    return ::emulator::order(::emulator::Order::event_made, nullptr, *event), cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return ::emulator::order(::emulator::Order::event_synchronised, nullptr, event), cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    event->capture = ::emulator::capture_of(stream) ? stream->capture : 0;
    ::emulator::order(::emulator::Order::event_recorded, stream, event);
    return clock_gettime(CLOCK_MONOTONIC, &event->time), cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = (end->time.tv_sec - start->time.tv_sec) * 1e3f + (end->time.tv_nsec - start->time.tv_nsec) * 1e-6f;
    return cudaSuccess;
}
