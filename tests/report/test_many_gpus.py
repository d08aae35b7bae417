import hashlib
import json
import re
import subprocess
import sys

import pytest

from playground.catalog import kernels_sha256
from playground.data_parallel import WAYS
from playground.report import many_gpus
from playground.report.document import write
from playground.report.figures import ROOT
from playground.report.marks_of_age import heaviest

README = "# Title\n\n<!-- many GPUs:begin -->\nold\n<!-- many GPUs:end -->\n\nThe rest.\n"
MODEL = "batch_size = 128\n"
VARIANTS = ("v1_fused_tail", "v10_later")


@pytest.fixture
def root(tmp_path):
    """A small repository: one model, two CUDA variants, no results."""
    root = tmp_path / "repository"
    for folder in ("models", "kernels/pool"):
        (root / folder).mkdir(parents=True)
    (root / "models" / "pool.py").write_text(MODEL)
    for variant in VARIANTS:
        (root / "kernels" / "pool" / f"{variant}.py").write_text(f"# {variant}\n")
    (root / "README.md").write_text(README)
    return root


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def hashes(root):
    """hashes(variant) -> those of its file and of the model's, as a run records them."""

    def of(variant):
        source = root / "kernels" / "pool" / f"{variant}.py"
        both = dict.fromkeys(("source_sha256", "code_sha256"), digest(source))
        return both | {"kernels_sha256": kernels_sha256(source), "model_sha256": digest(root / "models" / "pool.py")}

    return of


@pytest.fixture
def trained(tmp_path, hashes, make_environment):
    """trained(ranks, alone_ms, step_ms, **changes) -> the file of a run of both variants by playground.data_parallel."""

    def make(ranks, alone, step, **changes):
        rows = []
        for place, variant in enumerate(VARIANTS):
            row = {"model": "pool", "variant": variant, "settings": {}, "verdict": "pass", "reason": None}
            row |= {
                "errors": dict.fromkeys(WAYS, (place + 1) / 10 / ranks),
                "samples": 128,
                "alone_ms": alone,
                "step_ms": step,
            }
            row |= {"samples_per_second": 1e3 * ranks * 128 / step, "efficiency": alone / step, **hashes(variant), **changes}
            rows.append(row)
        found = {"kind": "data_parallel", "ranks": ranks, "device": "NVIDIA H200", "environment": make_environment()}
        file = tmp_path / f"x{ranks}.json"
        file.write_text(json.dumps(found | {"results": rows}))
        return file

    return make


@pytest.fixture
def shared(tmp_path, hashes, make_passed, make_environment):
    """shared(ranks, seconds, **environment) -> the file of a sweep over two batch sizes, as compare.py writes it."""

    def make(ranks, seconds, points=(("v1_fused_tail", 1), ("v1_fused_tail", 128)), **environment):
        results = [
            make_passed("pool", variant, 7.0, settings={"batch_size": size}) | hashes(variant) for variant, size in points
        ]
        whole = make_environment() | {"seconds": seconds, "complete": True}
        if ranks > 1:
            whole |= {"ranks": [{"rank": rank} for rank in range(ranks)], "lost_ranks": []}
        file = tmp_path / f"sweep{ranks}.json"
        write({"schema": 1, "environment": whole | environment, "results": results}, file)
        return file

    return make


def keep(root, *files):
    assert many_gpus.main(["--keep", *map(str, files)], root) == 0
    return (root / "README.md").read_text()


def table(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]


def test_nothing_measured(root):
    assert many_gpus.section(root) == "Nothing has been measured on several GPUs yet."


def test_training(root, trained):
    text = keep(root, trained(4, 2.0, 2.5), trained(2, 2.1, 2.2))
    name = "pool [`v10_later`](kernels/pool/v10_later.py)"
    assert table(text) == [
        [name, "1", "128", "2.10", "61000", ""],
        [name, "2", "128", "2.20", "116000", "95.5%"],
        [name, "4", "128", "2.50", "205000", "80.0%"],
    ]
    assert "The gradients of 2 variants on 2 GPUs and of 2 variants on 4 GPUs agreed with those of one process, under" in text
    assert (
        "as it is, compiled, accumulated, both and in a CUDA graph; the largest difference was 10.0% of what is allowed."
        in text
    )
    assert "Measured on NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, driver 580.95.05, 2026-11-20" in text
    assert sorted(path.name for path in (root / "results" / "many_gpus").iterdir()) == [
        "nvidia-h200-x2.json",
        "nvidia-h200-x4.json",
    ]
    assert text.startswith("# Title\n\n<!-- many GPUs:begin -->\n| trained") and text.endswith("-->\n\nThe rest.\n")


def test_training_in_a_graph(root, trained):
    graphed = {"alone_ms": 0.2, "step_ms": 0.25, "samples_per_second": 1e3 * 2 * 128 / 0.25, "efficiency": 0.8}
    text = keep(root, trained(2, 2.1, 2.2, graphed=graphed))
    name = "pool [`v10_later`](kernels/pool/v10_later.py), in a CUDA graph"
    assert table(text)[2:] == [[name, "1", "128", "0.200", "640000", ""], [name, "2", "128", "0.250", "1.02e6", "80.0%"]]


def test_gradients_that_were_wrong(root, trained):
    wrong = {"verdict": "fail", "reason": "not | those", "errors": dict.fromkeys(WAYS), "step_ms": None}
    with_one = json.loads(trained(2, 2.1, 2.2).read_text())
    with_one["results"][0] |= wrong
    file = trained(2, 2.1, 2.2)
    file.write_text(json.dumps(with_one))
    text = keep(root, file)
    assert "Gradients were wrong: v1_fused_tail of pool on 2 GPUs: not \\| those." in text
    assert "The gradients of 1 variant on 2 GPUs agreed with those of one process, under" in text, "the other is right, too"
    (root / "kernels/pool/v1_fused_tail.py").write_text("changed = True\n")
    many_gpus.main([], root)
    assert "v1_fused_tail of pool on 2 GPUs †: not" in (root / "README.md").read_text()
    assert len(table(text)) == 2


def test_sharing(root, shared):
    text = keep(root, shared(1, 300.4), shared(4, 80.25), shared(2, 151.0))
    assert "A sweep of pool over 2 values of batch_size (2 measurements) took " in text
    assert "300 s on 1 GPU, 151 s on 2 GPUs, 80.3 s on 4 GPUs.\n" in text.replace("80.2 s", "80.3 s")
    kept = json.loads((root / "results" / "many_gpus" / "nvidia-h200-x4-sweep.json").read_text())
    assert kept["ranks"] == 4 and len(kept["results"]) == 2 and "time_ms" not in kept["results"][0]


def test_only_the_same_work_is_compared(root, shared):
    text = keep(root, shared(1, 300.0), shared(2, 100.0, points=[("v1_fused_tail", 128)]))
    kept = {path.name for path in (root / "results" / "many_gpus").iterdir()}
    assert kept == {"nvidia-h200-x1-sweep.json", "nvidia-h200-x2-run.json"}
    assert "A sweep of pool over 2 values of batch_size (2 measurements) took 300 s on 1 GPU." in text
    assert "A run of pool (1 measurement) took 100 s on 2 GPUs." in text


def test_variants_of_different_sizes_are_no_sweep(root, shared):
    """Those of the CPU have smaller ones than those of the GPU."""
    text = keep(root, shared(2, 100.0, points=[("v1_fused_tail", 128), ("v10_later", 4)]))
    assert "A run of pool (2 measurements) took 100 s on 2 GPUs." in text


@pytest.mark.parametrize("change", [{"complete": False}, {"lost_ranks": [1]}, {"seconds": None}])
def test_a_run_that_says_nothing_about_time_is_refused(root, shared, change, capsys):
    file = shared(2, 100.0)
    found = json.loads(file.read_text())
    found["environment"] = {key: value for key, value in (found["environment"] | change).items() if value is not None}
    file.write_text(json.dumps(found))
    assert many_gpus.main(["--keep", str(file)], root) == 2
    assert "only a whole run" in capsys.readouterr().err
    assert not (root / "results").exists() and (root / "README.md").read_text() == README


def test_training_without_times_is_refused(root, trained, capsys):
    assert many_gpus.main(["--keep", str(trained(2, 2.0, 2.0, step_ms=None))], root) == 2
    assert "run it with --time" in capsys.readouterr().err


def test_what_ran_on_no_gpu_is_refused(root, shared, capsys):
    assert many_gpus.main(["--keep", str(shared(2, 100.0, gpu=None))], root) == 2
    assert "measured on no GPU" in capsys.readouterr().err


def test_what_changed_since_is_marked(root, trained, shared):
    assert "†" not in keep(root, trained(2, 2.0, 2.5), shared(2, 100.0))
    for variant in VARIANTS:
        (root / "kernels" / "pool" / f"{variant}.py").write_text("# edited\n")
    assert many_gpus.main(["--check"], root) == 1
    text = many_gpus.section(root)
    assert {row[0].split()[-1] for row in table(text)} == {"†"}
    assert re.search(r"100 s on 2 GPUs †\.", text) and "† measured before the file's last change." in text


def test_what_changed_around_the_kernels_has_a_mark_of_its_own(root, trained, shared):
    for variant in VARIANTS:
        (root / "kernels" / "pool" / f"{variant}.py").write_text('CUDA = "kernels"\n')
    assert "‡" not in keep(root, trained(2, 2.0, 2.5), shared(2, 100.0))
    first = root / "kernels" / "pool" / f"{VARIANTS[0]}.py"
    first.write_text('CUDA = "kernels"\nBINDING = "checks"\n')
    text = many_gpus.section(root)
    assert re.search(r"100 s on 2 GPUs ‡\.", text) and "†" not in text and text.endswith("whose text is the same.")
    first.write_text('CUDA = "other kernels"\n')
    assert re.search(r"100 s on 2 GPUs †\.", many_gpus.section(root))
    assert heaviest(["", " ‡", " †", " ‡"]) == " †" and heaviest(["", " ‡"]) == " ‡" and heaviest([""]) == ""


def test_a_model_that_changed_is_not_quoted(root, trained, shared):
    keep(root, trained(2, 2.0, 2.5), shared(2, 100.0))
    (root / "models" / "pool.py").write_text("batch_size = 64\n")
    text = many_gpus.section(root)
    assert not table(text) and "measurements) took" not in text


def test_check_changes_nothing(root, trained, capsys):
    keep(root, trained(2, 2.0, 2.5))
    assert many_gpus.main(["--check"], root) == 0
    (root / "README.md").write_text(README)
    assert many_gpus.main(["--check"], root) == 1
    assert "python -m playground.report.many_gpus" in capsys.readouterr().err
    assert (root / "README.md").read_text() == README


def test_what_cannot_be_read_is_named(root, tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    for file in ("broken.json", "missing.json"):
        assert many_gpus.main(["--keep", str(tmp_path / file)], root) == 2
        assert file in capsys.readouterr().err


def test_as_a_module():
    command = [sys.executable, "-m", "playground.report.many_gpus", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--keep" in done.stdout
