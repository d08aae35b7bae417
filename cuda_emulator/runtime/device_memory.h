// Device memory in check mode: one reserved range of addresses, in which every allocation keeps a distance to the next, is
// filled with a value that stands for "never written", and has shadow memory at a fixed place.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <string>

#include "emulator/runtime_api.h"

namespace emulator {

// A NaN as half, bfloat16, float and double, and -655371 as an integer.
constexpr uint32_t POISON = 0xfff5fff5u;

constexpr size_t DEVICE_PAGE = 4096;  // an allocation has its pages to itself

// What is known of one word (4 bytes) of memory: who wrote it and who read it last, and by which instructions.
struct Cell {
    uint32_t writer;  // Segment and flags; 0: nobody
    uint32_t writer_instruction;
    uint32_t reader;
    uint32_t reader_instruction;
};

struct Allocation {
    char* begin = nullptr;
    size_t bytes = 0;
    bool has_split_cells = false;
    const char* name = nullptr;  // of a __device__ variable
    Shape shape{};               // of that
    Owner owner = Owner::device;
};

class DeviceMemory {
 public:
    void* allocate(size_t bytes);
    void release(void* pointer);
    bool contains(const void* address) const { return size_t((const char*)address - base_) < size_; }
    // Does an allocation own the page, so that its cells can be looked at?
    bool holds_page(uintptr_t address) const {
        const size_t offset = address - uintptr_t(base_);
        return offset < size_ && page_owner_[offset / DEVICE_PAGE];
    }
    // The allocation that holds the byte at `address`, or the nearest one, or nullptr.
    Allocation* find(const void* address);
    Allocation* nearest(const void* address);
    Cell* cell(const void* address) const { return cells_ + (size_t((const char*)address - base_) >> 2); }
    // The host has written it: a word that has the value of POISON is marked, so that it does not pass for an unwritten one.
    void note_written(const void* begin, size_t bytes);
    void for_each(void (*visit)(const Allocation&)) const;
    char* base() const { return base_; }
    size_t size() const { return size_; }

 private:
    void reserve();
    char* place(size_t span);

    char* base_ = nullptr;
    size_t size_ = 0, next_ = 0;
    Cell* cells_ = nullptr;
    uint32_t* page_owner_ = nullptr;  // by page: 1 + index of the allocation
};

extern DeviceMemory device_memory;

// "byte 4096 of a tensor of 8192 bytes"; in a plain CUDA program it is an allocation.
std::string place_in_memory(const void* address);

// Does an allocation hold all the bytes that host code is about to touch, or is it none of device memory? Reports where not.
bool in_bounds(const void* begin, size_t bytes, const char* function, int line);
// Has something written all the words that host code is about to compute with? Reports where not.
bool written(const void* begin, size_t bytes, const char* function, int line);

// Ends the launch where a kernel touches memory of the host that one of its arguments points to; else returns.
void stop_at_host_memory(const void* address);

// Is it host memory that cudaHostRegister has pinned?
bool is_registered(const void* address);

// Called before an allocation's shadow disappears.
void forget_split_cells(const Allocation& allocation);

}  // namespace emulator

// The offset of the first word of [begin, begin + bytes) that nothing has written, or -1.
extern "C" long long emulator_first_unwritten(const char* begin, long long bytes);
