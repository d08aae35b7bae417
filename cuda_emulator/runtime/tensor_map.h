// What a CUtensorMap holds here: the tensor, and the box of it that one instruction copies.
#pragma once
#include <stdint.h>

namespace emulator {

enum class Swizzle : uint8_t { none, bytes32, bytes64, bytes128 };

struct TensorMap {
    static constexpr uint64_t MAGIC = 0x70616d2d726f736eull;
    uint64_t magic;  // 0 in what was never encoded
    char* address;
    uint64_t strides[5];  // in bytes; the first is an element's size
    uint32_t last[5];     // the highest coordinate inside the tensor: a size may be 2^32
    uint16_t box[5];      // elements of each dimension that are copied, or 1
    uint8_t steps[5];     // between elements that are copied
    uint8_t rank, element_bytes;
    Swizzle swizzle;  // of the box in shared memory
    bool fill_with_nan;
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");

// Where the swizzle puts what would lie at `address` of the block's shared window.
inline uint32_t swizzled(uint32_t address, Swizzle swizzle) {
    switch (swizzle) {
        case Swizzle::bytes32:
            return address ^ (address >> 3 & 0x10);
        case Swizzle::bytes64:
            return address ^ (address >> 3 & 0x30);
        case Swizzle::bytes128:
            return address ^ (address >> 3 & 0x70);
        default:
            return address;
    }
}

}  // namespace emulator
