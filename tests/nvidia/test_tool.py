"""What both tools need: their programs are found, and a run ends with all that it started."""

import psutil
from typed import wait_for

from playground.nvidia.tool import Program, Run


def test_a_program_is_found_on_path_in_the_toolkit_and_where_it_is_usually_installed(install, monkeypatch, tmp_path):
    program = Program("tool", "tool", "get it")
    assert program.find() is None and str(program.missing()) == "no tool on this machine: get it"
    file = install("tool", "")
    assert program.find() == str(file) and program.missing() is None
    monkeypatch.setenv("PATH", "")
    assert program.find() is None
    assert Program("tool", "tool", "get it", (f"{str(tmp_path)[1:]}/b*",)).find() == str(file)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert program.find() == str(file)


def test_what_hangs_is_ended_with_all_it_started(install, target, tmp_path):
    """A child in a process group of its own, and one whose parent has ended."""
    program = install(
        "tool",
        f"""
import pathlib, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
own_group = subprocess.Popen(sleep, process_group=0)
orphan = subprocess.run(["/bin/sh", "-c", "sleep 1000 >/dev/null & echo $!"], capture_output=True, text=True).stdout
pathlib.Path({str(tmp_path / "children")!r}).write_text(f"{{own_group.pid}} {{orphan}}")
time.sleep(1000)
""",
    )
    target("")
    for what in ("reply", "log"):
        (tmp_path / f"hangs.{what}").write_text('"an earlier variant\'s"')
    with Run("hangs", {"limit": 2.0}, tmp_path, [str(program)]) as run:
        run.wait()
    assert run.timed_out and run.reply() is None and run.log() == ""
    for child in map(int, (tmp_path / "children").read_text().split()):
        wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 10)  # noqa: B023


def test_the_target_is_a_process_that_leaves_its_reply(write_forward, tiny_problem, tmp_path):
    variant = write_forward("plain", "return torch.tanh(self.linear(x))")
    load = {"problem": str(tiny_problem), "variant": str(variant.path), "settings": {"batch_size": 3}, "place": "cpu"}
    request = {"load": load | {"weights": None, "seed": 1}, "inputs": None, "tool": None, "limit": 120}
    with Run("no tool", request, tmp_path) as run:
        run.wait()
    assert run.exit_status == 0, run.last_words()
    assert run.reply() == {"kernels": [], "passes": ["forward"], "refused": None, "error": None}
