#include "ticks.h"

#ifdef __linux__
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulator {
namespace {

constexpr long TICK_NANOSECONDS = 20000000;
const int TICK_SIGNAL = SIGRTMIN + 7;

// Runs on the stack of the fiber that was interrupted. Where the interrupted instruction is the kernel's own, nothing of the
// runtime or the C library is half done, so the fiber can be left here for a while, or for good.
void tick(int, siginfo_t*, void* context) {
    Worker* w = worker;
    if (!w || !current || !w->launch) return;
    if (w->launch->is_late()) w->launch->late = true;
    const uintptr_t at = interrupted(context).program_counter;
    if (at < w->launch->text_begin || at >= w->launch->text_end) return;
    if (w->launch->late) w->stop_out_of_time(w->launch->out_of_time(), {0, (const void*)(at + 1)});
    if (options.checked() || current != w->ticked) {  // the order of check mode does not depend on time
        w->ticked = current;
        return;
    }
    w->ticked = nullptr;
    Block& b = *w->block;
    b.yields += int(b.threads.size());
    w->pause();
}

int find_text(dl_phdr_info* info, size_t, void* data) {
    Launch& launch = *static_cast<Launch*>(data);
    const uintptr_t entry = (uintptr_t)launch.entry;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD && entry >= begin && entry < begin + header.p_memsz) {
            launch.text_begin = begin;
            launch.text_end = begin + header.p_memsz;
            return 1;
        }
    }
    return 0;
}

struct Timer {
    timer_t id{};
    bool made = false;
    ~Timer() {
        if (made) timer_delete(id);
    }
};
thread_local Timer timer;

void arm(long nanoseconds) {
    itimerspec period{};
    period.it_value.tv_nsec = period.it_interval.tv_nsec = nanoseconds;
    timer_settime(timer.id, 0, &period, nullptr);
}

}  // namespace

Interrupted interrupted(void* context) {
    const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    return {uintptr_t(machine.gregs[REG_RIP]), uintptr_t(machine.gregs[REG_RSP]), 0};
#elif defined(__aarch64__)
    return {machine.pc, machine.sp, machine.regs[30]};
#else
    (void)machine;
    return {};
#endif
}

void find_kernel_text(Launch& launch) { dl_iterate_phdr(find_text, &launch); }

Ticks::Ticks(Launch&) {
    if (options.debugged) return;
    if (!timer.made) {
        struct sigaction action{};
        action.sa_sigaction = tick;
        // The handler may leave through another fiber and come back much later, so the signal must not stay blocked.
        action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER;
        sigaction(TICK_SIGNAL, &action, nullptr);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = TICK_SIGNAL;
        event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
        timer.made = timer_create(CLOCK_MONOTONIC, &event, &timer.id) == 0;
    }
    if (timer.made) arm(TICK_NANOSECONDS);
}

Ticks::~Ticks() {
    if (timer.made) arm(0);
}

void call_launches_off_at(int signal) {
    struct sigaction action{};
    action.sa_handler = [](int) { called_off = 1; };
    action.sa_flags = SA_RESTART;
    sigaction(signal, &action, nullptr);
}

}  // namespace emulator

#else
namespace emulator {
void call_launches_off_at(int) {}
void find_kernel_text(Launch&) {}
Ticks::Ticks(Launch&) {}
Ticks::~Ticks() {}
}  // namespace emulator
#endif
