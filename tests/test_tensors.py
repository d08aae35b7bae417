"""What counts as a model's inputs and outputs."""

import collections
import os
import types

import numpy as np
import pytest
import torch

from playground import tensors


def given(value):
    return types.SimpleNamespace(get_inputs=lambda: value)


def test_outputs_in_the_order_of_a_dicts_keys():
    a, b, c = torch.zeros(1), torch.ones(2), torch.ones(3)
    for outputs in {"b": [b, (c,)], "a": a}, {"a": a, "b": [b, (c,)]}:
        assert all(each is expected for each, expected in zip(tensors.flatten(outputs), [a, b, c], strict=True))


def test_numbers_are_compared_and_other_things_are_not():
    tensor, count, mean = tensors.flatten((torch.zeros(2), None, "text", 3, 0.1))
    assert (tensor.shape, count.item(), count.dtype, mean.item(), mean.dtype) == ((2,), 3, torch.int64, 0.1, torch.float64)


@pytest.mark.parametrize("outputs", [3.0, "text", None, [1, 2], {}])
def test_without_a_tensor_there_is_no_output(outputs):
    with pytest.raises(TypeError, match="must return a tensor or a collection of tensors"):
        tensors.flatten(outputs)


def test_a_tensor_of_another_class_is_refused():
    class Other(torch.Tensor):
        pass

    for outputs in torch.zeros(2).as_subclass(Other), [torch.zeros(1), {"a": torch.zeros(2).as_subclass(Other)}]:
        with pytest.raises(TypeError, match="plain tensors, got a Other"):
            tensors.flatten(outputs)
    assert len(tensors.flatten([torch.nn.Parameter(torch.zeros(2)), torch.zeros(1)])) == 2


@pytest.fixture
def known_classes():
    tensors.known_classes_only()
    yield
    tensors._known = None


Pair = collections.namedtuple("Pair", "mean, most")


def test_collections_are_read_as_what_they_are(known_classes):
    """Whatever methods of known classes say, and named tuples that are made later."""
    late = collections.namedtuple("Late", "mean, most")
    a, b = torch.zeros(1), torch.ones(2)
    for given in Pair(a, b), late(a, b), collections.OrderedDict(x=a, y=b), OfBefore(x=a, y=b), [a, (b,)], {"y": b, "x": a}:
        assert all(each is expected for each, expected in zip(tensors.flatten(given), [a, b], strict=True))
    assert tensors.form(OfBefore(x=a, y=b)) == "{'x': tensor, 'y': tensor}" and tensors.form(late(a, b)) == "(tensor, tensor)"
    most = torch.max(torch.rand(2, 3), 1)
    assert all(each is expected for each, expected in zip(tensors.flatten(most), most, strict=True))


class OfBefore(dict):
    def __getitem__(self, key):
        raise AssertionError(key)


def computing(base, **methods):
    return type("Computing", (base,), methods)


@pytest.mark.parametrize(
    "base, content, method",
    [
        (tuple, (1, 2), "__iter__"),
        (list, [1, 2], "__getitem__"),
        (dict, {"a": 1}, "items"),
        (dict, {"a": 1}, "values"),
        (Pair, (1, 2), "__getattribute__"),
    ],
)
def test_a_collection_that_may_compute_when_it_is_read_is_refused(known_classes, base, content, method):
    kind = computing(base, **{method: lambda *given: pytest.fail("it was read")})
    made = kind(*content) if base is Pair else kind(content)
    for given in made, (torch.zeros(1), made):
        with pytest.raises(TypeError, match=f"got a Computing, a (tuple|list|dict) with its own {method}"):
            tensors.flatten(given)


def test_a_number_that_may_compute_when_it_is_read_is_refused(known_classes):
    with pytest.raises(TypeError, match="plain numbers, got a Computing"):
        tensors.flatten((torch.zeros(1), computing(float, __float__=lambda self: pytest.fail("it was read"))(1)))
    assert tensors.flatten((torch.zeros(1), np.float32(2)))[1] == 2


def test_a_node_that_was_registered_later_is_refused(known_classes):
    class Node:
        pass

    flatten = torch.utils._pytree.register_pytree_node
    flatten(Node, lambda node: pytest.fail("it was read"), lambda parts, context: Node())
    try:
        with pytest.raises(TypeError, match="got a Node"):
            tensors.flatten((torch.zeros(1), Node()))
    finally:
        torch.utils._pytree._deregister_pytree_node(Node)


def test_inputs():
    tensor = torch.zeros(2)
    found = tensors.inputs_of(given((tensor, 3, None, "mean", [1, 2], np.float64(0.5), np.int32(4))))
    assert found[0] is tensor and found[1:] == [3, None, "mean", [1, 2], 0.5, 4]
    assert [type(value) for value in found[-2:]] == [float, int]
    with torch.device("meta"):  # a get_inputs that names a device itself
        assert tensors.inputs_of(given([torch.zeros(2, device="cpu"), 3]))[0].is_meta


@pytest.mark.parametrize(
    "value, expected",
    [
        (torch.zeros(3), "must return a list of forward's arguments, got Tensor"),
        ([torch.zeros(3), [torch.zeros(2)]], "its element 1 is a list of tensors; give each tensor"),
        ([{"x": torch.zeros(3)}], "its element 0 is a dict of tensors"),
        ([np.zeros(3)], "its element 0 is a ndarray; give"),
    ],
)
def test_other_inputs_are_refused(value, expected):
    with pytest.raises(TypeError, match=expected):
        tensors.inputs_of(given(value))


class HoldsFunctions(torch.nn.Module):
    """y = (w * x) * 2 + w, through functions that hold a layer, one another, a Python module, and what is never set."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        names, layer = [torch], self
        if names is None:
            never = 1

        def scaled(x, *, factor=2):
            return never if x is None else layer.weight * x * factor

        def again(x, depth=1):
            return again(x, 0) if depth else scaled(x) + self.weight * names[0].ones(3)

        self.steps = {"all": [again]}

    def forward(self, x):
        return self.steps["all"][0](x)


def test_a_copy_uses_its_own_layers_and_the_original_keeps_its_own():
    model, x = HoldsFunctions(), torch.tensor([1.0, 2.0, 3.0])
    copied = tensors.copy_model(tensors.copy_model(model))
    with torch.no_grad():
        copied.weight.fill_(10.0)
    assert model(x).tolist() == [3, 5, 7]
    assert copied(x).tolist() == [30, 50, 70]
    copied(x).sum().backward()
    assert copied.weight.grad.tolist() == [3, 5, 7] and model.weight.grad is None
    assert tensors.copy_model(model).double()(x.double()).dtype == torch.float64


def test_a_copy_of_what_is_computed_from_parameters():
    model = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
    copied, x = tensors.copy_model(model), torch.rand(4, 3)
    assert torch.equal(copied(x), model(x))
    with torch.no_grad():
        copied.weight_g.mul_(2)
    assert not torch.equal(copied(x), model(x))


def test_parts_of_a_complex_tensor():
    assert tensors.as_real(torch.tensor([1 + 2j]).conj()).tolist() == [[1, -2]]
    assert tensors.as_real(torch.ones(2)).tolist() == [1, 1]


def test_results_come_back_as_they_were(tmp_path):
    outputs = [torch.randn(3, 4).t(), torch.tensor(2, dtype=torch.bfloat16), torch.empty(0, 5), torch.tensor([True, False])]
    outputs += [torch.randn(2, dtype=torch.complex64).conj(), torch.arange(3)]
    given = tensors.Results(outputs, {"weight": torch.ones(2, dtype=torch.float64), "bias": None}, detached=True)
    tensors.save_results(given, tmp_path / "results")
    found = tensors.load_results(tmp_path / "results", 4096)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(outputs, found.outputs, strict=True))
    assert torch.equal(found.gradients["weight"], torch.ones(2, dtype=torch.float64)) and found.gradients["bias"] is None
    assert found.detached


def test_a_device_without_room_is_no_fault_of_the_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    tensors.save_results(tensors.Results([torch.ones(3)]), tmp_path / "results")
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        tensors.load_results(tmp_path / "results", 4096, "cuda")


def test_a_sparse_result_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"output 0 is torch\.sparse_coo, expected a dense tensor"):
        tensors.save_results(tensors.Results([torch.eye(2).to_sparse()]), tmp_path / "results")


def _shortened(path):
    path.write_bytes(path.read_bytes()[:-1])


def _renamed(path):
    path.write_bytes(path.read_bytes().replace(b"output 0", b"output 1"))


def _retyped(path, name):
    path.write_bytes(path.read_bytes().replace(b'"torch.float32"', name.ljust(15)))


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda path: _retyped(path, b'"torch.quint8"'), "something that is no tensor: KeyError"),  # which ended the referee
        (lambda path: _retyped(path, b'"torch.int4"'), "something that is no tensor: KeyError"),
        (_shortened, "something that is no tensor: ValueError"),
        (_renamed, "something that is no tensor: ValueError"),
        (lambda path: path.write_bytes(b""), "something that is no tensor"),
        (lambda path: path.write_bytes(bytes(4096) * 2), "has 8192 bytes, expected at most 4096"),
        (lambda path: path.write_bytes(b"\2" + bytes(7) + b"{}"), "something that is no tensor: KeyError"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: os.link(path, path.with_name("other")), "no regular file of its own"),
        (
            lambda path: path.rename(path.with_name("other")).parent.joinpath("results").symlink_to("other"),
            "cannot be read: Too many",
        ),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file of its own"),
    ],
)
def test_what_is_no_file_of_results(tmp_path, change, complaint):
    path = tmp_path / "results"
    tensors.save_results(tensors.Results([torch.ones(3)]), path)
    change(path)
    with pytest.raises(tensors.NotTensors, match=complaint):
        tensors.load_results(path, 4096)


def test_a_seed_is_torch_s():
    torch.manual_seed(11)
    expected = torch.rand(3)
    tensors.manual_seed(11)
    assert torch.equal(torch.rand(3), expected)
