"""Highlighted sources, findings at their lines, plots, counters."""

import re
from pathlib import Path

import pytest
import torch
from made import UNTIMED, make_passed, read_result
from reading import Page

from playground.judge import diagnosis
from playground.report import speed_bars
from playground.report.page import sources, variant

FILE = '''"""A docstring; with a semicolon;
"""
import torch

CUDA = r"""
#include <cuda_runtime.h>
__global__ void k(float* p) { if (p) p[0] = 1.0f; }  // "quoted" & more
"""
CPP = r"""
TORCH_LIBRARY(x, m) { m.def("f"); }
"""
def build(): return load_inline("x", CPP, f"""
no kernel;
""")
'''


def text_of(html):
    return Page(f"<pre>{html}</pre>").text


def test_each_language_is_highlighted_as_itself():
    html = str(sources.highlighted(FILE))
    assert text_of(html) == FILE
    assert '<i class="k">__global__</i> <i class="kt">void</i>' in html, "CUDA"
    assert '<i class="k">import</i>' in html and '<i class="s">"x"</i>' in html, "Python"
    assert [number for number, line in enumerate(html.split("\n</span>"), 1) if '<span class="in">' in line] == [*range(5, 12)]


@pytest.mark.parametrize(
    "text", ["", "\n", "def (", 'x = """\n#include <x>\nint f();', "\t\tx = 1", 'a = r"""\n;\n"""', "é = 'ß'\n", "a\r\nb\rc\n"]
)
def test_any_text_comes_out_as_it_is(text):
    expected = text.expandtabs(4).replace("\r\n", "\n").replace("\r", "\n")
    assert text_of(str(sources.highlighted(text))).rstrip("\n") == expected.rstrip("\n")


def test_a_finding_stands_below_its_line():
    html = str(sources.highlighted(FILE, [(7, "race <here>", "there")]))
    before, after = html.split('<b class="finding" id="there" role="note">')
    assert text_of(before).splitlines()[-1].startswith("__global__") and '<span class="hit">' in before
    assert "race &lt;here&gt;" in after and text_of(after.split("</b>", 1)[1]).startswith('"""')


RACE = (
    "my.copy.py:65: shared memory race on `s[1]`: thread (32,0,0) writes it here, thread (1,0,0) read it at line 68, no "
    "barrier between them (memory model: a data race); kernel k, block (0,0,0)"
)


def failed(reason, **more):
    return read_result(make_passed("m", "v1_x") | UNTIMED | {"verdict": "fail", "reason": reason} | more)


def test_both_parties_of_a_race_are_marked():
    result = failed(f"on normal inputs: {RACE}", findings=[RACE])
    found = variant.findings_at_lines(result, Path("/somewhere/my.copy.py"))
    assert [line for line, _ in found] == [65, 68] and "line 65" in found[1][1]
    assert variant.findings_at_lines(result, Path("/somewhere/my_copy.py")) == []


def test_a_syntax_error_and_a_traceback_are_marked():
    reason = "/x/v.py:3: SyntaxError: invalid syntax"
    assert variant.findings_at_lines(failed(reason), Path("v.py")) == [(3, reason)]
    details = 'File "/x/v.py", line 9, in forward\nFile "/x/v.py", line 12, in f\nFile "/x/torch.py", line 99, in g\n'
    assert variant.findings_at_lines(failed("ValueError: no", details=details), Path("/x/v.py")) == [(12, "ValueError: no")]
    assert variant.findings_at_lines(read_result(make_passed("m", "v")), Path("v.py")) == []


def pictures(results, **options):
    return speed_bars.pictures([(read_result(result), {"id": result["variant"]}) for result in results], **options)


def test_bars_are_as_long_as_their_speed():
    """The floor of make_passed is 0.139 ms."""
    results = [make_passed("m", name, median) for name, median in (("v1_x", 1.38), ("v2_y", 0.69), ("v3_z", 0.276))]
    results.append(make_passed("m", "v4_bad") | {"verdict": "fail", "reason": "no"} | UNTIMED)
    (picture,) = pictures(results, brief=True)
    rows = {row.name: row for row in picture.rows}
    assert list(rows) == ["PyTorch eager", "torch.compile", "v1_x", "v2_y", "v3_z", "v4_bad"]
    shares = [picture.share(rows[name]) for name in ("v1_x", "v2_y", "v3_z")]
    assert shares == pytest.approx([results[0]["floor_ms"] / median for median in (1.38, 0.69, 0.276)])
    svg = speed_bars.page_svg(picture, "p", "m")
    assert 'href="#v3_z"' in svg and "fail, not timed" in svg
    widths = [float(end) - float(begin) for begin, end in re.findall(r'd="M ([\d.]+) [\d.]+ L ([\d.]+) [^"]*z"', svg)]
    assert widths[-1] / widths[-2] == pytest.approx(2.5, rel=0.01), "drawn to the scale that it says"
    assert pictures(results[-1:], brief=True) == []


def test_what_is_faster_than_the_floor_says_why_beside_its_bar():
    result = make_passed("m", "v1_x")
    result["time_ms"] = dict.fromkeys(("median", "p20", "p80"), result["floor_ms"] / 2)
    (picture,) = pictures([result], brief=True)
    assert picture.share(picture.rows[-1]) == 2
    assert picture.rows[-1].notes[-1].startswith("faster than the floor, which counts more arithmetic")
    assert not any(row.notes for row in picture.rows[:-1])


def test_folders_of_the_machine_are_left_out(tmp_path):
    file = tmp_path / "v1_x.py"
    file.write_text("x = 1\n")
    result = failed(f"{file}:1: no", details=f'File "{file}", line 1')
    shown = variant.shown("id", result, file, stale=False)
    assert str(tmp_path) not in str(shown)
    assert shown["reason"] == "v1_x.py:1: no" and [line for line, _, _ in shown["findings"]] == [1]


def test_where_a_result_is_wrong_is_drawn():
    right = torch.arange(64.0).reshape(8, 8)
    actual = right.clone()
    actual[4:, 2:4] = 0
    lines = diagnosis.diagnose(actual, right, 1e-3).picture
    shown = variant.shown("id", failed("wrong", details="\n".join([*lines, "and more"])), None, stale=False)
    assert shown["details"] == "and more" and shown["error_map"].count("<path") == 1 + 4, "its frame, and a run a row"
    assert "where it is wrong: rows 0-7 down, columns 0-7 across" in shown["error_map"]
    assert variant.shown("id", failed("wrong", details="more"), None, stale=False)["error_map"] is None


def test_folders_before_a_line_are_left_out_wherever_they_are():
    text = "race at /home/me/x/my-file.py:10: reads; other at /a/b.cu:7, not /tmp nor https://host/a.py:1"
    assert variant.without_folders(text) == "race at my-file.py:10: reads; other at b.cu:7, not /tmp nor https://host/a.py:1"
