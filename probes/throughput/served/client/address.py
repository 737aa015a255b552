"""What is asked: a URL as a user types it, taken apart. Pure."""

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from probes.errors import UsageError

_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer)?/?")
_WRITE = "write it as http://127.0.0.1:8000, or http://127.0.0.1:8000/v2/models/NAME/infer"


@dataclass(frozen=True)
class Target:
    """A server, and of it a model of the Open Inference Protocol, or any path that takes a POST.

    `model` is empty where the URL and the command line name none; `path` is then the URL's own.
    """

    host: str
    port: int
    tls: bool
    path: str
    model: str
    prefix: str = ""  # of the path, before /v2

    @property
    def url(self) -> str:
        """Without anything secret: a user name in it isn't taken in the first place."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def parse_url(text: str, *, model: str = "") -> Target:
    """The target of a URL. Raises UsageError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {text[:200]!r}: {error}", _WRITE) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {text[:200]!r} is not an http or https URL", _WRITE)
    if port == 0:
        raise UsageError("--url has port 0, on which nothing listens", _WRITE)
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("--url takes no user name, query or fragment", _WRITE)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"--url {text[:200]!r} holds characters that no URL has", _WRITE)
    tls = parts.scheme == "https"
    prefix, found = _model_in(parts.path)
    if found and model and found["model"] != quote(model, safe=""):
        raise UsageError(
            f"--url names the model {found['model']!r}, --served-model {model!r}", "give one of the two"
        )
    path = parts.path.rstrip("/")
    if found or model:
        path = found[0].rstrip("/").removesuffix("/infer") if found else f"/v2/models/{quote(model, safe='')}"
        path = f"{prefix if found else path_prefix(parts.path)}{path}/infer"
        name = found["model"] if found else quote(model, safe="")
        return Target(parts.hostname, port or _usual(tls), tls, path, name, prefix)
    return Target(parts.hostname, port or _usual(tls), tls, path, "", path_prefix(parts.path))


def path_prefix(path: str) -> str:
    """What stands before /v2 in a server's paths."""
    return path.rstrip("/").removesuffix("/v2")


def _model_in(path: str) -> tuple[str, re.Match[str] | None]:
    at = path.find("/v2/models/")
    return (path[:at], _MODEL.fullmatch(path[at:])) if at >= 0 else ("", None)


def _usual(tls: bool) -> int:
    return 443 if tls else 80
