"""The values of a build: variants of the catalog, their resolved inputs, the images that come out."""

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from buildtool.core.errors import ConfigError
from probes.core.spelling import guess
from probes.core.units import parse_bytes

CARD = "{gpu_target}"  # in a requirement: a card's target
LABEL = "io.weir"  # what the names of our labels begin with
# zstd 3: on the CPU image 13 % smaller than level 1 for a second of the processor (docs/decisions/0104)
ZSTD_LEVEL = 3


def parse_size(text: str) -> int:
    """Bytes from "1.0 GB" (10^9) or "512 MiB" (2^20). Raises ConfigError for anything else."""
    try:
        if not text.rstrip().endswith("B"):
            raise ValueError("a size without a unit")
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            f"not a size: {text!r}", "write a number and a unit, such as `320 MB` or `1.5 GiB`"
        ) from error


def normalised(name: str) -> str:
    """The normalised name of a distribution or an extra (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class TorchBuild(Enum):
    """Which hardware a torch build has kernels for."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


@dataclass(frozen=True)
class Registry:
    """A base that an image registry holds."""

    ref: str

    def pinned(self, pin: str) -> "PinnedBase":
        """The base, pinned to the digest of its manifest."""
        return PinnedBase("registry", self.ref, pin)


@dataclass(frozen=True)
class Bootstrap:
    """A base made from Debian's packages: `mmdebstrap`'s essential variant, plus and minus packages.

    `cut` are paths from the root, with `fnmatch`'s wildcards, that stay out with all below them.
    """

    suite: str
    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    def pinned(self, pin: str) -> "PinnedBase":
        """The base, pinned to the SHA-256 of its tar."""
        return PinnedBase("bootstrap", self.suite, pin)


Base = Registry | Bootstrap


@dataclass(frozen=True)
class TorchSource:
    """One place torch can come from: the host's pip configuration, an index, or the base itself.

    `require` is empty where the base already holds torch; `{gpu_target}` in it is replaced by a card. Only a
    `fallback` may give a build other than the variant's first source. `base` and `python` replace the
    variant's own.
    """

    name: str
    build: TorchBuild
    require: tuple[str, ...] = ()
    index: str | None = None
    fallback: bool = False
    python: str | None = None
    base: tuple[Base, ...] = ()

    def for_card(self, gpu_target: str) -> "TorchSource":
        """The source with its requirements for a card; itself where it has none by card."""
        return replace(self, require=tuple(text.replace(CARD, gpu_target) for text in self.require))

    @property
    def is_by_card(self) -> bool:
        """True where every card has its own wheels."""
        return any(CARD in text for text in self.require)


@dataclass(frozen=True)
class Budget:
    """The most bytes an image may take; None where no limit is set."""

    unpacked_bytes: int | None = None
    stored_bytes: int | None = None


@dataclass(frozen=True)
class Variant:
    """One image, as variants.yaml asks for it."""

    name: str
    summary: str
    python: str
    base: tuple[Base, ...]
    torch: tuple[TorchSource, ...]
    wheels: tuple[str, ...] = ()
    system_packages: tuple[str, ...] = ()
    gpu_targets: tuple[str, ...] = ()
    prune: bool = False  # whether GPU code for other cards than gpu_targets is taken out
    labels: tuple[tuple[str, str], ...] = ()
    budget: Budget = Budget()
    dockerfile: Path | None = None  # of an image that BuildKit makes; the others are written layer by layer

    @property
    def first_target(self) -> str:
        """The card that represents all cards where wheels are made for one; empty without any."""
        return self.gpu_targets[0] if self.gpu_targets else ""

    @property
    def ref(self) -> str:
        """The tag that the built image gets."""
        return f"weir/{self.name}:latest"


def is_nvidia(gpu_target: str) -> bool:
    """Whether a target is an NVIDIA card's (`sm_90`), and not an AMD one's (`gfx906`)."""
    return gpu_target.startswith("sm_")


@dataclass(frozen=True)
class Catalog:
    """Everything in variants.yaml."""

    source_date_epoch: int
    default: tuple[str, ...]
    variants: tuple[Variant, ...]

    def for_cards(self, gpu_targets: tuple[str, ...], *, asked: bool = True) -> "Catalog":
        """The catalog with these cards instead of those that a variant names; itself for none.

        A variant gets those of its own maker. Where there are none of that maker, it keeps its own, unless
        these were `asked` for: then its inputs have no code for them, which the build says.
        """
        if not gpu_targets:
            return self

        def chosen(variant: Variant) -> Variant:
            if not variant.gpu_targets:
                return variant
            own = tuple(t for t in gpu_targets if is_nvidia(t) == is_nvidia(variant.first_target))
            return replace(variant, gpu_targets=own or (gpu_targets if asked else variant.gpu_targets))

        return replace(self, variants=tuple(map(chosen, self.variants)))

    def select(self, names: tuple[str, ...]) -> tuple[Variant, ...]:
        """The named variants in the file's order, the default ones for no names. Raises ConfigError."""
        known = {variant.name: variant for variant in self.variants}
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"no variant {name!r} in the catalog",
                    f"{guess(name, known)}there are: {', '.join(known)}",
                )
        selected = set(names or self.default)
        return tuple(variant for variant in self.variants if variant.name in selected)


@dataclass(frozen=True)
class Wheel:
    """One wheel file, by content."""

    filename: str
    sha256: str
    stored_bytes: int

    @property
    def distribution(self) -> str:
        """The distribution's normalised name (PEP 503)."""
        return normalised(self.filename.split("-")[0])

    @property
    def version(self) -> str:
        """The distribution's version, with its local label."""
        return self.filename.split("-")[1]


@dataclass(frozen=True)
class PinnedBase:
    """A resolved base: `pin` is a manifest digest or the SHA-256 of a root file system's tar."""

    origin: str  # "registry" or "bootstrap"
    name: str  # the reference, or the suite
    pin: str


@dataclass(frozen=True)
class Resolved:
    """A variant whose every input is known by content. What the lock file keeps."""

    variant: str
    spec_sha256: str
    torch_source: str
    torch_build: TorchBuild
    python: str
    base: PinnedBase
    wheels: tuple[Wheel, ...] = ()
    notes: tuple[str, ...] = field(default=())  # sources that were tried before and why they didn't serve
    gpu_target: str = ""  # the card that the wheels are for; empty where they are for every card

    @property
    def torch_version(self) -> str | None:
        """Version of the torch wheel; None when torch comes with the base."""
        return next((wheel.version for wheel in self.wheels if wheel.distribution == "torch"), None)


@dataclass(frozen=True)
class BuiltImage:
    """An image that a build made."""

    variant: str
    ref: str
    digest: str  # of the manifest
    image_id: str = ""  # by which the engine knows it; empty where no engine has it
