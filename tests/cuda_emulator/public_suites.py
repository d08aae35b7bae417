"""Other people's CUDA under check mode: suites for verifiers (GPUVerify, Faial), benchmarks, samples and textbooks.

    python tests/cuda_emulator/public_suites.py SUITE=FOLDER ... [--only TEXT] [--every N]

Each FOLDER is a local copy of the repository; suites not named are left out, and nothing of theirs is kept here. Each program
runs in the forward schedule, with sizes and repetitions made smaller where its text names them (check mode is slow). Prints a
line for each program, then the table for cuda_emulator/README.md.
"""

import argparse
import collections
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, where it is run as a script

from cuda_emulator import runtime
from cuda_emulator.errors import EmulatorError
from cuda_emulator.program import Program

OUTCOMES = ("right", "finding", "wrong result", "not built", "no data", "crash", "no end")
# In the output of a program that ends with an error: it wants arguments or a file.
WANTS = r"\busage\b|No such file|(open|load)\w*\b.*\b(file|db|input|data)\b|\b(file|input|data)\b.*\b(open|load)|not found"


@dataclass
class Case:
    """A program: its files as they are to be compiled, and what is expected of it ("right", "wrong" or "")."""

    suite: str
    name: str
    files: list
    folders: list
    arguments: list = field(default_factory=list)
    expected: str = ""
    replacements: list = field(default_factory=list)  # (pattern, text) for the program's own files
    folder: Path | None = None  # whose files are copied before they are changed
    defines: list = field(default_factory=list)
    absent: str = "(?!)"  # in its output: it is built without what its arguments ask for
    fails: str = r"\b(test failed|mismatch|error)\b"  # in its output: the result is wrong


# ---- GPUVerify: kernels without a host program, annotated with the launch

# What the annotations say to GPUVerify and a compiler need not hear, and a host program for a kernel of any parameters:
# pointers get memory of zeros, numbers the number of threads along x, or what the annotations ask for; a structure's numbers
# are zero. Functions without a body, any behaviour of which GPUVerify allows, return zero.
HARNESS = r"""
#include <assert.h>
#include <cooperative_groups.h>
#include <tuple>
#include <type_traits>
template <class Group>
__device__ void synchronize(const Group& group) {{ group.sync(); }}
#define __requires(...)
#define __requires_fresh_array(...)
#define __ensures(...)
#define __modifies(...)
#define __invariant(...) true
#define __global_invariant(...) true
#define __axiom(...)
#define __assume(...)
#define __function_wide_invariant(...)
#define __function_wide_candidate_invariant(...)
#define __candidate_invariant(...)
#define __assert(...) {assertion}
#define __global_assert(...)
#define __barrier_invariant(...)
#define __barrier_invariant_1(...)
#define __non_temporal_loads_begin()
#define __non_temporal_loads_end()
#include "{file}"
{bodies}
{addresses}
template <class T>
T harness_argument(unsigned threads);
struct harness_field {{
    unsigned threads;
    template <class T>
    operator T() const {{
        if constexpr (std::is_arithmetic<T>::value || std::is_enum<T>::value) return T();
        else return harness_argument<T>(threads);
    }}
}};
template <class T, size_t... I>
auto harness_structure(unsigned threads, std::index_sequence<I...>, int) -> decltype(T{{harness_field{{(I, threads)}}...}}) {{
    return T{{harness_field{{((void)I, threads)}}...}};
}}
template <class T, size_t... I>  // it has fewer fields than I
T harness_structure(unsigned threads, std::index_sequence<I...>, long) {{
    if constexpr (sizeof...(I) == 0) return T();
    else return harness_structure<T>(threads, std::make_index_sequence<sizeof...(I) - 1>(), 0);
}}
template <class T>
T harness_argument(unsigned threads) {{
    if constexpr (std::is_pointer<T>::value) {{
        void* memory;
        cudaMalloc(&memory, 1 << 23);
        cudaMemset(memory, 0, 1 << 23);
        return (T)memory;
    }} else if constexpr (std::is_arithmetic<T>::value || std::is_enum<T>::value)
        return T(threads);
    else if constexpr (std::is_aggregate<T>::value)
        return harness_structure<T>(threads, std::make_index_sequence<16>(), 0);
    else {{  // members that nobody sees: pointers
        T structure{{}};
        for (size_t at = 0; at + sizeof(void*) <= sizeof structure; at += sizeof(void*)) {{
            void* const memory = harness_argument<void*>(threads);
            memcpy((char*)&structure + at, &memory, sizeof memory);
        }}
        return structure;
    }}
}}
template <size_t I, class T>
T harness_argument(unsigned threads) {{
    {required}
    return harness_argument<T>(threads);
}}
template <class... P, size_t... I>
void harness_launch(void (*kernel)(P...), dim3 grid, dim3 block, bool cooperative, std::index_sequence<I...>) {{
    const unsigned threads = grid.x * block.x;
    if (cooperative) {{
        std::tuple<std::decay_t<P>...> values{{harness_argument<I, std::decay_t<P>>(threads)...}};
        const auto launch = [&](auto&... v) {{
            void* a[] = {{&v..., nullptr}};
            cudaLaunchCooperativeKernel(kernel, grid, block, a, 0, 0);
        }};
        std::apply(launch, values);
    }} else
        kernel<<<grid, block>>>(harness_argument<I, std::decay_t<P>>(threads)...);
}}
template <class... P>
void harness_launch(void (*kernel)(P...), dim3 grid, dim3 block, bool cooperative) {{
    harness_launch(kernel, grid, block, cooperative, std::index_sequence_for<P...>{{}});
}}
int main() {{ harness_launch({kernel}, dim3({grid}), dim3({block}), {cooperative}); }}
"""


def gpuverify(folder, work):
    place = folder / "testsuite" / "CUDA"
    for path in sorted(place.rglob("*.cu")):
        first, *rest = path.read_text(errors="replace").splitlines()
        options = next((line for line in rest[:3] if "--blockDim" in line or "--gridDim" in line), "")
        expected = "right" if first.startswith("//pass") else "wrong" if first.startswith("//xfail") else ""
        yield from harnessed("GPUVerify", str(path.parent.relative_to(place)), path, options, expected, work)


def faial(folder, work):
    """Faial's examples, by the beginnings of their names, at its own default of 1024 threads."""
    for path in sorted((folder / "examples" / "drf").glob("*.cu")):
        expected = {"racy": "wrong", "drf": "right"}.get(path.name.split("-")[0], "")
        options = re.search(r"--(?:blockDim|gridDim).*", path.read_text(errors="replace"))
        yield from harnessed("Faial", path.stem, path, options[0] if options else "--blockDim=1024", expected, work)


def harnessed(suite, name, path, options, expected, work):
    text = path.read_text(errors="replace")
    kernels = re.findall(r"__global__\s+(?:\w+\s+)*?void\s+(?:__\w+\s*\([^)]*\)\s*)?(\w+)\s*\(", text)
    if not kernels:
        return
    block, grid = launch_sizes(options)
    file = work / suite / name.replace("/", "-") / "harness.cu"
    file.parent.mkdir(parents=True, exist_ok=True)
    cooperative = str("grid_group" in text).lower()
    file.write_text(
        HARNESS.format(
            file=path.name,
            kernel=instance(text, kernels[-1]),
            grid=grid,
            block=block,
            cooperative=cooperative,
            required=required(text, kernels[-1]),
            bodies=bodies(text),
            addresses="".join(
                f"__device__ auto address_of_{name} = {name};\n"
                for name in device_functions(text)
                if re.search(rf"(__requires|__assume)\(\w+ == {name}\b", text)
            ),
            # What asks GPUVerify's own functions cannot be evaluated.
            assertion="" if re.search(r"__assert\(.*\b__\w+\(", text) else "assert(__VA_ARGS__)",
        )
    )
    defines = re.findall(r"-D(\S+)", options)
    yield Case(suite, name, [file], [path.parent], expected=expected, fails="(?!)", defines=defines)


def instance(text, kernel):
    """The kernel as it is named where it is launched: of a template that of int, and of 1."""
    parameters = re.search(rf"template\s*<([^<>]*)>[^;{{}}()]*\b{kernel}\s*\(", text)
    types = parameters[1].split(",") if parameters else []
    given = ", ".join("int" if each.split()[0] in ("typename", "class") else "1" for each in types)
    return f"{kernel}<{given}>" if given else kernel


def required(text, kernel):
    """A statement for each parameter of the kernel that the text says to equal a number or a function, or to be below one.

    What is in a comment, as in `//x = 185`, is GPUVerify's own example of a value with which the kernel is wrong.
    """
    parameters = re.search(rf"\b{kernel}\s*\(([^)]*)\)", text)[1].split(",")
    statements = []
    for at, name in enumerate(re.search(r"\w*\s*$", parameter)[0].strip() for parameter in parameters):
        asked = (
            re.findall(rf"(?:__requires|__assume)\(({name}) (==|<) (\w+)\b|^//({name}) (=) (\d+)$", text, re.M) if name else []
        )
        for *_, relation, value in ([each for each in found if each] for found in asked):
            if value.isdigit():
                statements.append(f"if constexpr (I == {at}) return (T)({value}{' - 1' if relation == '<' else ''});")
            elif value in device_functions(text):
                copied = (
                    f"std::decay_t<decltype(address_of_{value})> f; cudaMemcpyFromSymbol(&f, address_of_{value}, sizeof f);"
                )
                statements.append(f"if constexpr (I == {at}) {{ {copied} return (T)f; }}")
    return " ".join(statements)


def device_functions(text):
    """Their names."""
    return set(re.findall(r"__device__[^;{}()]*\b(\w+)\(", text))


def bodies(text):
    """Definitions of the functions that the text only declares."""
    found = re.findall(r"^[ \t]*((?:extern +|__device__ +)*)((?:\w+ +|\w+ *\* *)+)(\w+)\s*\(([^(){};]*)\)\s*;", text, re.M)
    return "\n".join(
        f"typedef {kind} of_{name}; {kind} {name}({parameters}) {{ return of_{name}(); }}"
        for _, kind, name, parameters in found
        if kind.strip() not in ("return", "typedef", "else") and not re.search(rf"\b{name}\s*\([^;{{}}()]*\)\s*\{{", text)
    )


def launch_sizes(options):
    """The arguments of dim3 for block and grid; a block has at most 1024 threads on a device, whatever GPUVerify takes."""
    sizes = {}
    for name in ("blockDim", "gridDim"):
        found = re.search(rf"--{name}=\[?([\d,]+)\]?", options)
        sizes[name] = [int(size) for size in found[1].split(",") if size] if found else [1]
    left = 1024
    for at, size in enumerate(sizes["blockDim"]):
        sizes["blockDim"][at] = min(size, left)
        left //= sizes["blockDim"][at]
    return (", ".join(map(str, each)) for each in sizes.values())


# ---- programs with a host side of their own


def llm_c(folder, work):
    """Each file with each kernel that its first comment names, at B = 2, T = 64, C = 128 and the like."""
    here = folder / "dev" / "cuda"
    smaller = [
        (r"\b((?:const )?(?:int|size_t|long|int64_t) (?:B|NH)) = \d+", r"\1 = 2"),
        (r"\b((?:const )?(?:int|size_t|long|int64_t) T) = \d+", r"\1 = 64"),
        (r"\b((?:const )?(?:int|size_t|long|int64_t) (?:C|OC)) = [^;]+", r"\1 = 128"),
        (r"\b((?:const )?(?:int|size_t|long|int64_t) (?:V|Vp)) = \d+", r"\1 = 512"),
        (r"\bB = 8, T = 1024", "B = 2, T = 64"),
        (r"\b(num_parameters) = \d+", r"\1 = 4096"),
        (r"\bint (L|dim_\d) = \d+", r"int \1 = 4"),
        (r"\b(repeat_times) = \d+", r"\1 = 1"),
        (r"block_sizes\[\] = \{[^}]*\}", "block_sizes[] = {128, 512}"),
    ]
    absent = "Invalid kernel number|only supported for"  # cuDNN's, and those of another precision
    for path in sorted(here.glob("*.cu")):
        if path.stem == "nccl_all_reduce":  # for several devices
            continue
        named = re.findall(rf"\./{path.stem} (\d+)", path.read_text())
        longer = [(r"\bT = 64", "T = 128")] if path.stem == "trimat_forward" else []  # it asserts multiples of 128
        for kernel in sorted(set(named), key=int) or ["1"]:
            name = f"{path.stem} {kernel}"
            yield Case(
                "llm.c",
                name,
                [path],
                [here],
                [kernel],
                "right",
                smaller + longer,
                here,
                absent=absent,
                fails=r"mismatch|not ok\b",
            )


SGEMM = r"""
#include <vector>
#include <cmath>
#include "runner.cuh"
int main(int argc, char** argv) {
    const int n = 128, kernel = atoi(argv[1]);
    std::vector<float> a(n * n), b(n * n), c(n * n), expected(n * n);
    for (int i = 0; i < n * n; ++i) a[i] = i % 7 - 3, b[i] = i % 5 - 2, c[i] = i % 3;
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < n; ++j) {
            float sum = 0;
            for (int k = 0; k < n; ++k) sum += a[i * n + k] * b[k * n + j];
            expected[i * n + j] = 0.5f * sum + 3.0f * c[i * n + j];
        }
    float *da, *db, *dc;
    cudaMalloc(&da, n * n * 4), cudaMalloc(&db, n * n * 4), cudaMalloc(&dc, n * n * 4);
    cudaMemcpy(da, a.data(), n * n * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(db, b.data(), n * n * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(dc, c.data(), n * n * 4, cudaMemcpyHostToDevice);
    cublasHandle_t handle;
    cublasCreate(&handle);
    run_kernel(kernel, n, n, n, 0.5f, da, db, 3.0f, dc, handle);
    cudaMemcpy(c.data(), dc, n * n * 4, cudaMemcpyDeviceToHost);
    for (int i = 0; i < n * n; ++i)
        if (std::abs(c[i] - expected[i]) > 1e-2f) return printf("mismatch at %d: %f, not %f\n", i, c[i], expected[i]), 1;
}
"""


def sgemm(folder, work):
    file = work / "SGEMM_CUDA" / "main.cu"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SGEMM)
    source = folder / "src"
    for kernel in range(13):
        yield Case("SGEMM_CUDA", f"kernel {kernel}", [file, source / "runner.cu"], [source], [str(kernel)], "right")


# What a sample's text says of sizes and repetitions, made smaller.
SMALLER = {
    "matrixMul": [
        (r"int nIter = \d+", "int nIter = 1"),
        (r"5 \* 2 \* block_size", "2 * block_size"),
        (r"5 \* 4 \* block_size", "4 * block_size"),
    ],
    "reduction": [(r"1 << 24", "1 << 14"), (r"testIterations = \d+", "testIterations = 1")],
    "scan": [(r"13 \* 1048576 / 2", "262144"), (r"(iCycles|iterations|ITERATIONS) = \d+", r"\1 = 1")],
    "histogram": [(r"64 \* 1048576", "64 * 1024"), (r"numRuns = \d+", "numRuns = 1")],
    "scalarProd": [(r"VECTOR_N = \d+", "VECTOR_N = 8"), (r"ELEMENT_N = \d+", "ELEMENT_N = 1024")],
    "sortingNetworks": [(r"N = 1048576", "N = 16384"), (r"numIterations = \d+", "numIterations = 1")],
    "convolutionSeparable": [
        (r"image[WH] = \d+", lambda m: m[0].split("=")[0] + "= 256"),
        (r"iterations = \d+", "iterations = 1"),
    ],
    "threadFenceReduction": [(r"1 << 20", "1 << 14"), (r"testIterations = \d+", "testIterations = 1")],
    "reductionMultiBlockCG": [(r"1 << 25", "1 << 14"), (r"testIterations = \d+", "testIterations = 1")],
    "shfl_scan": [(r"65536", "16384"), (r"1 << 20", "1 << 14")],
    "transpose": [(r"NUM_REPS\s+\d+", "NUM_REPS 1"), (r"MATRIX_SIZE_X\s+\d+|matrix_size\s*=\s*\d+", lambda m: m[0])],
    "BlackScholes": [(r"OPT_N = \d+", "OPT_N = 16384"), (r"NUM_ITERATIONS = \d+", "NUM_ITERATIONS = 1")],
    "fastWalshTransform": [(r"log2Data = \d+", "log2Data = 14")],
    "mergeSort": [(r"4 \* 1048576", "16384")],
    "simpleStreams": [
        (r"16 \* 1024 \* 1024", "64 * 1024"),
        (r"nreps = \d+", "nreps = 1"),
        (r"niterations = \d+", "niterations = 1"),
    ],
    "simpleMultiCopy": [(r"1 << 22", "1 << 14"), (r"nreps = \d+", "nreps = 4")],
    "simpleZeroCopy": [(r"1048576", "16384")],
    "asyncAPI": [(r"16 \* 1024 \* 1024", "64 * 1024")],
    "simpleOccupancy": [(r"count = 1000000", "count = 20000")],
    "simpleAtomicIntrinsics": [(r"numBlocks = \d+", "numBlocks = 8")],
    "globalToShmemAsyncCopy": [(r"nIter = \d+", "nIter = 1")],
    "warpAggregatedAtomicsCG": [(r"10000000", "20000")],
    "binaryPartitionCG": [(r"1024 \* 100", "1024 * 4")],
    "simpleAWBarrier": [(r"1 << 20", "1 << 14")],
    "simpleCallback": [
        (r"N_workloads\s*=\s*\d+", "N_workloads = 2"),
        (r"N_elements_per_workload = \d+", "N_elements_per_workload = 4096"),
    ],
    "clock": [],
    "simpleTemplates": [],
    "simpleVoteIntrinsics": [],
    "simplePrintf": [],
    "simpleAssert": [],
    "simpleCooperativeGroups": [],
    "vectorAdd": [],
    "inlinePTX": [],
    "fp16ScalarProduct": [],
    "template": [],
    "dwtHaar1D": [],
    "simpleTexture": [],
    "simpleSurfaceWrite": [],
    "simpleLayeredTexture": [],
    "simplePitchLinearTexture": [(r"NUM_REPS \d+", "NUM_REPS 1"), (r"n([xy]) = 2048", r"n\1 = 128")],
    "convolutionTexture": [
        (r"image[WH] = [^;]+", lambda m: m[0].split("=")[0] + "= 256"),
        (r"iterations = \d+", "iterations = 1"),
    ],
}
SAMPLE_ARGUMENTS = {
    "reduction": [["--n=65536", f"--kernel={kernel}"] for kernel in (0, 3, 6, 8, 9)],
    "globalToShmemAsyncCopy": [[f"-kernel={kernel}", "-wA=64", "-hA=64", "-wB=64", "-hB=64"] for kernel in range(8)],
    "matrixMul": [["-wA=64", "-hA=64", "-wB=64", "-hB=64"]],
    "transpose": [["-dimX=64", "-dimY=64"]],
}


def samples(folder, work):
    found = {path.name: path for path in (folder / "Samples").glob("*/*") if path.is_dir()}
    for name, smaller in sorted(SMALLER.items()):
        if name not in found:
            continue
        here = found[name]
        files = sorted(path for path in here.iterdir() if path.suffix in (".cu", ".cpp") and "nvrtc" not in path.name)
        texts = {path: path.read_text(errors="replace") for path in files}
        files = [path for path in files if not any(f'"{path.name}"' in text for text in texts.values())]  # included ones
        for arguments in SAMPLE_ARGUMENTS.get(name, [[]]):
            label = " ".join([name, *arguments])
            fails = r"test failed|\bfailed!|mismatch|: error|Result = FAIL"
            yield Case("CUDA samples", label, files, [folder / "Common"], arguments, "", smaller, here, fails=fails)


def polybench(folder, work):
    """PolyBench-ACC's CUDA programs, which compare with the host themselves, at the smallest of their sizes."""
    folders = [folder / "common", folder / "CUDA" / "utilities"]
    for path in sorted((folder / "CUDA").rglob("*.cu")):
        fails = r"Threshold of .*: [1-9]"
        yield Case("PolyBench", path.stem, [path], [path.parent, *folders], fails=fails, defines=["MINI_DATASET", "RUN_ON_CPU"])


# Rodinia's that need no file of data, with arguments for small sizes, and what of their text is compiled.
RODINIA = {
    "backprop": (["1024"], ["backprop_cuda.cu", "backprop.c", "facetrain.c", "imagenet.c"]),
    "gaussian": (["-s", "16"], ["gaussian.cu"]),
    "nw": (["64", "10"], ["needle.cu"]),
    "particlefilter": (["-x", "32", "-y", "32", "-z", "3", "-np", "100"], ["ex_particle_CUDA_naive_seq.cu"]),
    "pathfinder": (["1000", "20", "5"], ["pathfinder.cu"]),
    "srad/srad_v2": (["64", "64", "0", "31", "0", "31", "0.5", "2"], ["srad.cu"]),
    "streamcluster": (
        ["4", "8", "16", "256", "256", "100", "none", "output.txt", "1"],
        ["streamcluster_cuda_cpu.cpp", "streamcluster_cuda.cu"],
    ),
}


def rodinia(folder, work):
    for name, (arguments, files) in RODINIA.items():
        here = folder / "cuda" / name
        yield Case("Rodinia", name, [here / file for file in files], [here], arguments, folder=here, fails="(?!)")


def cuda_by_example(folder, work):
    """The book's programs; those that draw need OpenGL."""
    for path in sorted(folder.glob("chapter*/**/*.cu")):
        yield Case("CUDA by Example", str(path.relative_to(folder).with_suffix("")), [path], [folder / "common"], fails="(?!)")


HECBENCH = {"dense-embedding": ["1000", "16", "1"]}  # it asserts that there are more rows than the square of a batch


def hecbench(folder, work):
    """Every program, with the arguments of its Makefile, large numbers among them made smaller."""
    for here in sorted((folder / "src").glob("*-cuda")):
        files = sorted(path for path in here.iterdir() if path.suffix in (".cu", ".cpp", ".cc"))
        texts = {path: path.read_text(errors="replace") for path in files}
        files = [path for path in files if not any(f'"{path.name}"' in text for text in texts.values())]
        mains = [path for path in files if re.search(r"\bmain\s*\(", texts[path])]
        if "main.cu" in (path.name for path in mains):  # the others are programs of their own
            files = [path for path in files if path not in mains or path.name == "main.cu"]
        made = here / "Makefile"
        asked = re.sub(r"\\\s*\n", " ", made.read_text(errors="replace")) if made.is_file() else ""
        line = re.search(r"\./\$\(program\)(.*)", asked)
        folders = [here, *(here / name for name in re.findall(r"-I *(\.\./\S+)", asked) if (here / name).is_dir())]
        arguments = [str(min(int(each), 64)) if each.isdigit() else each for each in (line[1].split() if line else [])]
        arguments = [str(here / each) if "/" in each and (here / each).exists() else each for each in arguments]
        arguments = HECBENCH.get(here.name.removesuffix("-cuda"), arguments)
        if files:
            fails = r"\b(FAIL(ED)?|mismatch|error)\b"
            yield Case("HeCBench", here.name.removesuffix("-cuda"), files, folders, arguments, folder=here, fails=fails)


def indigo(folder, work):
    """The codes that IndigoSuite's generator has written ("Bug" in the name: wrong), on one small graph."""
    graphs = (folder / "inputs").rglob("undirect_power_law_*.egr")
    graph = max((path for path in graphs if path.stat().st_size < 2000), key=lambda path: path.stat().st_size)
    for path in sorted((folder / "CUDA").rglob("*.cu")):
        expected = "wrong" if "Bug" in path.stem else "right"
        yield Case("Indigo", path.stem, [path], [folder / "include"], [str(graph), "64", "2"], expected, fails="differs")


def indigo2(folder, work):
    """All of its CUDA codes, on the largest of its small graphs."""
    graph = max((folder / "small-inputs").iterdir(), key=lambda path: path.stat().st_size)
    for path in sorted((folder / "codes" / "cuda").rglob("*.cu")):
        behind = {"bfs": ["0", "1"], "sssp": ["0", "1"], "pr": []}.get(path.stem.split("_")[0].lower(), ["1"])
        yield Case("Indigo2", path.stem, [path], [folder / "include"], [str(graph), *behind], "right")


def scor(folder, work):
    """The microbenchmarks, which say in their names whether they race."""
    for path in sorted((folder / "microbenchmarks" / "src").glob("*.cu")):
        yield Case("ScoR", path.stem, [path], [], expected="wrong" if path.stem.startswith("race") else "right")


def plain(suite, place, smaller=(), fails=r"test failed|\bmismatch|do(n't| not) match|\*\*\* FAILED", asked=()):
    """A suite whose programs are one file each, in `place` of its folder, with a shared folder called common.

    asked: (pattern of names, arguments); of the arguments "TEXT" and "KEY" are files of 4096 and 16 bytes.
    """

    def cases(folder, work):
        for path in sorted((folder / place).rglob("*.cu")):
            text = path.read_text(errors="replace")
            if "FIXME" in text or "main" not in text:  # for the reader to complete; a part of another
                continue
            name = str(path.relative_to(folder / place).with_suffix(""))
            arguments = next((given for pattern, given in asked if re.search(pattern, name)), [])
            for given, size in (("TEXT", 4096), ("KEY", 16)):
                (work / given).write_bytes(bytes(at * 7 % 251 for at in range(size)))
            arguments = [str(work / each) if each in ("TEXT", "KEY") else each for each in arguments]
            yield Case(suite, name, [path], [path.parent], arguments, "", list(smaller), folder / place, fails=fails)

    return cases


POWERS = (r"(?<!\w)1 ?<< ?(?:1[7-9]|2\d|3\d)\b", "(1 << 14)")
SQUARES = (r"\b(n[xy]|[MNK]) = (\(?)1 << (?:9|1[0-4])\b", r"\1 = \g<2>1 << 7")
PROFESSIONAL = [SQUARES, POWERS, (r"#define N 300000", "#define N 300"), (r"#define N 100000", "#define N 1000")]
CRYPT = ["encrypt", "TEXT", "crypted", "KEY"]
PROFESSIONAL_ARGUMENTS = [("[mM]emTransfer$", ["1"]), (r"crypt\.(config|flexible)", [*CRYPT, "128"])]
PROFESSIONAL_ARGUMENTS += [(r"crypt\.openmp", [*CRYPT, "128", "2", "50"]), (r"crypt\.", CRYPT)]
OLCF = [(r"DSIZE = (?:4096|8192|16384)\b", "DSIZE = 128"), (r"32 ?\* ?1048576", "4096")]
OLCF += [(r"8ULL ?\* ?1024ULL ?\* ?1024ULL", "16384ULL"), (r"#define N 500000", "#define N 5000"), POWERS]
BLOG = [POWERS, (r"NUM_REPS = 100", "NUM_REPS = 1"), (r"\b(n|N) = 1048576", r"\1 = 16384"), (r"4 ?\* ?1024 ?\* ?256", "16384")]

SUITES = {
    "indigo": indigo,
    "indigo2": indigo2,
    "scor": scor,
    "professional-cuda": plain("Professional CUDA C Programming", ".", PROFESSIONAL, asked=PROFESSIONAL_ARGUMENTS),
    "olcf": plain("OLCF's training", "exercises", OLCF),
    "nvidia-blog": plain("NVIDIA's blog", ".", BLOG),
    "crash-course": plain("CUDA Crash Course", ".", [SQUARES, POWERS]),
    "gpuverify": gpuverify,
    "faial": faial,
    "llm.c": llm_c,
    "SGEMM_CUDA": sgemm,
    "cuda-samples": samples,
    "polybench": polybench,
    "rodinia": rodinia,
    "cuda-by-example": cuda_by_example,
    "hecbench": hecbench,
}


def shrunk(case, work):
    """The case with a copy of its folder whose files have the replacements made."""
    if not case.folder:
        return case
    copy = work / case.suite / re.sub(r"\W+", "-", case.name)
    shutil.copytree(case.folder, copy)
    for path in copy.rglob("*"):
        if path.suffix in (".cu", ".cpp", ".h", ".cuh", ".hpp", ".inl"):
            text = path.read_text(errors="replace")
            for pattern, new in case.replacements:
                text = re.sub(pattern.replace(" ", r"\s+"), new, text)
            path.write_text(text)
    case.files = [copy / path.relative_to(case.folder) if case.folder in path.parents else path for path in case.files]
    case.folders = [copy if path == case.folder else path for path in case.folders]
    return case


def run(case, work, seconds):
    """(outcome, one line about it); the outcome is None where the program says that it is built without what was asked for."""
    case = shrunk(case, work)
    try:
        program = Program(case.files, case.folders, case.defines).read()
        executable = program.build("check")
    except EmulatorError as error:
        return "not built", " ".join(str(error).splitlines()[:2])
    output = tempfile.TemporaryFile(dir=work)  # noqa: SIM115
    try:
        status, finding = program.run(
            executable,
            case.arguments,
            "check",
            "forward",
            1,
            stdout=output,
            stderr=output,
            cwd=case.files[0].parent,
            limit=seconds,
        )
    except subprocess.TimeoutExpired:
        return "no end", f"after {seconds} s"
    output.seek(0)
    printed = output.read().decode(errors="replace")
    if finding:
        return {"time limit": "no end", "not supported": "not built"}.get(finding.kind, "finding"), str(finding)
    if re.search(case.absent, printed):
        return None, ""
    wrong = next((line.strip() for line in printed.splitlines() if re.search(case.fails, line, re.IGNORECASE)), "")
    if not wrong and status > 0 and status != 2:  # 2: a sample that waives itself
        wrong = f"exit status {status}"
    if not wrong and status >= 0:
        return "right", ""
    absent = (each for each in case.arguments if "/" in each and not (case.files[0].parent / each).exists())
    wants = (line.strip() for line in printed.splitlines() if status and re.search(WANTS, line, re.IGNORECASE))
    if wanted := next(absent, None) or next(wants, None):
        return "no data", wanted
    return ("crash", f"signal {-status}") if status < 0 else ("wrong result", wrong)


VERIFIED = ("GPUVerify", "Faial", "Indigo", "Indigo2", "ScoR")  # those that say what is right and what is wrong


def table(rows):
    suites = collections.defaultdict(collections.Counter)
    for case, outcome in rows:
        expected = {"right": ", expected right", "wrong": ", expected wrong"}.get(case.expected, "")
        suites[case.suite + (expected if case.suite in VERIFIED else "")][outcome] += 1
    lines = ["| | programs | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 2) + "|"]
    for suite, counts in suites.items():
        cells = [str(counts[outcome] or "") for outcome in OUTCOMES]
        lines.append(f"| {suite} | {sum(counts.values())} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", metavar="SUITE=FOLDER", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--only", default="", metavar="PATTERN", help="the programs in whose name it is found")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of those the first and each Nth behind it")
    parser.add_argument("--seconds", type=float, default=300, help="that a program may run")
    given = parser.parse_args()
    runtime.library()
    with tempfile.TemporaryDirectory(prefix="public-suites-") as folder:
        work = Path(folder)
        cases = []
        for suite in given.suites:
            name, _, place = suite.partition("=")
            if name not in SUITES or not Path(place).is_dir():
                parser.error(f"{suite}: SUITE=FOLDER is expected, with one of {', '.join(SUITES)} and a folder that is there")
            found = [case for case in SUITES[name](Path(place).resolve(), work) if re.search(given.only, case.name)]
            cases += found[:: given.every]
        rows = []
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for case, (outcome, line) in zip(cases, pool.map(lambda case: run(case, work, given.seconds), cases), strict=True):
                if outcome is None:
                    continue
                mark = (
                    " (not expected)" if {"right": outcome != "right", "wrong": outcome != "finding"}.get(case.expected) else ""
                )
                print(f"{case.suite}: {case.name}: {outcome}{mark}{': ' + line if line else ''}", flush=True)
                rows.append((case, outcome))
    print("\n" + table(rows))


if __name__ == "__main__":
    sys.exit(main())
