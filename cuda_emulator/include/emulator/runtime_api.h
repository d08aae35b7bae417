// What compiled kernel text and the runtime library know of each other.
#pragma once
#include <emulator/dim3.h>
#include <emulator/wgmma.h>
#include <stddef.h>
#include <stdint.h>
#include <initializer_list>
#include <new>
#include <type_traits>

// Bodies of the emulator's own inline functions: their loads and stores are not the kernel's, so they are not checked.
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread")))
// Wrappers whose caller's line must show in debug information, also where nothing else is inlined.
#define EMULATOR_INLINE inline __attribute__((always_inline))

namespace emulator {

// The parts of a block and of a thread that kernel text reads. The runtime's own structures begin with them.
struct BlockView {
    uint3 block_index;
    dim3 block_dim, grid_dim;
};

struct ThreadView {
    uint3 thread_index;
    const BlockView* block;
    int linear, lane, warp;
};

extern __thread ThreadView* current __attribute__((tls_model("initial-exec")));

// The same as values. In check mode kernel text uses these, so that asking for an index is not a load of the kernel.
uint3 thread_index() __attribute__((const));
uint3 block_index() __attribute__((const));
dim3 block_dim() __attribute__((const));
dim3 grid_dim() __attribute__((const));
int lane_index() __attribute__((const));

// ---- barriers of the block
enum class Vote { none, count, all, any };
// `site` tells those apart that stand on one line.
int block_barrier(Vote vote, int predicate, int line, int site = 0);
void named_barrier(int id, int threads, bool wait, int line);
// Of the threads of a tile of several warps. With `tile_exchange` each brings at most ROW bytes and gets those of the thread
// `from` of the block.
void tile_barrier(int tile, int threads, int line);
void tile_exchange(int tile, int threads, const void* row, int from, void* result, int bytes, int line);
int named_barrier_count(int id, int threads, bool predicate, int line);  // waits; how many threads came with a true predicate

// ---- operations of a warp
// Each lane of `mask` brings a row; all rows lie `ROW` bytes apart. Operations that meet must be of one kind, with one
// function.
constexpr int ROW = 64;
enum class WarpOp { sync, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all, elect, match, reduce, matrix };
// Waits for the lanes of `mask` and returns the 32 rows that they brought.
const char* warp_exchange(unsigned mask, const void* row, unsigned bytes, WarpOp op, int line);
// The same, but the last lane to come calls `compute` once for all, and each gets its row of `results`.
using WarpFunction = void (*)(unsigned mask, const char* rows, char* results);
const char* warp_compute(unsigned mask, const void* row, unsigned bytes, WarpOp op, WarpFunction compute, int line);
// Which lanes of the calling thread's warp are running `mask` aside those that have ended.
unsigned lanes_present(unsigned mask);
// The lanes of the warp that come to the same line. They wait there for each other until nothing else of the block can run.
unsigned active_mask(int line);
// A shuffle is about to read `lane`, which must take part.
void shuffle_source(unsigned mask, int lane, int line);

// ---- shared memory
// The elements of a variable, to name one: their size, 0 where it is not known, and the extents of an array.
struct Shape {
    unsigned element = 0, dimensions = 0, extents[4] = {};
    bool unpadded = false;  // floating-point numbers or CUDA's vectors, which have no padding
    bool loose = false;     // structs of the program's own that are aligned to less than 16
};
template <class T, class = void>
constexpr bool is_vector = false;
template <class T>
constexpr bool is_vector<T, std::void_t<decltype(T::whole_)>> = true;  // vector_types.h
template <class T>
constexpr Shape shape_of() {
    using E = std::remove_cv_t<std::remove_all_extents_t<T>>;
    Shape shape{unsigned(sizeof(E))};
    shape.unpadded = std::is_floating_point_v<E> || is_vector<E>;
    shape.loose = std::is_class_v<E> && !is_vector<E> && alignof(E) < 16;
    if constexpr (std::rank_v<T> <= 4) {
        shape.dimensions = std::rank_v<T>;
        shape.extents[0] = std::extent_v<T, 0>, shape.extents[1] = std::extent_v<T, 1>;
        shape.extents[2] = std::extent_v<T, 2>, shape.extents[3] = std::extent_v<T, 3>;
    }
    return shape;
}
struct SharedDeclaration {
    size_t bytes, alignment;
    const char* name;
    int line;
    Shape shape;
    int id = -1;
};
void* shared_variable(SharedDeclaration* declaration);
void* dynamic_shared(const char* name, unsigned element);  // the name and the size of an element are what the text gives it
uint32_t shared_address(const void* pointer);              // within the block's shared window
void* shared_pointer(uint32_t address);
bool is_shared(const void* pointer);

// ---- memory accesses that the compiler does not report by itself
void note_atomic(void* address, unsigned bytes, bool of_block = false);   // of_block: of the block's scope
void note_compare(void* address, unsigned bytes, bool of_block = false);  // a compare-and-swap
void note_read(const void* address, unsigned bytes);
void note_write(void* address, unsigned bytes);
void* copy_memory(void* to, const void* from, size_t bytes);  // also where they overlap
void* fill_memory(void* to, int value, size_t bytes);
void note_strong_read(const void* address, unsigned bytes, bool of_block = false);
void note_strong_write(void* address, unsigned bytes, bool of_block = false);
void note_atomic_store(void* address, unsigned bytes, bool of_block);  // an exchange whose result is not used
void block_fence();                                                    // for the block's own threads
void device_fence();
void proxy_fence();  // fence.proxy.async
// The thread may be waiting for another one: let others run.
void yield();
void memory_changed();  // in a way that check mode does not see by itself
// An atomic operation has changed nothing: if that happens again, the thread waits for somebody.
void may_be_waiting(const void* address);
long long clock_ticks();
[[noreturn]] void trap(int line);
[[noreturn]] void exit_thread();  // ends it as the kernel's end does

// ---- device memory for __device__ variables and cudaMalloc
void* device_variable(const void* initial, size_t bytes, const char* name, bool managed, Shape shape);
struct ConstantVariable {  // a __constant__ variable, which kernels cannot write
    ConstantVariable(const void* variable, size_t bytes, const char* name);
};
// host: pinned memory, which kernels may use, too; pageable: CPU tensors, which they may not.
enum class Owner { device, managed, host, pageable };
void* device_allocate(size_t bytes, Owner owner = Owner::device);  // nullptr: there is no more

// ---- asynchronous copies; they land as late as the program allows
void async_copy(void* shared, const void* global, unsigned bytes, unsigned given);  // cp.async; the rest is filled with zeros
void async_commit();
void async_wait(int groups_left);
void async_arrive(uint32_t mbarrier, bool counted, int line);  // when all copies so far have landed
void bulk_load(void* shared, const void* global, unsigned bytes, uint32_t mbarrier);
void bulk_store(void* global, const void* shared, unsigned bytes);
// A box of the tensor that `map`, a CUtensorMap, describes, from coordinates `at` on.
void tensor_load(void* shared, const void* map, int rank, const int* at, uint32_t mbarrier);
void tensor_store(const void* map, int rank, const int* at, const void* shared);
void bulk_commit();
void bulk_wait(int groups_left);

// ---- barriers in shared memory
void mbarrier_init(uint32_t mbarrier, unsigned count, int line);
void mbarrier_init_fence();                                                            // fence.mbarrier_init
unsigned mbarrier_arrive(uint32_t mbarrier, unsigned count, unsigned expected_bytes);  // the parity of the phase it counts for
void mbarrier_drop(uint32_t mbarrier);  // arrives, and phases to come expect one arrival less
// Has the phase of this parity ended? If `wait`, first lets others run until it has.
bool mbarrier_wait(uint32_t mbarrier, unsigned parity, bool wait, int line);

// ---- matrices of a warp in shared memory
void matrix_load(uint32_t* result, uint32_t row, int matrices, bool transposed, int line);
void matrix_store(uint32_t row, const uint32_t* values, int matrices, bool transposed, int line);

// ---- clusters, whose blocks see one another's shared memory, and the grid of a cooperative launch
unsigned cluster_rank();
unsigned cluster_blocks();
dim3 cluster_dim();  // in blocks
void cluster_arrive(int line);
void cluster_wait(int line);
uint32_t cluster_address(uint32_t shared_address, unsigned rank);
void* cluster_pointer(const void* shared, unsigned rank);
void grid_barrier(int line);

// griddepcontrol.wait: what the launch before has written is there.
void wait_for_dependency();

// ---- launches
struct Line {
    int number;
};
struct LaunchConfig {
    dim3 grid, block;
    size_t shared_bytes;
    bool cooperative = false;
    dim3 cluster{};             // in blocks
    bool programmatic = false;  // may begin before the launch in front of it has ended
    const void* stream;
    int line = 0;  // of the launch; 0: not known
    // The number, from 0, of the argument that holds a pointer for which `points(pointer, address)` is true; -1: none.
    using Points = bool (*)(const void* pointer, const void* address);
    int (*argument_that)(const void* arguments, Points points, const void* address) = nullptr;
    const Shape* pointees = nullptr;             // for each argument that of what it points to
    LaunchConfig clustered(dim3 blocks) const {  // by the kernel's __cluster_dims__
        LaunchConfig copy = *this;
        copy.cluster = blocks;
        return copy;
    }
    LaunchConfig(dim3 grid, dim3 block, size_t shared_bytes = 0, const void* stream = nullptr)
        : grid(grid), block(block), shared_bytes(shared_bytes), stream(stream) {}
    LaunchConfig(Line at, dim3 grid, dim3 block, size_t shared_bytes = 0, const void* stream = nullptr)
        : LaunchConfig(grid, block, shared_bytes, stream) {
        line = at.number;
    }
};
// Runs `entry(arguments)` once for every thread of the grid. `name` is the kernel's, or, with a question mark in front, an
// expression for a pointer to it. `kernel` identifies it for set_kernel_shared_limit; `line` is that of its definition.
void run_grid(const char* name, int line, const void* kernel, const LaunchConfig& config, void (*entry)(void*), void* arguments,
              size_t argument_bytes);
void report_launch_bounds(int threads);
// Stands at the beginning of a kernel with __launch_bounds__(threads): there its template's arguments are known.
EMULATOR_UNCHECKED inline void launch_bounds(int threads) {
    const ThreadView& thread = *current;
    const dim3& size = thread.block->block_dim;
    if (!thread.linear && size.x * size.y * size.z > unsigned(threads)) report_launch_bounds(threads);
}
void set_kernel_shared_limit(const void* kernel, size_t bytes);
size_t kernel_shared_limit(const void* kernel);  // of dynamic shared memory
// Of a kernel that is launched through a pointer: those that have a cluster of their own, by name.
struct NamedCluster {
    const char* kernel;
    dim3 blocks;
};
dim3 cluster_of(const void* kernel, std::initializer_list<NamedCluster> known);

}  // namespace emulator

namespace emulator {
// `__shared__ T name` outside a function: the block's own variable, wherever it is used.
template <class T>
class FileShared {
 public:
    FileShared(size_t alignment, const char* name, int line)
        : declaration_{sizeof(T), alignment ? alignment : alignof(T), name, line, shape_of<T>()} {}
    EMULATOR_UNCHECKED operator T&() const { return get(); }
    EMULATOR_UNCHECKED T* operator&() const { return &get(); }
    template <class V>
    T& operator=(const V& value) const {
        return get() = value;
    }
    T& operator=(const FileShared& other) const { return get() = other.get(); }
    template <class V>
    T& operator+=(const V& value) const {
        return get() += value;
    }
    template <class V>
    T& operator-=(const V& value) const {
        return get() -= value;
    }
    template <class V>
    T& operator*=(const V& value) const {
        return get() *= value;
    }
    template <class V>
    T& operator|=(const V& value) const {
        return get() |= value;
    }
    template <class V>
    T& operator&=(const V& value) const {
        return get() &= value;
    }
    T& operator++() const { return ++get(); }
    T& operator--() const { return --get(); }
    auto operator++(int) const { return get()++; }
    auto operator--(int) const { return get()--; }

 private:
    EMULATOR_UNCHECKED T& get() const { return *(T*)shared_variable(&declaration_); }
    mutable SharedDeclaration declaration_;
};
template <class T, size_t N>
class FileShared<T[N]> {
 public:
    FileShared(size_t alignment, const char* name, int line)
        : declaration_{sizeof(T[N]), alignment ? alignment : alignof(T), name, line, shape_of<T[N]>()} {}
    using Array = T[N];
    EMULATOR_UNCHECKED operator T*() const { return begin(); }
    EMULATOR_UNCHECKED Array* operator&() const { return (Array*)begin(); }
    EMULATOR_UNCHECKED T* begin() const { return (T*)shared_variable(&declaration_); }
    EMULATOR_UNCHECKED T* end() const { return begin() + N; }

 private:
    mutable SharedDeclaration declaration_;
};
}  // namespace emulator
