"""Imports torch, or says why not: a build for another system, or one half removed, raises any error."""

import importlib
from functools import cache

from probes.errors import DeviceUnusable

MOST_WORDS = 300  # characters of its error


def require_torch(way_out: str) -> None:
    """Import torch. Raises DeviceUnusable where that fails."""
    if why := why_without():
        raise DeviceUnusable(f"torch can't be imported: {why}", way_out)


@cache
def why_without() -> str:
    """Why torch can't be imported; empty once it is. A second try would fail for what the first one left."""
    try:
        torch = importlib.import_module("torch")
        _ = torch.Tensor, torch.nn  # an empty folder of that name can be imported, too
    except (ImportError, OSError) as error:  # OSError: a library that torch links against is missing
        return str(error)[:MOST_WORDS]
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"[:MOST_WORDS]
    return ""
