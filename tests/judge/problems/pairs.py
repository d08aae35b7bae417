"""Strangers' problems in KernelBench's format, for each a right file and a wrong one.

A text holds the body of Model, what get_inputs returns, with the sizes below it, then what is right and what is wrong: the
body of ModelNew, whose __init__ is Model's where there is none. A wrong one may be the right one's lines with others in the
place of some: after `-` the old, after `+` the new. "Verdict: fail: <regular expression of the reason>" is what is expected of
it. The pages name the folder beside this.
"""

import ast
import atexit
import functools
import re
import tempfile
import textwrap
from pathlib import Path

FILES = "problem.py", "right.py", "wrong.py"

IMPORTS = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"

PROBLEMS = {
    "causal_attention": """Attention in which no position sees a later one; three inputs.
[problem]
def forward(self, query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)
[inputs] torch.rand(batch_size, heads, length, features) for _ in range(3)
batch_size = 2
heads, length, features = 3, 10, 8
[right] Scores, mask, softmax and sum by hand.
def forward(self, query, key, value):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ value
[wrong] The mask is off by one: each position sees the next one, too.
Verdict: fail: the output is off by
-    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
+    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(2)""",
    "cholesky": """Batches of positive definite matrices, of which others have no decomposition.
[problem]
def forward(self, x):
    return torch.linalg.cholesky(x)
[inputs]
batch_size = 6
size = 16
def get_inputs():
    x = torch.randn(batch_size, size, size)
    return [x @ x.mT + torch.eye(size)]
[right] The decomposition of two blocks on the diagonal, the second after what the first leaves of it.
def forward(self, x):
    x = (x + x.mT) / 2  # so that its gradient is symmetric, too
    half = x.shape[-1] // 2
    first = torch.linalg.cholesky(x[..., :half, :half])
    below = torch.linalg.solve_triangular(first, x[..., half:, :half].mT, upper=False).mT
    second = torch.linalg.cholesky(x[..., half:, half:] - below @ below.mT)
    upper = torch.zeros_like(below.mT)
    return torch.cat([torch.cat([first, upper], -1), torch.cat([below, second], -1)], -2)
[wrong] As right.py, but the second block does not lose what the first explains.
Verdict: fail: the output is off by
-    second = torch.linalg.cholesky(x[..., half:, half:] - below @ below.mT)
+    second = torch.linalg.cholesky(x[..., half:, half:])""",
    "conv1d_dilated": """A one-dimensional convolution with stride and dilation.
[problem]
def __init__(self, in_channels, out_channels, kernel_size, stride, dilation):
    self.conv1d = nn.Conv1d(in_channels, out_channels, kernel_size, stride=stride, dilation=dilation)
def forward(self, x):
    return self.conv1d(x)
[inputs] torch.rand(batch_size, in_channels, length)
batch_size = 4
in_channels, out_channels, kernel_size, stride, dilation = 3, 5, 3, 2, 4
length = 40
[right] One product for each element of the kernel.
def __init__(self, in_channels, out_channels, kernel_size, stride, dilation):
    self.conv1d = nn.Conv1d(in_channels, out_channels, kernel_size, stride=stride, dilation=dilation)
    self.stride, self.dilation = stride, dilation
def forward(self, x):
    weight = self.conv1d.weight
    last = x.shape[2] - self.dilation * (weight.shape[2] - 1)
    taps = [x[:, :, k * self.dilation :][:, :, : last : self.stride] for k in range(weight.shape[2])]
    return sum(torch.einsum("oc,ncl->nol", weight[:, :, k], tap) for k, tap in enumerate(taps)) + self.conv1d.bias[:, None]
[wrong] Takes the kernel without the gaps, in an output of the right length.
Verdict: fail: the output is off by
-    weight = self.conv1d.weight
-    last = x.shape[2] - self.dilation * (weight.shape[2] - 1)
-    taps = [x[:, :, k * self.dilation :][:, :, : last : self.stride] for k in range(weight.shape[2])]
-    return sum(torch.einsum("oc,ncl->nol", weight[:, :, k], tap) for k, tap in enumerate(taps)) + self.conv1d.bias[:, None]
+    length = (x.shape[2] - self.dilation * (self.conv1d.weight.shape[2] - 1) - 1) // self.stride + 1
+    y = F.conv1d(x, self.conv1d.weight, self.conv1d.bias, stride=self.stride)
+    return y[:, :, :length]""",
    "conv_batch_norm_relu": """
A convolution whose bias a batch norm takes away again: the gradient of that bias is zero in mathematics.
[problem]
def __init__(self, in_channels, out_channels, kernel_size):
    self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
    self.norm = nn.BatchNorm2d(out_channels)
def forward(self, x):
    return torch.relu(self.norm(self.conv(x)))
[inputs] torch.rand(batch_size, in_channels, height, width)
batch_size = 5
in_channels, out_channels, kernel_size = 3, 4, 3
height, width = 11, 10
[right] Statistics by hand; the running ones are kept up to date.
def forward(self, x):
    y = self.conv(x)
    norm = self.norm
    if not self.training:
        return torch.relu(norm(y))
    variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
    with torch.no_grad():
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * y[:, 0].numel() / (y[:, 0].numel() - 1), norm.momentum)
    scale = norm.weight * (variance + norm.eps).rsqrt()
    y = (y - mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]
    return torch.relu(y)
[wrong] A backward that takes mean and variance for constants: only the gradients are wrong.
Verdict: forward only: the gradient of conv.(weight|bias) is off by
-    variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
+    variance, mean = torch.var_mean(y.detach(), (0, 2, 3), correction=0)""",
    "conv_transpose3d": """A transposed convolution in three dimensions.
[problem]
def __init__(self, in_channels, out_channels, kernel_size):
    self.conv = nn.ConvTranspose3d(in_channels, out_channels, kernel_size)
def forward(self, x):
    return self.conv(x)
[inputs] torch.rand(batch_size, in_channels, depth, height, width)
batch_size = 2
in_channels, out_channels, kernel_size = 3, 4, 3
depth, height, width = 4, 6, 5
[right] A convolution of the padded input with the flipped kernel.
def forward(self, x):
    weight = self.conv.weight
    return F.conv3d(x, weight.flip(2, 3, 4).transpose(0, 1), self.conv.bias, padding=weight.shape[2] - 1)
[wrong] Forgets to flip the kernel.
Verdict: fail: the output is off by
-    return F.conv3d(x, weight.flip(2, 3, 4).transpose(0, 1), self.conv.bias, padding=weight.shape[2] - 1)
+    return F.conv3d(x, weight.transpose(0, 1), self.conv.bias, padding=weight.shape[2] - 1)""",
    "cross_entropy": """A loss of one number, with class indices as its second input.
[problem]
def forward(self, predictions, targets):
    return F.cross_entropy(predictions, targets)
[inputs] torch.rand(batch_size, classes), torch.randint(0, classes, (batch_size,))
batch_size = 37
classes = 10
[right] Logarithm of the sum of exponentials, minus the target's score.
def forward(self, predictions, targets):
    chosen = predictions.gather(1, targets[:, None]).squeeze(1)
    return (predictions.logsumexp(1) - chosen).mean()
[wrong] Leaves out the samples that do not fill a block of eight.
Verdict: fail: the output is off by
-def forward(self, predictions, targets):
+def forward(self, predictions, targets):
+    whole = max(1, predictions.shape[0] // 8 * 8)
+    predictions, targets = predictions[:whole], targets[:whole]""",
    "cumulative_product": """A cumulative product, which soon overflows where values are larger than the problem's.
[problem]
def forward(self, x):
    return torch.cumprod(x, dim=1)
[inputs] 0.5 + torch.rand(batch_size, length)
batch_size, length = 8, 40
[right] By logarithms' elder sister: each product from the one before.
def forward(self, x):
    columns = list(x.unbind(1))
    for i in range(1, len(columns)):
        columns[i] = columns[i - 1] * columns[i]
    return torch.stack(columns, 1)
[wrong] Starts with the second factor.
Verdict: fail: the output is off by
def forward(self, x):
    return torch.cumprod(torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1), dim=1)""",
    "divergence": """The Kullback-Leibler divergence of two distributions, which is none of anything else.
[problem]
def forward(self, predictions, targets):
    return F.kl_div(torch.log(predictions), targets, reduction="batchmean")
[inputs] torch.rand(batch_size, classes).softmax(-1), torch.randn(batch_size, classes).softmax(-1)
batch_size, classes = 16, 32
[right] The sum of the targets times the difference of the logarithms.
def forward(self, predictions, targets):
    return (torch.special.xlogy(targets, targets) - targets * torch.log(predictions)).sum() / predictions.shape[0]
[wrong] Divides by all elements instead of by the samples.
Verdict: fail: the output is off by
def forward(self, predictions, targets):
    return (torch.special.xlogy(targets, targets) - targets * torch.log(predictions)).mean()""",
    "dropout": """Dropout in training mode, as a model has it unless told otherwise: each call draws which values are kept.
[problem]
def __init__(self, features, hidden, share):
    self.wide = nn.Linear(features, hidden)
    self.dropout = nn.Dropout(share)
    self.narrow = nn.Linear(hidden, features)
def forward(self, x):
    return x + self.narrow(self.dropout(torch.relu(self.wide(x))))
[inputs] torch.rand(batch_size, features)
batch_size = 16
features = 12
hidden = 40
share = 0.25
[right] Draws what PyTorch draws on a CPU, and scales what is kept.
def __init__(self, features, hidden, share):
    self.wide = nn.Linear(features, hidden)
    self.narrow = nn.Linear(hidden, features)
    self.kept = 1 - share
def forward(self, x):
    hidden = self.wide(x).clamp_min(0)
    if not self.training:
        return x + self.narrow(hidden)
    keeps = torch.bernoulli(torch.empty_like(hidden), self.kept)
    return x + self.narrow(hidden * (keeps / self.kept))
[wrong] Keeps everything, as in inference.
Verdict: fail: off by
-    keeps = torch.bernoulli(torch.empty_like(hidden), self.kept)
-    return x + self.narrow(hidden * (keeps / self.kept))
+    return x + self.narrow(hidden)""",
    "embedding_mean": """Word vectors, averaged over the words that a mask leaves: integers and truth values as inputs.
[problem]
def __init__(self, words, features):
    self.table = nn.Embedding(words, features)
def forward(self, indices, mask):
    vectors = self.table(indices) * mask[:, :, None]
    return vectors.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
[inputs] torch.randint(0, words, (batch_size, length)), torch.rand(batch_size, length) < 0.7
batch_size = 6
length = 9
words, features = 30, 8
[right] As a product with a matrix of counts.
def forward(self, indices, mask):
    counts = self.table.weight.new_zeros(indices.shape[0], self.table.num_embeddings)
    counts = counts.scatter_add(1, indices, mask.to(counts.dtype))
    return counts @ self.table.weight / counts.sum(1, keepdim=True).clamp(min=1)
[wrong] Divides by the length instead of the number of words that are left.
Verdict: fail: the output is off by
def forward(self, indices, mask):
    return (self.table(indices) * mask[:, :, None]).mean(1)""",
    "gru": """A recurrent layer that gives every step and the last state: two outputs, and two inputs.
[problem]
def __init__(self, input_size, hidden_size):
    self.gru = nn.GRU(input_size, hidden_size)
def forward(self, x, h0):
    return self.gru(x, h0)
[inputs] torch.rand(length, batch_size, input_size), torch.rand(1, batch_size, hidden_size)
length = 3
batch_size = 3
input_size, hidden_size = 4, 5
[right] Step by step.
def forward(self, x, h0):
    layer, h, steps = self.gru, h0[0], []
    for step in x:
        own = (step @ layer.weight_ih_l0.T + layer.bias_ih_l0).chunk(3, 1)
        old = (h @ layer.weight_hh_l0.T + layer.bias_hh_l0).chunk(3, 1)
        reset, update = torch.sigmoid(own[0] + old[0]), torch.sigmoid(own[1] + old[1])
        h = (1 - update) * torch.tanh(own[2] + reset * old[2]) + update * h
        steps.append(h)
    return torch.stack(steps), h[None]
[wrong] Resets the state before the product, as in the first paper on it, where PyTorch resets the product.
Verdict: fail: output 0 is off by
-        old = (h @ layer.weight_hh_l0.T + layer.bias_hh_l0).chunk(3, 1)
-        reset, update = torch.sigmoid(own[0] + old[0]), torch.sigmoid(own[1] + old[1])
-        h = (1 - update) * torch.tanh(own[2] + reset * old[2]) + update * h
+        weights, biases = layer.weight_hh_l0.chunk(3), layer.bias_hh_l0.chunk(3)
+        reset = torch.sigmoid(own[0] + h @ weights[0].T + biases[0])
+        update = torch.sigmoid(own[1] + h @ weights[1].T + biases[1])
+        h = (1 - update) * torch.tanh(own[2] + (reset * h) @ weights[2].T + biases[2]) + update * h""",
    "layer_norm": """A norm over the last two dimensions.
[problem]
def __init__(self, normalized_shape):
    self.norm = nn.LayerNorm(normalized_shape)
def forward(self, x):
    return self.norm(x)
[inputs] torch.rand(batch_size, channels, height, width)
batch_size = 4
channels = 3
height, width = 12, 15
def get_init_inputs():
    return [(height, width)]
[right] With mean and variance by hand.
def forward(self, x):
    centred = x - x.mean((2, 3), keepdim=True)
    variance = centred.square().mean((2, 3), keepdim=True)
    return centred * (variance + self.norm.eps).rsqrt() * self.norm.weight + self.norm.bias
[wrong] Divides the variance by n - 1.
Verdict: fail: the output is off by
-    variance = centred.square().mean((2, 3), keepdim=True)
+    variance = x.var((2, 3), correction=1, keepdim=True)""",
    "linear_batch_norm": """
A batch norm behind a linear layer: in eval mode it uses the statistics that it has kept in training.
[problem]
def __init__(self, in_features, out_features):
    self.linear = nn.Linear(in_features, out_features)
    self.norm = norm = nn.BatchNorm1d(out_features)
    self.normed = lambda x: norm(self.linear(x))  # a copy's function has to use the copy's layers
def forward(self, x):
    return self.normed(x)
[inputs] torch.rand(batch_size, in_features)
batch_size = 12
in_features, out_features = 9, 7
[right] Statistics by hand, which are kept for eval mode.
def __init__(self, in_features, out_features):
    self.linear = nn.Linear(in_features, out_features)
    self.norm = nn.BatchNorm1d(out_features)
def forward(self, x):
    y, norm = self.linear(x), self.norm
    variance, mean = norm.running_var, norm.running_mean
    if self.training:
        variance, mean = torch.var_mean(y, 0, correction=0)
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * len(y) / (len(y) - 1), norm.momentum)
    return (y - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
[wrong] Statistics by hand, which nothing keeps for eval mode.
Verdict: forward only: in eval mode: the output is off
-        with torch.no_grad():
-            norm.num_batches_tracked += 1
-            norm.running_mean.lerp_(mean, norm.momentum)
-            norm.running_var.lerp_(variance * len(y) / (len(y) - 1), norm.momentum)""",
    "lstm": """A recurrent layer and a linear one on its last step.
[problem]
def __init__(self, input_size, hidden_size, output_size):
    self.lstm = nn.LSTM(input_size, hidden_size, batch_first=True)
    self.head = nn.Linear(hidden_size, output_size)
def forward(self, x):
    steps, _ = self.lstm(x)
    return self.head(steps[:, -1])
[inputs] torch.rand(batch_size, length, input_size)
batch_size = 3
length = 3
input_size, hidden_size, output_size = 5, 6, 4
[right] Step by step.
def forward(self, x):
    layer = self.lstm
    h = c = x.new_zeros(x.shape[0], layer.hidden_size)
    for step in x.unbind(1):
        gates = step @ layer.weight_ih_l0.T + layer.bias_ih_l0 + h @ layer.weight_hh_l0.T + layer.bias_hh_l0
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    return self.head(h)
[wrong] Takes the gates in the order of another library: input, cell, forget, output.
Verdict: fail: the output is off by
-        i, f, g, o = gates.chunk(4, 1)
+        i, g, f, o = gates.chunk(4, 1)""",
    "masked_cumsum": """A running sum over the elements that a mask leaves.
[problem]
def forward(self, x, mask):
    return torch.cumsum(x * mask, dim=1)
[inputs] torch.rand(batch_size, length), torch.randint(0, 2, (batch_size, length)).bool()
batch_size = 4
length = 90
[right] A product with a triangle of ones.
def forward(self, x, mask):
    triangle = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu()
    return (x * mask) @ triangle
[wrong] Blocks of 32 are summed, and the carry from the block before the last is lost.
Verdict: fail: the output is off by
def forward(self, x, mask):
    blocks = (x * mask).split(32, 1)
    carries = [0, *(block.sum(1, keepdim=True) for block in blocks)]
    return torch.cat([block.cumsum(1) + carry for block, carry in zip(blocks, carries, strict=False)], 1)""",
    "matmul": """A product of two matrices, both of them inputs.
[problem]
def forward(self, a, b):
    return torch.matmul(a, b)
[inputs] torch.rand(rows, inner), torch.rand(inner, columns)
rows, inner, columns = 24, 130, 20
[right] The inner sum in blocks of 32.
def forward(self, a, b):
    return sum(left @ right for left, right in zip(a.split(32, 1), b.split(32, 0), strict=True))
[wrong] Computes in bf16 without a word.
Verdict: fail: the output is off by .*bf16
def forward(self, a, b):
    return (a.bfloat16().float() @ b.bfloat16().float()).contiguous()""",
    "max_with_index": """Two outputs of different types, and nothing to learn.
[problem]
def __init__(self, dim):
    self.dim = dim
def forward(self, x):
    values, indices = torch.max(x, dim=self.dim)
    return values, indices
[inputs] torch.rand(batch_size, height, width)
batch_size = 5
height, width = 12, 14
dim = 1
[right] By sorting.
def forward(self, x):
    ordered, indices = x.sort(dim=self.dim, descending=True, stable=True)
    return ordered.select(self.dim, 0), indices.select(self.dim, 0)
[wrong] The indices count from the other end.
Verdict: fail: output 1 is off by
def forward(self, x):
    values, indices = torch.max(x, dim=self.dim)
    return values, x.shape[self.dim] - 1 - indices""",
    "running_mean": """
A running mean in float64 and the number of samples in it, both of them inputs that each call brings up to date in place.
[problem]
def forward(self, mean, count, x):
    count.add_(1)
    mean.add_((x - mean) / count[:, None])
    return mean * count[:, None]
[inputs]
batch_size, features = 6, 33
def get_inputs():
    mean = torch.rand(batch_size, features, dtype=torch.float64)
    return [mean, torch.randint(1, 9, (batch_size,)), torch.rand(batch_size, features)]
[right] In another order: the sum of all samples so far grows by the new one.
def forward(self, mean, count, x):
    total = mean * count[:, None] + x
    count += 1
    mean.copy_(total / count[:, None])
    return total
[wrong] Counts the new sample after it has divided by the number.
Verdict: fail: the output is off
def forward(self, mean, count, x):
    mean.add_((x - mean) / count[:, None])
    count.add_(1)
    return mean * count[:, None]""",
    "seldom_positive": """A ReLU that is zero nearly everywhere: on most small inputs an old result is right, and so is none.
[problem]
def __init__(self, in_features, out_features):
    self.linear = nn.Linear(in_features, out_features)
def forward(self, x):
    return torch.relu((self.linear(x) - 1.7) * 1.5)
[inputs] torch.randn(batch_size, in_features)
batch_size, in_features, out_features = 128, 10, 5
[right] Honest.
def forward(self, x):
    return 1.5 * torch.relu(F.linear(x, self.linear.weight, self.linear.bias - 1.7))
[wrong] Takes an input in the same memory for the same input.
Verdict: fail: new content in the same memory: one element was changed, and the result is the old one
def __init__(self, in_features, out_features):
    self.linear = nn.Linear(in_features, out_features)
    self.seen = self.kept = None
def forward(self, x):
    if torch.is_grad_enabled():
        return torch.relu((self.linear(x) - 1.7) * 1.5)
    if self.seen is None or self.seen.data_ptr() != x.data_ptr():
        self.seen, self.kept = x, torch.relu((self.linear(x) - 1.7) * 1.5)
    return self.kept.clone()""",
    "softmax": """A softmax of each row, without parameters.
[problem]
def forward(self, x):
    return torch.softmax(x, dim=1)
[inputs] torch.randn(batch_size, dim)
batch_size, dim = 5, 192
[right] In two passes, the first of which goes through a row in blocks; it knows that a block may be all minus infinity.
def forward(self, x):
    largest = torch.full_like(x[:, :1], -torch.inf)
    total = torch.zeros_like(largest)
    for block in x.split(32, 1):
        larger = torch.maximum(largest, block.amax(1, keepdim=True))
        shift = torch.where(larger == -torch.inf, 0, larger)
        total = total * torch.exp(largest - shift) + torch.exp(block - shift).sum(1, keepdim=True)
        largest = larger
    return torch.exp(x - largest) / total
[wrong] In two passes, the first of which goes through a row in blocks: minus infinity less minus infinity is NaN.
Verdict: forward only: with a NaN, or minus infinity, in a sample: the output is NaN or infinite in 192 elements
-        shift = torch.where(larger == -torch.inf, 0, larger)
-        total = total * torch.exp(largest - shift) + torch.exp(block - shift).sum(1, keepdim=True)
+        total = total * torch.exp(largest - larger) + torch.exp(block - larger).sum(1, keepdim=True)""",
    "spectrum": """Complex outputs: a filter, then the spectrum of each channel, in a dict beside its largest magnitude.
[problem]
def __init__(self, channels, taps):
    self.filter = nn.Conv1d(1, channels, taps)
def forward(self, x):
    spectrum = torch.fft.rfft(self.filter(x))
    return {"spectrum": spectrum, "peak": spectrum.abs().amax(-1)}
[inputs] torch.rand(batch_size, 1, length)
batch_size = 3
length = 22
channels, taps = 4, 3
[right] The transform as a product with cosines and sines; the entries of the dict in another order.
def forward(self, x):
    y = self.filter(x)
    n = y.shape[-1]
    turns = torch.outer(torch.arange(n), torch.arange(n // 2 + 1)) % n
    angles = turns.to(y) * (2 * torch.pi / n)
    spectrum = torch.complex(y @ angles.cos(), -(y @ angles.sin()))
    return {"peak": spectrum.abs().amax(-1), "spectrum": spectrum}
[wrong] The other sign in the exponent: the conjugate, whose real part and magnitude are right.
Verdict: fail: output 1 is off by
def forward(self, x):
    spectrum = torch.fft.rfft(self.filter(x)).conj_physical()
    return {"spectrum": spectrum, "peak": spectrum.abs().amax(-1)}""",
    "triangular_product": """The product of two lower triangular matrices.
[problem]
def forward(self, a, b):
    return torch.tril(torch.matmul(a, b))
[inputs] torch.tril(torch.rand(n, n)), torch.tril(torch.rand(n, n))
n = 24
[right] Adds only what is not zero: of anything but triangular matrices it would be no product.
def forward(self, a, b):
    rows = [a[i : i + 1, : i + 1] @ b[: i + 1] for i in range(a.shape[0])]
    return torch.tril(torch.cat(rows))
[wrong] Leaves the diagonal of the first matrix out.
Verdict: fail: the output is off by
def forward(self, a, b):
    return torch.tril(torch.tril(a, -1) @ b)""",
}


FOLDERS = {path.parent.name: path.parent for path in Path(__file__).parent.glob("*/problem.py")}
NAMES = sorted([*PROBLEMS, *FOLDERS])


@functools.cache
def folder():
    """Return a folder that holds NAME/problem.py, right.py and wrong.py of all as long as this process runs."""
    made = tempfile.TemporaryDirectory(prefix="problems_")
    atexit.register(made.cleanup)
    for name in NAMES:
        Path(made.name, name).mkdir()
        for file, text in zip(FILES, texts(name), strict=True):
            Path(made.name, name, file).write_text(text)
    return Path(made.name)


def expected(name):
    """Return the verdict on the wrong file and the pattern of its reason."""
    text = PROBLEMS[name] if name in PROBLEMS else texts(name)[2]
    return re.search("^Verdict: ([a-z ]+): (.*)$", text, re.M).groups()


def texts(name):
    """Return those of FILES."""
    if name in FOLDERS:
        return [(FOLDERS[name] / file).read_text() for file in FILES]
    parts = re.split(r"^\[(?:problem|inputs|right|wrong)\](.*)\n", PROBLEMS[name], flags=re.M)
    _, _, model, inputs, sizes, _, right, _, wrong = parts
    wrong = wrong.partition("\n")[2]  # without the verdict
    if wrong.startswith("-"):
        wrong = patched(right, wrong)
    return [problem(model, inputs, sizes), *(IMPORTS + solution(model, body) for body in (right, wrong))]


def problem(model, inputs, sizes):
    """Return the text of a problem."""
    text = of_class("Model", model) + "\n" + sizes
    return whole(text + (f"\ndef get_inputs():\n    return [{inputs.strip()}]\n" if inputs else ""))


def whole(problem):
    """Return a problem's text with what it may leave out: the imports, and a get_init_inputs that gives what __init__ names."""
    taken = re.search(r"def __init__\(self, (.*)\):", problem)
    init = f"\ndef get_init_inputs():\n    return [{taken[1] if taken else ''}]\n"
    return IMPORTS + problem + ("" if "def get_init_inputs" in problem else init)


def of_class(name, body):
    """Return the text of a module's class with its body, whose __init__ calls the module's first."""
    body = re.sub(r"^def __init__.*\n", r"\g<0>    super().__init__()\n", body, flags=re.M)
    return f"class {name}(nn.Module):\n" + textwrap.indent(body, 4 * " ")


def patched(text, patch):
    """Return the text with the lines that begin with `-` in the patch replaced by those that follow with `+`."""
    assert all(line[0] in "-+" for line in patch.splitlines()), patch
    for change in re.findall(r"(?:^-.*\n?)+(?:^\+.*\n?)*", patch, re.M):
        old, new = ("".join(line[1:] + "\n" for line in change.splitlines() if line[0] == sign) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def solution(model, body):
    """Return the text of ModelNew with this body."""
    own = [part for part in ast.parse(model).body if part.name == "__init__" and "def __init__" not in body]
    return of_class("ModelNew", "\n".join([*map(ast.unparse, own), body]))
