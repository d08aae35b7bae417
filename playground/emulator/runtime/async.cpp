// Asynchronous copies and the barriers in shared memory that announce them.
//
// A copy lands as late as the program allows: cp.async when its thread waits for the group, a bulk copy when somebody waits
// at its barrier. A program that forgets to wait reads what was there before, in every mode; check mode reports it.
#include <string.h>

#include <algorithm>

#include "access.h"
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
    used = false;
}

namespace {

Thread& self() { return *static_cast<Thread*>(current); }

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
}

// Ends the phase if nothing is missing, and wakes those who wait for that.
void complete(Block& b, uint32_t address, Mbarrier& m) {
    if (m.pending == 0 && m.bytes == 0) {
        m.phase ^= 1;
        m.pending = m.expected;
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

void arrive(Block& b, uint32_t address, unsigned count, int bytes, Thread& by, int line) {
    Mbarrier m = read(b, address);
    if (count > m.pending)
        worker->stop(worker->describe(
            "invalid barrier", "more arrivals at an mbarrier than the phase expects (" + std::to_string(m.expected) + ")",
            {line, nullptr}));
    m.pending -= count;
    m.bytes += bytes;
    if (options.checked()) barrier_arrival(by, address);
    complete(b, address, m);
}

// ---- landing

void land(Thread& issuer, const PendingCopy& copy) {
    memcpy(copy.to, copy.from, copy.given);
    memset(copy.to + copy.given, 0, copy.bytes - copy.given);
    if (options.checked()) mark_landed(issuer, copy.to, copy.bytes);
}

// The thread's cp.async copies of the groups before `group`.
void land_groups(Thread& issuer, int group) {
    auto& copies = issuer.owner->async.copies[issuer.linear];
    size_t landed = 0;
    while (landed < copies.size() && copies[landed].group < group) land(issuer, copies[landed++]);
    copies.erase(copies.begin(), copies.begin() + landed);
}

// Everything that the barrier's phase waits for.
void land_for(Block& b, uint32_t mbarrier) {
    auto& arrivals = b.async.arrivals;
    for (size_t i = 0; i < arrivals.size();) {
        const PendingArrival a = arrivals[i];
        if (a.mbarrier != mbarrier) {
            ++i;
            continue;
        }
        arrivals.erase(arrivals.begin() + i);
        land_groups(b.threads[a.thread], a.group);
        arrive(b, mbarrier, 1, 0, b.threads[a.thread], 0);
    }
    auto& loads = b.async.loads;
    for (size_t i = 0; i < loads.size();) {
        const PendingBulk load = loads[i];
        if (load.mbarrier != mbarrier) {
            ++i;
            continue;
        }
        loads.erase(loads.begin() + i);
        memcpy(load.to, load.from, load.bytes);
        Thread& issuer = b.threads[load.thread];
        if (options.checked()) mark_landed(issuer, load.to, load.bytes);
        arrive(b, mbarrier, 0, -int(load.bytes), issuer, 0);
    }
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
    b.async.arrivals.push_back({mbarrier, t.linear, ++b.async.groups[t.linear]});
    if (somebody_waits(b, mbarrier)) land_for(b, mbarrier);
    (void)line;
}

// ---- bulk copies

void bulk_load(void* shared, const void* global, unsigned bytes, uint32_t mbarrier) {
    Thread& t = self();
    Block& b = *t.owner;
    b.async.used = true;
    if (options.checked()) {
        if (bytes % 16)
            worker->stop(worker->describe(
                "misaligned access", "a bulk copy moves " + std::to_string(bytes) + " bytes, no multiple of 16", {0, CALLER}));
        examine(global, bytes, Access::read, 16, CALLER);
        mark_in_flight(shared, bytes, 16, CALLER);
        examine(b.arena + mbarrier, 8, Access::atomic, 8, CALLER);
    }
    b.async.loads.push_back({(char*)shared, (const char*)global, bytes, mbarrier, t.linear});
    if (somebody_waits(b, mbarrier)) land_for(b, mbarrier);
}

void bulk_store(void* global, const void* shared, unsigned bytes) {
    Thread& t = self();
    AsyncState& a = t.owner->async;
    a.used = true;
    if (options.checked()) {
        if (bytes % 16)
            worker->stop(worker->describe(
                "misaligned access", "a bulk copy moves " + std::to_string(bytes) + " bytes, no multiple of 16", {0, CALLER}));
        examine(shared, bytes, Access::read, 16, CALLER);
        examine(global, bytes, Access::write, 16, CALLER);
    }
    a.stores[t.linear].push_back({(char*)global, (const char*)shared, bytes, 0, a.store_groups[t.linear]});
    // Device memory has no state of its own for what is under way, so the copy is done at once.
    memcpy(global, shared, bytes);
}

void bulk_commit() { ++self().owner->async.store_groups[current->linear]; }
void bulk_wait(int) { self().owner->async.stores[current->linear].clear(); }

// ---- mbarriers

void mbarrier_init(uint32_t mbarrier, unsigned count, int line) {
    Block& b = *self().owner;
    if (!count || count >= 1 << 20)
        worker->stop(worker->describe("invalid barrier", "an mbarrier expects 1 to 1048575 arrivals", {line, nullptr}));
    if (options.checked()) examine(b.arena + mbarrier, 8, Access::write, 8, CALLER);
    Mbarrier m{};
    m.expected = m.pending = count;
    write(b, mbarrier, m);
}

void mbarrier_arrive(uint32_t mbarrier, unsigned count, unsigned bytes, int line) {
    Thread& t = self();
    if (options.checked()) examine(t.owner->arena + mbarrier, 8, Access::atomic, 8, CALLER);
    arrive(*t.owner, mbarrier, count, int(bytes), t, line);
}

bool mbarrier_wait(uint32_t mbarrier, unsigned parity, bool wait, int line) {
    Thread& t = self();
    Block& b = *t.owner;
    if (options.checked()) examine(b.arena + mbarrier, 8, Access::atomic, 8, CALLER);
    if (read(b, mbarrier).phase == (parity & 1)) land_for(b, mbarrier);
    if (read(b, mbarrier).phase == (parity & 1)) {
        if (!wait) {
            worker->pause();
            return false;
        }
        b.async.used = true;
        b.async.waiting.push_back({mbarrier, t.linear});
        worker->wait(State::at_mbarrier, line);
    } else if (options.checked()) {
        barrier_departure(t, mbarrier);
    }
    return true;
}

}  // namespace emulator
