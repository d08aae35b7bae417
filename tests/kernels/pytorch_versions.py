"""With which PyTorch the kernels' files work: each release in an environment of its own, removed afterwards.

    python tests/kernels/pytorch_versions.py                first and last release of each minor version that pip offers
    python tests/kernels/pytorch_versions.py 2.4.0 2.15.0   these
    python tests/kernels/pytorch_versions.py 2.4.0 --all    with all variants instead of VARIANTS

Each file is copied out of the project and compared with the original in float64, outputs and gradients, at small sizes: the
CPU's natively, those in CUDA under the emulator. Prints a row of docs/commands.md's table for each release. A release takes
some minutes, 3 GB to download and 8 GB of disk.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST = 2, 4
# One native; one whose autograd is in C++, and that asks for PyTorch's precision in Python and C++.
VARIANTS = ["conv_pool_sigmoid_sum/cpu_box_sums", "conv3d_div_max_gap_bias_sum/v5_hopper"]
LIMIT = 2e-2  # of a tensor's norm; TF32 is off by up to 9e-3

# In the release's own Python: how far outputs and gradients of a file are off. Reads "KIND MODEL PATH_OF_COPY".
COMPARE = """
import json, sys
import torch
from playground import catalog

kind, model, path = sys.argv[1:]
problem = catalog.load_problem(catalog.find_model(model).path, catalog.SETTINGS["emulator"][model])
torch.manual_seed(0)
ours = catalog.load_variant(path).ModelNew(*problem.get_init_inputs())
if kind == "emulator":
    import cuda_emulator as emulator
    emulator.install(debug=True)
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


def offered():
    """The first and the last release of each minor version from OLDEST on, and the last one before, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listed = re.search(r"Available versions: (.+)", text)[1].split(", ")
    releases = sorted({tuple(map(int, each.split("."))) for each in listed if re.fullmatch(r"\d+\.\d+\.\d+", each)})
    chosen = [max(each for each in releases if each[:2] < OLDEST)]
    for _, group in itertools.groupby((each for each in releases if each[:2] >= OLDEST), key=lambda each: each[:2]):
        group = list(group)
        chosen += sorted({group[0], group[-1]})
    return [".".join(map(str, each)) for each in chosen]


def row(release, variants, scratch):
    """A row of the table: release, its CUDA, CPU variants, CUDA variants under the emulator."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        folder = Path(folder)
        python = folder / "environment" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
        needed = [f"torch=={release}", "ninja", "setuptools"]
        command = [python, "-m", "pip", "install", "-q", "--no-compile", *needed]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return [release, "", *[f"not installed: {last_line(done.stderr)}"] * 2]
        asked = [python, "-c", "import torch; print(torch.version.cuda or 'none')"]
        cuda = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        found = {"cpu": [], "emulator": []}
        for variant in variants:
            kind = "cpu" if "/cpu_" in variant else "emulator"
            found[kind].append(compared(python, kind, variant, folder, scratch))
    return [release, cuda, *map(summary, found.values())]


def compared(python, kind, variant, folder, scratch):
    """What came out, in a line: right, or what is wrong."""
    model, name = variant.split("/")
    copy = folder / f"{name}.py"
    shutil.copy(ROOT / "kernels" / model / f"{name}.py", copy)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "CUDA_EMULATOR_CACHE": str(Path(scratch) / "emulator"),
    }
    done = subprocess.run([python, "-c", COMPARE, kind, model, copy], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return f"`{name}`: {last_line(done.stderr)}"
    answer = json.loads(done.stdout.splitlines()[-1])
    print(f"    {kind} {variant}: {answer}", file=sys.stderr)
    return "right" if answer <= LIMIT else f"`{name}`: off by {answer:.1e}"


def summary(answers):
    return answers[0] if len(set(answers)) == 1 else "; ".join(each for each in answers if each != "right")


def last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1].replace("|", "/")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*")
    parser.add_argument("--all", action="store_true", help="all variants")
    options = parser.parse_args()
    files = sorted((ROOT / "kernels").glob("*/*.py"))
    variants = [f"{path.parent.name}/{path.stem}" for path in files] if options.all else VARIANTS
    with tempfile.TemporaryDirectory() as scratch:
        for release in options.releases or offered():
            print(f"PyTorch {release}", file=sys.stderr)
            print("|", " | ".join(row(release, variants, scratch)), "|", flush=True)


if __name__ == "__main__":
    main()
