#include "async_reads.h"

#include <sys/mman.h>

#include <new>

namespace emulator {

constexpr size_t WORDS = ARENA_BYTES / 4;
constexpr Segment NOT_YET = ~0u;

AsyncReads::~AsyncReads() {
    if (words_) munmap(words_, WORDS * sizeof *words_);
}

void AsyncReads::begin_block() {
    first_ = next_;
    readers_.clear();
    waits_.clear();
}

uint32_t AsyncReads::begin(AsyncReader reader) {
    if (!words_) {
        void* memory =
            mmap(nullptr, WORDS * sizeof *words_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        words_ = static_cast<uint32_t (*)[COLUMNS]>(memory);
    }
    reader.to_wait = reader.product ? WARPGROUP : 1;
    reader.waits = waits_.size();
    waits_.resize(reader.waits + reader.to_wait, NOT_YET);
    readers_.push_back(reader);
    return next_++;
}

void AsyncReads::covers(uint32_t reader, size_t word) {
    const AsyncReader& r = readers_[reader - first_];
    words_[word][r.product ? r.thread / WARPGROUP % STORES : STORES] = reader;
}

void AsyncReads::done(uint32_t reader, int thread, Segment segment) {
    if (!current(reader)) return;
    AsyncReader& r = readers_[reader - first_];
    Segment& wait = waits_[r.waits + (thread - r.thread)];
    if (wait != NOT_YET) return;
    wait = segment;
    --r.to_wait;
    r.pending &= ~(1u << (thread - r.thread) / 32);
}

// Is what the writer does ordered behind the wait of one of the warp's threads? They wait together, so any of them will do.
bool AsyncReads::behind_the_wait(const AsyncReader& r, int warp, const Thread& writer, const BlockClock& clock) const {
    const int first = 32 * warp, last = r.product ? first + 32 : 1;
    for (int thread = first; thread < last; ++thread) {
        const Segment wait = waits_[r.waits + thread];
        if (wait != NOT_YET && launch_clock.ordered(wait, writer, clock, false)) return true;
    }
    return false;
}

AsyncConflict AsyncReads::conflict(size_t word, const Thread& writer, const BlockClock& clock) const {
    for (int column = 0; column < COLUMNS; ++column) {
        const uint32_t number = words_[word][column];
        if (!current(number)) continue;
        const AsyncReader& r = readers_[number - first_];
        const int warps = r.product ? 4 : 1;
        for (int warp = 0; warp < warps; ++warp) {
            const int thread = r.thread + 32 * warp;
            if (r.pending >> warp & 1) return {&r, thread, true};
            if (r.product && writer.warp == r.thread / 32 + warp) continue;  // each of its threads has waited itself
            if (!behind_the_wait(r, warp, writer, clock)) return {&r, thread, false};
        }
    }
    return {};
}

}  // namespace emulator
