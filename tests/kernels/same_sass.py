"""Which kernels of a variant changed: the machine code (SASS) of two versions of its file, compared byte by byte.

    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py          against HEAD
    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py REVISION
    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py OLD_FILE.py

Needs nvcc; no GPU. A kernel whose code is the same under another name counts as the same. Exit status 1 if a kernel differs.
What is the same needs no new measurement: the times that are recorded for it still hold, unless its launch changed.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, where it is run as a script

import nvcc

from playground import catalog, tensors
from playground.machine import ptxas


def sass(model, path, folder):
    """{(architecture, kernel): (hash of its code, registers)} of the variant at `path`."""
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"].get(model.name))
    new = tensors.make_model(problem, catalog.load_variant(path).ModelNew, seed=0)
    recipe = nvcc.recipe(new, problem.get_inputs())
    found = {}
    for architecture in recipe.architectures or ptxas.ARCHITECTURES:
        kernels, _ = ptxas.compile_cubin(ptxas.find_nvcc(), recipe, architecture, folder)
        registers = {kernel.name: kernel.registers for kernel in kernels}
        with (folder / f"text_{architecture}.cubin").open("rb") as file:
            for section in ELFFile(file).iter_sections():
                if section.name.startswith(".text."):
                    name = demangled(section.name.removeprefix(".text."))
                    found[architecture, name] = hashlib.sha256(section.data()).hexdigest(), registers.get(name)
    return found


def demangled(name):
    found = subprocess.run(["c++filt", "--no-params", name], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"^void |\(anonymous namespace\)::", "", found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("before", nargs="?", default="HEAD", help="a revision, or another file (default: HEAD)")
    options = parser.parse_args()
    model = next(model for model in catalog.models() if model.name == options.file.resolve().parent.name)
    with tempfile.TemporaryDirectory() as folder:
        folder, old = Path(folder), Path(options.before)
        if not old.is_file():
            shown = subprocess.run(["git", "show", f"{options.before}:./{options.file}"], capture_output=True, check=True)
            old = folder / options.file.name
            old.write_bytes(shown.stdout)
        before, after = sass(model, old, folder), sass(model, options.file, folder)
    codes_before = {architecture_code(key, value) for key, value in before.items()}
    codes_after = {architecture_code(key, value) for key, value in after.items()}
    differs = False
    for key in sorted(after):
        same = architecture_code(key, after[key]) in codes_before
        differs |= not same
        print(f"{'same   ' if same else 'DIFFERS'} {key[0]:8} {key[1]}  {after[key][1]} registers")
    for key in sorted(before):
        if architecture_code(key, before[key]) not in codes_after:
            print(f"{'gone' if key not in after else 'before':7} {key[0]:8} {key[1]}  {before[key][1]} registers")
    return 1 if differs else 0


def architecture_code(key, value):
    return key[0], value[0]


if __name__ == "__main__":
    sys.exit(main())
