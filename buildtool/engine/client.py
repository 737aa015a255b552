"""The Docker engine as buildtool sees it: look at images, run one, stream one. Builds are buildx's.

The only module that imports the docker package.
"""

import contextlib
import os
import posixpath
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.tls
import requests.exceptions
from docker.models.containers import Container
from docker.types import LogConfig

from buildtool.engine.endpoint import Endpoint, current_endpoint, disk_of
from buildtool.engine.reference import Reference, parse_pullable
from buildtool.errors import (
    BuildFailed,
    ConfigError,
    DataError,
    EngineForbidden,
    EngineUnavailable,
    EnvironmentMissing,
    ProofFailed,
    SourceUnreachable,
)
from buildtool.files import scratch, sweep_partials
from buildtool.shipped import state_directory
from probes.shared.quoting import command
from probes.shared.unknown import Unknown

ANSWER_TIMEOUT_S = 8  # a registry that hasn't answered by then is skipped
NEXT_STEP = "start one (`sudo systemctl start docker`), or as root on Debian or Ubuntu: `make engine`"


@dataclass(frozen=True)
class EngineInfo:
    """What the engine reports about itself."""

    version: str
    storage_driver: str
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
_NO_HEALTHCHECK = {"test": ["NONE"]}
_OWNER = "io.weir.owner"  # label of a container: the host and the directory of the run that it belongs to


class Engine:
    """A connection to the engine. The constructor connects; every method raises our errors."""

    def __init__(self, timeout_s: float = 600) -> None:
        with _translated():
            self._client = _client(timeout_s)
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
            host=str(info.get("Name") or ""),
            root_dir=str(info.get("DockerRootDir", "/var/lib/docker")),
            security_options=tuple(info.get("SecurityOptions") or ()),
            machine=str(info.get("Architecture") or ""),
            runtimes=tuple(sorted(info.get("Runtimes") or ())),
            cdi_directories=tuple(map(str, info.get("CDISpecDirs") or ())),
        )

    def inspect(self, ref: str) -> Mapping[str, Any] | None:
        """The engine's own record of an image, or None when it has no such image. Raises ConfigError."""
        with _asked_for(ref):
            try:
                return dict(self._client.images.get(ref).attrs)
            except docker.errors.ImageNotFound:
                return None

    def registry_digest(self, ref: str) -> str:
        """The manifest (or index) digest that a registry now gives for a reference.

        Asked through the engine, with its mirrors, proxy and credentials. Raises SourceUnreachable,
        ConfigError, and EngineUnavailable when it is the engine that doesn't answer.
        """
        with _asked_for(ref):
            client = _client(ANSWER_TIMEOUT_S)
        try:
            return str(client.images.get_registry_data(ref).id)
        except docker.errors.APIError as error:
            raise SourceUnreachable(f"registry base {ref}: {error.explanation or error}") from error
        except requests.exceptions.RequestException as error:
            raise SourceUnreachable(f"registry base {ref}: no answer within {ANSWER_TIMEOUT_S} s") from error

    def save(self, ref: str) -> Iterator[bytes]:
        """An image as the engine's archive (`docker save`), in chunks. Raises DataError and ConfigError."""
        with _asked_for(ref):
            try:
                yield from self._client.api.get_image(ref, chunk_size=1 << 20)
            except docker.errors.NotFound as error:  # in words of the image store's own
                pull = command("docker", "pull", ref)
                raise DataError(
                    f"the engine has no image {ref}", f"build or pull it first: {pull}"
                ) from error

    def unpacked_bytes(self, ref: str) -> int:
        """How much an image's files take on disk, as the engine counts them; an upper bound.

        With containerd's store the engine adds the compressed layers. Raises DataError for an unknown image.
        """
        record = self.inspect(ref)
        if record is None:
            raise _unknown(ref)
        with _translated():
            rows = self._client.api.images()
        listed = [int(row.get("Size") or 0) for row in rows if row.get("Id") == record["Id"]]
        return max(int(record.get("Size") or 0), *listed, 0)

    def export(self, ref: str) -> Iterator[bytes]:
        """An image's files, layers merged, as one tar in chunks. Raises DataError if unknown."""
        with _translated():
            settings = {"healthcheck": _NO_HEALTHCHECK, "tmpfs": self._closed_volumes(ref)}
            with self._created(ref, ["true"], settings) as container:
                yield from self._client.api.export(str(container.id), chunk_size=1 << 20)

    def load(self, chunks: Iterator[bytes]) -> None:
        """Load an image archive (`docker load`). Raises BuildFailed with the engine's reason."""
        with _translated():
            for row in self._client.api.load_image(chunks):  # type: ignore[no-untyped-call]
                if "errorDetail" in row:
                    reason = str(row["errorDetail"].get("message"))
                    if "no space left" in reason.lower():
                        raise EnvironmentMissing(
                            f"the disk filled up while the engine loaded an image: {reason}",
                            "docker system df; docker builder prune",
                        )
                    raise BuildFailed(f"the engine refused the image: {reason}")

    def tag(self, image: str, name: Reference) -> str:
        """Give an image, by its id or digest, another name, which must hold a tag; returns its id.

        Raises DataError for an unknown image, BuildFailed unless it has the name then.
        """
        wanted = self.inspect(image)
        if wanted is None:
            raise _unknown(image)
        with _translated():
            done = self._client.api.tag(str(wanted["Id"]), name.repository, name.tag)
        record = self.inspect(str(name)) if done else None
        if record is None or record["Id"] != wanted["Id"]:
            raise BuildFailed(f"the engine didn't give the image {image[:19]} the name {name}")
        return str(wanted["Id"])

    def forget(self, ref: str) -> None:
        """Remove a tag, and the image with its last tag; does nothing where there is no such tag."""
        with _asked_for(ref):
            try:
                self._client.images.remove(ref)
            except docker.errors.ImageNotFound:
                return

    def tags(self, repository: str) -> tuple[str, ...]:
        """The names `repository:tag` of this repository that the engine holds."""
        with _translated():
            rows = self._client.api.images(name=repository)
        return tuple(str(name) for row in rows for name in row.get("RepoTags") or ())

    def run(
        self,
        ref: str,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        limits: RunLimits = RUN_LIMITS,
    ) -> RunResult:
        """Run a command in a fresh, unprivileged, offline container within limits, and remove it.

        The image's own entry point and health check don't run, and all but /tmp is read-only. The last
        `limits.log_bytes` of the command's output are kept. Raises ProofFailed when it takes too long,
        BuildFailed when the engine can't run it.
        """
        with _translated():
            settings = {
                "environment": dict(env or {}),
                "healthcheck": _NO_HEALTHCHECK,
                "read_only": True,
                "tmpfs": {**self._closed_volumes(ref), _SCRATCH: f"mode=1777,size={limits.scratch_bytes}"},
                "cap_drop": ["ALL"],
                "security_opt": ["no-new-privileges"],
                **_limited(limits),
            }
            with self._created(ref, command, settings) as container:
                container.start()
                code = _awaited(container, ref, limits)
                out, err = (_said(container, stream, limits) for stream in ("stdout", "stderr"))
        return RunResult(code, out, err)

    @contextmanager
    def _created(self, ref: str, command: list[str], settings: Mapping[str, Any]) -> Iterator[Container]:
        """A container for the length of the block. Those that killed runs left behind are removed first.

        Its label names a directory that this process holds for as long: `files.scratch`.
        """
        folder = state_directory().resolve() / "containers"
        with scratch(folder) as held, _translated():  # the package's errors are OSErrors, as scratch's are
            self._sweep_containers(folder)
            owner = {_OWNER: f"{socket.gethostname()}:{held}"}
            try:
                container = self._client.containers.create(
                    ref, command, entrypoint=[], network_mode="none", labels=owner, **settings
                )
            except docker.errors.ImageNotFound as error:
                raise _unknown(ref) from error
            try:
                yield container
            finally:
                container.remove(force=True, v=True)

    def _sweep_containers(self, folder: Path) -> None:
        sweep_partials(folder)
        ours = f"{socket.gethostname()}:{folder}/"
        for row in self._client.api.containers(all=True, filters={"label": _OWNER}):
            owner = str(row["Labels"][_OWNER])
            if owner.startswith(ours) and not Path(owner.partition(":")[2]).exists():
                with contextlib.suppress(docker.errors.APIError):  # another run was quicker
                    self._client.api.remove_container(row["Id"], v=True, force=True)

    def _closed_volumes(self, ref: str) -> dict[str, str]:
        """Empty read-only places over what an image declares as volumes.

        The engine would copy their content to the host's disk, and let a container write there without limit.
        """
        record = self.inspect(ref) or {"Config": None}
        declared = {posixpath.normpath(path) for path in (record["Config"] or {}).get("Volumes") or ()}
        return dict.fromkeys(sorted(declared - {_SCRATCH}), "ro,size=4k")


def _limited(limits: RunLimits) -> dict[str, Any]:
    """Limits as settings of a container; its log is one file that starts over when full."""
    log = LogConfig(type=LogConfig.types.JSON, config={"max-size": str(limits.log_bytes), "max-file": "1"})
    return {
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "pids_limit": limits.processes,
        "log_config": log,
    }


def _awaited(container: Container, ref: str, limits: RunLimits) -> int:
    """The exit code. Raises ProofFailed when the container still runs at the end of its time."""
    begun = time.monotonic()
    try:
        return int(container.wait(timeout=limits.seconds)["StatusCode"])
    except requests.exceptions.RequestException as error:
        if time.monotonic() - begun < limits.seconds:
            raise
        raise ProofFailed(f"{ref} was stopped: its command took more than {limits.seconds} s") from error


def _said(container: Container, stream: str, limits: RunLimits) -> str:
    """A stream's output. The engine's log file is bounded; so is this, were the engine to keep more."""
    kept, left = [], limits.log_bytes
    wanted = {"stdout": stream == "stdout", "stderr": stream == "stderr"}
    for chunk in container.logs(stream=True, follow=False, **wanted):
        kept.append(chunk[:left])
        left -= len(kept[-1])
        if not left:
            break
    return b"".join(kept).decode(errors="replace")


def _unknown(ref: str) -> DataError:
    return DataError(f"the engine has no image {ref}", "list the images: docker images")


_NO_NAME = ("invalid reference format", "repository name must")  # the engine's messages for a malformed name


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
        raise _unavailable(error, endpoint_here()) from error


@contextmanager
def _asked_for(ref: str) -> Iterator[None]:
    """A request in whose address a name stands: the engine would take `x/../../images` for another request.

    Raises ConfigError for what no image can be called; else translates as `_translated` does.
    """
    parse_pullable(ref)
    with _translated():
        yield


def disk_here(info: EngineInfo) -> Path | Unknown:
    """Where on this host the engine's images are, or why their disk can't be measured.

    Raises EngineUnavailable.
    """
    root = Path(info.root_dir)
    try:
        is_seen = root.is_dir()
    except OSError:  # below a directory that we may not search
        is_seen = False
    return disk_of(
        endpoint_here(),
        root,
        engine_host=info.host,
        this_host=socket.gethostname(),
        is_seen=is_seen,
    )


def endpoint_here() -> Endpoint:
    """The engine that this process's environment names. Raises EngineUnavailable."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without a name and without $HOME, as in a container: no settings
        home = Path("/nonexistent")
    return current_endpoint(os.environ, home)


def _client(timeout_s: float) -> docker.DockerClient:
    """A connection to the engine that the Docker CLI uses; the package by itself may find another one."""
    endpoint = endpoint_here()
    tls: docker.tls.TLSConfig | bool = False
    if found := endpoint.tls:
        client = (str(found.client[0]), str(found.client[1])) if found.client else None
        ca = str(found.ca) if found.ca else None
        tls = docker.tls.TLSConfig(client_cert=client, ca_cert=ca, verify=found.verify)
    try:
        return docker.DockerClient(
            base_url=endpoint.host, tls=tls, timeout=int(timeout_s), version="auto", use_ssh_client=True
        )
    except ValueError as error:  # for a malformed address
        raise docker.errors.DockerException(str(error)) from error


def _unavailable(error: BaseException, endpoint: Endpoint) -> EngineUnavailable:
    """The reason why an engine doesn't answer, and what to type. Pure."""
    if any(isinstance(cause, PermissionError) for cause in _causes(error)):
        return EngineForbidden(
            f"permission denied on {endpoint.host}: an engine is there, and you may not use it",
            "run this as root; or as root: `usermod -aG docker USER`, and log in again",
        )
    if endpoint.named_by:
        return EngineUnavailable(
            f"no Docker engine answers at {endpoint.host}, which {endpoint.named_by} names",
            f"start the engine there, or use this host's own: {endpoint.way_back}",
        )
    return EngineUnavailable("no Docker engine answers", NEXT_STEP)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that led to it; urllib3 keeps some of them among the arguments."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [
                e for e in (one.__cause__, one.__context__, *one.args) if isinstance(e, BaseException)
            ]
