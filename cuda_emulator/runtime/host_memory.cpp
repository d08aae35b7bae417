// Memory as host code asks for it (host_memory.h): allocation, copies, and in check mode the mistakes in them. The host code of
// a plain CUDA program is instrumented, too; there device memory is known from host memory, as on a real device.
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "access.h"
#include "device_memory.h"
#include "emulator/host_api.h"
#include "finding.h"
#include "scheduler.h"
#include "streams.h"

namespace emulator {
namespace {

std::atomic<size_t> allocated_bytes{0};

std::mutex registered_mutex;
std::map<const char*, size_t> registered;  // what cudaHostRegister has pinned: begin, bytes

// The range that begins last at or before `address`, if it reaches behind it; under the mutex.
bool in_registered(const char* address) {
    const auto after = registered.upper_bound(address);
    return after != registered.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

std::string count_of_bytes(size_t bytes) { return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes"); }

// Host code made the mistake, in the line of its call. False, for what the call returns if nothing is raised.
bool report(const char* kind, const std::string& message, int line) {
    Finding finding;
    finding.kind = kind;
    finding.message = message;
    finding.kernel_line = line;
    deliver(finding);
    return false;
}

bool on_device(const void* pointer) {
    const Allocation* a = device_memory.contains(pointer) ? device_memory.find(pointer) : nullptr;
    return a && a->owner == Owner::device;
}

// Is one side of a copy the device's, or the host's, as its kind says? Managed and pinned memory is both.
bool fits_kind(const void* pointer, bool device, const char* function, const char* side, int line) {
    if (!options.program || !options.checked() || (device ? device_memory.contains(pointer) : !on_device(pointer))) return true;
    return report("invalid argument",
                  std::string(function) + ": by its cudaMemcpyKind the " + side + " is " + (device ? "device" : "host") +
                      " memory, but it is " + (device ? "host memory" : place_in_memory(pointer) + ", which the device owns"),
                  line);
}

}  // namespace

// Does an allocation hold all the bytes, or is it none of device memory?
bool in_bounds(const void* begin, size_t bytes, const char* function, int line) {
    if (!options.checked() || !bytes || !device_memory.contains(begin)) return true;
    const Allocation* a = device_memory.find(begin);
    if (a && (const char*)begin >= a->begin && (const char*)begin + bytes <= a->begin + a->bytes) return true;
    return report("global memory out of bounds",
                  std::string(function) + " of " + count_of_bytes(bytes) + " at " + place_in_memory(begin), line);
}

bool written(const void* begin, size_t bytes, const char* function, int line) {
    const long long at = options.checked() ? emulator_first_unwritten((const char*)begin, bytes) : -1;
    if (at < 0) return true;
    return report("uninitialised global read",
                  std::string(function) + " reads " + place_in_memory((const char*)begin + at) + ", which nothing has written",
                  line);
}

void* device_allocate(size_t bytes, Owner owner) {
    if (!bytes || bytes > cudaDeviceProp{}.totalGlobalMem - std::min(cudaDeviceProp{}.totalGlobalMem, allocated_bytes.load()))
        return nullptr;
    try {
        void* memory = options.checked() ? device_memory.allocate(bytes) : aligned_alloc(512, (bytes + 511) / 512 * 512);
        if (options.checked()) device_memory.find(memory)->owner = owner;
        if (memory) allocated_bytes += options.checked() ? bytes : malloc_usable_size(memory);
        return memory;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

bool host_release(void* pointer, const char* function, int line) {
    if (!pointer) return true;
    host_waits_for_the_device();
    if (!device_memory.contains(pointer)) {
        if (options.program && options.checked())
            return report("invalid argument", std::string(function) + " of memory that it did not allocate", line);
        allocated_bytes -= std::min(allocated_bytes.load(), malloc_usable_size(pointer));
        return free(pointer), true;
    }
    const Allocation* a = device_memory.find(pointer);
    if (!a) return report("invalid argument", std::string(function) + " of memory that has been released", line);
    if (a->begin != pointer)
        return report("invalid argument", std::string(function) + " at " + place_in_memory(pointer) + ", not at its beginning",
                      line);
    allocated_bytes -= a->bytes;
    return device_memory.release(pointer), true;
}

bool host_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, int kind,
               const char* function, int line) {
    host_waits_for_the_device();
    if (!width || !rows) return true;
    if (!in_bounds(to, (rows - 1) * to_pitch + width, function, line) ||
        !in_bounds(from, (rows - 1) * from_pitch + width, function, line))
        return false;
    if (kind != cudaMemcpyDefault) {
        const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        if (!fits_kind(to, to_device, function, "destination", line)) return false;
        if (!fits_kind(from, from_device, function, "source", line)) return false;
    }
    const bool in_one = to_pitch == width && from_pitch == width;
    for (size_t row = 0; row < (in_one ? 1 : rows); ++row) {
        char* const begin = (char*)to + row * to_pitch;
        const size_t bytes = in_one ? width * rows : width;
        const char* const source = (const char*)from + row * from_pitch;
        const bool given = options.checked() && device_memory.contains(begin) && emulator_first_unwritten(source, bytes) < 0;
        memmove(begin, source, bytes);
        if (given) device_memory.note_written(begin, bytes);
    }
    return true;
}

bool host_fill(void* to, size_t pitch, int value, size_t width, size_t rows, const char* function, int line) {
    host_waits_for_the_device();
    if (!width || !rows) return true;
    if (!in_bounds(to, (rows - 1) * pitch + width, function, line)) return false;
    if (options.program && options.checked() && !device_memory.contains(to))
        return report("invalid argument", std::string(function) + " of host memory", line);
    for (size_t row = 0; row < rows; ++row) memset((char*)to + row * pitch, value, width);
    return true;
}

bool symbol_holds(size_t symbol_bytes, size_t offset, size_t bytes, const char* function, int line) {
    if (offset <= symbol_bytes && bytes <= symbol_bytes - offset) return true;
    return report("global memory out of bounds",
                  std::string(function) + " of " + count_of_bytes(bytes) + " at byte " + std::to_string(offset) +
                      " of a symbol of " + count_of_bytes(symbol_bytes),
                  line);
}

void memory_info(size_t* available, size_t* total) {
    *total = cudaDeviceProp{}.totalGlobalMem;
    *available = *total - std::min(*total, allocated_bytes.load());
}

bool host_register(void* begin, size_t bytes) {
    std::lock_guard<std::mutex> lock(registered_mutex);
    const char* const first = (const char*)begin;
    const auto next = registered.lower_bound(first);
    if (in_registered(first) || (next != registered.end() && next->first < first + bytes)) return false;
    return registered[first] = bytes, true;
}

bool host_unregister(void* begin) {
    std::lock_guard<std::mutex> lock(registered_mutex);
    return registered.erase((const char*)begin);
}

bool is_registered(const void* address) {
    std::lock_guard<std::mutex> lock(registered_mutex);
    return in_registered((const char*)address);
}

int memory_type(const void* pointer) {
    if (!options.checked())  // else nothing is known of it, and all of it may be used
        return is_registered(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    const Allocation* a = device_memory.contains(pointer) ? device_memory.find(pointer) : nullptr;
    if (!a) return is_registered(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    return a->owner == Owner::device     ? cudaMemoryTypeDevice
           : a->owner == Owner::host     ? cudaMemoryTypeHost
           : a->owner == Owner::pageable ? cudaMemoryTypeUnregistered
                                         : cudaMemoryTypeManaged;
}

namespace {

bool is_pageable(const void* address) {
    const Allocation* a = device_memory.contains(address) ? device_memory.find(address) : nullptr;
    return a && a->owner == Owner::pageable;
}

// Is it memory of this process that is none of the device's? An address that is merely wrong is in no memory.
bool is_host_memory(const void* pointer) {
    if (device_memory.contains(pointer) || uintptr_t(pointer) < 4096) return false;
    char byte;
    const iovec here{&byte, 1}, there{(void*)pointer, 1};
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1;
}

bool is_in_the_same_tensor(const void* pointer, const void* address) {
    return is_pageable(pointer) && device_memory.find(pointer) == device_memory.find(address);
}

bool is_host_memory_before(const void* pointer, const void* address) {
    constexpr size_t FAR = 1 << 30;
    return size_t((const char*)address - (const char*)pointer) < FAR && is_host_memory(pointer) && is_host_memory(address);
}

}  // namespace

void stop_at_host_memory(const void* address) {
    const Launch& launch = *worker->launch;
    const bool is_tensor = is_pageable(address);
    const auto points = is_tensor ? is_in_the_same_tensor : is_host_memory_before;
    const int argument = launch.config.argument_that ? launch.config.argument_that(launch.arguments, points, address) : -1;
    if (argument < 0 && !is_tensor) return;
    Finding finding = worker->describe(
        "host memory",
        (argument < 0 ? "what is at " + place_in_memory(address) : "argument " + std::to_string(argument + 1)) +
            (is_tensor ? " is a CPU tensor" : " is memory of the host (malloc's, a vector's, NumPy's)") +
            ", and a kernel gets its pointer",
        {launch.config.line ? launch.config.line : launch.line, nullptr});
    finding.argument = argument + 1;
    worker->stop(finding);
}

void examine_host(const void* address, unsigned bytes, Access access, const void* instruction) {
    if (!device_memory.contains(address)) return;
    const Allocation* a = device_memory.find(address);
    if (a && a->owner != Owner::device && (const char*)address + bytes <= a->begin + a->bytes) return;
    Finding finding;
    finding.kind = a && a->owner == Owner::device ? "device memory used by host code" : "global memory out of bounds";
    finding.message = std::string("host code ") + (access == Access::write ? "writes " : "reads ") + place_in_memory(address) +
                      (a && a->owner == Owner::device ? "; cudaMemcpy is the way to it" : "");
    finding.party.place = {0, instruction};
    deliver(finding);
}

}  // namespace emulator

extern "C" {
// Of a tensor in check mode: 1 is one of the CPU's, 0 the device's; -1: no tensor's memory in check mode.
int emulator_is_pageable(const void* pointer) {
    using namespace emulator;
    const Allocation* a = device_memory.base() && device_memory.contains(pointer) ? device_memory.find(pointer) : nullptr;
    return a ? a->owner == Owner::pageable : -1;
}
void emulator_set_pageable(const void* pointer, int on) {
    using namespace emulator;
    Allocation* a = device_memory.base() && device_memory.contains(pointer) ? device_memory.find(pointer) : nullptr;
    if (a) a->owner = on ? Owner::pageable : Owner::device;
}
void emulator_refuse_pageable(int on) { emulator::options.refuses_pageable = on; }
}
