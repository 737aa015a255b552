"""Pushes and pulls with a real engine and a real registry on loopback; another one there lets nobody in."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from standins import refusing_registry, registry, silent_registry

from buildtool.build import publish
from buildtool.build.layer_store import LayerStore
from buildtool.build.registry_base import fetch_base, registry_digest
from buildtool.core.errors import BuildFailed, EnvironmentMissing, Exit, SourceUnreachable
from buildtool.core.model import PinnedBase
from buildtool.engine import registry as gate
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.image.layer_writer import LayerWriter, TarMembers
from buildtool.image.written import LayerFile, WrittenImage, written_image

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
    digest = gate.push(image, name, engine=engine, progress=said.append)
    assert digest == engine.registry_digest(str(name))
    if engine.info().containerd_store:
        assert digest == image, "what was pushed is what was built"
    assert any("of 2 layers" in line for line in said) or not said
    engine.remove_tag(str(name))
    assert engine.inspect(str(name)) is None
    yield name
    forget(str(name))


@pytest.fixture
def layout_image(tmp_path: Path) -> tuple[WrittenImage, LayerStore]:
    """A written image of two layers of 200 kB, and the store that has it."""
    store = LayerStore(tmp_path / "state")

    def make(writer: LayerWriter) -> LayerFile:
        members = TarMembers(writer, 1)
        members.file("file", 200_000, [os.urandom(200_000)])
        return members.end()

    layers = [store.bring(store.key(n), make)[0] for n in range(2)]
    made = written_image({"architecture": "amd64", "os": "linux"}, layers, [])
    store.put(made)
    return made, store


def test_a_push_from_a_layout_moves_only_what_the_registry_lacks(
    host: str, layout_image: tuple[WrittenImage, LayerStore], tmp_path: Path
) -> None:
    made, store = layout_image
    said = list[str]()
    pushed = publish.Pushed(tmp_path / "pushed")
    for name in ("layouts/a:1", "layouts/a:2", "layouts/b:1"):
        ref = parse_new_name(f"{host}/{name}")
        digest = publish.push(made, ref, store=store, pushed=pushed, progress=said.append)
        assert digest == made.digest == registry_digest(str(ref))
    assert "in 3 blobs, 0 were there" in said[0]
    assert said[1].endswith("sent 0 B in 0 blobs, 3 were there")
    assert said[2].endswith("sent 0 B in 0 blobs, 3 were there, 3 of them in another repository")
    fetched = fetch_base(PinnedBase("registry", f"{host}/layouts/b:1", made.digest), store, said.append)
    assert [layer.digest for layer in fetched.layers] == [layer.digest for layer in made.layers]
    elsewhere = LayerStore(tmp_path / "elsewhere")
    again = fetch_base(PinnedBase("registry", f"{host}/layouts/b:1", made.digest), elsewhere, said.append)
    assert again == fetched
    assert all(elsewhere.blob(layer.digest).is_file() for layer in again.layers)


def test_a_mount_that_a_registry_refuses_is_an_upload(
    host: str, layout_image: tuple[WrittenImage, LayerStore], tmp_path: Path
) -> None:
    """What is remembered may be gone: somebody removed that repository."""
    made, store = layout_image
    pushed = publish.Pushed(tmp_path / "pushed")
    pushed.remember(host, dict.fromkeys((layer.digest for layer in made.layers), "layouts/gone"))
    said = list[str]()
    publish.push(
        made, parse_new_name(f"{host}/layouts/c:1"), store=store, pushed=pushed, progress=said.append
    )
    assert "in 3 blobs, 0 were there" in said[0]


def test_a_blob_that_a_registry_cannot_read_is_sent_anew(
    layout_image: tuple[WrittenImage, LayerStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full leaves empty links, which Debian's registry answers 500 for."""
    monkeypatch.setattr("buildtool.engine.registry_api._PAUSE_S", 0)
    made, store = layout_image
    folder = tmp_path / "registry"
    folder.mkdir()
    with registry(folder) as address:
        ref, said = parse_new_name(f"{address}/team/tiny:1"), list[str]()
        publish.push(made, ref, store=store, pushed=publish.Pushed(tmp_path / "one"), progress=said.append)
        links = list((folder / "storage").glob("docker/registry/v2/repositories/*/*/_layers/*/*/link"))
        assert len(links) == 3
        for link in links:
            link.write_bytes(b"")
        publish.push(made, ref, store=store, pushed=publish.Pushed(tmp_path / "two"), progress=said.append)
        assert "in 3 blobs, 0 were there" in said[-1]
        assert all(link.read_bytes() for link in links)


@pytest.mark.parametrize(
    ("status", "error", "way_out"),
    [
        (401, EnvironmentMissing, "docker login"),
        (429, SourceUnreachable, "wait some minutes"),
        (503, SourceUnreachable, "later"),
    ],
)
def test_a_registry_that_does_not_take_a_layout_is_told_with_the_way_out(
    status: int, error: type[Exception], way_out: str, layout_image: tuple[WrittenImage, LayerStore],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("buildtool.engine.registry_api._PAUSE_S", 0)
    made, store = layout_image
    pushed = publish.Pushed(tmp_path / "pushed")
    with refusing_registry(status) as address:
        name = parse_new_name(f"{address}/team/tiny:1")
        with pytest.raises(error, match=way_out):
            publish.push(made, name, store=store, pushed=pushed, progress=lambda _line: None)


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
            gate.push(image, parse_new_name(name), engine=Engine(), progress=lambda _line: None)
    finally:
        forget(name)


def test_a_registry_that_wants_a_login_is_told_with_the_command(image: str) -> None:
    with refusing_registry(401) as host:
        name = f"{host}/team/tiny:1"
        done = weir("audit", name)
        assert done.returncode == Exit.DATA
        assert f"docker login {host}" in done.stderr
        try:
            with pytest.raises(EnvironmentMissing, match=f"docker login {host}"):
                gate.push(image, parse_new_name(name), engine=Engine(), progress=lambda _line: None)
        finally:
            forget(name)


def test_an_id_is_not_asked_of_a_registry() -> None:
    done = weir("audit", "0123456789ab")
    assert done.returncode == Exit.DATA
    assert "an id can't be pulled" in done.stderr


@pytest.mark.parametrize(("status", "way_out"), [(429, "wait some minutes"), (500, "later"), (504, "later")])
def test_a_registry_that_fails_for_now_is_neither_a_wrong_name_nor_a_broken_build(
    status: int, way_out: str, image: str
) -> None:
    with refusing_registry(status) as host:
        name = f"{host}/team/tiny:1"
        done = weir("audit", name)
        assert done.returncode == Exit.ENVIRONMENT
        assert way_out in done.stderr
        try:
            with pytest.raises(SourceUnreachable, match=way_out):
                gate.push(image, parse_new_name(name), engine=Engine(), progress=lambda _line: None)
        finally:
            forget(name)


def test_a_pull_that_hangs_can_be_interrupted() -> None:
    with silent_registry() as host:
        # a test run in the background ignores SIGINT, and its children would with it
        program = ["env", "--default-signal=INT", sys.executable, "-m", "buildtool"]
        command = [*program, "audit", f"{host}/team/tiny:1"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "pulling it" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (Exit.INTERRUPTED, "")
    assert "interrupted;" in err


def test_of_two_pushes_under_one_name_none_passes_the_others_image_for_its_own(
    host: str, image: str, tmp_path: Path
) -> None:
    second = f"{LOCAL}-second"
    (tmp_path / "one").write_bytes(os.urandom(1000))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY one /one\n")
    command = ["docker", "buildx", "build", "--provenance=false", "-q", "--load", "-t", second, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    name = parse_new_name(f"{host}/team/contested:1")
    ended = dict[str, str]()

    def push(own: str) -> None:
        try:
            ended[own] = gate.push(own, name, engine=Engine(), progress=lambda _line: None)
        except (BuildFailed, SourceUnreachable):  # registries answer 500 where one file of theirs is replaced
            ended[own] = "refused"

    through = 0
    try:
        record = Engine().inspect(second)
        assert record is not None
        for _ in range(4):
            threads = [threading.Thread(target=push, args=(own,)) for own in (image, str(record["Id"]))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seen = [(digest, own) for own, digest in ended.items() if digest != "refused"]
            through += len(seen)
            for digest, own in seen:
                of_it = Engine().inspect(f"{name.repository}@{digest}")
                assert of_it is None or of_it["Id"] == own
        assert through >= 2, "most rounds end with one of the two in the registry"
    finally:
        forget(second)
        forget(str(name))
