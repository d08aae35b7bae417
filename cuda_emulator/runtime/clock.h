// Who is ordered before whom: the happens-before relation of one launch.
//
// What a thread does between two of its synchronisations is one segment. A segment's number is 32 * chunk + lane, where a
// chunk stands for lanes of a warp between two of their synchronisations, so that a barrier of the block makes one entry a
// warp. Numbers grow, which makes the frequent question cheap: what has a smaller number than the first segment after the last
// barrier of the block, and belongs to the block, is ordered before whatever runs now. For all else each warp counts its
// synchronisations (ticks), and each thread keeps, for each other thread, the tick before which all is ordered before it.
#pragma once
#include <stdint.h>

#include <array>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "scheduler.h"

namespace emulator {

using Segment = uint32_t;
constexpr Segment SEGMENT_LIMIT = 1u << 30;  // two bits are left for the flags of a memory cell

struct Chunk {
    uint32_t block;  // serial number over all launches
    uint32_t warp;
    uint32_t tick;  // of the warp
};

// What other blocks may count on once they have seen a value that was written behind a fence.
struct Published {
    uint32_t block, warp;
    Segment barrier;                 // everything of the block before it
    std::array<uint32_t, 32> ticks;  // by lane: everything that it did before that tick of the warp
    void merge(const Published& other);
};
using PublishedByWarp = std::unordered_map<uint64_t, Published>;  // by block and warp
// Whoever has seen a variable keeps what was published with it then: it is copied before it changes.
using PublishedByVariable = std::unordered_map<uintptr_t, std::shared_ptr<PublishedByWarp>>;
struct Seen {
    std::shared_ptr<const PublishedByWarp> by_all, by_block;
    uint64_t when = 0;
};

// Where a thread stands with what it has written to device memory since the block's last barrier.
enum class Fence : uint8_t { none_needed, missing, passed };

struct BlockClock {
    using Ticks = std::vector<uint32_t>;  // by thread; 0: nothing

    uint32_t serial = 0;
    Segment first = 0;                            // the first segment of the block
    Segment barrier = 0;                          // the first segment after the block's last barrier
    std::vector<uint32_t> ticks;                  // of each warp
    Ticks own;                                    // what is ordered before a thread of the 32 lanes of its warp
    Ticks others;                                 // the same of all threads but those of its warp; empty until it is needed
    std::unordered_map<uint32_t, Ticks> brought;  // to a barrier of some threads, by those who have arrived
    std::unordered_map<uint32_t, Ticks> ended;    // of a barrier in shared memory: the same at the end of its last phase
    std::vector<Fence> fences;                    // by thread: its next atomic or volatile write publishes if it has passed one
    std::vector<uint8_t> fenced_for_block;        // by thread: the same of a fence for the block's own threads
    PublishedByVariable variables;                // written behind such a fence
    // By who has seen it, a thread, a warp or the block, and variable: what a fence will order before them.
    std::map<std::pair<int, uintptr_t>, Seen> seen;
    std::unordered_map<uint32_t, PublishedByWarp> from_outside;  // brought to a barrier by other blocks of the cluster
    PublishedByWarp acquired;                                    // from other blocks
    std::unordered_map<uint32_t, Segment> acquired_barriers;     // of them, by block
    // Proxy fences, which let asynchronous instructions see ordinary writes: a write is behind one if its own thread has
    // passed one since, or some thread that knew of the write has.
    std::vector<Segment> own_fence;  // by thread: its first segment after its last fence
    Segment fenced_barrier = 0;      // what lies before this barrier of the block is behind a fence
    Ticks fenced_ticks;

    size_t threads() const { return fences.size(); }
    uint32_t* others_of(int thread) { return others.data() + thread * threads(); }
    bool knows(int thread, int other, uint32_t tick) const {
        return !others.empty() && tick < others[thread * threads() + other];
    }
};

class Clock {
 public:
    Segment launch_first = 1;  // everything before it belongs to an earlier launch, or lies before a barrier of the grid

    void begin_launch();
    void begin_block(Block& block);
    void block_synchronised(Block& block);
    void blocks_synchronised(const std::vector<Block*>& blocks);  // of a cluster or a grid; null for those that are not there
    void cluster_begins(const std::vector<Block*>& blocks);
    void lanes_synchronised(Block& block, int warp, unsigned mask);
    void arrive(Block& block, uint32_t barrier, Thread& thread);
    void arrive_from_outside(Block& home, uint32_t barrier, Thread& thread);
    void leave(Block& block, uint32_t barrier, Thread& thread);
    void phase_ends(Block& block, uint32_t barrier);  // for those who leave from now on
    void proxy_fence(Thread& thread);
    bool behind_proxy_fence(Segment segment, const BlockClock& clock) const;
    void release(Thread& thread, uintptr_t variable);  // a write that others may wait for
    // An atomic or volatile access is relaxed: what it has seen is ordered before what follows the thread's next fence, or that
    // of a thread with which it has met at a barrier since.
    void see(Thread& thread, uintptr_t variable);
    void fence(Thread& thread, bool for_block);
    // Would a fence have ordered `segment` before what the block does now?
    bool is_seen_without_a_fence(Segment segment, const BlockClock& clock) const;

    const Chunk& chunk(Segment segment) const { return chunks_[segment >> 5]; }
    // Is everything in `segment` ordered before what `thread` does now? A thread's own past counts only if `strict` is false.
    bool ordered(Segment segment, const Thread& thread, const BlockClock& clock, bool strict) const;
    uint3 block_index(uint32_t serial) const { return blocks_[serial - first_block_]; }
    // Numbers are running out: a launch has to end, and the next one may begin them anew.
    bool exhausted() const { return next_ + (1u << 20) >= SEGMENT_LIMIT >> 5; }
    bool half_exhausted() const { return next_ >= SEGMENT_LIMIT >> 6; }
    void begin_anew() { next_ = 2, ++era; }
    uint32_t era = 0;  // segments of different eras cannot be compared

 private:
    uint32_t new_chunk(uint32_t block, uint32_t warp, uint32_t tick);
    void share_seen(BlockClock& clock, int first_thread, int last_thread, int as);
    void acquire(const PublishedByWarp& published, Thread& thread, bool for_block);
    void advance(Block& block, int warp, unsigned mask);
    template <class Visit>
    void for_each_published(const Thread& thread, Visit visit) const;

    Chunk* chunks_ = nullptr;
    uint32_t next_ = 1, serial_ = 0, first_block_ = 0;
    std::vector<uint3> blocks_;
    uint64_t times_seen_ = 0;
    PublishedByVariable variables_;
};

extern Clock launch_clock;
BlockClock& clock_of(Block& block);

}  // namespace emulator
