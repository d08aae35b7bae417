"""What a run takes over of an earlier one."""

import dataclasses

import pytest

from playground import catalog
from playground.driver import measurement, plan
from playground.driver.task import Options
from playground.report import document
from playground.worker.referee_client import describe_machine


@pytest.fixture(scope="module")
def described():
    """What every run says of this machine: a process looks, which takes seconds."""
    return describe_machine()


@pytest.fixture
def record(described):
    """The record of a run over alexnet_conv1's native variant."""
    model = catalog.find_model("alexnet_conv1")
    tasks = plan.of_variants(model, [catalog.find_variant(model, "cpu_polyphase_winograd")], [{}], Options(device="cpu"))

    def ask(function, *arguments):
        return described if function is describe_machine else function(*arguments)

    return measurement.Record(tasks, Options(quick=True), None, lambda report: None, ask)


def skipped(task):
    return plan.settled(task, "skipped", "it is only a row")


@pytest.fixture
def earlier(record, tmp_path):
    """earlier(**of its row) -> the file of a run of the same task."""

    def write(**changed):
        row = dataclasses.replace(skipped(record.tasks[0]), **changed)
        document.write(dataclasses.replace(record.document(), results=[row]), tmp_path / "earlier.json")
        return tmp_path / "earlier.json"

    return write


def test_it_says_how_much_that_is(record, earlier, capsys):
    file = earlier()
    record.take_over(file)
    assert record.settle() == []
    assert capsys.readouterr().err == f"--resume {file}: 1 kept\n"


def test_a_changed_file_is_run_again(record, earlier, capsys):
    file = earlier(source_sha256="0" * 64)
    record.take_over(file)
    assert len(record.settle()) == 1
    told = f"--resume {file}: 1 new; 1 in it is of another file or at other settings\n"
    assert capsys.readouterr().err == told


def test_an_error_is_judged_again_and_said(record, earlier, capsys):
    file = earlier(verdict="error")
    record.take_over(file)
    assert len(record.settle()) == 1
    assert capsys.readouterr().err == f"--resume {file}: 1 judged again after an error\n"


def test_a_run_of_something_else_is_refused(record, earlier):
    with pytest.raises(catalog.Impossible, match="has results of gelu/right, and none of what is to be run here"):
        record.take_over(earlier(model="gelu", variant="right"))


def test_a_run_that_trusted_somebody_else_is_refused(record, earlier):
    file = earlier()
    record.environment["options"] = record.environment["options"] | {"trust": "mine"}
    with pytest.raises(catalog.Impossible, match=r"that run had options .*'trust': 'nobody'.*this one has .*'trust': 'mine'"):
        record.take_over(file)


def test_a_result_that_breaks_the_contract_costs_itself_alone(record):
    (task,) = record.tasks
    record.keep([dataclasses.replace(skipped(task), peak_mib=-1.0)])
    (row,) = record.document().results
    assert row.verdict == "error" and "peak_mib: expected a number that is not negative, got -1.0" in row.reason
    document.as_text(record.document())
