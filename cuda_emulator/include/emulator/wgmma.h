// Matrix products of a warpgroup (wgmma), as kernel text and the runtime library know them.
#pragma once
#include <stdint.h>

namespace emulator {

enum class ProductElement : uint8_t { tf32, f16, bf16 };

// The form of wgmma.mma_async.m64nNkK.f32: D (64 x N, float) = A (64 x K) B (K x N) + D; a row of A, or column of B, has 32
// bytes.
struct ProductForm {
    int n;
    ProductElement element;
    bool a_in_registers, a_transposed, b_transposed;  // transposed: the rows of A, or columns of B, are contiguous
    int a_sign, b_sign;
};

// All threads of the warpgroup meet here. `accumulator` has n / 2 values.
void wgmma(const ProductForm& form, float* accumulator, const uint32_t* a, uint64_t a_descriptor, uint64_t b_descriptor,
           bool accumulate, int line);
// The same, but the values come to where the pointers point when the thread waits.
void wgmma_checked(const ProductForm& form, float* const* accumulator, const uint32_t* a, uint64_t a_descriptor,
                   uint64_t b_descriptor, bool accumulate, int line);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups_left);
// setmaxnreg: no effect but its rules.
void set_registers(int count, int line);

#ifdef EMULATOR_CHECKED
constexpr bool CHECKED = true;
#else
constexpr bool CHECKED = false;
#endif

}  // namespace emulator
