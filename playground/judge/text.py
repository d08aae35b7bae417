"""What the text of a file says: nothing of it runs here."""

import ast
import re
from pathlib import Path

from cuda_emulator import kernel_names
from playground.catalog import lines_of

# What a text that computes in a lower precision has.
PRECISIONS = {
    "tf32": r"tf32|tl\.dot|wmma|\bmma[_.]|matmul_precision|0x1fff",
    "fp16": r"__half|half2|\bhalf\b *[*&>()]|khalf|f(loat|p)?16|autocast",
    "bf16": r"bfloat16|bf16|autocast",
}
TRITON_KERNEL = re.compile(r"@(?:triton\.)?(?:jit|autotune|heuristics)\b(?:.|\n)*?\ndef\s+(\w+)")


def names_cuda(path, content=None):
    """Return whether a file, or its bytes `content`, speaks of CUDA: .cuda(), device="cuda", torch.cuda, its headers."""
    text = (Path(path).read_bytes() if content is None else content).decode(errors="replace")
    of_device = r"""\.cuda\(|is_cuda|["']cuda|torch\.cuda( import|\.(?!is_available\b))"""
    of_build = r"\bcuda_sources\b|\bwith_cuda\s*=\s*True|#\s*include\s*<(cuda|cublas|(c10|ATen)/cuda/)"
    return bool(re.search(f"{of_device}|{of_build}", text))


class Text:
    """What a variant's file says it contains. Docstrings and comments do not count. `content`: see names_cuda."""

    def __init__(self, path, content=None):
        text = (Path(path).read_bytes() if content is None else content).decode("utf-8-sig", errors="replace")
        tree = ast.parse(text, filename=str(path))
        nodes = list(ast.walk(tree))
        bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        strings = [node.value for node in texts if id(node) not in bare]
        self._lines = lines_of(text)
        self._first_of_model = next((n.lineno for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ModelNew"), 1)
        names = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", None) for node in nodes}
        self.triton_kernels = set(TRITON_KERNEL.findall(text))
        self.cuda_kernels = {name for string in strings for name in kernel_names(string)}
        self.names_cuda = names_cuda(path, content)
        self.may_compute_in = {name for name, pattern in PRECISIONS.items() if re.search(pattern, text, re.IGNORECASE)}
        self.means_to_build = bool(names & {"load_inline"} or self.cuda_kernels)

    def line_of(self, pattern):
        """Return the number of the first line in which a pattern is found, ModelNew's before the others'; None without."""
        found = [number for number, line in enumerate(self._lines, 1) if re.search(pattern, line)]
        return next((number for number in found if number >= self._first_of_model), found[0] if found else None)
