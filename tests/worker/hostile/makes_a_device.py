r"""It makes a device file for the first disk, and reads it.

Verdict: error: PermissionError: \[Errno 1\] Operation not permitted
"""

import os
import stat

os.mknod("/tmp/disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0))
raise RuntimeError(os.read(os.open("/tmp/disk", os.O_RDONLY), 512))
