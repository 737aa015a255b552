"""Which engine the Docker CLI talks to, so that the docker package talks to the same one. Only reads files.

The order is the CLI's: DOCKER_HOST, then DOCKER_CONTEXT, then the context that `docker context use` chose.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildtool.errors import EngineUnavailable
from probes.shared.unknown import Unknown

DEFAULT_HOST = "unix:///var/run/docker.sock"


@dataclass(frozen=True)
class Tls:
    """A context's certificates; None for one that it hasn't."""

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


def current_endpoint(env: Mapping[str, str], home: Path) -> Endpoint:
    """The endpoint of this environment. Raises EngineUnavailable for a context that can't be read."""
    if host := env.get("DOCKER_HOST"):
        verify = bool(env.get("DOCKER_TLS_VERIFY"))
        folder = Path(env.get("DOCKER_CERT_PATH") or home / ".docker")
        tls = _tls(folder, verify=True) if verify else None
        return Endpoint(host, "DOCKER_HOST", "unset DOCKER_HOST", tls)
    folder = Path(env.get("DOCKER_CONFIG") or home / ".docker")
    name = env.get("DOCKER_CONTEXT") or _chosen(folder / "config.json")
    if name == "default":
        return Endpoint(DEFAULT_HOST)
    back = "unset DOCKER_CONTEXT" if env.get("DOCKER_CONTEXT") else "docker context use default"
    return _of_context(folder / "contexts", name, back)


def disk_of(
    endpoint: Endpoint, root: Path, *, engine_host: str, this_host: str, is_seen: bool
) -> Path | Unknown:
    """The engine's directory if it is on this host, else the reason why its disk can't be measured.

    `root` is the engine's name for it; `is_seen` says whether this host has a directory of that name,
    which may be another one. A socket alone proves nothing: ssh forwards them, containers are given them.
    """
    if not endpoint.host.startswith("unix://"):
        return Unknown(f"the engine is at {endpoint.host}, and its disk can't be measured from here")
    if engine_host != this_host:
        return Unknown(f"the engine runs on {engine_host or 'a host without a name'}, not on {this_host}")
    return root if is_seen else Unknown(f"the engine's directory {root} can't be seen from here")


def _chosen(config: Path) -> str:
    """The name of the context in the CLI's configuration; like the CLI, ignores what it can't read."""
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("currentContext")
    except (OSError, ValueError, AttributeError, RecursionError):
        return "default"
    return found if isinstance(found, str) and found else "default"


def _of_context(folder: Path, name: str, back: str) -> Endpoint:
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
