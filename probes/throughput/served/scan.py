"""A served scan from end to end: looks at the server, raises the load, hands each finished level over."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

from probes.core.errors import ServerUnusable
from probes.throughput.served import protocol
from probes.throughput.served.http import (
    GOOD,
    MOST_CONNECTIONS,
    BusySelector,
    Endpoint,
    HttpClient,
    ResponseParser,
    loop_with,
    resolve,
)
from probes.throughput.served.level import Load, measure_level
from probes.throughput.served.load import MakeClient, wake_early_s
from probes.throughput.served.protocol import (
    Body,
    ResponseCheck,
    Target,
    Tensor,
    bodies,
    get,
    request,
    with_sizes,
)
from probes.throughput.served.results import (
    Level,
    ServedBy,
    ServedScan,
    ServedSettings,
    next_callers,
    open_rates,
    saturated,
)

UNFINISHED = "interrupted, or cut off"
T = TypeVar("T")


@dataclass(frozen=True)
class RequestOptions:
    """What to send. `payload`: a whole body that is sent as it is, instead of one made of the metadata."""

    inputs: tuple[str, ...] = ()
    dim: int = 16
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    payload: bytes | None = None
    in_json: bool = False


Listener = Callable[[ServedScan], None]


def scan(target: Target, asking: RequestOptions, settings: ServedSettings, on_level: Listener) -> ServedScan:
    """Measure the closed loop, then the open one. `on_level` is called with everything so far.

    Raises ServerUnusable where the server can't be reached or asked, UsageError for an impossible request,
    and KeyboardInterrupt; what was handed over until then is all that there is.
    """
    watch = BusySelector()
    loop = loop_with(watch)
    try:
        return _Scan(loop, watch, settings, on_level).run(target, asking)
    finally:
        _wind_up(loop)


def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what an interruption has left, so that no connection stays open and nothing warns."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with suppress(KeyboardInterrupt):
        loop.run_until_complete(_ended(tasks))
    loop.close()


async def _ended(tasks: set["asyncio.Task[Any]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # for aborted connections to be closed


class _Scan:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watch: BusySelector,
        settings: ServedSettings,
        on_level: Listener,
    ) -> None:
        self._loop = loop
        self._watch = watch
        self._settings = settings
        self._on_level = on_level

    def run(self, target: Target, asking: RequestOptions) -> ServedScan:
        endpoint = _resolved(target)
        secure = ssl.create_default_context() if target.tls else None
        by, requests, wanted = self._do(self._prepared(target, endpoint, asking, secure))

        def make() -> HttpClient:
            s = self._settings
            return HttpClient(
                endpoint,
                requests,
                self._watch,
                limit_s=s.limit_s,
                keep=s.keep_alive,
                secure=secure,
                wanted=wanted,
            )

        found = ServedScan(by, self._settings, (), UNFINISHED, complete=False)
        self._on_level(found)
        found = self._closed(found, make)
        found = self._open(found, make) if found.complete else found
        self._on_level(found)
        return found

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def _level(self, found: ServedScan, load: Load, make: MakeClient) -> tuple[ServedScan, Level]:
        busy = lambda: self._watch.busy_s  # noqa: E731
        level = self._do(measure_level(load, make, self._settings, busy_s=busy, early_s=wake_early_s))
        found = replace(found, levels=(*found.levels, level))
        self._on_level(found)
        return found, level

    def _closed(self, found: ServedScan, make: MakeClient) -> ServedScan:
        while True:
            callers, why = next_callers(found.of("closed"), self._settings)
            if callers is None:
                answered = bool(found.levels[-1].answered)
                return replace(found, ended=why, complete=answered)
            found, _ = self._level(found, Load("closed", callers), make)

    def _open(self, found: ServedScan, make: MakeClient) -> ServedScan:
        ended = [found.ended]
        most = min(self._settings.most_connections, MOST_CONNECTIONS)
        for rate in open_rates(found.of("closed"), self._settings):
            found, level = self._level(found, Load("open", most, rate), make)
            if why := saturated(level):
                return replace(found, ended="; ".join([*ended, why]), complete=bool(level.latency_s))
        return replace(found, ended="; ".join([*ended, "every rate was measured"]))

    async def _prepared(
        self, target: Target, endpoint: Endpoint, asking: RequestOptions, secure: ssl.SSLContext | None
    ) -> tuple[ServedBy, tuple[bytes, ...], ResponseCheck]:
        """Who answers, the requests to send, of which one has been answered well, and what answers hold."""
        looking = HttpClient(endpoint, (), self._watch, limit_s=self._settings.limit_s, secure=secure)
        keep, authority = self._settings.keep_alive, endpoint.authority
        try:
            if asking.payload is None:
                by, path, made, wanted = await self._described(looking, target, authority, asking)
            else:
                by, path, made, wanted = _given(target, asking.payload)
            requests = tuple(request(body, path=path, authority=authority, keep=keep) for body in made)
            first = await _tried(looking, requests[0], by.url, wanted)
            return by, requests, replace(wanted, first_bytes=first.body_bytes)
        finally:
            looking.close()

    async def _described(
        self, caller: HttpClient, target: Target, authority: str, asking: RequestOptions
    ) -> tuple[ServedBy, str, tuple[Body, ...], ResponseCheck]:
        server = protocol.server_metadata(await _got(caller, f"{target.prefix}/v2", authority) or b"{}")
        target = target if target.model else await _with_model(caller, target, authority)
        place = target.path.removesuffix("/infer")
        body = await _got(caller, place, authority)
        if body is None:
            raise ServerUnusable(
                f"{target.url.removesuffix('/infer')} describes no model",
                "name it: --served-model NAME, or give --payload",
            )
        model = protocol.model_metadata(body)
        chosen = protocol.choose_inputs(model, server, asking.inputs)
        rows = self._settings.rows if any(one.shape[:1] == (-1,) for one in chosen) else None
        inputs = with_sizes(
            chosen,
            rows=self._settings.rows,
            dim=asking.dim,
            shapes=dict(asking.shapes),
        )
        made = bodies(inputs, seed=self._settings.seed, binary=server.binary and not asking.in_json)
        by = ServedBy(
            url=target.url,
            model=target.model,
            server=f"{server.name} {server.version}".strip(),
            platform=model.platform,
            request=_words(inputs, made[0]),
            request_bytes=len(made[0].data),
            facts=model.parameters,
        )
        return by, target.path, made, ResponseCheck(protocol=True, rows=rows)


def _resolved(target: Target) -> Endpoint:
    try:
        return resolve(target.host, target.port, tls=target.tls)
    except (OSError, UnicodeError) as error:  # a label of a name is empty, or longer than 63 characters
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ServerUnusable(f"can't find {target.host}: {why}", "check the address of --url") from error


async def _got(caller: HttpClient, path: str, authority: str) -> bytes | None:
    """The body of a GET; None for any status but 200. Raises ServerUnusable where no answer comes."""
    reply, answer = await caller.fetch(get(path, authority=authority))
    if not answer.done:
        raise _unreachable(authority, reply.outcome)
    _refuse_redirect(answer, authority + path)
    return bytes(answer.body) if answer.status == 200 else None


async def _with_model(caller: HttpClient, target: Target, authority: str) -> Target:
    """The one model of a server that lists its models."""
    index = request(Body(b"{}"), path=f"{target.prefix}/v2/repository/index", authority=authority, keep=True)
    reply, answer = await caller.fetch(index)
    if not answer.done:
        raise _unreachable(authority, reply.outcome)
    _refuse_redirect(answer, authority)
    if answer.status != 200:
        raise ServerUnusable("the server doesn't list its models", "name one: --served-model NAME")
    # whatever JSON can say goes back as it came, half of a surrogate pair too
    name = quote(protocol.only_model(bytes(answer.body)), safe="", errors="surrogatepass")
    return replace(target, model=name, path=f"{target.prefix}/v2/models/{name}/infer")


async def _tried(caller: HttpClient, one: bytes, url: str, wanted: ResponseCheck) -> ResponseParser:
    """The answer to one request before any is timed. Raises ServerUnusable with what the server says."""
    reply, answer = await caller.fetch(one)
    _refuse_redirect(answer, url)
    why = wanted.outcome(answer) if reply.outcome == GOOD else reply.outcome
    if why:
        said = bytes(answer.body[:300]).decode(errors="replace").strip()
        raise ServerUnusable(
            f"{url} doesn't answer a request: {why}{f': {said}' if said else ''}",
            "see the server's log; other inputs: --send, --tensor, --payload FILE",
        )
    return answer


def _refuse_redirect(answer: ResponseParser, where: str) -> None:
    """Following it in every request would time two of them. Raises ServerUnusable with where it leads."""
    if 300 <= answer.status < 400:
        target = answer.headers.get(b"location", b"")[:300].decode(errors="replace") or "no address"
        raise ServerUnusable(
            f"{where} redirects (status {answer.status}) to {target}",
            "give the address that it leads to: --url",
        )


def _unreachable(authority: str, why: str) -> ServerUnusable:
    hint = "check that the server runs, and --url"
    if why.startswith("TLS"):
        hint = "a server without TLS: http://; a certificate of your own: run it with SSL_CERT_FILE=CA.pem"
    return ServerUnusable(f"can't ask {authority}: {why}", hint)


def _given(target: Target, payload: bytes) -> tuple[ServedBy, str, tuple[Body, ...], ResponseCheck]:
    protocol = bool(target.model)
    checked = "" if protocol else ", whose answers are judged by status and length alone"
    by = ServedBy(target.url, target.model, "", "", f"a given body{checked}", len(payload))
    return by, target.path or "/", (Body(payload),), ResponseCheck(protocol)


def _words(inputs: tuple[Tensor, ...], body: Body) -> str:
    tensors = ", ".join(f"{one.name} {one.datatype}{list(one.shape)}" for one in inputs)
    return f"{tensors}, {'in JSON' if body.json_bytes is None else 'as binary tensors'}"
