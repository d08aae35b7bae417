#include "scheduler.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>

#include "faults.h"
#include "shadow.h"
#include "ticks.h"

namespace emulator {

__thread ThreadView* current = nullptr;
__thread Worker* worker = nullptr;
extern "C" __thread char* emulator_dynamic_shared __attribute__((tls_model("initial-exec")));
__thread char* emulator_dynamic_shared = nullptr;
Options options;

namespace {
void enter(Thread& t) {
    current = &t;
    emulator_dynamic_shared = t.owner->arena + ARENA_START;
}

// The thread that runs; in host code, which is told so, one of no grid.
inline const ThreadView& thread_of(const char* what, const void* instruction) {
    if (__builtin_expect(current != nullptr, true)) return *current;
    static const BlockView no_block{};
    static const ThreadView no_thread{{}, &no_block, 0, 0, 0};
    host_runs_device_code(what, {0, instruction});
    return no_thread;
}
}  // namespace

#define CALLER __builtin_return_address(0)
uint3 thread_index() { return thread_of("threadIdx", CALLER).thread_index; }
uint3 block_index() { return thread_of("blockIdx", CALLER).block->block_index; }
dim3 block_dim() { return thread_of("blockDim", CALLER).block->block_dim; }
dim3 grid_dim() { return thread_of("gridDim", CALLER).block->grid_dim; }
int lane_index() { return thread_of("the lane's index", CALLER).lane; }

double seconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

uint3 Launch::block_at(uint64_t position, unsigned rank) const {
    uint64_t index = position;
    if (options.schedule == Schedule::reversed) index = units - 1 - position;
    if (options.schedule == Schedule::random) index = (options.seed + position * stride) % units;
    const dim3& c = config.cluster;
    const unsigned x = config.grid.x / c.x, y = config.grid.y / c.y;  // clusters
    return {unsigned(index % x) * c.x + rank % c.x, unsigned(index / x % y) * c.y + rank / c.x % c.y,
            unsigned(index / x / y) * c.z + rank / c.x / c.y};
}

Block::~Block() {
    if (arena) munmap(arena - ARENA_MARGIN, ARENA_BYTES + 2 * ARENA_MARGIN);
    free_shadow(*this);
}

uint64_t Worker::random() {  // xorshift
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

void Worker::prepare(Launch& next_launch) {
    worker = this;
    launch = &next_launch;
    stopped = false;
    shared_offsets.clear();
    shared_extents.clear();
    dynamic_shape = {};
    shared_used = ARENA_START;
    if (const size_t bytes = launch->config.shared_bytes) {
        shared_extents.push_back({ARENA_START, ARENA_START + bytes, nullptr});
        shared_used = ARENA_START + bytes + RED_ZONE;
        if (options.checked()) shared_variable_appears(shared_extents.back());
    }
    random_state = options.seed * 0x9e3779b97f4a7c15ull + launch->number + 1;
}

constexpr uint64_t SAMPLE = 32;  // clusters of a launch that run where only extents count

// Takes the next cluster of the grid, which usually is one block, and makes its first the running one; false if there is none.
bool Worker::start_blocks() {
    uint64_t position = launch->next_unit.fetch_add(1);
    if (position >= launch->units) return false;
    if (options.extents && launch->units > SAMPLE && !launch->grid) {  // the first, the last, and some between
        if (position >= SAMPLE) return false;
        position = uint64_t((launch->units - 1) * (long double)position / (SAMPLE - 1));
    }
    std::shared_ptr<BlockGroup> cluster;
    if (launch->cluster > 1) {
        cluster = std::make_shared<BlockGroup>();
        cluster->alive = int(launch->cluster) * launch->threads;
    }
    Block* first = nullptr;
    for (unsigned rank = 0; rank < launch->cluster; ++rank) {
        Block& b = start_block(launch->block_at(position, rank));
        b.membership = {cluster, launch->grid ? launch->grid->shared_from_this() : nullptr, rank};
        if (cluster) cluster->blocks.push_back(&b);
        if (launch->grid) launch->grid->blocks.push_back(&b);
        if (!first) first = &b;
    }
    block = first;
    if (cluster && options.checked()) cluster_begins(cluster->blocks);
    return true;
}

// Makes a block that is not waiting for others the running one; false if there is none.
bool Worker::turn_to_runnable() {
    for (Block* other : resident)
        if (!other->ready.empty() || other->started < (int)other->threads.size() || !other->alive) {
            block = other;
            return true;
        }
    return start_blocks();
}

Block& Worker::start_block(uint3 index) {
    if (idle_blocks.empty()) {
        pool.push_back(std::make_unique<Block>());
        idle_blocks.push_back(pool.back().get());
    }
    Block& b = *idle_blocks.back();
    idle_blocks.pop_back();
    if (!b.arena) {
        void* space =
            mmap(nullptr, ARENA_BYTES + 2 * ARENA_MARGIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space == MAP_FAILED) throw std::bad_alloc();
        b.arena = static_cast<char*>(space) + ARENA_MARGIN;
        mprotect(b.arena, ARENA_BYTES, PROT_READ | PROT_WRITE);
    }
    const int count = launch->threads;
    const dim3 size = launch->config.block;
    b.block_index = index;
    if ((int)b.threads.size() != count || b.block_dim.x != size.x || b.block_dim.y != size.y || b.block_dim.z != size.z) {
        b.threads.assign(count, Thread{});
        b.warps = std::vector<Warp>((count + 31) / 32);
        b.start_order.resize(count);
        for (int i = 0; i < count; ++i) {
            Thread& t = b.threads[i];
            t.thread_index = {unsigned(i) % size.x, unsigned(i) / size.x % size.y, unsigned(i) / size.x / size.y};
            t.block = t.owner = &b;
            t.linear = i;
            t.lane = i % 32;
            t.warp = i / 32;
        }
    }
    b.block_dim = size;
    b.grid_dim = launch->config.grid;
    for (int i = 0; i < count; ++i) {
        b.threads[i].state = State::ready;
        b.threads[i].fiber = nullptr;
        b.threads[i].watched = b.threads[i].watches_from = nullptr;
        b.threads[i].standstill = {};
        b.threads[i].awaits_products = b.threads[i].gave_up = b.threads[i].dependency_met = false;
        b.start_order[i] = options.schedule == Schedule::reversed ? count - 1 - i : i;
    }
    if (options.schedule == Schedule::random)
        for (int i = count - 1; i > 0; --i) std::swap(b.start_order[i], b.start_order[random() % (i + 1)]);
    for (size_t w = 0; w < b.warps.size(); ++w) {
        const int lanes = std::min(32, count - int(w) * 32);
        b.warps[w].alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
        b.warps[w].used = 0;
    }
    b.ready.reset(count);
    b.waiting.clear();
    for (NamedBarrier& barrier : b.named) barrier.arrived = 0, barrier.waiting.clear();
    if (b.async.used || (int)b.async.groups.size() != count) b.async.reset(count);
    b.warpgroups.resize((count + WARPGROUP - 1) / WARPGROUP);
    for (const auto& group : b.warpgroups)
        if (group) group->reset();
    b.at_active_mask = 0;
    b.started = b.arrived = b.yields = b.pauses = b.grid_barriers = 0;
    b.alive = count;
    ++changes;
    resident.push_back(&b);
    if (options.checked()) begin_block_shadow(b);
    return b;
}

void Worker::retire(Block& b) {
    resident.erase(std::find(resident.begin(), resident.end(), &b));
    idle_blocks.push_back(&b);
    for (const auto& group : {b.membership.cluster, b.membership.grid})
        if (group) std::replace(group->blocks.begin(), group->blocks.end(), &b, static_cast<Block*>(nullptr));
    b.membership = {};
    if (options.checked()) end_block_shadow(b);
}

void Worker::run(Launch& next_launch) {
    prepare(next_launch);
    const Ticks ticks(next_launch);
    provide_fault_stack();
    while (!launch->failed && start_blocks()) {
        running = &main;
        Fiber& first = idle_fiber();
        running = &first;
        main.switch_to(first);
        current = nullptr;
        if (stopped) {
            // The fibers stopped half way; what they held on their stacks is forgotten with them.
            launch->failed = true;
            idle_fibers.clear();
            fibers.clear();
            while (!resident.empty()) retire(*resident.back());
        }
    }
    block = nullptr;
    worker = nullptr;
}

Fiber& Worker::idle_fiber() {
    if (idle_fibers.empty()) {
        fibers.push_back(std::make_unique<Fiber>(&Worker::fiber_body));
        idle_fibers.push_back(fibers.back().get());
    }
    Fiber* fiber = idle_fibers.back();
    idle_fibers.pop_back();
    return *fiber;
}

void Worker::fiber_body() {
    for (;;) worker->run_threads();
}

// One fiber runs thread after thread of the block, as long as they end without waiting.
void Worker::run_threads() {
    Fiber* me = running;
    Block& b = *block;
    while (b.started < (int)b.threads.size()) {
        Thread& t = b.threads[b.start_order[b.started++]];
        ++changes;
        t.fiber = me;
        enter(t);
        jmp_buf begun;
        t.begun = &begun;
        if (!_setjmp(begun)) launch->entry(launch->arguments);
        t.state = State::ended;
        ++changes;
        b.yields = 0;
        --b.alive;
        Warp& warp = b.warps[t.warp];
        warp.alive &= ~(1u << t.lane);
        lane_ends(t);
        if (options.checked()) thread_ends(t);
        group_thread_ends(t);
        if (b.alive && b.arrived == b.alive) release_barrier(b);
        if (block != &b) break;
    }
    idle_fibers.push_back(me);
    Fiber& other = next();
    if (&other != me) {
        running = &other;
        me->switch_to(other);
    }
}

void exit_thread() { longjmp(*static_cast<jmp_buf*>(static_cast<Thread*>(current)->begun), 1); }

void Worker::make_ready(Block& b, int thread) {
    if (b.threads[thread].state != State::at_warp_operation) ++changes;  // lanes may meet in a loop in which they wait
    b.threads[thread].state = State::ready;
    b.yields = 0;
    b.ready.push(thread);
}

// Decides what this worker does next: a thread that can go on, a thread not yet begun, another block that this one may
// wait for, or, when all is done, the launch's end.
Fiber& Worker::next() {
    for (;;) {
        Block& b = *block;
        // Threads that only look whether something has happened must not keep others from starting.
        const bool waiting = b.yields > b.ready.size() && b.started < (int)b.threads.size();
        const bool looks_in_vain = b.yields > 2 * (int)b.threads.size() || b.pauses_in_vain(changes);
        const bool stalled = looks_in_vain && b.started == (int)b.threads.size();
        if (!b.ready.empty() && !stalled && !waiting) {
            const int which = options.schedule == Schedule::random ? int(random() % b.ready.size()) : 0;
            Thread& t = b.threads[b.ready.pop(which)];
            enter(t);
            return *t.fiber;
        }
        if (b.started < (int)b.threads.size()) return idle_fiber();
        if (!b.alive) {
            retire(b);
            if (resident.empty()) return main;
            block = resident.front();
            continue;
        }
        if (release_active_masks(b)) continue;
        if (b.ready.empty() && (b.membership.cluster || b.membership.grid) && turn_to_runnable()) continue;
        if (b.ready.empty()) report_deadlock(b);
        // All that can run only waits for something outside: let the other blocks run.
        if (b.pauses_in_vain(changes)) b.in_vain_at = changes;
        b.yields = b.pauses = 0;
        if (launch->failed) return main;
        if (launch->is_late()) {
            Thread& t = b.threads[b.ready.pop()];
            current = &t;
            stop_out_of_time("the launch has not ended; its threads wait for something that does not come",
                             {0, t.watches_from});
        }
        const size_t position = std::find(resident.begin(), resident.end(), &b) - resident.begin();
        if (!start_blocks()) block = resident[(position + 1) % resident.size()];
    }
}

void Worker::wait(State state, int line) {
    Thread& t = *static_cast<Thread*>(current);
    if (launch->late) stop_out_of_time(launch->out_of_time(), {line, nullptr});  // a loop may meet others here for ever
    t.state = state;
    t.waits_at_line = line;
    if (state == State::at_warp_operation && still_at == changes && options.checked()) look_at_state(t);
    Fiber& other = next();
    if (&other != t.fiber) {
        running = &other;
        t.fiber->switch_to(other);
    }
}

void Worker::pause() {
    Thread& t = *static_cast<Thread*>(current);
    Block& b = *t.owner;
    if (options.checked()) notice_standstill(t);
    ++b.yields;
    b.pauses = b.paused_at == changes ? b.pauses + 1 : 0;
    b.paused_at = changes;
    b.ready.push(t.linear);
    Fiber& other = next();
    if (&other != t.fiber) {
        running = &other;
        t.fiber->switch_to(other);
    }
}

void yield() {
    if (worker) worker->pause();
}

void may_be_waiting(const void* address) {
    Thread* t = static_cast<Thread*>(current);
    if (!t) return;
    if (t->watched == address) worker->pause();
    t->watched = address;
}

void memory_changed() {
    if (worker) ++worker->changes;
}

long long clock_ticks() {
    memory_changed();  // a loop may wait for a time
    return (long long)(seconds_now() * 1e9);
}

void Worker::stop(const Finding& finding) {
    stopped = true;
    if (!launch->failed.exchange(true)) *launch_finding() = finding;
    Fiber* from = running;
    running = &main;
    from->switch_to(main);
    __builtin_unreachable();
}

void Worker::stop_out_of_time(const std::string& message, Place place) {
    if (options.extents) stop(Finding());  // one that says nothing ends the launch as well
    stop_waiting(describe("time limit", message, place));
}

// Who looks at memory that nothing has written may wait because of that, as for a lock that was never made free.
void Worker::stop_waiting(const Finding& finding) {
    const Finding* cause = options.checked() ? uninitialised_in(resident) : nullptr;
    stop(cause ? *cause : finding);
}

Party Worker::party(const Thread& thread, Place place, const char* did) const {
    return {true, thread.block->block_index, thread.thread_index, place, did};
}

Finding Worker::describe(const char* kind, const std::string& message, Place place) {
    Finding finding;
    finding.kind = kind;
    finding.message = message;
    finding.kernel = launch->kernel;
    finding.kernel_line = launch->line;
    if (current) finding.party = party(*static_cast<Thread*>(current), place, "");
    return finding;
}

void Worker::report_deadlock(Block& b) {
    int at_barrier = 0, at_warp = 0, at_named = 0, at_mbarrier = 0, at_group = 0, at_blocks = 0;
    Thread* someone = nullptr;
    for (Thread& t : b.threads) {
        at_barrier += t.state == State::at_barrier;
        at_warp += t.state == State::at_warp_operation;
        at_named += t.state == State::at_named_barrier;
        at_mbarrier += t.state == State::at_mbarrier;
        at_group += t.state == State::at_warpgroup;
        at_blocks += t.state == State::at_group_barrier;
        if (t.state == State::at_warp_operation && (!someone || someone->state != State::at_warp_operation)) someone = &t;
        if (t.state != State::ended && !someone) someone = &t;
    }
    current = someone;
    std::string message = "no thread of the block can go on:";
    if (at_warp) {
        Warp& warp = b.warps[someone->warp];
        unsigned missing = 0;
        for (int i = 0; i < warp.used; ++i) {
            const Rendezvous& r = *warp.rendezvous[i];
            if (r.arrived >> someone->lane & 1) missing = r.mask & ~r.arrived;
        }
        message += " " + std::to_string(at_warp) +
                   " wait in a warp operation whose mask names lanes that never arrive (missing here: ";
        char digits[16];
        snprintf(digits, sizeof digits, "0x%x", missing);
        message += std::string(digits) + ")";
    }
    if (at_barrier)
        message += (at_warp ? "," : "") + (" " + std::to_string(at_barrier)) + " of " + std::to_string(b.alive) +
                   " wait at the block's barrier in line " + std::to_string(b.barrier_line);
    if (at_named) message += " " + std::to_string(at_named) + " wait at a named barrier";
    if (at_mbarrier)
        message += " " + std::to_string(at_mbarrier) + " wait at an mbarrier whose phase never ends" + missing_at_mbarrier(b);
    if (at_group) message += " " + std::to_string(at_group) + " wait for the other threads of their warpgroup";
    if (at_blocks) message += " " + std::to_string(at_blocks) + " wait at a barrier of the cluster or the grid";
    Finding finding = describe(at_warp    ? "warp lanes never arrive"
                               : at_group ? "warpgroup divergence"
                                          : "barrier never completes",
                               message, {someone->waits_at_line, nullptr});
    for (Thread& t : b.threads)
        if (t.state != State::ended && t.state != someone->state) {
            finding.other = party(t, {t.waits_at_line, nullptr}, "waits");
            break;
        }
    stop_waiting(finding);
}

// Lets those who ask for the active mask go on, each with the lanes of its warp that ask in the same line.
bool Worker::release_active_masks(Block& b) {
    if (!b.at_active_mask) return false;
    b.at_active_mask = 0;
    for (Thread& t : b.threads) {
        if (t.state != State::at_active_mask) continue;
        const int first = t.linear - t.lane, last = std::min(first + 32, int(b.threads.size()));
        unsigned mask = 0;
        for (int other = first; other < last; ++other)
            if (b.threads[other].state == State::at_active_mask && b.threads[other].waits_at_line == t.waits_at_line)
                mask |= 1u << (other - first);
        for (int other = first; other < last; ++other)
            if (mask >> (other - first) & 1) {
                b.threads[other].active_mask = mask;
                make_ready(b, other);
            }
    }
    return true;
}

unsigned active_mask(int line) {
    Thread& t = *static_cast<Thread*>(current);
    ++t.owner->at_active_mask;
    worker->wait(State::at_active_mask, line);
    return t.active_mask;
}

}  // namespace emulator
