"""One process from its start to its end: `serve` answers at once, loads the models in the background, drains
on SIGTERM, loads them again on SIGHUP, and ends when the device is lost.
"""

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

from service.api.admission import ConnectionLimiter
from service.api.app import create_app
from service.api.connection import Connection, HttpServer
from service.api.service import Service
from service.batching.worker import run_in_thread
from service.errors import DeviceLost, ServiceError, SettingsError
from service.inference.classifier import Classifier
from service.listen import format_address
from service.models import DEFAULT, folder_of
from service.settings import Limits, Settings

if TYPE_CHECKING:
    import grpc.aio

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCH_S = 0.5  # between two checks of how long the device has been busy
_DEVICE_LOST_S = 2.0  # between losing the device and exiting, so that health checks see the reason
# Iterations for which OpenMP's threads spin before they sleep: 0.2 to 0.5 ms, longer than the gaps within a
# pass. The default of 300,000 takes a CPU from the event loop for 7 ms after each pass, and makes a pass
# several times slower where other programs need the CPUs.
_SPIN_COUNT = "10000"

log = logging.getLogger("service")


def listen(host: str, port: int, *, backlog: int = Limits.backlog) -> socket.socket:
    """Return a listening socket. The address `::` takes IPv4 connections, too, where the platform can.

    Raises ServiceError when the address can't be bound.
    """
    try:
        family = _family(host, port)
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        why = getattr(error, "strerror", None) or error
        no_ipv6 = "; where there is no IPv6, WEIR_LISTEN=0.0.0.0:8000 takes IPv4" if ":" in host else ""
        raise ServiceError(
            f"can't listen on {format_address(host, port)}: {why}",
            f"set WEIR_LISTEN to another host:port{no_ipv6}",
        ) from error
    # Accepted sockets inherit it. Without it, the second answer on a connection waits 40 ms for an ACK.
    # asyncio sets it only on sockets whose protocol number is TCP's, and create_server leaves that at 0.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _family(host: str, port: int) -> socket.AddressFamily:
    """IPv4 where the host has such an address, else IPv6. Raises OSError."""
    families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in families or not families else socket.AF_INET6


def _load(settings: Settings, name: str) -> Classifier:
    """Load a model, in a thread: importing torch alone takes seconds, and `live` must not wait for it."""
    # torch warns when it is imported without numpy, which the slim image leaves out on purpose
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if "OMP_WAIT_POLICY" not in os.environ:  # libgomp reads both when torch loads it
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    from service.inference.model import load

    if name != DEFAULT:  # a name that a caller chose must not bring random weights
        settings = replace(settings, weights="mounted", hub=None)
    return load(settings, name, folder_of(settings.model_dir, name))


def make_service(settings: Settings) -> Service:
    """Return the state of one process, before its models are loaded."""

    async def load(name: str) -> Classifier:
        return await run_in_thread(partial(_load, settings, name), name=f"load {name}")

    return Service(
        settings.limits,
        load=load,
        model_dir=settings.model_dir,
        model_control=settings.model_control,
        hub=settings.hub is not None,
    )


def make_server(service: Service) -> uvicorn.Server:
    """Return uvicorn without its own log lines: each prediction has one of ours, health checks need none."""
    limits = service.limits
    limiter: ConnectionLimiter[Connection] = ConnectionLimiter(limits.max_connections)
    protocol = partial(Connection, limiter=limiter, limits=limits)
    return HttpServer(
        uvicorn.Config(
            create_app(service),
            http=cast("type[asyncio.Protocol]", protocol),  # uvicorn only calls it
            h11_max_incomplete_event_size=limits.head_bytes,
            timeout_keep_alive=limits.keep_alive_s,
            backlog=limits.backlog,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,  # `with_telemetry` writes it
            proxy_headers=False,  # nothing here asks who the caller is
            timeout_graceful_shutdown=limits.close_s,
        )
    )


class _Lifecycle:
    """What runs beside the server until it stops: loading, signals, the watch over the device."""

    def __init__(self, service: Service, server: uvicorn.Server, tasks: TaskGroup) -> None:
        self._service = service
        self._server = server
        self._tasks = tasks
        self.failure: ServiceError | None = None
        self._reloading = anyio.Lock()
        self._reload_waits = False  # behind the one that runs; further signals change nothing

    async def load(self) -> None:
        """Load all models; the server ends when one can't be."""
        gc.disable()  # collections while torch is imported take 0.15 s, and find little
        try:
            await self._service.load_models()
            gc.freeze()  # torch's 165,000 objects stay, and each collection of them takes 50 to 100 ms
        except ServiceError as error:
            self._fail(error)
        finally:
            gc.enable()

    async def reload(self) -> None:
        """Load all models again. The old ones answer until then, and continue if that fails."""
        async with self._reloading:
            self._reload_waits = False
            try:
                await self._service.load_models()
                log.info("models loaded again")
            except ServiceError as error:
                log.error("the models stay as they were: %s", error)

    async def handle_signals(self) -> None:
        """Drain on SIGTERM and SIGINT, end at once on a second one; load the models again on SIGHUP."""
        try:
            with anyio.open_signal_receiver(*_SIGNALS) as signals:
                async for received in signals:
                    self._handle(received)
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # the default action would change the exit code

    def _handle(self, received: signal.Signals) -> None:
        admission = self._service.admission
        if received == signal.SIGHUP:
            if not self._reload_waits:
                self._reload_waits = True
                self._tasks.start_soon(self.reload)
            return
        log.info("%s: not ready any more, %d in flight", received.name, admission.in_flight)
        if admission.draining:  # the second signal
            self._server.force_exit = self._server.should_exit = True
        else:
            self._tasks.start_soon(self.drain)

    async def drain(self) -> None:
        """Admit no more requests, answer those in flight, and end."""
        if not await self._service.admission.drain(self._service.limits.drain_s):
            log.warning("%d requests weren't done in time and get 503", self._service.admission.in_flight)
        self._server.should_exit = True

    async def watch(self) -> None:
        """End when the device is lost, after health checks have had the time to see it."""
        while self._service.live:
            await anyio.sleep(_WATCH_S)
            self._service.worker.watch()
        log.error("the device is lost: %s", self._service.health.reason)
        await self._service.admission.drain(0)
        await anyio.sleep(_DEVICE_LOST_S)
        self._fail(
            DeviceLost(
                f"the device failed and didn't recover: {self._service.health.reason}",
                "see the kernel's log (dmesg); restart the container, or the driver",
            )
        )

    def _fail(self, error: ServiceError) -> None:
        self.failure = error
        self._service.admission.draining = True
        self._server.should_exit = True


def _add_spans(service: Service) -> None:
    """Export spans of requests. Raises ServiceError where OpenTelemetry isn't installed."""
    try:
        from service.api.spans import Spans  # in few images

        service.spans = Spans()
    except ImportError as error:
        raise ServiceError(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, but {error.name} isn't installed here",
            "use an image with OpenTelemetry (make images VARIANTS=cpu-extras), or unset the variable",
        ) from error
    except ValueError as error:  # OpenTelemetry checks its variables when it is imported and set up
        raise SettingsError(
            f"OpenTelemetry: {error}", "correct that variable (OTEL_...), or unset it"
        ) from error


async def _start_grpc(service: Service, settings: Settings) -> "grpc.aio.Server | None":
    """Start gRPC if the settings ask for it. Raises ServiceError when it can't be started."""
    if settings.grpc is None:
        return None
    try:
        from service.api.grpc_endpoint import start  # grpcio is in few images
    except ImportError as error:
        raise ServiceError(
            f"WEIR_GRPC_LISTEN is set, but {error.name} isn't installed here",
            "use an image with gRPC (make images VARIANTS=cpu-extras), or unset WEIR_GRPC_LISTEN",
        ) from error
    server, port = await start(service, *settings.grpc)
    log.info("listening on %s for gRPC", format_address(settings.grpc[0], port))
    return server


def _fit_limits(settings: Settings) -> Settings:
    """Lower the limits to what this process may open, and log what was lowered and what contradicts."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits, lowered = settings.limits.within_open_files(open_files, grpc=settings.grpc is not None)
    for message in (*settings.limits.contradictions(), *lowered):
        log.warning("%s", message)
    return replace(settings, limits=limits)


async def serve(settings: Settings) -> None:
    """Serve until a signal. Raises ServiceError when the device or a model isn't usable.

    Returns without waiting for a thread that still loads or computes: nothing can end such a thread, so
    the caller must end the process without joining it.
    """
    settings = _fit_limits(settings)
    limits = settings.limits
    service = make_service(settings)
    server = make_server(service)
    with listen(settings.host, settings.port, backlog=limits.backlog) as sock:
        if settings.spans:
            _add_spans(service)
        grpc_server = await _start_grpc(service, settings)
        log.info("listening on %s profile=%s", format_address(settings.host, settings.port), settings.profile)
        service.worker.start()
        async with anyio.create_task_group() as tasks:
            lifecycle = _Lifecycle(service, server, tasks)
            for task in (lifecycle.handle_signals, lifecycle.load, lifecycle.watch):
                tasks.start_soon(task)
            await server.serve(sockets=[sock])
            if grpc_server:
                await grpc_server.stop(0 if server.force_exit else limits.close_s)
            tasks.cancel_scope.cancel()
        service.worker.stop()
        if service.spans:
            with anyio.move_on_after(limits.flush_s):
                await run_in_thread(service.spans.flush, name="flush spans")
    if lifecycle.failure:
        raise lifecycle.failure
    log.info("stopped")
