"""Every byte of an image with its owner, kind, layer and visibility: counted by hand, without a tar."""

from collections.abc import Mapping

import pytest
from contents_maker import A, L, contents, debs, facts
from report_maker import HOSTILE

from buildtool.audit.claims import FOREIGN_CODE
from buildtool.audit.counts import Facts, SecretPlace, Tally, gather_facts
from buildtool.audit.kinds import Kind, Location, PackageName, Pattern
from buildtool.audit.packages import PackageRow
from buildtool.audit.treemap import FileRow
from buildtool.image.documents import Step

SITE = "usr/lib/python3/dist-packages"


def tally(found: Tally) -> tuple[int, dict[Location, int]]:
    return found.unpacked_bytes, dict(found.places)


def tallies(found: Mapping[str, Tally]) -> dict[str, tuple[int, dict[Location, int]]]:
    return {key: tally(one) for key, one in found.items()}


def test_a_tally_shows_its_largest_places_first() -> None:
    counted = Tally()
    for at, n_bytes in enumerate((5, 30, 4, 20)):
        counted.add(n_bytes, b"%d" % (at % 3))
    assert tally(counted) == (59, {b"0": 25, b"1": 30, b"2": 4})
    assert counted.top(5) == (b"1", b"0", b"2")
    assert counted.top(2) == (b"1", b"0")


SERVICES = ("app", "srv", "usr/src/app", "opt/weir")


@pytest.mark.parametrize("place", SERVICES)
def test_what_no_package_owns_is_the_services_below_its_directories_only(place: str) -> None:
    layer = L({f"{place}/a": 1, f"{place}/deep/b": 20, f"{place}s/c": 300, f"x/{place}/d": 4000})
    assert facts(layer).owners == {"service": 21, "unowned": 4300}


def test_what_came_with_the_base_is_the_bases_wherever_it_is() -> None:
    history = [
        Step("RUN a", has_layer=True),
        Step('CMD ["x"]', has_layer=False),
        Step("RUN b", has_layer=True),
    ]
    found = facts(L({"app/a": 1, "etc/b": 2}), L({"app/c": 30, "etc/d": 400}), history=history)
    assert found.base.n_layers == 1
    assert found.owners == {"base image": 3, "service": 30, "unowned": 400}
    assert {row.owner for row in found.top_files} == {"base image", "service", "unowned"}
    assert {(row.path, row.group, row.owner) for row in found.tree.rows if row.layer == 0} == {
        ("app/a", "base image", "base image"),
        ("etc/b", "base image", "base image"),
    }


LIBRARY = A(1000, code={"gfx906": 600, "gfx1100": 100}, debug=200)


def test_what_is_inside_a_library_counts_by_its_own_kind() -> None:
    found = facts(L({"opt/lib/libx.so.1": LIBRARY, "opt/lib/plain.so.1": A(50, debug=7), "x": 9}))
    assert found.kinds == {Kind.GPU_CODE: 700, Kind.LIBRARY: 143, Kind.DEBUG: 207, Kind.DATA: 9}
    assert {kind: tally(one) for kind, one in found.visible_by_kind.items()} == {
        Kind.GPU_CODE: (700, {b"opt/lib/libx.so.1": 700}),
        Kind.LIBRARY: (143, {b"opt/lib": 143}),
        Kind.DATA: (9, {b"": 9}),
    }
    assert tallies(found.gpu_in_libraries) == {
        "gfx906": (600, {b"opt/lib/libx.so.1": 600}),
        "gfx1100": (100, {b"opt/lib/libx.so.1": 100}),
    }
    assert tally(found.strippable) == (207, {b"opt/lib": 207})
    assert {(row.path, row.kind, row.target): row.unpacked_bytes for row in found.tree.rows} == {
        ("opt/lib/libx.so.1", "gpu code", "gfx906"): 600,
        ("opt/lib/libx.so.1", "gpu code", "gfx1100"): 100,
        ("opt/lib/libx.so.1", "shared libraries", ""): 100,
        ("opt/lib/libx.so.1", "debug information", ""): 200,
        ("opt/lib/plain.so.1", "shared libraries", ""): 43,
        ("opt/lib/plain.so.1", "debug information", ""): 7,
        ("x", "other data", ""): 9,
    }
    assert found.gpu_files == {}
    assert (found.visible_bytes, found.n_files) == (1059, 3)


def test_a_file_of_gpu_code_or_debug_information_is_all_of_that_kind() -> None:
    code = A(500, code={"gfx906": 300}, debug=50)
    found = facts(L({"k/a_gfx906.co": code, "usr/lib/debug/x": A(70, debug=60)}))
    assert found.kinds == {Kind.GPU_CODE: 500, Kind.DEBUG: 70}
    assert tallies(found.gpu_files) == {"gfx906": (500, {b"k": 500})}
    assert found.gpu_in_libraries == {}
    assert tally(found.strippable) == (0, {})
    debug_with_code = facts(L({"usr/lib/debug/x": A(70, code={"gfx906": 20}, debug=60)}))
    assert debug_with_code.kinds == {Kind.GPU_CODE: 20, Kind.DEBUG: 50}


def test_code_for_several_targets_is_counted_under_all_of_their_names() -> None:
    found = facts(L({"k/gfx906_gfx90a.co": 5}))
    assert tallies(found.gpu_files) == {"gfx906+gfx90a": (5, {b"k": 5})}


def test_findings_claim_the_file_its_code_and_its_symbols_each_once() -> None:
    layer = L({"p/tests/libx.so": LIBRARY, "k/a_gfx906.co": 40, "k/b_gfx1100.co": 3, "p/x": 2})
    found = facts(layer, targets=("gfx1100",))
    assert found.wanted_targets == ("gfx1100",)
    assert found.claims == {
        ("tests",): 100 + 100,
        ("tests", FOREIGN_CODE): 600,
        ("tests", "debug-info-in-libraries"): 200,
        ("foreign-gfx",): 40,
    }


def test_targets_of_the_label_count_where_the_caller_names_none() -> None:
    labels = {"io.weir.gpu-targets": " gfx906,, gfx1100 ,"}
    assert facts(L({"x": 1}), labels=labels).wanted_targets == ("gfx906", "gfx1100")
    assert facts(L({"x": 1}), labels=labels, targets=("gfx90a",)).wanted_targets == ("gfx90a",)
    assert facts(L({"x": 1})).wanted_targets == ()


def test_a_credential_in_a_label_is_not_passed_on() -> None:
    secret = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"
    found = facts(L({"x": 1}), labels={"api_key": secret, "plain": "a=b"})
    assert found.labels == {"api_key": "[redacted]", "plain": "a=b"}


def test_only_visible_files_are_counted_as_shown() -> None:
    lower = L({"a": 1, "d/b": 20, "d/c": 300, "empty": 0}, stored_bytes=77)
    upper = L({"a": 4000}, gone=("d/b",), stored_bytes=None)
    found = facts(lower, upper, top=2)
    assert (found.layer_bytes, found.layer_stored_bytes) == ((321, 4000), (77, None))
    assert (found.visible_bytes, found.n_files) == (4300, 2)
    assert found.kinds == {Kind.DATA: 4321}
    assert tally(found.visible_by_kind[Kind.DATA]) == (4300, {b"": 4000, b"d": 300})
    assert tally(found.overwritten) == (1, {b"a": 1})
    assert tally(found.deleted) == (20, {b"d/b": 20})
    assert found.claims == {("overwritten",): 1, ("deleted",): 20}
    assert found.top_files == (FileRow("a", 4000, 1, "unowned"), FileRow("d/c", 300, 0, "unowned"))
    assert found.top_directories == ((b"d", 300),)
    assert [(row.path, row.unpacked_bytes, row.visible_bytes) for row in found.tree.rows] == [
        ("a", 4000, 4000),
        ("a", 1, 0),
        ("d/b", 20, 0),
        ("d/c", 300, 300),
    ]


def test_at_most_200_directories_are_kept_and_no_more_than_are_asked_for() -> None:
    layer = L({f"d{n}/x": 1 + n for n in range(250)})
    assert len(facts(layer, top=201).top_directories) == len(facts(layer, top=10_000).top_directories) == 200
    assert len(facts(layer, top=199).top_directories) == 199
    assert len(facts(layer, top=201).top_files) == 201
    assert len(gather_facts(contents(layer)).top_files) == 20


@pytest.mark.parametrize(
    ("command", "below", "above", "rewritten"),
    [
        ("RUN x", b"same", b"same", {"rewritten by a later layer": 70}),
        ("RUN chown x", b"same", b"same", {"chown or chmod in a later layer": 70}),
        ("COPY x /", b"same", b"same", {"the same COPY again": 70}),
        ("RUN x", b"same", b"other", {}),
        ("RUN x", b"", b"", {}),  # too small to be hashed: nobody knows whether they are equal
        ("RUN x", b"same", b"", {}),
    ],
)
def test_content_that_a_later_layer_brings_again_is_counted_by_cause(
    command: str, below: bytes, above: bytes, rewritten: dict[str, int]
) -> None:
    lower, upper = L({"a": A(70, below)}, command="COPY all /"), L({"a": A(90, above)}, command=command)
    found = facts(lower, upper)
    assert found.rewritten == rewritten
    assert found.overwritten.unpacked_bytes == 70


def test_copies_of_one_content_are_claimed_but_for_one() -> None:
    found = facts(
        L({"a": A(70, b"same"), "b": A(70, b"same"), "c/tests/d": A(70, b"same"), "e": A(70, b"x")})
    )
    assert [(row.unpacked_bytes, row.paths) for row in found.duplicates] == [(70, ("a", "b", "c/tests/d"))]
    assert found.claims == {("duplicates",): 70, ("tests", "duplicates"): 70}


def test_packages_are_reported_with_all_and_with_visible_bytes_the_largest_first() -> None:
    lower = L(
        {**debs(b=("lib/b", "lib/b2"), a=("lib/a",), c=("lib/c",)), "lib/b": 10, "lib/a": 5, "lib/c": 5}
    )
    upper = L({"lib/b": 20, "lib/b2": 1, "lib/x": 400})
    found = facts(lower, upper)
    assert found.packages == (
        PackageRow("deb", "b", "1", "", 31, 21, 2),
        PackageRow("deb", "a", "1", "", 5, 5, 1),
        PackageRow("deb", "c", "1", "", 5, 5, 1),
    )
    assert found.owners == {"deb": 41, "unowned": 400}
    assert found.packages_left_out == 0
    assert {(row.path, row.owner) for row in found.top_files} == {
        ("lib/b", "b"),
        ("lib/b2", "b"),
        ("lib/a", "a"),
        ("lib/c", "c"),
        ("lib/x", "unowned"),
    }


def python(name: str, version: str, *paths: str, site: str = SITE) -> dict[str, A | int]:
    record = "".join(f"{path},,\n" for path in paths)
    return {f"{site}/{name}-{version}.dist-info/RECORD": A(database=record)}


CUDA_LIBRARIES = """libcublas.so.12 libcublasLt.so libcudnn.so.9 libcufft.so libcufile.so libcupti.so
    libcurand.so libcusolver.so libcusparse.so libcudart.so.12 libcudss.so libnccl.so.2 libnvrtc.so
    libnvJitLink.so libnvshmem_host.so libnvToolsExt.so libnvperf_host.so libtorch_cuda.so libtorch_nvshmem.so
    libc10_cuda.so libcaffe2_nvrtc.so"""
OTHER_LIBRARIES = "libtorch_cpu.so libtorch.so libc10.so libcurl.so mylibcublas.so libcuda.so libcairo.so"


def test_libraries_of_cuda_are_known_by_name_wherever_they_are() -> None:
    names = CUDA_LIBRARIES.split()
    layer = L({f"opt/{name}": 1 + at for at, name in enumerate([*names, *OTHER_LIBRARIES.split()])})
    wanted = {f"opt/{name}".encode(): 1 + at for at, name in enumerate(names)}
    found = facts(layer)
    assert tally(found.cuda) == (sum(wanted.values()), wanted)
    assert found.claims == {("cuda-in-cpu-image",): sum(wanted.values())}


CUDA_DISTRIBUTIONS = (
    "nvidia-cublas-cu12 NVIDIA_nccl_cu12 triton pytorch-triton pytorch_triton cuda-python cupy-cuda12x"
)
OTHER_DISTRIBUTIONS = "triton-rocm torch my-nvidia cupy nvidiax cudax"


@pytest.mark.parametrize("name", CUDA_DISTRIBUTIONS.split())
def test_distributions_of_cuda_are_known_by_name_and_named_with_place_and_version(name: str) -> None:
    file_name = name.replace("-", "_")
    found = facts(L({**python(file_name, "12.8", "x/y"), f"{SITE}/x/y": 30, f"{SITE}/z": 4}))
    assert tally(found.cuda) == (30, {f"{SITE}/{file_name} 12.8".encode(): 30})


@pytest.mark.parametrize("name", OTHER_DISTRIBUTIONS.split())
def test_other_distributions_are_not_taken_for_cudas(name: str) -> None:
    found = facts(L({**python(name.replace("-", "_"), "1", "x/y"), f"{SITE}/x/y": 30}))
    assert tally(found.cuda) == (0, {})


def test_a_debian_package_with_cudas_name_is_judged_by_its_files() -> None:
    found = facts(L({**debs(cuda_python=("x/y",)), "x/y": 30}))
    assert tally(found.cuda) == (0, {})


def test_a_conda_package_of_cuda_is_named_by_its_environment() -> None:
    meta = '{"name": "cuda-cudart", "version": "12", "files": ["lib/x"]}'
    found = facts(L({"opt/env/conda-meta/cuda.json": A(database=meta), "opt/env/lib/x": 30}))
    assert tally(found.cuda) == (30, {b"opt/env/cuda-cudart 12": 30})


def test_build_tools_are_named_by_package_and_unlisted_ones_by_directory() -> None:
    files = {
        **debs(gcc_12=("usr/bin/gcc", "usr/share/x"), rocm_core=("opt/rocm/llvm/bin/listed",)),
        "usr/bin/gcc": 1,
        "usr/share/x": 20,
        "opt/rocm/llvm/bin/listed": 300,  # by a package that is no build tool
        "opt/rocm/llvm/bin/clang": 4000,
        "usr/local/cuda/bin/nvcc": 50_000,
        "usr/local/cuda/lib64/x": 600_000,
    }
    found = facts(L(files))
    assert tally(found.build_only) == (
        54_021,
        {PackageName("gcc-12"): 21, b"opt/rocm/llvm/bin": 4000, b"usr/local/cuda/bin": 50_000},
    )
    assert found.claims == {("build-only",): 54_021}


def test_what_a_file_of_a_tool_is_besides_is_claimed_together() -> None:
    files = {**debs(gcc_12=("usr/include/x.h",)), "usr/include/x.h": A(70, b"same"), "y": A(70, b"same")}
    assert facts(L(files)).claims == {("headers-and-static", "build-only"): 70, ("duplicates",): 70}


def test_files_that_could_not_be_inspected_are_reported_with_the_reason() -> None:
    found = facts(L({"x": 1, "d/y": A(5, unread="cut off")}), L({"z": A(5, unread="too large")}))
    assert found.unread == ((b"d/y", "cut off"), (b"z", "too large"))


def test_links_to_nothing_are_counted_and_cost_no_bytes() -> None:
    found = facts(L({"a": 5, "b": A(link="a"), "c": A(link="none"), "d": A(link="gone")}))
    assert (found.dangling_links, found.visible_bytes, found.n_files) == (2, 5, 1)


def test_every_place_of_a_credential_is_reported_with_layer_and_escaped_name() -> None:
    token = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"
    found = facts(
        L({"x": 1, "d/y": A(5, secrets=("password",)), "gone": A(9, secrets=("key",))}),
        L({"y": 1, "e\x1b": A(7, secrets=("a", "b"))}, gone=("gone",)),
        env=("PATH=/bin", f"X\x1b={token}"),
        labels={"plain": "x", "l\x1b": token},
        history=[Step("RUN x", has_layer=True), Step(f"RUN {token}", has_layer=True)],
        documents=(b'{"x": 1}', f'{{"x": "{token}"}}'.encode()),
    )
    kinds = ("Hugging Face token",)
    assert found.secrets == (
        SecretPlace("ENV X\\x1b", kinds, 0),
        SecretPlace("label l\\x1b", kinds, 0),
        SecretPlace("history, step 1", kinds, 0),
        SecretPlace("an attestation (provenance or SBOM) of the image", kinds, 0),
        SecretPlace("d/y (layer 0)", ("password",), 5),
        SecretPlace("gone (layer 0, gone from later layers but still stored)", ("key",), 9),
        SecretPlace("e\\x1b (layer 1)", ("a", "b"), 7),
    )
    assert found.claims.get(("secrets",)) is None


def test_sums_of_owners_kinds_and_layers_are_equal_whatever_is_in_an_image() -> None:
    found: Facts = facts(
        L({**debs(x=("lib/x",)), "lib/x": LIBRARY, "k_gfx906.co": 5, "opt/rocm/lib/librocblas.so": 7}),
        L({"lib/x": 30, "app/y": A(9, debug=3), **{name.replace("\0", ""): 1 for name in HOSTILE[:9]}}),
    )
    assert sum(found.owners.values()) == sum(found.kinds.values()) == sum(found.layer_bytes)
    assert sum(row.unpacked_bytes for row in found.tree.rows) == sum(found.layer_bytes)
    assert sum(row.visible_bytes for row in found.tree.rows) == found.visible_bytes


def test_patterns_name_files_of_one_ending() -> None:
    found = facts(L({"a/x.py": 5, "a/y.py": 6, "a/z.so": 7}))
    assert tally(found.visible_by_kind[Kind.PYTHON]) == (11, {Pattern(b"a", b"py"): 11})
    assert tally(found.visible_by_kind[Kind.LIBRARY]) == (7, {Pattern(b"a", b"so"): 7})


def test_a_layer_whose_content_is_not_in_the_archive_counts_no_bytes() -> None:
    found = facts(L({"x": 5}), L({"x": 7}, is_absent=True, command=None), L({"y": 9}, command=None))
    assert (found.layer_bytes, found.visible_bytes) == ((5, 0, 9), 14)
