"""Where a file can be written is seen before a run, nobody else writes it meanwhile, and what fails later is kept elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from playground.catalog import Impossible
from playground.report.document import write_whole
from playground.report.output import Output


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_seen_before_the_run(small_disk):
    fill(small_disk)
    with pytest.raises(Impossible, match=r"--json .*/a\.json: cannot be written: No space left on device"):
        Output("--json", small_disk / "a.json").claim()
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_what_cannot_be_written_any_more_goes_elsewhere(small_disk, capsys):
    output = Output("--json", small_disk / "a.json")
    output.claim()
    output.write(lambda path: write_whole(path, "first"))
    (small_disk / "filler").touch()
    fill(small_disk)
    output.write(lambda path: write_whole(path, "second" * 9999))
    output.write(lambda path: write_whole(path, "third"))
    output.release()
    told = re.fullmatch(
        r"--json (.*): No space left on device; what was to be written is in (.*/a-\w+\.json)\n", capsys.readouterr().err
    )
    assert told[1] == str(small_disk / "a.json") and output.is_elsewhere
    assert (small_disk / "a.json").read_text() == "first" and Path(told[2]).read_text() == "third"
    Path(told[2]).unlink()


def test_a_file_has_one_writer_at_a_time(tmp_path):
    ours = Output("--json", tmp_path / "a.json")
    ours.claim()
    claim = "import sys; from playground.report.output import Output; Output('--json', sys.argv[1]).claim()"
    other = subprocess.run([sys.executable, "-c", claim, ours.path], capture_output=True, text=True)
    assert re.search(r"Impossible: --json .*/a\.json: another run or option writes it; name another file", other.stderr)
    ours.release()
    again = Output("--json", tmp_path / "a.json")
    again.claim()
    again.release()
    assert list(tmp_path.iterdir()) == [], "locks and trials are gone"


def test_a_writer_that_was_killed_keeps_nobody_out(tmp_path):
    claim = "import os, sys; from playground.report.output import Output; "
    claim += "Output('--json', sys.argv[1]).claim(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", claim, tmp_path / "a.json"])
    assert (tmp_path / ".a.json.lock").exists()
    output = Output("--json", tmp_path / "a.json")
    output.claim()
    output.release()
