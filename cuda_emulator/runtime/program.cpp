// A plain CUDA program runs in a process of its own, which program.py starts: it says how in the environment, and reads a
// finding from a pipe, or at the end which races were accepted. The first finding ends the program.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <string>

#include "scheduler.h"
#include "ticks.h"

extern "C" void emulator_set_receiver(void (*receiver)(const char*));
extern "C" void emulator_accept_races(const char* library, int line);
extern "C" void emulator_waits(const char* library, int line);
extern "C" const char* emulator_accepted_races();

namespace emulator {
namespace {

constexpr int FINDING_STATUS = 1;
constexpr const char* ACCEPTED = "accepted races\n";  // begins a report that is no finding
int report_to = -1;

void tell(const char* report) {
    for (size_t left = strlen(report); left;) {
        const ssize_t written = ::write(report_to, report + strlen(report) - left, left);
        if (written <= 0) break;
        left -= size_t(written);
    }
}

[[noreturn]] void end_program(const char* report) {
    fflush(nullptr);
    tell(report);
    _exit(FINDING_STATUS);
}

void tell_accepted_races() {
    if (const char* races = emulator_accepted_races(); *races) tell((std::string(ACCEPTED) + races).c_str());
}

void note_lines(const char* variable, void (*note)(const char* library, int line)) {
    if (const char* lines = getenv(variable))
        for (char* end; *lines; lines = *end ? end + 1 : end) note(program_invocation_name, strtol(lines, &end, 10));
    unsetenv(variable);
}

// Before the program's own constructors, which make its __device__ variables.
__attribute__((constructor)) void begin_program() {
    const char* told = getenv("EMULATOR_PROGRAM");  // mode, schedule, seed, the pipe and a signal
    int mode, schedule, call_off;
    unsigned long long seed;
    if (!told || sscanf(told, "%d %d %llu %d %d", &mode, &schedule, &seed, &report_to, &call_off) != 5) return;
    options.mode = static_cast<Mode>(mode);
    options.schedule = static_cast<Schedule>(schedule);
    options.seed = seed;
    options.program = true;
    call_launches_off_at(call_off);
    note_lines("EMULATOR_ACCEPTED_RACES", emulator_accept_races);
    note_lines("EMULATOR_WAITING_LINES", emulator_waits);
    unsetenv("EMULATOR_PROGRAM");  // what the program starts is none
    emulator_set_receiver(end_program);
    atexit(tell_accepted_races);
}

}  // namespace
}  // namespace emulator
