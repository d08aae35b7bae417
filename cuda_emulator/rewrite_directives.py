"""The preprocessor's directives: headers, macros, pragmas, conditions."""

import re
from pathlib import Path

from .text import end_of_directive, matching, skip_blanks, split_at_commas, squeezed, tokens_of

INCLUDE = Path(__file__).parent / "include"

# Libraries that the emulator has nothing for, but for what is in INCLUDE: naming them beats a page of errors about them.
UNSUPPORTED_HEADERS = re.compile(
    r"cub/|thrust/|cute/|cutlass/|cuda/|nv/|nvfunctional|cublas|cudnn|cufft|curand|cusparse|cusolver|mma\.h$|cuda_fp[468]\.h$"
    r"|cuda_awbarrier|cudaTypedefs|cudaProfiler|cuda_gl_interop|nvrtc|nvtx|nvToolsExt|nvml|nccl|npp|cooperative_groups/(?!reduce\.h|scan\.h)"
)
# Headers of the toolkit that only declare what nvcc, or cuda_runtime.h, declares anyway.
DECLARING_HEADERS = re.compile(
    r"(crt/)?(builtin_types|channel_descriptor|common_functions|cudart_platform|cuda_occupancy|cuda_stdint|cuda_surface_types"
    r"|cuda_texture_types|device_(atomic|double)_functions|device_launch_parameters|device_types|driver_functions|func_macro"
    r"|host_config|host_defines|math_functions|sm_\d\d_(atomic_functions|intrinsics|rt)|storage_class|surface_functions"
    r"|surface_indirect_functions|surface_types|texture_fetch_functions|texture_indirect_functions|texture_types"
    r"|vector_functions|vector_types)\.hp{0,2}"
)


class Directives:
    """The part of Rewriter that reads directives."""

    def directive(self, at):
        if at < self.define_end:  # an operator of the macro's body
            self.out.append(self.tokens[at])
            return at + 1
        name_at = skip_blanks(self.tokens, at + 1)
        name = self.tokens[name_at].text if name_at < len(self.tokens) else ""
        end = end_of_directive(self.tokens, name_at)
        line = self.tokens[at:end]
        self.conditions += (name in ("if", "ifdef", "ifndef")) - (name == "endif")
        if name == "include":
            line = self.include(line)
            self.include_end = end
        elif name == "endif" and self.holds_only_directives(self.include_end, at):
            self.last_include_line = line[0].line  # it ends a condition that holds nothing else
        elif name == "pragma":
            return self.pragma(at, end)
        elif name == "define":  # its body may hold what is rewritten elsewhere
            self.define_end = end
            self.out.append(self.tokens[at])
            return at + 1
        self.out.extend(line)
        return end

    def holds_only_directives(self, begin, end):
        while begin < end:
            if self.tokens[begin].text == "#":
                begin = end_of_directive(self.tokens, begin)
            elif not self.tokens[begin].blank:
                return False
            begin += 1
        return True

    def include(self, line):
        """The tokens to put in the place of the line."""
        text = squeezed(line)
        header = re.search(r'[<"](.*)[>"]', text)
        if header and self.is_own_header(header[1]):
            return line
        self.last_include_line = line[0].line
        if not header:
            return line
        if UNSUPPORTED_HEADERS.match(header[1]) and not (INCLUDE / header[1]).is_file():
            return tokens_of(f"// {header[1]}")  # what of it is used is not known to the compiler, and named by it
        if DECLARING_HEADERS.fullmatch(header[1]):
            return tokens_of("#include <cuda_runtime.h>")
        self.uses_torch |= bool(re.match(r"torch/|ATen/|c10/", header[1]))
        return line

    def pragma(self, at, end):
        words = squeezed(self.tokens[at:end]).split()
        unroll = re.fullmatch(r"# ?pragma unroll ?\(?(\d*)\)?", " ".join(words))
        if unroll:
            self.emit(
                f"#pragma GCC unroll {min(int(unroll[1] or 32), 1024)}" if unroll[1] not in ("0", "1") else "",
                self.tokens[at:end],
            )
        else:
            self.out.extend(self.tokens[at:end])
        return end


def expand(tokens, macros, depth=0):
    """The tokens with the text's own function-like macros replaced; operand lists are often written with their help."""
    out, at = [], 0
    while at < len(tokens):
        token = tokens[at]
        macro = macros.get(token.text) if token.kind == "word" and depth < 16 else None
        open_at = skip_blanks(tokens, at + 1)
        if macro and macro[0] is None:
            out.extend(expand(macro[1], macros, depth + 1))
            at += 1
        elif macro and open_at < len(tokens) and tokens[open_at].text == "(":
            close_at = matching(tokens, open_at)
            arguments = dict(zip(macro[0], split_at_commas(tokens[open_at + 1 : close_at]), strict=False))
            body = [inner for part in macro[1] for inner in arguments.get(part.text, [part])]
            out.extend(expand(body, macros, depth + 1))
            at = close_at + 1
        else:
            out.append(token)
            at += 1
    return out


def macros_of(text):
    """The #defines of a text: name -> (parameters or None, body)."""
    found = {}
    for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(\(([^)]*)\))?((?:\\\n|[^\n])*)", text, re.M):
        parameters = [p.strip() for p in match[3].split(",") if p.strip()] if match[2] else None
        found[match[1]] = (parameters, tokens_of(match[4].replace("\\\n", " ").strip()))
    return found
