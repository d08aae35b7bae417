// Matrices that a warp multiplies, loads, stores and transposes together.
#pragma once
#include <emulator/float8.h>
#include <emulator/ptx_arithmetic.h>
#include <emulator/runtime_api.h>
#include <string.h>

namespace emulator::ptx {

// ---- matrices of the warp
// ldmatrix: lane 8 * i + r names row r of matrix i; lane l gets elements 2 * (l % 4) and the next of row l / 4 of each.
EMULATOR_INLINE void ldmatrix(uint32_t* result, uint32_t row, int matrices, bool transposed, int line) {
    matrix_load(result, row, matrices, transposed, line);
}
EMULATOR_INLINE void stmatrix(uint32_t row, const uint32_t* values, int matrices, bool transposed, int line) {
    matrix_store(row, values, matrices, transposed, line);
}

struct m16n8k4 {
    static constexpr int K = 4;
};
struct m16n8k8 {
    static constexpr int K = 8;
};
struct m16n8k16 {
    static constexpr int K = 16;
};
struct m16n8k32 {
    static constexpr int K = 32;
};
struct m16n8k64 {
    static constexpr int K = 64;
};
struct tf32 {
    static constexpr int PER_WORD = 1;
    static float at(uint32_t word, int) { return bits<float>(word & 0xffffe000u); }
};
template <bool E4M3>
struct float8 {
    static constexpr int PER_WORD = 4;
    static float at(uint32_t word, int i) { return float8_to_float<E4M3>(uint8_t(word >> 8 * i)); }
};
using e4m3 = float8<true>;
using e5m2 = float8<false>;

// D = A * B + C for the warp. A is 16 x K, B is K x 8. With `g` = lane / 4 and `t` = lane % 4, a word of A holds row g (or
// g + 8) and the elements from PER_WORD * t on of its quarter of the columns; B likewise with column g.
using Columns __attribute__((vector_size(8 * sizeof(float)), may_alias)) = float;  // of a row of D: one instruction for all

// mma.sp keeps half of each row of A, two of four elements, or one of two of tf32. Four bits of metadata name
// where they stand. A word holds 16 bits for row g and, above them, 16 for row g + 8; where a row needs more, the next lane has
// them. `selector` says which of the four lanes (or of the two pairs) of rows g and g + 8 brings them.
template <int PER_WORD>
EMULATOR_UNCHECKED inline int position_of_kept(const char* rows, int row, int kept, int chunks, int at) {
    const int group = PER_WORD == 1 ? kept : kept / 2;
    const uint32_t* first = (const uint32_t*)(rows + row % 8 * 4 * ROW) + at;
    const uint32_t metadata = *(const uint32_t*)((const char*)first + (first[1] * chunks + group / 4) * ROW);
    const uint32_t four = metadata >> (row / 8 * 16 + group % 4 * 4);
    return PER_WORD == 1 ? 2 * group + (four >> 1 & 1) : 4 * group + (four >> kept % 2 * 2 & 3);
}

template <class Shape, class ElementA, class ElementB, bool WIDE, bool SPARSE>
EMULATOR_UNCHECKED inline void mma_all(unsigned, const char* rows, char* results) {
    constexpr int K = Shape::K, P = ElementA::PER_WORD, WORDS_B = 8 * K / P / 32, WORDS_A = WORDS_B * (SPARSE ? 1 : 2);
    constexpr int QUARTERS = K / (4 * P);  // of four lanes' words along K
    float a[16][K] = {};
    alignas(Columns) float b[K][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const uint32_t* w = (const uint32_t*)(rows + lane * ROW);
        const int g = lane / 4, t = lane % 4;
        for (int q = 0; q < QUARTERS; ++q)
            for (int p = 0; p < P; ++p) {
                const int k = q * 4 * P + t * P + p;
                for (int h = 0; h < 2 && q * 2 < WORDS_A; ++h) {
                    const int row = g + 8 * h, metadata = WORDS_A + WORDS_B + (WIDE ? 4 : 2);
                    const int at = SPARSE ? position_of_kept<P>(rows, row, k, WORDS_A / 2, metadata) : k;
                    a[row][at] = ElementA::at(w[q * 2 + h], p);
                }
                b[k][g] = ElementB::at(w[WORDS_A + q], p);
            }
        const uint32_t* c = w + WORDS_A + WORDS_B;
        for (int i = 0; i < 4; ++i)
            d[g + i / 2 * 8][2 * t + i % 2] = WIDE ? bits<float>(c[i]) : half_to_float(uint16_t(c[i / 2] >> 16 * (i % 2)));
    }
    for (int m = 0; m < 16; ++m) {
        Columns sum = *(const Columns*)d[m];
        for (int k = 0; k < K; ++k) sum += a[m][k] * *(const Columns*)b[k];
        *(Columns*)d[m] = sum;
    }
    for (int lane = 0; lane < 32; ++lane) {
        uint32_t* r = (uint32_t*)(results + lane * ROW);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            const float value = d[g + i / 2 * 8][2 * t + i % 2];
            if (WIDE)
                r[i] = bits<uint32_t>(value);
            else
                r[i / 2] = (i % 2 ? r[i / 2] : 0) | (uint32_t)float_to_half(value) << 16 * (i % 2);
        }
    }
}

template <class Shape, class ElementA, class ElementB, bool WIDE, int A, int B, int C>
EMULATOR_UNCHECKED inline void mma(uint32_t (&d)[C], const uint32_t (&a)[A], const uint32_t (&b)[B], const uint32_t (&c)[C],
                                   int line) {
    static_assert(A == 16 * Shape::K / ElementA::PER_WORD / 32 && B * 2 == A && C == (WIDE ? 4 : 2), "operands of mma.sync");
    uint32_t row[A + B + C];
    memcpy(row, a, sizeof a);
    memcpy(row + A, b, sizeof b);
    memcpy(row + A + B, c, sizeof c);
    const auto all = mma_all<Shape, ElementA, ElementB, WIDE, false>;
    memcpy(d, warp_compute(~0u, row, sizeof row, WarpOp::matrix, all, line), sizeof d);
}
template <class Shape, class Element, bool WIDE, int A, int B, int C>
EMULATOR_UNCHECKED inline void mma_sparse(uint32_t (&d)[C], const uint32_t (&a)[A], const uint32_t (&b)[B],
                                          const uint32_t (&c)[C], uint32_t metadata, uint32_t selector, int line) {
    static_assert(B == 8 * Shape::K / Element::PER_WORD / 32 && A == B && C == (WIDE ? 4 : 2), "operands of mma.sp");
    uint32_t row[A + B + C + 2];
    memcpy(row, a, sizeof a);
    memcpy(row + A, b, sizeof b);
    memcpy(row + A + B, c, sizeof c);
    row[A + B + C] = metadata, row[A + B + C + 1] = selector;
    const auto all = mma_all<Shape, Element, Element, WIDE, true>;
    memcpy(d, warp_compute(~0u, row, sizeof row, WarpOp::matrix, all, line), sizeof d);
}

// Integers of 4 and 8 bits.
template <int BITS, bool SIGNED>
struct integer {
    static constexpr int PER_WORD = 32 / BITS;
    static int at(uint32_t word, int i) {
        const uint32_t shifted = word << (32 - BITS * (i + 1));
        return SIGNED ? int(shifted) >> (32 - BITS) : int(shifted >> (32 - BITS));
    }
};
using s8 = integer<8, true>;
using u8 = integer<8, false>;
using s4 = integer<4, true>;
using u4 = integer<4, false>;

template <class Shape, class ElementA, class ElementB, bool SATURATES>
EMULATOR_UNCHECKED inline void mma_integers_all(unsigned, const char* rows, char* results) {
    constexpr int P = ElementA::PER_WORD, QUARTERS = Shape::K / (4 * P), WORDS_A = 2 * QUARTERS;
    const auto word = [&](int lane, int i) EMULATOR_UNCHECKED { return ((const uint32_t*)(rows + lane * ROW))[i]; };
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
            int64_t sum = int32_t(word(lane, WORDS_A + QUARTERS + i));
            for (int q = 0; q < QUARTERS; ++q)
                for (int t = 0; t < 4; ++t) {
                    const uint32_t a = word(m % 8 * 4 + t, q * 2 + m / 8), b = word(n * 4 + t, WORDS_A + q);
                    for (int p = 0; p < P; ++p) sum += ElementA::at(a, p) * ElementB::at(b, p);
                }
            if (SATURATES) sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
            ((int32_t*)(results + lane * ROW))[i] = int32_t(sum);
        }
}
template <class Shape, class ElementA, class ElementB, bool SATURATES, int A, int B>
EMULATOR_UNCHECKED inline void mma_integers(uint32_t (&d)[4], const uint32_t (&a)[A], const uint32_t (&b)[B],
                                            const uint32_t (&c)[4], int line) {
    static_assert(A == Shape::K / (2 * ElementA::PER_WORD) && B * 2 == A, "operands of mma.sync");
    uint32_t row[A + B + 4];
    memcpy(row, a, sizeof a);
    memcpy(row + A, b, sizeof b);
    memcpy(row + A + B, c, sizeof c);
    const auto all = mma_integers_all<Shape, ElementA, ElementB, SATURATES>;
    memcpy(d, warp_compute(~0u, row, sizeof row, WarpOp::matrix, all, line), sizeof d);
}

// m8n8k4 of doubles: A is 8 x 4, B is 4 x 8.
EMULATOR_UNCHECKED inline void mma_doubles_all(unsigned, const char* rows, char* results) {
    const auto value = [&](int lane, int i) EMULATOR_UNCHECKED { return ((const double*)(rows + lane * ROW))[i]; };
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 2; ++i) {
            const int m = lane / 4, n = lane % 4 * 2 + i;
            double sum = value(lane, 2 + i);
            for (int k = 0; k < 4; ++k) sum = ::fma(value(m * 4 + k, 0), value(n * 4 + k, 1), sum);
            ((double*)(results + lane * ROW))[i] = sum;
        }
}
EMULATOR_UNCHECKED inline void mma_doubles(double (&d)[2], double a, double b, double c0, double c1, int line) {
    const double row[4] = {a, b, c0, c1};
    memcpy(d, warp_compute(~0u, row, sizeof row, WarpOp::matrix, mma_doubles_all, line), sizeof d);
}

// movmatrix: a matrix of 8 x 8 elements of 16 bits, held as ldmatrix gives it, transposed.
EMULATOR_UNCHECKED inline void movmatrix_all(unsigned, const char* rows, char* results) {
    for (int lane = 0; lane < 32; ++lane) {
        uint32_t moved = 0;
        for (int i = 0; i < 2; ++i) {
            const int row = lane % 4 * 2 + i, column = lane / 4;
            const uint32_t word = *(const uint32_t*)(rows + (row * 4 + column / 2) * ROW);
            moved |= (word >> 16 * (column % 2) & 0xffffu) << 16 * i;
        }
        *(uint32_t*)(results + lane * ROW) = moved;
    }
}
EMULATOR_UNCHECKED inline uint32_t movmatrix(uint32_t a, int line) {
    uint32_t moved;
    memcpy(&moved, warp_compute(~0u, &a, sizeof a, WarpOp::matrix, movmatrix_all, line), sizeof moved);
    return moved;
}

}  // namespace emulator::ptx
