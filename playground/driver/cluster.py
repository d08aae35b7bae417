"""A suite on several GPUs or hosts, by Dask: a task is one pair with its files' texts, tried again if lost."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dask
import distributed
from rich.console import Console

from playground.catalog import Impossible
from playground.driver import plan, runner
from playground.driver.task import Options, Task
from playground.machine.environment import cpu_name
from playground.machine.memory import MEMORY, judged_at_once
from playground.record import Ceilings, Result
from playground.report.progress import Progress
from playground.run_record import load_result
from playground.serial import dump
from playground.subject import Device
from playground.worker import kill_all
from playground.worker.failures import internal_error
from playground.worker.referee_client import describe_machine

LOCAL, HERE = "local", "127.0.0.1"
RETRIES = 2  # of a pair whose worker was lost; a running scheduler has its own allowed-failures
ANSWER_WITHIN = 10  # seconds, of a scheduler
QUIET = {"distributed.nanny.pre-spawn-environ": {}, "distributed.admin.large-graph-warning-threshold": "1GB"}
LOST = "each worker that judged it was lost ({attempts} of them); --resume tries it again"
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology"


@contextlib.contextmanager
def connected(where: str, side_by_side: bool = True, without_gpu: int = 1) -> Iterator["Cluster"]:
    """Yield the Cluster of "local" (`without_gpu` workers if there is no GPU) or of a scheduler. Raises Impossible."""
    with contextlib.ExitStack() as stack:
        if where == LOCAL:
            stack.enter_context(dask.config.set(QUIET | {"distributed.scheduler.allowed-failures": RETRIES}))
            workers = _local_workers(side_by_side, without_gpu)
            scheduler = {"cls": distributed.Scheduler, "options": {"host": HERE, "port": 0, "dashboard": False}}
            where = stack.enter_context(distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs="CRITICAL"))
        try:
            client = distributed.Client(where, timeout=ANSWER_WITHIN, set_as_default=False)
        except (OSError, ValueError) as error:
            raise Impossible(f"--cluster {where}: no scheduler answers there ({error})") from None
        stack.callback(client.close)
        is_local = isinstance(where, distributed.SpecCluster)
        if not is_local and not client.nthreads():
            print(f"--cluster {where}: waits for its first worker", file=sys.stderr)
        client.wait_for_workers(len(workers) if is_local else 1)
        yield Cluster(client, is_local)


def _local_workers(side_by_side: bool, without_gpu: int) -> dict[str, Any]:
    """Dask's specification of a worker for each GPU of this machine, or of so many where there is none."""
    import torch

    gpus = [str(number) for number in range(torch.cuda.device_count())]
    if gpus and (named := os.environ.get("CUDA_VISIBLE_DEVICES")):
        gpus = [name.strip() for name in named.split(",")]
    count = len(gpus) or without_gpu
    at_once = 2 * judged_at_once(shared_by=count) if gpus and side_by_side else 1  # as many more may wait to be timed
    options = {"nthreads": at_once, "memory_limit": 0, "worker_class": _Worker, "host": HERE, "silence_logs": "CRITICAL"}
    workers = {}
    for number, share in enumerate(shares(count)):
        own = {"env": {"CUDA_VISIBLE_DEVICES": gpus[number]}, "processors": share} if gpus else {}
        name = f"GPU {gpus[number]}" if gpus else f"CPU {number}"
        workers[name] = {"cls": distributed.Nanny, "options": options | own}
    return workers


class _Worker(distributed.Worker):
    """Keeps to its processors, as all does that it starts. Ctrl-C, which a terminal sends here too, is compare.py's to hear."""

    def __init__(self, *arguments: Any, processors: set[int] | None = None, **more: Any) -> None:
        if processors:
            os.sched_setaffinity(0, processors)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: None)  # no SIG_IGN, which the processes that it starts would inherit
        super().__init__(*arguments, **more)


def shares(count: int) -> list[set[int]]:
    """Return the processors that this process may use as `count` equal sets of whole cores; all in each if there are fewer."""
    cores: dict[tuple[int, ...], set[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        folder = Path(TOPOLOGY.format(processor))
        core: tuple[int, ...] = 0, processor
        with contextlib.suppress(OSError, ValueError):  # hyperthreads share one
            core = tuple(int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
        cores.setdefault(core, set()).add(processor)
    ordered = [cores[core] for core in sorted(cores)]
    size = len(ordered) // count
    return [set().union(*(ordered[i * size : (i + 1) * size] or ordered)) for i in range(count)]


class Cluster:
    """Workers that judge pairs. `lost` counts those that were lost while they did."""

    def __init__(self, client: Any, is_local: bool) -> None:
        self._client, self._is_local = client, is_local
        self.lost = 0

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function says on a worker's machine; it raises here what it raises there."""
        if self._is_local:
            return function(*arguments)
        return self._client.submit(function, *arguments, pure=False, priority=1).result()

    def results(self, tasks: Sequence[Task], options: Options) -> Iterator[tuple[Task, Result]]:
        """Yield (task, result) of each as soon as it is there. What is under way ends with the generator."""
        run = uuid.uuid4().hex
        hosts = Counter(address.rpartition(":")[0] for address in self._client.nthreads())
        judge_one = functools.partial(judge, options=options, run=run, shared_by=max(hosts.values()))
        futures, left = {}, len(tasks)
        for number, task in enumerate(tasks):
            texts = tuple(path.read_bytes() if path.is_file() else None for path in (task.model.path, task.variant.path))
            futures[self._client.submit(judge_one, task, texts, key=f"pair-{run}-{number}", pure=False)] = task
        self._client.subscribe_topic("all", self._heard)
        try:
            for future in distributed.as_completed(futures, loop=self._client.loop):
                left -= 1
                yield futures[future], _outcome(future, futures[future])
        finally:
            self._client.unsubscribe_topic("all")
            if left:
                self._client.cancel(list(futures), force=True)
                self._client.run(_end, run)

    def _heard(self, event: Any) -> None:
        _, said = event
        if said.get("action") == "remove-worker" and not said.get("expected") and (pairs := said.get("processing-tasks")):
            self.lost += 1
            print(f"a worker was lost; the pairs that it had ({len(pairs)}) are tried again", file=sys.stderr)


def _outcome(future: Future[Any], task: Task) -> Result:
    try:
        return future.result()
    except distributed.KilledWorker as killed:
        reason, details = LOST.format(attempts=killed.allowed_failures + 1), ""
    except Exception as exception:
        reason, details = internal_error(exception)
    return plan.settled(task, "error", reason, details)


# ---- on a worker

_ceilings: dict[str, Ceilings] = {}  # of this machine: measured once
_running: dict[runner.Runner, str] = {}  # Runner -> the run that it is of
_ended: set[str] = set()  # runs
_preparing = threading.Lock()


def judge(task: Task, texts: tuple[bytes | None, ...], options: Options, run: str, shared_by: int) -> Result:
    """Return the result of a task whose files have these texts. `shared_by`: so many workers share this host's memory."""
    with _preparing:
        slot = _prepare(shared_by)
    silent = Console(file=io.StringIO(), quiet=True)
    with tempfile.TemporaryDirectory(prefix="playground-") as folder, Progress(silent) as progress:
        root = Path(folder).resolve()
        model, variant = _at(task.model, root / "problem", texts[0]), _at(task.variant, root / "solution", texts[1])
        here = dataclasses.replace(task, model=model, variant=variant)
        one = runner.Runner(options, progress, slot)
        one.measured.ceilings = _ceilings
        _running[one] = run
        try:
            if run in _ended:
                kill_all(one)
            (result,) = one.run([here])
        finally:
            del _running[one]
    name, host, worker = _device(task.place)
    device = Device(name=name, host=host, worker=worker, seed=one.seed, probe_seed=one.probe_seed)
    moved = {str(getattr(here, of).path): str(getattr(task, of).path) for of in ("model", "variant")}
    return _renamed(dataclasses.replace(result, device=device), moved)


@functools.cache
def _prepare(shared_by: int) -> threading.BoundedSemaphore:
    """Make this process, whose threads Dask has set to 1, one like compare.py's. Returns what bounds pairs judged at once."""
    for name, value in dask.config.get("distributed.nanny.pre-spawn-environ", {}).items():
        if os.environ.get(name) == str(value):
            del os.environ[name]
    os.environ.pop("DASK_INTERNAL_INHERIT_CONFIG", None)
    MEMORY.shared_by = shared_by
    runner.sweep()
    return threading.BoundedSemaphore(judged_at_once())


def _at(named: Any, folder: Path, text: bytes | None) -> Any:
    """A model or variant as a file of the same name in a folder; the project's own variants stay where they are."""
    if getattr(named, "is_catalogued", False) or text is None:
        return named
    folder.mkdir()
    path = folder / named.path.name
    path.write_bytes(text)
    return dataclasses.replace(named, path=path)


@functools.cache
def _device(place: str | None) -> tuple[str | None, str, str]:
    name = describe_machine().gpu if place == "cuda" else cpu_name()
    return name, socket.gethostname(), str(distributed.get_worker().name)


def _renamed(result: Result, moved: dict[str, str]) -> Result:
    """A result in which paths of the folder are those of the user's files."""
    text = json.dumps(dump(result))
    for here, there in moved.items():
        text = text.replace(json.dumps(here)[1:-1], json.dumps(there)[1:-1])
    return load_result(json.loads(text))


def _end(run: str) -> None:
    _ended.add(run)
    for one in [one for one, of in list(_running.items()) if of == run]:
        kill_all(one)
