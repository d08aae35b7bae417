"""NVIDIA's compute-sanitizer on a variant's kernels. It needs a GPU.

`sanitizer` has compute-sanitizer look for mistakes. `sanitizer_reports` reads what it prints, and `control` holds mistakes that
it must find, or its silence means nothing. It watches one process, `target`; `tool` runs that under it.
"""
