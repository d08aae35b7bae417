// WMMA: every shape and type of operands, both layouts, against sums of the host. Small integers, so that all of it is exact.
#include <mma.h>

#include <type_traits>

#include "expect.h"

using namespace nvcuda;
using wmma::col_major;
using wmma::row_major;

template <int M, int N, int K, class T, class S, class C, class LayoutA, class LayoutB>
__global__ void product(const S* a, const S* b, const C* c, C* d, bool satf) {
    wmma::fragment<wmma::matrix_a, M, N, K, T, LayoutA> fa;
    wmma::fragment<wmma::matrix_b, M, N, K, T, LayoutB> fb;
    wmma::fragment<wmma::accumulator, M, N, K, C> fc;
    wmma::load_matrix_sync(fa, a, std::is_same<LayoutA, row_major>::value ? K : M);
    wmma::load_matrix_sync(fb, b, std::is_same<LayoutB, row_major>::value ? N : K);
    if (c)
        wmma::load_matrix_sync(fc, c, N, wmma::mem_row_major);
    else
        wmma::fill_fragment(fc, 1.0f);
    if constexpr (std::is_same<T, wmma::precision::tf32>::value)
        for (auto& x : fa.x) x = wmma::__float_to_tf32(x);
    wmma::mma_sync(fc, fa, fb, fc, satf);
    for (int i = 0; i < fc.num_elements; ++i) fc.x[i] = fc.x[i] + fc.x[i];
    wmma::store_matrix_sync(d, fc, M, wmma::mem_col_major);
}

template <class T>
T* managed(int n) {
    T* p;
    cudaMallocManaged(&p, n * sizeof(T));
    return p;
}

template <int M, int N, int K, class T, class S, class C, class LayoutA, class LayoutB>
bool is_right(bool with_c) {
    const bool rows_a = std::is_same<LayoutA, row_major>::value, rows_b = std::is_same<LayoutB, row_major>::value;
    S *a = managed<S>(M * K), *b = managed<S>(K * N);
    C *c = managed<C>(M * N), *d = managed<C>(M * N);
    for (int i = 0; i < M * K; ++i) a[i] = S(float(i * 5 % 9));
    for (int i = 0; i < K * N; ++i) b[i] = S(float(i * 3 % 7));
    for (int i = 0; i < M * N; ++i) c[i] = C(float(i % 5));
    product<M, N, K, T, S, C, LayoutA, LayoutB><<<1, 32>>>(a, b, with_c ? c : nullptr, d, false);
    cudaDeviceSynchronize();
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) {
            double sum = with_c ? double(c[i * N + j]) : 1;
            for (int k = 0; k < K; ++k) sum += double(a[rows_a ? i * K + k : k * M + i]) * double(b[rows_b ? k * N + j : j * K + k]);
            if (double(d[j * M + i]) != 2 * sum) return false;
        }
    return true;
}

__global__ void largest(const signed char* ones, int* d) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, signed char, row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, signed char, col_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, int> c;
    wmma::load_matrix_sync(a, ones, 16);
    wmma::load_matrix_sync(b, ones, 16);
    wmma::fill_fragment(c, 0x7fffffff);
    wmma::mma_sync(c, a, b, c, true);
    wmma::store_matrix_sync(d, c, 16, wmma::mem_row_major);
}

int main() {
    EXPECT((is_right<16, 16, 16, half, half, float, row_major, col_major>(true)));
    EXPECT((is_right<16, 16, 16, half, half, half, col_major, row_major>(false)));
    EXPECT((is_right<32, 8, 16, __nv_bfloat16, __nv_bfloat16, float, row_major, row_major>(true)));
    EXPECT((is_right<8, 32, 16, half, half, float, col_major, col_major>(true)));
    EXPECT((is_right<8, 32, 16, signed char, signed char, int, col_major, col_major>(true)));
    EXPECT((is_right<16, 16, 16, unsigned char, unsigned char, int, row_major, col_major>(false)));
    EXPECT((is_right<16, 16, 8, wmma::precision::tf32, float, float, row_major, col_major>(true)));
    EXPECT((is_right<8, 8, 4, double, double, double, row_major, col_major>(true)));

    signed char* ones = managed<signed char>(256);
    int* d = managed<int>(256);
    for (int i = 0; i < 256; ++i) ones[i] = 1;
    largest<<<1, 32>>>(ones, d);
    cudaDeviceSynchronize();
    EXPECT(d[17] == 0x7fffffff);
}
