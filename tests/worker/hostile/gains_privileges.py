r"""It makes a namespace in which it may mount, and mounts.

Verdict: error: RuntimeError: \[-1, -1, -1\]
"""

import ctypes

CLONE_NEWUSER, CLONE_NEWNS, MS_REMOUNT, MS_BIND = 0x10000000, 0x20000, 32, 4096
libc = ctypes.CDLL(None, use_errno=True)
raise RuntimeError(
    [
        libc.unshare(CLONE_NEWUSER),
        libc.unshare(CLONE_NEWNS),
        libc.mount(None, b"/usr", None, ctypes.c_ulong(MS_REMOUNT | MS_BIND), None),
    ]
)
