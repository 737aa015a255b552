"""Runs the application: answers at once, loads in the background, drains on SIGTERM, exits 0."""

import contextlib
import logging
import signal
import socket
import warnings
from collections.abc import Iterator

import anyio
import anyio.to_thread
import uvicorn

from service.app import MODEL, Service, create_app
from service.classifier import Classifier
from service.errors import ServiceError
from service.settings import Settings

_BACKLOG = 128
_CLOSE_S = 5  # for connections to close once everyone has been answered

log = logging.getLogger("service")


class _Server(uvicorn.Server):
    """uvicorn, but SIGTERM is ours: its own handler closes at once and then dies by the signal (143)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServiceError when the address can't be had."""
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise ServiceError(
            f"can't listen on {host}:{port}: {error.strerror or error}",
            "set WEIR_LISTEN to another host:port",
        ) from error


def _load(settings: Settings) -> Classifier:
    """In the loader's thread: importing torch alone takes seconds, and `live` must not wait for it."""
    # The slim image has no numpy on purpose, and torch says so when it is imported
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from service.inference import load

    return load(settings, MODEL)


def _server(service: Service) -> _Server:
    """uvicorn without its own log lines: every prediction has one of ours, health checks need none."""
    return _Server(
        uvicorn.Config(
            create_app(service),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )


async def serve(settings: Settings) -> None:
    """Serve until a signal. Raises ServiceError when the device or the model can't be had."""
    service = Service(settings.limits)
    server = _server(service)
    failures: list[ServiceError] = []

    async def load() -> None:
        try:
            service.classifier = await anyio.to_thread.run_sync(_load, settings)
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
            log.warning("%d requests weren't done in time", service.admission.in_flight)
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
