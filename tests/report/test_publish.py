"""What is published of results/: figures as measured, nothing that is stale, harmless whatever the record says."""

import copy
import hashlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from made import UNTIMED, document_of, make_passed, read

from playground import catalog
from playground.catalog import ROOT, code_sha256, sha256
from playground.report.document import write
from tools import publish

README = "# Title\n\n<!-- best:begin -->\nold\n<!-- best:end -->\n\nThe rest.\n"
LIGHT, DARK = publish.PLOTS
LADDER = Path("docs/ladder_pool.md")
MODEL = "batch_size = 128\nheight, width = 384, 384\n"
VARIANTS = ("v1_fused_tail", "v2_single_kernel", "v10_later", "cpu_box_sums")


@pytest.fixture
def root(tmp_path):
    """A small repository: one model, three CUDA variants, a CPU variant, no results."""
    for folder in ("models", "kernels/pool", "results", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "pool.py").write_text(MODEL)
    (tmp_path / "models" / "__init__.py").touch()
    for variant in VARIANTS:
        source_of(tmp_path, variant).write_text(f"# {variant}\n")
    (tmp_path / "README.md").write_text(README)
    (tmp_path / LADDER).write_text(README.replace("best", "results"))
    return tmp_path


@pytest.fixture
def record(root):
    """Writes a run of the named variants of `pool` into results/; changes are made to each of its results."""

    def record(
        name="h200.json", variants=("v1_fused_tail", "v2_single_kernel"), environment=(), medians=(7.0, 0.142), **changes
    ):
        results = []
        for variant, median in zip(variants, medians, strict=True):
            result = make_passed("pool", variant, median, settings={"batch_size": 128})
            source = source_of(root, variant)
            result["source_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else "0" * 64
            result.update(copy.deepcopy(changes))
            results.append(result)
        write(read(document_of(*results, **dict(environment))), root / "results" / name)

    return record


def source_of(root, variant):
    return root / "kernels" / "pool" / f"{variant}.py"


def cells_of(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def best_rows(root):
    """The cells of the rows of README's table."""
    return cells_of(publish.best(publish.newest_runs(root), ["pool"]))[2:]


def table(root):
    return publish.table(root, publish.newest_runs(root), LADDER, "pool")


def rows(root):
    """{first cell: other cells} of a ladder's table."""
    cells = cells_of(table(root))
    assert len({len(row) for row in cells}) <= 1
    return {re.sub(r"\[`(.*)`\]\(.*\)", r"\1", first): others for first, *others in cells}


def texts(file):
    return [node.text for node in ElementTree.parse(file).iter() if node.tag.endswith("}text")]


def test_the_best_of_a_model_comes_first(root, record):
    record()
    (row,) = best_rows(root)
    assert row == [
        *("pool", "284", "176 (torch.compile)", "**0.142** ([`v2_single_kernel`](kernels/pool/v2_single_kernel.py))"),
        *("**49.4x**", "97.9%", "NVIDIA H200"),
    ]
    record(variant_precision="fp16")
    assert best_rows(root) == [], "what computes in a lower precision is not the best"


def test_a_ladder_shows_all_that_was_measured(root, record):
    record()
    text = table(root)
    assert "**NVIDIA H200**, input 128x8x384x384, TF32 permitted\n\n| " in text
    assert "[`v2_single_kernel`](../kernels/pool/v2_single_kernel.py)" in text
    versions = "torch 2.11.0+cu130, CUDA 13.0, driver 580.95.05"
    assert f"\n\nMeasured on NVIDIA H200, {versions}, 2026-11-20; recorded in `results/h200.json`. " in text
    found = rows(root)
    assert list(found)[2:] == [
        *("eager", "channels_last", "torch.compile", "eager fp32", "torch.compile fp32"),
        *("v1_fused_tail", "v2_single_kernel", "v10_later"),
    ]
    assert found["v2_single_kernel"] == [
        *("0.142", "79.6x", "49.4x (torch.compile)", "97.9%", "1.10e-5 (1.20e-5)", "4.57 (5.43x)", "5.10 (4.94x)")
    ]
    assert found["v10_later"] == ["not measured yet", "", "", "", "", "", ""]
    # The median over both variants' runs: (7.0 + 0.142) / 2 * 79.6.
    assert found["eager"] == ["284", "1.00x", "", "", "", "40.0", "40.6"]
    assert found["torch.compile"][:2] == ["176", "1.61x"]


def test_what_is_stale_shows_no_figure(root, record):
    """Neither its own nor a baseline's that was taken beside it."""
    record()
    before = rows(root)
    assert "stale" not in table(root).lower()
    source_of(root, "v2_single_kernel").write_text("# edited\n")
    found = rows(root)
    assert found["v2_single_kernel"] == ["stale", "", "", "", "", "", ""] and found["v1_fused_tail"] == before["v1_fused_tail"]
    assert found["eager"][0] == "557" and "Stale: the file has changed since it was measured." in table(root)
    assert "v1_fused_tail" in best_rows(root)[0][3]
    assert publish.main([], root) == 0
    shown = texts(root / LIGHT)
    assert "v1_fused_tail" in shown and "v2_single_kernel" not in shown


@pytest.mark.parametrize(
    "median, training, edit, stale",
    [
        (0.142, False, "host = 2", False),
        (0.05, False, "host = 2", True),
        (0.142, True, "host = 2", True),
        (0.142, False, 'CUDA = "other"', True),
    ],
)
def test_another_host_part_leaves_a_forward_pass_that_does_not_wait_for_it(root, record, median, training, edit, stale):
    source = source_of(root, "v2_single_kernel")
    source.write_text('CUDA = "kernel"\nhost = 1\n')
    known = {"kernels_sha256": catalog.kernels_sha256(source), "model_sha256": sha256(root / "models" / "pool.py")}
    known |= {} if training else {"training": None}
    record(variants=("v2_single_kernel",), medians=(median,), **known)
    name = edit.split()[0]
    source.write_text("\n".join(edit if line.startswith(name) else line for line in source.read_text().splitlines()))
    assert (rows(root)["v2_single_kernel"][0] == "stale") == stale


def test_a_new_docstring_makes_nothing_stale(root, record):
    source = source_of(root, "v1_fused_tail")
    record(variants=("v1_fused_tail",), medians=(7.0,), code_sha256=code_sha256(source))
    text = source.read_text()
    source.write_text(f'"""Measured: 7.00 ms."""\n{text}')
    assert rows(root)["v1_fused_tail"][0] == "7.00"
    source.write_text(f"{text}X = 2\n")
    assert rows(root)["v1_fused_tail"][0] == "stale"


def test_the_newest_full_size_run_of_each_gpu(root, record):
    record("a.json", environment={"date": "2026-11-19T23:30:00+00:00"}, medians=(3.0, 4.0))
    record("z.json", environment={"date": "2026-11-20T00:00:00+00:00"}, medians=(1.0, 2.0))
    record("l40s.json", environment={"gpu": "NVIDIA L40S", "date": "2026-11-01"}, medians=(5.0, 6.0))
    record("cpu.json", environment={"gpu": None, "date": "2026-12-01"}, medians=(7.0, 8.0))
    record("small.json", environment={"date": "2026-12-01"}, medians=(9.0, 9.5), shape={"settings": {"batch_size": 4}})
    record("emulated.json", environment={"date": "2026-12-01"}, medians=(9.0, 9.5), ran_on="emulator")
    text = table(root)
    assert re.findall(r"recorded in `results/(.*)`", text) == ["z.json", "l40s.json"]
    assert re.findall(r"v1_fused_tail.py\) \| (\S+)", text) == ["1.00", "5.00"]


def test_fp16_and_bf16_have_runs_of_their_own(root, record):
    record()
    record("bf16.json", precision="bf16", variants=("v1_fused_tail",), medians=(3.5,), training=None)
    wide = [{"tag": "out-dtype", "text": "what is judged is the float32 result", "line": None}]
    record("fp16.json", precision="fp16", variants=("v1_fused_tail",), medians=(3.0,), training=None, caveats=wide)
    assert [row[0] for row in best_rows(root)] == ["pool", "pool, fp16 (float32 sum)", "pool, bf16"]
    text = table(root)
    assert re.findall(r"recorded in `results/(.*)`", text) == ["h200.json", "fp16.json", "bf16.json"]
    assert "**NVIDIA H200**, input 128x8x384x384, fp16 (float32 sum)\n\n| " in text
    assert text.count("v10_later.py") == 1, "variants that take no 16 bits are left out there"
    assert publish.main([], root) == 0
    assert "3.00" not in texts(root / LIGHT)


def test_what_is_no_pass_and_text_that_is_hostile(root, record):
    record(verdict="fail", reason="a | b <!-- results:end -->\nsecond line", **UNTIMED)
    assert rows(root)["v1_fused_tail"][0] == "fail: a \\| b &lt;!-- results:end --> second line"
    record(environment={"gpu": "NVIDIA <b>$H200$"})
    assert publish.main([], root) == 0 and publish.main(["--check"], root) == 0
    assert "&lt;b>$H200$" in (root / "README.md").read_text()
    assert texts(root / LIGHT)[0].startswith("Forward pass on NVIDIA <b>$H200$, torch")


def test_the_command_rewrites_and_checks(root, record, capsys):
    assert publish.main(["--check"], root) == 1
    names = "README.md, docs/ladder_pool.md, docs/times-light.svg, docs/times-dark.svg"
    assert capsys.readouterr().err == f"out of date: {names}; run: python -m tools.publish\n"
    assert (root / "README.md").read_text() == README and not (root / "docs" / "times-light.svg").exists()
    assert publish.main([], root) == publish.main(["--check"], root) == 0
    assert (root / "README.md").read_text() == README.replace("old", publish.NOTHING_MEASURED)
    assert " ".join(texts(root / DARK)) == publish.NOTHING_MEASURED
    record()
    assert publish.main(["--check"], root) == 1
    assert publish.main([], root) == publish.main(["--check"], root) == 0
    text = (root / "README.md").read_text()
    assert text.startswith(f"# Title\n\n<!-- best:begin -->\n{publish.PICTURE}\n\nNVIDIA H200, torch") and "\n| pool | " in text
    assert text.count("<picture>") == 1 and set(re.findall(r'"(docs/[^"]*)"', text)) == set(map(str, publish.PLOTS))
    assert text.endswith("arithmetic rate allow.\n<!-- best:end -->\n\nThe rest.\n")
    text = (root / LADDER).read_text()
    assert text.startswith("# Title\n\n<!-- results:begin -->\n**NVIDIA H200**")
    assert text.endswith("'The best' is the fastest baseline.\n<!-- results:end -->\n\nThe rest.\n")
    plot = root / DARK
    plot.write_text(plot.read_text().replace("0.142", "0.141"))
    assert publish.main(["--check"], root) == 1


def test_the_projects_pages_are_current(capsys):
    assert publish.main(["--check"], ROOT) == 0, capsys.readouterr().err
