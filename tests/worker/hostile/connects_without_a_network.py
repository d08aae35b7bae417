"""It connects to a socket that has a name and no file.

Verdict: error: ConnectionRefusedError: .*
"""

import socket

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("\0@ABSTRACT@")
    connection.sendall(b"here I am")
