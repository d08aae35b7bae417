"""One file of a stranger's in one process: what it does there, a crash, a hang or a flag it sets, stays there."""

from .process import UNTIMED, Spare, WorkerFailure, WorkerProcess, kill_all, owner, spent, standstill

__all__ = ["UNTIMED", "Spare", "WorkerFailure", "WorkerProcess", "kill_all", "owner", "spent", "standstill"]
