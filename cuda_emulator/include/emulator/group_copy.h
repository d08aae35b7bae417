// memcpy_async of cuda:: and cooperative_groups: the threads of a group copy by cp.async where source, destination and sizes
// allow it, and otherwise at once.
#pragma once
#include <cuda_runtime.h>

namespace cuda {
// A size that is promised to be a multiple of ALIGNMENT, as the addresses are.
template <size_t ALIGNMENT>
struct aligned_size_t {
    static constexpr size_t align = ALIGNMENT;
    size_t value;
    constexpr explicit aligned_size_t(size_t bytes) : value(bytes) {}
    constexpr operator size_t() const { return value; }
};
}  // namespace cuda

namespace emulator {

// The compiler would check an inlined copy as a plain access.
EMULATOR_UNCHECKED __attribute__((noinline)) inline void copy_piece_unchecked(char* to, const char* from, unsigned bytes) {
    __builtin_memcpy(to, from, bytes);
}
EMULATOR_INLINE void copy_piece(char* to, const char* from, unsigned bytes) {
    note_read(from, bytes);
    note_write(to, bytes);
    copy_piece_unchecked(to, from, bytes);
}

// The pieces of the thread of this rank, of `threads`; each is as large as the addresses allow, at most 16 bytes.
EMULATOR_INLINE void group_copy(void* to, const void* from, size_t bytes, unsigned rank, unsigned threads) {
    const uintptr_t alignment = uintptr_t(to) | uintptr_t(from) | 16;
    const unsigned piece = unsigned(alignment & -alignment);
    const bool async = piece >= 4 && is_shared(to) && !is_shared(from);
    const size_t whole = bytes / piece;
    for (size_t i = rank; i < whole; i += threads) {
        char* const target = (char*)to + i * piece;
        const char* const source = (const char*)from + i * piece;
        async ? async_copy(target, source, piece, piece) : copy_piece(target, source, piece);
    }
    for (size_t at = whole * piece + rank; at < bytes; at += threads) copy_piece((char*)to + at, (const char*)from + at, 1);
}

}  // namespace emulator
