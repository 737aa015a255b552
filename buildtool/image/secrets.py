"""Finds credentials in an image: files, ENV, labels, history, attestations.

Callers report only their kind and place. There are two signs: a value with a token's known form, under any
name; and a value assigned to a name such as PASSWORD. Obvious placeholders are skipped.

Every search takes time linear in the text, for any content: repetitions are possessive (`++`) or bounded
where what follows them may be missing, and no search begins twice within one run of bytes.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class _Hit:
    """A credential in a text: its kind, and which bytes are the secret."""

    kind: str
    start: int
    end: int


# Which files are searched.


class SearchScope(Enum):
    """Which files of a directory are searched for credentials."""

    NAMED_FILES = "files named after credentials"
    NO_CODE = "all text but code"
    ALL_TEXT = "all text"


SCANNED_BYTES = 256 << 10  # larger files aren't searched: credentials are in small ones
# Files in which a value without a name, or with a common one, is a credential.
SPECIAL = {
    b".netrc": rb"\bpassword\s+(?P<s>\S{3,})",
    b"_netrc": rb"\bpassword\s+(?P<s>\S{3,})",
    b".pgpass": rb"(?m)^[^#:\s]+:[^:\s]*:[^:\s]*:[^:\s]*:(?P<s>\S+)$",
    b".htpasswd": rb"(?m)^[^:\s]+:(?:\$apr1\$|\$2[aby]\$|\{SHA\})(?P<s>\S+)",
    b"shadow": rb"(?m)^[^:\s]+:(?P<s>\$[^:\s]{8,})",
    b"kaggle.json": rb"\"key\"\s*:\s*\"(?P<s>[0-9a-f]{32})\"",
    b"rclone.conf": rb"(?m)^pass\s*=\s*(?P<s>\S{8,})",
    b"kubeconfig": rb"client-key-data:\s*(?P<s>\S{40,})",
    b"config": rb"client-key-data:\s*(?P<s>\S{40,})",
}
NAMED = frozenset(SPECIAL) | frozenset(
    b".pypirc pip.conf .npmrc .yarnrc .yarnrc.yml .git-credentials .my.cnf .env credentials .dockercfg .s3cfg"
    b" .boto id_rsa id_ed25519 id_ecdsa id_dsa application_default_credentials.json .vault-token .terraformrc"
    b" secrets.yaml hosts.yml".split()
)
_LIBRARIES = re.compile(
    rb"(^|/)(site-packages|dist-packages|node_modules|conda-meta|python3(\.\d+)?|share/doc)(/|$)"
    rb"|^(usr/(lib\w*|share|include|src)|lib\w*|proc|sys|dev|boot|var/lib/(dpkg|apt)|usr/local/(lib\w*|include|share))(/|$)"
    rb"|^opt/(conda|rocm[^/]*)/(lib\w*|include|share|pkgs|llvm)(/|$)"
)
_LIB = re.compile(rb"(^|/)lib(64)?(/|$)")
_NO_TEXT = re.compile(
    rb"(?i)\.(so|pyc|pyo|h|hpp|c|cc|cpp|cu|a|o|mo|gz|xz|bz2|zst|zip|whl|jar|png|jpe?g|gif|ico|svg|woff2?|ttf|css|map"
    rb"|safetensors|gguf|onnx|pt|pth|bin|npy|npz|parquet|db|sqlite3?|co|hsaco|dat|crt|po|md|rst|html?)$"
)
CODE = re.compile(rb"\.(pyi?|js|mjs|ts|go|java|rb|json|ya?ml|toml|tf|ipynb|php|lua|xml)$")


def search_scope(directory: bytes) -> SearchScope:
    """Which files of a directory are searched. Code of libraries is full of names and examples."""
    if _LIBRARIES.search(directory):
        return SearchScope.NAMED_FILES
    return SearchScope.NO_CODE if _LIB.search(directory) else SearchScope.ALL_TEXT


def should_search(name: bytes, scope: SearchScope) -> bool:
    """Whether to search a file, by its name."""
    if name in NAMED:
        return True
    if scope is SearchScope.NAMED_FILES or _NO_TEXT.search(name):
        return False
    return scope is SearchScope.ALL_TEXT or not CODE.search(name)


# What is found.


@dataclass(frozen=True)
class Credentials:
    """What was found in one place. `values` are for `redacted`, never for a report."""

    kinds: tuple[str, ...]  # sorted, each once
    values: frozenset[bytes]


def credentials_in_file(directory: bytes, name: bytes, content: bytes) -> Credentials:
    """The credentials in a file."""
    return _credentials(_hits_in_file(directory, name, content), content)


def credentials_in_text(text: str) -> Credentials:
    """The credentials in ENV, a label or a step of the history."""
    return _credentials(_hits_in_text(_raw(text)), _raw(text))


def credentials_in_document(content: bytes) -> Credentials:
    """The credentials in a JSON document."""
    hits = [*_tokens(content), *_assigned_values(_ASSIGNMENTS["code"], content)]
    return _credentials(hits, content)


def _credentials(hits: Collection[_Hit], raw: bytes) -> Credentials:
    """Values that aren't UTF-8 are left out: no text that a report repeats has them."""
    texts = (raw[hit.start : hit.end] for hit in hits)
    values = frozenset(value for value in texts if value.decode("utf-8", "ignore").encode() == value)
    return Credentials(tuple(sorted({hit.kind for hit in hits})), values)


_HIDDEN = "[redacted]"
_MOST_KNOWN = 500  # credentials that are searched for one by one


def redacted(text: str, known: Collection[bytes] = ()) -> str:
    """The text without the credentials that `credentials_in_text` finds, and without `known` ones.

    Nothing is left of it where too many are known to search for each.
    """
    if text and len(known) > _MOST_KNOWN:
        return _HIDDEN
    raw = _raw(text)
    kept: list[bytes] = []
    end = 0
    for hit in _without_overlaps([*_hits_in_text(raw), *_repeated(known, raw)]):
        kept += raw[end : hit.start], _HIDDEN.encode()
        end = hit.end
    return b"".join([*kept, raw[end:]]).decode("utf-8", "surrogatepass")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _hits_in_file(directory: bytes, name: bytes, content: bytes) -> list[_Hit]:
    if b"\0" in content[:1024]:
        return []
    hits = [*_tokens(content), *_file_specific(name, content, _FILE_PATTERNS.get(name))]
    if not directory.startswith(b"etc"):  # system settings have many names and no secrets tied to them
        hits += _assigned_values(_ASSIGNMENTS["code"], content) if CODE.search(name) else ()
        hits += _assigned_values(_ASSIGNMENTS["ini"], content) if _INI.search(name) or name in NAMED else ()
    return hits


def _hits_in_text(raw: bytes) -> list[_Hit]:
    netrc = _file_specific(b".netrc", raw, _WRITTEN_NETRC)
    return _without_overlaps(
        [
            *_tokens(raw),
            *netrc,
            *_assigned_values(_ASSIGNMENTS["shell"], raw),
            *_assigned_values(_ASSIGNMENTS["code"], raw),
        ]
    )


def _repeated(known: Collection[bytes], raw: bytes) -> Iterator[_Hit]:
    """Where a text repeats credentials that were found elsewhere."""
    for value in known:
        at = raw.find(value)
        while at >= 0:
            yield _Hit("known", at, at + len(value))
            at = raw.find(value, at + len(value))


def _without_overlaps(hits: list[_Hit]) -> list[_Hit]:
    """The hits in their order; those that overlap are one."""
    kept: list[_Hit] = []
    for hit in sorted(hits, key=lambda hit: (hit.start, -hit.end)):
        if not kept or hit.start >= kept[-1].end:
            kept.append(hit)
        else:
            last = kept.pop()
            kept.append(_Hit(last.kind, last.start, max(last.end, hit.end)))
    return kept


# Values with a token's known form.

# kind -> literals of which one must be there (quicker to find than a pattern), and the pattern, whose group
# `s` is the secret; forms as their issuers and secret scanners document them
_TOKENS: dict[str, tuple[tuple[bytes, ...], bytes]] = {
    "AWS access key": ((b"AKIA", b"ASIA"), rb"\b(?P<s>A(?:KIA|SIA)[A-Z2-7]{16})\b"),
    "GitHub token": (
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        rb"\b(?P<s>gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255})\b",
    ),
    "GitLab token": ((b"glpat-", b"gldt-", b"glrt-"), rb"\b(?P<s>gl(?:pat|dt|rt)-[A-Za-z0-9_-]{20,255})"),
    "Hugging Face token": ((b"hf_",), rb"\b(?P<s>hf_[A-Za-z0-9]{30,64})\b"),
    "Slack token": ((b"xox",), rb"\b(?P<s>xox[abeoprs]-[A-Za-z0-9-]{10,255})"),
    "Slack webhook": (
        (b"hooks.slack.com",),
        rb"hooks\.slack\.com/services/(?P<s>T[A-Za-z0-9]+/B[A-Za-z0-9]+/[A-Za-z0-9]{16,})",
    ),
    "Google API key": ((b"AIza",), rb"\b(?P<s>AIza[A-Za-z0-9_-]{35})\b"),
    "Google OAuth secret": (
        (b"GOCSPX-", b"1//0", b"ya29."),
        rb"\b(?P<s>GOCSPX-[A-Za-z0-9_-]{20,}|1//0[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{30,})",
    ),
    "package index token": (
        (b"pypi-", b"npm_"),
        rb"\b(?P<s>pypi-[A-Za-z0-9_-]{50,}|npm_[A-Za-z0-9]{36})\b",
    ),
    "Docker token": ((b"dckr_",), rb"\b(?P<s>dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,})"),
    "payment API key": ((b"k_live_",), rb"\b(?P<s>[rs]k_live_[A-Za-z0-9]{20,})\b"),
    "model API key": ((b"sk-",), rb"\b(?P<s>sk-(?:proj-|ant-|or-)?[A-Za-z0-9_-]{32,})"),
    "mail API key": ((b"SG.",), rb"\b(?P<s>SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43})"),
    "Vault token": ((b"hvs.", b"hvb."), rb"\b(?P<s>hv[sb]\.[A-Za-z0-9_-]{20,})"),
    "Azure storage key": ((b"AccountKey=",), rb"AccountKey=(?P<s>[A-Za-z0-9+/]{60,}={0,2})"),
    "JSON web token": (
        (b"eyJ",),
        rb"(?<![\w-])(?P<s>eyJ[A-Za-z0-9_-]{10,}+\.eyJ[A-Za-z0-9_-]{10,}+\.[A-Za-z0-9_-]{10,})",
    ),
    "private key": (
        (b"PRIVATE KEY",),
        rb"-----BEGIN (?:[A-Z0-9]++ ){0,4}PRIVATE KEY(?: BLOCK)?-----(?P<s>[\s\w+/=:,.;\\-]{64,})",
    ),
    "password in a URL": (
        (b"://",),
        rb"://[^\s/:@\"'`]{0,99}:(?P<s>[^\s/:@\"'`]{3,200})@[\w.\[-]",
    ),
    "HTTP authorization": (
        (b"uthorization", b"UTHORIZATION"),
        rb"(?i:authorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:bearer|basic|token)\s{1,9})(?P<s>[\w.~+/=-]{8,})",
    ),
    "registry login": (
        (b'"auth"', b'"identitytoken"'),
        rb"\"(?:auth|identitytoken)\"\s{0,9}:\s{0,9}\"(?P<s>[A-Za-z0-9+/=_.-]{8,})\"",
    ),
    "password option": (
        (b" -",),
        rb"\s--?(?i:password|passwd|token|api-?key|secret)[= ](?P<s>[^\s$\"'<\\-][^\s\"']{3,})",
    ),
    "login option": (
        (b" -u", b" --user"),
        rb"\s(?:-u|--user)[= ]?[\"']?[\w.@-]{1,64}+:(?P<s>[^\s$\"']{4,})",
    ),
}
_TOKEN_PATTERNS = {kind: (marks, re.compile(text)) for kind, (marks, text) in _TOKENS.items()}
# A form that is a credential only in a command of these programs, at most this many bytes before it.
_LOGIN = "login option"
_CLIENT = re.compile(rb"\b(?:curl|wget|twine)\b")
_NEXT_COMMAND = re.compile(rb"[\n|;&]")
_CLIENT_BYTES = 200
_PLACEHOLDER_BYTES = 100  # bytes of a value in which a placeholder would show
_PLACEHOLDER = re.compile(
    rb"(?i)example|placeholder|change_?me|your|dummy|redacted|xxxx|\*\*\*|\.\.\.|^(none|null|true|false|test|password"
    rb"|passwd|secret|token|pass|user|default|required|optional|disabled|enabled|string|str|\d{1,8}|.*[<>{}].*|[$%/~@].*)$"
)


def _tokens(raw: bytes) -> Iterator[_Hit]:
    for kind, (marks, pattern) in _TOKEN_PATTERNS.items():
        if any(mark in raw for mark in marks):
            for match in pattern.finditer(raw):
                value = match["s"][:_PLACEHOLDER_BYTES]
                if _PLACEHOLDER.search(value) or len(set(value)) <= 3:
                    continue
                if kind != _LOGIN or _is_of_client(raw, match.start()):
                    yield _Hit(kind, *match.span("s"))


def _is_of_client(raw: bytes, option: int) -> bool:
    """Whether the option that begins there belongs to a command of a client that logs in."""
    before = raw[max(0, option - _CLIENT_BYTES) : option]
    ends = [match.end() for match in _CLIENT.finditer(before)]
    return bool(ends) and not _NEXT_COMMAND.search(before, ends[-1])


# Values assigned to a name.

_WORD = (
    rb"(?i:passw(?:or)?d|passphrase|secret|token(?!s|iz)|api_?key|access_?key|private_?key|auth_?key|_auth\b"
    rb"|credential)(?P<n>[\w-]{0,40}+)"
)
# what such a word begins with; literals are found much quicker than the pattern, which few texts need
_BEGINNINGS = tuple(
    b"passw passphrase secret token apikey api_key accesskey access_key privatekey private_key authkey"
    b" auth_key _auth credential".split()
)


def _beginnings(raw: bytes) -> list[int]:
    """Where `_WORD` may match, sorted."""
    lowered = raw.lower()
    places: set[int] = set()
    for literal in _BEGINNINGS:
        at = lowered.find(literal)
        while at >= 0:
            places.add(at)
            at = lowered.find(literal, at + 1)
    return sorted(places)


@dataclass(frozen=True, slots=True)
class _Assignment:
    """How a kind of text assigns a value to a name such as PASSWORD; the value ends at a byte in `ends`."""

    head: re.Pattern[bytes]
    ends: re.Pattern[bytes]
    least: int  # bytes of a value
    closing: re.Pattern[bytes] = re.compile(b"")

    def values(self, raw: bytes) -> Iterator[tuple[bytes, int, int]]:
        """What follows the decisive word in the name, and where the value is."""
        at = end = 0
        for begin in _beginnings(raw):
            head = self.head.match(raw, begin) if begin >= at else None
            if head is None:
                continue
            at = start = head.end()
            if start >= end:  # else an earlier name's value, of the same run of bytes, ended there too
                match = self.ends.search(raw, start)
                end = match.start() if match else len(raw)
            quote = head["q"]
            if end - start < self.least or not raw.startswith(quote, end):
                continue
            closing = self.closing.match(raw, end + len(quote))
            if closing:
                at = closing.end()
                yield head["n"], start, end


_ASSIGNMENTS = {
    "shell": _Assignment(re.compile(_WORD + rb"=(?P<q>[\"']?)"), ends=re.compile(rb"[\s\"';|&]"), least=4),
    "ini": _Assignment(
        re.compile(_WORD + rb"[ \t]{0,9}+[=:][ \t]{0,9}+(?P<q>[\"']?)"),
        ends=re.compile(rb"[\s\"'#;,()\[\]{}]"),
        least=4,
        closing=re.compile(rb"[ \t\r]{0,9}+(?=\n|\Z)"),
    ),
    "code": _Assignment(
        re.compile(_WORD + rb"[\"']?\]?[ \t]{0,9}+[=:][ \t]{0,9}+(?P<q>[\"'])"),
        ends=re.compile(rb"[\s\"'()\[\]{}]"),
        least=6,
    ),
}
_NOT_SECRET_NAME = re.compile(
    rb"(?i)(file|path|dir|url|uri|name|ttl|type|ids?|expir\w*|len\w*|limit|max|min|size|header|prefix|env|count"
    rb"|sock|mode|class|policy|enabled|required|parallelism|provider|manager|store|helper)$"
)
_INI = re.compile(
    rb"(?i)(^|\.)(env|ini|cfg|conf|properties|sh|bash|ya?ml|toml|npmrc|pypirc|cnf|s3cfg|boto|txt)(\.\w+)?$"
)


def _assigned_values(tie: _Assignment, raw: bytes) -> Iterator[_Hit]:
    for name, start, end in tie.values(raw):
        value = raw[start : min(end, start + _PLACEHOLDER_BYTES)]
        if not _NOT_SECRET_NAME.search(name) and not _PLACEHOLDER.search(value):
            yield _Hit("value of a name such as PASSWORD or TOKEN", start, end)


# Values that only a file of this name, or a command that writes it, gives away.

_FILE_PATTERNS = {name: re.compile(text) for name, text in SPECIAL.items()}
# What a command writes to a .netrc, perhaps with `\n` for its line ends.
_WRITTEN_NETRC = re.compile(
    rb"\b(?:machine(?:\s|\\[nt])++[^\s\\]{1,200}+|default)(?:\s|\\[nt])++login(?:\s|\\[nt])++[^\s\\]{1,200}+"
    rb"(?:\s|\\[nt])++password\s++(?P<s>[^\s\\\"']{3,}+)"
)


def _file_specific(name: bytes, raw: bytes, pattern: re.Pattern[bytes] | None) -> Iterator[_Hit]:
    for match in pattern.finditer(raw) if pattern else ():
        if not _PLACEHOLDER.search(
            match["s"][:_PLACEHOLDER_BYTES].lstrip(b"$")
        ):  # hashes begin with a dollar sign
            yield _Hit(f"password in {name.decode()}", *match.span("s"))
