"""load_inline that has nvcc keep line numbers: those of the variant's Python file."""

import inspect

from playground.emulator.sourcemap import SourceMap

KEEPS_LINES = ("-lineinfo", "--generate-line-info", "-G", "--device-debug")


def numbered(load_inline, file):
    """`load_inline` (or `load`) whose CUDA text tells nvcc which line of `file` each of its lines is."""
    signature = inspect.signature(load_inline)

    def with_lines(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        flags = list(given.get("extra_cuda_cflags") or [])
        given["extra_cuda_cflags"] = flags if set(flags) & set(KEEPS_LINES) else [*flags, "-lineinfo"]
        sources = given.get("cuda_sources")
        if sources:
            text = sources if isinstance(sources, str) else "\n".join(sources)
            given["cuda_sources"] = [SourceMap(text, file, f"<{given['name']}: cuda_sources>").with_directives(text)]
        return load_inline(*call.args, **call.kwargs)

    return with_lines
