"""--against: two runs compared row by row, with documents that are made for it."""

import copy

import pytest
from drawn import printed, unfolded
from made import UNTIMED, make_passed, read

from playground.report import against
from playground.serial import dump

CPU = {"cores": 2, "logical_cores": 2, "usable_logical_cores": 2, "capability": "AVX2", "threads": 2}
VARIANT = ("conv_pool_sigmoid_sum", "v2_single_kernel")


def compared(new, old):
    """(the first row of VARIANT in `new`, the document) after `new` was compared with `old`."""
    result = dump(against.compare(read(new), read(old), "old.json"))
    row = next(each for each in result["results"] if (each["model"], each["variant"]) == VARIANT)["against"][0]
    return row, result


def of(content):
    return next(each for each in content["results"] if (each["model"], each["variant"]) == VARIANT)


def slow_down(timings, variant=1.0, baseline=1.0):
    """As if the variant, and its baselines, had taken so many times as long."""
    timings["time_ms"] = {key: value * variant for key, value in timings["time_ms"].items()}
    for spread in timings["baselines_ms"].values():
        spread.update({key: value * baseline for key, value in spread.items()})
    for ratio in timings["speedup"].values():
        ratio.update({key: value * baseline / variant for key, value in ratio.items()})


@pytest.mark.parametrize(
    "variant, baseline, verdict",
    [
        (1.0, 1.0, "same"),
        (0.8, 1.0, "faster"),
        (1.25, 1.0, "slower"),
        (2.0, 2.0, "same"),  # the whole machine was slower
        (1.0, 2.0, "same"),  # the baseline had a bad day
        (0.99, 1.0, "same"),  # within what two runs of the same code differ by
        (0.8, 0.9, "faster"),
        (0.8, 0.5, "not comparable"),  # the time says faster, the speed-up slower
    ],
)
def test_verdict(gpu_document, variant, baseline, verdict):
    old = copy.deepcopy(gpu_document)
    slow_down(of(gpu_document), variant, baseline)
    row, _ = compared(gpu_document, old)
    assert row["verdict"] == verdict
    assert (row["old_ms"], row["new_ms"]) == (of(old)["time_ms"]["median"], of(gpu_document)["time_ms"]["median"])
    assert row["time"]["ratio"] == pytest.approx(1 / variant)
    assert row["speedup"]["ratio"] == pytest.approx(baseline / variant)
    assert row["baseline"] == "eager"
    assert (row["reason"] is None) == (verdict != "not comparable")


def test_ranges_are_those_of_the_worst_ends(gpu_document):
    old = copy.deepcopy(gpu_document)
    row, _ = compared(gpu_document, old)
    spread, ratio = of(old)["time_ms"], of(old)["speedup"]["eager"]
    assert row["time"]["low"] == pytest.approx(spread["p20"] / spread["p80"])
    assert row["time"]["high"] == pytest.approx(spread["p80"] / spread["p20"])
    assert row["speedup"]["low"] == pytest.approx(ratio["low"] / ratio["high"])


def test_a_change_within_the_spread_is_none(gpu_document):
    old = copy.deepcopy(gpu_document)
    slow_down(of(gpu_document), 0.9)
    of(gpu_document)["time_ms"].update(p80=2 * of(old)["time_ms"]["median"])
    assert compared(gpu_document, old)[0]["verdict"] == "same"


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda old: old["environment"].update(gpu="NVIDIA H100"), "GPU NVIDIA H100 then, NVIDIA H200 now"),
        (lambda old: old["environment"].update(driver="550.0"), "driver 550.0 then, 580.95.05 now"),
        (lambda old: old["environment"].pop("driver"), "driver unknown then, 580.95.05 now"),
        (lambda old: old["environment"].update(torch="2.9.0"), "torch 2.9.0 then, 2.11.0+cu130 now"),
        (lambda old: of(old)["shape"].update(inputs=[[4, 8, 384, 384]]), "sizes: 4x8x384x384 then, 128x8x384x384 now"),
        (lambda old: of(old).update(precision="fp32"), "precision fp32 then, tf32 now"),
        (lambda old: of(old).update(model_sha256="0" * 64), "stale: the model's file has changed since"),
        (lambda old: of(old).update(ran_on="cpu"), "ran on cpu then, on cuda now"),
        (lambda old: of(old).update(speedup={}), "no baseline was timed in both runs"),
        (
            lambda old: of(old).update(UNTIMED, verdict="fail", reason="no"),
            "not timed in the earlier run, where its verdict was",
        ),
        (lambda old: old["results"].remove(of(old)), "not in the earlier run"),
        (lambda old: of(old)["time_ms"].update(p20=0.0, median=0.0, p80=0.0), None),
    ],
)
def test_what_cannot_be_compared(gpu_document, change, reason):
    of(gpu_document)["model_sha256"] = "1" * 64
    old = copy.deepcopy(gpu_document)
    change(old)
    row, _ = compared(gpu_document, old)
    if reason is None:  # an old time of 0 is no reason to divide by it
        assert row["verdict"] in ("slower", "same", "not comparable")
    else:
        assert row["verdict"] == "not comparable" and reason in row["reason"]
        assert row["time"] is None and row["speedup"] is None


def test_threads_count_on_the_cpu(cpu_document):
    old = copy.deepcopy(cpu_document)
    cpu_document["environment"]["cpu_details"] = CPU | {"threads": 2}
    old["environment"]["cpu_details"] = CPU | {"threads": 8}
    result = dump(against.compare(read(cpu_document), read(old), "old.json"))
    reasons = {each["variant"]: each["against"][0]["reason"] for each in result["results"]}
    assert reasons["cpu_box_sums"] == "threads 8 then, 2 now"
    assert reasons["v3_tiled"] == "not timed in this run: pass then, pass now"


def test_every_mode_is_a_row(gpu_document):
    old = copy.deepcopy(gpu_document)
    old["results"][1]["training"]["weights"] = None
    slow_down(of(gpu_document)["training"]["weights_and_input"], 0.5)
    _, result = compared(gpu_document, old)
    rows = {row["timed"]: (row["verdict"], row["reason"]) for row in of(result)["against"]}
    assert rows == {
        "forward": ("same", None),
        "training, weights": ("not comparable", "not timed in the earlier run"),
        "training, weights and input": ("faster", None),
    }


def test_a_sweep_is_compared_point_by_point(gpu_document):
    points = [make_passed(*VARIANT, median=size, settings={"batch_size": size}, inputs=(size, 8)) for size in (8, 16)]
    new = gpu_document | {"results": copy.deepcopy(points)}
    slow_down(new["results"][1], 0.5)
    result = dump(against.compare(read(new), read(gpu_document | {"results": points[::-1]}), "old.json"))
    assert [each["against"][0]["verdict"] for each in result["results"]] == ["same", "faster"]
    assert "v2_single_kernel: batch 16 instead of 128" in printed(lambda console: against.show(read(result), console), 160)


def test_counts_and_what_is_gone(gpu_document):
    old = copy.deepcopy(gpu_document)
    old["results"].append({**copy.deepcopy(of(old)), "variant": "v9_gone"})
    slow_down(of(gpu_document), 0.5)
    _, result = compared(gpu_document, old)
    rows = [row for each in result["results"] for row in each["against"]]
    assert sum(result["against"]["counts"].values()) == len(rows)
    assert result["against"]["counts"]["faster"] == 1
    assert result["against"]["not_in_this_run"] == [f"{VARIANT[0]}/v9_gone"]


def test_regressions_are_what_is_slower_or_less_right(gpu_document):
    old = copy.deepcopy(gpu_document)
    v1, v2 = gpu_document["results"][:2]
    slow_down(v1, 1.5)
    v2.update(UNTIMED, verdict="fail", reason="wrong")
    old["results"][-1].update(verdict="forward only", reason="no backward")  # better now
    text = compared(gpu_document, old)[1]["against"]["regressions"]
    assert text == [
        "conv_pool_sigmoid_sum/v1_fused_tail: forward slower: 7.00 ms then, 10.5 now",
        "conv_pool_sigmoid_sum/v2_single_kernel: pass then, fail now",
    ]
    v2["shape"]["inputs"] = [[4, 8, 384, 384]]
    assert len(compared(gpu_document, old)[1]["against"]["regressions"]) == 1, "at another size it is another question"
    assert dump(against.compare(read(old), read(old), "old.json"))["against"]["regressions"] == []


@pytest.mark.parametrize("width", [60, 160])
def test_what_is_printed(gpu_document, width):
    assert printed(lambda console: against.show(read(gpu_document), console)) == "", "without it"
    old = copy.deepcopy(gpu_document)
    slow_down(of(gpu_document), 0.8)
    old["environment"]["date"] = "2026-10-02T10:00:00+00:00"
    old["results"][0]["shape"]["inputs"] = [[4, 8, 384, 384]]
    _, result = compared(gpu_document, old)
    text = printed(lambda console: against.show(read(result), console), width)
    assert max(map(len, text.splitlines())) <= width and text.isascii()
    text = unfolded(text)
    assert "Against old.json of 2026-10-02" in text
    assert "1.25x" in text and "1.21-1.29" in text, "the interval holds those of the times and of the speed-ups"
    assert "v1_fused_tail: sizes: 4x8x384x384 then, 128x8x384x384 now" in text
    assert "v2_single_kernel: faster, though the file is the same as then" in text
    assert text.endswith("Against old.json: 1 faster, 3 same, 5 not comparable")
