"""The referee's side of the outer clock: it draws N inputs a turn, and compares all that came of them with PyTorch's results.

Nothing here believes what the judged process says. A turn begins when inputs that it has never seen become readable; it ends
when all elements of all results were taken. What was in the results' memory before is overwritten after the turn has begun.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from playground import tensors
from playground.clock.memory import DONE, HEADER, RELEASE, Gpu, Host, Unshareable, laid_out, lying_as, placed
from playground.clock.timer import CpuClock, CudaClock
from playground.clock.workload import Content, Workload
from playground.judge import tolerance
from playground.untrusted import new_seed

FROM_REFERENCE = 2.0  # times what the check allows: what two right results differ by
OF_BLUNT = 0.1  # of the spread: allowed where the check's tolerance cannot tell right from wrong
# Of a gradient's elements that are not zero, all there is to compute, those that a maximum which rounding decides moves
# elsewhere, to where it is zero: none of less than a hundred. And what the norm of its error may be, of its own.
MOVED, OF_NORM = 0.01, 0.15
NEAR_TIES = 50_000  # one of so many elements of all outputs may be further off, and one at least, as a sign of a near tie
MOST_IN_FULL = 8  # calls that the whole check is asked about: each takes seconds
OUTPUT = "output "  # begins an output's name
MARKED_AT_ONCE = 1 << 22  # words of the inputs
BUSY = 1.25  # times what flushes in a row take at least: another process works on the GPU
LOOK_AGAIN_SECONDS = 0.05
MOST_CALLS, OF_FREE, COPIES = 128, 1 / 3, 6  # of a turn; of the memory; of a turn's inputs and results, in all processes
MOST_ON_HOST = 1 << 28  # bytes of a turn on a CPU


class Call(NamedTuple):
    """A call's two seeds: of its contents, and of what the model draws in it."""

    seed: int
    draws: int


Turn = list[tuple[Call, list[Any]]]  # the calls of a turn, each with its inputs and upstream gradients
Told = list[dict[str, Any]]  # what a side has to know of each: "given", "kept", "due"
Results = Sequence[torch.Tensor]
References = dict[str, tolerance.Reference]
InFull = Callable[["Drawn", Call, Results], str | None]


class Drawn:
    """Contents of a workload of the original, as no other process has seen them, and PyTorch's results.

    `in_full(self, call, results)` says what the whole check has against results of a Call, or None. A turn has so many `calls`,
    if there is memory; one where the model draws its random numbers on the host of a GPU, or `is_graphed` and draws any.
    """

    def __init__(
        self, workload: Workload, references: References, in_full: InFull, calls: int = 1, is_graphed: bool = False
    ) -> None:
        self._references, self._in_full = references, in_full
        self.workload, self.step, self.device = workload, workload.mode, workload.device
        self._asked = self._told_apart = 0  # calls about which the whole check was asked; pairs of results of different inputs
        self._elements = self._near_ties = 0  # of the outputs that were compared: all, and those that were left out
        self._earlier: Results | None = None
        self._seeds, self._met = {0}, set[tuple[Any, ...]]()  # those that were drawn, and what _marks gives of their inputs
        # Of its own: a fixed seed, as seed_draws, a problem and a model set, gives everybody the numbers of torch's.
        self._secret = torch.Generator(self.device).manual_seed(new_seed(63))
        self._weights = torch.randint(1 << 40, (MARKED_AT_ONCE,), device=self.device, generator=self._secret)
        self._state = self.workload.state()
        content = self.workload.fresh(0)
        self._own = [*content.inputs, *content.upstream]
        before = _generators(self.device)
        results = self._results_of(content)
        changed = [a != b for a, b in zip(before, _generators(self.device), strict=True)]
        self.draws = any(changed)
        self.restores = not all(map(torch.equal, self._state, self.workload.state()))
        self._restore()
        gradients = self.workload.names(content) or []
        names = [f"{OUTPUT}{i}" for i in range(len(results) - len(gradients))] + gradients
        given = {name: value for name, value in zip(names, results, strict=True) if value is not None}
        self._names = list(given)
        self._due = {_form(self._own): laid_out(given.values())}  # where results lie, by the inputs' form
        of_call = laid_out(self._own)[1] + laid_out(given.values())[1]
        is_single = self.draws and (is_graphed or (self.device.type == "cuda" and changed[0]))
        self.count = 1 if is_single else max(1, min(calls, MOST_CALLS, _room(self.device) // max(1, of_call)))

    def _results_of(self, content: Content) -> list[Any]:
        result = self.workload(content, with_outputs=True)
        return tensors.flatten(result) if self.step == "forward" else list(result)

    def _restore(self) -> None:
        if self.restores:
            self.workload.restore(self._state)

    def random(self, words: int) -> torch.Tensor:
        """Return so many random words that nobody knows."""
        most = (1 << 63) - 1
        return torch.randint(-most - 1, most, (words,), dtype=torch.int64, device=self.device, generator=self._secret)

    def draw(self) -> Turn:
        """Return the contents of a turn.

        Raises Unshareable where the same were drawn before, and for what cannot be told to another process and changes.
        """
        seeds = set[int]()
        while len(seeds) < self.count:
            seeds = {*seeds, new_seed()} - self._seeds
        self._seeds |= seeds
        contents = [self.workload.fresh(seed) for seed in seeds]
        marks = self._marks([content.inputs for content in contents])
        if len(self._met | marks) < len(self._met) + self.count:
            raise Unshareable("get_inputs draws few different inputs: a remembered result would be right")
        self._met |= marks
        values = [[*content.inputs, *content.upstream] for content in contents]
        return [(Call(seed, new_seed()), of) for seed, of in zip(seeds, values, strict=True)]

    def told(self, drawn: Turn) -> tuple[Told, int, int]:
        """Return (what a side has to know of each call, the bytes of all inputs, of all results)."""
        calls, at, due_at = Told(), HEADER, 0
        for call, values in drawn:
            places, end = laid_out(values, at)
            if (form := _form(values)) not in self._due:
                self._due[form] = laid_out(self._right(call, values))
                self._restore()
            due, count = self._due[form]
            due = [place | {"offset": due_at + place["offset"]} for place in due if place]
            calls.append({"given": places, "kept": [self._kept(*each) for each in enumerate(values)], "due": due})
            at, due_at = end, due_at + count
        return calls, at, due_at

    def _kept(self, i: int, value: Any) -> dict[str, Any] | None:
        """How a side is told what is no tensor; None of what its own get_inputs gives."""
        if isinstance(value, torch.Tensor) or i >= len(self._own):
            return None
        if value is None or isinstance(value, bool | int | float | str):
            return {"is": value}
        if type(value) is not type(self._own[i]) or value != self._own[i]:
            raise Unshareable(f"inputs of type {type(value).__name__} that change")
        return None

    def _marks(self, contents: Sequence[Sequence[Any]]) -> set[tuple[Any, ...]]:
        """A set with one element for all inputs that are equal; it waits for the GPU once."""
        marks = [self._mark(value) for each in contents for value in each if isinstance(value, torch.Tensor)]
        told = iter(torch.stack(marks).tolist() if marks else [])
        return {tuple(next(told) if isinstance(value, torch.Tensor) else repr(value) for value in each) for each in contents}

    def _mark(self, value: torch.Tensor) -> Any:
        """A number, still on the device, that is another one for other contents of a tensor."""
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        words = torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
        parts = enumerate(words.split(MARKED_AT_ONCE), 1)
        return sum((i * (part * self._weights[: len(part)]).sum() for i, part in parts), self._weights[0] * 0)

    def _right(self, call: Call, values: Sequence[Any]) -> list[torch.Tensor]:
        """PyTorch's results of a call."""
        if self.draws:
            tensors.seed_draws(call.draws)
        content = self.workload.on(values, [None] * len(values))
        return [value for value in self._results_of(content) if value is not None]

    def complaint(self, drawn: Turn, results: Sequence[Results]) -> tuple[str | None, bool]:
        """Return (what is wrong with a turn's results, or None; whether the last call's are right). Raises Unshareable where
        another call's would be right, too, and where nobody can tell.
        """
        complaint, is_right = None, True
        self._restore()
        for (call, values), given in zip(drawn, results, strict=True):
            right = self._right(call, values)
            self._tell_apart(right)
            self._elements += sum(value.numel() for value in self.named(given)[0])
            is_right = not self._differ(given, right)
            if is_right or complaint:
                continue
            self._asked += 1
            if self._asked > MOST_IN_FULL:
                raise Unshareable("rounding decides about too many of its results")
            complaint = self._in_full(self, call, given)
            is_right = complaint is None
        return complaint, is_right

    def _tell_apart(self, right: Results) -> None:
        """Raise Unshareable where PyTorch's results of different inputs look alike; two pairs show whether they do."""
        earlier = self._earlier
        if self._told_apart < 2 and earlier and [value.shape for value in earlier] == [value.shape for value in right]:
            self._told_apart += 1
            if not self._differ(earlier, right, counts=False):
                raise Unshareable("a result cannot be told from that of other inputs")
        self._earlier = [value.clone() for value in right] if self._told_apart < 2 else None

    def named(self, results: Results) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return ([output, ...], {name: gradient}) of a call's results."""
        named = dict(zip(self._names, results, strict=True))
        outputs = [named.pop(name) for name in self._names if name.startswith(OUTPUT)]
        return outputs, named

    def _differ(self, results: Results, right: Results, counts: bool = True) -> bool:
        """Whether one of them is further from PyTorch's than rounding may bring it, but for a few elements: where a sign is a
        near tie, or a maximum, whose gradient goes to one of two elements then.
        """
        near_ties = self._near_ties if counts else 0
        for name, value, true in zip(self._names, results, right, strict=True):
            reference = self._references.get(name)
            if reference is None or not value.numel():
                continue
            most = [OF_BLUNT] * 2 if reference.is_blunt else [FROM_REFERENCE * reference.allowed, reference.allowed_rms]
            value, true, spread = tensors.as_real(value), tensors.as_real(true.to(value.device)), reference.spread
            is_same, is_floating = (value == true) | (torch.isnan(value) & torch.isnan(true)), true.is_floating_point()
            # A difference of two values of up to 32 bits is exact enough in as many, in half the time.
            wide = torch.float32 if is_floating and true.element_size() <= 4 else torch.float64
            value, true = value.to(wide), true.to(wide)
            if not reference.allowed and is_floating:  # zeros, as behind a relu, say nothing of rounding
                most, spread = [OF_BLUNT] * 2, true.abs().max().item()
            off = torch.where(is_same, 0.0, value - true)
            far = ~(off.abs() <= most[0] * spread)
            count = int(far.sum())
            if name.startswith(OUTPUT):
                near_ties += count
                if near_ties > max(1, self._elements // NEAR_TIES):
                    return True
            else:
                nonzero = true != 0  # most may be zeros, as behind a maximum
                most_moved = MOVED * nonzero.sum().item()
                if (far & nonzero).sum().item() > most_moved or count > 2 * most_moved:
                    return True
                if not (reference.is_zero or _norm(off) <= OF_NORM * _norm(torch.nan_to_num(true, posinf=0.0, neginf=0.0))):
                    return True
            rms = _norm(torch.where(far, 0.0, off)) / math.sqrt(off.numel())
            if not rms <= min(FROM_REFERENCE * most[1], tolerance.BLUNT) * spread:
                return True
        if counts:
            self._near_ties = near_ties
        return False


class Turns:
    """The referee's memory for all sides, and the clock: `Drawn` on a place, in the memory of a Gpu or a Host."""

    _allocated: Callable[[str, int, int], Any]  # what _blocks has of a side, for so many bytes of inputs and of results

    def __init__(self, drawn: Drawn, memory: Any, clock: Any) -> None:
        self._drawn, self._memory, self._clock = drawn, memory, clock
        self._blocks: dict[str, Any] = {}  # side -> [(tensor of bytes, what the side is told of it)] of inputs and of results
        self._numbers: dict[str, int] = {}
        self._paths: dict[str, Path | str] = {}  # of a process's own memory, on a CPU
        self._strides: dict[str, Sequence[Any]] = {}  # of a call's results, as a side says
        self._latest: Turn = []
        self._noise = torch.empty(0, dtype=torch.int64, device=drawn.device)  # random words

    def open(self, side: str, path: Path | str = "") -> dict[str, Any]:
        """Return what Side.join takes: a turn that is not timed, whose inputs are in the side's memory, at `path` on a CPU."""
        self._paths[side], self._numbers[side] = path, 0
        turn = Turns.draw(self, side, anew=not self._latest)
        self._write_inputs(self._current[0])
        self._overwrite(*self._random())  # whose kernels are loaded then
        self._clock.wait()
        return turn

    def arrange(self, side: str, strides: Any) -> dict[str, Any]:
        """Have the results of a side lie as it gives them, by what Side.join returns: another order takes longer to copy."""
        self._strides[side] = strides if isinstance(strides, list) else []
        return {}

    def draw(self, side: str, anew: bool) -> dict[str, Any]:
        """Draw the contents of a turn, as for the judged side, or take the latest. Returns what Side.ready takes."""
        if anew:
            self._latest = self._drawn.draw()
        self._calls, *sizes = self._drawn.told(self._latest)
        for due in (call["due"] for call in self._calls):
            due[:] = [lying_as(*each) for each in zip_longest(due, self._strides.get(side, [])[: len(due)])]
        known = self._blocks.get(side)
        if not known or any(len(block) < size for (block, _), size in zip(known, sizes, strict=True)):
            self._blocks[side] = self._allocated(side, *sizes)
        blocks = [(block[:size], told | {"bytes": size}) for (block, told), size in zip(self._blocks[side], sizes, strict=True)]
        self._current = [block for block, _ in blocks]
        draws = [call.draws for call, _ in self._latest] if self._drawn.draws else None
        places = {"inputs": blocks[0][1], "results": blocks[1][1]}
        return {"calls": self._calls, "draws": draws, "restores": self._drawn.restores} | places

    def _write_inputs(self, block: torch.Tensor) -> None:
        for told, (_, values) in zip(self._calls, self._latest, strict=True):
            for place, value in zip(told["given"], values, strict=True):
                if place:
                    placed(block, place).copy_(value.detach())

    def _random(self) -> tuple[torch.Tensor, int]:
        """(a tensor of random words as long as the results, a new random word)."""
        words = len(self._current[1]) // 8
        if len(self._noise) < words:
            self._noise = self._drawn.random(words)
        return self._noise[:words], new_seed(63)

    def _overwrite(self, noise: torch.Tensor, word: int) -> None:
        """Overwrite the memory of results: nothing that was written before is left."""
        torch.bitwise_xor(noise, word, out=self._current[1].view(torch.int64))

    def _judged(self, block: torch.Tensor, compares: bool) -> dict[str, Any]:
        """{"complaint": what is wrong with the results in a block, "is_last_right": whether those of the last call are not}."""
        taken = [[placed(block, place) for place in told["due"]] for told in self._calls]
        complaint, is_last_right = self._drawn.complaint(self._latest, taken) if compares else (None, True)
        return {"complaint": complaint, "is_last_right": is_last_right}

    def close(self) -> None:
        """Give back all memory."""
        self._blocks, self._current, self._latest = {}, [], []
        self._memory.free()


class OnCpu(Turns):
    """A turn's inputs are written, and its results are taken, while the timed process stands still."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__(drawn, Host(), CpuClock())

    def _allocated(self, side: str, inputs: int, results: int) -> Any:
        whole = self._memory.mapped(self._paths[side], inputs + results)
        return (whole[:inputs], {"begin": 0}), (whole[inputs:], {"begin": inputs})

    def release(self) -> dict[str, Any]:
        """Write the inputs, and random bytes over the results."""
        self._write_inputs(self._current[0])
        self._overwrite(*self._random())
        return {}

    def take(self, compares: bool) -> dict[str, Any]:
        """Take the results, and return what _judged does of them if it `compares`."""
        return self._judged(self._current[1].clone(), compares)


class OnGpu(Turns):
    """A turn's inputs are released by a gate, and its results are taken behind another one, both on the GPU."""

    def __init__(self, drawn: Drawn, memory: Any = None, clock: Any = None) -> None:
        super().__init__(drawn, memory or Gpu(), clock or CudaClock())
        self._clock.flush()
        word = torch.zeros(1, dtype=torch.int64, device=drawn.device)
        torch.bitwise_or(word, 0, out=word)  # its kernel is loaded then
        self._clock.wait()
        self._private = torch.empty(0)
        self._flush_ms = min(self._clock.flush_in_a_row(self._clock.flush_ms) for _ in range(3))

    def _allocated(self, side: str, inputs: int, results: int) -> Any:
        return self._memory.allocate(inputs), self._memory.allocate(max(results, 8))

    def await_quiet(self, seconds: float) -> dict[str, Any]:
        """Wait until no other process works on the GPU: one that stands still may have left something. No lines persist in L2
        then. Return {"at_once": whether none did}; raises Unshareable.
        """
        self._clock.flush()
        latest, at_once = time.monotonic() + seconds, True
        while not self._is_quiet():
            at_once = False
            if time.monotonic() > latest:
                raise Unshareable("another process works on the GPU")
            time.sleep(LOOK_AGAIN_SECONDS)
        return {"at_once": at_once}

    def _is_quiet(self) -> bool:
        took = self._clock.flush_in_a_row(self._flush_ms)
        if took > BUSY * self._flush_ms:
            return False
        self._flush_ms = min(took, self._flush_ms)
        return True

    def draw(self, side: str, anew: bool) -> dict[str, Any]:
        """Do the same, with the contents in memory of this process, too."""
        turn, device = super().draw(side, anew), self._drawn.device
        if anew or not len(self._private):
            self._private = torch.zeros(len(self._current[0]), dtype=torch.uint8, device=device)
            self._write_inputs(self._private)
        self._kept = torch.empty(len(self._current[1]), dtype=torch.uint8, device=device)
        self._numbers[side] += 1
        self._clock.wait()
        return turn | {"number": self._numbers[side]}

    def time(self, side: str, compares: bool, looks: bool, seconds: float) -> dict[str, Any]:
        """Time the turn that was drawn. Return what _judged does if it `compares`, and "milliseconds", None where it `looks`
        whether others use the GPU, and they do. Raises Unshareable without results after `seconds`; see `close`.
        """
        memory, clock, (inputs, results), random = self._memory, self._clock, self._current, self._random()
        number, (given, there) = self._numbers[side], (each[HEADER:].view(torch.int64) for each in (self._private, inputs))
        began = clock.now()
        # Kernels, on the multiprocessors: what copies on an engine of its own could go on beside another process's work.
        torch.bitwise_or(given, 0, out=there)
        self._overwrite(*random)
        memory.write(inputs, RELEASE, number)
        memory.wait_for(inputs, DONE, number)
        torch.bitwise_or(results.view(torch.int64), 0, out=self._kept.view(torch.int64))
        ended = clock.now()
        latest = time.monotonic() + seconds
        while not ended.query():
            if time.monotonic() > latest:
                raise Unshareable(f"no result within {seconds:g} s")
        milliseconds = None if looks and not self._is_quiet() else clock.between(began, ended)
        return {"milliseconds": milliseconds} | self._judged(self._kept, compares)

    def close(self) -> None:
        """Give back all memory, when no side works any more: a stream that waits for results which never came goes on."""
        with self._memory.elsewhere():
            for side, ((inputs, _), _) in self._blocks.items():
                self._memory.write(inputs, DONE, self._numbers[side])
        self._clock.wait()
        self._private = self._kept = torch.empty(0)
        super().close()


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def _form(values: Sequence[Any]) -> str:
    """What the form of a call's results follows from: the inputs' form, and numbers that may be sizes."""
    return repr((laid_out(values)[0], [value for value in values if type(value) is int]))


def _generators(device: torch.device) -> list[bytes]:
    """The states of the generators that a model may draw from, on the host and on a GPU."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [bytes(state.numpy()) for state in states]


def _room(device: torch.device) -> int:
    """Bytes that the inputs and results of a turn may take: of all sides, and the referee's own copies, there are six."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * OF_FREE / COPIES)
    return min(MOST_ON_HOST, int(psutil.virtual_memory().available * OF_FREE / COPIES))
