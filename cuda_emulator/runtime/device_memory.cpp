#include "device_memory.h"

#include "emulator/runtime_api.h"
#include "scheduler.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace emulator {

DeviceMemory device_memory;

namespace {
constexpr size_t PAGE = DEVICE_PAGE;
constexpr size_t GAP = 1 << 20;  // an index that is off by a row or by an image still hits nothing

std::recursive_mutex mutex;
std::deque<Allocation> allocations;  // stable addresses
std::vector<uint32_t> unused;
std::map<char*, uint32_t> live;
size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void* reserve_addresses(size_t bytes, int protection) {
    void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

constexpr size_t LARGE = 64 << 20, POISONED = 16 << 20;

// Lets memory show what was never written without touching it: pages of a file that holds nothing else, copied when written.
bool map_poison(char* begin, size_t bytes) {
    static const int file = [] {
        const int made = memfd_create("poison", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, POISONED)) return -1;
        auto* words = (uint32_t*)mmap(nullptr, POISONED, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
        if (words == MAP_FAILED) return -1;
        for (size_t word = 0; word < POISONED / 4; ++word) words[word] = POISON;
        munmap(words, POISONED);
        return made;
    }();
    if (file < 0) return false;
    for (size_t at = 0; at < bytes; at += POISONED)
        if (mmap(begin + at, std::min(POISONED, bytes - at), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
                 file, 0) == MAP_FAILED)
            return false;
    return true;
}
}  // namespace

void DeviceMemory::reserve() {
    for (size_t size = (size_t)1 << 40; size >= (size_t)1 << 32; size >>= 2) {
        char* base = (char*)reserve_addresses(size, PROT_NONE);
        Cell* cells = (Cell*)reserve_addresses(size / 4 * sizeof(Cell), PROT_NONE);
        uint32_t* owner = (uint32_t*)reserve_addresses(size / PAGE * 4, PROT_READ | PROT_WRITE);
        if (base && cells && owner) {
            base_ = base, cells_ = cells, page_owner_ = owner, size_ = size;
            return;
        }
        if (base) munmap(base, size);
        if (cells) munmap(cells, size / 4 * sizeof(Cell));
        if (owner) munmap(owner, size / PAGE * 4);
    }
    throw std::bad_alloc();
}

// Addresses are used again only when all have been used, so that a use after a release is noticed.
char* DeviceMemory::place(size_t span) {
    for (int round = 0; round < 2; ++round) {
        while (next_ + span <= size_) {
            char* begin = base_ + next_;
            auto after = live.lower_bound(begin);
            if (after != live.begin()) {
                const Allocation& before = allocations[std::prev(after)->second];
                char* end = before.begin + pages(before.bytes) + GAP;
                if (end > begin) {
                    next_ = end - base_;
                    continue;
                }
            }
            if (after == live.end() || begin + span <= after->first) {
                next_ += span;
                return begin;
            }
            const Allocation& blocking = allocations[after->second];
            next_ = blocking.begin + pages(blocking.bytes) + GAP - base_;
        }
        next_ = 0;
    }
    throw std::bad_alloc();
}

void* DeviceMemory::allocate(size_t bytes) {
    if (!bytes) return nullptr;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!base_) reserve();
    const size_t span = pages(bytes);
    char* begin = place(span + GAP);
    if (mprotect(begin, span, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    if (mprotect(cell(begin), span / 4 * sizeof(Cell), PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    uint32_t index;
    if (unused.empty()) {
        index = (uint32_t)allocations.size();
        allocations.emplace_back();
    } else {
        index = unused.back();
        unused.pop_back();
    }
    allocations[index] = {begin, bytes};
    live[begin] = index;
    for (size_t page = 0; page < span / PAGE; ++page) page_owner_[(begin - base_) / PAGE + page] = index + 1;
    if (!options.extents && !(span >= LARGE && map_poison(begin, span)))  // else what nobody touches takes no memory
        for (size_t word = 0; word < span / 4; ++word) ((uint32_t*)begin)[word] = POISON;
    return begin;
}

void DeviceMemory::release(void* pointer) {
    if (!pointer) return;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    const auto found = live.find((char*)pointer);
    if (found == live.end()) return;
    Allocation& a = allocations[found->second];
    if (a.has_split_cells) forget_split_cells(a);
    const size_t span = pages(a.bytes);
    mmap(a.begin, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    madvise(cell(a.begin), span / 4 * sizeof(Cell), MADV_DONTNEED);
    mprotect(cell(a.begin), span / 4 * sizeof(Cell), PROT_NONE);
    memset(page_owner_ + (a.begin - base_) / PAGE, 0, span / PAGE * 4);
    unused.push_back(found->second);
    a = Allocation();
    live.erase(found);
}

Allocation* DeviceMemory::find(const void* address) {
    const uint32_t owner = page_owner_[size_t((const char*)address - base_) / PAGE];
    return owner ? &allocations[owner - 1] : nullptr;
}

Allocation* DeviceMemory::nearest(const void* address) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto after = live.upper_bound((char*)address);
    Allocation* above = after == live.end() ? nullptr : &allocations[after->second];
    Allocation* below = after == live.begin() ? nullptr : &allocations[std::prev(after)->second];
    if (!above || !below) return above ? above : below;
    return above->begin - (char*)address < (char*)address - (below->begin + below->bytes) ? above : below;
}

void DeviceMemory::note_written(const void* begin, size_t bytes) {
    const uintptr_t end = (uintptr_t(begin) + bytes) & ~uintptr_t(3);
    for (uintptr_t word = (uintptr_t(begin) + 3) & ~uintptr_t(3); word < end; word += 4)
        if (*(const uint32_t*)word == POISON && !cell((void*)word)->writer) cell((void*)word)->writer = 1;  // before any launch
}

void DeviceMemory::for_each(void (*visit)(const Allocation&)) const {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (const auto& entry : live) visit(allocations[entry.second]);
}

std::string place_in_memory(const void* address) {
    const std::string noun = options.program ? "allocation" : "tensor";
    const Allocation* a = device_memory.base() ? device_memory.nearest(address) : nullptr;
    if (!a) return "an address that is in no " + noun;
    constexpr long long NEAR = 1 << 20;
    const bool near = (const char*)address >= a->begin - NEAR && (const char*)address < a->begin + a->bytes + NEAR;
    if (!device_memory.contains(address) && !near) return "an address far from every " + noun;
    const long long at = (const char*)address - a->begin;
    const std::string place =
        at < 0 ? std::to_string(-at) + (at == -1 ? " byte before " : " bytes before ") : "byte " + std::to_string(at) + " of ";
    const std::string size = std::to_string(a->bytes) + (a->bytes == 1 ? " byte" : " bytes");
    return place + (a->name ? "`" + std::string(a->name) + "` (" + size + ")"
                            : std::string(options.program ? "an " : "a ") + noun + " of " + size);
}

void* device_variable(const void* initial, size_t bytes, const char* name, bool managed, Shape shape) {
    void* memory = device_allocate(bytes ? bytes : 1, managed ? Owner::managed : Owner::device);
    if (options.checked()) device_memory.find(memory)->name = name, device_memory.find(memory)->shape = shape;
    memcpy(memory, initial, bytes);
    if (options.checked()) device_memory.note_written(memory, bytes);
    return memory;
}

}  // namespace emulator

extern "C" {
void* emulator_guarded_allocate(size_t bytes) { return emulator::device_memory.allocate(bytes); }
void emulator_guarded_release(void* pointer) { emulator::device_memory.release(pointer); }
}
