"""It attaches to the driver, and reads its memory.

Verdict: error: RuntimeError: \\[3, 3\\]
"""

import ctypes

PTRACE_ATTACH = 16
libc = ctypes.CDLL(None, use_errno=True)
driver, content = int("@DRIVER@"), ctypes.create_string_buffer(8)
here = (ctypes.c_void_p * 2)(ctypes.addressof(content), 8)  # struct iovec
failed = []
for call in (
    lambda: libc.ptrace(PTRACE_ATTACH, driver, None, None),
    lambda: libc.process_vm_readv(driver, here, ctypes.c_ulong(1), here, ctypes.c_ulong(1), ctypes.c_ulong(0)),
):
    ctypes.set_errno(0)
    call()
    failed.append(ctypes.get_errno())
raise RuntimeError(failed)
