"""The program: reads the profile, sets up the log, serves, and turns a ServiceError into a message and an
exit code.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from service.errors import Exit, ServiceError, SettingsError
from service.log import BufferedHandler, JsonFormatter, RepeatFilter
from service.settings import build_settings, profile_path


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which SafeLoader takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}", key_node.start_mark
                )
            seen.add(key)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


def read_profile(path: Path) -> Mapping[str, object]:
    """Read the keys of a profile. Raises SettingsError with the file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SettingsError(
            f"no profile {path.name} in {path.parent}", _known_profiles(path.parent)
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} can't be read: {error}") from error
    try:
        profile = yaml.load(text, Loader=_StrictLoader)
    # yaml raises the last two for values that only look right: `2020-13-45`, `0x_`, `!!timestamp x`
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError) as error:
        raise SettingsError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(profile, dict):
        raise SettingsError(f"{path} must hold keys and values", "for example: `device: cpu`")
    return profile


def _known_profiles(directory: Path) -> str:
    names = sorted(path.stem.removeprefix("application-") for path in directory.glob("application-*.yaml"))
    return f"known profiles: {', '.join(names)}" if names else f"{directory} holds no application-*.yaml"


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
    handler = BufferedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        path = profile_path(env)
        settings = build_settings(env, read_profile(path), path)
        from service.server import serve  # starlette and uvicorn, once the settings are right

        try:
            asyncio.run(serve(settings))
        finally:
            handler.flush()
    except ServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(Exit.OK)
