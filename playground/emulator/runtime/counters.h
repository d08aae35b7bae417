// Count mode: what the memory system would have to do.
#pragma once
#include "scheduler.h"

namespace emulator {

void begin_launch_counters();
void end_launch_counters(Launch& launch);
void end_block_counters(Block& block);
void count_barrier(Block& block);
void count_atomic();
void count_matrix();
void count_shared(Thread& thread, uint32_t offset, unsigned bytes, const void* instruction);
void count_global(Thread& thread, uintptr_t address, unsigned bytes, const void* instruction);

}  // namespace emulator
