#include "shadow.h"
#include "emulator/runtime_api.h"
namespace emulator {
void begin_launch_shadow(Launch&) {}
void end_launch_shadow(Launch&) {}
void begin_block_shadow(Block&) {}
void end_block_shadow(Block&) {}
void free_shadow(Block&) {}
void shared_variable_appears(const Worker::Extent&) {}
void thread_ends(Thread&) {}
void block_synchronised(Block&) {}
void lanes_synchronised(Block&, int, unsigned, WarpOp) {}
void named_barrier_arrival(Block&, int, Thread&) {}
void named_barrier_release(Block&, int, Thread*) {}
void report_early_exit(Block&, int line) { worker->stop(worker->describe("early exit before a barrier", "", {line, nullptr})); }
void report_missing_lanes(Block&, Warp&, unsigned, int line) { worker->stop(worker->describe("warp lanes never arrive", "", {line, nullptr})); }
void note_atomic(void*, unsigned) {}
void note_read(const void*, unsigned) {}
void note_write(void*, unsigned) {}
void device_fence() {}
}
