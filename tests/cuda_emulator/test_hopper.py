"""Tensor copies (TMA), matrix products of warpgroups (wgmma) and pipelines of both, against PyTorch in float64."""

import hopper
import pytest
import torch
from on_device import DeviceLibrary

from cuda_emulator import EmulatorError
from cuda_emulator.kernels import KernelLibrary


@pytest.fixture(scope="module", params=["fast", "check", "device"])
def library(request, tmp_path_factory):
    if request.param == "device":
        library = DeviceLibrary(hopper.TEXT, tmp_path_factory.mktemp("hopper"))
    else:
        library = KernelLibrary(hopper.TEXT, request.param, "hopper")
    yield library
    library.close()


def box_of(tensor, x, y, z, shape):
    """The box as it arrives: zeros outside the tensor."""
    nz, ny, nx = tensor.shape
    bx, by, bz = shape
    box = torch.zeros(bz, by, bx)
    for k in range(bz):
        for j in range(by):
            for i in range(bx):
                if 0 <= x + i < nx and 0 <= y + j < ny and 0 <= z + k < nz:
                    box[k, j, i] = tensor[z + k, y + j, x + i]
    return box


def swizzled(box, span):
    """The box's words where a swizzle of `span` bytes puts them: the number of a 16-byte chunk, xor bits of the address."""
    words = box.flatten()
    out = torch.empty_like(words)
    for at in range(0, 4 * words.numel(), 16):
        to = at ^ ((at >> 3) & (span - 16))
        out[to // 4 : to // 4 + 4] = words[at // 4 : at // 4 + 4]
    return out


STARTS = [(0, 0, 0), (4, 2, 1), (-8, -1, 0), (20, 5, 2), (40, 0, 0), (0, 0, -1), (8, 6, 2)]


@pytest.mark.parametrize("schedule", ["forward", "reversed", "random"])
@pytest.mark.parametrize("swizzle, columns", [(0, 12), (1, 8), (2, 16), (3, 32)])
def test_boxes(library, swizzle, columns, schedule):
    tensor, shape = torch.rand(3, 7, 36), (columns, 4, 2)
    starts, out = torch.tensor(STARTS, dtype=torch.int32), torch.empty(len(STARTS), columns * 8)
    error = library.call(
        "run_boxes", tensor, out, starts, len(STARTS), 36, 7, 3, *shape, swizzle, schedule=schedule, time_limit=30
    )
    assert error == 0
    for start, row in zip(STARTS, out, strict=True):
        box = box_of(tensor, *start, shape)
        assert torch.equal(row, swizzled(box, 16 << swizzle) if swizzle else box.flatten()), start


@pytest.mark.parametrize("x, y", [(0, 0), (4, 3), (-4, -3), (12, 6)])
def test_tile_store(library, x, y):
    rows, columns = 10, 20
    out = torch.full((rows, columns), -1.0)
    assert library.call("run_tile_store", out, rows, columns, x, y) == 0
    tile = torch.arange(128.0).view(8, 16)
    for r in range(rows):
        for c in range(columns):
            inside = 0 <= r - y < 8 and 0 <= c - x < 16
            assert out[r, c] == (tile[r - y, c - x] if inside else -1)


@pytest.mark.parametrize(
    "offset, size, stride, box, swizzle, error",
    [
        (0, 16, 64, 16, 0, 0),
        (4, 16, 64, 16, 0, 1),  # the address is no multiple of 16
        (0, 0, 64, 16, 0, 1),
        (0, 16, 68, 16, 0, 1),  # the stride is no multiple of 16
        (0, 16, 64, 0, 0, 1),
        (0, 16, 64, 257, 0, 1),
        (0, 300, 2048, 256, 0, 0),
        (0, 16, 64, 3, 0, 1),  # the box's rows have no multiple of 16 bytes
        (0, 16, 64, 16, 2, 0),
        (0, 16, 64, 16, 1, 1),  # the box's rows have more bytes than the swizzle spans
        (0, 64, 256, 64, 3, 1),
        (0, 16, 64, 16, 9, 1),
    ],
)
def test_encoder_checks_as_the_driver_does(library, offset, size, stride, box, swizzle, error):
    assert library.call("try_encode", torch.empty(4096), offset, size, stride, box, swizzle) == error


def truncated(x):
    """As the tensor cores read a float for TF32: the low 13 bits do not count."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def test_product_with_registers(library):
    a, b, d = torch.randn(64, 32), torch.randn(32, 24), torch.empty(64, 24)
    assert library.call("run_registers", d, a, b, time_limit=30) == 0
    torch.testing.assert_close(d.double(), truncated(a) @ truncated(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_layouts(library, layout, transposed):
    a, b, d = torch.randn(64, 64).half(), torch.randn(64, 64).half(), torch.empty(64, 64)
    assert library.call("run_layouts", layout, transposed, d, a, b, time_limit=30) == 0
    left = a.double().T if transposed & 1 else a.double()
    right = b.double() if transposed & 2 else b.double().T
    torch.testing.assert_close(d.double(), left @ right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("schedule", ["forward", "reversed", "random"])
@pytest.mark.parametrize("m, n, k", [(64, 128, 64), (128, 128, 320), (72, 200, 136)])
def test_pipeline(library, m, n, k, schedule):
    a, b, d = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.full((m, n), -1.0)
    assert library.call("run_pipeline", d, a, b, m, n, k, schedule=schedule, time_limit=60) == 0
    torch.testing.assert_close(d.double(), a.double() @ b.double().T, rtol=1e-4, atol=1e-3)


LOAD_2D = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(
    "statement, message",
    [
        (LOAD_2D + ".multicast::cluster [%0], [%1, {0, 0}], [%0], 3;", "the PTX instruction cp.async.bulk.*multicast"),
        (LOAD_2D + " [%0], [%1, {0, 0, 0}], [%0];", "other than 2 coordinates"),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0, %0}, %1, %1, 1, 1, 1;", "other than 4 accumulators"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %0, %0, %0}, %1, %1, 1, 1, 1, 0;", "2 are expected"),
        ("wgmma.mma_async.sync.aligned.m64n12k8.f32.tf32.tf32 {%0, %0}, %1, %1, 1, 1, 1;", "of this shape"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0}, %1, %1, 1, 1, 1;", "the PTX instruction wgmma"),
    ],
)
def test_unsupported_is_named_with_its_line(statement, message):
    text = f'__global__ void kernel(uint32_t a, uint64_t b) {{\n  asm volatile("{statement}" ::"r"(a), "l"(b));\n}}'
    with pytest.raises(EmulatorError, match=rf"test_hopper\.py:\d+: .*{message}"):
        KernelLibrary(text, "fast", "unsupported")
