// Stands after the last #include of a text that speaks to PyTorch: the emulated device's tensors are CPU tensors, so a
// question about CUDA is one about the CPU from here on.
#define is_cuda() is_cpu()
#define kCUDA kCPU
#define CUDA CPU
// A tensor moves to the device by staying where it is; `cpu()` copies it, to where devices.py can tell it from the device's.
#define cuda() to(c10::Device(c10::DeviceType::CPU))
#define cpu() to(c10::Device(c10::DeviceType::CPU, 0))

namespace at {
// PyTorch's own, which it declares to nvcc alone.
template <class T>
struct RestrictPtrTraits {
    typedef T* __restrict PtrType;
};
}  // namespace at
