"""The audit against a real engine: an image that is imported, read through `docker save`, and judged."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildtool.audit.audit import audit_image, audit_path, write_reports
from buildtool.audit.options import AuditOptions
from buildtool.core.errors import ConfigError, DataError
from buildtool.engine.client import Engine

REF = f"weir-test-{os.getpid()}/audit:1"
DOCKERFILE = """FROM scratch
COPY one /one
COPY two /two
COPY one /again
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    context = tmp_path_factory.mktemp("context")
    (context / "one").write_bytes(b"1" * 2_000_000)
    (context / "two").write_bytes(b"2" * 300)
    (context / "Dockerfile").write_text(DOCKERFILE)
    subprocess.run(["docker", "build", "-q", "-t", REF, str(context)], check=True, capture_output=True)
    yield REF
    subprocess.run(["docker", "image", "rm", "-f", REF], check=True, capture_output=True)


def test_an_engine_image_is_audited_without_being_extracted(image: str) -> None:
    report = audit_image(image, engine=Engine())
    assert [layer.unpacked_bytes for layer in report.layers] == [2_000_000, 300, 2_000_000]
    assert report.totals.visible_bytes == 4_000_300
    assert [row.id for row in report.findings] == ["duplicates"]
    assert all("COPY" in str(layer.command) for layer in report.layers)


def test_the_digest_is_the_engines_and_stored_bytes_are_the_compressed_ones(image: str) -> None:
    engine = Engine()
    report = audit_image(image, engine=engine)
    record = engine.inspect(image)
    assert record is not None
    if engine.info().containerd_store:
        assert report.image.digest == record["Id"]
        assert 0 < (report.totals.stored_bytes or 0) < 100_000
    else:
        assert report.image.config_digest == record["Id"]
        assert report.totals.stored_bytes is None


def test_a_saved_archive_shows_the_same_as_the_engine(image: str, tmp_path: Path) -> None:
    saved = tmp_path / "image.tar"
    subprocess.run(["docker", "save", image, "-o", str(saved)], check=True)
    from_file = audit_path(saved, options=AuditOptions(), tick=lambda _: None)
    from_engine = audit_image(image, engine=Engine())
    assert from_file.layers == from_engine.layers
    assert from_file.totals == from_engine.totals


def test_files_and_bytes_agree_with_what_the_engine_exports(image: str, tmp_path: Path) -> None:
    container = subprocess.run(["docker", "create", image, "x"], check=True, capture_output=True, text=True)
    name = container.stdout.strip()
    try:
        exported = subprocess.run(["docker", "export", name], check=True, capture_output=True).stdout
    finally:
        subprocess.run(["docker", "rm", name], check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(exported)) as reader:
        sizes = {member.name: member.size for member in reader if member.isfile() and member.size}
    assert sizes == {"one": 2_000_000, "two": 300, "again": 2_000_000}
    for written in write_reports(audit_image(image, engine=Engine()), tmp_path, "tiny"):
        assert written.stat().st_size > 0


def test_an_image_that_the_engine_lacks_is_reported_with_the_next_step() -> None:
    with pytest.raises(DataError, match="docker pull weir-test/none:1"):
        audit_image("weir-test/none:1", engine=Engine())


def test_a_name_that_no_image_can_have_is_a_mistake_in_the_command() -> None:
    with pytest.raises(ConfigError, match=r"`Weir/Nothing`\n  write .*NAME in lower case"):
        audit_image("Weir/Nothing", engine=Engine())
