"""Who owns what no Debian package and no RECORD names: conda, ROCm's tree, the base image, hard links."""

import image_maker as make
import pytest
from image_maker import Image, file, folder, hardlink, tar
from report_maker import FakeEngine

from buildtool.audit.audit import audit_image
from buildtool.audit.packages import component_of
from buildtool.audit.report import AuditReport

NOP = "/bin/sh -c #(nop) "


def audited(*layers: bytes, history: list[tuple[str, bool]] | None = None, **labels: str) -> AuditReport:
    steps = history and [
        {"created_by": text, **({} if layer else {"empty_layer": True})} for text, layer in history
    ]
    image = Image(list(layers), history=steps, labels=labels)  # type: ignore[arg-type]
    return audit_image(image.ref, engine=FakeEngine(image))


def packages(report: AuditReport) -> dict[tuple[str, str], int]:
    return {(row.manager, row.name): row.unpacked_bytes for row in report.packages}


def exact(report: AuditReport) -> bool:
    total = sum(layer.unpacked_bytes for layer in report.layers)
    return sum(report.owners.values()) == total == sum(row.unpacked_bytes for row in report.tree.rows)


def test_conda_packages_own_what_their_lists_name_in_every_environment() -> None:
    # keys as conda writes them; `files` are relative to the environment that conda-meta is in
    meta = {
        "name": "numpy",
        "version": "2.1.0",
        "build": "py312h1_0",
        "channel": "conda-forge",
        "files": ["lib/python3.12/site-packages/numpy/core.so", "bin/f2py"],
        "paths_data": {"paths": [{"_path": "bin/f2py", "path_type": "hardlink"}], "paths_version": 1},
        "link": {"source": "/opt/conda/pkgs/numpy-2.1.0-py312h1_0", "type": 1},
    }
    members = []
    for root in ("opt/conda", "opt/conda/envs/serve"):
        members += [
            file(f"{root}/conda-meta/numpy-2.1.0-py312h1_0.json", make.dump(meta)),
            file(f"{root}/lib/python3.12/site-packages/numpy/core.so", bytes(700)),
            file(f"{root}/bin/f2py", bytes(30)),
            file(f"{root}/conda-meta/history", bytes(9)),
        ]
    report = audited(tar(*members))
    listed = 730 + len(make.dump(meta))
    assert [(row.manager, row.name, row.unpacked_bytes, row.place) for row in report.packages] == [
        ("conda", "numpy", listed, "opt/conda"),
        ("conda", "numpy", listed, "opt/conda/envs/serve"),
    ]
    assert report.owners == {"conda": 2 * listed, "unowned": 18}
    assert exact(report)


def test_content_that_only_a_hard_link_is_listed_for_is_owned_through_it() -> None:
    meta = make.dump({"name": "mkl", "version": "1", "files": ["lib/libmkl.so"]})
    report = audited(
        tar(
            file("opt/conda/conda-meta/mkl-1.json", meta),
            file("home/u/pkgs/mkl-1/lib/libmkl.so", bytes(5000)),
            hardlink("opt/conda/lib/libmkl.so", "home/u/pkgs/mkl-1/lib/libmkl.so"),
        )
    )
    assert packages(report) == {("conda", "mkl"): 5000 + len(meta)}
    assert exact(report)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("lib/librocblas.so.4.4.60401", "rocblas"),
        ("lib/rocblas/library/TensileLibrary_gfx90a.co", "rocblas"),
        ("lib/libamdhip64.so.6", "hip"),
        ("lib/libMIOpen.so.1", "miopen"),
        ("lib/cmake/rocblas/rocblas-config.cmake", "rocblas"),
        ("include/rocblas/rocblas.h", "rocblas"),
        ("share/doc/rocblas/LICENSE", "rocblas"),
        ("share/miopen/db/gfx90a.db", "miopen"),
        ("lib/llvm/bin/clang-19", "llvm"),
        ("llvm/lib/libLLVM.so", "llvm"),
        ("amdgcn/bitcode/ocml.bc", "amdgcn"),
        ("bin/rocminfo", "bin"),
        (".info/version", ".info"),
        ("version", "rocm"),
    ],
)
def test_a_path_shows_the_component_of_rocm(path: str, name: str) -> None:
    directory, _, last = f"opt/rocm-6.4.1/{path}".encode().rpartition(b"/")
    found = component_of(directory, last)
    assert found
    assert (found.place, found.version, found.name) == ("opt/rocm-6.4.1", "6.4.1", name)


def test_what_is_outside_of_rocms_tree_has_no_component() -> None:
    assert component_of(b"opt/rocmlike", b"x") is None
    assert component_of(b"usr/lib", b"librocblas.so") is None
    assert component_of(b"opt/rocm", b"x") is not None


def test_rocms_tree_is_owned_by_component_where_no_deb_owns_it() -> None:
    status = b"Package: rocminfo\nStatus: install ok installed\nVersion: 1\n"
    listed = b"/opt/rocm-6.4.1/bin/rocminfo\n"
    report = audited(
        tar(
            file("var/lib/dpkg/status", status),
            file("var/lib/dpkg/info/rocminfo.list", listed),
            file("opt/rocm-6.4.1/bin/rocminfo", bytes(60)),
            file("opt/rocm-6.4.1/lib/librocblas.so.4", bytes(500)),
            file("opt/rocm-6.4.1/lib/rocblas/library/x.dat", bytes(40)),
            file("opt/rocm-6.4.1/lib/libMIOpen.so", bytes(200)),
        ),
        tar(file("opt/rocm-6.4.1/lib/librocblas.so.4", bytes(400))),
    )
    assert packages(report) == {
        ("deb", "rocminfo"): 60 + len(listed),
        ("rocm tree", "rocblas"): 940,
        ("rocm tree", "miopen"): 200,
    }
    assert report.owners["rocm tree"] == 1140
    assert {row.owner for row in report.top_files} >= {"rocblas", "miopen", "rocminfo"}
    assert exact(report)


def test_components_are_bounded_however_many_a_path_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.audit.packages._MOST_COMPONENTS", 3)
    report = audited(tar(*(file(f"opt/rocm/lib/p{n}/x", b"x") for n in range(9))))
    assert packages(report) == {
        ("rocm tree", name): n for name, n in (("p0", 1), ("p1", 1), ("p2", 1), ("rocm", 6))
    }


OWN = tar(file("app/service.py", bytes(5)), file("stray", bytes(7)))
LOWER = tar(file("etc/os-release", bytes(100)))
SECOND = tar(file("usr/local/bin/python3.11", bytes(2000)), folder("app"))


@pytest.mark.parametrize(
    ("history", "n_layers"),
    [
        # an image on python:slim by buildkit: each base ends in its CMD, the nearest one counts
        (
            [
                ("# debian.sh --arch 'amd64' out/ 'bookworm'", True),
                ('CMD ["bash"]', False),
                ("RUN make install # buildkit", True),
                ('CMD ["python3"]', False),
                ("COPY . /app # buildkit", True),
                ('CMD ["python3" "-m" "service"]', False),
            ],
            2,
        ),
        # by the classic builder
        (
            [
                (f"{NOP}ADD file:0a1b in / ", True),
                (f'{NOP} CMD ["bash"]', False),
                ("/bin/sh -c make install", True),
                (f"{NOP}COPY dir:5 in /app", True),
            ],
            1,
        ),
        # ours, on a bootstrapped tree
        (
            [
                ("ADD rootfs.tar / # buildkit", True),
                ("RUN a", True),
                ("COPY b c", True),
                ('CMD ["x"]', False),
            ],
            1,
        ),
        # nothing shows it
        ([("RUN a", True), ("RUN b", True), ("RUN c", True), ('CMD ["x"]', False)], 0),
        ([("COPY app.tar /srv/", True), ("RUN b", True), ("RUN c", True)], 0),
        ([('CMD ["bash"]', False), ("RUN a", True), ("RUN b", True), ("RUN c", True)], 0),
        # a history that doesn't fit the layers shows nothing
        ([("ADD rootfs.tar / # buildkit", True), ('CMD ["bash"]', False), ("RUN a", True)], 0),
    ],
)
def test_the_base_is_recognised_by_the_history(history: list[tuple[str, bool]], n_layers: int) -> None:
    report = audited(LOWER, SECOND, OWN, history=history)
    assert report.image.base_layers == n_layers
    assert bool(report.image.base_told_by) == bool(n_layers)
    owned = [0, 100, 2100][n_layers]
    assert report.owners.get("base image", 0) == owned
    assert report.owners["service"] == 5
    assert report.owners["unowned"] == 7 + 2100 - owned
    assert exact(report)


def test_a_base_by_itself_has_no_base_and_a_label_names_one() -> None:
    alone = [("ADD rootfs.tar / # buildkit", True), ('CMD ["bash"]', False)]
    assert audited(LOWER, history=alone).image.base_layers == 0
    steps = [*alone, ("COPY . /app", True)]
    label = {"org.opencontainers.image.base.name": "debian:bookworm\x1b"}
    assert audited(LOWER, OWN, history=steps, **label).image.base_name == "debian:bookworm\\x1b"
