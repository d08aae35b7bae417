// Graphs of what streams were asked for while they were captured.
#include "emulator/host_graphs.h"

#include <string.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "emulator/runtime_api.h"
#include "graphs.h"

namespace {

// A launch, or a call of `entry` by the host where there is no name. Both take a copy of their arguments, byte by byte, as the
// device does.
struct Node {
    const char* name;
    int line;
    const void* kernel;
    emulator::LaunchConfig config;
    void (*entry)(void*);
    std::vector<std::max_align_t> arguments;
    size_t bytes;
};

}  // namespace

struct CUgraph_st {
    std::vector<Node> nodes;
};

namespace {
std::mutex graphs_mutex;
std::unordered_map<unsigned, CUgraph_st*> under_way;  // captures, by their number
unsigned captures = 0;
}  // namespace

namespace emulator {

CUgraph_st* capture_of(cudaStream_t stream) {
    if (!is_made_by_create(stream) || !stream->capture) return nullptr;
    std::lock_guard<std::mutex> lock(graphs_mutex);
    const auto found = under_way.find(stream->capture);
    return found == under_way.end() ? nullptr : found->second;
}

static bool record(CUgraph_st* graph, Node node, const void* arguments) {
    if (!graph) return false;
    node.config.stream = nullptr;
    node.arguments.resize((node.bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    memcpy(node.arguments.data(), arguments, node.bytes);
    graph->nodes.push_back(std::move(node));
    return true;
}

bool record_launch(const char* name, int line, const void* kernel, const LaunchConfig& config, void (*entry)(void*),
                   const void* arguments, size_t bytes) {
    return record(capture_of((cudaStream_t)config.stream), {name, line, kernel, config, entry, {}, bytes}, arguments);
}

bool record_work(cudaStream_t stream, void (*work)(void*), const void* data, size_t bytes) {
    return record(capture_of(stream), {nullptr, 0, nullptr, LaunchConfig(dim3(), dim3()), work, {}, bytes}, data);
}

}  // namespace emulator

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!emulator::is_made_by_create(stream)) return cudaErrorStreamCaptureUnsupported;
    if (emulator::capture_of(stream)) return cudaErrorIllegalState;
    std::lock_guard<std::mutex> lock(graphs_mutex);
    stream->capture = ++captures;
    under_way[captures] = new CUgraph_st;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = emulator::capture_of(stream);
    if (!*graph) return cudaErrorIllegalState;
    std::lock_guard<std::mutex> lock(graphs_mutex);
    under_way.erase(stream->capture);
    return cudaSuccess;
}
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) { return *graph = new CUgraph_st, cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return delete executable, cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    return *executable = new CUgraph_st(*graph), cudaSuccess;
}
cudaError_t emulator_graph_launch(cudaGraphExec_t executable, cudaStream_t) {
    emulator::order(emulator::Order::all_synchronised);  // the order of its nodes is that in which they were recorded
    for (Node& node : executable->nodes) {
        if (node.name)
            emulator::run_grid(node.name, node.line, node.kernel, node.config, node.entry, node.arguments.data(), node.bytes);
        else
            node.entry(node.arguments.data());
    }
    emulator::order(emulator::Order::all_synchronised);
    return cudaSuccess;
}
cudaError_t emulator_graph_nodes(cudaGraph_t graph, size_t* count) { return *count = graph->nodes.size(), cudaSuccess; }

}  // extern "C"
