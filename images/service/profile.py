"""Reads a profile's YAML: a flat mapping, each key once. The only module that imports yaml."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from service.errors import SettingsError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader takes a duplicate key's last value in silence; this one refuses it."""

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
    """The keys of a profile. Raises SettingsError naming the file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SettingsError(f"no profile {path.name} in {path.parent}", _known(path.parent)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} can't be read: {error}") from error
    try:
        found = yaml.load(text, Loader=_StrictLoader)
    # The last two are yaml's for values that only look right: `2020-13-45`, `0x_`, `!!timestamp x`
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError) as error:
        raise SettingsError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{path} must hold keys and values", "for example: `device: cpu`")
    return found


def _known(directory: Path) -> str:
    names = sorted(path.stem.removeprefix("application-") for path in directory.glob("application-*.yaml"))
    return f"known profiles: {', '.join(names)}" if names else f"{directory} holds no application-*.yaml"
