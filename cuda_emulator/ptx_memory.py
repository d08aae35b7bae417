"""Loads, stores and atomic operations of PTX."""

from .ptx_operands import REGISTERS, assign, instruction, words

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


@instruction(r"(prefetch|prefetchu|discard|applypriority|cp\.async\.bulk\.prefetch)\.\S+|griddepcontrol\.launch_dependents")
def _(match, *operands):
    return ""


@instruction(r"griddepcontrol\.wait")
def _(match):
    return "::emulator::wait_for_dependency();"


@instruction(r"nanosleep\.u32")
def _(match, time):
    return "::emulator::yield();"


@instruction(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def _(match, count):
    return f"::emulator::set_registers((int){count.value}, __LINE__);"


# ---- atomic operations

ATOMICS = {
    "add": "atomicAdd", "min": "atomicMin", "max": "atomicMax", "and": "atomicAnd", "or": "atomicOr", "xor": "atomicXor",
    "exch": "atomicExch", "inc": "atomicInc", "dec": "atomicDec", "cas": "atomicCAS",
}  # fmt: skip
WHERE = r"(?:\.(relaxed|acquire|release|acq_rel))?(?:\.(cta|cluster|gpu|sys))?(?:\.(shared|global)(?:::cta|::cluster)?)?"


def atomic(match, to, address, values):
    order, scope, space, operation, kind, width = match.groups()
    typed = {
        "32": {"b": "unsigned", "u": "unsigned", "s": "int", "f": "float"},
        "64": {"b": "unsigned long long", "u": "unsigned long long", "s": "long long", "f": "double"},
        "128": {"b": REGISTERS["b128"]},
    }[width][kind]
    given = ", ".join(f"({typed})::emulator::ptx::take<{REGISTERS[kind + width]}>({value.value})" for value in values)
    call_text = f"{ATOMICS[operation]}{'_block' if scope == 'cta' else ''}(({typed}*){pointer(space, address.value)}, {given})"
    before, after = (fence_of(scope) if order in (named, "acq_rel") else "" for named in ("release", "acquire"))
    return f"{{ {before}{assign(to, call_text) if to else call_text + ';'} {after}}}"


@instruction(rf"atom{WHERE}\.(add|min|max|and|or|xor|exch|inc|dec|cas)\.([busf])(32|64)")
def _(match, to, address, *values):
    return atomic(match, to, address, values)


@instruction(rf"atom{WHERE}\.(exch|cas)\.(b)(128)")
def _(match, to, address, *values):
    return atomic(match, to, address, values)


@instruction(rf"(atom|red){WHERE}\.add(\.noftz)?(?:\.L2::cache_hint)?(?:\.v[248])?\.(?:(f16|bf16)(x2)?|f32)")
def _(match, *operands):
    """Floats, halves and vectors of them, each element on its own."""
    returns, order, scope, space, _, element, pair = match.groups()
    to, address, values = (operands if returns == "atom" else (None, *operands))[:3]
    targets = (to.parts or [to]) if to else []
    kind, bytes_each = ("uint32_t", 4) if pair else ("uint16_t", 2) if element else ("float", 4)
    text = ""
    for i, value in enumerate(words(values)):
        at = f"({kind}*)((char*){pointer(space, address.value)} + {bytes_each * i})"
        given = f"::emulator::ptx::take<{kind}>({value})"
        added = (
            f"::emulator::ptx::atomic_add<::emulator::ptx::{element}>({at}, {given})"
            if element
            else f"atomicAdd({at}, {given})"
        )
        text += assign(targets[i], added) if targets else added + "; "
    before, after = (fence_of(scope) if order in (named, "acq_rel") else "" for named in ("release", "acquire"))
    return f"{{ {before}{text} {after}}}"


@instruction(rf"red{WHERE}\.(add|min|max|and|or|xor|inc|dec)\.([busf])(32|64)")
def _(match, address, *values):
    return atomic(match, None, address, values)
