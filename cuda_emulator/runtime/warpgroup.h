// What a warpgroup, four warps that multiply matrices together, has under way.
#pragma once
#include <stdint.h>

#include <memory>
#include <vector>

#include "emulator/wgmma.h"

namespace emulator {

constexpr int WARPGROUP = 128;  // threads

// What one thread brings to a matrix product.
struct ProductCall {
    const ProductForm* form;
    float* accumulator;
    const uint32_t* a;  // its registers of A, if they hold it
    uint64_t a_descriptor, b_descriptor;
    bool accumulate;
    const void* instruction;
};

// Accumulators of a thread whose new values its wait will bring (check mode).
struct PendingProduct {
    std::vector<float*> registers;
    std::vector<float> values;
    int group;
    const void* instruction;
};

// What a wait brought, and how many fences the thread had executed by then.
struct LandedProduct {
    std::vector<float*> registers;
    std::vector<float> values;
    int fences;
};

struct Warpgroup {
    int arrived = 0, line = 0, first_thread = 0;
    const void* operation = nullptr;  // at which its threads meet
    ProductCall calls[WARPGROUP];
    // Check mode only.
    std::vector<PendingProduct> pending[WARPGROUP];
    int groups[WARPGROUP];  // committed by each thread
    int fences[WARPGROUP];  // wgmma.fence instructions of each thread
    std::vector<LandedProduct> landed[WARPGROUP];
    struct Read {
        uint32_t reader;  // see async_reads.h
        int group;
    };
    std::vector<Read> reads;
    bool used = false;
    int registers = 0, registers_line = 0;  // that setmaxnreg asked for, and where; 0 before
    void reset();
};

}  // namespace emulator
