"""Plain CUDA programs: `python -m cuda_emulator FILE.cu`, the host API they use, and the libraries of device code."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cuda_emulator.errors import EmulatorError
from cuda_emulator.program import Program

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "programs"


def build(*names, mode="check"):
    program = Program([FOLDER / name for name in names], [])
    program.read()
    return program, program.build(mode)


@pytest.fixture(scope="module")
def mistakes():
    """A program whose argument chooses the mistake that it makes."""
    return build("mistakes.cu")


def run(built, *arguments, schedule="forward"):
    program, executable = built
    return program.run(executable, arguments, schedule=schedule, stdout=subprocess.PIPE, limit=120)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "cuda_emulator", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )


def test_a_program_runs_as_it_is():
    done = command(FOLDER / "mistakes.cu", "--", "none")
    assert (done.returncode, done.stderr) == (7, "")
    assert "thread 3 of 4\n" in done.stdout and done.stdout.endswith("sum 6\n")


SENTENCES = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda_pipeline.h>
struct Point { float x, y; };
__device__ float table[2][8];
__global__ void race(float* out) {
    __shared__ float partial[4][16];
    partial[threadIdx.x / 16][threadIdx.x % 16] = 1;  // race
    out[threadIdx.x] = partial[3][5];
}
__global__ void blocks(float* out) {
    out[threadIdx.x] = 1;  // blocks
}
__global__ void unset(float* out) {
    extern __shared__ float row[];
    out[threadIdx.x] = row[threadIdx.x + 3];  // unset
}
__global__ void bounds(Point* points, const float* in) {
    points[threadIdx.x].y = 1;  // bounds
}
__global__ void variable() {
    (&table[0][0])[threadIdx.x] = 1;  // variable
}
__global__ void group_copy(const float* in) {
    __shared__ alignas(16) float s[32];
    auto block = cooperative_groups::this_thread_block();
    s[threadIdx.x] = 0;
    __syncthreads();
    cooperative_groups::memcpy_async(block, s, in, 1024);  // group_copy
    cooperative_groups::wait(block);
}
__global__ void pipeline_copy(const float* in, float* out) {
    __shared__ alignas(16) float s[32];
    __syncthreads();
    __pipeline_memcpy_async(&s[threadIdx.x], &in[threadIdx.x], 4);
    __pipeline_commit();
    out[threadIdx.x] = s[threadIdx.x];  // pipeline_copy
}
__global__ void diverge() {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();  // diverge
}
int main(int, char** arguments) {
    const std::string name = arguments[1];
    float *in, *out;
    cudaMalloc(&in, 4096), cudaMalloc(&out, 256), cudaMemset(in, 0, 4096);
    if (name == "race") race<<<1, 64>>>(out);
    if (name == "blocks") blocks<<<2, 32>>>(out + 8);
    if (name == "unset") unset<<<1, 32, 256>>>(out);
    if (name == "bounds") bounds<<<1, 64>>>((Point*)out, in);
    if (name == "variable") variable<<<1, 32>>>();
    if (name == "group_copy") group_copy<<<1, 32>>>(in);
    if (name == "pipeline_copy") pipeline_copy<<<1, 32>>>(in, out);
    if (name == "diverge") diverge<<<1, 64>>>();
}
"""
SAID = {
    "race": "shared memory race on `partial[3][5]`: thread (53,0,0) writes it here, thread (0,0,0) read it at line 10, "
    "no barrier between them (memory model: a data race); kernel race, block (0,0,0)",
    "blocks": "race between blocks on `out[0]`: thread (0,0,0) writes it here, thread (0,0,0) of block (0,0,0) wrote it at "
    "line 13, nothing between that orders two blocks (memory model: a data race, also if both write the same value); "
    "kernel blocks, block (1,0,0)",
    "unset": "uninitialised shared read of `row[3]`: thread (0,0,0) reads it here, nothing has written it; "
    "kernel unset, block (0,0,0)",
    "bounds": "global memory out of bounds at byte 4 of `points[32]`: thread (32,0,0) writes 4 bytes here, "
    "the array has 32 elements; kernel bounds, block (0,0,0)",
    "variable": "global memory out of bounds at `table[2][0]`: thread (16,0,0) writes 4 bytes here, "
    "the array has 16 elements (2 x 8); kernel variable, block (0,0,0)",
    "group_copy": "shared memory out of bounds at `s[128]`: thread (0,0,0) writes 16 bytes here, the array has 32 elements; "
    "kernel group_copy, block (0,0,0)",
    "pipeline_copy": "asynchronous copy not waited for at `s[0]`: thread (0,0,0) reads it here, "
    "thread (0,0,0) began a copy into it at line 36, the copy may still be under way; kernel pipeline_copy, block (0,0,0)",
    "diverge": "barrier divergence: threads of one block wait at different barriers: thread (32,0,0) waits here, "
    "thread (0,0,0) waits at line 41; kernel diverge, block (0,0,0)",
}


def test_findings_say_what_where_who_else_and_why(tmp_path):
    source = tmp_path / "sentences.cu"
    source.write_text(SENTENCES)
    program = Program([source], []).read()
    built = program, program.build("check")
    for name, sentence in SAID.items():
        _, finding = run(built, name)
        line = 1 + next(at for at, text in enumerate(SENTENCES.split("\n")) if text.endswith(f"// {name}"))
        assert str(finding) == f"{source}:{line}: {sentence}"


LAUNCHES = r"""
#include <string>
__global__ void fill(int* x, int v) { x[threadIdx.x] = v; }
__global__ void add(int* x) { x[threadIdx.x] += 1; }
__global__ void total(const int* x, int* out) { atomicAdd(out, x[threadIdx.x]); }
template <int WAITS>
__global__ void dependent(const int* x, int* y) {
    if (WAITS == 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (WAITS == 2 && threadIdx.x == 0) cudaGridDependencySynchronize();
    __syncthreads();
    cudaTriggerProgrammaticLaunchCompletion();
    y[threadIdx.x] = x[31 - threadIdx.x];
}
template <class... A> void launch(cudaStream_t s, void (*kernel)(const int*, int*), const int* x, int* y) {
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1, config.blockDim = 32, config.stream = s, config.attrs = attribute, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, x, y);
}
int main(int, char** arguments) {
    const std::string name = arguments[1];
    const auto is = [&](const char* other) { return name == other; };
    int *x, *y, *z, host[32];
    cudaMalloc(&x, 128), cudaMalloc(&y, 128), cudaMalloc(&z, 128);
    cudaMemset(x, 0, 128), cudaMemset(y, 0, 128), cudaMemset(z, 0, 128);
    cudaStream_t a, b, c, d;
    cudaStreamCreate(&a), cudaStreamCreate(&b);
    cudaStreamCreateWithFlags(&c, cudaStreamNonBlocking), cudaStreamCreateWithFlags(&d, cudaStreamNonBlocking);
    cudaEvent_t event;
    cudaEventCreate(&event);
    if (is("early event")) cudaEventRecord(event, a), cudaStreamWaitEvent(b, event, 0);
    fill<<<1, 32, 0, is("nonblocking") || is("default beside") ? c : a>>>(x, 1);
    if (is("event") || is("through a third")) cudaEventRecord(event, a), cudaStreamWaitEvent(b, event, 0);
    if (is("event on the host")) cudaEventRecord(event, a), cudaEventSynchronize(event);
    if (is("stream synchronised")) cudaStreamSynchronize(a);
    if (is("device synchronised")) cudaDeviceSynchronize();
    if (is("copy")) cudaMemcpy(host, y, 128, cudaMemcpyDeviceToHost);
    if (is("default between")) add<<<1, 32>>>(x);
    if (is("through a third")) {
        add<<<1, 32, 0, b>>>(x);
        cudaEventRecord(event, b), cudaStreamWaitEvent(c, event, 0);
        add<<<1, 32, 0, c>>>(x);
        return 0;
    }
    if (is("sums")) {
        cudaEventRecord(event, a), cudaStreamWaitEvent(b, event, 0);
        total<<<1, 32, 0, a>>>(x, y), total<<<1, 32, 0, b>>>(x, y);
        return 0;
    }
    if (is("waits")) return launch(a, dependent<1>, x, y), launch(a, dependent<1>, y, x), 0;
    if (is("one waits")) return launch(a, dependent<2>, x, y), 0;
    if (is("does not wait")) return launch(a, dependent<0>, x, y), 0;
    if (is("writes before it waits")) return launch(a, dependent<0>, y, x), 0;
    if (is("the one before does not wait")) return launch(a, dependent<0>, y, z), launch(a, dependent<0>, x, y), 0;
    add<<<1, 32, 0, is("default beside") ? 0 : is("nonblocking") ? d : b>>>(x);
    return 0;
}
"""
IN_ORDER = (
    "event|event on the host|stream synchronised|device synchronised|copy|default between|through a third|sums|waits|one waits"
)
UNORDERED = (
    "two streams|early event|nonblocking|default beside|does not wait|writes before it waits|the one before does not wait"
)


def test_launches_that_nothing_orders(tmp_path):
    (tmp_path / "launches.cu").write_text(LAUNCHES)
    program = Program([tmp_path / "launches.cu"], []).read()
    built = program, program.build("check")
    for name in IN_ORDER.split("|"):
        assert run(built, name) == (0, None), name
    line_of = {text.strip(): number for number, text in enumerate(LAUNCHES.split("\n"), 1)}
    reads = line_of["y[threadIdx.x] = x[31 - threadIdx.x];"]
    for name in UNORDERED.split("|"):
        _, finding = run(built, name)
        assert finding and finding.kind == "race between launches", (name, str(finding))
        assert finding.other.line == 3 and finding.line in (4, reads), (name, str(finding))


def test_the_version_of_cpp(tmp_path):
    (tmp_path / "new.cu").write_text(
        "#include <concepts>\ntemplate <std::integral T> __global__ void k(T* p) { *p = 3; }\nint main() {\n    int* p;\n"
        "    cudaMallocManaged(&p, 4);\n    k<<<1, 1>>>(p);\n    cudaDeviceSynchronize();\n    return *p;\n}\n"
    )
    assert command("-std=c++20", tmp_path / "new.cu").returncode == 3
    assert "new.cu:2: error: " in command(tmp_path / "new.cu").stderr


def test_the_first_finding_ends_a_program_with_status_1():
    done = command(FOLDER / "mistakes.cu", "--", "race")
    assert done.returncode == 1 and "sum" not in done.stdout
    line = 1 + (FOLDER / "mistakes.cu").read_text().splitlines().index("    *out += threadIdx.x;  // race")
    assert done.stderr.startswith(f"{FOLDER / 'mistakes.cu'}:{line}: global memory race on `out[0]`: ")


def test_a_race_that_a_program_accepts_is_counted(tmp_path):
    text = (FOLDER / "mistakes.cu").read_text().replace("// race", "// emulator: benign race")
    line = 1 + text.splitlines().index("    *out += threadIdx.x;  // emulator: benign race")
    (tmp_path / "accepts.cu").write_text(text)
    done = command(tmp_path / "accepts.cu", "-I", FOLDER, "--", "race")
    assert done.returncode == 7 and "sum" in done.stdout, done.stderr
    assert re.fullmatch(rf"{tmp_path}/accepts\.cu:{line}: \d+ races? accepted \(emulator: benign race\)\n", done.stderr)


@pytest.mark.parametrize(
    "mistake, file, marked, kind",
    [
        ("bounds", "mistakes.cuh", "// bounds", "global memory out of bounds"),
        ("host reads", "mistakes.cu", "// host reads", "device memory used by host code"),
        ("direction", "mistakes.cu", "// direction", "invalid argument"),
        ("too much", "mistakes.cu", "// too much", "global memory out of bounds"),
        ("symbol", "mistakes.cu", "// symbol", "global memory out of bounds"),
        ("freed twice", "mistakes.cu", "// freed twice", "invalid argument"),
        ("freed inside", "mistakes.cu", "// freed inside", "invalid argument"),
        ("product", "mistakes.cu", "// product", "uninitialised global read"),
        ("set on host", "mistakes.cu", "// set on host", "invalid argument"),
        ("pinned", "mistakes.cu", "// pinned", "not supported"),
    ],
)
def test_mistakes_are_found_in_their_file_and_line(mistakes, mistake, file, marked, kind):
    status, finding = run(mistakes, mistake)
    lines = (FOLDER / file).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(marked))
    assert status == 1 and finding.kind == kind
    assert (Path(finding.file), finding.line) == (FOLDER / file, line)


def test_a_time_limit_says_where_a_kernel_was(mistakes):
    program, executable = mistakes
    status, finding = program.run(executable, ["endless"], limit=2)
    (line,) = (n for n, text in enumerate((FOLDER / "mistakes.cu").read_text().splitlines(), 1) if text.endswith("// endless"))
    assert (status, finding.kind, finding.line) == (1, "time limit", line)


def test_a_call_from_another_file_is_named(mistakes):
    _, finding = run(mistakes, "bounds")
    assert finding.callers and str(finding.callers[-1]).endswith(" of mistakes.cu")


def test_what_the_command_line_gets_wrong(tmp_path):
    assert command(tmp_path / "missing.cu").returncode == 2
    assert "no such file" in command(tmp_path / "missing.cu").stderr


def test_two_files_with_a_main_are_explained_by_the_line_of_the_second(tmp_path):
    (tmp_path / "one.cu").write_text("int main() { return 0; }\n")
    (tmp_path / "two.cu").write_text("\nint main() { return 1; }\n")
    done = command(tmp_path / "one.cu", tmp_path / "two.cu")
    first, *_ = done.stderr.splitlines()
    assert first == f"{tmp_path / 'two.cu'}:2: error: main is defined in another of the program's files, too"


def test_a_broken_program_is_explained_by_its_own_line(tmp_path):
    (tmp_path / "helper.cuh").write_text("#pragma once\n__device__ int twice(int x) { return 2 * y; }\n")
    (tmp_path / "broken.cu").write_text('#include "helper.cuh"\nint main() {}\n')
    done = command(tmp_path / "broken.cu")
    assert done.returncode == 1
    first, source, caret, *_ = done.stderr.splitlines()
    assert first == f"{tmp_path / 'helper.cuh'}:2: error: ‘y’ was not declared in this scope"
    assert caret.index("^") == source.index("y;")


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("cudaGraphConditionalHandle h;", "the emulator does not support cudaGraphConditionalHandle"),
        (
            "cooperative_groups::block_tile_memory<64> m;",
            "the emulator does not support tiles of several warps (block_tile_memory)",
        ),
        ("texture<float, 1> t;", "a texture reference (texture<...>), which CUDA 12 removed; use a texture object"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tmp_path, line, complaint):
    (tmp_path / "text.cu").write_text(f"{line}\nint main() {{}}\n")
    program = Program([tmp_path / "text.cu"], [])
    with pytest.raises(EmulatorError) as raised:
        program.read().build("check")
    first = str(raised.value).splitlines()[0]
    assert first.startswith(f"{tmp_path / 'text.cu'}:1: ") and first.endswith(complaint)


# Each file checks its own results, and returns the line of the first that is wrong.
@pytest.mark.parametrize(
    "name", ["host_api", "libraries", "language", "textures", "fragments", "small_numbers", "graphs", "older"]
)
@pytest.mark.parametrize("mode", ["check", pytest.param("fast", marks=pytest.mark.full)])
def test_own_results(name, mode):
    built = build(f"{name}.cu", mode=mode)
    program, executable = built
    for schedule in ("forward", "reversed", "random") if mode == "check" else ("forward",):
        status, finding = program.run(executable, [], mode, schedule, limit=120)
        assert finding is None, str(finding)
        assert status == 0, f"line {status} (modulo 256) of {name}.cu"


def test_a_finding_as_junit_and_sarif(tmp_path):
    junit, sarif = tmp_path / "a.xml", tmp_path / "a.sarif"
    (tmp_path / "broken.cu").write_text("int main() {\n  return nothing;\n}\n")
    lines = (FOLDER / "mistakes.cu").read_text().splitlines()
    race = next(number for number, text in enumerate(lines, 1) if text.endswith("// race"))
    for file, arguments, rule, line in (
        (FOLDER / "mistakes.cu", ("--", "race"), "global memory race", race),
        (tmp_path / "broken.cu", (), "build", 2),
        (FOLDER / "mistakes.cu", ("--", "none"), None, None),
    ):
        done = command(file, "--junit", junit, "--sarif", sarif, *arguments)
        (case,) = ElementTree.fromstring(junit.read_text()).iter("testcase")
        results = json.loads(sarif.read_text())["runs"][0]["results"]
        if rule is None:
            assert results == [] and case.find("error").get("message") == "exit status 7" and done.returncode == 7
            continue
        assert done.returncode == 1 and case.find("failure").get("message") == done.stderr.strip()
        (found,) = results
        place = found["locations"][0]["physicalLocation"]
        assert (found["ruleId"], place["region"]["startLine"]) == (rule, line)
        assert place["artifactLocation"]["uri"].endswith(file.name)
    done = command(FOLDER / "mistakes.cu", "--junit", tmp_path / "none" / "a.xml")
    assert done.returncode == 2 and "make it first" in done.stderr
