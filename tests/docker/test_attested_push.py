"""What is said of an image travels with a push, to a registry of today and to one without referrers."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from standins import referring_registry, registry

from buildtool.build import publish
from buildtool.build.layer_store import LayerStore
from buildtool.core.errors import ToolError
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.image.layer_writer import LayerWriter, TarMembers
from buildtool.image.written import LayerFile, Referrer, WrittenImage, written_image
from buildtool.sbom import attest
from buildtool.sbom.keys import PrivateKey, PublicKey
from buildtool.sbom.verify import NotVerified, verify_registry

SECRET = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
OURS = PublicKey("ab" * 32, SECRET.public_key())
THEIRS = PublicKey("ab" * 32, ed25519.Ed25519PrivateKey.from_private_bytes(b"\2" * 32).public_key())


@pytest.fixture(scope="module", params=["debian's registry", "with the referrers API"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("registry")
    with registry(folder) if request.param == "debian's registry" else referring_registry() as address:
        yield address


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "state")


def image_of(store: LayerStore) -> WrittenImage:
    def make(writer: LayerWriter) -> LayerFile:
        members = TarMembers(writer, 1)
        members.file("file", 100_000, [os.urandom(100_000)])
        return members.end()

    made = written_image(
        {"architecture": "amd64", "os": "linux"}, [store.bring(store.key(os.urandom(9)), make)[0]], []
    )
    store.put(made)
    return made


def said_of(made: WrittenImage, key: PrivateKey | None) -> tuple[Referrer, ...]:
    statements = {
        kind: attest.statement(kind, {}, name="weir/tiny", digest=made.digest) for kind in attest.PREDICATES
    }
    return attest.referrers(made.descriptor({}), statements, key)


def pushed(store: LayerStore, made: WrittenImage, name: Reference, referrers: tuple[Referrer, ...]) -> None:
    publish.push(
        made, name, store=store, pushed=publish.Pushed(store.layout / "pushed"),
        progress=lambda _line: None, referrers=referrers,
    )  # fmt: skip


def test_a_pushed_image_is_verified_by_its_name(host: str, store: LayerStore) -> None:
    made, name = image_of(store), parse_new_name(f"{host}/team/tiny:1")
    referrers = said_of(made, PrivateKey("ab" * 32, SECRET))
    for _ in range(2):  # a second push adds nothing
        pushed(store, made, name, referrers)
    verified = verify_registry(name, OURS)
    assert (verified.digest, verified.names, verified.notes) == (made.digest, ("weir/tiny",), ())
    assert [*verified.statements] == ["CycloneDX", "SPDX", "provenance"]
    with pytest.raises(NotVerified, match="didn't sign"):
        verify_registry(name, THEIRS)
    by_digest = Reference(name.repository, None, made.digest)
    assert verify_registry(by_digest, OURS).digest == made.digest


def test_unsigned_attestations_and_none_are_not_verified(host: str, store: LayerStore) -> None:
    for tag, with_statements in (("none", False), ("unsigned", True)):
        made, name = image_of(store), parse_new_name(f"{host}/team/tiny:{tag}")
        pushed(store, made, name, said_of(made, None) if with_statements else ())
        with pytest.raises(NotVerified):
            verify_registry(name, OURS)


def test_another_image_under_the_tag_is_not_verified(host: str, store: LayerStore) -> None:
    """Attestations stay with the digest that they are about."""
    made, name = image_of(store), parse_new_name(f"{host}/team/moved:1")
    pushed(store, made, name, said_of(made, PrivateKey("ab" * 32, SECRET)))
    pushed(store, image_of(store), name, ())
    with pytest.raises(NotVerified, match="signed no statement"):
        verify_registry(name, OURS)


def test_a_layer_that_the_registry_changed_is_not_verified(store: LayerStore, tmp_path: Path) -> None:
    made = image_of(store)
    digest = made.layers[0].digest.removeprefix("sha256:")
    (tmp_path / "registry").mkdir()
    with registry(tmp_path / "registry") as host:
        name = parse_new_name(f"{host}/team/changed:1")
        pushed(store, made, name, said_of(made, PrivateKey("ab" * 32, SECRET)))
        [path] = (tmp_path / "registry").rglob(f"{digest}/data")
        path.write_bytes(b"x" + path.read_bytes()[1:])
        with pytest.raises(ToolError):
            verify_registry(name, OURS)


def test_other_tools_find_the_attestations(host: str, store: LayerStore) -> None:
    """By the API, or by the tag that the specification has for registries without it."""
    made, name = image_of(store), parse_new_name(f"{host}/team/seen:1")
    referrers = said_of(made, PrivateKey("ab" * 32, SECRET))
    pushed(store, made, name, referrers)
    by_api, by_tag = (
        index_at(f"http://{host}/v2/team/seen/{path}")
        for path in (f"referrers/{made.digest}", f"manifests/{made.digest.replace(':', '-')}")
    )
    found = by_api or by_tag
    assert found is not None
    assert [row["digest"] for row in found["manifests"]] == [each.digest for each in referrers]
    assert {row["artifactType"] for row in found["manifests"]} == {attest.BUILDKIT, attest.BUNDLE}


def index_at(url: str) -> dict[str, Any] | None:
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.oci.image.index.v1+json"})
    try:
        with urllib.request.urlopen(request) as answer:
            index: dict[str, Any] = json.load(answer)
            return index
    except urllib.error.HTTPError:
        return None
