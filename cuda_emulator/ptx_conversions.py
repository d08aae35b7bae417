"""Conversions of PTX."""

from .ptx_arithmetic import with_options
from .ptx_operands import REGISTERS, assign, instruction, taken


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


WHOLE = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@instruction(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(?:\.sat)?\.([us])(8|16|32|64)\.(f32|f64)")
def _(match, to, a):
    suffix = "f" if match[5] == "f32" else ""
    rounded = with_options(match[2] or "", taken(match[5], a), lambda value: f"{WHOLE[match[1]]}{suffix}({value})")
    return assign(to, f"::emulator::to_integer<{REGISTERS[match[3] + match[4]]}>({rounded})")


@instruction(r"cvt\.rn\.satfinite(\.relu)?\.(e4m3|e5m2)x2\.(f32|f16x2)")
def _(match, to, *operands):  # of a pair, the upper one comes first
    values = taken("f32", *operands)
    if match[3] == "f16x2":
        values = [f"::emulator::ptx::f16::at({taken('u32', *operands)[0]}, {i})" for i in (1, 0)]
    values = [f"::emulator::ptx::relu({value})" if match[1] else value for value in values]
    high, low = (f"::emulator::to_float8<{str(match[2] == 'e4m3').lower()}>({value}, true)" for value in values)
    return assign(to, f"(uint16_t)({low} | {high} << 8)")


@instruction(r"cvt\.rn(\.relu)?\.f16x2\.(e4m3|e5m2)x2")
def _(match, to, a):
    (pair,) = taken("u16", a)
    values = [f"::emulator::float8_to_float<{str(match[2] == 'e4m3').lower()}>(uint8_t({pair} >> {8 * i}))" for i in (0, 1)]
    values = [f"::emulator::float_to_half({f'::emulator::ptx::relu({value})' if match[1] else value})" for value in values]
    return assign(to, f"::emulator::ptx::pack({', '.join(values)})")


@instruction(r"cvt(?:\.(rni|rzi|rmi|rpi))?((?:\.ftz|\.sat)*)\.f32\.f32")
def _(match, to, a):
    return assign(
        to, with_options(match[2], taken("f32", a), lambda value: f"{WHOLE[match[1]]}f({value})" if match[1] else value)
    )


@instruction(r"cvt\.rn\.f(32|64)\.([us])(32|64)")
def _(match, to, a):
    return assign(to, f"({REGISTERS['f' + match[1]]}){taken(match[2] + match[3], a)[0]}")


@instruction(r"cvt\.([us])(8|16|32|64)\.([us])(8|16|32|64)")
def _(match, to, a):
    return assign(to, f"({REGISTERS[match[1] + match[2]]}){taken(match[3] + match[4], a)[0]}")
