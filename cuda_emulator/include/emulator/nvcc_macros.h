// Stands after the last #include of a CUDA text: what nvcc defines, for the emulated device of compute capability 9.0. Host and
// device code are compiled at once, so host code sees __CUDA_ARCH__, too.
#define __NVCC__ 1
#define __CUDACC__ 1
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUDART_VERSION 13000
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#ifdef EMULATOR_CHECKED
#define __syncthreads() __syncthreads(__LINE__, __COUNTER__)
#define memcpy emulator_memcpy
#define memmove emulator_memmove
#define memset emulator_memset
#endif
