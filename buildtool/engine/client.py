"""The Docker engine: inspect, tag, save, load and run images. Builds go through `buildx`.

This module and `connection` are the only ones that import the docker package.
"""

import contextlib
import posixpath
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import docker.errors
import requests.exceptions
from docker.models.containers import Container
from docker.types import DeviceRequest, LogConfig

from buildtool.core.errors import BuildFailed, DataError, EnvironmentMissing, ProofFailed, SourceUnreachable
from buildtool.core.files import scratch
from buildtool.core.model import LABEL
from buildtool.core.shipped import state_directory
from buildtool.engine.connection import PACKAGE_ERRORS, connect, engine_errors, engine_errors_for
from buildtool.engine.reference import Reference
from probes.core.codec import decode
from probes.core.files import sweep_partials
from probes.core.quoting import command

T = TypeVar("T")

ANSWER_TIMEOUT_S = 8  # a registry, or an interrupted request, that hasn't answered by then is given up


@dataclass(frozen=True)
class EngineInfo:
    """What the engine reports of itself."""

    version: str
    containerd_store: bool
    host: str  # the name of the machine it runs on
    root_dir: str  # on that machine
    security_options: tuple[str, ...]
    machine: str = ""  # its processor, as `uname -m` writes it
    runtimes: tuple[str, ...] = ()  # by name: runc, nvidia, amd
    cdi_directories: tuple[str, ...] = ()  # where it looks for CDI specifications; none where CDI is off


@dataclass(frozen=True)
class RunResult:
    """A finished container: exit code and both streams."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Devices:
    """What a container gets of the host's GPUs."""

    paths: tuple[str, ...] = ()  # device files
    groups: tuple[str, ...] = ()  # by number
    cdi: tuple[str, ...] = ()  # nvidia.com/gpu=all
    nvidia: bool = False  # every card of NVIDIA's runtime


@dataclass(frozen=True)
class RunLimits:
    """The host's resources that a container may use.

    The defaults are a multiple of what a proof of ROCm's torch takes: 1 GB, 50 threads, 30 s, 1 kB.
    """

    memory_bytes: int = 4 << 30  # with the scratch space, without swap
    scratch_bytes: int = 1 << 30  # of /tmp, which is memory
    processes: int = 1024  # and threads; torch starts one for each core
    seconds: int = 600
    log_bytes: int = 4 << 20


RUN_LIMITS = RunLimits()
_SCRATCH = "/tmp"
# how often to ask; of 100 requests beside loops that load, tag and remove images, 3 to 40 were refused
_ATTEMPTS = 20
NO_HEALTHCHECK = {"test": ["NONE"]}
_OWNER = f"{LABEL}.owner"  # label of a container: the host and the directory of the run that it belongs to


class Engine:
    """A connection to the engine. The constructor connects; every method raises our errors."""

    def __init__(self, timeout_s: float = 600) -> None:
        with engine_errors():
            self._client = connect(timeout_s)
            self._client.ping()

    def info(self) -> EngineInfo:
        """Version, image store and root directory. Raises EngineUnavailable."""
        with engine_errors():
            info = parse_answer(Info, self._client.info())
        return EngineInfo(
            version=info.ServerVersion,
            containerd_store="io.containerd.snapshotter.v1" in dict(info.DriverStatus).values(),
            host=info.Name,
            root_dir=info.DockerRootDir,
            security_options=info.SecurityOptions,
            machine=info.Architecture,
            runtimes=tuple(sorted(info.Runtimes)),
            cdi_directories=info.CDISpecDirs,
        )

    def inspect(self, ref: str) -> Mapping[str, Any] | None:
        """The engine's own record of an image, or None when it has no such image. Raises ConfigError."""
        with engine_errors_for(ref):
            try:
                record = dict(_settled(lambda: self._client.images.get(ref).attrs))
            except docker.errors.ImageNotFound:
                return None
            parse_answer(Image, record)
            return record

    def has(self, image_id: str) -> bool:
        """Whether it has an image of this id, with or without a name. Raises ConfigError."""
        return (self.inspect(image_id) or {}).get("Id") == image_id

    def labels(self, ref: str) -> dict[str, str]:
        """An image's labels; none for an image that the engine doesn't have. Raises ConfigError."""
        config = (self.inspect(ref) or {}).get("Config") or {}
        return {str(name): str(text) for name, text in (config.get("Labels") or {}).items()}

    def registry_digest(self, ref: str) -> str:
        """The manifest (or index) digest that a registry has for a reference now.

        It is asked through the engine, with its mirrors, proxy and credentials. Raises SourceUnreachable,
        ConfigError, and EngineUnavailable when it is the engine that doesn't answer.
        """
        with engine_errors_for(ref):
            client = connect(ANSWER_TIMEOUT_S)
        try:
            return str(client.images.get_registry_data(ref).id)
        except docker.errors.APIError as error:
            raise SourceUnreachable(f"registry base {ref}: {error.explanation or error}") from error
        except requests.exceptions.RequestException as error:
            raise SourceUnreachable(f"registry base {ref}: no answer within {ANSWER_TIMEOUT_S} s") from error
        except PACKAGE_ERRORS as error:
            raise SourceUnreachable(f"registry base {ref}: the engine can't say: {error}") from error

    def save(self, ref: str) -> Iterator[bytes]:
        """An image as the engine's archive (`docker save`), in chunks. Raises DataError and ConfigError."""
        with engine_errors_for(ref):
            try:
                yield from self._client.api.get_image(ref, chunk_size=1 << 20)
            except docker.errors.NotFound as error:  # in words of the image store's own
                pull = command("docker", "pull", ref)
                raise DataError(
                    f"the engine has no image {ref}", f"build or pull it first: {pull}"
                ) from error

    def unpacked_bytes(self, ref: str) -> int:
        """The bytes that an image's files take on disk, as the engine counts them: an upper bound.

        With containerd's store the engine adds the compressed layers. Raises DataError for an unknown image.
        """
        record = self.inspect(ref)
        if record is None:
            raise _no_image(ref)
        names = [*(record.get("RepoTags") or ())[:1], None]  # by its name, since a list of all takes long
        listed = (row.Size for name in names for row in self.images(name) if row.Id == record["Id"])
        return max(record.get("Size") or 0, next(listed, 0))  # all are listed where the name has moved on

    def export(self, ref: str) -> Iterator[bytes]:
        """An image's files, layers merged, as one tar in chunks. Raises DataError if unknown."""
        with engine_errors():
            settings = {"healthcheck": NO_HEALTHCHECK, "tmpfs": self._closed_volumes(ref)}
            with self._created(ref, ["true"], settings) as container:
                yield from self._client.api.export(str(container.id), chunk_size=1 << 20)

    def load(self, chunks: Iterator[bytes]) -> None:
        """Load an image archive (`docker load`). Raises BuildFailed with the engine's reason."""
        with engine_errors():
            for row in self._client.api.load_image(chunks):  # type: ignore[no-untyped-call]
                if fault := parse_answer(LoadRow, row).errorDetail:
                    if "no space left" in fault.message.lower():
                        raise EnvironmentMissing(
                            f"the disk filled up while the engine loaded an image: {fault.message}",
                            "docker system df; docker builder prune",
                        )
                    raise BuildFailed(f"the engine refused the image: {fault.message}")

    def tag(self, image: str, name: Reference) -> str:
        """Give an image, by its id or digest, another name, which must have a tag. Returns the image's id.

        Raises DataError for an unknown image, BuildFailed if the image doesn't have the name afterwards.
        """
        for _ in range(_ATTEMPTS):  # others may give the name away, too, or take it away
            record = self.inspect(image)
            if record is None:
                raise _no_image(image)
            image_id = str(record["Id"])
            with engine_errors(), contextlib.suppress(docker.errors.ImageNotFound):  # as the next look finds
                _settled(partial(self._client.api.tag, image_id, name.repository, name.tag))
            if (self.inspect(str(name)) or {}).get("Id") == image_id:
                return image_id
        raise BuildFailed(f"the engine didn't give the image {image[:19]} the name {name}")

    def remove_tag(self, ref: str) -> None:
        """Remove a tag, and the image with its last tag; does nothing where there is no such tag."""
        with engine_errors_for(ref), contextlib.suppress(docker.errors.ImageNotFound):
            _settled(partial(self._client.images.remove, ref))

    def tags(self, repository: str | None = None) -> tuple[str, ...]:
        """The names `repository:tag` of this repository that the engine holds; of all without one."""
        return tuple(name for row in self.images(repository) for name in row.RepoTags)

    def images(self, repository: str | None = None, *, label: str | None = None) -> "tuple[ImageRow, ...]":
        """Those of this repository, or with this label; those without a name among them."""
        filters = {"label": label} if label else {}
        with engine_errors():
            rows = _settled(partial(self._client.api.images, repository, filters=filters))
            return parse_answer(tuple[ImageRow, ...], rows)

    def run(
        self,
        ref: str,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        limits: RunLimits = RUN_LIMITS,
        devices: Devices | None = None,
    ) -> RunResult:
        """Run a command in a fresh, unprivileged, offline container, and remove that.

        The image's own entry point and health check don't run, and all but /tmp is read-only. The last
        `limits.log_bytes` of the command's output are kept. Raises ProofFailed when it takes too long,
        BuildFailed when the engine can't run it.
        """
        with engine_errors():
            settings = {
                "environment": dict(env or {}),
                "healthcheck": NO_HEALTHCHECK,
                "read_only": True,
                "tmpfs": {**self._closed_volumes(ref), _SCRATCH: f"mode=1777,size={limits.scratch_bytes}"},
                "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges"],
                **_limit_options(limits),
                **device_options(devices),
            }
            with self._created(ref, command, settings) as container:
                container.start()
                code = _exit_code(container, ref, limits)
                out, err = (_output(container, stream, limits) for stream in ("stdout", "stderr"))
        return RunResult(code, out, err)

    def _created(
        self, ref: str, command: list[str], settings: Mapping[str, Any]
    ) -> AbstractContextManager[Container]:
        """A container that runs nothing of the image's own, without a network."""
        return self.held(ref, command, {"entrypoint": [], "network_mode": "none", **settings})

    @contextmanager
    def held(self, ref: str, command: list[str], settings: Mapping[str, Any]) -> Iterator[Container]:
        """A container for the duration of the block. Those that killed runs left behind are removed first."""
        # the package's errors are OSErrors, as scratch's are; a thread asks: an interrupt doesn't end what
        # the engine does, and the container that it makes then is removed, too
        with self.owning() as (_, owner), engine_errors():
            create = self._client.containers.create
            asked = _asked_for(partial(create, ref, command, labels=owner, **settings))
            try:
                try:
                    container = asked.result()
                except docker.errors.ImageNotFound as error:
                    raise _no_image(ref) from error
                yield container
            finally:
                # an engine that doesn't answer is waited for no longer; the rest as in sweep_containers
                with contextlib.suppress(TimeoutError, docker.errors.APIError):
                    if not asked.exception(ANSWER_TIMEOUT_S):
                        asked.result().remove(force=True, v=True)

    @contextmanager
    def owning(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """A scratch directory that this process holds for the block, and the label which names it.

        Containers and networks with the label of a directory that is gone are removed by the next run.
        """
        with scratch(_containers()) as held:
            self.sweep_containers()
            yield held, {_OWNER: f"{socket.gethostname()}:{held}"}

    def sweep_containers(self) -> None:
        """Remove the containers that killed runs of this state directory left behind, and their networks."""
        sweep_partials(_containers())
        api = self._client.api
        for name in self.left_containers():
            with engine_errors(), contextlib.suppress(docker.errors.APIError):  # another run was quicker
                api.remove_container(name, v=True, force=True)
        with contextlib.suppress(BuildFailed):  # an engine may list none, and another run be quicker
            for name in self._left(api.networks):
                with engine_errors():
                    api.remove_network(name)

    def left_containers(self) -> tuple[str, ...]:
        """The ids of the containers of this state directory's runs whose scratch directory is gone."""
        return self._left(partial(self._client.api.containers, all=True))

    def _left(self, listing: Callable[..., object]) -> tuple[str, ...]:
        ours = f"{socket.gethostname()}:{_containers()}/"
        with engine_errors():
            rows = _settled(partial(listing, filters={"label": _OWNER}))
            owned = {
                row.Id: row.Labels.get(_OWNER, "") for row in parse_answer(tuple[ContainerRow, ...], rows)
            }
        return tuple(
            name
            for name, owner in owned.items()
            if owner.startswith(ours) and not Path(owner.partition(":")[2]).exists()
        )

    def build_cache_bytes(self) -> int:
        """What BuildKit's cache takes, of all builds on this engine: it doesn't know whose a record is."""
        with engine_errors():
            usage = parse_answer(DiskUsage, _settled(self._client.api.df))
        return sum(row.Size for row in usage.BuildCache if not row.Shared)

    def _closed_volumes(self, ref: str) -> dict[str, str]:
        """Empty read-only mounts in place of the volumes that an image declares.

        For volumes, the engine would copy their content to the host's disk, where a container can write
        without limit.
        """
        config = (self.inspect(ref) or {}).get("Config") or {}
        declared = {posixpath.normpath(path) for path in config.get("Volumes") or ()}
        return dict.fromkeys(sorted(declared - {_SCRATCH}), "ro,size=4k")


def _asked_for(call: Callable[[], T]) -> "Future[T]":
    """The answer of a call that a thread makes, and that the end of the program doesn't wait for."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer


def _settled(ask: Callable[[], T]) -> T:
    """The answer of the docker package, whose errors this raises.

    With containerd's store an engine reads many documents for one answer, and refuses it when another process
    removes an image or a container meanwhile, or gives the same name to an image: it is asked again. An image
    that isn't there is an answer.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ask()
        except docker.errors.ImageNotFound:
            raise
        except docker.errors.APIError as error:
            if not (error.is_server_error() or isinstance(error, docker.errors.NotFound)):
                raise
    return ask()


def _containers() -> Path:
    """The directory in which a run holds a scratch directory for each of its containers."""
    return state_directory().resolve() / "containers"


def device_options(devices: Devices | None) -> dict[str, Any]:
    """The host's devices as settings of a container."""
    if not devices:
        return {}
    requests = [DeviceRequest(driver="cdi", device_ids=list(devices.cdi))] if devices.cdi else []
    requests += [DeviceRequest(count=-1, capabilities=[["gpu"]])] if devices.nvidia else []
    return {
        "devices": [f"{path}:{path}" for path in devices.paths],
        "group_add": list(devices.groups),
        "device_requests": requests,
    }


def _limit_options(limits: RunLimits) -> dict[str, Any]:
    """Limits as settings of a container; its log is one file that starts over when full."""
    log = LogConfig(type=LogConfig.types.JSON, config={"max-size": str(limits.log_bytes), "max-file": "1"})
    return {
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "pids_limit": limits.processes,
        "log_config": log,
    }


def _exit_code(container: Container, ref: str, limits: RunLimits) -> int:
    """The exit code. Raises ProofFailed when the container still runs at the end of its time."""
    begun = time.monotonic()
    try:
        return parse_answer(ExitStatus, container.wait(timeout=limits.seconds)).StatusCode
    except requests.exceptions.RequestException as error:
        if time.monotonic() - begun < limits.seconds:
            raise
        raise ProofFailed(f"{ref} was stopped: its command took more than {limits.seconds} s") from error


def _output(container: Container, stream: str, limits: RunLimits) -> str:
    """The output on one stream, at most `limits.log_bytes`, whatever the engine keeps."""
    chunks, left = [], limits.log_bytes
    streams = {"stdout": stream == "stdout", "stderr": stream == "stderr"}
    for chunk in container.logs(stream=True, follow=False, **streams):
        chunks.append(chunk[:left])
        left -= len(chunks[-1])
        if not left:
            break
    return b"".join(chunks).decode(errors="replace")


def _no_image(ref: str) -> DataError:
    return DataError(f"the engine has no image {ref}", "list the images: docker images")


# ---- Docker's API: of each answer, the fields that are read ------------------------------------------


@dataclass(frozen=True)
class Unread:
    """An object none of whose members are read."""


@dataclass(frozen=True)
class Info:
    """The engine about itself."""

    ServerVersion: str = "unknown"
    DriverStatus: tuple[tuple[str, str], ...] = ()
    Name: str = ""
    DockerRootDir: str = "/var/lib/docker"
    SecurityOptions: tuple[str, ...] = ()
    Architecture: str = ""
    Runtimes: Mapping[str, Unread] = field(default_factory=dict)
    CDISpecDirs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunConfig:
    """What an image's containers are started with."""

    Volumes: Mapping[str, Unread] = field(default_factory=dict)


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
    Labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheRow:
    """A record of BuildKit's cache; what is shared is an image's, too."""

    Size: int = 0
    Shared: bool = False


@dataclass(frozen=True)
class DiskUsage:
    """What the engine's things take."""

    BuildCache: tuple[CacheRow, ...] = ()


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
class ExitStatus:
    """A container that has stopped."""

    StatusCode: int


def parse_answer(shape: type[T], answer: object) -> T:
    """An answer of Docker's API as a value. Raises Misfit where it has another form."""
    return decode(shape, _without_nulls(answer), "its answer")


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
