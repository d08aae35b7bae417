"""The outer clock: what both of its sides are made of, the timed side, and the referee's.

docs/how_times_are_taken.md has the protocol.
"""
