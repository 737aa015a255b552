"""Pushes and pulls images, by `docker push` and `docker pull`, and tells apart why they fail.

The CLI rather than the SDK: only it supports every kind of login (credential files, helpers, tokens).
"""

import re

from buildtool.core.command import CommandFailed, relay, run_streaming
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

# phrases of the CLI, engines and registries, in lower case
_NO_ENGINE = ("cannot connect to the docker daemon", "is the docker daemon running")
_NO_HELPER = ("error getting credentials",)
_DISK_FULL = ("no space left",)
_NO_ANSWER = (
    *("connection refused", "connection reset", "no such host", "i/o timeout", "deadline exceeded"),
    *("tls handshake", "unreachable", "server misbehaving", "name resolution", "client.timeout"),
    *("http response to https client", "x509:", "proxyconnect", "closed network connection"),
    *("broken pipe", ": eof", "unexpected eof", "redirects"),
)
_RATE_LIMITED = ("toomanyrequests", "too many requests")
_SERVER_ERROR = re.compile(r"\b5\d\d [a-z]+")  # 500 internal server error, 504 gateway timeout
_FORBIDDEN = ("denied", "unauthorized", "authentication required", "no basic auth", "forbidden")
_NOT_FOUND = ("not found", "manifest unknown", "name unknown", "no matching manifest")
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
    image_id = engine.tag(image, name)  # right before the push: somebody may have moved the tag
    lines = relay(progress, _Layers(f"push {name}").line, verbose=verbose)
    try:
        done = run_streaming(["docker", "push", str(name)], progress=lines)
    except CommandFailed as error:
        raise push_error(name, error.tail) from error
    digests = _DIGEST.findall(done.tail)
    digest = str(digests[-1]) if digests else ""
    pushed = engine.inspect(f"{name.repository}@{digest}") if digest else None
    if pushed and pushed["Id"] != image_id:
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
    options = [f"--platform={platform}"] if platform else []
    try:
        run_streaming(
            ["docker", "pull", *options, str(name)],
            progress=relay(progress, _Layers(f"pull {name}").line, verbose=False),
        )
    except CommandFailed as error:
        raise pull_error(name, error.tail) from error


def push_error(name: Reference, tail: str) -> ToolError:
    """Why a push failed, by the CLI's last lines. Pure."""
    words, signs = _reason(tail, name)
    if error := _common_error(words, signs, name):
        return error
    if _contains(signs, _FORBIDDEN):
        return EnvironmentMissing(
            f"{name.host} refuses to take {name}: {words}",
            f"log in, as someone who may push there: {_login(name)}",
        )
    if _contains(signs, _NO_ANSWER):
        return SourceUnreachable(f"{name.host} doesn't take {name}: {words}", _reach(name))
    return BuildFailed(
        f"{name} wasn't pushed: {words}", f"see all of it: {command('docker', 'push', str(name))}"
    )


def pull_error(name: Reference, tail: str) -> ToolError:
    """Why a pull failed, by the CLI's last lines. Pure."""
    words, signs = _reason(tail, name)
    if error := _common_error(words, signs, name):
        return error
    if _contains(signs, _NO_ANSWER):
        return SourceUnreachable(
            f"the engine has no image {name}, and {name.host} doesn't answer: {words}", _reach(name)
        )
    why = f"the engine has no image {name}, and can't pull it from {name.host}: {words}"
    if _contains(signs, (*_FORBIDDEN, *_NOT_FOUND)):
        return DataError(why, f"check the name; log in for a private image: {_login(name)}")
    return DataError(why, f"see all of it: {command('docker', 'pull', str(name))}")


def _reason(tail: str, name: Reference) -> tuple[str, str]:
    """The CLI's last line; and that line in lower case without names, since an image may be `team/denied`."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()] or ["it gave no reason"]
    words = lines[-1].removeprefix(_PREFIX)
    return words, _ADDRESS.sub("", words).replace(str(name), "").replace(name.repository, "").lower()


def _common_error(words: str, signs: str, name: Reference) -> ToolError | None:
    """The error for what isn't the registry's fault, or may pass by itself; None for anything else."""
    if _contains(signs, _NO_ENGINE):
        return EngineUnavailable("no Docker engine answers", NEXT_STEP)
    if _contains(signs, _NO_HELPER):
        return EnvironmentMissing(
            f"the docker CLI can't read its credentials: {words}",
            "install the helper that ~/.docker/config.json names as credsStore or in credHelpers",
        )
    if _contains(signs, _DISK_FULL):
        return EnvironmentMissing(
            f"the engine's disk is full: {words}", "docker system df; docker image prune"
        )
    if _contains(signs, _RATE_LIMITED):
        return SourceUnreachable(
            f"{name.host} takes no more requests for now: {words}",
            f"wait some minutes and run the same command again; logged in, you may do more: {_login(name)}",
        )
    if _SERVER_ERROR.search(signs):
        return SourceUnreachable(
            f"{name.host} is broken or under maintenance: {words}",
            "run the same command again later; layers that it has are not sent again",
        )
    return None


def _contains(words: str, signs: tuple[str, ...]) -> bool:
    return any(sign in words for sign in signs)


def _login(name: Reference) -> str:
    """The command that logs in to the name's registry; Docker Hub is the CLI's default."""
    return command("docker", "login") if name.is_on_hub else command("docker", "login", name.host)


def _reach(name: Reference) -> str:
    return f"check that the engine's host reaches {name.host}; the engine has its own proxy settings"
