// Launches: the checks that the device makes of their configuration, the workers, and the log.
#include <cxxabi.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "emulator/host_api.h"
#include "faults.h"
#include "graphs.h"
#include "scheduler.h"
#include "shadow.h"
#include "ticks.h"

namespace emulator {
namespace {

// Workers and their OS threads live as long as the process: their fibers and arenas are worth keeping.
class Crew {
 public:
    void run(Launch& launch, int count) {
        while ((int)workers_.size() < count) workers_.push_back(std::make_unique<Worker>());
        while ((int)helpers_ < count - 1) std::thread([this, index = ++helpers_] { help(index); }).detach();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            launch_ = &launch;
            wanted_ = count;
            busy_ = count - 1;
            ++generation_;
        }
        if (count > 1) wake_.notify_all();
        workers_[0]->run(launch);
        if (count > 1) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, [this] { return busy_ == 0; });
        }
    }

 private:
    void help(int index) {
        uint64_t seen = 0;
        for (;;) {
            Launch* launch;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_ != seen; });
                seen = generation_;
                if (index >= wanted_) continue;
                launch = launch_;
            }
            workers_[index]->run(*launch);
            std::lock_guard<std::mutex> lock(mutex_);
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::vector<std::unique_ptr<Worker>> workers_;
    int helpers_ = 0, wanted_ = 0, busy_ = 0;
    uint64_t generation_ = 0;
    Launch* launch_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
};

Crew& crew() {
    static Crew* crew = new Crew;  // never destroyed: its threads outlive everything
    return *crew;
}

std::mutex log_mutex, launch_mutex;
std::string launch_log;
std::map<const void*, size_t> shared_limits;
Finding current_finding;
uint64_t launches = 0;

std::string text(const dim3& v) { return std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z); }

// The name of a kernel by its address, without its parameters; "" if the linker does not know it (it is static).
std::string name_of(const void* kernel) {
    Dl_info info{};
    if (!kernel || !dladdr(kernel, &info) || info.dli_saddr != kernel || !info.dli_sname) return "";
    int status = 0;
    char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? demangled : info.dli_sname;
    free(demangled);
    // "void ns::name<3, (Kind)1>(float*)": from what follows the return type, which templates have, to the parameters.
    size_t begin = 0, depth = 0;
    for (size_t i = 0; i < name.size(); ++i) {
        if (name[i] == '<') ++depth;
        if (name[i] == '>') --depth;
        if (depth) continue;
        if (name[i] == ' ') begin = i + 1;
        if (name[i] == '(') return name.substr(begin, i - begin);
    }
    return name;
}

// "ns::name<3>" -> "name"
std::string without_arguments(const std::string& name) {
    const std::string base = name.substr(0, name.find('<'));
    const size_t colon = base.rfind(':');
    return colon == std::string::npos ? base : base.substr(colon + 1);
}

// What is wrong with the configuration on every device, or nothing.
std::string invalid(const LaunchConfig& c, const void* kernel) {
    const uint64_t threads = uint64_t(c.block.x) * c.block.y * c.block.z;
    const std::string shape = "grid (" + text(c.grid) + "), block (" + text(c.block) + "): ";
    if (!threads || !c.grid.x || !c.grid.y || !c.grid.z) return shape + "no size may be 0";
    if (threads > 1024) return shape + std::to_string(threads) + " threads in a block; 1024 is the limit";
    if (c.block.z > 64) return shape + "block.z is at most 64";
    if (c.grid.x > 2147483647u) return shape + "grid.x is at most 2147483647";
    const uint64_t cluster = uint64_t(c.cluster.x) * c.cluster.y * c.cluster.z;
    if (!cluster || cluster > 16) return shape + "a cluster has 1 to 16 blocks (more than 8 are not portable)";
    if (c.grid.x % c.cluster.x || c.grid.y % c.cluster.y || c.grid.z % c.cluster.z)
        return shape + "no multiple of the cluster (" + text(c.cluster) + ")";
    if (c.cooperative) {
        const cudaDeviceProp device;
        const uint64_t each = std::min<uint64_t>(device.maxThreadsPerMultiProcessor / threads,
                                                 device.sharedMemPerMultiprocessor / (c.shared_bytes + 1024));
        if (uint64_t(c.grid.x) * c.grid.y * c.grid.z > each * device.multiProcessorCount)
            return shape + "more blocks than a cooperative launch can hold at once (" +
                   std::to_string(each * device.multiProcessorCount) + " on the emulated device of " +
                   std::to_string(device.multiProcessorCount) + " multiprocessors)";
    }
    if (c.grid.y > 65535 || c.grid.z > 65535) return shape + "grid.y and grid.z are at most 65535";
    const size_t limit = kernel_shared_limit(kernel);
    if (c.shared_bytes > limit)
        return std::to_string(c.shared_bytes) + " bytes of dynamic shared memory; the limit is " + std::to_string(limit) +
               (limit == 48 << 10 ? " without cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)"
                                  : "");
    return "";
}

}  // namespace

volatile sig_atomic_t called_off = 0;

bool Launch::is_late() const { return late || called_off || (deadline && seconds_now() > deadline); }

std::string Launch::out_of_time() const {
    const uint64_t begun = std::min(next_unit.load(), units) * cluster;
    return "the launch has not ended in time: " + std::to_string(begun) + " of its " + std::to_string(blocks) +
           " blocks were begun" + (begun < blocks ? ", so that smaller sizes or more time may be all it needs" : "") +
           "; this thread was found here";
}

Finding* launch_finding() { return &current_finding; }

void report_launch_bounds(int threads) {
    Finding finding =
        worker->describe("invalid launch",
                         "block (" + text(worker->launch->config.block) + "): more threads than the " +
                             std::to_string(threads) + " of the kernel's __launch_bounds__",
                         {worker->launch->config.line ? worker->launch->config.line : worker->launch->line, nullptr});
    worker->stop(finding);
}

void set_kernel_shared_limit(const void* kernel, size_t bytes) {
    std::lock_guard<std::mutex> lock(log_mutex);
    shared_limits[kernel] = bytes;
}

size_t kernel_shared_limit(const void* kernel) {
    const cudaDeviceProp device;
    if (!kernel) return device.sharedMemPerBlockOptin;  // a kernel whose address is not known here
    std::lock_guard<std::mutex> lock(log_mutex);
    const auto raised = shared_limits.find(kernel);
    return raised == shared_limits.end() ? device.sharedMemPerBlock : std::max(device.sharedMemPerBlock, raised->second);
}

dim3 cluster_of(const void* kernel, std::initializer_list<NamedCluster> known) {
    const std::string name = without_arguments(name_of(kernel));
    for (const NamedCluster& cluster : known)
        if (name == cluster.kernel) return cluster.blocks;
    return dim3();
}

void run_grid(const char* name, int line, const void* kernel, const LaunchConfig& config, void (*entry)(void*), void* arguments,
              size_t argument_bytes) {
    if (current) worker->stop(worker->describe("not supported", std::string("a kernel launches another one, ") + name, {}));
    if (config.stream && record_launch(name, line, kernel, config, entry, arguments, argument_bytes)) return;
    if (finding_pending()) return;  // as on the device, nothing runs after an error that nobody has looked at
    Finding finding;
    {
        std::lock_guard<std::mutex> one_at_a_time(launch_mutex);
        Launch launch;
        launch.name = launch.kernel = name;
        if (name[0] == '?') {
            launch.name = launch.kernel = name + 1;
            const std::string found = name_of(kernel);
            if (!found.empty()) launch.kernel = found;
        }
        launch.line = line;
        launch.config = config;
        launch.entry = entry;
        launch.arguments = arguments;
        launch.argument_bytes = argument_bytes;
        launch.blocks = uint64_t(config.grid.x) * config.grid.y * config.grid.z;
        launch.threads = int(uint64_t(config.block.x) * config.block.y * config.block.z);
        launch.cluster = config.cluster.x * config.cluster.y * config.cluster.z;
        launch.units = launch.blocks / std::max(1u, launch.cluster);
        launch.number = ++launches;
        launch.stride = launch.units * 5 / 8 + options.seed % 7 + 1;
        while (launch.units && std::gcd(launch.stride, launch.units) != 1) ++launch.stride;
        if (options.time_limit > 0) launch.deadline = seconds_now() + options.time_limit;
        {
            std::lock_guard<std::mutex> lock(log_mutex);
            launch_log += launch.name + "\t" + text(config.grid) + "\t" + text(config.block) + "\t" +
                          std::to_string(config.shared_bytes) + "\n";
        }
        current_finding = Finding();
        const std::string problem = invalid(config, kernel);
        if (!problem.empty()) {
            current_finding.kind = "invalid launch";
            current_finding.message = problem;
            current_finding.kernel = launch.kernel;
            current_finding.kernel_line = config.line ? config.line : line;
        } else {
            int count = options.processors ? options.processors : (int)std::thread::hardware_concurrency();
            if (options.checked() || options.debugged)
                count = 1;  // the shadow memory has one user, and findings come in a fixed order
            if ((uint64_t)count > launch.units) count = (int)launch.units;
            std::shared_ptr<BlockGroup> grid;
            if (config.cooperative) {
                count = 1;
                grid = std::make_shared<BlockGroup>();
                grid->alive = int(launch.blocks) * launch.threads;
                launch.grid = grid.get();
            }
            find_kernel_text(launch);
            if (options.checked()) begin_launch_shadow(launch);
            {
                const FaultHandlers handlers;
                crew().run(launch, count);
            }
            if (options.checked()) end_launch_shadow(launch);
        }
        finding = current_finding;
    }
    if (!finding.kind.empty()) deliver(finding);
}

}  // namespace emulator

extern "C" {
void emulator_configure(int mode, int schedule, uint64_t seed, int processors, double time_limit) {
    using namespace emulator;
    options.mode = static_cast<Mode>(mode);
    options.schedule = static_cast<Schedule>(schedule);
    options.seed = seed ? seed : 1;
    options.processors = processors;
    options.time_limit = time_limit;
}

void emulator_call_launches_off_at(int signal) { emulator::call_launches_off_at(signal); }
void emulator_extents(int on) { emulator::options.extents = on; }
void emulator_debug(int on) { emulator::options.debugged = on; }

// One line a launch since the last reset: name, grid, block, dynamic shared bytes, separated by tabs.
const char* emulator_launches() { return emulator::launch_log.c_str(); }
void emulator_forget_launches() { emulator::launch_log.clear(); }
}
