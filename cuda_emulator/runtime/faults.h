// What would end the process while a kernel runs: a division by zero, a call of a null pointer, an access to memory that is
// not there, a stack that is full. Each becomes a finding.
#pragma once
#include "scheduler.h"

namespace emulator {

// While it lives, faults of the launch's threads stop the launch; all others go where they went before.
class FaultHandlers {
 public:
    FaultHandlers();
    ~FaultHandlers();
    FaultHandlers(const FaultHandlers&) = delete;
};

// A stack for the handler on the calling OS thread: the fiber's own may be full.
void provide_fault_stack();

}  // namespace emulator
