"""Start: settings, log, server; turns a ServiceError into a message and an exit code."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence

from service.errors import Exit, ServiceError
from service.log import Gathered, JsonLines
from service.profile import read_profile
from service.settings import build_settings, profile_path
from service.sparing import Sparing

_HELP = """Serve a model over HTTP until SIGTERM. Takes no arguments: the environment and the profile decide.

  APP_PROFILE        the profile's name (experiment1)
  WEIR_PROFILES_DIR  where profiles are, as application-NAME.yaml (the image's own)
  WEIR_DEVICE        cpu, rocm or cuda (what the profile says)
  WEIR_MODEL_DIR     the model's directory, or that of several (/models)
  WEIR_WEIGHTS       auto, mounted or random (auto: random where no model is mounted)
  WEIR_LISTEN        host:port (0.0.0.0:8000)
  WEIR_GRPC_LISTEN   host:port for gRPC, in images that have it (no gRPC)

Exits with 0 after SIGTERM, 2 for a wrong setting; docs/service.md has the rest."""


def main(env: Mapping[str, str], arguments: Sequence[str] = ()) -> int:
    """Serve until a signal and return the exit code. Raises SystemExit after help, or for arguments."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python3 -m service", description=_HELP, formatter_class=as_written)
    parser.parse_args(arguments)
    handler = Gathered(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(Sparing())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
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
