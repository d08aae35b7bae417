// Arrays, texture objects and surface objects. Fetches follow the CUDA C++ Programming Guide's appendix "Texture Fetching": its
// addressing modes, and filtering with fractions of 8 bits. Not here: mipmaps, cube maps, gathers, and sRGB.
#pragma once
#include <emulator/host_memory.h>
#include <emulator/runtime_api.h>
#include <emulator/vector_types.h>
#include <math.h>
#include <string.h>

#include <type_traits>

enum cudaChannelFormatKind {
    cudaChannelFormatKindSigned,
    cudaChannelFormatKindUnsigned,
    cudaChannelFormatKindFloat,
    cudaChannelFormatKindNone
};
struct cudaChannelFormatDesc {
    int x, y, z, w;  // bits
    cudaChannelFormatKind f;
};
inline cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, cudaChannelFormatKind kind) {
    return {x, y, z, w, kind};
}

namespace emulator {
// The elements of a vector type, and how many there are.
template <class T, class = void>
struct Channels {
    using type = T;
    static constexpr int count = 1;
};
template <class T>
struct Channels<T, std::void_t<decltype(T::x)>> {
    using type = decltype(T::x);
    static constexpr int count = int(sizeof(T) / sizeof(type));
};
}  // namespace emulator

template <class T>
inline cudaChannelFormatDesc cudaCreateChannelDesc() {
    using E = typename ::emulator::Channels<T>::type;
    constexpr int bits = sizeof(E) * 8, count = ::emulator::Channels<T>::count;
    return {bits, count > 1 ? bits : 0, count > 2 ? bits : 0, count > 3 ? bits : 0,
            std::is_floating_point<E>::value ? cudaChannelFormatKindFloat
            : std::is_signed<E>::value       ? cudaChannelFormatKindSigned
                                             : cudaChannelFormatKindUnsigned};
}

// ---- arrays: rows of texels, and layers of rows
struct cudaArray {
    char* data;
    cudaChannelFormatDesc format;
    cudaExtent extent;  // 0: the array has fewer dimensions
    unsigned flags;
    size_t texel() const { return size_t(format.x + format.y + format.z + format.w) / 8; }
    size_t row() const { return extent.width * texel(); }
    size_t rows() const { return extent.height ? extent.height : 1; }
    size_t layers() const { return extent.depth ? extent.depth : 1; }
};
using cudaArray_t = cudaArray*;
using cudaArray_const_t = const cudaArray*;
#define cudaArrayDefault 0
#define cudaArrayLayered 1
#define cudaArraySurfaceLoadStore 2
#define EMULATOR_LINE_OF_CALL int line = __builtin_LINE()

inline cudaError_t cudaMalloc3DArray(cudaArray_t* array, const cudaChannelFormatDesc* format, cudaExtent extent,
                                     unsigned flags = 0) {
    *array = new cudaArray{nullptr, *format, extent, flags};
    return cudaMalloc(&(*array)->data, (*array)->row() * (*array)->rows() * (*array)->layers());
}
inline cudaError_t cudaMallocArray(cudaArray_t* array, const cudaChannelFormatDesc* format, size_t width, size_t height = 0,
                                   unsigned flags = 0) {
    return cudaMalloc3DArray(array, format, {width, height, 0}, flags);
}
inline cudaError_t cudaFreeArray(cudaArray_t array, EMULATOR_LINE_OF_CALL) {
    if (!array) return cudaSuccess;
    const cudaError_t freed = cudaFree(array->data, line);
    return delete array, freed;
}
// Offsets and widths in bytes.
inline cudaError_t cudaMemcpy2DToArray(cudaArray_t to, size_t x, size_t y, const void* from, size_t pitch, size_t width,
                                       size_t rows, cudaMemcpyKind kind, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_copy(to->data + y * to->row() + x, to->row(), from, pitch, width, rows, kind,
                                                    "cudaMemcpy2DToArray", line));
}
inline cudaError_t cudaMemcpy2DFromArray(void* to, size_t pitch, cudaArray_const_t from, size_t x, size_t y, size_t width,
                                         size_t rows, cudaMemcpyKind kind, EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(::emulator::host_copy(to, pitch, from->data + y * from->row() + x, from->row(), width, rows, kind,
                                                    "cudaMemcpy2DFromArray", line));
}
inline cudaError_t cudaMemcpyToArray(cudaArray_t to, size_t x, size_t y, const void* from, size_t bytes, cudaMemcpyKind kind,
                                     EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(
        ::emulator::host_copy(to->data + y * to->row() + x, bytes, from, bytes, bytes, 1, kind, "cudaMemcpyToArray", line));
}
inline cudaError_t cudaMemcpyFromArray(void* to, cudaArray_const_t from, size_t x, size_t y, size_t bytes, cudaMemcpyKind kind,
                                       EMULATOR_LINE_OF_CALL) {
    return ::emulator::status(
        ::emulator::host_copy(to, bytes, from->data + y * from->row() + x, bytes, bytes, 1, kind, "cudaMemcpyFromArray", line));
}
struct cudaMemcpy3DParms {
    cudaArray_t srcArray;
    cudaPos srcPos;
    cudaPitchedPtr srcPtr;
    cudaArray_t dstArray;
    cudaPos dstPos;
    cudaPitchedPtr dstPtr;
    cudaExtent extent;
    cudaMemcpyKind kind;
};
// Widths are in texels where an array takes part, and otherwise in bytes.
inline cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* p, EMULATOR_LINE_OF_CALL) {
    const size_t texel = p->srcArray ? p->srcArray->texel() : p->dstArray ? p->dstArray->texel() : 1;
    const auto place = [](cudaArray_t array, cudaPos at, cudaPitchedPtr pointer, size_t layer) {
        if (array) return array->data + ((at.z + layer) * array->rows() + at.y) * array->row() + at.x * array->texel();
        return (char*)pointer.ptr + ((at.z + layer) * pointer.ysize + at.y) * pointer.pitch + at.x;
    };
    for (size_t layer = 0; layer < p->extent.depth; ++layer)
        if (!::emulator::host_copy(
                place(p->dstArray, p->dstPos, p->dstPtr, layer), p->dstArray ? p->dstArray->row() : p->dstPtr.pitch,
                place(p->srcArray, p->srcPos, p->srcPtr, layer), p->srcArray ? p->srcArray->row() : p->srcPtr.pitch,
                p->extent.width * texel, p->extent.height, p->kind, "cudaMemcpy3D", line))
            return cudaErrorInvalidValue;
    return cudaSuccess;
}
#undef EMULATOR_LINE_OF_CALL

// ---- objects
enum cudaResourceType {
    cudaResourceTypeArray = 0,
    cudaResourceTypeMipmappedArray = 1,
    cudaResourceTypeLinear = 2,
    cudaResourceTypePitch2D = 3
};
enum cudaTextureAddressMode { cudaAddressModeWrap, cudaAddressModeClamp, cudaAddressModeMirror, cudaAddressModeBorder };
enum cudaTextureFilterMode { cudaFilterModePoint, cudaFilterModeLinear };
enum cudaTextureReadMode { cudaReadModeElementType, cudaReadModeNormalizedFloat };
struct cudaResourceDesc {
    cudaResourceType resType;
    union {
        struct {
            cudaArray_t array;
        } array;
        struct {
            void* devPtr;
            cudaChannelFormatDesc desc;
            size_t sizeInBytes;
        } linear;
        struct {
            void* devPtr;
            cudaChannelFormatDesc desc;
            size_t width, height, pitchInBytes;
        } pitch2D;
    } res;
};
struct cudaTextureDesc {
    cudaTextureAddressMode addressMode[3];
    cudaTextureFilterMode filterMode;
    cudaTextureReadMode readMode;
    int sRGB;
    float borderColor[4];
    int normalizedCoords;
    unsigned maxAnisotropy;
    cudaTextureFilterMode mipmapFilterMode;
    float mipmapLevelBias, minMipmapLevelClamp, maxMipmapLevelClamp;
    int disableTrilinearOptimization;
};
struct cudaResourceViewDesc {
    int format;
    size_t width, height, depth;
};
using cudaTextureObject_t = unsigned long long;
using cudaSurfaceObject_t = unsigned long long;

namespace emulator {

struct Texture {
    char* data;
    cudaChannelFormatDesc format;
    size_t texel, pitch;
    int size[3];  // texels of a row, rows, layers
    cudaTextureDesc how;
};

inline cudaError_t make_texture(cudaTextureObject_t* object, const cudaResourceDesc* from, const cudaTextureDesc* how) {
    Texture t{};
    if (how) t.how = *how;
    const auto texel = [](const cudaChannelFormatDesc& f) { return size_t(f.x + f.y + f.z + f.w) / 8; };
    if (from->resType == cudaResourceTypeArray) {
        const cudaArray& a = *from->res.array.array;
        t.data = a.data, t.format = a.format, t.pitch = a.row();
        t.size[0] = int(a.extent.width), t.size[1] = int(a.rows()), t.size[2] = int(a.layers());
    } else if (from->resType == cudaResourceTypeLinear) {
        const auto& l = from->res.linear;
        t.data = (char*)l.devPtr, t.format = l.desc, t.pitch = l.sizeInBytes;
        t.size[0] = int(l.sizeInBytes / texel(l.desc)), t.size[1] = t.size[2] = 1;
    } else if (from->resType == cudaResourceTypePitch2D) {
        const auto& p = from->res.pitch2D;
        t.data = (char*)p.devPtr, t.format = p.desc, t.pitch = p.pitchInBytes;
        t.size[0] = int(p.width), t.size[1] = int(p.height), t.size[2] = 1;
    } else
        return cudaErrorNotSupported;
    t.texel = texel(t.format);
    if (how && (how->sRGB || !t.texel)) return cudaErrorNotSupported;
    return *object = (cudaTextureObject_t) new Texture(t), cudaSuccess;
}

// The index that an addressing mode makes of one outside; -1: the border. Without normalised coordinates they clamp.
EMULATOR_UNCHECKED inline int addressed(int i, int size, cudaTextureAddressMode mode, bool normalised) {
    if (i >= 0 && i < size) return i;
    if (mode == cudaAddressModeBorder) return -1;
    if (normalised && mode == cudaAddressModeWrap) return (i % size + size) % size;
    if (normalised && mode == cudaAddressModeMirror) {
        const int at = (i % (2 * size) + 2 * size) % (2 * size);
        return at < size ? at : 2 * size - 1 - at;
    }
    return i < 0 ? 0 : size - 1;
}

// The texel's address, which is read by the calling thread; nullptr: the border.
EMULATOR_UNCHECKED inline const char* texel_at(const Texture& t, const int (&at)[3], int dimensions) {
    int i[3] = {at[0], at[1], at[2]};
    for (int d = 0; d < dimensions; ++d)
        if ((i[d] = addressed(i[d], t.size[d], t.how.addressMode[d], t.how.normalizedCoords)) < 0) return nullptr;
    const char* address = t.data + (size_t(i[2]) * t.size[1] + i[1]) * t.pitch + size_t(i[0]) * t.texel;
    note_read(address, unsigned(t.texel));
    return address;
}

// An element of a texel as a float: of an integer, the fraction of the largest one.
EMULATOR_UNCHECKED inline float channel(const Texture& t, const char* texel, int which) {
    if (!texel) return t.how.borderColor[which];
    const int bits = t.format.x;
    const char* from = texel + which * bits / 8;
    if (t.format.f == cudaChannelFormatKindFloat) {
        if (bits == 16) {
            uint16_t half;
            memcpy(&half, from, 2);
            _Float16 value;
            memcpy(&value, &half, 2);
            return float(value);
        }
        float value;
        memcpy(&value, from, 4);
        return value;
    }
    if (t.format.f == cudaChannelFormatKindUnsigned) {
        uint32_t value = 0;
        memcpy(&value, from, bits / 8);
        return float(double(value) / double((1ull << bits) - 1));
    }
    int32_t value = 0;
    memcpy(&value, from, bits / 8);
    value = int32_t(uint32_t(value) << (32 - bits)) >> (32 - bits);
    return fmaxf(-1.0f, float(double(value) / double((1ull << (bits - 1)) - 1)));
}

template <class T>
EMULATOR_UNCHECKED inline T from_texel(const Texture& t, const char* texel) {
    T value;
    using E = typename Channels<T>::type;
    E elements[Channels<T>::count] = {};
    const bool as_it_is =
        t.how.readMode == cudaReadModeElementType && !(t.format.f == cudaChannelFormatKindFloat && t.format.x == 16);
    for (int c = 0; c < Channels<T>::count; ++c)
        if (!as_it_is)
            elements[c] = E(channel(t, texel, c));
        else if (texel)
            memcpy(&elements[c], texel + c * sizeof(E), sizeof(E));
        else
            elements[c] = E(t.how.borderColor[c]);
    return memcpy(&value, elements, sizeof elements), value;
}

template <class T>
EMULATOR_UNCHECKED inline T sampled(cudaTextureObject_t object, float x, float y, float z, int dimensions, int layer = 0) {
    const Texture& t = *(const Texture*)object;
    float at[3] = {x, y, z};
    if (t.how.normalizedCoords)
        for (int d = 0; d < dimensions; ++d) at[d] *= t.size[d];
    int first[3] = {0, 0, layer};
    if (t.how.filterMode == cudaFilterModePoint) {
        for (int d = 0; d < dimensions; ++d) first[d] = int(floorf(at[d]));
        return from_texel<T>(t, texel_at(t, first, dimensions));
    }
    using E = typename Channels<T>::type;
    float fraction[3] = {};
    for (int d = 0; d < dimensions; ++d) {
        const float begin = floorf(at[d] - 0.5f);
        first[d] = int(begin), fraction[d] = roundf((at[d] - 0.5f - begin) * 256) / 256;
    }
    float sums[4] = {};
    for (int corner = 0; corner < 1 << dimensions; ++corner) {
        int place[3] = {first[0], first[1], first[2]};
        float weight = 1;
        for (int d = 0; d < dimensions; ++d) {
            const bool upper = corner >> d & 1;
            place[d] += upper, weight *= upper ? fraction[d] : 1 - fraction[d];
        }
        if (weight == 0) continue;
        const char* texel = texel_at(t, place, dimensions);
        for (int c = 0; c < Channels<T>::count; ++c) sums[c] += weight * channel(t, texel, c);
    }
    E elements[Channels<T>::count];
    for (int c = 0; c < Channels<T>::count; ++c) elements[c] = E(sums[c]);
    T value;
    return memcpy(&value, elements, sizeof elements), value;
}

// A surface's bytes; nullptr outside, where the boundary mode is zero or clamp is not asked for.
EMULATOR_UNCHECKED inline char* surface_at(cudaSurfaceObject_t object, int byte, int y, int z, unsigned bytes) {
    const Texture& t = *(const Texture*)object;
    const bool inside = byte >= 0 && byte + int(bytes) <= int(t.pitch) && y >= 0 && y < t.size[1] && z >= 0 && z < t.size[2];
    return inside ? t.data + (size_t(z) * t.size[1] + y) * t.pitch + byte : nullptr;
}

}  // namespace emulator

inline cudaError_t cudaCreateTextureObject(cudaTextureObject_t* object, const cudaResourceDesc* resource,
                                           const cudaTextureDesc* how, const cudaResourceViewDesc* view) {
    return view ? cudaErrorNotSupported : ::emulator::make_texture(object, resource, how);
}
inline cudaError_t cudaDestroyTextureObject(cudaTextureObject_t object) {
    return delete (::emulator::Texture*)object, cudaSuccess;
}
inline cudaError_t cudaCreateSurfaceObject(cudaSurfaceObject_t* object, const cudaResourceDesc* resource) {
    return ::emulator::make_texture(object, resource, nullptr);
}
inline cudaError_t cudaDestroySurfaceObject(cudaSurfaceObject_t object) { return cudaDestroyTextureObject(object); }

// ---- fetches
template <class T>
EMULATOR_UNCHECKED inline T tex1Dfetch(cudaTextureObject_t object, int i) {  // outside it is 0
    const ::emulator::Texture& t = *(const ::emulator::Texture*)object;
    return i < 0 || i >= t.size[0] ? T{} : ::emulator::from_texel<T>(t, ::emulator::texel_at(t, {i, 0, 0}, 1));
}
template <class T>
inline T tex1D(cudaTextureObject_t object, float x) {
    return ::emulator::sampled<T>(object, x, 0, 0, 1);
}
template <class T>
inline T tex2D(cudaTextureObject_t object, float x, float y) {
    return ::emulator::sampled<T>(object, x, y, 0, 2);
}
template <class T>
inline T tex3D(cudaTextureObject_t object, float x, float y, float z) {
    return ::emulator::sampled<T>(object, x, y, z, 3);
}
template <class T>
inline T tex2DLayered(cudaTextureObject_t object, float x, float y, int layer) {
    return ::emulator::sampled<T>(object, x, y, 0, 2, layer);
}
// The form that writes to where a pointer points.
template <class T>
inline void tex2D(T* to, cudaTextureObject_t object, float x, float y) {
    *to = tex2D<T>(object, x, y);
}

// ---- surfaces: `byte` counts along the row
enum cudaSurfaceBoundaryMode { cudaBoundaryModeZero, cudaBoundaryModeClamp, cudaBoundaryModeTrap };

namespace emulator {
template <class T>
EMULATOR_UNCHECKED inline T surface_read(cudaSurfaceObject_t object, int byte, int y, int z, cudaSurfaceBoundaryMode mode,
                                         int line) {
    T value{};
    const char* from = surface_at(object, byte, y, z, sizeof(T));
    if (!from && mode == cudaBoundaryModeTrap) trap(line);
    if (!from && mode == cudaBoundaryModeClamp) {
        const Texture& t = *(const Texture*)object;
        const auto clamped = [](int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; };
        byte = clamped(byte / int(sizeof(T)), t.size[0]) * int(sizeof(T));
        from = surface_at(object, byte, clamped(y, t.size[1]), clamped(z, t.size[2]), sizeof(T));
    }
    if (from) note_read(from, sizeof(T)), memcpy(&value, from, sizeof(T));
    return value;
}
template <class T>
EMULATOR_UNCHECKED inline void surface_write(T value, cudaSurfaceObject_t object, int byte, int y, int z,
                                             cudaSurfaceBoundaryMode mode, int line) {
    char* to = surface_at(object, byte, y, z, sizeof(T));
    if (!to && mode == cudaBoundaryModeTrap) trap(line);
    if (to) note_write(to, sizeof(T)), memcpy(to, &value, sizeof(T));
}
}  // namespace emulator

#define EMULATOR_MODE cudaSurfaceBoundaryMode mode = cudaBoundaryModeTrap, int line = __builtin_LINE()
template <class T>
inline T surf1Dread(cudaSurfaceObject_t object, int byte, EMULATOR_MODE) {
    return ::emulator::surface_read<T>(object, byte, 0, 0, mode, line);
}
template <class T>
inline T surf2Dread(cudaSurfaceObject_t object, int byte, int y, EMULATOR_MODE) {
    return ::emulator::surface_read<T>(object, byte, y, 0, mode, line);
}
template <class T>
inline T surf3Dread(cudaSurfaceObject_t object, int byte, int y, int z, EMULATOR_MODE) {
    return ::emulator::surface_read<T>(object, byte, y, z, mode, line);
}
template <class T>
inline void surf2Dread(T* to, cudaSurfaceObject_t object, int byte, int y, EMULATOR_MODE) {
    *to = ::emulator::surface_read<T>(object, byte, y, 0, mode, line);
}
template <class T>
inline void surf1Dwrite(T value, cudaSurfaceObject_t object, int byte, EMULATOR_MODE) {
    ::emulator::surface_write(value, object, byte, 0, 0, mode, line);
}
template <class T>
inline void surf2Dwrite(T value, cudaSurfaceObject_t object, int byte, int y, EMULATOR_MODE) {
    ::emulator::surface_write(value, object, byte, y, 0, mode, line);
}
template <class T>
inline void surf3Dwrite(T value, cudaSurfaceObject_t object, int byte, int y, int z, EMULATOR_MODE) {
    ::emulator::surface_write(value, object, byte, y, z, mode, line);
}
#undef EMULATOR_MODE
