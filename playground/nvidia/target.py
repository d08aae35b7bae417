"""The process that a tool watches: one step of a variant.

    python -m playground.nvidia.target REQUEST REPLY

The files are JSON. The request: {"load": arguments of Candidate.load, "inputs": a probe's file, "limit": seconds, "tool": whose
control mistake to make at the end, or null}. The step is a forward pass and, if the variant trains, a backward pass.

The reply: {"kernels": names of the __global__ functions it built, "passes": what was run, "refused": what the forward pass
raised, "error": what else was raised}. The exit status is 1 with an error.
"""

import contextlib
import inspect
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

from cuda_emulator import SourceMap
from playground import tensors
from playground.nvidia import control
from playground.worker.candidate import Candidate
from playground.worker.failures import describe

KEEPS_LINES = ("-lineinfo", "--generate-line-info", "-G", "--device-debug")


def main(request_file, reply_file):
    """Run what the request file asks for, and write the reply. Returns the error, or None."""
    request = json.loads(Path(request_file).read_text())
    signal.alarm(int(request["limit"]) + 60)  # if the process that asked is gone by then
    load_inline, candidate = cpp_extension.load_inline, Candidate()
    reply = {"kernels": [], "passes": [], "refused": None, "error": None}
    _build_with_lines(request["load"]["variant"])
    for step in (lambda: _run(candidate, request, reply), lambda: _make_mistake(load_inline, request)):
        try:
            step()
        except Exception as exception:
            reply["error"] = reply["error"] or describe(exception)[0]
    reply["kernels"] = sorted(candidate.builds.kernels) if hasattr(candidate, "builds") else []
    Path(reply_file).write_text(json.dumps(reply))
    return reply["error"]


def _run(candidate, request, reply):
    candidate.load(**request["load"])
    probe = candidate.probe_in(request["inputs"])
    given = tensors.to(probe["inputs"], candidate.device)
    try:
        with torch.no_grad():
            candidate.model(*given)
        candidate._synchronize()
    except Exception as exception:
        candidate._synchronize()  # raises where the GPU is lost: then it was no refusal
        reply["refused"], _ = describe(exception)
        return
    reply["passes"].append("forward")
    if probe["upstream"] is not None:
        with contextlib.suppress(NotImplementedError):  # it is forward only
            # Gradients stay on the GPU: initcheck takes what the copy engine wrote for unwritten, and would complain of a copy.
            tensors.gradients(candidate.model, given, probe["upstream"], probe["wanted_inputs"])
            candidate._synchronize()
            reply["passes"].append("backward")


def _make_mistake(load_inline, request):
    """Without a tool it is only built, so that under one, where all is slow, nothing is left to build."""
    if request["load"]["place"] == "cuda":
        make = control.build(load_inline)
        if request["tool"]:
            make(request["tool"])


def _build_with_lines(variant):
    """Have nvcc keep the variant's line numbers, in builds apart from those of other runs, whose text is another."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(root) / "with_lines")
    for name in ("load_inline", "load"):
        setattr(cpp_extension, name, numbered(getattr(cpp_extension, name), variant))


def numbered(load_inline, file):
    """Return `load_inline` (or `load`) whose CUDA text tells nvcc which line of `file` each of its lines is."""
    signature = inspect.signature(load_inline)

    def with_lines(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        flags = list(given.get("extra_cuda_cflags") or [])
        given["extra_cuda_cflags"] = flags if set(flags) & set(KEEPS_LINES) else [*flags, "-lineinfo"]
        sources = given.get("cuda_sources")
        if sources:
            text = sources if isinstance(sources, str) else "\n".join(sources)
            given["cuda_sources"] = [SourceMap(text, file, f"<{given['name']}: cuda_sources>").with_directives(text)]
        return load_inline(*call.args, **call.kwargs)

    return with_lines


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
