"""A damaged configuration of the Docker CLI is named, and isn't taken for a missing engine."""

from pathlib import Path

import pytest

from buildtool.core.errors import ConfigError, EngineUnavailable
from buildtool.engine.connection import require_configuration


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "config.json"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '"x"',
        "null",
        "[" * 100_000,
        '{"proxies": []}',
        '{"proxies": {"default": 5}}',
        '{"auths": 5}',
        '{"auths": {"a": 5}}',
        '{"auths": {"a": {"auth": "!!"}}}',
        '{"auths": {"a": {"auth": 5}}}',
        '{"HttpHeaders": 5}',
        '{"HttpHeaders": {"a": 5}}',
        '{"HttpHeaders": {"a": "b\\nc"}}',
    ],
)
def test_a_damaged_configuration_is_named_with_the_way_out(text: str, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError) as refused:
        require_configuration()
    assert not isinstance(refused.value, EngineUnavailable), "an engine would be installed"
    assert refused.value.message.startswith(f"{config} isn't a configuration")
    assert f"mv -- {config} {config}.old" in refused.value.hint


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "{}",
        '{"currentContext": "default", "credsStore": "secretservice", "detachKeys": "ctrl-e,e"}',
        '{"auths": {"https://registry.example/v1/": {"auth": "dTpw"}}, "HttpHeaders": {"X-Meta": "v"}}',
        '{"proxies": {"default": {"httpProxy": "http://proxy:3128", "noProxy": "*.test"}}}',
    ],
)
def test_what_the_cli_writes_or_ignores_is_taken(text: str | None, config: Path) -> None:
    if text is not None:
        config.write_text(text)
    require_configuration()
