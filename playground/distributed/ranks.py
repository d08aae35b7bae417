"""What a rank does: a process of its own works, and the one that torchrun started watches over it.

torchrun ends a run as soon as one of its processes fails. So the process that it knows does nothing that could fail: it starts
the worker of the rank, says when that has died, and waits for the others. Rank 0's also collects what comes of the tasks.
"""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch

from playground.distributed.board import ATTEMPTS, PAUSE, Board, work_off
from playground.judging import give
from playground.machine import environment
from playground.report.progress import Progress
from playground.runner import Runner, blank_result
from playground.worker import kill_all

RUN = "run"
COLLECTOR = "collector"  # gives signs of life under this name
SECONDS_BETWEEN_SIGNS = 1.0
FAREWELL_SECONDS = 2.0  # for the other ranks to see that the run is over
RANK_ENDED = "each rank that took it ended before it was done ({attempts} of them)"


class Collected:
    """What rank 0 has at the end: `results` in the tasks' order, `ranks` (what each said of itself) and those `lost`."""

    def __init__(self, results, ranks, lost):
        self.results = results
        self.ranks = ranks
        self.lost = lost


def run(rank, tasks, options, keep):
    """Work off the tasks together with the other ranks. Returns Collected on rank 0, None elsewhere.

    `keep(results)` is called on rank 0 with all results so far whenever there is a new one. Interrupted, rank 0 returns what
    it has.
    """
    board = Board(rank.connect(serve=rank.rank == 0), rank.rank)
    engine = multiprocessing.get_context("spawn").Process(target=_work, args=(rank, tasks, options), name=str(rank))
    engine.start()
    try:
        return _collect(rank, board, engine, tasks, keep) if rank.rank == 0 else _attend(rank, board, engine)
    finally:
        engine.terminate()
        engine.join()


def _attend(rank, board, engine):
    """Until rank 0 says that the run is over."""
    collector = Board(rank.connect(), COLLECTOR)
    while not board.announced("over") and not collector.is_lost(COLLECTOR):
        _watch(rank, board, engine)
        time.sleep(PAUSE)


def _watch(rank, board, engine):
    if not engine.is_alive() and engine.exitcode != 0 and not board.is_lost(rank.rank):
        board.declare_lost(rank.rank)
        print(f"{rank} ended ({_cause(engine.exitcode)}); the others go on", file=sys.stderr)


def _cause(status):
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _collect(rank, board, engine, tasks, keep):
    life = Board(rank.connect(), COLLECTOR)
    everybody = range(rank.world_size)
    results = {}
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        while len(results) < len(tasks):
            life.sign_of_life()
            _watch(rank, board, engine)
            lost = [each for each in everybody if board.is_lost(each)]
            if _gather(board, tasks, results):
                keep(_ordered(tasks, results))
            if len(lost) == rank.world_size:
                break
            time.sleep(PAUSE)
    _gather(board, tasks, results)
    board.announce("over", True)
    lost = [each for each in everybody if board.is_lost(each)]
    ranks = [board.announced(f"rank/{each}") for each in everybody]
    time.sleep(FAREWELL_SECONDS if rank.world_size > 1 else 0)
    return Collected(_ordered(tasks, results), [each for each in ranks if each], lost)


def _gather(board, tasks, results):
    """Take over what is finished. Returns whether there was anything new."""
    missing = [item for item in range(len(tasks)) if item not in results]
    new = sorted(set(missing) - set(board.unfinished(RUN, missing)))
    for item in new:
        results[item] = board.outcome(RUN, item) or _abandoned(tasks[item])
    return bool(new)


def _ordered(tasks, results):
    return [results[item] for item in range(len(tasks)) if item in results]


def _abandoned(task):
    result = blank_result(task)
    give(result, "error", RANK_ENDED.format(attempts=ATTEMPTS))
    return result


# ---- in the rank's worker


def _work(rank, tasks, options):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process above decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_live, args=(rank,), daemon=True).start()
    try:
        with Progress(prefix=f"[{rank}] ") as progress:
            _Worker(rank, tasks, options, progress).work()
    finally:
        kill_all()


def _end_with_parent():
    wait([multiprocessing.parent_process().sentinel])
    kill_all()
    os._exit(1)


def _live(rank):
    board = Board(rank.connect(), rank.rank)
    while True:
        board.sign_of_life()
        time.sleep(SECONDS_BETWEEN_SIGNS)


class _Worker:
    """Builds its share of what its host needs, then judges and times what nobody else has taken."""

    def __init__(self, rank, tasks, options, progress):
        self._rank = rank
        self._tasks = tasks
        self._board = Board(rank.connect(), rank.rank)
        self._runner = Runner(options, progress)
        self._builds = f"build on host {rank.host}"
        self._group = None

    def work(self):
        seeds = {"seed": self._runner.seed, "probe_seed": self._runner.probe_seed}
        self._board.announce(f"rank/{self._rank.rank}", self._device(self._tasks[0].place) | seeds)
        items = range(len(self._tasks))
        try:
            work_off(self._board, self._builds, items, self._build)
            work_off(self._board, RUN, items, self._run, self._preferred)
        finally:
            self._runner.close()

    def _device(self, place):
        """Of a row, and of this rank."""
        name = torch.cuda.get_device_name() if place == "cuda" else environment.cpu_name()
        return {"rank": self._rank.rank, "host": self._rank.host, "index": self._rank.local_rank, "name": name}

    def _build(self, item):
        result = blank_result(self._tasks[item])
        self._runner.build(self._tasks[item], result)
        return result

    def _run(self, item):
        task = self._tasks[item]
        self._group = task.group
        result = self._board.outcome(self._builds, item) or _abandoned(task)
        result["device"] = self._device(task.place)
        if result["verdict"] is None:
            with _share_of_host(self._rank, alone=task.place == "cpu"):
                self._runner.check_and_time(task, result)
        return result

    def _preferred(self, items):
        """Tasks whose model this rank has at hand, then those of models that nobody works at, then the rest."""
        taken = {self._tasks[item].group for item in self._board.taken(RUN, range(len(self._tasks)))}
        groups = {item: self._tasks[item].group for item in items}
        return sorted(items, key=lambda item: (groups[item] != self._group, groups[item] in taken, item))


@contextlib.contextmanager
def _share_of_host(rank, alone):
    """What is timed on a CPU has the host to itself; all else shares it."""
    name = f"playground-{os.getuid()}-{rank.run_id}-{rank.port}.lock".replace(os.sep, "_")
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
