"""The instructions and intrinsics whose host bodies are compared with a GPU's: a small kernel, inputs, and what may differ.

A case is a kernel `name(out, in, n)`. Everything is passed as 32-bit words: thread i finds word k of its operands in
in[k * n + i] and puts word k of its result into out[k * n + i]. The text knows nothing of the emulator.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

THREADS = 64  # of a block; every n is a multiple of it

# One letter a type: (C++ type, asm constraint, 32-bit words, from words, comparison as)
TYPES = {
    "f": ("float", "f", 1, "__uint_as_float({0})", "float32"),
    "u": ("unsigned", "r", 1, "{0}", None),
    "i": ("int", "r", 1, "(int)({0})", None),
    "l": ("unsigned long long", "l", 2, "join({0}, {1})", None),
    "d": ("double", "d", 2, "__longlong_as_double((long long)join({0}, {1}))", "float64"),
    "s": ("unsigned short", "h", 1, "(unsigned short)({0})", None),
    "h": ("__half", None, 1, "__ushort_as_half((unsigned short)({0}))", "float16"),
    "b": ("__nv_bfloat16", None, 1, "__ushort_as_bfloat16((unsigned short)({0}))", "bfloat16"),
    "H": ("__half2", None, 1, "half2_of({0})", "float16x2"),
    "B": ("__nv_bfloat162", None, 1, "bfloat162_of({0})", "bfloat16x2"),
    "g": ("unsigned short", "h", 1, "(unsigned short)({0})", "float16"),  # a half in an asm statement
    "e": ("unsigned short", "h", 1, "(unsigned short)({0})", "bfloat16"),  # a bfloat16 in an asm statement
    "G": ("unsigned", "r", 1, "{0}", "float16x2"),
    "E": ("unsigned", "r", 1, "{0}", "bfloat16x2"),
}

PRELUDE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

__device__ unsigned long long join(uint32_t low, uint32_t high) { return (unsigned long long)high << 32 | low; }
__device__ __half2 half2_of(uint32_t word) {
    return __halves2half2(__ushort_as_half((unsigned short)word), __ushort_as_half((unsigned short)(word >> 16)));
}
__device__ __nv_bfloat162 bfloat162_of(uint32_t word) {
    return __halves2bfloat162(__ushort_as_bfloat16((unsigned short)word), __ushort_as_bfloat16((unsigned short)(word >> 16)));
}
// Results into words.
__device__ void put(uint32_t* out, int, float v) { out[0] = __float_as_uint(v); }
__device__ void put(uint32_t* out, int, unsigned v) { out[0] = v; }
__device__ void put(uint32_t* out, int, int v) { out[0] = (uint32_t)v; }
__device__ void put(uint32_t* out, int, bool v) { out[0] = v; }
__device__ void put(uint32_t* out, int, unsigned short v) { out[0] = v; }
__device__ void put(uint32_t* out, int n, unsigned long long v) { out[0] = (uint32_t)v, out[n] = (uint32_t)(v >> 32); }
__device__ void put(uint32_t* out, int n, double v) { put(out, n, (unsigned long long)__double_as_longlong(v)); }
__device__ void put(uint32_t* out, int, __half v) { out[0] = __half_as_ushort(v); }
__device__ void put(uint32_t* out, int, __nv_bfloat16 v) { out[0] = __bfloat16_as_ushort(v); }
__device__ void put(uint32_t* out, int, __half2 v) {
    out[0] = __half_as_ushort(__low2half(v)) | (uint32_t)__half_as_ushort(__high2half(v)) << 16;
}
__device__ void put(uint32_t* out, int, __nv_bfloat162 v) {
    out[0] = __bfloat16_as_ushort(__low2bfloat16(v)) | (uint32_t)__bfloat16_as_ushort(__high2bfloat16(v)) << 16;
}
__device__ unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }
"""


# ---- what may differ


class Rule(NamedTuple):
    """How far a result may be from the hardware's. `bound(inputs, value)` is absolute, in the results' unit."""

    why: str
    bound: object


def exact():
    """Bit for bit; where the result is a floating-point number, any NaN equals any NaN."""
    return Rule("the bits", None)


def ulp_of(value, mantissa=23, least=-149):
    """The distance from |value| to the next floating-point number, in float64."""
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.abs(value)))
    exponent = np.where(np.isfinite(exponent), exponent, least + mantissa)
    return np.exp2(np.maximum(exponent - mantissa, least))


def ulps(count, why, **kind):
    """`count` documented ulps, and one for the host's own rounding. `count` may depend on the inputs."""
    return Rule(why, lambda x, value: ((count(x) if callable(count) else count) + 1) * ulp_of(value, **kind))


def relative(error, why):
    return Rule(why, lambda x, value: error * np.abs(value) + ulp_of(value))


def absolute(error, why):
    return Rule(why, lambda x, value: error(x) + ulp_of(value))


HALF = {"mantissa": 10, "least": -24}


# ---- elementwise cases


@dataclass(frozen=True)
class Case:
    """`function` is the kernel in `text`; `pool` names the inputs; `result` has a letter for each value."""

    name: str
    function: str
    text: str
    result: str
    pool: str
    rule: Rule
    threads: int = THREADS


def words_of(letters):
    return sum(TYPES[letter][2] for letter in letters)


def operands(letters):
    """Declarations of a, b, c, ... from the input words."""
    lines, at = [], 0
    for name, letter in zip("abcd", letters, strict=False):
        kind, _, words, take, _ = TYPES[letter]
        lines.append(f"    const {kind} {name} = {take.format(*(f'in[{at + k} * n + i]' for k in range(words)))};\n")
        at += words
    return "".join(lines)


def kernel(name, body):
    return (
        f"__global__ void case_{name}(uint32_t* out, const uint32_t* in, int n) {{\n"
        f"    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n{body}}}\n"
    )


def call(expression, signature, rule=None, pool=None, name=None):
    """A case of a C++ expression of a, b, c. `signature` is "result:operands" in letters of TYPES."""
    result, letters = signature.split(":")
    name = name or expression.split("(")[0]
    body = f"{operands(letters)}    const {TYPES[result][0]} r = {expression};\n    put(out + i, n, r);\n"
    return Case(name, name, kernel(name, body), result, pool or letters, rule or exact())


def ptx(opcode, signature, rule=None, pool=None, arguments=None, name=None):
    """A case of one PTX instruction; `arguments` is its operand list where it is not %0, %1, ..."""
    result, letters = signature.split(":")
    name = name or "ptx_" + opcode.replace(".", "_")
    listed = arguments or ", ".join(f"%{k}" for k in range(1 + len(letters)))
    given = ", ".join(f'"{TYPES[letter][1]}"({operand})' for operand, letter in zip("abcd", letters, strict=False))
    body = (
        f"{operands(letters)}    {TYPES[result][0]} r;\n"
        f'    asm volatile("{opcode} {listed};" : "={TYPES[result][1]}"(r) : {given});\n    put(out + i, n, r);\n'
    )
    return Case(name, name, kernel(name, body), result, pool or letters, rule or exact())


def whole_case(name, body, result, pool, rule=None):
    """A case whose kernel reads its words itself."""
    return Case(name, name, kernel(name, body), result, pool, rule or exact())


def with_ftz(opcode, signature, rule, pool=None):
    """The instruction with and without .ftz."""
    return [ptx(opcode, signature, rule, pool), ptx(opcode.replace(".f32", ".ftz.f32"), signature, rule, pool)]


def angle_error(x):
    """PTX ISA, sin and cos: 2^-20.5 within 2 pi, 2^-14.7 within 100 pi; beyond, nothing is promised."""
    return np.where(np.abs(x[0]) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7)


def approximations():
    isa = "PTX ISA, "
    yield from with_ftz("ex2.approx.f32", "f:f", ulps(2, isa + "ex2: 2 ulp"))
    near_one = Rule(
        isa + "lg2: absolute 2^-22 in (0.5, 2), relative 2^-22 elsewhere",
        lambda x, value: np.where((x[0] > 0.5) & (x[0] < 2), 2.0**-22, 2.0**-22 * np.abs(value)) + ulp_of(value),
    )
    yield from with_ftz("lg2.approx.f32", "f:f", near_one)
    yield from with_ftz("rcp.approx.f32", "f:f", ulps(1, isa + "rcp.approx: 1 ulp"))
    yield from with_ftz("sqrt.approx.f32", "f:f", relative(2.0**-23, isa + "sqrt.approx: relative 2^-23"))
    yield from with_ftz("rsqrt.approx.f32", "f:f", relative(2.0**-22.4, isa + "rsqrt.approx: relative 2^-22.4"))
    yield from with_ftz(
        "sin.approx.f32", "f:f", absolute(angle_error, isa + "sin: 2^-20.5 to 2 pi, 2^-14.7 to 100 pi"), "f angle"
    )
    yield from with_ftz(
        "cos.approx.f32", "f:f", absolute(angle_error, isa + "cos: 2^-20.5 to 2 pi, 2^-14.7 to 100 pi"), "f angle"
    )
    yield ptx("tanh.approx.f32", "f:f", relative(2.0**-11, isa + "tanh.approx: relative 2^-11"))
    yield from with_ftz("rcp.rn.f32", "f:f", exact())
    yield from with_ftz("sqrt.rn.f32", "f:f", exact())


def conversions():
    for opcode, signature in [
        ("cvt.rna.tf32.f32", "u:f"), ("cvt.rn.f16x2.f32", "G:ff"), ("cvt.rn.bf16x2.f32", "E:ff"),
        ("cvt.rn.relu.f16x2.f32", "G:ff"), ("cvt.rn.relu.bf16x2.f32", "E:ff"), ("cvt.rz.f16x2.f32", "G:ff"),
        ("cvt.rz.bf16x2.f32", "E:ff"), ("cvt.rn.f16.f32", "g:f"), ("cvt.rz.f16.f32", "g:f"), ("cvt.rn.bf16.f32", "e:f"),
        ("cvt.f32.f16", "f:g"), ("cvt.rn.f32.s32", "f:i"), ("cvt.rn.f32.u32", "f:u"), ("cvt.rzi.s32.f32", "i:f"),
        ("cvt.rni.s32.f32", "i:f"), ("cvt.rmi.s32.f32", "i:f"), ("cvt.rpi.s32.f32", "i:f"), ("cvt.rzi.u32.f32", "u:f"),
        ("cvt.rni.u32.f32", "u:f"), ("cvt.sat.f32.f32", "f:f"), ("cvt.rni.f32.f32", "f:f"), ("cvt.rzi.f32.f32", "f:f"),
    ]:  # fmt: skip
        yield ptx(opcode, signature)


def arithmetic():
    for opcode in ("add", "sub", "mul"):
        for options in (".f32", ".rn.f32", ".ftz.f32", ".sat.f32", ".rn.ftz.sat.f32"):
            yield ptx(opcode + options, "f:ff")
    for options in (".rn.f32", ".rn.ftz.f32", ".rn.sat.f32"):
        yield ptx("fma" + options, "f:fff")
    for opcode in ("min", "max"):
        yield from with_ftz(f"{opcode}.f32", "f:ff", exact())
        for options in (".NaN.f32", ".ftz.NaN.f32"):
            yield ptx(opcode + options, "f:ff")
        yield ptx(f"{opcode}.s32", "i:ii")
        yield ptx(f"{opcode}.u32", "u:uu")
    for opcode in ("abs", "neg"):
        yield from with_ftz(f"{opcode}.f32", "f:f", exact())
        yield ptx(f"{opcode}.s32", "i:i")
    for opcode, signature in [
        ("add.s32", "i:ii"), ("sub.u32", "u:uu"), ("mul.lo.s32", "i:ii"), ("mul.lo.u32", "u:uu"), ("mul.hi.s32", "i:ii"),
        ("mul.hi.u32", "u:uu"), ("mul.wide.u32", "l:uu"), ("mul.wide.s32", "l:ii"), ("mad.lo.s32", "i:iii"),
        ("mad.lo.u32", "u:uuu"), ("and.b32", "u:uu"), ("or.b32", "u:uu"), ("xor.b32", "u:uu"), ("not.b32", "u:u"),
        ("popc.b32", "u:u"), ("clz.b32", "u:u"), ("brev.b32", "u:u"), ("prmt.b32", "u:uuu"), ("dp4a.s32.s32", "i:iii"),
        ("dp4a.u32.u32", "u:uuu"),
    ]:  # fmt: skip
        yield ptx(opcode, signature)
    for opcode in ("shl.b32", "shr.u32"):
        yield ptx(opcode, "u:uu", pool="uu shift")
    yield ptx("shr.s32", "i:iu", pool="uu shift")
    for opcode in ("shf.l.wrap.b32", "shf.l.clamp.b32", "shf.r.wrap.b32", "shf.r.clamp.b32"):
        yield ptx(opcode, "u:uuu", pool="uuu shift")
    yield ptx("bfe.u32", "u:uuu", pool="uuu field")
    yield ptx("bfe.s32", "i:iuu", pool="uuu field")
    yield ptx("bfi.b32", "u:uuuu", pool="uuuu field")
    yield ptx("lop3.b32", "u:uuu", arguments="%0, %1, %2, %3, 0xe8", name="ptx_lop3_majority")
    yield ptx("lop3.b32", "u:uuu", arguments="%0, %1, %2, %3, 0x96", name="ptx_lop3_parity")
    for comparison in ("eq", "lt", "ge"):
        for kind, letter in (("f32", "f"), ("s32", "i"), ("u32", "u")):
            name = f"ptx_setp_{comparison}_{kind}"
            body = (
                f"{operands(letter * 2)}    unsigned r;\n"
                f'    asm volatile("{{ .reg .pred p; setp.{comparison}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p; }}"\n'
                f'                 : "=r"(r) : "{TYPES[letter][1]}"(a), "{TYPES[letter][1]}"(b));\n    put(out + i, n, r);\n'
            )
            yield Case(name, name, kernel(name, body), "u", letter * 2, exact())
    body = (
        operands("uu") + "    unsigned low, high;\n"
        '    asm volatile("{ .reg .b64 t; mov.b64 t, {%2, %3}; shl.b64 t, t, 4; mov.b64 {%0, %1}, t; }"\n'
        '                 : "=r"(low), "=r"(high) : "r"(a), "r"(b));\n    out[i] = low, out[n + i] = high;\n'
    )
    yield whole_case("ptx_mov_b64", body, "uu", "uu")


def half_arithmetic(element, letters):
    """Instructions for numbers of 16 bits, alone (the second of the letters) and in pairs (the first)."""
    for suffix, letter in ((f".{element}x2", letters[0]), (f".{element}", letters[1])):
        for opcode in ("add", "sub", "mul"):
            for options in ("", ".rn") + ((".sat",) if element == "f16" else ()):
                yield ptx(opcode + options + suffix, f"{letter}:{letter * 2}")
        for options in (".rn", ".rn.relu"):
            yield ptx("fma" + options + suffix, f"{letter}:{letter * 3}")
        for opcode in ("min", "max"):
            for options in ("", ".NaN", ".xorsign.abs"):
                yield ptx(opcode + options + suffix, f"{letter}:{letter * 2}")
        for opcode in ("neg", "abs"):
            yield ptx(opcode + suffix, f"{letter}:{letter}")
        kind = HALF if element == "f16" else {"mantissa": 7, "least": -133}
        power, tangent = (2.0**-9.9, 2.0**-10.987) if element == "f16" else (2.0**-7, 2.0**-8)
        exponential = Rule(
            f"PTX ISA, ex2.approx{suffix}: relative {power:.1e}",
            lambda x, value, power=power, kind=kind: power * np.abs(value) + ulp_of(value, **kind),
        )
        hyperbolic = Rule(
            f"PTX ISA, tanh.approx{suffix}: absolute {tangent:.1e}",
            lambda x, value, tangent=tangent, kind=kind: tangent + ulp_of(value, **kind),
        )
        yield ptx(f"ex2.approx{'.ftz' if element == 'bf16' else ''}{suffix}", f"{letter}:{letter}", exponential)
        yield ptx(f"tanh.approx{suffix}", f"{letter}:{letter}", hyperbolic)


def atomic_pair(element, letter):
    operand_list = '"=r"(seen) : "l"(out + i), "r"({}) : "memory"'
    add = f'    asm volatile("atom.global.add.noftz.{element}x2 %0, [%1], %2;" : {operand_list});\n'
    body = operands(letter * 2) + "    [[maybe_unused]] unsigned seen;\n" + add.format("a") + add.format("b")
    return whole_case(f"ptx_atom_add_{element}x2", body, letter, letter * 2)


def packed():
    """What public kernels use of packed numbers, carries and integer matrices."""
    yield from half_arithmetic("f16", "Gg")
    yield atomic_pair("f16", "G")
    for kind in ("s8", "u8", "s16", "s64", "u64"):
        if kind[1:] in ("8", "16"):
            body = (
                f"{operands('f')}    int r;\n"
                f'    asm volatile("{{ .reg .{kind} t; cvt.rni.sat.{kind}.f32 t, %1; cvt.s32.{kind} %0, t; }}"\n'
                '                 : "=r"(r) : "f"(a));\n'
                "    put(out + i, n, r);\n"
            )
            yield whole_case(f"ptx_cvt_rni_sat_{kind}_f32", body, "i", "f")
        else:
            yield ptx(f"cvt.rni.{kind}.f32", "l:f")
    for kind, letter in (("s32", "i"), ("u32", "u"), ("s64", "l"), ("u64", "l")):
        yield ptx(f"cvt.rzi.{kind}.f64", f"{letter}:d")
    yield ptx("mul.hi.u64", "l:ll")
    yield ptx("mul.hi.s64", "l:ll")
    yield ptx("vabsdiff4.u32.u32.u32.add", "u:uuu")
    chains = {
        "add_32": ("add.cc.u32 %0, %2, %3; addc.u32 %1, %4, %5;", "uuuu"),
        "subtract_32": ("sub.cc.u32 %0, %2, %3; subc.u32 %1, %4, %5;", "uuuu"),
        "multiply_32": ("mad.lo.cc.u32 %0, %2, %3, %4; madc.hi.u32 %1, %2, %3, %5;", "uuuu"),
        "multiply_signed": ("mad.lo.cc.s32 %0, %2, %3, %4; madc.hi.cc.s32 %1, %2, %3, %5; addc.u32 %1, %1, 0;", "uuuu"),
    }
    for name, (text, letters) in chains.items():
        body = (
            operands(letters) + "    unsigned low, high;\n"
            f'    asm volatile("{text}" : "=&r"(low), "=&r"(high) : "r"(a), "r"(b), "r"(c), "r"(d));\n'
            "    out[i] = low, out[n + i] = high;\n"
        )
        yield whole_case(f"ptx_carry_{name}", body, "uu", letters)
    body = "    uint32_t r;\n" + '    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(in[i]));\n'
    yield whole_case("movmatrix", body + "    out[i] = r;\n", "u", "u whole")
    for shape, kinds, a, b in [
        ("m16n8k16", ("s8", "s8"), 2, 1), ("m16n8k16", ("u8", "s8"), 2, 1), ("m16n8k32", ("s8", "s8"), 4, 2),
        ("m16n8k32", ("s8", "u8"), 4, 2), ("m16n8k32", ("s4", "s4"), 2, 1), ("m16n8k64", ("u4", "s4"), 4, 2),
    ]:  # fmt: skip
        for saturated in ("", ".satfinite"):
            opcode = f"mma.sync.aligned.{shape}.row.col{saturated}.s32.{kinds[0]}.{kinds[1]}.s32"
            yield product_of_words(opcode, "r", a, b, 4, "u", "u", exact(), "whole")
    body = (
        operands("iiii") + "    double r[2] = {double(c % 1024), double(d % 1024)};\n"
        '    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"\n'
        '                 : "+d"(r[0]), "+d"(r[1]) : "d"(double(a % 1024)), "d"(double(b % 1024)));\n'
        "    put(out + i, n, r[0]), put(out + 2 * n + i, n, r[1]);\n"
    )
    yield whole_case("mma_m8n8k4_f64", body, "dd", "iiii whole")


def product_of_words(opcode, letter, a, b, c, operand, result, rule, values, kept=(), selector=0):
    """A case of an mma instruction with a, b and c words of operands; `letter` is the asm constraint of the accumulators.

    `kept`: of a sparse one, the values that four bits of its metadata may have.
    """

    def group(first, count):
        return "{" + ", ".join(f"%{first + k}" for k in range(count)) + "}"

    take = "__uint_as_float(in[{} * n + i])" if letter == "f" else "in[{} * n + i]"
    start = ", ".join(take.format(a + b + k) for k in range(c))
    results = ", ".join(f'"+{letter}"(d[{k}])' for k in range(c))
    given = ", ".join(f'"r"(in[{k} * n + i])' for k in range(a + b)) + ', "r"(metadata)' * bool(kept)
    of_c = group(0, c) + (f", %{a + b + c}, {selector}" if kept else "")
    body = (
        f"    const unsigned kept[] = {{{', '.join(map(str, kept))}}};\n    unsigned metadata = 0;\n"
        f"    for (int k = 0; k < 8; ++k) metadata |= kept[(i / 4 + i * 5 + k * 7) % {len(kept)}] << 4 * k;\n"
        if kept
        else ""
    ) + (
        f"    {'float' if letter == 'f' else 'uint32_t'} d[{c}] = {{{start}}};\n"
        f'    asm volatile("{opcode} {group(0, c)}, {group(c, a)}, {group(c + a, b)}, {of_c};" : {results} : {given});\n'
        f"    for (int k = 0; k < {c}; ++k) put(out + k * n + i, n, d[k]);\n"
    )
    name = opcode.removeprefix("mma.sync.aligned.").replace("mma.sp::ordered_metadata.sync.aligned", "sparse").replace(".", "_")
    return whole_case(f"mma_{name}", body, result * c, f"{operand * (a + b)}{result * c} {values}", rule)


def sparse():
    """Products with a sparse A, and what else compute capability 9.0 has for kernels that few write."""
    for shape, depth, kind, words, accumulator in [
        ("m16n8k16", 16, "f16", 2, "f32"), ("m16n8k32", 32, "f16", 4, "f32"), ("m16n8k32", 32, "f16", 4, "f16"),
        ("m16n8k32", 32, "bf16", 4, "f32"), ("m16n8k8", 8, "tf32", 2, "f32"), ("m16n8k16", 16, "tf32", 4, "f32"),
    ]:  # fmt: skip
        operand, result = {"f16": "G", "bf16": "E", "tf32": "f"}[kind], "f" if accumulator == "f32" else "G"
        opcode = f"mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{accumulator}.{kind}.{kind}.{accumulator}"
        kept = (4, 14) if kind == "tf32" else (4, 8, 9, 12, 13, 14)
        yield product_of_words(
            opcode, "f" if result == "f" else "r", words, words, 4 if result == "f" else 2, operand, result,
            product_rule(depth, result == "G"), "mixed", kept, selector=1,
        )  # fmt: skip
    body = (
        operands("llll")
        + "    unsigned long long x, y;\n    __shared__ ulonglong2 cell[64];\n    cell[threadIdx.x] = make_ulonglong2(a, b);\n"
        '    asm volatile("{ .reg .b128 e, v, s; mov.b128 e, {%2, %3}; mov.b128 v, {%4, %5};\\n"\n'
        '                 "atom.cas.b128 s, [%6], e, v; mov.b128 {%0, %1}, s; }"\n'
        '                 : "=l"(x), "=l"(y)\n'
        '                 : "l"(a), "l"(a & 1 ? b : b + 1), "l"(c), "l"(d), "l"(&cell[threadIdx.x]) : "memory");\n'
        "    put(out + i, n, x), put(out + 2 * n + i, n, y);\n"
        "    put(out + 4 * n + i, n, cell[threadIdx.x].x), put(out + 6 * n + i, n, cell[threadIdx.x].y);\n"
    )
    yield whole_case("ptx_atom_cas_b128", body, "llll", "llll")
    body = operands("uu") + '    out[i] = a;\n    if (b & 1) asm volatile("exit;");\n    out[i] = b;\n'
    yield whole_case("ptx_exit", body, "u", "uu")


def eight_bits():
    """Conversions and products of fp8, and arithmetic of bfloat16, which compute capability 9.0 has."""
    yield from half_arithmetic("bf16", "Ee")
    yield atomic_pair("bf16", "E")
    for kind in ("e4m3", "e5m2"):
        for relu in ("", ".relu"):
            yield ptx(f"cvt.rn.satfinite{relu}.{kind}x2.f32", "s:ff")
            yield ptx(f"cvt.rn{relu}.f16x2.{kind}x2", "G:s")
        body = (
            f"{operands('G')}    unsigned short r;\n"
            f'    asm volatile("cvt.rn.satfinite.{kind}x2.f16x2 %0, %1;" : "=h"(r) : "r"(a));\n    put(out + i, n, r);\n'
        )
        yield whole_case(f"ptx_cvt_{kind}x2_f16x2", body, "s", "G")
    for kinds in (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")):
        opcode = f"mma.sync.aligned.m16n8k32.row.col.f32.{kinds[0]}.{kinds[1]}.f32"
        # The sums keep 13 bits behind the largest term's first (measured for Hopper's fp8 by others).
        rule = Rule("mma of fp8: 33 times 2^-13 of |c| + sum |a b|", lambda magnitude, value: 33 * 2.0**-13 * magnitude)
        yield product_of_words(opcode, "f", 4, 2, 4, "q", "f", rule, "mixed")


def float_intrinsics():
    guide = "CUDA C++ Programming Guide, intrinsic functions: "
    for name in ("fadd", "fsub", "fmul", "fdiv"):
        for rounding in ("rn", "rz", "ru", "rd"):
            yield call(f"__{name}_{rounding}(a, b)", "f:ff")
    for rounding in ("rn", "rz", "ru", "rd"):
        yield call(f"__fmaf_{rounding}(a, b, c)", "f:fff")
        yield call(f"__fsqrt_{rounding}(a)", "f:f")
        yield call(f"__frcp_{rounding}(a)", "f:f")
    yield call("__frsqrt_rn(a)", "f:f")
    for name, letters in (("dadd", "dd"), ("dsub", "dd"), ("dmul", "dd"), ("ddiv", "dd")):
        yield call(f"__{name}_rn(a, b)", f"d:{letters}")
    yield call("__fma_rn(a, b, c)", "d:ddd")
    yield call(
        "__expf(a)", "f:f", ulps(lambda x: 2 + np.floor(np.abs(1.173 * x[0])), guide + "2 + floor(|1.173 x|) ulp"), "f exp"
    )
    yield call(
        "__exp10f(a)", "f:f", ulps(lambda x: 2 + np.floor(np.abs(2.97 * x[0])), guide + "2 + floor(|2.97 x|) ulp"), "f exp"
    )

    def logarithm(name, error, count):
        why = f"{guide}{name}: absolute 2^{error} in [0.5, 2], {count} ulp elsewhere"

        def bound(x, value):
            return np.where((x[0] >= 0.5) & (x[0] <= 2), 2.0**error, count * ulp_of(value)) + ulp_of(value)

        return call(f"__{name}(a)", "f:f", Rule(why, bound))

    yield logarithm("logf", -21.41, 3)
    yield logarithm("log2f", -22, 2)
    yield logarithm("log10f", -24, 3)
    yield call("__sinf(a)", "f:f", absolute(lambda x: 2.0**-21.41, guide + "__sinf: 2^-21.41 in [-pi, pi]"), "f half turn")
    yield call("__cosf(a)", "f:f", absolute(lambda x: 2.0**-21.19, guide + "__cosf: 2^-21.19 in [-pi, pi]"), "f half turn")
    division = ulps(2, guide + "__fdividef: 2 ulp for 2^-126 <= |y| <= 2^126")
    yield call("__fdividef(a, b)", "f:ff", division, "ff division")
    yield call("__saturatef(a)", "f:f")


def math_functions():
    guide = "CUDA C++ Programming Guide, mathematical functions: "
    for name, count in {
        "expf": 2, "exp2f": 2, "exp10f": 2, "expm1f": 1, "logf": 1, "log2f": 1, "log10f": 2, "log1pf": 1, "rsqrtf": 2,
        "cbrtf": 1, "rcbrtf": 1, "sinf": 2, "cosf": 2, "tanf": 4, "sinpif": 1, "cospif": 1, "asinf": 2, "acosf": 2, "atanf": 2,
        "sinhf": 3, "coshf": 2, "tanhf": 2, "erff": 2, "erfcf": 4, "normcdff": 5,
    }.items():  # fmt: skip
        yield call(f"{name}(a)", "f:f", ulps(count + 2 * (name in ("erfcf", "normcdff")), f"{guide}{name}: {count} ulp"))
    for name, count in {"powf": 4, "hypotf": 3, "rhypotf": 2, "atan2f": 3}.items():
        yield call(f"{name}(a, b)", "f:ff", ulps(count, f"{guide}{name}: {count} ulp"))
    for name in ("sqrtf", "fabsf", "floorf", "ceilf", "truncf", "rintf", "nearbyintf", "roundf"):
        yield call(f"{name}(a)", "f:f")
    for name in ("fminf", "fmaxf", "fmodf", "copysignf", "fdimf"):
        yield call(f"{name}(a, b)", "f:ff")
    yield call("fmaf(a, b, c)", "f:fff")
    yield call("min(a, b)", "i:ii", name="min_int")
    yield call("max(a, b)", "u:uu", name="max_unsigned")
    yield call("min(a, b)", "f:ff", name="min_float")
    yield call("max(a, b)", "f:ff", name="max_float")
    yield call("a / b", "f:ff", name="divide")


def integer_intrinsics():
    for rounding in ("rn", "rz", "rd", "ru"):
        yield call(f"__float2int_{rounding}(a)", "i:f")
        yield call(f"__float2uint_{rounding}(a)", "u:f")
    for name, signature in {
        "float2ll": "l:f", "float2ull": "l:f", "half2ll": "l:h", "half2ull": "l:h", "half2int": "i:h",
        "double2int": "i:d", "double2uint": "u:d", "double2ll": "l:d", "double2ull": "l:d",
    }.items():  # fmt: skip
        yield call(f"__{name}_rz(a)", signature)
    yield call("__int2float_rn(a)", "f:i")
    yield call("__uint2float_rn(a)", "f:u")
    yield call("__ll2float_rn((long long)a)", "f:l")
    yield call("__double2float_rn(a)", "f:d")
    for name in ("popc", "clz", "ffs", "brev"):
        yield call(f"__{name}(a)", "u:u")
    for name in ("popcll", "clzll", "ffsll"):
        yield call(f"__{name}(a)", "i:l")
    for name, signature in {
        "mulhi": "i:ii", "umulhi": "u:uu", "mul24": "i:ii", "umul24": "u:uu", "byte_perm": "u:uuu", "dp4a": "i:iii",
    }.items():  # fmt: skip
        yield call(f"__{name}({', '.join('abc'[: len(signature) - 2])})", signature)
    yield call("__dp4a(a, b, c)", "u:uuu", name="dp4a_unsigned")
    yield call("__funnelshift_l(a, b, c)", "u:uuu", pool="uuu shift")
    yield call("__funnelshift_r(a, b, c)", "u:uuu", pool="uuu shift")
    for name, expression in {
        "atomicAdd": "b", "atomicSub": "b", "atomicMin": "b", "atomicMax": "b", "atomicAnd": "b", "atomicOr": "b",
        "atomicXor": "b", "atomicExch": "b", "atomicInc": "b", "atomicDec": "b", "atomicCAS": "a & 1 ? a : b, b",
    }.items():  # fmt: skip
        body = f"{operands('uu')}    out[i] = a;\n    out[n + i] = {name}(&out[i], {expression});\n"
        yield whole_case(name, body, "uu", "uu")
    body = operands("ff") + "    float* cell = (float*)out + i;\n    *cell = a;\n    const float old = atomicAdd(cell, b);\n"
    yield whole_case("atomicAdd_float", body + "    out[n + i] = __float_as_uint(old);\n", "ff", "ff")


def half_intrinsics():
    one_ulp = ulps(1, "CUDA Math API, half functions: 1 ulp", **HALF)
    for letter, pair, name in (("h", "H", "half"), ("b", "B", "bfloat16")):
        for function in ("hadd", "hsub", "hmul", "hdiv", "hmax", "hmin"):
            yield call(f"__{function}(a, b)", f"{letter}:{letter * 2}", name=f"{function}_{name}")
        for function in ("heq", "hne", "hlt", "hle", "hgt", "hge"):
            yield call(f"__{function}(a, b)", f"i:{letter * 2}", name=f"{function}_{name}")
        for function in ("hneg", "habs"):
            yield call(f"__{function}(a)", f"{letter}:{letter}", name=f"{function}_{name}")
        yield call("__hisnan(a)", f"i:{letter}", name=f"hisnan_{name}")
        yield call("__hfma(a, b, c)", f"{letter}:{letter * 3}", name=f"hfma_{name}")
        for function in ("hadd2", "hsub2", "hmul2", "hmax2", "hmin2"):
            yield call(f"__{function}(a, b)", f"{pair}:{pair * 2}", name=f"{function}_{name}")
        for function in ("heq2", "hne2", "hlt2", "hle2", "hgt2", "hge2"):
            yield call(f"__{function}(a, b)", f"{pair}:{pair * 2}", name=f"{function}_{name}")
        yield call("__hfma2(a, b, c)", f"{pair}:{pair * 3}", name=f"hfma2_{name}")
        for operator, word in (("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "by")):
            yield call(f"a {operator} b", f"{letter}:{letter * 2}", name=f"{name}_{word}")
    for function in ("hexp", "hlog", "hsqrt", "hrsqrt", "hrcp"):
        yield call(f"{function}(a)", "h:h", one_ulp)
    for function, signature in {
        "float2half": "h:f", "float2half_rn": "h:f", "double2half": "h:d", "half2float": "f:h", "floats2half2_rn": "H:ff",
        "float2half2_rn": "H:f", "low2float": "f:H", "high2float": "f:H", "low2half": "h:H", "high2half": "h:H",
        "halves2half2": "H:hh", "half2half2": "H:h", "int2half_rn": "h:i", "half2int_rn": "i:h",
        "float2bfloat16": "b:f", "float2bfloat16_rn": "b:f", "bfloat162float": "f:b", "floats2bfloat162_rn": "B:ff",
        "float2bfloat162_rn": "B:f", "halves2bfloat162": "B:bb", "bfloat162bfloat162": "B:b", "low2bfloat16": "b:B",
        "high2bfloat16": "b:B",
    }.items():  # fmt: skip
        yield call(f"__{function}({', '.join('abc'[: len(signature) - 2])})", signature)


# ---- cases of a warp


def warps():
    def exchange(name, expression, result="u", pool="uu"):
        return whole_case(name, f"{operands('uu')}    put(out + i, n, {expression});\n", result, pool)

    for width in (32, 16, 8):
        yield exchange(f"shfl_{width}", f"__shfl_sync(0xffffffffu, a, (int)(b % 64u) - 16, {width})")
        yield exchange(f"shfl_up_{width}", f"__shfl_up_sync(0xffffffffu, a, 3u, {width})")
        yield exchange(f"shfl_down_{width}", f"__shfl_down_sync(0xffffffffu, a, 5u, {width})")
        yield exchange(f"shfl_xor_{width}", f"__shfl_xor_sync(0xffffffffu, a, 9, {width})")
    yield exchange("ballot", "__ballot_sync(0xffffffffu, a & 1)")
    yield exchange("any", "__any_sync(0xffffffffu, (a & 31) == 3)")
    yield exchange("all", "__all_sync(0xffffffffu, (a & 31) != 3)")
    yield exchange("match_any", "__match_any_sync(0xffffffffu, a & 3)")
    for name, value in (
        ("add", "a"),
        ("min", "a"),
        ("max", "a"),
        ("and", "~(1u << a % 32)"),
        ("or", "1u << a % 32"),
        ("xor", "a"),
    ):
        yield exchange(f"reduce_{name}", f"__reduce_{name}_sync(0xffffffffu, {value})")
    for name in ("add", "min", "max"):
        yield exchange(f"reduce_{name}_int", f"__reduce_{name}_sync(0xffffffffu, (int)a)")
    body = operands("uu") + "    int same;\n    out[i] = __match_all_sync(0xffffffffu, i / 32 % 2 ? a : 7u, &same);\n"
    yield whole_case("match_all", body + "    out[n + i] = same;\n", "uu", "uu")
    body = operands("uu") + (
        "    unsigned r = 0;\n"
        "    if (i & 1) r = __shfl_sync(0xaaaaaaaau, a, 7) + __ballot_sync(0xaaaaaaaau, b & 1);\n"
        "    put(out + i, n, r);\n"
    )
    yield whole_case("shfl_of_half_a_warp", body, "u", "uu")
    body = (
        operands("uu") + "    out[i] = __syncthreads_count(a & 1);\n"
        "    out[n + i] = __syncthreads_or((a & 63) == 5) * 2 + __syncthreads_and((a & 63) != 5);\n"
    )
    yield whole_case("syncthreads_votes", body, "uu", "uu")


def matrix_moves():
    for count in (1, 2, 4):
        for transposed in ("", ".trans"):
            registers = ", ".join(f"%{k}" for k in range(count))
            suffix = f"x{count}{transposed.replace('.', '_')}"
            address = f"shared_address(tile + 128 * (threadIdx.x / 32) + 4 * (threadIdx.x % {8 * count}))"
            # A warp's four matrices: lane l brings row l of 16 bytes, which is its own four words.
            fill = (
                "    __shared__ alignas(16) uint32_t tile[256];\n"
                "    for (int k = 0; k < 4; ++k) tile[4 * threadIdx.x + k] = in[k * n + i];\n    __syncthreads();\n"
                "    uint32_t r[4] = {};\n"
            )
            outputs = ", ".join(f'"=r"(r[{k}])' for k in range(count))
            yield whole_case(
                f"ldmatrix_{suffix}",
                f'{fill}    asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 "\n'
                f'                 "{{{registers}}}, [%{count}];"\n'
                f'                 : {outputs} : "r"({address}) : "memory");\n'
                "    for (int k = 0; k < 4; ++k) out[k * n + i] = r[k];\n",
                "uuuu",
                "uuuu",
            )
            registers = ", ".join(f"%{k + 1}" for k in range(count))
            inputs = ", ".join(f'"r"(in[{k} * n + i])' for k in range(count))
            yield whole_case(
                f"stmatrix_{suffix}",
                "    __shared__ alignas(16) uint32_t tile[256];\n"
                "    for (int k = 0; k < 4; ++k) tile[4 * threadIdx.x + k] = 0;\n    __syncthreads();\n"
                f'    asm volatile("stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%0], {{{registers}}};"\n'
                f'                 :: "r"({address}), {inputs} : "memory");\n'
                "    __syncthreads();\n    for (int k = 0; k < 4; ++k) out[k * n + i] = tile[4 * threadIdx.x + k];\n",
                "uuuu",
                "uuuu",
            )


def product_rule(depth, half_result=False):
    """For matrix products. `magnitude` is |c| + sum |a b|, which the test computes with the same kernel from absolute values.

    The PTX ISA does not say how mma rounds. Measurements (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS
    2021) say: products are exact; they and the accumulator are aligned to the largest of them and cut off below its 24th
    bit at the earliest, so each of the depth + 1 terms loses less than 2^-23 of the magnitude; the sum is cut off to a float.
    The emulator adds in float, which loses up to depth + 1 times 2^-24. A half result is rounded once more.
    """
    share = 1.5 * (depth + 2) * 2.0**-23

    def bound(magnitude, value):
        return share * magnitude + (ulp_of(value, **HALF) if half_result else 0.0)

    return Rule(f"mma: {share:.1e} of |c| + sum |a b|" + (" and one ulp of half" if half_result else ""), bound)


def products():
    for shape, depth, kind, accumulator, a, b, c in [
        ("m16n8k4", 4, "tf32", "f32", 2, 1, 4),
        ("m16n8k8", 8, "tf32", "f32", 4, 2, 4),
        ("m16n8k8", 8, "f16", "f32", 2, 1, 4),
        ("m16n8k8", 8, "f16", "f16", 2, 1, 2),
        ("m16n8k8", 8, "bf16", "f32", 2, 1, 4),
        ("m16n8k16", 16, "f16", "f32", 4, 2, 4),
        ("m16n8k16", 16, "f16", "f16", 4, 2, 2),
        ("m16n8k16", 16, "bf16", "f32", 4, 2, 4),
    ]:
        letter = "f" if accumulator == "f32" else "r"

        def group(first, count):
            return "{" + ", ".join(f"%{first + k}" for k in range(count)) + "}"

        def given(first, count):
            return ", ".join(f'"r"(in[{first + k} * n + i])' for k in range(count))

        take = "__uint_as_float(in[{} * n + i])" if letter == "f" else "in[{} * n + i]"
        start = ", ".join(take.format(a + b + k) for k in range(c))
        results = ", ".join(f'"+{letter}"(d[{k}])' for k in range(c))
        body = (
            f"    {'float' if letter == 'f' else 'uint32_t'} d[{c}] = {{{start}}};\n"
            f'    asm volatile("mma.sync.aligned.{shape}.row.col.{accumulator}.{kind}.{kind}.{accumulator} '
            f'{group(0, c)}, {group(c, a)}, {group(c + a, b)}, {group(0, c)};"\n'
            f"                 : {results} : {given(0, a)}, {given(a, b)});\n"
            f"    for (int k = 0; k < {c}; ++k) put(out + k * n + i, n, d[k]);\n"
        )
        function = f"mma_{shape}_{kind}_{accumulator}"
        letters = {"tf32": "f", "f16": "G", "bf16": "E"}[kind] * (a + b) + ("f" if letter == "f" else "G") * c
        for values in ("integers", "mixed", "edges"):
            rule = exact() if values == "integers" else product_rule(depth, accumulator == "f16")
            text = kernel(function, body)
            yield Case(f"{function}_{values}", function, text, ("f" if letter == "f" else "G") * c, f"{letters} {values}", rule)


# ---- Hopper: matrix products of four warps, and tiles that the tensor memory accelerator places

HOPPER_PRELUDE = r"""
#include <cuda.h>

__device__ uint64_t descriptor(const void* tile, int leading, int stride, int swizzle) {
    return (uint64_t)(shared_address(tile) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)swizzle << 62;
}
__device__ void tiles_are_written() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ void wait_for_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#define EIGHT(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
__device__ void product_from_registers(float (&d)[8], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, 1, 1, 1;"
                 : EIGHT(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ void product_tf32(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1;"
                 : EIGHT(d) : "l"(a), "l"(b));
}
template <int TRANSPOSED>
__device__ void product_f16(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "%8, %9, 1, 1, 1, %10, %10;"
                 : EIGHT(d) : "l"(a), "l"(b), "n"(TRANSPOSED));
}
// Word `w` of a tile whose rows are 8 words long: where it lies without swizzle, in pieces of 8 rows x 16 bytes.
__device__ int plain_place(int w, int rows) {
    const int row = w / 8, word = w % 8;
    return word / 4 * rows * 4 + row * 4 + word % 4;
}
// Word `w` of a tile of halves, k-th row after k-th row of `length` values: in pieces of 8 k x 8 values.
__device__ int transposed_place(int w, int length) {
    const int k = w / (length / 2), value = w % (length / 2) * 2;
    return k / 8 * length * 4 + value / 8 * 32 + k % 8 * 4 + value % 8 / 2;
}

__device__ void barrier_init(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void barrier_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes));
}
__device__ void barrier_wait(uint64_t* barrier, int parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra ready;\nbra again;\nready:\n}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
__device__ void load_tile(void* tile, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(tile)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}
"""


def warpgroup_kernel(name, shared, fill, multiply, start):
    body = (
        f"    __shared__ alignas(1024) uint32_t {shared};\n    const int t = threadIdx.x;\n{fill}"
        f"    float d[8];\n    for (int k = 0; k < 8; ++k) d[k] = __uint_as_float(in[({start} + k) * n + i]);\n"
        f"    tiles_are_written();\n{multiply}    wait_for_products();\n"
        "    for (int k = 0; k < 8; ++k) put(out + k * n + i, n, d[k]);\n"
    )
    return kernel(name, body)


def warpgroup_products():
    a_plain = "    for (int k = 0; k < 4; ++k) a[plain_place(4 * t + k, 64)] = in[k * n + i];\n"
    b_plain = "    b[plain_place(t, 16)] = in[4 * n + i];\n"
    kernels = {
        "wgmma_tf32_registers": (
            "b[128]",
            b_plain + "    uint32_t a[4];\n    for (int k = 0; k < 4; ++k) a[k] = in[k * n + i];\n",
            "    product_from_registers(d, a, descriptor(b, 256, 128, 0));\n",
            "f", 4, 1, 8,
        ),
        "wgmma_tf32_shared": (
            "a[512], b[128]", a_plain + b_plain,
            "    product_tf32(d, descriptor(a, 1024, 128, 0), descriptor(b, 256, 128, 0));\n", "f", 4, 1, 8,
        ),
        "wgmma_f16_shared": (
            "a[512], b[128]", a_plain + b_plain,
            "    product_f16<0>(d, descriptor(a, 1024, 128, 0), descriptor(b, 256, 128, 0));\n", "G", 4, 1, 16,
        ),
        "wgmma_f16_transposed": (
            "a[512], b[128]",
            "    for (int k = 0; k < 4; ++k) a[transposed_place(4 * t + k, 64)] = in[k * n + i];\n"
            "    b[transposed_place(t, 16)] = in[4 * n + i];\n",
            "    product_f16<1>(d, descriptor(a, 1024, 128, 0), descriptor(b, 256, 128, 0));\n", "G", 4, 1, 16,
        ),
        # B has rows of 128 bytes, whose 16-byte pieces are swizzled; four steps along them.
        "wgmma_tf32_swizzled": (
            "b[512]",
            "    uint32_t a[16];\n    for (int k = 0; k < 16; ++k) a[k] = in[k * n + i];\n"
            "    for (int k = 0; k < 4; ++k) {\n        const int w = 4 * t + k, row = w / 32, word = w % 32;\n"
            "        b[row * 32 + ((word / 4) ^ (row % 8)) * 4 + word % 4] = in[(16 + k) * n + i];\n    }\n",
            "    for (int k = 0; k < 4; ++k) product_from_registers(d, a + 4 * k, descriptor(b + 8 * k, 16, 1024, 1));\n",
            "f", 16, 4, 32,
        ),
    }  # fmt: skip
    for name, (shared, fill, multiply, letter, a, b, depth) in kernels.items():
        text = warpgroup_kernel(name, shared, fill, multiply, a + b)
        for values in ("integers", "mixed", "edges"):
            rule = exact() if values == "integers" else product_rule(depth)
            pool = f"{letter * (a + b)}ffffffff {values}"
            yield Case(f"{name}_{values}", name, text, "f" * 8, pool, rule, 128)


# The input is a matrix of 16 x 48 words. Three boxes of 16 rows are loaded: one begins left of it and above it, one lies
# inside, one ends outside; what is outside is filled with zeros.
TENSOR_TILES = r"""
__global__ void tiles_of_tensor(uint32_t* out, const __grid_constant__ CUtensorMap map, int columns) {
    __shared__ alignas(1024) uint32_t tile[512];
    __shared__ alignas(8) uint64_t barrier;
    if (threadIdx.x == 0) barrier_init(&barrier);
    __syncthreads();
    for (int box = 0; box < 3; ++box) {
        if (threadIdx.x == 0) {
            barrier_expect(&barrier, columns * 16 * 4);
            load_tile(tile, &map, box * 16 - 4, box == 2 ? 5 : box - 1, &barrier);
        }
        barrier_wait(&barrier, box & 1);
        for (int k = 0; k < columns / 8; ++k) out[(box * 4 + k) * 128 + threadIdx.x] = tile[k * 128 + threadIdx.x];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
    }
}

static void run_tiles(uint32_t* out, const uint32_t* in, int columns, CUtensorMapSwizzle swizzle, cudaStream_t stream) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
    CUtensorMap map;
    const cuuint64_t sizes[2] = {48, 16}, pitches[1] = {48 * 4};
    const cuuint32_t box[2] = {(cuuint32_t)columns, 16}, steps[2] = {1, 1};
    reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, (void*)in, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    tiles_of_tensor<<<1, 128, 0, stream>>>(out, map, columns);
}
"""


def tensor_tiles():
    for swizzle, constant, columns in (("none", "NONE", 32), ("32", "32B", 8), ("64", "64B", 16), ("128", "128B", 32)):
        name = f"tma_swizzle_{swizzle}"
        launcher = (
            f'extern "C" void run_{name}(uint32_t* out, const uint32_t* in, int n, cudaStream_t stream) {{\n'
            f"    run_tiles(out, in, {columns}, CU_TENSOR_MAP_SWIZZLE_{constant}, stream);\n}}\n"
        )
        yield Case(name, name, launcher, "u" * 12, "uuuuuu whole", exact(), 0)


# ---- everything

GENERAL = (
    approximations, conversions, arithmetic, packed, float_intrinsics, math_functions, integer_intrinsics, half_intrinsics,
    warps, matrix_moves, products,
)  # fmt: skip
SECTIONS = {
    "general": [case for group in GENERAL for case in group()],
    "hopper": [case for group in (warpgroup_products, tensor_tiles, eight_bits, sparse) for case in group()],
}
PRELUDES = {"general": PRELUDE, "hopper": PRELUDE + HOPPER_PRELUDE + TENSOR_TILES}


# One launch for all kernels: each of its own takes a compiler a while.
LAUNCH = """
typedef void (*Kernel)(uint32_t* out, const uint32_t* in, int n);
void launch(Kernel kernel, int threads, uint32_t* out, const uint32_t* in, int n, cudaStream_t stream) {
    kernel<<<n / threads, threads, 0, stream>>>(out, in, n);
}
"""


def text_of(section):
    """The CUDA text of a section: every kernel, and a launcher run_<function>(out, in, n, stream) for each."""
    parts, seen = [PRELUDES[section], LAUNCH], set()
    for case in SECTIONS[section]:
        if case.function in seen:
            continue
        seen.add(case.function)
        parts.append(case.text)
        if case.threads:
            parts.append(
                f'extern "C" void run_{case.function}(uint32_t* out, const uint32_t* in, int n, cudaStream_t stream) {{\n'
                f"    launch(case_{case.function}, {case.threads}, out, in, n, stream);\n}}\n"
            )
    return "\n".join(parts)


# ---- inputs


def hexadecimal(text):
    return np.array([int(word, 16) for word in text.split()], np.uint32)


# Zeros, the ends of the denormals and of the normals, one and its neighbours, infinity and NaNs, limits of integers, and
# what lies half way between two neighbours of a narrower format, and beside it.
FLOAT_EDGES = hexadecimal("""
    0 1 2 7fffff 800000 800001 3f800000 3f7fffff 3f800001 3f000000 40000000 7f7fffff 7f800000 7fc00000 7f800001 7fffffff
    40490fdb 3fc90fdb 42b17218 42fe0000 43000000 4f000000 4effffff 4f800000 4f7fffff 3fc00000 40200000 40600000 4b000000
    4affffff 477fe000 477ff000 477fefff 38800000 387fffff 33800000 33000000 33000001 3f801000 3f803000 3f800fff 3f801001
    3f808000 3f818000 3f807fff 3f808001 7f7f8000 7f7f7fff 7f7ff000 7f7fefff 1000 fff 8000
""")
HALF_EDGES = hexadecimal("0 1 2 3ff 400 401 3c00 3bff 3c01 4000 7bff 7c00 7e00 7c01 7fff 1400 6400")
BFLOAT_EDGES = hexadecimal("0 1 2 7f 80 81 3f80 3f7f 3f81 4000 7f7f 7f80 7fc0 7f81 7fff 4f00 2f80")
INTEGER_EDGES = hexadecimal("""
    0 1 2 3 1f 20 21 7f 80 ff 7fff 8000 ffff 7fffffff 80000000 80000001 fffffffe ffffffff ffffff 1000000 1000001
    55555555 aaaaaaaa
""")


def float_words(values):
    return np.asarray(values, np.float32).view(np.uint32)


def half_words(values):
    return np.asarray(values, np.float16).view(np.uint16).astype(np.uint32)


def bfloat_words(values):
    return float_words(values) >> 16


def with_edges(words, edges, rng, sign):
    """The words with every edge, of both signs where there is one, strewn over them."""
    edges = np.concatenate([edges, edges | sign]) if sign else edges
    places = rng.permutation(len(words))[: len(edges)]
    words[places] = edges[: len(places)]
    return words


def scaled(rng, n, span):
    """Normal variates of magnitudes spread over 2^-span to 2^span."""
    return rng.standard_normal(n) * np.exp2(rng.uniform(-span, span, n))


def floats(values, rng, n):
    if values == "angle":
        words = float_words(np.where(np.arange(n) % 2, rng.uniform(-100, 100, n), rng.uniform(-2, 2, n)) * np.pi)
        return with_edges(words, float_words([0, 1e-40, 1e-20, np.inf, np.nan, np.pi, np.pi / 2]), rng, 1 << 31)
    if values == "half turn":
        return with_edges(float_words(rng.uniform(-np.pi, np.pi, n)), float_words([0, 1e-40, 1e-20]), rng, 1 << 31)
    if values == "exp":
        words = float_words(np.where(np.arange(n) % 2, rng.uniform(-30, 30, n), rng.uniform(-2, 2, n)))
        return with_edges(words, float_words([0, 1e-40, 1, 100, 1000, np.inf, np.nan]), rng, 1 << 31)
    if values == "division":
        return float_words(scaled(rng, n, 20))
    words = np.where(np.arange(n) % 3 == 0, rng.integers(0, 1 << 32, n, dtype=np.uint32), float_words(scaled(rng, n, 12)))
    return with_edges(words.astype(np.uint32), FLOAT_EDGES, rng, 1 << 31)


def halves(rng, n, as_words, edges):
    words = np.where(np.arange(n) % 2, rng.integers(0, 1 << 16, n, dtype=np.uint32), as_words(scaled(rng, n, 4)))
    return with_edges(words.astype(np.uint32), edges, rng, 1 << 15)


def integers(values, position, rng, n):
    if values == "shift" and position == -1:  # the last operand
        return rng.integers(0, 70, n, dtype=np.uint32)
    if values == "field" and position in (-1, -2):  # where it begins and how long it is
        return rng.integers(0, 40, n, dtype=np.uint32)
    return with_edges(
        rng.integers(0, 1 << 32, n, dtype=np.uint32) >> rng.integers(0, 28, n, dtype=np.uint32), INTEGER_EDGES, rng, 0
    )


def matrix_words(letter, values, rng, n):
    if letter == "q":  # four numbers of fp8 below 2, of either format
        return rng.integers(0, 1 << 32, n, dtype=np.uint32) & 0xBFBFBFBF
    as_words, edges = {
        "f": (float_words, FLOAT_EDGES), "G": (half_words, HALF_EDGES), "E": (bfloat_words, BFLOAT_EDGES),
    }[letter]  # fmt: skip

    def one():
        if values == "integers":
            return as_words(rng.integers(-8, 9, n))
        words = as_words(scaled(rng, n, 4))
        if values == "edges":
            chosen = rng.random(n) < 0.02
            sign = rng.integers(0, 2, n, dtype=np.uint32) << (31 if letter == "f" else 15)
            words = np.where(chosen, rng.choice(edges, n) | sign, words).astype(np.uint32)
        return words

    return one() if letter == "f" else one() | one() << 16


def pool(key):
    """The input words of a pool, of shape (words, n). The key is the letters of the operands, and what kind of values."""
    letters, _, values = key.partition(" ")
    rng = np.random.default_rng([ord(character) for character in key])
    n = 128 if values in ("integers", "mixed", "edges", "whole") or letters == "uuuu" else 256
    rows = []
    for at, letter in enumerate(letters):
        if values in ("integers", "mixed", "edges"):
            rows.append(matrix_words(letter, values, rng, n))
        elif letter == "f":
            rows.append(floats(values, rng, n))
        elif letter in "hg":
            rows.append(halves(rng, n, half_words, HALF_EDGES))
        elif letter in "be":
            rows.append(halves(rng, n, bfloat_words, BFLOAT_EDGES))
        elif letter in "HG":
            rows.append(halves(rng, n, half_words, HALF_EDGES) | halves(rng, n, half_words, HALF_EDGES) << 16)
        elif letter in "BE":
            rows.append(halves(rng, n, bfloat_words, BFLOAT_EDGES) | halves(rng, n, bfloat_words, BFLOAT_EDGES) << 16)
        elif letter == "d":
            doubles = np.where(
                np.arange(n) % 3 == 0, rng.integers(0, 1 << 64, n, dtype=np.uint64).view(np.float64), scaled(rng, n, 12)
            )
            edges = np.array(
                [0, -0.0, 5e-324, 2.3e-308, 1.0, 1.7e308, np.inf, np.nan, 65519.99, 65520.0, 1 + 2**-24, 1 + 2**-11]
            )
            doubles[rng.permutation(n)[: len(edges)]] = edges
            rows.extend(doubles.view(np.uint32).reshape(n, 2).T.copy())
        elif letter == "l":
            rows.extend(integers(values, 0, rng, n) for _ in range(2))
        else:
            rows.append(integers(values, at - len(letters), rng, n))
    if letters in ("ff", "ii", "uu", "hh", "bb"):
        rows[1][::8] = rows[0][::8]  # operands that are equal
    return np.stack(rows)
