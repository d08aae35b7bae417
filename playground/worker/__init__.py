"""One untrusted file in one process: what it does there, a crash, a hang or a flag it sets, stays there."""

from .ahead import UNTIMED
from .process import WorkerFailure, WorkerProcess, kill_all, owner, pause_others, prepare, spent, submit

__all__ = ["UNTIMED", "WorkerFailure", "WorkerProcess", "kill_all", "owner", "pause_others", "prepare", "spent", "submit"]
