"""Wheels, resolved and downloaded on the host by its own pip, so that its index, find-links, certificate and
proxy serve and none of them enters an image.

Kept by content in a cache: <cache>/<sha256>/<file name>.
"""

import contextlib
import os
import platform
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from buildtool.command import CommandFailed, run_loud
from buildtool.errors import DataError, EnvironmentMissing, SourceUnreachable
from buildtool.files import sha256_of
from buildtool.model import TorchSource, Wheel

Say = Callable[[str], None]

ANSWER_TIMEOUT_S = 5  # an index that hasn't answered by then is passed over
GLIBC_FLOOR, GLIBC_BASE = 5, 36  # manylinux_2_5 up to the glibc of the oldest base (bookworm, 2.36)
UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|Name or service not known|Temporary failure in name|"
    r"Connection refused|Max retries exceeded|ProxyError|SSLError|ReadTimeout|40[34] Client Error|"
    r"No matching distribution|Could not find a version",
)
# What a build needs on the host's side: never installed into an image.
TOOLS = ("installer>=0.7", "pip>=23")


class WheelCache:
    """Wheels by content, filled by pip."""

    def __init__(self, directory: Path, say: Say) -> None:
        self._directory = directory
        self._say = say

    def path(self, wheel: Wheel) -> Path:
        """Where a wheel lies, or would lie."""
        return self._directory / wheel.sha256 / wheel.filename

    def holds(self, wheel: Wheel) -> bool:
        """Whether the wheel is here with its full length (its content is checked as it came in)."""
        path = self.path(wheel)
        return path.is_file() and path.stat().st_size == wheel.stored_bytes

    def resolve(self, source: TorchSource, python: str, requirements: Sequence[str]) -> tuple[Wheel, ...]:
        """Every wheel that torch from this source and the other requirements need.

        Torch is fetched first and alone, then pinned to that very file, so that no other index can put a
        newer or other build in its place. Raises SourceUnreachable when the source doesn't have it.
        """
        if not source.require:
            return self._download(list(requirements), python) if requirements else ()
        with self._scratch() as scratch:
            index = ["--index-url", source.index] if source.index else []
            quick = ["--no-deps", "--retries", "0", "--timeout", str(ANSWER_TIMEOUT_S)]
            try:
                self._pip([*quick, *index, *source.require], python, scratch)
            except CommandFailed as error:
                raise _unreachable(source, error) from error
            torch = next(iter(scratch.glob("torch-*.whl")), None)
            if torch is None:
                raise SourceUnreachable(f"torch source {source.name} gave no torch wheel")
            extra = ["--extra-index-url", source.index] if source.index else []
            pinned = [_pin(text, torch) for text in source.require]
            wanted = [*pinned, *requirements]
            return self._download([*extra, "--find-links", str(scratch), *wanted], python)

    def tools(self) -> tuple[Wheel, ...]:
        """The wheels that run inside the build but stay out of the image."""
        return self._download([*TOOLS, "--no-deps"], f"{sys.version_info[0]}.{sys.version_info[1]}")

    def fetch(self, wheels: Sequence[Wheel], python: str, *, index: str | None) -> None:
        """Bring locked wheels that aren't here, checked against their hashes.

        Raises DataError when what an index now gives isn't what was locked.
        """
        missing = [wheel for wheel in wheels if not self.holds(wheel)]
        if not missing:
            return
        with self._scratch() as scratch:
            lines = [f"{w.distribution}=={w.version} --hash=sha256:{w.sha256}" for w in missing]
            listing = scratch / "locked.txt"
            listing.write_text("\n".join(lines))
            extra = ["--extra-index-url", index] if index else []
            try:
                self._pip(["--no-deps", "--require-hashes", *extra, "-r", str(listing)], python, scratch)
            except CommandFailed as error:
                if "DO NOT MATCH" in error.tail:
                    raise DataError(
                        f"a wheel isn't the one that was locked:\n{error.tail}",
                        "if the index really changed, resolve afresh: weir build --update-lock",
                    ) from error
                raise SourceUnreachable(f"locked wheels can't be fetched:\n{error.tail}") from error
            self._keep(scratch)

    def verify(self, wheels: Sequence[Wheel]) -> None:
        """Read every wheel once and compare. Raises DataError naming the first that is damaged."""
        for wheel in wheels:
            path = self.path(wheel)
            if sha256_of(path) != wheel.sha256:
                path.unlink()
                raise DataError(
                    f"the cached wheel {wheel.filename} is corrupt (not {wheel.sha256[:12]}...); removed it",
                    "run the same command again to fetch it anew",
                )

    def _download(self, arguments: list[str], python: str) -> tuple[Wheel, ...]:
        with self._scratch() as scratch:
            try:
                self._pip(["--retries", "1", "--timeout", "30", *arguments], python, scratch)
            except CommandFailed as error:
                wanted = " ".join(word for word in arguments if not word.startswith("-"))
                raise SourceUnreachable(
                    f"pip can't resolve {wanted}:\n{error.tail}",
                    "check the host's pip configuration: python3 -m pip config list",
                ) from error
            return self._keep(scratch)

    def _pip(self, arguments: list[str], python: str, into: Path) -> None:
        tags = [f"--platform={tag}" for tag in platform_tags(platform.machine())]
        base = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off"]
        target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *tags]
        run_loud(
            [*base, *target, "--dest", str(into), *arguments],
            say=lambda line: (
                self._say(f"python {python}: {Path(line).name}") if line.startswith("Saved") else None
            ),
            env={**os.environ, "PIP_NO_INPUT": "1"},
        )

    def _keep(self, scratch: Path) -> tuple[Wheel, ...]:
        kept = []
        for file in sorted(scratch.glob("*.whl")):
            if not zipfile.is_zipfile(file):
                raise DataError(f"{file.name} is not a wheel: its ZIP directory is missing or cut short")
            wheel = Wheel(file.name, sha256_of(file), file.stat().st_size)
            target = self.path(wheel)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
            kept.append(wheel)
        return tuple(kept)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=self._directory) as name:
                yield Path(name)
        except OSError as error:
            raise EnvironmentMissing(f"can't use the wheel cache {self._directory}: {error}") from error


def platform_tags(machine: str) -> list[str]:
    """Wheel platform tags that a Debian base of this machine runs (PEP 600 and its older names)."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_BASE, GLIBC_FLOOR - 1, -1)]
    return [*tags, *(f"manylinux{old}_{machine}" for old in ("2014", "2010", "1"))]


def _pin(requirement: str, torch: Path) -> str:
    """The requirement, with torch pinned to the version of the wheel at hand (extras kept)."""
    match = re.match(r"\s*torch(\[[^\]]*\])?(?![\w-])", requirement)
    return f"torch{match[1] or ''}=={torch.name.split('-')[1]}" if match else requirement


def _unreachable(source: TorchSource, error: CommandFailed) -> SourceUnreachable:
    said = [line for line in error.tail.splitlines() if UNREACHABLE.search(line)]
    reason = (
        said[-1].removeprefix("ERROR: ").strip()
        if said
        else error.tail.splitlines()[-1]
        if error.tail
        else "?"
    )
    return SourceUnreachable(f"torch source {source.name}: {reason[:300]}")
