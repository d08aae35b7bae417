#include "fiber.h"

#include <stdint.h>
#include <sys/mman.h>

#include <atomic>
#include <new>

namespace emulator {

#ifdef EMULATOR_FAST_SWITCH
// Saves what the calling convention asks a function to preserve. Rounding mode and the like are the same in all fibers.
extern "C" void emulator_switch(void** save, void* next);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
#endif

Fiber::Fiber(void (*body)()) {
    void* memory =
        mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    mprotect(memory_, GUARD_BYTES, PROT_NONE);  // an overflow of the stack faults
    // All stacks begin at the same offset in their pages; without this their hot lines would share one set of the cache.
    static std::atomic<unsigned> created{0};
    const size_t colour = created++ % 64 * 64;
    char* top = memory_ + GUARD_BYTES + STACK_BYTES - 256 - colour;
#ifdef EMULATOR_FAST_SWITCH
    void** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
    *--frame = nullptr;  // where body would return to: a debugger's backtrace ends here
    *--frame = reinterpret_cast<void*>(body);
    for (int saved_register = 0; saved_register < 6; ++saved_register) *--frame = nullptr;
    stack_pointer_ = frame;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = memory_ + GUARD_BYTES;
    context_.uc_stack.ss_size = size_t(top - (memory_ + GUARD_BYTES));
    context_.uc_link = nullptr;
    makecontext(&context_, body, 0);
#endif
}

Fiber::~Fiber() {
    if (memory_) munmap(memory_, STACK_BYTES + GUARD_BYTES);
}

void Fiber::switch_to(Fiber& next) {
#ifdef EMULATOR_FAST_SWITCH
    emulator_switch(&stack_pointer_, next.stack_pointer_);
#else
    swapcontext(&context_, &next.context_);
#endif
}

}  // namespace emulator
