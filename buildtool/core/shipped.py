"""Where the files that come with this tool are, in a checkout of its repository and in an installed package.

`images/` is one folder of the repository; a wheel holds a copy of it as `buildtool/images` (pyproject.toml).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from buildtool.core.errors import EnvironmentMissing

_BUILDTOOL = Path(__file__).parents[1]
_INSTALLED = _BUILDTOOL / "images"
_REPOSITORY = _BUILDTOOL.parent

IMAGES = _INSTALLED if _INSTALLED.is_dir() else _REPOSITORY / "images"
CATALOG = IMAGES / "variants.yaml"
PROBES = _REPOSITORY / "probes"  # the other package, always next to this one


def state_directory(env: Mapping[str, str] = os.environ, *, installed: bool = _INSTALLED.is_dir()) -> Path:
    """Where caches are kept: $WEIR_STATE, else `.weir` of the checkout, else the user's cache directory."""
    if named := env.get("WEIR_STATE"):
        return Path(named)
    if not installed:
        return _REPOSITORY / ".weir"
    cache = Path(env.get("XDG_CACHE_HOME") or "")
    if cache.is_absolute():
        return cache / "weir"
    try:
        return Path.home() / ".cache/weir"
    except RuntimeError as error:
        raise EnvironmentMissing(
            "this user has no home directory for caches", "name one: WEIR_STATE=DIR"
        ) from error


def checkout(*, installed: bool = _INSTALLED.is_dir()) -> Path | None:
    """The checkout that this program runs from; None where it is installed."""
    return None if installed else _REPOSITORY


def lock_file(
    catalog: Path = CATALOG, env: Mapping[str, str] = os.environ, *, installed: bool = _INSTALLED.is_dir()
) -> Path:
    """Where a catalog's inputs are pinned: $WEIR_LOCK, else beside it, as NAME.lock.json for NAME.yaml.

    That of an installed package's own catalog, and of one that isn't a file, is in the state directory.
    """
    if named := env.get("WEIR_LOCK"):
        return Path(named)
    is_own = catalog.resolve() == CATALOG.resolve()
    if catalog.is_file() and not (is_own and installed):
        return catalog.with_suffix(".lock.json")
    return state_directory(env, installed=installed) / "variants.lock.json"


def reports_directory(env: Mapping[str, str] = os.environ, *, installed: bool = _INSTALLED.is_dir()) -> Path:
    """Where builds put their audits, wherever they are typed: into the checkout, else beside the caches."""
    home = state_directory(env, installed=True) if installed else _REPOSITORY
    return home / "reports/images"
