"""Provides an engine on this host: finds one, or installs and starts Debian's or Ubuntu's.

`plan_install` decides what to do, as a value; it is announced before it is done.
"""

import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from buildtool.core.command import CommandFailed, find, relay, run, run_streaming, spawn
from buildtool.core.errors import EngineForbidden, EngineUnavailable, EnvironmentMissing, ToolError
from buildtool.core.files import scratch, write_text
from buildtool.core.progress import Progress
from buildtool.engine.client import Engine
from buildtool.engine.connection import NEXT_STEP, endpoint_here

START_TIMEOUT_S = 60
_LOCK_S = 300  # for another apt to end, such as the updates that a new machine begins with
DAEMON_JSON = Path("/etc/docker/daemon.json")
DAEMON_SETTINGS = '{"features": {"containerd-snapshotter": true, "cdi": true}}\n'
DOCKERD_LOG = Path("/var/log/dockerd.log")

# Debian's releases in order: where one lacks docker-buildx, the next one's packages install on it
DEBIAN_SUITES = ("bullseye", "bookworm", "trixie", "forky")
DEBIAN = ("docker.io", "docker-cli", "docker-buildx", "docker-compose")
UBUNTU = ("docker.io", "docker-buildx", "docker-compose-v2")
ALSO_NEEDED = ("mmdebstrap",)  # beside the engine: makes base images where no registry answers


@dataclass(frozen=True)
class Host:
    """The facts that decide how an engine can be provided here."""

    distribution: str
    codename: str
    is_root: bool
    buildx_in_suite: bool
    has_engine: bool
    has_settings: bool = False  # a daemon.json
    has_images: bool = False  # or at least the data directory of an engine that was here once


@dataclass(frozen=True)
class InstallPlan:
    """Packages to install; `suite` is another release to take the engine's from, or None."""

    packages: tuple[str, ...]
    suite: str | None


def plan_install(host: Host) -> InstallPlan:
    """What to install. Raises EngineUnavailable where the user has to act."""
    if host.distribution not in ("debian", "ubuntu"):
        raise EngineUnavailable(
            f"no Docker engine answers, and this tool can't install one on {host.distribution}", NEXT_STEP
        )
    if not host.is_root:
        raise EngineUnavailable("no Docker engine answers, and only root may install or start one", NEXT_STEP)
    if host.has_engine:
        return InstallPlan(ALSO_NEEDED, None)
    if host.distribution == "ubuntu":
        return InstallPlan(UBUNTU + ALSO_NEEDED, None)
    if host.buildx_in_suite:
        return InstallPlan(DEBIAN + ALSO_NEEDED, None)
    if host.codename not in DEBIAN_SUITES[:-1]:
        raise EngineUnavailable(f"Debian {host.codename} has no docker-buildx package", NEXT_STEP)
    following = DEBIAN_SUITES[max(DEBIAN_SUITES.index(host.codename) + 1, DEBIAN_SUITES.index("trixie"))]
    return InstallPlan(DEBIAN + ALSO_NEEDED, following)


def may_choose_store(host: Host) -> bool:
    """Whether this tool may choose the engine's image store, by writing its settings.

    Not where there are settings or images: another store wouldn't show the images of the first.
    """
    return not (host.has_engine or host.has_settings or host.has_images)


def ensure_engine(progress: Progress, *, assume_yes: bool = False, verbose: bool = False) -> Engine:
    """A connection to a working engine, after installing and starting one if need be.

    When `verbose`, `progress` gets every line of apt's. Raises EngineUnavailable with the next step where
    this tool can't do that.
    """
    try:
        return Engine()
    except EngineForbidden:
        raise
    except EngineUnavailable:
        if endpoint_here().named_by:  # somebody else's engine, maybe on another machine
            raise
    host = describe_host()
    plan = plan_install(host)
    if not (host.has_engine and find("mmdebstrap")):
        where = f" (from Debian {plan.suite})" if plan.suite else ""
        progress(f"no Docker engine answers; installing {', '.join(plan.packages)}{where} with apt")
        if not (assume_yes or _confirmed()):
            raise EngineUnavailable("no Docker engine answers, and you declined to install one", NEXT_STEP)
        _install_on(host, plan, progress, verbose=verbose)
    start(progress)
    return Engine()


def _install_on(host: Host, plan: InstallPlan, progress: Progress, *, verbose: bool) -> None:
    """Install; a new engine's settings are written first, since its package may start it at once."""
    ours = may_choose_store(host)
    if ours:
        progress(f"writing {DAEMON_JSON} (containerd image store, CDI devices)")
        write_text(DAEMON_JSON, DAEMON_SETTINGS)
    try:
        install(plan, progress, verbose=verbose)
    except BaseException:
        if ours:
            DAEMON_JSON.unlink(missing_ok=True)
        raise


def describe_host() -> Host:
    """This host, from its files and its package manager."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # no distribution gives its name here
        release = {}
    return Host(
        distribution=release.get("ID", "unknown"),
        codename=release.get("VERSION_CODENAME", "unknown"),
        is_root=os.geteuid() == 0,
        buildx_in_suite=_has_candidate("docker-buildx"),
        has_engine=find("dockerd") is not None,
        has_settings=DAEMON_JSON.exists(),
        has_images=Path("/var/lib/docker").exists(),
    )


def install(plan: InstallPlan, progress: Progress, *, verbose: bool = False) -> None:
    """Install with apt; another suite's packages come through our own configuration."""
    with scratch() as folder:
        options = _borrow_suite(folder, plan.suite) if plan.suite else []
        packages = [f"{p}/{plan.suite}" if plan.suite and p in DEBIAN else p for p in plan.packages]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        quiet = ["apt-get", "-q", "-o", "Dpkg::Use-Pty=0", "-o", f"DPkg::Lock::Timeout={_LOCK_S}", *options]
        try:
            run_streaming(
                [*quiet, "update"],
                progress=relay(progress, lambda _line: None, verbose=verbose),
                env=environment,
            )
            command = [*quiet, "install", "-y", "--no-install-recommends", *packages]
            run_streaming(
                command,
                progress=relay(
                    progress, lambda line: line if line.startswith("Setting up") else None, verbose=verbose
                ),
                env=environment,
            )
        except CommandFailed as error:
            raise EnvironmentMissing(f"apt can't install the engine:\n{error.tail}", NEXT_STEP) from error


def start(progress: Progress) -> None:
    """Start the engine and wait until it answers. Raises EngineUnavailable with the last lines of its log."""
    if Path("/run/systemd/system").is_dir():
        progress("starting docker with systemd")
        try:
            run(["systemctl", "start", "docker"])
        except CommandFailed as error:
            raise EngineUnavailable(
                f"systemd can't start docker:\n{error.tail}", "see why: journalctl -u docker"
            ) from error
    else:
        progress(f"starting dockerd (its log: {DOCKERD_LOG})")
        spawn(["dockerd"], log=DOCKERD_LOG)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            progress(f"engine {Engine(timeout_s=5).info().version} answers")
        except ToolError:
            time.sleep(0.3)
        else:
            return
    log = DOCKERD_LOG.read_text(encoding="utf-8", errors="replace") if DOCKERD_LOG.exists() else ""
    words = "\n".join(log.splitlines()[-8:])
    raise EngineUnavailable(f"the engine didn't answer within {START_TIMEOUT_S} s:\n{words}", NEXT_STEP)


def host_mirror() -> str | None:
    """The Debian mirror that the host's own apt uses; None (mmdebstrap's default) elsewhere."""
    if not find("apt-get"):
        return None
    try:
        listed = run(
            ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
        )
    except CommandFailed:
        return None
    for line in listed.stdout.splitlines():
        origin, label, uri = (*line.split(" ", 2), "", "")[:3]
        if origin == label == "Debian":
            return uri.strip() or None
    return None


def _borrow_suite(directory: Path, suite: str) -> list[str]:
    """apt options that add one suite to the host's own mirror, at a priority that changes nothing else."""
    mirror = host_mirror()
    if not mirror:
        raise EngineUnavailable("apt knows no Debian mirror to take the engine from", NEXT_STEP)
    (directory / "parts").mkdir()
    (directory / "lists" / "partial").mkdir(parents=True)
    for own in Path("/etc/apt/sources.list.d").glob("*.sources"):
        shutil.copyfile(own, directory / "parts" / own.name)
    for own in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*.list")):
        if own.exists():
            shutil.copyfile(own, directory / "parts" / own.with_suffix(".list").name)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    borrowed = f"Types: deb\nURIs: {mirror}\nSuites: {suite}\nComponents: main\nSigned-By: {keyring}\n"
    (directory / "parts" / "weir.sources").write_text(borrowed, encoding="utf-8")
    preferences = f"Package: *\nPin: release n={suite}\nPin-Priority: 100\n"
    (directory / "preferences").write_text(preferences, encoding="utf-8")
    directory.chmod(0o755)
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": directory / "parts",
        "Dir::Etc::Preferences": directory / "preferences",
        "Dir::State::Lists": directory / "lists",
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _confirmed() -> bool:
    """Ask on a terminal; elsewhere true."""
    if sys.stdin is None or not sys.stdin.isatty():  # None: started with no standard input at all
        return True
    try:
        return input("go ahead? [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:  # Ctrl-D
        return False


def _has_candidate(package: str) -> bool:
    if not find("apt-cache"):
        return False
    policy = run(["apt-cache", "policy", package]).stdout
    return "Candidate:" in policy and "Candidate: (none)" not in policy
