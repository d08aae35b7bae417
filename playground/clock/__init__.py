"""How times are taken: what is timed, by which of two clocks, in whose turn, and what follows from it.

The inner clock (timer, clocked, race) is the timed process's own; the outer one (outer, side, referee, memory) belongs to
processes that no judged file runs in. docs/how_times_are_taken.md has both.
"""
