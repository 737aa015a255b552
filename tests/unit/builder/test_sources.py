"""Lists of sources are walked in order; what worked is kept, what didn't is reported."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from buildtool.builder.lockfile import Lock
from buildtool.builder.sources import Sources, bootstrap_of
from buildtool.errors import SourceUnreachable
from buildtool.model import Bootstrap, Registry, TorchBuild, TorchSource, Variant, Wheel

TORCH = Wheel("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "ab" * 32, 5)
VARIANT = Variant(
    name="cpu",
    summary="",
    dockerfile=Path("slim/Dockerfile"),
    python="3.11",
    base=(Registry("python:3.11-slim"), Bootstrap("bookworm", ("python3",))),
    torch=(
        TorchSource("first", TorchBuild.ROCM, ("torch",), index="x"),
        TorchSource(
            "second", TorchBuild.CPU, ("torch",), python="3.13", base=(Bootstrap("trixie", ("python3",)),)
        ),
    ),
    system_packages=("tini",),
)


@dataclass
class World:
    """Simulates index, registry and mirror: what answers, and what was asked."""

    torch_sources: set[str] = field(default_factory=lambda: {"first", "second"})
    registry: bool = True
    mirror: bool = True
    asked: list[str] = field(default_factory=list)

    def resolve(self, source: TorchSource, python: str, _requirements: Sequence[str]) -> tuple[Wheel, ...]:
        self.asked.append(f"torch {source.name} for {python}")
        if source.name not in self.torch_sources:
            raise SourceUnreachable(f"torch source {source.name}: no answer")
        return (TORCH,)

    def fetch(self, wheels: Sequence[Wheel], _python: str, *, index: str | None) -> None:
        self.asked.append(f"fetch {len(wheels)} with {index}")

    def registry_digest(self, ref: str) -> str:
        self.asked.append(f"registry {ref}")
        if not self.registry:
            raise SourceUnreachable(f"registry base {ref}: no such host")
        return "sha256:1"

    def bring(self, base: Bootstrap, _epoch: int) -> tuple[Path, str]:
        self.asked.append(f"bootstrap {base.suite} with {','.join(base.packages)}")
        if not self.mirror:
            raise SourceUnreachable("mmdebstrap can't")
        return Path("rootfs.tar"), "tar-digest"


def sources(world: World, tmp_path: Path) -> Sources:
    lock = Lock.load(tmp_path / "lock.json")
    return Sources(world, world, world, lock, 7, lambda _line: None)  # type: ignore[arg-type]


def test_the_first_source_that_answers_is_used_and_pinned(tmp_path: Path) -> None:
    found = sources(World(), tmp_path).resolve(VARIANT)
    assert (found.torch_source, found.torch_build, found.base.origin) == (
        "first",
        TorchBuild.ROCM,
        "registry",
    )
    assert (found.base.pin, found.notes) == ("sha256:1", ())


def test_a_silent_source_is_skipped_and_reported(tmp_path: Path) -> None:
    found = sources(World(torch_sources={"second"}), tmp_path).resolve(VARIANT)
    assert (found.torch_source, found.python) == ("second", "3.13")
    assert found.notes == ("torch source first: no answer",)


def test_a_source_may_bring_its_own_base(tmp_path: Path) -> None:
    found = sources(World(torch_sources={"second"}), tmp_path).resolve(VARIANT)
    assert (found.base.origin, found.base.name) == ("bootstrap", "trixie")
    recipe = bootstrap_of(VARIANT, found)
    assert recipe
    assert recipe.packages == ("python3", "tini")


def test_a_dead_registry_leads_to_the_bootstrapped_base(tmp_path: Path) -> None:
    found = sources(World(registry=False), tmp_path).resolve(VARIANT)
    assert (found.base.name, found.base.pin) == ("bookworm", "tar-digest")
    assert found.notes == ("registry base python:3.11-slim: no such host",)


def test_when_nothing_answers_every_reason_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreachable) as caught:
        sources(World(torch_sources=set()), tmp_path).resolve(VARIANT)
    assert "first: no answer" in caught.value.message
    assert "second: no answer" in caught.value.message
    assert not (tmp_path / "lock.json").exists()


def test_a_locked_variant_asks_no_index_again(tmp_path: Path) -> None:
    first = sources(World(), tmp_path).resolve(VARIANT)
    world = World(torch_sources=set(), registry=False)
    assert sources(world, tmp_path).resolve(VARIANT) == first
    assert world.asked == ["fetch 1 with x"]


def test_a_changed_spec_is_resolved_again(tmp_path: Path) -> None:
    sources(World(), tmp_path).resolve(VARIANT)
    world = World()
    sources(world, tmp_path).resolve(replace(VARIANT, python="3.12"))
    assert "torch first for 3.12" in world.asked


def test_a_moved_mirror_is_noticed_and_locked(tmp_path: Path) -> None:
    first = sources(World(registry=False), tmp_path).resolve(VARIANT)

    class Moved(World):
        def bring(self, base: Bootstrap, epoch: int) -> tuple[Path, str]:
            return super().bring(base, epoch)[0], "newer"

    again = sources(Moved(), tmp_path).resolve(VARIANT)
    assert (first.base.pin, again.base.pin) == ("tar-digest", "newer")
    assert Lock.load(tmp_path / "lock.json").entries["cpu"].base.pin == "newer"
