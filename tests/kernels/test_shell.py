"""What all files share below the text that is compiled: the build, the operator and its gradient, and a notebook of many."""

import threading
import time
import warnings
from contextlib import nullcontext

import apart
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.fixture
def asked(monkeypatch):
    """(module, what its load_inline was asked to build): name and options each; nothing is built."""
    module, asked = catalog.load_variant(V1), []

    def record(name, cpp, cuda, **options):
        asked.append((name, options))
        time.sleep(0.1)  # another thread would come to the same place
        assert len(inside) == 1
        return None  # CDLL(None) is the process itself

    inside = []
    lock = module.BUILDING

    class Lock:
        def __enter__(self):
            lock.acquire()
            inside.append(1)

        def __exit__(self, *_):
            inside.pop()
            lock.release()

    monkeypatch.setattr(module, "load_inline", record)
    monkeypatch.setattr(module, "BUILDING", Lock())
    return module, asked


def test_macros_are_part_of_a_builds_name(asked):
    module, asked = asked
    for macros in {}, {"HEIGHT": 3}, {"HEIGHT": 4}, {"HEIGHT": 3}:
        module.kernels("-lcuda", **macros)
    names = [name for name, _ in asked]
    assert names == [module.NAME, f"{module.NAME}_3", f"{module.NAME}_4"], "and the same is built once"
    assert {"-lcuda", "-DHEIGHT=3"} <= set(asked[1][1]["extra_cuda_cflags"])


@pytest.mark.parametrize("version, narrow", [("2.6.0", False), ("2.8.0", True), ("2.11.0", True)])
def test_an_older_pytorch_gets_what_it_knows(asked, monkeypatch, version, narrow):
    module, asked = asked
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    module.kernels()
    ((_, options),) = asked
    assert ("no_implicit_headers" in options) is narrow


def test_threads_build_one_after_the_other(asked):
    """As nn.DataParallel's, whose replicas run their first forward at the same time: load_inline's own lock may fail them."""
    module, asked = asked
    threads = [threading.Thread(target=module.kernels) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 3


def test_what_the_kernels_do_not_take_is_pytorchs_with_a_warning(emulated):
    torch.manual_seed(0)
    path = catalog.KERNELS / "conv_pool_sigmoid_sum" / "v4_tensor_core.py"
    model, x = catalog.load_variant(path).ModelNew(2, 3, 2, 3), torch.rand(2, 2, 9, 8)  # no even window
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        found = [model(x), model(x)]
    exact = torch.sigmoid(torch.nn.functional.avg_pool2d(model.conv(x), 3)).sum(dim=(1, 2, 3))
    torch.testing.assert_close(found, [exact] * 2)
    assert not emulator.launches()
    (warning,) = [str(each.message) for each in said]
    assert "PyTorch computes what these kernels do not take: " in warning and "even width" in warning


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("path", [CPU, V1], ids=["own", "PyTorch's"])
def test_an_argument_that_depends_on_another(path, create_graph, emulated):
    """Each argument's gradient is a partial derivative, also when the graph is kept: what leads back is counted once."""
    model, x = made(path)
    original, pool = catalog.load_variant(path).original, [2, 2]
    if path == V1:
        call = lambda f, y: f(y, pool) + f(y * y.mean(), pool)  # noqa: E731
    else:
        call = lambda f, y: f(y, model.conv.weight * y.mean(), model.conv.bias, pool)  # noqa: E731
    found = []
    for function in (model.operator, original):
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call(function, y).sum(), y, create_graph=create_graph)
        found.append(torch.autograd.grad(gradient.square().sum(), y)[0] if create_graph else gradient)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_tensors_elsewhere_are_the_dispatchers(emulated):
    """Where nothing is recorded v4's model calls no operator; a pointer from elsewhere must not come to the kernel."""
    model, x = made(V1.with_name("v4_tensor_core.py"))
    with torch.no_grad():
        assert model.to("meta")(x.to("meta")).is_meta


class Dispatched(TorchDispatchMode):
    """`namespaces` are those of the operators that the dispatcher was asked for."""

    def __init__(self):
        super().__init__()
        self.namespaces = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.namespaces.add(operator.namespace)
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_eager_call_passes_the_dispatcher_by(is_watched, emulated):
    """With a gradient recorded and without. Where a TorchFunctionMode looks on, as make_fx's, it sees the operator."""
    path = V1.with_name("v4_tensor_core.py")
    model, x = made(path)
    found = []
    for mode in (True, False):
        with torch.set_grad_enabled(mode), BaseTorchFunctionMode() if is_watched else nullcontext(), Dispatched() as seen:
            found.append(model(x))
        assert (f"conv_pool_sigmoid_sum_{path.stem}" in seen.namespaces) is is_watched
    assert torch.equal(*found)
    gradients = torch.autograd.grad(found[0].sum(), list(model.parameters()))
    exact = torch.autograd.grad(
        catalog.load_variant(path).original(x, *model.parameters(), (2, 2)).sum(), list(model.parameters())
    )
    torch.testing.assert_close(gradients, exact)


def pasted_without_dispatcher():
    """An instance made before keeps its kernel in eager mode; when compiled it calls the operator, which the paste replaces."""
    text = V1.with_name("v4_tensor_core.py").read_text(encoding="utf-8")
    edited = text.replace("    return out\n\n\noperator =", "    return 3 * out\n\n\noperator =")
    assert edited != text
    cell, x = {"__name__": "a cell"}, torch.rand(2, 2, 9, 8)

    def paste(text):
        exec(compile(text, "cell", "exec"), cell)
        torch.manual_seed(0)
        return cell["ModelNew"](2, 3, 2, 2)

    with emulator.install(mode="fast"):
        first = paste(text)
        expected = first(x)
        second = paste(edited)
        assert torch.equal(second(x), 3 * expected) and torch.equal(first(x), expected)
        compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 3 * expected)
        expected.sum().backward()
        assert first.conv.weight.grad.norm() > 0


def test_a_paste_of_a_file_that_passes_the_dispatcher_by():
    apart.run(pasted_without_dispatcher)


def pasted():
    """Cells of a notebook share one namespace: the same file twice, another one with the same names, an edited one."""
    text = V1.read_text(encoding="utf-8")
    another = text.replace("v1_fused_tail", "v0_other").replace("pool_w)));", "pool_w))) / 2;")
    another = another.replace("sum(dim=", "div(2).sum(dim=")
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
        assert torch.equal(first(x), 3 * expected), "a paste replaces the operator"
        torch.compiler.reset()  # compiled code holds the operator that was
        assert torch.equal(compiled(x), 3 * expected)
        assert torch.equal(second(x), expected / 2)
        pending.backward(torch.ones(2))
        assert first.conv.weight.grad.norm() > 0


def test_pasting_twice_another_file_and_an_edit():
    apart.run(pasted)
