"""The machine: what it can build and run, what it is, and how fast it can be at most."""
