"""Bytes that findings claim, budgets that are just met, bases, largest places: by hand."""

from collections import Counter

import pytest
from image_maker import chunks, file, tar

from buildtool.audit.claims import ClaimCounter, is_foreign, saved_bytes, targets_if_valid
from buildtool.audit.counts import Base, find_base
from buildtool.audit.kinds import is_tool_directory
from buildtool.audit.report import Judgement, Verdict, judge
from buildtool.audit.treemap import largest_directories, largest_files
from buildtool.core.model import Budget
from buildtool.image.documents import ImageConfig, Platform, Step
from buildtool.image.layer import LayerIndex, index_layer
from buildtool.image.merge import merge
from buildtool.image.tar import TarReader


@pytest.mark.parametrize(
    ("key", "wanted", "foreign"),
    [
        ("gfx906", ["gfx1100"], True),
        ("gfx1100", ["gfx1100"], False),
        ("gfx906+gfx1100", ["gfx1100"], False),
        ("gfx906+gfx908", ["gfx1100"], True),
        ("sm_90", ["gfx1100"], False),
        ("gfx906+sm_90", ["gfx1100"], False),
        ("gfx906", [], False),
    ],
)
def test_code_is_foreign_only_where_no_wanted_target_can_use_any_of_it(
    key: str, wanted: list[str], foreign: bool
) -> None:
    targets = targets_if_valid(wanted)
    assert is_foreign(key, targets) is foreign
    counter = ClaimCounter(targets)
    assert counter.cut_from({key: 7, "gfx1100": 1}, alignment=0) == ({key} if foreign else set())


def test_code_is_not_claimed_where_a_prune_would_leave_the_library_as_it_is() -> None:
    """jax's `_prng.so` was named in every audit, with the advice of a prune that changes nothing."""
    counter = ClaimCounter(targets_if_valid(["gfx1100"]))
    held = {"gfx906": 60_000, "gfx90a": 7_584, "gfx1100": 9_000, "sm_90": 9}
    assert counter.cut_from(held, alignment=1 << 16) == {"gfx906", "gfx90a"}
    assert counter.cut_from(held, alignment=1 << 21) == set()  # it can only get shorter by 2 MiB
    assert counter.cut_from(held | {"gfx90a": 7_583}, alignment=1 << 16) == set()  # the headers take the rest
    assert counter.cut_from({"gfx906": 60_000}, alignment=4096) == set()  # it never served the card
    assert counter.cut_from({"gfx906": 60_000, "sm_90": 9}, alignment=4096) == set()
    assert counter.cut_from({"gfx906": 60_000, "spirv": 9}, alignment=4096) == {"gfx906"}


def test_a_label_that_is_no_target_wants_nothing() -> None:
    assert targets_if_valid(["gfx906", "all of them"]) == []
    assert [str(one) for one in targets_if_valid(["gfx906"])] == ["gfx906"]


def test_bytes_are_claimed_only_where_a_finding_wants_them() -> None:
    counter = ClaimCounter([])
    counter.add(5, [])
    counter.add(0, ["tests"])
    assert counter.claims == {}
    for n_bytes in (5, 6):
        counter.add(n_bytes, ["tests", "caches"])
    assert counter.claims == {("tests", "caches"): 11}


def test_bytes_that_several_findings_want_are_saved_once() -> None:
    claims = Counter({("tests", "caches"): 10, ("caches",): 5, ("bytecode",): 3})
    assert saved_bytes(claims, {"tests", "caches"}) == 15
    assert saved_bytes(claims, {"tests"}) == 10
    assert saved_bytes(claims, set()) == 0


@pytest.mark.parametrize(
    ("directory", "tool"),
    [
        (b"opt/rocm/llvm", True),
        (b"opt/rocm-6.4/lib/llvm/bin", True),
        (b"usr/local/cuda-12/nvvm", True),
        (b"opt/rocm/llvmish", False),
        (b"home/opt/rocm/llvm", False),
        (b"usr/local/cuda/lib64", False),
    ],
)
def test_compilers_are_known_by_their_whole_directory(directory: bytes, tool: bool) -> None:
    assert is_tool_directory(directory) is tool


def test_a_limit_is_reported_with_what_was_compared_with_it() -> None:
    found = judge(Budget(10, 20), unpacked_bytes=11, stored_bytes=19)
    assert found.unpacked == Judgement(10, 11, Verdict.FAIL)
    assert found.stored == Judgement(20, 19, Verdict.PASS)
    unknown = judge(Budget(None, 20), unpacked_bytes=11, stored_bytes=None)
    assert unknown.unpacked == Judgement(None, 11, Verdict.NONE)
    assert unknown.stored == Judgement(20, None, Verdict.UNKNOWN)
    assert [verdict.value for verdict in Verdict] == ["pass", "fail", "none", "unknown"]


@pytest.mark.parametrize(
    ("unpacked", "stored", "verdict"),
    [
        (10, 20, Verdict.PASS),
        (11, 20, Verdict.FAIL),
        (10, 21, Verdict.FAIL),
        (10, None, Verdict.UNKNOWN),
        (11, None, Verdict.FAIL),
    ],
)
def test_a_budget_that_is_just_met_passes_and_the_graver_verdict_counts(
    unpacked: int, stored: int | None, verdict: Verdict
) -> None:
    assert judge(Budget(10, 20), unpacked_bytes=unpacked, stored_bytes=stored).verdict is verdict


def test_half_a_budget_judges_half() -> None:
    result = judge(Budget(10, None), unpacked_bytes=10, stored_bytes=7)
    assert (result.verdict, result.stored.verdict, result.stored.actual_bytes) == (
        Verdict.PASS,
        Verdict.NONE,
        7,
    )
    assert judge(Budget(None, None), unpacked_bytes=1, stored_bytes=None).verdict is Verdict.NONE


def layer(*members: bytes) -> LayerIndex:
    return index_layer(TarReader(chunks(tar(*members)), place="t"), place="t")


def test_the_largest_visible_files_are_reported_with_their_layer() -> None:
    merged = merge(
        [layer(file("a", b"1" * 9), file("b", b"1" * 5)), layer(file("a", b"22"), file("c", b"333"))]
    )
    found = largest_files(merged, 2, lambda row: f"row {row}")
    assert [(one.path, one.unpacked_bytes, one.layer, one.owner) for one in found] == [
        ("b", 5, 0, "row 1"),
        ("c", 3, 1, "row 3"),
    ]


def test_a_directory_is_left_out_where_one_child_fills_nine_tenths_of_it() -> None:
    filled = {b"a": 10, b"a/b": 90, b"c": 11, b"c/d": 89, b"c/e": 1}
    assert largest_directories(filled, 9) == ((b"c", 101), (b"a/b", 90), (b"c/d", 89), (b"c/e", 1))
    assert largest_directories(filled, 2) == ((b"c", 101), (b"a/b", 90))
    assert largest_directories({}, 2) == ()


RUN, CMD, ROOT = "RUN make", 'CMD ["sh"]', "ADD rootfs.tar /"
BY_CMD, BY_ROOT = "the CMD that ends it in the history", "its first step, which adds a root file system"


def config(*steps: tuple[str, bool], layers: int | None = None, **labels: str) -> ImageConfig:
    history = tuple(Step(command, has_layer) for command, has_layer in steps)
    n_layers = sum(step.has_layer for step in history) if layers is None else layers
    return ImageConfig(Platform("linux", "amd64"), ("sha256:0",) * n_layers, None, labels, (), "", history)


@pytest.mark.parametrize(
    ("image", "base"),
    [
        (config((RUN, True), (CMD, False), (RUN, True)), Base(1, BY_CMD)),
        (config((RUN, True), (CMD, False), (RUN, True), (CMD, False), (RUN, True)), Base(2, BY_CMD)),
        (config((RUN, True), (RUN, True), (CMD, False)), Base()),
        (config((CMD, False), (RUN, True)), Base()),
        (config((ROOT, True), (RUN, True)), Base(1, BY_ROOT)),
        (config(("ADD x.tar /", True), (RUN, True)), Base(1, BY_ROOT)),
        (config(("ADD .tar /", True), (RUN, True)), Base()),
        (config((ROOT, True)), Base()),
        (config((RUN, True), (ROOT, True)), Base()),
        (config((CMD, False), ("# debian.sh --arch amd64", True), (RUN, True)), Base(1, BY_ROOT)),
        (config((ROOT, True), (RUN, True), layers=3), Base()),
    ],
)
def test_a_base_ends_at_the_last_command_with_layers_on_both_sides(image: ImageConfig, base: Base) -> None:
    assert find_base(image) == base


@pytest.mark.parametrize(
    ("command", "adds"),
    [
        ("ADD rootfs /", True),
        ("ADD layer.tar.xz /   # buildkit", True),
        ("ADD layer.tar /srv", False),
        ("ADD layer.zip /", False),
        ("ADD .tar /", False),
        ("ADD file:0a1b in / ", True),
        ("/bin/sh -c #(nop)  ADD file:0a1b in / ", True),
        ("/bin/sh -c #(nop) ADD file:0a1b in /srv ", False),
        ("ADD dir:0a1b in / ", False),
        ("ADD rootfs.tar in / ", False),
        ("COPY rootfs.tar /", False),
        ("RUN x; ADD rootfs.tar /", False),
        ("# debian.sh --arch amd64 out/", True),
        ("# debian.shell", False),
    ],
)
def test_a_base_of_one_layer_is_recognised_by_what_fills_the_root(command: str, adds: bool) -> None:
    assert find_base(config((command, True), (RUN, True))) == (Base(1, BY_ROOT) if adds else Base())


@pytest.mark.parametrize(
    "command", ["CMD [x]", "/bin/sh -c #(nop)  CMD [x]", "/bin/sh -c #(nop) CMD x", "CMD"]
)
def test_a_command_ends_a_base_in_the_form_of_every_builder(command: str) -> None:
    assert find_base(config((RUN, True), (command, False), (RUN, True))) == Base(1, BY_CMD)
    assert find_base(config((RUN, True), (f"RUN {command}", False), (RUN, True))) == Base()


def test_a_word_that_begins_as_cmd_ends_no_base() -> None:
    assert find_base(config((RUN, True), ("CMDS", False), (RUN, True))) == Base()


def test_a_label_names_a_base_that_the_history_mentions() -> None:
    label = {"org.opencontainers.image.base.name": "debian:12\n"}
    assert find_base(config((ROOT, True), (RUN, True), **label)) == Base(1, BY_ROOT, "debian:12\\x0a")
    by_cmd = config((RUN, True), (CMD, False), (RUN, True), **label)
    assert find_base(by_cmd) == Base(1, BY_CMD, "debian:12\\x0a")
    assert find_base(config((RUN, True), (RUN, True), **label)) == Base()
    assert find_base(config(**label)) == Base()


def test_the_largest_files_of_many_layers_come_in_order_and_hidden_or_empty_ones_never() -> None:
    merged = merge(
        [
            layer(file("a", b"1" * 5), file("b", b"1" * 7), file("gone", b"1" * 99), file("empty")),
            layer(file("c", b"1" * 6), file("d", b"1" * 8), file(".wh.gone")),
        ]
    )
    found = largest_files(merged, 9, str)
    assert [(one.path, one.unpacked_bytes, one.layer) for one in found] == [
        ("d", 8, 1),
        ("b", 7, 0),
        ("c", 6, 1),
        ("a", 5, 0),
    ]
    assert [one.path for one in largest_files(merged, 3, str)] == ["d", "b", "c"]


def test_largest_directories_count_what_is_below_and_keep_to_the_number_asked_for() -> None:
    own = {b"a/b/c": 30, b"a/b/d": 40, b"a/e": 50, b"f": 100, b"": 7}
    assert largest_directories(own, 9) == (
        (b"a", 120),
        (b"f", 100),
        (b"a/b", 70),
        (b"a/e", 50),
        (b"a/b/d", 40),
        (b"a/b/c", 30),
    )
    assert largest_directories(own, 3) == ((b"a", 120), (b"f", 100), (b"a/b", 70))
    assert largest_directories(own, 0) == ()
