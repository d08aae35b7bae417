"""Asynchronous copies and barriers of PTX."""

from .ptx_operands import OperandError, assign, call, instruction

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
