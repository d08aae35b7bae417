"""What run_all.py and compare.py share: catalog -> worker (judge, stopwatch) -> report. `compare` is for use from Python."""

__all__ = ["compare"]


def __getattr__(name):
    """`compare` is imported when it is asked for: most of what imports this package needs a small part of it."""
    if name in __all__:
        from playground.api import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
