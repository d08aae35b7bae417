// Atomic and volatile accesses, fences, and the accesses of the device API.
#include <string.h>

#include <algorithm>

#include "accepted_races.h"
#include "counters.h"
#include "shadow_state.h"

namespace emulator {

// An atomic access of the block's scope.
struct OfBlock {
    Volatile::By by;
    bool only_reads;
};
static std::unordered_map<uintptr_t, OfBlock> block_scoped;  // by address: the launch's last, or last that writes

void begin_launch_scopes() { block_scoped.clear(); }

namespace {

// The same value seen twice in a row at one address: the thread may be waiting for another one.
void notice_spinning(Thread& t, const void* address, unsigned bytes) {
    uint64_t value = 0;
    memcpy(&value, address, bytes < 8 ? bytes : 8);
    const bool same = t.watched == address && t.watched_value == value;
    t.watched = address;
    t.watched_value = value;
    if (same) worker->pause();
}

Site site_of(Thread& t, const void* address, unsigned bytes, Access access, const void* instruction) {
    const bool shared = uintptr_t(address) - uintptr_t(t.owner->arena) < ARENA_BYTES;
    return {t, *t.owner->shadow, access, shared, uintptr_t(address), bytes, instruction};
}

// Does an access that is atomic to its own block only meet one of another block?
void examine_scope(Thread& t, const void* address, unsigned bytes, Access access, bool of_block, const void* instruction) {
    if (!device_memory.contains(address) || !device_memory.holds_page(uintptr_t(address))) return;
    const Site s = site_of(t, address, bytes, access, instruction);
    const auto check = [&](Segment other, uint32_t at, const char* did) {
        if (other < launch_clock.launch_first || launch_clock.chunk(other).block == s.shadow.clock.serial) return;
        if (launch_clock.ordered(other, t, s.shadow.clock, false)) return;
        Finding f =
            finding(s, "race between blocks", "one of the two has the block's scope and is atomic to its own block only");
        f.other = party_of(other, at, s, did);
        worker->stop(f);
    };
    const bool only_reads = access == Access::strong_read;
    const auto known = block_scoped.find(s.address);
    if (known != block_scoped.end() && !(only_reads && known->second.only_reads))
        check(known->second.by.segment, uint32_t(uintptr_t(known->second.by.instruction)),
              known->second.only_reads ? "read" : "wrote");
    if (!of_block) return;
    const Cell& c = *device_memory.cell(address);
    if (c.writer & ATOMIC && !(c.writer & SPLIT)) check(c.writer & SEGMENT_BITS, c.writer_instruction, "wrote");
    if (!only_reads || known == block_scoped.end()) block_scoped[s.address] = {{t.segment, instruction}, only_reads};
}

void report_warp_race(const Site& s, const Volatile::By& other, const char* did) {
    if (is_waiting(s.instruction) || is_waiting(other.instruction) || is_accepted_race(s.instruction, other.instruction))
        return;
    Finding f =
        finding(s, s.shared ? "shared memory race" : "global memory race",
                "no __syncwarp() between them (volatile orders nothing, and since Volta the threads of a warp need not go in "
                "step)");
    f.other = party_of(other.segment, uint32_t(uintptr_t(other.instruction)), s, did);
    worker->stop(f);
}

// Lanes of one warp that exchange values through volatile memory, as before Volta. To wait for a flag is something else.
void examine_in_warp(Thread& t, const void* address, unsigned bytes, Access access, const void* instruction) {
    BlockShadow& shadow = *t.owner->shadow;
    const Site s = site_of(t, address, bytes, access, instruction);
    const unsigned step = bytes < 4 ? 1 : 4;
    for (unsigned at = 0; at < bytes; at += step) {
        Volatile& known = shadow.volatiles[(s.address + at) << 6 | unsigned(t.warp)];
        const auto counts = [&](const Volatile::By& other) {
            return other.segment && int(other.segment & 31) != t.lane &&
                   !launch_clock.ordered(other.segment, t, shadow.clock, false);
        };
        if (access == Access::strong_read) {
            if (counts(known.writer)) report_warp_race(s, known.writer, "wrote");
            for (Volatile::By& reader : known.readers)
                if ((reader.segment & 31) == (t.segment & 31)) {
                    reader = {t.segment, instruction};
                    return;
                }
            known.readers.push_back({t.segment, instruction});
        } else {
            for (const Volatile::By& reader : known.readers)
                if (counts(reader)) report_warp_race(s, reader, "read");
            known.readers.clear();
            known.writer = {t.segment, instruction};
        }
    }
}

}  // namespace

void strong_access(const void* address, unsigned bytes, Access access, const void* instruction, bool of_block) {
    if (!current) return;
    Thread& t = *static_cast<Thread*>(current);
    if (t.fiber->owns(address)) return;  // a volatile variable of the thread's own
    t.watches_from = instruction;
    if (of_block || !block_scoped.empty()) examine_scope(t, address, bytes, access, of_block, instruction);
    if (access == Access::strong_read) notice_spinning(t, address, bytes);
    if (access != Access::strong_write) launch_clock.see(t, uintptr_t(address));
    examine(address, bytes, access, bytes, instruction);
    if (access != Access::strong_read) launch_clock.release(t, uintptr_t(address));
}

void volatile_access(const void* address, unsigned bytes, Access access, const void* instruction) {
    if (current) {
        Thread& t = *static_cast<Thread*>(current);
        const bool is_known = uintptr_t(address) - uintptr_t(t.owner->arena) < ARENA_BYTES ||
                              (device_memory.contains(address) && device_memory.holds_page(uintptr_t(address)));
        if (is_known) examine_in_warp(t, address, bytes, access, instruction);
    }
    strong_access(address, bytes, access, instruction);
}

static void examine_atomic(void* address, unsigned bytes, bool of_block, const void* instruction,
                           Access access = Access::atomic) {
    strong_access(address, bytes, access, instruction, of_block);
    if (options.mode == Mode::count) count_atomic();
}

void note_compare(void* address, unsigned bytes, bool of_block) {
    if (!options.checked()) return;
    Thread* t = static_cast<Thread*>(current);
    if (t) t->compares = true;
    examine_atomic(address, bytes, of_block, __builtin_return_address(0));
    if (t) t->compares = false;
}
void note_atomic(void* address, unsigned bytes, bool of_block) {
    if (options.checked()) examine_atomic(address, bytes, of_block, __builtin_return_address(0));
}
void note_read(const void* address, unsigned bytes) {
    if (options.checked()) examine(address, bytes, Access::read, bytes, __builtin_return_address(0));
}
void note_write(void* address, unsigned bytes) {
    if (options.checked()) examine(address, bytes, Access::write, bytes, __builtin_return_address(0));
}

// A range of any size and alignment.
static void examine_bytes(const void* address, size_t bytes, Access access, const void* instruction) {
    if (!options.checked()) return;
    const size_t MOST = options.mode == Mode::count ? 16 : 1u << 30;  // one load or store of a thread
    for (size_t at = 0; at < bytes; at += MOST)
        examine((const char*)address + at, unsigned(std::min(bytes - at, MOST)), access, 1, instruction);
}

void* copy_memory(void* to, const void* from, size_t bytes) {
    examine_bytes(from, bytes, Access::read, __builtin_return_address(0));
    examine_bytes(to, bytes, Access::write, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
void* fill_memory(void* to, int value, size_t bytes) {
    examine_bytes(to, bytes, Access::write, __builtin_return_address(0));
    return memset(to, value, bytes);
}

void note_strong_read(const void* address, unsigned bytes, bool of_block) {
    if (options.checked())
        strong_access(address, bytes, Access::strong_read, __builtin_return_address(0), of_block);
    else if (current)
        may_be_waiting(address);
}
void note_strong_write(void* address, unsigned bytes, bool of_block) {
    if (options.checked()) strong_access(address, bytes, Access::strong_write, __builtin_return_address(0), of_block);
}
void note_atomic_store(void* address, unsigned bytes, bool of_block) {
    if (options.checked()) examine_atomic(address, bytes, of_block, __builtin_return_address(0), Access::strong_write);
}

void block_fence() {
    if (!options.checked() || !current) return;
    Thread& t = *static_cast<Thread*>(current);
    t.owner->shadow->clock.fenced_for_block[t.linear] = 1;
    launch_clock.fence(t, true);
}

void device_fence() {
    if (options.checked() && current) {
        Thread& t = *static_cast<Thread*>(current);
        t.owner->shadow->clock.fences[t.linear] = Fence::passed;
        launch_clock.fence(t, false);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace emulator

extern "C" long long emulator_first_unwritten(const char* begin, long long bytes) {
    using namespace emulator;
    if (!bytes || options.extents || !device_memory.contains(begin)) return -1;
    for (long long at = 0; at + 4 <= bytes; at += 4) {
        uint32_t word;
        memcpy(&word, begin + at, 4);
        if (word == POISON && (uintptr_t(begin + at) & 3) == 0 && !device_memory.cell(begin + at)->writer) return at;
    }
    return -1;
}

extern "C" long long emulator_count_unwritten(const char* begin, long long bytes) {  // in words
    long long count = 0;
    for (long long at; (at = emulator_first_unwritten(begin, bytes)) >= 0; count++) begin += at + 4, bytes -= at + 4;
    return count;
}
