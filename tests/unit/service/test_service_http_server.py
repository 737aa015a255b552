"""How the server ends."""

import asyncio
from unittest.mock import Mock

import pytest
import uvicorn
from service.api.connection import HttpServer


@pytest.mark.thorough
def test_no_connection_is_left_open_when_the_server_has_ended() -> None:
    ended = []

    async def run() -> None:
        server = HttpServer(uvicorn.Config(Mock(), timeout_graceful_shutdown=0, lifespan="off"))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup()
        stubborn = Mock()
        stubborn.shutdown.side_effect = lambda: ended.append("asked")
        stubborn.transport.abort.side_effect = lambda: ended.append("aborted")
        server.server_state.connections.add(stubborn)
        await server.shutdown()

    asyncio.run(run())
    assert ended == ["asked", "aborted"]
