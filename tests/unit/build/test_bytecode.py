"""Bytecode in images: of what the service imports at its start, valid, and the same on every host."""

import importlib.util
import json
import marshal
import tarfile
import zipfile
from pathlib import Path

import pytest

from buildtool.build import compile_modules
from buildtool.build.bytecode import imported_names, write_bytecode
from buildtool.build.wheel_layer import KEPT, UNNEEDED
from buildtool.core.command import CommandFailed
from buildtool.core.errors import EnvironmentMissing
from buildtool.image.layer_writer import LayerWriter, TarMembers

EPOCH = 1_767_225_600
MODULES = {
    "top/__init__.py": "from . import used\nfrom .deep.sub import name\nimport json\n",
    "top/used.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import typed\nelse:\n    import untyped\n"
        "try:\n    import optional\nexcept ImportError:\n    pass\n"
        "def later():\n    import lazy\n"
        "words = {'a', 'b', 'c', 'd'}\nassert 'x' in {'x', 'y', 'z', 'w'}\n"
    ),
    "top/deep/__init__.py": "",
    "top/deep/sub.py": "from ..beside import x\nname = 1\n",
    "top/beside.py": "x = 1\n",
    "top/tests/test_x.py": "",
    "untyped.py": "",
    "optional.py": "from top.tests import test_x\n",
    "broken.py": "def (\n",
    "typed.py": "",
    "lazy.py": "",
    "never.py": "",
}
WANTED = {"top", "top.used", "top.deep", "top.deep.sub", "top.beside", "untyped", "optional"}


def job(folder: Path) -> dict[str, object]:
    """A wheel with MODULES."""
    with zipfile.ZipFile(folder / "w.whl", "w") as archive:
        for name, text in MODULES.items():
            archive.writestr(name, text)
    return {
        "wheels": [str(folder / "w.whl")], "site": "opt/lib", "epoch": EPOCH,
        "left_out": UNNEEDED.pattern, "kept": KEPT.pattern,
        "modules": ["top", "broken", "absent"],
    }  # fmt: skip


def compiled(folder: Path, made: dict[str, object]) -> dict[str, bytes]:
    (folder / "job.json").write_text(json.dumps(made), encoding="utf-8")
    compile_modules.main(str(folder / "job.json"), str(folder / "out"))
    with zipfile.ZipFile(folder / "out") as out:
        return {name: out.read(name) for name in out.namelist()}


def test_what_modules_import_at_once_is_compiled_and_nothing_else(tmp_path: Path) -> None:
    files = compiled(tmp_path, job(tmp_path))
    names = {
        importlib.util.source_from_cache(path).removeprefix("opt/lib/")[:-3].replace("/", ".")
        for path in files
    }
    assert {name.removesuffix(".__init__") for name in names} == WANTED


def test_bytecode_is_for_the_files_of_the_image(tmp_path: Path) -> None:
    files = compiled(tmp_path, job(tmp_path))
    for path, content in files.items():
        source = importlib.util.source_from_cache(path)
        text = MODULES[source.removeprefix("opt/lib/")]
        assert content[:4] == importlib.util.MAGIC_NUMBER
        assert [int.from_bytes(content[at : at + 4], "little") for at in (4, 8, 12)] == [0, EPOCH, len(text)]
        assert marshal.loads(content[16:]).co_filename == f"/{source}"


def test_bytecode_is_the_same_whatever_else_is_in_memory(tmp_path: Path) -> None:
    made = job(tmp_path)
    one, other = compiled(tmp_path, made), compiled(tmp_path, {**made, "modules": [*MODULES, "top"]})
    assert one == {path: other[path] for path in one}


def test_the_services_imports_are_found_but_those_in_functions() -> None:
    files = {
        "opt/weir/app/service/a.py": (
            b"import torch.nn as nn, yaml\nfrom torch import fx, jit as j\ndef f():\n    import lazy\n"
        ),
        "opt/weir/app/service/b.py": b"from .a import f\nfrom tokenizers import (\n    Tokenizer,\n)\n",
        "opt/weir/app/probes/c.py": b"import triton\n",
        "opt/weir/app/service/d.txt": b"import nothing\n",
    }
    wanted = {"torch", "torch.nn", "torch.fx", "torch.jit", "yaml", "tokenizers"}
    assert wanted == {*imported_names(files)}


def test_a_python_that_cannot_run_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: list[str]) -> None:
        raise CommandFailed(words, 126, "ld-linux-riscv64.so.1: Permission denied")

    monkeypatch.setattr("buildtool.build.bytecode.run", refused)
    program = tmp_path / "python3.11"
    program.write_bytes(b"\x7fELF of another machine")
    with tarfile.open(tmp_path / "rootfs.tar", "w") as tar:
        tar.add(program, "./usr/bin/python3.11")
        tar.add(program, "./usr/lib64/ld-linux-riscv64.so.1")
    with (
        (tmp_path / "layer").open("wb") as out,
        pytest.raises(EnvironmentMissing, match="WEIR_STATE") as raised,
    ):
        write_bytecode(
            TarMembers(LayerWriter(out), EPOCH), tmp_path / "rootfs.tar", [], ["os"],
            python="3.11", epoch=EPOCH, folder=tmp_path,
        )  # fmt: skip
    assert "Python 3.11 doesn't run on this host" in str(raised.value)


def test_relative_imports_are_of_the_package() -> None:
    code = compile("import a.b\nfrom ..c import d\n", "x", "exec")
    assert [*compile_modules.imported_by(code, "one.two")] == ["a.b", "one.c", "one.c.d"]
