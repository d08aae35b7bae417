"""compute-sanitizer is found, and a run ends with all that it started."""

import psutil
import torch
from typed import wait_for

from playground import tensors
from playground.nvidia import tool
from playground.nvidia.tool import Run


def test_the_tool_is_found_on_path_and_in_the_toolkit(install, monkeypatch, tmp_path):
    assert tool.find() is None and str(tool.missing()).startswith("no compute-sanitizer on this machine: it is part of")
    file = install(tool.NAME, "")
    assert tool.find() == str(file) and tool.missing() is None
    monkeypatch.setenv("PATH", "")
    assert tool.find() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tool.find() == str(file)


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
    tensors.save({"inputs": [torch.randn(3, 8)], "upstream": None, "wanted_inputs": []}, tmp_path / "inputs")
    load = {"problem": str(tiny_problem), "variant": str(variant.path), "settings": {"batch_size": 3}, "place": "cpu"}
    load |= {"weights": None, "seed": 1}
    with Run("no tool", {"load": load, "inputs": str(tmp_path / "inputs"), "tool": None, "limit": 120}, tmp_path) as run:
        run.wait()
    assert run.reply() == {"kernels": [], "passes": ["forward"], "refused": None, "error": None}, run.last_words()
