"""The referee's side of the outer clock: it releases inputs, takes results, and compares them with PyTorch's.

Nothing here believes what the judged process says. A call of it begins when inputs that it has never seen become readable, and
ends when the referee has taken a sample of its result whose places nobody knew.
"""

import secrets
import time

import torch

from playground import tensors
from playground.judge.tolerance import largest_difference
from playground.stopwatch import outer
from playground.stopwatch.workload import fresh_inputs

SAMPLED = 4096  # elements of each result that the clock waits for: where more than one in a thousand come late, 98% show it
HEAD_START_SECONDS = 1e-3  # for the host to queue a call's work, as the inner clock gives it
FROM_REFERENCE = 4.0  # times what the check allows: PyTorch's own error, twice, and that of other inputs
FLUSH_BYTES = 256 << 20


class OuterReferee:
    """Inputs, flags and the clock of one problem on one GPU; `problem` and `model` are the original's."""

    def __init__(self, problem, model, device):
        self._problem, self._device = problem, device
        self._model = tensors.copy_model(model)
        self._memory = outer.Memory()
        self._pages, self._blocks, self._calls = {}, {}, {}
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        given = self._inputs(0)
        self._layout = outer.Layout(given)
        self._private = torch.zeros(self._layout.bytes, dtype=torch.uint8, device=device)
        self._kept = [value for value in given if not isinstance(value, torch.Tensor)]
        self._shapes = [output.shape for output in self._outputs(given)]

    def open(self, side, page):
        """Make memory and flags for a side. Returns {"handle", "offset", "places"}, with which it finds them."""
        self._pages[side] = outer.Page(page, create=True)
        self._blocks[side] = self._memory.allocate(outer.HEADER + self._layout.bytes)
        self._calls[side] = 0
        handle, offset = self._memory.exported(self._blocks[side])
        return {"handle": handle, "offset": offset, "places": self._layout.places}

    def time(self, side, calls, compares, references, seconds):
        """Time some calls of a side: [{"milliseconds", "complaint"}, ...].

        `milliseconds` is None where memory of a result had to be opened, which happens in first calls. With `compares`, each
        result is compared with PyTorch's on the same inputs, within what `references` (tolerance.Reference) allow.
        """
        page, block = self._pages[side], self._blocks[side]
        shared = outer.bytes_at(block + outer.HEADER, self._layout.bytes)
        found = []
        for _ in range(calls):
            number = self._calls[side] = self._calls[side] + 1
            inputs = self._inputs(secrets.randbits(31))
            self._pack(inputs)
            picks = [self._picked(shape) for shape in self._shapes]
            self._flush.zero_()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            page.set(outer.CALL, number)
            # Of a call that waits for the device before it is queued, host and device take turns, as they do without a clock.
            is_queued = page.wait(outer.QUEUED, number, HEAD_START_SECONDS)
            results, was_known = self._results(page) if is_queued else ([], True)
            began.record()
            # One kernel, on the multiprocessors: what copies on an engine of its own could go on beside another process's work.
            torch.bitwise_or(self._private.view(torch.int32), 0, out=shared.view(torch.int32))
            self._memory.write(block + outer.RELEASE, number)
            if not is_queued:
                if not page.wait(outer.QUEUED, number, seconds):
                    raise outer.Unshareable(f"no result within {seconds:g} s")
                results, was_known = self._results(page)
            self._memory.wait_for(block + outer.DONE, number)
            samples = [result[pick] for result, pick in zip(results, picks, strict=True)]
            ended.record()
            self._finish(block, number, seconds)
            complaint = self._complaint(inputs, results, picks, samples, references) if compares else None
            found.append({"milliseconds": began.elapsed_time(ended) if was_known else None, "complaint": complaint})
        return found

    def close(self):
        """Give back all memory."""
        self._private = self._flush = None
        self._memory.free()
        for page in self._pages.values():
            page.close()

    def _inputs(self, seed):
        return fresh_inputs(self._problem, seed, self._device)

    def _pack(self, inputs):
        """Lay inputs out in memory that nobody else sees."""
        if [value for value in inputs if not isinstance(value, torch.Tensor)] != self._kept:
            raise outer.Unshareable("inputs that are no tensors and change")
        if outer.Layout(inputs).places != self._layout.places:
            raise outer.Unshareable("inputs whose shapes change")
        for value, place in zip(inputs, self._layout.places, strict=True):
            if place:
                outer.placed(self._private, place).copy_(value)

    def _results(self, page):
        """Return (the tensors that a side says are its results, whether all of their memory was open here before)."""
        places = page.text()
        if not (isinstance(places, list) and all(isinstance(place, dict) for place in places)):
            raise outer.Unshareable("it has written something else than the places of its results")
        was_known = all(self._memory.knows(place.get("handle")) for place in places)
        try:
            results = [outer.placed(outer.bytes_at(*self._memory.opened(place["handle"])), place) for place in places]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise outer.Unshareable(f"a result without a place: {error}") from None
        shapes = [result.shape for result in results]
        if shapes != self._shapes:
            raise outer.Unshareable(f"results of the shapes {list(map(tuple, shapes))}")
        return results, was_known

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

    def _picked(self, shape):
        """Return indices of elements, drawn now."""
        count = shape.numel()
        flat = torch.randint(max(1, count), (min(SAMPLED, count),), device=self._device)
        return torch.unravel_index(flat, shape)

    def _outputs(self, inputs):
        tensors.seed_draws()
        with torch.no_grad():
            return tensors.flatten(self._model(*inputs))

    def _complaint(self, inputs, results, picks, samples, references):
        """What is wrong with a result; None where nothing is."""
        whole = [result.clone() for result in results]
        expected = self._outputs(inputs)
        for reference, given, sample, pick, right in zip(references, whole, samples, picks, expected, strict=True):
            limit = FROM_REFERENCE * reference.allowed
            for part, true in ((sample, right[pick]), (given, right)):
                far = largest_difference(part, true) / reference.spread if part.numel() else 0.0
                if not far <= limit:
                    return f"the output is off by {far:.2e} of its spread from PyTorch's; allowed are {limit:.2e}"
        return None
