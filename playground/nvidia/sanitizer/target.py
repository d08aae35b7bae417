"""What runs under a tool: one forward and, where the variant trains, one backward pass of it.

python -m playground.nvidia.sanitizer.target REQUEST REPLY, two JSON files. The request: {"load": arguments of Candidate.load,
"inputs": file of a probe, "limit": seconds, "tool": whose control mistake to make at the end, or null}. The reply:
{"kernels": names, "passes": [what was run], "refused": why the variant takes no such inputs, "error": what else was raised,
"control": whether the control mistake was made}.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension

from playground import tensors
from playground.nvidia.sanitizer import control, lines
from playground.worker.candidate import Candidate
from playground.worker.failures import describe


def main(request_file, reply_file):
    request = json.loads(Path(request_file).read_text())
    signal.alarm(int(request["limit"]) + 60)  # ends this process, should the one that asked for it be gone by then
    # Builds of their own: in those that everybody uses the text would change back and forth.
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(root) / "with_lines")
    load_inline = cpp_extension.load_inline
    for name in ("load_inline", "load"):
        setattr(cpp_extension, name, lines.numbered(getattr(cpp_extension, name), request["load"]["variant"]))
    candidate = Candidate()
    reply = {"kernels": [], "passes": [], "refused": None, "error": None, "control": False}
    try:
        _run(candidate, request, reply)
    except Exception as exception:
        reply["error"], _ = describe(exception)
    reply["kernels"] = _kernels(candidate)
    try:
        if request["load"]["place"] == "cuda":
            make_mistake = control.build(load_inline)
            if request["tool"]:
                make_mistake(request["tool"])
                reply["control"] = True
    except Exception as exception:
        reply["error"] = reply["error"] or describe(exception)[0]
    Path(reply_file).write_text(json.dumps(reply))


def _run(candidate, request, reply):
    candidate.load(**request["load"])
    probe = tensors.load(request["inputs"])
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
    if probe["upstream"] is None:
        return
    # Gradients stay where they are: initcheck takes what the copy engine wrote for unwritten, and would complain of a copy.
    try:
        tensors.gradients(candidate.model, given, probe["upstream"], probe["wanted_inputs"])
    except NotImplementedError:  # it is forward only
        return
    candidate._synchronize()
    reply["passes"].append("backward")


def _kernels(candidate):
    """The names of the __global__ and Triton functions that the variant's text and what it built hold."""
    texts = getattr(candidate, "text", None)
    found = set(candidate.builds.kernels) if hasattr(candidate, "builds") else set()
    return sorted(found | texts.cuda_kernels | texts.triton_kernels) if texts else sorted(found)


if __name__ == "__main__":
    main(*sys.argv[1:3])
