"""Is it right? Compares a variant's raw outputs and gradients with float64. Knows nothing of the clocks."""
