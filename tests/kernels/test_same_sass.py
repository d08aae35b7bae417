"""What same_sass.py calls the same is the same to the compilers, and what results/ call the same was compared."""

import subprocess

import pytest
import same_sass
from nvcc import HostCode

from playground import catalog
from playground.machine import ptxas
from playground.report import document

needs_nvcc = pytest.mark.skipif(ptxas.find_nvcc() is None, reason="needs nvcc (CUDA_HOME, PATH or /usr/local/cuda)")

VARIANT = '''"""A docstring."""
NAME = "name"
CUDA = r"""__global__ void f() {}"""


def forward(x):
    return x


def main():
    print(1)
'''
KERNEL = """
__global__ void add(float* p, int n) {{
    const int {index} = blockIdx.x * blockDim.x + threadIdx.x;  // {comment}
    if ({index} < n) p[{index}] += {value};
}}
void launch(float* p, int n) {{ add<<<(n + 255) / 256, {threads}>>>(p, n); }}
"""
PLAIN = {"index": "i", "comment": "one", "value": "1.0f", "threads": 256}


def text_of_kernel(**changes):
    return ptxas.DeviceCode(KERNEL.format(**PLAIN | changes), ("-O3",))


@pytest.mark.parametrize(
    "change, same",
    [
        (("A docstring.", "Another."), True),
        (("void f()", "void g()"), True),
        (("return x", "return 2 * x"), False),
        (('NAME = "name"', 'NAME = "other"'), False),
        (("print(1)", "print(2)"), True),
    ],
)
def test_python_counts_without_docstring_and_texts(tmp_path, change, same):
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(VARIANT)
    new.write_text(VARIANT.replace(*change))
    assert (same_sass.python_of(old) == same_sass.python_of(new)) is same


def test_comments_are_no_tokens():
    assert same_sass.tokens("int a;  // one\n") == same_sass.tokens("/* two */ int\n    a;")
    assert same_sass.tokens('f("x // y");') != same_sass.tokens('f("x");')


@pytest.mark.parametrize(
    "new, same", [("int g(int b) { return b + 1; }", True), ("int g(int b) { return b + 2; }", False)], ids=["names", "code"]
)
def test_host_objects(tmp_path, new, same):
    old = HostCode("int f(int a) { return a + 1; }", ("-O3",))
    assert (same_sass.host_object(old, tmp_path) == same_sass.host_object(HostCode(new, ("-O3",)), tmp_path)) is same


@pytest.mark.full
@needs_nvcc
@pytest.mark.parametrize(
    "changes, kernels, launches",
    [
        ({"index": "element", "comment": "two"}, True, True),
        ({"value": "2.0f"}, False, True),
        ({"threads": 128}, True, False),
    ],
    ids=["names", "kernel", "launch"],
)
def test_kernels_and_launches(tmp_path, changes, kernels, launches):
    old, new = text_of_kernel(), text_of_kernel(**changes)
    assert (same_sass.sass(old, tmp_path) == same_sass.sass(new, tmp_path)) is kernels
    assert (same_sass.launches(old, tmp_path) == same_sass.launches(new, tmp_path)) is launches


def recorded():
    """{(file, revision): (renames, hash of what was measured, strict kernels that differ)} of results that name another."""
    found = {}
    for path in sorted((catalog.ROOT / "results").rglob("*.json")):
        if path.parent.name not in same_sass.NO_RUNS:
            for result in document.read(path)["results"]:
                if same := result.get("code_same_as"):
                    file = f"kernels/{result['model']}/{result['variant']}.py"
                    found[file, same["compared_with"]] = (
                        same.get("renamed", []),
                        result["code_sha256"],
                        same.get("strict_differs", []),
                    )
                    assert result["precision"] == "tf32" or not same.get("strict_differs"), "strict ones run other kernels now"
    return found


def shown(revision, file):
    """The file of a revision, or a skip where this clone does not have it."""
    done = subprocess.run(["git", "show", f"{revision}:{file}"], cwd=catalog.ROOT, capture_output=True)
    if done.returncode:
        pytest.skip(f"this clone has no {revision[:12]}:{file}")
    return done.stdout


@pytest.mark.parametrize("file, revision", recorded(), ids=lambda value: value.split("/")[-1][:24])
def test_what_was_compared_was_measured(tmp_path, file, revision):
    (tmp_path / "old.py").write_bytes(shown(revision, file))
    assert catalog.code_sha256(tmp_path / "old.py") == recorded()[file, revision][1]


@pytest.mark.full
@needs_nvcc
@pytest.mark.parametrize("file, revision", recorded(), ids=lambda value: value.split("/")[-1][:24])
def test_what_is_recorded_as_the_same_is_the_same(monkeypatch, file, revision):
    shown(revision, file)
    pairs, _, strict = recorded()[file, revision]
    renames = ["--rename", *(f"{old}={new}" for old, new in pairs)] if pairs else []
    monkeypatch.chdir(catalog.ROOT)
    monkeypatch.setattr("sys.argv", ["same_sass.py", file, revision, *renames, *(["--strict", *strict] if strict else [])])
    assert same_sass.main() == 0
