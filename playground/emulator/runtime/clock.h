// Who is ordered before whom: the happens-before relation of one launch.
//
// What a thread does between two of its synchronisations is one segment. A segment's number is 32 * chunk + lane, where a
// chunk stands for a warp between two of its synchronisations, so that a barrier of the block makes one entry a warp.
// Numbers grow, which makes the frequent question cheap: what has a smaller number than the first segment after the last
// barrier of the block, and belongs to the block, is ordered before whatever runs now.
#pragma once
#include <stdint.h>

#include <unordered_map>
#include <vector>

#include "scheduler.h"

namespace emulator {

using Segment = uint32_t;
constexpr Segment SEGMENT_LIMIT = 1u << 30;  // two bits are left for the flags of a memory cell

struct Chunk {
    uint32_t block;  // serial number over all launches
    uint32_t warp;
    uint32_t tick;  // counts the synchronisations of the warp
};

// What another thread may count on once it has seen a value that was written behind a fence.
struct Published {
    uint32_t block, warp;
    Segment barrier;  // everything of the block before it
    uint32_t tick;    // everything of the warp before it
};

struct BlockClock {
    uint32_t serial = 0;
    Segment first = 0;             // the first segment of the block
    Segment barrier = 0;           // the first segment after the block's last barrier
    std::vector<uint32_t> ticks;   // of each warp
    std::vector<uint32_t> own;     // by thread: what its own warp did before this tick is ordered before it
    std::vector<uint32_t> others;  // by thread and warp, the same of other warps; empty until it is needed
    std::unordered_map<uint32_t, std::vector<uint32_t>> brought;  // to a barrier: by warp, the tick before which all is known
    std::vector<uint8_t> fenced;                                  // by thread: has passed a fence in this segment
    std::unordered_map<uint64_t, Published> acquired;             // by block and warp, from other blocks

    bool knows(int thread, uint32_t warp, uint32_t tick) const {
        return !others.empty() && tick < others[thread * ticks.size() + warp];
    }
};

class Clock {
 public:
    Segment launch_first = 1;  // everything before it belongs to an earlier launch, or lies before a barrier of the grid

    void begin_launch();
    void grid_synchronised() { launch_first = next_ << 5; }
    void begin_block(Block& block);
    void block_synchronised(Block& block);
    void lanes_synchronised(Block& block, int warp, unsigned mask);
    void arrive(Block& block, uint32_t barrier, Thread& thread);
    void leave(Block& block, uint32_t barrier, Thread& thread);
    void release(Thread& thread, uintptr_t variable);  // a write that others may wait for
    void acquire(Thread& thread, uintptr_t variable);

    const Chunk& chunk(Segment segment) const { return chunks_[segment >> 5]; }
    // Is everything in `segment` ordered before what `thread` does now? A thread's own past counts only if `strict` is false.
    bool ordered(Segment segment, const Thread& thread, const BlockClock& clock, bool strict) const;
    uint3 block_index(uint32_t serial) const { return blocks_[serial - first_block_]; }
    bool exhausted() const { return next_ + 64 >= SEGMENT_LIMIT >> 5; }

 private:
    uint32_t new_chunk(uint32_t block, uint32_t warp, uint32_t tick);
    void advance(Block& block, int warp, unsigned mask);

    Chunk* chunks_ = nullptr;
    uint32_t next_ = 1, serial_ = 0, first_block_ = 0;
    std::vector<uint3> blocks_;
    std::unordered_map<uintptr_t, std::vector<Published>> variables_;
};

extern Clock launch_clock;
BlockClock& clock_of(Block& block);

}  // namespace emulator
