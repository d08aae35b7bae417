// A fiber: a stack of its own and the point at which it stopped. Switching costs about 20 ns on x86-64, where a few lines
// of assembly do it, and 200 ns elsewhere, through ucontext.
#pragma once
#include <stddef.h>

#if defined(__x86_64__) && !defined(EMULATOR_PORTABLE)
#define EMULATOR_FAST_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t LOCAL_BYTES = 512 << 10;  // of local memory a thread may have; the pages appear as they are used

class Fiber {
 public:
    static constexpr size_t STACK_BYTES = LOCAL_BYTES + (64 << 10), GUARD_BYTES = 4096;

    Fiber() = default;               // the calling OS thread's own context
    explicit Fiber(void (*body)());  // a fresh stack; `body` must never return
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Stops here, in `this`, and goes on in `next`.
    void switch_to(Fiber& next);
    bool guards(const void* address) const { return size_t((const char*)address - memory_) < GUARD_BYTES; }
    bool owns(const void* address) const { return size_t((const char*)address - memory_) < STACK_BYTES + GUARD_BYTES; }

 private:
    char* memory_ = nullptr;
#ifdef EMULATOR_FAST_SWITCH
    void* stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
};

}  // namespace emulator
