// WMMA: matrix fragments of a warp. CUDA leaves open which lane holds which element; here element i of a lane is number
// 32 * i + lane of the matrix, row by row. Shapes and types are the PTX ISA's for wmma, without its packed ones.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <limits.h>

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}  // namespace precision

namespace details {

template <class T>
struct Stored {
    using type = T;
};
template <>
struct Stored<precision::tf32> {
    using type = float;
};
template <class T>
using stored = typename Stored<T>::type;
template <class T, class... Others>
constexpr bool is_one_of = (std::is_same<T, Others>::value || ...);

template <class Use, class T>
constexpr bool is_shape(int m, int n, int k) {
    constexpr bool sums = std::is_same<Use, accumulator>::value;
    const bool k16 = k == 16 && ((m == 16 && n == 16) || (m == 32 && n == 8) || (m == 8 && n == 32));
    if (k16)
        return is_one_of<T, __half> ||
               (sums ? is_one_of<T, float, int> : is_one_of<T, __nv_bfloat16, signed char, unsigned char>);
    if (m == 16 && n == 16 && k == 8) return sums ? is_one_of<T, float> : is_one_of<T, precision::tf32>;
    return m == 8 && n == 8 && k == 4 && is_one_of<T, double>;
}
template <class A, class C, class D>
constexpr bool can_multiply() {
    if (is_one_of<A, __half>) return is_one_of<C, __half, float> && is_one_of<D, __half, float>;
    if (is_one_of<A, __nv_bfloat16, precision::tf32>) return is_one_of<C, float> && is_one_of<D, float>;
    return std::is_same<C, D>::value && (is_one_of<A, double> ? is_one_of<C, double> : is_one_of<C, int>);
}

// What a product computes with: float but for integers and doubles. TF32 operands lose their low 13 bits.
template <class T>
EMULATOR_UNCHECKED inline auto factor(stored<T> value) {
    if constexpr (is_one_of<T, precision::tf32>)
        return ::emulator::bits<float>(::emulator::bits<uint32_t>(value) & 0xffffe000u);
    else if constexpr (is_one_of<T, double>)
        return value;
    else if constexpr (std::is_integral<T>::value)
        return (long long)value;
    else
        return (float)value;
}
// `satf`: within the type's finite numbers, NaN as 0.
template <class D, class Sum>
EMULATOR_UNCHECKED inline D result(Sum sum, bool finite) {
    if constexpr (is_one_of<D, int>)
        return finite ? int(sum < INT_MIN ? INT_MIN : sum > INT_MAX ? INT_MAX : sum) : int((unsigned)sum);
    else {
        const float most = is_one_of<D, __half> ? 65504.0f : 3.40282347e38f;
        if (finite) sum = sum != sum ? Sum(0) : sum > Sum(most) ? Sum(most) : sum < Sum(-most) ? Sum(-most) : sum;
        return D(sum);
    }
}

}  // namespace details

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    static_assert(details::is_shape<Use, T>(M, N, K), "the emulator does not support a WMMA fragment of this shape and type");
    static constexpr bool sums = std::is_same<Use, accumulator>::value;
    static_assert(sums == std::is_void<Layout>::value, "fragments of matrix_a and matrix_b have a layout, accumulators none");
    static constexpr int rows = std::is_same<Use, matrix_b>::value ? K : M,
                         columns = std::is_same<Use, matrix_a>::value ? K : N;
    static constexpr int num_elements = rows * columns / 32, num_storage_elements = num_elements;
    using element_type = T;
    using storage_element_type = details::stored<T>;
    storage_element_type x[num_elements];
};

namespace details {
// Where element i of the lane lies in memory.
template <class Fragment>
EMULATOR_UNCHECKED inline size_t place(int i, unsigned leading, bool by_rows) {
    const unsigned at = 32u * i + ::emulator::lane(), row = at / Fragment::columns, column = at % Fragment::columns;
    return by_rows ? size_t(row) * leading + column : size_t(column) * leading + row;
}
template <class Fragment>
EMULATOR_INLINE void load(Fragment& f, const typename Fragment::storage_element_type* from, unsigned leading, bool by_rows,
                          int line) {
    ::emulator::warp_exchange(~0u, "", 0, ::emulator::WarpOp::matrix, line);
    for (int i = 0; i < Fragment::num_elements; ++i) {
        const auto* element = from + place<Fragment>(i, leading, by_rows);
        ::emulator::note_read(element, sizeof *element);
        __builtin_memcpy(&f.x[i], element, sizeof *element);
    }
}
}  // namespace details

template <class Use, int M, int N, int K, class T, class Layout>
EMULATOR_INLINE void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const details::stored<T>* from, unsigned leading,
                                      int line = __builtin_LINE()) {
    details::load(f, from, leading, std::is_same<Layout, row_major>::value, line);
}
template <int M, int N, int K, class T>
EMULATOR_INLINE void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const T* from, unsigned leading, layout_t layout,
                                      int line = __builtin_LINE()) {
    details::load(f, from, leading, layout == mem_row_major, line);
}
template <int M, int N, int K, class T>
EMULATOR_INLINE void store_matrix_sync(T* to, const fragment<accumulator, M, N, K, T>& f, unsigned leading, layout_t layout,
                                       int line = __builtin_LINE()) {
    using Fragment = fragment<accumulator, M, N, K, T>;
    ::emulator::warp_exchange(~0u, "", 0, ::emulator::WarpOp::matrix, line);
    for (int i = 0; i < Fragment::num_elements; ++i) {
        T* element = to + details::place<Fragment>(i, leading, layout == mem_row_major);
        ::emulator::note_write(element, sizeof *element);
        __builtin_memcpy(element, &f.x[i], sizeof *element);
    }
}
template <class Use, int M, int N, int K, class T, class Layout>
EMULATOR_INLINE void fill_fragment(fragment<Use, M, N, K, T, Layout>& f, const ::emulator::Given<details::stored<T>>& value) {
    for (auto& element : f.x) element = value;
}

// D = A * B + C. Products are added in the order of the inner index, as mma.sync's are here.
template <class D, int M, int N, int K, class AB, class LayoutA, class LayoutB, class C>
EMULATOR_UNCHECKED inline void mma_sync(fragment<accumulator, M, N, K, D>& d, const fragment<matrix_a, M, N, K, AB, LayoutA>& a,
                                        const fragment<matrix_b, M, N, K, AB, LayoutB>& b,
                                        const fragment<accumulator, M, N, K, C>& c, bool satf = false,
                                        int line = __builtin_LINE()) {
    static_assert(details::can_multiply<AB, C, D>(), "WMMA has no product of these types");
    char mine[sizeof a.x + sizeof b.x];
    __builtin_memcpy(mine, a.x, sizeof a.x);
    __builtin_memcpy(mine + sizeof a.x, b.x, sizeof b.x);
    const char* rows = ::emulator::warp_exchange(~0u, mine, sizeof mine, ::emulator::WarpOp::matrix, line);
    const auto element = [&](int at, size_t begin) EMULATOR_UNCHECKED {
        details::stored<AB> value;
        __builtin_memcpy(&value, rows + at % 32 * ::emulator::ROW + begin + at / 32 * sizeof value, sizeof value);
        return details::factor<AB>(value);
    };
    for (int i = 0; i < d.num_elements; ++i) {
        const int at = 32 * i + ::emulator::lane(), row = at / N, column = at % N;
        decltype(element(0, 0)) sum = c.x[i];
        for (int k = 0; k < K; ++k) sum += element(row * K + k, 0) * element(k * N + column, sizeof a.x);
        d.x[i] = details::result<D>(sum, satf);
    }
}

EMULATOR_INLINE float __float_to_tf32(float x) {
    return (::emulator::bits<uint32_t>(x) & 0x7f800000u) == 0x7f800000u
               ? x
               : ::emulator::bits<float>((::emulator::bits<uint32_t>(x) + 0x1000u) & 0xffffe000u);
}

}  // namespace nvcuda::wmma
