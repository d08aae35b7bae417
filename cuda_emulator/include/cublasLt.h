// Handles of cuBLASLt, which texts create beside cuBLAS's; its products are not here.
#pragma once
#include <cublas_v2.h>

using cublasLtHandle_t = cublasContext*;
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return cublasCreate(handle); }
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return cublasDestroy(handle); }
