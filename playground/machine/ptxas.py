"""What ptxas says of a CUDA text: registers, spills and shared memory of each kernel. Needs nvcc; no GPU, no CUDA in torch."""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playground.subject import Kernel, Unknown

ARCHITECTURES = ("sm_80", "sm_90a")  # where neither a GPU nor the text's own flags name one
SECONDS = 300  # for one text and architecture


class Refused(Exception):
    """nvcc does not compile the text; the exception's text is its command and its words."""


@dataclass(frozen=True)
class DeviceCode:
    """What a variant hands to load_inline for its device code."""

    text: str
    flags: tuple = ()

    @property
    def architectures(self):
        """Return those that the variant's own flags name (load_inline then adds none), or else none."""
        return tuple(sorted({name for flag in self.flags if "arch" in flag for name in re.findall(r"sm_\d+[af]?", flag)}))


def find_nvcc():
    """Return the path of nvcc, in the order in which torch looks, or None."""
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    folders = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def describe(codes, capability=None):
    """Return {architecture: [Kernel, ...]} for the texts' own flags, the GPU's `capability` or ARCHITECTURES, or an Unknown."""
    codes = [code for code in codes if code.text.strip()]
    if not codes:
        return Unknown("no CUDA text was given to load_inline")
    if any(re.search(r"^\s*#\s*include\s*[<\"](torch|ATen|c10)/", code.text, re.MULTILINE) for code in codes):
        return Unknown("its CUDA text includes PyTorch's headers, which nvcc alone is not asked to compile")
    nvcc = find_nvcc()
    if nvcc is None:
        return Unknown("nvcc is not installed")
    usual = (f"sm_{capability.replace('.', '')}",) if capability else ARCHITECTURES
    found = {}
    try:
        with tempfile.TemporaryDirectory(prefix="playground-ptxas-") as folder:
            for code in codes:
                kernels, _ = compile_text(nvcc, code, {each: [each] for each in code.architectures or usual}, Path(folder))
                for architecture, made in kernels.items():
                    found.setdefault(architecture, []).extend(made)
    except (Refused, OSError, subprocess.SubprocessError) as complaint:
        lines = [line.strip() for line in str(complaint).strip().splitlines()] or [""]
        error = next((line for line in lines if re.search(r"\b(error|fatal)\b", line)), lines[-1])[:300]
        return Unknown(f"nvcc does not compile the text by itself: {error}")
    except (KeyError, TypeError):  # a version that says it in another way
        return Unknown("ptxas's output is not understood")
    return found


def compile_text(nvcc, code, targets, folder):
    """Return ({architecture: kernels}, warnings) by one nvcc; `targets` are {PTX: what is made from it}. Raises Refused."""
    (folder / "text.cu").write_text(code.text, encoding="utf-8")
    generated = [f"-gencode=arch={ptx.replace('sm', 'compute')},code=[{','.join(made)}]" for ptx, made in targets.items()]
    named = [flag for flag in code.flags if "arch" not in flag and flag != "-gencode"]
    command = [nvcc, "-fatbin", "--threads=2", *generated, *named, "-Xptxas=-v", "text.cu", "-o", "text.fatbin"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    output = result.stdout + result.stderr
    if result.returncode:
        raise Refused(f"{' '.join(command)}\n{output}")
    found = {architecture: [] for made in targets.values() for architecture in made}
    for part in output.split("Compiling entry function ")[1:]:
        found[re.match(r"'.+?' for '(\w+)'", part)[1]].append(_kernel(part, nvcc))
    return found, [line for line in output.splitlines() if re.search(r"\bwarning\b|performance loss", line, re.IGNORECASE)]


def _kernel(part, nvcc):
    """From ptxas -v, whose lines on a function follow its name."""
    name = re.match(r"'(.+?)'", part)[1]
    # Lines on device functions that were not inlined may stand before or after the kernel's own.
    own = re.search(rf"Function properties for {re.escape(name)}\n(.+)", part)[1]
    stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+).+?(\d+) bytes spill loads", own).groups())
    used = re.search(r"Used (\d+) registers.*", part)
    shared = re.search(r"(\d+) bytes smem", used.group()) or (0, 0)
    return Kernel(_demangled(name, nvcc), int(used[1]), stack, stores, loads, int(shared[1]))


def _demangled(name, nvcc):
    """Without return type and arguments; as it is where the toolkit has no demangler."""
    tool = shutil.which("cu++filt", path=str(Path(nvcc).resolve().parent)) or shutil.which("c++filt")
    if tool is None:
        return name
    text = subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"^void ", "", re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", text))
