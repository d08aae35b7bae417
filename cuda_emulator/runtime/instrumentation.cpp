// The functions that the compiler calls at every load and store of text compiled with -fsanitize=thread. The sanitizer's own
// library is never linked: these take its place.
#include <stdint.h>

#include "access.h"
#include "scheduler.h"

#define CALLER __builtin_return_address(0)
using emulator::Access;
using emulator::examine;
using emulator::volatile_access;

// What -fsanitize=bounds hands over.
struct ArrayBounds {
    struct {
        const char* file;
        uint32_t line, column;
    } place;
    const struct TypeName {
        uint16_t kind, info;
        char text[1];  // "'float [4]'"
    } *array, *index;
};

extern "C" {

// An index of an array whose type has fewer elements; also of an inner dimension, beyond which C++ has no elements either.
void __ubsan_handle_out_of_bounds(void* data, void* value) {
    if (!emulator::current) return;
    const auto bounds = static_cast<const ArrayBounds*>(data);
    const uintptr_t index = (uintptr_t)value;
    const bool is_signed = bounds->index->info & 1, is_int = bounds->index->info >> 1 <= 5;  // info: sign and log2 of the bits
    const std::string shown = is_signed ? std::to_string(is_int ? (long long)(int32_t)index : (long long)index)
                                        : std::to_string((unsigned long long)index);
    emulator::worker->stop(emulator::worker->describe(
        "array index out of bounds", "index " + shown + " of an array of type " + bounds->array->text, {0, CALLER}));
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void** p, void*) { examine(p, sizeof *p, Access::write, sizeof *p, CALLER); }
void __tsan_vptr_read(void**) {}

#define PLAIN(BYTES)                                                                                                \
    void __tsan_read##BYTES(void* p) { examine(p, BYTES, Access::read, BYTES, CALLER); }                            \
    void __tsan_write##BYTES(void* p) { examine(p, BYTES, Access::write, BYTES, CALLER); }                          \
    void __tsan_unaligned_read##BYTES(void* p) { examine(p, BYTES, Access::read, 1, CALLER); }                      \
    void __tsan_unaligned_write##BYTES(void* p) { examine(p, BYTES, Access::write, 1, CALLER); }                    \
    void __tsan_volatile_read##BYTES(void* p) { volatile_access(p, BYTES, Access::strong_read, CALLER); }           \
    void __tsan_volatile_write##BYTES(void* p) { volatile_access(p, BYTES, Access::strong_write, CALLER); }         \
    void __tsan_unaligned_volatile_read##BYTES(void* p) { volatile_access(p, BYTES, Access::strong_read, CALLER); } \
    void __tsan_unaligned_volatile_write##BYTES(void* p) { volatile_access(p, BYTES, Access::strong_write, CALLER); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

void __tsan_read_range(void* p, unsigned long bytes) { examine(p, unsigned(bytes), Access::read, 1, CALLER); }
void __tsan_write_range(void* p, unsigned long bytes) { examine(p, unsigned(bytes), Access::write, 1, CALLER); }

// Atomic builtins of the text itself, such as the guard of a function's static variable.
#define ATOMIC(BITS, T)                                                                                               \
    T __tsan_atomic##BITS##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }           \
    void __tsan_atomic##BITS##_store(volatile T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }           \
    T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##BITS##_fetch_add(volatile T* p, T v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##BITS##_fetch_sub(volatile T* p, T v, int) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##BITS##_fetch_or(volatile T* p, T v, int) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }   \
    T __tsan_atomic##BITS##_fetch_and(volatile T* p, T v, int) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); } \
    T __tsan_atomic##BITS##_fetch_xor(volatile T* p, T v, int) { return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); } \
    int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {                    \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
    }                                                                                                                 \
    int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {                      \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
    }
ATOMIC(8, uint8_t)
ATOMIC(16, uint16_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}
}
