"""A sweep as a table and as a picture."""

import copy

import matplotlib
import pytest
from drawn import printed
from made import UNTIMED, read

from playground.report import sweep_plot, sweep_table

AXES = {"batch_size": (1, 8, 64)}


@pytest.fixture
def swept(gpu_document):
    """v2_single_kernel at three batches: it loses, then wins, then refuses."""
    (template,) = [result for result in gpu_document["results"] if result["variant"] == "v2_single_kernel"]
    results = []
    for batch, ratio in zip(AXES["batch_size"], (0.5, 2.0, None), strict=True):
        result = copy.deepcopy(template)
        result["shape"]["settings"] = {"batch_size": batch}
        if ratio:
            interval = {"ratio": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}
            result["outcome"] = interval | {"verdict": "win" if ratio > 1 else "loss", "against": "compile"}
        else:
            result.update(UNTIMED, verdict="error", reason="ValueError: batches up to 8", floor_ms=None)
        results.append(result)
    return {**gpu_document, "results": results}


def table(report, width):
    return printed(lambda console: sweep_table.Sweep(console, AXES).end(read(report)), width)


@pytest.fixture
def plot(swept, tmp_path):
    """plot() -> the text of the plot of what `swept` is by then."""

    def draw():
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            sweep_plot.write(read(swept), AXES, tmp_path / "plot.svg")
        return (tmp_path / "plot.svg").read_text()

    return draw


@pytest.mark.parametrize("width", [60, 200])
def test_the_table(swept, width):
    text = table(swept, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "conv_pool_sigmoid_sum v2_single_kernel" in words
    assert "refused" in words and "batch_size=64: ValueError: batches up to 8" in words


def test_the_picture_says_what_it_shows(plot):
    text = plot()
    for words in (
        "batch_size",
        "v2_single_kernel",
        "floor",
        "best baseline",
        "not measured: v2_single_kernel at 64: ValueError: batches up to 8",
        "eager",
        "speed-up over the best baseline",
        "median ms",
    ):
        assert words in text


def test_where_no_speedup_was_measured_a_strip_says_why(swept, plot):
    for result in swept["results"][:2]:
        result["outcome"] = {"verdict": "not measured", "reason": "the machine is busy", "against": None}
    text = plot()
    assert "not measured: v2_single_kernel at 1, 8: the machine is busy" in text
    assert "speed-up over the best baseline" not in text and "2x" not in text, "no empty panel"
    assert "batch_size=1; batch_size=8: the machine is busy" in " ".join(table(swept, 200).split())
