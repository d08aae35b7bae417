"""The worker's role that compiles a file's CUDA texts before PyTorch is imported anywhere: nothing of the file runs here."""

from typing import Any

import cuda_emulator
from playground.judge.text import Builds
from playground.worker.failures import describe
from playground.worker.interface import undeclared


class Compiler:
    """Of what is compiled here a process with the same cache finds all made."""

    def make_shared(self, file: str) -> dict[str, Any]:
        """Compile what all emulated files share, as far as `file` takes it."""
        cuda_emulator.compile_ahead(file, [])
        return {}

    def compile(self, file: str, content: str) -> dict[str, Any]:
        """Compile the file's load_inline texts; returns {"reason", "details"} of one without which it cannot load, or None."""
        found = Builds(content.encode("latin-1"))
        if any(map(undeclared, found.calls)):
            return {"reason": None, "details": ""}
        try:
            cuda_emulator.compile_ahead(file, found.calls)
        except cuda_emulator.EmulatorError as error:
            if found.fails_with_them:
                return dict(zip(("reason", "details"), describe(error), strict=True))
        return {"reason": None, "details": ""}
