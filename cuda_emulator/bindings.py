"""The Python module that load_inline makes of its `functions`."""

import re

DEFINED = re.compile(rb"_ZN8emulator6define\w+")  # emulator::define for a signature, as the compiler names it


def by_name(functions):
    """Return {name: documentation} of load_inline's `functions`."""
    functions = [functions] if isinstance(functions, str) else functions
    return functions if isinstance(functions, dict) else {name: name for name in functions}


def pybind_module(functions, with_error_handling):
    """Return the text that PyTorch adds to a binding for its `functions`."""
    wrap = "torch::wrap_pybind_function({})" if with_error_handling else "{}"
    lines = [f'm.def("{name}", {wrap.format(name)}, "{text}");' for name, text in by_name(functions).items()]
    return "\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n" + "\n".join(lines) + "\n}\n"


def own_module(name, functions, with_error_handling):
    """Return a text that makes the same module with `toolchain.bindings_library`, which has pybind11's code."""
    checked = "true" if with_error_handling else "false"
    lines = [f'emulator::define(m, "{each}", "{text}", {checked}, &{each});' for each, text in by_name(functions).items()]
    fill = "static void emulator_fill(void* m) {\n" + "\n".join(lines) + "\n}\n"
    begin = f'extern "C" _object* PyInit_{name}() {{ return emulator::make_module("{name}", &emulator_fill); }}\n'
    return "\n#include <emulator/bindings.h>\n" + fill + begin


def has_all(library, compiled):
    """Whether a library has the signatures that an object file of `own_module`'s text wants."""
    return set(DEFINED.findall(compiled.read_bytes())) <= set(DEFINED.findall(library.read_bytes()))
