"""What the stopwatch claims while the machine is busy, of two variants whose speed is known.

    python tests/clock/busy_machine.py [--timings 20] [--device cuda] [CONDITION ...]

One variant is the original itself: it must never be a win or a loss. The other does half of the work: it must be a win of about
2x, or be withheld. Each is timed so often, in a process of its own, five times in each run of compare.py. A row is printed for
each of the two under each condition; docs/how_times_are_taken.md has those of a whole run.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SILENT = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

MODEL = """
import torch
import torch.nn as nn

class {name}(nn.Module):
    def forward(self, x):
        {body}

batch_size, features = 64, 16384

def get_inputs():
    return [1 + torch.rand(batch_size, features)]

def get_init_inputs():
    return []
"""
TWICE = "return torch.lgamma(x) + torch.lgamma(x)"
VARIANTS = {"the_original": TWICE, "half_the_work": "y = torch.lgamma(x); return y + y"}
COPIES = 5  # of each variant in a run
SPIN = "while True: pass"
COPY = "import numpy; a = numpy.ones(1 << 25); b = a.copy()\nwhile True: b[:] = a"
ON_GPU = "import torch; a = torch.randn(4096, 4096, device='cuda')\nwhile True: a @ a; torch.cuda.synchronize()"
HALF_ON_GPU = ON_GPU.replace("while True:", "import time\nwhile True: time.sleep(0.002);")

# Name -> (what runs beside it, how often, with which niceness). A number below zero stands for one on every processor.
CONDITIONS = {
    "quiet": (None, 0, 0),
    "a busy loop": (SPIN, 1, 0),
    "a busy loop, niced": (SPIN, 1, 19),
    "a busy loop on every core": (SPIN, -1, 0),
    "a busy loop on every core, niced": (SPIN, -1, 19),
    "copies of memory in a loop": (COPY, 1, 0),
    "another compare.py": ("compare.py", 1, 0),
    "products of matrices on the GPU": (ON_GPU, 1, 0),
    "the same, now and then": (HALF_ON_GPU, 1, 0),
}


def write_files(folder, copies=COPIES):
    """(the problem's file, those of the variants' copies)."""
    problem = folder / "twice.py"
    problem.write_text(MODEL.format(name="Model", body=TWICE))
    variants = []
    for copy in range(copies):
        for name, body in VARIANTS.items():
            variants.append(folder / f"{name}.{copy}.py")
            variants[-1].write_text(MODEL.format(name="ModelNew", body=body))
    return problem, variants


@contextlib.contextmanager
def beside(condition, folder):
    """What the condition's name says runs meanwhile."""
    program, count, niceness = CONDITIONS[condition]
    command = [sys.executable, "-c", program]
    if program == "compare.py":
        again = f"{sys.executable} compare.py --model {folder}/twice.py --variant {folder}/the_original.0.py"
        command = ["sh", "-c", f"while true; do {again}; done"]
    command, times = ["nice", "-n", str(niceness), *command], os.cpu_count() if count < 0 else count
    running = [subprocess.Popen(command, start_new_session=True, **SILENT) for _ in range(times)]
    try:
        time.sleep(2 if running else 0)
        yield
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def claims(folder, device, copies=COPIES):
    """[(variant, its result)] of one run of compare.py."""
    problem, variants = write_files(folder, copies)
    command = [sys.executable, "compare.py", "--quick", "--device", device, "--json", str(folder / "run.json")]
    command += ["--model", str(problem), "--variant", *map(str, variants)]
    subprocess.run(command, check=True, **SILENT)
    return [(each["variant"].split(".")[0], each) for each in json.loads((folder / "run.json").read_text())["results"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help=f"default all: {', '.join(CONDITIONS)}")
    parser.add_argument("--timings", type=int, default=20, help="of each variant; rounded up to whole runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    usable = [name for name, (program, *_) in CONDITIONS.items() if given.device == "cuda" or "cuda" not in str(program)]
    for condition in given.conditions or usable:
        counts = collections.defaultdict(collections.Counter)
        ratios = collections.defaultdict(list)
        with tempfile.TemporaryDirectory() as folder, beside(condition, Path(folder)):
            write_files(Path(folder))
            for _ in range(math.ceil(given.timings / COPIES)):
                for name, result in claims(Path(folder), given.device):
                    outcome = result["outcome"] or {"verdict": result["verdict"], "ratio": None}
                    counts[name][outcome["verdict"]] += 1
                    ratios[name] += [f"{outcome['ratio']:.3g}"] if outcome["ratio"] else []
        for name, words in counts.items():
            told = ", ".join(f"{n} {word}" for word, n in words.items())
            print(f"{condition}: {name}: {told}; ratios: {' '.join(sorted(ratios[name], key=float)) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
