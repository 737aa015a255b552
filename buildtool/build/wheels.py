"""Wheels, resolved and downloaded by the host's own pip into a cache: <cache>/<sha256>/<file name>.

The host's index, find-links, certificate and proxy serve, and none of them enters an image. pip runs as
`pip_alone`, so that no package's code runs on this host.
"""

import os
import platform
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path

from buildtool.build import pip_alone
from buildtool.core.command import CommandFailed, relay, run, run_streaming
from buildtool.core.errors import ConfigError, DataError, SourceUnreachable
from buildtool.core.files import require_sha256, scratch, sha256_of
from buildtool.core.model import TorchBuild, TorchSource, Wheel, normalised
from buildtool.core.progress import Progress
from buildtool.prune.archives import ZIP_FAULTS
from probes.core.files import sync_directory
from probes.core.invocation import host_command

# -P: not a pip.py or json.py of the current directory
PIP = (sys.executable, "-P", "-m", "pip")
PIP_ALONE = (sys.executable, "-P", pip_alone.__file__)
ANSWER_TIMEOUT_S = 5  # an index that hasn't answered by then is skipped
GLIBC_FLOOR, GLIBC_BASE = 5, 36  # manylinux_2_5 up to the glibc of the oldest base (bookworm, 2.36)
# pip's messages for a source that doesn't work, the most specific first
CAUSES = (
    re.compile(re.escape(pip_alone.REFUSAL)),
    re.compile(r"Name or service not known|Temporary failure in name|Connection refused|ProxyError|SSLError"),
    re.compile(r"ConnectTimeout|ReadTimeout|NewConnectionError|Max retries exceeded|HTTP error|Client Error"),
    re.compile(r"\(constraint\)"),  # of the host's pip, which excludes what was asked for
    re.compile(r"No matching distribution|Could not find a version"),
)
# a requirement's name and its extras
_NAMED = re.compile(r"\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[(?P<extras>[^\]]*)\])?")
_MAX_METADATA = 4 << 20  # bytes of a wheel's description of itself
# a requirement of torch itself, with its extras
IS_TORCH = re.compile(r"\s*torch\s*(\[[^\]]*\])?(?![\w.-])", re.IGNORECASE)
CONNECTION = {"CERT", "CLIENT_CERT", "PROXY", "TRUSTED_HOST"}  # pip options that set how, not where
# a wheel that runs inside BuildKit's builds; never installed into an image
TOOLS = ("pip>=23",)
TOOLS_PYTHON = "3.11"  # the oldest that an image has


class WheelCache:
    """Wheels by content, downloaded by pip. `verbose`: print every line of pip's output."""

    def __init__(self, directory: Path, progress: Progress, *, verbose: bool = False) -> None:
        self._directory = directory
        self._progress = progress
        self._verbose = verbose

    def path(self, wheel: Wheel) -> Path:
        """Where a wheel is, or would be."""
        return self._directory / wheel.sha256 / wheel.filename

    def holds(self, wheel: Wheel) -> bool:
        """Whether the wheel is here with its full length; `verify` looks at its content before it is used."""
        path = self.path(wheel)
        return path.is_file() and path.stat().st_size == wheel.stored_bytes

    def resolve(self, source: TorchSource, python: str, requirements: Sequence[str]) -> tuple[Wheel, ...]:
        """Every wheel that torch from this source and the other requirements need.

        Torch is fetched first and separately, then pinned to exactly that file, so that no other index can
        put a newer or other build in its place. Raises SourceUnreachable when the source doesn't have it,
        and for a requirement or an extra that isn't in what was found: pip leaves some out without an error.
        """
        if not source.require:
            if not requirements:
                return ()
            wheels = self._download(["--", *requirements], python)
            self._require_all(requirements, wheels)
            return wheels
        with scratch(self._directory) as folder:
            index = [f"--index-url={source.index}"] if source.index else []
            quick = ["--no-deps", "--retries", "0", "--timeout", str(ANSWER_TIMEOUT_S)]
            try:
                alone = [text for text in source.require if IS_TORCH.match(text)]
                self._pip([*quick, *index, "--", *alone], python, folder, alone=source.index is not None)
            except CommandFailed as error:
                raise SourceUnreachable(f"torch source {source.name}: {failure_reason(error)}") from error
            torch = next(iter(folder.glob("torch-*.whl")), None)
            if torch is None:
                raise SourceUnreachable(f"torch source {source.name} gave no torch wheel")
            extra = [f"--extra-index-url={source.index}"] if source.index else []
            pinned = [pinned_requirement(text, torch) for text in source.require]
            wheels = self._download([*extra, f"--find-links={folder}", "--", *pinned, *requirements], python)
        self._require_all([*source.require, *requirements], wheels)
        foreign = foreign_to(source.build, wheels)
        if foreign:
            raise SourceUnreachable(
                f"torch source {source.name} gives a build other than {source.build.value}: it brings "
                f"{', '.join(sorted(foreign)[:4])}"
            )
        return wheels

    def tools(self) -> tuple[Wheel, ...]:
        """The wheels that run inside the build but stay out of the image."""
        return self._download(["--no-deps", "--", *TOOLS], TOOLS_PYTHON)

    def fetch(self, wheels: Sequence[Wheel], python: str, *, index: str | None) -> None:
        """Bring locked wheels that aren't here, checked against their hashes.

        Raises DataError when what an index now gives isn't what was locked.
        """
        missing = [wheel for wheel in wheels if not self.holds(wheel)]
        if not missing:
            return
        with scratch(self._directory) as folder, scratch() as beside:
            lines = [f"{w.distribution}=={w.version} --hash=sha256:{w.sha256}" for w in missing]
            listing = beside / "locked.txt"
            listing.write_text("\n".join(lines), encoding="utf-8")
            extra = [f"--extra-index-url={index}"] if index else []
            try:
                self._pip(["--no-deps", "--require-hashes", *extra, "-r", str(listing)], python, folder)
            except CommandFailed as error:
                if "DO NOT MATCH" in error.tail:
                    raise DataError(
                        f"a wheel differs from the locked one:\n{error.tail}",
                        f"if the index really changed, resolve again: {host_command()} build --update-lock",
                    ) from error
                raise SourceUnreachable(f"locked wheels can't be fetched: {failure_reason(error)}") from error
            self._keep(folder)
        if strange := next((wheel for wheel in missing if not self.holds(wheel)), None):
            raise DataError(
                f"what has the locked SHA-256 of {strange.filename} hasn't its name or its bytes",
                f"the lock isn't as a build wrote it; resolve again: {host_command()} build --update-lock",
            )

    def verify(self, wheels: Sequence[Wheel]) -> None:
        """Read every wheel once and compare. Raises DataError naming the first that is damaged."""
        for wheel in wheels:
            way_out = "run the same command again to fetch a new one"
            require_sha256(self.path(wheel), wheel.sha256, "the cached wheel", way_out=way_out)

    def _require_all(self, requirements: Sequence[str], wheels: Sequence[Wheel]) -> None:
        """Raise SourceUnreachable for a requirement or an extra that the wheels don't have."""
        by_name = {wheel.distribution: wheel for wheel in wheels}
        for text in requirements:
            name, extras = name_and_extras(text)
            if name not in by_name:
                raise SourceUnreachable(f"pip gave no wheel for {text!r}")
            path = self.path(by_name[name])
            if unknown := extras - set(_provided_extras(path) if extras else ()):
                raise SourceUnreachable(f"{path.name} has no extra {', '.join(sorted(unknown))}")

    def _download(self, arguments: list[str], python: str) -> tuple[Wheel, ...]:
        with scratch(self._directory) as folder:
            try:
                self._pip(["--retries", "1", "--timeout", "30", *arguments], python, folder)
            except CommandFailed as error:
                wanted = " ".join(word for word in arguments if not word.startswith("-"))
                raise SourceUnreachable(
                    f"pip can't resolve {wanted}: {failure_reason(error)}",
                    "check the host's pip configuration: python3 -m pip config list",
                ) from error
            return self._keep(folder)

    def _pip(self, arguments: list[str], python: str, into: Path, *, alone: bool = False) -> None:
        """Run `pip download`; with `alone`, it sees only the index and find-links in the arguments."""
        tags = [f"--platform={tag}" for tag in platform_tags(platform.machine())]
        base = [*PIP_ALONE, "download", "--disable-pip-version-check", "--progress-bar=off"]
        target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *tags]
        run_streaming(
            [*base, *target, "--dest", str(into), *arguments],
            progress=relay(
                lambda line: self._progress(f"python {python}: {line}"),
                lambda line: Path(line).name if line.startswith("Saved") else None,
                verbose=self._verbose,
            ),
            # the host says where packages come from, not that what they require is left out
            env={
                **(_connection_settings() if alone else os.environ),
                "PIP_NO_INPUT": "1",
                "PIP_NO_DEPS": "0",
            },
        )

    def _keep(self, folder: Path) -> tuple[Wheel, ...]:
        kept = []
        for file in sorted(folder.iterdir()):
            if file.suffix != ".whl":
                raise DataError(
                    f"pip brought {file.name}, which isn't a wheel", "name packages that have wheels"
                )
            if not zipfile.is_zipfile(file):
                raise DataError(f"{file.name} is not a wheel: its ZIP directory is missing or cut short")
            wheel = Wheel(file.name, sha256_of(file), file.stat().st_size)
            target = self.path(wheel)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            file.replace(target)
            sync_directory(target.parent)
            kept.append(wheel)
        return tuple(kept)


# ---- requirements ------------------------------------------------------------------------------------------


def name_and_extras(requirement: str) -> tuple[str, set[str]]:
    """The distribution and the extras that a requirement of a catalog names, normalised (PEP 503, 685)."""
    match = _NAMED.match(requirement)
    if not match:
        raise ConfigError(f"not a requirement: {requirement!r}", "write a name, such as numpy>=2")
    extras = (match["extras"] or "").split(",")
    return normalised(match["name"]), {normalised(extra.strip()) for extra in extras if extra.strip()}


def _provided_extras(path: Path) -> Iterator[str]:
    """The extras in a wheel's metadata. Raises DataError for a damaged file, of which pip may not have read
    that: indexes serve copies of the metadata.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                    with archive.open(name) as file:
                        text = file.read(_MAX_METADATA).decode("utf-8", "replace")
                    yield from map(normalised, HeaderParser().parsestr(text).get_all("Provides-Extra", []))
    except ZIP_FAULTS as error:
        raise DataError(f"{path.name} is not a wheel, or it is damaged: {error}") from error


def foreign_to(build: TorchBuild, wheels: Sequence[Wheel]) -> set[str]:
    """Distributions that belong to another torch build than this one."""
    names = {wheel.distribution for wheel in wheels}
    cuda = {name for name in names if name.startswith(("nvidia-", "cuda-"))}
    rocm = {name for name in names if name.startswith(("rocm-", "amd-torch", "pytorch-triton-rocm"))}
    match build:
        case TorchBuild.CPU:
            return cuda | rocm | (names & {"triton"})
        case TorchBuild.ROCM:
            return cuda
        case TorchBuild.CUDA:
            return rocm


def pinned_requirement(requirement: str, torch: Path) -> str:
    """The requirement, with torch pinned to the version of the wheel at hand (extras kept)."""
    match = IS_TORCH.match(requirement)
    return f"torch{match[1] or ''}=={torch.name.split('-')[1]}" if match else requirement


# ---- pip ---------------------------------------------------------------------------------------------------


def platform_tags(machine: str) -> list[str]:
    """Wheel platform tags that a Debian base of this machine runs (PEP 600 and its older names)."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_BASE, GLIBC_FLOOR - 1, -1)]
    return [*tags, *(f"manylinux{old}_{machine}" for old in ("2014", "2010", "1"))]


def _connection_settings() -> dict[str, str]:
    """An environment in which pip keeps the host's certificate and proxy and forgets its package sources.

    Else a find-links or extra index of the host could answer for an index that was meant to be the only one.
    """
    listed = run([*PIP, "config", "list"]).stdout
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    for key, value in re.findall(r"^\S*?\.([\w.-]+)='(.*)'$", listed, re.MULTILINE):
        name = key.strip(".").replace("-", "_").upper()
        if name in CONNECTION:
            kept[f"PIP_{name}"] = value
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


def failure_reason(error: CommandFailed) -> str:
    """The line of pip's output that gives the reason of its failure: "no connection" before "no version"."""
    lines = error.tail.splitlines() or ["pip printed nothing"]
    causes = [line for pattern in CAUSES for line in lines if pattern.search(line)]
    return (causes or lines[-1:])[0].strip().removeprefix("ERROR: ").removeprefix("WARNING: ")[:300]
