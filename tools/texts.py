"""Print all texts that the program can say, a line each, to be read whole: FILE:LINE: TEXT, with {} for what is filled in.

    python -m tools.texts [WORD ...]

With words only texts that hold one of them are printed. Docstrings, patterns and code are no texts.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = 3  # in a row make a text
SENTENCE = re.compile(rf"(?:[A-Za-z]['\w-]*[,:;]? +){{{WORDS - 1}}}[A-Za-z{{]")
NO_TEXT = re.compile(r"#include|__global__|\\[sdwb(]|\(\?|\bdef |\bimport |;\n|\{\{|^--")
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def of_python(path):
    """Yield (line, text) of a file's strings, those of an f-string with {} for its expressions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in statements or id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def of_cpp(path):
    """Yield (line, text) of a file's strings; those that follow one another, but for expressions, are one."""
    code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    for statement in re.finditer(r"[^;{}]+", code):
        if found := LITERAL.findall(statement[0]):
            yield code.count("\n", 0, statement.start() + statement[0].index('"')) + 1, "{}".join(found)


def texts():
    """Yield (path below the root, line, text) of all that is a text."""
    for folder, suffixes in (("playground", (".py",)), ("cuda_emulator", (".py", ".cpp", ".h"))):
        for path in sorted(each for each in (ROOT / folder).rglob("*") if each.suffix in suffixes):
            for line, text in (of_python if path.suffix == ".py" else of_cpp)(path):
                if SENTENCE.search(text) and not NO_TEXT.search(text):
                    yield path.relative_to(ROOT), line, " ".join(text.split())


def main(words):
    for path, line, text in texts():
        if not words or any(word in text for word in words):
            print(f"{path}:{line}: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
