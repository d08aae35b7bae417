#include "groups.h"

#include <algorithm>

#include "access.h"
#include "scheduler.h"
#include "shadow.h"

namespace emulator {
namespace {

void end_phase(BlockGroup& g) {
    ++g.phase;
    g.arrived = 0;
    if (options.checked()) blocks_synchronised(g.blocks);
    for (const auto& [block, thread] : g.waiting) worker->make_ready(*block, thread);
    g.waiting.clear();
}

void arrive(BlockGroup& g, uint32_t& token) {
    token = g.phase;
    if (++g.arrived == g.alive) end_phase(g);
}

void wait(BlockGroup& g, uint32_t token, int line) {
    if (g.phase != token) return;
    Thread& t = self();
    g.waiting.push_back({t.owner, t.linear});
    worker->wait(State::at_group_barrier, line);
}

void thread_ends(const std::shared_ptr<BlockGroup>& g) {
    if (!g) return;
    --g->alive;
    if (g->alive && g->arrived == g->alive) end_phase(*g);
}

}  // namespace

// Unlike barriers of a cluster, which expect only threads that have not ended, grid.sync() expects every thread of the grid.
[[noreturn]] static void report_exit_before_grid_barrier(const Thread& waiting, const Thread* ended) {
    const Place place{waiting.waits_at_line, nullptr};
    Finding f = worker->describe("early exit before a barrier",
                                 "a thread comes to grid.sync(), but another has ended (Cooperative Groups: every thread of "
                                 "the grid has to come)",
                                 place);
    f.party = worker->party(waiting, place, "waits");
    if (ended) f.other = worker->party(*ended, {}, "ended");
    worker->stop(f);
}

void group_thread_ends(Thread& t) {
    const auto& grid = t.owner->membership.grid;
    if (grid && grid->arrived && options.checked()) {
        const auto& [block, thread] = grid->waiting.front();
        report_exit_before_grid_barrier(block->threads[thread], &t);
    }
    thread_ends(t.owner->membership.cluster);
    thread_ends(grid);
}

Block& home_of(uint32_t& address) {
    Block& own = *self().owner;
    const unsigned rank = address >> RANK_SHIFT;
    if (!rank) return own;
    address &= (1u << RANK_SHIFT) - 1;
    const auto& cluster = own.membership.cluster;
    Block* home = cluster && rank <= cluster->blocks.size() ? cluster->blocks[rank - 1] : nullptr;
    if (!home)
        worker->stop(worker->describe("shared memory of an ended block",
                                      "shared memory of block " + std::to_string(rank - 1) +
                                          " of the cluster, which has ended or is not there; a cluster barrier before the end "
                                          "keeps it alive",
                                      {}));
    return *home;
}

// ---- clusters

unsigned cluster_rank() { return self().owner->membership.rank; }
unsigned cluster_blocks() {
    const auto& cluster = self().owner->membership.cluster;
    return cluster ? unsigned(cluster->blocks.size()) : 1;
}
dim3 cluster_dim() {
    const dim3 c = worker->launch->config.cluster;
    return c;
}

// A block alone is a cluster, too.
void cluster_arrive(int line) {
    Thread& t = self();
    if (const auto& cluster = t.owner->membership.cluster) return arrive(*cluster, t.cluster_token);
    (void)line;
}

void cluster_wait(int line) {
    Thread& t = self();
    if (const auto& cluster = t.owner->membership.cluster)
        wait(*cluster, t.cluster_token, line);
    else
        block_barrier(Vote::none, 0, line);
}

uint32_t cluster_address(uint32_t address, unsigned rank) {
    Block& own = *self().owner;
    address &= (1u << RANK_SHIFT) - 1;
    if (rank >= cluster_blocks())
        worker->stop(worker->describe(
            "invalid cluster rank",
            "rank " + std::to_string(rank) + " in a cluster of " + std::to_string(cluster_blocks()) + " blocks",
            {0, __builtin_return_address(0)}));
    return own.membership.cluster ? address | (rank + 1) << RANK_SHIFT : address;
}

void* cluster_pointer(const void* pointer, unsigned rank) {
    return shared_pointer(cluster_address(shared_address(pointer), rank));
}

// ---- the grid

void grid_barrier(int line) {
    Thread& t = self();
    const auto& grid = t.owner->membership.grid;
    if (!grid)
        worker->stop(worker->describe("invalid barrier", "grid.sync() in a launch that is not cooperative", {line, nullptr}));
    if (options.checked() && grid->alive != int(worker->launch->blocks) * worker->launch->threads) {
        t.waits_at_line = line;
        const auto ended = std::find_if(t.owner->threads.begin(), t.owner->threads.end(),
                                        [](const Thread& other) { return other.state == State::ended; });
        report_exit_before_grid_barrier(t, ended == t.owner->threads.end() ? nullptr : &*ended);
    }
    uint32_t token;
    arrive(*grid, token);
    wait(*grid, token, line);
}

}  // namespace emulator
