#include "counters.h"

#include <dlfcn.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

namespace emulator {
namespace {

struct Request {
    uint64_t addresses[32];
    uint32_t lanes;
};

// One instruction, and what the lanes of each warp have asked of it since the last barrier.
struct Instruction {
    const void* address;
    unsigned bytes;
    bool shared, writes;
    struct OfWarp {
        std::vector<Request> requests;
        uint32_t next[32];
    };
    std::vector<OfWarp> warps;
    uint64_t requests = 0, transactions = 0, ideal = 0, moved = 0;  // over the launch
};

struct Totals {
    uint64_t launches = 0, barriers = 0, atomics = 0, matrices = 0;
};

std::deque<Instruction> instructions;
std::unordered_map<uintptr_t, uint32_t> index_of;  // by address and kind
struct {
    uintptr_t key = 0;
    Instruction* instruction = nullptr;
} recent[64];
Totals totals;

struct Row {
    uint64_t requests = 0, transactions = 0, ideal = 0, moved = 0;
};
using RowKey = std::tuple<std::string, std::string, uint64_t, bool, bool>;  // kernel, library, offset, shared, writes
std::map<RowKey, Row> rows;
std::map<std::string, Totals> kernel_totals;
std::string told;

Instruction& instruction_at(const void* address, unsigned bytes, bool shared, bool writes, size_t warps) {
    const uintptr_t key = (uintptr_t)address * 4 + shared * 2 + writes;
    auto& slot = recent[(key ^ key >> 7) % 64];
    if (slot.key != key) {
        const auto found = index_of.try_emplace(key, (uint32_t)instructions.size());
        if (found.second) {
            instructions.emplace_back();
            Instruction& i = instructions.back();
            i.address = address;
            i.bytes = bytes;
            i.shared = shared;
            i.writes = writes;
        }
        slot.key = key;
        slot.instruction = &instructions[found.first->second];
    }
    Instruction& i = *slot.instruction;
    if (i.warps.size() < warps) i.warps.resize(warps);
    return i;
}

// Most requests have their addresses in order.
template <class T>
unsigned distinct(T* values, unsigned count) {
    if (!std::is_sorted(values, values + count)) std::sort(values, values + count);
    return unsigned(std::unique(values, values + count) - values);
}

void count_sectors(Instruction& in, const Request& r) {
    uint64_t sectors[32 * 2], words[32 * 4];
    unsigned sector_count = 0, word_count = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(r.lanes >> lane & 1)) continue;
        const uint64_t first = r.addresses[lane], last = first + in.bytes - 1;
        for (uint64_t sector = first / 32; sector <= last / 32 && sector_count < 64; ++sector) sectors[sector_count++] = sector;
        const unsigned grain = in.bytes < 4 ? in.bytes : 4;
        for (uint64_t word = first / grain; word <= last / grain && word_count < 128; ++word) words[word_count++] = word;
        in.moved += in.bytes;
    }
    const unsigned grain = in.bytes < 4 ? in.bytes : 4;
    ++in.requests;
    in.transactions += distinct(sectors, sector_count);
    in.ideal += (distinct(words, word_count) * grain + 31) / 32;
}

void count_wavefronts(Instruction& in, const Request& r) {
    const int group = in.bytes <= 4 ? 32 : in.bytes <= 8 ? 16 : 8;
    ++in.requests;
    for (int begin = 0; begin < 32; begin += group) {
        uint64_t words[32 * 4];
        unsigned count = 0;
        for (int lane = begin; lane < begin + group; ++lane) {
            if (!(r.lanes >> lane & 1)) continue;
            for (uint64_t word = r.addresses[lane] / 4; word <= (r.addresses[lane] + in.bytes - 1) / 4 && count < 128; ++word)
                words[count++] = word;
            in.moved += in.bytes;
        }
        if (!count) continue;
        count = distinct(words, count);
        unsigned banks[32] = {}, busiest = 0;
        for (unsigned i = 0; i < count; ++i) busiest = std::max(busiest, ++banks[words[i] % 32]);
        in.transactions += busiest;
        in.ideal += (count + 31) / 32;
    }
}

void settle() {
    for (Instruction& in : instructions)
        for (Instruction::OfWarp& warp : in.warps) {
            for (const Request& r : warp.requests) in.shared ? count_wavefronts(in, r) : count_sectors(in, r);
            if (warp.requests.empty()) continue;
            warp.requests.clear();
            memset(warp.next, 0, sizeof warp.next);
        }
}

void record(Thread& t, uint64_t address, unsigned bytes, bool shared, bool writes, const void* at) {
    Instruction& in = instruction_at(at, bytes, shared, writes, t.owner->warps.size());
    Instruction::OfWarp& warp = in.warps[t.warp];
    if (warp.requests.empty()) memset(warp.next, 0, sizeof warp.next);
    const uint32_t k = warp.next[t.lane]++;
    if (k >= warp.requests.size()) warp.requests.emplace_back().lanes = 0;
    Request& r = warp.requests[k];
    r.addresses[t.lane] = address;
    r.lanes |= 1u << t.lane;
}

}  // namespace

void begin_launch_counters() {
    instructions.clear();
    index_of.clear();
    for (auto& slot : recent) slot.key = 0;
    totals = Totals();
}

void end_launch_counters(Launch& launch) {
    settle();
    for (const Instruction& in : instructions) {
        Dl_info info{};
        dladdr(in.address, &info);
        Row& row = rows[{launch.name, info.dli_fname ? info.dli_fname : "",
                         (uintptr_t)in.address - (uintptr_t)info.dli_fbase - 1, in.shared, in.writes}];
        row.requests += in.requests;
        row.transactions += in.transactions;
        row.ideal += in.ideal;
        row.moved += in.moved;
    }
    Totals& t = kernel_totals[launch.name];
    ++t.launches;
    t.barriers += totals.barriers;
    t.atomics += totals.atomics;
    t.matrices += totals.matrices;
}

// Co-resident blocks share the table; their requests are settled together, which changes no count that a block would have
// alone, because a warp's entries are its own.
void end_block_counters(Block&) { settle(); }
void count_barrier(Block&) {
    ++totals.barriers;
    settle();
}
void count_atomic() { ++totals.atomics; }
void count_matrix() { ++totals.matrices; }

void count_copy(uintptr_t address, unsigned bytes, bool writes, const void* at) {
    Instruction& in = instruction_at(at, bytes, false, writes, 0);
    ++in.requests;
    in.transactions += (address + bytes - 1) / 32 - address / 32 + 1;
    in.ideal += (bytes + 31) / 32;
    in.moved += bytes;
}

void count_access(Thread& t, const void* address, unsigned bytes, Access access, const void* at) {
    const uintptr_t offset = uintptr_t(address) - uintptr_t(t.owner->arena);
    const bool shared = offset < ARENA_BYTES, writes = access == Access::write || access == Access::strong_write;
    record(t, shared ? offset : uintptr_t(address), bytes, shared, writes, at);
}

}  // namespace emulator

extern "C" {
// Lines: "kernel", name, launches, barriers, atomics, matrix instructions; then for each instruction "access", kernel,
// library, offset, space, direction, requests, transactions, ideal transactions, bytes. Tabs between.
const char* emulator_counts() {
    using namespace emulator;
    told.clear();
    for (const auto& [name, t] : kernel_totals)
        told += "kernel\t" + name + "\t" + std::to_string(t.launches) + "\t" + std::to_string(t.barriers) + "\t" +
                std::to_string(t.atomics) + "\t" + std::to_string(t.matrices) + "\n";
    for (const auto& [key, row] : rows) {
        const auto& [kernel, library, offset, shared, writes] = key;
        told += "access\t" + kernel + "\t" + library + "\t" + std::to_string(offset) + "\t" + (shared ? "shared" : "global") +
                "\t" + (writes ? "write" : "read") + "\t" + std::to_string(row.requests) + "\t" +
                std::to_string(row.transactions) + "\t" + std::to_string(row.ideal) + "\t" + std::to_string(row.moved) + "\n";
    }
    return told.c_str();
}

void emulator_forget_counts() {
    emulator::rows.clear();
    emulator::kernel_totals.clear();
}
}
