"""Lists of sources are walked in order; what worked is kept, what didn't is reported."""

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from buildtool.build.lockfile import Lock
from buildtool.build.sources import Sources, bootstrap_of, packages_in
from buildtool.core.errors import BuildFailed, DataError, SourceUnreachable
from buildtool.core.model import Bootstrap, Registry, TorchBuild, TorchSource, Variant, Wheel

PACKAGES_IN = packages_in  # which the tests of sources replace
TORCH = Wheel("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "ab" * 32, 5)
VARIANT = Variant(
    name="cpu",
    summary="",
    python="3.11",
    base=(Registry("python:3.11-slim"), Bootstrap("bookworm", ("python3",))),
    torch=(
        TorchSource("first", TorchBuild.ROCM, ("torch",), index="x"),
        TorchSource(
            "second", TorchBuild.CPU, ("torch",), python="3.13", base=(Bootstrap("trixie", ("python3",)),)
        ),
    ),
    system_packages=("tini",),
    dockerfile=Path("mine/Dockerfile"),  # which installs them on a registry's base
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
            raise SourceUnreachable("no such host")
        return "sha256:1"

    def bring(
        self, base: Bootstrap, _epoch: int, *, locked_as: str | None = None, update: bool = False
    ) -> tuple[Path, str]:
        self.asked.append(f"bootstrap {base.suite} with {','.join(base.packages)}{' update' * update}")
        if not self.mirror:
            raise SourceUnreachable("mmdebstrap can't")
        return Path("rootfs.tar"), "tar-digest"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages in every root file system."""
    names = {"python3", "tini"}
    monkeypatch.setattr("buildtool.build.sources.packages_in", lambda _tar: names)
    return names


def sources(world: World, tmp_path: Path) -> Sources:
    lock = Lock.load(tmp_path / "lock.json")
    return Sources(world.registry_digest, world, world, lock, 7, lambda _line: None)  # type: ignore[arg-type]


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


def test_system_packages_without_a_dockerfile_lead_to_the_bootstrapped_base(
    tmp_path: Path,
) -> None:
    world = World()
    found = sources(world, tmp_path).resolve(replace(VARIANT, dockerfile=None))
    assert found.base.name == "bookworm"
    assert not [line for line in world.asked if line.startswith("registry")]
    assert "`system_packages`" in found.notes[0]
    plain = replace(VARIANT, dockerfile=None, system_packages=())
    assert sources(World(), tmp_path).resolve(plain).base.origin == "registry"


def test_a_package_that_the_root_file_system_lacks_is_an_error(installed: set[str], tmp_path: Path) -> None:
    """apt takes `libc.bin`, which no package is called, for a pattern, and installs libc-bin."""
    installed.remove("tini")
    with pytest.raises(SourceUnreachable, match="Debian bookworm has no package tini"):
        sources(World(registry=False), tmp_path).resolve(VARIANT)


def test_the_packages_of_a_root_file_system_are_read_from_its_own_list(tmp_path: Path) -> None:
    status = "Package: libc-bin\nStatus: install ok installed\n\nPackage: mawk\nProvides: awk, nawk (= 1)\n"
    (tmp_path / "status").write_text(status)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "status", "./var/lib/dpkg/status")
    assert PACKAGES_IN(tmp_path / "t.tar") == {"libc-bin", "mawk", "awk", "nawk"}


@pytest.mark.parametrize("content", [b"", b"damaged" * 999, bytes(10240)])
def test_a_root_file_system_without_a_list_of_packages_is_no_traceback(
    content: bytes, tmp_path: Path
) -> None:
    """`cut: [var/lib/dpkg]`, or a cached file that is damaged."""
    (tmp_path / "rootfs.tar").write_bytes(content)
    with pytest.raises(DataError, match="var/lib/dpkg/status") as refused:
        PACKAGES_IN(tmp_path / "rootfs.tar")
    assert "`cut`" in refused.value.hint
    assert "rm --" in refused.value.hint


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
        def bring(self, base: Bootstrap, epoch: int, *, locked_as: str | None = None) -> tuple[Path, str]:
            assert locked_as == "tar-digest"
            return super().bring(base, epoch)[0], "newer"

    again = sources(Moved(), tmp_path).resolve(VARIANT)
    assert (first.base.pin, again.base.pin) == ("tar-digest", "newer")
    assert Lock.load(tmp_path / "lock.json").entries["cpu"].base.pin == "newer"


def test_a_base_that_no_mirror_serves_is_not_blamed_on_a_source_of_torch(tmp_path: Path) -> None:
    world = World(registry=False, mirror=False)
    same_base = replace(VARIANT, torch=(VARIANT.torch[0], replace(VARIANT.torch[1], base=())))
    with pytest.raises(SourceUnreachable) as caught:
        sources(world, tmp_path).resolve(same_base)
    assert caught.value.message == (
        "cpu: torch was found, but no base for it:\n  - registry base python:3.11-slim: no such host\n"
        "  - mmdebstrap can't"
    )
    assert "apt-get update" in caught.value.hint
    assert "pip" not in caught.value.hint
    assert len([line for line in world.asked if line.startswith("torch")]) == 1, "the same bases fail again"


def test_an_update_of_the_lock_takes_no_root_file_system_from_the_cache(tmp_path: Path) -> None:
    """`--update-lock` pinned the cached one again: no newer packages, and whatever lay there."""
    world = World(registry=False)
    sources(world, tmp_path).resolve(VARIANT)
    sources(world, tmp_path).resolve(VARIANT, update_lock=True)
    made = [line for line in world.asked if line.startswith("bootstrap")]
    assert made == ["bootstrap bookworm with python3,tini", "bootstrap bookworm with python3,tini update"]


def test_another_base_of_a_later_source_of_torch_is_still_tried(tmp_path: Path) -> None:
    class OnlyTrixie(World):
        def bring(self, base: Bootstrap, epoch: int, **_more: object) -> tuple[Path, str]:
            self.mirror = base.suite == "trixie"
            return super().bring(base, epoch)

    found = sources(OnlyTrixie(registry=False), tmp_path).resolve(VARIANT)
    assert (found.torch_source, found.base.name) == ("second", "trixie")


def test_a_mmdebstrap_that_dies_ends_the_search_with_its_own_words(tmp_path: Path) -> None:
    class Dying(World):
        def bring(self, _base: Bootstrap, _epoch: int, **_more: object) -> tuple[Path, str]:
            raise BuildFailed("mmdebstrap was killed by signal 9")

    world = Dying(registry=False)
    with pytest.raises(BuildFailed, match="killed by signal 9"):
        sources(world, tmp_path).resolve(VARIANT)
    assert len([line for line in world.asked if line.startswith("torch")]) == 1
