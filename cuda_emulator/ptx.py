"""Inline PTX into C++: an `asm` statement becomes a lambda that does what its instructions do.

An instruction is known if its opcode matches a row of INSTRUCTIONS; the row names the function of include/emulator/ptx.h that
stands for it. Registers, predicates, guards and labels of the asm text become variables, ifs and gotos.
"""

import ast
import re
from dataclasses import dataclass

from .text import UnsupportedError, matching, skip_blanks, split_at_commas, squeezed, tokens_of

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
SPECIAL_VALUES = {
    "warpid": "::emulator::ptx::warp_of_block()", "nwarpid": "::emulator::ptx::warps_of_block()", "smid": "0",
    "lanemask_eq": "(1u << ::emulator::lane())", "lanemask_lt": "((1u << ::emulator::lane()) - 1)",
    "lanemask_le": "(~0u >> (31 - ::emulator::lane()))", "lanemask_gt": "(~1u << ::emulator::lane())",
    "lanemask_ge": "(~0u << ::emulator::lane())", "clock": "(uint32_t)::emulator::clock_ticks()",
    "clock64": "(uint64_t)::emulator::clock_ticks()", "globaltimer": "(uint64_t)::emulator::clock_ticks()",
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


class OperandError(Exception):
    """What is wrong with an instruction's operands."""


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


@instruction(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(cluster|cta)\.global(\.tile)?\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?"
)
def _(match, to, source, barrier, *policy):
    return call("tensor_load", to.value, source.text, coordinates(source, int(match[1])), barrier.value)


@instruction(r"cp\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(\.tile)?\.bulk_group(\.L2::cache_hint)?")
def _(match, to, source, *policy):
    return call("tensor_store", to.text, coordinates(to, int(match[1])), source.value)


def coordinates(tensor, count):
    """The coordinates in `[map, {a, b}]` as a C++ list."""
    given = tensor.parts[0].parts if tensor.parts else None
    if not given or len(given) != count:
        raise OperandError(f"with other than {count} coordinates behind the tensor map")
    return "{" + ", ".join(f"(int)({part.value})" for part in given) + "}"


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


@instruction(r"mbarrier\.arrive(\.release\.(cta|cluster))?(\.shared(::cta|::cluster)?)?\.b64")
def _(match, state, barrier=None, count=None):
    if barrier is None or not barrier.is_address:  # without the state that it returns
        state, barrier, count = None, state, barrier
    return call("mbarrier_arrive", barrier.value, count.value if count else 1, 0)


@instruction(r"mbarrier\.arrive\.expect_tx(\.release\.(cta|cluster))?(\.shared(::cta|::cluster)?)?\.b64")
def _(match, state, barrier, size):
    return call("mbarrier_arrive", barrier.value, 1, size.value)


@instruction(r"mbarrier\.expect_tx(\.relaxed\.(cta|cluster))?(\.shared(::cta|::cluster)?)?\.b64")
def _(match, barrier, size):
    return call("mbarrier_arrive", barrier.value, 0, size.value)


@instruction(r"mbarrier\.(try_wait|test_wait)\.parity(\.acquire\.(cta|cluster))?(\.shared(::cta)?)?\.b64")
def _(match, done, barrier, parity, *hint):
    return assign(
        done, f"::emulator::mbarrier_wait({barrier.value}, {parity.value}, {str(match[1] == 'try_wait').lower()}, __LINE__)"
    )


@instruction(r"(bar|barrier)(\.cta)?\.sync(\.aligned)?")
def _(match, barrier, threads=None):
    if threads is None and barrier.value == "0":
        return "::emulator::block_barrier(::emulator::Vote::none, 0, __LINE__, __COUNTER__);"
    return call("bar", barrier.value, threads.value if threads else -1, "true", "__LINE__")


@instruction(r"(bar|barrier)(\.cta)?\.red\.(popc|and|or)(\.aligned)?\.(u32|pred)")
def _(match, result, barrier, *rest):
    threads = rest[0].value if len(rest) == 2 else -1
    count = f"::emulator::ptx::bar_count({barrier.value}, {threads}, {rest[-1].value}, __LINE__)"
    if match[3] == "and":  # nobody came with the opposite
        count = f"::emulator::ptx::bar_count({barrier.value}, {threads}, !({rest[-1].value}), __LINE__) == 0"
    return assign(result, count if match[3] in ("popc", "and") else count + " != 0")


@instruction(r"(bar|barrier)(\.cta)?\.arrive(\.aligned)?")
def _(match, barrier, threads):
    return call("bar", barrier.value, threads.value, "false", "__LINE__")


@instruction(r"barrier\.cluster\.(arrive|wait)(\.(release|relaxed|acquire))?(\.aligned)?")
def _(match):
    return f"::emulator::cluster_{match[1]}(__LINE__);"


@instruction(r"mapa(\.shared::cluster)?\.u(32|64)")
def _(match, to, address, rank):
    if not match[1]:
        return assign(to, f"(uint64_t)::emulator::cluster_pointer((const void*)(uint64_t)({address.value}), {rank.value})")
    return assign(to, f"::emulator::cluster_address((uint32_t)({address.value}), {rank.value})")


@instruction(r"bar\.warp\.sync")
def _(match, mask):
    return f"__syncwarp({mask.value}, __LINE__);"


@instruction(r"membar\.(?:gl|sys)|fence\.(?:acq_rel|sc|acquire|release)\.(?:gpu|sys|cluster)")
def _(match):
    return "::emulator::device_fence();"


@instruction(r"membar\.cta|fence\.(?:acq_rel|sc|acquire|release)\.cta")
def _(match):
    return "::emulator::block_fence();"


@instruction(r"fence\.mbarrier_init\.release\.cluster")
def _(match):
    return "::emulator::mbarrier_init_fence();"


@instruction(r"fence\.proxy\.(alias|tensormap\S*)")
def _(match, *operands):
    return ""


@instruction(r"fence\.proxy\.async(\.shared::(cta|cluster))?")
def _(match):
    return "::emulator::proxy_fence();"


@instruction(r"fence\.proxy\.async\.global")
def _(match):
    return ""


# ---- matrices


# ptxas takes their modifiers in any order.
SHAPE_AND_NUMBER = r"(?=\S*\.m8n8\b)(?=\S*\.x([124])\b)(?=(\S*\.trans\b)?)(?:\.m8n8|\.x[124]|\.trans){2,3}"


@instruction(rf"ldmatrix\.sync\.aligned{SHAPE_AND_NUMBER}\.shared(::cta)?\.b16")
def _(match, to, source):
    targets = [part.text for part in to.parts] if to.parts else [to.text]
    return (
        f"{{ uint32_t r[4]; ::emulator::ptx::ldmatrix(r, {source.value}, {match[1]}, {str(bool(match[2])).lower()}, __LINE__); "
        + ("".join(f"::emulator::ptx::give({target}, r[{i}]);" for i, target in enumerate(targets)) + " }")
    )


@instruction(rf"stmatrix\.sync\.aligned{SHAPE_AND_NUMBER}\.shared(::cta)?\.b16")
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


@instruction(r"wgmma\.(fence|commit_group)\.sync\.aligned")
def _(match):
    return f"::emulator::wgmma_{'fence' if match[1] == 'fence' else 'commit'}();"


@instruction(r"wgmma\.wait_group\.sync\.aligned")
def _(match, groups):
    return f"::emulator::wgmma_wait((int){groups.value});"


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(8|16)\.f32\.(tf32|f16|bf16)\.\3")
def _(match, d, a, b, scale_d, scale_a, scale_b, *transposed):
    columns, inner, element = int(match[1]), int(match[2]), match[3]
    if columns % 8 or not 8 <= columns <= 256 or inner != (8 if element == "tf32" else 16):
        raise OperandError("of this shape")
    if not d.parts or len(d.parts) != columns // 2:
        raise OperandError(f"with other than {columns // 2} accumulators")
    if a.parts and len(a.parts) != 4:
        raise OperandError("with other than 4 registers of A")
    expected = 0 if element == "tf32" else 1 if a.parts else 2
    if len(transposed) != expected:
        raise OperandError(f"with {len(transposed)} transpositions ({expected} are expected)")
    flags = [f"(bool)({operand.value})" for operand in transposed]
    flags = ["false"] * (2 - len(flags)) + flags
    form = ", ".join(
        [f"{columns}, ::emulator::ProductElement::{element}, {str(bool(a.parts)).lower()}", *flags]
        + [f"(int)({scale.value})" for scale in (scale_a, scale_b)]
    )
    names = [part.text for part in d.parts]
    registers = bits(words(a)) if a.parts else "{}"
    descriptors = f"{'0' if a.parts else a.value}, {b.value}, (bool)({scale_d.value})"
    return (
        f"{{ const ::emulator::ProductForm form{{{form}}}; const uint32_t a[4] = {registers}; "
        f"if constexpr (::emulator::CHECKED) {{ float* const d[] = {{{', '.join('&' + name for name in names)}}}; "
        f"::emulator::wgmma_checked(form, d, a, {descriptors}, __LINE__); }} "
        f"else {{ float d[] = {{{', '.join(names)}}}; ::emulator::wgmma(form, d, a, {descriptors}, __LINE__); "
        + "".join(f"{name} = d[{i}]; " for i, name in enumerate(names))
        + "} }"
    )


# ---- loads and stores

ELEMENT = {"8": 1, "16": 2, "32": 4, "64": 8}
ORDER = r"(?:\.(volatile|relaxed|acquire|release)(?:\.(cta|cluster|gpu|sys))?)?"
HINTS = r"(?:\.(?:nc|ca|cg|cs|cv|lu|wb|wt|L1::\w+|L2::\w+))*"
TYPE = r"(?:\.(v2|v4))?\.([busf])(8|16|32|64)"


def pointer(space, address):
    return f"::emulator::shared_pointer((uint32_t)({address}))" if space == "shared" else f"(void*)(uint64_t)({address})"


def strength(order, scope):
    return f"::emulator::ptx::Strength::{('of_block' if scope == 'cta' else 'strong') if order else 'weak'}"


def fence_of(scope):
    return f"::emulator::{'block' if scope == 'cta' else 'device'}_fence(); "


# Without a space an address is generic, as a C++ pointer is.
@instruction(rf"ld{ORDER}(?:\.(shared|global)(?:::cta|::cluster)?)?{HINTS}{TYPE}")
def _(match, to, source, *policy):
    order, scope, space, _, kind, width = match.groups()
    targets = to.parts or [to]
    size = ELEMENT[width] * len(targets)
    strong, fence = strength(order, scope), fence_of(scope) if order == "acquire" else ""
    element = f"::emulator::ptx::element<'{kind}', {ELEMENT[width]}>"
    return (
        f"{{ {element}::type v[{len(targets)}]; ::emulator::ptx::load(v, {pointer(space, source.value)}, {size}, {strong}); "
        + "".join(f"::emulator::ptx::give({target.text}, v[{i}]);" for i, target in enumerate(targets) if target.text != "_")
        + f" {fence}}}"
    )


@instruction(rf"st{ORDER}(?:\.(shared|global)(?:::cta|::cluster)?)?{HINTS}{TYPE}")
def _(match, to, source, *policy):
    order, scope, space, _, kind, width = match.groups()
    values = words(source)
    strong, fence = strength(order, scope), fence_of(scope) if order == "release" else ""
    element = f"::emulator::ptx::element<'{kind}', {ELEMENT[width]}>"
    listed = ", ".join(f"{element}::of({value})" for value in values)
    return (
        f"{{ {fence}const {element}::type v[] = {{{listed}}}; "
        f"::emulator::ptx::store({pointer(space, to.value)}, v, {ELEMENT[width] * len(values)}, {strong}); }}"
    )


@instruction(r"(prefetch|prefetchu|discard|applypriority|cp\.async\.bulk\.prefetch)\.\S+|griddepcontrol\.\S+")
def _(match, *operands):  # kernels run one after the other, so what griddepcontrol waits for has ended
    return ""


@instruction(r"nanosleep\.u32")
def _(match, time):
    return "::emulator::yield();"


@instruction(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def _(match, count):
    return f"::emulator::set_registers((int){count.value}, __LINE__);"


# ---- arithmetic and conversions


@instruction(r"mov\.([busf]\d+|pred)")
def _(match, to, source):
    if to.parts:  # mov.b64 {low, high}, x
        width = int(match[1][1:]) // len(to.parts)
        return f"{{ const uint64_t whole = {taken('b' + match[1][1:], source)[0]}; " + (
            "".join(assign(part, f"(uint{width}_t)(whole >> {width * i})") for i, part in enumerate(to.parts)) + " }"
        )
    if source.parts:
        width = int(match[1][1:]) // len(source.parts)
        parts = [
            f"(uint64_t)::emulator::ptx::take<uint{width}_t>({value}) << {width * i}" for i, value in enumerate(source.value)
        ]
        return assign(to, f"(uint{match[1][1:]}_t)({' | '.join(parts)})")
    return assign(to, source.value)


@instruction(r"cvta(\.to)?(?:\.(shared)(?:::cta|::cluster)?|\.global)?\.u(32|64)")
def _(match, to, source):
    (address,) = taken("u" + match[3], source)
    if not match[2]:
        return assign(to, address)
    if match[1]:
        return assign(to, f"(uint64_t)::emulator::shared_address((const void*)(uintptr_t){address})")
    return assign(to, f"(uint64_t)(uintptr_t)::emulator::shared_pointer((uint32_t){address})")


def taken(kind, *operands):
    """The operands as values of a PTX type."""
    return [f"::emulator::ptx::take<{REGISTERS[kind]}>({operand.value})" for operand in operands]


def function_of(name):
    """A handler that calls a function of the emulator with 32-bit words."""
    return lambda match, to, *operands: assign(to, f"{name}({', '.join(taken('b32', *operands))})")


def with_options(options, values, compute):
    """compute(values) for floats, with .ftz and .sat as the options say."""
    if ".ftz" in options:
        values = [f"::emulator::ptx::flush({value})" for value in values]
    result = compute(*values)
    if ".ftz" in options:
        result = f"::emulator::ptx::flush({result})"
    return f"::emulator::ptx::saturate({result})" if ".sat" in options else result


FLOAT_FUNCTIONS = {
    "add": "__fadd_rn", "sub": "__fsub_rn", "mul": "__fmul_rn",
    "min": "::emulator::minimum", "max": "::emulator::maximum", "fma": "fmaf", "abs": "fabsf", "neg": "-",
}  # fmt: skip


@instruction(r"(add|sub|mul|min|max|fma|abs|neg)((?:\.rn|\.ftz|\.sat)*)\.f32")
def _(match, to, *operands):
    function = FLOAT_FUNCTIONS[match[1]]
    return assign(to, with_options(match[2], taken("f32", *operands), lambda *values: f"{function}({', '.join(values)})"))


@instruction(r"(min|max)(\.ftz)?\.NaN\.f32")
def _(match, to, a, b):
    function = FLOAT_FUNCTIONS[match[1]] + "_or_nan"
    return assign(to, with_options(match[2] or "", taken("f32", a, b), lambda x, y: f"{function}({x}, {y})"))


@instruction(r"(add|sub|mul|min|max)(?:\.rn)?\.f64")
def _(match, to, a, b):
    x, y = taken("f64", a, b)
    operator = {"add": "+", "sub": "-", "mul": "*"}.get(match[1])
    return assign(to, f"{x} {operator} {y}" if operator else f"::{match[1]}({x}, {y})")


@instruction(r"fma(?:\.rn)?\.f64")
def _(match, to, *operands):
    return assign(to, f"::fma({', '.join(taken('f64', *operands))})")


@instruction(r"(add|sub|mul\.lo|and|or|xor)\.([bus])(16|32|64)")
def _(match, to, a, b):
    x, y = taken("u" + match[3], a, b)  # without a sign, overflow wraps
    operator = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}[match[1]]
    return assign(to, f"({REGISTERS['u' + match[3]]})({x} {operator} {y})")


@instruction(r"mad\.lo\.[us](32|64)")
def _(match, to, a, b, c):
    x, y, z = taken("u" + match[1], a, b, c)
    return assign(to, f"{x} * {y} + {z}")


@instruction(r"mul\.(hi|wide)\.([us])32")
def _(match, to, a, b):
    x, y = taken(match[2] + "32", a, b)
    product = f"({REGISTERS[match[2] + '64']}){x} * {y}"
    return assign(to, product if match[1] == "wide" else f"(uint32_t)(({product}) >> 32)")


@instruction(r"(min|max)\.([us])(32|64|16)")
def _(match, to, a, b):
    return assign(to, f"::{match[1]}({', '.join(taken(match[2] + match[3], a, b))})")


@instruction(r"(not|neg|abs)\.([bs])(32|64)")
def _(match, to, a):
    (x,) = taken("u" + match[3], a)
    expression = {"not": f"~{x}", "neg": f"0u - {x}", "abs": f"({x} >> {int(match[3]) - 1} ? 0u - {x} : {x})"}[match[1]]
    return assign(to, f"({REGISTERS['u' + match[3]]})({expression})")


@instruction(r"(shl|shr)\.([bus])(32|64)")
def _(match, to, a, by):
    kind = "u" if match[1] == "shl" or match[2] == "b" else match[2]
    direction = "left" if match[1] == "shl" else "right"
    return assign(to, f"::emulator::ptx::shift_{direction}({taken(kind + match[3], a)[0]}, {taken('u32', by)[0]})")


@instruction(r"shf\.([lr])\.(wrap|clamp)\.b32")
def _(match, to, low, high, by):
    x, y, n = taken("u32", low, high, by)
    n = f"({n} & 31)" if match[2] == "wrap" else f"::min({n}, 32u)"
    return assign(to, f"::emulator::ptx::funnel_{'left' if match[1] == 'l' else 'right'}({x}, {y}, {n})")


@instruction(r"bfe\.([us])32")
def _(match, to, a, begin, length):
    return assign(to, f"::emulator::ptx::field({taken(match[1] + '32', a)[0]}, {', '.join(taken('u32', begin, length))})")


instruction(r"bfi\.b32")(function_of("::emulator::ptx::insert_field"))
instruction(r"lop3\.b32")(function_of("::emulator::ptx::logic"))
instruction(r"prmt\.b32")(function_of("::emulator::ptx::permute"))
instruction(r"popc\.b32")(function_of("__popc"))
instruction(r"clz\.b32")(function_of("__clz"))
instruction(r"brev\.b32")(function_of("__brev"))
instruction(r"dp4a\.u32\.u32")(function_of("__dp4a"))


@instruction(r"dp4a\.s32\.s32")
def _(match, to, *operands):
    return assign(to, f"__dp4a({', '.join(taken('s32', *operands))})")


@instruction(r"setp\.(\w\w)\.([busf])(32|64|16)")
def _(match, to, a, b):
    kind = REGISTERS[match[2] + match[3]]
    return assign(
        to, f"::emulator::ptx::take<{kind}>({a.value}) {COMPARISONS[match[1]]} ::emulator::ptx::take<{kind}>({b.value})"
    )


@instruction(r"(and|or|xor)\.pred")
def _(match, to, a, b):
    return assign(to, f"({a.value}) {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[match[1]]} ({b.value})")


@instruction(r"not\.pred")
def _(match, to, a):
    return assign(to, f"!({a.value})")


@instruction(r"selp\.([busf])(32|64|16)")
def _(match, to, a, b, predicate):
    return assign(to, f"{predicate.value} ? {a.value} : {b.value}")


@instruction(r"cvt\.rna\.tf32\.f32")
def _(match, to, a):
    return assign(to, f"::emulator::ptx::to_tf32({a.value})")


@instruction(r"cvt\.(rn|rz)(\.relu)?\.tf32\.f32")
def _(match, to, a):
    (value,) = taken("f32", a)
    value = f"::emulator::ptx::relu({value})" if match[2] else value
    return assign(to, f"::emulator::ptx::to_tf32_{'nearest' if match[1] == 'rn' else 'zero'}({value})")


NARROWED = {
    ("rn", "f16"): "::emulator::float_to_half", ("rn", "bf16"): "::emulator::float_to_bfloat16",
    ("rz", "f16"): "::emulator::ptx::half_to_zero", ("rz", "bf16"): "::emulator::ptx::bfloat16_to_zero",
}  # fmt: skip


@instruction(r"cvt\.(rn|rz)(\.relu)?\.(f16|bf16)(x2)?\.f32")
def _(match, to, *operands):  # of a pair, the upper half comes first
    values = [f"::emulator::ptx::relu({value})" if match[2] else value for value in taken("f32", *operands)]
    narrowed = [f"{NARROWED[match[1], match[3]]}({value})" for value in values]
    return assign(to, f"::emulator::ptx::pack({narrowed[1]}, {narrowed[0]})" if match[4] else narrowed[0])


@instruction(r"cvt\.f32\.(f16|bf16)")
def _(match, to, a):
    function = {"f16": "half_to_float", "bf16": "bfloat16_to_float"}[match[1]]
    return assign(to, f"::emulator::{function}({taken('u16', a)[0]})")


WHOLE = {"rni": "nearbyintf", "rzi": "truncf", "rmi": "floorf", "rpi": "ceilf"}


@instruction(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?\.([us])32\.f32")
def _(match, to, a):
    rounded = with_options(match[2] or "", taken("f32", a), lambda value: f"{WHOLE[match[1]]}({value})")
    return assign(to, f"::emulator::to_integer<{'int' if match[3] == 's' else 'unsigned'}>({rounded})")


@instruction(r"cvt(?:\.(rni|rzi|rmi|rpi))?((?:\.ftz|\.sat)*)\.f32\.f32")
def _(match, to, a):
    return assign(to, with_options(match[2], taken("f32", a), lambda value: f"{WHOLE.get(match[1], '')}({value})"))


@instruction(r"cvt\.rn\.f(32|64)\.([us])(32|64)")
def _(match, to, a):
    return assign(to, f"({REGISTERS['f' + match[1]]}){taken(match[2] + match[3], a)[0]}")


@instruction(r"cvt\.([us])(8|16|32|64)\.([us])(8|16|32|64)")
def _(match, to, a):
    return assign(to, f"({REGISTERS[match[1] + match[2]]}){taken(match[3] + match[4], a)[0]}")


@instruction(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.(approx|rn)(\.ftz)?\.f32")
def _(match, to, a):
    return assign(to, with_options(match[3] or "", taken("f32", a), lambda value: f"::emulator::ptx::{match[1]}({value})"))


@instruction(r"createpolicy\.\S+")
def _(match, to, *rest):
    return assign(to, "0")


# ---- exchanges among the lanes of a warp


@instruction(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _(match, to, a, b, c, mask):
    value, inside = to.parts or (to, None)
    x, y, z, m = taken("u32", a, b, c, mask)
    results = assign(value, "moved.value") + (assign(inside, "moved.inside") if inside else "")
    return f"{{ const auto moved = ::emulator::ptx::shuffle_{match[1]}({m}, {x}, {y}, {z}, __LINE__); {results} }}"


@instruction(r"vote\.sync\.(all|any)\.pred")
def _(match, to, a, mask):
    return assign(to, f"__{match[1]}_sync({taken('u32', mask)[0]}, {a.value}, __LINE__) != 0")


@instruction(r"vote\.sync\.ballot\.b32")
def _(match, to, a, mask):
    return assign(to, f"__ballot_sync({taken('u32', mask)[0]}, {a.value}, __LINE__)")


@instruction(r"match\.any\.sync\.b(32|64)")
def _(match, to, a, mask):
    return assign(to, f"__match_any_sync({taken('u32', mask)[0]}, {taken('u' + match[1], a)[0]}, __LINE__)")


@instruction(r"redux\.sync\.(add|min|max|and|or|xor)\.([bus])32")
def _(match, to, a, mask):
    return assign(to, f"__reduce_{match[1]}_sync({taken('u32', mask)[0]}, {taken(match[2] + '32', a)[0]}, __LINE__)")


@instruction(r"activemask\.b32")
def _(match, to):
    return assign(to, "__activemask(__LINE__)")


# ---- atomic operations

ATOMICS = {
    "add": "atomicAdd", "min": "atomicMin", "max": "atomicMax", "and": "atomicAnd", "or": "atomicOr", "xor": "atomicXor",
    "exch": "atomicExch", "inc": "atomicInc", "dec": "atomicDec", "cas": "atomicCAS",
}  # fmt: skip
WHERE = r"(?:\.(relaxed|acquire|release|acq_rel))?(?:\.(cta|cluster|gpu|sys))?(?:\.(shared|global)(?:::cta|::cluster)?)?"


def atomic(match, to, address, values):
    order, scope, space, operation, kind, width = match.groups()
    typed = (
        {"b": "unsigned", "u": "unsigned", "s": "int", "f": "float"}[kind]
        if width == "32"
        else ({"b": "unsigned long long", "u": "unsigned long long", "s": "long long", "f": "double"}[kind])
    )
    given = ", ".join(f"({typed})::emulator::ptx::take<{REGISTERS[kind + width]}>({value.value})" for value in values)
    call_text = f"{ATOMICS[operation]}{'_block' if scope == 'cta' else ''}(({typed}*){pointer(space, address.value)}, {given})"
    before, after = (fence_of(scope) if order in (named, "acq_rel") else "" for named in ("release", "acquire"))
    return f"{{ {before}{assign(to, call_text) if to else call_text + ';'} {after}}}"


@instruction(rf"atom{WHERE}\.(add|min|max|and|or|xor|exch|inc|dec|cas)\.([busf])(32|64)")
def _(match, to, address, *values):
    return atomic(match, to, address, values)


@instruction(rf"red{WHERE}\.(add|min|max|and|or|xor|inc|dec)\.([busf])(32|64)")
def _(match, address, *values):
    return atomic(match, None, address, values)


@instruction(r"elect\.sync")
def _(match, to, mask):
    leader, chosen = to.parts
    results = assign(leader, "first") + assign(chosen, "::emulator::lane() == first")
    return f"{{ const int first = ::emulator::ptx::elect({mask.value}, __LINE__); {results} }}"


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
