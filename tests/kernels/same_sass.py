"""What of a variant changed between two versions of its file, by what compilers make of them: its kernels' machine code (SASS),
the code that launches them, its C++, its Python.

    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py          against HEAD
    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py REVISION
    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py OLD_FILE.py
    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py REVISION --rename places=argmax --record
    python tests/kernels/same_sass.py kernels/alexnet_conv1/v5_hopper.py REVISION --strict 'a_kernel<true>' --record

Needs g++ and, for CUDA, nvcc; no GPU. Names of symbols and comments do not count, nor do the functions `build` and `main`: no
timed call runs them, and what `build` gives to the compilers is compared. Exit status 1 if anything else differs.
What is the same needs no new measurement: the times that are recorded for it still hold. `--record` writes that into results/:
each result of the old file gets a key "code_same_as" with the new file's hash and the revision that it was compared with.
`--strict` names kernels that run in strict precision alone: where nothing else differs, results in TF32 stay valid.
"""

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from torch.utils import cpp_extension

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, where it is run as a script

import nvcc

from playground import catalog, tensors
from playground.machine import ptxas
from playground.report import document

TABLES = (".nv.constant2", ".nv.constant3", ".nv.constant4", ".nv.global.init")
NOT_THE_HOSTS = (".nv", ".eh_frame", ".note", ".comment", "__nv")  # sections of an object: the kernels' code has its own check
NO_RUNS = ("exhibits", "originals", "published")  # folders of results/ that hold something else
NOT_MEASURED = ("build", "main")  # functions that no timed call runs
TEXTS = ("INTERFACE", "CUDA", "CPP", "BINDING")  # module constants that compilers see


def recipes(model, path):
    """(HostCode, DeviceCode) of the variant at `path`."""
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"].get(model.name))
    return nvcc.recipes(tensors.make_model(problem, catalog.load_variant(path).ModelNew, seed=0), problem.get_inputs())


def sass(device, folder):
    """{(architecture, kernel): (hash of its code, registers and shared memory; registers)}; empty without a CUDA text.

    Tables that kernels read count as one more kernel.
    """
    found = {}
    for architecture in (device.architectures or ptxas.ARCHITECTURES) if device.text else ():
        kernels, _ = ptxas.compile_cubin(ptxas.find_nvcc(), device, architecture, folder)
        takes = {kernel.name: (kernel.registers, kernel.shared) for kernel in kernels}
        tables = hashlib.sha256()
        with (folder / f"text_{architecture}.cubin").open("rb") as file:
            for section in ELFFile(file).iter_sections():
                if section.name.startswith(".text."):
                    name = demangled(section.name.removeprefix(".text."))
                    code = hashlib.sha256(section.data() + repr(takes.get(name)).encode()).hexdigest()
                    found[architecture, name] = code, takes.get(name, "?")[0]
                elif section.name.startswith(TABLES):
                    tables.update(section.data())
        found[architecture, "tables"] = tables.hexdigest(), 0
    return found


def demangled(name):
    found = subprocess.run(["c++filt", "--no-params", name], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"^void |\(anonymous namespace\)::", "", found)


def other_differences(old, new, old_path, new_path, folder):
    """What else differs, as words: "Python", "C++", "launches". `old` and `new` are what `recipes` gives."""
    (old_host, old_device), (new_host, new_device) = old, new
    if python_of(old_path) != python_of(new_path):
        yield "Python"
    if (old_host.flags, old_device.flags) != (new_host.flags, new_device.flags):
        yield "a compiler's flags"
    # The cheaper comparisons first: what the preprocessor makes the same needs no compiler.
    if not any(view(old_host, folder) == view(new_host, folder) for view in (host_tokens, host_preprocessed, host_object)):
        yield "C++"
    is_other = bool(new_device.text) and tokens(old_device.text) != tokens(new_device.text)
    if is_other and launches(old_device, folder) != launches(new_device, folder):
        yield "launches"


def python_of(path):
    """Its syntax tree without docstring, without the compilers' texts, and without what no timed call runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = [each for each in tree.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    kept = [each for each in kept if not (isinstance(each, ast.Assign) and getattr(each.targets[0], "id", None) in TEXTS)]
    return [ast.dump(each) for each in kept if getattr(each, "name", None) not in NOT_MEASURED]


def tokens(text):
    """A C++ text without comments, directives left as they are."""
    command = ["g++", "-fpreprocessed", "-dD", "-E", "-P", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.split()


def host_tokens(host, folder):
    return tokens(host.text)


def host_preprocessed(host, folder):
    """All that g++ compiles, headers included, every __LINE__ 0."""
    host_compiled(host, folder, "-E", "-P")
    return (folder / "host.o").read_bytes().split()


def host_object(host, folder):
    """The contents of the object that g++ makes, every __LINE__ 0."""
    host_compiled(host, folder, "-c")
    return contents(folder / "host.o")


def host_compiled(host, folder, *steps):
    """Write host.o, as far as `steps` say: by the flags of the text, against the headers of torch and CUDA."""
    (folder / "host.cpp").write_text(host.text, encoding="utf-8")
    cuda = Path(ptxas.find_nvcc() or "/").resolve().parents[1] / "include"
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), *([cuda] if cuda.is_dir() else []))]
    named = [
        "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",
        "-DTORCH_EXTENSION_NAME=same",
        "-D__LINE__=0",
        "-Wno-builtin-macro-redefined",
    ]
    command = ["g++", *steps, "-fPIC", "-std=c++20", *host.flags, *named, *includes, "host.cpp", "-o", "host.o"]
    subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL)


def launches(device, folder):
    """The contents of the object that nvcc makes of a CUDA text's host functions."""
    (folder / "launches.cu").write_text(device.text, encoding="utf-8")
    target = "90a" if device.architectures else "80"
    named = [flag for flag in device.flags if "arch" not in flag and flag != "-gencode"]
    generated = f"-gencode=arch=compute_{target},code=compute_{target}"  # PTX alone, which is quick
    command = [ptxas.find_nvcc(), "-c", *named, generated, "launches.cu", "-o", "launches.o"]
    subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL)
    return contents(folder / "launches.o")


def contents(path):
    """Code and data of an object's sections with their relocations; a symbol counts by its first use, not by its name."""
    numbers, found = {}, []
    with path.open("rb") as file:
        elf = ELFFile(file)
        sections = list(elf.iter_sections())
        relocations = {each["sh_info"]: each for each in sections if isinstance(each, RelocationSection)}
        for index, section in enumerate(sections):
            if not section["sh_flags"] & SH_FLAGS.SHF_ALLOC or section.name.startswith(NOT_THE_HOSTS):
                continue
            used = []
            if index in relocations:
                symbols = sections[relocations[index]["sh_link"]]
                for each in relocations[index].iter_relocations():
                    symbol = symbols.get_symbol(each["r_info_sym"])
                    name = symbol.name or str(symbol["st_shndx"])
                    number = numbers.setdefault(name, len(numbers))
                    used.append((each["r_offset"], each["r_info_type"], each["r_addend"], number))
            found.append((section["sh_type"], section["sh_size"], section.data(), used))
    return found


def renamed(text, renames):
    """The text with words replaced, [(old, new), ...]: for names that programs see, of arguments and in messages."""
    for old, new in renames:
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
    return text


def record(old_path, new_path, revision, renames, strict=()):
    """Write into the results of the old file that the new one is the same. Returns how many there were.

    Where kernels of `strict` precision alone differ, only into those in TF32, with the kernels' names.
    Where the old file is itself the same as the measured one, the new one is, with the renames of both comparisons: the result
    goes on naming the revision of the measured file.
    """
    old, new, count = catalog.code_sha256(old_path), catalog.code_sha256(new_path), 0
    for path in sorted((catalog.ROOT / "results").rglob("*.json")):
        if path.parent.name in NO_RUNS:
            continue
        found = document.read(path)
        ours = 0
        for result in found["results"] if old != new else ():
            same = result.get("code_same_as") or {"compared_with": revision}
            if strict and result["precision"] != "tf32":
                continue
            if same.get("code_sha256", result.get("code_sha256")) == old:
                all_renames = [*same.get("renamed", []), *renames]
                all_strict = sorted({*same.get("strict_differs", []), *strict})
                kept = {"code_sha256": new, "compared_with": same["compared_with"]}
                kept |= {"renamed": all_renames} if all_renames else {}
                result["code_same_as"] = kept | ({"strict_differs": all_strict} if all_strict else {})
                ours += 1
        if ours:
            document.write(found, path)
        count += ours
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("before", nargs="?", default="HEAD", help="a revision, or another file (default: HEAD)")
    parser.add_argument("--record", action="store_true", help="write it into results/ if nothing differs from a revision")
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        nargs="+",
        default=[],
        help="what is new on purpose; it is recorded, too",
    )
    parser.add_argument("--strict", metavar="KERNEL", nargs="+", default=[], help="kernels of strict precision that may differ")
    options = parser.parse_args()
    renames = [each.split("=", 1) for each in options.rename]
    model = next(model for model in catalog.models() if model.name == options.file.resolve().parent.name)
    with tempfile.TemporaryDirectory() as folder:
        folder, old = Path(folder), Path(options.before)
        if not old.is_file():
            shown = subprocess.run(["git", "show", f"{options.before}:./{options.file}"], capture_output=True, check=True)
            old = folder / options.file.name
            old.write_bytes(shown.stdout)
        elif options.record:
            parser.error("--record takes a revision: a file may be gone when somebody looks")
        same_names = folder / f"renamed_{old.name}"
        same_names.write_text(renamed(old.read_text(encoding="utf-8"), renames), encoding="utf-8")
        recipe_before, recipe_after = recipes(model, same_names), recipes(model, options.file)
        texts = [recipe[1].text for recipe in (recipe_before, recipe_after)]
        if all(texts) and tokens(texts[0]) == tokens(texts[1]):
            print("same    CUDA text, token by token")
            before, after = {}, {}
        else:
            before, after = sass(recipe_before[1], folder), sass(recipe_after[1], folder)
        if unknown := set(options.strict) - {name for _, name in (*before, *after)}:
            parser.error(f"--strict names kernels, as they are printed; none is called {', '.join(sorted(unknown))}")
        others = list(other_differences(recipe_before, recipe_after, same_names, options.file, folder))
        codes_before, codes_after = (
            {architecture_code(key, value) for key, value in found.items() if key[1] not in options.strict}
            for found in (before, after)
        )
        for key in sorted(after):
            same = architecture_code(key, after[key]) in codes_before
            word = "strict" if key[1] in options.strict else "same" if same else "DIFFERS"
            print(f"{word:7} {key[0]:8} {key[1]}  {after[key][1]} registers")
        for key in sorted(before):
            if architecture_code(key, before[key]) not in codes_after and key[1] not in options.strict:
                print(f"{'gone' if key not in after else 'before':7} {key[0]:8} {key[1]}  {before[key][1]} registers")
        print(f"DIFFERS {', '.join(others)}" if others else "same    Python, C++, launches")
        differs = bool(others) or codes_before != codes_after
        if options.record and not differs:
            named = subprocess.run(["git", "rev-parse", options.before], capture_output=True, text=True, check=True)
            print(f"recorded in {record(old, options.file, named.stdout.strip(), renames, options.strict)} results")
    return int(differs)


def architecture_code(key, value):
    return key[0], value[0]


if __name__ == "__main__":
    sys.exit(main())
