// Blocks that may wait for one another: the clusters of a launch, and the whole grid of a cooperative one. All blocks of a
// group run on one worker.
#pragma once
#include <stdint.h>

#include <memory>
#include <utility>
#include <vector>

namespace emulator {

struct Block;
struct Thread;

struct BlockGroup : std::enable_shared_from_this<BlockGroup> {
    std::vector<Block*> blocks;  // by rank; null: ended, or (in a grid) not begun
    int alive = 0;               // threads that have not ended
    int arrived = 0;             // at the group's barrier
    uint32_t phase = 0;          // of the barrier
    std::vector<std::pair<Block*, int>> waiting;
};

struct Membership {  // of a block
    std::shared_ptr<BlockGroup> cluster, grid;
    unsigned rank = 0;  // in the cluster
};

void group_thread_ends(Thread& thread);

// Addresses of the shared memory of a cluster's block hold its rank above those of the block's own window.
constexpr unsigned RANK_SHIFT = 24;

// The block that such an address belongs to (the calling thread's for one without a rank), and the offset in its window.
Block& home_of(uint32_t& address);

}  // namespace emulator
