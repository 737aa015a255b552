"""uvicorn's server, with our own way of taking connections and of ending."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # by connections; some will close
_EXHAUSTED_S = 1.0

log = logging.getLogger("service")


class Acceptor(uvicorn.Server):
    """uvicorn, but SIGTERM is ours: its own handler closes at once and then dies by the signal (143).

    And it waits to be told to exit. uvicorn looks ten times a second, and each look takes a CPU from a pass.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether it ends. May be set in any thread."""
        return self._exits

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        self._exits = exits
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections from now on."""
        self._loop = asyncio.get_running_loop()
        self.servers = []  # of asyncio: none
        for listener in sockets or []:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._loop.add_reader(listener, self._accept, self._loop, listener)
        self.started = True

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> bool:
        """Take one connection, if one waits. The loop calls again for the next, and hears others in between.

        asyncio's own way makes a task and a future for each, and three turns of the loop.
        """
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            log.warning("no connection is taken for %g s: %s", _EXHAUSTED_S, error.strerror)
            loop.remove_reader(listener)  # it stays readable
            loop.call_later(_EXHAUSTED_S, self._accept_again, loop, listener)
            return False
        connection.setblocking(False)
        made = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        protocol = made(self.config, self.server_state, self.lifespan.state, loop)
        loop._make_socket_transport(connection, protocol)  # type: ignore[attr-defined]
        return True

    def _accept_again(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        if not self.should_exit and listener.fileno() >= 0:
            loop.add_reader(listener, self._accept, loop, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait, then no more, and end all; each has a moment to be answered."""
        for listener in sockets or []:
            if self._loop and listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                for _ in range(self.config.backlog):
                    if not self._accept(self._loop, listener):
                        break
                listener.close()
        await asyncio.sleep(0)  # until those are connected
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # whose peers neither read nor close
            connection.transport.abort()
        await asyncio.sleep(0)  # until those are closed

    async def main_loop(self) -> None:
        """Serve until `should_exit` is set."""
        if not self.should_exit:
            await self._told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `server`."""
        yield
