"""What a machine needs to build and run the kernels, a clear line on what is missing, and repairs of what is certain."""

import contextlib
import ctypes
import functools
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cuda_emulator

LEAST_ROOM = 1 << 20  # bytes: less than any build takes
INSTALL_PREFIX = Path("/usr/local")  # where NVIDIA's installers put cuda and cuda-<version>


@dataclass(frozen=True)
class Missing:
    """Something that this machine lacks, and how to get it. `str()` gives one line."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: the directory that CUDA_HOME should name, and the release that its nvcc prints, such as 13.0."""

    home: Path
    release: str

    @property
    def major(self) -> str:
        return self.release.split(".")[0]


def missing_for(backend: str) -> Missing | None:
    """Return the first thing that keeps this machine from building and running kernels for 'cuda' or 'cpu', or None."""
    if backend not in ("cuda", "cpu"):
        raise ValueError(f"backend must be 'cuda' or 'cpu', not {backend!r}")
    prepare_environment()
    if backend == "cuda":
        torch_cuda = cuda_emulator.torch_version().cuda
        return missing_gpu() or missing_compiler() or missing_ninja() or missing_toolkit(torch_cuda)
    return missing_compiler() or missing_ninja()


def prepare_environment() -> None:
    """Let this process and its children find a ninja beside this Python, and a CUDA toolkit of torch's major version.

    CUDA_HOME is set only where it is unset: torch's guess is wrong where nvcc on PATH is a wrapper script or a link.
    """
    if not _runs("ninja"):
        directories = [Path(sys.executable).parent]
        with contextlib.suppress(ImportError):
            import ninja

            directories.append(Path(ninja.BIN_DIR).absolute())
        directory = next((str(directory) for directory in directories if _runs(str(directory / "ninja"))), None)
        if directory:  # behind all that is on PATH, or, if a ninja there does not run, before it
            path = os.environ.get("PATH", os.defpath).split(os.pathsep)
            os.environ["PATH"] = os.pathsep.join([directory, *path] if shutil.which("ninja") else [*path, directory])
    if torch_cuda := cuda_emulator.torch_version().cuda:
        set_cuda_home(torch_cuda)


def missing_folder(folders) -> Missing | None:
    """Return the first folder in which nothing can be kept, of (what for, its variable, a getter) and the temporary one."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        return Missing(f"no room for temporary files ({error.strerror})", "make some, or set TMPDIR to a folder that has it")
    for purpose, variable, folder_of in folders:
        remedy = f"set {variable} to a folder that can be written"
        try:
            folder = folder_of()
        except RuntimeError as error:  # there is no home
            return Missing(f"no folder for {purpose} ({error})", remedy)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(LEAST_ROOM))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return Missing(f"{folder}, where {purpose} go, cannot be written ({error.strerror})", remedy)
    return None


def missing_compiler() -> Missing | None:
    """Return a Missing where no C++ compiler runs. torch takes $CXX, or else c++; nvcc one of its own, not looked at here."""
    compiler = os.environ.get("CXX", "c++")
    if _runs(*shlex.split(compiler)):
        return None
    found = next((path for name in ("c++", "g++", "clang++") if name != compiler and _runs(path := shutil.which(name))), None)
    install = "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
    usual = shutil.which("c++")
    why = f"{usual} does not run" if usual else "c++ is not on PATH"
    why = f"CXX is {compiler!r}, which does not run" if "CXX" in os.environ else why
    return Missing(f"no C++ compiler: {why}", f"export CXX={found}" if found else install)


def missing_ninja() -> Missing | None:
    """Return a Missing where no ninja runs, neither on PATH nor beside this Python (see `prepare_environment`)."""
    if _runs("ninja"):
        return None
    broken = shutil.which("ninja")
    return Missing(f"{broken} does not run" if broken else "no ninja", f"{sys.executable} -m pip install ninja")


def missing_gpu() -> Missing | None:
    """Return a Missing for a torch without CUDA, no driver, one too old for torch, or no GPU."""
    version = cuda_emulator.torch_version()
    if version.cuda is None:
        what = f"torch {version.__version__} is built without CUDA"
        return Missing(what, "install a CUDA build of torch (https://pytorch.org/get-started/locally)")
    reason = no_gpu() if "torch" in sys.modules else _no_gpu_elsewhere(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not reason:
        return None
    if "no NVIDIA driver" in reason:
        return Missing("no NVIDIA driver", "install it, or start the container with the GPU (docker run --gpus all)")
    if "too old" in reason:
        what = f"the NVIDIA driver is too old for torch {version.__version__}"
        return Missing(what, f"update it to one for CUDA {version.cuda}, or install a torch built for an older CUDA")
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Missing(f"no GPU is visible: CUDA_VISIBLE_DEVICES is {visible!r}", "unset it, or name a GPU of this machine")
    return Missing(f"no GPU is visible ({reason})", "check what nvidia-smi says")


def no_gpu() -> str:
    """Return why torch finds no GPU; "" where it finds one. Its text runs in a process of its own, too."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is returned
        if torch.cuda.is_available():
            return ""
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().split("\n")[0]
    return "torch finds no GPU"


@functools.cache
def _no_gpu_elsewhere(visible: str | None) -> str:
    """What `no_gpu` returns where these GPUs are visible: this process need not import torch for it, which takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver"
    found = output(sys.executable, "-c", f"{inspect.getsource(no_gpu)}\nprint(no_gpu())")
    return "torch cannot be imported" if found is None else found


def missing_toolkit(torch_cuda: str) -> Missing | None:
    """Return a Missing for no CUDA toolkit, a CUDA_HOME without one, or another major version than `torch_cuda`'s, '13.0'."""
    major = torch_cuda.split(".")[0]
    install = f"install a CUDA {major} toolkit (https://developer.nvidia.com/cuda-downloads) and set CUDA_HOME to it"
    found = find_toolkit(torch_cuda)
    export = f"export CUDA_HOME={found.home}" if found and found.major == major else install
    toolkit = toolkit_at(Path(home)) if (home := named_home()) else found
    if toolkit is None and home:
        return Missing(f"CUDA_HOME is {home}, which holds no CUDA toolkit (bin/nvcc, include/cuda_runtime.h)", export)
    if toolkit is None:
        nvcc = shutil.which("nvcc")
        why = f"{nvcc} belongs to none that has bin/nvcc and include/cuda_runtime.h" if nvcc else "no nvcc"
        return Missing(f"no CUDA toolkit: {why}", install)
    if toolkit.major != major:
        what = f"nvcc {toolkit.release} ({toolkit.home}) does not fit a torch built for CUDA {torch_cuda}"
        return Missing(what, f"{export}, or install a torch built for CUDA {toolkit.major}")
    return None


def named_home() -> str | None:
    """Return what the environment names as the toolkit, in the order in which torch looks; None where it is silent."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None


def toolkit_at(home: Path) -> Toolkit | None:
    """Return the toolkit in `home`, if it has an nvcc that runs and the runtime's headers."""
    printed = output(str(home / "bin" / "nvcc"), "--version")
    release = re.search(r"release (\d+\.\d+)", printed or "")
    headers = (home / "include", *home.glob("targets/*/include"))  # the latter are conda's
    has_headers = any((folder / "cuda_runtime.h").is_file() for folder in headers)
    return Toolkit(home, release.group(1)) if release and has_headers else None


def find_toolkit(torch_cuda: str | None = None) -> Toolkit | None:
    """Return a toolkit installed here, whatever CUDA_HOME says: of `torch_cuda`'s major version if there is one, or any."""
    toolkits = [toolkit for home in dict.fromkeys(_homes()) if (toolkit := toolkit_at(home))]
    fitting = [toolkit for toolkit in toolkits if torch_cuda and toolkit.major == torch_cuda.split(".")[0]]
    return next(iter(fitting + toolkits), None)


def set_cuda_home(torch_cuda: str) -> None:
    """Name a toolkit of `torch_cuda`'s major version in the environment where it names none, if there is one."""
    if named_home():
        return
    toolkit = find_toolkit(torch_cuda)
    if toolkit and toolkit.major == torch_cuda.split(".")[0]:
        os.environ["CUDA_HOME"] = str(toolkit.home)
        if cpp_extension := sys.modules.get("torch.utils.cpp_extension"):  # it read CUDA_HOME when it was imported
            cpp_extension.CUDA_HOME = str(toolkit.home)


def _homes() -> Iterator[Path]:
    """Where a toolkit may be: first torch's own guess, then what stands behind the nvcc on PATH, then the usual places."""
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).parent.parent
        yield Path(nvcc).resolve().parent.parent  # a link into the toolkit
        dry_run = output(nvcc, "--dryrun", "-x", "cu", os.devnull, stderr=True)  # fails without a host compiler
        if top := re.search(r"^#\$ TOP=(.+)$", dry_run or "", re.MULTILINE):  # a wrapper that calls the toolkit's nvcc
            yield Path(top.group(1)).resolve()
    yield INSTALL_PREFIX / "cuda"
    releases = {path: [int(digits) for digits in re.findall(r"\d+", path.name)] for path in INSTALL_PREFIX.glob("cuda-*")}
    yield from sorted(releases, key=releases.get, reverse=True)  # the newest first


def _runs(*command: str | None) -> bool:
    """Whether `command --version` succeeds: a command that is found need not run (a shim, a stub of an uninstalled tool)."""
    return bool(command) and all(command) and output(*command, "--version") is not None


def output(*command: str, stderr: bool = False) -> str | None:
    """Return what a command prints to stdout, None if it is not there or fails; or to stderr, even if it fails."""
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60, check=not stderr
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stderr if stderr else result.stdout.strip()


def ask_gpu(*fields: str) -> str | None:
    """Return nvidia-smi's line with these fields of the GPU that torch calls cuda:0; None where it does not tell."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return output("nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits") or None
