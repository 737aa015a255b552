"""The lock file: for each variant, every input by content, as the first resolution found it.

It holds no addresses: a source's name records where a wheel came from, its SHA-256 what it is.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from buildtool.core.errors import ConfigError, DataError
from buildtool.core.files import locked, write_text
from buildtool.core.json_text import why_unread
from buildtool.core.model import Resolved, Variant, Wheel
from probes.core.codec import Json, decode, encode, load
from probes.core.files import read_text
from probes.core.quoting import command

SCHEMA_VERSION = 1
MAX_BYTES = 64 << 20  # ours has 6 kB
# a file's name, without a directory; pip reads parts of it in a list of requirements, where a blank ends one
_WHEEL = re.compile(r"(?=.{1,255}$)[A-Za-z0-9][\w.+!]*(-[\w.+!]+)+\.whl", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def spec_sha256(variant: Variant) -> str:
    """Fingerprint of a variant's requirements: a change requires a new resolution.

    Budget, labels, targets and Dockerfile stay out: they change no input.
    """
    spec = asdict(variant)
    for name in ("budget", "labels", "summary", "gpu_targets", "prune", "dockerfile"):
        del spec[name]
    return hashlib.sha256(json.dumps(spec, sort_keys=True, default=str).encode()).hexdigest()


@dataclass
class Lock:
    """Pinned inputs by variant. Each change is saved at once, merged with those of other builds."""

    path: Path
    entries: dict[str, Resolved] = field(default_factory=dict)
    tools: tuple[Wheel, ...] = ()  # run inside builds, not part of images

    @classmethod
    def load(cls, path: Path) -> "Lock":
        """The lock in a file; an empty one when there is no file.

        Raises ConfigError when it isn't a lock file of this tool, DataError when it can't be read.
        """
        try:
            data: Any = load(read_text(path, most_bytes=MAX_BYTES))
            if data["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version {data['schema_version']}, this tool reads {SCHEMA_VERSION}")
            entries = {name: _from_json(name, raw) for name, raw in data["variants"].items()}
            return cls(path, entries, tuple(_checked(decode(Wheel, raw, "tools")) for raw in data["tools"]))
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            raise DataError(
                f"can't read {path}: {error.strerror}", "name another lock file: WEIR_LOCK=FILE"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = f"remove it to resolve again: {command('rm', '--', str(path))}"
            if not path.is_file():  # a device or a pipe
                hint = "name another lock file: WEIR_LOCK=FILE"
            raise ConfigError(f"{path}: not a lock file of this tool ({why_unread(error)})", hint) from error

    def get(self, variant: Variant) -> Resolved | None:
        """What is pinned for this very spec, and for its card where wheels are made by card; else None."""
        entry = self.entries.get(variant.name)
        if entry is None or entry.spec_sha256 != spec_sha256(variant):
            return None
        if entry.gpu_target not in ("", variant.first_target):
            return None
        if variant.system_packages and variant.dockerfile is None and entry.base.origin == "registry":
            return None  # nothing installs them on such a base
        bases = [source.base or variant.base for source in variant.torch if source.name == entry.torch_source]
        known = [base.pinned(entry.base.pin) for each in bases for base in each]
        return entry if entry.base in known else None

    def put(self, entry: Resolved) -> None:
        """Pin a variant's inputs and save. Raises as `files.write_text` does, ConfigError as `load` does."""
        with self._newest() as newest:
            newest.entries[entry.variant] = entry
        self.entries[entry.variant] = entry

    def put_tools(self, tools: tuple[Wheel, ...]) -> None:
        """Pin the build's own wheels and save. Raises as `put` does."""
        with self._newest() as newest:
            newest.tools = tools
        self.tools = tools

    @contextmanager
    def _newest(self) -> Iterator["Lock"]:
        """The file's content, to be changed and saved while no other thread or build does the same."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent, lambda: None):
            newest = Lock.load(self.path)
            yield newest
            write_text(self.path, newest._to_text())

    def _to_text(self) -> str:
        data = {
            "schema_version": SCHEMA_VERSION,
            "tools": encode(self.tools),
            "variants": {name: _to_json(self.entries[name]) for name in sorted(self.entries)},
        }
        return json.dumps(data, indent=1) + "\n"


def _to_json(entry: Resolved) -> Json:
    data = cast(dict[str, Json], encode(entry))
    del data["variant"]  # its key in the file
    return data


def _from_json(name: str, raw: dict[str, Any]) -> Resolved:
    always = {"wheels": None, "notes": None}  # not to be left out, though new values have defaults
    entry = decode(Resolved, {**always, **raw, "variant": name}, name)
    seen: set[str] = set()
    for wheel in entry.wheels:
        if _checked(wheel).distribution in seen:
            raise ValueError(f"{name} has two wheels of {wheel.distribution}")
        seen.add(wheel.distribution)
    return entry


def _checked(wheel: Wheel) -> Wheel:
    """A wheel whose name and digest make a path inside the cache. Raises ValueError."""
    if not (_WHEEL.fullmatch(wheel.filename) and _SHA256.fullmatch(wheel.sha256)):
        raise ValueError(f"{wheel.filename!r} with SHA-256 {wheel.sha256!r} is not a wheel")
    return wheel
