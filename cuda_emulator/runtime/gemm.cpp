// Matrix products that host code asks cuBLAS for.
#include <vector>

#include "device_memory.h"
#include "emulator/bits.h"
#include "emulator/conversions.h"
#include "emulator/float16.h"
#include "emulator/host_api.h"

#include "cublas_v2.h"

namespace emulator {

namespace {

size_t bytes_of(cudaDataType type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

double element(const void* data, cudaDataType type, long long at) {
    switch (type) {
        case CUDA_R_64F:
            return ((const double*)data)[at];
        case CUDA_R_32F:
            return ((const float*)data)[at];
        case CUDA_R_16F:
            return half_to_float(((const uint16_t*)data)[at]);
        default:
            return bits<float>(uint32_t(((const uint16_t*)data)[at]) << 16);
    }
}

void set_element(void* data, cudaDataType type, long long at, double value) {
    switch (type) {
        case CUDA_R_64F:
            ((double*)data)[at] = value;
            break;
        case CUDA_R_32F:
            ((float*)data)[at] = float(value);
            break;
        case CUDA_R_16F:
            ((uint16_t*)data)[at] = float_to_half(float(value));
            break;
        default:
            ((uint16_t*)data)[at] = float_to_bfloat16(float(value));
    }
}

// A matrix of the batch as numbers, row by row.
template <class Sum>
void unpack(std::vector<Sum>& to, const GemmOperand& from, int item, int rows, int columns) {
    to.resize(size_t(rows) * columns);
    for (int row = 0; row < rows; ++row)
        for (int column = 0; column < columns; ++column) {
            const long long at = from.transposed ? row * from.leading + column : column * from.leading + row;
            to[size_t(row) * columns + column] = Sum(element(from.data, from.type, item * from.stride + at));
        }
}

template <class Sum>
void multiply(int m, int n, int k, double alpha, const GemmOperand& a, const GemmOperand& b, double beta, const GemmOperand& c,
              int batch) {
    std::vector<Sum> rows, columns, sums(n);
    for (int item = 0; item < batch; ++item) {
        unpack(rows, a, item, m, k);
        unpack(columns, b, item, k, n);
        for (int i = 0; i < m; ++i) {
            sums.assign(n, 0);
            for (int p = 0; p < k; ++p)
                for (int j = 0; j < n; ++j) sums[j] += rows[size_t(i) * k + p] * columns[size_t(p) * n + j];
            for (int j = 0; j < n; ++j) {
                const long long at = item * c.stride + j * c.leading + i;
                const double before = beta == 0 ? 0 : beta * element(c.data, c.type, at);  // C need not be initialised then
                set_element(const_cast<void*>(c.data), c.type, at, alpha * double(sums[j]) + before);
            }
        }
    }
}

bool holds(const GemmOperand& x, int rows, int columns, int batch, bool is_read, const char* function, int line) {
    if (!rows || !columns || !batch) return true;
    if (x.transposed) std::swap(rows, columns);
    const long long elements = (batch - 1) * x.stride + (columns - 1) * x.leading + rows;
    if (!in_bounds(x.data, size_t(elements) * bytes_of(x.type), function, line)) return false;
    for (int item = 0; is_read && item < batch; ++item)
        for (int column = 0; column < columns; ++column) {
            const char* first = (const char*)x.data + (item * x.stride + column * x.leading) * bytes_of(x.type);
            if (!written(first, rows * bytes_of(x.type), function, line)) return false;
        }
    return true;
}

}  // namespace

bool gemm(int m, int n, int k, double alpha, const GemmOperand& a, const GemmOperand& b, double beta, const GemmOperand& c,
          int batch, bool in_double, const char* function, int line) {
    if (!holds(a, m, k, batch, true, function, line) || !holds(b, k, n, batch, true, function, line) ||
        !holds(c, m, n, batch, beta != 0, function, line))
        return false;
    in_double ? multiply<double>(m, n, k, alpha, a, b, beta, c, batch) : multiply<float>(m, n, k, alpha, a, b, beta, c, batch);
    return true;
}

}  // namespace emulator
