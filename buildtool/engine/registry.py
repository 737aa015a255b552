"""The gate to image registries: `docker push` and `docker pull`, whose credentials are the CLI's own.

The engine moves the layers. We run the CLI rather than call the SDK because only the CLI supports every
kind of login: credential files, helpers and tokens.
"""

import re

from buildtool.core.command import CommandFailed, relay, run_loud
from buildtool.core.errors import (
    BuildFailed,
    DataError,
    EngineUnavailable,
    EnvironmentMissing,
    SourceUnreachable,
    ToolError,
)
from buildtool.core.progress import Progress
from buildtool.engine.client import Engine
from buildtool.engine.connection import NEXT_STEP
from buildtool.engine.reference import Reference
from probes.core.quoting import command

_LAYER = re.compile(r"([0-9a-f]{12}): (.+)")
_DONE = ("Pull complete", "Download complete", "Already exists", "Pushed", "Layer already exists", "Mounted")
_DIGEST = re.compile(r"digest: (sha256:[0-9a-f]{64})")
_PREFIX = "Error response from daemon: "

# phrases that the CLI, engines and registries use, in lower case
_NO_ENGINE = ("cannot connect to the docker daemon", "is the docker daemon running")
_NO_HELPER = ("error getting credentials",)
_FULL = ("no space left",)
_SILENT = (
    *("connection refused", "connection reset", "no such host", "i/o timeout", "deadline exceeded"),
    *("tls handshake", "unreachable", "server misbehaving", "name resolution", "client.timeout"),
    *("http response to https client", "x509:", "proxyconnect", "closed network connection"),
    *("broken pipe", ": eof", "unexpected eof", "redirects"),
)
_BUSY = ("toomanyrequests", "too many requests")
_BROKEN = re.compile(r"\b5\d\d [a-z]+")  # 500 internal server error, 504 gateway timeout
_FORBIDDEN = ("denied", "unauthorized", "authentication required", "no basic auth", "forbidden")
_ABSENT = ("not found", "manifest unknown", "name unknown", "no matching manifest")
_ADDRESS = re.compile(r"\"[^\"]*\"|https?://\S+")  # what the user or the registry chose; it holds no signs


class _Layers:
    """Counts the layers of a push or a pull from the CLI's lines."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._seen: set[str] = set()
        self._done: set[str] = set()

    def line(self, line: str) -> str | None:
        """The progress, if the line completes a layer; else None."""
        match = _LAYER.fullmatch(line.strip())
        if match is None:
            return None
        layer, state = match.groups()
        self._seen.add(layer)
        if layer in self._done or not state.startswith(_DONE):
            return None
        self._done.add(layer)
        return f"{self._label}: {len(self._done)} of {len(self._seen)} layers"


def push(image: str, name: Reference, *, engine: Engine, progress: Progress, verbose: bool = False) -> str:
    """Tag an image, given by its digest, and push that tag.

    Returns the digest that the registry now has for that name, empty where the CLI doesn't print one.
    Raises EnvironmentMissing when the registry refuses the credentials or the engine's disk is full,
    SourceUnreachable when it doesn't answer or can't take it now, BuildFailed for any other reason, such as
    another image under that name.
    """
    ours = engine.tag(image, name)  # right before the push: somebody may have moved the tag
    hear = relay(progress, _Layers(f"push {name}").line, verbose=verbose)
    try:
        done = run_loud(["docker", "push", str(name)], progress=hear)
    except CommandFailed as error:
        raise push_fault(name, error.tail) from error
    found = _DIGEST.findall(done.tail)
    digest = str(found[-1]) if found else ""
    there = engine.inspect(f"{name.repository}@{digest}") if digest else None
    if there and there["Id"] != ours:
        raise BuildFailed(
            f"{name} was pushed as another image, {digest}: somebody moved that tag meanwhile",
            "run the same command again when no other build pushes that name",
        )
    return digest


def pull(name: Reference, *, progress: Progress, platform: str | None = None) -> None:
    """Pull an image into the engine, for `platform` or else for the engine's own.

    Raises DataError when the registry has no such image for this user, SourceUnreachable when it doesn't
    answer, EnvironmentMissing when the disk is full.
    """
    wish = [f"--platform={platform}"] if platform else []
    try:
        run_loud(
            ["docker", "pull", *wish, str(name)],
            progress=relay(progress, _Layers(f"pull {name}").line, verbose=False),
        )
    except CommandFailed as error:
        raise pull_fault(name, error.tail) from error


def push_fault(name: Reference, tail: str) -> ToolError:
    """Why a push failed, by the CLI's last lines. Pure."""
    words, signs = _said(tail, name)
    if fault := _common_fault(words, signs, name):
        return fault
    if _says(signs, _FORBIDDEN):
        return EnvironmentMissing(
            f"{name.host} refuses to take {name}: {words}",
            f"log in, as someone who may push there: {_login(name)}",
        )
    if _says(signs, _SILENT):
        return SourceUnreachable(f"{name.host} doesn't take {name}: {words}", _reach(name))
    return BuildFailed(
        f"{name} wasn't pushed: {words}", f"see all of it: {command('docker', 'push', str(name))}"
    )


def pull_fault(name: Reference, tail: str) -> ToolError:
    """Why a pull failed, by the CLI's last lines. Pure."""
    words, signs = _said(tail, name)
    if fault := _common_fault(words, signs, name):
        return fault
    if _says(signs, _SILENT):
        return SourceUnreachable(
            f"the engine has no image {name}, and {name.host} doesn't answer: {words}", _reach(name)
        )
    why = f"the engine has no image {name}, and can't pull it from {name.host}: {words}"
    if _says(signs, (*_FORBIDDEN, *_ABSENT)):
        return DataError(why, f"check the name; log in for a private image: {_login(name)}")
    return DataError(why, f"see all of it: {command('docker', 'pull', str(name))}")


def _said(tail: str, name: Reference) -> tuple[str, str]:
    """The last line, in which the CLI says what happened; and what of it shows that, without names.

    An image may be called `team/denied`.
    """
    lines = [line.strip() for line in tail.splitlines() if line.strip()] or ["it gave no reason"]
    words = lines[-1].removeprefix(_PREFIX)
    return words, _ADDRESS.sub("", words).replace(str(name), "").replace(name.repository, "").lower()


def _common_fault(words: str, signs: str, name: Reference) -> ToolError | None:
    """The failure, if it isn't the registry's, or one of a registry that answers and may pass by itself."""
    if _says(signs, _NO_ENGINE):
        return EngineUnavailable("no Docker engine answers", NEXT_STEP)
    if _says(signs, _NO_HELPER):
        return EnvironmentMissing(
            f"the docker CLI can't read its credentials: {words}",
            "install the helper that ~/.docker/config.json names as credsStore or in credHelpers",
        )
    if _says(signs, _FULL):
        return EnvironmentMissing(
            f"the engine's disk is full: {words}", "docker system df; docker image prune"
        )
    if _says(signs, _BUSY):
        return SourceUnreachable(
            f"{name.host} takes no more requests for now: {words}",
            f"wait some minutes and run the same command again; logged in, you may do more: {_login(name)}",
        )
    if _BROKEN.search(signs):
        return SourceUnreachable(
            f"{name.host} is broken or under maintenance: {words}",
            "run the same command again later; layers that it has are not sent again",
        )
    return None


def _says(words: str, signs: tuple[str, ...]) -> bool:
    return any(sign in words for sign in signs)


def _login(name: Reference) -> str:
    """The command that logs in to the name's registry; Docker Hub is the CLI's default."""
    return command("docker", "login") if name.is_on_hub else command("docker", "login", name.host)


def _reach(name: Reference) -> str:
    return f"check that the engine's host reaches {name.host}; the engine has its own proxy settings"
