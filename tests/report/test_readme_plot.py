"""README's plot: made from the record, checked to be current, harmless whatever the record says."""

import hashlib
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from playground.report import readme_plot
from playground.report.document import write
from playground.report.figures import ROOT

MODEL = "batch_size = 128\n"


@pytest.fixture
def root(tmp_path, make_passed, make_environment):
    """A small repository with one model, two CUDA variants, and a run of both."""
    for folder in ("models", "kernels/pool", "results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "pool.py").write_text(MODEL)
    results = []
    for variant, median in (("v1_fused_tail", 7.0), ("v2_single_kernel", 0.142)):
        file = tmp_path / "kernels" / "pool" / f"{variant}.py"
        file.write_text(f"# {variant}\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        results.append(make_passed("pool", variant, median, settings={"batch_size": 128}) | {"source_sha256": digest})
    environment = make_environment() | {"gpu": "NVIDIA <b>$H200$"}
    write({"schema": 1, "environment": environment, "results": results}, tmp_path / "results" / "h200.json")
    return tmp_path


def texts(file):
    return [node.text for node in ElementTree.parse(file).iter() if node.tag.endswith("}text")]


def test_it_shows_what_was_measured(root):
    assert readme_plot.main([], root) == 0
    for theme in readme_plot.FILES.values():
        shown = texts(root / theme)
        assert any(text.startswith("0.142 ms, 49.4x over torch.compile, 97.9% of the floor") for text in shown)
        assert {"v1_fused_tail", "v2_single_kernel", "eager", "torch.compile"} <= set(shown)
        assert "pool, 128×8×384×384; floor 0.139 ms" in shown
        assert any(text.startswith("Forward pass on NVIDIA <b>$H200$, torch") for text in shown)


def test_a_variant_that_changed_is_marked(root):
    (root / "kernels" / "pool" / "v1_fused_tail.py").write_text("# edited\n")
    assert readme_plot.main([], root) == 0
    shown = texts(root / readme_plot.FILES["light"])
    assert "v1_fused_tail †" in shown and "v2_single_kernel" in shown


def test_check_tells_old_from_new(root, capsys):
    assert readme_plot.main(["--check"], root) == 1
    assert "out of date; run: python -m playground.report.readme_plot" in capsys.readouterr().err
    assert not (root / readme_plot.FILES["light"]).exists()
    assert readme_plot.main([], root) == 0
    assert readme_plot.main(["--check"], root) == 0
    file = root / readme_plot.FILES["dark"]
    file.write_text(file.read_text().replace("0.142", "0.141"))
    assert readme_plot.main(["--check"], root) == 1


def test_nothing_measured(root, capsys):
    shutil.rmtree(root / "results")
    assert readme_plot.main([], root) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_readmes_plot_is_current():
    assert readme_plot.main(["--check"], ROOT) == 0, f"run: {readme_plot.COMMAND}"


def test_both_backgrounds_can_be_read():
    assert readme_plot.COLOURS["light"].keys() == readme_plot.COLOURS["dark"].keys() == set(readme_plot.NAMES)
