"""What a page says that one could type, held against the programs' own parsers: nothing is run."""

import argparse
import contextlib
import importlib
import inspect
import io
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

from playground import catalog
from playground.command import main

SEPARATORS = {"&&", "||", ";", "|"}
SCRIPTS = {"run_all.py": main.run_all, "compare.py": main.compare}


class _Found(Exception):
    """The parser that a program has made."""


def parser_of(program):
    """The parser of a script or of a module of the project, by the name that follows `python` or `python -m`."""
    main = SCRIPTS.get(program) or _main_of(program)

    def stop(parser, *_):
        raise _Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            main([]) if inspect.signature(main).parameters else main()
        except _Found as found:
            return found.args[0]
    raise AssertionError(f"{program} parses no arguments")


def _main_of(module):
    found = importlib.import_module(module)
    return (found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")).main


def options_of(program):
    """All that begins with two dashes."""
    actions = parser_of(program)._actions
    return {option for action in actions for option in action.option_strings if option.startswith("--")} - {"--help"}


def check_block(block):
    """Every command of a shell block is one that could be typed. Raises AssertionError."""
    for words in split(block.text, block.language):
        check_command(words)


def split(text, language="bash"):
    """The words of each command."""
    lines = text.replace("\\\n", " ").splitlines()
    if language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if word not in SEPARATORS:
                words.append(word)
            elif words:
                yield words
                words = []


def check_command(words):
    if "=" in words[0]:  # an environment variable
        return check_command(words[1:])
    program, *rest = words
    program = program.removeprefix("!")  # in a notebook
    match Path(program).name:
        case "python" | "python3":
            _check_python(rest)
        case "pip":
            install, *options, what = rest
            from_file = options[-1:] == ["-r"] and (catalog.ROOT / what).is_file()
            assert install == "install" and (from_file or what == "git+URL"), words
        case "kernel-playground":
            _check_program("compare.py", rest)
        case "taskset":
            check_command(rest[2:])
        case _:
            raise AssertionError(f"no rule says whether this could be typed: {shlex.join(words)}; run it, or add a rule here")


def _check_python(words):
    if words[0] != "-m":
        assert (catalog.ROOT / words[0]).is_file(), words[0]
        _check_program(words[0], words[1:])
    elif words[1] == "dask":
        shown = subprocess.run([sys.executable, *words[:3], "--help"], capture_output=True, text=True, check=True).stdout
        assert all(word in shown for word in words if word.startswith("--"))
    else:
        _check_program(words[1], words[2:])


def _check_program(program, arguments):
    given = vars(_parse(parser_of(program), arguments))
    models = [catalog.find_model(name) for name in _names(given.get("model")) + (given.get("models") or "").split(",") if name]
    for name in _names(given.get("variant")):
        for model in models:
            catalog.find_variant(model, name)


def _names(value):
    return [value] if isinstance(value, str) else list(value or [])


def _parse(parser, arguments):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return parser.parse_args(arguments)
        except SystemExit:
            raise AssertionError(f"{shlex.join(arguments)}: {said.getvalue()}") from None
