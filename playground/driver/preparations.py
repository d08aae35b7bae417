"""Progress of one-time builds, which take minutes."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import cuda_emulator

# By the folder of the emulator's cache: what is made there, and the seconds that it takes on two free cores (AMD EPYC, 2026).
MADE = {"runtime": ("the emulator's runtime", 15), "headers": ("PyTorch's headers", 25)}
LOOK_AGAIN = 0.5  # seconds


@contextlib.contextmanager
def told(tell: Callable[[str], None]) -> Iterator[None]:
    """Call `tell` once for each of MADE that some process begins to make while this lasts, and once when it is made."""
    is_over = threading.Event()

    def watch() -> None:
        begun: set[str] = set()
        ended: set[str] = set()
        while not is_over.wait(LOOK_AGAIN):
            for name, folder in ((folder.name, folder) for folder in cuda_emulator.own_folders()):
                what, seconds = MADE[name]
                is_made = not any(path.is_dir() for path in cuda_emulator.entries(folder))
                if name not in begun and not is_made:
                    begun.add(name)
                    tell(f"compiling {what}, the first time only: about {seconds} s on two free cores")
                elif name in begun - ended and is_made:
                    ended.add(name)
                    tell(f"{what} {'are' if what.endswith('s') else 'is'} ready; compiling the file")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
