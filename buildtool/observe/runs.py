"""Observed runs: an image's container, a workload that uses it, and the files that were opened meanwhile."""

import itertools
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from buildtool.core.command import CommandFailed, run_streaming
from buildtool.core.errors import ConfigError, EnvironmentMissing, ProofFailed
from buildtool.core.files import scratch, write_text
from buildtool.core.progress import Progress
from buildtool.engine.client import Devices, Engine
from buildtool.engine.connection import endpoint_here
from buildtool.engine.served import GATE, GATE_THAT_STAYS, Served, Started, served
from buildtool.gpucode import loaded
from buildtool.gpucode.used import is_generated
from buildtool.keep.keep_list import GENERATED, GPU_CODE
from buildtool.observe.fanotify import Fanotify, is_local
from probes.core.quoting import terminal

FANOTIFY, INOTIFY = "fanotify", "inotify"
LEFT_OUT = "weir: the "  # what a slim image's messages of missing files begin with
_WATCHER = Path(__file__).parent / "inotify.py"


@dataclass(frozen=True)
class Workload:
    """What uses an image: a program on this host while its container serves, or the container's own end.

    `program` is split as a shell would; WEIR_URL and WEIR_CONTAINER tell it where the container is.
    """

    program: str = ""
    command: tuple[str, ...] = ()  # in the container; empty: the image's own
    environments: tuple[tuple[tuple[str, str], ...], ...] = ((),)  # a run with each
    volumes: tuple[str, ...] = ()
    devices: Devices | None = None


@dataclass(frozen=True)
class Observation:
    """The files that runs opened, from the image's root, and by what that was seen."""

    paths: frozenset[str]
    method: str


def environments(texts: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """A run's variables for each value of those that are given several times. Raises ConfigError."""
    values: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"{terminal(text)} sets no variable", "write --env NAME=VALUE")
        values.setdefault(name, []).append(value)
    products = itertools.product(*values.values())
    return tuple(tuple(zip(values, product, strict=True)) for product in products)


def mounts(texts: Sequence[str]) -> tuple[str, ...]:
    """What --volume says, looked at before the engine makes folders of it. Raises ConfigError.

    Whether a path is there is only asked of an engine on this host's socket. Raises EngineUnavailable for a
    docker context that can't be read.
    """
    is_here = bool(texts) and endpoint_here().host.startswith("unix://")
    for text in texts:
        host, _, place = text.partition(":")
        if not host or not place.startswith("/"):
            raise ConfigError(
                f"{terminal(text)} mounts nothing", "write --volume HOST:PLACE, such as /data:/data:ro"
            )
        if is_here and host.startswith("/") and not Path(host).exists():
            raise ConfigError(
                f"this host has no {terminal(host)} to mount", "name a directory or file that is there"
            )
    return tuple(texts)


def observe(engine: Engine, ref: str, workload: Workload, *, method: str, progress: Progress) -> Observation:
    """The files that an image's containers open in each of a workload's runs.

    `method` is FANOTIFY, INOTIFY, or empty for the first that works. Raises ProofFailed where a run fails,
    EnvironmentMissing where nothing can watch, and as `served` does.
    """
    paths: frozenset[str] = frozenset()
    used = ""
    for env in workload.environments:
        for name in [method] if method else [FANOTIFY, INOTIFY]:
            try:
                seen = _observed(engine, ref, workload, env, method=name, progress=progress)
            except _Refused as refused:
                progress(f"{name} can't watch: {refused}")
                continue
            paths, used = paths | seen, name
            break
        else:
            raise EnvironmentMissing(
                f"nothing here can watch what {terminal(ref)} opens",
                "run this as root on the engine's host, or use an image with Python",
            )
    return Observation(paths, used)


class _Refused(OSError):
    """A way of watching doesn't work here. An OSError, since those pass through what words the engine's."""


def _observed(
    engine: Engine,
    ref: str,
    workload: Workload,
    env: tuple[tuple[str, str], ...],
    *,
    method: str,
    progress: Progress,
) -> frozenset[str]:
    """The files that one run opened and its image has. Raises _Refused before the run has begun."""
    gate = GATE if method == FANOTIFY else GATE_THAT_STAYS
    with ExitStack() as stack:
        container = stack.enter_context(served(engine, ref, _started(workload, env, gate)))
        watch: Fanotify | _Inside
        if method == FANOTIFY:
            if not is_local(container.pid, gate):
                raise _Refused("the engine is on another machine")
            try:
                watch = Fanotify(container.pid)
            except OSError as error:
                raise _Refused(str(error)) from error
            stack.callback(watch.close)
        else:
            watch = _Inside(container)
        shown = " ".join(f"{name}={value}" for name, value in env)
        progress(f"{terminal(ref)}: watching by {method}{' with ' if shown else ''}{terminal(shown)}")
        container.let_through()
        _drive(
            container, workload, stop=Served.stop if method == FANOTIFY else Served.signal, progress=progress
        )
        if method == FANOTIFY:
            code = container.exit_code()
        try:
            paths = watch.finish()
        except OSError as error:
            raise ProofFailed(f"the run was not seen whole: {error}", "run the same command again") from error
        if method == INOTIFY:
            container.let_through()
            code = container.exit_code()
        _require_success(container, workload, code)
        if not paths:  # it opens its own executable, if it begins
            raise ProofFailed(
                "no file of the image was opened: its program hadn't begun when it was stopped",
                "give the image a health check, or let the workload wait until the service answers",
            )
        return paths


_INSIDE = "/run/weir-gpu-code"  # where the container has what watches its GPU code


@contextmanager
def watching_gpu_code(engine: Engine, ref: str, workload: Workload) -> Iterator[tuple[Workload, Path]]:
    """A workload whose Python processes write which GPU code they load, and the file that they write to.

    Others aren't seen, nor those that are started with -S, -E or -I.
    """
    record = engine.inspect(ref) or {}
    own = dict(text.partition("=")[::2] for text in (record.get("Config") or {}).get("Env") or ())
    with scratch() as folder:
        folder.chmod(0o755)
        shutil.copyfile(loaded.__file__, folder / "sitecustomize.py")
        lines = folder / "lines"
        write_text(lines, "")
        lines.chmod(0o666)  # whoever runs in the container
        runs = []
        for env in workload.environments:
            before = {**own, **dict(env)}.get("PYTHONPATH", "")
            more = (("PYTHONPATH", f"{_INSIDE}:{before}".rstrip(":")), (loaded.FILE, f"{_INSIDE}/lines"))
            runs.append((*(pair for pair in env if pair[0] != "PYTHONPATH"), *more))
        volumes = (*workload.volumes, f"{folder}:{_INSIDE}")
        yield replace(workload, environments=tuple(runs), volumes=volumes), lines


def loaded_code(lines: Path, progress: Progress) -> frozenset[str]:
    """Lines of a keep-list for what processes wrote. Raises ProofFailed where none could be watched."""
    rows = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        value = _value(line)
        rows.append(value if isinstance(value, dict) else {"error": line})
    faults = sorted({str(row["error"])[:200] for row in rows if "error" in row})
    watched = sum("by" in row for row in rows)
    if not watched:
        why = terminal("; ".join(faults[:3]) or "none ran")
        raise ProofFailed(
            f"no Python of the run could be watched for GPU code: {why}",
            "run it in an image with CUPTI, which PyTorch's CUDA wheels bring, and with --gpus",
        )
    for fault in faults:
        progress(f"a process wasn't watched for GPU code: {terminal(fault)}")
    return frozenset(_line_of(row) for row in rows if "key" in row)


def _line_of(row: Mapping[str, object]) -> str:
    """The line of a keep-list for a module that was loaded."""
    count, names = row.get("functions"), row.get("such_as")
    made = (
        isinstance(count, int)
        and isinstance(names, list)
        and is_generated(count, [str(each) for each in names])
    )
    return f"{GENERATED if made else GPU_CODE}{row['key']}"


def _started(workload: Workload, env: tuple[tuple[str, str], ...], gate: str) -> Started:
    # a command may end before its first health check, or not: two runs would differ
    health = bool(workload.program)
    return Started(workload.command, env, workload.volumes, workload.devices, gate, health)


def _drive(
    container: Served, workload: Workload, *, stop: Callable[[Served], None], progress: Progress
) -> None:
    """Run the workload's program beside the service, and stop that; a command ends by itself."""
    if workload.program:
        container.wait_until_ready()
        run_program(workload.program, container.url, {"WEIR_CONTAINER": container.name}, progress)
        container.require_no_end()
        progress("the workload has passed; stopping the container")
        stop(container)


def _require_success(container: Served, workload: Workload, code: int) -> None:
    """Raises ProofFailed for a command that failed, and a slim image that lacks what the run asked for."""
    asked = [line for line in container.full_log().splitlines() if line.startswith(LEFT_OUT)]
    if asked:
        raise ProofFailed(
            "the run asked for what was left out of its image:\n" + "\n".join(map(terminal, asked[:10])),
            "observe that run on the whole image: weir build --undo; weir observe IMAGE --keep FILE",
        )
    if code and not workload.program:  # a service that is stopped may say so with its code
        raise ProofFailed(
            f"its command ended with {code}\n{container.log()}",
            "correct the command: a run that fails hasn't opened all that it needs",
        )


def words_of(program: str) -> list[str]:
    """A workload's program and its arguments. Raises ConfigError for one that can't be run."""
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise ConfigError(
            f"--workload can't be read as a command: {error}", "close its quotation marks"
        ) from error
    if not words or shutil.which(words[0]) is None:
        named = f"{terminal(words[0])}, which can't be run" if words else "no program"
        raise ConfigError(f"--workload names {named}", "write one, such as 'python3 requests.py'")
    return words


def run_program(program: str, url: str, variables: Mapping[str, str], progress: Progress) -> None:
    """Run a workload's program on this host. Raises ProofFailed where it fails, and as `words_of` does."""
    words = words_of(program)
    try:
        run_streaming(words, progress=progress, env={**os.environ, "WEIR_URL": url, **variables})
    except CommandFailed as error:
        tail = "\n".join(terminal(line) for line in error.tail.splitlines())
        raise ProofFailed(
            f"the workload failed: `{terminal(program)}` exited with {error.code}\n{tail}"
        ) from error


def prove(engine: Engine, ref: str, workload: Workload, *, progress: Progress) -> None:
    """Run all of a workload on an image. Raises ProofFailed, also where it asked for what was left out."""
    for env in workload.environments:
        with served(engine, ref, _started(workload, env, GATE)) as container:
            container.let_through()
            _drive(container, workload, stop=Served.stop, progress=progress)
            _require_success(container, workload, container.exit_code())


class _Inside:
    """The watcher that runs in the container itself. Raises _Refused where it can't watch."""

    def __init__(self, container: Served) -> None:
        self._container = container
        self._paths: set[str] = set()
        self._fault = ""
        source = _WATCHER.read_text(encoding="utf-8")
        self._lines = _lines(container.run_beside(["python3", "-S", "-B", "-c", source]))
        said = next((line for line in self._lines if line.strip()), "")
        if not isinstance(_value(said), int):  # which the watcher says first
            raise _Refused(terminal(f"in the container, python3 says: {said.strip()[:300] or 'nothing'}"))
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for line in self._lines:
            value = _value(line)
            if value == "":
                return
            if isinstance(value, str):
                self._paths.add(value)
            else:
                self._fault = str(value)
        self._fault = self._fault or "the watcher ended early"

    def finish(self) -> frozenset[str]:
        """The paths. Raises OSError if events were lost."""
        self._thread.join()
        if self._fault:
            raise OSError(terminal(f"events were lost: {self._fault[:200]}"))
        return frozenset(self._paths)


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def _value(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return {"error": line}


__all__ = [
    "FANOTIFY",
    "INOTIFY",
    "Observation",
    "Workload",
    "environments",
    "loaded_code",
    "observe",
    "prove",
    "run_program",
    "watching_gpu_code",
    "words_of",
]
