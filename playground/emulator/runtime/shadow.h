// What check mode is told by the scheduler. Its state and its rules are in the files named below.
#pragma once
#include "scheduler.h"

namespace emulator {

Finding* launch_finding();  // of the launch under way

void begin_launch_shadow(Launch& launch);
void end_launch_shadow(Launch& launch);
void begin_block_shadow(Block& block);
void end_block_shadow(Block& block);
void free_shadow(Block& block);
void shared_variable_appears(const Worker::Extent& extent);

void thread_ends(Thread& thread);
void block_synchronised(Block& block);
void lanes_synchronised(Block& block, int warp, unsigned mask, WarpOp op);
// Barriers of some of a block's threads: named ones by their number, those in shared memory by their address.
void barrier_arrival(Thread& thread, uint32_t barrier);
void barrier_departure(Thread& thread, uint32_t barrier);
void barrier_forget(Block& block, uint32_t barrier);

[[noreturn]] void report_early_exit(Block& block, int line);
[[noreturn]] void report_missing_lanes(Block& block, Warp& warp, unsigned mask, int line);

}  // namespace emulator
