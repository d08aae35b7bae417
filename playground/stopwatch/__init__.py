"""How fast: what is timed, how, and against what. Knows nothing of the judge."""
