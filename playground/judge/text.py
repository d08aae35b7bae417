"""What the text of a file says: nothing of it runs here."""

import ast
import contextlib
import re
from pathlib import Path
from typing import Any

from cuda_emulator import kernel_names
from playground.catalog import lines_of

# What a text that computes in a lower precision has.
PRECISIONS = {"tf32": r"tf32|tl\.dot|wmma|\bmma[_.]|matmul_precision|0x1fff", "bf16": r"bfloat16|bf16|autocast"}
PRECISIONS |= {"fp16": r"__half|half2|\bhalf\b *[*&>()]|khalf|f(loat|p)?16|autocast"}
TRITON_KERNEL = re.compile(r"@(?:triton\.)?(?:jit|autotune|heuristics)\b(?:.|\n)*?\ndef\s+(\w+)")


def names_cuda(path: str | Path, content: bytes | None = None) -> bool:
    """Return whether a file, or its bytes `content`, speaks of CUDA: .cuda(), device="cuda", torch.cuda, its headers."""
    text = (Path(path).read_bytes() if content is None else content).decode(errors="replace")
    of_device = r"""\.cuda\(|is_cuda|["']cuda|torch\.cuda( import|\.(?!is_available\b))"""
    of_build = r"\bcuda_sources\b|\bwith_cuda\s*=\s*True|#\s*include\s*<(cuda|cublas|(c10|ATen)/cuda/)"
    return bool(re.search(f"{of_device}|{of_build}", text))


class Text:
    """What a variant's file says it contains. Docstrings and comments do not count. `content`: see names_cuda."""

    def __init__(self, path: str | Path, content: bytes | None = None) -> None:
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

    def line_of(self, pattern: str | None) -> int | None:
        """Return the number of the first line in which a pattern is found, ModelNew's before the others'; None without."""
        found = [number for number, line in enumerate(self._lines, 1) if pattern and re.search(pattern, line)]
        return next((number for number in found if number >= self._first_of_model), found[0] if found else None)


PARAMETERS = ("name", "cpp_sources", "cuda_sources")  # of load_inline, those that are given by position
REPLACES = {"exec", "eval", "globals", "setattr", "vars", "patch"}  # by these load_inline could be another function


class Builds:
    """A file's constant calls of load_inline; `fails_with_them`: one that fails ends the loading of the file."""

    def __init__(self, content: bytes) -> None:
        tree = ast.parse(content)
        nodes = list(ast.walk(tree))
        stored = [_name_of(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)]
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self._known = {}
        for each in tree.body:
            if isinstance(each, ast.Assign) and stored.count(name := _name_of(each.targets[0])) == 1:
                with contextlib.suppress(ValueError):
                    self._known[name] = self._value(each.value)
        found = [node for node in nodes if isinstance(node, ast.Call) and _name_of(node.func) == "load_inline"]
        self.calls = []
        for call in found:
            with contextlib.suppress(ValueError):
                given: dict[Any, Any] = dict(zip(PARAMETERS, map(self._value, call.args), strict=False))
                given |= {each.arg: self._value(each.value) for each in call.keywords}  # one of ** raises, too
                if {"name", "cpp_sources"} <= given.keys() and len(call.args) <= len(PARAMETERS):
                    self.calls.append(given)
        at_top = [each.value for each in tree.body if isinstance(each, ast.Assign | ast.Expr)]
        are_made = len(self.calls) == len(found) and all(call in at_top for call in found)
        names = {_name_of(node) for node in nodes}
        is_other = "load_inline" in {*stored, *defined} or names & REPLACES or not all(map(_is_torchs, nodes))
        self.fails_with_them = are_made and not is_other and "ModelNew" in defined

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression of constants. Raises ValueError for any other."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name) if name in self._known:
                return self._known[name]
            case ast.List(elements) | ast.Tuple(elements):
                return [self._value(each) for each in elements]
            case ast.BinOp(left, ast.Add(), right) if type(one := self._value(left)) is type(other := self._value(right)):
                return one + other
        raise ValueError


def _name_of(node: ast.AST | None) -> Any:
    """The name, or attribute, that a node of a tree is; None of others."""
    return getattr(node, "id", None) or getattr(node, "attr", None)


def _is_torchs(node: ast.AST | None) -> bool:
    """Whether a node imports or calls no other load_inline than torch's, as far as it does either."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "torch.utils.cpp_extension" or not {each.name for each in node.names} & {"load_inline", "*"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_inline":
        return _name_of(node.func.value) == "cpp_extension"
    return True
