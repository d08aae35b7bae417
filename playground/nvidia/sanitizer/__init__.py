"""NVIDIA's compute-sanitizer on a variant: four tools, each on one training step of it at a reduced size.

`subject` says what is looked at, `examination` asks, `command` knows the program and its options, `target` is what runs under
it, `reports` reads what it prints, and `control` are mistakes that each tool must find, or its silence means nothing.
"""

from .command import missing
from .examination import examine

__all__ = ["examine", "missing"]
