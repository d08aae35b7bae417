// What check mode knows of every word of shared and of device memory, for the files that have its rules.
#pragma once
#include <array>
#include <unordered_map>

#include "access.h"
#include "async_reads.h"
#include "clock.h"
#include "device_memory.h"
#include "shadow.h"

namespace emulator {

// The volatile accesses of a warp's lanes to one word.
struct Volatile {
    struct By {
        Segment segment;
        const void* instruction;
    };
    std::vector<By> readers;  // each lane's last
    By writer{0, nullptr};
};

struct BlockShadow {
    BlockClock clock;
    uint32_t era = 0;             // of the clock, when the cells were used last
    Cell* cells = nullptr;        // of the arena
    std::vector<uint32_t> split;  // words of the arena whose cell is split
    AsyncReads async_reads;
    std::unordered_map<uint64_t, Volatile> volatiles;  // by word and warp
    std::vector<Segment> landed;                       // by word: the writer, if what it wrote came by an asynchronous copy
    Finding uninitialised;  // the first such read, kept back: if a write follows that it raced with, that is the finding
};

// ---- cells

constexpr uint32_t SEGMENT_BITS = SEGMENT_LIMIT - 1;
constexpr uint32_t SPLIT = 1u << 31;   // in `writer`: the four bytes have a cell each; `writer_instruction` says where
constexpr uint32_t ATOMIC = 1u << 30;  // in `writer`: it was an atomic operation
constexpr uint32_t IN_FLIGHT = ~0u;    // as `reader`: an asynchronous copy by `writer` has not been waited for

#pragma GCC visibility push(hidden)  // they are read at every access
extern std::vector<std::array<Cell, 4>> split_cells;
void split(Cell& cell);
void unsplit(Cell& cell);

// ---- the layout of the arena, the same for all blocks of a launch

constexpr size_t ARENA_WORDS = ARENA_BYTES / 4;
extern uint8_t word_extent[ARENA_WORDS];  // 1 + index in `extents`, 0 for what belongs to no variable
extern std::vector<Worker::Extent> extents;
#pragma GCC visibility pop

// ---- the access under examination

struct Site {
    Thread& thread;
    BlockShadow& shadow;
    Access access;
    bool shared;
    uintptr_t address;
    unsigned bytes;
    const void* instruction;
    bool whole_object = false;  // of a type that is not known here: a struct's copy, memcpy
    Block* home = nullptr;      // whose shared memory it is, if not the thread's own block's: of another in the cluster

    Block& shared_home() const { return home ? *home : *thread.owner; }
};

void begin_launch_scopes();  // of atomic accesses (strong_accesses.cpp)
void begin_launch_images();  // of the libraries that are loaded

// ---- findings (shadow_findings.cpp)

const char* verb(Access access);
std::string bytes_text(uint64_t bytes);
// Of what the memory at hand holds, as far as that is known.
Shape shape_at(const Site& s);
// `why` makes it a mistake; `did` says what the thread does, if not only "reads it".
Finding finding(const Site& s, const char* kind, const std::string& why, const std::string& did = "");
// A cell keeps the lower half of an instruction's address; the upper is that of the instruction at hand.
const void* whole_address(uint32_t instruction, const Site& s);
Party party_of(Segment segment, uint32_t instruction, const Site& s, const char* did);
// Returns only if the text accepts the race.
[[gnu::cold]] void report_race(const Site& s, Segment other, uint32_t instruction, const char* did);
// A plain read of what another thread updates atomically: a mistake, but for the first look of a compare-and-swap loop, whose
// value the next instruction confirms. The Programming Guide's own atomicAdd for double begins like that.
[[gnu::cold]] void defer_race(const Site& s, Segment other, uint32_t instruction);
void forgive_or_stop(Thread& t, const void* address);
[[gnu::cold]] void note_uninitialised(const Site& s, unsigned at);
[[noreturn]] void report_in_flight(const Site& s, const Cell& c);
[[noreturn]] void report_async_read(const Site& s, const AsyncConflict& conflict);
[[noreturn]] void report_missing_proxy_fence(const Site& s, Segment writer, uint32_t instruction);
[[noreturn]] void report_bounds(const Site& s);

}  // namespace emulator
