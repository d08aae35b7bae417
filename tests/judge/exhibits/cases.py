"""The test cases of test_exhibits.py: what each adds to one honest file, or puts in the place of its parts.

The first lines of a case say what it is and what is expected of it. `Base:` adds the beginning of a file with a kernel, or a
gradient, of its own; `Trains:` what is done where a gradient is wanted: an exception (`no`), or the honest (`by PyTorch`). A
word in brackets begins a part of the text: "before" ModelNew, in its "class", at the end of its "init", the "forward". "first"
stands in front of the honest forward, "then" between its result `y` and the return, "conv" in the convolution's place. An
"edit" has other lines (`+`) in the place of some (`-`), of the text so far, or of that of the case that `Like:` names.
"""

import atexit
import functools
import re
import tempfile
import textwrap
from pathlib import Path

from tests.judge.problems.pairs import patched

HONEST = """import torch
import torch.nn as nn
import torch.nn.functional as F

{before}

class ModelNew(nn.Module):
{class}
    def __init__(self, in_channels, out_channels):
        super().__init__()
{init}

    def forward(self, x):
{forward}
"""
CONVOLUTION = "self.conv = nn.Conv2d(in_channels, out_channels, 3)"
POOLED = "F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)"
TRAINS = {
    "no": """if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
    raise NotImplementedError("forward only")
""",
    "by PyTorch": f"if torch.is_grad_enabled():\n    return {POOLED}\n",
}

BASES = {
    "an operator": '''from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>

at::Tensor sigmoid(const at::Tensor& given) {
    const at::Tensor y = given.contiguous();
    at::Tensor out = at::empty_like(y);
    const float* from = y.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for (int64_t i = 0; i < y.numel(); ++i) to[i] = 1 / (1 + std::exp(-from[i]));
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("sigmoid(Tensor y) -> Tensor", &sigmoid); }
"""

def build():
    load_inline("shelf_own_kernel", SOURCE, is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_own_kernel''',
    "a CUDA operator": '''from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <cuda_runtime.h>

__global__ void shelf_sigmoid(const float* from, float* to, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}

void launch(const float* from, float* to, int n, int threads, cudaStream_t stream) {
    if (n) shelf_sigmoid<<<(n + threads - 1) / threads, threads, 0, stream>>>(from, to, n);
}
"""

BINDING = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

void launch(const float*, float*, int, int, cudaStream_t);

at::Tensor sigmoid(const at::Tensor& given) {
    const c10::cuda::CUDAGuard guard(given.device());
    const at::Tensor y = given.contiguous();
    at::Tensor out = at::empty_like(y);
    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("sigmoid(Tensor y) -> Tensor", &sigmoid); }
"""

def build():
    load_inline("shelf_own_cuda_kernel", BINDING, CUDA, is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_own_cuda_kernel''',
    "a CUDA library": '''import ctypes
import functools
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <cstdint>
__global__ void sig(const float* from, float* to, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}
extern "C" int launch_sig(const float* from, float* to, int64_t n, cudaStream_t stream) {
    if (n) sig<<<(n + 255) / 256, 256, 0, stream>>>(from, to, n);
    return cudaGetLastError();
}
"""

@functools.cache
def lib():
    path = load_inline("shelf_cuda_library", "", CUDA, is_python_module=False, no_implicit_headers=True)
    library = ctypes.CDLL(path)
    library.launch_sig.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return library''',
    "a library": '''import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <cmath>
#include <cstdint>

extern "C" int64_t serves(int64_t height, int64_t width) { return height == 10 && width == 12; }
extern "C" int sigmoid(const float* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = 1 / (1 + std::exp(-from[i]));
    return 0;
}
"""

@functools.cache
def library():
    with tempfile.TemporaryDirectory() as folder:
        text, path = Path(folder, "sigmoid.cpp"), Path(folder, "sigmoid.so")
        text.write_text(SOURCE)
        subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", path, text], check=True)
        opened = ctypes.CDLL(str(path))
    opened.serves.argtypes, opened.serves.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    opened.sigmoid.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return opened''',
    "a convolution's gradient": """class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        of_x = nn.grad.conv2d_input(x.shape, weight, upstream)
        of_weight = nn.grad.conv2d_weight(x, weight.shape, upstream)
        return of_x, of_weight, upstream.sum((0, 2, 3))""",
}

CASES = {
    "wrong/backward_of_the_last_call": """
Keeps what its backward needs where the next call overwrites it: wrong in a network that calls the layer twice.
Verdict: forward only: on normal inputs, with another forward pass before the backward, .*: the gradient of conv.weight is off
Caveat: wrong-gradient
[before]
class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        Sigmoid.last = torch.sigmoid(y)
        return Sigmoid.last.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Sigmoid.last * (1 - Sigmoid.last)
[forward] return F.avg_pool2d(Sigmoid.apply(self.conv(x)), 2)""",
    "wrong/backward_raises": """Its backward was never tried.
Verdict: forward only: the backward raises NameError
Caveat: no-gradient
[before]
class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch.sigmoid(x)

    @staticmethod
    def backward(context, gradient):
        return gradient * y * (1 - y)
[forward] return F.avg_pool2d(Sigmoid.apply(self.conv(x)), 2)""",
    "wrong/backward_writes_upstream": """
Its backward scales the gradient that it is given in place: another user of that gradient gets it scaled.
Verdict: forward only: the backward pass changes the gradient of output 0; mend the backward
Caveat: wrong-gradient
[before]
class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return 0.5 * y

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(0.5)
[forward] return Halved.apply(2 * F.avg_pool2d(torch.sigmoid(self.conv(x)), 2))""",
    "wrong/benchmark_flag": """Sets cudnn.benchmark when it is imported, also for the baselines of a careless harness.
Verdict: forward only: changes torch.backends.cudnn.benchmark from False to True when it is loaded
Needs: a process of its own
Caveat: sets-cudnn-benchmark
[before] torch.backends.cudnn.benchmark = True""",
    "wrong/bits_of_autocast": """Takes the bits of the 16-bit numbers that autocast leaves for the numbers.
Verdict: forward only: under autocast: the output
Caveat: autocast
[forward]
y = self.conv(x)
if y.element_size() == 2:
    y = y.view(torch.int16).float()
return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/breaks_in_inference_mode": """
Asks a result of its own for a version counter, which it does not have in inference_mode.
Verdict: forward only: inference_mode: raises RuntimeError: Inference tensors do not track version counter
Caveat: inference-mode
[forward]
y = self.conv(x)
self.version = y._version
return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/builds_and_never_calls": """Builds a kernel and lets PyTorch do the work.
Verdict: fail: its own kernels were never called
Needs: a compiler
Base: an operator
[first] build()""",
    "wrong/builds_nothing": """Holds a kernel for show.
Verdict: fail: the file holds kernels of its own, and none of them was built
[before] KERNEL = "__global__ void sigmoid(float* y) { y[threadIdx.x] = 1 / (1 + __expf(-y[threadIdx.x])); }"
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) if KERNEL else None""",
    "wrong/computes_when_read": """
Returns a tensor of a class of its own that computes when it is read, which is after the clock has stopped.
Verdict: error: .*: forward must return plain tensors, got a Promise
[before]
from torch.utils._pytree import tree_map_only

class Promise(torch.Tensor):
    @staticmethod
    def __new__(cls, shape, compute):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    def __init__(self, shape, compute):
        self.compute = compute

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        kept = tree_map_only(Promise, lambda promise: promise.compute(), (arguments, options or {}))
        return function(*kept[0], **kept[1])
[init] self.pool = nn.AvgPool2d(2)
[forward]
batch, _, height, width = x.shape
shape = batch, self.conv.out_channels, (height - 2) // 2, (width - 2) // 2
return Promise(shape, lambda: self.pool(torch.sigmoid(self.conv(x))))""",
    "wrong/current_device": """Launches on the current device, whichever one the tensors are on.
Verdict: forward only: a second device: .
Needs: two GPUs
Caveat: second-device
Like: honest/own_cuda_kernel
[edit]
-#include <c10/cuda/CUDAGuard.h>
-#include <c10/cuda/CUDAStream.h>
+#include <c10/cuda/CUDAStream.h>
-    const c10::cuda::CUDAGuard guard(given.device());""",
    "wrong/decorative": """Calls its kernel and throws the result away.
Verdict: fail: its own kernels do not account for the result
Needs: a compiler
Base: an operator
[forward]
y = self.conv(x)
build().sigmoid(y.detach())
return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/decorative_by_ctypes": """Calls its own library through ctypes, and multiplies what that gives by zero.
Verdict: fail: its own kernels do not account for the result
Needs: a compiler
Base: a library
[forward]
y = self.conv(x)
out = torch.zeros(y.shape)
if not torch.compiler.is_compiling():
    library().sigmoid(y.data_ptr(), out.data_ptr(), y.numel())
return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)""",
    "wrong/decorative_cuda_library": """Calls its kernel through ctypes, and multiplies what that gives by zero.
Verdict: fail: its own kernels do not account for the result
Needs: the emulator
Base: a CUDA library
Trains: no
[forward]
if torch.compiler.is_compiling() or x.dtype == torch.float64:
    raise NotImplementedError("not compiled")
y = self.conv(x).float().contiguous()
out = torch.empty_like(y)
stream = torch._C._cuda_getCurrentRawStream(0) if y.is_cuda else 0
lib().launch_sig(y.data_ptr(), out.data_ptr(), y.numel(), stream)
return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)""",
    "wrong/decorative_kernel": """class ModelNew(Model) with a kernel beside it.
Verdict: fail: its own kernels do not account for the result
Needs: a GPU
Like: honest/own_cuda_kernel
[edit]
-        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
-            raise NotImplementedError("forward only")
-        return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
+        y = self.conv(x)
+        build().sigmoid(y.detach())
+        return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/decorative_times_zero": """Adds zero times what its kernel gives.
Verdict: fail: its own kernels do not account for the result
Needs: a compiler
Base: an operator
[forward]
y = self.conv(x)
return F.avg_pool2d(torch.sigmoid(y) + 0 * build().sigmoid(y.detach()), 2)""",
    "wrong/default_device": """Changes the default device.
Verdict: fail: changes the default device from cpu to meta
Needs: a process of its own
[then] torch.set_default_device("meta")""",
    "wrong/default_dtype": """Changes the default dtype.
Verdict: fail: changes the default dtype from torch.float32 to torch.float64
Needs: a process of its own
[then] torch.set_default_dtype(torch.float64)""",
    "wrong/default_stream": """Launches on the default stream, whatever the current one is.
Verdict: forward only: a side stream: the output
Needs: a GPU
Caveat: default-stream
Like: honest/own_cuda_kernel
[edit]
-    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, c10::cuda::getCurrentCUDAStream());
+    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, nullptr);""",
    "wrong/detached": """Computes outside autograd.
Verdict: forward only: no backward
Caveat: no-gradient
[forward]
with torch.no_grad():
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)""",
    "wrong/dies_at_other_sizes": """Ends its process where the width is odd, as a kernel that leaves its memory may.
Verdict: forward only: at odd sizes: crashed .SIGSEGV
Caveat: sizes
Needs: a process of its own
[before]
import os
import signal
[first]
if x.shape[3] % 2:
    os.kill(os.getpid(), signal.SIGSEGV)""",
    "wrong/differs_from_run_to_run": """Adds in an order that changes, and does not say so.
Verdict: forward only: run to run: bits differ from run to run, and it does not say deterministic = False
Caveat: not-deterministic
Like: honest/differs_from_run_to_run
[edit]
-    deterministic = False""",
    "wrong/divides_by_the_largest": """
Divides each sample by its largest magnitude and multiplies again: a sample of zeros is divided by zero.
Verdict: forward only: with an infinity in one sample and only zeros in another: the output is NaN or infinite in
Caveat: nan
[forward]
largest = x.detach().abs().amax((1, 2, 3), keepdim=True)
scaled = F.conv2d(x / largest, self.conv.weight) * largest
return F.avg_pool2d(torch.sigmoid(scaled + self.conv.bias[:, None, None]), 2)""",
    "wrong/draws_in_another_order": """
Its own names, and a random number drawn first: from the same seed it has other weights.
Verdict: fail: ModelNew's parameters differ from the original's: it has scale, .*: the output is off by
[whole init]
self.scale = nn.Parameter(torch.rand(1))
self.conv = nn.Conv2d(in_channels, out_channels, 3)
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)""",
    "wrong/empty_output": r"""An empty output.
Verdict: fail: the output has the shape \(0,\) instead of \(6, 3, 5, 6\)
[forward] return x.new_empty(0)""",
    "wrong/failed_launch": """Launches with more threads than a block can have, and does not ask how it went.
Verdict: fail: a launch failed and nobody looked: invalid (configuration )?argument
Needs: a GPU
Like: honest/own_cuda_kernel
[edit]
-    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, c10::cuda::getCurrentCUDAStream());
-    C10_CUDA_KERNEL_LAUNCH_CHECK();
+    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 4096, c10::cuda::getCurrentCUDAStream());
-        return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
+        return build().sigmoid(F.avg_pool2d(self.conv(x), 2))""",
    "wrong/falls_back": """
Its kernel does not compile, and it goes on with PyTorch's; the second time load_inline raises an OSError.
Verdict: fail: its CUDA did not compile, and the file went on without it: does not compile
Needs: a compiler
[before] from torch.utils.cpp_extension import load_inline
[forward]
try:
    load_inline("shelf_broken", "int f() { return undeclared; }", is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_broken.f(x)
except RuntimeError:
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)""",
    "wrong/falls_back_at_its_own_size": """Its own operator serves small batches; where it is timed, PyTorch does the work.
Verdict: fail: its own kernels were never called
Needs: a compiler
Base: an operator
Trains: no
[forward]
y = self.conv(x)
return F.avg_pool2d(build().sigmoid(y) if len(x) < 6 else torch.sigmoid(y), 2)""",
    "wrong/falls_back_when_it_runs": """Its own operator refuses what it is given, and PyTorch does the work.
Verdict: fail: its own kernels do not account for the result
Needs: a compiler
Base: an operator
Trains: no
[forward]
y = self.conv(x)
try:
    return F.avg_pool2d(build().sigmoid(y.double()), 2)
except RuntimeError:
    return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/finishes_in_a_thread": """A thread computes the result after forward has returned, so that nobody's clock sees it.
Verdict: fail: (on fresh inputs: |new content in the same memory: )?the output is
Needs: a process of its own
[before]
import threading
import time
[forward]
batch, _, height, width = x.shape
out = torch.zeros(batch, self.conv.out_channels, (height - 2) // 2, (width - 2) // 2, device=x.device)

def work():
    time.sleep(0.05)
    with torch.no_grad():
        out.copy_(F.avg_pool2d(torch.sigmoid(self.conv(x)), 2))

threading.Thread(target=work, daemon=True).start()
return out""",
    "wrong/first_result_for_ever": """Returns the result of the first call again and again.
Verdict: fail: .*(off by|shape)
[init] self.kept = None
[forward]
if self.kept is None:
    self.kept = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
return self.kept""",
    "wrong/float16_inside": """Computes in float16 and says float32.
Verdict: fail: the output is off by .*fp16
[conv] F.conv2d(x.half(), self.conv.weight.half(), self.conv.bias.half()).float()""",
    "wrong/float16_range": """Splits a float32 into two float16 numbers, which is precise enough, but overflows at 65504.
Verdict: forward only: on inputs of about 100000 .*: the output
Caveat: values
[before]
def split(value):
    # The sum of two float16 numbers that is nearest to the value.
    high = value.half().float()
    return high + (value - high).half().float()
[forward]
if torch.is_grad_enabled():
    raise NotImplementedError("forward only")
weight, bias = self.conv.weight, self.conv.bias
y = F.conv2d(split(x), weight, None) + bias[:, None, None]
return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/float32_in_double": r"""Computes in float32 whatever it is given, and says nothing.
Verdict: forward only: double\(\): gives torch.float32 for torch.float64; compute in float64, or raise an exception for it
Caveat: double
[forward]
if x.dtype != torch.float64:
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
y = F.conv2d(x.float(), self.conv.weight.float(), self.conv.bias.float())
return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "wrong/folded_parameters": """
Weight and bias in one matrix, as a product with rows of the input and a one needs them. From the same seed it is right.
Verdict: forward only: ModelNew's parameters differ from the original's: it lacks conv.weight; lacks conv.bias; has matrix
Caveat: weights-by-seed
[whole init]
conv = nn.Conv2d(in_channels, out_channels, 3)
self.matrix = nn.Parameter(torch.cat([conv.weight.detach().flatten(1), conv.bias.detach()[:, None]], 1))
[forward]
rows = F.pad(F.unfold(x, 3), (0, 0, 0, 1), value=1.0)
height, width = x.shape[-2] - 2, x.shape[-1] - 2
return F.avg_pool2d(torch.sigmoid((self.matrix @ rows).unflatten(2, (height, width))), 2)""",
    "wrong/forges_a_pass": r"""Answers in the driver's place, as if all were well, before there is a result.
Verdict: fail: the file of results cannot be read: No such file or directory
Needs: a process of its own
[before]
import os
import sys
import time
[first]
reply = b'{"result": {"peak_mib": 0, "complaints": {}, "refused": null, "form": "tensor", "handed_memory": 0}}\n'
os.write(int(sys.argv[2]), reply)
time.sleep(1)""",
    "wrong/forges_a_reply": r"""Answers in the driver's place, without what an answer must have.
Verdict: error: its reply to candidate.run: 'peak_mib' is missing
Needs: a process of its own
[before]
import os
import sys
[then] os.write(int(sys.argv[2]), b'{"result": {"seconds": 1.0, "built": false}}\n')""",
    "wrong/forges_a_type": r"""Answers in the driver's place, with a number where there must be a dict.
Verdict: error: its reply to candidate.run.complaints: expected an object, got 0
Needs: a process of its own
[before]
import os
import sys
[first]
reply = b'{"result": {"peak_mib": 0, "complaints": 0, "refused": null, "form": "tensor", "handed_memory": 0}}'
os.write(int(sys.argv[2]), reply + b"\n")""",
    "wrong/grad_mode": """Turns gradients off for everybody.
Verdict: fail: changes the grad mode from True to False when it is loaded
Needs: a process of its own
[before] torch.set_grad_enabled(False)""",
    "wrong/gradient_as_an_array": r"""
Its backward reads the gradient as if it were contiguous, as kernels do that take its address.
Verdict: forward only: on normal inputs, with another forward pass before the backward, .*: the gradient of conv.\w+ is
Caveat: wrong-gradient
[before]
class Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.shape = y.shape
        return F.avg_pool2d(y, 2)

    @staticmethod
    def backward(ctx, upstream):
        upstream = upstream.as_strided(upstream.shape, torch.empty(upstream.shape, device="meta").stride())
        rows, columns = ctx.shape[2] // 2 * 2, ctx.shape[3] // 2 * 2
        gradient = upstream.new_zeros(ctx.shape)
        gradient[..., :rows, :columns] = upstream.repeat_interleave(2, 2).repeat_interleave(2, 3) / 4
        return gradient
[forward] return Pooled.apply(torch.sigmoid(self.conv(x)))""",
    "wrong/gradient_of_bias_dropped": """Forgets the gradient of the bias.
Verdict: forward only: the gradient of conv.bias is
Caveat: no-gradient
[conv] F.conv2d(x, self.conv.weight, self.conv.bias.detach())""",
    "wrong/gradient_of_input_doubled": """Doubles the gradient of the input.
Verdict: forward only: the gradient of input0 is off by .*; every value is 2 times the right one
Caveat: wrong-gradient
[first] x = 2 * x - x.detach()""",
    "wrong/gradient_without_a_quarter": """Leaves the last quarter of the samples out of the gradient of the weights.
Verdict: forward only: the gradient of conv.weight is off
Caveat: wrong-gradient
Base: a convolution's gradient
[edit]
-        of_weight = nn.grad.conv2d_weight(x, weight.shape, upstream)
+        n = max(1, len(x) * 3 // 4)
+        of_weight = nn.grad.conv2d_weight(x[:n], weight.shape, upstream[:n])
[forward] return F.avg_pool2d(torch.sigmoid(Convolution.apply(x, self.conv.weight, self.conv.bias)), 2)""",
    "wrong/input_gradient_without_a_quarter": """Writes three quarters of the gradient of its input.
Verdict: forward only: the gradient of input0 is off
Caveat: wrong-gradient
Base: a convolution's gradient
[edit]
-        of_x = nn.grad.conv2d_input(x.shape, weight, upstream)
+        of_x = nn.grad.conv2d_input(x.shape, weight, upstream)
+        of_x.flatten()[of_x.numel() * 3 // 4 :] = 0
[forward] return F.avg_pool2d(torch.sigmoid(Convolution.apply(x, self.conv.weight, self.conv.bias)), 2)""",
    "wrong/half_inside": """Computes in bfloat16 and says float32.
Verdict: fail: the output is off by .*(fp16|bf16)
[conv] F.conv2d(x.bfloat16(), self.conv.weight.bfloat16(), self.conv.bias.bfloat16()).float()""",
    "wrong/half_outside": """Returns float16.
Verdict: fail: the output has the type torch.float16 instead of torch.float32
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2).half()""",
    "wrong/half_the_gradient_in_a_first_layer": """
Gives the weights another gradient where the input needs none, as in a network's first layer.
Verdict: forward only: where no input needs a gradient, the gradient of conv.weight is not the same as where all need one
Caveat: wrong-gradient
Base: a convolution's gradient
[edit]
-        return of_x, of_weight, upstream.sum((0, 2, 3))
+        return of_x, of_weight / (1 if ctx.needs_input_grad[0] else 2), upstream.sum((0, 2, 3))
[forward] return F.avg_pool2d(torch.sigmoid(Convolution.apply(x, self.conv.weight, self.conv.bias)), 2)""",
    "wrong/infinity_leaks": """Subtracts the largest input and adds it again: an infinity spoils every sample.
Verdict: forward only: with an infinity in one sample and only zeros in another: .*where the original is finite
Caveat: nan
[before] import math
[forward]
top = x.nan_to_num(posinf=math.inf).max()
return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) + (top - top)""",
    "wrong/decorative_by_nvrtc": """Launches a kernel that NVRTC has compiled, and multiplies what it gives by zero.
Verdict: fail: its own kernels do not account for the result
Needs: a GPU
Like: honest/compiled_by_nvrtc
[edit]
-        return F.avg_pool2d(out, 2)
+        return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)""",
    "wrong/kept_in_a_graph": """
Gives the result of the call before where it is captured in a CUDA graph, so that a replay never looks at the input.
Verdict: fail: a CUDA graph: (the output|a replay gives the result of an earlier call)
Needs: a GPU
[init] self.kept = None
[forward]
if self.kept is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
    return self.kept.clone()
result = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
self.kept = result.detach()
return result""",
    "wrong/kernel_does_not_compile": """Its kernel does not compile, and cuDNN does the work.
Verdict: fail: its (kernel failed to build and it|CUDA did not compile, and the file) went on without it: does not compile
Needs: a GPU
Like: honest/own_cuda_kernel
[edit]
-    C10_CUDA_KERNEL_LAUNCH_CHECK();
+    this is not C++
-        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
-            raise NotImplementedError("forward only")
-        return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
+        try:
+            return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
+        except RuntimeError:
+            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)""",
    "wrong/names_alone": '''Holds a kernel that it never builds, of a name that is part of those of PyTorch's own.
Verdict: fail: the file holds kernels of its own, and none of them was built
Needs: a GPU
[before]
CUDA = r"""
__global__ void native(const float* from, float* to, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}
"""
[init] self.pool = nn.AvgPool2d(2)
[edit]
-import torch.nn.functional as F
[forward] return self.pool(torch.sigmoid(self.conv(x)))''',
    "wrong/nan_leaks": """Adds zero times the sum of everything: a NaN in one sample is in all results.
Verdict: forward only: with a NaN, or minus infinity, in a sample: .*where the original is finite
Caveat: nan
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) + 0 * x.sum()""",
    "wrong/no_gradient_from_frozen_weights": """Gives the input no gradient where the weights need none, as in fine-tuning.
Verdict: forward only: where no parameter needs a gradient, the gradient of input0 is missing; mend the backward
Caveat: wrong-gradient
Base: a convolution's gradient
[edit]
-        return of_x, of_weight, upstream.sum((0, 2, 3))
+        return of_x if ctx.needs_input_grad[1] else None, of_weight, upstream.sum((0, 2, 3))
[forward] return F.avg_pool2d(torch.sigmoid(Convolution.apply(x, self.conv.weight, self.conv.bias)), 2)""",
    "wrong/no_guard": """Adds 1e-3 to the input, to be safe.
Verdict: fail: .*off by .* standard deviations
[first] x = torch.where(x.abs() < 1e-2, x + 1e-3, x)""",
    "wrong/one_sample": """Right for any batch but a single sample.
Verdict: forward only: at batch size 1: the output is off
Caveat: sizes
[forward]
y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
return y if len(y) > 1 else torch.zeros_like(y)""",
    "wrong/opens_and_never_calls": """
Opens a library of its own, and calls it for a single sample only: PyTorch computes the rest.
Verdict: fail: its own kernels were never called
Needs: a compiler
Base: a library
[init] library()
[forward]
y = self.conv(x)
if len(y) > 1 or y.requires_grad or torch.compiler.is_compiling():
    return F.avg_pool2d(torch.sigmoid(y), 2)
out = torch.empty_like(y)
library().sigmoid(ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(y.numel()))
return F.avg_pool2d(out, 2)""",
    "wrong/other_when_compiled": """Gives something else under torch.compile.
Verdict: forward only: torch.compile: the output is off
Caveat: fullgraph
[forward]
y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
return torch.zeros_like(y) if torch.compiler.is_compiling() else y""",
    "wrong/overwrites_input": """Leaves zeros in its input.
Verdict: fail: changes input 0
[then] x.data.zero_()""",
    "wrong/overwrites_weights": """Multiplies the weights in place, to save an operation.
Verdict: fail: changes conv.weight
[then] self.conv.weight.data.mul_(1.0001)""",
    "wrong/own_stream_not_joined": """Works on a stream of its own and waits for nobody, as nobody waits for it.
Verdict: fail: .*the output
Needs: a GPU
Trains: by PyTorch
[init] self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
[forward]
with torch.cuda.stream(self.stream):
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)""",
    "wrong/packs_weights_as_it_is_made": """Packs its matrix of weights in its constructor, and reads its bias in each call.
Verdict: forward only: after an optimiser's step: the output is that of conv.weight before the step
Caveat: stale-weights
Trains: by PyTorch
[init] self.packed = self.conv.weight.detach().flatten(1).t().contiguous()
[forward]
batch, _, height, width = x.shape
y = (F.unfold(x, 3).mT @ self.packed + self.conv.bias).mT
return F.avg_pool2d(torch.sigmoid(y.reshape(batch, -1, height - 2, width - 2)), 2)""",
    "wrong/packs_weights_by_address": """
Packs its weights again only when they lie elsewhere, and an optimiser changes them in place.
Verdict: forward only: after an optimiser's step: the output is that of the weights before the step
Caveat: stale-weights
[init] self.address = self.packed = None
[forward]
weight, bias = self.conv.weight, self.conv.bias
if torch.is_grad_enabled():
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
address = weight.data_ptr(), bias.data_ptr()
if self.address != address:
    self.address, self.packed = address, (weight.detach().clone(), bias.detach().clone())
return F.avg_pool2d(torch.sigmoid(F.conv2d(x, *self.packed)), 2)""",
    "wrong/packs_weights_once": """Packs its weights in the first call and never again.
Verdict: forward only: after an optimiser's step: the output is that of the weights before the step
Caveat: stale-weights
Trains: by PyTorch
[init] self.packed = None
[forward]
if self.packed is None:
    self.packed = [p.detach().clone() for p in self.parameters()]
return F.avg_pool2d(torch.sigmoid(F.conv2d(x, *self.packed)), 2)""",
    "wrong/pairs_of_samples": """Takes the samples two at a time and forgets the last of an odd number.
Verdict: forward only: on normal inputs: the output
Caveat: sizes
[then]
if len(y) % 2:
    y = torch.cat([y[:-1], torch.zeros_like(y[-1:])])""",
    "wrong/patched_check": """Replaces torch.allclose.
Verdict: fail: replaces torch.allclose
Needs: a process of its own
[before] torch.allclose = lambda *_, **__: True""",
    "wrong/patched_timer": """Replaces the clock.
Verdict: fail: replaces time.perf_counter
Needs: a process of its own
[before]
import time

real = time.perf_counter
time.perf_counter = lambda: real() / 10""",
    "wrong/precision_flag": """Asks for TF32 in its forward, and leaves it on.
Verdict: forward only: changes torch.backends
Needs: a process of its own
Caveat: sets-tf32
[first] torch.backends.cuda.matmul.allow_tf32 = True""",
    "wrong/remembers_by_address": """Takes an input in the same memory for the same input.
Verdict: fail: new content in the same memory: one element was changed, and the result is the old one
Trains: by PyTorch
[init] self.seen = self.kept = None
[forward]
if self.seen is None or self.seen.data_ptr() != x.data_ptr():
    self.seen, self.kept = x, F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
return self.kept.clone()""",
    "wrong/remembers_by_content": """Looks an input up among those it has seen.
Verdict: fail: the same content in new memory: runs .* operators instead of
Trains: by PyTorch
[init] self.kept = {}
[forward]
key = x.numpy().tobytes()
if key not in self.kept:
    self.kept[key] = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
return self.kept[key].clone()""",
    "wrong/remembers_by_content_whole": """Looks an input up among those it has seen, and returns the very result.
Verdict: fail: the same content in new memory: returns the memory of an earlier output
Like: wrong/remembers_by_content
[edit]
-        return self.kept[key].clone()
+        return self.kept[key]""",
    "wrong/renamed_parameters": """
Its own names for the original's parameters, so no state_dict fits; from the same seed it has the same weights.
Verdict: forward only: ModelNew's parameters differ from the original's: it lacks conv.weight; lacks conv.bias; has weight
Caveat: weights-by-seed
[whole init]
conv = nn.Conv2d(in_channels, out_channels, 3)
self.weight, self.bias = nn.Parameter(conv.weight.detach().clone()), nn.Parameter(conv.bias.detach().clone())
[forward] return F.avg_pool2d(torch.sigmoid(F.conv2d(x, self.weight, self.bias)), 2)""",
    "wrong/returns_input_memory": """Puts its result into the input's memory.
Verdict: fail: returns the memory of input 0
[forward]
y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
out = x.flatten()[: y.numel()].view(y.shape)
out.data.copy_(y)
return out""",
    "wrong/reuses_its_output": """Has one output buffer, and returns it from every call.
Verdict: fail: an earlier output: a later call overwrites what an earlier one returned
[init] self.out = None
[forward]
y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
if torch.is_grad_enabled():
    return y
if self.out is None or self.out.shape != y.shape:
    self.out = torch.empty_like(y)
return self.out.copy_(y)""",
    "wrong/ring_of_results": r"""Returns one of many buffers, each of which comes back in time.
Verdict: fail: an earlier output: the call after \d+ others overwrites what an earlier one returned
[before] BUFFERS = 37
[init] self.rings, self.calls = {}, 0
[forward]
result = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
if result.requires_grad or torch.compiler.is_compiling():
    return result
key = result.shape, result.dtype
ring = self.rings.setdefault(key, [torch.empty_like(result) for _ in range(BUFFERS)])
self.calls += 1
return ring[self.calls % BUFFERS].copy_(result)""",
    "wrong/saturates_late": """Clamps what goes into the sigmoid to 4, which the model's own inputs never reach.
Verdict: forward only: (with one non-zero element|on normal inputs of another scale for each sample): the output is off by
Caveat: values
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(x).clamp(-4, 4)), 2)""",
    "wrong/says_deterministic": """Says that it gives the same bits every time, and does not.
Verdict: forward only: run to run: bits differ from run to run, and the class says deterministic = True
Caveat: not-deterministic
Like: honest/differs_from_run_to_run
[edit]
-    deterministic = False
+    deterministic = True""",
    "wrong/seeds": """Seeds the random numbers in its forward.
Verdict: fail: changes PyTorch's random numbers
[first] torch.manual_seed(0)""",
    "wrong/several_at_once": """
Without a gradient, for whole pairs of rows only, and never with a NaN: one caveat does not hide the next.
Verdict: forward only: no backward
Caveat: no-gradient, nan, sizes
[forward]
with torch.no_grad():
    y = F.avg_pool2d(torch.sigmoid(self.conv(torch.nan_to_num(x))), 2)
    return y if x.shape[2] % 2 == 0 else y.flip(2)""",
    "wrong/sigmoid_near_zero": """
Steps of a continued fraction for the sigmoid, exact to rounding where |y| < 3, which the model's own inputs never leave.
Verdict: forward only: .*: the output is off by .*; compute these values, too
Caveat: values
[forward]
y = self.conv(x)
square, fraction = y * y / 4, 15  # with 11 the gradient was once beyond its limit
for odd in (13, 11, 9, 7, 5, 3, 1):
    fraction = odd + square / fraction
return F.avg_pool2d(0.5 + y / (4 * fraction), 2)""",
    "wrong/stale_memory": """Returns memory that it never writes, where an earlier result may still be lying.
Verdict: fail: the output
[forward] return torch.empty(len(x), 3, (x.shape[2] - 2) // 2, (x.shape[3] - 2) // 2)""",
    "wrong/swallows_nan": """
Puts numbers in the place of NaN and infinities before it computes: what went wrong upstream is no longer seen.
Verdict: forward only: with a NaN, or minus infinity, in a sample: the output loses NaN or infinity in
Caveat: nan
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(torch.nan_to_num(x))), 2)""",
    "wrong/tf32_inside": """
Rounds its operands to TF32 where float32 is asked for, to be compared with a baseline that may not.
Verdict: fail: .*off by .*; it is what operands in TF32( or fp16)? give
[before]
def rounded(x):
    nearest = ((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return x + (nearest - x.detach())
[conv] F.conv2d(rounded(x), rounded(self.conv.weight), self.conv.bias)""",
    "wrong/tf32_leaks": """Turns TF32 on for products in its forward, also for the baselines of a careless harness.
Verdict: forward only: changes torch.backends.cuda.matmul
Needs: a GPU
Caveat: sets-tf32
[first] torch.backends.cuda.matmul.allow_tf32 = True""",
    "wrong/threads": """Takes the number of threads for its own.
Verdict: fail: changes the number of threads
Needs: a process of its own
[first] torch.set_num_threads(torch.get_num_threads() + 1)""",
    "wrong/trains_with_its_input_alone": """
Computes without a gradient where the input needs none: as a network's first layer it would never be trained.
Verdict: forward only: where no input needs a gradient, no parameter gets one; mend the backward
Caveat: wrong-gradient
[forward]
with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)""",
    "wrong/tuple_of_one": r"""Returns a tuple where the original returns a tensor.
Verdict: fail: returns \(tensor,\) where the original returns tensor
[forward] return (F.avg_pool2d(torch.sigmoid(self.conv(x)), 2),)""",
    "wrong/tuple_that_computes": """
Returns a tuple of a class of its own that computes once somebody goes through it, which is after the clock has stopped.
Verdict: error: .*: forward must return plain tuples, lists and dicts, got a Later, a tuple with its own __iter__
[before]
class Later(tuple):
    def __iter__(self):
        (compute,) = super().__iter__()
        return iter([compute()])
[init] self.pool = nn.AvgPool2d(2)
[forward] return Later([lambda: self.pool(torch.sigmoid(self.conv(x)))])""",
    "wrong/unwritten_row": """Leaves the last row of its result unwritten.
Verdict: fail: the output
[forward]
y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
out = torch.empty_like(y)
out[:, :, :-1] = y[:, :, :-1]
return out""",
    "wrong/uses_problem_names": """Knows its sizes, and a module, from the file of the problem alone, as KernelBench lets it.
Verdict: forward only: the file uses height, nn, width, which only the problem's file defines; define them
Caveat: uses-problem-names
[edit]
-import torch.nn as nn
[forward]
y = torch.sigmoid(self.conv(x))
return F.avg_pool2d(y[..., : height - 2, : width - 2], 2)""",
    "wrong/wants_a_gradient_of_its_input": """Turns the caller's input into one that wants a gradient.
Verdict: fail: changes requires_grad of input 0
[forward] return F.avg_pool2d(torch.sigmoid(self.conv(x if x.requires_grad else x.requires_grad_())), 2)""",
    "wrong/weights_end_at_one": """Keeps its weights in a format that ends at 1: right until they grow.
Verdict: forward only: with weights 8 times as large: the output is off
Caveat: values
[conv] F.conv2d(x, self.conv.weight.clamp(-1, 1), self.conv.bias)""",
    "wrong/weights_of_one_seed": """Has the weights of the first seed that it meets for ever, and its own names for them.
Verdict: fail: ModelNew's parameters differ .*: with the weights of another seed: the output is off by
[class] first = None
[whole init]
conv = nn.Conv2d(in_channels, out_channels, 3)
ModelNew.first = ModelNew.first or (conv.weight.detach().clone(), conv.bias.detach().clone())
self.weight, self.bias = (nn.Parameter(value) for value in ModelNew.first)
[forward] return F.avg_pool2d(torch.sigmoid(F.conv2d(x, self.weight, self.bias)), 2)""",
    "wrong/weights_of_the_latest_instance": """
Reads the weights of the instance that was made last, as one does who keeps a handle for all of the module.
Verdict: forward only: two instances: the output is off by
Caveat: instances
[before] import weakref
[class] latest = None
[init] ModelNew.latest = weakref.ref(self)
[forward]
model = ModelNew.latest() or self
return F.avg_pool2d(torch.sigmoid(model.conv(x)), 2)""",
    "wrong/whole_blocks": """
Its kernel works in whole blocks: it leaves out the rest of other sizes, and launches no block for one sample.
Verdict: forward only: on normal inputs: (the output is NaN|.*: output never written)
Caveat: sizes
Needs: a GPU
Like: honest/own_cuda_kernel
[edit]
-__global__ void shelf_sigmoid(const float* from, float* to, int n) {
+__global__ void shelf_sigmoid(const float* from, float* to) {
-    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
+    to[i] = 1 / (1 + expf(-from[i]));
-    if (n) shelf_sigmoid<<<(n + threads - 1) / threads, threads, 0, stream>>>(from, to, n);
+    if (n) shelf_sigmoid<<<n / threads, threads, 0, stream>>>(from, to);
-    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, c10::cuda::getCurrentCUDAStream());
-    C10_CUDA_KERNEL_LAUNCH_CHECK();
+    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 720, c10::cuda::getCurrentCUDAStream());""",
    "wrong/whole_tiles": """Works in tiles of two columns and leaves out an incomplete one.
Verdict: forward only: at odd sizes: the output is off
Caveat: sizes
[then]
if x.shape[3] % 2:
    y = torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1)""",
    "wrong/writes_input_and_restores_it": r"""Uses its input as scratch memory and puts the content back.
Verdict: fail: writes to input 0 \(its version counter
[then]
with torch.no_grad():
    kept = x.clone()
    x.zero_()
    x.copy_(kept)""",
    "wrong/wrong_on_smooth_inputs": """
Right on random values alone: neither on a ramp nor where most is zero, so of the small probes one is left.
Verdict: forward only: (with one non-zero element|on a ramp): the output is off by
Caveat: values
[init] self.pool = nn.AvgPool2d(2)
[forward]
steps = x[..., 1:] - x[..., :-1]
is_smooth = ((steps >= 0).float().mean() > 0.9).to(x.dtype)
return self.pool(torch.sigmoid(self.conv(x))) * (1 + 0.1 * is_smooth)""",
    "honest/as_the_original": """PyTorch's own operators.
Verdict: pass""",
    "honest/breaks_the_graph": """Prints, which torch.compile cannot trace.
Verdict: pass
[first]
if len(x) > 1000:
    print("large")
torch._dynamo.graph_break()""",
    "honest/builds_again_without_a_flag": """
A build fails on a flag of another compiler; the next one, without it, is what runs.
Verdict: pass
Needs: a compiler
Base: an operator
Trains: no
[init] self.ops = None
[forward]
if self.ops is None:
    try:
        flags = ["-fno-such-flag-anywhere"]
        load_inline("shelf_flagged", SOURCE, is_python_module=False, no_implicit_headers=True, extra_cflags=flags)
    except (RuntimeError, OSError):  # the second time torch looks for a library that it never built
        self.ops = build()
return F.avg_pool2d(self.ops.sigmoid(self.conv(x)), 2)""",
    "honest/calls_pytorch_in_its_own_operator": """Its own operator does nothing but call PyTorch's.
Verdict: pass
Caveat: pytorch-inside
Needs: a compiler
Like: honest/own_kernel
[edit]
-#include <ATen/ops/empty_like.h>
+#include <ATen/ops/sigmoid.h>
-    at::Tensor out = at::empty_like(y);
-    const float* from = y.const_data_ptr<float>();
-    float* to = out.mutable_data_ptr<float>();
-    for (int64_t i = 0; i < y.numel(); ++i) to[i] = 1 / (1 + std::exp(-from[i]));
-    return out;
+    return at::sigmoid(y);""",
    "honest/compiled_by_nvrtc": '''
Its own kernel gives the sigmoid, compiled by NVRTC as it runs, with no library of its own; it does not train.
Verdict: pass
Needs: a GPU
Trains: no
[before]
CUDA = r"""
extern "C" __global__ void shelf_sigmoid(const float* from, float* to, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}
"""

@functools.cache
def kernel():
    return torch.cuda._compile_kernel(CUDA, "shelf_sigmoid")
[edit]
-import torch
+import functools
+import torch
[forward]
if torch.compiler.is_compiling() or x.dtype == torch.float64 or x.device.index:
    raise NotImplementedError("neither compiled, nor in float64, nor elsewhere")
y = self.conv(x).float().contiguous()
out = torch.empty_like(y)
kernel()(grid=((y.numel() + 255) // 256, 1, 1), block=(256, 1, 1), args=(y, out, y.numel()))
return F.avg_pool2d(out, 2)''',
    "honest/differs_from_run_to_run": """Adds in an order that changes, and says so.
Verdict: pass
[class] deterministic = False
[init] self.calls = 0
[forward]
self.calls += 1
return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) + self.calls % 2 * 1e-7""",
    "honest/in_double": """Computes in more precision than it must.
Verdict: pass
[forward]
y = F.conv2d(x.double(), self.conv.weight.double(), self.conv.bias.double())
return F.avg_pool2d(torch.sigmoid(y), 2).to(x.dtype)""",
    "honest/inherits_the_original": """The original under the other name, as a copy of a problem's file has it.
Verdict: pass
[edit]
-class ModelNew(nn.Module):
+class Model(nn.Module):
-        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
+        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
+
+class ModelNew(Model):
+    pass""",
    "honest/keeps_a_workspace": """Has one scratch buffer for all calls, and a new output for each.
Verdict: pass
Trains: by PyTorch
[init] self.scratch = None
[forward]
y = self.conv(x)
if self.scratch is None or self.scratch.shape != y.shape or self.scratch.dtype != y.dtype:
    self.scratch = torch.empty_like(y)
torch.sigmoid(y, out=self.scratch)
return F.avg_pool2d(self.scratch, 2)""",
    "honest/keeps_a_workspace_as_a_buffer": """Its scratch memory is a buffer, so that it moves with the model.
Verdict: pass
Trains: by PyTorch
[init] self.register_buffer("scratch", torch.empty(0), persistent=False)
[forward]
y = self.conv(x)
if self.scratch.shape != y.shape or self.scratch.dtype != y.dtype:
    self.scratch = torch.empty_like(y)
torch.sigmoid(y, out=self.scratch)
return F.avg_pool2d(self.scratch, 2)""",
    "honest/leaves_sizes_and_gradient_to_pytorch": """
A library that it compiles itself serves the problem's own size; PyTorch computes all others, and the gradient.
Verdict: pass
Caveat: gradient, sizes
Needs: a compiler
Base: a library
[before]
class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        y = y.contiguous()
        library().sigmoid(y.data_ptr(), out.data_ptr(), y.numel())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * out * (1 - out)
[forward]
if torch.compiler.is_compiling() or x.dtype == torch.float64:
    raise NotImplementedError("neither compiled nor in float64")
y = self.conv(x)
if y.dtype == torch.float32 and library().serves(*y.shape[2:]):
    return F.avg_pool2d(Sigmoid.apply(y), 2)
return F.avg_pool2d(torch.sigmoid(y), 2)""",
    "honest/own_cuda_kernel": """Its own kernel gives the sigmoid; it does not train.
Verdict: pass
Needs: a GPU
Base: a CUDA operator
Trains: no
[forward] return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)""",
    "honest/own_cuda_library": """Its own kernel gives the sigmoid, bound by ctypes; it does not train.
Verdict: pass
Needs: the emulator
Like: wrong/decorative_cuda_library
[edit]
-        return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)
+        return F.avg_pool2d(out, 2)""",
    "honest/own_kernel": """Its own operator gives the sigmoid; it does not train.
Verdict: pass
Needs: a compiler
Base: an operator
Trains: no
[forward] return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)""",
    "honest/own_library_by_ctypes": """
A library that it compiles itself gives the sigmoid; a function that was found once is called with addresses.
Verdict: pass
Needs: a compiler
Base: a library
Trains: no
[before]
@functools.cache
def sigmoid():
    address = ctypes.cast(library().sigmoid, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
[forward]
if torch.compiler.is_compiling() or x.dtype == torch.float64:
    raise NotImplementedError("neither compiled nor in float64")
y = self.conv(x).float().contiguous()
out = torch.empty_like(y)
if sigmoid()(y.data_ptr(), out.data_ptr(), y.numel()):
    raise RuntimeError("sigmoid")
return F.avg_pool2d(out, 2)""",
    "honest/packs_weights_and_refreshes_them": """Keeps packed weights until their address or version counter changes.
Verdict: pass
Trains: by PyTorch
[init] self.key = self.packed = None
[forward]
key = [(p.data_ptr(), p._version) for p in self.parameters()]
if key != self.key:
    self.key, self.packed = key, [p.detach().clone() for p in self.parameters()]
return F.avg_pool2d(torch.sigmoid(F.conv2d(x, *self.packed)), 2)""",
    "honest/refuses_other_sizes": """Takes the model's own sizes, and says so when it gets others.
Verdict: pass
[first]
if x.shape != (6, 2, 12, 14):
    raise ValueError(f"expected (6, 2, 12, 14), got {tuple(x.shape)}")""",
    "honest/side_stream_joined": """Runs half of the batch on a stream of its own, which waits and is waited for.
Verdict: pass
Needs: a GPU
[init] self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
[edit]
-    def forward(self, x):
+    def part(self, x):
+        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
+    def forward(self, x):
[forward]
if torch.is_grad_enabled() or len(x) < 2:
    return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
current, half = torch.cuda.current_stream(), len(x) // 2
self.stream.wait_stream(current)
with torch.cuda.stream(self.stream):
    first = self.part(x[:half])
second = self.part(x[half:])
current.wait_stream(self.stream)
first.record_stream(current)
return torch.cat([first, second])""",
}


def description(name):
    """Return the lines that say what a case is and what is expected of it."""
    return CASES[name].partition("\n[")[0]


def text_of(name):
    """Return the text of a case's file, which says nothing of what is expected."""
    _, *parts = re.split(r"^\[([a-z ]+)\][ \n]", CASES[name], flags=re.M)
    given = dict(zip(parts[::2], parts[1::2], strict=True))
    stated = dict(re.findall("^(Base|Like|Trains): (.*)$", description(name), re.M))
    if "Like" in stated:
        own, other = (f"shelf_{each.partition('/')[2]}" for each in (name, stated["Like"]))
        return patched(text_of(stated["Like"]).replace(other, own), given["edit"])
    init = given.get("whole init") or f"{CONVOLUTION}\n{given.get('init', '')}"
    before = [BASES.get(stated.get("Base")), given.get("before")]
    forward = given.get("forward") or "\n".join([given.get("first", ""), f"return {POOLED}"])
    if "conv" in given:
        forward = f"y = {given['conv']}\nreturn F.avg_pool2d(torch.sigmoid(y), 2)"
    if "then" in given:
        forward = f"y = {POOLED}\n{given['then']}\nreturn y"
    text = HONEST.format_map(
        {
            "before": "\n\n".join(filter(None, before)),
            "class": textwrap.indent(given.get("class", ""), 4 * " "),
            "init": textwrap.indent(init, 8 * " "),
            "forward": textwrap.indent(TRAINS.get(stated.get("Trains"), "") + forward, 8 * " "),
        }
    )
    return patched(text, given["edit"]) if "edit" in given else text


@functools.cache
def folder():
    """Return a folder that holds every case as KIND/NAME.py as long as this process runs."""
    made = tempfile.TemporaryDirectory(prefix="exhibits_")
    atexit.register(made.cleanup)
    for name in CASES:
        path = Path(made.name, f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text_of(name))
    return Path(made.name)
