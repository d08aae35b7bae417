"""What the pages say, as far as it can be held against the project without running anything: no stale option, name or link."""

import importlib.util
import re
import shlex

import doc_commands
import doc_pages
import pytest

from playground import catalog
from playground.catalog import ROOT
from playground.command import options
from tools import texts

VARIANT = re.compile(r"(v[1-9][0-9]*|cpu|training)(_[a-z0-9]+)+")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.<>/-]+(/|\.(py|md|cpp|h|npz|txt))|(docs|kernels|models|playground|results|tests|tools)/[\w./-]+")
COMMANDS = ("python", "compare.py", "run_all.py", "pip")
EMULATOR = "cuda_emulator"
# Where the files stand that a page names without their folder.
FOLDERS = {
    "README.md": ["."],
    f"{EMULATOR}/README.md": [".", EMULATOR, f"{EMULATOR}/runtime", f"{EMULATOR}/include/emulator"],
    "docs/design.md": [".", "playground"],
    "docs/what_a_pass_proves.md": [".", "playground", "tests/judge"],
}
ALL_PAGES = pytest.mark.parametrize("page", doc_pages.PAGES)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@ALL_PAGES
def test_every_block_is_run_or_says_what_it_is(page):
    previous = None
    for block in doc_pages.blocks(page):
        for comment in block.comments:
            kinds = (doc_pages.NOT_RUN, doc_pages.RUN_BY_CI, doc_pages.EXIT_STATUS)
            assert comment in doc_pages.MARKED or any(kind.fullmatch(comment) for kind in kinds), f"{block}: <!-- {comment} -->"
        assert len(block.comments) <= 1, f"{block}: {block.comments}"
        assert block.mark or block.language in (*doc_pages.RUNNABLE, doc_pages.OUTPUT), (
            f"{block}: {block.language or 'a block without a language'} is neither run nor marked"
        )
        if block.is_output:
            assert previous and (previous.is_run or previous.is_output), f"{block}: the output of no block that is run"
        previous = block


def test_ci_runs_what_the_pages_say_that_it_runs():
    """By the names of the blocks, each once."""
    named = [block.name_in_ci for block in doc_pages.all_blocks() if block.name_in_ci]
    followed = re.findall(r'^follow "([^"]+)"', (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert named and sorted(followed) == sorted(named)


@ALL_PAGES
def test_no_code_escapes_the_tests(page):
    """Fences that are indented or not closed, code that is only indented, and code that goes on in the next line."""
    text = doc_pages.without_blocks(page)
    assert not re.search(r"^\s*(```|~~~)", text, re.MULTILINE)
    assert not re.search(r"\n\n {4,}\S", text), "write it as a fenced block"
    for line in text.splitlines():
        assert line.count("`") % 2 == 0, f"write code on one line: {line}"


@pytest.mark.parametrize("block", [block for block in doc_pages.all_blocks("not run") if not block.name_in_ci], ids=str)
def test_what_is_not_run_could_be_typed(block):
    assert block.language in doc_pages.SHELL, "only commands are parsed; run it"
    doc_commands.check_block(block)


@ALL_PAGES
def test_links_lead_somewhere(page):
    text = doc_pages.without_blocks(page)
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for target in (one or other for one, other in targets):
        if not target.startswith("https://"):
            assert (ROOT / page).parent.joinpath(target.split("#")[0]).exists(), target


@ALL_PAGES
def test_files_and_options_in_the_text_exist(page):
    programs = [*doc_commands.SCRIPTS, "cuda_emulator"]
    known = set().union(*map(doc_commands.options_of, programs))
    for code in CODE.findall(doc_pages.without_blocks(page)):
        first = code.split()[0]
        if first.startswith("--") and first != "--":
            assert first.split("=")[0] in known, code
        elif first in COMMANDS:
            assert_options_exist(shlex.split(code))
        elif VARIANT.fullmatch(code):
            assert any(ROOT.glob(f"kernels/*/{code}.py")), code
        elif FILE.fullmatch(code):
            assert is_there(code, page), code


def is_there(name, page):
    """Whether a file or folder of this name, which may have <placeholders>, stands where the page looks for it."""
    pattern = re.sub(r"<\w+>", "*", name).rstrip("/")
    return any(any((ROOT / folder).glob(pattern)) for folder in FOLDERS.get(page, ["."]))


def assert_options_exist(words):
    """Of a command in the text, which may have placeholders."""
    words = words[1:] if words[0] == "python" else words
    program = words[1] if words[0] == "-m" else words[0]
    given = {word for word in words if word.startswith("--")}
    if program not in (*doc_commands.SCRIPTS, "pip"):
        assert importlib.util.find_spec(program), words
    assert not given or given <= doc_commands.options_of(program), words


def test_the_usage_is_that_of_the_parsers():
    (block,) = doc_pages.all_blocks("usage")
    named = set(re.findall(r"--[\w-]+", block.text))
    assert named == set().union(*map(doc_commands.options_of, doc_commands.SCRIPTS))
    common = block.text[block.text.index("options:") :]
    only_here = doc_commands.options_of("compare.py") - doc_commands.options_of("run_all.py")
    assert not only_here & set(re.findall(r"--[\w-]+", common))
    assert f"--device {'|'.join(options.CHOICES['device'])}]" in block.text


def test_the_layout_is_that_of_the_files():
    for block in doc_pages.all_blocks("layout"):
        for line in re.findall(r"^\S.*", block.text, re.MULTILINE):
            for name in re.split(r",\s+", re.split(r"\s{2,}", line)[0]):
                assert is_there(name, block.page), f"{block}: {name}"


@pytest.mark.parametrize("block", doc_pages.all_blocks("sample output"), ids=str)
def test_a_sample_ends_as_todays_output_does(block):
    """`.ci/run` compares its last line with what run_all.py prints."""
    every = sum(len(catalog.variants(model)) for model in catalog.models())
    assert block.text.splitlines()[-1] == f"{every} passed"


def test_the_index_of_texts_has_those_of_python_and_of_cpp():
    found = {(str(path), text) for path, _, text in texts.texts()}
    assert ("playground/worker/referee.py", "no backward: loss.backward() would silently skip this layer") in found
    assert any(path == "cuda_emulator/runtime/shadow.cpp" and "race" in text for path, text in found)
