"""Image registries by their HTTP API (OCI distribution), without an engine: what is there, what is sent.

Credentials and certificates are those of the Docker CLI: its configuration, its helpers, /etc/docker/certs.d.
"""

import hashlib
import ipaddress
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlencode, urljoin, urlsplit

import docker.auth
import docker.errors
import requests
import requests.exceptions

from buildtool.core.errors import BuildFailed, DataError, EnvironmentMissing, SourceUnreachable, ToolError
from buildtool.engine.reference import Reference
from buildtool.image.errors import LIMITS
from buildtool.image.written import Referrer, digest_of, index_of
from probes.core.codec import load
from probes.core.quoting import command, terminal
from probes.core.units import decimal_bytes

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
CONNECT_S, ANSWER_S = 8, 300
ATTEMPTS = 3  # at what fails for now
_PAUSE_S = 1.0
_PIECE_BYTES = 1 << 20
_HUB = "registry-1.docker.io"
_CERTIFICATES = Path("/etc/docker/certs.d")
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_MOST_WORDS = 300  # of a registry's own message


@dataclass(frozen=True)
class Answer:
    """A registry's answer: status, headers, and a body that was read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class _Session(requests.Session):
    """Sends the credentials that it is given, and none of ~/.netrc: not even where a redirect leads."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request  # else ~/.netrc takes the place of our header

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Take our header off a request that goes to another host."""
        was, goes = str(response.request.url), str(prepared_request.url)
        if self.should_strip_auth(was, goes):  # type: ignore[no-untyped-call]
            prepared_request.headers.pop("Authorization", None)


class RegistryBroken(SourceUnreachable):
    """The registry answers that it can't serve this: 5xx, at each of ATTEMPTS."""


class Registry:
    """One repository of a registry. Every method raises errors that name it, with what to type next.

    EnvironmentMissing for refused credentials, SourceUnreachable for one that doesn't answer or can't for
    now, DataError for what it doesn't have, BuildFailed for what it refuses.
    """

    def __init__(self, name: Reference) -> None:
        self.name = name
        self.host = name.host
        path = name.canonical.partition("@")[0].partition("/")[2]
        self.repository = path if name.digest else path.rpartition(":")[0]
        self._session = _Session()
        self._session.verify = _authorities(self.host)
        self._authorization: str | None = None
        self._base: str | None = None

    def close(self) -> None:
        """Close its connections."""
        self._session.close()

    # ---- what is there

    def digest(self, ref: str) -> str:
        """The digest of the manifest, or index, that a tag or digest names now."""
        answer = self._ask("HEAD", self._manifest(ref), headers={"Accept": ", ".join(MANIFESTS)})
        digest = answer.headers.get("Docker-Content-Digest", "")
        is_known = answer.status == 200 and re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
        return digest if is_known else digest_of(self.manifest(ref))

    def manifest(self, ref: str) -> bytes:
        """The manifest, or index, of a tag or digest."""
        answer = self._ask("GET", self._manifest(ref), headers={"Accept": ", ".join(MANIFESTS)})
        if answer.status != 200:
            raise self._refused(answer, f"has no {self.name}")
        if ref.startswith("sha256:") and digest_of(answer.body) != ref:
            raise DataError(f"{self.host} gives another manifest than {ref}", "ask again later")
        return answer.body

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        return self._ask("HEAD", f"blobs/{digest}").status == 200

    def blob(self, digest: str, n_bytes: int) -> Iterator[bytes]:
        """A blob of that length in pieces; no more is read.

        Raises DataError where it is longer, and at its end where it isn't what has this digest.
        """
        total, left = hashlib.sha256(), n_bytes
        with self._errors(), self._send("GET", self._url(f"blobs/{digest}")) as response:
            if response.status_code != 200:
                raise self._refused(self._read(response), f"has no {digest[:19]} of {self.name}")
            for piece in response.iter_content(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                total.update(piece)
                yield piece
        if f"sha256:{total.hexdigest()}" != digest:
            raise DataError(f"{self.host} gives something else than {digest}", "run the same command again")

    # ---- what is sent

    def mount(self, digest: str, origin: str) -> str | None:
        """Take a blob from another repository of the registry; where it doesn't, the place to send it to.

        Without an `origin`, that place alone is asked for.
        """
        query = "?" + urlencode({"mount": digest, "from": origin}) if origin else ""
        answer = self._ask("POST", f"blobs/uploads/{query}")
        if answer.status == 201:
            return None
        if answer.status != 202 or "Location" not in answer.headers:
            raise self._refused(answer, f"doesn't take {self.name}")
        place = urljoin(self._url("blobs/uploads/"), answer.headers["Location"])
        if self._root().startswith("https:") and place.startswith("http:"):
            place = f"https:{place.removeprefix('http:')}"  # a proxy in front of it ends TLS
        return place

    def upload(self, place: str, content: Path | bytes, digest: str) -> None:
        """Send a blob, a file or bytes, to the place that `mount` gave."""
        url = f"{place}{'&' if urlsplit(place).query else '?'}{urlencode({'digest': digest})}"
        n_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(n_bytes)}
        with (
            nullcontext(content) if isinstance(content, bytes) else content.open("rb") as data,
            self._errors(),
        ):
            answer = self._read(self._send("PUT", url, headers=headers, data=data))
        if answer.status != 201:
            raise self._refused(answer, f"doesn't take {self.name}")

    def put_manifest(self, tag: str, text: bytes, media_type: str) -> str:
        """Give an image, whose blobs are there, its tag; returns the digest that the registry has for it."""
        answer = self._ask("PUT", self._manifest(tag), headers={"Content-Type": media_type}, data=text)
        if answer.status != 201:
            raise self._refused(answer, f"doesn't take {self.name}")
        return answer.headers.get("Docker-Content-Digest") or digest_of(text)

    # ---- what is said of an image

    def refer(self, referrer: Referrer, subject: str) -> None:
        """Send a manifest about the image `subject`, which need not be there yet, and what it names.

        A registry that doesn't list such manifests itself gets an index of them, by the tag that the
        distribution specification (1.1) has for it. Two that send at once may lose one of both.
        """
        for blob in dict.fromkeys(referrer.blobs):
            digest = digest_of(blob)
            if not self.has_blob(digest) and (place := self.mount(digest, "")):
                self.upload(place, blob, digest)
        row = referrer.descriptor()
        headers = {"Content-Type": str(row["mediaType"])}
        answer = self._ask("PUT", self._manifest(referrer.digest), headers=headers, data=referrer.manifest)
        if answer.status != 201:
            raise self._refused(answer, f"doesn't take what is said of {self.name}")
        if "OCI-Subject" not in answer.headers:
            rows = [each for each in self.referrers(subject) if each.get("digest") != row["digest"]]
            self.put_manifest(_referrers_tag(subject), index_of([*rows, row]), MANIFESTS[1])

    def referrers(self, subject: str) -> list[dict[str, Any]]:
        """The descriptors of the manifests about the image `subject`, by the registry or by that tag.

        Raises DataError for a list that can't be read or comes in parts.
        """
        headers = {"Accept": MANIFESTS[1]}
        answer = self._ask("GET", f"referrers/{subject}", headers=headers)
        if answer.status != 200:
            answer = self._ask("GET", self._manifest(_referrers_tag(subject)), headers=headers)
        if answer.status == 404:
            return []
        if answer.status != 200:
            raise self._refused(answer, f"doesn't say what refers to {self.name}")
        try:
            index: Any = load(answer.body)
            rows = index["manifests"]
            if "Link" in answer.headers or not all(isinstance(row["digest"], str) for row in rows):
                raise ValueError("not whole")
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{self.host} has a list of what refers to {self.name} that can't be read"
            ) from error
        return [dict(row) for row in rows]

    # ---- requests

    def _manifest(self, ref: str) -> str:
        return f"manifests/{ref}"

    def _url(self, path: str) -> str:
        return f"{self._root()}/v2/{self.repository}/{path}"

    def _root(self) -> str:
        """The address; on loopback, as for the engine, also without TLS."""
        if self._base is None:
            host = _HUB if self.name.is_on_hub else self.host
            self._base = f"https://{host}"
            if _is_loopback(host):
                try:
                    wait = (CONNECT_S, CONNECT_S)
                    self._session.get(f"https://{host}/v2/", timeout=wait, stream=True).close()
                except requests.exceptions.RequestException:
                    self._base = f"http://{host}"
        return self._base

    def _ask(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, data: bytes | None = None
    ) -> Answer:
        """A request, made again where the registry can't answer for now."""
        for attempt in range(1, ATTEMPTS + 1):
            is_last = attempt == ATTEMPTS
            try:
                with self._errors():
                    answer = self._read(self._send(method, self._url(path), headers=headers, data=data))
            except SourceUnreachable:
                if is_last:
                    raise
            else:
                if answer.status < 500 or is_last:
                    if answer.status in (401, 403, 429) or answer.status >= 500:
                        raise self._refused(answer, f"doesn't answer for {self.name}")
                    return answer
            time.sleep(_PAUSE_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes | BinaryIO | None = None,
    ) -> requests.Response:
        """A request with the credentials that the registry asks for; only it gets them."""
        own_headers = dict(headers or {})
        for is_last in (False, True):
            own = urlsplit(url)[:2] == urlsplit(self._root())[:2]
            if self._authorization and own:
                own_headers["Authorization"] = self._authorization
            response = self._session.request(
                method, url, headers=own_headers, data=data, stream=True, timeout=(CONNECT_S, ANSWER_S)
            )
            if response.status_code != 401 or is_last or not own:
                return response
            challenge = response.headers.get("WWW-Authenticate", "")
            response.close()
            if (authorization := self._answer_to(challenge)) is None:
                return response
            self._authorization = authorization
            if data is not None and not isinstance(data, bytes):
                data.seek(0)
        raise AssertionError("the last attempt returns")

    def _answer_to(self, challenge: str) -> str | None:
        """What to answer to a demand for credentials; None where there is nothing to answer."""
        kind, _, rest = challenge.partition(" ")
        login = self._login()
        user, password = (str(login.get(key) or "").encode() for key in ("Username", "Password"))
        if kind.lower() == "basic":
            return requests.auth._basic_auth_str(user, password) if user else None
        if kind.lower() != "bearer":
            return None
        asked = dict(_PARAMETER.findall(rest))
        realm = asked.pop("realm", "")
        scope = asked.get("scope") or f"repository:{self.repository}:pull,push"
        secret = urlsplit(realm).scheme == "https" or _is_loopback(urlsplit(realm).netloc)
        if not secret:
            return None
        fields = {"service": asked.get("service", ""), "scope": scope}
        if token := login.get("IdentityToken"):
            form = {**fields, "grant_type": "refresh_token", "refresh_token": token, "client_id": "weir"}
            response = self._session.post(
                realm,
                data=form,
                timeout=(CONNECT_S, ANSWER_S),
                stream=True,
                allow_redirects=False,  # which would send the token on, to wherever they lead
            )
        else:
            own = requests.auth.HTTPBasicAuth(user, password) if user else None
            response = self._session.get(
                realm, params=fields, auth=own, timeout=(CONNECT_S, ANSWER_S), stream=True
            )
        answer = self._read(response)
        if answer.status != 200:
            return None
        with suppress(ValueError):
            given: Any = load(answer.body)
            if isinstance(given, dict) and (word := given.get("token") or given.get("access_token")):
                return f"Bearer {word}"
        return None

    def _login(self) -> Mapping[str, Any]:
        """The Docker CLI's credentials for this registry; none where nobody has logged in."""
        try:
            return dict(docker.auth.load_config().resolve_authconfig(self.host) or {})
        except (docker.errors.DockerException, ValueError, KeyError, AttributeError, OSError) as error:
            raise EnvironmentMissing(
                f"the Docker CLI's credentials for {self.host} can't be read: {error}",
                "install the helper that ~/.docker/config.json names as credsStore or in credHelpers",
            ) from error

    def _read(self, response: requests.Response) -> Answer:
        """A response, read to its end. Raises DataError for one that is longer than a document may be."""
        with response:
            body = bytearray()
            for piece in response.iter_content(_PIECE_BYTES):
                body += piece
                if len(body) > LIMITS.document_bytes:
                    raise DataError(
                        f"{self.host} answers for {self.name} with more than "
                        f"{decimal_bytes(LIMITS.document_bytes)}, where a document was asked for",
                        "check the name; if it is right, tell the administrators of that registry",
                    )
            return Answer(response.status_code, response.headers, bytes(body))

    # ---- errors

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except requests.exceptions.RequestException as error:
            raise SourceUnreachable(
                f"{self.host} doesn't answer for {self.name}: {_words(_cause(error))}",
                f"check that this host reaches {self.host}, and its proxy settings",
            ) from error

    def _refused(self, answer: Answer, what: str) -> ToolError:
        """The error for an answer that isn't the wanted one."""
        words = _message(answer)
        login = command("docker", "login") if self.name.is_on_hub else command("docker", "login", self.host)
        match answer.status:
            case 401 | 403:
                return EnvironmentMissing(
                    f"{self.host} refuses {self.name}: {words}",
                    f"log in, as someone who may do that: {login}",
                )
            case 404:
                return DataError(f"{self.host} {what}: {words}", f"check the name; log in: {login}")
            case 429:
                return SourceUnreachable(
                    f"{self.host} takes no more requests for now: {words}",
                    f"wait some minutes and run the same command again; logged in, you may do more: {login}",
                )
            case status if status >= 500:
                return RegistryBroken(
                    f"{self.host} is broken or under maintenance: {words}",
                    "run the same command again later; layers that it has are not sent again",
                )
        return BuildFailed(f"{self.host} {what}: {words}", "see what its administrators allow")


def _referrers_tag(subject: str) -> str:
    return subject.replace(":", "-")


def _message(answer: Answer) -> str:
    """The registry's own words, else its status."""
    with suppress(ValueError, LookupError, TypeError):
        document: Any = load(answer.body)
        return _words(f"{document['errors'][0]['code']} {document['errors'][0].get('message', '')}")
    return f"status {answer.status}"


def _cause(error: BaseException) -> str:
    """What lies below an error of a connection, in its own words."""
    for _ in range(10):
        inner = getattr(error, "reason", None) or next(
            (each for each in error.args if isinstance(each, BaseException)), error.__cause__
        )
        if not isinstance(inner, BaseException):
            break
        error = inner
    return str(error)


def _words(text: str) -> str:
    return terminal(" ".join(text.split())[:_MOST_WORDS])


def _authorities(host: str) -> str | bool:
    """The file of certificate authorities for a host: the engine's for it, else the system's."""
    own = sorted((_CERTIFICATES / host).glob("*.crt")) if (_CERTIFICATES / host).is_dir() else []
    if own:
        return str(own[0])
    return str(_SYSTEM_CA) if _SYSTEM_CA.is_file() else True


def _is_loopback(netloc: str) -> bool:
    host = urlsplit(f"//{netloc}").hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
