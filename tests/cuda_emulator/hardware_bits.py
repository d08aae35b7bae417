"""Records what a GPU makes of every instruction in hardware_cases.py, for test_hardware_bits.py to compare with.

    python tests/cuda_emulator/hardware_bits.py tests/cuda_emulator/hardware_bits.npz

needs PyTorch with CUDA, a compiler and a GPU; the Hopper section needs compute capability 9.0. It prints a table of the groups.
The file holds the inputs of each pool, the outputs of each case, and a digest of the text of each case.
"""

import ctypes
import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

import hardware_cases
import numpy as np
import torch

# PyTorch turns the operators of half off.
FLAGS = {"general": ["-U__CUDA_NO_HALF_OPERATORS__"], "hopper": ["-gencode=arch=compute_90a,code=sm_90a"]}


def build(section):
    """Compile and load the section's text with load_inline. Returns the library for ctypes."""
    from torch.utils import cpp_extension

    text = hardware_cases.text_of(section)
    path = cpp_extension.load_inline(
        f"hardware_bits_{section}_{hashlib.sha256(text.encode()).hexdigest()[:10]}",
        cpp_sources="",
        cuda_sources=text,
        extra_cuda_cflags=FLAGS[section],
        is_python_module=False,
        no_implicit_headers=True,
    )
    return ctypes.CDLL(str(path))


def outputs(library, case, inputs, device):
    """The case's result on `inputs`, (words, n) of uint32, as uint32 of the same shape."""
    n = inputs.shape[1]
    given = torch.from_numpy(inputs.astype(np.int32)).to(device)
    result = torch.zeros(hardware_cases.words_of(case.result), n, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    run = getattr(library, f"run_{case.function}")
    run(ctypes.c_void_p(result.data_ptr()), ctypes.c_void_p(given.data_ptr()), n, ctypes.c_void_p(stream))
    if device == "cuda":
        torch.cuda.synchronize()
    return result.cpu().numpy().view(np.uint32)


def digest(section, case):
    """Changes when the recorded outputs no longer belong to the case."""
    return hashlib.sha256(repr((hardware_cases.PRELUDES[section], case.text, case.pool)).encode()).hexdigest()[:16]


def record(device, sections):
    """{"inputs <pool>", "outputs <case>", "about"}: arrays for numpy.savez."""
    data, about = {}, {"digests": {}, "device": torch.cuda.get_device_name() if device == "cuda" else "emulator"}
    for section in sections:
        started = time.monotonic()
        library = build(section)
        print(f"{section}: built in {time.monotonic() - started:.1f} s", flush=True)
        for case in hardware_cases.SECTIONS[section]:
            inputs = data.setdefault(f"inputs {case.pool}", hardware_cases.pool(case.pool))
            data[f"outputs {case.name}"] = outputs(library, case, inputs, device)
            about["digests"][case.name] = digest(section, case)
    about |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    return data | {"about": np.array(json.dumps(about))}


def main(arguments):
    if len(arguments) != 1:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("hardware_bits.py: there is no GPU that PyTorch can use")
    hopper = torch.cuda.get_device_capability()[0] == 9
    data = record("cuda", ["general", "hopper"] if hopper else ["general"])
    np.savez_compressed(arguments[0], **data)
    kinds = Counter((section, case.rule.why) for section, cases in hardware_cases.SECTIONS.items() for case in cases)
    for (section, why), count in kinds.most_common():
        print(f"{count:4} {section}: {why}")
    print(f"{len(data)} arrays, {Path(arguments[0]).stat().st_size / 1024:.0f} KiB in {arguments[0]}")
    if not hopper:
        print("without the Hopper section: that needs compute capability 9.0")


if __name__ == "__main__":
    main(sys.argv[1:])
