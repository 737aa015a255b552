"""Findings of images counted by hand: from how many bytes on, how grave, where, what the remedy names."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from contents_maker import A, L, debs, facts

from buildtool.audit.counts import (
    LATER_RUN,
    ONE_LAYER,
    ROCM_TWICE,
    TWO_COPIES,
    Duplicate,
    Facts,
    SecretPlace,
    Tally,
)
from buildtool.audit.findings import Finding, Severity, display_paths, find_waste, merged_places, predict
from buildtool.audit.kinds import Kind, Location, PackageName, Pattern

MIB = 1_048_576
NOTHING = facts(L({"x": 5}))
OF_KINDS = {
    "caches": [Kind.CACHE],
    "headers-and-static": [Kind.HEADER, Kind.STATIC_LIBRARY, Kind.BUILD_FILE],
    "tests": [Kind.TEST],
    "debug-info": [Kind.DEBUG],
    "docs-and-locale": [Kind.DOC, Kind.LOCALE],
    "bytecode": [Kind.BYTECODE],
}
PLACES = [b"p%d" % n for n in range(30)]


def tally(n_bytes: int, places: Sequence[Location] = (b"a",)) -> Tally:
    """So many bytes, the most of them at the first place."""
    rest = len(places) * (len(places) - 1) // 2
    sizes = [n_bytes - rest, *range(len(places) - 1, 0, -1)]
    return Tally(n_bytes, Counter(dict(zip(places, sizes, strict=True))))


def only(found: Facts) -> Finding:
    [finding] = find_waste(found)
    return finding


def test_an_ordinary_image_has_no_finding() -> None:
    assert find_waste(NOTHING) == ()


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in OF_KINDS.items() for kind in kinds]
)
def test_each_kind_that_nobody_needs_has_its_finding_from_a_mebibyte_on(name: str, kind: Kind) -> None:
    assert find_waste(replace(NOTHING, visible_by_kind={kind: tally(MIB - 1)})) == ()
    finding = only(replace(NOTHING, visible_by_kind={kind: tally(MIB, PLACES), Kind.DATA: tally(9 * MIB)}))
    severity = Severity.INFO if name == "bytecode" else Severity.WARNING
    assert (finding.id, finding.severity, finding.bytes) == (name, severity, MIB)
    assert finding.paths == tuple(f"p{n}" for n in range(20))
    assert finding.predicted_unpacked_bytes is None  # no claim says what would be saved


@pytest.mark.parametrize("name", ["headers-and-static", "docs-and-locale"])
def test_kinds_of_one_finding_are_added_up_and_their_places_sorted_by_bytes(name: str) -> None:
    first, second = OF_KINDS[name][:2]
    places = {first: tally(MIB - 500, [b"a", b"b"]), second: tally(500, [b"c", b"b"])}
    finding = only(replace(NOTHING, visible_by_kind=places))
    assert (finding.bytes, finding.paths) == (MIB, ("a", "c", "b"))


@pytest.mark.parametrize("name", ["headers-and-static", "tests", "debug-info"])
def test_a_remedy_names_the_eight_largest_places(name: str) -> None:
    remedy = only(replace(NOTHING, visible_by_kind={OF_KINDS[name][0]: tally(MIB, PLACES)})).remedy
    words = " ".join(f"/p{n}" for n in range(8))
    assert remedy.startswith(f"RUN rm -rf {words}   #")
    assert "{places}" not in remedy


def test_remedies_against_caches_and_documents_name_no_place() -> None:
    for kind, directory in ((Kind.CACHE, "/var/lib/apt/lists"), (Kind.DOC, "/usr/share/doc/")):
        remedy = only(replace(NOTHING, visible_by_kind={kind: tally(MIB)})).remedy
        assert directory in remedy
        assert "/a " not in remedy


def test_symbols_in_libraries_are_a_finding_with_the_directories_to_strip() -> None:
    assert find_waste(replace(NOTHING, strippable=tally(MIB - 1))) == ()
    finding = only(replace(NOTHING, strippable=tally(MIB, PLACES)))
    assert (finding.id, finding.severity, finding.bytes) == (
        "debug-info-in-libraries",
        Severity.WARNING,
        MIB,
    )
    assert finding.paths == tuple(f"p{n}" for n in range(20))
    listed = " ".join(f"/p{n}" for n in range(20))
    assert finding.remedy.startswith(f"RUN find {listed} -maxdepth 1 -type f ")
    assert "\n# and 10 more directories" in finding.remedy
    assert "never after weir prune;" in finding.remedy  # not by the program's old name
    alone = only(replace(NOTHING, strippable=tally(MIB))).remedy
    assert all(line.startswith("#") for line in alone.split("\n")[2:])
    assert "more directories" not in only(replace(NOTHING, strippable=tally(MIB, PLACES[:20]))).remedy


@pytest.mark.parametrize("name", ["overwritten", "deleted"])
def test_what_later_layers_replace_or_delete_is_a_finding_from_a_mebibyte_on(name: str) -> None:
    assert find_waste(replace(NOTHING, **{name: tally(MIB - 1)})) == ()  # type: ignore[arg-type]
    finding = only(replace(NOTHING, **{name: tally(MIB, PLACES)}))  # type: ignore[arg-type]
    assert (finding.id, finding.severity, finding.bytes) == (name, Severity.WARNING, MIB)
    assert finding.paths == tuple(f"p{n}" for n in range(20))


def test_content_that_came_back_is_reported_by_cause_the_largest_first() -> None:
    causes = {"b": 2_000_000, "c": 3_000_000, "a": 2_000_000}
    title = only(replace(NOTHING, overwritten=tally(9 * MIB), rewritten=causes)).title
    assert title.endswith("c, same content: 3.00 MB; a, same content: 2.00 MB; b, same content: 2.00 MB")
    assert "same content" not in only(replace(NOTHING, overwritten=tally(9 * MIB))).title


def duplicate(n_bytes: int, cause: str = ONE_LAYER, *paths: str) -> Duplicate:
    named = paths or ("a", "b")
    return Duplicate(n_bytes, n_bytes * (len(named) - 1), named, cause)


def test_copies_are_a_finding_from_a_mebibyte_of_waste_on() -> None:
    assert find_waste(replace(NOTHING, duplicates=(duplicate(MIB - 1),))) == ()
    assert only(replace(NOTHING, duplicates=(duplicate(MIB),))).bytes == MIB
    rows = [duplicate(MIB, ONE_LAYER, "a\\x0a", "b", "c", "d"), *[duplicate(1)] * 30]
    finding = only(replace(NOTHING, duplicates=tuple(rows)))
    assert (finding.id, finding.severity, finding.bytes) == (
        "duplicates",
        Severity.WARNING,
        3 * MIB + 30,
    )
    assert finding.paths == ("a\\x0a = b = c", *["a = b"] * 19)
    assert finding.title.endswith(f"({ONE_LAYER})")


def test_copies_of_several_causes_are_reported_and_answered_the_largest_first() -> None:
    sizes = {ONE_LAYER: 2, ROCM_TWICE: 4, TWO_COPIES: 3, LATER_RUN: 2}
    rows = tuple(duplicate(n * 1_000_000, why) for why, n in sizes.items())
    finding = only(replace(NOTHING, duplicates=rows))
    order = [ROCM_TWICE, TWO_COPIES, LATER_RUN, ONE_LAYER]
    assert finding.title.endswith("(" + ", ".join(f"{why}: {sizes[why]}.00 MB" for why in order) + ")")
    answers = finding.remedy.split("\n")
    assert [
        word in line
        for word, line in zip(["/opt/rocm/lib", "COPY", "one RUN", "ln -sf"], answers, strict=True)
    ]
    assert len(set(answers)) == 4


def test_build_tools_are_a_finding_whose_remedy_purges_the_eight_largest_packages() -> None:
    assert find_waste(replace(NOTHING, build_only=tally(MIB - 1))) == ()
    packages = [PackageName(f"p{n}-dev") for n in range(12)]
    finding = only(replace(NOTHING, build_only=tally(MIB, [b"opt/rocm/llvm", *packages])))
    assert (finding.id, finding.severity, finding.bytes) == ("build-only", Severity.WARNING, MIB)
    assert finding.paths == ("opt/rocm/llvm", *(f"p{n}-dev" for n in range(12)))
    assert finding.remedy.endswith(" -- " + " ".join(f"p{n}-dev" for n in range(8)))
    alone = only(replace(NOTHING, build_only=tally(MIB))).remedy
    assert "purge" not in alone
    assert alone == alone.rstrip()


def test_every_credential_is_an_error_and_500_places_are_listed() -> None:
    rows = tuple(SecretPlace(f"p{n}", ("a", "b"), 3) for n in range(501))
    finding = only(replace(NOTHING, secrets=rows))
    assert (finding.id, finding.severity, finding.bytes) == ("secrets", Severity.ERROR, 1503)
    assert finding.paths == tuple(f"p{n}: a, b" for n in range(500))
    assert "in 501 places" in finding.title


def test_a_layer_of_10_000_mib_is_taken_by_registries_and_a_larger_one_is_not() -> None:
    limit = 10_485_760_000
    image = replace(NOTHING, layer_bytes=(1, 20, 300, 4000))
    assert find_waste(replace(image, layer_stored_bytes=(1, limit, None, 0))) == ()
    finding = only(replace(image, layer_stored_bytes=(1, limit + 1, None, limit + 1)))
    assert (finding.id, finding.severity, finding.bytes) == ("huge-layer", Severity.WARNING, 4020)
    assert finding.paths == ("layer 1", "layer 3")


def test_errors_come_first_and_then_the_largest_findings() -> None:
    found = replace(
        NOTHING,
        deleted=tally(2 * MIB),
        overwritten=tally(3 * MIB),
        visible_by_kind={Kind.BYTECODE: tally(9 * MIB), Kind.TEST: tally(4 * MIB)},
        secrets=(SecretPlace("x", ("a",), 0),),
    )
    assert [row.id for row in find_waste(found)] == ["secrets", "bytecode", "tests", "overwritten", "deleted"]


def test_each_remedy_is_predicted_alone_and_those_of_warnings_together() -> None:
    claims = {("tests",): 10, ("tests", "deleted"): 20, ("bytecode",): 300, ("bytecode", "deleted"): 4000}
    image = replace(
        NOTHING,
        layer_bytes=(90_000, 10_000),
        claims=claims,
        visible_by_kind={Kind.BYTECODE: tally(MIB), Kind.TEST: tally(MIB), Kind.DOC: tally(MIB)},
        deleted=tally(MIB),
    )
    found = find_waste(image)
    assert {row.id: row.predicted_unpacked_bytes for row in found} == {
        "tests": 100_000 - 30,
        "deleted": 100_000 - 4020,
        "bytecode": 100_000 - 4300,
        "docs-and-locale": None,
    }
    predicted = predict(image, found)
    assert (predicted.saved_bytes, predicted.unpacked_bytes) == (4030, 95_970)
    assert predict(image, ()).saved_bytes == 0


def test_paths_are_shown_with_a_slash_and_what_is_no_path_without() -> None:
    row = Finding("tests", Severity.INFO, "", 1, ("a/b", "c = d = e"), "")
    assert display_paths(row) == ["/a/b", "/c = /d = /e"]
    for name in ("secrets", "build-only", "huge-layer"):
        assert display_paths(replace(row, id=name)) == ["a/b", "c = d = e"]


def test_places_of_several_tallies_are_added_before_they_are_sorted() -> None:
    first, second = Counter({b"a": 5, b"b": 4}), Counter({b"b": 4, b"c": 6})
    assert merged_places([Tally(9, first), Tally(10, second)]) == [b"b", b"c", b"a"]  # type: ignore[arg-type]
    assert merged_places([]) == []


CUDA = facts(L({f"opt/{n}/libcublas.so": 1 + n for n in range(30)}))


@pytest.mark.parametrize(
    ("variant", "ref", "build", "meant"),
    [
        ("rocm", "x", "", "rocm"),
        ("ROCm-7", "x", "cpu", "rocm"),
        ("", "weir/rocm:1", "cuda", "rocm"),
        ("cpu", "x", "cuda", "cpu"),
        ("", "weir/cpu:1", "", "cpu"),
        ("", "x", "cpu", "cpu"),
        ("", "x", "rocm", "rocm"),
        ("", "x", "other", ""),
        ("", "x", "", ""),
    ],
)
def test_cuda_is_an_error_where_the_image_says_it_is_for_other_hardware(
    variant: str, ref: str, build: str, meant: str
) -> None:
    labels = {"io.weir.variant": variant, "io.weir.torch.build": build}
    finding = only(replace(CUDA, labels=labels, ref=ref))
    assert (finding.id, finding.severity) == (
        "cuda-in-cpu-image",
        Severity.ERROR if meant else Severity.INFO,
    )
    assert finding.bytes == 465
    assert finding.paths == tuple(f"opt/{n}/libcublas.so" for n in range(29, 9, -1))
    assert (f"for {meant}" in finding.title) is bool(meant)
    index = "rocm6.4" if meant == "rocm" else "cpu"
    assert f"/whl/{index}\n" in finding.remedy


@pytest.mark.parametrize(
    ("variant", "ref", "build"), [("cuda", "x", "cpu"), ("x", "weir/CUDA:1", ""), ("", "x", "cuda")]
)
def test_cuda_is_no_finding_where_the_image_is_for_it(variant: str, ref: str, build: str) -> None:
    labels = {"io.weir.variant": variant, "io.weir.torch.build": build}
    found = find_waste(replace(CUDA, labels=labels, ref=ref))
    assert [row.id for row in found if row.id == "cuda-in-cpu-image"] == []


def test_an_image_without_labels_is_judged_by_its_name() -> None:
    assert only(replace(CUDA, labels={}, ref="x")).severity is Severity.INFO
    assert find_waste(replace(NOTHING, labels={}, ref="weir/cpu:1")) == ()


@pytest.mark.parametrize(
    ("variant", "build", "found"),
    [
        ("rocm", "cpu", True),
        ("cuda-slim", "cpu", True),
        ("rocm", "rocm", False),
        ("cpu", "cpu", False),
        ("my-rocm", "cpu", False),
        ("rocm", None, False),
        (None, "cpu", False),
    ],
)
def test_a_cpu_build_of_torch_is_reported_in_variants_for_gpus(
    variant: str | None, build: str | None, found: bool
) -> None:
    told = {"io.weir.variant": variant, "io.weir.torch.build": build}
    labels = {key: value for key, value in told.items() if value is not None}
    rows = find_waste(replace(NOTHING, labels=labels))
    assert [(row.id, row.severity, row.bytes, row.paths) for row in rows] == [
        ("torch-without-gpu-kernels", Severity.WARNING, 0, ())
    ] * found
    if found:
        assert f"variant {variant} " in rows[0].title
        assert rows[0].remedy.endswith(f"\nweir build -- {variant}")


FILES = {f"d{n}/k_gfx906.co": 1000 + n for n in range(25)}
LIBRARIES = {f"lib{n}.so": A(9000, code={"gfx90a": 100 + n, "gfx1100": 7}) for n in range(25)}


def test_foreign_code_in_files_and_libraries_is_a_finding_each_with_one_remedy() -> None:
    files = {"f/a_gfx908.co": 1, **FILES, **LIBRARIES, "k_gfx1100.co": 5}
    image = facts(L(files), targets=("gfx1100",))
    named, libraries = find_waste(image)
    assert (named.id, named.severity, named.bytes) == ("foreign-gfx", Severity.WARNING, 25_301)
    assert named.paths == tuple(f"d{n}" for n in range(24, 4, -1))
    assert "for gfx906, gfx908; the image is for gfx1100" in named.title
    assert (libraries.id, libraries.bytes) == ("foreign-gfx-in-libraries", 2800)
    assert libraries.paths == tuple(f"lib{n}.so" for n in range(24, 4, -1))
    assert "for gfx90a; the image is for gfx1100" in libraries.title
    assert named.remedy == libraries.remedy
    total = sum(image.layer_bytes)
    assert named.predicted_unpacked_bytes == total - 25_301
    assert libraries.predicted_unpacked_bytes == total - 2800
    first, second, third = named.remedy.split("\n")
    assert first == "weir prune --targets gfx1100 -- weir/x:1"
    assert "28.10 kB" in second
    assert f"{(total - 28_101) / 1000:.2f} kB" in second
    assert third.endswith("weir prune --targets gfx1100 DIRECTORY")


@pytest.mark.parametrize("targets", [("gfx906", "gfx90a"), ()])
def test_code_that_is_wanted_is_no_finding(targets: tuple[str, ...]) -> None:
    image = facts(L({"k_gfx906.co": 5, "x.so": A(50, code={"gfx90a": 9})}), targets=targets)
    assert find_waste(image) == ()


def test_packages_of_an_image_appear_in_its_findings() -> None:
    files = {**debs(gcc_12=("usr/bin/gcc",)), "usr/bin/gcc": 2 * MIB, "a/x.h": 2 * MIB}
    found = {row.id: row.paths for row in find_waste(facts(L(files)))}
    assert found == {"build-only": ("gcc-12",), "headers-and-static": ("a/*.h",)}
    assert merged_places([facts(L(files)).visible_by_kind[Kind.HEADER]]) == [Pattern(b"a", b"h")]
