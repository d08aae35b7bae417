"""Runs started by torchrun: ranks take tasks from a queue that they share, one at a time, until none is left."""

from playground.distributed.launch import current_rank, leave_group, take_own_gpu
from playground.distributed.ranks import RunFailed, RunLost, run

__all__ = ["RunFailed", "RunLost", "current_rank", "leave_group", "run", "take_own_gpu"]
