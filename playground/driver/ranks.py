"""What a rank does: a process of its own works, and the one that torchrun started watches over it.

torchrun ends a run as soon as one of its processes fails. So the process that it knows does nothing that could fail: it starts
the worker of the rank, says when that has died, and waits for the others. Rank 0's also says what is to be done, and collects
what comes of it.

With several hosts a torchrun on each looks after its own processes only, and the store is on the host of rank 0: without that
host a run ends, without another one it goes on. A torchrun whose processes succeeded waits minutes for those whose processes
did not, so all hosts end with the same status.

Who announces what on the board, in this order:

    tasks       rank 0: the identities of what is to be done
    rank/N      rank N's worker: its device, its seeds
    over        rank 0: there is a result of every task, or no rank is left, or the run was interrupted
    present/N   rank N: it has seen that the run is over
    passed      rank 0: whether the run passed
    farewell/N  rank N: it has seen whether, or was interrupted; it does not need the store any more
"""

import contextlib
import fcntl
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch.distributed import DistError

from playground.driver.bench import submit
from playground.driver.board import ATTEMPTS, LOST_AFTER, PAUSE, Board, work_off
from playground.driver.runner import Runner, blank_result
from playground.driver.verdict import give
from playground.machine import environment
from playground.machine.builds import builds_at_once
from playground.machine.memory import MEMORY
from playground.report.progress import Progress
from playground.worker import kill_all, owner

RUN = "run"
COLLECTOR = "collector"  # rank 0's watching process gives its signs of life under this name
SECONDS_BETWEEN_SIGNS = 1.0
FAREWELL_SECONDS = 10.0  # at most, for the other ranks to see how the run ended: then the store is gone
RANK_ENDED = "each rank that took it ended before it was done ({attempts} of them)"


class RunLost(Exception):
    """This rank cannot take part in the run, or no longer; the text says why."""


class RunFailed(Exception):
    """The run is over and did not pass, as rank 0 on another host tells."""


@dataclass(frozen=True)
class Collected:
    """What rank 0 has at the end: `results` in the tasks' order, `ranks` (what each said of itself) and those `lost`."""

    results: list
    ranks: list
    lost: list


def run(rank, tasks, options, keep, conclude):
    """Work off the tasks, {identity: Task}, together with the other ranks.

    Those of rank 0 count; the others must have tasks of the same identities and may have more. On rank 0 `keep(results)` is
    called with all results so far whenever there is a new one, and at the end `conclude(Collected)`, which says whether the run
    passed; interrupted, it is called with what there is, and the interrupt is raised again. Raises RunLost, and RunFailed on
    other hosts than that of rank 0: there torchrun would end rank 0, which has still to show the results, when another rank
    fails.
    """
    try:
        board = Board(rank.connect(serve=rank.rank == 0), rank.rank)
        ours = list(_agreed(rank, board, tasks).values())
    except DistError:
        raise _without_rank_0(rank) from None
    worker = multiprocessing.get_context("spawn").Process(target=_work, args=(rank, ours, options), name=str(rank))
    worker.start()
    try:
        if rank.rank == 0:
            _collect(rank, board, worker, ours, keep, conclude)
        elif not _attend(rank, board, worker) and rank.host != 0:
            _outlast_rank_0(board)
            raise RunFailed
    except DistError:
        raise _without_rank_0(rank) from None
    finally:
        worker.terminate()
        worker.join()


def _agreed(rank, board, tasks):
    """The tasks that rank 0 has, in its order: it alone knows which results of an earlier run there are already."""
    if rank.rank == 0:
        board.sign_of_life(COLLECTOR)
        board.announce("tasks", list(tasks))
        return tasks
    while (names := board.announced("tasks")) is None:
        _pause(rank, board)
    if missing := [name for name in names if name not in tasks]:
        board.declare_lost(rank.rank)
        raise RunLost(f"{rank} has other files or options than rank 0: it does not know the task {missing[0]}")
    return {name: tasks[name] for name in names}


def _pause(rank, board):
    """Before the next look at what rank 0 says. Raises RunLost when it is gone."""
    if board.is_lost(COLLECTOR):
        raise _without_rank_0(rank)
    time.sleep(PAUSE)


def _without_rank_0(rank):
    return RunLost(f"{rank} cannot reach the host of rank 0, which has the results so far, and ends; --resume goes on there")


def _attend(rank, board, worker):
    """Until rank 0 says that the run is over. Returns whether it passed."""
    try:
        while not board.announced("over"):
            _watch(rank, board, worker)
            _pause(rank, board)
        board.announce(f"present/{rank.rank}", True)
        latest = time.monotonic() + 2 * LOST_AFTER  # rank 0 waits for those that are late
        while (passed := board.announced("passed")) is None and time.monotonic() < latest:
            time.sleep(PAUSE)
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(DistError):
            board.declare_lost(rank.rank)  # its task is free at once
            board.announce(f"farewell/{rank.rank}", True)
        raise
    with contextlib.suppress(DistError):  # rank 0 has not waited for it
        board.announce(f"farewell/{rank.rank}", True)
    return bool(passed)


def _outlast_rank_0(board):
    """Until the torchrun of rank 0 has ended: it needs the rendezvous, which may be kept by the torchrun of this rank."""
    latest = time.monotonic() + LOST_AFTER
    with contextlib.suppress(DistError):
        while time.monotonic() < latest:
            board.announced("over")
            time.sleep(PAUSE)


def _watch(rank, board, worker):
    if not worker.is_alive() and worker.exitcode != 0 and not board.is_lost(rank.rank):
        board.declare_lost(rank.rank)
        print(f"{rank} ended ({_cause(worker.exitcode)}); the others go on", file=sys.stderr)


def _cause(status):
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _collect(rank, board, worker, tasks, keep, conclude):
    everybody = range(rank.world_size)
    results, lost, told, interrupt = {}, [], set(), None
    try:
        while len(results) < len(tasks):
            board.sign_of_life(COLLECTOR)
            _watch(rank, board, worker)
            lost = [each for each in everybody if board.is_lost(each)]
            silent = {each for each in lost if not board.was_declared_lost(each)}
            for each in sorted(silent - told):
                print(f"rank {each} gives no sign of life; the others go on", file=sys.stderr)
            told |= silent
            if _gather(board, tasks, results):
                keep(_ordered(tasks, results))
            if len(lost) == rank.world_size:
                break
            time.sleep(PAUSE)
    except (KeyboardInterrupt, SystemExit) as ended:
        interrupt = ended
        worker.terminate()
    _gather(board, tasks, results)
    board.announce("over", True)
    ranks = [board.announced(f"rank/{each}") for each in everybody]
    others = set() if interrupt else set(everybody) - {rank.rank}  # interrupted, torchrun gives little time
    absent = _wait_for(board, others - set(lost), LOST_AFTER, "present", "farewell")  # one may have just been started
    absent |= _wait_for(board, others & set(lost), FAREWELL_SECONDS, "present", "farewell")
    collected = Collected(_ordered(tasks, results), [each for each in ranks if each], sorted({*lost, *absent}))
    if interrupt:
        board.announce("passed", False)
        if results:
            conclude(collected)
        raise interrupt
    board.announce("passed", conclude(collected))
    _wait_for(board, others - absent, FAREWELL_SECONDS, "farewell")


def _wait_for(board, ranks, seconds, *words):
    """Until each of the ranks has said one of the words; those of a lost host never do. Returns them."""
    latest = time.monotonic() + seconds
    silent = set(ranks)
    while True:
        silent -= {each for each in silent if any(board.announced(f"{word}/{each}") for word in words)}
        if not silent or time.monotonic() > latest:
            return silent
        time.sleep(PAUSE / 4)


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
    runner = Runner(options, progress := Progress(prefix=f"[{rank}] "))
    owner.set(runner)
    # In a thread of its own: the main one may wait for a file that does not come to an end.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=_end_at_once, args=(runner,)).start())
    threading.Thread(target=_end_with_parent, args=(runner,), daemon=True).start()
    threading.Thread(target=_live, args=(rank,), daemon=True).start()
    try:
        with progress:
            _Worker(rank, tasks, options, runner).work()
    except DistError:
        sys.exit(1)  # the process above says that the store is gone
    finally:
        kill_all(runner)


def _end_at_once(runner):
    try:
        kill_all(runner)
        runner.close()
    finally:
        os._exit(1)


def _end_with_parent(runner):
    wait([multiprocessing.parent_process().sentinel])
    _end_at_once(runner)


def _live(rank):
    with contextlib.suppress(DistError):  # the store is gone, and with it the run
        board = Board(rank.connect(), rank.rank)
        while True:
            board.sign_of_life()
            time.sleep(SECONDS_BETWEEN_SIGNS)


class _Worker:
    """Builds its share of what its host needs, then judges and times what nobody else has taken."""

    def __init__(self, rank, tasks, options, runner):
        self._rank = rank
        self._tasks = tasks
        self._board = Board(rank.connect(), rank.rank)
        self._options = options
        self._runner = runner
        MEMORY.shared_by = rank.local_world_size
        self._builds = f"build on host {rank.host}"
        self._group = None

    def work(self):
        seeds = {"seed": self._runner.seed, "probe_seed": self._runner.probe_seed}
        if not self._tasks:
            return
        self._board.announce(f"rank/{self._rank.rank}", self._device(self._tasks[0].place) | seeds)
        items = range(len(self._tasks))
        try:
            self._build_all(items)
            work_off(self._board, RUN, items, self._run, self._preferred)
        finally:
            self._runner.close()

    def _device(self, place):
        """Of a row, and of this rank."""
        name = torch.cuda.get_device_name() if place == "cuda" else environment.cpu_name()
        return {"rank": self._rank.rank, "host": self._rank.host, "index": self._rank.local_rank, "name": name}

    def _build_all(self, items):
        """Several at once; each thread has a board of its own, as a store wants it."""
        most = builds_at_once(shared_by=self._rank.local_world_size)
        with ThreadPoolExecutor(min(most, len(items))) as pool:
            boards = [Board(self._rank.connect(), self._rank.rank) for _ in range(min(most, len(items)))]
            calls = [functools.partial(work_off, board, self._builds, items, self._build) for board in boards]
            for building in [submit(pool, call) for call in calls]:
                building.result()

    def _build(self, item):
        result = blank_result(self._tasks[item])
        if not self._options.isolates(self._tasks[item]):  # a build in a sandbox is of use there alone
            self._runner.build(self._tasks[item], result)
        return result

    def _run(self, item):
        task = self._tasks[item]
        self._group = task.group
        result = self._board.outcome(self._builds, item) or _abandoned(task)
        result["device"] = self._device(task.place)
        if result["verdict"] is None and self._options.isolates(task):
            self._runner.build(task, result)
        if result["verdict"] is None:
            with _share_of_host(self._rank, alone=task.place == "cpu"):
                self._runner.check_and_time(task, result)
        self._runner.close_room(task)
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
