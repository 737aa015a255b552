"""Pushes and pulls with a real engine and a real registry on loopback; another one there lets nobody in."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from standins import free_port, locked_registry, registry

from buildtool.engine import registry as gate
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.errors import EnvironmentMissing, Exit, SourceUnreachable

LOCAL = f"t-registry-{os.getpid()}/tiny:1"
DOCKERFILE = "FROM scratch\nCOPY one /one\nCOPY two /two\n"


def weir(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "buildtool", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def forget(ref: str) -> None:
    subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small image in the engine; yields its id."""
    context = tmp_path_factory.mktemp("context")
    (context / "one").write_bytes(b"1" * 200_000)
    (context / "two").write_bytes(os.urandom(1000))  # a layer that no registry has
    (context / "Dockerfile").write_text(DOCKERFILE)
    command = ["docker", "buildx", "build", "--provenance=false", "-q", "--load", "-t", LOCAL, str(context)]
    subprocess.run(command, check=True, capture_output=True)
    record = Engine().inspect(LOCAL)
    assert record is not None
    yield str(record["Id"])
    forget(LOCAL)


@pytest.fixture
def pushed(host: str, image: str) -> Iterator[Reference]:
    """The image in the registry and no longer in the engine, by that name."""
    name = parse_new_name(f"{host}/team/tiny:1")
    said = list[str]()
    engine = Engine()
    digest = gate.push(image, name, engine=engine, say=said.append)
    assert digest == engine.registry_digest(str(name))
    if engine.info().containerd_store:
        assert digest == image, "what was pushed is what was built"
    assert any("of 2 layers" in line for line in said) or not said
    engine.forget(str(name))
    assert engine.inspect(str(name)) is None
    yield name
    forget(str(name))


def test_an_audit_pulls_what_the_engine_lacks_and_says_so_first(pushed: Reference) -> None:
    done = weir("audit", str(pushed))
    assert done.returncode == Exit.OK, done.stderr
    assert done.stderr.startswith(f"the engine doesn't have {pushed}; pulling it\n")
    assert Engine().inspect(str(pushed)) is not None
    again = weir("audit", str(pushed))
    assert again.returncode == Exit.OK
    assert "pulling" not in again.stderr


def test_no_pull_leaves_the_engine_as_it_is(pushed: Reference) -> None:
    for words in (["audit", str(pushed)], ["diff", LOCAL, str(pushed)]):
        done = weir(*words, "--no-pull")
        assert done.returncode == Exit.DATA
        assert f"docker pull {pushed}" in done.stderr
    assert Engine().inspect(str(pushed)) is None


def test_a_diff_pulls_what_the_engine_lacks(pushed: Reference) -> None:
    done = weir("diff", LOCAL, str(pushed))
    assert done.returncode == Exit.OK, done.stderr
    assert f"doesn't have {pushed}; pulling it" in done.stderr


def test_a_name_that_a_registry_lacks_is_told_with_its_registry(host: str) -> None:
    done = weir("audit", f"{host}/team/none:1")
    assert done.returncode == Exit.DATA
    assert f"can't pull it from {host}: " in done.stderr
    assert f"docker login {host}" in done.stderr


def test_a_registry_that_does_not_answer_is_told_apart_from_a_wrong_name(image: str) -> None:
    name = f"127.0.0.1:{free_port()}/team/tiny:1"
    done = weir("audit", name)
    assert done.returncode == Exit.ENVIRONMENT
    assert "doesn't answer" in done.stderr
    try:
        with pytest.raises(SourceUnreachable):
            gate.push(image, parse_new_name(name), engine=Engine(), say=lambda _line: None)
    finally:
        forget(name)


def test_a_registry_that_wants_a_login_is_told_with_the_command(image: str) -> None:
    with locked_registry() as host:
        name = f"{host}/team/tiny:1"
        done = weir("audit", name)
        assert done.returncode == Exit.DATA
        assert f"docker login {host}" in done.stderr
        try:
            with pytest.raises(EnvironmentMissing, match=f"docker login {host}"):
                gate.push(image, parse_new_name(name), engine=Engine(), say=lambda _line: None)
        finally:
            forget(name)


def test_an_id_is_not_asked_of_a_registry() -> None:
    done = weir("audit", "0123456789ab")
    assert done.returncode == Exit.DATA
    assert "an id can't be pulled" in done.stderr
