"""Runs in an image's own Python, with no other module of ours: compiles what modules import at once.

`python3 compile_modules.py JOB OUT`. JOB is JSON: `wheels`, files; `site`, where they are in the image;
`epoch`, the time of every file there; `left_out` and `kept`, what isn't there by its name; `modules`, dotted
names to begin with. OUT becomes a zip of bytecode by its path. No code of the wheels runs.
"""

import dis
import importlib.util
import json
import marshal
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

MOST_BYTES = 8 << 20  # of a source; torch's longest has 0.6 MB
MARSHAL = 2  # a later format writes down which objects are shared, which depends on what else is in memory


def main(job_path: str, out_path: str) -> None:
    """Compile the modules, and all that they import at once, as far as the wheels have them."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    warnings.simplefilter("ignore")  # of old escapes in strings
    sources = sources_in(job)
    waiting: list[str] = sorted(job["modules"])
    seen: set[str] = set()
    with zipfile.ZipFile(out_path, "w") as out:
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            waiting.append(module.rpartition(".")[0])  # the package, which is imported before it
            archive, name = sources.get(module, (None, ""))
            if archive is None or archive.getinfo(name).file_size > MOST_BYTES:
                continue
            source, path = archive.read(name), f"{job['site']}/{name}"
            try:
                code = compile(source, f"/{path}", "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # an import would fail as well
            head = struct.pack("<4sIII", importlib.util.MAGIC_NUMBER, 0, job["epoch"], len(source))
            place = importlib.util.cache_from_source(path, optimization="")
            out.writestr(place, head + marshal.dumps(code, MARSHAL))
            is_package = name.endswith("/__init__.py")
            waiting += imported_by(code, module if is_package else module.rpartition(".")[0])


def sources_in(job: dict[str, list[str]]) -> dict[str, tuple[zipfile.ZipFile, str]]:
    """The file of each module that the image has, and its wheel; the first wheel wins."""
    left_out, kept = re.compile(str(job["left_out"])), re.compile(str(job["kept"]))
    sources: dict[str, tuple[zipfile.ZipFile, str]] = {}
    for wheel in job["wheels"]:
        archive = zipfile.ZipFile(wheel)
        for name in archive.namelist():
            if name.endswith(".py") and (kept.match(name) or not left_out.search(name)):
                module = name[: -len(".py")].replace("/", ".").removesuffix(".__init__")
                sources.setdefault(module, (archive, name))
    return sources


def imported_by(code: CodeType, package: str) -> Iterator[str]:
    """The dotted names that a module's code imports when it runs; `from a import b` gives `a` and `a.b`.

    What only type checkers read isn't there.
    """
    constants: list[object] = [0, None]  # those loaded last: an import's level and names
    loaded, until = "", 0
    for step in dis.get_instructions(code):
        if step.offset < until:
            continue
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants = [constants[-1], step.argval]
        elif step.opname == "IMPORT_NAME":
            level, names = constants
            base = step.argval
            if level:
                above = package.split(".")[: len(package.split(".")) - int(str(level)) + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield base
            yield from (f"{base}.{name}" for name in (names if isinstance(names, tuple) else ()))
        elif loaded == "TYPE_CHECKING" and step.opname.startswith("POP_JUMP") and "FALSE" in step.opname:
            until = step.argval
        loaded = str(step.argval)


if __name__ == "__main__":
    main(*sys.argv[1:])
