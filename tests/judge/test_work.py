"""Own code is found where it is called, spoiled where that is asked, and read off a file's text."""

import contextlib
import ctypes
import ctypes.util
import importlib.util
import subprocess
import textwrap
import types

import numpy as np
import pytest
import torch

from playground.judge import foreign, work
from playground.judge.text import Text
from playground.machine import requirements


def fill(x):
    x.fill_(7)


@pytest.fixture(scope="module")
def library():
    library = torch.library.Library("test_work", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    library.define("any_device(Tensor x) -> Tensor")
    library.impl("any_device", lambda x: 2 * x, "CompositeImplicitAutograd")
    library.define("fill_(Tensor(a!) x) -> ()")
    library.impl("fill_", fill, "CompositeExplicitAutograd")
    yield library
    library._destroy()


@pytest.fixture
def own(library):
    own = work.OwnCode()
    own.operators = {name for name in work.all_operators() if name.startswith("test_work::")}
    return own


X = torch.ones(3)


def test_calls_of_operators_are_counted(own):
    with own.watched():
        torch.ops.test_work.twice(torch.ops.test_work.twice.default(X))
        torch.ops.test_work.any_device(X)
        torch.relu(X)
    torch.ops.test_work.twice(X)
    assert own.calls == 3


def test_calls_of_a_module_are_counted(own):
    module = types.ModuleType("extension")
    module.twice = lambda x: 2 * x
    own.wrap_module(module)
    assert torch.equal(module.twice(X), 2 * X) and own.calls == 1


@contextlib.contextmanager
def spoiling(own, *seen, **how):
    """What is written between operators is spoiled, in the tensors `seen` at the end at the latest."""
    written = work.WrittenBetween(own)
    written.spoiling = True
    with torch.no_grad(), own.watched(spoiling=True, **how), written:
        yield written
        written.check(seen)


@pytest.mark.parametrize("by", ["a library", "custom_op"])
def test_what_an_operator_in_python_writes_is_spoiled(own, by):
    """Numbers that NumPy writes are the operator's own, those of PyTorch's operators inside of it are not."""

    def tripled(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y.numpy()[:] = 3 * x.numpy()
        return y

    def doubled(x: torch.Tensor) -> torch.Tensor:
        tripled(x)
        return 2 * x

    with torch.library._scoped_library("test_work_python", "DEF") as library:
        functions = {"tripled": tripled, "doubled": doubled}
        for name, function in functions.items():
            if by == "a library":
                library.define(f"{name}(Tensor x) -> Tensor")
                library.impl(name, function, "CPU")
            else:
                functions[name] = torch.library.custom_op(f"test_work_custom::{name}", function, mutates_args=())
        if by == "a library":
            functions = {name: getattr(torch.ops.test_work_python, name) for name in functions}
        with spoiling(own) as written:
            right, wrong = functions["doubled"](X), functions["tripled"](X)
        assert torch.equal(right, 2 * X) and not torch.isclose(wrong, 3 * X).any() and torch.isfinite(wrong).all()
        assert written.count and not written.reached


C = """
#include <stdint.h>
#include <stdlib.h>
struct task { const float* from; float* to; int64_t n; };
void doubled(const float* from, float* to, int64_t n) { for (int64_t i = 0; i < n; ++i) to[i] = 2 * from[i]; }
void of_task(const struct task* t) { doubled(t->from, t->to, t->n); }
void of_pointers(void** p) { doubled(*(float**)p[0], *(float**)p[1], *(int64_t*)p[2]); }
static struct task kept;
void give(const float* from, float* to, int64_t n) { kept.from = from; kept.to = to; kept.n = n; }
void go(void) { of_task(&kept); }
float* made(const float* from, int64_t n) { float* to = malloc(4 * n); doubled(from, to, n); return to; }
double total(const float* from, int64_t n) { double sum = 0; for (int64_t i = 0; i < n; ++i) sum += from[i]; return sum; }
int64_t count(const float* from, int64_t n) { int64_t k = 0; for (int64_t i = 0; i < n; ++i) k += from[i] > 0; return k; }
"""
N = 100


@pytest.fixture(scope="module")
def c_library(tmp_path_factory):
    if requirements.missing_for("cpu"):
        pytest.skip("needs a C compiler")
    foreign.install()
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.c").write_text(C)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "own.so", folder / "own.c"], check=True)
    return folder / "own.so"


class Task(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("to", ctypes.c_void_p), ("n", ctypes.c_int64)]


def by_integers(library, x, y):
    library.doubled(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(N))


def by_types(library, x, y):
    library.doubled.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.doubled(x.data_ptr(), y.data_ptr(), N)


def by_a_view(library, x, y):
    rest = y.flatten()[1:]
    library.doubled(ctypes.c_void_p(x.data_ptr() + 4), ctypes.c_void_p(rest.data_ptr()), ctypes.c_int64(N - 1))


def by_a_prototype(library, x, y):
    address = ctypes.cast(library.doubled, ctypes.c_void_p).value
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)(x.data_ptr(), y.data_ptr(), N)


def by_a_struct(library, x, y):
    library.of_task(ctypes.byref(Task(x.data_ptr(), y.data_ptr(), N)))


def by_pointers(library, x, y):
    values = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(N)
    library.of_pointers((ctypes.c_void_p * 3)(*map(ctypes.addressof, values)))


def by_what_was_given_before(library, x, y):
    library.give(*map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr(), N)))
    library.go()


def by_numpy(library, x, y):
    kind = np.ctypeslib.ndpointer(np.float32)
    library.doubled.argtypes = [kind, kind, ctypes.c_int64]
    library.doubled(x.numpy(), y.numpy(), N)
    library.doubled.argtypes = None


def by_an_array_of_numpy(library, x, y):
    given, result = x.numpy(), np.empty(N, np.float32)
    library.doubled(*(ctypes.c_void_p(each.ctypes.data) for each in (given, result)), ctypes.c_int64(N))
    y.copy_(torch.from_numpy(result))


def by_a_pointer_that_it_gives(library, x, y):
    library.made.restype = ctypes.POINTER(ctypes.c_float * N)
    y.copy_(torch.frombuffer(library.made(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(N)).contents, dtype=torch.float32))


WAYS = [
    *(by_integers, by_types, by_a_view, by_a_prototype, by_a_struct, by_pointers, by_what_was_given_before),
    *(by_numpy, by_an_array_of_numpy, by_a_pointer_that_it_gives),
]


@pytest.mark.parametrize(
    "opened, way",
    [
        *(pytest.param(ctypes.CDLL, way, id=way.__name__) for way in WAYS),
        (ctypes.PyDLL, by_types),
        (ctypes.cdll.LoadLibrary, by_a_prototype),
    ],
)
def test_what_ctypes_calls_is_spoiled(own, c_library, opened, way):
    library, x, y = opened(str(c_library)), torch.rand(N), torch.zeros(N)
    given = x.clone()
    with own.watched():
        way(library, x, y)
    assert torch.equal(y[1:], 2 * given[1:]) and own.calls >= 1
    way(library, torch.rand(N), y)  # what another call leaves in memory that is used again
    with spoiling(own, y):
        way(library, x, y)
    assert not torch.isclose(y[1:], 2 * given[1:]).any() and torch.isfinite(y).all() and torch.equal(x, given)
    way(library, x, y)
    assert torch.equal(y[1:], 2 * given[1:])


def test_numbers_that_ctypes_gives_are_spoiled(own, c_library):
    library, x = ctypes.CDLL(str(c_library)), torch.ones(N)
    library.total.restype, library.count.restype = ctypes.c_double, ctypes.c_int64
    with own.watched(spoiling=True):
        assert library.total(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(N)) != N
        assert library.count(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(N)) == N
    with own.watched(spoiling=True, with_integers=True):
        for _ in range(99):  # also by what is less than one
            assert library.count(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(N)) != N
        library.count.restype = ctypes.c_bool
        assert library.count(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(N)) is False


def test_the_functions_of_the_system_and_of_python_are_nobodys_work(own):
    foreign.install()
    callback = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(lambda x: 2 * x)
    cosine = ctypes.CDLL(ctypes.util.find_library("m")).cos
    cosine.restype, cosine.argtypes = ctypes.c_double, [ctypes.c_double]
    with own.watched(spoiling=True):
        assert callback(1.0) == 2.0 and cosine(0.0) == 1.0
    assert own.calls == 0


CDEF = "void doubled(const float* from, float* to, int64_t n); double total(const float* from, int64_t n);"


def through_cffi(ffi, library, x, y):
    doubled = library.doubled
    doubled(ffi.cast("float*", x.data_ptr()), ffi.cast("float*", y.data_ptr()), N)


def from_a_buffer(ffi, library, x, y):
    library.doubled(ffi.from_buffer("float[]", x.numpy()), ffi.from_buffer("float[]", y.numpy()), N)


def in_memory_of_cffi(ffi, library, x, y):
    made = ffi.new("float[]", N)
    library.doubled(ffi.cast("float*", x.data_ptr()), made, N)
    y.copy_(torch.frombuffer(ffi.buffer(made), dtype=torch.float32))


@pytest.mark.parametrize("way", [through_cffi, from_a_buffer, in_memory_of_cffi], ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", ["dlopen", "compiled"])
def test_what_cffi_calls_is_spoiled(own, c_library, tmp_path, way, how):
    cffi = pytest.importorskip("cffi")
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    if how == "dlopen":
        library = ffi.dlopen(str(c_library))
    else:
        name = f"of_cffi_{way.__name__}"
        ffi.set_source(name, C)
        spec = importlib.util.spec_from_file_location(name, ffi.compile(tmpdir=str(tmp_path)))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        own.wrap_module(module)
        ffi, library = module.ffi, module.lib
    x, y = torch.rand(N), torch.zeros(N)
    with own.watched():
        way(ffi, library, x, y)
    assert torch.equal(y, 2 * x) and own.calls == 1
    way(ffi, library, torch.rand(N), y)  # what another call leaves in memory that is used again
    with spoiling(own, y):
        way(ffi, library, x, y)
    assert not torch.isclose(y, 2 * x).any() and torch.isfinite(y).all()
    assert library.total(ffi.cast("float*", x.data_ptr()), N) == pytest.approx(x.sum().item())


def test_what_is_written_between_operators_is_spoiled(own):
    """As a kernel is that nobody sees launched; here NumPy writes."""
    x, kept = torch.rand(4, 8), torch.zeros(4, 8)

    def forward(writes):
        y = torch.relu(x)
        if writes:
            kept.numpy()[:] = 3 * y.numpy()
        return y + 0, kept + y, y * torch.tensor(0.5)

    with spoiling(own) as written:
        first, second, third = forward(writes=True)
    assert written.count == 1 and torch.equal(first, x.relu()) and not torch.isclose(second, 4 * x.relu()).any()
    assert torch.equal(third, 0.5 * x.relu())
    with spoiling(own) as written:
        forward(writes=False)
    assert written.count == 0
    with spoiling(own) as written:
        written.with_data = True
        assert not torch.isclose(forward(writes=False)[2], 0.5 * x.relu()).any()


def test_memory_that_was_seen_before_is_not_spoiled_and_all_of_a_storage_is(own):
    kept, rows = torch.ones(8), torch.zeros(4, 3)
    written = work.WrittenBetween(own)
    kept.numpy()[:] = 5  # as a cache that the file's own code has filled
    with torch.no_grad(), written:
        kept + 0
    written.spoiling = True
    with torch.no_grad(), written:
        kept + 0
        rows.numpy()[:] = 2
        rows[0].expand(2, 3) + 0
    assert (kept == 5).all() and not (rows == 2).any()


CPP = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <torch/library.h>
at::Tensor by_pytorch(const at::Tensor& x) { return at::add(at::sigmoid(x.contiguous()), x); }
at::Tensor by_itself(const at::Tensor& x) {
    const at::Tensor y = at::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) y.mutable_data_ptr<float>()[i] = 2 * x.const_data_ptr<float>()[i];
    return y;
}
at::Tensor by_both(const at::Tensor& x) { return at::sigmoid(by_itself(x)); }
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("by_pytorch", &by_pytorch);
    m.def("by_itself", &by_itself);
    m.def("by_both", &by_both);
}
"""


@pytest.mark.skipif(requirements.missing_for("cpu") is not None, reason="needs a C++ compiler")
def test_operators_of_pytorchs_within_own_ones(own):
    from torch.utils.cpp_extension import load_inline

    name = "test_work_within"
    load_inline(name, CPP, functions=None, is_python_module=False, no_implicit_headers=True)
    own.operators |= {each for each in work.all_operators() if each.startswith(name)}
    found = {}
    for each in ("by_pytorch", "by_itself", "by_both"):
        written = work.WrittenBetween(own)
        with torch.no_grad(), own.watched(), written:
            written.check(getattr(getattr(torch.ops, name), each)(X))
        found[each] = written.count, written.reached
    assert found == {
        "by_pytorch": (0, {"at::sigmoid", "at::add"}),
        "by_itself": (1, set()),
        "by_both": (1, {"at::sigmoid"}),
    }


def text(tmp_path, content):
    path = tmp_path / "variant.py"
    path.write_text(textwrap.dedent(content))
    return Text(path)


def test_a_file_that_means_to_build(tmp_path):
    assert text(tmp_path, 'CUDA = "__global__ void f(float* p) {}"').means_to_build
    assert text(
        tmp_path, "from torch.utils import cpp_extension\nf = lambda: cpp_extension.load_inline('f', '')"
    ).means_to_build
    assert not text(tmp_path, '"""Once had a __global__ void f(float* p)."""\n# load_inline\nx = 1').means_to_build


def test_lines_are_counted_as_python_counts_them(tmp_path):
    found = text(tmp_path, "x = 1\n\f\ny = '\u2028'\nclass ModelNew: pass\n")
    assert found.line_of("class ModelNew") == 4 and found.line_of("no such") is None


def test_names_of_kernels(tmp_path):
    found = text(
        tmp_path,
        """
        CUDA = '''
        template <int N> __global__ void __launch_bounds__(N) first(float* p) {}
        static __global__ void second (int n) {}
        extern "C" __global__ void
        third(int n) {}
        __global__ void __launch_bounds__(THREADS(1), 2) fourth(int n) {}
        __global__ void __cluster_dims__(2,1,1) __maxnreg__(64) sixth(int n) {}
        void launch() { first<32><<<1, 32>>>(0); }
        '''
        @triton.jit
        def fifth(p): pass
        """,
    )
    assert found.cuda_kernels == {"first", "second", "third", "fourth", "sixth"}
    assert found.triton_kernels == {"fifth"}


def test_the_share_of_kernels():
    kernels = [
        {"name": "void first<32>(float*)", "calls": 1, "microseconds": 30.0},
        {"name": "cudnn::first_of_all", "calls": 1, "microseconds": 10.0},
    ]
    assert work.own_share(kernels, {"first"}) == 0.75
    assert work.own_share(kernels, set()) == 0
    assert work.own_share([], {"first"}) is None
