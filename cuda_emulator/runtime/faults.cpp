#include "faults.h"

#ifdef __linux__
#include <signal.h>
#include <stdio.h>

#include "device_memory.h"
#include "ticks.h"

namespace emulator {
namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr int COUNT = sizeof SIGNALS / sizeof *SIGNALS;
constexpr size_t STACK_BYTES = 64 << 10;
struct sigaction before[COUNT];

// The kernel's instruction at which, or in a call from which, it happened. In a function of the runtime or of the C library
// that is the innermost return address on the stack that leads into the kernel's text.
const void* instruction_of(const Interrupted& at, const Launch& launch) {
    const auto is_of_kernel = [&](uintptr_t address) { return address >= launch.text_begin && address < launch.text_end; };
    if (is_of_kernel(at.program_counter)) return (const void*)(at.program_counter + 1);
    if (is_of_kernel(at.link)) return (const void*)at.link;
    const Fiber& fiber = *static_cast<Thread*>(current)->fiber;
    for (uintptr_t slot = at.stack_pointer; fiber.owns((void*)slot) && fiber.owns((char*)slot + 7); slot += sizeof slot)
        if (const uintptr_t address = *(const uintptr_t*)slot; is_of_kernel(address)) return (const void*)address;
    return nullptr;
}

std::string digits(uintptr_t address) {
    char text[32];
    snprintf(text, sizeof text, "0x%llx", (unsigned long long)address);
    return text;
}

void handle(int signal, siginfo_t* info, void* context) {
    Worker* w = worker;
    if (!w || !w->launch || !current) {  // host code: back to the handler that was there, which the instruction meets again
        for (int i = 0; i < COUNT; ++i)
            if (SIGNALS[i] == signal) sigaction(signal, &before[i], nullptr);
        return;
    }
    const Interrupted at = interrupted(context);
    const uintptr_t address = (uintptr_t)info->si_addr;
    const Place place{0, instruction_of(at, *w->launch)};
    if (signal == SIGFPE)
        w->stop(w->describe("integer division", "an integer is divided by zero, or the least one by -1", place));
    if (signal == SIGILL)
        w->stop(w->describe("invalid instruction", "the compiler expected this place never to be reached", place));
    if (static_cast<Thread*>(current)->fiber->guards((void*)address))
        w->stop(w->describe("local memory exceeded",
                            "the thread's local variables and calls take more than the " + std::to_string(LOCAL_BYTES >> 10) +
                                " KB of local memory that a thread can have",
                            place));
    if (at.program_counter == address)
        w->stop(w->describe(
            "invalid call",
            address ? "a call of address " + digits(address) + ", which is no function" : "a call of a null function pointer",
            place));
    w->stop(w->describe("invalid address", "an access to address " + digits(address) + ", where there is no memory", place));
}

}  // namespace

FaultHandlers::FaultHandlers() {
    struct sigaction action{};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler leaves by a switch of fibers
    for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, &before[i]);
}

FaultHandlers::~FaultHandlers() {
    for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
}

void provide_fault_stack() {
    thread_local std::unique_ptr<char[]> stack;
    if (stack) return;
    stack_t present{};
    sigaltstack(nullptr, &present);
    if (!(present.ss_flags & SS_DISABLE)) return;  // somebody else's serves as well
    stack.reset(new char[STACK_BYTES]);
    stack_t own{};
    own.ss_sp = stack.get();
    own.ss_size = STACK_BYTES;
    sigaltstack(&own, nullptr);
}

}  // namespace emulator

#else
namespace emulator {
FaultHandlers::FaultHandlers() {}
FaultHandlers::~FaultHandlers() {}
void provide_fault_stack() {}
}  // namespace emulator
#endif
