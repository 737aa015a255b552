"""The real pip on planted packages: whatever form of requirement reaches it, it runs no code of a package."""

import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from standins import Index, make_wheel, package_index

from buildtool.build.wheels import WheelCache
from buildtool.core.errors import SourceUnreachable
from buildtool.core.model import TorchBuild, TorchSource

BACKEND = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
# in this folder, whose `evil` is planted in every form that pip takes
FORMS = {
    "a path": "./evil",
    "an absolute path": "{folder}/evil",
    "a file's address": "file://{folder}/evil",
    "a direct reference": "evil @ file://{folder}/evil",
    "a direct reference without blanks": "evil@file://{folder}/evil",
    "an archive of this directory": "evil-1.0.tar.gz",
    "a zip of this directory": "evil.zip",
    "a zip that looks like a version": "evil==1.0+a.zip",
    "an archive's address": "file://{folder}/evil-1.0.tar.gz",
    "an archive of an index": "{url}../files/evil-1.0.tar.gz",
    "a repository": "git+file://{folder}/evil",
    "a repository by name": "evil @ git+file://{folder}/evil",
    "a wheel's own requirement": "innocent",
    "a package without a wheel": "evil",
}
BASE_HAS_TORCH = TorchSource("base", TorchBuild.CPU)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as found:
        yield found


@pytest.fixture
def planted(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `evil`, which leaves `mark` where its code runs; pip's only index has it, too."""
    evil, mark = tmp_path / "evil", tmp_path / "mark"
    evil.mkdir()
    code = f"open({str(mark)!r}, 'w').close()\n"
    (evil / "backend.py").write_text(code)
    (evil / "setup.py").write_text(code)
    (evil / "pyproject.toml").write_text(BACKEND)
    with tarfile.open(tmp_path / "evil-1.0.tar.gz", "w:gz") as tar:
        tar.add(evil, "evil-1.0")
    for name in ("evil.zip", "evil==1.0+a.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file in evil.iterdir():
                archive.write(file, f"evil-1.0/{file.name}")
    git = ["git", "-C", str(evil), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    os.link(tmp_path / "evil-1.0.tar.gz", index.files / "evil-1.0.tar.gz")
    innocent = make_wheel(index.files, "innocent", "1.0", {"innocent.py": ""})
    text = f"Metadata-Version: 2.1\nName: innocent\nVersion: 1.0\nRequires-Dist: evil @ file://{evil}\n"
    rewritten(innocent, "innocent-1.0.dist-info/METADATA", text)
    make_wheel(index.files, "plain", "1.0", {"plain.py": ""})
    index.refresh()
    pages = index.files.parent / "simple/evil"
    pages.mkdir()
    (pages / "index.html").write_text('<a href="/files/evil-1.0.tar.gz">evil-1.0.tar.gz</a>')
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewritten(path: Path, name: str, text: str) -> None:
    with zipfile.ZipFile(path) as archive:
        content = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in content.items():
            archive.writestr(each, text if each == name else data)


def test_the_planted_package_runs_where_pip_is_called_as_it_comes(planted: Path) -> None:
    """Else the tests below would show nothing."""
    from buildtool.build.wheels import PIP

    command = [*PIP, "download", "--only-binary=:all:", "--dest", str(planted / "out"), "./evil"]
    subprocess.run(command, check=False, capture_output=True)
    assert (planted / "mark").exists()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_no_form_of_a_requirement_runs_code_of_its_package(form: str, planted: Path, index: Index) -> None:
    requirement = form.format(folder=planted, url=index.url)
    with pytest.raises(SourceUnreachable) as refused:
        WheelCache(planted / "cache", lambda _line: None).resolve(BASE_HAS_TORCH, "3.11", [requirement])
    assert not (planted / "mark").exists(), refused.value
    assert "Traceback" not in str(refused.value)


def test_a_wheel_that_a_requirement_names_is_taken(planted: Path) -> None:
    cache = WheelCache(planted / "cache", lambda _line: None)
    [wheel] = cache.resolve(BASE_HAS_TORCH, "3.11", ["plain>=1"])
    assert wheel.filename == "plain-1.0-py3-none-any.whl"


@pytest.mark.parametrize("requirement", ["plain[nosuch]", "plain; python_version < '3'"])
def test_what_pip_leaves_out_in_silence_is_an_error(requirement: str, planted: Path) -> None:
    with pytest.raises(SourceUnreachable, match=r"has no extra nosuch|pip gave no wheel"):
        WheelCache(planted / "cache", lambda _line: None).resolve(BASE_HAS_TORCH, "3.11", [requirement])


@pytest.mark.parametrize(("python", "brought"), [("3.10", {"old"}), ("3.14", {"new"})])
def test_what_a_wheel_requires_is_judged_by_the_images_python(
    python: str, brought: set[str], planted: Path, index: Index
) -> None:
    """pip judged it by this host's: what an image's other Python needs was left out in silence."""
    for name in ("old", "new"):
        make_wheel(index.files, name, "1.0", {f"{name}.py": ""})
    asking = make_wheel(index.files, "asking", "1.0", {"asking.py": ""})
    markers = {"old": "python_version < '3.11'", "new": "python_full_version >= '3.14'"}
    lines = "".join(f"Requires-Dist: {name}; {marker}\n" for name, marker in markers.items())
    text = f"Metadata-Version: 2.1\nName: asking\nVersion: 1.0\n{lines}"
    rewritten(asking, "asking-1.0.dist-info/METADATA", text)
    index.refresh()
    wheels = WheelCache(planted / "cache", lambda _line: None).resolve(BASE_HAS_TORCH, python, ["asking"])
    assert {wheel.distribution for wheel in wheels} == brought | {"asking"}


def test_no_setting_of_the_hosts_pip_leaves_out_what_a_wheel_requires(
    planted: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = make_wheel(index.files, "needs", "1.0", {"needs.py": ""})
    text = "Metadata-Version: 2.1\nName: needs\nVersion: 1.0\nRequires-Dist: plain\n"
    rewritten(needs, "needs-1.0.dist-info/METADATA", text)
    index.refresh()
    (planted / "pip.conf").write_text("[download]\nno-deps = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(planted / "pip.conf"))
    monkeypatch.setenv("PIP_NO_DEPS", "1")
    wheels = WheelCache(planted / "cache", lambda _line: None).resolve(BASE_HAS_TORCH, "3.11", ["needs"])
    assert [wheel.distribution for wheel in wheels] == ["needs", "plain"]
