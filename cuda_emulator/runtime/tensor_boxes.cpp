// Boxes of tensors on their way between device and shared memory.
#include <string.h>

#include <algorithm>

#include "access.h"
#include "counters.h"
#include "scheduler.h"

namespace emulator {

unsigned box_bytes(const TensorMap& m) {
    unsigned bytes = m.element_bytes;
    for (int i = 0; i < 5; ++i) bytes *= m.box[i];
    return bytes;
}

namespace {

// Calls function(offset in the box, its row in the tensor, first byte inside the tensor, bytes inside) for each row of a box.
template <class Function>
void for_each_row(const TensorBox& box, Function function) {
    const TensorMap& m = box.map;
    const int64_t begin = std::max<int64_t>(0, -int64_t(box.at[0]));
    const int64_t end = std::min<int64_t>(m.box[0], int64_t(m.last[0]) + 1 - box.at[0]);
    unsigned rows = 1;
    for (int i = 1; i < 5; ++i) rows *= m.box[i];
    for (unsigned row = 0; row < rows; ++row) {
        bool inside = end > begin;
        char* address = m.address + int64_t(box.at[0]) * m.element_bytes;
        unsigned rest = row;
        for (int i = 1; i < 5; ++i) {
            const int64_t at = int64_t(box.at[i]) + int64_t(rest % m.box[i]) * m.steps[i];
            rest /= m.box[i];
            inside &= at >= 0 && at <= int64_t(m.last[i]);
            address += at * int64_t(m.strides[i]);
        }
        const unsigned first = inside ? unsigned(begin) * m.element_bytes : 0;
        const unsigned bytes = inside ? unsigned(end - begin) * m.element_bytes : 0;
        function(row * m.box[0] * m.element_bytes, address, first, bytes);
    }
}

constexpr unsigned ROW_BYTES = 256 * 8;  // at most

// Moves a row between `row` and the chunks of shared memory where the swizzle puts them.
template <bool TO_SHARED>
void move_row(Block& b, uint32_t address, char* row, unsigned bytes, Swizzle swizzle) {
    for (unsigned at = 0; at < bytes; at += 16) {
        char* chunk = b.arena + swizzled(address + at, swizzle);
        TO_SHARED ? memcpy(chunk, row + at, 16) : memcpy(row + at, chunk, 16);
    }
}

// What lies outside the tensor is zero, or, where the map asks for it, a NaN.
void fill(char* row, unsigned bytes, const TensorMap& m) {
    memset(row, m.fill_with_nan ? 0xff : 0, bytes);
    if (m.fill_with_nan)
        for (unsigned at = m.element_bytes - 1u; at < bytes; at += m.element_bytes) row[at] = 0x7f;
}

}  // namespace

void land_box(Block& b, char* to, const TensorBox& box) {
    const uint32_t start = uint32_t(to - b.arena);
    const unsigned row_bytes = unsigned(box.map.box[0]) * box.map.element_bytes;
    char row[ROW_BYTES];
    for_each_row(box, [&](unsigned offset, const char* from, unsigned first, unsigned bytes) {
        if (bytes < row_bytes) fill(row, row_bytes, box.map);
        memcpy(row + first, from + first, bytes);
        move_row<true>(b, start + offset, row, row_bytes, box.map.swizzle);
    });
}

void store_box(Block& b, const char* from, const TensorBox& box) {
    const uint32_t start = uint32_t(from - b.arena);
    const unsigned row_bytes = unsigned(box.map.box[0]) * box.map.element_bytes;
    char row[ROW_BYTES];
    for_each_row(box, [&](unsigned offset, char* to, unsigned first, unsigned bytes) {
        move_row<false>(b, start + offset, row, row_bytes, box.map.swizzle);
        memcpy(to + first, row + first, bytes);
    });
}

std::shared_ptr<TensorBox> box_of(const void* map, int rank, const int* at, const void* shared, const void* instruction) {
    auto box = std::make_shared<TensorBox>();
    memcpy(&box->map, map, sizeof box->map);
    const TensorMap& m = box->map;
    auto stop = [&](const char* kind, const std::string& message) {
        worker->stop(worker->describe(kind, message, {0, instruction}));
    };
    if (m.magic != TensorMap::MAGIC)
        stop("invalid tensor map", "cuTensorMapEncodeTiled has not made the tensor map that is used");
    if (m.rank != rank)
        stop("invalid tensor map",
             "an instruction for " + std::to_string(rank) + " dimensions uses a tensor map of " + std::to_string(m.rank));
    const unsigned inner = unsigned(m.box[0]) * m.element_bytes;
    if (m.swizzle != Swizzle::none && inner != 16u << int(m.swizzle))
        stop("not supported", "a box whose rows have " + std::to_string(inner) + " bytes with a swizzle of " +
                                  std::to_string(16 << int(m.swizzle)));
    if (shared_address(shared) % 128)
        stop("misaligned access",
             "a tensor copy's address in shared memory (" + std::to_string(shared_address(shared)) + ") is no multiple of 128");
    for (int i = 0; i < rank; ++i) box->at[i] = at[i];
    return box;
}

void examine_rows(const TensorBox& box, Access access, const void* instruction) {
    for_each_row(box, [&](unsigned, const char* row, unsigned first, unsigned bytes) {
        if (!bytes) return;
        examine_range(row + first, bytes, access, instruction);
        if (options.mode == Mode::count) count_copy(uintptr_t(row + first), bytes, access == Access::write, instruction);
    });
}

}  // namespace emulator
