"""What a slim image says where a program asks for what was left out of it."""

import builtins
import contextlib
import importlib.abc
import importlib.util
import io
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = "weir build cpu --keep cpu.keep --restore"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of modules, some of which were left out, with the hook in place."""
    spec = importlib.util.spec_from_file_location("left_out", ROOT / "images/left_out.py")
    assert spec is not None
    assert spec.loader is not None
    hook: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    for name in ("here_x/__init__.py", "here_x/there.py", "half_x/data.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    gone = ["here_x/gone.py", "half_x/__init__.py", "here_x/data.json", "here_x/libgone.so.1"]
    lines = "".join(f"file 9 {tmp_path / name}\n" for name in gone)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = builtins.open, io.open, sys.excepthook, threading.excepthook, sys.meta_path[:]
    hook.install(hook.Manifest(f"restore {COMMAND}\nwhole weir build cpu --undo\n{lines}"))
    yield tmp_path
    builtins.open, io.open, sys.excepthook, threading.excepthook = before[:4]
    sys.meta_path[:] = before[4]
    for name in [each for each in sys.modules if each.partition(".")[0] in ("here_x", "half_x")]:
        del sys.modules[name]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_a_left_out_module_is_named_with_its_command(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import here_x.there  # type: ignore[import-not-found] # noqa: F401

    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("here_x.gone")
    sys.excepthook(error.type, error.value, error.tb)
    text = said(capsys)
    assert f"weir: the module here_x.gone ({site}/here_x/gone.py) was left out" in text
    assert text.count(f"{COMMAND} here_x.gone\n") == 1, "once, though it is raised and then not caught"
    assert "weir build cpu --undo" in text
    assert importlib.util.find_spec("here_x.gone"), "who only asks learns that the whole image has it"


class AsSetuptools(importlib.abc.MetaPathFinder):
    """Finds `alias_x` by importing what was left out, and passes over its failure."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "alias_x":
            with contextlib.suppress(ImportError):
                importlib.import_module("here_x.gone")


def test_a_module_missing_after_a_left_out_one_gives_both_names_and_no_traceback(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'other_x'", name="other_x")
    before = sys.excepthook
    sys.excepthook(ModuleNotFoundError, missing, None)
    assert "No module named 'other_x'" in capsys.readouterr().err, "Python's own words: nothing was left out"
    assert sys.excepthook is before
    sys.meta_path.insert(0, AsSetuptools())
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("alias_x.core")
    sys.excepthook(error.type, error.value, error.tb)
    text = said(capsys)
    assert f"the module here_x.gone ({site}/here_x/gone.py) was left out" in text
    assert "ModuleNotFoundError: No module named 'alias_x' (" in text
    assert "may lack it without here_x.gone: see above" in text


def test_a_directory_without_its_init_is_no_namespace_package(site: Path) -> None:
    assert (site / "half_x").is_dir()
    with pytest.raises(ModuleNotFoundError, match="half_x"):
        importlib.import_module("half_x")


def test_python_m_gives_the_message(site: Path) -> None:
    with pytest.raises(ImportError, match="was left out of this image"):
        runpy.run_module("here_x.gone")


def test_files_and_libraries_are_named_and_other_errors_stay(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):
        (site / "here_x/data.json").read_text()
    assert f"{COMMAND} {site}/here_x/data.json" in said(capsys)
    missing = OSError("libgone.so.1: cannot open shared object file: No such file or directory")
    sys.excepthook(OSError, missing, None)
    assert f"the file {site}/here_x/libgone.so.1" in said(capsys)
    with pytest.raises(FileNotFoundError):
        (site / "never").read_text()
    assert said(capsys) == ""
    sys.excepthook(ValueError, ValueError("theirs"), None)
    assert "theirs" in capsys.readouterr().err


def test_what_somebody_put_in_its_place_is_used(site: Path) -> None:
    (site / "here_x/gone.py").write_text("mounted = 1\n")
    importlib.invalidate_caches()
    assert importlib.import_module("here_x.gone").mounted == 1


def test_a_module_that_an_earlier_place_has_is_not_refused(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tmp_path_factory.mktemp("earlier")
    (earlier / "half_x.py").write_text("there = True\n")
    monkeypatch.syspath_prepend(str(earlier))
    assert importlib.import_module("half_x").there
    monkeypatch.undo()
    assert not (site / "half_x/__init__.py").exists()


def test_places_without_a_path_break_no_import(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = site / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", [None, "", *sys.path])
    importlib.import_module("here_x.there")
    with pytest.raises(FileNotFoundError) as error:
        Path("relative").read_text()
    assert error.value.filename == "relative", "the error is the system's own"


def test_open_stays_no_method_of_a_class_that_has_it(site: Path) -> None:
    holder = type("Holder", (), {"opener": builtins.open})()
    with holder.opener(site / "half_x/data.txt") as file:
        assert file.read() == ""


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_lost_standard_error_changes_no_error(
    site: Path, monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    with pytest.raises(FileNotFoundError, match=r"data\.json"):
        (site / "here_x/data.json").read_text()
