// The part of the CUDA runtime that host code calls.
#pragma once
#include <emulator/host_device.h>
#include <emulator/host_graphs.h>
#include <emulator/host_launch.h>
#include <emulator/host_memory.h>
#include <emulator/host_status.h>
#include <stdlib.h>
#include <string.h>

#include <utility>
