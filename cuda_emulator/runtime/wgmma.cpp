// Matrix products of a warpgroup: its 128 threads meet, and the last to come multiplies for all.
//
// In fast mode the product is done there and then. In check mode its values come where the thread waits for them, as late as
// the program allows; until then the accumulators hold a value that no product gives.
#include "emulator/wgmma.h"

#include <string.h>

#include <algorithm>

#include "access.h"
#include "async_reads.h"
#include "counters.h"
#include "emulator/float16.h"
#include "scheduler.h"
#include "shadow.h"
#include "tensor_map.h"

namespace emulator {

void Warpgroup::reset() {
    arrived = registers = 0;
    if (!used) return;
    used = false;
    for (auto& products : pending) products.clear();
    std::fill(groups, groups + WARPGROUP, 0);
    std::fill(fences, fences + WARPGROUP, 0);
    for (auto& products : landed) products.clear();
    reads.clear();
}

namespace {

#define CALLER __builtin_return_address(0)

Warpgroup& group_of(Thread& t) {
    auto& slot = t.owner->warpgroups[t.linear / WARPGROUP];
    if (!slot) {
        slot = std::make_unique<Warpgroup>();
        slot->used = true;
        slot->reset();
    }
    return *slot;
}

// Waits for the rest of the warpgroup; true for the last to come, which must release the others.
bool meet(Thread& t, Warpgroup& g, const void* operation, int line) {
    Worker& w = *worker;
    Block& b = *t.owner;
    const int first = t.linear / WARPGROUP * WARPGROUP;
    if (first + WARPGROUP > (int)b.threads.size())
        w.stop(w.describe("warpgroup divergence",
                          "an instruction of a warpgroup, which has 128 threads; the block has only " +
                              std::to_string(b.threads.size() - first) + " in this one",
                          {line, nullptr}));
    if (g.arrived && (g.operation != operation || g.line != line)) {
        Finding finding =
            w.describe("warpgroup divergence", "threads of one warpgroup meet in different instructions", {line, nullptr});
        finding.party.did = "waits";
        finding.other = w.party(b.threads[g.first_thread], {g.line, nullptr}, "waits");
        w.stop(finding);
    }
    if (!g.arrived) g.first_thread = t.linear;
    g.operation = operation;
    g.line = line;
    if (++g.arrived == WARPGROUP) return true;
    w.wait(State::at_warpgroup, line);
    return false;
}

void release(Thread& last, Warpgroup& g) {
    Block& b = *last.owner;
    const int first = last.linear / WARPGROUP * WARPGROUP;
    g.arrived = 0;
    for (int i = 0; i < WARPGROUP; ++i)
        if (first + i != last.linear) worker->make_ready(b, first + i);
}

// ---- operands in shared memory

struct Descriptor {
    uint32_t start, leading, stride;
    Swizzle swizzle;
    explicit Descriptor(uint64_t bits)
        : start(uint32_t(bits & 0x3fff) << 4),
          leading(uint32_t(bits >> 16 & 0x3fff) << 4),
          stride(uint32_t(bits >> 32 & 0x3fff) << 4),
          swizzle(Swizzle((4 - (bits >> 62)) & 3)) {}
};

// Where the 16 bytes lie that hold rows [.., ..] of a K-major operand: row `row`, half `half` of its 32 bytes.
uint32_t k_major(const Descriptor& d, int row, int half) {
    const uint32_t pitch = 16u << int(d.swizzle), between_halves = d.swizzle == Swizzle::none ? d.leading : 16;
    return swizzled(d.start + row % 8 * pitch + row / 8 * d.stride + half * between_halves, d.swizzle);
}

// The same of an operand whose rows are contiguous: rows 8 * `eight` and the 7 next, at inner index `k`.
uint32_t mn_major(const Descriptor& d, int eight, int k) {
    if (d.swizzle == Swizzle::none) return d.start + k % 8 * 16 + k / 8 * d.leading + eight * d.stride;
    const uint32_t chunks = 1u << int(d.swizzle);  // in a row of the swizzled atom
    return swizzled(d.start + eight % chunks * 16 + eight / chunks * d.leading + k % 8 * chunks * 16 + k / 8 * d.stride,
                    d.swizzle);
}

// Calls function(address, first row, rows, first k) for each 16 bytes of an operand of `rows` rows.
template <class Function>
void for_each_chunk(const Descriptor& d, int rows, bool transposed, bool wide_elements, Function function) {
    const int per_chunk = wide_elements ? 4 : 8;
    if (transposed) {
        for (int k = 0; k < 16; ++k)
            for (int eight = 0; eight < rows / 8; ++eight) function(mn_major(d, eight, k), eight * 8, 8, k);
    } else {
        for (int row = 0; row < rows; ++row)
            for (int half = 0; half < 2; ++half) function(k_major(d, row, half), row, 1, half * per_chunk);
    }
}

float tf32(uint32_t word) {  // the hardware ignores the low bits
    word &= 0xffffe000u;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

float element_16(ProductElement element, uint16_t bits) {
    return element == ProductElement::f16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

// An operand as floats: to[row * row_pitch + k * k_pitch].
void gather(const char* arena, const Descriptor& d, int rows, bool transposed, ProductElement element, float sign, float* to,
            int row_pitch, int k_pitch) {
    const bool wide = element == ProductElement::tf32;
    for_each_chunk(d, rows, transposed, wide, [&](uint32_t address, int row, int row_count, int k) {
        if (address + 16 > ARENA_BYTES)
            worker->stop(worker->describe("shared memory out of bounds",
                                          "a matrix descriptor leads to byte " + std::to_string(address) + " of shared memory",
                                          {group_of(self()).line, nullptr}));
        float* out = to + row * row_pitch + k * k_pitch;
        const int step = row_count > 1 ? row_pitch : k_pitch;
        if (wide) {
            uint32_t words[4];
            memcpy(words, arena + address, 16);
            for (int i = 0; i < 4; ++i) out[i * step] = sign * tf32(words[i]);
        } else {
            uint16_t halves[8];
            memcpy(halves, arena + address, 16);
            for (int i = 0; i < 8; ++i) out[i * step] = sign * element_16(element, halves[i]);
        }
    });
}

// ---- the product

typedef float Vector __attribute__((vector_size(32), aligned(4)));
constexpr int VECTOR_LANES = 8, MAX_N = 256, MAX_K = 16;

struct Scratch {
    alignas(64) float a[64 * MAX_K], b[MAX_K * MAX_N], d[64 * MAX_N];
};

Scratch& scratch() {
    static thread_local std::unique_ptr<Scratch> own;  // too large for a fiber's stack
    if (!own) own = std::make_unique<Scratch>();
    return *own;
}

// d (2 rows from `row`, 8 * VECTORS columns from `column`) += a b
template <int K, int VECTORS>
void multiply_tile(const float* a, const float* b, float* d, int n, int row, int column) {
    Vector sum[2][VECTORS];
    for (int r = 0; r < 2; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = *(const Vector*)(d + (row + r) * n + column + v * VECTOR_LANES);
    for (int k = 0; k < K; ++k)
        for (int v = 0; v < VECTORS; ++v) {
            const Vector column_values = *(const Vector*)(b + k * n + column + v * VECTOR_LANES);
            for (int r = 0; r < 2; ++r) sum[r][v] += a[(row + r) * K + k] * column_values;
        }
    for (int r = 0; r < 2; ++r)
        for (int v = 0; v < VECTORS; ++v) *(Vector*)(d + (row + r) * n + column + v * VECTOR_LANES) = sum[r][v];
}

template <int K>
void multiply(const float* a, const float* b, float* d, int n) {
    int column = 0;
    for (; column + 4 * VECTOR_LANES <= n; column += 4 * VECTOR_LANES)
        for (int row = 0; row < 64; row += 2) multiply_tile<K, 4>(a, b, d, n, row, column);
    for (; column < n; column += VECTOR_LANES)
        for (int row = 0; row < 64; row += 2) multiply_tile<K, 1>(a, b, d, n, row, column);
}

// A from the registers of the 128 threads. With g = lane / 4 and t = lane % 4, the words of a thread belong to rows g, g + 8
// of its warp's sixteen, and to the words t and t + 4 of a row.
void gather_registers(const ProductCall* calls, ProductElement element, float sign, float* to, int k_count) {
    for (int thread = 0; thread < WARPGROUP; ++thread) {
        const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = calls[thread].a[i];
            float* out = to + (row + i % 2 * 8) * k_count;
            const int at = lane % 4 + i / 2 * 4;
            if (element == ProductElement::tf32) {
                out[at] = sign * tf32(word);
            } else {
                out[2 * at] = sign * element_16(element, uint16_t(word));
                out[2 * at + 1] = sign * element_16(element, uint16_t(word >> 16));
            }
        }
    }
}

// The accumulators of a thread and its rows of D: values 4 j and the next of row lane / 4, the two after of the row 8 below.
template <bool TO_THREADS>
void exchange(const ProductCall* calls, float* d, int n) {
    for (int thread = 0; thread < WARPGROUP; ++thread) {
        const int lane = thread % 32;
        float* upper = d + (thread / 32 * 16 + lane / 4) * n + 2 * (lane % 4);
        float* lower = upper + 8 * n;
        float* own = calls[thread].accumulator;
        for (int j = 0; j < n / 8; ++j)
            if (TO_THREADS) {
                memcpy(own + 4 * j, upper + 8 * j, 8);
                memcpy(own + 4 * j + 2, lower + 8 * j, 8);
            } else {
                memcpy(upper + 8 * j, own + 4 * j, 8);
                memcpy(lower + 8 * j, own + 4 * j + 2, 8);
            }
    }
}

void compute(const char* arena, const Warpgroup& g) {
    const ProductCall& call = g.calls[0];
    const ProductForm& form = *call.form;
    Scratch& s = scratch();
    const int k_count = form.element == ProductElement::tf32 ? 8 : 16;
    if (form.a_in_registers)
        gather_registers(g.calls, form.element, float(form.a_sign), s.a, k_count);
    else
        gather(arena, Descriptor(call.a_descriptor), 64, form.a_transposed, form.element, float(form.a_sign), s.a, k_count, 1);
    gather(arena, Descriptor(call.b_descriptor), form.n, form.b_transposed, form.element, float(form.b_sign), s.b, 1, form.n);
    if (call.accumulate)
        exchange<false>(g.calls, s.d, form.n);
    else
        memset(s.d, 0, sizeof(float) * 64 * form.n);
    if (k_count == 8)
        multiply<8>(s.a, s.b, s.d, form.n);
    else
        multiply<16>(s.a, s.b, s.d, form.n);
    exchange<true>(g.calls, s.d, form.n);
}

// ---- check mode

// What all threads of the warpgroup must agree on, and what a descriptor may say.
void check_agreement(const Block& b, const Warpgroup& g) {
    const ProductCall& one = g.calls[0];
    for (const ProductCall& call : g.calls)
        if (call.b_descriptor != one.b_descriptor || call.accumulate != one.accumulate ||
            (!one.form->a_in_registers && call.a_descriptor != one.a_descriptor))
            worker->stop(worker->describe("warpgroup divergence",
                                          "threads of one warpgroup bring different descriptors or scales to a matrix product",
                                          {0, call.instruction}));
    const uint64_t used = one.b_descriptor | (one.form->a_in_registers ? 0 : one.a_descriptor);
    if (used >> 49 & 7)
        worker->stop(
            worker->describe("not supported", "a matrix descriptor with a base offset other than 0", {0, one.instruction}));
    (void)b;
}

// The operands are read from now until the warps have waited.
void examine_operands(Thread& t, Warpgroup& g) {
    Block& b = *t.owner;
    const ProductCall& call = g.calls[0];
    const ProductForm& form = *call.form;
    const bool wide = form.element == ProductElement::tf32;
    const int first = t.linear / WARPGROUP * WARPGROUP;
    const uint32_t reader = async_reads_of(b).begin({true, first, 0xf, call.instruction});
    g.reads.push_back({reader, g.groups[t.linear - first]});
    for_each_chunk(Descriptor(call.b_descriptor), form.n, form.b_transposed, wide, [&](uint32_t address, int, int, int) {
        for (int warp = 0; warp < 4; ++warp)
            examine_async_read(b.threads[first + 32 * warp], address, 16, reader, call.instruction);
    });
    if (form.a_in_registers) return;
    for_each_chunk(Descriptor(call.a_descriptor), 64, form.a_transposed, wide, [&](uint32_t address, int row, int, int) {
        examine_async_read(b.threads[first + row / 16 * 32], address, 16, reader, call.instruction);
    });
}

constexpr uint32_t NO_RESULT_YET = 0x7fdeadbdu;  // a NaN that no product gives

void report_unfinished(const char* message, const void* here, const PendingProduct& product, const char* did) {
    Finding f = worker->describe("matrix product not waited for", message, {0, here});
    f.party.did = did;
    f.other = worker->party(self(), {0, product.instruction}, "began the product");
    worker->stop(f);
}

bool holds(const PendingProduct& product, const void* address, unsigned bytes) {
    return std::any_of(product.registers.begin(), product.registers.end(), [&](const float* r) {
        return (const char*)r < (const char*)address + bytes && (const char*)address < (const char*)(r + 1);
    });
}

// The product of `t` under way whose accumulators these are; others that share some of them are a mistake.
PendingProduct* chained(Thread& t, Warpgroup& g, float* const* registers, int count, const void* here) {
    auto& products = g.pending[t.linear % WARPGROUP];
    for (PendingProduct& product : products) {
        if ((int)product.registers.size() == count && std::equal(registers, registers + count, product.registers.begin()))
            return &product;
        for (int i = 0; i < count; ++i)
            if (holds(product, registers[i], 4))
                report_unfinished("a matrix product accumulates into part of what another one, not waited for, writes", here,
                                  product, "accumulates");
    }
    return nullptr;
}

void land(const PendingProduct& product) {
    for (size_t i = 0; i < product.values.size(); ++i) {
        if (memcmp(product.registers[i], &NO_RESULT_YET, 4))
            report_unfinished("an accumulator has been changed before wgmma.wait_group", nullptr, product, "");
        *product.registers[i] = product.values[i];
    }
}

LandedProduct* landed_in(Warpgroup& g, int thread, float* const* registers, size_t count) {
    for (LandedProduct& landed : g.landed[thread])
        if (landed.registers.size() == count && std::equal(registers, registers + count, landed.registers.begin()))
            return &landed;
    return nullptr;
}

void remember(Warpgroup& g, int thread, PendingProduct& product) {
    LandedProduct* landed = landed_in(g, thread, product.registers.data(), product.registers.size());
    if (!landed) {
        g.landed[thread].push_back({product.registers, {}, 0});
        landed = &g.landed[thread].back();
    }
    landed->values = std::move(product.values);
    landed->fences = g.fences[thread];
}

// Do the accumulators hold something else than the last product, though no wgmma.fence has come since it was waited for?
bool changed_since_the_wait(Warpgroup& g, int thread, float* const* registers, int count) {
    const LandedProduct* landed = landed_in(g, thread, registers, count);
    if (!landed || landed->fences != g.fences[thread]) return false;
    for (int i = 0; i < count; ++i)
        if (memcmp(registers[i], &landed->values[i], 4)) return true;
    return false;
}

const char product_tag = 0, registers_tag = 0;

}  // namespace

void wgmma(const ProductForm& form, float* accumulator, const uint32_t* a, uint64_t a_descriptor, uint64_t b_descriptor,
           bool accumulate, int line) {
    Thread& t = self();
    Warpgroup& g = group_of(t);
    g.calls[t.linear % WARPGROUP] = {&form, accumulator, a, a_descriptor, b_descriptor, accumulate, CALLER};
    if (!meet(t, g, &product_tag, line)) return;
    compute(t.owner->arena, g);
    release(t, g);
}

void wgmma_checked(const ProductForm& form, float* const* accumulator, const uint32_t* a, uint64_t a_descriptor,
                   uint64_t b_descriptor, bool accumulate, int line) {
    Thread& t = self();
    Warpgroup& g = group_of(t);
    g.used = true;
    const int index = t.linear % WARPGROUP, count = form.n / 2;
    if (!g.fences[index])
        worker->stop(worker->describe("missing wgmma.fence",
                                      "the first matrix product of a kernel needs a wgmma.fence before it, to order it behind "
                                      "the writes of its registers",
                                      {0, CALLER}));
    PendingProduct* earlier = chained(t, g, accumulator, count, CALLER);
    if (!earlier && changed_since_the_wait(g, index, accumulator, count))
        worker->stop(worker->describe("missing wgmma.fence",
                                      "accumulators have been changed since the last product into them was waited for, with no "
                                      "wgmma.fence before the next one",
                                      {0, CALLER}));
    std::vector<float> values(count);
    for (int i = 0; i < count; ++i) values[i] = earlier ? earlier->values[i] : *accumulator[i];
    g.calls[index] = {&form, values.data(), a, a_descriptor, b_descriptor, accumulate, CALLER};
    if (meet(t, g, &product_tag, line)) {
        check_agreement(*t.owner, g);
        examine_operands(t, g);
        if (options.mode == Mode::count) count_matrix();
        compute(t.owner->arena, g);
        release(t, g);
    }
    auto& products = g.pending[index];
    earlier = chained(t, g, accumulator, count, CALLER);
    if (!earlier) {
        products.push_back({std::vector<float*>(accumulator, accumulator + count), {}, 0, nullptr});
        earlier = &products.back();
        for (int i = 0; i < count; ++i) memcpy(accumulator[i], &NO_RESULT_YET, 4);
    }
    earlier->values = std::move(values);
    earlier->group = g.groups[index];
    earlier->instruction = CALLER;
    t.awaits_products = true;
}

void wgmma_fence() {
    if (!options.checked()) return;
    Warpgroup& g = group_of(self());
    g.used = true;
    ++g.fences[current->linear % WARPGROUP];
}

void wgmma_commit() {
    if (!options.checked()) return;
    Warpgroup& g = group_of(self());
    g.used = true;
    ++g.groups[current->linear % WARPGROUP];
}

void wgmma_wait(int groups_left) {
    if (!options.checked()) return;
    Thread& t = self();
    Warpgroup& g = group_of(t);
    const int end = g.groups[t.linear % WARPGROUP] - groups_left;  // groups before this one are waited for
    auto& products = g.pending[t.linear % WARPGROUP];
    for (size_t i = 0; i < products.size();)
        if (products[i].group < end) {
            land(products[i]);
            remember(g, t.linear % WARPGROUP, products[i]);
            products.erase(products.begin() + i);
        } else {
            ++i;
        }
    t.awaits_products = !products.empty();
    AsyncReads& reads = async_reads_of(*t.owner);
    for (const Warpgroup::Read& read : g.reads)
        if (read.group < end) reads.done(read.reader, t.linear, t.segment);
    g.reads.erase(std::remove_if(g.reads.begin(), g.reads.end(),
                                 [&](const Warpgroup::Read& read) { return reads.awaited_by_all(read.reader); }),
                  g.reads.end());
}

// setmaxnreg deals out what the launch allocated, at most an equal part of the multiprocessor's registers for each thread; an
// increase waits until others have given up enough, here forever. Warpgroups that have not asked yet count as the least.
void examine_registers(const Block& b, const Warpgroup& last) {
    constexpr int ALL = 65536, LEAST = 24, MOST = 256;
    const int threads = b.threads.size(), launched = std::min(ALL / threads / 8 * 8, MOST);
    int asked = 0;
    const Warpgroup* greediest = &last;
    std::string shares;
    for (size_t k = 0; k < b.warpgroups.size(); ++k) {
        const int size = std::min<int>(WARPGROUP, threads - k * WARPGROUP);
        const Warpgroup* group = b.warpgroups[k].get();
        const int registers = group ? group->registers : 0;
        if (registers > greediest->registers) greediest = group;
        asked += size * (registers ? registers : LEAST);
        shares += (k ? ", " : "") + (registers ? std::to_string(registers) : "?");
    }
    if (asked > threads * launched)
        worker->stop(worker->describe("registers that no warpgroup gives up",
                                      "setmaxnreg waits forever: the warpgroups ask for " + shares +
                                          " registers a thread; a block of " + std::to_string(threads) + " threads has " +
                                          std::to_string(launched) + " for each to deal out",
                                      {greediest->registers_line, nullptr}));
}

void set_registers(int count, int line) {
    if (count % 8 || count < 24 || count > 256)
        worker->stop(worker->describe("invalid register count",
                                      "setmaxnreg takes a multiple of 8 from 24 to 256, not " + std::to_string(count),
                                      {line, nullptr}));
    if (!options.checked()) return;
    Thread& t = self();
    Warpgroup& g = group_of(t);
    if (!meet(t, g, &registers_tag, line)) return;
    g.registers = count, g.registers_line = line;
    examine_registers(*t.owner, g);
    release(t, g);
}

// ---- what check mode asks

void examine_pending_accumulators(Thread& t, const void* address, unsigned bytes, bool writes, const void* instruction) {
    for (const PendingProduct& product : group_of(t).pending[t.linear % WARPGROUP])
        if (holds(product, address, bytes))
            report_unfinished(writes ? "an accumulator is written before wgmma.wait_group has waited for its product"
                                     : "an accumulator is read before wgmma.wait_group has waited for its product",
                              instruction, product, writes ? "writes" : "reads");
}

void examine_products_at_end(Thread& t) {
    const auto& products = group_of(t).pending[t.linear % WARPGROUP];
    if (products.empty()) return;
    Finding f =
        worker->describe("matrix product not waited for", "a thread ends, and wgmma.wait_group has not waited for its product",
                         {0, products.front().instruction});
    f.party = worker->party(t, {0, products.front().instruction}, "began the product");
    worker->stop(f);
}

}  // namespace emulator
