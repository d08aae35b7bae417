// Which earlier launches may still be running when one begins (check mode).
#pragma once
#include <string>
#include <vector>

#include "clock.h"

namespace emulator {

struct UnorderedLaunch {
    Segment first, end;  // its segments
    std::string kernel;
    bool until_wait;  // programmatic dependent launch: only until griddepcontrol.wait
};
extern std::vector<UnorderedLaunch> unordered_launches;  // of the launch under way

void order_launch(const Launch& launch);  // it begins
void forget_earlier_launches();           // their segments mean nothing any more
void host_waits_for_the_device();         // as cudaMemcpy does

}  // namespace emulator
