"""Parses names of images as engines and registries do. Pure.

The grammar is the distribution project's (reference/regexp.go), the defaults are the Docker engine's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from buildtool.core.errors import ConfigError
from probes.core.quoting import terminal

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_NAME = re.compile(rf"(?:(?P<host>{_HOST})/)?(?P<path>{_PART}(?:/{_PART})*)")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}")
_ID = re.compile(r"(?:sha256:)?[0-9a-f]{64}")
_ANY_ID = re.compile(r"sha256:[0-9a-f]+|[0-9a-f]{12,64}")  # whole or shortened
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{1,20}://(?=[a-z])")  # skopeo's `docker://`, a page's `https://`
_ALIKE = 3  # names to offer for one that isn't there
_MAX_NAME = 255  # of a repository's path
_MAX_TEXT = 1024
_DEFAULT_HOST, _DEFAULT_NAMESPACE, _DEFAULT_TAG = "docker.io", "library", "latest"
_HINT = "write [HOST[:PORT]/]NAME[:TAG], with NAME in lower case"


@dataclass(frozen=True)
class Reference:
    """A reference as the user wrote it: the repository, and a tag or a digest (`sha256:...`) where given."""

    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def canonical(self) -> str:
        """The full name, with host, namespace and tag filled in: equal for all spellings of a name."""
        host, slash, path = self.repository.partition("/")
        if not (slash and _is_host(host)):
            host, path = _DEFAULT_HOST, self.repository
        if host == _DEFAULT_HOST and "/" not in path:
            path = f"{_DEFAULT_NAMESPACE}/{path}"
        end = f"@{self.digest}" if self.digest else f":{self.tag or _DEFAULT_TAG}"
        return f"{host}/{path}{end}"

    @property
    def host(self) -> str:
        """The registry that has it."""
        return self.canonical.partition("/")[0]

    @property
    def is_on_hub(self) -> bool:
        """Whether that is Docker's own registry, which names need not mention."""
        return self.host == _DEFAULT_HOST

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


def parse_reference(text: str) -> Reference:
    """The parts of an image's name. Raises ConfigError for an impossible name."""
    if len(text) > _MAX_TEXT:
        raise _refused(text, "it is too long")
    if match := _SCHEME.match(text):
        is_page = match[0].startswith("http")
        name = "what that page tells to `docker pull`" if is_page else terminal(text[match.end() :][:300])
        raise _refused(text, f"names don't begin with `{match[0]}`", f"write {name}")
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise _refused(text, "what follows `@` is not a digest")
    repository, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:  # that colon is before a registry's port
        repository, colon, tag = rest, "", ""
    if colon and not _TAG.fullmatch(tag):
        raise _refused(text, "a tag has up to 128 letters, digits, `_`, `.` and `-`")
    if _ID.fullmatch(text):
        raise _refused(text, "that is an image's id")
    match = _NAME.fullmatch(repository)
    if not match or len(repository) > _MAX_NAME:
        raise _refused(text, "")
    first, slash, _ = repository.partition("/")
    if slash and not _is_host(first) and not re.fullmatch(_PART, first):
        raise _refused(text, "")
    return Reference(repository, tag or None, digest or None)


def parse_pullable(text: str) -> Reference | None:
    """An image's name as a registry can be asked for it; None for an id, which only an engine knows.

    Raises ConfigError for what no image can be called. `docker images` prints twelve digits of an id.
    """
    return None if _ANY_ID.fullmatch(text) else parse_reference(text)


def parse_new_name(text: str) -> Reference:
    """A name to give to an image, its tag filled in. Raises ConfigError, also for a name with a digest."""
    parsed = parse_reference(text)
    if parsed.digest:
        raise _refused(text, "a digest can't be given to an image")
    return Reference(parsed.repository, parsed.tag or _DEFAULT_TAG)


def alike(text: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names that a mistyped one may mean, at most three: of the same last part, or of similar letters."""
    known = sorted(set(names))
    same = [name for name in known if _last_part(name) == _last_part(text)]
    whole = text if ":" in text.rpartition("/")[2] else f"{text}:{_DEFAULT_TAG}"
    return tuple(dict.fromkeys([*same, *get_close_matches(whole, known, n=_ALIKE, cutoff=0.8)]))[:_ALIKE]


def _last_part(name: str) -> str:
    return name.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _is_host(text: str) -> bool:
    """Whether the first part of a name is a registry: by the engine's rule."""
    return "." in text or ":" in text or text == "localhost" or text.lower() != text


def _refused(text: str, why: str, way_out: str = _HINT) -> ConfigError:
    shown = terminal(text[:300])
    return ConfigError(f"no image can be called `{shown}`{f': {why}' if why else ''}", way_out)
