// Count mode: what the memory system would have to do.
//
// Lanes of a warp are taken to make one request when they execute the same instruction for the same, k-th, time since the
// last barrier of the block. A request to device memory costs the 32-byte sectors that it touches. A request to shared memory
// is served in groups of lanes that together ask for at most 128 bytes, and each group costs as many wavefronts as the
// busiest of the 32 banks has different words to give.
#pragma once
#include "access.h"
#include "scheduler.h"

namespace emulator {

void begin_launch_counters();
void end_launch_counters(Launch& launch);
void end_block_counters(Block& block);
void count_barrier(Block& block);
void count_atomic();
void count_matrix();
// Rows that an asynchronous instruction copies: a request each.
void count_copy(uintptr_t address, unsigned bytes, bool writes, const void* instruction);
void count_access(Thread& thread, const void* address, unsigned bytes, Access access, const void* instruction);

}  // namespace emulator
