"""The option with which the exhibits' verdicts on a GPU are recorded, and a module's process for variants."""

import pytest
from judged import one_worker


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="test_exhibits.py: write the verdicts on the exhibits that need a GPU")


@pytest.fixture(scope="module")
def worker():
    with one_worker() as process:
        yield process
