"""Four tools on one variant: which runs there are, and what follows from what they print. The tools are played by a script."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from playground.judge.verdict import UNJUDGED, doubted, found
from playground.nvidia import control, sanitizer
from playground.nvidia.sanitizer import TOOLS
from playground.record import compose
from playground.subject import Subject

SUBJECT = Subject(model="m", variant="v", backend="cuda", ran_on="cuda", source_sha256=None, build_seconds=None, built=True)
RIGHT = dataclasses.replace(compose(SUBJECT, UNJUDGED), verdict="pass")
SAMPLES = Path(__file__).parent / "samples"

# Plays compute-sanitizer: runs the target, then writes the sample of its tool as the log. What it should do wrong stands in a
# file beside it; there it also leaves what it was asked.
PLAYER = """
import json, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
options, target = sys.argv[1 : sys.argv.index("{python}")], sys.argv[sys.argv.index("{python}") :]
tool, log = options[options.index("--tool") + 1], Path(options[options.index("--log-file") + 1])
(here / f"{{tool}}.asked").write_text(json.dumps(options))
behaviour = json.loads((here / "behaviour.json").read_text())
if behaviour.get("hangs") == tool:
    time.sleep(1000)
if behaviour.get("breaks") == tool:
    sys.exit("Unable to find injection library")
subprocess.run(target)
log.write_text(behaviour.get("says", {{}}).get(tool) or (here / f"{{tool}}.log").read_text())
"""

# Plays the target, which test_target.py looks at: it gives the reply of its inputs, or dies where there is none.
TARGET = """
said = json.loads(Path(json.loads(request.read_text())["inputs"]).read_text())
if said is None:
    sys.exit("Aborted")
reply.write_text(json.dumps(said))
"""

VARIANT = "CUDA = '__global__ void planted(float* p) {}'"
REPLY = {"kernels": ["built"], "passes": ["forward", "backward"], "refused": None, "error": None}


def clean(tool):
    """The sample of a tool that found the control's mistake and no other."""
    text = (SAMPLES / f"{tool}.log").read_text()
    reports = text.split("=========\n")
    return "=========\n".join(
        [part for part in reports if f"playground_control_{tool}" in part] + ["========= ERROR SUMMARY: 1 error\n"]
    )


@pytest.fixture
def stage(tmp_path, install, target):
    """stage(replies, found=(), **behaviour) -> (Examination, folder of the player).

    `replies` are those to each of the inputs; `found` are tools that have a finding.
    """
    player, variant = install("compute-sanitizer", PLAYER.format(python=sys.executable)), tmp_path / "variant.py"
    target(TARGET)

    def play(replies=(REPLY,), found=(), limit=60, text=VARIANT, **behaviour):
        variant.write_text(text)
        for tool in TOOLS:
            log = (SAMPLES / f"{tool}.log").read_text().replace("/src/variant.py", str(variant))
            (player.parent / f"{tool}.log").write_text(log if tool in found else clean(tool))
        (player.parent / "behaviour.json").write_text(json.dumps(behaviour))
        probes = [tmp_path / f"inputs{i}" for i, _ in enumerate(replies)]
        for probe, reply in zip(probes, replies, strict=True):
            probe.write_text(json.dumps(reply))
        return sanitizer.examine({"variant": str(variant), "place": "cuda"}, probes, tmp_path, limit), player.parent

    return play


def test_silence_of_all_tools(stage):
    silent, folder = stage()
    assert (silent.findings, silent.problem, silent.notes) == ([], None, [])
    assert silent.passes == ["forward", "backward"] and silent.kernels == ["built", "planted"]
    assert silent.tools == {tool: {"findings": 0, "of_other_kernels": 0} for tool in TOOLS}
    assert silent.outcome == "nothing found"
    for tool in TOOLS:
        asked = json.loads((folder / f"{tool}.asked").read_text())
        assert asked[asked.index("--target-processes") + 1] == "application-only"
        filters = {asked[i + 1] for i, each in enumerate(asked) if each == "--kernel-name"}
        # initcheck has to see what PyTorch's kernels write.
        assert filters == (
            {f"kns={name}" for name in ("built", "planted", *map(control.kernel_of, TOOLS))} if tool != "initcheck" else set()
        )


def test_findings_are_the_verdict(stage):
    examined, _ = stage(found=("initcheck", "racecheck"))
    assert len(examined.findings) == 3 and examined.outcome == "fail"
    assert examined.findings[0].startswith(
        "variant.py:27: shared memory race: write here and read by thread (64,0,0) in line 30"
    )
    assert examined.tools["initcheck"] == {"findings": 1, "of_other_kernels": 1}
    judgment = found(UNJUDGED, examined.findings)
    assert (judgment.verdict, judgment.reason) == ("fail", examined.findings[0])
    assert judgment.findings == examined.findings and judgment.check.max_error is None
    assert examined.tools["racecheck"]["findings"] == 2


@pytest.mark.parametrize(
    "behaviour, problem",
    [
        ({"breaks": "memcheck"}, "memcheck does not work on this machine: Unable to find injection"),
        ({"says": {"initcheck": "========= COMPUTE-SANITIZER\n"}}, "initcheck does not work on this machine: "),
        (
            {"says": {"synccheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"}},
            "synccheck did not find the mistake that was made for it to find",
        ),
        (
            {"says": {"racecheck": "========= Internal Sanitizer Error: out of memory\n" + clean("racecheck")}},
            "racecheck did not look at everything: Internal Sanitizer Error",
        ),
        (
            {"says": {"memcheck": "========= A new kind of error\n=========     by thread (0,0,0) in block (0,0,0)\n"}},
            "memcheck prints a report that cannot be understood: A new kind of error",
        ),
    ],
    ids=["breaks", "no end", "blind", "incomplete", "unknown form"],
)
def test_silence_that_proves_nothing_is_a_problem(stage, behaviour, problem):
    silent, _ = stage(**behaviour)
    assert silent.problem.startswith(problem) and silent.findings == []
    result = doubted(dataclasses.replace(RIGHT, sanitizer=silent))
    assert result.verdict == "error" and result.reason == f"compute-sanitizer: {silent.problem}"


def test_a_tool_that_hangs(stage):
    found, _ = stage(hangs="racecheck", limit=3)
    assert found.problem == "racecheck did not end within the time limit"


REFUSAL = REPLY | {"passes": [], "refused": "ValueError: only five"}


def test_a_variant_that_takes_no_reduced_size_is_looked_at_in_its_own(stage):
    found, _ = stage([REFUSAL, REPLY])
    assert found.problem is None and found.passes == ["forward", "backward"]


def test_a_variant_that_takes_nothing(stage):
    found, folder = stage([REFUSAL, REFUSAL])
    assert found.problem == "it refuses all inputs: ValueError: only five"
    assert not (folder / "memcheck.asked").exists()


def test_a_variant_whose_process_dies_is_judged_by_what_the_tool_saw(stage):
    found, _ = stage([None], found=("memcheck",))
    assert "kernel planted" in found.findings[0] and found.problem.startswith("racecheck does not work")
    silent, _ = stage([None])
    assert silent.problem == "memcheck does not work on this machine: Aborted"


def test_a_variant_that_fails_under_a_tool_alone(stage):
    found, _ = stage([REPLY | {"error": "OutOfMemoryError: too large"}])
    assert found.problem == "memcheck made the variant fail: OutOfMemoryError: too large"


def test_a_variant_without_kernels(stage):
    found, folder = stage([REPLY | {"kernels": []}], text="x = 1")
    assert found.notes == ["no kernel of its own to look at"] and found.problem is None
    assert found.outcome == "no kernel of its own to look at" and not (folder / "memcheck.asked").exists()


def test_nothing_is_doubted_where_nothing_was_asked():
    assert doubted(RIGHT) == RIGHT
