"""Connects to the engine that the Docker CLI would use, and turns the docker package's errors into ours."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import docker
import docker.errors
import docker.tls
import requests
import requests.exceptions
from docker.constants import MINIMUM_DOCKER_API_VERSION
from docker.utils.config import find_config_file, load_general_config

from buildtool.core.errors import (
    BuildFailed,
    ConfigError,
    EngineForbidden,
    EngineUnavailable,
    EnvironmentMissing,
    ToolError,
)
from buildtool.engine.reference import parse_pullable
from probes.core.invocation import host_command
from probes.core.quoting import command

DEFAULT_HOST = "unix:///var/run/docker.sock"
INSTALL = f"as root on Debian or Ubuntu: {host_command()} engine"
NEXT_STEP = f"start one (`sudo systemctl start docker`), or {INSTALL}"
_MALFORMED_NAME = (
    "invalid reference format",
    "repository name must",
)  # the engine's messages for a malformed name
# what the docker package raises for a configuration, or an answer, of another shape
PACKAGE_ERRORS = (
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    docker.errors.DockerException,
    requests.exceptions.RequestException,
)


def connect(timeout_s: float) -> docker.DockerClient:
    """A connection to the engine that the Docker CLI uses; the docker package by itself may find another.

    Raises ConfigError, EngineUnavailable, and what `engine_errors` turns into our errors.
    """
    endpoint = endpoint_here()
    require_configuration()
    tls: docker.tls.TLSConfig | bool = False
    if files := endpoint.tls:
        client = (str(files.client[0]), str(files.client[1])) if files.client else None
        ca = str(files.ca) if files.ca else None
        tls = docker.tls.TLSConfig(client_cert=client, ca_cert=ca, verify=files.verify)
    try:
        return docker.DockerClient(
            base_url=endpoint.host, tls=tls, timeout=int(timeout_s), version="auto", use_ssh_client=True
        )
    except ValueError as error:  # for a malformed address
        raise docker.errors.DockerException(str(error)) from error


def require_configuration() -> None:
    """Raise ConfigError for a configuration of the Docker CLI that the docker package can't use.

    The package would fail in many ways, also as if no engine answered, and one would be installed in vain.
    """
    path = cast(str, find_config_file())
    try:
        headers = load_general_config().get("HttpHeaders")
        requests.Request("GET", "http://localhost", headers).prepare()
        docker.APIClient(base_url=DEFAULT_HOST, version=MINIMUM_DOCKER_API_VERSION).close()  # asks nothing
    except PACKAGE_ERRORS as error:
        raise ConfigError(
            f"{path} isn't a configuration that the Docker CLI can have written",
            f"correct it, or move it away: {command('mv', '--', path, f'{path}.old')}",
        ) from error


# ---- which engine: the Docker CLI's rules ------------------------------------------------------------------


@dataclass(frozen=True)
class Tls:
    """An endpoint's certificate files; None for those that it doesn't have."""

    ca: Path | None
    client: tuple[Path, Path] | None  # certificate and key
    verify: bool


@dataclass(frozen=True)
class Endpoint:
    """An engine's address. `named_by` says what named it; it is empty for the default socket of this host."""

    host: str
    named_by: str = ""
    way_back: str = ""  # what to type to get the default one
    tls: Tls | None = None
    builder: str = "default"  # buildx's name for the builder inside this engine: its context's


def endpoint_here() -> Endpoint:
    """The engine that this process's environment names. Raises EngineUnavailable."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without a name and without $HOME, as in a container: no settings
        home = Path("/nonexistent")
    return current_endpoint(os.environ, home)


def current_endpoint(env: Mapping[str, str], home: Path) -> Endpoint:
    """The endpoint of this environment. Raises EngineUnavailable for a context that can't be read."""
    if host := env.get("DOCKER_HOST"):
        verify = bool(env.get("DOCKER_TLS_VERIFY"))
        folder = Path(env.get("DOCKER_CERT_PATH") or home / ".docker")
        tls = _tls(folder, verify=True) if verify else None
        return Endpoint(host, "DOCKER_HOST", "unset DOCKER_HOST", tls)
    folder = Path(env.get("DOCKER_CONFIG") or home / ".docker")
    name = env.get("DOCKER_CONTEXT") or _current_context(folder / "config.json")
    if name == "default":
        return Endpoint(DEFAULT_HOST)
    back = "unset DOCKER_CONTEXT" if env.get("DOCKER_CONTEXT") else "docker context use default"
    return _context_endpoint(folder / "contexts", name, back)


def _current_context(config: Path) -> str:
    """The name of the context in the CLI's configuration; like the CLI, ignores what it can't read."""
    try:
        name = json.loads(config.read_text(encoding="utf-8")).get("currentContext")
    except (OSError, ValueError, AttributeError, RecursionError):
        return "default"
    return name if isinstance(name, str) and name else "default"


def _context_endpoint(folder: Path, name: str, back: str) -> Endpoint:
    key = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
    try:
        meta = json.loads((folder / "meta" / key / "meta.json").read_text(encoding="utf-8"))
        docker = meta["Endpoints"]["docker"]
        host = str(docker.get("Host") or DEFAULT_HOST)
        verify = not docker.get("SkipTLSVerify", False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise EngineUnavailable(
            f"there is no docker context {name!r}" if missing else f"the docker context {name!r} is damaged",
            f"list the contexts: docker context ls; or use the default one: {back}",
        ) from error
    certificates = folder / "tls" / key / "docker"
    tls = _tls(certificates, verify=verify) if certificates.is_dir() else None
    return Endpoint(host, f"the docker context {name!r}", back, tls, builder=name)


def _tls(folder: Path, *, verify: bool) -> Tls:
    ca, certificate, key = (folder / f"{name}.pem" for name in ("ca", "cert", "key"))
    client = (certificate, key) if certificate.exists() and key.exists() else None
    return Tls(ca if ca.exists() else None, client, verify)


# ---- errors ------------------------------------------------------------------------------------------------


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turn exceptions of the docker package and its transport, and those for odd answers, into our errors."""
    try:
        yield
    except docker.errors.APIError as error:
        if any(sign in str(error.explanation) for sign in _MALFORMED_NAME):
            raise ConfigError(
                f"no image can have that name: {error.explanation}", "write NAME[:TAG], NAME in lower case"
            ) from error
        raise BuildFailed(f"the engine refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, ConnectionError) as error:
        raise unavailable_error(error, endpoint_here()) from error
    except (ToolError, OSError):
        raise
    except Exception as error:  # the package raises all kinds for JSON of another shape, even a bare one
        raise EnvironmentMissing(
            f"what answers at {endpoint_here().host} isn't Docker's API as this tool knows it: {error}",
            "see what is there: docker version; or choose another engine: docker context ls",
        ) from error


@contextmanager
def engine_errors_for(ref: str) -> Iterator[None]:
    """`engine_errors` for a request with an image's name in its URL.

    Raises ConfigError for what no image can be called: `x/../../images` would become another request.
    """
    parse_pullable(ref)
    with engine_errors():
        yield


def unavailable_error(error: BaseException, endpoint: Endpoint) -> EngineUnavailable:
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
        cause = waiting.pop()
        if id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            below = (cause.__cause__, cause.__context__, *cause.args)
            waiting += [each for each in below if isinstance(each, BaseException)]
