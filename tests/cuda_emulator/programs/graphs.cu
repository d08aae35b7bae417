// A stream is captured: its launches, copies and host functions run when the graph is launched, those of other streams at once.
#include "expect.h"

__global__ void add(int* p, int v) { p[threadIdx.x] += v; }
__global__ void twice(int* p) { p[threadIdx.x] *= 2; }
template <int BY>
__global__ void scale(int* p, const int4 how) {
    p[threadIdx.x] = BY * p[threadIdx.x] + how.w;
}

int main() {
    int *d, *other, host[8] = {-1}, calls = 0;
    cudaMalloc(&d, 32), cudaMalloc(&other, 4);
    cudaMemset(other, 0, 4);
    cudaStream_t s, joined, apart;
    cudaStreamCreate(&s), cudaStreamCreate(&joined), cudaStreamCreate(&apart);
    cudaEvent_t fork, join;
    cudaEventCreate(&fork), cudaEventCreate(&join);
    cudaGraph_t graph;
    cudaStreamCaptureStatus status;
    EXPECT(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported);
    EXPECT(cudaStreamEndCapture(s, &graph) == cudaErrorIllegalState);

    EXPECT(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal) == cudaSuccess);
    EXPECT(cudaStreamIsCapturing(s, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive);
    EXPECT(cudaStreamSynchronize(s) == cudaErrorStreamCaptureUnsupported);
    cudaMemsetAsync(d, 0, 32, s);
    for (int i = 1; i <= 3; ++i) add<<<1, 8, 0, s>>>(d, i);
    cudaEventRecord(fork, s);
    cudaStreamWaitEvent(joined, fork, 0);
    twice<<<1, 8, 0, joined>>>(d);
    cudaEventRecord(join, joined);
    cudaStreamWaitEvent(s, join, 0);
    scale<5><<<1, 8, 0, s>>>(d, make_int4(0, 0, 0, 1));
    cudaLaunchHostFunc(s, [](void* p) { ++*(int*)p; }, &calls);
    cudaMemcpyAsync(host, d, 32, cudaMemcpyDeviceToHost, s);
    add<<<1, 1, 0, apart>>>(other, 4);
    EXPECT(cudaStreamEndCapture(s, &graph) == cudaSuccess);
    EXPECT(host[0] == -1 && calls == 0);
    int now;
    cudaMemcpy(&now, other, 4, cudaMemcpyDeviceToHost);
    EXPECT(now == 4);

    size_t nodes;
    EXPECT(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes == 8);
    cudaGraphExec_t first, second;
    EXPECT(cudaGraphInstantiate(&first, graph, nullptr, nullptr, 0) == cudaSuccess);
    EXPECT(cudaGraphInstantiate(&second, graph) == cudaSuccess);
    cudaGraphDestroy(graph);
    for (int i = 0; i < 2; ++i) EXPECT(cudaGraphLaunch(first, s) == cudaSuccess);
    cudaStreamSynchronize(s);
    EXPECT(host[0] == 61 && host[7] == 61 && calls == 2);
    cudaGraphLaunch(second, apart);
    EXPECT(calls == 3);
    add<<<1, 1, 0, joined>>>(other, 1);  // no longer captured
    cudaMemcpy(&now, other, 4, cudaMemcpyDeviceToHost);
    EXPECT(now == 5);
    cudaGraphExecDestroy(first), cudaGraphExecDestroy(second);
}
