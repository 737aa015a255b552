"""Compose projects, by Docker's command line: a service as compose resolves it, started and asked about."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buildtool.core.command import CommandFailed, run
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.files import write_text
from buildtool.core.yaml_text import Limits, require_bounded
from probes.core.codec import load
from probes.core.files import read_text
from probes.core.quoting import terminal

_COMPOSE = ("docker", "compose")
_MOST_BYTES = 4 << 20
_LIMITS = Limits(depth=100, nodes=100_000)
_READ_S = 120.0  # files that a file includes may be far away; compose itself unfolds aliases without end


def resolved(files: Sequence[Path], service: str) -> dict[str, Any]:
    """The document of a service and of what it depends on, with variables and files merged.

    Raises ConfigError for what compose refuses, EnvironmentMissing without compose.
    """
    if service.startswith("-"):
        raise ConfigError(f"{terminal(service)} would pass for an option", "name a service of the file")
    for path in files:
        _require_bounded(path)
    words = [word for path in files for word in ("-f", str(path))]
    try:
        done = run([*_COMPOSE, *words, "config", "--format", "json", service], seconds=_READ_S)
    except CommandFailed as error:
        raise ConfigError(
            f"compose can't read {', '.join(map(str, files))}: {terminal(error.tail, keep=chr(10))}",
            "see: docker compose config",
        ) from error
    try:
        document: Any = load(done.stdout)
        found = document["services"][service]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError("compose printed no service as JSON", "see: docker compose config") from error
    if not isinstance(found, dict):
        raise DataError(f"compose printed no service {terminal(service)}", "see: docker compose config")
    return dict(document)


def _require_bounded(path: Path) -> None:
    """Refuse what compose would read without end: a pipe without a writer, aliases of aliases."""
    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text", "save it as UTF-8") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"can't read {path}: {why}", "check the path and its permissions") from error
    require_bounded(text, str(path), _LIMITS)


@dataclass(frozen=True)
class Project:
    """A document that is started under a name of its own, and its service."""

    name: str
    file: Path
    service: str

    def _run(self, *words: str) -> str:
        return run([*_COMPOSE, "--progress", "quiet", "-p", self.name, "-f", str(self.file), *words]).stdout

    def up(self, seconds: int) -> None:
        """Start the service and wait until it is healthy, or runs. Raises CommandFailed."""
        self._run("up", "-d", "--no-build", "--wait", "--wait-timeout", str(seconds), self.service)

    def run_to_end(self) -> None:
        """Start the service, and wait for its end. Raises CommandFailed for another code than 0."""
        self._run("up", "--no-build", "--no-log-prefix", "--exit-code-from", self.service, self.service)

    def url(self, ports: Sequence[Mapping[str, Any]]) -> str:
        """Where the first of the service's ports is reached; empty without one."""
        for port in ports:
            target = str(port.get("target", ""))
            try:
                place = self._run("port", self.service, target).strip()
            except CommandFailed:
                place = ""
            if place and not place.endswith(":0"):
                return f"http://{place.replace('0.0.0.0', '127.0.0.1')}"
        return ""


@contextmanager
def project(folder: Path, document: Mapping[str, Any], name: str, service: str) -> Iterator[Project]:
    """A project for the block; what it started is removed afterwards, with its volumes of no name."""
    path = folder / "compose.json"
    write_text(path, json.dumps(document))
    made = Project(name, path, service)
    try:
        yield made
    finally:
        try:
            made._run("rm", "--stop", "--force", "--volumes")  # what `down` leaves: volumes without a name
        finally:
            made._run("down", "-t", "10", "--remove-orphans")
