import copy
import functools
import io
import os
import re
from pathlib import Path

import pytest
from drawn import printed, unfolded
from made import RATIOS, UNTIMED, read, read_result
from rich.console import Console

from playground.driver.task import NOT_PROVED
from playground.report import figures, layout, terminal

VIEWS = {
    "summary": terminal.Summary,
    "details": terminal.Details,
    "explained": functools.partial(terminal.Details, checks=True),
}


def draw(view, document, width=80, **console):
    return printed(lambda console: VIEWS[view](console, {}).end(read(document)), width, **console)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [60, 160])
def test_in_a_pipe_it_is_plain_ascii_within_the_width_and_nothing_is_cut_off(view, width, document):
    text = draw(view, document, width)
    assert text.isascii()
    assert "\x1b" not in text and "..." not in text
    assert max(map(len, text.splitlines())) <= width
    for result in document["results"]:
        assert result["model"] in text
        assert re.search(rf"^\s*{result['variant']}\b", text, re.MULTILINE)
        assert result["verdict"] in text
        if result["reason"]:
            assert result["reason"].replace("\n", " ") in unfolded(text)


def test_summary_has_one_line_a_variant_where_there_is_room(gpu_document):
    text = draw("summary", gpu_document, 160)
    row = next(line for line in text.splitlines() if line.startswith("v2_single_kernel"))
    assert row.split() == [
        *("v2_single_kernel", "cuda,", "tf32", "pass", "ok", "1.10e-5", "1.20e-5", "0.142", "6.70", "49.4x", "torch.compile"),
        *("97.9%", "faster"),
    ]


def test_summary_counts_and_names_what_is_missing(gpu_document):
    text = unfolded(draw("summary", gpu_document))
    assert text.endswith("3 passed, 1 failed, 1 ended in an error")
    assert "NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, driver 580.95.05" in text
    assert "baseline torch.compile not measured: torch.compile: no working C++ compiler was found" in text
    assert "instead of" not in text  # settings that are the original's are no change


@pytest.mark.parametrize("view", ["summary", "details"])
def test_rows_come_as_they_are_known(view, gpu_document):
    """A table when its model is complete; until then what there is can be drawn, and is not printed."""
    file, results = io.StringIO(), gpu_document["results"]
    model = results[0]["model"]
    count = sum(result["model"] == model for result in results)
    shown = VIEWS[view](Console(file=file, width=100), {model: count})
    drawn = shown.update(read(gpu_document | {"results": results[:1]}))
    if view == "summary":
        assert drawn and results[0]["variant"] not in file.getvalue()
    else:
        assert results[0]["variant"] in file.getvalue()
    shown.update(read(gpu_document | {"results": results[:count]}))
    first = file.getvalue()
    assert all(result["variant"] in first for result in results[:count])
    shown.end(read(gpu_document))
    assert not re.search(rf"^{model}\b", file.getvalue()[len(first) :], re.MULTILINE), "nothing is printed twice"


def test_what_was_emulated_takes_a_line_of_80(cpu_document):
    emulated = [result for result in cpu_document["results"] if result["ran_on"] == "emulator"]
    text = draw("summary", cpu_document | {"results": emulated})
    for result in emulated:
        (row,) = [line for line in text.splitlines() if line.startswith(result["variant"])]
        assert result["verdict"] in row and len(row) <= 80
    assert "speed-up" not in text and "median" not in text


def test_summary_gives_the_geometric_mean_over_the_models(gpu_document, cpu_document):
    text = unfolded(draw("summary", gpu_document))
    mean = (49.37 * 64.3 / 400) ** 0.5  # the failed model has no ratio
    assert f"Geometric mean over 2 models on cuda, the best variant of each against its best baseline: {mean:.2f}x" in text
    assert "Geometric mean over 1 model on cpu, " in unfolded(draw("summary", cpu_document))
    for result in gpu_document["results"]:
        result["speedup"] = result["outcome"] = None
    assert "Geometric mean" not in unfolded(draw("summary", gpu_document))


@pytest.mark.parametrize("view", VIEWS)
def test_what_disturbed_a_timing_is_said(view, gpu_document):
    result = gpu_document["results"][1]
    result["notes"] = ["the SM clock went from 1980 to 1500 MHz while it was timed"]
    result["training"]["weights"]["notes"] = ["the GPU was slowed down while it was timed: power cap"]
    result["floor_ms"] = 0.2
    result["outcome"]["any_precision"] = "channels_last"
    result["graphed"] = {"unavailable": "RuntimeError: cannot be captured"}
    result["training"]["weights"]["graphed"] = {"unavailable": "not tried"}
    text = unfolded(draw(view, gpu_document))
    for note in [
        "the SM clock went from 1980 to 1500 MHz while it was timed",
        "training, weights: the GPU was slowed down while it was timed: power cap",
        "faster than the floor, which counts more arithmetic than this variant does",
        "64.3x over channels_last, the fastest of any precision",
        "v2_single_kernel: not timed in a CUDA graph: RuntimeError" if view == "summary" else "note not timed in a CUDA graph",
        "not timed in a CUDA graph: RuntimeError: cannot be captured",
        "training, weights: not timed in a CUDA graph: not tried",
    ]:
        assert note in text


def with_graphed_training(document):
    """Of the second result: forward was timed without a graph only, the weights also in one, 40 times as fast."""
    graphed = copy.deepcopy(document["results"][1]["training"]["weights"])
    graphed["time_ms"] = {key: value / 40 for key, value in graphed["time_ms"].items()}
    graphed["outcome"].update(ratio=2.5, low=2.4, high=2.6)
    graphed |= {"not_graphed": ["eager", "channels_last"], "notes": []}
    graphed["baselines_unavailable"] = {"compile_fp32": "RuntimeError: no capture"}
    document["results"][1]["training"]["weights"]["graphed"] = graphed
    return document


def test_summary_shows_training_in_a_graph(gpu_document):
    assert "CUDA graph" not in unfolded(draw("summary", gpu_document))
    text = unfolded(draw("summary", with_graphed_training(gpu_document)))
    assert "v2_single_kernel: CUDA graph: training, weights 0.114 ms, 2.50x over torch.compile" in text
    assert "without a graph" not in text  # eager ran without one, which is no matter where torch.compile is what counts
    document = with_graphed_training(gpu_document)
    document["results"][1]["training"]["weights"]["graphed"]["outcome"]["against"] = "eager"
    assert "2.50x over eager without a graph" in unfolded(draw("summary", document))


def test_details_show_everything_of_a_variant(gpu_document):
    gpu_document["results"] = [gpu_document["results"][1]]
    gpu_document["results"][0]["findings"] = ["v2.py:88: race on `tile`"]
    gpu_document["results"][0]["check"]["mutants_rejected"] = "9/9"
    text = unfolded(draw("details", gpu_document))
    for part in [
        "v2_single_kernel pass",
        "finding v2.py:88: race on `tile`",
        "ran on cuda, tf32",
        "inputs 128x8x384x384",
        "max error 1.1e-5 standard deviations; PyTorch's 1.2e-5; allowed 2.4e-5",
        "mutants 9/9 rejected",
        "build 6.70 s",
        "floor 0.139 ms, bound by memory; 97.9% of it reached",
        "conv.weight ok 3.21e-6 1.20e-5 2.40e-5",
        "conv.bias ok 0 1.20e-5 2.40e-5",
        "input0 ok 2.20e-5 1.20e-5 2.40e-5",
        "forward 0.142 0.141-0.145 613",
        "torch.compile 7.01 6.94-7.15 49.4x 48.9x-49.9x",
        "training, weights 4.57 4.52-4.66 1230",
        "training, weights and input 5.10 5.05-5.20 2400",
    ]:
        assert part in text


def test_details_of_what_is_no_pass(gpu_document, cpu_document):
    text = unfolded(draw("details", gpu_document))
    assert "conv.weight fail 5.00e-1 1.20e-5 2.40e-5" in text
    assert "conv.bias fail - 1.20e-5 2.40e-5" in text
    assert "gradients none: v1_direct has no backward" in text
    assert "build 0.300 s, from the cache" in text
    assert "note baseline torch.compile not measured" in text
    text = unfolded(draw("details", cpu_document))
    assert "v1_fused_tail skipped reason no CUDA GPU in this machine" in text
    assert "inputs 4x8x384x384: batch 4 instead of 128" in text


def test_the_reason_that_decides_stands_before_the_caveats(gpu_document):
    caveat = {"tag": "no-gradient", "text": "the output is detached", "costs": "drop-in", "line": 3}
    failed = gpu_document["results"][1]
    failed |= UNTIMED | {"verdict": "fail", "reason": "an earlier output: it is off by 4.9", "caveats": [caveat]}
    text = unfolded(draw("details", gpu_document))
    assert text.index("reason an earlier output: it is off by 4.9") < text.index(
        f"caveat no-gradient: {failed['variant']}.py:3: the output is detached"
    )
    failed |= {"verdict": "forward only", "reason": caveat["text"]}
    text = unfolded(draw("details", gpu_document))
    assert "reason the output is detached" not in text and text.count("the output is detached") == 1


def test_details_keep_the_lines_of_a_compiler(gpu_document):
    gpu_document["results"][3]["details"] = "kernel.cu(12): error\n      wodth\x1b[31m\n      ^[red]\n"
    assert "\n    kernel.cu(12): error\n          wodth [31m\n          ^[red]\n" in draw("details", gpu_document)


def test_long_details_are_for_those_who_ask(gpu_document):
    gpu_document["results"][3].update(reason="does not compile", details="does not compile\n" + "noise\n" * 100)
    short = draw("details", gpu_document)
    assert short.count("noise") == terminal.SHOWN_DETAILS and "(92 more lines: --verbose)" in short
    assert short.count("does not compile") == 1, "what the reason says is not said again"
    file = io.StringIO()
    terminal.Details(Console(file=file, width=80), verbose=True).end(read(gpu_document))
    assert file.getvalue().count("noise") == 100 and "--verbose" not in file.getvalue()


def test_a_full_disk_behind_the_output_ends_nothing(gpu_document, capsys):
    with Path("/dev/full").open("w") as file:
        terminal.Summary(layout.make_console(file), {}).end(read(gpu_document))
    assert capsys.readouterr().err == "the output cannot be written: No space left on device\n"


def test_a_pipe_that_nobody_reads_ends_nothing(gpu_document, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        terminal.Summary(layout.make_console(file), {}).end(read(gpu_document))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("variable", [{}, {"NO_COLOR": "1"}])
def test_no_color_means_no_style(gpu_document, monkeypatch, variable):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variable | {"TERM": "xterm-256color"}).items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    file.isatty = lambda: True
    terminal.Summary(layout.make_console(file), {}).end(read(gpu_document))
    assert ("\x1b[" in file.getvalue()) == (not variable)


def test_what_a_variant_printed_stands_behind_its_name(gpu_document):
    name = gpu_document["results"][1]["variant"]
    gpu_document["results"][1]["printed"] = "n = 3\x1b[31m\n" * 5 + "end\n"
    details, table = draw("details", gpu_document), draw("summary", gpu_document)
    assert details.count("printed: n = 3") == 1 and "printed: end\n" in details and "\x1b" not in details
    assert f"{name} printed: n = 3" in table


@pytest.mark.parametrize("view", VIEWS)
def test_an_untrusted_text_is_neither_obeyed_nor_cut(view, gpu_document):
    name = "/home/somebody/kernels/" + "a_very_long_name_" * 8 + "[red]x[/green].py"
    reason = "line one\nline two \x1b[2J\x07 [bold]markup[/nonsense] " + "unbroken" * 30
    gpu_document["results"][0].update(variant=name, model=name)
    gpu_document["results"][2].update(reason=reason, variant=name)
    gpu_document["results"][1]["check"]["gradients"] = {name: {"max_error": 1e-6, "allowed": 1e-5, "eager_error": 1e-6}}
    text = draw(view, gpu_document, 80)
    assert "\x1b" not in text and "\x07" not in text and "..." not in text
    assert max(map(len, text.splitlines())) <= 80
    letters = "".join(text.split())
    assert "lineonelinetwo[2J[bold]markup[/nonsense]" + "unbroken" * 30 in letters
    assert name in letters  # the model's, which has a line of its own


@pytest.mark.parametrize("columns, encoding", [("20", "utf-8"), ("nonsense", "ascii")])
def test_what_a_pipe_gets(columns, encoding, gpu_document, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", columns)
    gpu_document["results"][2]["reason"] = "naïve 核 kernel"
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = layout.make_console(file)
    terminal.Summary(console, {}).end(read(gpu_document))
    file.flush()
    printed = file.buffer.getvalue()
    assert console.width == {"20": 60}.get(columns, layout.UNFOLDED)
    assert b"\x1b" not in printed
    assert not re.search(rb"[ \t]$", printed, re.MULTILINE), "a line ends with blanks"
    reason = "naïve 核 kernel" if encoding == "utf-8" else "na\\xefve \\u6838 kernel"
    assert reason in printed.decode(encoding)


@pytest.mark.parametrize("view", ["summary", "details"])
def test_mutants_are_counted_and_survivors_named(view, gpu_document):
    _, second, *_ = gpu_document["results"]
    assert "mutants" not in unfolded(draw(view, gpu_document))
    second["check"] |= {"mutants_rejected": "14/14", "mutants_survived": []}
    text = unfolded(draw(view, gpu_document))
    assert "14/14 rejected" in text and "cannot be told" not in text
    second["check"] |= {"mutants_rejected": "13/14", "mutants_survived": ["conv2d: bias dropped"]}
    assert "13/14 rejected; cannot be told from the original: conv2d: bias dropped" in unfolded(draw(view, gpu_document))


def test_a_speed_up_in_a_lower_precision_is_labelled(gpu_document):
    _, second, *_ = gpu_document["results"]
    second["variant_precision"] = "fp16"
    text = unfolded(draw("summary", gpu_document, 160))
    assert "cuda, fp16 against tf32" in text and "49.4x fp16" in text
    assert "faster in fp16" in text
    read(gpu_document)
    assert "forward, in fp16: faster than" in unfolded(draw("details", gpu_document, 160))
    assert "fp16 against tf32" in unfolded(draw("details", gpu_document, 160))
    coloured = draw("summary", gpu_document, 160, force_terminal=True, color_system="standard")
    assert "x fp16" in coloured and not re.search(r"\x1b\[32m[\d.]+x fp16", coloured), "green would call it faster"


def test_a_speed_up_that_is_not_proved_says_so_wherever_it_stands(gpu_document):
    _, second, *_ = gpu_document["results"]
    second["speedup_proof"] = NOT_PROVED
    read(gpu_document)
    assert f"49.4x {NOT_PROVED}" in unfolded(draw("summary", gpu_document, 160))
    assert NOT_PROVED in unfolded(draw("details", gpu_document, 160))
    assert figures.labelled("49.4x", read_result(second)) == f"49.4x {NOT_PROVED}"


def test_what_is_measured_and_what_is_proved_stand_side_by_side(gpu_document):
    _, second, *_ = gpu_document["results"]
    second |= {"measured": second["speedup"], "proved": {"ratio": 78.0, "low": 75.0, "high": 80.0}}
    over = 75 * RATIOS["compile"] / RATIOS["eager"]  # eager PyTorch's time over torch.compile's is the inner clock's
    for view in ("summary", "details"):
        assert f"49.4x, proved {over:.3g}x" in unfolded(draw(view, gpu_document, 200)).replace(" (48.9x-49.9x)", "")
    assert "79.6x, proved 75.0x" in unfolded(draw("details", gpu_document, 200))
    second["measured"] = {name: {key: 10 * value for key, value in each.items()} for name, each in second["speedup"].items()}
    assert f"49.4x by the outer clock, proved {over:.3g}x" in unfolded(draw("summary", gpu_document, 200))
    second |= {"speedup": {}, "proved": None}
    second["outcome"] = {"verdict": "not measured", "reason": "its own processes go on"}
    told = "796x over eager measured, not proved: its own processes go on"
    assert told in unfolded(draw("summary", gpu_document, 200)) and told in unfolded(draw("details", gpu_document, 200))
