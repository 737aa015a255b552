"""The docker package talks to the engine that the Docker CLI talks to, and failures name it."""

import hashlib
import json
from pathlib import Path

import pytest

from buildtool.core.errors import EngineForbidden, EngineUnavailable
from buildtool.engine.connection import DEFAULT_HOST, Endpoint, current_endpoint, unavailable_error
from buildtool.engine.host import disk_of
from probes.core.unknown import Unknown


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A CLI's configuration with two contexts, `far` chosen."""
    folder = tmp_path / ".docker"
    for name, host in (("far", "tcp://far:2376"), ("near", "unix:///near.sock")):
        key = hashlib.sha256(name.encode()).hexdigest()
        (folder / "contexts/meta" / key).mkdir(parents=True)
        meta = {"Name": name, "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False}}}
        (folder / "contexts/meta" / key / "meta.json").write_text(json.dumps(meta))
    certificates = folder / "contexts/tls" / hashlib.sha256(b"far").hexdigest() / "docker"
    certificates.mkdir(parents=True)
    for name in ("ca", "cert", "key"):
        (certificates / f"{name}.pem").write_text(name)
    (folder / "config.json").write_text('{"currentContext": "far"}')
    return tmp_path


def test_without_any_setting_it_is_the_default_socket(tmp_path: Path) -> None:
    assert current_endpoint({"DOCKER_HOST": ""}, tmp_path) == Endpoint(DEFAULT_HOST)


def test_the_context_in_use_is_followed_with_its_certificates(config: Path) -> None:
    found = current_endpoint({}, config)
    assert (found.host, found.named_by) == ("tcp://far:2376", "the docker context 'far'")
    assert found.builder == "far"  # buildx has one of the context's name
    assert found.tls is not None
    assert found.tls.verify
    assert found.tls.client is not None


@pytest.mark.parametrize(
    ("env", "host"),
    [
        ({"DOCKER_CONTEXT": "near"}, "unix:///near.sock"),
        ({"DOCKER_CONTEXT": "default"}, DEFAULT_HOST),
        ({"DOCKER_CONTEXT": "near", "DOCKER_HOST": "tcp://named:1"}, "tcp://named:1"),
    ],
)
def test_the_environment_goes_before_the_context_in_use(config: Path, env: dict[str, str], host: str) -> None:
    assert current_endpoint(env, config).host == host


@pytest.mark.parametrize(
    ("name", "said"), [("missing", "there is no docker context 'missing'"), ("broken", "'broken' is damaged")]
)
def test_a_context_that_can_not_be_read_is_not_taken_for_the_default_one(
    config: Path, name: str, said: str
) -> None:
    broken = config / ".docker/contexts/meta" / hashlib.sha256(b"broken").hexdigest()
    broken.mkdir()
    (broken / "meta.json").write_text("[1]")
    with pytest.raises(EngineUnavailable, match=said) as caught:
        current_endpoint({"DOCKER_CONTEXT": name}, config)
    assert "docker context ls" in caught.value.hint


def test_permission_denied_is_not_reported_as_no_engine() -> None:
    deep = ConnectionError("Connection aborted.", PermissionError(13, "Permission denied"))
    outer = RuntimeError("Error while fetching server API version")
    outer.__cause__ = deep
    said = unavailable_error(outer, Endpoint(DEFAULT_HOST))
    assert isinstance(said, EngineForbidden)
    assert DEFAULT_HOST in said.message
    assert "permission denied" in said.message


def test_an_engine_named_by_a_setting_is_reported_with_that_setting() -> None:
    said = unavailable_error(RuntimeError(), Endpoint("tcp://a:1", "DOCKER_HOST", "unset DOCKER_HOST"))
    assert "tcp://a:1" in said.message
    assert "DOCKER_HOST" in said.message
    assert "unset DOCKER_HOST" in said.hint


def disk(address: str = DEFAULT_HOST, *, engine_host: str = "here", is_seen: bool = True) -> Path | Unknown:
    root = Path("/var/lib/docker")
    return disk_of(Endpoint(address), root, engine_host=engine_host, this_host="here", is_seen=is_seen)


def test_the_disk_of_an_engine_elsewhere_is_not_measured_here() -> None:
    """`/var/lib/docker` of the other machine is a path of this one too, with another disk under it."""
    assert disk() == Path("/var/lib/docker")
    assert disk("tcp://far:2376") == Unknown(
        "the engine is at tcp://far:2376, and its disk can't be measured from here"
    )
    assert disk("ssh://far", engine_host="here") != Path("/var/lib/docker")
    assert disk("unix:///forwarded.sock", engine_host="far") == Unknown("the engine runs on far, not on here")
    assert disk(is_seen=False) == Unknown("the engine's directory /var/lib/docker can't be seen from here")
