"""Every load and store is seen: types, ways to read and write a value, kinds of fault and memories, all crossed.

A kernel for each type and way; its arguments choose the memory and the fault. Elements are read by other threads than those
that have written them (or two threads write one), the last four may be unset, and an index may be one too large.
"""

import contextlib
import ctypes
import itertools
import re

import pytest
import torch

from cuda_emulator import Finding
from cuda_emulator.kernels import KernelLibrary

# A type: what declares it, a number made of its value `v`, and a value made of `i`.
TYPES = {
    "float4": ("", "v.x + v.w", "make_float4(i, 1, 2, 3)"),
    "half": ("", "__half2float(v)", "__float2half(i)"),
    "Padded": ("struct Padded { double value; int index; };", "v.value + v.index", "Padded{1.0, i}"),
    "Box": ("struct Box { float values[6]; };", "v.values[0] + v.values[5]", "Box{{1, 2, 3, 4, 5, float(i)}}"),
}
MORE_TYPES = {
    "Bits": ("struct Bits { unsigned a : 5, b : 11, c : 20; };", "v.a + v.b + v.c", "Bits{3u, 4u, unsigned(i)}"),
    "Best": ("struct Best { float value; int index; };", "v.value + v.index", "Best{1.0f, i}"),
    "float3": ("", "v.x + v.y + v.z", "make_float3(i, 1, 2)"),
    "float": ("", "v", "float(i)"),
    "char": ("", "v", "char(i)"),
    "double": ("", "v", "double(i)"),
    "char3": ("", "v.x + v.z", "make_char3(i, 1, 2)"),
    "float2": ("", "v.x + v.y", "make_float2(i, 1)"),
    "int2": ("", "v.x + v.y", "make_int2(i, 1)"),
    "double2": ("", "v.x + v.y", "make_double2(i, 1)"),
    "double4": ("", "v.x + v.w", "make_double4(i, 1, 2, 3)"),
    "half2": ("", "__low2float(v)", "__float2half2_rn(i)"),
    "__nv_bfloat16": ("", "__bfloat162float(v)", "__float2bfloat16(i)"),
    "Triple": ("struct Triple { float a, b, c; };", "v.a + v.c", "Triple{1, 2, float(i)}"),
    "Four": ("struct Four { float a, b, c, d; };", "v.a + v.d", "Four{1, 2, 3, float(i)}"),
    "Aligned": ("struct alignas(16) Aligned { float a, b, c, d; };", "v.a + v.d", "Aligned{1, 2, 3, float(i)}"),
    "Either": ("union Either { float a; int b; };", "v.b", "Either{float(i)}"),
    "Nested": (
        "struct Corner { float2 at; bool is_set; };\nstruct Nested { Corner corners[3]; char tag; };",
        "v.corners[2].at.y + v.tag",
        "Nested{{{{1, 2}, true}, {{3, float(i)}, false}, {}}, 'x'}",
    ),
    "Derived": (
        "struct Base { float a, b; };\nstruct Derived : Base { float c; };",
        "v.a + v.c",
        "[&] { Derived d; d.a = 1, d.b = 2, d.c = i; return d; }()",
    ),
    "Pair<float>": (
        "template <class A> struct Pair { A a; int b; __device__ Pair() {} __device__ Pair(A a, int b) : a(a), b(b) {} };",
        "v.a + v.b",
        "Pair<float>(1.0f, i)",
    ),
}
READS = {  # of s[j] into `sum`
    "argument": "sum = take(s[j]);",
    "second_argument": "sum = take_second(i, s[j]);",
    "inlined_argument": "sum = take_inlined(s[j]);",
    "reference": "sum = look(s[j]);",
    "pointer": "sum = look(*(s + j));",
    "operator": "sum = Of{0} + s[j];",
    "call_operator": "sum = Of{0}(s[j]);",
    "return": "sum = take([&] { return s[j]; }());",
    "returned_reference": "sum = take(element(s, j));",
    "capture": "sum = [v = s[j]] { return look(v); }();",
    "lambda": "sum = [](T v) { return look(v); }(s[j]);",
    "initialiser": "T v = s[j]; sum = look(v);",
    "braces": "T v{s[j]}; sum = take(v);",
    "aggregate": "Two two = {s[j], s[j]}; sum = look(two.v[1]);",
    "temporary": "sum = take_two(Two{{s[j], s[j]}});",
    "constructor": "sum = Holder(s[j]).held();",
    "conditional": "sum = take(i % 2 ? T(value) : s[j]);",
    "conditional_element": "sum = take(i % 2 ? s[31 - i] : s[j]);",
    "comma": "sum = take((sum += 1, s[j]));",
    "assignment": "T v; v = s[j]; sum = look(v);",
    "array": "T v[2]; v[i % 2] = s[j]; sum = look(v[i % 2]);",
    "memcpy": "T v; memcpy(&v, &s[j], sizeof v); sum = look(v);",
    "template": "sum = forwarded(s[j]);",
    "pack": "sum = packed(1, s[j]);",
    "virtual": "sum = taker->take(s[j]);",
    "function_pointer": "sum = function(s[j]);",
    "recursion": "sum = recursive(s[j], 2);",
    "default_member": "struct { T v; } made{s[j]}; sum = take(made.v);",
    "loop": "int n = 0; for (T v = s[j]; n < 2; ++n) sum += look(v);",  # an unset value could keep it from ending
    "cast": "sum = take(static_cast<const T&>(s[j]));",
    "moved": "sum = take(static_cast<T&&>(s[j]));",
    "first_byte": "sum = *(const char*)&s[j];",
    "member": "sum = s[j]MEMBER;",
    "volatile": "sum = ((volatile T*)s)[j]MEMBER;",
}
WRITES = {  # of s[j]
    "call": "s[j] = make(i);",
    "inlined_call": "s[j] = make_inlined(i);",
    "variable": "s[j] = value;",
    "temporary": "s[j] = T(value);",
    "zero": "s[j] = T{};",
    "conditional": "s[j] = i % 2 ? make(i) : value;",
    "conditional_element": "(i % 2 ? s[j] : s[j]) = make(i);",
    "chain": "T v; v = s[j] = make(i);",
    "returned_reference": "element(s, j) = make(i);",
    "reference": "fill(s[j], i);",
    "pointer": "T* to = &s[j]; *to = make(i);",
    "lambda": "[&] { s[j] = make(i); }();",
    "lambda_result": "s[j] = [&] { return make(i); }();",
    "held": "s[j] = Holder(value).value;",
    "virtual": "s[j] = taker->make(i);",
    "function_pointer": "s[j] = maker(i);",
    "template": "store(&s[j], make(i));",
    "memcpy": "memcpy(&s[j], &value, sizeof value);",
    "memset": "memset(&s[j], 0, sizeof(T));",
    "placement": "new (&s[j]) T(value);",
    "array": "T v[2] = {make(i), make(i)}; s[j] = v[i % 2];",
    "first_byte": "*(char*)&s[j] = 1;",
    "member": "s[j]MEMBER = 1;",
    "volatile": "((volatile T*)s)[j]MEMBER = 1;",
    "increment": "s[j]MEMBER += 1;",
}
MEMBER = re.compile(r"\bv((?:\.\w+|\[\d\])*)")  # which a number is made of
FAULTS = {"race": 1, "bounds": 2, "unset": 3}
KINDS = {"race": "memory race", "bounds": "memory out of bounds", "unset": "uninitialised"}
MEMORIES = {"global": 0, "shared": 1}

HELPERS = """
__device__ __noinline__ float take(T v) { return NUMBER; }
__device__ __noinline__ float take_second(int, T v) { return NUMBER; }
inline __device__ float take_inlined(T v) { return NUMBER; }
__device__ __forceinline__ float look(const T& v) { return NUMBER; }
__device__ __noinline__ T make(int i) { return VALUE; }
inline __device__ T make_inlined(int i) { return VALUE; }
struct Of { float of; __device__ __noinline__ float operator()(T v) const { return NUMBER; } };
__device__ __noinline__ float operator+(Of, T v) { return NUMBER; }
__device__ __noinline__ T& element(T* s, int j) { return s[j]; }
struct Two { T v[2]; };
__device__ __noinline__ float take_two(Two two) { return look(two.v[0]) + look(two.v[1]); }
struct Holder { T value; __device__ Holder(T v) : value(v) {} __device__ float held() { return take(value); } };
template <class U> __device__ float forwarded(U v) { return take(v); }
template <class... U> __device__ float packed(int, U... v) { return (take(v) + ...); }
template <class U> __device__ __forceinline__ void store(U* to, U v) { *to = v; }
__device__ __forceinline__ void fill(T& to, int i) { to = make(i); }
__device__ float recursive(T v, int depth) { return depth ? recursive(v, depth - 1) : take(v); }
struct Taker { virtual __device__ float take(T v) { return NUMBER; } virtual __device__ T make(int i) { return VALUE; } };
struct OtherTaker : Taker { __device__ float take(T v) override { return NUMBER + 1; } };
__device__ void set(T* to, int i) {
    const T v = VALUE;
    for (int at = 0; at < sizeof v; ++at) ((char*)to)[at] = ((const char*)&v)[at];
}
// One for all kernels: each launch takes a compiler some 50 ms.
void launch(void (*kernel)(T*, float*, int, int), T* given, float* out, int fault, int is_shared) {
    kernel<<<1, 32>>>(given, out, fault, is_shared);
}
"""
KERNEL = """
__global__ void NAME(T* given, float* out, int fault, int is_shared) {
    __shared__ T tile[32];
    Taker a; OtherTaker b; Taker* taker = fault > 5 ? &a : &b;
    float (*volatile function)(T) = take; T (*volatile maker)(int) = make;
    T* s = is_shared ? tile : given;
    const int i = threadIdx.x; T value = VALUE; float sum = 0;
    if (i < (fault == 3 ? 28 : 32)) set(s + i, i);
    if (fault != 1) __syncthreads();
    const int j = INDEX + (fault == 2);
    BODY
    out[i] = sum + look(value);
}
"""
INDICES = {"read": "31 - i", "write": "i / (1 + (fault == 1))"}


def text_of(types):
    """The program, and the line of each kernel's access by (type, kind of access, way)."""
    text = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cstring>\n#include <new>\n#line 6\n"
    lines = {}
    for index, (kind, (declaration, number, value)) in enumerate(types.items()):
        text += f"namespace of_{index} {{\n{declaration}\nusing T = {kind};\n"
        text += HELPERS.replace("NUMBER", number).replace("VALUE", value)
        for access, ways in (("read", READS), ("write", WRITES)):
            for way, body in ways.items():
                if "MEMBER" in body and "(" in number:
                    continue  # a type without members of its own
                name = f"{access}_{way}"
                head, tail = KERNEL.replace("NAME", name).replace("INDEX", INDICES[access]).split("BODY")
                text += head.replace("VALUE", value)
                lines[kind, access, way] = text.count("\n") + 1
                text += body.replace("MEMBER", MEMBER.search(number)[1]) + tail
                text += f'extern "C" void k{index}_{name}(T* given, float* out, int fault, int is_shared) '
                text += f"{{ launch({name}, given, out, fault, is_shared); }}\n"
        text += f'extern "C" int size_{index}() {{ return sizeof(T); }}\n}}\n'
    return text, lines


def missed_in(types):
    """(how many faults there are, those that are not found at their line, the findings in kernels without one)"""
    text, lines = text_of(types)
    library = KernelLibrary(text, "check", "accesses")
    count, missed, false_alarms = 0, [], []
    with contextlib.closing(library):
        for (kind, access, way), line in lines.items():
            index = list(types).index(kind)
            bytes_of_all = 32 * library.call(f"size_{index}")
            for memory, fault in itertools.product(MEMORIES, [None, *FAULTS]):
                if fault == "unset" and access == "write":
                    continue
                given = torch.empty(bytes_of_all, dtype=torch.uint8)
                arguments = ctypes.c_int(FAULTS.get(fault, 0)), ctypes.c_int(MEMORIES[memory])
                found = None
                try:
                    library.call(f"k{index}_{access}_{way}", given, torch.empty(32), *arguments)
                except Finding as finding:
                    found = finding
                case = f"{kind}, {access} {way}, {memory} {fault}: {found}"
                if fault is None:
                    false_alarms += [case] if found else []
                    continue
                count += 1
                places = [found.line, *found.callers] if found else []
                if found and found.other:
                    places += [found.other.line, *found.other.callers]
                if not found or KINDS[fault] not in found.kind:
                    missed.append(case)
                elif line not in places:
                    missed.append(f"{case} (not at line {line})")
    return count, missed, false_alarms


@pytest.mark.parametrize("types", [TYPES, pytest.param(MORE_TYPES, marks=pytest.mark.full)], ids=["usual", "more"])
def test_every_access_is_seen(types):
    count, missed, false_alarms = missed_in(types)
    print(f"{count - len(missed)} of {count} found")
    assert not missed, f"{len(missed)} of {count} faults not found:\n" + "\n".join(missed)
    assert not false_alarms, "\n".join(false_alarms)
