"""The Python module that load_inline makes of its `functions`."""

import re

from . import toolchain
from .errors import EmulatorError

DEFINED = re.compile(rb"_ZN8emulator6define\w+")  # emulator::define for a signature, as the compiler names it
DECLARED = toolchain.INCLUDE / "light" / "declared"  # what declarations take in place of PyTorch's headers


def by_name(functions):
    """Return {name: documentation} of load_inline's `functions`."""
    functions = [functions] if isinstance(functions, str) else functions
    return functions if isinstance(functions, dict) else {name: name for name in functions}


def pybind_module(functions, with_error_handling):
    """Return the text that PyTorch adds to a binding for its `functions`."""
    wrap = "torch::wrap_pybind_function({})" if with_error_handling else "{}"
    lines = [f'm.def("{name}", {wrap.format(name)}, "{text}");' for name, text in by_name(functions).items()]
    return "\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n" + "\n".join(lines) + "\n}\n"


def of_declarations(name, text, functions, with_error_handling, flags):
    """Return [object, library] of a module whose text has declarations alone; None where it has more, or is wrong.

    Only the text is compiled: pybind11's code for the usual signatures is in a library.
    """
    if "{" in text or not functions:
        return None
    checked = "true" if with_error_handling else "false"
    lines = [f'emulator::define(m, "{each}", "{told}", {checked}, &{each});' for each, told in by_name(functions).items()]
    fill = "\nstatic void emulator_fill(void* m) {\n" + "\n".join(lines) + "\n}\n"
    begin = f'extern "C" _object* PyInit_{name}() {{ return emulator::make_module("{name}", &emulator_fill); }}\n'
    flags = [f"-I{DECLARED}", f"-I{toolchain.INCLUDE}", toolchain.torch_flags()[0][0], "-fPIC", "-w", *flags]
    try:
        compiled = toolchain.compile_text(text + fill + begin, ".cpp", flags)
        library = toolchain.bindings_library()
    except EmulatorError:
        return None  # pybind11's own way tells what is wrong
    defined = set(DEFINED.findall(library.read_bytes()))
    return [compiled, library] if defined.issuperset(DEFINED.findall(compiled.read_bytes())) else None
