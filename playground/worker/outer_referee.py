"""The referee's side of the outer clock: it draws inputs, and compares what came of them with PyTorch's results.

Nothing here believes what the judged process says. A call begins when inputs that it has never seen become readable; it ends
when its result was taken: on a GPU a sample of it, whose places nobody knew.
"""

import math
import mmap
import os
import secrets
import time

import numpy as np
import torch

from playground import tensors, untrusted
from playground.judge import behaviour, tolerance
from playground.stopwatch import outer
from playground.stopwatch.timer import CudaClock
from playground.stopwatch.workload import Workload

SAMPLED = 4096  # elements of each result that the clock waits for: where more than one in a thousand come late, 98% show it
HEAD_START_SECONDS = 1e-3  # for the host to queue a call's work, as the inner clock gives it
FROM_REFERENCE = 4.0  # times what the check allows: PyTorch's own error, twice, and that of other inputs
OF_BLUNT = 0.1  # of the spread: allowed where the check's tolerance cannot tell right from wrong
# Of a gradient's elements: what a maximum that rounding decides moves elsewhere. The check looks at each of them, with reasons.
MOVED = 0.01
OF_NONZERO, FEW = 0.25, 2  # of those that are not zero, which are all there is to compute; two may always be moved
NEAR_TIES = 50_000  # one of so many elements of all outputs may be further off, and one at least, as a sign of a near tie
OF_NORM = 0.5  # of a gradient's norm: what that of its error may be
MOST_IN_FULL = 8  # calls that the whole check is asked about: each takes seconds
UNSPOILED = 3  # calls that are compared before results are overwritten
OUTPUT = "output "  # begins an output's name
MARKED_AT_ONCE = 1 << 22  # words of the inputs
BUSY, OFTEN = 1.25, 0.2  # times what flushes in a row take at least, of a turn's flushes: another process works on the GPU
LOOK_AGAIN_SECONDS = 0.05


class Drawn:
    """Contents of one step of a problem, as no other process has seen them, and PyTorch's results.

    `references` are {name: tolerance.Reference} of outputs ("output 0", ...) and of gradients. `in_full(self, results)` says
    what the whole check has against results of the latest contents, or None.
    """

    def __init__(self, problem, model, step, device, references, in_full):
        self._references, self._in_full = references, in_full
        self._earlier = None  # PyTorch's results of the first call that was compared
        self._compared = self._asked = 0  # how many calls were, and about how many the whole check was asked
        self._elements = self._near_ties = 0  # of the outputs that were compared: all, and those that were left out
        self._workload = Workload(problem, tensors.copy_model(model), step, device)
        self.step = step
        self._seeds, self._met = {0}, set()  # those that were drawn, and what _mark gives of their inputs
        # Of its own: a fixed seed, as seed_draws, a problem and a model set, gives everybody the numbers of torch's.
        self._secret = torch.Generator(device).manual_seed(secrets.randbits(63))
        self._weights = torch.randint(1 << 40, (MARKED_AT_ONCE,), device=device, generator=self._secret)
        self.seed, self.draws = 0, secrets.randbits(31)  # of the contents, and of what the model draws in its call
        values = self.draw(0)
        self.layout = outer.Layout(values)
        self._kept = [value for value in values if not isinstance(value, torch.Tensor)]
        results = self._computed()
        gradients = self._workload.names(self._content) or []
        names = [f"{OUTPUT}{i}" for i in range(len(results) - len(gradients))] + gradients
        given = {name: value for name, value in zip(names, results, strict=True) if value is not None}
        self._names, self.shapes = list(given), [value.shape for value in given.values()]
        self._dtypes = [value.dtype for value in given.values()]
        self._overlaps = [not name.startswith(OUTPUT) or behaviour.overlap(value) for name, value in given.items()]
        owners = {behaviour.storage(value) for value in values if isinstance(value, torch.Tensor) and value.numel()}
        # A gradient may be an upstream one.
        self.returns_inputs = step != "forward" or any(behaviour.storage(value) in owners for value in given.values())
        self.bytes = sum(value.nbytes for value in given.values())
        del results, given
        self._may_spoil = not self.returns_inputs and self._gives_results_away(problem, model, device)

    def _gives_results_away(self, problem, model, device):
        """Whether the original computes all of its results again, whatever the caller does to them."""
        workload = Workload(problem, tensors.copy_model(model), self.step, device)

        def called():
            tensors.seed_draws(self.draws)
            return tensors.flatten(workload.with_outputs(self._content))

        results = called()
        before = [value.clone() for value in results]
        spoil(results)
        is_same = behaviour.same(before, called())
        with torch.no_grad():  # it may be a constant of the problem's file
            for value, was in zip(results, before, strict=True):
                if not behaviour.overlap(value):
                    value.copy_(was)
        return is_same

    @property
    def spoils(self):
        """Return whether the results of the latest call are to be overwritten."""
        return self._may_spoil and self._compared >= UNSPOILED

    def draw(self, seed):
        """Return the inputs and upstream gradients of a call."""
        self._content = self._workload.fresh(seed)
        return [*self._content.inputs, *self._content.upstream]

    def pack(self, block):
        """Draw inputs for a new call, and lay them out in a tensor of bytes.

        Raises Unshareable where their form changes, or where the same were drawn before.
        """
        while (seed := secrets.randbits(31)) in self._seeds:
            pass
        self._seeds.add(seed)
        self.seed, self.draws = seed, secrets.randbits(31)
        values = self.draw(seed)
        if [value for value in values if not isinstance(value, torch.Tensor)] != self._kept:
            raise outer.Unshareable("inputs that are no tensors and change")
        if outer.Layout(values).places != self.layout.places:
            raise outer.Unshareable("inputs whose shapes change")
        for value, place in zip(values, self.layout.places, strict=True):
            if place:
                outer.placed(block, place).copy_(value.detach())
        if (content := self._mark(block)) in self._met:
            raise outer.Unshareable("get_inputs gives few different contents: a result that was kept would be right")
        self._met.add(content)

    def picks(self):
        """Return the places of a call's samples, for each result its indices when it is flat: nobody else can know them."""
        counts, device = [shape.numel() for shape in self.shapes], self._secret.device
        return [torch.randint(max(1, n), (min(SAMPLED, n),), device=device, generator=self._secret) for n in counts]

    def _mark(self, block):
        """A number that is another one for other inputs."""
        of_upstream = (place["offset"] for place in self.layout.places[len(self._content.inputs) :] if place)
        parts = block[: next(of_upstream, self.layout.bytes)].view(torch.int32).split(len(self._weights))
        return hash(tuple((part * self._weights[: len(part)]).sum().item() for part in parts))

    def _computed(self):
        tensors.seed_draws(self.draws)
        result = self._workload.with_outputs(self._content)
        return tensors.flatten(result) if self.step == "forward" else list(result)

    def require_form(self, results):
        """Raise Unshareable for results of other shapes or types, or outputs whose elements share memory where none of the
        original's do.
        """
        if [value.shape for value in results] != self.shapes:
            raise outer.Unshareable(f"results of the shapes {[tuple(value.shape) for value in results]}")
        if [value.dtype for value in results] != self._dtypes:
            raise outer.Unshareable(f"results of the types {[str(value.dtype) for value in results]}")
        for value, overlaps in zip(results, self._overlaps, strict=True):
            if not overlaps and (why := behaviour.overlap(value)):
                raise outer.Unshareable(f"it {why}")

    def complaint(self, results, taken=()):
        """Return what is wrong with a call's results; None where nothing is.

        `taken` are samples that were read before, [(values, their indices in the flat result), ...]. Raises Unshareable where
        another call's results would be right, too, where nobody can tell, and for what was overwritten: a caller's results are
        the caller's, but a file that keeps a constant among them is no wrong one.
        """
        spoiled, self._compared = self.spoils, self._compared + 1  # as it was when the calls before were taken
        for (sample, pick), value in zip(taken, results, strict=False):
            now = value.take(pick)
            if not ((sample == now) | (torch.isnan(sample) & torch.isnan(now))).all():
                return "a result is another one once it was taken"
        right = [value for value in self._computed() if value is not None]
        if self._earlier and not self._differ(self._earlier, right):
            raise outer.Unshareable("a result cannot be told from that of other inputs")
        self._earlier = right if self._earlier is None else ()  # two calls show it
        self._elements += sum(value.numel() for value in self.named(results)[0])
        if not self._differ(results, right):
            return None
        if spoiled and any(map(_is_spoiled, results, right)):
            raise outer.Unshareable("a result is wrong once that of an earlier call was overwritten")
        self._asked += 1
        if self._asked > MOST_IN_FULL:
            raise outer.Unshareable("rounding decides about too many of its results")
        return self._in_full(self, results)

    def named(self, results):
        """Return ([output, ...], {name: gradient}) of a call's results."""
        named = dict(zip(self._names, results, strict=True))
        outputs = [named.pop(name) for name in self._names if name.startswith(OUTPUT)]
        return outputs, named

    def _differ(self, results, right):
        """Whether one of them is further from what PyTorch gives than rounding may bring it.

        A few elements may be: where a sign is a near tie, or a maximum, whose gradient goes to one of two elements then.
        """
        for name, value, true in zip(self._names, results, right, strict=True):
            reference = self._references.get(name)
            if reference is None or not value.numel():
                continue
            most = [OF_BLUNT] * 2 if reference.is_blunt else [FROM_REFERENCE * reference.allowed, reference.allowed_rms]
            value, true, spread = tensors.as_real(value), tensors.as_real(true.to(value.device)), reference.spread
            if not reference.allowed and true.is_floating_point():  # zeros, as behind a relu, say nothing of rounding
                most, spread = [OF_BLUNT] * 2, true.abs().max().item()
            is_same = (value == true) | (torch.isnan(value) & torch.isnan(true))
            off = torch.where(is_same, 0.0, value.double() - true.double())
            far = ~(off.abs() <= most[0] * spread)
            count = far.sum().item()
            if name.startswith(OUTPUT):
                if self._near_ties + count > max(1, self._elements // NEAR_TIES):
                    return True
                self._near_ties += count
            else:
                nonzero = true != 0  # most may be zeros, as behind a maximum
                moved = (far & nonzero).sum().item() > max(FEW, OF_NONZERO * nonzero.sum().item())
                if moved or count > MOVED * value.numel():
                    return True
                norm = torch.linalg.vector_norm(torch.nan_to_num(true.double()))
                if not (reference.is_zero or torch.linalg.vector_norm(off) <= OF_NORM * norm):
                    return True
            rms = torch.linalg.vector_norm(torch.where(far, 0.0, off)).item() / math.sqrt(off.numel())
            if not rms <= min(FROM_REFERENCE * most[1], tolerance.BLUNT) * spread:
                return True
        return False


@torch.no_grad()
def spoil(results):
    """Overwrite a caller's results, so that whoever returns the memory again has to fill it."""
    for value in results:
        if not behaviour.overlap(value):
            value.fill_(math.nan if value.is_floating_point() or value.is_complex() else 1)


def _is_spoiled(value, true):
    """Whether `spoil` has written what is wrong with it."""
    true = true.to(value.device)
    if value.is_floating_point() or value.is_complex():
        return bool((torch.isnan(value) & ~torch.isnan(true)).any())
    wrong = value[value != true]
    return wrong.numel() > 0 and bool((wrong == 1).all())


class OnCpu:
    """Contents for the driver, which writes them to the memory of whoever is timed; results come back in a file.

    Inputs and results are in this process's memory, under no name that a judged one could reach or put something else at.
    """

    def __init__(self, drawn):
        self._drawn = drawn
        inputs = untrusted.sealed_memory("outer-inputs", drawn.layout.bytes)
        self._files = {"inputs": os.fdopen(inputs, "r+b"), "results": os.fdopen(os.memfd_create("outer-results"), "r+b")}
        self._block = torch.frombuffer(mmap.mmap(inputs, drawn.layout.bytes), dtype=torch.uint8)

    def open(self, side, page):
        """Return {"places", "bytes", "inputs", "results", "returns_inputs"}: the layout of inputs, the files of inputs and of
        results, whether a result may be one of the inputs, or a view of it.
        """
        files = {what: str(untrusted.held_at(file.fileno())) for what, file in self._files.items()}
        told = {"places": self._drawn.layout.places, "returns_inputs": self._drawn.returns_inputs}
        return told | files | {"bytes": max(self._drawn.layout.bytes, self._drawn.bytes)}

    def draw(self):
        """Write the inputs of a new call to the file. Returns {"draws": the seed of what the model draws in it}."""
        self._drawn.pack(self._block)
        return {"draws": self._drawn.draws}

    def compare(self, places):
        """Return {"complaint", "spoils"} of the results in the file, which are at these places: what is wrong with them, and
        whether they are to be overwritten. Raises Unshareable for another form.
        """
        self._files["results"].seek(0)
        block = torch.from_numpy(np.fromfile(self._files["results"], np.uint8))
        results = [outer.placed(block, place) for place in places]
        self._drawn.require_form(results)
        return {"complaint": self._drawn.complaint(results), "spoils": self._drawn.spoils}

    def close(self):
        """Give back the memory."""
        self._block = None
        for file in self._files.values():
            file.close()


class OnGpu:
    """Inputs, flags and the clock of one problem on one GPU."""

    def __init__(self, drawn, device):
        self._drawn = drawn
        self._device = device
        self._memory = outer.Memory()
        self._pages, self._blocks, self._calls = {}, {}, {}
        self._private = torch.zeros(drawn.layout.bytes, dtype=torch.uint8, device=device)
        self._clock = CudaClock()
        self._clock.flush()
        torch.cuda.synchronize()
        self._flush_ms = min(self._clock.flush_in_a_row(self._clock.flush_ms) for _ in range(3))

    def open(self, side, page):
        """Make memory and flags for a side. Returns {"handle", "offset", "places"}, with which it finds them."""
        self._pages[side] = outer.Page(page, create=True)
        self._blocks[side] = self._memory.allocate(outer.HEADER + self._drawn.layout.bytes)
        self._calls[side] = 0
        handle, offset = self._memory.exported(self._blocks[side])
        return {"handle": handle, "offset": offset, "places": self._drawn.layout.places}

    def await_quiet(self, seconds):
        """Wait until no other process works on the GPU: one that stands still may have left something. Raises Unshareable."""
        latest = time.monotonic() + seconds
        while (took := self._clock.flush_in_a_row(self._flush_ms)) > BUSY * self._flush_ms:
            if time.monotonic() > latest:
                raise outer.Unshareable("another process works on the GPU")
            time.sleep(LOOK_AGAIN_SECONDS)
        self._flush_ms = min(took, self._flush_ms)
        return {}

    def time(self, side, calls, compares, seconds):
        """Time some calls of a side: {"calls": [{"milliseconds", "complaint"}, ...]}.

        `milliseconds` is None where another process worked on the GPU. If it `compares`, each result is held to PyTorch's on
        the same inputs.
        """
        last, flushes = self._calls[side] + calls, []
        try:
            timed = [self._timed(side, compares, seconds, flushes) for _ in range(calls)]
            if sum(each > BUSY * self._flush_ms for each in flushes) > OFTEN * calls:
                timed = [each | {"milliseconds": None} for each in timed]
            torch.cuda.synchronize()
            return {"calls": timed}
        except BaseException:  # or the side would wait for inputs until its time limit ends it
            self._pages[side].set(outer.CALL, last)
            with torch.cuda.stream(torch.cuda.Stream()):
                self._memory.write(self._blocks[side] + outer.RELEASE, last)
            raise

    def _timed(self, side, compares, seconds, flushes):
        page, block = self._pages[side], self._blocks[side]
        shared = outer.bytes_at(block + outer.HEADER, self._drawn.layout.bytes)
        number = self._calls[side] = self._calls[side] + 1
        self._drawn.pack(self._private)
        picks = self._drawn.picks()
        self._clock.flush()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        page.set(outer.DRAWS, self._drawn.draws)
        page.set(outer.CALL, number)
        # Of a call that waits for the device before it is queued, host and device take turns, as they do without a clock.
        is_queued = page.wait(outer.QUEUED, number, HEAD_START_SECONDS)
        results = self._results(page) if is_queued else []
        began.record()
        # One kernel, on the multiprocessors: what copies on an engine of its own could go on beside another process's work.
        torch.bitwise_or(self._private.view(torch.int32), 0, out=shared.view(torch.int32))
        self._memory.write(block + outer.RELEASE, number)
        if not is_queued:
            if not page.wait(outer.QUEUED, number, seconds):
                raise outer.Unshareable(f"no result within {seconds:g} s")
            results = self._results(page)
        self._memory.wait_for(block + outer.DONE, number)
        samples = [result.take(pick) for result, pick in zip(results, picks, strict=True)]
        ended.record()
        self._finish(block, number, seconds)
        flushes.append(self._clock.flush_ms)
        whole = [result.clone() for result in results] if compares else []
        complaint = self._drawn.complaint(whole, list(zip(samples, picks, strict=True))) if compares else None
        if compares and self._drawn.spoils:
            spoil(results)
        return {"milliseconds": began.elapsed_time(ended), "complaint": complaint}

    def close(self):
        """Give back all memory."""
        self._private = None
        self._memory.free()
        for page in self._pages.values():
            page.close()

    def _results(self, page):
        """Return the tensors that a side says are its results."""
        places = page.text()
        if not (isinstance(places, list) and all(isinstance(place, dict) for place in places)):
            raise outer.Unshareable("it has written something else than the places of its results")
        try:
            results = [outer.placed(outer.bytes_at(*self._memory.opened(place["handle"])), place) for place in places]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise outer.Unshareable(f"a result without a place: {error}") from None
        self._drawn.require_form(results)
        return results

    def _finish(self, block, number, seconds):
        """Wait until this process's stream is done. Raises Unshareable after `seconds`; the stream is then let go."""
        latest = time.monotonic() + seconds
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() > latest:
                with torch.cuda.stream(torch.cuda.Stream()):
                    self._memory.write(block + outer.DONE, number)
                torch.cuda.synchronize()
                raise outer.Unshareable(f"no result within {seconds:g} s")
