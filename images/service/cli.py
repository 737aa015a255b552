"""Start: settings, log, server; turns a ServiceError into a message and an exit code."""

import asyncio
import logging
import sys
from collections.abc import Mapping

from service.errors import Exit, ServiceError
from service.log import Gathered, JsonLines
from service.profile import read_profile
from service.settings import build_settings, profile_path
from service.sparing import Sparing


def main(env: Mapping[str, str]) -> int:
    """Serve until a signal and return the exit code. Never raises for anything a user can cause."""
    handler = Gathered(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(Sparing())
    try:
        path = profile_path(env)
        settings = build_settings(env, read_profile(path), path)
        from service.server import serve  # starlette and uvicorn only once the settings are right

        try:
            asyncio.run(serve(settings))
        finally:
            handler.flush()
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(Exit.OK)
