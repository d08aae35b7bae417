"""The stand-in for torch.utils.cpp_extension.load_inline: the same arguments, but the CUDA text runs on the CPU."""

import importlib.util
import inspect
import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from . import bindings, c_functions, runtime, toolchain
from .diagnostics import of_the_text
from .errors import EmulatorError
from .prepared import REGISTERS, STAND_IN, LoadedFile, Prepared
from .program import LINES_OF_A_FILE, Program, in_mirror
from .sourcemap import calling_file
from .text import tokens_of

IMPLICIT_CPP = "#include <torch/extension.h>\n"
IMPLICIT_CUDA = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
# Unlike kernels, without -fno-gnu-unique: what libraries share in a real process, they share here.
BINDING_FLAGS = (f"-I{toolchain.INCLUDE}", "-O1", *toolchain.LINES_ONLY, "-fPIC", "-w")
VERSIONS = {}  # an extension's name -> what was given to build each of its versions
KEPT_FLAG = re.compile(r"-[DUI].*|-std=.*")
# What PyTorch gives nvcc for each CUDA text.
HALF_FLAGS = tuple(
    f"-D__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
)
# What may move a tensor between devices: not what names another type alone, as in to(torch::kHalf) and to(x.dtype()).
TYPE = r"(?:\w+::)*k(?:U?Int\d*|Float\w*|BFloat16|Half|Double|Long|Short|Byte|Char|Bool)|\w+(?:\.|->)(?:scalar_type|dtype)\(\)"
MOVES_TENSORS = re.compile(rf"(\.|->)\s*(cuda|set_data|(to|type)(?!\s*\(\s*(?:{TYPE})\s*\)))\s*\(")
DEVICE_LAMBDA = re.compile(r"\]\s*(?:__host__\s*)?__device__\b")


def as_text(sources):
    return sources if isinstance(sources, str) else "\n".join(sources or [])


def versioned(name, given):
    """The name of an extension for what is `given` to build it: NAME, then NAME_v1 and so on, as PyTorch counts.

    A process knows a module, and a library its operators, by name. Another text under a name that is taken is another module.
    """
    versions = VERSIONS.setdefault(name, [])
    if given not in versions:
        versions.append(given)
    version = versions.index(given)
    return f"{name}_v{version}" if version else name


def refuse_device_lambdas(prepared, flags):
    """Raise EmulatorError for a lambda of the device without the flag that nvcc wants for it."""
    if any("extended-lambda" in str(flag) for flag in flags or []):
        return
    code = "".join(
        re.sub(r"[^\n]", " ", t.text) if t.kind in ("comment", "string") else t.text for t in tokens_of(prepared.given)
    )
    if found := DEVICE_LAMBDA.search(code):
        line = prepared.line_of(code.count("\n", 0, found.start()) + 1)
        raise EmulatorError(
            f"{prepared.file}:{line}: error: nvcc refuses a __device__ lambda without extra_cuda_cflags=['--extended-lambda']"
        )


class NumberedFiles:
    """The files of all that load has built: each has its own range of lines, which no text of load_inline reaches."""

    def __init__(self):
        self.files = {}  # index in the numbering -> path
        self.next_index = 1

    def add(self, program):
        self.files |= {program.first_index + at: file.path for at, file in enumerate(program.files)}
        self.next_index += len(program.files)

    @property
    def names(self):
        return {path.name for path in self.files.values()}

    def place(self, line):
        """(file, line); no file for a line of load_inline's."""
        index, at = divmod(line, LINES_OF_A_FILE)
        return (self.files[index], at) if index in self.files else (None, line)


class Builder:
    """Builds and loads texts under one configuration, and remembers which library came from which file."""

    def __init__(self, mode, debug, source_file):
        self.mode, self.debug, self.source_file = mode, debug, source_file
        self.files = {}  # library -> the Python file of its text
        self.namespaces = {}  # of operators -> the Python file
        self.kernel_lines = {}  # kernel -> the line of its definition
        self.numbered = NumberedFiles()
        self.last_file = None
        self.moves_tensors = False  # whether a text may move tensors between devices
        self.watch = None  # an OperatorWatch

    def file_of_library(self, library):
        return self.files.get(library, self.last_file)

    @property
    def takes_light_header(self):
        """Whether kernels are compiled as those are that are judged, for which headers are parsed beforehand."""
        return self.mode == "check" and not self.debug

    def make_shared(self):
        """Make what the source file's texts take, before it asks for them."""
        make_all(self.shared())

    def shared(self):
        """Return what makes it, a function a file of the cache."""
        file = Path(self.source_file or "")
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        includes_all = "load_inline" in text and "no_implicit_headers" not in text
        light = [toolchain.bindings_library, light_kernel_header, toolchain.names_in_torch_headers]
        light += [light_binding_header] * bool(USES_PYBIND.search(text))
        return (
            *OWN_LIBRARIES,
            *(light if includes_all and self.takes_light_header else ()),
            *(binding_header,) * bool(REGISTERS.search(text)),
        )

    def load_inline(
        self,
        name,
        cpp_sources,
        cuda_sources=None,
        sycl_sources=None,
        functions=None,
        extra_cflags=None,
        extra_cuda_cflags=None,
        extra_sycl_cflags=None,
        extra_ldflags=None,
        extra_include_paths=None,
        build_directory=None,
        verbose=False,
        with_cuda=None,
        with_sycl=None,
        is_python_module=True,
        with_pytorch_error_handling=True,
        keep_intermediates=True,
        use_pch=False,
        no_implicit_headers=False,
    ):
        """Build and load as torch.utils.cpp_extension.load_inline does."""
        options = extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths
        texts = as_text(cpp_sources), as_text(cuda_sources)
        how = no_implicit_headers, with_pytorch_error_handling
        name, library, kernels = self.build(name, *texts, functions, *options, *how)
        self.files[str(library)] = self.namespaces[name] = self.last_file
        runtime.accept_races(library, kernels.accepted_races if kernels else [])
        runtime.waits(library, kernels.waiting if kernels else [])
        self.kernel_lines.update(kernels.kernel_lines if kernels else {})
        names = [functions] if isinstance(functions, str) else list(functions or [])
        return self._loaded(name, library, is_python_module, names)

    def build(
        self,
        name,
        cpp,
        cuda,
        functions=None,
        extra_cflags=None,
        extra_cuda_cflags=None,
        extra_ldflags=None,
        extra_include_paths=None,
        no_implicit_headers=False,
        with_pytorch_error_handling=True,
    ):
        """Return (the extension's name, its library, the Prepared CUDA text or None) of what load_inline is given.

        Needs no PyTorch in this process. Raises EmulatorError.
        """
        source_file = self.source_file or calling_file()
        given = cpp, cuda, functions, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths, self.mode, self.debug
        name = versioned(name, repr(given))
        if not no_implicit_headers:
            cpp, cuda = IMPLICIT_CPP + cpp, IMPLICIT_CUDA + cuda if cuda else ""
        own = None  # the binding without pybind11
        if functions is not None:
            if not USES_PYBIND.search(cpp) and not REGISTERS.search(cpp):
                own = cpp + bindings.own_module(name, functions, with_pytorch_error_handling)
                own = Prepared(own, source_file, f"<{name}: cpp_sources>", is_cuda=False)
                own.is_declared = "{" not in cpp
            cpp += bindings.pybind_module(functions, with_pytorch_error_handling)
        includes = [f"-I{path}" for path in extra_include_paths or []]
        binding = (
            Prepared(cpp, source_file, f"<{name}: cpp_sources>", is_cuda=False) if cpp.strip() or not cuda.strip() else None
        )
        kernels = Prepared(cuda, source_file, f"<{name}: cuda_sources>", is_cuda=True) if cuda.strip() else None
        self.last_file = kernels.file if kernels else binding.file
        self.moves_tensors |= MOVES_TENSORS.search(cpp + cuda) is not None
        if kernels:
            refuse_device_lambdas(kernels, extra_cuda_cflags)
        cpp_flags = [*filter(KEPT_FLAG.fullmatch, extra_cflags or []), *includes]
        cuda_flags = [*filter(KEPT_FLAG.fullmatch, extra_cuda_cflags or []), *includes]
        extra = [flag for flag in extra_ldflags or [] if flag and not re.search(r"cuda|cublas|cudnn", flag)]
        try:
            library = self._compiled(name, binding, cpp_flags, kernels, cuda_flags, extra, own)
        except EmulatorError as error:
            raise error.with_traceback(None) from None  # what is wrong is the caller's text
        return name, library, kernels

    def _loaded(self, name, library, is_python_module, functions):
        """What load_inline and load return. `functions` are the module's to be watched; None: all."""
        if is_python_module:
            spec = importlib.util.spec_from_file_location(name, library)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            if functions is None:
                functions = [
                    each for each in dir(module) if type(getattr(module, each)).__name__.startswith("builtin_function")
                ]
            if self.watch and functions:
                self.watch.wrap_module(module, functions, self.last_file)
            return module
        import torch

        torch.ops.load_library(str(library))
        return str(library)

    def load(
        self,
        name,
        sources,
        extra_cflags=None,
        extra_cuda_cflags=None,
        extra_sycl_cflags=None,
        extra_ldflags=None,
        extra_include_paths=None,
        build_directory=None,
        verbose=False,
        with_cuda=None,
        with_sycl=None,
        is_python_module=True,
        is_standalone=False,
        keep_intermediates=True,
    ):
        """Build and load files as torch.utils.cpp_extension.load does. Raises EmulatorError for one that cannot be read."""
        paths = [Path(sources)] if isinstance(sources, (str, Path)) else [Path(path) for path in sources]
        folders = [Path(folder) for folder in extra_include_paths or []]
        program = Program(paths, folders, first_index=self.numbered.next_index).read()
        texts = [(str(file.path), file.text) for file in program.files]
        given = texts, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths, self.mode, self.debug
        name = versioned(name, repr(given))
        self.numbered.add(program)
        self.moves_tensors |= any(MOVES_TENSORS.search(file.text) for file in program.files)
        self.last_file = str(next((path for path in paths if path.suffix == ".cu"), paths[0]))
        mirror = toolchain.kept("sources", "", [*texts, program.first_index], program.write)
        flags = {
            True: [*filter(KEPT_FLAG.fullmatch, extra_cuda_cflags or [])],
            False: [*filter(KEPT_FLAG.fullmatch, extra_cflags or [])],
        }
        own = dict.fromkeys([*(path.parent for path in paths), *folders])
        includes = [f"-I{in_mirror(mirror, folder)}" for folder in own] + [f"-I{folder}" for folder in own]
        objects = []
        for file in program.files[: len(paths)]:
            loaded = LoadedFile(program, file)
            if loaded.is_cuda:
                refuse_device_lambdas(loaded, extra_cuda_cflags)
                objects.append(self.compile_kernels(name, loaded, [*flags[True], *includes]))
            else:
                objects += self.compile_binding(name, loaded, [*flags[False], *includes])
            self.kernel_lines.update({k: found[-1].line % LINES_OF_A_FILE for k, found in file.made.kernels.items()})
        extra = [flag for flag in extra_ldflags or [] if flag and not re.search(r"cuda|cublas|cudnn", flag)]
        library = toolchain.link(objects, name, (*toolchain.torch_flags()[1], *extra))
        self.files[str(library)] = self.namespaces[name] = self.last_file
        runtime.accept_races(library, program.accepted_lines)
        runtime.waits(library, [line for file in program.files for line in file.waiting])
        return self._loaded(name, library, is_python_module, None)

    load.emulates_cuda = True
    load_inline.emulates_cuda = True  # what a variant's main asks: whether its kernels run on CPU tensors here

    def _compiled(self, name, binding, cpp_flags, kernels, cuda_flags, linker_flags, own):
        """The path of a library of the Prepared texts; one of the two may be None. `own`: the binding without pybind11."""
        uses_torch = binding is not None or kernels.uses_torch
        cuda_flags = cuda_flags if uses_torch else [*cuda_flags, *c_functions.FLAGS]

        def bind():
            made = own and self.compile_own_binding(name, own, cpp_flags)
            return made or self.compile_binding(name, binding, cpp_flags, with_pybind=not own)

        jobs = [bind] if binding else []
        jobs += [lambda: [self.compile_kernels(name, kernels, cuda_flags)]] if kernels else []
        with ThreadPoolExecutor() as pool:
            pool.submit(toolchain.runtime_library)  # `link` says what is wrong with it
            objects = [path for made in _side_by_side(jobs) for path in made]
        return toolchain.link(objects, name, (*(toolchain.torch_flags()[1] if uses_torch else ()), *linker_flags))

    def load_kernels(self, text, name, source_file=None):
        """A CUDA text on its own, without PyTorch: what it declares `extern "C"` can be called through ctypes."""
        prepared = Prepared(text, source_file or self.source_file or calling_file(), f"<{name}>", is_cuda=True)
        self.last_file = prepared.file
        library = toolchain.link([self.compile_kernels(name, prepared, [])], name)
        self.files[str(library)] = prepared.file
        runtime.accept_races(library, prepared.accepted_races)
        runtime.waits(library, prepared.waiting)
        return library

    def compile_binding(self, name, prepared, flags, with_pybind=True):
        """The object files of a binding: it, and its library's name where the one serves all names.

        `with_pybind`: its own text has pybind11's code, whose headers are parsed beforehand.
        """
        own = list(BINDING_FLAGS)
        if REGISTERS.search(prepared.text):
            own += ["-include", str(binding_header())]
        if not prepared.shared:
            return [compile_with_torch(name, prepared, [*own, *flags], light_binding_header if with_pybind else None)]
        shared = compile_with_torch(STAND_IN, prepared, [*own, *flags, f'-DEMULATOR_STAND_IN="{STAND_IN}"'])
        hidden = '__attribute__((visibility("hidden")))'
        named = f'extern "C" {hidden} const char emulator_library_name[];\nconst char emulator_library_name[] = "{name}";\n'
        return [shared, toolchain.compile_text(named, ".cpp", ["-fPIC"])]

    def compile_own_binding(self, name, prepared, flags):
        """The object file and library of a binding without pybind11; None where it is wrong, or has an unusual signature."""
        try:
            if prepared.is_declared:
                flags = [f"-I{DECLARED}", *BINDING_FLAGS, toolchain.torch_flags()[0][0], *flags]
                compiled = toolchain.compile_text(prepared.text, ".cpp", flags)
            else:
                compiled = compile_with_torch(name, prepared, [*BINDING_FLAGS, *flags])
            library = toolchain.bindings_library()
        except EmulatorError:
            return None  # what is wrong is told of pybind11's text
        return [compiled, library] if bindings.has_all(library, compiled) else None

    def compile_kernels(self, name, prepared, flags):
        flags = [*toolchain.kernel_flags(self.mode, self.debug), *(HALF_FLAGS if prepared.uses_torch else ()), *flags]
        prepared.text = "#include <cuda_runtime.h>\n" + prepared.text  # nvcc includes it by itself
        if prepared.uses_torch:
            prepared.text = "#include <cfloat>\n" + prepared.text  # as PyTorch's headers do under nvcc, by thrust/complex.h
            return compile_with_torch(name, prepared, flags, light_kernel_header if self.takes_light_header else None)
        return toolchain.compile_text(prepared.text, ".cpp", ["-std=c++17", *flags], prepared.explain)


def _side_by_side(jobs):
    """What the jobs of a build return. The first that fails ends the compilers of the others, and is what is raised."""
    build = toolchain.Build()

    def run(job):
        toolchain.Build.current.set(build)
        try:
            return job()
        finally:
            toolchain.Build.current.set(None)

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run, job) for job in jobs]
        try:
            for job in as_completed(running):
                job.result()
        except BaseException:
            build.stop()
            raise
        return [job.result() for job in running]


# What the light headers lack; without it the compiler complains of the syntax.
BEYOND_LIGHT = re.compile(r"\btorch::(autograd|nn|indexing|data|optim|jit)\b|\bat::indexing\b|\bTensorIndex\b")
INCLUDES_ALL = re.compile(r"#\s*include\s*<torch/(extension|types|all|torch)\.h>")
USES_PYBIND = re.compile(r"\bPYBIND11_|\bpy::|\bpybind11\b")
DECLARED = toolchain.INCLUDE / "light" / "declared"  # what declarations take in place of PyTorch's headers
LIGHT = (f"-I{toolchain.INCLUDE / 'light'}",)


def takes_light(prepared):
    """Whether a text is first tried with the light headers. A macro in front of PyTorch's may be for them."""
    first = INCLUDES_ALL.search(prepared.text)
    is_before = first and re.search(r"^\s*#\s*define\b", prepared.text[: first.start()], re.MULTILINE)
    return first and not is_before and not BEYOND_LIGHT.search(prepared.text)


def compile_with_torch(name, prepared, flags, light_header=None):
    """Texts that include all of PyTorch's headers are first tried with a small part of them, which is enough for most.

    With all of them a text is compiled again only where what is wrong may be the want of a header: a broken text is not.
    `light_header` returns the light headers, parsed beforehand for these flags.
    """
    flags = [*flags, *toolchain.torch_flags()[0], f"-DTORCH_EXTENSION_NAME={name}"]
    if takes_light(prepared):
        binds = USES_PYBIND.search(prepared.text)
        light = [*LIGHT, *["-DLIGHT_PYBIND"] * bool(binds)]
        if light_header and "-include" not in flags and (binds or light_header is not light_binding_header):
            light += ["-include", str(light_header())]

        def explain(messages):
            names = toolchain.names_in_torch_headers()
            broken = of_the_text(prepared.errors(messages), names, prepared.given)
            return prepared.described(broken, messages) if broken else LightHeadersError(messages)

        try:
            return toolchain.compile_text(prepared.text, ".cpp", [*light, *flags], explain, uses_torch=True)
        except LightHeadersError:
            pass  # the full headers decide
    return toolchain.compile_text(prepared.text, ".cpp", flags, prepared.explain, uses_torch=True)


def compile_ahead(source_file, calls):
    """Compile what `load_inline` is called with in a file, each a dict of arguments, for a process that will call it.

    What it makes is in the cache then. Needs no PyTorch in this process. Raises EmulatorError.
    """
    builder = Builder("check", False, source_file)
    builder.make_shared()
    taken = inspect.signature(builder.build).parameters
    for call in calls:
        texts = as_text(call["cpp_sources"]), as_text(call.get("cuda_sources"))
        builder.build(call["name"], *texts, **{name: value for name, value in call.items() if name in taken and name != "name"})


def is_made(source_file):
    """Return whether the cache has what the texts of a file share."""
    with toolchain.making_nothing():
        try:
            return all(job() for job in Builder("check", False, source_file).shared())
        except toolchain.NotMade:
            return False


OWN_LIBRARIES = toolchain.runtime_library, toolchain.torch_glue_library


def make_all(jobs):
    """Call the functions side by side. What they make stays in the cache."""
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(job) for job in jobs]:
            made.result()


def make_own():
    """Make all that any text may take: the runtime, and PyTorch's headers."""
    make_all([*OWN_LIBRARIES, binding_header, toolchain.names_in_torch_headers])


def binding_header():
    """PyTorch's headers as bindings that register operators take them; it takes longest to make."""
    return toolchain.precompiled_header("emulator/torch_headers.h", [*BINDING_FLAGS, *toolchain.torch_flags()[0]])


def light_binding_header():
    """The light headers as bindings take them that pybind11 makes."""
    return toolchain.precompiled_header(
        "light/bindings.h", [*LIGHT, "-DLIGHT_PYBIND", *BINDING_FLAGS, *toolchain.torch_flags()[0]]
    )


def light_kernel_header():
    """The light headers as kernels take them in check mode."""
    flags = [*LIGHT, *toolchain.kernel_flags("check", False), *HALF_FLAGS, *toolchain.torch_flags()[0]]
    return toolchain.precompiled_header("light/kernels.h", flags)


class LightHeadersError(Exception):
    """A text may lack a header that the light ones leave out."""
