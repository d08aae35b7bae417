"""NVIDIA's tools on a variant's kernels. They need a GPU.

`sanitizer` has compute-sanitizer look for mistakes. `sanitizer_reports` reads what it prints, and `control` holds mistakes that
it must find, or its silence means nothing. `profiler` has Nsight Compute measure what bounds the kernels. `metrics` are its
figures, and the emulator's for the same kernels. Both watch one process, `target`; `tool` runs it under them.
"""
