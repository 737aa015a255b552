"""What an engine's answers have to hold, checked where they come in: not every engine is Docker's. Pure.

Fields have the names of Docker's API. It sends null for what is empty, which is left out before it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from probes.shared.codec import decode

T = TypeVar("T")


@dataclass(frozen=True)
class Anything:
    """An object whose members aren't read."""


@dataclass(frozen=True)
class Info:
    """The engine about itself."""

    ServerVersion: str = "unknown"
    DriverStatus: tuple[tuple[str, str], ...] = ()
    Name: str = ""
    DockerRootDir: str = "/var/lib/docker"
    SecurityOptions: tuple[str, ...] = ()
    Architecture: str = ""
    Runtimes: Mapping[str, Anything] = field(default_factory=dict)
    CDISpecDirs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunConfig:
    """What an image's containers are started with."""

    Volumes: Mapping[str, Anything] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """An image, inspected."""

    Id: str
    RepoTags: tuple[str, ...] = ()
    Size: int = 0
    Config: RunConfig = RunConfig()
    Os: str = ""
    Architecture: str = ""
    Variant: str = ""
    Created: str = ""


@dataclass(frozen=True)
class ImageRow:
    """An image in a list."""

    Id: str
    RepoTags: tuple[str, ...] = ()
    Size: int = 0


@dataclass(frozen=True)
class ContainerRow:
    """A container in a list."""

    Id: str
    Labels: Mapping[str, str]


@dataclass(frozen=True)
class ErrorDetail:
    """Why an image can't be loaded."""

    message: str = "it gives no reason"


@dataclass(frozen=True)
class LoadRow:
    """A row of progress."""

    errorDetail: ErrorDetail | None = None


@dataclass(frozen=True)
class Ended:
    """A container that has stopped."""

    StatusCode: int


def read(shape: type[T], answer: object) -> T:
    """An answer as a value. Raises Misfit where it is something else than Docker's API has there."""
    return decode(shape, _without_nulls(answer), "its answer")


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
