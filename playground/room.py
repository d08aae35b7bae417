"""What is said where a folder of this machine has no room. Without PyTorch, since the driver needs it before that is there."""

import errno

NO_ROOM = "no room "  # begins the reason of what failed for the machine, and by no fault of a file's


class NoRoom(Exception):
    """A folder of this machine is full; the text says which, and what to do."""


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a file system, or a share of it, is full."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def no_room_in(folder: object) -> str:
    return f"{NO_ROOM}in {folder}, where processes exchange tensors: make some there, or set TMPDIR to a folder that has it"
