"""What an inventory of an image says, and that both documents are valid by the formats' own schemas."""

import json
import struct
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import image_maker as make
import jsonschema
import pytest
from elf_maker import shared
from packageurl import PackageURL
from referencing import Registry, Resource
from sbom_image import COMMIT, LIB, UNOWNED, image

from buildtool.cli import main
from buildtool.core.errors import Exit
from buildtool.core.model import Wheel
from buildtool.gpucode import elf
from buildtool.gpucode.source import Source
from buildtool.image.archive import open_archive
from buildtool.image.documents import Platform
from buildtool.image.reader import read_image
from buildtool.sbom import binaries
from buildtool.sbom.documents import cyclonedx, render, spdx
from buildtool.sbom.inventory import Component, Inventory, image_name, take_inventory
from buildtool.sbom.libraries import BUILDS, LIBRARIES, ElfFacts, identify

SCHEMAS = files("lib4sbom") / "schemas"
WHEELS = (Wheel("demo-1.0-py3-none-any.whl", "ab" * 32, 7),)


def inventory_of(path: Path, wheels: tuple[Wheel, ...] = WHEELS) -> Inventory:
    archive = open_archive(path, inspect=binaries.inspect)
    contents = read_image(archive, label=str(path), platform=Platform("linux", "amd64"))
    return take_inventory(contents, name=image_name(contents, str(path)), wheels=wheels)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.layout_directory(make.oci_layout(image()), tmp_path_factory.mktemp("layout"))


@pytest.fixture(scope="module")
def inventory(layout: Path) -> Inventory:
    return inventory_of(layout)


def every(components: tuple[Component, ...]) -> list[Component]:
    return [each for one in components for each in (one, *every(one.parts))]


def test_every_file_has_an_owner_or_is_listed_as_unowned(inventory: Inventory) -> None:
    """Another name of an owned file is nobody's, as is dpkg's status where there is no package dpkg."""
    assert [each.path for each in inventory.unowned] == [
        "etc/hostname",
        "srv/\\xff\\x1b.txt",
        "usr/bin/libc-again",
        "usr/local/lib/libcrypto.so.1.1.1k",
        "var/lib/dpkg/status",
    ]
    owned = {each.name: each.n_files for each in inventory.components if each.n_files}
    assert owned == {"Demo": 11, "libc6": 3, "acme/tiny": 2, "local": 2}
    assert inventory.n_files == 23


def test_packages_have_the_urls_that_scanners_match(inventory: Inventory) -> None:
    by_name = {each.name: each for each in inventory.components}
    assert by_name["libc6"].purl == (
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u4?arch=amd64&distro=debian-12&upstream=glibc"
    )
    assert by_name["Demo"].purl == "pkg:pypi/demo@1.0"
    assert (by_name["Demo"].archive, by_name["Demo"].sha256) == (WHEELS[0].filename, WHEELS[0].sha256)
    assert by_name["debian"].version == "12"
    assert "gone" not in by_name
    for each in every((*inventory.components, *inventory.unowned)):
        assert not each.purl or PackageURL.from_string(each.purl).to_string() == each.purl
        assert each.version or each.why_unknown, each


def test_libraries_inside_wheels_are_named_with_how_sure_that_is(inventory: Inventory) -> None:
    wheel = next(each for each in inventory.components if each.name == "Demo")
    named = {
        each.path.rpartition("/")[2].partition(".")[0].partition("-")[0] or each.name: (
            each.purl, each.confidence, each.technique,
        )
        for each in wheel.parts
    }  # fmt: skip
    assert named == {
        "libopenblas": ("pkg:generic/openblas@0.3.27", 0.9, "binary-analysis"),
        "libgomp": ("pkg:rpm/almalinux/libgomp@8.5.0-28.el8_10.alma.1", 1.0, "hash-comparison"),
        "libzstd": ("pkg:generic/zstd@1.5.7", 0.9, "binary-analysis"),
        "libstrange": ("pkg:generic/strange", 0.3, "filename"),
        "libXau": ("pkg:rpm/almalinux/libXau@1.0.9-3.el8", 0.95, "manifest-analysis"),
        "libdemo": ("pkg:pypi/demo@1.0#demo/lib/libdemo.so", 0.8, "filename"),
        "hidden": ("pkg:generic/hidden@7", 0.9, "manifest-analysis"),
    }
    own = next(each for each in wheel.parts if each.name == "libdemo")
    assert [(part.purl, part.why_unknown) for part in own.parts] == [
        ("pkg:generic/onednn", "its code has no text of its release"),
        ("pkg:generic/openssl@3.0.1", ""),
    ]


def test_an_unowned_library_is_named_too(inventory: Inventory) -> None:
    [library] = [part for each in inventory.unowned for part in each.parts]
    assert library.purl == "pkg:generic/openssl@1.1.1k"


def test_models_have_their_revision(inventory: Inventory) -> None:
    models = [each for each in inventory.components if each.kind == "machine-learning-model"]
    assert sorted((each.name, each.version, each.purl, each.n_files) for each in models) == [
        ("acme/tiny", COMMIT, f"pkg:huggingface/acme/tiny@{COMMIT}", 2),
        ("local", COMMIT, "", 2),
    ]


def test_the_same_image_gives_the_same_bytes_from_every_form(layout: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make.archive(make.oci_layout(image())))
    (tmp_path / "a.tar.gz").write_bytes(make.gzipped(make.archive(make.oci_layout(image()))))
    for kind in ("cyclonedx", "spdx"):
        texts = {render(inventory_of(path), kind) for path in (layout, layout, *tmp_path.glob("a.*"))}
        assert len(texts) == 1


@cache
def validator(kind: str) -> Any:
    registry: Registry[Any] = Registry()
    for name in ("spdx.schema.json", "jsf-0.82.schema.json"):
        schema = json.loads((SCHEMAS / "cyclonedx" / name).read_text())
        registry = registry.with_resource(schema["$id"], Resource.from_contents(schema))
    path = "cyclonedx/bom-1.6.schema.json" if kind == "cyclonedx" else "spdx/2.3-schema.json"
    return jsonschema.Draft7Validator(json.loads((SCHEMAS / path).read_text()), registry=registry)


@pytest.mark.parametrize("kind", ["cyclonedx", "spdx"])
def test_documents_are_valid_by_the_official_schemas(kind: str, inventory: Inventory) -> None:
    document = json.loads(render(inventory, kind))
    assert [error.message for error in validator(kind).iter_errors(document)] == []
    assert list(validator(kind).iter_errors({"bomFormat": 7})), "the schema refuses something"


def test_identifiers_occur_once_and_lead_to_something(inventory: Inventory) -> None:
    references: list[str] = []

    def walk(row: dict[str, Any]) -> None:
        references.append(row["bom-ref"])
        for part in row.get("components", ()):
            walk(part)

    document = cyclonedx(inventory)
    for row in (document["metadata"]["component"], *document["components"]):
        walk(row)
    assert len(references) == len(set(references))
    other = spdx(inventory)
    ids = [row["SPDXID"] for row in (*other["packages"], *other["files"])] + ["SPDXRef-DOCUMENT"]
    assert len(ids) == len(set(ids))
    for row in other["relationships"]:
        assert {row["spdxElementId"], row["relatedSpdxElement"]} <= {*ids}
    assert [row["fileName"] for row in other["files"]] == [f"./{each.path}" for each in inventory.unowned]


def test_digests_are_those_of_the_files(inventory: Inventory) -> None:
    host = next(each for each in inventory.unowned if each.path == "etc/hostname")
    assert host.sha256 == make.sha(UNOWNED["etc/hostname"]).removeprefix("sha256:")


def test_a_head_that_comes_in_pieces_is_still_an_elf_file() -> None:
    """Archives differ in where their chunks end, and must not in what is found."""
    content = shared("libx.so", b"\0OpenBLAS 0.3.27 \0", build_id="ab" * 20)
    for size in (1, 7, 63, 100_000):
        facts = binaries.inspect(b"libx.so", len(content), make.chunks(content, size))
        assert facts.shared is not None
        assert (facts.shared.soname, facts.shared.build_id) == ("libx.so", "ab" * 20)
        assert dict(facts.shared.marks) == {"openblas": "0.3.27"}


@pytest.mark.parametrize("at", range(0, 700, 13))
def test_damaged_elf_files_are_listed_with_a_reason_or_without_a_name(at: int) -> None:
    """Neither a traceback nor a read outside the file: every field changed, every cut."""
    content = shared("libx.so", b"text", build_id="ab" * 20)
    for damaged in (content[:at], content[:at] + b"\xff" * 8 + content[at + 8 :]):
        facts = binaries.inspect(b"a/libx.so", len(damaged), make.chunks(damaged))
        assert facts.sha256 == make.sha(damaged).removeprefix("sha256:")


def test_a_version_in_a_name_that_the_code_does_not_have_is_no_release() -> None:
    """libgmp.so.10.5.0 is GMP 6.3: the file's version is the interface's."""
    for confirmed, version in ((False, ""), (True, "10.5.0")):
        found = identify(
            "a.libs/libgmp-8c6c054f.so.10.5.0",
            ElfFacts("libgmp.so.10", confirmed=confirmed),
            wheel=("a", "1"),
            declared=(),
        )
        assert (found.name, found.version) == ("gmp", version)


def test_a_damaged_bill_of_materials_of_a_wheel_says_nothing(tmp_path: Path) -> None:
    info = f"{LIB}/demo-1.0.dist-info"
    for n, text in enumerate(
        (b"{", b'{"components": 7}', b'{"components": [7, {"name": 7, "type": "library"}]}')
    ):
        members = [
            make.file(f"{info}/METADATA", b"Name: demo\nVersion: 1.0\n"),
            make.file(f"{info}/RECORD", b"demo-1.0.dist-info/METADATA,,\n"),
            make.file(f"{info}/sboms/x.cdx.json", text),
        ]
        tiny = make.Image([make.tar(*members)])
        found = inventory_of(make.layout_directory(make.oci_layout(tiny), tmp_path / str(n)), ())
        assert [each.parts for each in found.components] == [()]


def test_the_command_prints_and_writes_the_same(
    layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bom.json"
    words = ["sbom", str(layout), "--platform", "linux/amd64", "--format", "spdx"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--output", str(target)]) == 0
    assert target.read_text() == printed
    assert "no package owns 5" in capsys.readouterr().err
    assert main([*words, "--lock", str(tmp_path / "none.json")]) == 5


@pytest.mark.parametrize("own", ["index.json", "oci-layout", "blobs/sha256/new"])
def test_a_document_never_replaces_a_part_of_the_layout_that_it_is_about(own: str, layout: Path) -> None:
    before = (layout / "index.json").read_bytes()
    options = ["--platform", "linux/amd64", "--output", str(layout / own)]
    assert main(["sbom", str(layout), *options]) == Exit.USAGE
    assert (layout / "index.json").read_bytes() == before
    assert not (layout / "blobs/sha256/new").exists()


def test_names_of_any_length_take_no_time() -> None:
    """A name that a pattern would try in a billion ways is taken as it is."""
    name = "lib" + "-0123abcd" * 400 + "!"
    for path in (name, f"a.libs/{name}.so"):
        found = identify(path, ElfFacts(), wheel=("a", "1"), declared=())
        assert found.confidence <= 0.8


def test_sections_and_segments_that_share_their_bytes_are_read_once() -> None:
    """A megabyte with 1,000 rows for it would be searched 1,000 times for each library."""
    text = b"\0OpenSSL 3.0.1 14 Dec 2021\0"
    content = bytearray(shared("libcrypto.so.3", text, build_id="ab" * 20))
    tables_at = len(content)
    head = list(struct.unpack("<HHIQQQIHHHHHH", content[16:64]))
    sections, segments = content[head[5] :], bytes(content[64 : 64 + 3 * 56])
    row, note = sections[2 * 64 : 3 * 64], segments[2 * 56 :]
    content += sections[: 4 * 64] + bytes(row) * 1000 + segments + note * 1000
    head[4], head[5], head[9], head[11] = tables_at + 1004 * 64, tables_at, 1003, 1004
    content[16:64] = struct.pack("<HHIQQQIHHHHHH", *head)
    source = Source(len(content), lambda at, n: bytes(content[at : at + n]))
    searched = binaries._searched(elf.read_elf(source), len(content))
    assert len(searched) == 2, "the names' and the constants'"
    facts = binaries.inspect(b"opt/libcrypto.so.3", len(content), iter([bytes(content)])).shared
    assert facts
    assert (facts.build_id, dict(facts.marks).get("openssl")) == ("ab" * 20, "3.0.1")


def test_every_row_of_the_table_of_libraries_can_match() -> None:
    names = [library.name for library in LIBRARIES]
    stems = [stem for library in LIBRARIES for stem in library.files]
    assert len(names) == len(set(names))
    assert len(stems) == len(set(stems))
    assert all(library.files or library.mark for library in LIBRARIES)
    assert all(purl.startswith("pkg:rpm/") and len(build) == 40 for build, purl in BUILDS.items())


def test_a_file_that_is_no_lock_is_never_to_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock reader's hint, `rm -- FILE`, was printed for whatever --lock named."""
    other = tmp_path / "thesis.json"
    other.write_text('{"chapters": 7}')
    assert main(["sbom", "an/image:1", "--lock", str(other)]) == Exit.DATA
    said = capsys.readouterr().err
    assert "not a lock file" in said
    assert "rm" not in said.split(str(other))[-1]
