"""What the tools are shown: a model at a size at which they come to an end."""

import contextlib
import tempfile
from pathlib import Path

from playground.worker.truth import Truth


@contextlib.contextmanager
def small_case(model, original, seed, limit):
    """Yields (arguments of Candidate.load but for the variant, files of inputs to try in turn, a folder).

    The tools make a kernel thousands of times slower, so a model that has a size for the emulator is shown at that one, unless
    `original`, the arguments of referee.load, asks for another. Raises WorkerFailure where the original does not run.
    """
    original = original | {"settings": original["settings"] or model.settings("emulator")}
    with tempfile.TemporaryDirectory(prefix="playground-") as name:
        folder = Path(name)
        truth = Truth(original, folder, seed, limit)
        try:
            truth.prepare()
            probes = [truth.inputs(probe) for probe in truth.probes_for_training()]
            yield original | {"weights": truth.weights}, probes, folder
        finally:
            truth.close()
