"""What all files share behind ModelNew: the build, the operator and its gradient, the warnings."""

import warnings

import apart
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


def made(path):
    torch.manual_seed(0)
    return catalog.load_variant(path).ModelNew(2, 3, 2, 2), torch.rand(2, 2, 9, 8)


def test_pytorchs_gradient_is_said_once(emulated):
    model, x = made(V1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).sum().backward()
    (warning,) = [each for each in said if "The gradient is PyTorch's" in str(each.message)]
    assert str(warning.message).startswith("conv_pool_sigmoid_sum_v1_fused_tail: ")


def test_what_a_kernel_refuses_as_not_implemented_is_pytorchs_with_one_warning(emulated):
    module = catalog.load_variant(V1)
    asked = []

    def forward(kernels, x):
        asked.append(x)
        raise NotImplementedError("at most 8 channels")

    operators = module.register("shelf_of_limits", "", "(Tensor x) -> Tensor", forward, torch.sin)
    x = torch.rand(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = [module.call(operators, x) for _ in range(2)]
        (grad,) = torch.autograd.grad(out[1].sum(), x)
    torch.testing.assert_close(out, [x.sin()] * 2)
    torch.testing.assert_close(grad, x.cos())
    assert len(asked) == 2
    assert [str(each.message) for each in said if "at most 8 channels" in str(each.message)] == [
        "shelf_of_limits: PyTorch computes what these kernels do not take: at most 8 channels"
    ]


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
    pool = model.pool if path == V1 else model.avg_pool.kernel_size
    operator = model.operators.train if path == V1 else getattr(torch.ops, model.namespace()).forward
    found = []
    if path == V1:
        call = lambda f, y: f(y, [pool, pool]) + f(y * y.mean(), [pool, pool])  # noqa: E731
    else:
        call = lambda f, y: f(y, model.conv.weight * y.mean(), model.conv.bias, [pool, pool])  # noqa: E731
    for function in (operator, module.original):
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


def test_plain_tensors_are_dispatched_once(monkeypatch):
    """The dispatcher takes 2 us more for a call below autograd, which only tensors of other kinds need."""
    model, x = made(CPU)
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


def pasted():
    """Cells of a notebook share one namespace: the same file twice, another one with the same names, an edited one."""
    text = V1.read_text(encoding="utf-8")
    another = (
        text.replace("v1_fused_tail", "v0_other").replace("pool_w)));", "pool_w))) / 2;").replace("sum(dim=", "div(2).sum(dim=")
    )
    edited = text.replace("out[blockIdx.x] = sum;", "out[blockIdx.x] = 3 * sum;")
    cell = {"__name__": "a cell"}

    def paste(text):
        exec(compile(text, "cell", "exec"), cell)
        torch.manual_seed(0)
        return cell["ModelNew"](2, 3, 2, 2)

    x = torch.rand(2, 2, 9, 8)
    with emulator.install(mode="fast"), torch.no_grad():
        first, not_called = paste(text), paste(text)
        expected = first(x)
        compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        with torch.enable_grad():
            pending = first(x)
        assert torch.equal(paste(text)(x), expected)
        second = paste(another)
        assert torch.equal(second(x), expected / 2)
        assert torch.equal(not_called(x), expected) and torch.equal(first(x), expected)
        assert torch.equal(paste(edited)(x), 3 * expected)
        assert torch.equal(first(x), 3 * expected) and torch.equal(compiled(x), 3 * expected), "a paste replaces the operators"
        assert torch.equal(second(x), expected / 2)
        pending.backward(torch.ones(2))
        assert first.conv.weight.grad.norm() > 0


def test_pasting_twice_another_file_and_an_edit():
    apart.run(pasted)
