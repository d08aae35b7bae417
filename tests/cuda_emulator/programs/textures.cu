// Texture and surface objects: what the Programming Guide says of filtering and addressing.
#include "expect.h"

const int WIDTH = 4, HEIGHT = 2;

__global__ void fetch(float* out, cudaTextureObject_t image, float step, float y) {
    out[threadIdx.x] = tex2D<float>(image, threadIdx.x * step, y);
}
__global__ void fetch_linear(float* out, cudaTextureObject_t line) { out[threadIdx.x] = tex1Dfetch<float>(line, (int)threadIdx.x - 1); }
__global__ void fetch_bytes(float* out, cudaTextureObject_t image) { out[threadIdx.x] = tex2D<float4>(image, threadIdx.x, 0).y; }
__global__ void draw(cudaSurfaceObject_t image) {
    const int x = threadIdx.x * sizeof(float);
    surf2Dwrite(surf2Dread<float>(image, x, 1) + 100, image, x, 0);
}

static float back[16];
static float* out;
static const float* fetched() {
    cudaMemcpy(back, out, sizeof back, cudaMemcpyDeviceToHost);
    return back;
}

int main() {
    const float pixels[HEIGHT][WIDTH] = {{0, 1, 2, 3}, {4, 6, 8, 10}};
    cudaMalloc(&out, sizeof back);
    cudaMemset(out, 0, sizeof back);
    cudaArray_t array;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    EXPECT(cudaMallocArray(&array, &format, WIDTH, HEIGHT) == cudaSuccess);
    EXPECT(cudaMemcpy2DToArray(array, 0, 0, pixels, sizeof pixels[0], sizeof pixels[0], HEIGHT, cudaMemcpyHostToDevice) == cudaSuccess);
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc how = {};
    how.addressMode[0] = how.addressMode[1] = cudaAddressModeClamp;
    cudaTextureObject_t image;

    EXPECT(cudaCreateTextureObject(&image, &resource, &how, nullptr) == cudaSuccess);
    fetch<<<1, 6>>>(out, image, 1, 1.9f);  // nearest, and clamped behind the last
    EXPECT(fetched()[0] == 4 && back[3] == 10 && back[5] == 10);

    how.filterMode = cudaFilterModeLinear;
    EXPECT(cudaCreateTextureObject(&image, &resource, &how, nullptr) == cudaSuccess);
    fetch<<<1, 8>>>(out, image, 0.5f, 1.0f);  // halfway between the rows; centres lie at 0.5, 1.5, ...
    EXPECT(fetched()[1] == 2 && back[2] == 2.75f && back[3] == 3.5f);

    how.filterMode = cudaFilterModePoint, how.normalizedCoords = 1, how.addressMode[0] = cudaAddressModeWrap;
    EXPECT(cudaCreateTextureObject(&image, &resource, &how, nullptr) == cudaSuccess);
    fetch<<<1, 8>>>(out, image, 0.25f, 0.25f);
    EXPECT(fetched()[1] == 1 && back[4] == 0 && back[7] == 3);

    cudaSurfaceObject_t surface;
    EXPECT(cudaCreateSurfaceObject(&surface, &resource) == cudaSuccess);
    draw<<<1, WIDTH>>>(surface);
    float drawn[WIDTH];
    EXPECT(cudaMemcpy2DFromArray(drawn, sizeof drawn, array, 0, 0, sizeof drawn, 1, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(drawn[0] == 104 && drawn[3] == 110);

    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = out;
    resource.res.linear.desc = format;
    resource.res.linear.sizeInBytes = 8 * sizeof(float);
    how = {};
    float* line;
    cudaMalloc(&line, sizeof back);
    EXPECT(cudaCreateTextureObject(&image, &resource, &how, nullptr) == cudaSuccess);
    fetch_linear<<<1, 10>>>(line, image);  // outside it is 0
    cudaMemcpy(back, line, 10 * sizeof(float), cudaMemcpyDeviceToHost);
    EXPECT(back[0] == 0 && back[2] == 1 && back[8] == 3 && back[9] == 0);

    const uchar4 bytes[2] = {make_uchar4(0, 255, 0, 0), make_uchar4(0, 51, 0, 0)};
    uchar4* device;
    cudaMalloc(&device, 512);
    cudaMemcpy(device, bytes, sizeof bytes, cudaMemcpyHostToDevice);
    resource.resType = cudaResourceTypePitch2D;
    resource.res.pitch2D.devPtr = device;
    resource.res.pitch2D.desc = cudaCreateChannelDesc<uchar4>();
    resource.res.pitch2D.width = 2, resource.res.pitch2D.height = 1, resource.res.pitch2D.pitchInBytes = 512;
    how.readMode = cudaReadModeNormalizedFloat;
    EXPECT(cudaCreateTextureObject(&image, &resource, &how, nullptr) == cudaSuccess);
    fetch_bytes<<<1, 2>>>(out, image);
    EXPECT(fetched()[0] == 1.0f && back[1] == 0.2f);
    EXPECT(cudaDestroyTextureObject(image) == cudaSuccess && cudaFreeArray(array) == cudaSuccess);
}
