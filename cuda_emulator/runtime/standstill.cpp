// Threads that look for ever for what nobody does: a flag that stays, a phase that never ends.
//
// A thread that waits in a loop pauses there, or meets other lanes. If it does so in a state in which it has done so before,
// and no memory has changed in between, its loop goes on until another thread changes some. If that holds for all threads that
// do not wait at a barrier, nothing will ever happen again.
#include <unwind.h>

#include "scheduler.h"

namespace emulator {
namespace {

constexpr unsigned PATIENCE = 64;  // pauses in a row after which a thread counts as one that waits

bool is_power_of_two(unsigned n) { return !(n & (n - 1)); }

#if defined(__x86_64__)
constexpr int KEPT_REGISTERS[] = {3, 6, 12, 13, 14, 15};  // over calls, by DWARF's numbers
#elif defined(__aarch64__)
constexpr int KEPT_REGISTERS[] = {19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29};
#else
constexpr int KEPT_REGISTERS[] = {};
#endif

struct Frames {
    const Launch& launch;
    uint64_t state = 0xcbf29ce484222325u;
    uintptr_t begin = 0, end = 0;  // of the kernel's part of the stack
    const void* instruction = nullptr;
    void mix(uint64_t value) { state = (state ^ value) * 0x100000001b3u, state ^= state >> 29; }
};

_Unwind_Reason_Code visit(_Unwind_Context* context, void* data) {
    Frames& f = *static_cast<Frames*>(data);
    const uintptr_t at = _Unwind_GetIP(context);
    const bool is_of_kernel = at >= f.launch.text_begin && at < f.launch.text_end;
    if (!is_of_kernel && !f.begin) return _URC_NO_REASON;  // the runtime's functions that the kernel has called
    if (!f.begin) {
        f.begin = _Unwind_GetCFA(context);
        f.instruction = (const void*)at;
        f.mix(at);
        for (const int number : KEPT_REGISTERS) f.mix(_Unwind_GetGR(context, number));
    }
    f.end = _Unwind_GetCFA(context);
    return is_of_kernel ? _URC_NO_REASON : _URC_END_OF_STACK;
}

// What the calling thread does next depends on: where it is, and its registers and variables.
Frames frames_of_kernel(const Launch& launch) {
    Frames f{launch};
    _Unwind_Backtrace(visit, &f);
    for (uintptr_t at = f.begin; at + 8 <= f.end; at += 8) f.mix(*(const uint64_t*)at);
    return f;
}

}  // namespace

bool Worker::all_stand_still(bool endlessly) const {
    if (launch->next_unit.load() < launch->units) return false;
    for (const Block* b : resident) {
        if (b->started < (int)b->threads.size()) return false;
        std::vector<bool> runs(b->warps.size());
        for (const Thread& t : b->threads)
            if (t.state == State::ready) runs[t.warp] = true;
        for (const Thread& t : b->threads) {
            const Standstill& s = t.standstill;
            // Lanes that meet go on when the last of them comes.
            if (t.state != State::ready && !(endlessly && t.state == State::at_warp_operation && runs[t.warp])) continue;
            const bool looked = s.changes == changes && (endlessly ? s.endless : s.pauses >= PATIENCE);
            if (!looked && (endlessly || b->in_vain_at != changes)) return false;
        }
    }
    return true;
}

// Notes whether the calling thread has been in its state before; returns where it is, null where that cannot be told.
const void* Worker::look_at_state(Thread& t) {
    Standstill& s = t.standstill;
    if (s.changes != changes) s = {changes};
    const Frames frames = frames_of_kernel(*launch);
    if (!frames.begin) return nullptr;
    if (is_power_of_two(++s.looks))
        s.state = frames.state;  // of looks 1, 2, 4...: each is compared with as many that follow
    else if (s.state == frames.state)
        s.endless = true;
    return frames.instruction;
}

void Worker::notice_standstill(Thread& t) {
    Standstill& s = t.standstill;
    if (s.changes != changes) s = {changes};
    ++s.pauses;
    // To look at a thread's state takes microseconds, and others may wait for long while one works without changing memory,
    // as when it multiplies matrices: it is looked only when all that can go on have paused so often.
    if (still_at != changes) {
        if (s.pauses < PATIENCE || !is_power_of_two(s.pauses) || !all_stand_still(false)) return;
        still_at = changes;
    }
    const void* instruction = look_at_state(t);
    if (!s.endless || !all_stand_still(true)) return;
    int looking = 0, waiting = 0;
    for (const Block* b : resident)
        for (const Thread& other : b->threads) {
            looking += other.state == State::ready;
            waiting += other.state != State::ready && other.state != State::ended;
        }
    stop_waiting(describe("endless wait",
                          std::to_string(looking) + (looking == 1 ? " thread spins" : " threads spin") +
                              " on memory that no other thread is left to write" +
                              (waiting ? "; " + std::to_string(waiting) + " more wait at barriers" : ""),
                          {0, t.watches_from ? t.watches_from : instruction}));
}

}  // namespace emulator
