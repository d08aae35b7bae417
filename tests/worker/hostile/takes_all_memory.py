r"""It takes memory until there is none.

Verdict: error: ((out of memory: .*|crashed \(SIGKILL.*\)) \(|was ended: )the sandbox allows .* of memory
Needs: a process of its own
"""

taken = []
while True:
    taken.append(bytearray(b"1") * (1 << 26))
