// Graphs: what host code asks of a stream while the stream is captured, done again at each cudaGraphLaunch, in that order.
#pragma once
#include <emulator/host_status.h>

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive, cudaStreamCaptureStatusInvalidated };
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraph_st*;  // a copy of the graph
using cudaGraphNode_t = struct CUgraphNode_st*;

extern "C" {
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t emulator_graph_launch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t emulator_graph_nodes(cudaGraph_t graph, size_t* count);
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
// As it was before CUDA 12.
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, cudaGraphNode_t*, char*, size_t) {
    return cudaGraphInstantiateWithFlags(executable, graph, 0);
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    return nodes ? cudaErrorNotSupported : emulator_graph_nodes(graph, count);
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return *status = ::emulator::capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}
