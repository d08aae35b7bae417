"""The emulator (cuda_emulator) on this project's variants."""
