"""The fallback for processors without the hand-written fiber switch gives the same results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


def test_ucontext():
    environment = {**os.environ, "CXX": f"{os.environ.get('CXX') or 'g++'} -DEMULATOR_PORTABLE"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("test_fast.py"))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
