"""The least that a model must move and compute, and the time that takes at this machine's measured ceilings.

Bytes, of a forward pass: every input, parameter and output once. Of a training step also: a gradient of every output read and
one of every parameter written, and one of every floating-point input where it is wanted. Everything once: how much of it must
be read again depends on what the chip can keep.

FLOPs (two a multiply-add) are those of the cheapest way to compute the model exactly that the project's variants use, stated
here and nowhere else:

    conv_pool_sigmoid_sum           pooling in front of the weights: one product of inner size C k k a pooled position, and as
                                    many for the gradient of the weights, and as many for that of the input
    conv3d_div_max_gap_bias_sum     Winograd's F(2,k) in each direction: (k+1)/2 products an output instead of k, 64 instead of
                                    216 for k = 3 and 8 outputs; its transforms, which only add, are not counted. Gradients
                                    pass through one place of each pooling window, directly
    alexnet_conv1                   a convolution of stride s is s x s convolutions of every s-th value, each by Winograd's
                                    F(2,n): 225 products for 2 x 2 outputs instead of 484 for k = 11 and s = 4, also backward
    any other                       its convolutions and matrix products as written, forward and backward

They are taken at the fastest rate that gives the precision: TF32's 11 bits come from one product of scaled fp16 values,
float32's from three of either (3xTF32). A variant that did less would come out at more than 100%.
"""

from playground.record import Bound, Ceilings, Work

POSSIBLE = 0.7  # of the time that bytes take at the measured rate: anything below is impossible
CPU_CACHES = 1 << 29  # bytes: more than any CPU's


def floor(work: Work, ceilings: Ceilings, precision: str | float | None) -> tuple[float, Bound]:
    """Return (the larger of the two times in milliseconds, "memory" or "compute") at record.Ceilings and a precision."""
    memory = work.bytes / max(ceilings.read_bytes_per_second, ceilings.copy_bytes_per_second) * 1e3
    fast = max(ceilings.tf32_flops or 0, ceilings.fp16_flops or 0)  # 11 bits of each factor, sums in float32
    rate = max(ceilings.fp32_flops, fast / 3 if precision == "fp32" else fast)
    compute = work.flops / rate * 1e3
    return max(memory, compute), "memory" if memory >= compute else "compute"


def impossible(milliseconds: float, count: float, rate: float, on_cpu: bool) -> str | None:
    """Return what is wrong with a time in which `count` bytes cannot have moved at `rate` bytes a second; None if nothing."""
    beyond = max(0, count - CPU_CACHES) if on_cpu else count
    least = POSSIBLE * beyond / rate * 1e3
    if milliseconds >= least:
        return None
    takes = f"the {rate / 1e9:.3g} GB/s measured here takes {beyond / rate * 1e3:.3g} ms"
    return f"{milliseconds:.3g} ms a call, which is impossible: reading and writing {beyond / 1e6:.3g} MB at {takes}"
