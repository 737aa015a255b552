"""What an audit says of small images: owners, kinds, findings, budget; and how it says it."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cmarkgfm
import image_maker as make
import jsonschema
import pytest
from cmarkgfm.cmark import Options
from gpucode.cutting import cuda
from gpucode.maker import Spec, bundles, make_library, nv_fatbin
from image_maker import Image, file, folder, hardlink, symlink, tar

from buildtool.audit.audit import audit_image, audit_path, write_reports
from buildtool.audit.findings import Finding, Severity
from buildtool.audit.kinds import Classifier, Kind
from buildtool.audit.options import AuditOptions, RenderOptions
from buildtool.audit.packages import DebPackage, deb_packages
from buildtool.audit.report import AuditReport, Verdict, judge
from buildtool.audit.text import MARKDOWN_BYTES, render_markdown, render_table, summary_row, verdict_lines
from buildtool.cli import audit as command
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.model import Budget
from buildtool.gpucode.source import BadTarget
from buildtool.gpucode.target import parse_targets
from buildtool.prune.trees import prune_tree
from probes.core.quoting import terminal

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "docs/schema/audit-report.schema.json").read_text())
MB = 1_000_000

STATUS = b"""Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Version: 2.41-1

Package: removed
Status: deinstall ok config-files
Version: 1

Package: dpkg
Status: install ok installed
Version: 1.22
"""
SITE = "usr/lib/python3.11/site-packages"
BASE = tar(
    folder("usr/lib"),
    symlink("lib", "usr/lib"),
    file("usr/lib/libc.so.6", bytes(2000)),
    file("var/lib/dpkg/status", STATUS),
    file(
        "var/lib/dpkg/info/libc6:amd64.list", b"/.\n/lib\n/lib/libc.so.6\n/usr/share/doc/libc6\n/etc/gone\n"
    ),
    file("var/lib/dpkg/info/dpkg.list", b"/usr/bin/dpkg\n"),
    file("usr/bin/dpkg", bytes(300)),
)
PYTHON = tar(
    file(
        f"{SITE}/torch-2.9.1+cpu.dist-info/METADATA",
        b"Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+cpu\n\nName: no\n",
    ),
    file(
        f"{SITE}/torch-2.9.1+cpu.dist-info/RECORD",
        b'torch/lib/libtorch_cpu.so,sha256=x,1\n"torch/we,ird.py",,\n../../../bin/torchrun,,\n'
        b"torch-2.9.1+cpu.dist-info/METADATA,,\n",
    ),
    file(f"{SITE}/torch/lib/libtorch_cpu.so", bytes(5000)),
    file(f"{SITE}/torch/we,ird.py", bytes(70)),
    file(f"{SITE}/torch/__pycache__/we,ird.cpython-311.pyc", bytes(60)),
    file("usr/bin/torchrun", bytes(11)),
    file("opt/rocm-7.0/lib/librocblas.so", bytes(40)),
    file("app/service.py", bytes(30)),
    file("stray", bytes(7)),
)


class FakeEngine:
    def __init__(self, image: Image) -> None:
        self._content = make.archive(make.containerd_nested(image))

    def save(self, ref: str) -> Iterator[bytes]:
        return make.chunks(self._content, 10_000)


def audited(*layers: bytes, labels: dict[str, str] | None = None, **options: object) -> AuditReport:
    history = options.pop("history", None)
    image = Image(
        list(layers), labels=labels or {}, ref=str(options.pop("ref", "weir/tiny:1")), history=history
    )  # type: ignore[arg-type]
    return audit_image(image.ref, engine=FakeEngine(image), options=AuditOptions(**options))  # type: ignore[arg-type]


def found(report: AuditReport, name: str) -> Finding:
    return next(row for row in report.findings if row.id == name)


def ids(report: AuditReport) -> set[str]:
    return {row.id for row in report.findings}


def test_every_byte_has_one_owner_and_one_kind() -> None:
    report = audited(BASE, PYTHON, tar(file("usr/bin/dpkg", bytes(400)), file(".wh.stray")))
    total = sum(layer.unpacked_bytes for layer in report.layers)
    assert report.totals.unpacked_bytes == total
    assert sum(report.owners.values()) == sum(report.kinds.values()) == total
    assert report.owners["rocm tree"] == 40
    assert report.owners["service"] == 30
    assert report.owners["unowned"] == 7
    assert report.totals.visible_bytes == total - 7 - 300


def test_packages_own_their_files_through_links_and_lists() -> None:
    report = audited(BASE, PYTHON, tar(file("usr/bin/dpkg", bytes(400))))
    rows = {row.name: row for row in report.packages}
    assert set(rows) == {"libc6", "dpkg", "torch", "rocblas"}
    assert rows["libc6"].version == "2.41-1"
    assert rows["libc6"].unpacked_bytes == 2000 + len(
        b"/.\n/lib\n/lib/libc.so.6\n/usr/share/doc/libc6\n/etc/gone\n"
    )
    lists = len(STATUS) + len(b"/usr/bin/dpkg\n")
    assert (rows["dpkg"].unpacked_bytes, rows["dpkg"].visible_bytes) == (300 + 400 + lists, 400 + lists)
    record = 2 * 60 + 5000 + 70 + 11
    assert rows["torch"].version == "2.9.1+cpu"
    assert rows["torch"].unpacked_bytes > record
    assert rows["torch"].place == SITE
    assert report.torch_build == "2.9.1+cpu"


def test_debian_comes_before_python_where_both_claim_a_file() -> None:
    listed = f"/{SITE}/torch/we,ird.py\n".encode()
    report = audited(
        tar(file("var/lib/dpkg/status", STATUS), file("var/lib/dpkg/info/libc6.list", listed)), PYTHON
    )
    rows = {row.name: row.unpacked_bytes for row in report.packages}
    assert rows["libc6"] == len(listed) + 70 + 60  # the source, and the bytecode made from it


def test_dpkg_stanzas_of_removed_packages_are_skipped() -> None:
    expected = [DebPackage("libc6", "2.41-1", "amd64"), DebPackage("dpkg", "1.22", "")]
    assert list(deb_packages(STATUS.split(b"\n"))) == expected


def test_distroless_databases_are_read() -> None:
    base = tar(
        file("var/lib/dpkg/status.d/tzdata", b"Package: tzdata\nVersion: 1\n"),
        file("var/lib/dpkg/status.d/tzdata.md5sums", b"0" * 32 + b"  usr/share/zoneinfo/UTC\n"),
        file("usr/share/zoneinfo/UTC", bytes(50)),
    )
    assert [(row.name, row.unpacked_bytes) for row in audited(base).packages] == [("tzdata", 50)]


def test_conda_packages_own_what_python_does_not() -> None:
    meta = make.dump({"name": "mkl", "version": "1", "files": ["lib/libmkl.so"]})
    base = tar(file("opt/conda/conda-meta/mkl-1.json", meta), file("opt/conda/lib/libmkl.so", bytes(50)))
    rows = audited(base, tar(file("opt/conda/conda-meta/other.json", b"[1"))).packages
    assert [(row.manager, row.name, row.unpacked_bytes) for row in rows] == [("conda", "mkl", 50 + len(meta))]


KINDS = {
    "usr/include/x.txt": Kind.HEADER,
    "opt/x/y.h": Kind.HEADER,
    "usr/lib/libx.a": Kind.STATIC_LIBRARY,
    "usr/lib/libx.so.1.2": Kind.LIBRARY,
    "usr/lib/cmake/x/y.txt": Kind.BUILD_FILE,
    "a/__pycache__/x.bin": Kind.BYTECODE,
    "a/tests/x.py": Kind.TEST,
    "root/.cache/pip/x": Kind.CACHE,
    "var/lib/apt/lists/x": Kind.CACHE,
    "opt/conda/pkgs/x/include/y.h": Kind.CACHE,
    "root/miniforge3/pkgs/x.conda": Kind.CACHE,
    "opt/weir/lib/distutils-precedence.pth": Kind.PYTHON,
    "opt/lib/__editable__.x-1.pth": Kind.PYTHON,
    "usr/share/doc/x/changelog.gz": Kind.DOC,
    "usr/share/doc/x/copyright": Kind.DATA,
    "usr/share/locale/de/x.mo": Kind.LOCALE,
    "usr/bin/x": Kind.PROGRAM,
    "m/model.safetensors": Kind.MODEL,
    "usr/lib/debug/x": Kind.DEBUG,
    "rocblas/library/Kernels.so-000-gfx90a.hsaco": Kind.GPU_CODE,
    "a/b.py": Kind.PYTHON,
    "usr/lib/python3/dist-packages/distutils-precedence.pth": Kind.PYTHON,
    "models/resnet.pth": Kind.MODEL,
    "x": Kind.DATA,
}


@pytest.mark.parametrize("path", KINDS)
def test_a_file_has_the_kind_that_its_path_says(path: str) -> None:
    directory, _, name = path.encode().rpartition(b"/")
    assert Classifier().classify(directory, name).kind is KINDS[path]


NVIDIA = tar(
    file(
        f"{SITE}/nvidia_cublas_cu12-12.8.dist-info/METADATA", b"Name: nvidia-cublas-cu12\nVersion: 12.8\n\n"
    ),
    file(f"{SITE}/nvidia_cublas_cu12-12.8.dist-info/RECORD", b"nvidia/cublas/lib/libcublas.so.12,,\n"),
    file(f"{SITE}/nvidia/cublas/lib/libcublas.so.12", bytes(3 * MB)),
    file("usr/local/lib/libcudnn.so.9", bytes(MB)),
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ref", "variant", "severity"),
    [
        ("weir/x:1", "cpu-naive", Severity.ERROR),
        ("weir/cpu:1", "", Severity.ERROR),
        ("weir/x:1", "rocm", Severity.ERROR),
        ("weir/x:1", "", Severity.INFO),
    ],
)
def test_cuda_is_found_where_it_is_not_wanted(ref: str, variant: str, severity: Severity) -> None:
    finding = found(audited(NVIDIA, ref=ref, labels={"io.weir.variant": variant}), "cuda-in-cpu-image")
    assert finding.severity is severity
    assert finding.bytes >= 4 * MB
    assert "nvidia-cublas-cu12 12.8" in finding.paths[0]
    assert "usr/local/lib/libcudnn.so.9" in finding.paths
    assert "--index-url" in finding.remedy


def test_torch_own_libraries_for_cuda_are_distinguished_from_those_that_every_build_has() -> None:
    cuda = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libc10_cuda.so")
    common = ("libtorch_cpu.so", "libtorch.so", "libc10.so", "libtorch_python.so")
    image = tar(*(file(f"{SITE}/torch/lib/{name}", bytes(1000)) for name in (*cuda, *common)))
    finding = found(audited(image, ref="weir/cpu:1"), "cuda-in-cpu-image")
    assert {path.rpartition("/")[2] for path in finding.paths} == set(cuda)


def test_cuda_in_a_cuda_image_is_no_finding() -> None:
    assert "cuda-in-cpu-image" not in ids(audited(NVIDIA, labels={"io.weir.variant": "cuda"}))


LIBRARY = "opt/rocm/lib/rocblas/library"
KERNELS = tar(
    file(f"{LIBRARY}/Kernels.so-000-gfx1100.hsaco", bytes(2 * MB)),
    file(f"{LIBRARY}/TensileLibrary_gfx90a.co", bytes(3 * MB)),
    file(f"{LIBRARY}/TensileLibrary_fallback.dat", bytes(MB)),
)


def test_gpu_code_is_counted_by_target_and_foreign_targets_are_named() -> None:
    report = audited(KERNELS, labels={"io.weir.gpu-targets": "gfx906, gfx1100"})
    assert report.gpu_code.by_target == {"gfx1100": 2 * MB, "gfx90a": 3 * MB}
    finding = found(report, "foreign-gfx")
    assert finding.bytes == 3 * MB
    assert "weir prune --targets gfx1100 -- weir/tiny:1\n" in finding.remedy  # prune refuses absent targets
    assert "takes 3.00 MB out of files and libraries, leaves 3.00 MB" in finding.remedy


@pytest.mark.thorough
def test_a_card_without_code_is_an_error_and_no_prune_is_advised_that_would_be_refused() -> None:
    """`--targets gfx803` advised a prune that removes all code; `weir prune` refuses to do that."""
    report = audited(KERNELS, targets=("gfx803",))
    assert "foreign-gfx" not in ids(report)
    finding = found(report, "no-code-for-target")
    assert finding.severity is Severity.ERROR
    assert "no GPU code for gfx803, only for gfx1100, gfx90a" in finding.title
    assert finding.remedy.startswith("weir doctor --card gfx803\n")
    assert "no-code-for-target" not in ids(audited(KERNELS, targets=("gfx1100", "sm_90")))
    assert "no-code-for-target" not in ids(audited(BASE, targets=("gfx803",)))


def test_no_card_is_said_to_have_no_code_where_code_is_in_an_uncommon_section() -> None:
    """cuDNN, cuFFT and TensorFlow keep code elsewhere: "[error] nothing here computes" was said of them."""
    kernels = cuda([nv_fatbin([(2, 80, 90_000)])])
    hiding = cuda([nv_fatbin([(2, 90, 90_000)])], section=".cask_resource")
    files = [file("usr/lib/libnccl.so", kernels), file("usr/lib/libcufft.so.11", hiding)]
    assert "no-code-for-target" not in ids(audited(tar(*files), targets=("sm_90",)))
    sure = found(audited(tar(*files[:1]), targets=("sm_90",)), "no-code-for-target")
    assert sure.severity is Severity.ERROR
    assert sure.title == "no GPU code for sm_90, only for sm_80: the libraries here can't use that card"


def test_a_card_without_code_is_a_warning_where_a_library_could_not_be_read() -> None:
    broken = bytearray(cuda([nv_fatbin([(2, 90, 90_000)])]))
    at = broken.index(b"\x50\xed\x55\xba")
    broken[at + 8 : at + 16] = b"\xff" * 8
    files = file("libgood.so", cuda([nv_fatbin([(2, 80, 90_000)])])), file("libbroken.so", bytes(broken))
    finding = found(audited(tar(*files), targets=("sm_90",)), "no-code-for-target")
    assert finding.severity is Severity.WARNING
    assert finding.title.endswith("; 1 file couldn't be inspected")
    assert finding.paths == ("libbroken.so",)


@pytest.mark.parametrize(
    ("align", "targets", "advised"),
    [(4096, ["gfx906", "gfx803"], True), (1 << 21, ["gfx906", "gfx803"], False), (4096, ["gfx803"], False)],
)
def test_a_prune_is_advised_only_of_libraries_that_it_would_change(
    align: int, targets: list[str], *, advised: bool, tmp_path: Path
) -> None:
    """jax's `_prng.so` has segments on borders of 2 MiB and less code than that: it was advised for ever."""
    library = make_library(Spec(bundles(targets, n_bytes=30_000), align=align)).data
    other = file("opt/k_gfx906.co", b"1" * 9)  # so that the image has code for the card
    ids_of = ids(audited(tar(file("jax/_prng.so", library), other), targets=("gfx906",)))
    assert ("foreign-gfx-in-libraries" in ids_of) is advised
    place = tmp_path / "tree/_prng.so"
    place.parent.mkdir()
    place.write_bytes(library)
    (place.parent / "k_gfx906.co").write_bytes(b"1" * 9)
    assert prune_tree(place.parent, parse_targets("gfx906")).changed is advised


@pytest.mark.thorough
def test_targets_of_the_command_line_come_before_the_label() -> None:
    assert "foreign-gfx" not in ids(audited(KERNELS, targets=("gfx90a", "gfx1100")))
    assert "foreign-gfx" not in ids(audited(KERNELS))
    with pytest.raises(BadTarget):
        audited(KERNELS, targets=("rx580",))


def test_waste_between_layers_is_reported_by_cause() -> None:
    first = tar(file("big", bytes(2 * MB)), file("log", b"x" * 2 * MB), file("kept", bytes(5)))
    report = audited(first, tar(file("big", bytes(2 * MB)), file(".wh.log")))
    assert found(report, "overwritten").bytes == 2 * MB
    assert "same content" in found(report, "overwritten").title
    assert found(report, "deleted").paths == ("log",)
    assert "duplicates" not in ids(report)


def test_the_same_content_at_two_paths_is_found_and_hard_links_are_not() -> None:
    body = b"r" * (2 * MB)
    report = audited(
        tar(
            file("opt/rocm/lib/x.so", body), file("p/torch/lib/x.so", body), hardlink("h", "p/torch/lib/x.so")
        )
    )
    finding = found(report, "duplicates")
    assert finding.bytes == 2 * MB
    assert "(ROCm in /opt/rocm and in torch/lib)" in finding.title
    assert report.duplicates[0].paths == ("opt/rocm/lib/x.so", "p/torch/lib/x.so")


@pytest.mark.parametrize(
    ("commands", "cause"),
    [
        (("COPY a /", "COPY b /"), "copied by two COPY steps"),
        (("COPY a /", "RUN cp -l /a /b"), "copied, or hard-linked, by a RUN in a later layer"),
    ],
)
def test_duplicates_are_named_by_what_made_them(commands: tuple[str, str], cause: str) -> None:
    body = b"r" * (2 * MB)
    report = audited(
        tar(file("a", body)), tar(file("b", body)), history=[{"created_by": text} for text in commands]
    )
    assert report.duplicates[0].cause == cause
    assert cause in found(report, "duplicates").title


@pytest.mark.parametrize(
    ("command", "again", "cause"),
    [
        ("RUN chown -R app /", (), "chown or chmod in a later layer"),
        ("COPY --chown=app . /", (), "the same COPY again"),
        ("RUN ln /a /c", (hardlink("c", "a"),), "a hard link made in a later layer"),
        ("RUN touch /a", (), "rewritten by a later layer"),
    ],
)
def test_content_that_came_back_is_named_by_what_brought_it(
    command: str, again: tuple[bytes], cause: str
) -> None:
    body = file("a", b"r" * (2 * MB))
    steps = [{"created_by": "COPY . /"}, {"created_by": command}]
    finding = found(audited(tar(body), tar(body, *again), history=steps), "overwritten")
    assert f"{cause}, same content: 2.00 MB" in finding.title


@pytest.mark.thorough
def test_compilers_and_dev_packages_are_reported_and_runtimes_are_not() -> None:
    names = {"gcc-12": 3, "libstdc++-12-dev": 2, "gcc-12-base": 1, "libgcc-s1": 1, "libllvm17": 5, "make": 1}
    status = "".join(f"Package: {name}\nStatus: install ok installed\nVersion: 1\n\n" for name in names)
    members = [file("var/lib/dpkg/status", status.encode())]
    for name, megabytes in names.items():
        members += [
            file(f"var/lib/dpkg/info/{name}.list", f"/opt/p/{name}\n".encode()),
            file(f"opt/p/{name}", name.encode() + bytes(megabytes * MB)),
        ]
    finding = found(audited(tar(*members)), "build-only")
    assert finding.paths == ("gcc-12", "libstdc++-12-dev", "make")
    assert 6 * MB <= finding.bytes < 6 * MB + 1000


def test_predictions_count_no_byte_twice() -> None:
    header = file("usr/include/tests/x.h", b"h" * (2 * MB))  # a header at two paths: three findings want it
    layer = tar(header, file("usr/include/y.h", b"h" * (2 * MB)), file("gone", bytes(2 * MB)))
    report = audited(layer, tar(file(".wh.gone")))
    total = report.totals.unpacked_bytes
    assert report.prediction is not None
    assert (report.prediction.saved_bytes, report.prediction.unpacked_bytes) == (total, 0)
    assert found(report, "duplicates").predicted_unpacked_bytes == total - 2 * MB
    assert sum(row.bytes for row in report.findings) > total


def test_a_layer_that_registries_refuse_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.audit.findings.REGISTRY_LAYER_BYTES", 100)
    assert found(audited(BASE), "huge-layer").paths == ("layer 0",)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("var/lib/apt/lists/all", "caches"),
        ("usr/include/x.h", "headers-and-static"),
        ("usr/lib/x/libx.a", "headers-and-static"),
        ("p/tests/x", "tests"),
        ("usr/share/man/x", "docs-and-locale"),
        ("usr/lib/debug/x", "debug-info"),
        ("p/__pycache__/x.pyc", "bytecode"),
    ],
)
def test_content_that_is_not_needed_is_found_from_a_mebibyte_on(path: str, name: str) -> None:
    finding = found(audited(tar(file(path, bytes(2 * MB)))), name)
    assert finding.bytes == 2 * MB
    assert finding.remedy.startswith(("RUN", "#"))
    assert name not in ids(audited(tar(file(path, bytes(1000)))))


def test_remedies_quote_what_an_image_calls_its_files() -> None:
    remedy = found(audited(tar(file("a;$(reboot) `x`/tests/x", bytes(2 * MB)))), "tests").remedy
    assert "rm -rf '/a;$(reboot) `x`/tests'" in remedy


def test_a_cpu_torch_in_a_rocm_image_is_reported() -> None:
    labels = {"io.weir.variant": "rocm", "io.weir.torch.build": "cpu"}
    assert found(audited(BASE, labels=labels), "torch-without-gpu-kernels").severity is Severity.WARNING
    assert ids(audited(BASE, labels={**labels, "io.weir.variant": "cpu"})) == set()


@pytest.mark.parametrize(
    ("budget", "stored", "verdict"),
    [
        (Budget(), 5, Verdict.NONE),
        (Budget(10, 5), 5, Verdict.PASS),
        (Budget(9, 5), 5, Verdict.FAIL),
        (Budget(10, 4), 5, Verdict.FAIL),
        (Budget(10, 4), None, Verdict.UNKNOWN),
        (Budget(9, 4), None, Verdict.FAIL),
        (Budget(10), None, Verdict.PASS),
    ],
)
def test_a_budget_is_judged_on_both_sizes(budget: Budget, stored: int | None, verdict: Verdict) -> None:
    assert judge(budget, unpacked_bytes=10, stored_bytes=stored).verdict is verdict


@pytest.mark.thorough
def test_the_json_report_keeps_to_its_schema(tmp_path: Path) -> None:
    report = audited(
        BASE, PYTHON, KERNELS, NVIDIA, budget=Budget(MB, None), labels={"io.weir.variant": "cpu"}
    )
    as_json, as_markdown, as_html = write_reports(report, tmp_path / "new", "tiny")
    document = json.loads(as_json.read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["budget"]["verdict"] == "fail"
    assert document["budget"]["limit_bytes"] == MB
    assert document["gpu_code"]["by_target"] == {"gfx1100": 2 * MB, "gfx90a": 3 * MB}
    assert document["image"]["attestations"] == 1
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"tiny.json", "tiny.md", "tiny.html"}
    assert as_markdown.read_text().startswith("# weir/tiny:1\n")
    assert "<bdi>weir/tiny:1</bdi>" in as_html.read_text()


def test_the_same_image_gives_the_same_json(tmp_path: Path) -> None:
    first, second = (write_reports(audited(BASE, PYTHON), tmp_path / name, "x")[0] for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_stored_bytes_of_plain_layers_are_unknown_with_a_reason() -> None:
    image = Image([BASE], make.plain)
    report = audit_image(image.ref, engine=FakeEngine(image), options=AuditOptions(budget=Budget(None, 10)))
    assert report.totals.stored_bytes is None
    assert report.budget.verdict is Verdict.UNKNOWN
    assert "stored bytes unknown" in render_table(report)
    assert summary_row(report).stored == "unknown"


def test_the_summary_row_names_the_gravest_finding() -> None:
    row = summary_row(
        audited(NVIDIA, tar(file("usr/include/x", bytes(9 * MB))), labels={"io.weir.variant": "cpu"})
    )
    assert row.biggest_finding.startswith("cuda-in-cpu-image: 4.00 MB")
    assert (row.layers, row.verdict, row.unpacked) == ("2", "none", "13.00 MB")
    assert summary_row(audited(BASE)).biggest_finding == "none"


def test_names_from_an_image_can_not_break_a_table_or_a_terminal() -> None:
    evil = "x\x1b[31m|\n<script>`/tests/f"
    report = audited(tar(file(evil, bytes(2 * MB))))
    assert "\x1b" not in render_table(report)
    page = cmarkgfm.markdown_to_html_with_extensions(
        render_markdown(report), options=Options.CMARK_OPT_UNSAFE, extensions=["table", "autolink"]
    )
    assert "<script>" not in page
    assert "x\\x1b[31m|\\x0a&lt;script&gt;`/tests" in page
    assert terminal(b"\xff\x1b\n") == "\\xff\\x1b\\x0a"
    assert terminal("\ud800\u202ea\n", keep="\n") == "\\ud800\\u202ea\n"


@pytest.mark.thorough
def test_markdown_is_cut_before_step_summaries_refuse_it() -> None:
    layers = tar(*(file(f"{n:04}{'d' * 90}/{'f' * 99}".replace("/", "/", 1)[:99], b"x") for n in range(300)))
    text = render_markdown(audited(layers), RenderOptions(300))
    assert len(text.encode()) < MARKDOWN_BYTES
    report = audited(*[BASE] * 3)
    long = Finding("long", Severity.INFO, "t", 1, tuple("p" * 9000 for _ in range(200)), "r")
    cut = render_markdown(AuditReport(**{**vars(report), "findings": (long,)}), RenderOptions(200))
    assert len(cut.encode()) <= MARKDOWN_BYTES
    assert cut.endswith("JSON file.*\n")
    remedy = Finding("long", Severity.INFO, "t", 1, (), "r\n" * (MARKDOWN_BYTES // 2 + 1))
    fenced = render_markdown(AuditReport(**{**vars(report), "findings": (remedy,)}))
    assert fenced.count("```") == 2
    assert len(fenced.encode()) <= MARKDOWN_BYTES


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    path = tmp_path / "image.tar"
    path.write_bytes(make.archive(make.docker_25(Image([BASE, KERNELS]))))
    return path


def test_the_command_prints_data_on_stdout_and_fails_over_budget(
    image_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    words = (str(image_file), "--format", "json", "--json", str(out), "--platform", "linux/amd64")
    assert command.run(arguments(*words, "--budget-unpacked", "1 GB")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text())
    assert printed.err == ""
    assert command.run(arguments(*words, "--budget-unpacked", "1 MB")) == 1
    assert "over budget (unpacked 6.00 MB > 1.00 MB)" in capsys.readouterr().err
    assert command.run(arguments(*words, "--budget-stored", "1 B")) == 1


def test_a_limit_on_unknown_bytes_passes_no_gate_in_silence() -> None:
    """Engines without the containerd store don't say what layers take compressed."""
    totals = replace(audited(BASE).totals, stored_bytes=None, stored_reason="not kept")
    unknown = judge(Budget(None, 1), unpacked_bytes=1, stored_bytes=None)
    report = replace(audited(BASE), totals=totals, budget=unknown)
    assert [line.partition(":")[0] for line in verdict_lines(report, None, baseline="")] == ["not checked"]


def test_the_command_renders_table_and_markdown(image_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.run(
        arguments(
            str(image_file), "--all", "--targets", "gfx906,gfx1100", "--markdown", str(image_file) + ".md"
        )
    )
    assert "[warning] foreign-gfx" in capsys.readouterr().out
    command.run(arguments(str(image_file), "--format", "markdown", "--top", "1"))
    assert "## Layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("--platform", "amd64"), ("--top", "-1"), ("--budget-stored", "many"), ("--targets", "rx580")]
)
def test_wrong_arguments_are_refused_before_anything_is_read(
    image_file: Path, words: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError):
        command.run(arguments(str(image_file), *words))


def test_audit_path_reads_a_layout_directory(tmp_path: Path) -> None:
    root = make.layout_directory(make.oci_layout(Image([BASE])), tmp_path / "layout")
    heard: list[int] = []
    report = audit_path(root, options=AuditOptions(), tick=heard.append)
    assert report.totals.unpacked_bytes > 2000
    assert sum(heard) > 0


def test_a_missing_file_is_no_missing_image() -> None:
    with pytest.raises(DataError, match=r"can't read none\.tar: No such file"):
        command.run(arguments("./none.tar"))
