#pragma once
#include <emulator/host_api.h>
#include <emulator/vector_types.h>
