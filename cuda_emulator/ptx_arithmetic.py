"""Arithmetic of PTX."""

from .ptx_operands import REGISTERS, assign, instruction, taken

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

# ---- arithmetic and conversions


@instruction(r"mov\.([busf]\d+|pred)")
def _(match, to, source):
    if to.parts:  # mov.b64 {low, high}, x
        width = int(match[1][1:]) // len(to.parts)
        return f"{{ const auto whole = {taken('b' + match[1][1:], source)[0]}; " + (
            "".join(assign(part, f"(uint{width}_t)(whole >> {width * i})") for i, part in enumerate(to.parts)) + " }"
        )
    if source.parts:
        width = int(match[1][1:]) // len(source.parts)
        kind = REGISTERS["b" + match[1][1:]]
        parts = [
            f"({kind})::emulator::ptx::take<uint{width}_t>({value}) << {width * i}" for i, value in enumerate(source.value)
        ]
        return assign(to, f"({kind})({' | '.join(parts)})")
    return assign(to, source.value)


@instruction(r"cvta(\.to)?(?:\.(shared)(?:::cta|::cluster)?|\.global)?\.u(32|64)")
def _(match, to, source):
    (address,) = taken("u" + match[3], source)
    if not match[2]:
        return assign(to, address)
    if match[1]:
        return assign(to, f"(uint64_t)::emulator::shared_address((const void*)(uintptr_t){address})")
    return assign(to, f"(uint64_t)(uintptr_t)::emulator::shared_pointer((uint32_t){address})")


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


# Of numbers of 16 bits, alone or in pairs: the result in float, before it is rounded.
HALF_FUNCTIONS = {
    "add": "x + y", "sub": "x - y", "mul": "x * y", "neg": "-x", "abs": "fabsf(x)",
    "fma": "::emulator::ptx::fma_to_odd(x, y, z)",
    "min": "::emulator::minimum(x, y)", "max": "::emulator::maximum(x, y)",
    "min.NaN": "::emulator::minimum_or_nan(x, y)", "max.NaN": "::emulator::maximum_or_nan(x, y)",
    "ex2": "exp2f(x)", "tanh": "tanhf(x)",
}  # fmt: skip


@instruction(
    r"(add|sub|mul|fma|min|max|neg|abs|ex2|tanh)((?:\.rn|\.approx|\.ftz|\.sat|\.relu|\.NaN|\.xorsign\.abs)*)\.(f16|bf16)(x2)?"
)
def _(match, to, *operands):
    name, options, element, pair = match.groups()
    names = "xyz"[: len(operands)]
    expression = HALF_FUNCTIONS[name + (".NaN" if ".NaN" in options else "")]
    flush = f"::emulator::ptx::flush_small<::emulator::ptx::{element}>" if ".ftz" in options and element == "f16" else ""
    body = "".join(f"{each} = {flush}({each}); " for each in names) if flush else ""
    if ".xorsign" in options:
        body += "const float sign = copysignf(1.0f, x) * copysignf(1.0f, y); x = fabsf(x), y = fabsf(y); "
        expression = f"copysignf({expression}, sign)"
    for option, function in ((".relu", "::emulator::ptx::relu"), (".sat", "::emulator::ptx::saturate")):
        expression = f"{function}({expression})" if option in options else expression
    expression = f"{flush}({expression})" if flush else expression
    function = f"[]({', '.join('float ' + each for each in names)}) {{ {body}return {expression}; }}"
    kind, count = ("u32", 2) if pair else ("u16", 1)
    given = ", ".join(taken(kind, *operands))
    return assign(to, f"({REGISTERS[kind]})::emulator::ptx::each<::emulator::ptx::{element}, {count}>({function}, {given})")


@instruction(r"(add|sub)(c?)(\.cc)?(?<=c)\.([us])(32|64)")
def _(match, to, a, b):
    name, takes, gives, _, width = match.groups()
    function = {"add": "add_carry", "sub": "subtract_borrow"}[name]
    form = f"{REGISTERS['u' + width]}, {str(bool(takes)).lower()}, {str(bool(gives)).lower()}"
    return assign(to, f"::emulator::ptx::{function}<{form}>({', '.join(taken('u' + width, a, b))})")


@instruction(r"mad(c?)\.(lo|hi)(\.cc)?\.([us])(32|64)")
def _(match, to, a, b, c):
    takes, half, gives, sign, width = match.groups()
    x, y = taken(sign + width, a, b)
    product = f"{x} * {y}" if half == "lo" else f"::emulator::ptx::product_high({x}, {y})"
    form = f"{REGISTERS['u' + width]}, {str(bool(takes)).lower()}, {str(bool(gives)).lower()}"
    return assign(to, f"::emulator::ptx::add_carry<{form}>({product}, {taken('u' + width, c)[0]})")


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


@instruction(r"mul\.wide\.([us])32")
def _(match, to, a, b):
    x, y = taken(match[1] + "32", a, b)
    return assign(to, f"({REGISTERS[match[1] + '64']}){x} * {y}")


@instruction(r"mul\.hi\.([us])(32|64)")
def _(match, to, a, b):
    return assign(to, f"::emulator::ptx::product_high({', '.join(taken(match[1] + match[2], a, b))})")


@instruction(r"vabsdiff4\.u32\.u32\.u32(\.add)?")
def _(match, to, a, b, c):
    x, y, z = taken("u32", a, b, c)
    return assign(to, f"__vsadu4({x}, {y}) + {z}" if match[1] else f"__vabsdiffu4({x}, {y})")


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


@instruction(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.(approx|rn)(\.ftz)?\.f32")
def _(match, to, a):
    return assign(to, with_options(match[3] or "", taken("f32", a), lambda value: f"::emulator::ptx::{match[1]}({value})"))


@instruction(r"createpolicy\.\S+")
def _(match, to, *rest):
    return assign(to, "0")
