"""Finds the largest size that fits by real trials: a worker process that tries each size in a fork of itself.

The worker imports torch and transformers once and touches neither memory nor GPU with them, so every fork
is as fresh as a process that has just imported them, and takes milliseconds to start instead of seconds.
Run as a program, this module is the worker.
"""

import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from probes.core.codec import Json, decode, encode, load
from probes.core.errors import DeviceUnusable, Exit, ProbeError, UsageError
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.fit import limits
from probes.fit.forecast import with_size
from probes.fit.limits import Group, Parent, group, parent
from probes.fit.report import NOT_BUILT, Axis, Built, Cap, Measured, Question, Taken, Trial, Verdict
from probes.fit.search import Hint, Tried, search, summary
from probes.hardware.host import floor_bytes, meminfo_bytes, oom_kills, spendable_bytes, threads
from probes.measure import supervisor
from probes.measure.worker import Send, die_with, exit_now, require_torch, why_without, work
from probes.records.schema import Done, Failed

MOST_ANSWER: Final = 1 << 20  # bytes
MOST_WORDS: Final = 300  # characters of an error
IMPORT_S: Final = 60.0  # beyond the limit, for a cold import of torch and transformers
ROOT: Final = Path("/")


@dataclass(frozen=True)
class SearchRequest:
    """Find the largest size of an axis that fits."""

    config: str  # a config.json
    question: Question
    device: Literal["cpu", "gpu"]
    axis: Axis
    budget: int  # bytes
    hint: Hint  # where the search begins
    most: int  # the largest size worth trying
    limit_s: float
    cap: Cap = "auto"  # on a CPU; a GPU's is torch's own


@dataclass(frozen=True)
class SearchStart:
    """What is known before the first trial: what the model's modules say, and what the cap is."""

    built: Built | Unknown
    cap: str
    notes: tuple[str, ...] = ()


NOT_BEGUN: Final = SearchStart(NOT_BUILT, "No trial was begun.")


@dataclass(frozen=True)
class SearchMessage:
    """The start of the search, a trial's end, or what the largest size takes by a trace."""

    trial: Trial | None = None
    taken: Taken | Unknown | None = None
    device: str = ""
    start: SearchStart | None = None
    tag: ClassVar[str] = "found"


@dataclass(frozen=True)
class Line:
    """One line of the pipe."""

    message: SearchMessage | Done | Failed


# ---- in the parent -------------------------------------------------------------------------------------


def measure(request: SearchRequest, on_trial: Callable[[Trial], None], *, root: Path = ROOT) -> Measured:
    """Try sizes until the largest that fits is known, or until time is up.

    Raises DeviceUnusable where the host hasn't the memory or torch is missing, and what refuses the model.
    """
    if request.device == "cpu":
        refuse_what_the_host_lacks(request.budget, root)
    trials: list[Trial] = []

    def on_record(message: SearchMessage) -> None:
        if message.trial is not None:
            trials.append(message.trial)
            on_trial(message.trial)

    result = supervisor.run_job(
        request,
        parse_message,
        limit_s=request.limit_s + IMPORT_S,
        on_record=on_record,
        command=supervisor.module_command(__name__),
    )
    why = ""
    if isinstance(result.outcome, Failed):
        if not trials and result.outcome.exit_code != Exit.INTERRUPTED:
            raise _refusal(result.outcome)
        why = result.outcome.reason
    traced = next((message for message in result.records if message.taken is not None), None)
    start = next((message.start for message in result.records if message.start is not None), NOT_BEGUN)
    return assemble(request, trials, traced, start, seconds=result.seconds, why=why)


def parse_message(line: Json) -> SearchMessage | Done | Failed:
    """A message of this worker. Raises ValueError for anything else."""
    return decode(Line, line, "message").message


def assemble(
    request: SearchRequest,
    trials: list[Trial],
    traced: SearchMessage | None,
    start: SearchStart,
    *,
    seconds: float,
    why: str,
) -> Measured:
    """The measurement that the trials make up; `why` the worker ended early, if so. Pure."""
    tries = [(trial.size, trial.verdict == "fits") for trial in trials if trial.verdict != "out_of_time"]
    largest = summary(tries, request.axis, most=request.most)
    at_largest = next((trial for trial in trials if trial.size == largest.fits), None)
    if not why and not largest.ended:
        why = f"the limit of {request.limit_s:.0f} s was reached"
    return Measured(
        device=(traced.device if traced else "") or request.device.upper(),
        cap=start.cap,
        largest=largest,
        trials=tuple(trials),
        at_size=traced.taken
        if traced and traced.taken is not None
        else Unknown("nothing that fits was traced"),
        peak_bytes=at_largest.peak_bytes if at_largest else Unknown("nothing fits"),
        seconds=seconds,
        ended=why,
        built=start.built,
        notes=start.notes,
    )


def refuse_what_the_host_lacks(budget: int, root: Path) -> None:
    """Raise DeviceUnusable where a process with this budget could take the host's last memory.

    A container's own limit isn't a reason: the kernel kills the trial, whose size then doesn't fit.
    """
    available = meminfo_bytes(root, "MemAvailable")
    if isinstance(available, Unknown):
        raise DeviceUnusable(f"how much memory is free isn't known: {available.reason}", "predict only")
    most = spendable_bytes(available, floor_bytes(available))
    if budget > most:
        raise DeviceUnusable(
            f"trials may take {binary_bytes(budget)}, and this host can spare {binary_bytes(most)}",
            f"give a budget of at most that: --vram {most}",
        )


def _refusal(failed: Failed) -> ProbeError:
    """The worker's refusal, with its exit code."""
    kinds = {int(kind.exit_code): kind for kind in (DeviceUnusable, UsageError)}
    return kinds.get(failed.exit_code, ProbeError)(failed.reason, failed.hint)


# ---- forks of the worker -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForkAnswer:
    """What a fork found, or why it couldn't."""

    trial: Trial | None = None
    taken: Taken | Unknown | None = None
    name: str = ""
    built: Built | None = None
    notes: tuple[str, ...] = ()
    refused: Failed | None = None
    failed: str = ""  # the class of an error that nothing here expects, and what it says


@dataclass(frozen=True)
class ForkResult:
    """How a fork ended: its answer, or its exit code (below 0: a signal); neither if it was out of time."""

    answer: ForkAnswer | None
    code: int | None


def run_in_fork(work: Callable[[], ForkAnswer], limit_s: float) -> ForkResult:
    """Do the work in a fork of this process, for at most so many seconds."""
    reading, writing = os.pipe()
    parent = os.getpid()
    text: bytes | None = None
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(work, writing, parent)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + limit_s)
    finally:
        os.close(reading)
        if text is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text is None:
        return ForkResult(None, None)
    if not text:
        return ForkResult(None, os.waitstatus_to_exitcode(status))
    return ForkResult(decode(ForkAnswer, load(text), "answer"), None)


def _in_child(work: Callable[[], ForkAnswer], writing: int, parent: int) -> None:
    code = 1
    try:
        die_with(parent)  # else an interrupted search would leave a trial behind, with its memory
        os.write(writing, _answered(work))
        code = 0
    finally:  # whatever happened: nothing of the parent's may run here
        os._exit(code)


def _answered(work: Callable[[], ForkAnswer]) -> bytes:
    """The answer as it is sent, of an error too."""
    try:
        return _sent(work())
    except ProbeError as error:
        return _sent(
            ForkAnswer(refused=Failed(error.message, error.hint, int(error.exit_code), wedged=False))
        )
    except Exception as error:  # of a library, or a fault of ours: the parent says it
        return _sent(ForkAnswer(failed=f"{type(error).__name__}: {str(error)[:MOST_WORDS]}"))


def _sent(answer: ForkAnswer) -> bytes:
    return json.dumps(encode(answer), allow_nan=False).encode()


def _read(reading: int, until: float) -> bytes | None:
    """All that comes until the other end is closed; None when time is up."""
    text = b""
    while len(text) < MOST_ANSWER:
        ready, _, _ = select.select([reading], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return None
        data = os.read(reading, 1 << 16)
        if not data:
            break
        text += data
    return text


# ---- in the worker -------------------------------------------------------------------------------------

NOT_SAID: Final = Unknown("the process ended before it could say")


def messages(request: SearchRequest, send: Send) -> Iterator[Done | Failed]:
    """Do the search, sending what it finds; yields how it ended."""
    try:
        require_torch("run it where torch is; to predict needs none: leave --measure out")
        Searcher(request, send).run()
        yield Done()
    except Refused as error:
        yield error.failed
    except ProbeError as error:
        yield Failed(error.message, error.hint, int(error.exit_code), wedged=False)


class Refused(ProbeError):
    """A fork that can't even begin: the rest would end the same way."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason, failed.hint)
        self.failed = failed


class Searcher:
    """Tries sizes, sends each trial as it ends, and keeps to the time limit."""

    def __init__(self, request: SearchRequest, send: Callable[[SearchMessage], object]) -> None:
        from probes.fit import trial

        self._request, self._send, self._trial = request, send, trial
        self._config: Mapping[str, Any] = json.loads(request.config)
        self._until = time.monotonic() + request.limit_s
        self._longest_s = 0.0
        self._tries = 0
        self._groups: Parent | Unknown = Unknown("the cap of a GPU is torch's own")

    def run(self) -> None:
        """Search, then trace the largest size that fits."""
        request = self._request
        self._begin()
        largest = search(self._fits, request.hint, request.axis, most=request.most, budget=request.budget)
        if largest.fits:
            self._trace(largest.fits)

    def _begin(self) -> None:
        """Import what the model needs, choose the cap, and say so. Raises DeviceUnusable."""
        request = self._request
        if request.device == "gpu":
            built, notes = self._built()
            self._send(SearchMessage(start=SearchStart(built, limits.GPU_LIMIT, (*notes, *_threads()))))
            return
        built, notes = self._trial.warm(self._config, request.question, request.axis)
        notes = (*notes, *_threads())
        chosen = Unknown("the process's own limit was asked for")
        self._groups = chosen if request.cap == "process" else parent()
        if isinstance(self._groups, Unknown) and request.cap == "cgroup":
            raise DeviceUnusable(
                f"{self._groups.reason}", "run as root, or use the process's own limit: --cap process"
            )
        if isinstance(self._groups, Unknown):
            cap, notes = limits.DATA_LIMIT, (*notes, f"no cgroup for each trial: {self._groups.reason}")
        else:
            cap = limits.CGROUP_LIMIT
        self._send(SearchMessage(start=SearchStart(built, cap, notes)))

    def _built(self) -> tuple[Built | Unknown, tuple[str, ...]]:
        """What the model's modules say, in a fork: what they import may ask the driver. Raises Refused."""
        request = self._request

        def work() -> ForkAnswer:
            built, notes = self._trial.warm(self._config, request.question, request.axis)
            return ForkAnswer(built=built, notes=notes)

        answer = run_in_fork(work, max(self._until - time.monotonic(), 1.0)).answer
        if answer is None or answer.built is None:
            if answer and answer.refused:
                raise Refused(answer.refused)
            if answer and answer.failed:
                return Unknown(f"{NOT_BUILT.reason}: {answer.failed}"), ()
            return NOT_BUILT, ()
        return answer.built, answer.notes

    def _fits(self, size: int) -> Tried | None:
        left = self._until - time.monotonic()
        if left <= self._longest_s:
            return None
        began = time.monotonic()
        trial = self._try(size, left)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        self._send(SearchMessage(trial))
        if trial.verdict == "out_of_time":
            return None
        phases = () if isinstance(trial.parts, Unknown) else trial.parts.phases
        return Tried(trial.verdict == "fits", tuple(phase.peak_bytes for phase in phases))

    def _try(self, size: int, left: float) -> Trial:
        self._tries += 1
        if isinstance(self._groups, Unknown):
            return self._tried(size, left, None, partial(oom_kills, ROOT))
        with group(self._groups, self._request.budget, self._tries) as own:
            return self._tried(size, left, own, own.kills)

    def _tried(self, size: int, left: float, own: Group | None, kills: Callable[[], int | Unknown]) -> Trial:
        request, began, kills_before = self._request, time.monotonic(), kills()
        question = with_size(request.question, request.axis, size)

        def work() -> ForkAnswer:
            return ForkAnswer(
                trial=self._trial.run(
                    self._config, question, request.device, budget=request.budget, size=size, group=own
                )
            )

        ended = run_in_fork(work, left)
        if ended.answer is not None:
            if ended.answer.refused is not None:
                raise Refused(ended.answer.refused)
            if ended.answer.trial is not None:
                return ended.answer.trial
            if ended.answer.failed:
                return _failed(ended.answer.failed, size, time.monotonic() - began)
        kills_after = kills()
        by_cgroup = (
            isinstance(kills_after, int) and isinstance(kills_before, int) and kills_after > kills_before
        )
        return _without_answer(ended, size, time.monotonic() - began, by_cgroup=by_cgroup)

    def _trace(self, size: int) -> None:
        request = self._request
        question = with_size(request.question, request.axis, size)

        def work() -> ForkAnswer:
            name = self._trial.device_name(request.device)
            return ForkAnswer(taken=self._trial.traced(self._config, question, request.device), name=name)

        ended = run_in_fork(work, max(self._until - time.monotonic(), 1.0))
        taken = ended.answer.taken if ended.answer else None
        why = Unknown(_why_untraced(ended))
        self._send(SearchMessage(taken=taken or why, device=ended.answer.name if ended.answer else ""))


def _threads() -> tuple[str, ...]:
    """A note where libraries have threads already: a fork has none of them, and may wait for one."""
    count = threads(ROOT)
    return (f"{count} threads were there when trials were forked",) if count > 1 else ()


def _failed(text: str, size: int, seconds: float) -> Trial:
    """The trial of a fork in which something else than the model's own code failed."""
    kind, _, message = text.partition(": ")
    return Trial(size, limits.verdict_of(kind, message), seconds, NOT_SAID, NOT_SAID, NOT_SAID, text)


def _why_untraced(ended: ForkResult) -> str:
    if ended.answer is None:
        return "the trace didn't end in time" if ended.code is None else _how_ended(ended.code)
    text = ended.answer.failed or (ended.answer.refused.reason if ended.answer.refused else "")
    return f"torch couldn't trace the model: {text}" if text else "torch couldn't trace the model"


def _how_ended(code: int) -> str:
    number = -code
    if number <= 0:
        return f"ended by exit code {code}"
    return f"ended by {signal.Signals(number).name if number in list(signal.Signals) else f'signal {number}'}"


def _without_answer(ended: ForkResult, size: int, seconds: float, *, by_cgroup: bool) -> Trial:
    """The trial of a fork that said nothing."""
    if ended.code is None:
        return Trial(size, "out_of_time", seconds, NOT_SAID, NOT_SAID, NOT_SAID)
    killed = by_cgroup and ended.code == -signal.SIGKILL
    verdict: Verdict = "killed_for_memory" if killed else "crashed"
    return Trial(size, verdict, seconds, NOT_SAID, NOT_SAID, NOT_SAID, _how_ended(ended.code))


def preload() -> None:
    """Import what takes seconds, before there is a job; an error is reported when there is one.

    A driver that was asked anything can't be used in a fork, and libraries ask whether there is a GPU when
    they are imported. With this setting torch asks NVML instead. Libraries that multiply begin threads
    when they are imported, unless these settings forbid it; a fork of threads may wait for ever.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    if why_without():
        return
    for name in ("probes.fit.trial", "transformers.models.auto.modeling_auto", "peft"):
        with suppress(Exception):  # whatever a library raises that doesn't suit this torch
            importlib.import_module(name)


if __name__ == "__main__":
    exit_now(work(sys.argv[1:], SearchRequest, messages, preload=preload))
