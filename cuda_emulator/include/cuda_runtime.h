// Stands in for CUDA's own header of this name.
#pragma once
#define __CUDA_RUNTIME_H__
#define __DRIVER_TYPES_H__
#include <emulator/qualifiers.h>

#include <cuda_runtime_api.h>
#include <emulator/atomics.h>
#include <emulator/builtins.h>
#include <emulator/cache_hints.h>
#include <emulator/copies.h>
#include <emulator/launch.h>
#include <emulator/math.h>
#include <emulator/ptx.h>
#include <emulator/textures.h>
#include <emulator/vector_types.h>
#include <emulator/warp.h>
