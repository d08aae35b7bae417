"""NVIDIA's compute-sanitizer on a process (`target`) that runs a variant's kernels, and on mistakes it must find (`control`)."""
