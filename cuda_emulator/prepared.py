"""Texts of extensions, made ready for the host compiler."""

import re
from pathlib import Path

from . import toolchain
from .declarations import ACCEPTED_RACE
from .diagnostics import describe, errors_in, unexplained
from .errors import EmulatorError
from .program import LINES_OF_A_FILE, numbered
from .rewrite import rewrite
from .sourcemap import SourceMap
from .text import UnsupportedError, as_read

REGISTERS = re.compile(r"#\s*include\s*<torch/library\.h>")
NAME = re.compile(r"\bTORCH_EXTENSION_NAME\b")
NAMED_LIBRARY = re.compile(r"\bTORCH_LIBRARY(?:_IMPL|_FRAGMENT)?\s*\(\s*TORCH_EXTENSION_NAME\b")
NAME_IN_A_VARIABLE = re.compile(r"(=\s*)C10_STRINGIZE\s*\(\s*TORCH_EXTENSION_NAME\s*\)(?=\s*;)")
STAND_IN = "emulator_stand_in"  # the library's name in a binding that is compiled once for all names
STAND_IN_FILE = "<cpp_sources>"  # the file of a binding's lines: copies of a file share its object


def after_line(text, line, inserted):
    """`text` with `inserted` behind its `line`-th line (0: in front)."""
    lines = text.split("\n")
    return "\n".join([*lines[:line], inserted, *lines[line:]])


def operator_headers(text):
    """Includes for the operators that a text names in full, as in torch::empty_like."""
    names = sorted(set(re.findall(r"\b(?:torch|at)::(\w+)\s*\(", text)))
    folders = [Path(flag.removeprefix("-isystem")) for flag in toolchain.torch_flags()[0] if flag.startswith("-isystem")]
    return [f"#include <ATen/ops/{name}.h>" for name in names if any((f / "ATen/ops" / f"{name}.h").exists() for f in folders)]


def is_the_same_under_any_name(text):
    """Whether a binding uses its library's name for nothing but registering operators, and to keep it in a variable."""
    named = len(NAMED_LIBRARY.findall(text)) + len(NAME_IN_A_VARIABLE.findall(text))
    return REGISTERS.search(text) is not None and named > 0 and named == len(NAME.findall(text))


class Prepared:
    """One text made ready for the host compiler. `shared`: it is a binding that serves under any library name."""

    def __init__(self, text, source_file, fallback_name, is_cuda):
        text = as_read(text)
        source_map = SourceMap(text, source_file, fallback_name)
        try:
            rewritten = rewrite(text)
        except UnsupportedError as error:
            place = f"{source_map.file}:{source_map.line(error.line)}"
            raise EmulatorError(f"{place}: {error.told}") from None
        self.file, self.given, self.line_of = source_map.file, text, source_map.line
        self.uses_torch = rewritten.uses_torch or not is_cuda
        self.shared = not is_cuda and is_the_same_under_any_name(text)
        self.kernel_lines = {name: source_map.line(found[-1].line) for name, found in rewritten.kernels.items()}

        lines = enumerate(text.split("\n"), 1)
        self.waiting = {source_map.line(number) for number in rewritten.waiting_lines}
        self.accepted_races = [source_map.line(number) for number, line in lines if ACCEPTED_RACE.search(line)]

        # The rewriter writes a kernel's line as the text counts it; make it the file's.
        def renumber(match):
            return f"{match[1]}{match[2]}{match[3]}{source_map.line(int(match[4]))}"

        launch = r'(::emulator::launch(?:_\w+)?\(")((?:\\.|[^"\\])*)(", )(\d+)'
        text = re.sub(launch, renumber, rewritten.text)
        text = NAME_IN_A_VARIABLE.sub(r"\1emulator_library_name", text) if self.shared else text
        source_map.lines += [None] * (text.count("\n") + 1 - len(source_map.lines))
        self.rewritten_lines = {
            line
            for line, before, after in zip(source_map.lines, self.given.split("\n"), text.split("\n"), strict=False)
            if before != after
        }
        added = [*operator_headers(text), "#include <emulator/torch_overrides.h>"] if self.uses_torch else []
        added += ["#include <emulator/nvcc_macros.h>"] if is_cuda else []
        added += ["#include <emulator/library_name.h>"] if self.shared else []
        at = rewritten.last_include_line
        text = after_line(text, at, "\n".join(added))
        source_map.lines[at:at] = [None] * len(added)
        self.text = source_map.with_directives(text, self.file if is_cuda else STAND_IN_FILE)

    def explain(self, messages):
        """An exception of the compiler's messages."""
        return self.described(self.errors(messages), messages)

    def errors(self, messages):
        return errors_in(messages, {str(self.file), STAND_IN_FILE}.__contains__)

    def described(self, errors, messages):
        if not errors:
            return EmulatorError(unexplained(messages))
        return EmulatorError(
            describe(
                errors,
                place=lambda line: (self.file, line),
                column_holds=lambda line: line not in self.rewritten_lines,
                text_lines=self.given.split("\n"),
            )
        )


class LoadedFile:
    """One of the files that are given to load, made ready as Prepared does it, with its headers in its program's mirror.

    PyTorch's headers that the program's own include come first: what nvcc defines stands behind them and before the own.
    """

    TORCH_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?:torch|ATen|c10|pybind11)/[^>\n]*>", re.M)

    def __init__(self, program, file):
        self.program, self.file, self.given = program, str(file.path), file.text
        self.is_cuda = file.path.suffix == ".cu"
        self.uses_torch, self.shared = True, False
        headers = [line for each in program.files if each is not file for line in self.TORCH_INCLUDE.findall(each.text)]
        added = [*dict.fromkeys(headers), *operator_headers(file.rewritten), "#include <emulator/torch_overrides.h>"]
        added += ["#include <emulator/nvcc_macros.h>"] if self.is_cuda else []
        last = file.made.last_include_line
        at = last % LINES_OF_A_FILE if last else 0
        more = "\n".join([*added, f"#line {file.first_line + at}"])
        self.text = after_line(numbered(file), at + 1, more)  # its first line is a #line

    def line_of(self, line):
        return line

    def errors(self, messages):
        return errors_in(messages, {str(file.path) for file in self.program.files}.__contains__)

    def described(self, errors, messages):
        described = describe(errors, self.program.place, self.program.is_compiled_as_it_is) if errors else unexplained(messages)
        return EmulatorError(described)

    def explain(self, messages):
        return self.described(self.errors(messages), messages)
