// What check mode is told by the scheduler. Its state and its rules are in the files named below.
#pragma once
#include "scheduler.h"

namespace emulator {

Finding* launch_finding();  // of the launch under way
// The first read of memory that nothing has written, which is kept back in one of the blocks; null where there is none.
const Finding* uninitialised_in(const std::vector<Block*>& blocks);

void begin_launch_shadow(Launch& launch);
void end_launch_shadow(Launch& launch);
void begin_block_shadow(Block& block);
void end_block_shadow(Block& block);
void free_shadow(Block& block);
void shared_variable_appears(const Worker::Extent& extent);

void thread_ends(Thread& thread);
void block_synchronised(Block& block);
void blocks_synchronised(const std::vector<Block*>& blocks);
void cluster_begins(const std::vector<Block*>& blocks);
void lanes_synchronised(Block& block, int warp, unsigned mask, WarpOp op);
// Barriers of some of a block's threads: named ones by their number, those in shared memory by their address.
void barrier_arrival(Thread& thread, Block& home, uint32_t barrier);
void barrier_departure(Thread& thread, uint32_t barrier);
void barrier_forget(Block& block, uint32_t barrier);
void barrier_phase_ends(Block& block, uint32_t barrier);

// Accumulators that a matrix product has yet to fill (wgmma.cpp).
void examine_pending_accumulators(Thread& thread, const void* address, unsigned bytes, bool writes, const void* instruction);
void examine_products_at_end(Thread& thread);
// Asynchronous copies under way at the end (async.cpp).
void examine_stores_at_end(Thread& thread);
void examine_loads_at_end(Block& block);
void keep_rounds(Block& block);

[[noreturn]] void report_early_exit(Block& block, int line);
[[noreturn]] void report_missing_lanes(Block& block, Warp& warp, unsigned mask, int line);

}  // namespace emulator
