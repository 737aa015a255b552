"""The Docker engine as buildtool sees it: look at images, run one, stream one. Builds are buildx's.

The only module that imports the docker package.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
import requests.exceptions

from buildtool.errors import BuildFailed, ConfigError, DataError, EngineUnavailable, SourceUnreachable

ANSWER_TIMEOUT_S = 8  # a registry that hasn't answered by then is passed over
NEXT_STEP = "start one (`sudo systemctl start docker`), or as root on Debian or Ubuntu: `make engine`"


@dataclass(frozen=True)
class EngineInfo:
    """What the engine says of itself."""

    version: str
    storage_driver: str
    containerd_store: bool
    root_dir: str
    security_options: tuple[str, ...]


@dataclass(frozen=True)
class RunResult:
    """A finished container: exit code and both streams."""

    exit_code: int
    stdout: str
    stderr: str


class Engine:
    """A connection to the engine. Construction connects; every method raises our errors."""

    def __init__(self, timeout_s: float = 600) -> None:
        with _translated():
            self._client: docker.DockerClient = docker.from_env(timeout=int(timeout_s))
            self._client.ping()

    def info(self) -> EngineInfo:
        """Version, storage driver and root directory. Raises EngineUnavailable."""
        with _translated():
            info: dict[str, Any] = self._client.info()
        status = dict(info.get("DriverStatus") or ())
        return EngineInfo(
            version=str(info.get("ServerVersion", "unknown")),
            storage_driver=str(info.get("Driver", "unknown")),
            containerd_store="io.containerd.snapshotter.v1" in status.values(),
            root_dir=str(info.get("DockerRootDir", "/var/lib/docker")),
            security_options=tuple(info.get("SecurityOptions") or ()),
        )

    def inspect(self, ref: str) -> Mapping[str, Any] | None:
        """The engine's own record of an image, or None when it has no such image."""
        with _translated():
            try:
                return dict(self._client.images.get(ref).attrs)
            except docker.errors.ImageNotFound:
                return None

    def registry_digest(self, ref: str) -> str:
        """The manifest (or index) digest that a registry now gives for a reference.

        Asked through the engine, whose mirrors, proxy and credentials serve. Raises SourceUnreachable.
        """
        try:
            client = docker.from_env(timeout=ANSWER_TIMEOUT_S)
            return str(client.images.get_registry_data(ref).id)
        except docker.errors.APIError as error:
            raise SourceUnreachable(f"registry base {ref}: {error.explanation or error}") from error
        except requests.exceptions.RequestException as error:
            raise SourceUnreachable(f"registry base {ref}: no answer within {ANSWER_TIMEOUT_S} s") from error

    def save(self, ref: str) -> Iterator[bytes]:
        """An image as the engine's archive (`docker save`), in chunks. Raises DataError if unknown."""
        with _translated():
            try:
                yield from self._client.api.get_image(ref, chunk_size=1 << 20)
            except docker.errors.ImageNotFound as error:
                raise DataError(
                    f"the engine has no image {ref}", f"build or pull it first: docker pull {ref}"
                ) from error

    def export(self, ref: str) -> Iterator[bytes]:
        """An image's files, layers merged, as one tar in chunks. Raises DataError if unknown."""
        with _translated():
            try:
                container = self._client.containers.create(ref, ["true"], entrypoint=[], network_mode="none")
            except docker.errors.ImageNotFound as error:
                raise DataError(
                    f"the engine has no image {ref}", "see which there are: docker images"
                ) from error
            try:
                yield from self._client.api.export(str(container.id), chunk_size=1 << 20)
            finally:
                container.remove(force=True, v=True)

    def rename(self, old: str, new: str) -> None:
        """Give the image `old` the tag `new` instead of its own. Raises BuildFailed."""
        repository, _, tag = new.rpartition(":")
        with _translated():
            self._client.images.get(old).tag(repository, tag)
            self._client.images.remove(old)

    def forget(self, ref: str) -> None:
        """Take a tag away, and with its last one the image; nothing where there is no such tag."""
        with _translated():
            try:
                self._client.images.remove(ref)
            except docker.errors.ImageNotFound:
                return

    def run(self, ref: str, command: list[str], *, env: Mapping[str, str] | None = None) -> RunResult:
        """Run a command in a fresh, unprivileged, offline container and remove it. Raises BuildFailed."""
        with _translated():
            try:
                container = self._client.containers.create(
                    ref,
                    command,
                    entrypoint=[],
                    environment=dict(env or {}),
                    network_mode="none",
                    read_only=True,
                    cap_drop=["ALL"],
                    security_opt=["no-new-privileges"],
                    tmpfs={"/tmp": "mode=1777"},
                )
            except docker.errors.ImageNotFound as error:
                raise DataError(f"the engine has no image {ref}", "build it first: make images") from error
            try:
                container.start()
                code = int(container.wait()["StatusCode"])
                out = container.logs(stdout=True, stderr=False).decode(errors="replace")
                err = container.logs(stdout=False, stderr=True).decode(errors="replace")
            finally:
                container.remove(force=True, v=True)
        return RunResult(code, out, err)


_NO_NAME = ("invalid reference format", "repository name must")  # the engine's words for a malformed name


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the docker package's and its transport's exceptions into ours."""

    try:
        yield
    except docker.errors.APIError as error:
        if any(sign in str(error.explanation) for sign in _NO_NAME):
            raise ConfigError(
                f"no image can have that name: {error.explanation}", "write NAME[:TAG], NAME in lower case"
            ) from error
        raise BuildFailed(f"the engine refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, ConnectionError) as error:
        asked = os.environ.get("DOCKER_HOST")
        at = f" at {asked}, where DOCKER_HOST says" if asked else ""
        step = "unset DOCKER_HOST, or start the engine there" if asked else NEXT_STEP
        raise EngineUnavailable(f"no Docker engine answers{at}", step) from error
