// Blocks, their threads, and the worker (one for each processor) that runs them on fibers.
#pragma once
#include <signal.h>
#include <stdint.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/runtime_api.h"
#include "fiber.h"
#include "finding.h"
#include "groups.h"
#include "tensor_map.h"
#include "warpgroup.h"

namespace emulator {

enum class Access;
enum class Mode { fast, check, count };
enum class Schedule { forward, reversed, random };

struct Options {
    Mode mode = Mode::fast;
    Schedule schedule = Schedule::forward;
    uint64_t seed = 1;
    int processors = 0;     // 0: all
    bool program = false;   // a plain CUDA program: what is not device memory is the host's alone
    bool debugged = false;  // somebody steps through: no ticks, one processor
    double time_limit = 0;  // seconds a launch may take; 0: no limit
    bool extents = false;   // tensors have no values, and a launch runs only some of its blocks, for `time_limit` at most
    bool refuses_pageable = false;  // kernels may not touch CPU tensors, as far as they are known
    bool checked() const { return mode != Mode::fast; }
};
extern Options options;

struct Launch {
    std::string name;    // as the launch writes it
    std::string kernel;  // the same, or, where that is a pointer, what it points to
    int line = 0;
    LaunchConfig config{dim3(), dim3()};
    void (*entry)(void*) = nullptr;
    void* arguments = nullptr;
    size_t argument_bytes = 0;
    uint64_t blocks = 0;
    int threads = 0;             // in a block
    unsigned cluster = 1;        // blocks in a cluster
    uint64_t units = 0;          // clusters, which workers take whole
    BlockGroup* grid = nullptr;  // of a cooperative launch
    uint64_t number = 0;
    uint64_t stride = 1;  // of the random schedule's walk over the blocks; has no divisor in common with their number
    double deadline = 0;
    std::atomic<bool> late{false};           // seen by a tick at which the launch could not be stopped
    uintptr_t text_begin = 0, text_end = 0;  // of the library that holds the kernel
    std::atomic<uint64_t> next_unit{0};
    std::atomic<bool> failed{false};
    uint3 block_at(uint64_t position, unsigned rank) const;  // of the cluster that is at `position` in the schedule's order
    bool is_late() const;                                    // behind its deadline, or called off
    std::string out_of_time() const;                         // what a finding says then
};

enum class State : uint8_t {
    ready,
    at_barrier,
    at_named_barrier,
    at_warp_operation,
    at_mbarrier,
    at_warpgroup,
    at_group_barrier,  // of a cluster or the grid
    at_active_mask,
    ended
};

struct Block;

// What a thread that waits in a loop has to show for it (check mode; standstill.cpp).
struct Standstill {
    uint64_t changes = 0;  // the worker's, when it began
    uint64_t state = 0;    // of the thread, at an earlier pause since then
    unsigned pauses = 0;   // since then
    unsigned looks = 0;    // at its state, since then
    bool endless = false;  // it has been in one state twice: only others can end its loop
};

struct Thread : ThreadView {
    Block* owner = nullptr;
    Fiber* fiber = nullptr;
    void* begun = nullptr;  // where its fiber goes on when it has ended: a jmp_buf
    State state = State::ready;
    int waits_at_line = 0;
    unsigned active_mask = 0;       // what __activemask last told it
    uint32_t cluster_token = 0;     // the phase of the cluster's barrier at which it arrived last
    bool awaits_products = false;   // has accumulators that wgmma.wait_group is to fill
    uint32_t segment = 0;           // see clock.h
    const void* watched = nullptr;  // where it last looked for a sign of another thread, and what it saw
    uint64_t watched_value = 0;
    const void* watches_from = nullptr;   // the instruction, where it is known
    bool gave_up = false;                 // in its last mbarrier.try_wait
    bool dependency_met = false;          // it has waited for the launch before (griddepcontrol.wait), or been told of it
    bool compares = false;                // its atomic operation is a compare-and-swap
    std::shared_ptr<Finding> forgivable;  // a race of its last plain read, unless a compare-and-swap of the same word follows
    const void* forgivable_at = nullptr;
    Standstill standstill;
};

// Where the lanes of one mask meet. Rows are kept twice: a fast lane may bring its row for the next operation while a slow
// one still reads the rows of this one; it cannot come to the operation after that before all have left this one.
struct Rendezvous {
    unsigned mask = 0, arrived = 0;
    WarpOp op{};
    WarpFunction compute = nullptr;
    int line = 0, half = 0, first_thread = 0;
    unsigned present[2] = {0, 0};  // the lanes whose rows they are
    alignas(64) char rows[2][32 * ROW];
    alignas(64) char results[2][32 * ROW];
};

struct Warp {
    unsigned alive = 0;  // lanes that have not ended
    int used = 0;        // rendezvous of this block's run
    std::vector<std::unique_ptr<Rendezvous>> rendezvous;
};

// The calls that lead from the kernel to a place, innermost first, as return addresses.
struct CallPath {
    static constexpr int MOST = 16;
    const void* at[MOST];
    int calls = 0;
};

struct NamedBarrier {
    int expected = 0, arrived = 0, line = 0;
    std::vector<int> waiting;
    int votes[2] = {}, half = 0;  // of the threads that arrive, in turn, so that those who leave can still read theirs
};

// The threads that can go on, in the order in which they may.
class ReadyQueue {
 public:
    void reset(int capacity) { slots_.assign(capacity, 0), head_ = count_ = 0; }
    bool empty() const { return count_ == 0; }
    int size() const { return count_; }
    void push(int thread) {
        int at = head_ + count_++;
        if (at >= (int)slots_.size()) at -= (int)slots_.size();
        slots_[at] = thread;
    }
    int pop(int which = 0) {
        if (which) {
            int at = head_ + which;
            if (at >= (int)slots_.size()) at -= (int)slots_.size();
            std::swap(slots_[at], slots_[head_]);
        }
        const int thread = slots_[head_];
        if (++head_ == (int)slots_.size()) head_ = 0;
        --count_;
        return thread;
    }

 private:
    std::vector<int> slots_;
    int head_ = 0, count_ = 0;
};

// cp.async and bulk copies that have begun and not landed (async.cpp), and who waits at barriers in shared memory.
struct PendingCopy {
    char* to;
    const char* from;
    unsigned bytes, given;  // from `given` on it is zeros
    int group;              // of the thread's cp.async groups
};
struct TensorBox {  // a box of a tensor map, where it begins
    TensorMap map;
    int32_t at[5];
};
unsigned box_bytes(const TensorMap& map);
void land_box(Block& block, char* to, const TensorBox& box);
void store_box(Block& block, const char* from, const TensorBox& box);
// The box that an instruction names, after the checks that the device makes of it.
std::shared_ptr<TensorBox> box_of(const void* map, int rank, const int* at, const void* shared, const void* instruction);
void examine_rows(const TensorBox& box, Access access, const void* instruction);
struct PendingBulk {
    char* to;
    const char* from;
    unsigned bytes;
    uint32_t mbarrier;
    int thread;
    std::shared_ptr<TensorBox> box;  // of a tensor copy
    const void* instruction;
};
struct PendingStore {
    uint32_t reader;  // of async_reads.h
    int group;        // of the thread's bulk stores
    const void* instruction;
};
struct PendingArrival {
    int thread, group;  // arrives when the thread's copies of the groups up to this one have landed
};
struct MbarrierWait {
    uint32_t mbarrier;
    int thread;
};
struct FreshMbarrier {           // initialised, and behind no fence.mbarrier_init of its thread
    uint32_t mbarrier, segment;  // in which it was initialised
    int thread;
    const void* instruction;
};
struct AsyncState {
    std::vector<std::vector<PendingCopy>> copies;  // by thread
    std::vector<int> groups;                       // closed by each thread
    std::vector<PendingBulk> loads;
    std::vector<std::vector<PendingStore>> stores;  // by thread, whose reads have not been waited for (check mode)
    std::vector<int> store_groups;
    std::unordered_map<uint32_t, std::vector<PendingArrival>> arrivals;  // by mbarrier
    std::vector<MbarrierWait> waiting;
    std::vector<FreshMbarrier> fresh;               // check mode
    std::unordered_map<uint32_t, unsigned> rounds;  // of each stage of a pipeline (check mode; async.cpp)
    bool used = false;
    void reset(int threads);
};

constexpr size_t ARENA_BYTES = 512 << 10;  // the shared window of a block
constexpr size_t ARENA_START = 1024;       // address 0 stays invalid; what comes first is aligned as the device aligns it
constexpr size_t RED_ZONE = 128;           // between the variables in it
constexpr size_t ARENA_MARGIN = 16 << 20;  // around the arena; nothing else lies there

struct BlockShadow;

struct Block : BlockView {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    ReadyQueue ready;
    std::vector<int> start_order;
    int started = 0, alive = 0;
    // the barrier of the whole block
    int arrived = 0, barrier_line = 0, barrier_site = 0, first_at_barrier = 0;
    CallPath barrier_path;  // of the first to arrive (check mode)
    Vote vote = Vote::none;
    int votes[2] = {0, 0}, vote_half = 0;
    std::vector<int> waiting;
    NamedBarrier named[32];       // 16 of the program's, then one for each tile of several warps
    std::vector<char> tile_rows;  // what the threads of such tiles exchange, ROW bytes each
    Membership membership;
    AsyncState async;
    std::vector<std::unique_ptr<Warpgroup>> warpgroups;  // those that have multiplied
    int yields = 0;                                      // in a row, without any other progress
    int pauses = 0;                                      // in a row, though lanes may meet, without a change of memory
    uint64_t paused_at = 0;                              // the changes of memory at the last of them
    uint64_t in_vain_at = 0;                             // the changes of memory when it had last paused in vain
    // So often that lanes which meet in a loop wait there, too. (Others may pause long while some multiply matrices.)
    bool pauses_in_vain(uint64_t changes) const { return paused_at == changes && pauses > 512 * (int)threads.size(); }
    int at_active_mask = 0;
    int grid_barriers = 0;  // passed
    char* arena = nullptr;
    BlockShadow* shadow = nullptr;
    ~Block();
};

// A name that the kernel gives its dynamic shared memory, and the size of an element; 0: it is not known.
struct NamedShape {
    const char* name = nullptr;
    unsigned element = 0;
};

struct Worker {
    Launch* launch = nullptr;
    Block* block = nullptr;        // the one that runs
    std::vector<Block*> resident;  // begun and not finished; more than one only if blocks wait for one another
    std::vector<std::unique_ptr<Block>> pool, all_blocks_;
    std::vector<Block*> idle_blocks;
    Fiber main;
    std::vector<Fiber*> idle_fibers;
    std::vector<std::unique_ptr<Fiber>> fibers;
    Fiber* running = nullptr;
    std::vector<int64_t> shared_offsets;  // of each declaration, -1 before its first use in this launch
    struct Extent {
        size_t begin, end;
        const SharedDeclaration* declaration;
    };
    std::vector<Extent> shared_extents;
    size_t shared_used = 0;
    NamedShape dynamic_shape;
    uint64_t random_state = 1;
    unsigned lanes_met = 0;              // in the last exchange of the running thread
    bool stopped = false;                // a finding ended the launch
    const ThreadView* ticked = nullptr;  // who ran at the last tick
    uint64_t changes = 1;                // of memory, and of what threads wait for, so far (check mode)
    uint64_t still_at = 0;               // the changes at which all threads that could go on were seen to wait in loops

    void run(Launch& launch);
    uint64_t random();

    // Called on a fiber.
    void wait(State state, int line);  // until somebody makes the thread ready
    void make_ready(Block& block, int thread);
    void pause();  // the thread stays ready; others run first
    [[noreturn]] void stop(const Finding& finding);
    [[noreturn]] void stop_waiting(const Finding& finding);  // what threads wait for does not come
    [[noreturn]] void stop_out_of_time(const std::string& message, Place place);
    Finding describe(const char* kind, const std::string& message, Place place);
    Party party(const Thread& thread, Place place, const char* did) const;
    Fiber& next();  // chooses what runs now
    void release_barrier(Block& block);

 private:
    void prepare(Launch& launch);
    bool start_blocks();
    Block& start_block(uint3 index);
    bool turn_to_runnable();
    void retire(Block& block);
    Fiber& idle_fiber();
    void resume(Block& block, int thread);
    bool release_active_masks(Block& block);
    [[noreturn]] void report_deadlock(Block& block);
    void notice_standstill(Thread& thread);
    const void* look_at_state(Thread& thread);
    bool all_stand_still(bool endlessly) const;
    static void fiber_body();
    void run_threads();
};

void lane_ends(Thread& thread);  // those of its warp may have waited for it

// What the phase lacks for which the first of the waiting threads waits (async.cpp).
std::string missing_at_mbarrier(Block& block);

inline Thread& self() { return *static_cast<Thread*>(current); }  // the one that runs

extern __thread Worker* worker __attribute__((tls_model("initial-exec")));

double seconds_now();
extern volatile sig_atomic_t called_off;  // no launch may go on

}  // namespace emulator
