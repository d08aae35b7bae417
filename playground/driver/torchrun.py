"""What torchrun tells each process it starts."""

import functools
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore

ANSWER_WITHIN = timedelta(seconds=60)  # of the store, which answers at once unless its host is gone
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """One process of several. `host` numbers the hosts; `agent_has_store` says that torchrun itself keeps the TCPStore."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    address: str
    port: int
    agent_has_store: bool
    run_id: str
    restarts: int

    def connect(self, serve=False):
        """A connection of its own to the store that all ranks share; with `serve` this process keeps the store if it must."""
        serve = serve and not self.agent_has_store
        store = TCPStore(self.address, self.port, is_master=serve, wait_for_workers=False, timeout=ANSWER_WITHIN)
        return PrefixStore(f"playground/{self.restarts}", store)

    def __str__(self):
        return f"rank {self.rank}"


@functools.cache
def current_rank():
    """The Rank of this process; None unless torchrun started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Rank(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        host=int(os.environ["GROUP_RANK"]),
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        agent_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=os.environ["TORCHELASTIC_RUN_ID"],
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def is_first(rank):
    """Whether a Rank, or the only process there is (None), is the one that collects the results and writes files."""
    return rank is None or rank.rank == 0


def leave_group():
    """Hide from what this process starts that torchrun is behind it: what is judged is to see an ordinary process.

    `current_rank` still knows.

    torchrun also sets OMP_NUM_THREADS to 1 for every process where the user did not set it. That would slow down all that is
    timed on a CPU, so 1 is taken back: such timings have the host to themselves.
    """
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(("TORCHELASTIC_", "ROLE_", "GROUP_WORLD")):
            del os.environ[name]
    if os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]


def take_own_gpu(rank):
    """Let this process and its children see one GPU, the rank's own. Returns why that is impossible, else None.

    Before CUDA is initialised. Where there is no GPU nothing is done.
    """
    visible = torch.cuda.device_count()
    if visible == 0:
        return None
    if rank.local_world_size > visible:
        gpus = "1 GPU" if visible == 1 else f"{visible} GPUs"
        return (
            f"{rank.local_world_size} ranks on a host with {gpus}, and each needs one of its own: start torchrun with "
            f"--nproc-per-node={visible}"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = names.split(",")[rank.local_rank] if names else str(rank.local_rank)
    os.environ["CUDA_VISIBLE_DEVICES"] = own.strip()
    return None
