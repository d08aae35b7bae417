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
void named_barrier_arrival(Block& block, int id, Thread& thread);
void named_barrier_release(Block& block, int id, Thread* last);

[[noreturn]] void report_early_exit(Block& block, int line);
[[noreturn]] void report_missing_lanes(Block& block, Warp& warp, unsigned mask, int line);

}  // namespace emulator
