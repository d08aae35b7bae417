"""Matrices of a warp and exchanges among its lanes, in PTX."""

from .ptx_operands import OperandError, assign, bits, instruction, taken, words

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


@instruction(
    r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col(?:\.kind::f8f6f4)?\.(f32|f16)\.(?:(tf32|f16|bf16)\.\3|(e4m3|e5m2)\.(e4m3|e5m2))\.\2"
)
def _(match, d, a, b, c):
    count, elements = len(words(d)), [match[3] or match[4], match[3] or match[5]]
    return (
        f"{{ const uint32_t a[] = {bits(words(a))}, b[] = {bits(words(b))}, c[] = {bits(words(c))}; uint32_t r[{count}]; "
        f"::emulator::ptx::mma<::emulator::ptx::{match[1]}, {', '.join('::emulator::ptx::' + each for each in elements)}, "
        f"{str(match[2] == 'f32').lower()}>"
        f"(r, a, b, c, __LINE__); "
        + "".join(f"::emulator::ptx::give({part.text}, r[{i}]);" for i, part in enumerate(d.parts or [d]))
        + " }"
    )


@instruction(
    r"mma\.sp(?:::ordered_metadata)?\.sync\.aligned\.(?:(m16n8k(?:16|32))(?=\S*\.b?f16\.b?f16\.)|(m16n8k(?:8|16))(?=\S*\.tf32\.))"
    r"\.row\.col\.(f32|f16)\.(tf32|f16|bf16)\.\4\.\3"
)
def _(match, d, a, b, c, metadata, selector):
    shape, element = match[1] or match[2], match[4]
    lanes = 4 if shape == ("m16n8k8" if element == "tf32" else "m16n8k16") else 2
    if not selector.text.isalnum() or not 0 <= int(selector.text, 0) < lanes:
        raise OperandError(f"with the sparsity selector {selector.text} (0 to {lanes - 1} are expected)")
    form = [f"::emulator::ptx::{shape}", f"::emulator::ptx::{element}", str(match[3] == "f32").lower()]
    return (
        f"{{ const uint32_t a[] = {bits(words(a))}, b[] = {bits(words(b))}, c[] = {bits(words(c))}; "
        f"uint32_t r[{len(words(d))}]; ::emulator::ptx::mma_sparse<{', '.join(form)}>"
        f"(r, a, b, c, {taken('u32', metadata)[0]}, {selector.text}, __LINE__); "
        + "".join(assign(part, f"r[{i}]") for i, part in enumerate(d.parts))
        + " }"
    )


@instruction(r"mma\.sync\.aligned\.(m16n8k\d+)\.row\.col(\.satfinite)?\.s32\.([su][48])\.([su][48])\.s32")
def _(match, d, a, b, c):
    if match[3][1] != match[4][1]:
        raise OperandError("of two widths")
    form = [f"::emulator::ptx::{match[i]}" for i in (1, 3, 4)] + [str(bool(match[2])).lower()]
    return (
        f"{{ const uint32_t a[] = {bits(words(a))}, b[] = {bits(words(b))}, c[] = {bits(words(c))}; uint32_t r[4]; "
        f"::emulator::ptx::mma_integers<{', '.join(form)}>(r, a, b, c, __LINE__); "
        + "".join(assign(part, f"r[{i}]") for i, part in enumerate(d.parts))
        + " }"
    )


@instruction(r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f64\.f64\.f64\.f64")
def _(match, d, a, b, c):
    values = ", ".join(taken("f64", *(a.parts or [a]), *(b.parts or [b]), *c.parts))
    results = "".join(assign(part, f"r[{i}]") for i, part in enumerate(d.parts))
    return f"{{ double r[2]; ::emulator::ptx::mma_doubles(r, {values}, __LINE__); {results} }}"


@instruction(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _(match, to, a):
    return assign(to, f"::emulator::ptx::movmatrix({taken('u32', a)[0]}, __LINE__)")


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


@instruction(r"elect\.sync")
def _(match, to, mask):
    leader, chosen = to.parts
    results = assign(leader, "first") + assign(chosen, "::emulator::lane() == first")
    return f"{{ const int first = ::emulator::ptx::elect({mask.value}, __LINE__); {results} }}"
