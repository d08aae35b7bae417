"""What instructions of PTX are made of, and the table of those that are known."""

import re
from dataclasses import dataclass

REGISTERS = {
    "pred": "bool", "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t",
    "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t", "f16": "uint16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float", "f16x2": "uint32_t",
    "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t", "f64": "double",
    "b128": "unsigned __int128",
}  # fmt: skip
# Opcode -> how it is called. Groups of the pattern are handed to the handler. The list is the documentation of what is
# supported: what stands here is executed, everything else is refused by name.
INSTRUCTIONS = []


def instruction(pattern):
    def register(handler):
        INSTRUCTIONS.append((re.compile(pattern), handler))
        return handler

    return register


class OperandError(Exception):
    """What is wrong with an instruction's operands."""


@dataclass
class Operand:
    """`%3`, a register, a number; `{a, b}` has parts; `[a + 4]` is an address, with the coordinates of a tensor perhaps."""

    text: str = ""
    parts: list | None = None
    offset: str = ""
    is_address: bool = False

    @property
    def value(self):
        if self.parts is not None and not self.is_address:
            return [part.value for part in self.parts]
        return self.text + (f" + {self.offset}" if self.offset else "")


def call(function, *arguments):
    return f"::emulator::ptx::{function}({', '.join(str(a) for a in arguments)});"


def assign(target, expression):
    return "" if target.text == "_" else f"::emulator::ptx::give({target.text}, {expression});"


def words(operand):
    """The values of a braced operand, or the one value."""
    return operand.value if isinstance(operand.value, list) else [operand.value]


def bits(values):
    return "{" + ", ".join(f"::emulator::ptx::word({value})" for value in values) + "}"


def taken(kind, *operands):
    """The operands as values of a PTX type."""
    return [f"::emulator::ptx::take<{REGISTERS[kind]}>({operand.value})" for operand in operands]
