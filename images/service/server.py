"""Runs the application: answers at once, loads in the background, drains on SIGTERM, exits 0."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import anyio
import uvicorn
from anyio.abc import TaskGroup

from service.api.admission import ConnectionLimiter, places
from service.api.app import create_app
from service.api.connection import Connection, HttpServer
from service.api.service import Service
from service.batching.worker import run_in_thread
from service.errors import DeviceLost, ServiceError, SettingsError
from service.inference.classifier import Classifier
from service.listen import format_address
from service.models import DEFAULT, folder_of
from service.settings import Settings

if TYPE_CHECKING:
    import grpc.aio

_BACKLOG = 128  # connections that wait for us to accept them, and those accepted at once
_CLOSE_S = 5  # for connections to close once everyone has been answered
_FLUSH_S = 2  # for spans that weren't sent when everything else has ended
_KEEP_ALIVE_S = 5  # without a byte of the next request
_HEAD_BYTES = 16 << 10  # of one request's head
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCH_S = 0.5  # between two looks at how long the device has been busy
_LAST_WORDS_S = 2.0  # between losing the device and the end: probes see why
# Turns that OpenMP's threads wait awake for more work, 0.2 to 0.5 ms: longer than the gaps within a pass. By
# default it is 300,000, which takes a CPU from the event loop for 7 ms after each pass, and stretches a
# pass many times over where other programs need the CPUs.
_SPINS = "10000"

log = logging.getLogger("service")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; the IPv6 address `::` takes IPv4 too, where the platform can.

    Raises ServiceError when the address can't be bound.
    """
    try:
        family = _family(host, port)
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        why = getattr(error, "strerror", None) or error
        no_ipv6 = "; where there is no IPv6, WEIR_LISTEN=0.0.0.0:8000 takes IPv4" if ":" in host else ""
        raise ServiceError(
            f"can't listen on {format_address(host, port)}: {why}",
            f"set WEIR_LISTEN to another host:port{no_ipv6}",
        ) from error
    # Accepted sockets inherit it. asyncio sets it only on sockets made with the protocol number of TCP, which
    # create_server leaves at 0; and without it the second answer on a connection waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _family(host: str, port: int) -> socket.AddressFamily:
    """IPv4 where the host has such an address, as ever; else IPv6. Raises OSError."""
    found = {each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in found or not found else socket.AF_INET6


def _load(settings: Settings, name: str) -> Classifier:
    """In the loader's thread: importing torch alone takes seconds, and `live` must not wait for it."""
    # The slim image has no numpy on purpose, and torch says so when it is imported
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if "OMP_WAIT_POLICY" not in os.environ:  # libgomp reads both when torch loads it
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    from service.inference.model import load

    if name != DEFAULT:  # a name that a caller chose must not bring random weights
        settings = replace(settings, weights="mounted", hub=None)
    return load(settings, name, folder_of(settings.model_dir, name))


def make_service(settings: Settings) -> Service:
    """The state of one process, without its models."""

    async def load(name: str) -> Classifier:
        return await run_in_thread(partial(_load, settings, name), name=f"load {name}")

    return Service(
        settings.limits,
        load=load,
        model_dir=settings.model_dir,
        model_control=settings.model_control,
        hub=settings.hub is not None,
    )


def _open_files(*, shared: bool) -> int:
    """How many files HTTP may have open: half of them where it shares them with gRPC."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return n_files // 2 if shared else n_files


def make_server(service: Service, *, shared: bool = False) -> uvicorn.Server:
    """uvicorn without its own log lines: every prediction has one of ours, health checks need none.

    `shared`: gRPC takes half of the files that may be open, so that neither can lock the other out.
    """
    wanted = service.limits.max_connections
    n_files = _open_files(shared=shared)
    limit, burst = places(wanted, n_files, burst=_BACKLOG)
    if limit < wanted:
        log.warning(
            "%d open files allow %d connections, not the %d of max_connections", n_files, limit, wanted
        )
    door: ConnectionLimiter[Connection] = ConnectionLimiter(limit)
    protocol = partial(Connection, door=door, timeout_s=service.limits.header_timeout_s)
    return HttpServer(
        uvicorn.Config(
            create_app(service),
            http=cast("type[asyncio.Protocol]", protocol),  # uvicorn only calls it
            h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=burst,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,  # `observed` writes it
            proxy_headers=False,  # nothing here asks who the caller is
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )


class _Lifecycle:
    """Start, signals and end of one server: what runs beside it until it stops."""

    def __init__(self, service: Service, server: uvicorn.Server, tasks: TaskGroup) -> None:
        self._service = service
        self._server = server
        self._tasks = tasks
        self.failure: ServiceError | None = None
        self._reloading = anyio.Lock()
        self._reload_waits = False  # for the one that runs; further signals wish for the same

    async def load(self) -> None:
        """Load all models; the server ends when one can't be."""
        try:
            await self._service.load_models()
            gc.freeze()  # torch's 165,000 objects stay; looking through them takes 50 to 100 ms each time
        except ServiceError as error:
            self._fail(error)

    async def reload(self) -> None:
        """Load all models again; those from before answer until then, and go on where that fails."""
        async with self._reloading:
            self._reload_waits = False
            try:
                await self._service.load_models()
                log.info("models loaded again")
            except ServiceError as error:
                log.error("the models stay as they were: %s", error)

    async def handle_signals(self) -> None:
        """SIGTERM and SIGINT drain, a second one ends at once; SIGHUP loads the models again."""
        try:
            with anyio.open_signal_receiver(*_SIGNALS) as signals:
                async for received in signals:
                    self._handle(received)
        finally:
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_IGN)  # all is over: by default they would change the exit code

    def _handle(self, received: signal.Signals) -> None:
        admission = self._service.admission
        if received == signal.SIGHUP:
            if not self._reload_waits:
                self._reload_waits = True
                self._tasks.start_soon(self.reload)
            return
        log.info("%s: not ready any more, %d in flight", received.name, admission.in_flight)
        if admission.draining:  # the second one: somebody is in a hurry
            self._server.force_exit = self._server.should_exit = True
        else:
            self._tasks.start_soon(self.drain)

    async def drain(self) -> None:
        """Admit nobody else, answer those inside, and end."""
        if not await self._service.admission.drain(self._service.limits.drain_s):
            log.warning("%d requests weren't done in time and get 503", self._service.admission.in_flight)
        self._server.should_exit = True

    async def watch(self) -> None:
        """End when the device is lost, after those who ask whether we live have heard that we don't."""
        while self._service.live:
            await anyio.sleep(_WATCH_S)
            self._service.worker.watch()
        log.error("the device is lost: %s", self._service.pulse.reason)
        await self._service.admission.drain(0)
        await anyio.sleep(_LAST_WORDS_S)
        self._fail(
            DeviceLost(
                f"the device failed and didn't recover: {self._service.pulse.reason}",
                "see the kernel's log (dmesg); restart the container, or the driver",
            )
        )

    def _fail(self, error: ServiceError) -> None:
        self.failure = error
        self._service.admission.draining = True
        self._server.should_exit = True


def _add_spans(service: Service) -> None:
    """Have requests traced. Raises ServiceError where OpenTelemetry isn't installed."""
    try:
        from service.api.spans import Spans  # in few images

        service.spans = Spans()
    except ImportError as error:
        raise ServiceError(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, but {error.name} isn't installed here",
            "use an image with OpenTelemetry (make images VARIANTS=cpu-extras), or unset the variable",
        ) from error
    except ValueError as error:  # it checks its own variables as it is imported and set up
        raise SettingsError(
            f"OpenTelemetry: {error}", "correct that variable (OTEL_...), or unset it"
        ) from error


async def _start_grpc(service: Service, settings: Settings) -> "grpc.aio.Server | None":
    """The gRPC server where one is asked for. Raises ServiceError when it can't be had."""
    if settings.grpc is None:
        return None
    try:
        from service.api.grpc_endpoint import MAX_CONNECTIONS, start  # grpcio is in few images
    except ImportError as error:
        raise ServiceError(
            f"WEIR_GRPC_LISTEN is set, but {error.name} isn't installed here",
            "use an image with gRPC (make images VARIANTS=cpu-extras), or unset WEIR_GRPC_LISTEN",
        ) from error
    connections, _ = places(MAX_CONNECTIONS, _open_files(shared=True), burst=_BACKLOG)
    server, port = await start(service, *settings.grpc, connections=connections)
    log.info("listening on %s for gRPC", format_address(settings.grpc[0], port))
    return server


async def serve(settings: Settings) -> None:
    """Serve until a signal. Raises ServiceError when the device or a model isn't usable.

    Returns without waiting for a thread that still loads or computes: nothing can end such a thread, so
    its caller must end the process without joining it.
    """
    service = make_service(settings)
    server = make_server(service, shared=settings.grpc is not None)
    with listen(settings.host, settings.port) as sock:
        if settings.spans:
            _add_spans(service)
        calls = await _start_grpc(service, settings)
        log.info("listening on %s profile=%s", format_address(settings.host, settings.port), settings.profile)
        service.worker.start()
        async with anyio.create_task_group() as tasks:
            life = _Lifecycle(service, server, tasks)
            for task in (life.handle_signals, life.load, life.watch):
                tasks.start_soon(task)
            await server.serve(sockets=[sock])
            if calls:
                await calls.stop(0 if server.force_exit else _CLOSE_S)
            tasks.cancel_scope.cancel()
        service.worker.stop()
        if service.spans:
            with anyio.move_on_after(_FLUSH_S):
                await run_in_thread(service.spans.flush, name="flush spans")
    if life.failure:
        raise life.failure
    log.info("stopped")
