"""The emulator (cuda_emulator) on this project's variants; its own names are here, too, for notebooks that had them here."""

import cuda_emulator
from cuda_emulator import *  # noqa: F403
from cuda_emulator import __all__  # noqa: F401


def __getattr__(name):
    return getattr(cuda_emulator, name)
