// A clock tick for threads that run long without calling the runtime: one that waits for another by looking at memory has to
// make room for it, and one that never ends has to be stopped.
#pragma once
#include "scheduler.h"

namespace emulator {

// Where a signal met a thread.
struct Interrupted {
    uintptr_t program_counter = 0, stack_pointer = 0, link = 0;  // link: a return address that is not on the stack
};
Interrupted interrupted(void* context);  // of the signal's handler

// Finds the machine code that the launch runs: only there may a tick interrupt.
void find_kernel_text(Launch& launch);

// While it lives, the calling OS thread gets ticks for the worker.
class Ticks {
 public:
    explicit Ticks(Launch& launch);
    ~Ticks();
    Ticks(const Ticks&) = delete;
};

// From that signal on no launch goes on: the one under way ends with a finding that says where a thread was.
void call_launches_off_at(int signal);

}  // namespace emulator
