"""What all files share behind ModelNew: the build, the operator and its gradient, the warnings."""

import warnings

import pytest
import torch
from torch.utils import cpp_extension

import cuda_emulator as emulator
from playground import catalog

V1 = catalog.KERNELS / "conv_pool_sigmoid_sum" / "v1_fused_tail.py"
CPU = catalog.KERNELS / "conv_pool_sigmoid_sum" / "cpu_box_sums.py"


@pytest.fixture
def emulated():
    with emulator.install(mode="check"):
        emulator.reset_launches()
        yield


def made(path, **changes):
    torch.manual_seed(0)
    return catalog.load_variant(path).ModelNew(2, 3, 2, 2), torch.rand(2, 2, 9, 8)


def test_pytorchs_gradient_is_said_once_at_the_line_that_calls(emulated):
    model, x = made(V1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).sum().backward()
    (warning,) = [each for each in said if "The gradient is PyTorch's" in str(each.message)]
    assert warning.filename == __file__
    assert "model(x).sum().backward()" in open(__file__, encoding="utf-8").read().splitlines()[warning.lineno - 1]  # noqa: PTH123, SIM115
    assert str(warning.message).startswith("conv_pool_sigmoid_sum_v1_fused_tail: ")


def test_what_the_kernels_do_not_take_is_pytorchs_with_a_warning(emulated):
    torch.manual_seed(0)
    path = catalog.KERNELS / "conv_pool_sigmoid_sum" / "v4_tensor_core.py"
    model, x = catalog.load_variant(path).ModelNew(2, 3, 2, 3), torch.rand(2, 2, 9, 8)  # no even window
    with torch.no_grad(), pytest.warns(UserWarning, match="PyTorch computes what these kernels do not take: .*even width"):
        found = model(x)
    exact = torch.sigmoid(model.avg_pool(model.conv(x))).sum(dim=(1, 2, 3))
    torch.testing.assert_close(found, exact)
    assert not emulator.launches()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("path", [CPU, V1], ids=["own", "PyTorch's"])
def test_an_argument_that_depends_on_another(path, create_graph, emulated):
    """Each argument's gradient is a partial derivative, also when the graph is kept: what leads back is counted once."""
    model, x = made(path)
    module = catalog.load_variant(path)
    pool = model.avg_pool.kernel_size
    found = []
    if path == V1:
        operator, original = getattr(torch.ops, model.namespace()).forward, module.original
        call = lambda f, y: f(y, [pool, pool]) + f(y * y.mean(), [pool, pool])  # noqa: E731
    else:
        operator, original = getattr(torch.ops, model.namespace()).forward, module.original
        call = lambda f, y: f(y, model.conv.weight * y.mean(), model.conv.bias, [pool, pool])  # noqa: E731
    for function in (operator, original):
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call(function, y).sum(), y, create_graph=create_graph)
        found.append(torch.autograd.grad(gradient.square().sum(), y)[0] if create_graph else gradient)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_sets_of_keys_that_pytorch_2_4_cannot_compare(monkeypatch):
    monkeypatch.delattr(torch._C.DispatchKeySet, "__eq__")
    model, x = made(CPU)
    model(x.requires_grad_()).sum().backward()
    (expected,) = torch.autograd.grad(torch.sigmoid(model.avg_pool(model.conv(x))).sum(), x)
    torch.testing.assert_close(x.grad, expected)


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("path, device", [(CPU, "cpu"), pytest.param(V1, "cuda", marks=ON_A_GPU)])
def test_plain_tensors_are_dispatched_once(path, device, monkeypatch):
    """The dispatcher takes 2 us more for a call below autograd, which only tensors of other kinds need."""
    model, x = (each.to(device) for each in made(path))
    with torch.no_grad():
        expected = model(-x)

        def refuse():
            raise ZeroDivisionError

        monkeypatch.setattr(torch._C, "_AutoDispatchBelowAutograd", refuse)
        assert torch.equal(model(-x), expected)
        with pytest.raises(ZeroDivisionError):
            model(torch._neg_view(x))
        monkeypatch.undo()
        assert torch.equal(model(torch._neg_view(x)), expected)


def test_releases_that_return_no_path(monkeypatch):
    """The library is opened where load_inline has put it; CDLL(None) would be the process itself."""
    load = cpp_extension.load_inline
    monkeypatch.setattr(cpp_extension, "load_inline", lambda *args, **options: load(*args, **options) and None)
    model, x = made(CPU)
    with torch.no_grad():
        torch.testing.assert_close(model(x), torch.sigmoid(model.avg_pool(model.conv(x))).sum(dim=(1, 2, 3)))
