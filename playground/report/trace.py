"""A document's results as traces of FlashInfer-Bench and SOL-ExecBench: a line of JSON for each workload and solution."""

import json

from playground.record import ERROR, SKIPPED
from playground.report import document, suite

NO_NUMBER = "NaN"  # as their form writes it
# What begins or is part of the judge's own sentences, and the status that it stands for.
OF_ERRORS = {suite.NOT_COMPILED: "COMPILE_ERROR", "no answer within the time limit": "TIMEOUT"}
OF_OUTPUTS = {" has the shape ": "INCORRECT_SHAPE", " has the type ": "INCORRECT_DTYPE"}


def traces(report):
    """Return the traces of results whose problems are definitions, without skipped ones, and right ones not timed."""
    made = []
    for result in report.results:
        status = _status(result)
        if result.pair and result.pair.workload and status:
            evaluation = _evaluation(result, status, report.environment)
            made.append(
                {
                    "definition": result.pair.problem,
                    "workload": result.pair.workload,
                    "solution": result.pair.solution,
                    "evaluation": evaluation,
                }
            )
    return made


def _status(result):
    if suite.is_correct(result, "forward"):
        return "PASSED" if result.time_ms and "eager" in suite.speedups(result) else None
    if result.verdict == SKIPPED:
        return None
    complaints = [probe.complaint for probe in result.checked.probes.values() if probe.complaint]
    if result.verdict == ERROR or result.findings or not complaints:  # not by what it computes, but by what it does besides
        return next((status for said, status in OF_ERRORS.items() if said in (result.reason or "")), "RUNTIME_ERROR")
    return next((status for said, status in OF_OUTPUTS.items() if said in complaints[0]), "INCORRECT_NUMERICAL")


def _evaluation(result, status, environment):
    hardware = environment.gpu if result.ran_on == "cuda" else environment.cpu
    libs = {name: version for name in ("torch", "cuda") if (version := getattr(environment, name))}
    found = {"status": status, "environment": {"hardware": hardware or "unknown", "libs": libs}}
    found |= {"timestamp": environment.date, "log": result.reason or "", "correctness": None, "performance": None}
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        check = result.checked
        extra = {"max_error_in_spreads": check.max_error, "allowed_in_spreads": check.allowed}
        found["correctness"] = {"max_relative_error": NO_NUMBER, "max_absolute_error": NO_NUMBER, "extra": extra}
    if status == "PASSED":
        latencies = {"latency_ms": result.time_ms.median, "reference_latency_ms": result.baselines_ms["eager"].median}
        found["performance"] = latencies | {"speedup_factor": suite.speedups(result)["eager"].ratio}
    return found


def write(report, path):
    """Write the traces, a line each."""
    document.write_whole(path, "".join(json.dumps(each) + "\n" for each in traces(report)))
