// The driver's encoder of tensor maps, with the driver's checks of its arguments.
#include "tensor_map.h"

#include <cuda.h>
#include <string.h>

#include "emulator/runtime_api.h"

namespace {

// Bytes of an element, 0 for types that the emulator does not know.
unsigned element_bytes(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8:
            return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
            return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32:
        case CU_TENSOR_MAP_DATA_TYPE_INT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
        case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
        case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ:
            return 4;
        case CU_TENSOR_MAP_DATA_TYPE_UINT64:
        case CU_TENSOR_MAP_DATA_TYPE_INT64:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
            return 8;
        default:
            return 0;
    }
}

bool is_float(CUtensorMapDataType type) {
    return type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16 && type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = error == CUDA_SUCCESS               ? "CUDA_SUCCESS"
            : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
                                                : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_SUCCESS               ? "no error"
            : error == CUDA_ERROR_INVALID_VALUE ? "invalid argument"
            : error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported"
                                                : "unknown error";
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if (!map || (uintptr_t)map % 64 || !sizes || !box || !element_strides) return CUDA_ERROR_INVALID_VALUE;
    if (rank < 1 || rank > 5 || (rank > 1 && !strides)) return CUDA_ERROR_INVALID_VALUE;
    if (!address || (uintptr_t)address % 16) return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)type > CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B || (unsigned)interleave > CU_TENSOR_MAP_INTERLEAVE_32B ||
        (unsigned)swizzle > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B || (unsigned)promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B ||
        (unsigned)fill > CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
        return CUDA_ERROR_INVALID_VALUE;
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE && rank < 3) return CUDA_ERROR_INVALID_VALUE;
    const unsigned bytes = element_bytes(type);
    if (!bytes || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && !is_float(type)) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < rank; ++i) {
        if (!sizes[i] || sizes[i] > (cuuint64_t)1 << 32) return CUDA_ERROR_INVALID_VALUE;
        if (!box[i] || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
        if (!element_strides[i] || element_strides[i] > 8) return CUDA_ERROR_INVALID_VALUE;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= (cuuint64_t)1 << 40)) return CUDA_ERROR_INVALID_VALUE;
    }
    const unsigned inner_bytes = box[0] * bytes;
    if (inner_bytes % 16) return CUDA_ERROR_INVALID_VALUE;
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner_bytes > 16u << swizzle) return CUDA_ERROR_INVALID_VALUE;

    emulator::TensorMap encoded{};
    encoded.magic = emulator::TensorMap::MAGIC;
    encoded.address = (char*)address;
    encoded.rank = (uint8_t)rank;
    encoded.element_bytes = (uint8_t)bytes;
    encoded.swizzle = (emulator::Swizzle)swizzle;
    encoded.fill_with_nan = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    for (unsigned i = 0; i < 5; ++i) {
        const bool given = i < rank;
        encoded.strides[i] = i == 0 ? bytes : given ? strides[i - 1] : 0;
        encoded.last[i] = given ? uint32_t(sizes[i] - 1) : 0;
        encoded.steps[i] = given && i > 0 ? (uint8_t)element_strides[i] : 1;  // ignored in the first dimension
        encoded.box[i] = given ? uint16_t((box[i] + encoded.steps[i] - 1) / encoded.steps[i]) : 1;
    }
    memset(map, 0, sizeof *map);
    memcpy(map, &encoded, sizeof encoded);
    return CUDA_SUCCESS;
}

// Functions of the driver that host code may ask for by name.
void* emulator_driver_function(const char* name) {
    if (!strcmp(name, "cuTensorMapEncodeTiled")) return (void*)cuTensorMapEncodeTiled;
    if (!strcmp(name, "cuGetErrorString")) return (void*)cuGetErrorString;
    if (!strcmp(name, "cuGetErrorName")) return (void*)cuGetErrorName;
    if (!strcmp(name, "cuInit")) return (void*)cuInit;
    return nullptr;
}
}
