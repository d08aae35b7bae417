// Moves of 8 x 8 matrices of 16-bit elements between shared memory and the registers of a warp.
#include <string.h>

#include "access.h"
#include "scheduler.h"

namespace emulator {

// Lane 8 * i + r names row r of matrix i. Each lane gets two elements of each matrix: 2 * (lane % 4) and the next of row
// lane / 4, or, transposed, of column lane / 4.
void matrix_load(uint32_t* result, uint32_t row, int matrices, bool transposed, int line) {
    const int lane = current->lane;
    char mine[16] = {};
    if (lane < 8 * matrices) {
        const char* source = static_cast<Thread*>(current)->owner->arena + row;
        if (options.checked()) examine(source, 16, Access::read, 16, __builtin_return_address(0));
        memcpy(mine, source, 16);
    }
    const char* rows = warp_exchange(~0u, mine, 16, WarpOp::matrix, line);
    for (int m = 0; m < matrices; ++m) {
        if (!transposed) {
            memcpy(&result[m], rows + (8 * m + lane / 4) * ROW + 4 * (lane % 4), 4);
            continue;
        }
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) memcpy(&pair[i], rows + (8 * m + 2 * (lane % 4) + i) * ROW + 2 * (lane / 4), 2);
        memcpy(&result[m], pair, 4);
    }
}

void matrix_store(uint32_t row, const uint32_t* values, int matrices, bool transposed, int line) {
    const int lane = current->lane, r = lane % 8, m = lane / 8;
    const char* rows = warp_exchange(~0u, values, 4 * matrices, WarpOp::matrix, line);
    if (lane >= 8 * matrices) return;
    uint16_t mine[8];
    for (int c = 0; c < 8; ++c) {
        const int from = transposed ? c * 4 + r / 2 : r * 4 + c / 2, half = transposed ? r % 2 : c % 2;
        memcpy(&mine[c], rows + from * ROW + 4 * m + 2 * half, 2);
    }
    char* target = static_cast<Thread*>(current)->owner->arena + row;
    if (options.checked()) examine(target, 16, Access::write, 16, __builtin_return_address(0));
    memcpy(target, mine, 16);
}

}  // namespace emulator
