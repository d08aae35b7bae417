// Launches into a stream that is being captured.
#pragma once
#include "emulator/runtime_api.h"

namespace emulator {

// Has the launch gone into a graph? It takes what run_grid takes.
bool record_launch(const char* name, int line, const void* kernel, const LaunchConfig& config, void (*entry)(void*),
                   const void* arguments, size_t argument_bytes);

}  // namespace emulator
