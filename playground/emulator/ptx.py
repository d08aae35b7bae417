"""Inline PTX into C++: an `asm` statement becomes a lambda that does what its instructions do.

An instruction is known if its opcode matches a row of INSTRUCTIONS; the row names the function of include/emulator/ptx.h that
stands for it. Registers, predicates, guards and labels of the asm text become variables, ifs and gotos.
"""

import ast
import re
from dataclasses import dataclass

from .text import UnsupportedError, matching, skip_blanks, split_at_commas, squeezed, text_of, tokens_of

TYPES = {"r": "uint32_t", "l": "uint64_t", "h": "uint16_t", "f": "float", "d": "double"}
REGISTERS = {
    "pred": "bool", "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t",
    "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t", "f16": "uint16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float", "f16x2": "uint32_t",
    "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t", "f64": "double",
}  # fmt: skip
SPECIAL = {
    "tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim",
}  # fmt: skip
COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}

# Opcode -> how it is called. Groups of the pattern are handed to the handler. The list is the documentation of what is
# supported: what stands here is executed, everything else is refused by name.
INSTRUCTIONS = []


def instruction(pattern):
    def register(handler):
        INSTRUCTIONS.append((re.compile(pattern), handler))
        return handler

    return register


@dataclass
class Operand:
    """`%3`, a register, a number; `{a, b}` has parts; `[a + 4]` is an address, with the coordinates of a tensor perhaps."""

    text: str = ""
    parts: list | None = None
    offset: str = ""
    is_address: bool = False

    @property
    def value(self):
        if self.parts is not None and not self.is_address:
            return [part.value for part in self.parts]
        return self.text + (f" + {self.offset}" if self.offset else "")


class Statement:
    """One asm statement: its template, and its operands as (constraint, expression)."""

    def __init__(self, template, outputs, inputs, line):
        self.template, self.outputs, self.inputs, self.line = template, outputs, inputs, line
        self.operands = outputs + inputs
        self.locals = []

    def translate(self):
        body = "".join(self.instructions())
        declared = []
        for index, (constraint, expression) in enumerate(self.operands):
            kind = constraint.strip("=+&%")
            name = f"ptx_{index}"
            if kind in ("n", "i"):
                declared.append(f"const long long {name} = (long long)({expression});")
            elif kind not in TYPES:
                raise UnsupportedError(f"the asm constraint {constraint!r}", self.line)
            elif constraint.startswith("="):
                declared.append(f"{TYPES[kind]} {name}{{}};")
            else:
                declared.append(f"{TYPES[kind]} {name} = ::emulator::ptx::take<{TYPES[kind]}>({expression});")
        written = "".join(f"::emulator::ptx::give({expression}, ptx_{i});" for i, (_, expression) in enumerate(self.outputs))
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
            self.locals += [f"{REGISTERS[kind]} reg_{name.strip()}{{}};" for name in names.split(",")]
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
        if opcode in ("ret", "exit"):
            return "return;"
        operands = [self.operand(text) for text in self.comma_parts(rest)]
        for pattern, handler in INSTRUCTIONS:
            match = pattern.fullmatch(opcode)
            if match:
                return handler(match, *operands)
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
        if re.fullmatch(r"%%?laneid", text):
            return "::emulator::lane()"
        if re.fullmatch(r"%%?(warpid|smid)", text):
            return "0"
        operand = re.fullmatch(r"%(\d+)", text)
        if operand:
            if int(operand[1]) >= len(self.operands):
                raise UnsupportedError(f"the asm operand {text}, of which there is none", self.line)
            return f"ptx_{operand[1]}"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"__uint_as_float(0x{text[2:]}u)"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return text.rstrip("U")
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


def call(function, *arguments):
    return f"::emulator::ptx::{function}({', '.join(str(a) for a in arguments)});"


def assign(target, expression):
    return "" if target.text == "_" else f"::emulator::ptx::give({target.text}, {expression});"


def words(operand):
    """The values of a braced operand, or the one value."""
    return operand.value if isinstance(operand.value, list) else [operand.value]


def bits(values):
    return "{" + ", ".join(f"::emulator::ptx::word({value})" for value in values) + "}"


# ---- asynchronous copies


@instruction(r"cp\.async\.(ca|cg)\.shared(::cta)?\.global(\.L2::cache_hint)?(\.L2::\d+B)?")
def _(match, to, source, size, *rest):
    given = rest[0].value if rest and not match[3] else size.value
    return call("copy_async", to.value, source.value, size.value, given)


@instruction(r"cp\.async\.commit_group")
def _(match):
    return "::emulator::async_commit();"


@instruction(r"cp\.async\.wait_group")
def _(match, groups):
    return f"::emulator::async_wait((int){groups.value});"


@instruction(r"cp\.async\.wait_all")
def _(match):
    return "::emulator::async_commit(); ::emulator::async_wait(0);"


@instruction(r"cp\.async\.mbarrier\.arrive(\.noinc)?(\.shared(::cta)?)?\.b64")
def _(match, barrier):
    return f"::emulator::async_arrive({barrier.value}, {'true' if match[1] else 'false'}, __LINE__);"


@instruction(r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?")
def _(match, to, source, size, barrier, *policy):
    return call("bulk_load", to.value, source.value, size.value, barrier.value)


@instruction(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?")
def _(match, to, source, size, *policy):
    return call("bulk_store", to.value, source.value, size.value)


@instruction(r"cp\.async\.bulk\.commit_group")
def _(match):
    return "::emulator::bulk_commit();"


@instruction(r"cp\.async\.bulk\.wait_group(\.read)?")
def _(match, groups):
    return f"::emulator::bulk_wait((int){groups.value});"


# ---- barriers


@instruction(r"mbarrier\.init(\.shared(::cta)?)?\.b64")
def _(match, barrier, count):
    return call("mbarrier_init", barrier.value, count.value, "__LINE__")


@instruction(r"mbarrier\.inval(\.shared(::cta)?)?\.b64")
def _(match, barrier):
    return ""


@instruction(r"mbarrier\.arrive(\.release\.cta)?(\.shared(::cta)?)?\.b64")
def _(match, state, barrier=None, count=None):
    barrier = barrier or state
    return call("mbarrier_arrive", barrier.value, count.value if count else 1, 0, "__LINE__")


@instruction(r"mbarrier\.arrive\.expect_tx(\.release\.cta)?(\.shared(::cta)?)?\.b64")
def _(match, state, barrier, size):
    return call("mbarrier_arrive", barrier.value, 1, size.value, "__LINE__")


@instruction(r"mbarrier\.expect_tx(\.relaxed\.cta)?(\.shared(::cta)?)?\.b64")
def _(match, barrier, size):
    return call("mbarrier_arrive", barrier.value, 0, size.value, "__LINE__")


@instruction(r"mbarrier\.(try_wait|test_wait)\.parity(\.acquire\.cta)?(\.shared(::cta)?)?\.b64")
def _(match, done, barrier, parity, *hint):
    return assign(
        done, f"::emulator::mbarrier_wait({barrier.value}, {parity.value}, {str(match[1] == 'try_wait').lower()}, __LINE__)"
    )


@instruction(r"(bar|barrier)(\.cta)?\.sync(\.aligned)?")
def _(match, barrier, threads=None):
    if threads is None and barrier.value == "0":
        return "__syncthreads(__LINE__);"
    return call("bar", barrier.value, threads.value if threads else -1, "true", "__LINE__")


@instruction(r"(bar|barrier)(\.cta)?\.arrive(\.aligned)?")
def _(match, barrier, threads):
    return call("bar", barrier.value, threads.value, "false", "__LINE__")


@instruction(r"bar\.warp\.sync")
def _(match, mask):
    return f"__syncwarp({mask.value}, __LINE__);"


@instruction(r"(membar|fence)\.(gl|sys|acq_rel\.gpu|acq_rel\.sys|sc\.gpu|sc\.sys)")
def _(match):
    return "::emulator::device_fence();"


@instruction(r"membar\.cta|fence\.(acq_rel|sc)\.cta|fence\.mbarrier_init\.release\.cluster|fence\.proxy\.\S+")
def _(match):
    return ""


# ---- matrices


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(::cta)?\.b16")
def _(match, to, source):
    targets = [part.text for part in to.parts] if to.parts else [to.text]
    return (
        f"{{ uint32_t r[4]; ::emulator::ptx::ldmatrix(r, {source.value}, {match[1]}, {str(bool(match[2])).lower()}, __LINE__); "
        + ("".join(f"::emulator::ptx::give({target}, r[{i}]);" for i, target in enumerate(targets)) + " }")
    )


@instruction(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(::cta)?\.b16")
def _(match, to, source):
    return (
        f"{{ const uint32_t r[4] = {bits(words(source))}; "
        f"::emulator::ptx::stmatrix({to.value}, r, {match[1]}, {str(bool(match[2])).lower()}, __LINE__); }}"
    )


@instruction(r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col\.(f32|f16)\.(tf32|f16|bf16)\.\3\.\2")
def _(match, d, a, b, c):
    count = len(words(d))
    return (
        f"{{ const uint32_t a[] = {bits(words(a))}, b[] = {bits(words(b))}, c[] = {bits(words(c))}; uint32_t r[{count}]; "
        f"::emulator::ptx::mma<::emulator::ptx::{match[1]}, ::emulator::ptx::{match[3]}, {str(match[2] == 'f32').lower()}>"
        f"(r, a, b, c, __LINE__); "
        + "".join(f"::emulator::ptx::give({part.text}, r[{i}]);" for i, part in enumerate(d.parts or [d]))
        + " }"
    )


# ---- loads and stores

ELEMENT = {"8": 1, "16": 2, "32": 4, "64": 8}
ORDER = r"(?:\.(volatile|relaxed|acquire|release)(?:\.(?:cta|cluster|gpu|sys))?)?"
HINTS = r"(?:\.(?:nc|ca|cg|cs|cv|lu|wb|wt|L1::\w+|L2::\w+))*"
TYPE = r"(?:\.(v2|v4))?\.([busf])(8|16|32|64)"


def pointer(space, address):
    return f"::emulator::shared_pointer((uint32_t)({address}))" if space == "shared" else f"(void*)(uint64_t)({address})"


@instruction(rf"ld{ORDER}\.(shared|global)(?:::cta)?{HINTS}{TYPE}")
def _(match, to, source, *policy):
    order, space, _, kind, width = match.groups()
    targets = to.parts or [to]
    size = ELEMENT[width] * len(targets)
    strong = "true" if order in ("volatile", "relaxed", "acquire") else "false"
    element = f"::emulator::ptx::element<'{kind}', {ELEMENT[width]}>"
    return (
        f"{{ {element}::type v[{len(targets)}]; ::emulator::ptx::load(v, {pointer(space, source.value)}, {size}, {strong}); "
        + "".join(f"::emulator::ptx::give({target.text}, v[{i}]);" for i, target in enumerate(targets) if target.text != "_")
        + " }"
    )


@instruction(rf"st{ORDER}\.(shared|global)(?:::cta)?{HINTS}{TYPE}")
def _(match, to, source, *policy):
    order, space, _, kind, width = match.groups()
    values = words(source)
    strong = "true" if order in ("volatile", "relaxed", "release") else "false"
    fence = "::emulator::device_fence(); " if order == "release" else ""
    element = f"::emulator::ptx::element<'{kind}', {ELEMENT[width]}>"
    listed = ", ".join(f"{element}::of({value})" for value in values)
    return (
        f"{{ {fence}const {element}::type v[] = {{{listed}}}; "
        f"::emulator::ptx::store({pointer(space, to.value)}, v, {ELEMENT[width] * len(values)}, {strong}); }}"
    )


@instruction(r"(prefetch|prefetchu|discard|applypriority)\.\S+|setmaxnreg\.\S+|griddepcontrol\.\S+|nanosleep\.u32")
def _(match, *operands):
    return ""


# ---- arithmetic and conversions


@instruction(r"(mov|cvta(?:\.to)?(?:\.shared|\.global)?)\.([busf]\d+|pred)")
def _(match, to, source):
    if to.parts:  # mov.b64 {low, high}, x
        half = 32 if len(to.parts) == 2 else 16
        return "".join(assign(part, f"(uint32_t)((uint64_t)({source.value}) >> {half * i})") for i, part in enumerate(to.parts))
    if source.parts:
        low, high = source.value
        half = 16 if match[2] in ("b32", "u32") else 32
        return assign(to, f"(uint64_t)::emulator::ptx::word({low}) | (uint64_t)::emulator::ptx::word({high}) << {half}")
    return assign(to, source.value)


@instruction(r"(add|sub|mul|and|or|xor|shl|min|max)(\.lo|\.rn|\.ftz|\.sat)*\.([busf])(32|64|16)")
def _(match, to, a, b):
    kind = REGISTERS[match[3] + match[4]]
    x, y = (f"::emulator::ptx::take<{kind}>({v.value})" for v in (a, b))
    operator = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<"}.get(match[1])
    return assign(to, f"{x} {operator} {y}" if operator else f"::{match[1]}({x}, {y})")


@instruction(r"(fma|mad)(\.rn|\.lo|\.ftz)*\.([busf])(32|64)")
def _(match, to, a, b, c):
    kind = REGISTERS[match[3] + match[4]]
    x, y, z = (f"::emulator::ptx::take<{kind}>({v.value})" for v in (a, b, c))
    return assign(to, f"::fma{'f' if match[4] == '32' else ''}({x}, {y}, {z})" if match[3] == "f" else f"{x} * {y} + {z}")


@instruction(r"setp\.(\w\w)\.([busf])(32|64|16)")
def _(match, to, a, b):
    kind = REGISTERS[match[2] + match[3]]
    return assign(
        to, f"::emulator::ptx::take<{kind}>({a.value}) {COMPARISONS[match[1]]} ::emulator::ptx::take<{kind}>({b.value})"
    )


@instruction(r"selp\.([busf])(32|64|16)")
def _(match, to, a, b, predicate):
    return assign(to, f"{predicate.value} ? {a.value} : {b.value}")


@instruction(r"cvt\.rna\.tf32\.f32")
def _(match, to, a):
    return assign(to, f"::emulator::ptx::to_tf32({a.value})")


@instruction(r"cvt\.rn(\.relu)?\.(f16x2|bf16x2)\.f32")
def _(match, to, high, low):
    return assign(to, f"::emulator::ptx::pack_{match[2]}({low.value}, {high.value})")


@instruction(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.(approx|rn)(\.ftz)?\.f32")
def _(match, to, a):
    return assign(to, f"::emulator::ptx::{match[1]}({a.value})")


@instruction(r"createpolicy\.\S+")
def _(match, to, *rest):
    return assign(to, "0")


@instruction(r"elect\.sync")
def _(match, to, mask):
    leader, chosen = to.parts
    results = assign(leader, "first") + assign(chosen, "::emulator::lane() == first")
    return f"{{ const int first = __builtin_ctz({mask.value}); {results} }}"


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


def operands_of(tokens, line):
    """(constraint, expression) for each operand of one section of an asm statement."""
    found = []
    for part in split_at_commas(tokens):
        part = [token for token in part if not token.blank]
        if not part:
            continue
        if part[0].text == "[":  # a name for it
            raise UnsupportedError("a named asm operand", line)
        if part[0].kind != "string" or len(part) < 3 or part[1].text != "(":
            raise UnsupportedError(f"the asm operand `{squeezed(part)}`", line)
        found.append((part[0].text.strip('"'), text_of(part[2:-1]) if " " not in squeezed(part) else squeezed(part[2:-1])))
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
