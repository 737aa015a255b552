"""A served scan from end to end: looks at the server, raises the load, hands each finished level over."""

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from probes.core.errors import ServerUnusable
from probes.core.unknown import Unknown
from probes.throughput.served import protocol
from probes.throughput.served.conditions import (
    Snapshot,
    between,
    is_own_address,
    reported_cpu_s,
    snapshot,
)
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
from probes.throughput.served.saturation import judge

UNFINISHED = "interrupted, or cut off"
ROOT = Path("/")
METRICS_S = 2.0  # to wait for /metrics, which isn't needed
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


def scan(target: Target, options: RequestOptions, settings: ServedSettings, on_level: Listener) -> ServedScan:
    """Measure the closed loop, then the open one. `on_level` is called with everything so far.

    Raises ServerUnusable where the server can't be reached or asked, UsageError for an impossible request,
    and KeyboardInterrupt; what was handed over until then is all that there is.
    """
    selector = BusySelector()
    loop = loop_with(selector)
    try:
        return _Scan(loop, selector, settings, on_level).run(target, options)
    finally:
        _close_loop(loop)


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
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
        selector: BusySelector,
        settings: ServedSettings,
        on_level: Listener,
    ) -> None:
        self._loop = loop
        self._selector = selector
        self._settings = settings
        self._on_level = on_level
        self._metrics: _Metrics | None = None
        self._port: int | None = None  # of a server on this machine

    def run(self, target: Target, options: RequestOptions) -> ServedScan:
        endpoint = _resolve(target)
        secure = ssl.create_default_context() if target.tls else None
        by, requests, check = self._do(self._prepare(target, endpoint, options, secure))
        same_machine = is_own_address(endpoint.address)
        by = replace(by, same_machine=same_machine)
        self._port = endpoint.port if same_machine is True else None
        self._metrics = _Metrics(endpoint, f"{target.prefix}/metrics", self._selector, secure)

        def make() -> HttpClient:
            s = self._settings
            return HttpClient(
                endpoint,
                requests,
                self._selector,
                limit_s=s.limit_s,
                keep=s.keep_alive,
                secure=secure,
                check=check,
            )

        scanned = ServedScan(by, self._settings, (), UNFINISHED, complete=False)
        self._on_level(scanned)
        scanned = self._closed(scanned, make)
        scanned = self._open(scanned, make) if scanned.complete else scanned
        scanned = replace(scanned, saturated=judge(scanned))
        self._on_level(scanned)
        return scanned

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def _level(self, scanned: ServedScan, load: Load, make: MakeClient) -> tuple[ServedScan, Level]:
        busy = lambda: self._selector.busy_s  # noqa: E731
        before = self._snapshot()
        level = self._do(measure_level(load, make, self._settings, busy_s=busy, early_s=wake_early_s))
        level = replace(level, conditions=between(before, self._snapshot(), cpus=os.cpu_count() or 1))
        scanned = replace(scanned, levels=(*scanned.levels, level))
        self._on_level(scanned)
        return scanned, level

    def _snapshot(self) -> Snapshot:
        reported = self._do(self._metrics.cpu_s()) if self._metrics else Unknown("not asked")
        return snapshot(ROOT, reported, port=self._port)

    def _closed(self, scanned: ServedScan, make: MakeClient) -> ServedScan:
        while True:
            callers, why = next_callers(scanned.of("closed"), self._settings)
            if callers is None:
                answered = bool(scanned.levels[-1].answered)
                return replace(scanned, ended=why, complete=answered)
            scanned, _ = self._level(scanned, Load("closed", callers), make)

    def _open(self, scanned: ServedScan, make: MakeClient) -> ServedScan:
        ended = [scanned.ended]
        most = min(self._settings.most_connections, MOST_CONNECTIONS)
        for rate in open_rates(scanned.of("closed"), self._settings):
            scanned, level = self._level(scanned, Load("open", most, rate), make)
            if why := saturated(level):
                return replace(scanned, ended="; ".join([*ended, why]), complete=bool(level.latency_s))
        return replace(scanned, ended="; ".join([*ended, "every rate was measured"]))

    async def _prepare(
        self, target: Target, endpoint: Endpoint, options: RequestOptions, secure: ssl.SSLContext | None
    ) -> tuple[ServedBy, tuple[bytes, ...], ResponseCheck]:
        """Who answers, the requests to send, of which one has been answered well, and what answers hold."""
        client = HttpClient(endpoint, (), self._selector, limit_s=self._settings.limit_s, secure=secure)
        keep, authority = self._settings.keep_alive, endpoint.authority
        try:
            if options.payload is None:
                by, path, bodies_to_send, check = await self._from_metadata(
                    client, target, authority, options
                )
            else:
                by, path, bodies_to_send, check = _from_payload(target, options.payload)
            requests = tuple(
                request(body, path=path, authority=authority, keep=keep) for body in bodies_to_send
            )
            first = await _try_request(client, requests[0], by.url, check)
            return by, requests, replace(check, first_bytes=first.body_bytes)
        finally:
            client.close()

    async def _from_metadata(
        self, client: HttpClient, target: Target, authority: str, options: RequestOptions
    ) -> tuple[ServedBy, str, tuple[Body, ...], ResponseCheck]:
        server = protocol.server_metadata(await _get_body(client, f"{target.prefix}/v2", authority) or b"{}")
        target = target if target.model else await _with_model(client, target, authority)
        place = target.path.removesuffix("/infer")
        body = await _get_body(client, place, authority)
        if body is None:
            raise ServerUnusable(
                f"{target.url.removesuffix('/infer')} describes no model",
                "name it: --served-model NAME, or give --payload",
            )
        model = protocol.model_metadata(body)
        tensors = protocol.choose_inputs(model, server, options.inputs)
        rows = self._settings.rows if any(tensor.shape[:1] == (-1,) for tensor in tensors) else None
        inputs = with_sizes(
            tensors,
            rows=self._settings.rows,
            dim=options.dim,
            shapes=dict(options.shapes),
        )
        made = bodies(inputs, seed=self._settings.seed, binary=server.binary and not options.in_json)
        by = ServedBy(
            url=target.url,
            model=target.model,
            server=f"{server.name} {server.version}".strip(),
            platform=model.platform,
            request=_request_text(inputs, made[0]),
            request_bytes=len(made[0].data),
            facts=model.parameters,
        )
        return by, target.path, made, ResponseCheck(protocol=True, rows=rows)


class _Metrics:
    """The server's own account of its processor time, asked for between levels; after a failure no more."""

    def __init__(
        self, endpoint: Endpoint, path: str, selector: BusySelector, secure: ssl.SSLContext | None
    ) -> None:
        self._client = HttpClient(endpoint, (), selector, limit_s=METRICS_S, keep=False, secure=secure)
        self._request = get(path, authority=endpoint.authority)
        self._given_up: Unknown | None = None

    async def cpu_s(self) -> float | Unknown:
        """Return the CPU seconds used so far."""
        if self._given_up:
            return self._given_up
        found = await self._asked()
        if isinstance(found, Unknown):
            self._given_up = found
        return found

    async def _asked(self) -> float | Unknown:
        exchange, response = await self._client.fetch(self._request)
        if exchange.outcome != GOOD:
            return Unknown(f"its /metrics: {exchange.outcome}")
        return reported_cpu_s(bytes(response.body))


def _resolve(target: Target) -> Endpoint:
    try:
        return resolve(target.host, target.port, tls=target.tls)
    except (OSError, UnicodeError) as error:  # a label of a name is empty, or longer than 63 characters
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ServerUnusable(f"can't find {target.host}: {why}", "check the address of --url") from error


async def _get_body(client: HttpClient, path: str, authority: str) -> bytes | None:
    """The body of a GET; None for any status but 200. Raises ServerUnusable where no answer comes."""
    exchange, response = await client.fetch(get(path, authority=authority))
    if not response.done:
        raise _unreachable(authority, exchange.outcome)
    _refuse_redirect(response, authority + path)
    return bytes(response.body) if response.status == 200 else None


async def _with_model(client: HttpClient, target: Target, authority: str) -> Target:
    """The one model of a server that lists its models."""
    index = request(Body(b"{}"), path=f"{target.prefix}/v2/repository/index", authority=authority, keep=True)
    exchange, response = await client.fetch(index)
    if not response.done:
        raise _unreachable(authority, exchange.outcome)
    _refuse_redirect(response, authority)
    if response.status != 200:
        raise ServerUnusable("the server doesn't list its models", "name one: --served-model NAME")
    # whatever JSON can say goes back as it came, half of a surrogate pair too
    name = quote(protocol.only_model(bytes(response.body)), safe="", errors="surrogatepass")
    return replace(target, model=name, path=f"{target.prefix}/v2/models/{name}/infer")


async def _try_request(client: HttpClient, prepared: bytes, url: str, check: ResponseCheck) -> ResponseParser:
    """The answer to one request before any is timed. Raises ServerUnusable with what the server says."""
    exchange, response = await client.fetch(prepared)
    _refuse_redirect(response, url)
    why = check.outcome(response) if exchange.outcome == GOOD else exchange.outcome
    if why:
        text = bytes(response.body[:300]).decode(errors="replace").strip()
        raise ServerUnusable(
            f"{url} doesn't answer a request: {why}{f': {text}' if text else ''}",
            "see the server's log; other inputs: --send, --tensor, --payload FILE",
        )
    return response


def _refuse_redirect(response: ResponseParser, where: str) -> None:
    """Following it in every request would time two of them. Raises ServerUnusable with where it leads."""
    if 300 <= response.status < 400:
        target = response.headers.get(b"location", b"")[:300].decode(errors="replace") or "no address"
        raise ServerUnusable(
            f"{where} redirects (status {response.status}) to {target}",
            "give the address that it leads to: --url",
        )


def _unreachable(authority: str, why: str) -> ServerUnusable:
    hint = "check that the server runs, and --url"
    if why.startswith("TLS"):
        hint = "a server without TLS: http://; a certificate of your own: run it with SSL_CERT_FILE=CA.pem"
    return ServerUnusable(f"can't ask {authority}: {why}", hint)


def _from_payload(target: Target, payload: bytes) -> tuple[ServedBy, str, tuple[Body, ...], ResponseCheck]:
    protocol = bool(target.model)
    checked = "" if protocol else ", whose answers are judged by status and length alone"
    by = ServedBy(target.url, target.model, "", "", f"a given body{checked}", len(payload))
    return by, target.path or "/", (Body(payload),), ResponseCheck(protocol)


def _request_text(inputs: tuple[Tensor, ...], body: Body) -> str:
    tensors = ", ".join(f"{tensor.name} {tensor.datatype}{list(tensor.shape)}" for tensor in inputs)
    return f"{tensors}, {'in JSON' if body.json_bytes is None else 'as binary tensors'}"
