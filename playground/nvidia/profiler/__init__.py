"""NVIDIA's Nsight Compute on a variant: the few figures that say what binds its kernels, from one forward pass on a GPU.

`command` knows the program and runs it, `target` is what runs under it, `metrics` are the figures and their names in Nsight
Compute, `reading` turns its CSV into them, and `emulated` are the emulator's figures for the same kernels.
"""

from .command import ProfilerError, missing, profile
from .emulated import counted

__all__ = ["ProfilerError", "counted", "missing", "profile"]
