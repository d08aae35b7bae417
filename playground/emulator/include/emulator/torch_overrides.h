// Stands after the last #include of a text that speaks to PyTorch: the emulated device's tensors are CPU tensors, so a
// question about CUDA is one about the CPU from here on.
#define is_cuda() is_cpu()
#define kCUDA kCPU
#define CUDA CPU
