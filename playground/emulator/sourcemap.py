"""Which line of the variant's Python file each line of a text given to load_inline comes from.

The text is usually a string literal of that file with a few #defines put in front, but it may be put together from several
literals. So runs of equal lines are looked for, and each run gets a #line directive of its own.
"""

import linecache
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


def calling_file():
    """The file of the nearest caller outside this package and PyTorch."""
    frame = sys._getframe(1)
    while frame:
        name = frame.f_code.co_filename
        if not name.startswith(HERE) and f"{'/'}torch{'/'}" not in name:
            return name
        frame = frame.f_back
    return None


def lines_of_file(path):
    """The file's lines; linecache also knows the cells of a notebook."""
    linecache.checkcache(path)
    return [line.rstrip("\n") for line in linecache.getlines(path)]


def line_map(text, file_lines):
    """For each line of `text` its line number in the file, or None."""
    lines = text.split("\n")
    places = {}
    for number, line in enumerate(file_lines, 1):
        if line.strip():
            places.setdefault(line, []).append(number)
    result = [None] * len(lines)
    at = 0
    while at < len(lines):
        best, best_place = 0, None
        for place in places.get(lines[at], ()):
            run = weight = 0
            while at + run < len(lines) and place - 1 + run < len(file_lines) and lines[at + run] == file_lines[place - 1 + run]:
                weight += len(lines[at + run].strip())
                run += 1
            if weight > best:
                best, best_place = weight, place
                best_run = run
        # A lone brace or the like matches by accident.
        if best_place is None or best < 8:
            at += 1
            continue
        for offset in range(best_run):
            result[at + offset] = best_place + offset
        at += best_run
    # Around a raw literal's quotes the file's line holds more than the text's; it still is the next one.
    for at in range(1, len(result)):
        if result[at] is None and result[at - 1] is not None:
            result[at] = result[at - 1] + 1
    return result


class SourceMap:
    """Maps lines of one text. `file` is what #line names: the Python file, or a made-up name where it was not found."""

    def __init__(self, text, source_file, fallback_name):
        self.lines = line_map(text, lines_of_file(source_file)) if source_file else [None] * (text.count("\n") + 1)
        self.found = any(line is not None for line in self.lines)
        self.file = source_file if self.found else fallback_name

    def line(self, number):
        """The file's line for the text's `number`-th."""
        if not self.found or not 1 <= number <= len(self.lines):
            return number
        return self.lines[number - 1] or next((line for line in self.lines[number - 1 :] if line), number)

    def with_directives(self, text):
        """The text with a #line wherever the numbering jumps."""
        quoted = str(self.file).replace("\\", "\\\\").replace('"', '\\"')
        if not self.found:
            return f'#line 1 "{quoted}"\n{text}'
        out, expected = [], None
        continued = False
        for line, number in zip(text.split("\n"), self.lines):
            if number is not None and number != expected and not continued:
                out.append(f'#line {number} "{quoted}"')
                expected = number
            out.append(line)
            continued = line.endswith("\\")
            expected = expected + 1 if expected is not None else None
        return "\n".join(out)
