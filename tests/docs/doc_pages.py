"""The pages that a reader follows: their code blocks, and what each block is.

A block is run, unless a comment directly above it in the markdown says what it is:

    <!-- not run: REASON -->        shell: it is only parsed, every option, file, model and variant in it must exist
    <!-- run by .ci/run: NAME -->   .ci/run runs it as it stands: it takes minutes and the whole machine
    <!-- sample output -->          of run_all.py: its last line is checked
    <!-- usage -->                  the options of the commands: all of them, and no others
    <!-- layout -->                 of files: those at the beginning of a line must exist
    <!-- exit status N -->          it is run, and ends with this status

A text block without a comment is the output of the block before it; `...` stands for anything, and USERS_FOLDER for where the
page's commands ran.
"""

import re
from dataclasses import dataclass

from playground.catalog import ROOT

PAGES = ["README.md", "cuda_emulator/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SHELL = ("bash", "sh", "console")
RUNNABLE = (*SHELL, "python", "gdb")
OUTPUT = "text"
MARKED = ("sample output", "usage", "layout")
NOT_RUN = re.compile(r"not run: \S.*")
RUN_BY_CI = re.compile(r"run by \.ci/run: (\S.*)")
EXIT_STATUS = re.compile(r"exit status (\d+)")
USERS_FOLDER = "/home/you/playground"

FENCED = re.compile(r"((?:^<!--.*-->\n)*)^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
COMMENT = re.compile(r"<!-- (.*) -->")


@dataclass(frozen=True)
class Block:
    """`comments` are those directly above; `line` is that of the block's first line."""

    page: str
    line: int
    language: str
    text: str
    comments: tuple

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def mark(self):
        """What the comment says that the block is: one of MARKED, "not run", or "" for one that is run or was printed.

        What only .ci/run runs is "not run".
        """
        if self.name_in_ci or any(NOT_RUN.fullmatch(comment) for comment in self.comments):
            return "not run"
        return next((comment for comment in self.comments if comment in MARKED), "")

    @property
    def name_in_ci(self):
        """By what name .ci/run takes it from the page."""
        return next((match[1] for match in map(RUN_BY_CI.fullmatch, self.comments) if match), None)

    @property
    def status(self):
        """The exit status with which it ends."""
        return next((int(match[1]) for match in map(EXIT_STATUS.fullmatch, self.comments) if match), 0)

    @property
    def is_run(self):
        return self.language in RUNNABLE and not self.mark

    @property
    def is_output(self):
        return self.language == OUTPUT and not self.mark


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in FENCED.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        yield Block(page, line, match[2], match[3], tuple(COMMENT.findall(match[1])))


def all_blocks(mark=None):
    return [block for page in PAGES for block in blocks(page) if mark is None or block.mark == mark]


@dataclass
class Step:
    """A block that is run, and those of its output."""

    block: Block
    outputs: list

    def __str__(self):
        return str(self.block)


def steps(*pages):
    """What a reader of the pages does, in their order."""
    found = []
    for block in (block for page in pages for block in blocks(page)):
        if block.is_run:
            found.append(Step(block, []))
        elif block.is_output:
            found[-1].outputs.append(block)
    return found


def without_blocks(page):
    """The page's text with a blank line in place of each line of a block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
