"""What a worker can be asked: the names and their functions."""

from playground.worker.baselines import Baselines
from playground.worker.candidate import Candidate
from playground.worker.referee import Referee


def answerer():
    """A function (name, arguments) -> result, with the objects behind it. Raises whatever the request's function raises."""
    roles = {"candidate": Candidate(), "referee": Referee(), "baselines": Baselines()}

    def answer(name, arguments):
        role, method = name.split(".")
        return getattr(roles[role], method)(**arguments)

    return answer
