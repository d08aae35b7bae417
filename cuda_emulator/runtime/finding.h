// What the emulator has to say about a kernel: what happened, where, and who else took part.
#pragma once
#include <string>

#include "emulator/dim3.h"

namespace emulator {

// A place in the kernel text: a line where the text itself knew it, or the address of an instruction.
struct Place {
    int line = 0;
    const void* instruction = nullptr;
};

struct Party {
    bool known = false;  // else, if anything, the place is: host code's
    uint3 block{}, thread{};
    Place place;
    std::string did;  // "wrote", "read", ...
};

struct Finding {
    std::string kind, message, kernel;
    // Of one about memory, in the place of `message`: what it is at, why it is a mistake, and who else was there, if that is
    // not known by name.
    std::string object, why, somebody;
    Party party, other;
    int kernel_line = 0;
    int argument = 0;   // the number of the launch's argument that it is about, from 1
    int parameter = 0;  // the number of the kernel's parameter that `object` names, from 1
};

// Hands the finding to whoever configured a receiver (which raises). Without one, and where nothing can be thrown
// (emulator_keep_findings), it is kept until emulator_take_finding.
void deliver(const Finding& finding);
// A finding about host code. Without a receiver that raises it goes on.
void host_runs_device_code(const char* what, Place place);
bool finding_pending();

}  // namespace emulator
