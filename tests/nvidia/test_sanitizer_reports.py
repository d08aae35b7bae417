"""What compute-sanitizer prints is read: places, threads, what belongs together, and what is none of the variant's."""

from pathlib import Path

import pytest

from playground.nvidia import sanitizer_reports as reports

SAMPLES = Path(__file__).parent / "samples"
VARIANT = "/src/variant.py"
KERNELS = {"planted", "planted_tail"}


def log(tool):
    return reports.read(tool, (SAMPLES / f"{tool}.log").read_text())


def own(tool):
    return [each.describe(VARIANT) for each in log(tool).findings if each.concerns(KERNELS, VARIANT)]


def test_memcheck():
    assert own("memcheck") == [
        "variant.py:12: Invalid __global__ write of size 4 bytes: out of bounds, 1 bytes after the nearest allocation "
        "of size 1,024 bytes; kernel planted, block (3,0,0), thread (32,0,0) (memcheck, 1 more like it)",
        "variant.py:20: Invalid __shared__ read of size 4 bytes: out of bounds; kernel planted_tail<(int)256, "
        "Pair<int, float>>, block (0,0,0), thread (0,0,0) (memcheck)",
    ]
    assert [each.kernel for each in log("memcheck").findings if not each.concerns(KERNELS, VARIANT)] == [
        "cudnn::engines_precompiled::nchwToNhwcKernel<float, float>",
        "playground_control_memcheck",
    ]


def test_racecheck_counts_the_bytes_of_a_race_and_its_analysis_as_one():
    assert own("racecheck") == [
        "variant.py:27: shared memory race: write here and read by thread (64,0,0) in line 30, no barrier between the two; "
        "kernel planted<(int)256>, block (7,0,0), thread (1,0,0) (racecheck, 2 more like it)",
        "variant.py:27: shared memory race: write here and write in line 27, no barrier between the two; "
        "kernel planted<(int)256> (racecheck)",
    ]


def test_a_race_without_lines_names_offsets():
    (vendor,) = [each for each in log("racecheck").findings if each.kernel.startswith("sgemm")]
    assert "read here and write by thread (35,0,0) at sgemm_32x32x32_NT_vec+0x68" in vendor.describe(VARIANT)


def test_initcheck():
    assert own("initcheck") == [
        "variant.py:41: Uninitialized __global__ memory read of size 4 bytes; kernel planted, block (1,0,0), thread (5,0,0) "
        "(initcheck)"
    ]


def test_synccheck_names_the_line_of_the_variant_behind_a_header():
    assert own("synccheck") == [
        "variant.py:42: Barrier error detected. Divergent thread(s) in block; kernel planted, block (0,0,0), thread (32,0,0) "
        "(synccheck)",
        "variant.py:48: Barrier error detected. Invalid arguments; kernel planted, block (0,0,0), thread (0,0,0) (synccheck)",
    ]
    assert log("synccheck").troubles[0].startswith("Warning: Detected overflow")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_log_that_breaks_off_is_not_complete(tool):
    text = (SAMPLES / f"{tool}.log").read_text()
    assert reports.read(tool, text).is_complete
    assert not reports.read(tool, text[: text.rindex("=========")]).is_complete
    assert not reports.read(tool, "").is_complete


def test_a_kernel_without_lines_is_known_by_its_name():
    text = (SAMPLES / "initcheck.log").read_text().replace(" in /src/variant.py:41", "")
    (finding,) = [each for each in reports.read("initcheck", text).findings if each.concerns(KERNELS, VARIANT)]
    assert finding.describe(VARIANT).startswith("Uninitialized __global__ memory read of size 4 bytes; kernel planted")


def test_a_place_in_the_file_is_enough():
    (finding,) = [each for each in log("initcheck").findings if each.concerns(set(), VARIANT)]
    assert finding.kernel == "planted"
    assert not [each for each in log("initcheck").findings if each.concerns(set(), "/elsewhere/variant.py")]
    stripped = (SAMPLES / "initcheck.log").read_text().replace("/src/", "")
    assert [each for each in reports.read("initcheck", stripped).findings if each.concerns(set(), VARIANT)]


OF_ANOTHER_RELEASE = """
========= Invalid __global__ write of size 4 bytes
=========     at 0x160 in memcheck_demo.cu:6:planted(void)
=========     by thread (0,0,0) in block (0,0,0)
"""
RACE_OF_ANOTHER_RELEASE = "========= Error: Race reported between Write access at planted+0x10 in a.cu:1\n=========     with\n"


@pytest.mark.parametrize("text", [OF_ANOTHER_RELEASE, RACE_OF_ANOTHER_RELEASE])
def test_a_report_that_cannot_be_understood_is_no_silence(text):
    with pytest.raises(reports.Unreadable):
        reports.read("memcheck", text)


def test_what_the_program_prints_itself_is_no_report():
    text = "hello\n  ========= Invalid\n========= ERROR SUMMARY: 0 errors\n"
    assert reports.read("memcheck", text) == reports.Log([], [], is_complete=True)
