"""What the driver knows of the referee: the right results of one model at one size, asked for once and shared by variants."""

import random
import threading

from playground import untrusted
from playground.judge.checks import AT_OWN_SIZE, OF_SEEDS, PROBE_NAMES, size_of
from playground.judge.footprint import Footprint
from playground.machine import memory
from playground.run_record import Environment
from playground.serial import load
from playground.worker.ahead import UNTIMED
from playground.worker.process import WorkerProcess

SIZED_BY = ("problem", "settings", "place", "precision")  # of the arguments of referee.load
OF_HOST_MEMORY = 0.6  # that is free: a variant takes up to half of what float64 does
TEACHING = ("load", "prepare", "prepare_timed")  # requests after which it knows more
GIVEN = "given"  # the folder of what variants are given


def sized_up(worker, original):
    """Return the footprint.Footprint of an original, as a worker tells that has loaded no variant's file yet."""
    return Footprint(**worker.ask("size_up", **{key: original[key] for key in SIZED_BY}))


def describe_machine(limit=300.0):
    """Return what environment.describe does, in a process of its own: this one must not initialise CUDA beside a timing."""
    with WorkerProcess("referee", limit, UNTIMED) as worker:
        return load(Environment, worker.ask("environment"), "environment")


class RefereeClient:
    """The referee of one model at one size, which threads may share.

    `folder` holds the tensors that are exchanged, `given`, below it, what variants see of them. `original` are the arguments of
    `referee.load` but for the weights; a request may take `limit` seconds.
    """

    def __init__(self, original, folder, probe_seed, limit):
        self.folder, self.given = folder, folder / GIVEN
        self.given.mkdir(exist_ok=True)
        self._answers = untrusted.Folder(folder)  # of processes in no sandbox
        self.weights = str(self.given / "weights")
        self.side_effects, self.domain, self.ways = (), [], []
        self.checks_itself = False  # whether the problem's file has a check of its own
        self.has_layouts = self.uses_tf32 = True  # see clock.baselines.distinct
        self.float_outputs = None  # why a variant's outputs have to be float32 where its inputs are not
        self.smaller = {}  # constants of a size that the emulator computes in seconds
        self.tells_nothing = None  # why the original's outputs cannot tell a right variant from one that does nothing
        self._original, self._probe_seed = original, probe_seed
        self._limit, self._is_closed = limit, False
        self._worker = WorkerProcess("referee", limit, UNTIMED)
        self._lock = threading.RLock()
        self._told = []  # the requests that another process in its place has to be told
        self._prepared = {}
        self._mutants = {}

    @property
    def worker(self):
        """Its process; where that has ended, another one, that knows the same. Raises WorkerFailure."""
        with self._lock:
            if self._told and self._worker.has_ended and not self._is_closed:
                self._worker.close()
                self._worker = WorkerProcess("referee", self._limit, UNTIMED)
                self._limit_memory()
                for what, arguments in self._told:
                    self._worker.ask(what, **arguments)
            return self._worker

    def size_up(self):
        """Return the problem's footprint.Footprint, before anything is computed."""
        return sized_up(self.worker, self._original)

    def load(self, share=1.0):
        """Return what referee.load does, comparing a `share` of large results by another secret seed. Raises WorkerFailure."""
        self._limit_memory()
        secret = untrusted.new_seed(63)
        description = self.ask("load", **self._original, weights=self.weights, share=share, secret=secret)
        self.domain, self.checks_itself = description["domain"], description["checks_itself"]
        self.float_outputs = description["float_outputs"]
        self.smaller = description["smaller"]
        self.has_layouts, self.uses_tf32 = description["has_layouts"], description["precision"] == "tf32"
        return description

    def _limit_memory(self):
        if self._original["place"] == "cpu":
            memory.limit(self._worker.pid, OF_HOST_MEMORY)

    def prepare(self):
        """Compute the reference on the probes of the problem's own size. Raises WorkerFailure."""
        self.side_effects = self.ask("side_effects")["side_effects"]
        for probe in PROBE_NAMES:
            if size_of(probe) == "own" and probe != OF_SEEDS:
                self.prepared(probe)
        self.tells_nothing = self.ask("tells_nothing")["why"]

    def prepared(self, probe):
        """Return {"differentiable", "unusable", "form"} of a probe, whose reference is computed when it is first asked for."""
        with self._lock:
            if probe not in self._prepared:
                seed = self._seed_of(probe.removesuffix(AT_OWN_SIZE))
                given = {"probe": probe, "size": size_of(probe), "seed": seed, "inputs": self.inputs(probe)}
                self._prepared[probe] = self.ask("prepare", **given)
                self.ways = self._prepared[probe].get("ways", self.ways)
            return self._prepared[probe]

    def _seed_of(self, what):
        """The seed of a probe, which a variant that draws its inputs is told, or of the mutants: no other follows from it."""
        return random.Random(f"{self._probe_seed} {what}").getrandbits(31)

    def inputs(self, probe):
        return str(self.given / f"inputs-{probe}")

    def answers(self, worker):
        """Return the untrusted.Folder in which a variant's process writes."""
        return worker.room.answers if worker.room else self._answers

    def compare(self, what, probe, file, declared=None, **more):
        """Compare the "outputs" or "gradients" (`what`) in a file; `declared` is what is permitted beyond the strict limit."""
        return self.ask(f"compare_{what}", probe=probe, file=file, declared=declared, **more)

    def mutants(self, probes, gradients, declared):
        """Return {"counted", "rejected", "survivors"} of wrong versions of the original on these probes."""
        given = {"probes": probes, "gradients": gradients, "declared": declared}
        with self._lock:
            if (key := tuple(given.values())) not in self._mutants:
                self._mutants[key] = self.ask("mutants", **given, seed=self._seed_of("mutants"))
            return self._mutants[key]

    def reserved(self):
        """Return a context that keeps other threads from asking the referee anything, once what one has asked is answered."""
        return self._lock

    def ask(self, what, **arguments):
        """Return the reply to a request of the referee's. Raises WorkerFailure."""
        with self._lock:
            reply = self.worker.ask(what, **arguments)
            if what in TEACHING:
                self._told.append((what, arguments))
            return reply

    def close(self):
        self._is_closed = True
        self._worker.close()
        self._answers.close()
