"""The page as a whole: no untrusted text becomes markup, nothing is lost, and it is small and well formed."""

import copy
import hashlib
import re

import hostile
import pytest
from made import UNTIMED, document_of, make_passed, read, summarised
from reading import Page
from typed import run

from playground import catalog
from playground.report import document as documents
from playground.report import page
from playground.serial import dump

ELEMENTS = """
html head meta title style body header main footer nav section figure figcaption h1 h2 h3 h4 h5 p a b i ul li dl div dt dd span
small bdi code pre details summary table caption thead tbody tr th td fieldset legend label input svg desc defs g path rect text
use clippath
"""


def well_formed(made):
    assert not made.mismatched and not made.open, (made.mismatched[:3], made.open)
    assert made.names() <= set(ELEMENTS.split())
    assert len(made.ids) == len(set(made.ids))
    assert {target.removeprefix("#") for target in made.targets} <= set(made.ids), "a link that leads nowhere, or out"
    attributes = {name for _, each in made.tags for name in each}
    assert not [name for name in attributes if name.startswith("on")]


@pytest.fixture
def hostile_page(tmp_path):
    document, names = hostile.document()
    canaries = hostile.Canaries()
    model = tmp_path / "<img src=x onerror=alert(3)>.py"
    variant = tmp_path / '"><script>alert(4)<' / "v1_$x^$.py"
    variant.parent.mkdir()
    model.write_text(f"'''{canaries.text()}'''", encoding="utf-8", errors="replace")
    text = f'r"""Title {canaries.text()}\n\nWhy\n    {canaries.text()} `{canaries.text()}`\n"""\n'
    text += f'CUDA = r"""\n#include <x>\n__global__ void k() {{}}  // {canaries.text()}\n"""\nx = "{canaries.text()}"\n'
    text += f"y = '{'long ' * 4000}'\n"
    variant.write_text(text, encoding="utf-8", errors="replace")
    result = copy.deepcopy(document["results"][0])
    result.update(model=model.stem, variant=variant.stem, source_sha256=hashlib.sha256(variant.read_bytes()).hexdigest())
    document["results"].append(result)
    return page.render(read(document), [page.Files(model, variant)]), [*names, *canaries.names]


def test_untrusted_text_stays_text(hostile_page):
    source, names = hostile_page
    made = Page(source)
    well_formed(made)
    assert [name for name in names if name not in made.text and f'"{name}' not in source] == []
    odd = {c for c in source if not (c.isprintable() or c in "\n\t\u00a0")}
    assert not odd, [hex(ord(c)) for c in odd]
    assert "[U+202E]" in made.text and "U+0007" in made.text
    assert set(re.findall(r"canary\d+\.[^{]*(.{8})", made.text)) == {"{{ 7 * 7"}, "a template in the text was filled in"
    source.encode("utf-8")


def test_long_lines_and_files_are_cut_with_a_remark(hostile_page):
    source, _ = hostile_page
    assert "more characters)" in Page(source).text
    assert max(map(len, source.splitlines())) < 100_000


def test_a_real_run(h200_page):
    made = Page(h200_page)
    well_formed(made)
    results = dump(documents.read(catalog.ROOT / "results" / "nvidia-h200.json"))["results"]
    assert len(h200_page.encode()) < 800_000 and len(made.tags) < 20_000
    for result in results:
        assert result["model"] in made.text and result["variant"] in made.text
    for words in ("Why it is faster", "ms, bound by"):
        assert words in made.text
    plots = [attributes["aria-labelledby"] for tag, attributes in made.tags if tag == "svg"]
    assert sum(name.startswith("first") for name in plots) == 2 * 3  # the ladders on both


def test_a_suite_of_untrusted_pairs():
    document, _ = hostile.document()
    document["suite"] = summarised(document, ["level1/3_<b>"])
    source = page.render(read(document), [])
    well_formed(Page(source))
    assert source.count('style="--by-run:') == len(document["results"])
    assert "<script" not in source


def test_what_was_raised_is_not_counted_as_right():
    result = make_passed("m", "v1_x")
    held, raised = {"complaint": None, "note": None}, {"complaint": None, "note": "raises Unsupported: graph break"}
    result["check"]["behaviour"] = {"inputs unchanged": held, "torch.compile": raised}
    text = Page(page.render(read(document_of(result)), [])).text
    assert "1 right, noted: torch.compile" in text and "2 right" not in text


def sources_on(source):
    shown = [part.split("</pre>")[0] for part in source.split('<pre class="code" tabindex="0">')[1:]]
    return {Page(f"<pre>{part}</pre>").text for part in shown}


def test_the_sources_of_a_few_variants_are_there_letter_by_letter(known):
    recorded = dump(documents.read(catalog.ROOT / "results" / "cpu-amd-epyc.json"))
    paths = [catalog.KERNELS / result["model"] / f"{result['variant']}.py" for result in recorded["results"]]
    assert sources_on(page.render(read(recorded), known)) == {path.read_text() for path in paths}


def test_of_many_sources_only_the_lines_around_findings_are_there(h200, h200_page, known, monkeypatch):
    assert sources_on(h200_page) == set() and "left out so that the page stays small" in h200_page
    monkeypatch.setattr("playground.report.page.view.MOST_SOURCE", 0)
    document = copy.deepcopy(h200)
    document["results"] = [result for result in document["results"] if result["variant"] == "v1_fused_tail"]
    for result in document["results"]:
        reason = f"{result['variant']}.py:100: it is wrong here"
        result.update(verdict="fail", reason=reason, findings=[reason], **UNTIMED)
    source = page.render(read(document), known)
    well_formed(Page(source))
    assert len(sources_on(source)) == len(document["results"])
    for text in sources_on(source):
        assert re.search(r"lines 1 to 87 are not shown.*it is wrong here.*lines 113 to \d+ are not shown", text, re.DOTALL)


def test_a_failure_says_its_reason_in_verdicts_and_starts_open():
    right, wrong = make_passed("m", "v1_x"), make_passed("m", "v2_y") | UNTIMED
    wrong |= {"verdict": "fail", "reason": "off by <everything>"}
    wrong["check"]["gradients"]["conv.bias"] |= {"complaint": "the gradient of conv.bias is off by 1 (RMS)"}
    source = page.render(read(document_of(right, wrong)), [])
    row = re.search(r'<tr role="row" class="[^"]*is-fail".*?</tr>', source, re.DOTALL)[0]
    assert '<p class="why">off by &lt;everything&gt;</p>' in row and "wrong: conv.bias" in row
    boxes = re.findall(r'<details class="variant"( open)?>.*?<div class="body" id="([^"]+)">', source, re.DOTALL)
    assert [bool(is_open) for is_open, _ in boxes] == [False, True]
    assert f'<a href="#{boxes[1][1]}">' in row, "the link leads into the box: a browser opens it"
    details = source.split(f'id="{boxes[1][1]}"')[1]
    assert "✗</span> wrong</span></td><td>the gradient of conv.bias is off by 1 (RMS)</td>" in details


def written(folder, text="marker_of_the_source = 1"):
    """(what the page is given of a variant with that text, a result of it)."""
    (folder / "m.py").write_text("'''A model.'''\n")
    (folder / "v1_x.py").write_text(f"'''m, v1: Title.'''\n{text}\n")
    digest = hashlib.sha256((folder / "v1_x.py").read_bytes()).hexdigest()
    return [page.Files(folder / "m.py", folder / "v1_x.py")], make_passed("m", "v1_x") | {"source_sha256": digest}


def test_a_stale_result_is_labelled(tmp_path):
    known, result = written(tmp_path)
    assert "tale" not in page.render(read(document_of(result)), known)
    written(tmp_path, "edited = True")
    made = page.render(read(document_of(result)), known)
    assert '<span class="chip">stale</span>' in made and "Stale: this is the file as it is now" in made


def test_without_files_ceilings_or_times(cpu_document):
    made = Page(page.render(read(cpu_document), []))
    well_formed(made)
    assert "Its source is not at hand." in made.text
    assert "Registers, spills" not in made.text, "no empty blocks"
    well_formed(Page(page.render(read(document_of()), [])))


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(page, "LIBRARIES", ("jinja2", "no_such_library_here"))
    assert page.missing() == "--html needs no_such_library_here: python -m pip install no_such_library_here"
    assert (catalog.ROOT / "requirements-html.txt").is_file()


def test_from_a_recorded_run(tmp_path):
    status, _, err = run("-m", "playground.report.page", "results/nvidia-h200.json", tmp_path / "page.html")
    assert status == 0, err
    assert "NVIDIA H200" in (tmp_path / "page.html").read_text()
    status, _, err = run("-m", "playground.report.page", "nowhere.json", tmp_path / "page.html")
    assert status == 2 and err.startswith("nowhere.json: ") and err.count("\n") == 1
