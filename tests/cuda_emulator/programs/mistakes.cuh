#pragma once

__device__ __forceinline__ void put(int* out, int at, int value) {
    out[at] = value;  // bounds
}
