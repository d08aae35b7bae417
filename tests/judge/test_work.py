"""Own code is found where it is called, spoiled where that is asked, and read off a file's text."""

import textwrap
import types

import pytest
import torch

from playground.judge import work


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


@pytest.mark.parametrize("name", ["twice", "any_device"])
def test_results_are_spoiled(own, name):
    with own.watched(spoiling=True):
        spoiled = getattr(torch.ops.test_work, name)(X)
    assert not torch.allclose(spoiled, 2 * X) and torch.equal(X, torch.ones(3))
    assert torch.isfinite(spoiled).all()


def test_targets_are_spoiled_and_operands_are_not(own):
    target = torch.zeros(100)
    with own.watched(spoiling=True):
        torch.ops.test_work.fill_(target)
    assert (target != 7).all()


def test_a_function_of_addresses_is_left_out(own):
    module = types.ModuleType("extension")
    target = torch.zeros(3)
    module.write = lambda address: target.fill_(1)
    own.wrap_module(module)
    module.write(target.data_ptr())
    assert target.sum() == 3
    target.zero_()
    with own.watched(spoiling=True):
        module.write(target.data_ptr())
    assert target.sum() == 0 and own.calls == 2


def text(tmp_path, content):
    path = tmp_path / "variant.py"
    path.write_text(textwrap.dedent(content))
    return work.Text(path)


def test_a_file_that_means_to_build(tmp_path):
    assert text(tmp_path, 'CUDA = "__global__ void f(float* p) {}"').means_to_build
    assert text(
        tmp_path, "from torch.utils import cpp_extension\nf = lambda: cpp_extension.load_inline('f', '')"
    ).means_to_build
    assert not text(tmp_path, '"""Once had a __global__ void f(float* p)."""\n# load_inline\nx = 1').means_to_build


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
