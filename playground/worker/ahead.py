"""What a worker imports while nobody waits for it."""

# For a process that is never timed. Threads of OpenMP that wait for their share of the next loop keep a processor busy, and
# take it from the compilers and the other workers: a referee beside them needs three times its processor time.
UNTIMED = {"OMP_WAIT_POLICY": "PASSIVE"}

# What most workers import besides, in some 2 s of a processor: for shapes without values, and for torch.compile. More of
# torch._inductor asks CUDA and leaves a thread, after which nothing can be forked.
AHEAD = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor", "torch.distributed.fsdp")
AHEAD += ("torch._dynamo", "torch._functorch.aot_autograd", "networkx")
