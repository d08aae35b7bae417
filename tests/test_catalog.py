import inspect
import itertools
import os
import py_compile

import pytest

from playground import catalog


def test_the_tenth_variant_stands_behind_the_ninth(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "KERNELS", tmp_path)
    names = ["v1_a", "v2_b", "v9_c", "v10_d", "cpu_v2", "cpu_v10"]
    (tmp_path / "model").mkdir()
    for name in sorted(names):
        (tmp_path / "model" / f"{name}.py").touch()
    variants = catalog.variants(catalog.Model("model", tmp_path / "model.py"))
    assert [variant.name for variant in variants] == names


@pytest.mark.parametrize("names", [["v1", "v2_b", "v2_c", "v10"], ["2", "10", "a", "a²", "b1"]])
def test_a_natural_order_compares_any_names(names):
    assert all(catalog.natural_order(one) < catalog.natural_order(other) for one, other in itertools.pairwise(names))


@pytest.mark.parametrize("text", ["batch_size", "=4", "a b=1", "batch_size=four"])
def test_bad_settings_are_refused(text):
    with pytest.raises(catalog.CatalogError, match="--set"):
        catalog.parse_settings([text])


def test_constants_computed_from_a_setting_follow_it(tiny_problem):
    problem = catalog.load_problem(tiny_problem, {"features": 12})
    assert problem.outputs == 6
    assert problem.get_init_inputs() == [12, 6]


def test_a_setting_of_one_name_in_a_tuple():
    path = catalog.find_model("conv_pool_sigmoid_sum").path
    problem = catalog.load_problem(path, {"height": 20, "batch_size": 1})
    assert problem.get_inputs()[0].shape == (1, 8, 20, 384)


def test_a_file_without_what_it_must_define(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    with pytest.raises(catalog.CatalogError, match="does not define Model, get_inputs, get_init_inputs"):
        catalog.load_problem(path)
    with pytest.raises(catalog.CatalogError, match="does not define ModelNew"):
        catalog.load_variant(path)


def test_a_docstring_is_no_part_of_the_code(tmp_path):
    def code(text):
        path = tmp_path / "v1_x.py"
        path.write_text(text)
        return catalog.code_sha256(path), catalog.sha256(path)

    plain, other = code('"""One.\n\nMeasured: 1 ms."""\nX = 1\n'), code('"""Another."""\nX = 1\n')
    assert plain[0] == other[0] and plain[1] != other[1]
    assert code('"""One."""\nX = 2\n')[0] != plain[0]
    assert code('X = 1\n"""One."""\n')[0] != code('X = 1\n"""Two."""\n')[0], "only the module's own docstring"
    broken = code("def f(:")
    assert broken[0] == broken[1]


def test_kernels_are_their_text_alone(tmp_path):
    def kernels(text):
        path = tmp_path / "v1_x.py"
        path.write_text(text)
        return catalog.kernels_sha256(path)

    plain = kernels('CUDA = r"""\nkernel\n"""\nBINDING = "binding"\n')
    assert plain == kernels('"""A docstring."""\nimport torch\nCUDA = "\\nkernel\\n"\nBINDING = "another"\n')
    assert len({plain, kernels('CUDA = "kernel"\n'), kernels('CPP = r"""\nkernel\n"""\n')}) == 3
    assert kernels('BINDING = "binding"\n') is None and kernels("def f(:") is None
    assert kernels('def f():\n    CUDA = "kernel"\n') is None, "only the module's own"


def test_names_that_a_file_has_from_its_problem(tmp_path):
    problem, variant = tmp_path / "problem.py", tmp_path / "variant.py"
    problem.write_text("import math\nbatch, size, kept, late = 1, 2, 3, 4\ndef helper(): pass\nclass Model: pass\n")
    variant.write_text(
        """
from torch import *
width = size
class ModelNew(Model):
    kept = 5
    def forward(self, batch):
        global late
        late = 6
        other = [helper() for kept in range(batch)]
        return math.inf, late, self.kept, unknown, len(other)
"""
    )
    assert catalog.borrowed_names(variant, problem) == ["Model", "helper", "math", "size"]
    variant.write_text("def broken(:")
    assert catalog.borrowed_names(variant, problem) == []


def test_what_runs_is_the_content_that_was_read(tmp_path):
    """Not what is in the file by then, nor what is compiled beside it; lines and source are the content's."""
    path = tmp_path / "variant.py"
    content = b"class ModelNew:\n    def forward(self):\n        return 1 / 0\n"
    path.write_text("class ModelNew:\n    planted = True\n" + "#" * (len(content) - 36))
    py_compile.compile(str(path))
    path.write_bytes(content)
    module = catalog.load_variant(path, content)
    path.write_text("class Other: pass\n")
    assert not hasattr(module.ModelNew, "planted") and "1 / 0" in inspect.getsource(module.ModelNew.forward)
    with pytest.raises(ZeroDivisionError) as raised:
        module.ModelNew().forward()
    assert raised.traceback[-1].path == path and raised.traceback[-1].lineno == 2
    with pytest.raises(catalog.CatalogError, match="does not define ModelNew"):
        catalog.load_variant(path)
    path.write_bytes(content)
    times = path.stat()
    path.write_bytes(content.replace(b"1 / 0", b"2 / 0"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "2 / 0" in inspect.getsource(catalog.load_variant(path, path.read_bytes()).ModelNew.forward)


def test_a_solution_in_another_format_has_its_problems_model_new(tmp_path):
    problem, variant = tmp_path / "problem.py", tmp_path / "variant.py"
    problem.write_text("def model_new_of(module): return module.double\nsize = 3\n")
    variant.write_text("def double(x): return 2 * x + size\n")
    assert catalog.borrowed_names(variant, problem) == []
    assert catalog.load_variant(variant, model_new_of=lambda module: module.double).ModelNew is not None
