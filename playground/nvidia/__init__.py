"""NVIDIA's compute-sanitizer on a process (`target`) with a variant's kernels, and on mistakes it must find (`control`)."""
