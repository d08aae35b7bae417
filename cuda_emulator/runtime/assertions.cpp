// Kernels that stop themselves.
#include <stdio.h>
#include <stdlib.h>

#include "scheduler.h"

namespace emulator {
void trap(int line) { worker->stop(worker->describe("trap", "the kernel executes __trap()", {line, nullptr})); }
}  // namespace emulator

// The C library's assert() of kernel text leads here (toolchain.py); that of host code ends the process as usual.
extern "C" [[noreturn]] void emulator_assertion_failed(const char* assertion, const char* file, unsigned line,
                                                       const char* function) noexcept {
    using namespace emulator;
    if (current)
        worker->stop(worker->describe("assertion failed", std::string("assert(") + assertion + ")", {int(line), nullptr}));
    fprintf(stderr, "%s:%u: %s: Assertion `%s' failed.\n", file, line, function, assertion);
    abort();
}
