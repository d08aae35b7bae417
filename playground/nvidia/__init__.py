"""NVIDIA's tools on a variant: compute-sanitizer and Nsight Compute. Both need a GPU."""
