"""Which line of the variant's Python file each line of a text given to load_inline comes from.

The text is usually a string literal of that file with a few #defines put in front, but it may be put together from several
literals. So runs of equal lines are looked for, and each run gets a #line directive of its own.
"""

import linecache
import re
import sys
from pathlib import Path

LINE_DIRECTIVE = re.compile(r"\s*#\s*line\s+(\d+)\s*$")
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

    def run_length(at, place):
        length = 0
        while (
            at + length < len(lines)
            and place - 1 + length < len(file_lines)
            and lines[at + length] == file_lines[place - 1 + length]
        ):
            length += 1
        return length

    result = [None] * len(lines)
    at = expected = 0  # the line of the file that follows the last one found
    while at < len(lines):
        candidates = places.get(lines[at], ())
        # A line may stand in the file more than once: the one behind the last is meant, or else the longest run of equals.
        longest = max(candidates, key=lambda place, at=at: run_length(at, place), default=None)
        place = expected if expected in candidates else longest
        length = run_length(at, place) if place else 0
        # A lone brace or the like matches by accident, and so does an #include.
        distinct = sum(len(line.strip()) for line in lines[at : at + length] if not line.startswith("#include"))
        if length and (place == expected or distinct >= 8):
            result[at : at + length] = range(place, place + length)
            at, expected = at + length, place + length
        else:
            at, expected = at + 1, expected + 1 if expected else 0
    # A text of one line, say the declaration of a function, stands within a line.
    for at, line in enumerate(lines):
        if result[at] is None and len(line.strip()) >= 8 and not line.startswith("#"):
            holders = [number for number, held in enumerate(file_lines, 1) if line.strip() in held]
            result[at] = holders[0] if len(holders) == 1 else None
    # Around a raw literal's quotes the file's line holds more than the text's; it still is the next one.
    for at in range(1, len(result)):
        if result[at] is None and result[at - 1] is not None:
            result[at] = result[at - 1] + 1
    return result


def explicit_map(text):
    """The lines' numbers by the text's own #line directives."""
    numbers, following = [], 1
    for line in text.split("\n"):
        numbers.append(following)
        directive = LINE_DIRECTIVE.match(line)
        following = int(directive[1]) if directive else following + 1
    return numbers


class SourceMap:
    """Maps lines of one text. `file` is what #line names: the Python file, or a made-up name where it was not found."""

    def __init__(self, text, source_file, fallback_name):
        self.explicit = any(map(LINE_DIRECTIVE.match, text.split("\n")))
        if self.explicit:
            self.lines = explicit_map(text)
        else:
            self.lines = line_map(text, lines_of_file(source_file)) if source_file else [None] * (text.count("\n") + 1)
        self.found = any(line is not None for line in self.lines)
        self.file = source_file if self.found else fallback_name
        if not self.found:  # by the text's own numbers, whatever is put into it
            self.lines = list(range(1, len(self.lines) + 1))

    def line(self, number):
        """The file's line for the text's `number`-th."""
        if not self.found or not 1 <= number <= len(self.lines):
            return number
        return self.lines[number - 1] or next((line for line in self.lines[number - 1 :] if line), number)

    def with_directives(self, text, file=None):
        """The text with a #line wherever the numbering jumps. They name `file` where it is given, in place of `self.file`."""
        quoted = str(file or self.file).replace("\\", "\\\\").replace('"', '\\"')
        if self.explicit:
            return "\n".join(LINE_DIRECTIVE.sub(rf'#line \1 "{quoted}"', line) for line in text.split("\n"))
        out, expected = [], None
        continued = False
        for line, number in zip(text.split("\n"), self.lines, strict=True):
            if number is not None and number != expected and not continued:
                out.append(f'#line {number} "{quoted}"')
                expected = number
            out.append(line)
            continued = line.endswith("\\")
            expected = expected + 1 if expected is not None else None
        return "\n".join(out)
