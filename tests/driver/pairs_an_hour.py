"""Pairs an hour on one GPU and on all of this machine's, and whether verdicts and speed-ups are the same.

    python -m tests.driver.pairs_an_hour [--suite PROBLEMS [--solutions RUN]] [--kill] [compare.py's options, such as --quick]

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


def judged(name, suite, more, file, kill=False, **environment):
    """The results by pair, and their number an hour."""
    began = time.monotonic()
    command = [sys.executable, "compare.py", *suite, *more, "--json", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL)
    if kill:
        kill_a_worker(process, file)
    status = process.wait()
    seconds = time.monotonic() - began
    document = json.loads(file.read_text())
    results = {(row["model"], row["variant"]): row for row in document["results"]}
    lost = document["environment"].get("lost_workers", 0)
    count = sum(row["verdict"] in ("pass", "forward only", "fail") for row in results.values())  # a file may be missing
    rate = f"{count} of {len(results)} pairs judged in {seconds:.0f} s, {3600 * count / seconds:.0f} an hour"
    print(f"{name}: exit status {status}, {rate}", end="")
    print(f", {lost} workers lost; complete: {document['environment']['complete']}", flush=True)
    return results


def kill_a_worker(process, file):
    """As soon as there is a result: the youngest child that has the judged processes for children."""
    while process.poll() is None:
        time.sleep(0.5)
        if file.exists() and (workers := [each for each in psutil.Process(process.pid).children() if is_worker(each)]):
            return workers[-1].kill()


def is_worker(process):
    try:
        return any("playground.worker" in child.cmdline() for child in process.children())
    except psutil.Error:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite")
    parser.add_argument("--solutions")
    parser.add_argument("--kill", action="store_true")
    given, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        suite = ["--suite", given.suite] if given.suite else own_suite(folder)
        suite += ["--solutions", given.solutions] if given.solutions else []
        gpus = torch.cuda.device_count()
        warm = ["--check-only"]  # builds what all three then find built
        judged("builds", suite, [*more, *warm], folder / "warm.json")
        here = judged("here", suite, more, folder / "here.json", CUDA_VISIBLE_DEVICES="0")
        one = judged("cluster, 1 GPU", suite, [*more, "--cluster", "local"], folder / "one.json", CUDA_VISIBLE_DEVICES="0")
        everything = [*more, "--cluster", "local"]
        many = judged(f"cluster, {gpus} GPUs", suite, everything, folder / "many.json", given.kill)
    print("workers: ", sorted({row["device"]["worker"] for row in many.values() if row.get("device")}))
    for pair, row in here.items():
        told = [f"{each[pair]['verdict']} {ratio(each[pair])}" for each in (here, one, many)]
        same = len({each[pair]["verdict"] for each in (here, one, many)}) == 1
        print(f"{'same' if same else 'DIFFERENT'}: {row['model']} {row['variant']}: {' | '.join(told)}")


def ratio(row):
    """The speed-up over the fastest baseline, with its interval; '' where nothing is claimed."""
    outcome = row["outcome"] or {}
    return f"{outcome['ratio']:.3f}x [{outcome['low']:.3f}, {outcome['high']:.3f}]" if outcome.get("ratio") else ""


if __name__ == "__main__":
    main()
