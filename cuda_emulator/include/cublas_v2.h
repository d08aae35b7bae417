// Matrix products of cuBLAS, called by host code: plain loops of the runtime library (gemm.cpp). Nothing else of cuBLAS is
// here.
#pragma once
#define CUBLAS_API_H_
#define CUBLAS_V2_H_
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <library_types.h>

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
    CUBLAS_STATUS_LICENSE_ERROR = 16
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C };
enum cublasMath_t {
    CUBLAS_DEFAULT_MATH = 0,
    CUBLAS_TENSOR_OP_MATH = 1,
    CUBLAS_PEDANTIC_MATH = 2,
    CUBLAS_TF32_TENSOR_OP_MATH = 3
};
struct cublasContext {
    cudaStream_t stream = nullptr;
    cublasMath_t mode = CUBLAS_DEFAULT_MATH;
};
using cublasHandle_t = cublasContext*;
enum cublasPointerMode_t { CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
enum cublasComputeType_t {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_64F = 70,
    CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77
};

namespace emulator {
struct GemmOperand {
    const void* data;
    cudaDataType type;
    long long leading, stride;  // of a column, of a matrix of the batch, in elements
    bool transposed;
};
// C = alpha A B + beta C for each matrix of the batch, stored by columns; A is m x k and C is m x n. Products are added in
// double where `in_double`, or else in float, whatever the math mode. False if check mode has reported a mistake.
bool gemm(int m, int n, int k, double alpha, const GemmOperand& a, const GemmOperand& b, double beta, const GemmOperand& c,
          int batch, bool in_double, const char* function, int line);
}  // namespace emulator

#define EMULATOR_LINE_OF_CALL int line = __builtin_LINE()

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { return *handle = new cublasContext, CUBLAS_STATUS_SUCCESS; }
// Copies of vectors and of matrices that lie by columns, between host and device.
inline cublasStatus_t emulator_cublas_copy(int rows, int columns, int bytes, const void* from, int from_step, void* to,
                                           int to_step, cudaMemcpyKind kind) {
    if (rows < 0 || columns < 0 || bytes <= 0 || from_step <= 0 || to_step <= 0) return CUBLAS_STATUS_INVALID_VALUE;
    const cudaError_t error =
        cudaMemcpy2D(to, size_t(to_step) * bytes, from, size_t(from_step) * bytes, size_t(rows) * bytes, size_t(columns), kind);
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_MAPPING_ERROR;
}
inline cublasStatus_t cublasSetVector(int n, int bytes, const void* x, int step, void* to, int to_step) {
    return emulator_cublas_copy(1, n, bytes, x, step, to, to_step, cudaMemcpyHostToDevice);
}
inline cublasStatus_t cublasGetVector(int n, int bytes, const void* x, int step, void* to, int to_step) {
    return emulator_cublas_copy(1, n, bytes, x, step, to, to_step, cudaMemcpyDeviceToHost);
}
inline cublasStatus_t cublasSetMatrix(int rows, int columns, int bytes, const void* a, int step, void* to, int to_step) {
    return emulator_cublas_copy(rows, columns, bytes, a, step, to, to_step, cudaMemcpyHostToDevice);
}
inline cublasStatus_t cublasGetMatrix(int rows, int columns, int bytes, const void* a, int step, void* to, int to_step) {
    return emulator_cublas_copy(rows, columns, bytes, a, step, to, to_step, cudaMemcpyDeviceToHost);
}
// Every copy is done at once.
#define EMULATOR_CUBLAS_ASYNC(NAME, PARAMETERS, ...) \
    inline cublasStatus_t NAME##Async PARAMETERS { return NAME(__VA_ARGS__); }
EMULATOR_CUBLAS_ASYNC(cublasSetVector, (int n, int bytes, const void* x, int step, void* to, int to_step, cudaStream_t), n,
                      bytes, x, step, to, to_step)
EMULATOR_CUBLAS_ASYNC(cublasGetVector, (int n, int bytes, const void* x, int step, void* to, int to_step, cudaStream_t), n,
                      bytes, x, step, to, to_step)
EMULATOR_CUBLAS_ASYNC(cublasSetMatrix, (int m, int n, int bytes, const void* a, int step, void* to, int to_step, cudaStream_t),
                      m, n, bytes, a, step, to, to_step)
EMULATOR_CUBLAS_ASYNC(cublasGetMatrix, (int m, int n, int bytes, const void* a, int step, void* to, int to_step, cudaStream_t),
                      m, n, bytes, a, step, to, to_step)
#undef EMULATOR_CUBLAS_ASYNC
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    return handle->stream = stream, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
    return *stream = handle->stream, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    return handle->mode = mode, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
    return *mode = handle->mode, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasGetPointerMode(cublasHandle_t, cublasPointerMode_t* mode) {
    return *mode = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasGetVersion(cublasHandle_t, int* version) { return *version = 130000, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetPointerMode(cublasHandle_t, cublasPointerMode_t mode) {
    return mode == CUBLAS_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}
inline const char* cublasGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "the operation failed";
}

inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t of_a, cublasOperation_t of_b, int m, int n,
                                                 int k, const void* alpha, const void* a, cudaDataType a_type, int lda,
                                                 long long stride_a, const void* b, cudaDataType b_type, int ldb,
                                                 long long stride_b, const void* beta, void* c, cudaDataType c_type, int ldc,
                                                 long long stride_c, int batch, cublasComputeType_t compute,
                                                 cublasGemmAlgo_t = CUBLAS_GEMM_DEFAULT,
                                                 const char* function = "cublasGemmStridedBatchedEx", EMULATOR_LINE_OF_CALL) {
    if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < (of_a ? k : m) || ldb < (of_b ? n : k) || ldc < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    const auto scalar = [&](const void* value) -> double {
        if (compute == CUBLAS_COMPUTE_64F) return *(const double*)value;
        return compute == CUBLAS_COMPUTE_16F ? double(__half2float(*(const __half*)value)) : double(*(const float*)value);
    };
    const bool done = ::emulator::gemm(m, n, k, scalar(alpha), {a, a_type, lda, stride_a, of_a != CUBLAS_OP_N},
                                       {b, b_type, ldb, stride_b, of_b != CUBLAS_OP_N}, scalar(beta),
                                       {c, c_type, ldc, stride_c, false}, batch, compute == CUBLAS_COMPUTE_64F, function, line);
    return done ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m, int n, int k,
                                   const void* alpha, const void* a, cudaDataType a_type, int lda, const void* b,
                                   cudaDataType b_type, int ldb, const void* beta, void* c, cudaDataType c_type, int ldc,
                                   cublasComputeType_t compute, cublasGemmAlgo_t algorithm = CUBLAS_GEMM_DEFAULT,
                                   EMULATOR_LINE_OF_CALL) {
    return cublasGemmStridedBatchedEx(handle, of_a, of_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type,
                                      ldc, 0, 1, compute, algorithm, "cublasGemmEx", line);
}
// The products of one type throughout, and of a matrix with a vector whose elements follow one another.
#define EMULATOR_GEMM(LETTER, T, DATA, COMPUTE)                                                                                \
    inline cublasStatus_t cublas##LETTER##gemmStridedBatched(                                                                  \
        cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m, int n, int k, const T* alpha,            \
        const T* a, int lda, long long stride_a, const T* b, int ldb, long long stride_b, const T* beta, T* c, int ldc,        \
        long long stride_c, int batch, EMULATOR_LINE_OF_CALL) {                                                                \
        return cublasGemmStridedBatchedEx(handle, of_a, of_b, m, n, k, alpha, a, DATA, lda, stride_a, b, DATA, ldb, stride_b,  \
                                          beta, c, DATA, ldc, stride_c, batch, COMPUTE, CUBLAS_GEMM_DEFAULT,                   \
                                          "cublas" #LETTER "gemmStridedBatched", line);                                        \
    }                                                                                                                          \
    inline cublasStatus_t cublas##LETTER##gemm(cublasHandle_t handle, cublasOperation_t of_a, cublasOperation_t of_b, int m,   \
                                               int n, int k, const T* alpha, const T* a, int lda, const T* b, int ldb,         \
                                               const T* beta, T* c, int ldc, EMULATOR_LINE_OF_CALL) {                          \
        return cublasGemmStridedBatchedEx(handle, of_a, of_b, m, n, k, alpha, a, DATA, lda, 0, b, DATA, ldb, 0, beta, c, DATA, \
                                          ldc, 0, 1, COMPUTE, CUBLAS_GEMM_DEFAULT, "cublas" #LETTER "gemm", line);             \
    }                                                                                                                          \
    inline cublasStatus_t cublas##LETTER##gemv(cublasHandle_t handle, cublasOperation_t of_a, int rows, int columns,           \
                                               const T* alpha, const T* a, int lda, const T* x, int x_step, const T* beta,     \
                                               T* y, int y_step, EMULATOR_LINE_OF_CALL) {                                      \
        if (x_step != 1 || y_step != 1) return CUBLAS_STATUS_NOT_SUPPORTED;                                                    \
        const int m = of_a ? columns : rows, k = of_a ? rows : columns;                                                        \
        return cublasGemmStridedBatchedEx(handle, of_a, CUBLAS_OP_N, m, 1, k, alpha, a, DATA, lda, 0, x, DATA, k, 0, beta, y,  \
                                          DATA, m, 0, 1, COMPUTE, CUBLAS_GEMM_DEFAULT, "cublas" #LETTER "gemv", line);         \
    }
EMULATOR_GEMM(S, float, CUDA_R_32F, CUBLAS_COMPUTE_32F)
EMULATOR_GEMM(D, double, CUDA_R_64F, CUBLAS_COMPUTE_64F)
EMULATOR_GEMM(H, __half, CUDA_R_16F, CUBLAS_COMPUTE_16F)
#undef EMULATOR_GEMM
#undef EMULATOR_LINE_OF_CALL
