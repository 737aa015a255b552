"""What the engine refuses is reported as the engine's refusal, wherever in our own work it comes up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest
import requests.exceptions

from buildtool.core.errors import BuildFailed, ConfigError, EngineUnavailable, ToolError
from buildtool.engine.client import Engine


def engine(fault: Exception) -> Engine:
    """An engine whose containers don't start."""

    def start() -> None:
        raise fault

    container = SimpleNamespace(start=start, remove=lambda **_: None)
    made: Any = Engine.__new__(Engine)
    made._client = SimpleNamespace(
        api=SimpleNamespace(containers=lambda **_: [], networks=lambda **_: []),
        containers=SimpleNamespace(create=lambda *_, **__: container),
        images=SimpleNamespace(get=lambda _: SimpleNamespace(attrs={"Id": "x", "Config": None})),
    )
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (docker.errors.APIError("500 Server Error", explanation="unable to find user x"), BuildFailed),
        (requests.exceptions.ConnectionError("Connection aborted"), EngineUnavailable),
    ],
)
def test_a_container_that_does_not_start_is_no_directory_that_cannot_be_written(
    fault: Exception, kind: type[ToolError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    with pytest.raises(kind) as caught:
        engine(fault).run("x", ["true"])
    assert "can't write" not in caught.value.message


@pytest.mark.parametrize("name", ["x/../../images", "img\udcff", "a\nb", "x?all=1", "Team/X", ""])
def test_a_name_that_no_image_can_have_makes_no_other_request_of_an_engine(name: str) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("the engine was asked")

    made: Any = Engine.__new__(Engine)
    api = SimpleNamespace(get_image=refuse)
    made._client = SimpleNamespace(api=api, images=SimpleNamespace(get=refuse, remove=refuse))
    for ask in (made.inspect, made.remove_tag, made.unpacked_bytes, lambda ref: list(made.save(ref))):
        with pytest.raises(ConfigError, match="no image can be called"):
            ask(name)
