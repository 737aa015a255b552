"""Random layers with links on every level, merged as a model does it that keeps nothing but whole paths.

The bench `stacks` has 2,000 more, which umoci and the engine apply.
"""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from buildtool.image.errors import MalformedTar
from buildtool.image.layer import LayerIndex
from buildtool.image.merge import Finder, Merged, Tree, merge
from buildtool.image.tar import DIRECTORY, FILE, HARDLINK, SYMLINK

Path = tuple[str, ...]
NAMES = "abc"
STACKS = 400


@dataclass(frozen=True)
class Member:
    """What a layer says of one path: a kind of member, `gone` for a whiteout or `opaque`."""

    path: Path
    kind: int | str
    target: str = ""


class Circle(Exception):
    """Links that lead to one another."""


class Model:
    """Real path -> row, or None for a directory. Every rule searches all paths; nothing is remembered."""

    def __init__(self) -> None:
        self.there: dict[Path, int | None] = {(): None}
        self.members: list[Member] = []
        self.links: dict[int, int] = {}
        self.dangling: list[int] = []

    def real(self, path: list[str]) -> Path:
        """Where a path leads when all links in it are followed, inside the root; it need not exist."""
        real: Path = ()
        waiting, hops = path[::-1], 0
        while waiting:
            part = waiting.pop()
            row = self.there.get((*real, part))
            if part in ("", ".", ".."):
                real = real[:-1] if part == ".." else real
            elif row is not None and (target := self.target(row)):
                hops += 1
                if hops > 255:
                    raise Circle
                real = () if target.startswith("/") else real
                waiting += target.split("/")[::-1]
            else:
                real = (*real, part)
        return real

    def target(self, row: int) -> str:
        member = self.members[self.links.get(row, row)]
        return member.target if member.kind == SYMLINK else ""

    def remove(self, path: Path) -> None:
        for other in [other for other in self.there if other[: len(path)] == path]:
            del self.there[other]

    def below(self, path: Path, own: set[Path]) -> Path | None:
        """The directory of lower layers that a whiteout speaks of."""
        for n in range(1, len(path) + 1):
            if self.there.get(path[:n], "nothing") == "nothing":
                return None
            if self.there[path[:n]] is not None:
                if path[:n] in own:
                    return None
                path = self.real(list(path))
                break
        return path if self.there.get(path, "nothing") is None else None

    def apply(self, layer: list[Member]) -> None:
        own = {member.path for member in layer if member.kind == DIRECTORY}
        gone: dict[Path, int] = {}
        for member in layer:
            if member.kind == "opaque" and (place := self.below(member.path, own)) is not None:
                self.remove(place)
                self.there[place] = None
        for member in layer:
            if member.kind == "gone" and (place := self.below(member.path[:-1], own)) is not None:
                row = self.there.get((*place, member.path[-1]))
                if row is not None:
                    gone[member.path] = row
                self.remove((*place, member.path[-1]))
        for member in layer:
            if isinstance(member.kind, int):
                self.members.append(member)
                self.put(len(self.members) - 1, member, gone)

    def put(self, row: int, member: Member, gone: dict[Path, int]) -> None:
        above = self.real(list(member.path[:-1]))
        for n in range(1, len(above) + 1):
            if self.there.get(above[:n], "nothing") is not None:
                self.remove(above[:n])
                self.there[above[:n]] = None
        place = (*above, member.path[-1])
        if member.kind == DIRECTORY:
            if self.there.get(place, "nothing") is not None:
                self.there[place] = None
            return
        if member.kind == HARDLINK:
            self.link(row, member.target, gone)
        self.remove(place)
        self.there[place] = row

    def link(self, row: int, target: str, gone: dict[Path, int]) -> None:
        *above, name = target.split("/")
        place = (*self.real(above), name)
        if self.is_directory(above) and place in self.there:
            found = self.there[place]
        else:
            found = gone.get(tuple(target.split("/")))
        if found is None:
            self.dangling.append(row)
        else:
            self.links[row] = self.links.get(found, found)

    def is_directory(self, path: list[str]) -> bool:
        return self.there.get(self.real(path), "nothing") is None

    def shown(self) -> list[int]:
        rows = {row for row in self.there.values() if row is not None}
        content = {self.links.get(row, row) for row in rows if row not in self.dangling}
        return sorted(row for row in content if self.members[row].kind == FILE)


def random_layer(rng: random.Random) -> list[Member]:
    def path(longest: int) -> Path:
        return tuple(rng.choices(NAMES, k=rng.randint(1, longest)))

    def target(start: str) -> str:
        return start + "/".join(rng.choices(["a", "b", "c", ".."], [3, 3, 3, 1], k=rng.randint(1, 3)))

    layer = []
    for kind in rng.choices(
        [FILE, DIRECTORY, SYMLINK, HARDLINK, "gone", "opaque"], [4, 3, 3, 2, 2, 1], k=rng.randint(1, 7)
    ):
        if kind == SYMLINK:
            layer.append(Member(path(rng.choice([1, 2, 3])), kind, target(rng.choice(["", "/"]))))
        elif kind == HARDLINK:
            layer.append(Member(path(3), kind, "/".join(path(3))))
        else:
            layer.append(Member(path(3), kind))
    return layer


def indexed(layer: list[Member]) -> LayerIndex:
    """The layer as `index_layer` gives it."""
    index = LayerIndex()
    directories: dict[Path, bytes] = {}  # members of one directory share its name
    for member in layer:
        directory = directories.setdefault(member.path[:-1], "/".join(member.path[:-1]).encode())
        name = member.path[-1].encode()
        if member.kind == "gone":
            index.whiteouts.append((directory, name))
        elif member.kind == "opaque":
            index.opaque.append("/".join(member.path).encode())
        else:
            assert isinstance(member.kind, int)
            if member.target:
                index.links[len(index.names)] = member.target.encode()
            index.dirs.append(directory)
            index.names.append(name)
            index.kinds.append(member.kind)
    index.sizes = array("q", bytes(8 * len(index.names)))
    return index


def places(tree: Tree, above: Path = ()) -> Iterator[tuple[Path, int | None]]:
    yield above, None
    for name, what in tree.items():
        path = (*above, name.decode())
        if isinstance(what, dict):
            yield from places(what, path)
        else:
            yield path, what


def agrees(result: Merged, model: Model) -> None:
    assert dict(places(result.tree)) == model.there
    assert {row for row, seen in enumerate(result.visible) if seen} == {
        row for row in model.there.values() if row is not None
    }
    assert [row for row, seen in enumerate(result.content_visible) if seen] == model.shown()
    assert (result.links, list(result.dangling)) == (model.links, model.dangling)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_layers_with_links_are_merged_as_a_model_merges_them(seed: int) -> None:
    rng = random.Random(seed)
    circles = 0
    for _ in range(STACKS // 4):
        stack = [random_layer(rng) for _ in range(rng.randint(1, 4))]
        model = Model()
        try:
            for layer in stack:
                model.apply(layer)
        except Circle:
            circles += 1
            with pytest.raises(MalformedTar, match="circle"):
                merge([indexed(layer) for layer in stack])
            continue
        result = merge([indexed(layer) for layer in stack])
        agrees(result, model)
        finder = Finder(result)
        for path in (tuple(rng.choices([*NAMES, ".."], k=3)) for _ in range(10)):
            looked_up(finder, model, path)
    assert circles < STACKS // 8


def looked_up(finder: Finder, model: Model, path: Path) -> None:
    if path[-1] == "..":
        return
    try:
        above = model.real(list(path[:-1]))
    except Circle:
        return
    found = model.there.get((*above, path[-1])) if model.there.get(above, "nothing") is None else None
    assert finder.row("/".join(path).encode()) == found
