// Where threads of a block, or lanes of a warp, wait for one another.
#include <string.h>

#include <algorithm>

#include "scheduler.h"
#include "shadow.h"
#include "source_lines.h"

namespace emulator {
namespace {

int vote_result(const Block& b) {
    const int yes = b.votes[b.vote_half];
    switch (b.vote) {
        case Vote::count:
            return yes;
        case Vote::all:
            return yes == b.arrived;
        case Vote::any:
            return yes != 0;
        default:
            return 0;
    }
}

const char* op_name(WarpOp op) {
    switch (op) {
        case WarpOp::sync:
            return "__syncwarp";
        case WarpOp::shuffle:
            return "__shfl_sync";
        case WarpOp::shuffle_up:
            return "__shfl_up_sync";
        case WarpOp::shuffle_down:
            return "__shfl_down_sync";
        case WarpOp::shuffle_xor:
            return "__shfl_xor_sync";
        case WarpOp::ballot:
            return "__ballot_sync";
        case WarpOp::any:
            return "__any_sync";
        case WarpOp::all:
            return "__all_sync";
        case WarpOp::elect:
            return "elect.sync";
        case WarpOp::match:
            return "a match";
        case WarpOp::reduce:
            return "a reduction";
        case WarpOp::matrix:
            return "a matrix instruction";
    }
    return "";
}

// Follows the frame pointers, which checked kernels keep, from the runtime's function that the kernel called.
CallPath call_path(const void* const* frame, const Thread& t, const Launch& launch) {
    CallPath path;
    while (path.calls < CallPath::MOST && t.fiber->owns(frame) && t.fiber->owns(frame + 1)) {
        const uintptr_t address = (uintptr_t)frame[1];
        if (address < launch.text_begin || address >= launch.text_end) break;
        path.at[path.calls++] = frame[1];
        frame = (const void* const*)frame[0];
    }
    return path;
}

// The first call in which two paths through the source differ, or -1. The compiler may have made several copies of one call.
int first_difference(const CallPath& a, const CallPath& b) {
    if (a.calls == b.calls && !memcmp(a.at, b.at, a.calls * sizeof *a.at)) return -1;
    const int both = std::min(a.calls, b.calls);
    for (int i = 0; i < both; ++i)
        if (a.at[i] != b.at[i] && source_lines(a.at[i]).lines != source_lines(b.at[i]).lines) return i;
    return a.calls == b.calls ? -1 : both - 1;
}

}  // namespace

void Worker::release_barrier(Block& b) {
    b.votes[b.vote_half] = vote_result(b);  // what the waiting threads will read
    b.vote_half ^= 1;
    b.votes[b.vote_half] = 0;
    b.arrived = 0;
    if (options.checked()) block_synchronised(b);
    for (int thread : b.waiting) make_ready(b, thread);
    b.waiting.clear();
}

int block_barrier(Vote vote, int predicate, int line, int site) {
    if (!current) return host_runs_device_code("a barrier", {line, nullptr}), 0;
    Worker& w = *worker;
    Thread& t = self();
    Block& b = *t.owner;
    if (options.checked()) {
        const CallPath path = call_path((const void* const*)__builtin_frame_address(0), t, *w.launch);
        if (!b.arrived) b.barrier_path = path;
        const bool elsewhere = b.arrived && (b.barrier_line != line || b.barrier_site != site);
        const int call = b.arrived && !elsewhere ? first_difference(b.barrier_path, path) : -1;
        if (elsewhere || call >= 0) {
            const Place here = elsewhere ? Place{line, nullptr} : Place{0, path.at[call]};
            const Place there = elsewhere ? Place{b.barrier_line, nullptr} : Place{0, b.barrier_path.at[call]};
            Finding finding = w.describe("barrier divergence",
                                         elsewhere ? "threads of one block wait at different barriers"
                                                   : "threads of one block come to the barrier in line " +
                                                         std::to_string(line) + " through different calls",
                                         here);
            finding.party.did = "waits";
            finding.other = w.party(b.threads[b.first_at_barrier], there, "waits");
            w.stop(finding);
        }
        if (b.alive != (int)b.threads.size()) report_early_exit(b, line);
    }
    if (!b.arrived) b.first_at_barrier = t.linear;
    b.barrier_line = line;
    b.barrier_site = site;
    b.vote = vote;
    const int half = b.vote_half;
    b.votes[half] += predicate;
    ++b.arrived;
    if (b.arrived == b.alive) {
        // The last to come goes on behind those who waited, so that all run in the same order again.
        b.waiting.push_back(t.linear);
        w.release_barrier(b);
        Fiber& other = w.next();
        if (&other != t.fiber) {
            w.running = &other;
            t.fiber->switch_to(other);
        }
    } else {
        b.waiting.push_back(t.linear);
        w.wait(State::at_barrier, line);
    }
    return b.votes[half];
}

namespace {

void meet_at_named(int id, int threads, bool wait, int line) {
    Worker& w = *worker;
    Thread& t = self();
    Block& b = *t.owner;
    const bool all = threads == (int)b.threads.size();  // which a barrier without a count expects, too
    if (threads <= 0 || (threads % 32 && !all))
        w.stop(w.describe("invalid barrier",
                          "a barrier for " + std::to_string(threads) + " threads; their number must be a multiple of 32",
                          {line, nullptr}));
    NamedBarrier& barrier = b.named[id];
    if (barrier.arrived && barrier.expected != threads)
        w.stop(w.describe("barrier divergence", "threads bring different counts to one named barrier", {line, nullptr}));
    barrier.expected = threads;
    barrier.line = line;
    ++barrier.arrived;
    if (options.checked()) barrier_arrival(t, b, id);
    if (barrier.arrived == threads) {
        barrier.arrived = 0;
        for (int thread : barrier.waiting) {
            if (options.checked()) barrier_departure(b.threads[thread], id);
            w.make_ready(b, thread);
        }
        if (options.checked()) {
            if (wait) barrier_departure(t, id);
            barrier_forget(b, id);
        }
        barrier.waiting.clear();
    } else if (wait) {
        barrier.waiting.push_back(t.linear);
        w.wait(State::at_named_barrier, line);
    }
}

}  // namespace

void named_barrier(int id, int threads, bool wait, int line) {
    Worker& w = *worker;
    if (id < 0 || id > 15)
        w.stop(w.describe("invalid barrier", "the barriers of a block are numbered 0 to 15", {line, nullptr}));
    meet_at_named(id, threads, wait, line);
}

void tile_barrier(int tile, int threads, int line) { meet_at_named(16 + tile, threads, true, line); }

void tile_exchange(int tile, int threads, const void* row, int from, void* result, int bytes, int line) {
    Thread& t = self();
    std::vector<char>& rows = t.owner->tile_rows;
    rows.resize(ROW * t.owner->threads.size());
    memcpy(&rows[ROW * t.linear], row, bytes);
    tile_barrier(tile, threads, line);
    memcpy(result, &rows[ROW * from], bytes);
    tile_barrier(tile, threads, line);  // or the next exchange would write what others have not read
}

int named_barrier_count(int id, int threads, bool predicate, int line) {
    NamedBarrier& barrier = self().owner->named[id & 15];
    if (!barrier.arrived) {
        barrier.half ^= 1;
        barrier.votes[barrier.half] = 0;
    }
    const int half = barrier.half;
    barrier.votes[half] += predicate;
    named_barrier(id, threads, true, line);
    return barrier.votes[half];
}

namespace {

// All lanes of the mask that have not ended are there.
void complete(Rendezvous& r, Block& b, int warp, unsigned waiting) {
    if (r.compute) r.compute(r.arrived, r.rows[r.half], r.results[r.half]);
    r.present[r.half] = r.arrived;
    r.arrived = 0;
    r.half ^= 1;
    if (options.checked()) lanes_synchronised(b, warp, r.mask, r.op);
    for (unsigned rest = waiting; rest; rest &= rest - 1) worker->make_ready(b, warp * 32 + __builtin_ctz(rest));
}

// Brings the calling lane's row and waits for the others; the last to come computes.
Rendezvous& meet(unsigned mask, const void* row, unsigned bytes, WarpOp op, WarpFunction compute, int line, int* half) {
    Worker& w = *worker;
    Thread& t = self();
    Block& b = *t.owner;
    Warp& warp = b.warps[t.warp];
    if (!(mask >> t.lane & 1))
        w.stop(w.describe("lane not in mask", std::string("a lane calls ") + op_name(op) + " with a mask that does not name it",
                          {line, nullptr}));
    Rendezvous* r = nullptr;
    for (int i = 0; i < warp.used; ++i)
        if (warp.rendezvous[i]->mask == mask) {
            r = warp.rendezvous[i].get();
            break;
        }
    if (!r) {
        if (warp.used == (int)warp.rendezvous.size()) warp.rendezvous.push_back(std::make_unique<Rendezvous>());
        r = warp.rendezvous[warp.used++].get();
        r->mask = mask;
        r->arrived = 0;
    }
    // Lanes may come from different lines, but not to instructions that they have to execute together (.aligned).
    const bool from_elsewhere = op == WarpOp::matrix && r->line != line && options.checked();
    if (r->arrived && (r->op != op || r->compute != compute || from_elsewhere)) {
        Finding finding =
            w.describe("warp divergence",
                       std::string("lanes of one mask meet in different operations, ") + op_name(op) + " and " + op_name(r->op),
                       {line, nullptr});
        finding.party.did = "waits";
        finding.other = w.party(b.threads[r->first_thread], {r->line, nullptr}, "waits");
        w.stop(finding);
    }
    // Lanes that have ended, or never were, are none that a mask waits for; but .aligned instructions are of a whole warp.
    if (options.checked() && op == WarpOp::matrix && mask & ~warp.alive) report_missing_lanes(b, warp, mask, line);
    if (!r->arrived) r->first_thread = t.linear;
    r->op = op;
    r->compute = compute;
    r->line = line;
    *half = r->half;
    if (bytes) memcpy(r->rows[r->half] + ROW * t.lane, row, bytes);
    r->arrived |= 1u << t.lane;
    if (r->arrived == (mask & warp.alive)) {
        complete(*r, b, t.warp, r->arrived & ~(1u << t.lane));
    } else {
        w.wait(State::at_warp_operation, line);
    }
    return *r;
}

}  // namespace

void lane_ends(Thread& t) {
    Block& b = *t.owner;
    Warp& warp = b.warps[t.warp];
    for (int i = 0; i < warp.used; ++i) {
        Rendezvous& r = *warp.rendezvous[i];
        if (!r.arrived || !(r.mask >> t.lane & 1)) continue;
        if (options.checked() && r.op == WarpOp::matrix) report_missing_lanes(b, warp, r.mask, r.line);
        if (r.arrived == (r.mask & warp.alive)) complete(r, b, t.warp, r.arrived);
    }
}

const char* warp_exchange(unsigned mask, const void* row, unsigned bytes, WarpOp op, int line) {
    static const char no_rows[32 * ROW] = {};
    if (!current) return host_runs_device_code(op_name(op), {line, nullptr}), no_rows;
    int half;
    Rendezvous& r = meet(mask, row, bytes, op, nullptr, line, &half);
    worker->lanes_met = r.present[half];
    return r.rows[half];
}

const char* warp_compute(unsigned mask, const void* row, unsigned bytes, WarpOp op, WarpFunction compute, int line) {
    int half;
    Rendezvous& r = meet(mask, row, bytes, op, compute, line, &half);
    return r.results[half] + ROW * current->lane;
}

unsigned lanes_present(unsigned mask) { return mask & self().owner->warps[current->warp].alive; }

void shuffle_source(unsigned mask, int lane, int line) {
    if (mask & worker->lanes_met & 1u << lane) return;
    worker->stop(
        worker->describe("shuffle from absent lane",
                         "the shuffle reads lane " + std::to_string(lane) +
                             (mask >> lane & 1 ? ", which has ended or is not there (Programming Guide: the value is undefined)"
                                               : ", which its mask does not name"),
                         {line, nullptr}));
}

}  // namespace emulator
