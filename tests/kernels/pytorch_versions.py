"""Whether the kernels' files work with the PyTorch of the Python that runs this: a release in an environment of its own.

    python -m venv /tmp/old && /tmp/old/bin/pip install torch==2.6.0 ninja setuptools
    /tmp/old/bin/python tests/kernels/pytorch_versions.py [MODEL/VARIANT ...]

Each file is copied out of the project and compared with the original in float64, outputs and gradients, at small sizes: the
CPU's natively, those in CUDA under the emulator. Prints a line for each. Without arguments it tries all.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 2e-2  # of a tensor's norm; TF32 is off by up to 9e-3

# How far outputs and gradients of a file are off. Reads "MODEL PATH_OF_COPY".
COMPARE = """
import json, sys
import torch
from playground import catalog

model, path = sys.argv[1:]
problem = catalog.load_problem(catalog.find_model(model).path, catalog.SETTINGS["emulator"][model])
torch.manual_seed(0)
if "/cpu_" not in path:
    import cuda_emulator as emulator
    emulator.install(debug=True)
ours = catalog.load_variant(path).ModelNew(*problem.get_init_inputs())
torch.manual_seed(0)
exact = problem.Model(*problem.get_init_inputs()).double()
x = torch.randn_like(problem.get_inputs()[0])
found = []
for model, dtype in ((ours, torch.float32), (exact, torch.float64)):
    given = x.to(dtype).requires_grad_()
    out = model(given)
    weights = torch.linspace(0, 1, out.numel(), dtype=dtype).reshape(out.shape)
    found.append([out, *torch.autograd.grad((out * weights).sum(), [given, *model.parameters()])])
errors = [(a - b).norm() / b.norm() for a, b in zip(*found, strict=True)]
print(json.dumps(torch.stack(errors).max().item()))
"""


def compared(variant, folder):
    """What came out, in a line: right, or what is wrong."""
    model, name = variant.split("/")
    copy = shutil.copy(ROOT / "kernels" / model / f"{name}.py", folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": f"{folder}/extensions"}
    done = subprocess.run([sys.executable, "-c", COMPARE, model, copy], env=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    error = json.loads(done.stdout.splitlines()[-1])
    return "right" if error <= LIMIT else f"off by {error:.1e}"


def main():
    every = [f"{path.parent.name}/{path.stem}" for path in sorted((ROOT / "kernels").glob("*/*.py"))]
    for variant in sys.argv[1:] or every:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{variant}: {compared(variant, folder)}", flush=True)


if __name__ == "__main__":
    main()
