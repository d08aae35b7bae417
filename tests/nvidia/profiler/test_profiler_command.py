"""compare.py --profile with a program called ncu that prints what Nsight Compute would: no GPU is needed."""

import shlex
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from playground import catalog
from playground.command import main
from playground.machine import requirements
from playground.nvidia import profiler
from playground.nvidia.profiler import command, metrics
from playground.report.figures import significant

SAMPLE = Path(__file__).parent / "sample_raw.csv"
NOT_PERMITTED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target "
    "device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)
NO_KERNELS = "==PROF== Connected to process 1\n==PROF== Disconnected from process 1\n==WARNING== No kernels were profiled.\n"

PRETENDS_TO_BE_A_GPU = """
import sys, torch
torch.cuda.synchronize = lambda: None
from playground import tensors
from playground.nvidia.profiler import target
tensors.to = lambda inputs, device: inputs
torch.nn.Module.to = lambda model, device: model
target.main(sys.argv[1:])
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """fake_ncu(body) -> the file in which a program called ncu, alone on PATH with Python's body, keeps its arguments."""
    seen = tmp_path / "arguments"

    def install(body):
        program = tmp_path / "bin" / "ncu"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable}\nimport sys, shlex, pathlib\n"
            f"seen = pathlib.Path({str(seen)!r})\n"
            f"seen.write_text((seen.read_text() if seen.exists() else '') + shlex.join(sys.argv[1:]) + '\\n')\n"
            "log = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n" + textwrap.dedent(body)
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        return seen

    monkeypatch.setattr(command, "FOLDERS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(requirements, "missing_for", lambda backend: None)
    monkeypatch.setattr(command.target, "arguments_for", lambda *_: ["-c", "pass"])
    return install


@pytest.fixture
def compare(capsys):
    def run(*arguments):
        status = main.compare(["--model", "conv_pool_sigmoid_sum", "--profile", *arguments])
        return status, *capsys.readouterr()

    return run


def project_variant(name):
    model = catalog.find_model("conv_pool_sigmoid_sum")
    return model, catalog.find_variant(model, name)


def test_what_is_asked_and_what_is_shown(fake_ncu, compare, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    seen = fake_ncu(f"log.write_text(pathlib.Path({str(SAMPLE)!r}).read_text()); print('the program itself')")
    status, out, err = compare("--variant", "v3_box_sums")
    assert (status, err.count("Traceback")) == (0, 0)
    (line,) = seen.read_text().splitlines()
    options = shlex.split(line)
    assert options[options.index("--metrics") + 1] == ",".join(metrics.ALL)
    names = options[options.index("--kernel-name") + 1]
    assert names.startswith("regex:^(") and {"sum_sigmoids", "weighted_sum", "input_grad"} <= set(names[8:-2].split("|"))
    for words in (["--csv"], ["--page", "raw"], ["--clock-control", "none"], ["--print-units", "base"]):
        assert shlex.join(words) in line
    assert options[-3:] == [sys.executable, "-c", "pass"]

    unfolded = " ".join(out.split())
    for part in ["sum_sigmoids<1>", "25.5%", "21.0% of 25.0%", "124", "long scoreboard: waits for a value from device memory"]:
        assert part in unfolded, part
    # Beside it stands what the emulator counted of the kernel that the launch calls by another name.
    assert "The emulator counted at its own size: batch_size 3" in unfolded
    counts = profiler.counted(*project_variant("v3_box_sums"))["kernels"]["kernel"]["device memory read"]
    numbers = " ".join(significant(number) for number in (6.0, counts["per_request"], counts["least"]))
    assert f"sum_sigmoids<1> device memory read, sectors {numbers}" in unfolded


@pytest.mark.parametrize("width", ["60", "80", "160"])
def test_it_fits_any_width(fake_ncu, compare, monkeypatch, width):
    fake_ncu(f"log.write_text(pathlib.Path({str(SAMPLE)!r}).read_text())")
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = compare("--variant", "v3_box_sums")
    assert max(map(len, out.splitlines())) <= int(width)


def test_without_permission(fake_ncu, compare):
    fake_ncu(f"log.write_text({NOT_PERMITTED!r}); sys.exit(1)")
    status, out, err = compare("--variant", "v3_box_sums")
    assert (status, out) == (2, "")
    for word in ("ERR_NVGPUCTRPERM", "--cap-add=SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0"):
        assert word in err.splitlines()[-1]


def test_no_kernel_was_launched(fake_ncu, compare):
    fake_ncu(f"log.write_text({NO_KERNELS!r})")
    status, _, err = compare("--variant", "v3_box_sums")
    assert status == 1
    assert "v3_box_sums: its forward pass launched none of its kernels (" in err


def test_another_failure_is_quoted(fake_ncu, compare):
    fake_ncu("log.write_text('==ERROR== The driver is too old.\\n'); sys.exit(9)")
    status, out, err = compare("--variant", "v3_box_sums")
    assert (status, out) == (2, "")
    assert "Nsight Compute measured nothing (exit status 9): The driver is too old." in err


def test_metrics_that_the_gpu_lacks_are_left_out(fake_ncu, compare):
    lacking = metrics.STALL.format("gmma")
    seen = fake_ncu(f"""
        if {lacking!r} in sys.argv[sys.argv.index('--metrics') + 1]:
            log.write_text("==ERROR== Failed to find metric {lacking}\\n")
            sys.exit(1)
        log.write_text(pathlib.Path({str(SAMPLE)!r}).read_text())
    """)
    status, out, _ = compare("--variant", "v3_box_sums")
    assert status == 0 and "sum_sigmoids<1>" in out
    first, second = seen.read_text().splitlines()
    assert lacking in first and lacking not in second
    assert all(metric in second for metric in metrics.ALL if metric != lacking)


def test_without_nsight_compute(compare, monkeypatch, tmp_path):
    monkeypatch.setattr(requirements, "missing_for", lambda backend: None)
    monkeypatch.setattr(command, "FOLDERS", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, out, err = compare()
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "no Nsight Compute (ncu) on this machine: install" in err and "https://developer.nvidia.com/nsight-compute" in err


def test_a_forward_pass_that_fails(fake_ncu, compare, monkeypatch):
    fake_ncu("sys.exit('it is not to be called')")
    monkeypatch.setattr(command.target, "arguments_for", lambda *_: ["-c", "raise ValueError('expected 4 samples')"])
    status, _, err = compare("--variant", "v3_box_sums")
    assert status == 1
    assert "v3_box_sums: its forward pass fails: ValueError: expected 4 samples" in err


def test_a_time_limit_ends_ncu_and_what_it_started(fake_ncu, compare, tmp_path):
    fake_ncu(f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
        child.wait()
    """)
    status, _, err = compare("--variant", "v3_box_sums", "--time-limit", "2")
    assert status == 1 and "no end after 2 s" in err
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "what ncu started still runs"
        time.sleep(0.1)


def test_a_file_without_a_kernel(fake_ncu, write_variant):
    fake_ncu("sys.exit('it is not to be called')")
    model = catalog.find_model("alexnet_conv1")
    with pytest.raises(profiler.ProfilerError, match="no CUDA kernel in its text"):
        profiler.profile(model, write_variant("plain", "ModelNew = 1\n"), {}, 10.0)


def test_the_counts_of_an_edited_copy_are_not_the_recorded_ones(monkeypatch, tmp_path):
    """A file of one's own is counted anew, even one with a variant's name."""
    model = catalog.find_model("alexnet_conv1")
    variant = catalog.find_variant(model, "v1_direct")
    assert profiler.counted(model, variant)["kernels"]["conv2d"]["device memory read"]["least"] > 0
    copy = tmp_path / "v1_direct.py"
    copy.write_text(variant.path.read_text())
    asked = []
    monkeypatch.setattr(profiler.counted.__globals__["counting"], "measure_apart", lambda *pair: asked.append(pair) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profiler.counted(model, catalog.Variant("v1_direct", copy, "cuda"))
    assert asked
    stranger = catalog.Model("stranger", tmp_path / "stranger.py")
    assert profiler.counted(stranger, catalog.Variant("v1_direct", copy, "cuda")) is None


def test_what_runs_under_it_runs(tiny_problem, write_forward):
    """The target, with tensors that stay on the CPU."""
    variant = write_forward("plain", "return torch.tanh(self.linear(x))")
    arguments = command.target.arguments_for(catalog.find_model(str(tiny_problem)), variant, {"batch_size": 3})
    assert arguments[:2] == ["-m", "playground.nvidia.profiler.target"]
    done = command._run([sys.executable, "-c", PRETENDS_TO_BE_A_GPU, *arguments[2:]], variant, 120)
    assert done.returncode == 0
