"""Runs the application: answers at once, loads in the background, drains on SIGTERM, exits 0."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import warnings
from collections.abc import Iterator
from functools import partial
from typing import cast

import anyio
import anyio.to_thread
import uvicorn

from service.errors import ServiceError
from service.model.classifier import Classifier
from service.settings import Settings
from service.web.app import MODEL, Service, create_app
from service.web.connection import Connection
from service.web.door import Door, places

_BACKLOG = 128  # connections that wait for us to accept them, and those accepted at once
_CLOSE_S = 5  # for connections to close once everyone has been answered
_KEEP_ALIVE_S = 5  # without a byte of the next request
_HEAD_BYTES = 16 << 10  # of one request's head

log = logging.getLogger("service")


class _Server(uvicorn.Server):
    """uvicorn, but SIGTERM is ours: its own handler closes at once and then dies by the signal (143)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServiceError when the address can't be bound."""
    try:
        listener = socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise ServiceError(
            f"can't listen on {host}:{port}: {error.strerror or error}",
            "set WEIR_LISTEN to another host:port",
        ) from error
    # Accepted sockets inherit it. asyncio sets it only on sockets made with the protocol number of TCP, which
    # create_server leaves at 0; and without it the second answer on a connection waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _load(settings: Settings) -> Classifier:
    """In the loader's thread: importing torch alone takes seconds, and `live` must not wait for it."""
    # The slim image has no numpy on purpose, and torch says so when it is imported
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from service.model.inference import load

    return load(settings, MODEL)


def make_server(service: Service) -> uvicorn.Server:
    """uvicorn without its own log lines: every prediction has one of ours, health checks need none."""
    wanted = service.limits.max_connections
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, burst = places(wanted, n_files, burst=_BACKLOG)
    if limit < wanted:
        log.warning(
            "%d open files allow %d connections, not the %d of max_connections", n_files, limit, wanted
        )
    door: Door[Connection] = Door(limit)
    protocol = partial(Connection, door=door, timeout_s=service.limits.header_timeout_s)
    return _Server(
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
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )


async def serve(settings: Settings) -> None:
    """Serve until a signal. Raises ServiceError when the device or the model isn't usable.

    Returns without waiting for a thread that still loads or computes: nothing can end such a thread, so
    whoever calls must end the process without joining it.
    """
    service = Service(settings.limits)
    server = make_server(service)
    failures: list[ServiceError] = []

    async def load() -> None:
        try:
            service.classifier = await anyio.to_thread.run_sync(_load, settings, abandon_on_cancel=True)
        except ServiceError as error:
            failures.append(error)
            server.should_exit = True

    async def stop_on_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for received in signals:
                log.info("%s: not ready any more, %d in flight", received.name, service.admission.in_flight)
                if service.admission.draining:  # the second one: somebody is in a hurry
                    server.force_exit = server.should_exit = True
                else:
                    tasks.start_soon(drain)

    async def drain() -> None:
        if not await service.admission.drain(settings.limits.drain_s):
            log.warning("%d requests weren't done in time and get 503", service.admission.in_flight)
        server.should_exit = True

    with listen(settings.host, settings.port) as sock:
        log.info("listening on %s:%d profile=%s", settings.host, settings.port, settings.profile)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on_signal)
            tasks.start_soon(load)
            await server.serve(sockets=[sock])
            tasks.cancel_scope.cancel()
    if failures:
        raise failures[0]
    log.info("stopped")
