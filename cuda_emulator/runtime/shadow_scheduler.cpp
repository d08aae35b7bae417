// What the scheduler tells check mode: launches, blocks and threads that begin and end, and those that meet.
#include <string.h>
#include <sys/mman.h>

#include "counters.h"
#include "shadow_state.h"
#include "streams.h"

namespace emulator {

BlockClock& clock_of(Block& block) { return block.shadow->clock; }
AsyncReads& async_reads_of(Block& block) { return block.shadow->async_reads; }

std::vector<std::array<Cell, 4>> split_cells(1);
static std::vector<uint32_t> unused_split_cells;
uint8_t word_extent[ARENA_WORDS];
std::vector<Worker::Extent> extents;

void split(Cell& cell) {
    uint32_t index;
    if (unused_split_cells.empty()) {
        index = (uint32_t)split_cells.size();
        split_cells.emplace_back();
    } else {
        index = unused_split_cells.back();
        unused_split_cells.pop_back();
    }
    split_cells[index].fill(cell);
    cell = {SPLIT, index, 0, 0};
}

void unsplit(Cell& cell) {
    if (!(cell.writer & SPLIT)) return;
    unused_split_cells.push_back(cell.writer_instruction);
    cell = Cell{};
}

namespace {

// What was written stays written, by nobody in particular.
void forget_segments(Cell& c) { c = {c.writer ? 1u : 0u, 0, 0, 0}; }
void forget_segments_of(const Allocation& a) {
    for (size_t word = 0; word < (a.bytes + 3) / 4; ++word) {
        Cell& c = device_memory.cell(a.begin)[word];
        if (c.writer & SPLIT)
            for (Cell& byte : split_cells[c.writer_instruction]) forget_segments(byte);
        else
            forget_segments(c);
    }
}

void check_numbers() {
    if (launch_clock.exhausted())
        worker->stop(worker->describe("launch too large for check mode", "too many synchronisations; use smaller sizes", {}));
}

}  // namespace

void begin_launch_shadow(Launch& launch) {
    if (launch_clock.half_exhausted()) {
        device_memory.for_each(forget_segments_of);
        forget_earlier_launches();
        launch_clock.begin_anew();
    }
    launch_clock.begin_launch();
    order_launch(launch);
    begin_launch_scopes();
    memset(word_extent, 0, sizeof word_extent);
    extents.clear();
    begin_launch_images();
    if (options.mode == Mode::count) begin_launch_counters();
}

void end_launch_shadow(Launch& launch) {
    if (options.mode == Mode::count) end_launch_counters(launch);
}

void begin_block_shadow(Block& b) {
    if (!b.shadow) b.shadow = new BlockShadow;
    if (!b.shadow->cells) {
        void* cells = mmap(nullptr, ARENA_WORDS * sizeof(Cell), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (cells == MAP_FAILED) throw std::bad_alloc();
        b.shadow->cells = static_cast<Cell*>(cells);
    }
    if (b.shadow->era != launch_clock.era) {
        madvise(b.shadow->cells, ARENA_WORDS * sizeof(Cell), MADV_DONTNEED);  // zeros from now on
        b.shadow->landed.clear();
        b.shadow->era = launch_clock.era;
    }
    launch_clock.begin_block(b);
    b.shadow->volatiles.clear();
    b.shadow->async_reads.begin_block();
    b.shadow->landed.resize(ARENA_WORDS);
    // What earlier blocks left must not look like an answer.
    const size_t words = (worker->shared_used + 3) / 4;
    for (size_t word = 0; word < words; ++word) ((uint32_t*)b.arena)[word] = POISON;
}

void end_block_shadow(Block& b) {
    Finding pending = b.shadow->uninitialised;
    b.shadow->uninitialised = Finding();
    for (uint32_t word : b.shadow->split) unsplit(b.shadow->cells[word]);
    b.shadow->split.clear();
    if (options.mode == Mode::count) end_block_counters(b);
    if (worker->launch->failed) return;
    if (!pending.kind.empty()) worker->stop(pending);
    if (b.async.used) examine_loads_at_end(b);
    keep_rounds(b);
}

const Finding* uninitialised_in(const std::vector<Block*>& blocks) {
    for (const Block* b : blocks)
        if (b->shadow && !b->shadow->uninitialised.kind.empty()) return &b->shadow->uninitialised;
    return nullptr;
}

void free_shadow(Block& b) {
    if (b.shadow && b.shadow->cells) munmap(b.shadow->cells, ARENA_WORDS * sizeof(Cell));
    delete b.shadow;
}

void shared_variable_appears(const Worker::Extent& extent) {
    extents.push_back(extent);
    if (extents.size() > 255) return;
    for (size_t word = extent.begin / 4; word < (extent.end + 3) / 4; ++word) word_extent[word] = uint8_t(extents.size());
    for (Block* b : worker->resident)
        for (size_t word = extent.begin / 4; word < (extent.end + 3) / 4; ++word) ((uint32_t*)b->arena)[word] = POISON;
}

void forget_split_cells(const Allocation& a) {
    for (size_t word = 0; word < (a.bytes + 3) / 4; ++word) unsplit(device_memory.cell(a.begin)[word]);
}

void thread_ends(Thread& t) {
    Block& b = *t.owner;
    t.state = State::ended;
    check_numbers();
    if (t.forgivable) forgive_or_stop(t, nullptr);
    if (t.awaits_products) examine_products_at_end(t);
    if (b.async.used) examine_stores_at_end(t);
    if (!b.arrived) return;
    Thread& waiting = b.threads[b.first_at_barrier];
    Finding f = worker->describe("early exit before a barrier", "a thread waits at the block's barrier, but another has ended",
                                 {b.barrier_line, nullptr});
    f.party = worker->party(waiting, {b.barrier_line, nullptr}, "waits");
    f.other = worker->party(t, {}, "ended");
    worker->stop(f);
}

void report_early_exit(Block& b, int line) {
    Finding f = worker->describe("early exit before a barrier", "a thread comes to the block's barrier, but another has ended",
                                 {line, nullptr});
    f.party.did = "waits";
    for (const Thread& t : b.threads)
        if (t.state == State::ended) {
            f.other = worker->party(t, {}, "ended");
            break;
        }
    worker->stop(f);
}

void report_missing_lanes(Block& b, Warp& warp, unsigned mask, int line) {
    const int lane = __builtin_ctz(mask & ~warp.alive), linear = int(&warp - b.warps.data()) * 32 + lane;
    Finding f = worker->describe("warp lanes never arrive",
                                 "the mask of a warp operation names lane " + std::to_string(lane) +
                                     (linear < (int)b.threads.size() ? ", which has ended" : ", which the block does not have"),
                                 {line, nullptr});
    f.party.did = "waits";
    if (linear < (int)b.threads.size()) f.other = worker->party(b.threads[linear], {}, "ended");
    worker->stop(f);
}

void blocks_synchronised(const std::vector<Block*>& blocks) { launch_clock.blocks_synchronised(blocks); }
void cluster_begins(const std::vector<Block*>& blocks) { launch_clock.cluster_begins(blocks); }

namespace {
// What one of some threads that meet has waited for is there for all of them.
template <class Each>
void share_dependency(Each each) {
    if (!worker->launch->config.programmatic) return;
    bool met = false;
    each([&](Thread& t) { met |= t.dependency_met; });
    if (met) each([&](Thread& t) { t.dependency_met = true; });
}
}  // namespace

void wait_for_dependency() { static_cast<Thread*>(current)->dependency_met = true; }

void block_synchronised(Block& b) {
    launch_clock.block_synchronised(b);
    share_dependency([&](auto visit) {
        for (Thread& t : b.threads) visit(t);
    });
    check_numbers();
    if (options.mode == Mode::count) count_barrier(b);
}

void lanes_synchronised(Block& b, int warp, unsigned mask, WarpOp op) {
    // Only __syncwarp orders memory: shuffles, votes and the like exchange registers.
    if (op == WarpOp::matrix && options.mode == Mode::count) count_matrix();
    if (op != WarpOp::sync) return;
    launch_clock.lanes_synchronised(b, warp, mask);
    share_dependency([&](auto visit) {
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && warp * 32 + lane < (int)b.threads.size()) visit(b.threads[warp * 32 + lane]);
    });
    check_numbers();
}

void barrier_arrival(Thread& t, Block& home, uint32_t barrier) {
    check_numbers();
    if (t.owner == &home)
        launch_clock.arrive(home, barrier, t);
    else
        launch_clock.arrive_from_outside(home, barrier, t);
}
void barrier_departure(Thread& t, uint32_t barrier) { launch_clock.leave(*t.owner, barrier, t); }
void barrier_phase_ends(Block& b, uint32_t barrier) { launch_clock.phase_ends(b, barrier); }
void barrier_forget(Block& b, uint32_t barrier) { clock_of(b).brought.erase(barrier); }

}  // namespace emulator
