"""The floor: what a model must move and compute at least, and the time that this takes at the machine's measured rates."""
