r"""It sends what it has found.

Verdict: error: OSError: \[Errno 101\] Network is unreachable
"""

import socket

socket.create_connection(("192.0.2.1", 80), timeout=5).sendall(b"here I am")
