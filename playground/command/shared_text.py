"""What all variants of the project write alike: python -m playground.command.shared_text writes it into their files.

Of templates/, shell.txt (or shell_cpu.txt) stands between the text that is compiled and what is the file's own, main.txt ends
the file. device.txt has small device functions, PTX wrappers and the macros in those, separated by empty lines: where a file
defines one of these names, it is that text, with the comment above it. --check names the files that differ, with exit status 1.
"""

import argparse
import re
import sys
from pathlib import Path

from playground import catalog

TEMPLATES = Path(__file__).parent / "templates"
SHELL, OWN = "# ---- The same text in all files, down to", "# ---- What is this file's own.\n"
MAIN = "@torch.no_grad()\ndef main():"
NAME = re.compile(r"^(?:#define |(?:template <[^\n]*>\n)?DEVICE[^\n(]* )(\w+)(?=\(| )", re.MULTILINE)


def shell(is_cuda=True):
    """Return what stands behind the text that is compiled: CUDA, or C++ to run on the CPU."""
    return (TEMPLATES / ("shell.txt" if is_cuda else "shell_cpu.txt")).read_text(encoding="utf-8")


def main_text():
    """Return what ends a file: its `main` and the call of it."""
    return (TEMPLATES / "main.txt").read_text(encoding="utf-8")


def device_functions():
    """Return {name: text with the comment above it} of the canonical device functions."""
    blocks = (TEMPLATES / "device.txt").read_text(encoding="utf-8").strip("\n").split("\n\n")
    return {NAME.search(block)[1]: block for block in blocks}


def as_shared(text):
    """Return a variant's text with the shared parts as they are to be; one without any as it is."""
    if SHELL not in text:
        return text
    own = text[text.index(OWN) + len(OWN) : text.rindex(MAIN)]
    text = text[: text.index(SHELL)] + shell(is_cuda="\nCUDA = " in text) + own + main_text()
    has_macro = "#define DEVICE" in text
    for name, block in device_functions().items():
        block = block if has_macro else block.replace("DEVICE", "__device__ __forceinline__")
        text = _own_definition(name).sub(lambda _, block=block: block + "\n", text)
    return text


def _own_definition(name):
    """Return a pattern for that macro or device function with the comment above it; a function ends on its line or at `}`."""
    comment = r"(?:^//(?! ----)[^\n]*\n)*"
    head = rf"^(?:template <[^\n]*>\n)?(?:__device__|DEVICE)[^\n(]*?\b{name}\([^;{{]*?\{{"
    function = rf"{head}(?:[^\n]*\}}\n|[^\n]*\n(?:(?!\}})[^\n]*\n)*\}}\n)"
    return re.compile(rf"{comment}(?:{function}|^#define {name}\b(?:[^\n]*\\\n)*[^\n]*\n)", re.MULTILINE)


def different():
    """Return {path: text as it is to be} of the files that differ."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(catalog.KERNELS.glob("*/*.py"))}
    return {path: as_shared(text) for path, text in texts.items() if as_shared(text) != text}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = different()
    for path, text in found.items():
        print(path.relative_to(catalog.ROOT))
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
