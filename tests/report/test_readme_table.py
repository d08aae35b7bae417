import copy
import dataclasses
import hashlib
import re
import subprocess
import sys

import pytest

from playground.catalog import code_sha256, kernels_sha256
from playground.report import readme_table
from playground.report.document import write
from playground.report.figures import ROOT

README = (
    "# Title\n\n<!-- best:begin -->\nold\n<!-- best:end -->\n\n<!-- results:begin -->\nold\n<!-- results:end -->\n\nThe rest.\n"
)
MODEL = "batch_size = 128\nheight, width = 384, 384\n"
VARIANTS = ("v1_fused_tail", "v2_single_kernel", "v10_later", "cpu_box_sums")


@pytest.fixture
def root(tmp_path):
    """A small repository: one model, three CUDA variants, a CPU variant, no results."""
    for folder in ("models", "kernels/pool", "results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "pool.py").write_text(MODEL)
    (tmp_path / "models" / "__init__.py").touch()
    for variant in VARIANTS:
        (tmp_path / "kernels" / "pool" / f"{variant}.py").write_text(f"# {variant}\n")
    (tmp_path / "README.md").write_text(README)
    return tmp_path


@pytest.fixture
def record(root, make_passed, make_environment):
    """Writes a run of the named variants of `pool` into results/; changes are made to each of its results."""

    def record(
        name="h200.json", variants=("v1_fused_tail", "v2_single_kernel"), environment=(), medians=(7.0, 0.142), **changes
    ):
        results = []
        for variant, median in zip(variants, medians, strict=True):
            result = make_passed("pool", variant, median, settings={"batch_size": 128})
            source = root / "kernels" / "pool" / f"{variant}.py"
            result["source_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else "0" * 64
            result.update(copy.deepcopy(changes))
            results.append(result)
        document = {"schema": 1, "environment": {**make_environment(), **dict(environment)}, "results": results}
        write(document, root / "results" / name)

    return record


def best_rows(root):
    """The cells of the rows of README's first table."""
    lines = readme_table.best(root, readme_table.pages(root)[0]).splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| pool")]


def test_the_best_of_a_model_comes_first(root, record):
    record()
    (row,) = best_rows(root)
    assert row[0] == "pool" and row[3] == "**0.142** ([`v2_single_kernel`](kernels/pool/v2_single_kernel.py))"
    (root / "kernels" / "pool" / "v2_single_kernel.py").write_text("# edited\nx = 1\n")
    (row,) = best_rows(root)
    assert "v1_fused_tail" in row[3], "what has changed since is not the best"
    record(variant_precision="fp16")
    assert best_rows(root) == [], "nor is what computes in a lower precision"


@pytest.mark.parametrize(("graphed", "said"), [(0.139, ""), (0.12, ", in a CUDA graph 0.120")])
def test_the_best_in_a_graph_where_launches_took_their_share(root, record, graphed, said):
    record()
    _, document = readme_table.newest_runs(root)[0]
    for result in document["results"]:
        timings = ("time_ms", "peak_mib", "speedup", "baselines_ms", "outcome", "rounds", "calls", "notes")
        replayed = {name: value * graphed / 0.142 for name, value in result["time_ms"].items()}
        result["graphed"] = {key: result[key] for key in timings} | {"time_ms": replayed}
    write(document, root / "results" / "h200.json")
    (row,) = best_rows(root)
    assert row[3] == f"**0.142**{said} ([`v2_single_kernel`](kernels/pool/v2_single_kernel.py))"


def whole(root):
    return dataclasses.replace(readme_table.pages(root)[0], short=False)


def rows(root):
    """{first cell: other cells} of the tables."""
    lines = [line for line in readme_table.table(root, whole(root)).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert len({len(row) for row in cells}) <= 1
    return {re.sub(r"\[`(.*)`\]\(.*\)", r"\1", first): others for first, *others in cells}


def test_nothing_measured(root):
    assert readme_table.table(root, whole(root)) == "Nothing has been measured on a GPU yet."
    (root / "results").rmdir()
    assert readme_table.table(root, whole(root)) == "Nothing has been measured on a GPU yet."


def test_rows(root, record):
    record()
    text = readme_table.table(root, whole(root))
    assert "**pool**, input 128x8x384x384, TF32 permitted\n\n| " in text
    assert "[`v2_single_kernel`](kernels/pool/v2_single_kernel.py)" in text
    versions = "torch 2.11.0+cu130, CUDA 13.0, driver 580.95.05"
    assert f"\n\nMeasured on NVIDIA H200, {versions}, 2026-11-20; recorded in `results/h200.json`. " in text
    table = rows(root)
    assert list(table)[2:] == [
        *("eager", "channels_last", "torch.compile", "eager fp32", "compile fp32"),
        *("v1_fused_tail", "v2_single_kernel", "v10_later"),
    ]
    assert table["v2_single_kernel"] == [
        *("0.142", "79.6x", "49.4x (torch.compile)", "97.9%", "1.10e-5 (1.20e-5)", "4.57 (5.43x)", "5.10 (4.94x)"),
    ]
    assert table["v10_later"] == ["not measured yet", "", "", "", "", "", ""]
    # The median over both variants' runs: (7.0 + 0.142) / 2 * 79.6.
    assert table["eager"] == ["284", "1.00x", "", "", "", "40.0", "40.6"]
    assert table["torch.compile"][:2] == ["176", "1.61x"]


def test_the_short_table_has_two_baselines_and_no_training(root, record):
    record()
    lines = readme_table.table(root, readme_table.pages(root)[0]).splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert names[2:4] == ["eager", "torch.compile"] and len(names) == 7
    assert {line.count("|") for line in lines if line.startswith("|")} == {7}
    assert "1.10e-5 (1.20e-5) |" in next(line for line in lines if "v2_single_kernel" in line)


def test_a_variant_that_changed_is_marked(root, record):
    record()
    mark = "† measured before the file's last change."
    assert mark not in readme_table.table(root, whole(root))
    (root / "kernels" / "pool" / "v1_fused_tail.py").write_text("# edited\n")
    table = rows(root)
    assert table["v1_fused_tail †"][0] == "7.00"
    assert table["v2_single_kernel"][0] == "0.142"
    assert mark in readme_table.table(root, whole(root))


def test_a_variant_with_a_new_docstring_is_not_marked(root, record):
    source = root / "kernels" / "pool" / "v1_fused_tail.py"
    record(variants=("v1_fused_tail",), medians=(7.0,), code_sha256=code_sha256(source))
    text = source.read_text()
    source.write_text(f'"""Measured: 7.00 ms."""\n{text}')
    assert rows(root)["v1_fused_tail"][0] == "7.00"
    source.write_text(f"{text}X = 2\n")
    assert rows(root)["v1_fused_tail †"][0] == "7.00"


def test_a_variant_whose_kernels_are_the_same_still_counts(root, record):
    source = root / "kernels" / "pool" / "v1_fused_tail.py"
    source.write_text('CUDA = "kernels"\nBINDING = "checks"\n')
    digests = {"code_sha256": code_sha256(source), "kernels_sha256": kernels_sha256(source)}
    record(variants=("v1_fused_tail",), medians=(7.0,), **digests)
    remark = "‡ measured before a change to the code around the kernels, whose text is the same."
    assert best_rows(root)[0][3].startswith("**7.00** ([`v1_fused_tail`]") and "‡" not in readme_table.best(root, whole(root))
    source.write_text('CUDA = "kernels"\nBINDING = "more checks"\n')
    assert rows(root)["v1_fused_tail ‡"][0] == "7.00" and remark in readme_table.table(root, whole(root))
    assert best_rows(root)[0][3].endswith(" ‡)") and remark in readme_table.best(root, whole(root))
    source.write_text('CUDA = "other kernels"\nBINDING = "checks"\n')
    assert rows(root)["v1_fused_tail †"][0] == "7.00" and not best_rows(root)


def test_a_model_that_changed_is_not_quoted(root, record):
    record(model_sha256=hashlib.sha256(MODEL.encode()).hexdigest())
    assert rows(root)["v1_fused_tail"][0] == "7.00"
    (root / "models" / "pool.py").write_text(MODEL + "# edited\n")
    table = rows(root)
    assert table["v1_fused_tail"][0] == table["v2_single_kernel"][0] == "not measured since the model changed"
    assert "eager" not in table


def test_of_each_gpu_the_newest_run_counts(root, record):
    record("z.json", environment={"date": "2026-11-19T23:00:00Z"}, medians=(1.0, 2.0))
    record("a.json", environment={"date": "2026-11-20T00:30:00+02:00"}, medians=(3.0, 4.0))  # earlier: 22:30 UTC
    record("l40s.json", environment={"gpu": "NVIDIA L40S", "date": "2026-11-01"}, medians=(5.0, 6.0))
    record("cpu.json", environment={"gpu": None, "date": "2026-12-01"}, medians=(7.0, 8.0))
    record("small.json", environment={"date": "2026-12-01"}, medians=(9.0, 9.5), shape={"settings": {"batch_size": 4}})
    record("emulated.json", environment={"date": "2026-12-01"}, medians=(9.0, 9.5), ran_on="emulator")
    text = readme_table.table(root, whole(root))
    assert re.findall(r"recorded in `results/(.*)`", text) == ["z.json", "l40s.json"]
    assert re.findall(r"v1_fused_tail.py\) \| (\S+)", text) == ["1.00", "5.00"]


def test_results_that_are_no_pass(root, record):
    record(
        verdict="fail",
        reason="a | b <!-- results:end -->\nsecond line",
        **{"time_ms": None, "speedup": None, "training": None, "baselines_ms": {}},
    )
    expected = "fail: a \\| b &lt;!-- results:end --> second line"
    assert rows(root)["v1_fused_tail"][0] == expected
    assert readme_table.main([], root) == 0
    assert readme_table.main(["--check"], root) == 0


def test_results_without_training_floor_or_compile(root, record):
    eager = {"ratio": 2.0, "low": 1.9, "high": 2.1}
    without = {"floor_ms": None, "floor_bound": None, "baselines_ms": None, "precision": None, "outcome": None}
    record(training=None, speedup={"eager": eager}, **without)
    assert rows(root)["v2_single_kernel"] == ["0.142", "2.00x", "2.00x (eager)", "", "1.10e-5 (1.20e-5)", "", ""]
    record(speedup=None, outcome=None)
    assert rows(root)["v2_single_kernel"][1:3] == ["", ""]


def test_training_in_a_graph_stands_beside_training_without(root, record, make_passed):
    training = make_passed("pool", "v2_single_kernel")["training"]
    training["weights"]["graphed"] = copy.deepcopy(training["weights"])
    training["weights"]["graphed"]["time_ms"] = {"median": 0.18, "p20": 0.17, "p80": 0.19}
    training["weights_and_input"]["graphed"] = {"unavailable": "RuntimeError: cannot be captured"}
    record(training=training)
    assert rows(root)["v2_single_kernel"][-2:] == ["4.57 (5.43x); CUDA graph 0.180 (5.43x)", "5.10 (4.94x)"]


def test_a_variant_that_is_gone_is_not_shown(root, record):
    record(variants=("v0_gone", "v2_single_kernel"))
    assert "v0_gone" not in rows(root)


def test_command_rewrites_and_checks(root, record, capsys):
    assert readme_table.main(["--check"], root) == 1
    assert capsys.readouterr().err.splitlines() == [
        "README.md's table of results is out of date; run: python -m playground.report.readme_table"
    ]
    assert (root / "README.md").read_text() == README
    assert readme_table.main([], root) == 0
    assert readme_table.main(["--check"], root) == 0
    assert (root / "README.md").read_text() == README.replace("old", "Nothing has been measured on a GPU yet.")
    record()
    assert readme_table.main(["--check"], root) == 1
    assert readme_table.main([], root) == 0
    assert readme_table.main(["--check"], root) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- best:begin -->\n| model, forward pass") and "\n| pool | " in text
    assert "\n\n<!-- results:begin -->\n**pool**" in text
    assert text.endswith("may still compute in full float32.\n<!-- results:end -->\n\nThe rest.\n")
    capsys.readouterr()


@pytest.mark.parametrize(
    "readme", ["no markers", README.replace("begin", "end"), README + README, "<!-- results:end --> <!-- results:begin -->"]
)
def test_markers_that_are_missing_or_doubled(readme, root, capsys):
    (root / "README.md").write_text(readme)
    for arguments in ([], ["--check"]):
        assert readme_table.main(arguments, root) == 2
        assert "README.md must contain" in capsys.readouterr().err
    assert (root / "README.md").read_text() == readme


def test_a_broken_record_is_named(root, capsys):
    (root / "results" / "broken.json").write_text("{")
    assert readme_table.main([], root) == 2
    error = capsys.readouterr().err
    assert "broken.json: not JSON" in error
    assert error.count("\n") == 1
    assert (root / "README.md").read_text() == README


def test_a_ladder_has_the_table_of_its_model(root, record):
    (root / "docs").mkdir()
    ladder = root / "docs" / "ladder_pool.md"
    ladder.write_text(README)
    record()
    (root / "models" / "other.py").write_text(MODEL)
    assert readme_table.main(["--check"], root) == 1
    assert readme_table.main([], root) == 0
    assert readme_table.main(["--check"], root) == 0
    assert "**other**" in (root / "README.md").read_text() and "**other**" not in ladder.read_text()
    assert "(../kernels/pool/v1_fused_tail.py)" in ladder.read_text()
    assert "(kernels/pool/v1_fused_tail.py)" in (root / "README.md").read_text()


def test_as_a_module():
    command = [sys.executable, "-m", "playground.report.readme_table", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--check" in done.stdout
