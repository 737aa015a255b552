"""The text of PTX, as Triton makes it, read into instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass


class Refused(Exception):
    """What was asked of a thread isn't known here or isn't allowed; it says what."""


@dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: "Operand"
    offset: int


Operand = int | str | Address | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    """`guard`: a predicate, and the value that it must have."""

    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None


@dataclass(frozen=True)
class Program:
    """The code of one kernel.

    `parameters` are the types by name, `threads` those of a block, `labels` where they are in the code, and
    `registers` their types by name. A register of inline text has another name in each block of it.
    """

    name: str
    parameters: dict[str, str]
    threads: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]


def parse(ptx: str) -> Program:
    """The only kernel in a module's text."""
    ptx = re.sub(r"//.*|^\s*\.(loc|file)\b.*", "", ptx, flags=re.MULTILINE)
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\n\{(.*?)\n\}", ptx, re.DOTALL)
    if not entry:
        raise Refused("the text has no kernel")
    name, declared, directives, body = entry.groups()
    threads = re.search(r"\.reqntid (\d+)", directives)
    if not threads:
        raise Refused(f"{name} doesn't say how many threads a block has")
    parameters = {of: kind for kind, of in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", declared)}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    scopes: list[dict[str, str]] = [{}]
    for statement in _statements(body):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            labels[statement[:-1]] = len(code)
        elif declared := re.fullmatch(r"\.reg \.(\w+) (.*)", statement):
            own = _declared(declared[2], f"#{len(registers)}" if len(scopes) > 1 else "")
            scopes[-1].update(own)
            registers.update(dict.fromkeys(own.values(), declared[1]))
        elif not statement.startswith(".pragma"):
            code.append(_instruction(statement, scopes))
    return Program(name, parameters, int(threads[1]), tuple(code), labels, registers)


def _statements(body: str) -> Iterator[str]:
    """Instructions and directives without their semicolons, labels with their colons, braces of scopes."""
    for found in re.finditer(r"\s*([{}]|[$\w]+:|[^;]+;)", body):
        yield " ".join(found[1].rstrip(";").split())


def _declared(names: str, suffix: str) -> dict[str, str]:
    """What a declaration's names are called from now on; %r<3> declares %r0, %r1 and %r2."""
    found = {}
    for name in names.split(", "):
        numbered = re.fullmatch(r"(%\w+)<(\d+)>", name)
        of = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]
        found |= {one: one + suffix for one in of}
    return found


def _instruction(statement: str, scopes: list[dict[str, str]]) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(\S+) )?([\w.:]+)(.*)", statement)
    if not found:
        raise Refused(f"not an instruction: {statement}")
    inverted, guard, opcode, rest = found.groups()
    operands = tuple(_operand(of, scopes) for of in re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", rest))
    condition = (_operand(guard, scopes), not inverted) if guard else None
    return Instruction(statement, opcode, operands, condition)


def _operand(text: str, scopes: list[dict[str, str]]) -> Operand:
    if text[0] == "{":
        return tuple(_operand(part.strip(), scopes) for part in text[1:-1].split(","))
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(_operand(base, scopes), int(offset or "0", 0))
    if found := re.fullmatch(r"0f([0-9A-Fa-f]{8})", text):
        return int(found[1], 16)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return next((scope[text] for scope in reversed(scopes) if text in scope), text)
