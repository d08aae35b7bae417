// Asynchronous copies and the barriers in shared memory that announce them.
//
// A copy lands as late as the program allows: cp.async when its thread waits for the group, a bulk copy when somebody waits
// at its barrier. A program that forgets to wait reads what was there before, in every mode; check mode reports it.
#include <string.h>

#include <algorithm>
#include <map>
#include <utility>

#include "access.h"
#include "async_reads.h"
#include "counters.h"
#include "scheduler.h"
#include "shadow.h"

namespace emulator {

void AsyncState::reset(int threads) {
    copies.assign(threads, {});
    groups.assign(threads, 0);
    stores.assign(threads, {});
    store_groups.assign(threads, 0);
    loads.clear();
    arrivals.clear();
    waiting.clear();
    fresh.clear();
    rounds.clear();
    used = false;
}

namespace {

#define CALLER __builtin_return_address(0)

// ---- the state of an mbarrier, in its 8 bytes of shared memory

struct Mbarrier {
    uint32_t expected : 20, pending : 20;  // arrivals of a phase, and how many are still missing
    int32_t bytes : 23;                    // announced and not yet landed
    uint32_t phase : 1;
};

Mbarrier read(Block& b, uint32_t address) {
    uint64_t word;
    memcpy(&word, b.arena + address, 8);
    Mbarrier m;
    m.expected = word & 0xfffff;
    m.pending = word >> 20 & 0xfffff;
    m.bytes = int32_t(word >> 40 & 0x7fffff) - (1 << 22);
    m.phase = word >> 63;
    return m;
}

void write(Block& b, uint32_t address, const Mbarrier& m) {
    const uint64_t word =
        uint64_t(m.expected) | uint64_t(m.pending) << 20 | uint64_t(m.bytes + (1 << 22)) << 40 | uint64_t(m.phase) << 63;
    memcpy(b.arena + address, &word, 8);
    ++worker->changes;
}

// Ends the phase if nothing is missing, and wakes those who wait for that.
void complete(Block& b, uint32_t address, Mbarrier& m) {
    if (m.pending == 0 && m.bytes == 0) {
        m.phase ^= 1;
        m.pending = m.expected;
        if (options.checked()) {
            barrier_phase_ends(b, address);
            ++b.async.rounds[address];
        }
        auto& waiting = b.async.waiting;
        for (const MbarrierWait& w : waiting)
            if (w.mbarrier == address) {
                if (options.checked()) barrier_departure(b.threads[w.thread], address);
                worker->make_ready(b, w.thread);
            }
        waiting.erase(
            std::remove_if(waiting.begin(), waiting.end(), [&](const MbarrierWait& w) { return w.mbarrier == address; }),
            waiting.end());
    }
    write(b, address, m);
}

void arrive(Block& b, uint32_t address, unsigned count, int bytes, Thread& by, const void* instruction) {
    Mbarrier m = read(b, address);
    if (count > m.pending)
        worker->stop(worker->describe(
            "invalid barrier", "more arrivals at an mbarrier than the phase expects (" + std::to_string(m.expected) + ")",
            {0, instruction}));
    m.pending -= count;
    m.bytes += bytes;
    if (options.checked()) barrier_arrival(by, b, address);
    complete(b, address, m);
}

// ---- how often a stage of a pipeline is used

constexpr uint32_t OF_COPIES = 1u << 31;  // in the key of a round: cp.async lands there; else it is an mbarrier
// By kernel, and in it by key: the most of a block.
std::map<std::string, std::map<uint32_t, unsigned>> most_rounds;

// ---- landing

void land(Thread& issuer, const PendingCopy& copy) {
    memcpy(copy.to, copy.from, copy.given);
    memset(copy.to + copy.given, 0, copy.bytes - copy.given);
    if (!options.checked()) return;
    mark_landed(issuer, copy.to, copy.bytes);
    if (!issuer.lane) ++issuer.owner->async.rounds[uint32_t(copy.to - issuer.owner->arena) | OF_COPIES];
}

// The thread's cp.async copies of the groups before `group`.
void land_groups(Thread& issuer, int group) {
    auto& copies = issuer.owner->async.copies[issuer.linear];
    size_t landed = 0;
    while (landed < copies.size() && copies[landed].group < group) land(issuer, copies[landed++]);
    copies.erase(copies.begin(), copies.begin() + landed);
}

// ---- bulk stores

// A store of the calling thread reads shared memory from now on.
void begin_store(const void* shared, unsigned bytes, unsigned alignment, const void* instruction) {
    Thread& t = self();
    Block& b = *t.owner;
    const uint32_t address = shared_address(shared);
    if (address % alignment || bytes % 16)
        worker->stop(worker->describe("misaligned access",
                                      "a bulk store of " + std::to_string(bytes) + " bytes from byte " +
                                          std::to_string(address) + " of shared memory: multiples of 16 are expected",
                                      {0, instruction}));
    const uint32_t reader = async_reads_of(b).begin({false, t.linear, 1, instruction});
    for (unsigned at = 0; at < bytes; at += 16) examine_async_read(t, address + at, 16, reader, instruction);
    b.async.stores[t.linear].push_back({reader, b.async.store_groups[t.linear], instruction});
}

// ---- what a barrier waits for

// Everything that the barrier's phase waits for.
void land_for(Block& b, uint32_t mbarrier) {
    if (const auto found = b.async.arrivals.find(mbarrier); found != b.async.arrivals.end()) {
        const std::vector<PendingArrival> arrivals = std::exchange(found->second, {});
        for (const PendingArrival& a : arrivals) {
            land_groups(b.threads[a.thread], a.group);
            arrive(b, mbarrier, 1, 0, b.threads[a.thread], nullptr);
        }
    }
    auto& loads = b.async.loads;
    for (size_t i = 0; i < loads.size();) {
        const PendingBulk load = loads[i];
        if (load.mbarrier != mbarrier) {
            ++i;
            continue;
        }
        loads.erase(loads.begin() + i);
        if (load.box)
            land_box(b, load.to, *load.box);
        else
            memcpy(load.to, load.from, load.bytes);
        Thread& issuer = b.threads[load.thread];
        if (options.checked()) mark_landed(issuer, load.to, load.bytes);
        arrive(b, mbarrier, 0, -int(load.bytes), issuer, nullptr);
    }
}

// ---- mbarriers that asynchronous copies may not see yet

template <class Predicate>
void forget_fresh(Block& b, Predicate predicate) {
    auto& fresh = b.async.fresh;
    fresh.erase(std::remove_if(fresh.begin(), fresh.end(), predicate), fresh.end());
}

// A copy is about to name the mbarrier as the one at which it completes.
void examine_completion(Block& b, uint32_t mbarrier, const void* instruction) {
    examine(b.arena + mbarrier, 8, Access::atomic, 8, instruction);
    const auto found = std::find_if(b.async.fresh.begin(), b.async.fresh.end(),
                                    [&](const FreshMbarrier& f) { return f.mbarrier == mbarrier; });
    if (found == b.async.fresh.end()) return;
    if (!launch_clock.behind_proxy_fence(found->segment, clock_of(b))) {
        Finding f = worker->describe("missing proxy fence",
                                     "an asynchronous copy is to complete at an mbarrier that was initialised with no "
                                     "fence.mbarrier_init (or fence.proxy.async) since",
                                     {0, instruction});
        f.party.did = "begins the copy";
        f.other = worker->party(b.threads[found->thread], {0, found->instruction}, "initialised the mbarrier");
        worker->stop(f);
    }
    b.async.fresh.erase(found);
}

bool somebody_waits(const Block& b, uint32_t mbarrier) {
    return std::any_of(b.async.waiting.begin(), b.async.waiting.end(),
                       [&](const MbarrierWait& w) { return w.mbarrier == mbarrier; });
}

}  // namespace

// ---- cp.async

void async_copy(void* shared, const void* global, unsigned bytes, unsigned given) {
    Thread& t = self();
    AsyncState& a = t.owner->async;
    a.used = true;
    if (given > bytes) given = bytes;
    if (options.checked()) {
        if (given) examine(global, given, Access::read, given == bytes ? bytes : 1, CALLER);
        mark_in_flight(shared, bytes, bytes, CALLER);
    }
    a.copies[t.linear].push_back({(char*)shared, (const char*)global, bytes, given, a.groups[t.linear]});
}

void async_commit() { ++self().owner->async.groups[current->linear]; }

void async_wait(int groups_left) {
    Thread& t = self();
    land_groups(t, t.owner->async.groups[t.linear] - groups_left);
}

void async_arrive(uint32_t mbarrier, bool counted, int line) {
    Thread& t = self();
    Block& b = *t.owner;
    b.async.used = true;
    if (options.checked()) examine(b.arena + mbarrier, 8, Access::atomic, 8, CALLER);
    if (!counted) {
        Mbarrier m = read(b, mbarrier);
        ++m.pending;
        write(b, mbarrier, m);
    }
    // The copies of the open group count, too: close it.
    b.async.arrivals[mbarrier].push_back({t.linear, ++b.async.groups[t.linear]});
    if (somebody_waits(b, mbarrier)) land_for(b, mbarrier);
    (void)line;
}

// The barrier of an instruction that takes none of other blocks; a rank in its address must be the thread's own.
void own_barrier(uint32_t& mbarrier, const void* instruction) {
    if (&home_of(mbarrier) != self().owner)
        worker->stop(worker->describe("not supported", "this instruction with an mbarrier of another block of the cluster",
                                      {0, instruction}));
}

// ---- bulk copies

void bulk_load(void* shared, const void* global, unsigned bytes, uint32_t mbarrier) {
    Thread& t = self();
    Block& b = *t.owner;
    b.async.used = true;
    own_barrier(mbarrier, CALLER);
    if (options.checked()) {
        if (bytes % 16)
            worker->stop(worker->describe(
                "misaligned access", "a bulk copy moves " + std::to_string(bytes) + " bytes, no multiple of 16", {0, CALLER}));
        examine(global, bytes, Access::read, 16, CALLER);
        mark_in_flight(shared, bytes, 16, CALLER);
        examine_completion(b, mbarrier, CALLER);
    }
    b.async.loads.push_back({(char*)shared, (const char*)global, bytes, mbarrier, t.linear, nullptr, CALLER});
    if (somebody_waits(b, mbarrier)) land_for(b, mbarrier);
}

void bulk_store(void* global, const void* shared, unsigned bytes) {
    self().owner->async.used = true;
    if (options.checked()) {
        begin_store(shared, bytes, 16, CALLER);
        examine(global, bytes, Access::write, 16, CALLER);
    }
    // Device memory has no state of its own for what is under way, so the copy is done at once.
    memcpy(global, shared, bytes);
}

void tensor_load(void* shared, const void* map, int rank, const int* at, uint32_t mbarrier) {
    Thread& t = self();
    Block& b = *t.owner;
    b.async.used = true;
    own_barrier(mbarrier, CALLER);
    const std::shared_ptr<TensorBox> box = box_of(map, rank, at, shared, CALLER);
    const unsigned bytes = box_bytes(box->map);
    if (options.checked()) {
        examine_rows(*box, Access::read, CALLER);
        mark_in_flight(shared, bytes, 128, CALLER);
        examine_completion(b, mbarrier, CALLER);
    }
    b.async.loads.push_back({(char*)shared, nullptr, bytes, mbarrier, t.linear, box, CALLER});
    if (somebody_waits(b, mbarrier)) land_for(b, mbarrier);
}

void tensor_store(const void* map, int rank, const int* at, const void* shared) {
    Block& b = *self().owner;
    b.async.used = true;
    const std::shared_ptr<TensorBox> box = box_of(map, rank, at, shared, CALLER);
    if (options.checked()) {
        begin_store(shared, box_bytes(box->map), 128, CALLER);
        examine_rows(*box, Access::write, CALLER);
    }
    store_box(b, (const char*)shared, *box);
}

void bulk_commit() {
    AsyncState& a = self().owner->async;
    a.used = true;
    ++a.store_groups[current->linear];
}

void bulk_wait(int groups_left) {
    Thread& t = self();
    AsyncState& a = t.owner->async;
    auto& stores = a.stores[t.linear];
    const int end = a.store_groups[t.linear] - groups_left;
    while (!stores.empty() && stores.front().group < end) {
        async_reads_of(*t.owner).done(stores.front().reader, t.linear, t.segment);
        stores.erase(stores.begin());
    }
}

void keep_rounds(Block& b) {
    if (b.async.rounds.empty()) return;
    auto& most = most_rounds[worker->launch->kernel];
    for (const auto& [key, rounds] : b.async.rounds) most[key] = std::max(most[key], rounds);
}

void examine_stores_at_end(Thread& t) {
    const auto& stores = t.owner->async.stores[t.linear];
    if (stores.empty()) return;
    Finding f = worker->describe("asynchronous copy not waited for",
                                 "a thread ends, and its bulk store may still be reading shared memory "
                                 "(cp.async.bulk.wait_group.read)",
                                 {0, stores.front().instruction});
    f.party = worker->party(t, {0, stores.front().instruction}, "began the store");
    worker->stop(f);
}

void examine_loads_at_end(Block& b) {
    if (b.async.loads.empty()) return;
    const PendingBulk& load = b.async.loads.front();
    Finding f = worker->describe("asynchronous copy not waited for",
                                 "the block ends, and no thread has waited for a copy into its shared memory", {});
    f.party = worker->party(b.threads[load.thread], {0, load.instruction}, "began the copy");
    worker->stop(f);
}

std::string missing_at_mbarrier(Block& b) {
    if (b.async.waiting.empty()) return "";
    // The barrier that lacks least, or bytes only: others wait for what comes after it.
    auto lacks = [&](const MbarrierWait& w) { return read(b, w.mbarrier).pending; };
    const auto least = std::min_element(b.async.waiting.begin(), b.async.waiting.end(),
                                        [&](const MbarrierWait& x, const MbarrierWait& y) { return lacks(x) < lacks(y); });
    const Mbarrier m = read(b, least->mbarrier);
    std::string text = " (missing there: " + std::to_string(m.pending) + " of " + std::to_string(m.expected) + " arrivals";
    if (m.bytes > 0) text += ", " + std::to_string(m.bytes) + " bytes that were announced and have not come";
    if (m.bytes < 0) text += "; " + std::to_string(-m.bytes) + " bytes have come that were not announced";
    return text + ")";
}

// ---- mbarriers

void mbarrier_init(uint32_t mbarrier, unsigned count, int line) {
    Block& b = *self().owner;
    if (!count || count >= 1 << 20)
        worker->stop(worker->describe("invalid barrier", "an mbarrier expects 1 to 1048575 arrivals", {line, nullptr}));
    if (options.checked()) {
        examine(b.arena + mbarrier, 8, Access::write, 8, CALLER);
        b.async.used = true;
        forget_fresh(b, [&](const FreshMbarrier& f) { return f.mbarrier == mbarrier; });
        b.async.fresh.push_back({mbarrier, self().segment, self().linear, CALLER});
    }
    Mbarrier m{};
    m.expected = m.pending = count;
    write(b, mbarrier, m);
}

void mbarrier_init_fence() {
    if (!options.checked()) return;
    const int thread = self().linear;
    forget_fresh(*self().owner, [&](const FreshMbarrier& f) { return f.thread == thread; });
}

unsigned mbarrier_arrive(uint32_t mbarrier, unsigned count, unsigned bytes) {
    Block& home = home_of(mbarrier);
    if (options.checked()) examine(home.arena + mbarrier, 8, Access::atomic, 8, CALLER);
    const unsigned parity = read(home, mbarrier).phase;
    arrive(home, mbarrier, count, int(bytes), self(), CALLER);
    return parity;
}

void mbarrier_drop(uint32_t mbarrier) {
    Block& home = home_of(mbarrier);
    if (options.checked()) examine(home.arena + mbarrier, 8, Access::atomic, 8, CALLER);
    Mbarrier m = read(home, mbarrier);
    --m.expected;
    write(home, mbarrier, m);
    arrive(home, mbarrier, 1, 0, self(), CALLER);
}

bool mbarrier_wait(uint32_t mbarrier, unsigned parity, bool wait, int line) {
    Thread& t = self();
    Block& b = *t.owner;
    own_barrier(mbarrier, CALLER);
    if (options.checked()) examine(b.arena + mbarrier, 8, Access::atomic, 8, CALLER);
    const bool ended = read(b, mbarrier).phase != (parity & 1);
    // try_wait may give up whenever it likes. Here it does at first, before anything lands, so that code which does not ask
    // again shows. Only the next one waits, whatever its barrier: a thread may ask for several in turn.
    if (wait && !ended && options.mode == Mode::check && !std::exchange(t.gave_up, true)) return false;
    if (!ended) land_for(b, mbarrier);
    if (read(b, mbarrier).phase == (parity & 1)) {
        if (!wait) {
            t.watches_from = CALLER;
            worker->pause();
            return false;
        }
        t.gave_up = false;
        b.async.used = true;
        b.async.waiting.push_back({mbarrier, t.linear});
        worker->wait(State::at_mbarrier, line);
    } else if (options.checked()) {
        barrier_departure(t, mbarrier);
    }
    return true;
}

}  // namespace emulator

// Since the process began: kernel, "mbarrier" or "cp.async", address in shared memory, rounds, with tabs between, a line for
// each.
extern "C" const char* emulator_rounds() {
    using namespace emulator;
    static std::string text;
    text.clear();
    for (const auto& [kernel, rounds_of] : most_rounds)
        for (const auto& [key, rounds] : rounds_of)
            text += kernel + (key & OF_COPIES ? "\tcp.async\t" : "\tmbarrier\t") + std::to_string(key & ~OF_COPIES) + "\t" +
                    std::to_string(rounds) + "\n";
    return text.c_str();
}
