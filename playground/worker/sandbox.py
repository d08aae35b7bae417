"""Where an untrusted file runs: under bubblewrap, with compilers, two folders to write to, no network, nothing of the user's.

docs/what_a_pass_proves.md says what that stops, and what it does not.
"""

import contextlib
import fnmatch
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import cuda_emulator
from playground import untrusted
from playground.catalog import IS_CLONE, MODELS, ROOT
from playground.judge.failure import SANDBOX_ALLOWS
from playground.machine import build_locks
from playground.machine.memory import free_on_host
from playground.room import NO_ROOM, NoRoom, no_room_in

INSTALL = "install bubblewrap 0.8.0 or newer (apt-get install bubblewrap)"
MODES = ("auto", "require", "off")
GIB = 1 << 30
PARENT = 1  # what a worker inside sees as its parent: bubblewrap's own process there

# Of the environment; with an asterisk what begins so.
PASSED = {"PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "CC", "CXX", "CUDAHOSTCXX", "MAX_JOBS", "CUDA_*", "NVCC_*", "NVIDIA_*"}
PASSED |= {"TORCH_*", "PYTORCH_*", "TRITON_*", "CUBLAS_*", "CUDNN_*", "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*"}
PASSED |= {"MALLOC_*"}
NOT_PASSED = {"TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_HOME"}
FOLDERS = ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")  # passed as far as they exist
CACHES = ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # kept beside the builds, for the file's processes
OF_TOOLKITS = ("lib/gcc", "lib/clang", "nvvm")  # which of them is beside bin says that all there belongs to a compiler

SYSTEM = ("/usr", "/opt", "/nix/store", "/run/opengl-driver")  # the last are NixOS's
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # into /usr on most systems
OF_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
OF_SYS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
# CUDA names its threads, by /proc/self/task/*/comm: it starts only where /proc can be written to. Of what is there for root
# alone, this is then read-only, as in Docker's containers.
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger", "acpi", "asound", "scsi", "driver")
GPU = ("nvidiactl", "nvidia[0-9]*", "nvidia-uvm*", "nvidia-caps*", "dri", "dxg")  # names in /dev; the last is WSL's

# Control groups, which only root may make on most systems: hierarchies, with the files that hold which limit. RLIMIT_NPROC
# does not bind root.
GROUPS = {"/sys/fs/cgroup": {"pids.max": "processes", "memory.max": "memory"}}
GROUPS |= {"/sys/fs/cgroup/pids": {"pids.max": "processes"}, "/sys/fs/cgroup/memory": {"memory.limit_in_bytes": "memory"}}
# Files of a group that count what the kernel did at a limit: the counter's name, and the limit's. Whoever is killed for the
# memory may be a child that its parent does not wait for, and what is left keeps below the limit.
EVENTS = {"pids.events": ("max", "processes"), **dict.fromkeys(("memory.events", "memory.oom_control"), ("oom_kill", "memory"))}
GROUP = "playground-"  # begins a group's name; the driver's process id follows
RUN = "playground-run-"  # begins the name of the folder of a run
MOST_KEPT, MOST_KEPT_BYTES = 32, 64 << 20  # folders; bytes of one
MOST_ENTRIES = 20_000  # files and folders, in each of the two folders
MOST_PRINTED = 256 << 20  # bytes on the disk, in each of a process's two outputs
RESERVE, MOST_RESERVE = 0.02, GIB  # of the file system that these are on: less must not be free
# What Python, torch and compilers say when they have reached a limit -> the limit's name.
SAID = {
    r"\[Errno 27\]|File too large|SIGXFSZ": "file",
    r"\[Errno 24\]|Too many open files": "open_files",
    r"\[Errno 28\]|No space left on device|^no room for builds": "scratch",
    r"\[Errno 11\] Resource temporarily unavailable|can't start new thread": "processes",
    r"MemoryError|out of memory|Cannot allocate memory|bad_alloc": "memory",
}


@dataclass(frozen=True)
class Limits:
    """Bytes of memory of all processes, their number with threads, bytes of a file, both folders and /tmp, open files."""

    memory: int
    processes: int
    file: int
    folder: int
    scratch: int
    open_files: int = 8192

    def describe(self, name):
        """Return 'files of up to 8 GiB'."""
        size = f"{getattr(self, name) / GIB:.3g} GiB"
        told = {"memory": f"{size} of memory", "processes": f"{self.processes} processes and threads"}
        told |= {"file": f"files of up to {size}", "scratch": f"{size} in /tmp and in /dev/shm"}
        told |= {"folder": f"{size} and {MOST_ENTRIES} files in the folders of its own"}
        return (told | {"open_files": f"{self.open_files} open files"})[name]

    def of_process(self):
        """Return what a worker sets for itself before it loads a file: {name in the module resource: limit}."""
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.file, "RLIMIT_NOFILE": self.open_files}
        if not has_gpu():  # CUDA reserves more addresses than there is memory
            limits["RLIMIT_DATA"] = self.memory
        if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14):  # before, other sandboxes' count, too
            limits["RLIMIT_NPROC"] = self.processes
        return limits


def limits(folder):
    """Return the Limits that this machine bears now, with results in `folder`."""
    memory, free = free_on_host(), shutil.disk_usage(folder).free
    return Limits(
        memory=int(0.8 * memory),
        processes=256 + 64 * (os.cpu_count() or 1),
        file=min(16 * GIB, free // 2),
        folder=min(32 * GIB, int(0.8 * free)),
        scratch=min(4 * GIB, memory // 8),
    )


@functools.cache
def version():
    """Return 'bubblewrap 0.8.0'. Raises Missing where a sandbox cannot be made here."""
    program = shutil.which("bwrap")
    if sys.platform != "linux" or not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        raise Missing("bubblewrap needs Linux, and limits need a kernel with CONFIG_PROC_CHILDREN")
    if not program:
        raise Missing(f"bwrap is not on PATH: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="playground-") as folder, contextlib.closing(Room([], folder, folder)) as room:
        command = room.command(["sh", "-c", "true"])
        tried = subprocess.run(command, capture_output=True, text=True, env=room.environment())
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise Missing(f"bwrap does not work here ({said}): {INSTALL}, on a kernel that lets this user make namespaces")
    told = subprocess.run([program, "--version"], capture_output=True, text=True)
    return told.stdout.strip()


class Missing(Exception):
    """No sandbox can be made here; the text says why, and what to do."""


CACHE_OF_EMULATOR = "emulator"  # the folder in that of a room's builds


def has_gpu():
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg"))


class Room:
    """What one judged file is given: it sees `shown` at their own paths, and can write to `exchange` and `builds`, made new.

    Every process of the file runs in the same room. `close` removes both folders; `key` says that the builds are kept for the
    next room of this key, of the same files. Raises NoRoom where the disk is full.
    """

    def __init__(self, shown, exchange, builds, key=None):
        self._shown = list(map(Path, shown))
        self.exchange = Path(tempfile.mkdtemp(prefix="results-", dir=exchange))
        self._open = contextlib.ExitStack()
        self.builds = (key and self._kept(Path(builds) / f"{build_locks.KEPT}{key}")) or self._new(builds)
        self.answers, self._builds = untrusted.Folder(self.exchange), untrusted.Folder(self.builds)
        for folder in (self.answers, self._builds):
            self._open.callback(folder.close)
        self._free = {folder: shutil.disk_usage(folder).free for folder in (self.exchange, self.builds)}
        self.limits = limits(self.exchange)
        self._groups = list(_groups(self.exchange.name, self.limits))
        self._looks = 0
        for folder in self._free:
            if _lacks_reserve(folder):
                self.close()
                raise NoRoom(_no_room(folder, builds))

    @property
    def has_builds(self):
        """Whether these very files were built in an earlier room of this key, for the emulator."""
        return bool(cuda_emulator.entries(self.builds / CACHE_OF_EMULATOR / "libraries"))

    def _new(self, builds):
        folder = Path(tempfile.mkdtemp(prefix=build_locks.ROOM, dir=builds))
        self._open.enter_context(cuda_emulator.held(folder))
        return folder

    def _kept(self, folder):
        """The folder of kept builds, which is this room's alone until it is closed; None where it is another's now."""
        folder.mkdir(exist_ok=True)
        try:
            self._open.enter_context(cuda_emulator.held(folder, without_waiting=True))
            os.utime(folder)
        except OSError:
            return None
        for each in cuda_emulator.entries(folder):  # where a build was killed: nobody can put a link in its place meanwhile
            if each.is_dir() and not each.is_symlink():
                with contextlib.suppress(OSError):
                    (each / "lock").unlink()
        return folder

    def close(self, keep=False):
        """Remove both folders, but builds that have a key if `keep`, unless large. Safe to call twice."""
        for group in self._groups:
            for _ in range(40):  # the last process may be seen to end a moment before it leaves its group
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.05)
        is_kept = keep and self.builds.name.startswith(build_locks.KEPT) and self._builds.size(MOST_ENTRIES) <= MOST_KEPT_BYTES
        for folder in (self.exchange, *([] if is_kept else [self.builds])):
            cuda_emulator.remove_folder(folder)
        self._open.close()

    def command(self, command):
        """Return the command line that runs `command` in the room."""
        scratch = ["--size", str(self.limits.scratch), "--tmpfs"]
        gpus = [path for name in GPU for path in sorted(Path("/dev").glob(name))]  # the first process to use CUDA makes some
        # What keeps a file from changing the kernel's settings, where it runs as root.
        closed = _bound("--ro-bind-try", [f"/proc/{name}" for name in READ_ONLY]) if has_gpu() else ["--remount-ro", "/proc"]
        return [
            *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--cap-drop", "ALL"),
            *_system(),
            *("--proc", "/proc", "--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp", "--dir", "/tmp/home"),
            *_bound("--dev-bind-try", gpus),
            *_bound("--ro-bind", [*_programs(), *_existing(self._shown)]),
            *_bound("--bind", [self.exchange, self.builds]),
            *closed,
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *command),
        ]

    def environment(self, more=None):
        """Return all of the environment inside, `more` included."""
        passed = {name for name in {*os.environ} - NOT_PASSED if any(fnmatch.fnmatchcase(name, each) for each in PASSED)}
        passed = {name: os.environ[name] for name in passed}
        passed |= {name: os.pathsep.join(map(str, folders)) for name in FOLDERS if (folders := _folders_in(name))}
        passed |= {name: str(self.builds / name.lower()) for name in CACHES}
        passed |= {"HOME": "/tmp/home", "TMPDIR": "/tmp", "USER": "sandbox", "LOGNAME": "sandbox"}
        passed |= dict.fromkeys(("PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE"), "1")
        passed["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *_site_folders()]))
        passed[cuda_emulator.CACHE_VARIABLE] = str(self.builds / CACHE_OF_EMULATOR)
        passed[cuda_emulator.MADE_VARIABLE] = str(cuda_emulator.cache_folder())
        return passed | (more or {})

    def admit(self, pid):
        """Put the processes below `pid` into the room's control groups, before a file is loaded into them."""
        admitted = set()
        while new := set(family_of(pid, self.limits.processes)) - admitted:  # until none of them has started another meanwhile
            for each in new:
                with contextlib.suppress(OSError):
                    Path(f"/proc/{each}/oom_score_adj").write_text("1000")  # where memory ends, they end before all others
                for group in self._groups:
                    with contextlib.suppress(OSError):
                        (group / "cgroup.procs").write_text(str(each))
            admitted |= new

    def reached(self, pid, outputs=()):
        """Return the limit that the processes below `pid` have reached, which print to `outputs`, or None."""
        self._looks += 1
        if any(512 * os.fstat(each.fileno()).st_blocks > MOST_PRINTED for each in outputs):
            return f"{MOST_PRINTED >> 20} MiB of output"
        for file, (counter, limit) in ((group / name, told) for group in self._groups for name, told in EVENTS.items()):
            if file.exists() and re.search(rf"^{counter} [1-9]", file.read_text(), re.M):
                return self.limits.describe(limit)
        threads, resident, family = 0, 0, []
        for each in family_of(pid, self.limits.processes):
            with contextlib.suppress(psutil.Error):
                family.append(process := psutil.Process(each))
                threads, resident = threads + process.num_threads(), resident + process.memory_info().rss
        if threads > self.limits.processes:
            return self.limits.describe("processes")
        if resident > self.limits.memory and sum(map(_proportional, family)) > self.limits.memory:
            return self.limits.describe("memory")
        folders = [self.answers] if self._looks % 5 else [self.answers, self._builds]  # builds are the larger, and slower
        sizes = {folder.path: folder.size(MOST_ENTRIES) for folder in folders}
        if sum(sizes.values()) > self.limits.folder:
            return self.limits.describe("folder")
        for folder in filter(_lacks_reserve, sizes):
            if sizes[folder] < self._free[folder] / 2:  # others have taken more
                raise NoRoom(_no_room(folder, self.builds.parent))
            return f"{_reserve(folder) / GIB:.2g} GiB of the file system of {folder} to be left free"
        return None


def sweep(exchange):
    """Remove what rooms have left whose driver was killed: `exchange` are the folders in which runs make theirs."""
    judged = build_locks.extensions_root() / build_locks.JUDGED
    cuda_emulator.remove_unheld(judged, build_locks.ROOM)
    for kept in sorted(judged.glob(f"{build_locks.KEPT}*"), key=os.path.getmtime)[:-MOST_KEPT]:
        cuda_emulator.remove_unheld(judged, kept.name)
    for folder in exchange:
        cuda_emulator.remove_unheld(Path(folder), RUN)
    for parent in map(Path, GROUPS):
        for group in parent.glob(f"{GROUP}*"):
            if not psutil.pid_exists(int(group.name.split("-")[1])):
                with contextlib.suppress(OSError):
                    group.rmdir()


def _reserve(folder):
    return min(RESERVE * shutil.disk_usage(folder).total, MOST_RESERVE)


def _lacks_reserve(folder):
    return shutil.disk_usage(folder).free < _reserve(folder)


def _no_room(folder, builds):
    if folder.parent == Path(builds):
        return f"{NO_ROOM}for builds in {builds}: make some there, or set TORCH_EXTENSIONS_DIR to a folder that has it"
    return no_room_in(folder.parent)


def _groups(name, limits):
    for parent, files in GROUPS.items():
        group = Path(parent) / f"{GROUP}{os.getpid()}-{name}"
        if not (group.parent / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                for file, limit in files.items():
                    (group / file).write_text(str(getattr(limits, limit)))
                yield group
            except OSError:  # a hierarchy without that controller
                group.rmdir()


def family_of(pid, most):
    """Return the process and its descendants, and a few more than `most` of them at most, looking at no other process."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, children.read_text().split())
        if len(found) > most + 1:
            break
    return found


def named(reason, limits):
    """Return the reason of a failure, with the limit that it sounds like; as it is where it sounds like none."""
    name = next((name for said, name in SAID.items() if re.search(said, reason, re.IGNORECASE)), None)
    return f"{reason} ({SANDBOX_ALLOWS}{limits.describe(name)})" if name else reason


def _bound(option, paths):
    return [str(argument) for path in paths for argument in (option, path, path)]


def _system():
    """Mounts of the system's own files, as far as compilers, Python and CUDA need them."""
    mounts = _bound("--ro-bind-try", SYSTEM)
    for path in filter(os.path.lexists, LINKS):
        mounts += ["--symlink", os.readlink(path), path] if Path(path).is_symlink() else _bound("--ro-bind", [path])  # noqa: PTH115
    return mounts + _bound("--ro-bind-try", [*(f"/etc/{name}" for name in OF_ETC), *(["/sys"] if has_gpu() else OF_SYS)])


@functools.cache
def _programs():
    """The folders of this Python, its packages, the project's code, compilers and what the emulator has made of its own."""
    roots = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("include"), *_site_folders()]
    roots += [Path(sys.executable).parent, Path(sys.executable).resolve().parent]
    roots += [ROOT / "playground", MODELS, ROOT / "cuda_emulator"]
    roots += [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    roots += [folder for name in FOLDERS for folder in _folders_in(name)]
    for program in filter(None, map(shutil.which, ("nvcc", "ninja", "c++", "g++", "gcc"))):
        folder = Path(program).resolve().parent
        roots += [folder, *([folder.parent] if any((folder.parent / name).is_dir() for name in OF_TOOLKITS) else [])]
    for folder in cuda_emulator.own_folders():  # what is made there later is seen, too
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    roots += cuda_emulator.own_folders()
    private = {Path("/"), Path.home(), Path.home().parent, *([ROOT] if IS_CLONE else [])}
    paths = [path for root in filter(None, roots) for path in (Path(root), Path(root).resolve())]  # links may lead elsewhere
    return [path for path in _existing(dict.fromkeys(paths)) if path not in private]


def _existing(paths):
    return [path for path in sorted(paths) if path.exists() and not path.is_relative_to("/usr")]


def _site_folders():
    names = ("site-packages", "dist-packages")
    torch = importlib.util.find_spec("torch")
    folders = [path for path in sys.path if Path(path).name in names] + ([str(Path(torch.origin).parents[1])] if torch else [])
    return [Path(folder) for folder in dict.fromkeys(folders)]


def _folders_in(variable):
    folders = os.environ.get(variable, "").split(os.pathsep)
    return [Path(folder) for folder in folders if folder.startswith("/") and Path(folder).is_dir()]


def _proportional(process):
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0
