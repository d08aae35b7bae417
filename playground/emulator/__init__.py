"""The emulator (cuda_emulator) on this project's variants; its own names are here, too, for notebooks that had them here."""

import cuda_emulator
from cuda_emulator import __all__  # noqa: F401


def __getattr__(name):
    """Its `devices` imports PyTorch: not before that is asked for."""
    return getattr(cuda_emulator, name)
