"""compare.py --profile with a program called ncu that prints what Nsight Compute would: no GPU is needed."""

import shlex
import textwrap
from pathlib import Path

import pytest

from playground import catalog
from playground.machine import requirements
from playground.nvidia import metrics, profiler, tool
from playground.report.text import significant

SAMPLE = Path(__file__).parent / "samples" / "sample_raw.csv"
NOT_PERMITTED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target "
    "device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)
NO_KERNELS = "==PROF== Connected to process 1\n==PROF== Disconnected from process 1\n==WARNING== No kernels were profiled.\n"


@pytest.fixture(scope="module")
def counted():
    """What the emulator counts, which needs a compiler on PATH."""
    return metrics.counting.measure_apart(*project_variant("v3_box_sums"))


@pytest.fixture
def fake_ncu(tmp_path, counted, install, target, monkeypatch):
    """fake_ncu(body) -> the file in which a program called ncu, with Python's body, keeps its arguments."""
    seen = tmp_path / "arguments"

    def write(body):
        keep = f"with open({str(seen)!r}, 'a') as file: print(shlex.join(sys.argv[1:]), file=file)\n"
        log = "log = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n"
        install("ncu", "import sys, shlex, pathlib\n" + keep + log + textwrap.dedent(body))
        return seen

    monkeypatch.setattr(requirements, "missing_for", lambda backend: None)
    monkeypatch.setattr(metrics.counting, "measure_apart", lambda *pair: counted)
    target("reply.write_text(json.dumps({'error': None}))")
    return write


@pytest.fixture
def profile(compare):
    return lambda *arguments: compare("--model", "conv_pool_sigmoid_sum", "--profile", *arguments)


def project_variant(name):
    model = catalog.find_model("conv_pool_sigmoid_sum")
    return model, catalog.find_variant(model, name)


def test_what_is_asked_and_what_is_shown(fake_ncu, profile, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    seen = fake_ncu(f"log.write_text(pathlib.Path({str(SAMPLE)!r}).read_text()); print('the program itself')")
    status, out, err = profile("--variant", "v3_box_sums")
    assert (status, err.count("Traceback")) == (0, 0)
    (line,) = seen.read_text().splitlines()
    options = shlex.split(line)
    assert options[options.index("--metrics") + 1] == ",".join(metrics.ALL)
    names = options[options.index("--kernel-name") + 1]
    assert names.startswith("regex:^(") and {"sum_sigmoids", "add_blocks"} <= set(names[8:-2].split("|"))
    for words in (["--csv"], ["--page", "raw"], ["--clock-control", "none"], ["--print-units", "base"]):
        assert shlex.join(words) in line
    assert options[-4:-2] == list(tool.TARGET)

    unfolded = " ".join(out.split())
    for part in ["sum_sigmoids<1>", "25.5%", "21.0% of 25.0%", "124", "long scoreboard: waits for a value from device memory"]:
        assert part in unfolded, part
    # Beside it stands what the emulator counted.
    assert "The emulator counted at its own size: batch_size 3" in unfolded
    counts = metrics.counted(*project_variant("v3_box_sums"))["kernels"]["sum_sigmoids"]["device memory read"]
    numbers = " ".join(significant(number) for number in (6.0, counts["per_request"], counts["least"]))
    assert f"sum_sigmoids<1> device memory read, sectors {numbers}" in unfolded


def test_it_fits_a_narrow_terminal(fake_ncu, profile, monkeypatch):
    fake_ncu(f"log.write_text(pathlib.Path({str(SAMPLE)!r}).read_text())")
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = profile("--variant", "v3_box_sums")
    assert max(map(len, out.splitlines())) <= 60


def test_without_permission(fake_ncu, profile):
    fake_ncu(f"log.write_text({NOT_PERMITTED!r}); sys.exit(1)")
    status, out, err = profile("--variant", "v3_box_sums")
    assert (status, out) == (2, "")
    for word in ("ERR_NVGPUCTRPERM", "--cap-add=SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0"):
        assert word in err.splitlines()[-1]


def test_no_kernel_was_launched(fake_ncu, profile):
    fake_ncu(f"log.write_text({NO_KERNELS!r})")
    status, _, err = profile("--variant", "v3_box_sums")
    assert status == 1
    assert "v3_box_sums: its forward pass launched none of its kernels (" in err


def test_another_failure_is_quoted(fake_ncu, profile):
    fake_ncu("log.write_text('==ERROR== The driver is too old.\\n'); sys.exit(9)")
    status, out, err = profile("--variant", "v3_box_sums")
    assert (status, out) == (2, "")
    assert "Nsight Compute measured nothing (exit status 9): The driver is too old." in err


def test_metrics_that_the_gpu_lacks_are_left_out(fake_ncu, profile):
    lacking = metrics.STALL.format("gmma")
    seen = fake_ncu(f"""
        if {lacking!r} in sys.argv[sys.argv.index('--metrics') + 1]:
            log.write_text("==ERROR== Failed to find metric {lacking}\\n")
            sys.exit(1)
        log.write_text(pathlib.Path({str(SAMPLE)!r}).read_text())
    """)
    status, out, _ = profile("--variant", "v3_box_sums")
    assert status == 0 and "sum_sigmoids<1>" in out
    first, second = seen.read_text().splitlines()
    assert lacking in first and lacking not in second
    assert all(metric in second for metric in metrics.ALL if metric != lacking)


def test_without_nsight_compute(profile, monkeypatch):
    monkeypatch.setattr(requirements, "missing_for", lambda backend: None)
    monkeypatch.setattr(tool.Program, "find", lambda self: None)
    status, out, err = profile()
    assert (status, out) == (2, "") and err.startswith("--profile: no Nsight Compute (ncu) on this machine: install")
    assert "https://developer.nvidia.com/nsight-compute" in err and "PATH" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("reply.write_text(json.dumps({'error': 'ValueError: expected 4 samples'}))", "ValueError: expected 4 samples"),
        ("sys.exit('Segmentation fault')", "Segmentation fault"),
    ],
    ids=["raises", "dies"],
)
def test_a_forward_pass_that_fails(fake_ncu, target, profile, text, said):
    fake_ncu("sys.exit('it is not to be called')")
    target(text)
    status, _, err = profile("--variant", "v3_box_sums")
    assert status == 1 and f"v3_box_sums: its forward pass fails: {said}\n" in err


def test_a_time_limit(fake_ncu, profile):
    fake_ncu("import time; time.sleep(1000)")
    status, _, err = profile("--variant", "v3_box_sums", "--time-limit", "1")
    assert status == 1 and "v3_box_sums: no end after 1 s; --time-limit sets how long it may take" in err


def test_a_file_without_a_kernel(fake_ncu, write_variant):
    fake_ncu("sys.exit('it is not to be called')")
    model = catalog.find_model("alexnet_conv1")
    with pytest.raises(profiler.ProfilerError, match="no CUDA kernel in its text"):
        profiler.profile(model, write_variant("plain", "ModelNew = 1\n"), {}, 10.0)


def test_a_problem_without_a_size_for_the_emulator_is_not_counted(tmp_path):
    stranger = catalog.Model("stranger", tmp_path / "stranger.py")
    assert metrics.counted(stranger, catalog.Variant("v1_direct", tmp_path / "v1_direct.py", "cuda")) is None
