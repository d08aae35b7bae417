"""Pairs an hour on one GPU and on all of this machine's, and what differs between them, as compare.py's --against tells it.

    python -m tests.driver.pairs_an_hour [--kill] [compare.py's options, such as --suite PROBLEMS --solutions RUN --quick]

Without --suite: each CUDA variant of the project, and tests/judge/problems/. The same suite is judged three times: here, by
`--cluster local` on the first GPU, and on all of them. With --kill a worker of the last run is killed in the middle.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from tests.judge.problems.pairs import folder as folder_of_problems

ROOT = Path(__file__).resolve().parents[2]


def own_suite(folder):
    pairs = [[f"models/{path.parent.name}.py", path] for path in sorted((ROOT / "kernels").glob("*/v[1-9]*.py"))]
    problems = sorted(folder_of_problems().glob("*/problem.py"))
    pairs += [[problem, problem.with_name(name)] for problem in problems for name in ("right.py", "wrong.py")]
    listed = [[str(ROOT / problem), str(solution)] for problem, solution in pairs if Path(ROOT / solution).is_file()]
    (folder / "pairs.json").write_text(json.dumps(listed))
    return ["--suite", str(folder / "pairs.json")]


def judged(name, arguments, file, kill=False, **environment):
    """Judge a suite, and tell how many pairs an hour that is."""
    began = time.monotonic()
    command = [sys.executable, "compare.py", *arguments, "--json", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)
    if kill:
        kill_a_worker(process, file)
    status = process.wait()
    seconds = time.monotonic() - began
    document = json.loads(file.read_text())
    about, rows = document["environment"], document["results"]
    count = sum(row["verdict"] in ("pass", "forward only", "fail") for row in rows)  # a file may be missing
    rate = f"{count} of {len(rows)} pairs judged in {seconds:.0f} s, {3600 * count / seconds:.0f} an hour"
    lost = f"{about.get('lost_workers', 0)} workers lost; complete: {about['complete']}"
    print(f"\n{name}: exit status {status}, {rate}, {lost}\n", flush=True)


def kill_a_worker(process, file):
    """As soon as there is a result: the youngest child that has the judged processes for children."""
    while process.poll() is None:
        time.sleep(0.5)
        if file.exists() and (workers := [each for each in psutil.Process(process.pid).children() if is_worker(each)]):
            return workers[-1].kill()


def is_worker(process):
    try:
        return any("playground.worker" in " ".join(child.cmdline()) for child in process.children())
    except psutil.Error:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill", action="store_true")
    given, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        arguments += [] if "--suite" in arguments else own_suite(folder)
        judged("builds, which all three then find", [*arguments, "--check-only"], folder / "warm.json")
        judged("here", arguments, folder / "here.json", CUDA_VISIBLE_DEVICES="0")
        arguments += ["--cluster", "local", "--against", str(folder / "here.json")]
        judged("cluster, 1 GPU", arguments, folder / "one.json", CUDA_VISIBLE_DEVICES="0")
        judged(f"cluster, {torch.cuda.device_count()} GPUs", arguments, folder / "many.json", given.kill)


if __name__ == "__main__":
    main()
