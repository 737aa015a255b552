"""A container that waits at a gate before its program starts, so that what it does can be watched from the
first moment on; and the service in it.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import docker.errors
from docker.models.containers import Container

from buildtool.core.errors import DataError, ProofFailed
from buildtool.engine.client import NO_HEALTHCHECK, Devices, Engine, device_options, parse_answer
from buildtool.engine.connection import engine_errors
from probes.core.quoting import terminal

READY_S = 300.0  # for a service to get healthy
STOP_S = 60  # from SIGTERM to SIGKILL
LOG_LINES = 30
GATE = 'read -r go; exec "$@" </dev/null'
# stays until it is let through again, and makes a file first: for who watches from inside the container
GATE_THAT_STAYS = (
    'read -r go; "$@" </dev/null & p=$!; trap "kill -TERM $p" TERM; '
    "while :; do wait $p; c=$?; kill -0 $p 2>/dev/null || break; done; : > /dev/shm/.weir-observed; "
    "read -r end; exit $c"
)


@dataclass(frozen=True)
class Started:
    """How a container is started. Paths of `volumes` are as `docker run --volume` takes them."""

    command: tuple[str, ...] = ()  # empty: the image's own
    env: tuple[tuple[str, str], ...] = ()
    volumes: tuple[str, ...] = ()
    devices: Devices | None = None
    gate: str = GATE
    checks_health: bool = True  # where the image says how


@dataclass(frozen=True)
class _Health:
    Status: str = "none"


@dataclass(frozen=True)
class _State:
    Pid: int = 0
    Status: str = ""
    ExitCode: int = 0
    Health: _Health = _Health()


@dataclass(frozen=True)
class _Binding:
    HostPort: str = ""


@dataclass(frozen=True)
class _Network:
    Ports: Mapping[str, tuple[_Binding, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Inspected:
    State: _State = _State()
    NetworkSettings: _Network = _Network()


class Served:
    """A container whose program waits at its gate, and then runs."""

    def __init__(self, container: Container, stdin: Any) -> None:  # noqa: ANN401 - a socket of the package's
        self._container, self._stdin = container, stdin

    @property
    def name(self) -> str:
        """The container's name in the engine."""
        return str(self._container.name)

    def _inspected(self) -> _Inspected:
        with engine_errors():
            self._container.reload()
        return parse_answer(_Inspected, self._container.attrs)

    @property
    def pid(self) -> int:
        """The number of its first process on the engine's host."""
        return self._inspected().State.Pid

    def let_through(self) -> None:
        """Open the gate; where that stays, the second call lets it end."""
        self._stdin.sendall(b"\n")

    @property
    def url(self) -> str:
        """Where its first port is reached from this host; empty without one."""
        ports = self._inspected().NetworkSettings.Ports
        numbers = [each.HostPort for name in sorted(ports) for each in ports[name] if each.HostPort]
        return f"http://127.0.0.1:{numbers[0]}" if numbers else ""

    def wait_until_ready(self) -> None:
        """Wait until the image's health check passes; at once without one. Raises ProofFailed."""
        deadline = time.monotonic() + READY_S
        while (state := self._inspected().State).Health.Status not in ("none", "", "healthy"):
            if state.Status != "running":
                raise self._ended(state, "before it was ready")
            if time.monotonic() > deadline:
                raise ProofFailed(f"it isn't healthy after {READY_S:.0f} s\n{self.log()}")
            time.sleep(0.1)

    def _ended(self, state: _State, when: str) -> ProofFailed:
        return ProofFailed(
            f"its program ended with {state.ExitCode} {when}\n{self.log()}",
            "where that is 137, it was killed: give it more memory, or end what kills it",
        )

    def require_no_end(self) -> None:
        """Raises ProofFailed where its program ended with an error before anybody stopped it."""
        state = self._inspected().State
        if state.Status != "running" and state.ExitCode:
            raise self._ended(state, "while the workload used it")

    def exit_code(self) -> int:
        """Wait for the end of its program."""
        with engine_errors():
            return int(self._container.wait(timeout=None)["StatusCode"])

    def stop(self) -> None:
        """End its program, as `docker stop` does."""
        with engine_errors():
            self._container.stop(timeout=STOP_S)

    def signal(self) -> None:
        """Ask its program to end."""
        with engine_errors():
            self._container.kill("SIGTERM")

    def log(self) -> str:
        """The last lines of its output, quoted."""
        with engine_errors():
            text = self._container.logs(tail=LOG_LINES).decode(errors="replace")
        return "\n".join(terminal(line[:500]) for line in text.splitlines())

    def full_log(self) -> str:
        """All of its output that the engine kept."""
        with engine_errors():
            return str(self._container.logs().decode(errors="replace"))

    def run_beside(self, program: list[str]) -> Iterator[bytes]:
        """Run a program in the container, as root; its output in pieces. Raises ProofFailed."""
        try:
            with engine_errors():
                ran: Any = self._container.exec_run(program, user="0", stream=True, stderr=False)
                yield from ran.output
        except docker.errors.APIError as error:
            raise ProofFailed(f"nothing can watch from inside the container: {error}") from error


@contextmanager
def served(engine: Engine, ref: str, how: Started) -> Iterator[Served]:
    """Start an image's container, whose program waits at its gate; it is removed after the block.

    Its ports are reached from this host alone. Raises DataError for an image that the engine doesn't have, or
    that has no shell, or says nothing to run; BuildFailed where it can't be started.
    """
    record = engine.inspect(ref)
    if record is None:
        raise DataError(f"the engine has no image {terminal(ref)}", "list the images: docker images")
    config = record.get("Config") or {}
    program = [*(config.get("Entrypoint") or ()), *(how.command or config.get("Cmd") or ())]
    if not program:
        raise DataError(
            f"{terminal(ref)} says nothing to run", "name a command: weir observe IMAGE -- COMMAND"
        )
    settings = {
        "environment": dict(how.env),
        "volumes": list(how.volumes),
        "ports": dict.fromkeys(config.get("ExposedPorts") or (), ("127.0.0.1", None)),
        "entrypoint": ["/bin/sh", "-c", how.gate, "sh"],
        "stdin_open": True,
        **({} if how.checks_health else {"healthcheck": NO_HEALTHCHECK}),
        **device_options(how.devices),
    }
    with engine.held(ref, program, settings) as container, engine_errors():
        attached: Any = container.attach_socket(params={"stdin": 1, "stream": 1})
        with closing(attached):
            try:
                container.start()
            except docker.errors.APIError as error:
                if '"/bin/sh"' in str(error) and "no such file" in str(error):
                    raise DataError(
                        f"{terminal(ref)} has no /bin/sh, in which its program waits until it is watched",
                        "observe an image with a shell, and of the same content otherwise",
                    ) from error
                raise
            yield Served(container, attached._sock)  # the package's wrapper only reads
