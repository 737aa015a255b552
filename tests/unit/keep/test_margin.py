"""What stays beside observed files: without it, a run that nobody observed would fail."""

import posixpath
from collections.abc import Mapping

import pytest

from buildtool.core.errors import DataError
from buildtool.keep.imports import imported_names
from buildtool.keep.margin import Node, Reason, Tree, kept_paths, python_path

LIB = "opt/weir/lib"


def tree(files: Mapping[str, str | Node]) -> Tree:
    """A tree of files with their texts, and of other nodes; directories are added."""
    nodes: dict[str, Node] = {}
    for path, what in files.items():
        node = what if isinstance(what, Node) else Node("file", len(what), source=what.encode())
        nodes[path] = node
        while path := posixpath.dirname(path):
            nodes.setdefault(path, Node("directory"))
    return Tree(nodes, python_path([f"PYTHONPATH=/{LIB}"], nodes))


def kept(files: Mapping[str, str | Node], *observed: str, names: tuple[str, ...] = ()) -> set[str]:
    made = tree(files)
    return {path for path in kept_paths(made, observed, names) if made.nodes[path].kind != "directory"}


def test_modules_of_branches_that_no_run_took_stay_with_what_they_import_at_once() -> None:
    files = {
        f"{LIB}/a/__init__.py": "try:\n import json2\nexcept ImportError:\n from . import fallback\n",
        f"{LIB}/a/fallback.py": "from .. import nothing\nfrom .sub import x\ndef later():\n import far\n",
        f"{LIB}/a/sub/__init__.py": "",
        f"{LIB}/a/sub/x.cpython-311-x86_64-linux-gnu.so": "",
        f"{LIB}/a/types.py": "",
        f"{LIB}/a/lazy.py": "",
        f"{LIB}/far.py": "",
        f"{LIB}/json2.py": "def f():\n  import importlib\n  importlib.import_module('a.lazy')\n",
        f"{LIB}/b.py": "import a\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import a.types\n",
        f"{LIB}/broken.py": "def (",
    }
    assert kept(files, f"{LIB}/b.py") == {
        f"{LIB}/{name}"
        for name in ("b.py", "a/__init__.py", "json2.py", "a/fallback.py", "a/sub/__init__.py")
    } | {f"{LIB}/a/sub/x.cpython-311-x86_64-linux-gnu.so"}
    assert f"{LIB}/a/lazy.py" in kept(files, f"{LIB}/json2.py"), "an observed module's functions count"
    assert kept(files, f"{LIB}/broken.py") == {f"{LIB}/broken.py"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from . import a", {"p.q", "p.q.a"}),
        ("from ..r import a", {"p.r", "p.r.a"}),
        ("from .... import a", set()),
        ("match 1:\n case 1:\n  import a.b", {"a.b"}),
        ("async def f():\n async with x as y:\n  import c", {"c"}),
        ("x = [__import__('d') for _ in y]", {"d"}),
        ("import_module('.e')", set()),
        ("(" * 5000, set()),
        ("\0", set()),
    ],
)
def test_import_statements_are_read_wherever_they_are(source: str, names: set[str]) -> None:
    assert imported_names(source.encode(), "p.q", everywhere=True) == names


def test_bytecode_and_its_source_stay_together() -> None:
    files = {
        "usr/lib/python3.11/os.py": "import stat",
        "usr/lib/python3.11/__pycache__/os.cpython-311.pyc": "",
        "usr/lib/python3.11/stat.py": "",
        "usr/lib/python3.11/__pycache__/stat.cpython-311.pyc": "",
        "usr/lib/python3.11/lone.py": "",
    }
    assert kept(files, "usr/lib/python3.11/__pycache__/os.cpython-311.pyc") == set(files) - {
        "usr/lib/python3.11/lone.py"
    }


def test_programs_that_a_kept_module_only_asks_for_stay() -> None:
    """torch asks whether its torch_shm_manager is there, and doesn't open it: a whole image hadn't worked."""
    files = {
        f"{LIB}/torch/__init__.py": "path('torch', 'bin', \"torch_shm_manager\")",
        f"{LIB}/torch/bin/torch_shm_manager": Node("file", 1, needed=("libshm.so",)),
        f"{LIB}/torch/lib/libshm.so": Node("file", 1),
        f"{LIB}/other/torch_shm_manager": "",
    }
    assert kept(files, f"{LIB}/torch/__init__.py") == set(files) - {f"{LIB}/other/torch_shm_manager"}


def test_libraries_links_and_the_loader_stay_through_links_of_directories() -> None:
    files = {
        "lib": Node("link", target="usr/lib"),
        "lib64": Node("link", target="usr/lib64"),
        "usr/lib64/ld-linux.so.2": Node("link", target="/lib/x/ld-linux.so.2"),
        "usr/lib/x/ld-linux.so.2": Node("file", 1),
        "usr/bin/python3": Node("link", target="python3.11"),
        "usr/bin/python3.11": Node("file", 1, needed=("ld-linux.so.2", "libz.so.1")),
        "usr/lib/x/libz.so.1": Node("link", target="libz.so.1.2"),
        "usr/lib/x/libz.so.1.2": Node("file", 1, needed=("libc.so.6",)),
        "usr/lib/x/libc.so.6": Node("file", 1),
        "usr/lib/x/libunused.so": Node("file", 1),
        "usr/lib/x/libunused.so.0": Node("link", target="libunused.so"),
        "usr/share/a": Node("hard link", target="usr/share/b"),
        "usr/share/b": Node("file", 1),
        "dangling": Node("link", target="/proc/mounts"),
        "circle": Node("link", target="circle"),
    }
    unused = {"usr/lib/x/libunused.so", "usr/lib/x/libunused.so.0", "usr/share/a", "usr/share/b"}
    assert kept(files, "usr/bin/python3") | {"circle"} == set(files) - unused
    assert {"usr/share/a", "usr/share/b"} <= kept(files, "usr/share/a"), (
        "a hard link's content is its target's"
    )


def test_directories_of_what_went_go_and_empty_ones_stay() -> None:
    made = tree({"usr/share/doc/x/readme": "", "usr/bin/x": ""})
    nodes = {**made.nodes, "tmp": Node("directory"), "dev/null": Node("other"), "dev": Node("directory")}
    paths = kept_paths(Tree(nodes), ["usr/bin/x"])
    assert {path for path in paths if nodes[path].kind == "directory"} == {"usr", "usr/bin", "tmp", "dev"}
    assert "dev/null" in paths


def test_metadata_licences_and_settings_stay() -> None:
    files = ["etc/x/y", f"{LIB}/a-1.dist-info/RECORD", "usr/share/doc/x/copyright", "var/lib/dpkg/status"]
    assert kept(dict.fromkeys([*files, f"{LIB}/a/data"], ""), "none") == set(files)


def test_a_module_by_name_counts_as_observed_and_an_unknown_one_is_refused() -> None:
    files = {f"{LIB}/a/__init__.py": "", f"{LIB}/a/b.py": "def f():\n import c", f"{LIB}/c.py": ""}
    assert kept(files, names=("a.b",)) == set(files)
    with pytest.raises(DataError, match=r"no module a\.none"):
        kept(files, names=("a.none",))


def test_every_reason_is_said_in_words() -> None:
    assert len({reason.value for reason in Reason}) == len(Reason)
