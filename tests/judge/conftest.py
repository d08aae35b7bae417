"""The option with which the exhibits' verdicts on a GPU are recorded."""


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="test_exhibits.py: write the verdicts on the exhibits that need a GPU")
