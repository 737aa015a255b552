"""Copies of one content: which rows are copies, what they waste, what made them. Layers with notes."""

from dataclasses import replace

import pytest
from image_maker import chunks, file, hardlink, tar

from buildtool.audit.counts import (
    BROKEN_LINK,
    CHOWN,
    LATER_RUN,
    ONE_LAYER,
    REWRITTEN,
    ROCM_TWICE,
    SECOND_COPY,
    TWO_COPIES,
    Copies,
    Duplicate,
    LayerCommand,
    cause_of_rewriting,
    find_copies,
)
from buildtool.image.documents import ImageConfig, Platform
from buildtool.image.layer import HASHED_BYTES, LayerIndex, index_layer
from buildtool.image.merge import Merged, merge
from buildtool.image.reader import Attestations, ImageContents, Layer
from buildtool.image.tar import TarReader

COPY, RUN, CHOWNING = (
    LayerCommand.of("COPY a /a"),
    LayerCommand.of("RUN cp a b"),
    LayerCommand.of("RUN chown app /a"),
)
KIB = 1024


def merged(*layers: tuple[bytes, ...]) -> Merged:
    return merge([index_layer(TarReader(chunks(tar(*members)), place="t"), place="t") for members in layers])


def large(name: str, letter: bytes = b"x", more: int = 0) -> bytes:
    return file(name, letter * (HASHED_BYTES + more))


def test_copies_are_grouped_by_content_and_ordered_by_what_they_waste() -> None:
    result = merged(
        (
            large("small-1", b"s"),
            large("small-2", b"s"),
            large("alone", b"z"),
            file("tiny-1"),
            file("tiny-2"),
        ),
        (large("b/3", b"b", KIB), large("b/1", b"b", KIB), large("b/2", b"b", KIB), large("a", b"a", KIB)),
        (large("c", b"a", KIB), large("even-2", b"e"), large("even-1", b"e")),
    )
    assert find_copies(result, [RUN, COPY, COPY]) == Copies(
        (
            Duplicate(65 * KIB, 130 * KIB, ("b/1", "b/2", "b/3"), ONE_LAYER),
            Duplicate(65 * KIB, 65 * KIB, ("a", "c"), TWO_COPIES),
            Duplicate(64 * KIB, 64 * KIB, ("even-1", "even-2"), ONE_LAYER),
            Duplicate(64 * KIB, 64 * KIB, ("small-1", "small-2"), ONE_LAYER),
        ),
        frozenset({1, 6, 7, 9, 11}),
    )


def test_all_copies_but_one_are_waste_and_are_named_for_people() -> None:
    result = merged((large("a\x1b"), large("b"), large("c")))
    assert find_copies(result, [RUN]).duplicates == (
        Duplicate(64 * KIB, 128 * KIB, ("a\\x1b", "b", "c"), ONE_LAYER),
    )


def test_hidden_files_and_hard_links_are_no_copies() -> None:
    below = (large("a"), hardlink("b", "a"), file("shown", b"x"))
    result = merged(below, (file("other", b"x"), large("c")), (file(".wh.c"),))
    assert find_copies(result, [RUN] * 3) == Copies((), frozenset())


@pytest.mark.parametrize(
    ("paths", "makers", "cause"),
    [
        (("opt/rocm-6/x.so", "v/torch/lib/x.so"), (COPY, COPY), ROCM_TWICE),
        (("opt/rocm/x.so", "torch/lib/x.so"), (COPY, COPY), TWO_COPIES),
        (("opt/rocm/x.so", "opt/rocm/y.so"), (COPY, COPY), TWO_COPIES),
        (("v/torch/lib/x.so", "w/torch/lib/x.so"), (RUN, COPY), LATER_RUN),
        (("usr/opt/rocm/x.so", "v/torch/lib/x.so"), (COPY, RUN), LATER_RUN),
        (("a", "b"), (RUN, RUN), LATER_RUN),
    ],
)
def test_copies_in_two_layers_are_named_by_paths_and_commands(
    paths: tuple[str, str], makers: tuple[LayerCommand, LayerCommand], cause: str
) -> None:
    copies = find_copies(merged((large(paths[0]),), (large(paths[1]),)), makers)
    assert [row.cause for row in copies.duplicates] == [cause]


@pytest.mark.parametrize(
    ("command", "maker"),
    [
        ("RUN chown app /a", LayerCommand(True, False)),
        ("RUN find / -exec chmod 644 {} +", LayerCommand(True, False)),
        ("RUN chgrp app /a", LayerCommand(True, False)),
        ("COPY --chown=app --chmod=644 a /a", LayerCommand(False, True)),
        ("ADD a.tar /", LayerCommand(False, True)),
        ("/bin/sh -c #(nop) COPY file:0 in /", LayerCommand(False, True)),
        ("RUN cp a COPYING", LayerCommand(False, False)),
        ("RUN schown", LayerCommand(False, False)),
        ("", LayerCommand(False, False)),
    ],
)
def test_what_a_layer_does_is_known_from_whole_words_of_its_command(
    command: str, maker: LayerCommand
) -> None:
    assert LayerCommand.of(command) == maker


def test_content_that_came_back_is_named_by_the_first_reason_that_fits() -> None:
    result = merged((large("a"),), (large("a"), hardlink("l", "a"), large("b")))
    rows = {result.path(row): row for row in range(1, 4)}
    linked, alone = rows[b"a"], rows[b"b"]
    assert result.linked == {linked}
    causes = {(linked, RUN): BROKEN_LINK, (linked, CHOWNING): CHOWN, (alone, COPY): SECOND_COPY}
    causes[alone, RUN] = REWRITTEN
    assert {key: cause_of_rewriting(result, key[1], key[0]) for key in causes} == causes


def test_rows_are_distinguished_across_layers() -> None:
    result = merged((file("a", b"1"), large("b")), (), (large("d/c", b"c"), hardlink("e", "b")))
    assert list(result.starts) == [0, 2, 2]
    assert [result.layer_of(row) for row in range(4)] == [0, 0, 2, 2]
    assert [result.path(row) for row in range(4)] == [b"a", b"b", b"d/c", b"e"]
    assert [result.size(row) for row in range(4)] == [1, HASHED_BYTES, HASHED_BYTES, 0]
    assert [result.digest(row) is not None for row in range(4)] == [False, True, True, False]
    assert (result.links, result.dangling, list(result.content_visible)) == ({3: 1}, (), [1, 1, 1, 0])


def with_notes(*notes: tuple[str, ...] | None) -> ImageContents:
    layers = tuple(
        Layer(None, "d", None, 0, None, None if row is None else LayerIndex(notes=row)) for row in notes
    )
    config = ImageConfig(Platform("linux", "amd64"), (), None, {}, (), "", ())
    return ImageContents("r", None, None, "c", config, layers, Attestations(), ())


def test_an_oddity_of_many_layers_is_one_note_with_the_first_five() -> None:
    odd, end = ("odd",), ("odd", "end")
    assert with_notes(odd).layer_notes() == ("layer 0: odd",)
    assert with_notes(None, (), odd, end).layer_notes() == ("layers 2, 3: odd", "layer 3: end")
    assert with_notes(*[odd] * 5).layer_notes() == ("layers 0, 1, 2, 3, 4: odd",)
    assert with_notes(*[odd] * 6).layer_notes() == ("layers 0, 1, 2, 3, 4 and more: odd",)


def test_bytes_of_a_layer_are_those_of_its_files() -> None:
    layer = with_notes(()).layers[0]
    assert layer.index is not None
    layer.index.sizes.extend([3, 4])
    assert layer.unpacked_bytes == 7
    assert replace(layer, index=None).unpacked_bytes == 0
