"""Pushes and pulls by the CLI's words: how far they are, why they failed, and what to type then."""

from types import SimpleNamespace
from typing import Any

import pytest

from buildtool.core.command import CommandFailed, Completed
from buildtool.core.errors import (
    BuildFailed,
    ConfigError,
    DataError,
    EngineUnavailable,
    EnvironmentMissing,
    SourceUnreachable,
    ToolError,
)
from buildtool.engine import registry
from buildtool.engine.reference import parse_pullable, parse_reference

OURS = parse_reference("ghcr.example/team/bert:1.0")
HUB = parse_reference("team/bert:1.0")
DIGEST = f"sha256:{'a' * 64}"
REFUSED = "Error response from daemon: "


@pytest.mark.parametrize(
    ("words", "kind", "way_out"),
    [
        (
            "denied: requested access is denied",
            EnvironmentMissing,
            "docker login ghcr.example",
        ),
        ("unauthorized: authentication required", EnvironmentMissing, "docker login ghcr.example"),
        ("no basic auth credentials", EnvironmentMissing, "docker login ghcr.example"),
        ("dial tcp: lookup ghcr.example: no such host", SourceUnreachable, "reaches ghcr.example"),
        ("manifest invalid", BuildFailed, "docker push ghcr.example/team/bert:1.0"),
        ("write /var/lib/x: no space left on device", EnvironmentMissing, "docker system df"),
        ("error getting credentials - err: exec: file not found", EnvironmentMissing, "credHelpers"),
        ("Cannot connect to the Docker daemon at unix:///x", EngineUnavailable, "systemctl start docker"),
    ],
)
def test_a_failed_push_says_what_to_type(words: str, kind: type[ToolError], way_out: str) -> None:
    fault = registry.push_error(OURS, f"The push refers to repository [x]\n{REFUSED}{words}\n")
    assert isinstance(fault, kind)
    assert way_out in str(fault)


@pytest.mark.parametrize(
    ("words", "kind", "way_out"),
    [
        ("pull access denied for x, repository does not exist", DataError, "docker login ghcr.example"),
        ("manifest for x:1 not found: manifest unknown", DataError, "check the name"),
        ("no matching manifest for linux/arm64 in the manifest list", DataError, "linux/arm64"),
        ("dial tcp 1.2.3.4:443: connect: connection refused", SourceUnreachable, "reaches ghcr.example"),
        ("Get https://x: http: server gave HTTP response to HTTPS client", SourceUnreachable, "HTTPS"),
        ("write /var/lib/x: no space left on device", EnvironmentMissing, "docker system df"),
        ("what nobody foresaw", DataError, "docker pull ghcr.example/team/bert:1.0"),
    ],
)
def test_a_failed_pull_says_what_to_type(words: str, kind: type[ToolError], way_out: str) -> None:
    fault = registry.pull_error(OURS, f"{REFUSED}{words}")
    assert isinstance(fault, kind)
    assert way_out in str(fault)
    assert REFUSED not in str(fault)


HEAD = "failed to do request: unexpected status from HEAD request to http://ghcr.example/v2/x: "


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (f"{HEAD}429 Too Many Requests", "wait some minutes"),
        ("toomanyrequests: You have reached your unauthenticated pull rate limit", "wait some minutes"),
        (f"{HEAD}500 Internal Server Error", "later"),
        (f"{HEAD}502 Bad Gateway", "later"),
        ("received unexpected HTTP status: 503 Service Unavailable", "later"),
        (f"{HEAD}504 Gateway Timeout", "later"),
        ('failed to do request: Head "https://ghcr.example/v2/x": EOF', "reaches ghcr.example"),
        ("write tcp 127.0.0.1:1->1.2.3.4:443: use of closed network connection", "reaches ghcr.example"),
        ("write: broken pipe", "reaches ghcr.example"),
        ("unexpected EOF", "reaches ghcr.example"),
        ('Head "/v2/x": stopped after 10 redirects', "reaches ghcr.example"),
    ],
)
def test_a_registry_that_fails_for_now_is_not_a_wrong_name_nor_a_broken_build(
    words: str, way_out: str
) -> None:
    for fault in (registry.push_error(OURS, f"{REFUSED}{words}"), registry.pull_error(OURS, words)):
        assert isinstance(fault, SourceUnreachable)
        assert way_out in fault.hint


@pytest.mark.parametrize("repository", ["ghcr.example/denied/not-found", "toomanyrequests/x", "forbidden"])
def test_a_name_that_reads_like_a_failure_is_not_taken_for_one(repository: str) -> None:
    name = parse_reference(f"{repository}:unauthorized")
    words = (
        f'failed to push "https://{repository}/denied": {name}: manifest invalid, http://h/no%20space%20left'
    )
    assert isinstance(registry.push_error(name, words), BuildFailed)
    fault = registry.pull_error(name, words)
    assert isinstance(fault, DataError)
    assert "see all of it" in fault.hint


def test_a_push_under_a_name_that_somebody_moved_meanwhile_is_no_success(cli: list[list[str]]) -> None:
    engine: Any = SimpleNamespace(tag=lambda *_: "ours", inspect=lambda _ref: {"Id": "theirs"})
    with pytest.raises(BuildFailed, match="pushed as another image, sha256:aaaa"):
        registry.push(DIGEST, OURS, engine=engine, progress=lambda _line: None)


def test_a_cli_that_gives_no_reason_is_told_as_such() -> None:
    assert "it gave no reason" in str(registry.push_error(OURS, "\n"))


def test_a_login_at_docker_hub_names_no_registry_as_its_cli_wants_it() -> None:
    assert str(registry.push_error(HUB, "denied")).endswith("docker login")


@pytest.mark.parametrize(
    "text", ["sha256:0123456789ab", "0123456789ab", "a" * 64, f"sha256:{'b' * 64}", "sha256:abc"]
)
def test_an_image_id_is_never_pulled(text: str) -> None:
    assert parse_pullable(text) is None


@pytest.mark.parametrize("text", ["python", "deadbeef", "0123456789ab:1", "x.tar:1", f"h:5000/a@{DIGEST}"])
def test_a_name_that_only_resembles_an_id_is_pulled(text: str) -> None:
    assert str(parse_pullable(text)) == text


@pytest.mark.parametrize("text", ["Weir/Cpu", "a b", "-rf", "a//b", "https://x/y"])
def test_what_no_image_can_be_called_is_not_handed_to_the_cli(text: str) -> None:
    with pytest.raises(ConfigError, match="no image can be called"):
        parse_pullable(text)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A docker CLI that says what it says of two layers; the commands that it got."""
    commands = list[list[str]]()

    def run_streaming(command: list[str], *, progress: Any) -> Completed:
        commands.append(command)
        states = ("Pulling fs layer", "Download complete", "Pull complete")
        lines = [f"{layer * 12}: {state}" for layer in "ab" for state in ("Pulling fs layer",)]
        lines += [f"{layer * 12}: {state}" for layer in "ab" for state in states[1:]]
        for line in ("1.0: Pulling from team/bert", *lines, f"1.0: digest: {DIGEST} size: 528"):
            progress(line)
        return Completed("", f"{lines[-1]}\n1.0: digest: {DIGEST} size: 528")

    monkeypatch.setattr(registry, "run_streaming", run_streaming)
    return commands


def test_a_pull_of_many_layers_is_not_silent(cli: list[list[str]]) -> None:
    said = list[str]()
    registry.pull(OURS, progress=said.append, platform="linux/arm64")
    assert cli == [["docker", "pull", "--platform=linux/arm64", "ghcr.example/team/bert:1.0"]]
    assert said == [f"pull {OURS}: {done} of 2 layers" for done in (1, 2)]


def test_a_push_pushes_the_image_that_was_built_and_gives_its_digest(cli: list[list[str]]) -> None:
    tagged = list[tuple[str, str]]()
    engine: Any = SimpleNamespace(
        tag=lambda image, name: tagged.append((image, str(name))) or "id", inspect=lambda _ref: {"Id": "id"}
    )
    assert registry.push(DIGEST, OURS, engine=engine, progress=lambda _line: None) == DIGEST
    assert tagged == [(DIGEST, str(OURS))]
    assert cli == [["docker", "push", str(OURS)]]


def test_a_verbose_push_hides_no_line(cli: list[list[str]]) -> None:
    said = list[str]()
    engine: Any = SimpleNamespace(tag=lambda *_: "id", inspect=lambda _ref: None)
    registry.push(DIGEST, OURS, engine=engine, progress=said.append, verbose=True)
    assert len(said) == 8


def test_a_cli_that_fails_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_streaming(command: list[str], **_more: object) -> Completed:
        raise CommandFailed(command, 1, "denied: no")

    monkeypatch.setattr(registry, "run_streaming", run_streaming)
    engine: Any = SimpleNamespace(tag=lambda *_: "id", inspect=lambda _ref: None)
    with pytest.raises(EnvironmentMissing, match="refuses to take"):
        registry.push(DIGEST, OURS, engine=engine, progress=lambda _line: None)
    with pytest.raises(DataError, match="can't pull it"):
        registry.pull(OURS, progress=lambda _line: None)
