"""The emulator (cuda_emulator) on this project's variants; its own names are here, too, for notebooks that had them here."""

from cuda_emulator import *  # noqa: F403
