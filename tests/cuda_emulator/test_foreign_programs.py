"""Programs as others write them: what they print, which mistake is found in them, or why they are refused."""

import re
import subprocess

import pytest

from cuda_emulator import toolchain
from cuda_emulator.program import Program

# What most of them are: one kernel, of one or two blocks, that fills `out`.
MAIN = """
#include <cstdio>
int main() {{
    {type} *out, host[64];
    cudaMalloc(&out, sizeof host);
    cudaMemset(out, 0, sizeof host);
    k<<<{config}>>>(out);
    cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
    {print}
}}
"""
FIRST = r'printf("%g\n", double(host[0]));'


def with_main(text, type="int", config="1, 32", print=FIRST):
    return text + MAIN.format(type=type, config=config, print=print)


def run(folder, text, schedule="forward", name="program.cu", build_only=False, **others):
    """Build and run one; returns what it prints. Raises the Finding that ended it. `others` are files: {name: text}."""
    for file, content in {name: text, **others}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content, newline="")
    program = Program([folder / name, *(folder / file for file in others if not file.endswith("h"))], [folder])
    executable = program.read().build("check")
    if build_only:
        return executable
    done = {}

    def keep(process):
        done["printed"] = process

    with (folder / "printed").open("w") as printed:
        status, finding = program.run(executable, [], schedule=schedule, limit=120, stdout=printed)
    if finding:
        raise finding
    assert status == 0
    return (folder / "printed").read_text()


CONTAINERS = r"""
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
__global__ void k(int* p) {
    p[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) p[0] = p[63] + __shfl_sync(1u, p[2], 0);
}
template <class T> size_t grow(int n) {
    std::vector<T> some;
    for (int i = 0; i < n; ++i) some.push_back(T()), some.emplace_back(), some.insert(some.begin(), T());
    some.resize(5 * n);
    return some.size();
}
int main(int argc, char**) {
    size_t sum = grow<int>(argc) + grow<const void*>(argc) + grow<unsigned>(argc) + grow<char>(argc) + grow<std::string>(argc);
    sum += grow<std::unique_ptr<int>>(argc) + grow<size_t>(argc) + grow<std::pair<int, int>>(argc);
    std::map<std::string, int> named;
    std::unordered_map<unsigned, int> numbered;
    std::deque<int> queue;
    for (int i = 0; i < 40 * argc; ++i) named[std::to_string(i)] = numbered[i] = i, queue.push_back(i);
    int *d, h;
    cudaMalloc(&d, 256);
    k<<<2 - argc, 64>>>(d);
    cudaMemcpy(&h, d, 4, cudaMemcpyDeviceToHost);
    printf("%d %zu\n", h, sum + named.size() + numbered.size() + queue.size());
}
"""


@pytest.mark.parametrize("schedule", ["forward", "random"])
def test_containers_of_the_host_are_not_the_runtimes(tmp_path, schedule):
    assert run(tmp_path, CONTAINERS, schedule) == "65 160\n"


def test_nobody_takes_the_place_of_anothers_code_of_the_cpp_library(tmp_path):
    """By nm: neither a program nor the runtime lets go out what it instantiates of the C++ library."""
    for path in (run(tmp_path, CONTAINERS, build_only=True), toolchain.runtime_library()):
        listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        assert re.search(r" T (_Z1kPi|emulator_)", listed)
        assert not re.findall(r"^\w+ [TtWuVv] _Z(?:Z|GV|TV)*(?:NK?)?S[tabdios].*", listed, re.M)
