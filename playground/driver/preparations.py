"""What a first build makes for all later ones, told while it is made: minutes may pass."""

import contextlib
import threading

import cuda_emulator

MADE = {"runtime": "the emulator's runtime", "headers": "PyTorch's headers"}  # by the folder of the emulator's cache
LOOK_AGAIN = 0.5  # seconds


@contextlib.contextmanager
def told(tell):
    """While it lasts, call `tell` once for each of MADE that some process is making."""
    is_over = threading.Event()

    def watch():
        known = set()
        while not is_over.wait(LOOK_AGAIN):
            for folder in cuda_emulator.own_folders():
                if folder.name not in known and any(path.is_dir() for path in cuda_emulator.entries(folder)):
                    known.add(folder.name)
                    tell(f"preparing {MADE[folder.name]}, the first time only")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
