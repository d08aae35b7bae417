// Indices, block barriers and fences.
#pragma once
#include <emulator/runtime_api.h>

#ifdef EMULATOR_CHECKED
#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_dim())
#define gridDim (::emulator::grid_dim())
#else
#define threadIdx (::emulator::current->thread_index)
#define blockIdx (::emulator::current->block->block_index)
#define blockDim (::emulator::current->block->block_dim)
#define gridDim (::emulator::current->block->grid_dim)
#endif
constexpr int warpSize = 32;

// A call where nothing is optimised, so that a debugger stops at its line.
inline void __syncthreads(int line = __builtin_LINE(), int site = 0) {
    ::emulator::block_barrier(::emulator::Vote::none, 0, line, site);
}
EMULATOR_INLINE int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return ::emulator::block_barrier(::emulator::Vote::count, predicate != 0, line);
}
EMULATOR_INLINE int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return ::emulator::block_barrier(::emulator::Vote::all, predicate != 0, line);
}
EMULATOR_INLINE int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return ::emulator::block_barrier(::emulator::Vote::any, predicate != 0, line);
}

inline void __threadfence() { ::emulator::device_fence(); }
inline void __threadfence_system() { ::emulator::device_fence(); }
inline void __threadfence_block() { ::emulator::block_fence(); }
// Programmatic dependent launch. When a launch may begin changes nothing: its work counts as unordered until it waits.
EMULATOR_INLINE void cudaGridDependencySynchronize() { ::emulator::wait_for_dependency(); }
EMULATOR_INLINE void cudaTriggerProgrammaticLaunchCompletion() {}
inline void __nanosleep(unsigned) { ::emulator::yield(); }

inline long long clock64() { return ::emulator::clock_ticks(); }  // clock() is the C library's

inline size_t __cvta_generic_to_shared(const void* pointer) { return ::emulator::shared_address(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return ::emulator::shared_pointer((uint32_t)address); }
inline size_t __cvta_generic_to_global(const void* pointer) { return (size_t)pointer; }
inline unsigned __isShared(const void* pointer) { return ::emulator::is_shared(pointer); }
inline unsigned __isGlobal(const void* pointer) { return !::emulator::is_shared(pointer); }

#define __trap() (::emulator::trap(__LINE__))
#define __brkpt() ((void)0)
#define __prof_trigger(counter) ((void)0)
#define __builtin_assume(condition) ((void)0)
#define __assume(condition) ((void)0)
