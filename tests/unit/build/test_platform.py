"""An image is built for this host's platform alone; another one is refused before any work."""

import platform

import pytest

from buildtool.cli import arguments
from buildtool.cli.program import main
from buildtool.core.errors import ConfigError, Exit
from buildtool.image.documents import Platform


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "host_platform", lambda: Platform("linux", "amd64"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize("asked", ["linux/amd64", "linux/amd64/v1"])
@pytest.mark.parametrize("machine", ["", "x86_64"])
def test_this_hosts_own_platform_is_not_refused(asked: str, machine: str) -> None:
    arguments.require_platform(asked, machine)


@pytest.mark.parametrize("asked", ["linux/arm64", "windows/amd64", "linux/amd64/v3"])
def test_no_image_is_built_for_a_platform_that_it_could_not_be_proved_on(asked: str) -> None:
    with pytest.raises(ConfigError, match=f"can't build for {asked}: .* linux/amd64\n.*on a {asked} machine"):
        arguments.require_platform(asked, "")


def test_no_engine_of_another_architecture_builds_what_was_asked_for() -> None:
    with pytest.raises(ConfigError, match="of type aarch64"):
        arguments.require_platform("linux/amd64", "aarch64")


@pytest.mark.parametrize("asked", ["amd64", "linux/", "linux/arm64"])
def test_a_platform_is_refused_before_an_engine_is_asked(
    asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_more: object) -> None:
        raise AssertionError("an engine was looked for")

    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", refuse)
    assert main(["build", "cpu", "--platform", asked]) == Exit.USAGE
    assert "machine" in capsys.readouterr().err or "/" not in asked.strip("/")
