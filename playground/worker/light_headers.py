"""A small part of torch/extension.h for judged files' builds, by the names in a text; in doubt, the full header is used."""

import hashlib
import re
from pathlib import Path

import cuda_emulator

LIGHT = cuda_emulator.LIGHT_HEADERS
REFUSED = "refused"  # a file beside the headers of a text that did not compile with them
# What the whole header brings along of the standard library, as far as texts rely on it.
STANDARD = ("algorithm", "array", "cassert", "cmath", "cstdint", "cstdio", "cstdlib", "cstring", "functional", "iostream")
STANDARD += ("limits", "map", "memory", "numeric", "optional", "sstream", "stdexcept", "string", "tuple", "unordered_map")
STANDARD += ("utility", "vector")
INCLUDES = re.compile(r'#\s*include\s*[<"]((?:torch|ATen)/[^>"]*)[>"]')
KNOWN_HEADERS = re.compile(r"torch/(extension|types)\.h|ATen/((cuda|core|ops)/.*|(ATen|Dispatch|Tensor)\.h)")
QUALIFIED = re.compile(r"(?<![\w:])(?:::)?(torch|at)::(\w+)")
KNOWN_NAMES = {
    *("Tensor", "TensorOptions", "TensorList", "Scalar", "ScalarType", "Device", "DeviceType", "DeviceIndex", "Dtype"),
    *("Layout", "MemoryFormat", "IntArrayRef", "ArrayRef", "Half", "BFloat16", "dtype", "device", "elementSize", "toString"),
    *("PackedTensorAccessor32", "PackedTensorAccessor64", "RestrictPtrTraits", "DefaultPtrTraits", "TensorAccessor", "cuda"),
}
CONSTANT = re.compile(r"k[A-Z]\w*")
# What looks like an operator and is more in the whole header; what gives names without a qualifier; methods of Tensor that are
# defined elsewhere.
NEEDS_ALL = re.compile(
    r"\b(torch|at)::(tensor|from_blob)\b|\busing\s+namespace\s+(torch|at)\b|\btorch::cuda::|\brequires_grad"
    r"|\.index(_put_)?\s*\(|\bAT_DISPATCH_(V2|SWITCH)\b|\bTORCH_(LIBRARY|MODULE)"
)
BINDS = re.compile(r"\bPYBIND11_|\bpy::|\bpybind11\b")


def folder_for(root, cpp, cuda, has_functions, implicit):
    """Return the folder, below `root`, of headers that serve these two texts; None where they need the whole, or none."""
    texts = [re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL) for text in (cpp, cuda)]  # without comments
    if not (implicit or any(INCLUDES.search(text) for text in texts)):
        return None
    operators = set()
    for text in texts:
        found = _operators(text)
        if found is None:
            return None
        operators |= found
    bindings = has_functions or bool(BINDS.search(texts[0])), bool(BINDS.search(texts[1]))
    content = _headers(sorted(operators), *bindings)
    if not any(header.startswith("ATen/") for text in texts for header in INCLUDES.findall(text)):  # those may need the whole
        content |= {f"ATen/{file.name}": file.read_text() for file in sorted((LIGHT.parent / "ATen").iterdir())}
    folder = Path(root) / "light" / hashlib.sha256(repr((cpp, cuda, content)).encode()).hexdigest()[:16]
    if (folder / REFUSED).exists():
        return None
    for name, text in content.items():
        file = folder / name
        if not file.exists():  # written again, it would be newer than what was built with it
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


def refuse(folder):
    """Remember that the whole is needed after all."""
    (folder / REFUSED).touch()


def _operators(text):
    """The operators that a text calls by their qualified names; None where it uses what is not known here."""
    if NEEDS_ALL.search(text) or not all(KNOWN_HEADERS.fullmatch(header) for header in INCLUDES.findall(text)):
        return None
    names = {name for _, name in QUALIFIED.findall(text)} - KNOWN_NAMES
    names = {name for name in names if not CONSTANT.fullmatch(name)}
    from torch.utils import cpp_extension

    folders = [Path(folder) / "ATen" / "ops" for folder in cpp_extension.include_paths()]
    return names if all(any((folder / f"{name}.h").is_file() for folder in folders) for name in names) else None


def _headers(operators, in_cpp, in_cuda):
    """{path: text} of torch/types.h and torch/extension.h; the latter has pybind11 for the C++ text, the CUDA text, or both."""
    lines = [*(f"#include <{name}>" for name in STANDARD), f'#include "{LIGHT / "types.h"}"']
    lines += [f"#include <ATen/ops/{name}.h>" for name in operators]
    wanted = {(True, True): "1", (True, False): "!defined(__CUDACC__)", (False, True): "defined(__CUDACC__)"}
    binding = [f"#if {wanted.get((in_cpp, in_cuda), '0')}", "#define LIGHT_PYBIND", "#endif"]
    extension = [*binding, f'#include "{LIGHT / "extension.h"}"']
    files = ("torch/types.h", lines), ("torch/extension.h", extension)
    return {path: "\n".join(["#pragma once", *own, ""]) for path, own in files}
