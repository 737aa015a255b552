"""Package databases read line by line, and what they own of an image: by hand, each rule at its edges."""

import json

import pytest
from contents_maker import A, L, debs, facts
from image_maker import file, tar
from report_maker import audited

from buildtool.audit.packages import (
    LINE_BYTES,
    DebPackage,
    conda_package,
    deb_packages,
    lines,
    python_name,
    recorded_paths,
)

INSTALLED = "install ok installed"


def stanza(**fields: str) -> bytes:
    return "".join(f"{key}: {value}\n" for key, value in fields.items()).encode() + b"\n"


def packages_of(status: bytes) -> list[DebPackage]:
    return list(deb_packages(status.split(b"\n")))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_the_text_is_cut(size: int) -> None:
    text = b"a\nb b~\r\n\nlong one\r\n\r\nno end~\r"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert list(lines(pieces)) == [b"a", b"b b~", b"", b"long one", b"", b"no end~"]
    assert list(lines([])) == list(lines([b""])) == []


def test_a_long_line_is_cut_at_16_kib_and_the_next_one_is_whole() -> None:
    assert LINE_BYTES == 16_384
    for n_bytes in (LINE_BYTES - 1, LINE_BYTES, LINE_BYTES + 1, 3 * LINE_BYTES):
        line = b"x" * min(n_bytes, LINE_BYTES)
        assert list(lines([b"x" * n_bytes + b"\nnext\n"])) == [line, b"next"]
        assert list(lines([b"x" * n_bytes, b"\nnext"])) == [line, b"next"]
        assert list(lines([b"x" * n_bytes])) == [line]


@pytest.mark.parametrize(
    ("status", "installed"),
    [
        ("install ok installed", True),
        ("hold ok installed", True),
        ("deinstall ok config-files", False),
        ("purge ok not-installed", False),
        ("install reinstreq half-installed", False),
        ("installed", False),
    ],
)
def test_only_what_dpkg_calls_installed_is_a_package(status: str, installed: bool) -> None:
    found = packages_of(stanza(Package="x", Version="1", Architecture="all", Status=status))
    assert found == [DebPackage("x", "1", "all")] * installed


def test_a_distroless_stanza_has_no_status_and_is_installed() -> None:
    assert packages_of(stanza(Package="x")) == [DebPackage("x", "", "")]


def test_a_package_is_reported_once_for_each_architecture() -> None:
    status = b"".join(
        stanza(Package="x", Architecture=architecture, Version=version, Status=INSTALLED)
        for architecture, version in [("amd64", "1"), ("i386", "2"), ("amd64", "3")]
    )
    nameless = stanza(Version="1", Status=INSTALLED)
    assert packages_of(nameless + status) == [DebPackage("x", "1", "amd64"), DebPackage("x", "2", "i386")]


def test_fields_of_a_stanza_end_at_a_blank_line_and_continuations_belong_to_the_field_above() -> None:
    status = b"""

Package:  x
Description: one
 Package: y
\tVersion: 9
 .
Version
Version: 1
Versions: 8
Version: 2~a:b
Version
 \t
Package: z\xff
Version: 3"""
    assert packages_of(status) == [DebPackage("x", "2~a:b", ""), DebPackage("z\udcff", "3", "")]


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (b"Metadata-Version: 2.1\nName: torch\nVersion: 2.9\n\nName: no\n", ("torch", "2.9")),
        (b"Name: torch\n\nVersion: 2.9\n", ("torch", None)),
        (b"\nVersion: 2.9\n", (None, "2.9")),
        (b"Name:\n", ("", None)),
        (b"Package: x\nStatus: y\n", (None, None)),
        (b"", (None, None)),
    ],
)
def test_a_python_package_is_named_by_the_head_of_its_metadata(
    metadata: bytes, told: tuple[str | None, str | None]
) -> None:
    assert python_name(metadata.split(b"\n")) == told


SITE = b"usr/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"x/y.py,sha256=abc,12", SITE + b"/x/y.py"),
        (b"x", SITE + b"/x"),
        (b'"x,""y"".py",,', SITE + b'/x,"y".py'),
        (b'"x.py",sha256=a,"1"', SITE + b"/x.py"),
        (b'x"",y",', SITE + b'/x""'),
        (b"../../../bin/x,,", b"usr/bin/x"),
        (b"../../../../../../bin/x,,", b"bin/x"),
        (b"x/./y,,", SITE + b"/x/y"),
        (b"x//y,,", SITE + b"/x/y"),
        (b"x/.hidden,,", SITE + b"/x/.hidden"),
        (b"x..y/z,,", SITE + b"/x..y/z"),
        (b"/etc/x,,", b"etc/x"),
        (b"//etc/../x,,", b"x"),
    ],
)
def test_a_recorded_path_is_a_path_of_the_image(line: bytes, path: bytes) -> None:
    assert list(recorded_paths([b",,", line, b""], SITE)) == [path]


def test_a_record_at_the_root_names_files_at_the_root() -> None:
    assert list(recorded_paths([b"x/y,,", b"~x,,"], b"")) == [b"x/y", b"~x"]


def meta(n_others: int = 0, **changes: object) -> str:
    own = {"name": "mkl", "version": "1", "files": ["lib/a", "b"], **changes}
    others = dict.fromkeys((f"k{n}" for n in range(n_others)), 0)
    return json.dumps({**others, **{key: value for key, value in own.items() if value is not None}})


def test_a_conda_package_is_read_from_its_json() -> None:
    found = conda_package(meta(5, depends=["x"], link={"files": ["no"]}))
    assert found
    assert (found.name, found.version, list(found.files)) == ("mkl", "1", ["lib/a", "b"])
    assert conda_package(meta(997))  # conda's own files have some 30 keys; a thousand are looked at
    assert conda_package(meta(998)) is None


@pytest.mark.parametrize("key", ["name", "version", "files"])
@pytest.mark.parametrize("value", [None, 5, [1], {"x": "y"}])
def test_somebody_elses_json_is_no_conda_package(key: str, value: object) -> None:
    assert conda_package(meta(**{key: value})) is None
    assert conda_package(meta(files=["x", None])) is None


def test_a_conda_package_without_files_is_one() -> None:
    found = conda_package(meta(files=[]))
    assert found
    assert list(found.files) == []


def owned(*members: bytes) -> dict[str, int]:
    """Bytes by package, without those of the databases themselves where these have no owner."""
    return {row.name: row.unpacked_bytes for row in audited(tar(*members)).packages}


DPKG_ENDS = "list md5sums conffiles shlibs symbols triggers templates preinst postinst prerm postrm config"


@pytest.mark.parametrize("end", DPKG_ENDS.split())
def test_dpkgs_own_files_about_a_package_belong_to_it(end: str) -> None:
    status = stanza(Package="x", Architecture="amd64", Status=INSTALLED)
    names = f"x.{end}", f"x:amd64.{end}", f"x:i386.{end}", f"y.{end}", "x.other", end
    members = [file(f"var/lib/dpkg/info/{name}", bytes(1 << at)) for at, name in enumerate(names)]
    assert owned(file("var/lib/dpkg/status", status), *members) == {"x": 1 + 2}


def test_dpkgs_lists_of_everything_belong_to_dpkg_itself() -> None:
    status = stanza(Package="dpkg", Status=INSTALLED) + stanza(Package="x", Status=INSTALLED)
    members = [
        file(f"var/lib/dpkg/{name}", bytes(1 << at))
        for at, name in enumerate(["status-old", "available", "diversions"])
    ]
    assert owned(file("var/lib/dpkg/status", status), *members) == {"dpkg": 1 + 2 + len(status), "x": 0}


def test_a_list_belongs_to_the_package_of_its_architecture_before_that_without_one() -> None:
    status = b"".join(stanza(Package="x", Architecture=name, Status=INSTALLED) for name in ("amd64", "i386"))
    lists = {"x:i386": "/i\n", "x": "/./a\n//b/../c\nd\n./e\n/~f\n"}
    members = [file(f"var/lib/dpkg/info/{name}.list", text.encode()) for name, text in lists.items()]
    report = audited(
        tar(
            file("var/lib/dpkg/status", status),
            *members,
            *(file(name, bytes(1 << at)) for at, name in enumerate(["i", "a", "c", "d", "e", "~f", "b"])),
        )
    )
    sizes = sorted(row.unpacked_bytes for row in report.packages)
    assert sizes == [1 + len(lists["x:i386"]), 2 + 4 + 8 + 16 + 32 + len(lists["x"])]


def python(name: str, record: str, metadata: str | None = None) -> list[bytes]:
    root = f"{SITE.decode()}/{name}.dist-info"
    return [
        *([] if metadata is None else [file(f"{root}/METADATA", metadata.encode())]),
        file(f"{root}/RECORD", record.encode()),
    ]


@pytest.mark.parametrize(
    ("metadata", "name", "version"),
    [
        ("Name: Torch_X\nVersion: 3\n", "Torch_X", "3"),
        ("Name: Torch_X\n", "Torch_X", "2.9-1"),
        ("Version: 3\n", "torch", "3"),
        ("Name:\nVersion:\n", "torch", "2.9-1"),
        (None, "torch", "2.9-1"),
    ],
)
def test_a_python_package_is_named_by_its_directory_where_metadata_does_not(
    metadata: str | None, name: str, version: str
) -> None:
    [row] = audited(tar(*python("torch-2.9-1", "x,,\n", metadata))).packages
    assert (row.manager, row.name, row.version, row.place) == ("python", name, version, SITE.decode())


def test_installers_own_files_belong_to_the_python_package() -> None:
    names = "INSTALLER", "REQUESTED", "direct_url.json", "LICENSE"
    root = f"{SITE.decode()}/x-1.dist-info"
    members = [file(f"{root}/{name}", bytes(1 << at)) for at, name in enumerate(names)]
    assert owned(*python("x-1", "a,,\n"), *members) == {"x": 1 + 2 + 4 + len("a,,\n")}
    assert owned(file(f"{SITE.decode()}/x-1.egg/RECORD", b"a,,\n")) == {}


@pytest.mark.parametrize(
    ("directory", "name", "is_owned"),
    [
        ("x/__pycache__", "m.cpython-311.pyc", True),
        ("x/__pycache__", "m.cpython-313t.opt-1.pyc", True),
        ("x/__pycache__", "m.cpython-311.opt-2.pyc", True),
        ("x/__pycache__", "m.cpython-311.opt-3.pyc", False),
        ("x/__pycache__", "m.pypy-311.pyc", False),
        ("x/__pycache__", "other.cpython-311.pyc", False),
        ("x/cache", "m.cpython-311.pyc", False),
        ("x/__pycache__", "m.cpython-311.pyo", False),
    ],
)
def test_bytecode_belongs_to_the_owner_of_its_source(directory: str, name: str, is_owned: bool) -> None:
    site = SITE.decode()
    record = "x/m.py,,\n"
    members = [file(f"{site}/x/m.py", bytes(10)), file(f"{site}/{directory}/{name}", bytes(100))]
    assert owned(*python("x-1", record), *members) == {"x": 10 + 100 * is_owned + len(record)}


def test_bytecode_that_a_list_names_stays_with_its_own_package() -> None:
    record, other = "x/m.py,,\n", "x/__pycache__/m.cpython-311.pyc,,\n"
    site = SITE.decode()
    members = [
        file(f"{site}/x/m.py", bytes(10)),
        file(f"{site}/x/__pycache__/m.cpython-311.pyc", bytes(100)),
    ]
    found = owned(*python("x-1", record), *python("y-1", other), *members)
    assert found == {"x": 10 + len(record), "y": 100 + len(other)}


def test_packages_beyond_the_bound_are_counted_and_own_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.audit.packages._MOST_PACKAGES", 3)
    lists = debs(**{f"p{n}": (f"f{n}",) for n in range(5)})
    found = facts(L({**lists, **{f"f{n}": 10 for n in range(5)}}))
    assert [(row.name, row.unpacked_bytes) for row in found.packages] == [(f"p{n}", 10) for n in range(3)]
    assert found.packages_left_out == 2


def test_a_thousand_components_of_rocm_are_distinguished_and_the_rest_is_rocms() -> None:
    files = {f"opt/rocm/p{n}/x": 1 for n in range(1002)}
    found = facts(L({"opt/rocmlike/x": 1, **files, "opt/rocm/p0/y": 1}))
    assert len(found.packages) == 1001
    assert [(row.name, row.unpacked_bytes) for row in found.packages[:2]] == [("p0", 2), ("rocm", 2)]
    assert found.owners == {"rocm tree": 1003, "unowned": 1}


def test_what_a_later_layer_replaces_keeps_the_owner_that_it_had_by_name() -> None:
    record = "x,,\n"
    first = tar(*python("x-1", record), file(f"{SITE.decode()}/x", bytes(10)), file("gone", bytes(1)))
    report = audited(first, tar(file(f"{SITE.decode()}/x", bytes(100)), file(".wh.gone")))
    [row] = report.packages
    assert (row.unpacked_bytes, row.visible_bytes, row.n_files) == (110 + len(record), 100 + len(record), 2)
    assert report.owners == {"python": 110 + len(record), "unowned": 1}


def test_databases_below_names_that_are_not_utf_8_are_read() -> None:
    site, env = "srv/\udcff", "opt/\udcfe"
    meta = (
        '{"name": "c", "version": "1", "depends": "\udcfb", '
        '"files": ["lib/\\ud800", "lib/\\udcfd", "lib/\udcfc"]}'
    )
    found = facts(
        L(
            {
                f"{site}/x-1.dist-info/RECORD": A(database="\udcfb,,\n"),
                f"{site}/\udcfb": 10,
                f"{env}/conda-meta/\udcff.json": A(database=meta),
                f"{env}/lib/\udcfd": 200,
                **debs(x=("d/\udcff",)),
                "d/\udcff": 3000,
                "var/lib/dpkg/info/\udcff.list": 1,
                "var/lib/dpkg/info/\udcff.postinst": 1,
            }
        )
    )
    assert [(row.manager, row.unpacked_bytes, row.place) for row in found.packages] == [
        ("deb", 3000, ""),
        ("conda", 200, "opt/\\xfe"),
        ("python", 10, "srv/\\xff"),
    ]


@pytest.mark.thorough
def test_a_large_database_without_lines_is_read_whole() -> None:
    names = [f"lib/{n:060}" for n in range(1500)]  # more than is decompressed at a time
    meta = json.dumps({"name": "c", "version": "1", "files": names})
    found = facts(L({"opt/conda-meta/c.json": A(database=meta), **{f"opt/{name}": 1 for name in names}}))
    assert found.owners == {"conda": 1500}


def test_other_databases_are_not_taken_for_lists_or_stanzas_of_dpkgs() -> None:
    root = "usr/lib/x-1.dist-info"
    found = facts(
        L(
            {
                **debs(METADATA=()),
                f"{root}/METADATA": A(database="Package: y\n/etc/passwd\nName: x\nVersion: 1\n"),
                f"{root}/RECORD": A(database="none,,\n"),
                "etc/passwd": 5,
            }
        )
    )
    assert [(row.manager, row.name, row.unpacked_bytes) for row in found.packages] == [
        ("deb", "METADATA", 0),
        ("python", "x", 0),
    ]


def test_distroless_packages_own_what_their_sums_name() -> None:
    root = "var/lib/dpkg/status.d"
    found = facts(
        L(
            {
                f"{root}/a.md5sums": A(database="0  usr/a\n1  ./usr/a2\n"),
                f"{root}/a": A(database="Package: a\nVersion: 2\n"),
                f"{root}/b": A(database="Package: b\nVersion: 3\n"),
                f"{root}/b.md5sums": A(database="0  usr/b\n"),
                f"{root}/c": A(database="Package: c\n"),
                **{f"usr/{name}": 1 << at for at, name in enumerate(["a", "a2", "b", "c"])},
            }
        )
    )
    assert [(row.name, row.version, row.unpacked_bytes) for row in found.packages] == [
        ("b", "3", 4),
        ("a", "2", 3),
        ("c", "", 0),
    ]
