"""Inline PTX into C++: an `asm` statement becomes a lambda that does what its instructions do.

An instruction is known if its opcode matches a row of INSTRUCTIONS; the row names the function of include/emulator/ptx.h that
stands for it. Registers, predicates, guards and labels of the asm text become variables, ifs and gotos.
"""

import ast
import re

from . import ptx_arithmetic, ptx_conversions, ptx_memory, ptx_synchronisation, ptx_warp  # noqa: F401 - they fill the table
from .ptx_operands import INSTRUCTIONS, REGISTERS, Operand, OperandError
from .rewrite_directives import expand
from .text import UnsupportedError, matching, skip_blanks, split_at_commas, squeezed

TYPES = {"r": "uint32_t", "l": "uint64_t", "h": "uint16_t", "f": "float", "d": "double", "q": "unsigned __int128"}
SPECIAL = {
    "tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim",
}  # fmt: skip
# ptxas takes `ld.global.acquire.gpu`, too.
ORDER_BEHIND_SPACE = re.compile(
    r"(ld|st|red|atom)\.((?:global|shared)(?:::cta|::cluster)?)"
    r"\.((?:relaxed|acquire|release|acq_rel|volatile)(?:\.(?:cta|cluster|gpu|sys))?)\."
)
SPECIAL_VALUES = {
    "warpid": "::emulator::ptx::warp_of_block()", "nwarpid": "::emulator::ptx::warps_of_block()", "smid": "0",
    "nsmid": "cudaDeviceProp{}.multiProcessorCount",
    "lanemask_eq": "(1u << ::emulator::lane())", "lanemask_lt": "((1u << ::emulator::lane()) - 1)",
    "lanemask_le": "(~0u >> (31 - ::emulator::lane()))", "lanemask_gt": "(~1u << ::emulator::lane())",
    "lanemask_ge": "(~0u << ::emulator::lane())", "clock": "(uint32_t)::emulator::clock_ticks()",
    "clock64": "(uint64_t)::emulator::clock_ticks()", "globaltimer": "(uint64_t)::emulator::clock_ticks()",
}  # fmt: skip


class Statement:
    """One asm statement: its template, and its operands as (constraint, expression)."""

    def __init__(self, template, outputs, inputs, line):
        self.template, self.outputs, self.inputs, self.line = template, outputs, inputs, line
        self.operands = outputs + inputs
        self.locals = []
        # The accumulators of wgmma are registers that change later, so they must not be copied.
        self.multiplies = "wgmma.mma_async" in template

    def translate(self):
        body = "".join(self.instructions())
        declared = []
        for index, (constraint, expression) in enumerate(self.operands):
            kind = constraint.strip("=+&%")
            name = f"ptx_{index}"
            if index < len(self.outputs) and kind == "f" and self.multiplies:
                declared.append(f"auto& {name} = ({expression});")
            elif kind in ("n", "i"):
                declared.append(f"const long long {name} = (long long)({expression});")
            elif kind not in TYPES:
                raise UnsupportedError(f"the asm constraint {constraint!r}", self.line)
            elif constraint.startswith("="):
                declared.append(f"{TYPES[kind]} {name}{{}};")
            else:
                declared.append(f"{TYPES[kind]} {name} = ::emulator::ptx::take<{TYPES[kind]}>({expression});")
        outputs = [] if self.multiplies else self.outputs
        written = "".join(f"::emulator::ptx::give({expression}, ptx_{i});" for i, (_, expression) in enumerate(outputs))
        return f"[&] {{ {''.join(declared)}{''.join(self.locals)}{body}{written} }}();"

    # ---- the instructions of the template

    def instructions(self):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", self.template, flags=re.S)
        for piece in self.split(text):
            yield self.one(piece)

    def split(self, text):
        """Statements, labels and the braces of scopes."""
        piece, depth = "", 0
        for character in text:
            if character == "{" and not piece.strip():
                continue  # registers of a scope are simply the lambda's
            if character == "}" and depth == 0 and not piece.strip():
                continue
            depth += (character in "{[") - (character in "}]")
            if character == ";" and depth == 0:
                yield piece.strip()
                piece = ""
            elif character == ":" and re.fullmatch(r"\s*[\w$%=]+", piece):
                piece += character
            elif piece.endswith(":") and character != ":" and re.fullmatch(r"\s*[\w$%=]+:", piece):
                yield piece.strip()
                piece = "" if character in "{}" else character
            else:
                piece += character
        if piece.strip():
            yield piece.strip()

    def one(self, piece):
        if not piece:
            return ""
        if piece.endswith(":"):
            return f"{self.label(piece[:-1])}: ;"
        if piece.startswith(".reg"):
            kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", piece, re.S).groups()
            if kind not in REGISTERS:
                raise UnsupportedError(f"the PTX register type .{kind}", self.line)
            declarations = [f"{REGISTERS[kind]} reg_{name.strip()}{{}};" for name in names.split(",")]
            self.locals += [text for text in declarations if text not in self.locals]  # scopes may repeat a name
            return ""
        guard = re.match(r"@(!?)([\w%]+)\s+(.*)", piece, re.S)
        if guard:
            return f"if ({guard[1]}{self.name(guard[2])}) {{ {self.one(guard[3])} }}"
        opcode, _, rest = piece.partition(" ") if " " in piece else (piece, "", "")
        opcode = opcode.strip()
        if "\n" in opcode or "\t" in opcode:
            opcode, rest = re.split(r"\s", piece, maxsplit=1)
        if opcode in ("bra", "bra.uni"):
            return f"goto {self.label(rest.strip())};"
        if opcode == "trap":
            return "::emulator::trap(__LINE__);"
        if opcode == "exit":
            return "::emulator::exit_thread();"
        opcode = ORDER_BEHIND_SPACE.sub(r"\1.\3.\2.", opcode)
        operands = [self.operand(text) for text in self.comma_parts(rest)]
        for pattern, handler in INSTRUCTIONS:
            match = pattern.fullmatch(opcode)
            if match:
                try:
                    return handler(match, *operands)
                except OperandError as error:
                    raise UnsupportedError(f"{opcode} {error}", self.line) from None
        raise UnsupportedError(f"the PTX instruction {opcode}", self.line)

    def label(self, name):
        return "label_" + re.sub(r"\W", "_", name.strip())

    def comma_parts(self, text):
        parts, depth, part = [], 0, ""
        for character in text:
            depth += (character in "{[(") - (character in "}])")
            if character == "," and depth == 0:
                parts.append(part)
                part = ""
            else:
                part += character
        return [part.strip() for part in [*parts, part] if part.strip()]

    def name(self, text):
        """A register, an operand or a number as C++."""
        text = text.strip()
        negative = text.startswith("!")
        if negative:
            return "!" + self.name(text[1:])
        special = re.fullmatch(r"%%?(\w+)\.([xyz])", text)
        if special and special[1] in SPECIAL:
            return f"{SPECIAL[special[1]]}.{special[2]}"
        if re.fullmatch(r"%%?cluster_(ctarank|nctarank)", text):
            return f"::emulator::cluster_{'rank' if 'nctarank' not in text else 'blocks'}()"
        if re.fullmatch(r"%%?laneid", text):
            return "::emulator::lane()"
        special = re.fullmatch(r"%%?(\w+)", text)
        if special and special[1] in SPECIAL_VALUES:
            return SPECIAL_VALUES[special[1]]
        operand = re.fullmatch(r"%(\d+)", text)
        if operand:
            if int(operand[1]) >= len(self.operands):
                raise UnsupportedError(f"the asm operand {text}, of which there is none", self.line)
            return f"ptx_{operand[1]}"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"__uint_as_float(0x{text[2:]}u)"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return text.rstrip("U")
        if re.fullmatch(r"\d+\.\d*", text):
            return text
        if text == "_":
            return "_"
        if re.fullmatch(r"[A-Za-z_$]\w*", text):
            return f"reg_{text}"
        raise UnsupportedError(f"the PTX operand {text!r}", self.line)

    def operand(self, text):
        if text.startswith("{"):
            return Operand(parts=[self.operand(part) for part in self.comma_parts(text[1:-1])])
        if text.startswith("["):
            inner = self.comma_parts(text[1:-1])
            base, _, offset = inner[0].partition("+")
            return Operand(
                self.name(base),
                [self.operand(part) for part in inner[1:]],
                self.name(offset) if offset.strip() else "",
                True,
            )
        if "|" in text:  # two destinations
            return Operand(parts=[self.operand(part) for part in text.split("|")])
        return Operand(self.name(text))


# ---- finding asm statements


def string_value(tokens, line):
    """The text of adjacent string literals."""
    text = ""
    for token in tokens:
        if token.blank:
            continue
        if token.kind != "string":
            raise UnsupportedError(f"an asm template made of {token.text}", line)
        raw = re.fullmatch(r'R"([^(]*)\((.*)\)\1"', token.text, re.S)
        text += raw[2] if raw else ast.literal_eval(token.text)
    return text


def operands_of(tokens, line):
    """(constraint, expression) for each operand of one section of an asm statement."""
    found = []
    for part in split_at_commas(tokens):
        first = skip_blanks(part, 0)
        if first == len(part):
            continue
        if part[first].text == "[":  # a name for it
            raise UnsupportedError("a named asm operand", line)
        open_at = skip_blanks(part, first + 1)
        if part[first].kind != "string" or open_at == len(part) or part[open_at].text != "(":
            raise UnsupportedError(f"the asm operand `{squeezed(part)}`", line)
        found.append((part[first].text.strip('"'), squeezed(part[open_at + 1 : matching(part, open_at)])))
    return found


def sections(tokens):
    """The parts of an asm statement between its colons; :: is two of them."""
    parts, depth = [[]], 0
    for token in tokens:
        if depth == 0 and token.text in (":", "::"):
            parts.extend([] for _ in token.text)
            continue
        depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))
        parts[-1].append(token)
    return parts


def translate(inner, macros, line):
    """The C++ for what stands between the parentheses of `asm volatile(...)`."""
    parts = sections(inner)
    template = string_value(expand(parts[0], macros), line)
    outputs, inputs = (operands_of(expand(part, macros), line) for part in ([*parts[1:3], [], []])[:2])
    return Statement(template, outputs, inputs, line).translate()
