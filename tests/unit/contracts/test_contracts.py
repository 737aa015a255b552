"""What users see of both programs, compared with golden files that no restructuring may change.

Frozen are the help of each verb, exit codes, what the lines of commands.txt print for recorded reports and
for small inputs, and the names and arguments of `probes.placement`. A change that is meant is written with

    WEIR_GOLDEN=write pytest tests/unit/contracts

and then read in `git diff`. Only the programs' command lines and `probes.placement` are imported.
"""

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib.metadata
import inspect
import io
import json
import os
import re
import shlex
import shutil
import socket
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import pytest

import probes.placement
from buildtool.cli import main as weir_main
from probes.cli import main as probes_main

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
GOLDEN = HERE / "golden"
# with what starts the process: the programs name themselves by it
PROGRAMS = {"weir": (weir_main, "weir"), "probes": (probes_main, "probes/__main__.py")}
FORWARDED = ("weir", "probe")  # its verbs are those of the other program
BLOCKS = [block.split("\n    ") for block in (HERE / "commands.txt").read_text("utf-8").strip().split("\n\n")]
TYPED = {name: lines for name, *lines in BLOCKS}
SEARCHING = ("weir-fits", "probes-plan-cards")  # most of a second each, for the planner


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No width, colour, language or engine of this machine."""

    def refuse(opened: socket.socket, *_: object) -> NoReturn:
        opened.close()
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    fixed = {"COLUMNS": "100", "LANGUAGE": "C", "NO_COLOR": "1", "DOCKER_HOST": "unix:///absent.sock"}
    for name, value in fixed.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read."""
    made = tmp_path_factory.mktemp("typed")
    for recorded in (ROOT / "docs" / "results").glob("*.json"):
        (made / recorded.name).symlink_to(recorded)
    shutil.copytree(HERE / "inputs", made, dirs_exist_ok=True)
    (made / "tree").mkdir()
    (made / "tree" / "kernels.hsaco").write_bytes(gpu_code())
    before, after = images()
    for name, content in (("before", before), ("after", after)):
        (made / f"{name}.tar").write_bytes(content)
        run("weir", ["audit", str(made / f"{name}.tar"), "--json", str(made / f"{name}.json")])
    return made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in SEARCHING else name for name in TYPED]
)
def test_what_commands_print_is_as_it_was(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WEIR_STATE", str(folder / "state"))
    said = "".join(f"$ {line}\n{printed(*shlex.split(line))}\n" for line in TYPED[name])
    said = said.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
    # the last digits are those of this machine's mathematical library
    compare(name, re.sub(r"\d+\.\d{12,}(?:e-?\d+)?", lambda found: f"{float(found[0]):.12g}", said))


def printed(first: str, *words: str) -> str:
    """What a command prints on both streams, and its exit code; `cat` shows a file that one has written."""
    if first == "cat":
        return shown(Path(words[0]).read_bytes())
    code, out, err = run(first, words)
    complaint = f"[standard error]\n{err}" if err else ""
    return f"{shown(out.encode())}{complaint}[exit {code}]\n"


def run(program: str, words: Sequence[str]) -> tuple[int | str | None, str, str]:
    main, started_by = PROGRAMS[program]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [started_by])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: int | str | None = int(main(list(words)))
            except SystemExit as left:
                code = left.code
    return code, out.getvalue(), err.getvalue()


def shown(content: bytes) -> str:
    """A text without our version and with digests for long scripts and styles; a digest for other bytes."""
    if b"\0" in content:
        return f"{len(content)} bytes, {digest(content)}\n"
    long = re.compile(r"(?<=<style>)[^<]{2000,}|(?<=<script>).{2000,}?(?=</script>)", re.DOTALL)
    text = long.sub(lambda found: digest(found[0].encode()), content.decode())
    version = re.escape(importlib.metadata.version("gpu-weir"))
    return re.sub(rf'("(?:tool_)?version": "|gpu-weir ){version}\b', r"\1VERSION", text)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_help_of_each_verb_is_as_it_was(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = "".join(f"$ {' '.join(path)} --help\n{text}\n" for path, text in helps(monkeypatch, program))
    # later versions of argparse break lines elsewhere
    compare(f"{program}-help", found, by_words=sys.version_info[:2] != (3, 11))


def helps(monkeypatch: pytest.MonkeyPatch, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The help of a verb and of every verb below it, which the parser that prints it names."""
    asked: list[argparse.ArgumentParser] = []
    write = argparse.ArgumentParser.print_help

    def noted(parser: argparse.ArgumentParser) -> None:
        asked.append(parser)
        write(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "print_help", noted)
        code, out, err = run(path[0], [*path[1:], "--help"])
    assert (code, err, len(asked)) == (0, "", 1), path
    yield path, out
    below = [action for action in asked[0]._actions if isinstance(action, argparse._SubParsersAction)]
    for verb in () if path == FORWARDED else (name for action in below for name in action.choices):
        yield from helps(monkeypatch, *path, verb)


def test_exit_codes_are_as_they_were() -> None:
    run("weir", ["audit", "--help"])  # imports them
    listed = []
    for program, (main, _) in PROGRAMS.items():
        top = f"{main.__module__.split('.')[0]}."
        # the one look inside: each program has an IntEnum called Exit, in whichever module
        enums = [e for e in IntEnum.__subclasses__() if e.__name__ == "Exit" and e.__module__.startswith(top)]
        listed += [f"{program} {one.name}={one.value}\n" for found in enums for one in found]
    compare("exit-codes", "".join(listed))


def test_the_names_of_placement_and_their_arguments_are_as_they_were() -> None:
    package = probes.placement
    written = {name: definition(package.__name__, name) for name in package.__all__}
    compare("placement-api", "".join(f"{signatures(node)}\n" for node in written.values()))
    for name, node in written.items():
        with contextlib.suppress(ModuleNotFoundError):  # of torch, which few environments have
            found = getattr(package, name)
            assert found.__name__ == name
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.args, *node.args.kwonlyargs]
                assert list(inspect.signature(found).parameters) == [argument.arg for argument in given]


def definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The function or class that a module's name means, by the sources: no library is needed."""
    place = ROOT.joinpath(*module.split("."))
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    taken = None
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if not any(ast.unparse(one) == "overload" for one in node.decorator_list):
                return node
        elif isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            taken = node.module
    assert taken, f"{module} has no {name}"
    return definition(taken, name)


def signatures(node: ast.stmt, *, indent: str = "") -> str:
    """A function's arguments, or a class's fields and public methods, as their source has them."""
    if isinstance(node, ast.FunctionDef):
        marks = "".join(f"{indent}@{ast.unparse(one)}\n" for one in node.decorator_list)
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{marks}{indent}def {node.name}({ast.unparse(node.args)}){returned}\n"
    if isinstance(node, ast.ClassDef):
        public = (one for one in node.body if not getattr(one, "name", "").startswith("_"))
        return f"class {node.name}\n" + "".join(signatures(one, indent="    ") for one in public)
    return f"{indent}{ast.unparse(node)}\n" if isinstance(node, ast.AnnAssign) else ""


def test_the_published_schema_of_plans_over_cards_is_what_is_printed() -> None:
    published = (ROOT / "docs" / "schema" / "placement-cards.schema.json").read_text(encoding="utf-8")
    assert run("probes", ["schema", "cards"]) == (0, published, "")


def test_each_golden_file_has_its_test() -> None:
    known = {*TYPED, *(f"{program}-help" for program in PROGRAMS), "exit-codes", "placement-api"}
    assert {path.stem for path in GOLDEN.iterdir()} == known


def compare(name: str, found: str, *, by_words: bool = False) -> None:
    """Fail with the lines that differ, or write the golden file where that is asked for."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WEIR_GOLDEN") == "write":
        path.write_bytes(found.encode())
    golden = path.read_bytes().decode()
    if golden != found and not (by_words and golden.split() == found.split()):
        before, now = golden.splitlines(), found.splitlines()
        lines = list(difflib.unified_diff(before, now, f"golden/{path.name}", "now", n=1, lineterm=""))
        pytest.fail("\n".join(lines[:40]) or f"{path.name}: only its ends of lines differ", pytrace=False)


def images() -> tuple[bytes, bytes]:
    """An image's archive with common faults, and that of a later one."""
    site = "usr/lib/python3.11/site-packages/"
    dpkg = "Package: tini\nStatus: install ok installed\nArchitecture: amd64\nVersion: 0.19.0-1\n"
    base = {"etc/os-release": b"ID=debian\n", "usr/bin/tini": b"\x7fELF" + bytes(30_000)}
    base |= {"var/lib/dpkg/status": dpkg.encode(), "var/lib/dpkg/info/tini.list": b"/usr/bin/tini\n"}
    faults = {f"{site}torch/copy.py": b"# x\n" * 275_000, "root/.cache/pip/http/aa": b"w" * 1_100_000}
    faults |= {f"{site}torch/lib/rocblas/library/Kernels_{card}.hsaco": gpu_code() for card in CARDS}
    later = {"root/.cache/pip/http/.wh.aa": b"", "srv/model.onnx": b"m" * 9000, **wheel(site, "demo", "1.0")}
    first = image(base, wheel(site, "torch", "2.9.1") | faults, later, PASSWORD="xyzzy")
    return first, image(base, wheel(site, "torch", "2.13.0") | wheel(site, "demo", "1.0"))


def wheel(site: str, name: str, version: str) -> dict[str, bytes]:
    """An installed package."""
    sources = {f"{site}{name}/{part}.py": b"# x\n" * 275_000 for part in ("__init__", "tests/test_all")}
    texts = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    texts["RECORD"] = "".join(f"{path.removeprefix(site)},,\n" for path in sources)
    about = f"{site}{name}-{version}.dist-info"
    return sources | {f"{about}/{part}": text.encode() for part, text in texts.items()}


CARDS = ("gfx906", "gfx1100")


def gpu_code() -> bytes:
    """A bundle of code for two cards, as clang writes it; the code itself runs nowhere."""
    codes = {"host-x86_64-unknown-linux-gnu-": b""}
    codes |= {f"hipv4-amdgcn-amd-amdhsa--{card}": b"\x7fELF" + card.encode() * 1300 for card in CARDS}
    table, payload = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(codes)), b""
    for name, code in codes.items():
        table += struct.pack("<QQQ", 4096 + len(payload), len(code), len(name)) + name.encode()
        payload += code + bytes(-len(code) % 4096)
    return table.ljust(4096, b"\0") + payload


def image(*layers: Mapping[str, bytes], **environment: str) -> bytes:
    """An image's archive with compressed layers, whose bytes depend on no library's version."""
    tars = [tar(layer) for layer in layers]
    config: dict[str, object] = {"architecture": "amd64", "os": "linux"}
    config["config"] = {"Env": [f"{name}={value}" for name, value in environment.items()]}
    config["rootfs"] = {"type": "layers", "diff_ids": [digest(one) for one in tars]}
    config["history"] = [{"created_by": f"RUN step {index}"} for index in range(len(tars))]
    blobs = {f"{hashlib.sha256(one).hexdigest()}.tar.gz": gzipped(one) for one in tars}
    written = json.dumps(config).encode()
    row = {"Config": digest(written), "RepoTags": ["registry.test/tiny:1"], "Layers": list(blobs)}
    return tar({digest(written): written, **blobs, "manifest.json": json.dumps([row]).encode()})


def tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as writer:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            writer.addfile(member, io.BytesIO(content))
    return out.getvalue()


def gzipped(content: bytes) -> bytes:
    """In the form that compresses nothing, which is the same everywhere."""
    body = b""
    for at in range(0, len(content), 65535):
        piece = content[at : at + 65535]
        body += struct.pack("<BHH", at + 65535 >= len(content), len(piece), len(piece) ^ 65535) + piece
    end = struct.pack("<II", zlib.crc32(content), len(content))
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + body + end
