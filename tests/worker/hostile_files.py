"""Hostile files of test_sandbox.py: what each does, its verdict, as "Verdict: error: <regular expression>", and its text.

Words between two @ are what it aims at. `Base: results` is a file that is right, but for save(), which writes its results.
"""

import re

IMPORTS = """import os
import sys
import time
from pathlib import Path
"""
RESULTS = """import torch
import torch.nn as nn
{}
sys.modules["playground.tensors"].save_results = save
class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)
"""

HOSTILE = {
    "changes_the_kernel": r"""It has the kernel run a program of its own where one crashes.
Verdict: error: OSError: \[Errno 30\] Read-only file system
Path("/proc/sys/kernel/core_pattern").write_text("|/tmp/mine")""",
    "connects_out": r"""It sends what it has found.
Verdict: error: OSError: \[Errno 101\] Network is unreachable
import socket
socket.create_connection(("192.0.2.1", 80), timeout=5).sendall(b"here I am")""",
    "connects_to_loopback": """It connects to a server on this machine.
Verdict: error: ConnectionRefusedError: .*
import socket
socket.create_connection(("127.0.0.1", int("@PORT@")), timeout=5).sendall(b"here I am")""",
    "connects_without_a_network": r"""It connects to a socket that has a name and no file.
Verdict: error: ConnectionRefusedError: .*
import socket
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("\0@ABSTRACT@")
    connection.sendall(b"here I am")""",
    "fills_its_folders": """It leaves files beside its results until the disk is full.
Verdict: error: was ended: the sandbox allows .* files in the folders of its own
Needs: a process of its own
import itertools
folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
for number in itertools.count():
    (folder / str(number)).write_bytes(bytes(1 << 14))""",
    "fills_the_disk": r"""It fills /tmp.
Verdict: error: OSError: \[Errno 28\] No space left on device \(the sandbox allows .* in /tmp and in /dev/shm\)
try:
    with Path("/tmp/full").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 24)) == 1 << 24:
            pass
        file.write(bytes(1 << 24))
finally:
    Path("/tmp/full").unlink()""",
    "forges_replies": r"""It says for itself that it was built, and is right.
Verdict: error: its reply to candidate.load: .* is missing
Needs: a process of its own
os.write(int(sys.argv[2]), b'{"result": {"verdict": "pass", "complaint": null}}\n')
time.sleep(1e6)""",
    "forks_without_end": r"""A fork bomb.
Verdict: error: (was ended: the sandbox allows \d+ processes and threads|BlockingIOError: .*the sandbox allows \d+ processes.*)
Needs: a process of its own
while True:
    os.fork()""",
    "gains_privileges": r"""It makes a namespace in which it may mount, and mounts.
Verdict: error: RuntimeError: \[-1, -1, -1\]
import ctypes
CLONE_NEWUSER, CLONE_NEWNS, MS_REMOUNT, MS_BIND = 0x10000000, 0x20000, 32, 4096
libc = ctypes.CDLL(None, use_errno=True)
raise RuntimeError(
    [
        libc.unshare(CLONE_NEWUSER),
        libc.unshare(CLONE_NEWNS),
        libc.mount(None, b"/usr", None, ctypes.c_ulong(MS_REMOUNT | MS_BIND), None),
    ]
)""",
    "honest": """An honest file, judged after the others.
Verdict: pass
Needs: the whole check
import torch
import torch.nn as nn
class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)""",
    "includes_a_secret": """It has the compiler print a secret.
Verdict: error: does not compile: .*No such file or directory
Needs: a compiler
from torch.utils.cpp_extension import load_inline
load_inline("includes_a_secret", cpp_sources='#include "@SECRET@"', no_implicit_headers=True, is_python_module=False)""",
    "lays_links_for_the_clock": """It is right, and lays links to another's file at all names that a timing writes or reads.
Verdict: pass
Needs: the outer clock
import torch
import torch.nn as nn
for name in "@NAMES@".split():  # in its folder, which /proc/self/mounts tells
    Path("@ANSWERS@", name).symlink_to("@OUTSIDE@")
class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)""",
    "leaves_things_behind": """It prepares what the next candidate would load: sitecustomize, LD_PRELOAD, PYTHONPATH, a build.
Verdict: error: RuntimeError: all is written
import site
RAISES = "raise SystemExit('poisoned')"
user = Path(site.getusersitepackages())
user.mkdir(parents=True)
for folder in (user, Path("/tmp"), Path(os.environ["TORCH_EXTENSIONS_DIR"])):
    (folder / "sitecustomize.py").write_text(RAISES)
    (folder / "torch.py").write_text(RAISES)
os.environ.update(LD_PRELOAD="/tmp/mine.so", PYTHONPATH="/tmp", PYTHONSTARTUP="/tmp/torch.py")
library = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "honest" / "honest.so"
library.parent.mkdir()
library.write_bytes(b"poison")
raise RuntimeError("all is written")""",
    "links_its_results": """In the place of its results there is a link to a file of another's.
Verdict: fail: the file of results cannot be read: Too many levels of symbolic links
Needs: the whole check
Base: results
def save(results, path):
    Path(path).symlink_to("@SECRET@")""",
    "makes_a_device": r"""It makes a device file for the first disk, and reads it.
Verdict: error: PermissionError: \[Errno 1\] Operation not permitted
import stat
os.mknod("/tmp/disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0))
raise RuntimeError(os.read(os.open("/tmp/disk", os.O_RDONLY), 512))""",
    "opens_devices": r"""It opens memory and disks as devices.
Verdict: error: RuntimeError: \[\]
usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
nodes = [path for path in Path("/dev").iterdir() if not path.is_symlink() and not path.is_dir()]
raise RuntimeError(sorted(path.name for path in nodes if path.name not in usual and not path.name.startswith("nvidia")))""",
    "opens_files_without_end": r"""It opens as many files as there can be.
Verdict: error: OSError: .*Too many open files.* \(the sandbox allows \d+ open files\)
opened = []
try:
    while True:
        opened.append(os.open("/dev/null", os.O_RDONLY))
finally:
    for descriptor in opened:
        os.close(descriptor)""",
    "outlives_its_run": r"""It leaves a daemon behind.
Verdict: error: ended the process \(exit status 0\)
Needs: a process of its own
import subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1e6)", "@MARK@"])
os._exit(0)""",
    "pickles_its_results": """Its results are a program, which whoever loads them would run.
Verdict: fail: the file of results holds something that is no tensor: .*
Needs: the whole check
Base: results
def save(results, path):
    torch.save({"outputs": [Runs()]}, path)
class Runs:
    def __reduce__(self):
        return Path.write_text, (Path("@OUTSIDE@"), "overwritten")""",
    "poisons_a_build": """It writes to the folder in which another candidate's library is built.
Verdict: error: (FileNotFoundError|OSError): .*
(Path("@BUILDS@") / "honest.so").write_bytes(b"poison")""",
    "prints_without_end": r"""It fills the disk of who judges it with what it prints.
Verdict: error: was ended: the sandbox allows \d+ MiB of output
Needs: a process of its own
while True:
    os.write(2, bytes(1 << 20))""",
    "promises_too_much": """Its results say that they are larger than any memory.
Verdict: fail: the file of results holds something that is no tensor: .*
Needs: the whole check
Base: results
import json
def save(results, path):
    header = json.dumps({"detached": False, "tensors": [["output 0", "torch.float32", [1 << 40, 1 << 20]]]}).encode()
    Path(path).write_bytes(len(header).to_bytes(8, "little") + header)""",
    "puts_a_folder": """In the place of its results there is a folder that is not to be removed, but by root.
Verdict: fail or error: (?!the judge)
Needs: the whole check
Base: results
def save(results, path):
    (Path(path) / "deep").mkdir(parents=True)
    Path(path).chmod(0)""",
    "puts_a_pipe": """In the place of its results there is a pipe, on which whoever reads waits for ever.
Verdict: fail: the file of results is no regular file of its own
Needs: the whole check
Base: results
def save(results, path):
    os.mkfifo(path)""",
    "reads_another_candidate": """It reads the file beside its own.
Verdict: error: FileNotFoundError: .*
raise RuntimeError(Path("@NEIGHBOUR@").read_text())""",
    "reads_anothers_results": """It reads what another candidate has answered.
Verdict: error: FileNotFoundError: .*
raise RuntimeError(Path("@RESULTS@").read_bytes())""",
    "reads_home": """It reads a key in the home folder of who judges it.
Verdict: error: FileNotFoundError: .*No such file or directory
raise RuntimeError(Path("@SECRET@").read_text())""",
    "reads_own_home": """It reads what `~` is.
Verdict: error: FileNotFoundError: .*
raise RuntimeError([path.read_text() for path in (Path.home() / ".ssh").iterdir()])""",
    "reads_the_environment": r"""It reads the keys in the environment, its own and its parents'.
Verdict: error: RuntimeError: \[\]
import contextlib
found = [name for name, value in os.environ.items() if "@KEY@" in value]
for environ in Path("/proc").glob("[0-9]*/environ"):
    with contextlib.suppress(OSError):
        found += [str(environ)] if b"@KEY@" in environ.read_bytes() else []
raise RuntimeError(found)""",
    "replies_without_end": """It fills the driver's memory with a reply.
Verdict: error: wrote something that is no reply .*
Needs: a process of its own
while True:
    os.write(int(sys.argv[2]), b"[" * (1 << 20))""",
    "shares_all_memory": r"""Many processes take memory, each less than one may.
Verdict: error: (was ended: |crashed \(SIGKILL.*\) \()the sandbox allows .* of memory
Needs: a process of its own
for _ in range(8):
    if os.fork() == 0:
        taken = bytearray(b"1") * (3 << 28)
        time.sleep(1e6)
time.sleep(1e6)""",
    "signals_a_sibling": """It stops another candidate.
Verdict: error: ProcessLookupError: .*
import signal
os.kill(int("@SIBLING@"), signal.SIGSTOP)""",
    "signals_everybody": """It ends all that it can.
Verdict: error: (RuntimeError: nobody is left|ProcessLookupError: )
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(-1, signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
raise RuntimeError("nobody is left")""",
    "signals_the_driver": """It ends the process that judges it.
Verdict: error: ProcessLookupError: .*
import signal
os.kill(int("@DRIVER@"), signal.SIGKILL)""",
    "takes_all_memory": r"""It takes memory until there is none.
Verdict: error: ((out of memory: .*|crashed \(SIGKILL.*\)) \(|was ended: )the sandbox allows .* of memory
Needs: a process of its own
taken = []
while True:
    taken.append(bytearray(b"1") * (1 << 26))""",
    "traces": r"""It attaches to the driver, and reads its memory.
Verdict: error: RuntimeError: \[3, 3\]
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
raise RuntimeError(failed)""",
    "writes_a_large_file": r"""It leaves a file of 10 GB beside its results.
Verdict: error: OSError: \[Errno 27\] File too large.* \(the sandbox allows files of up to .*\)
folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
with (folder / "large").open("wb") as file:
    file.truncate(10 << 30)""",
    "writes_outside": """It overwrites a file of who judges it.
Verdict: error: (FileNotFoundError|OSError|RuntimeError: written)
Path("@OUTSIDE@").write_text("overwritten")
raise RuntimeError("written")  # to what is called so in its own /tmp""",
    "writes_to_packages": r"""It has every Python from now on run a text of its own.
Verdict: error: OSError: \[Errno 30\] Read-only file system|PermissionError:
import sysconfig
(Path(sysconfig.get_path("purelib")) / "sitecustomize.py").write_text("raise SystemExit")""",
    "writes_to_the_judge": r"""It changes the tolerance.
Verdict: error: OSError: \[Errno 30\] Read-only file system|PermissionError:
import playground
with (Path(playground.__file__).parent / "judge" / "tolerance.py").open("a") as file:
    file.write("\nSLACK = 1e9\n")""",
}


def parts_of(name):
    """Return {"Verdict", "Needs", "Base"} as far as they are stated, and the text behind them."""
    lines = HOSTILE[name].split("\n")[1:]
    stated = [re.fullmatch("(Verdict|Needs|Base): (.*)", line) for line in lines]
    return dict(match.groups() for match in stated if match), "\n".join(lines[stated.index(None) :])


def declared(name):
    """Return the verdict, the regular expression of the reason, and what it needs."""
    stated, _ = parts_of(name)
    verdict, _, reason = stated["Verdict"].partition(": ")
    return verdict, reason, stated.get("Needs", "")


def text_of(name):
    """Return the text of its file, with words between two @."""
    stated, text = parts_of(name)
    return IMPORTS + (RESULTS.format(text) if "Base" in stated else text + "\n")
