"""Which torch runs on which card: the types of data/compatibility.yaml, and look-ups in it. Pure."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from buildtool.core.errors import DataError
from buildtool.core.yaml_text import Limits, parse
from probes.core.codec import Json, Misfit, decode

Rank = Literal["official", "distribution", "community", "override", "none"]
Runs = Literal["yes", "partly", "no"]
RANKS: tuple[Rank, ...] = ("official", "distribution", "community", "override", "none")
STALE_DAYS = 365
NOT_GIVEN = ""
FILE = Path(__file__).parent / "data" / "compatibility.yaml"
LIMITS = Limits(depth=8, nodes=50_000)


@dataclass(frozen=True)
class Source:
    """Where a statement comes from. `date` is the statement's or, with `read`, that of our reading."""

    what: str
    where: str
    date: str
    read: bool = False

    @property
    def day(self) -> datetime.date:
        """Return the source's date."""
        return datetime.date.fromisoformat(self.date)

    def is_stale(self, today: datetime.date) -> bool:
        """Return whether the source is older than a year."""
        return (today - self.day).days > STALE_DAYS


@dataclass(frozen=True)
class Cell:
    """A value, or why it is unknown; and the name of its source."""

    source: str
    value: str = NOT_GIVEN
    unknown: str = NOT_GIVEN

    def __str__(self) -> str:
        return self.value or f"unknown ({self.unknown})"


@dataclass(frozen=True)
class Build:
    """A published torch. Targets are words; `matrix` are those that its matrix library serves."""

    id: str
    torch: Cell
    runtime: Cell
    python: Cell
    index: Cell
    code: Cell
    matrix: Cell
    driver: Cell

    def torch_for(self, target: str) -> str:
        """The torch of this build for a target, `2.13.0+rocm7.2`."""
        return str(self.torch).replace("{target}", target)

    def requirement(self, target: str) -> str:
        """The requirement to give to pip for a target."""
        version = str(self.torch)
        return f"torch=={version}" if re.match(r"\d", version) else f"torch[device-{target}]"


@dataclass(frozen=True)
class Answer:
    """One route for one target. The cells are the build's where it names one."""

    rank: Rank
    platforms: tuple[Literal["linux", "wsl", "windows"], ...]
    runs: Runs
    says: str
    source: str = NOT_GIVEN
    build: str = NOT_GIVEN
    override: str | None = None  # HSA_OVERRIDE_GFX_VERSION; empty where there is none that could help
    variant: str = NOT_GIVEN  # a torch source in images/variants.yaml that is this route
    runtime: Cell | None = None
    torch: Cell | None = None
    python: Cell | None = None
    get: Cell | None = None


@dataclass(frozen=True)
class Target:
    """A GPU target with its answers, the best first."""

    id: str
    family: str
    source: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class CardName:
    """A product by its PCI ids."""

    pci: str
    target: str
    product: str
    source: str


@dataclass(frozen=True)
class Compatibility:
    """The whole file."""

    schema_version: int
    sources: Mapping[str, Source]
    builds: tuple[Build, ...]
    targets: tuple[Target, ...]
    cards: tuple[CardName, ...]

    def build(self, name: str) -> Build | None:
        """A build by its id."""
        return next((build for build in self.builds if build.id == name), None)

    def target(self, name: str) -> Target | None:
        """A target by its id; features such as `:xnack-` are ignored."""
        return next((target for target in self.targets if target.id == name.partition(":")[0]), None)

    def card(self, product: str) -> CardName | None:
        """A card by its PCI vendor:device."""
        return next((card for card in self.cards if card.pci == product.lower()), None)


def read(data: Json) -> Compatibility:
    """The file's content as values. Raises DataError naming the place of what doesn't fit."""
    try:
        return decode(Compatibility, data, "compatibility")
    except Misfit as error:
        raise DataError(str(error), "the file belongs to this program: install it again") from error


def cells(answer: Answer, data: Compatibility, target: str) -> dict[str, Cell]:
    """Runtime, torch, python and get of an answer, each with its source; its own come before the build's."""
    build = data.build(answer.build)
    of_build: dict[str, Cell] = {}
    if build:
        getting = f"pip install '{build.requirement(target)}' --index-url {build.index}"
        of_build = {
            "runtime": build.runtime,
            "torch": Cell(build.torch.source, build.torch_for(target)),
            "python": build.python,
            "get": Cell(build.index.source, getting),
        }
    own = {"runtime": answer.runtime, "torch": answer.torch, "python": answer.python, "get": answer.get}
    return of_build | {name: cell for name, cell in own.items() if cell}


def python_range(cell: Cell | None) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """`3.10-3.14` as ((3, 10), (3, 14)); None where it is unknown."""
    match = re.fullmatch(r"3\.(\d+)-3\.(\d+)", cell.value) if cell else None
    return ((3, int(match[1])), (3, int(match[2]))) if match else None


@cache
def compatibility() -> Compatibility:
    """The data. Raises ConfigError or DataError for a damaged installation."""
    return read(parse(FILE.read_text(encoding="utf-8"), str(FILE), LIMITS).data)
