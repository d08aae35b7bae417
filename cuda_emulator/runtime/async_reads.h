// Shared memory that asynchronous instructions read: a bulk store until its thread has waited for the group's reads, a
// warpgroup's matrix product until its warps have. Who writes there has to be ordered behind that wait.
#pragma once
#include <stdint.h>

#include <vector>

#include "clock.h"
#include "scheduler.h"

namespace emulator {

struct AsyncReader {
    bool product;             // of matrices by a warpgroup; else a store by a thread
    int thread;               // which began it, or the warpgroup's first
    uint8_t pending;          // a bit for each warp that has not waited; 1 for a store
    const void* instruction;  // which began it
    int to_wait = 0;          // threads that have not waited
    size_t waits = 0;         // where the segments of its threads' waits begin
};

// Why a thread may not write now.
struct AsyncConflict {
    const AsyncReader* reader = nullptr;
    int thread = 0;  // of the block: who has yet to wait, or has waited with nothing to order the write behind it
    bool pending = false;
};

class AsyncReads {
 public:
    ~AsyncReads();
    void begin_block();
    bool any() const { return next_ > first_; }
    uint32_t begin(AsyncReader reader);
    void covers(uint32_t reader, size_t word);
    // The thread (of a warpgroup's; 0 for a store) has waited in `segment`.
    void done(uint32_t reader, int thread, Segment segment);
    bool awaited_by_all(uint32_t reader) const { return !current(reader) || !readers_[reader - first_].to_wait; }
    AsyncConflict conflict(size_t word, const Thread& writer, const BlockClock& clock) const;

 private:
    // A word remembers the last product of each of four warpgroups, and the last store.
    static constexpr int STORES = 4, COLUMNS = 5;
    bool behind_the_wait(const AsyncReader& reader, int warp, const Thread& writer, const BlockClock& clock) const;
    bool current(uint32_t reader) const { return reader >= first_ && reader < next_; }

    uint32_t (*words_)[COLUMNS] = nullptr;
    std::vector<AsyncReader> readers_;
    std::vector<Segment> waits_;     // NOT_YET where a thread has not waited
    uint32_t first_ = 1, next_ = 1;  // numbers of the readers of this block's run
};

AsyncReads& async_reads_of(Block& block);

}  // namespace emulator
