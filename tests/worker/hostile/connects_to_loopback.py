"""It connects to a server on this machine.

Verdict: error: ConnectionRefusedError: .*
"""

import socket

socket.create_connection(("127.0.0.1", int("@PORT@")), timeout=5).sendall(b"here I am")
