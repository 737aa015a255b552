"""The watch's side of `--torch-allocator`: the changed command, and what the hook's lines amount to. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from probes.core.codec import decode, load
from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.records.watch import Allocator

_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")
_JOINED = re.compile(r"-[bBdEhiIOPqsSuvVx]*[cm].*", re.DOTALL)  # -Ic CODE, -mMODULE
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def with_hook(words: Sequence[str], hook: str) -> list[str]:
    """The command with the hook before the program that Python runs. Raises UsageError for anything else."""
    if not _PYTHON.fullmatch(words[0]):
        raise UsageError(
            f"--torch-allocator needs a command that begins with python, not {words[0]}",
            "write: watch --torch-allocator -- python script.py",
        )
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-", "--"):
        if _JOINED.fullmatch(words[at]):
            raise UsageError(
                f"--torch-allocator can't read {words[at]}", "write -c or -m as a word by itself"
            )
        at += 2 if words[at] in _WITH_VALUE else 1
    program = words[at:]
    if not program or program[0] in ("-", "--") or (program[0] in ("-m", "-c") and len(program) == 1):
        raise UsageError("--torch-allocator needs a script, -m MODULE or -c CODE", "name the program to run")
    return [*words[:at], hook, *words[at:]]


@dataclass(frozen=True)
class HookLine:
    """One line of the hook; bytes and counts."""

    device: int
    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int
    split: int
    retries: int
    out_of_memory: int
    largest_free: int | None = None


class AllocatorTotals:
    """Adds up the hook's lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._latest: dict[int, HookLine] = {}
        self._fullest: dict[int, HookLine] = {}
        self._free: dict[int, int] = {}

    def add(self, data: bytes) -> None:
        """Bytes of the pipe, cut anywhere. Lines that aren't the hook's are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                found = decode(HookLine, load(line), "line")
            except ValueError:
                continue
            self._latest[found.device] = found
            fullest = self._fullest.get(found.device)
            if fullest is None or (found.reserved, found.allocated) > (fullest.reserved, fullest.allocated):
                self._fullest[found.device] = found
            if found.largest_free is not None:
                self._free[found.device] = found.largest_free

    def found(self) -> tuple[Allocator, ...] | Unknown:
        """Each device that the program used."""
        if not self._latest:
            return Unknown("the program reported no memory of torch on a GPU")
        return tuple(self._of(device) for device in sorted(self._latest))

    def _of(self, device: int) -> Allocator:
        last, fullest = self._latest[device], self._fullest[device]
        reserved = max(fullest.reserved, 1)
        return Allocator(
            device=device,
            most_allocated_bytes=last.most_allocated,
            most_reserved_bytes=last.most_reserved,
            unused_share=max(fullest.reserved - fullest.allocated, 0) / reserved,
            split_share=fullest.split / reserved,
            largest_free_bytes=self._free.get(device, Unknown("no list of blocks was taken")),
            retries=last.retries,
            out_of_memory=last.out_of_memory,
        )
