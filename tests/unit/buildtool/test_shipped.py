"""Caches and the lock have a place of their own in a checkout and in an installed package."""

from pathlib import Path

import pytest

from buildtool.core import shipped

ROOT = Path(__file__).parents[3]


def test_a_checkout_keeps_its_things_in_itself() -> None:
    assert shipped.IMAGES == ROOT / "images"
    assert (shipped.PROBES / "cli").exists()
    assert shipped.state_directory({}) == ROOT / ".weir"
    assert shipped.lock_file(env={}) == ROOT / "images/variants.lock.json"


def test_an_installed_package_writes_nothing_among_the_installed_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert shipped.state_directory({}, installed=True) == tmp_path / ".cache/weir"
    assert shipped.state_directory({"XDG_CACHE_HOME": "/c"}, installed=True) == Path("/c/weir")
    assert shipped.state_directory({"XDG_CACHE_HOME": "relative"}, installed=True) == tmp_path / ".cache/weir"
    assert shipped.lock_file(env={}, installed=True) == tmp_path / ".cache/weir/variants.lock.json"


@pytest.mark.parametrize("installed", [True, False])
def test_a_build_writes_nothing_into_the_directory_that_it_is_typed_in(
    installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    home = Path("/home/somebody/.cache/weir") if installed else ROOT
    assert shipped.reports_directory({}, installed=installed) == home / "reports/images"
    assert shipped.lock_file(env={}, installed=installed).is_relative_to(home)


@pytest.mark.parametrize("installed", [True, False])
def test_the_lock_of_ones_own_catalog_is_beside_it(installed: bool, tmp_path: Path) -> None:
    mine = tmp_path / "here.yaml"
    mine.touch()
    assert shipped.lock_file(mine, {}, installed=installed) == tmp_path / "here.lock.json"
    piped = shipped.lock_file(Path("/dev/null"), {"WEIR_STATE": "/s"}, installed=installed)
    assert piped == Path("/s/variants.lock.json")


def test_the_environment_names_other_places() -> None:
    named = {"WEIR_STATE": "/s", "WEIR_LOCK": "/l"}
    for installed in (True, False):
        assert shipped.state_directory(named, installed=installed) == Path("/s")
        assert shipped.lock_file(env=named, installed=installed) == Path("/l")
