"""A catalog can name things and nothing else: no value of one runs a program on the host, none is dropped."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hostile_values as hostile
import pytest
import yaml

from buildtool.build import catalog, pip_alone, wheels
from buildtool.build.rootfs import environment, mmdebstrap_command
from buildtool.build.wheels import WheelCache
from buildtool.core.command import Completed
from buildtool.core.errors import ConfigError, DataError, SourceUnreachable
from buildtool.core.model import Bootstrap, TorchBuild, TorchSource, Variant

BOOTSTRAP = {"suite": "bookworm", "packages": ["tini"]}
PLACES = {  # where a value stands: the values, and the keys of the variant that hold it
    "wheels": (hostile.REQUIREMENTS, lambda value: {"wheels": [value]}),
    "torch.require": (hostile.REQUIREMENTS, lambda value: {"torch": [torch(require=[value])]}),
    "torch.index": (hostile.INDEXES, lambda value: {"torch": [torch(require=["torch"], index=value)]}),
    "torch.name": (hostile.SOURCE_NAMES, lambda value: {"torch": [torch(name=value)]}),
    "system_packages": (hostile.PACKAGES, lambda value: {"system_packages": [value]}),
    "packages": (
        hostile.PACKAGES,
        lambda value: {"base": [{"bootstrap": BOOTSTRAP | {"packages": [value]}}]},
    ),
    "remove": (hostile.PACKAGES, lambda value: {"base": [{"bootstrap": BOOTSTRAP | {"remove": [value]}}]}),
    "cut": (hostile.GLOBS, lambda value: {"base": [{"bootstrap": BOOTSTRAP | {"cut": [value]}}]}),
    "suite": (hostile.SUITES, lambda value: {"base": [{"bootstrap": BOOTSTRAP | {"suite": value}}]}),
    "registry": (hostile.REFERENCES, lambda value: {"base": [{"registry": value}]}),
    "dockerfile": (hostile.FOLDERS, lambda value: {"dockerfile": value}),
}


def torch(**more: object) -> dict[str, object]:
    return {"name": "t", "build": "cpu", **more}


def loaded(tmp_path: Path, name: str = "one", **keys: object) -> Variant:
    """The one variant of a catalog with these keys."""
    base: dict[str, object] = {
        "summary": "s",
        "dockerfile": "naive",
        "python": "3.11",
        "base": [{"registry": "a:1"}],
        "torch": [torch()],
    }
    file = tmp_path / "v.yaml"
    whole = {"schema_version": 1, "source_date_epoch": 1, "variants": {name: base | keys}}
    file.write_text(yaml.dump(whole, Dumper=yaml.CSafeDumper, allow_unicode=True), encoding="utf-8")
    [variant] = catalog.load(file).variants
    return variant


def test_there_are_at_least_200_values() -> None:
    assert len({value for values, _ in PLACES.values() for value in values}) >= 200


def is_refused(folder: Path, **keys: Any) -> bool:
    """Whether a catalog with these keys is refused, with its place."""
    try:
        loaded(folder, **keys)
    except ConfigError as error:
        return "v.yaml" in str(error)
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("key", PLACES)
def test_what_is_no_name_is_refused_with_its_place(key: str, tmp_path: Path) -> None:
    values, keys = PLACES[key]
    assert [value for value in values if not is_refused(tmp_path, **keys(value))] == []


def test_a_variant_is_called_by_a_name(tmp_path: Path) -> None:
    assert [name for name in hostile.NAMES if not is_refused(tmp_path, name=name)] == []


def test_a_package_by_its_name_extras_and_versions_is_taken(tmp_path: Path) -> None:
    for value in hostile.PLAIN_REQUIREMENTS:
        assert loaded(tmp_path, wheels=[value]).wheels == (value,)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of pip, which gives nothing and calls that success."""
    lines: list[list[str]] = []

    def run(words: Sequence[str], **_more: Any) -> Completed:
        lines.append(list(words))
        return Completed("", "")

    monkeypatch.setattr(wheels, "run_streaming", run)
    return lines


BASE_HAS_TORCH = TorchSource("base", TorchBuild.CPU)


@pytest.mark.parametrize("value", [*hostile.PLAIN_REQUIREMENTS, *hostile.REQUIREMENTS])
def test_no_requirement_reaches_pip_as_an_option_and_none_is_left_out_in_silence(
    value: str, asked: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises((SourceUnreachable, ConfigError)):  # that pip gave nothing
        WheelCache(tmp_path, lambda _line: None).resolve(BASE_HAS_TORCH, "3.11", [value])
    for line in asked:
        assert line[line.index("--") :] == ["--", value]
        assert line[:3] == [sys.executable, "-P", pip_alone.__file__]
        assert "--only-binary=:all:" in line


def test_what_pip_brings_besides_wheels_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(words: Sequence[str], **_more: Any) -> Completed:
        (Path(words[list(words).index("--dest") + 1]) / "p-1.0.zip").write_bytes(b"")
        return Completed("", "")

    monkeypatch.setattr(wheels, "run_streaming", run)
    with pytest.raises(DataError, match=r"pip brought p-1\.0\.zip, which isn't a wheel"):
        WheelCache(tmp_path, lambda _line: None).resolve(BASE_HAS_TORCH, "3.11", ["p"])


@pytest.mark.parametrize("event", sorted(pip_alone.STARTS))
def test_pip_starts_no_program(event: str) -> None:
    with pytest.raises(OSError, match="only wheels are taken"):
        pip_alone.refuse(event, ("/bin/sh", ["sh"], None, None))
    pip_alone.refuse("open", ("x", "r", 0))


@pytest.mark.parametrize("module", sorted(pip_alone.ALLOWED))
def test_pip_may_ask_a_keyring_for_a_password(module: str) -> None:
    names = {"__name__": module, "refuse": pip_alone.refuse}
    exec("def ask(): refuse('subprocess.Popen', ())\nask()", names)


def test_a_name_reaches_mmdebstrap_in_its_list_and_nowhere_else() -> None:
    base = Bootstrap("bookworm", ("libstdc++6", "libperl5.36"), ("perl",), ("usr/bin/perl*",))
    line = mmdebstrap_command(base, Path("/t.tar"), None)
    assert "--include=libperl5.36,libstdc++6" in line  # sorted: their order decides no digest
    hook = next(word for word in line if word.startswith("--customize-hook="))
    assert "usr/bin/perl" not in hook
    assert "usr/bin/perl*" not in environment(base, {}, 1).values()
