"""A connection to the engine that the Docker CLI talks to, and the docker package's failures as ours."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import docker
import docker.errors
import docker.tls
import requests
import requests.exceptions
from docker.constants import MINIMUM_DOCKER_API_VERSION
from docker.utils.config import find_config_file, load_general_config

from buildtool.engine.endpoint import DEFAULT_HOST, Endpoint, current_endpoint
from buildtool.engine.reference import parse_pullable
from buildtool.errors import (
    BuildFailed,
    ConfigError,
    EngineForbidden,
    EngineUnavailable,
    EnvironmentMissing,
    ToolError,
)
from probes.shared.invocation import host_command
from probes.shared.quoting import command

INSTALL = f"as root on Debian or Ubuntu: {host_command()} engine"
NEXT_STEP = f"start one (`sudo systemctl start docker`), or {INSTALL}"
_NO_NAME = ("invalid reference format", "repository name must")  # the engine's messages for a malformed name
# what the docker package raises for a configuration, or an answer, of another shape
UNUSABLE = (
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    docker.errors.DockerException,
    requests.exceptions.RequestException,
)


@contextmanager
def translated() -> Iterator[None]:
    """Turn the docker package's and its transport's exceptions into ours; and an odd answer's."""
    try:
        yield
    except docker.errors.APIError as error:
        if any(sign in str(error.explanation) for sign in _NO_NAME):
            raise ConfigError(
                f"no image can have that name: {error.explanation}", "write NAME[:TAG], NAME in lower case"
            ) from error
        raise BuildFailed(f"the engine refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, ConnectionError) as error:
        raise unavailable(error, endpoint_here()) from error
    except (ToolError, OSError):
        raise
    except Exception as error:  # the package raises all kinds for JSON of another shape, even a bare one
        raise EnvironmentMissing(
            f"what answers at {endpoint_here().host} isn't Docker's API as this tool knows it: {error}",
            "see what is there: docker version; or choose another engine: docker context ls",
        ) from error


@contextmanager
def asked_for(ref: str) -> Iterator[None]:
    """A request in whose address a name stands: the engine would take `x/../../images` for another request.

    Raises ConfigError for what no image can be called; else translates as `translated` does.
    """
    parse_pullable(ref)
    with translated():
        yield


def endpoint_here() -> Endpoint:
    """The engine that this process's environment names. Raises EngineUnavailable."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without a name and without $HOME, as in a container: no settings
        home = Path("/nonexistent")
    return current_endpoint(os.environ, home)


def connected(timeout_s: float) -> docker.DockerClient:
    """A connection to the engine that the Docker CLI uses; the package by itself may find another one.

    Raises ConfigError, EngineUnavailable and what `translated` translates.
    """
    endpoint = endpoint_here()
    require_configuration()
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


def require_configuration() -> None:
    """Refuse a configuration of the Docker CLI that the docker package can't use. Raises ConfigError.

    The package would fail in many ways, or as if no engine answered, and one might be installed in vain.
    """
    path = cast(str, find_config_file())
    try:
        headers = load_general_config().get("HttpHeaders")
        requests.Request("GET", "http://localhost", headers).prepare()
        docker.APIClient(base_url=DEFAULT_HOST, version=MINIMUM_DOCKER_API_VERSION).close()  # asks nothing
    except UNUSABLE as error:
        raise ConfigError(
            f"{path} isn't a configuration that the Docker CLI can have written",
            f"correct it, or move it away: {command('mv', '--', path, f'{path}.old')}",
        ) from error


def unavailable(error: BaseException, endpoint: Endpoint) -> EngineUnavailable:
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
