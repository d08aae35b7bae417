"""What run_all.py and compare.py share: catalog -> worker (judge, stopwatch) -> report."""
