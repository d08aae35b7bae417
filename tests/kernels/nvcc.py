"""The CUDA text of a variant through nvcc alone: what ptxas says of its kernels. It needs no GPU and no CUDA in torch."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch.utils import cpp_extension

ARCHITECTURES = ("sm_80", "sm_90a")


@dataclass(frozen=True)
class Recipe:
    """What a variant hands to load_inline for its device code."""

    text: str
    flags: tuple

    @property
    def architectures(self):
        """All of them, or the one that the variant's own flags name (load_inline then adds none)."""
        named = {name for flag in self.flags if "arch" in flag for name in re.findall(r"sm_\d+[af]?", flag)}
        return tuple(sorted(named)) or ARCHITECTURES


@dataclass(frozen=True)
class Kernel:
    """A kernel of a cubin; memory in bytes. `shared` is what is declared statically, what a launch adds is not in it."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self):
        return self.spill_stores + self.spill_loads > 0


class _Recorded(BaseException):
    """Raised in place of a build. Not an Exception, so that nothing takes it for a failed build and carries on."""


def find():
    """The path of nvcc, in the order in which torch looks, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    candidates += [Path(found) for found in [shutil.which("nvcc")] if found] + [Path("/usr/local/cuda/bin/nvcc")]
    return next((str(path) for path in candidates if path.is_file()), None)


def recipe(model, inputs):
    """The Recipe that model(*inputs) would build: load_inline is replaced by a recorder."""
    recorded = []

    def record(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=(), **options):
        recorded.append(Recipe(cuda_sources, tuple(extra_cuda_cflags)))
        raise _Recorded

    with mock.patch.object(cpp_extension, "load_inline", record), torch.no_grad():
        try:
            model(*inputs)
        except _Recorded:
            return recorded[0]
    raise AssertionError(f"{type(model).__module__} called no load_inline in its first forward")


def compile_cubin(nvcc, recipe, architecture, folder):
    """(kernels, warnings) of the text for one architecture. Raises AssertionError with nvcc's words when it refuses."""
    source = folder / f"text_{architecture}.cu"
    source.write_text(recipe.text)
    named = [flag for flag in recipe.flags if "arch" not in flag and flag != "-gencode"]
    command = [nvcc, "-cubin", f"-arch={architecture}", *named, "-Xptxas=-v", source.name, "-o", f"{source.stem}.cubin"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{' '.join(command)}\n{output}"
    warnings = [line for line in output.splitlines() if re.search(r"\bwarning\b", line, re.IGNORECASE)]
    return _kernels(output, nvcc), warnings


def _kernels(output, nvcc):
    """From ptxas -v, whose lines on a function follow its name."""
    kernels = []
    for part in re.split(r"Compiling entry function ", output)[1:]:
        name = re.match(r"'(.+?)'", part).group(1)
        # Lines on device functions that were not inlined may stand before or after the kernel's own.
        own = re.search(rf"Function properties for {re.escape(name)}\n(.+)", part).group(1)
        stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+).+?(\d+) bytes spill loads", own).groups())
        used = re.search(r"Used (\d+) registers.*", part)
        shared = re.search(r"(\d+) bytes smem", used.group())
        kernels.append(
            Kernel(_demangled(name, nvcc), int(used.group(1)), stack, stores, loads, int(shared.group(1)) if shared else 0)
        )
    return kernels


def _demangled(name, nvcc):
    """Without return type and arguments; as it is where the toolkit has no demangler."""
    tool = shutil.which("cu++filt", path=str(Path(nvcc).resolve().parent)) or shutil.which("c++filt")
    if tool is None:
        return name
    text = subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"^void ", "", re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", text))
