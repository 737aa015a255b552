"""The worker's side: with the arguments FD and PARENT it tries sizes, each in a fork of itself.

This process imports torch and transformers once and touches neither memory nor GPU with them, so every fork
is as fresh as a process that has just imported them, and takes milliseconds to start instead of seconds.
"""

import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
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
from probes.fit.question import NOT_BUILT, Axis, Built, Cap, Measured, Question, Taken, Trial, Verdict
from probes.fit.search import Hint, Tried, search, summary
from probes.hardware.host import floor_bytes, meminfo_bytes, oom_kills, spendable_bytes, threads
from probes.measure import supervisor
from probes.measure.worker import die_with, require_torch, why_without
from probes.records.schema import Done, Failed

MOST_ANSWER: Final = 1 << 20  # bytes
MOST_WORDS: Final = 300  # characters of an error


@dataclass(frozen=True)
class Answer:
    """What a fork says, or why it can't."""

    trial: Trial | None = None
    taken: Taken | Unknown | None = None
    name: str = ""
    built: Built | None = None
    notes: tuple[str, ...] = ()
    refused: Failed | None = None
    failed: str = ""  # the class of an error that nothing here expects, and what it says


@dataclass(frozen=True)
class Fork:
    """How a fork ended: its answer, or its exit code (below 0: a signal); neither if it was out of time."""

    answer: Answer | None
    code: int | None


def forked(work: Callable[[], Answer], limit_s: float) -> Fork:
    """Do the work in a fork of this process, for at most so many seconds."""
    reading, writing = os.pipe()
    parent = os.getpid()
    text: bytes | None = None
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_fork(work, writing, parent)
    os.close(writing)
    try:
        text = _heard(reading, time.monotonic() + limit_s)
    finally:
        os.close(reading)
        if text is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text is None:
        return Fork(None, None)
    if not text:
        return Fork(None, os.waitstatus_to_exitcode(status))
    return Fork(decode(Answer, load(text), "answer"), None)


def _in_fork(work: Callable[[], Answer], writing: int, parent: int) -> None:
    code = 1
    try:
        die_with(parent)  # else an interrupted search would leave a trial behind, with its memory
        os.write(writing, _answered(work))
        code = 0
    finally:  # whatever happened: nothing of the parent's may run here
        os._exit(code)


def _answered(work: Callable[[], Answer]) -> bytes:
    """The answer as it is sent, of an error too."""
    try:
        return _sent(work())
    except ProbeError as error:
        return _sent(Answer(refused=Failed(error.message, error.hint, int(error.exit_code), wedged=False)))
    except Exception as error:  # of a library, or a fault of ours: the parent says it
        return _sent(Answer(failed=f"{type(error).__name__}: {str(error)[:MOST_WORDS]}"))


def _sent(answer: Answer) -> bytes:
    return json.dumps(encode(answer), allow_nan=False).encode()


def _heard(reading: int, until: float) -> bytes | None:
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


NOT_SAID: Final = Unknown("the process ended before it could say")


@dataclass(frozen=True)
class Hunt:
    """What the worker is to do: find the largest size of an axis that fits. `config` is a config.json."""

    config: str
    asked: Question
    device: Literal["cpu", "gpu"]
    axis: Axis
    budget: int
    hint: Hint
    most: int
    limit_s: float
    cap: Cap = "auto"  # on a CPU; a GPU's is torch's own


@dataclass(frozen=True)
class Began:
    """What is known before the first trial: what the model's modules say, and what the cap is."""

    built: Built | Unknown
    cap: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What the search begins with, a trial's end, or what the largest size takes by a trace."""

    trial: Trial | None = None
    taken: Taken | Unknown | None = None
    device: str = ""
    began: Began | None = None
    tag: ClassVar[str] = "found"


@dataclass(frozen=True)
class Line:
    """One line of the pipe."""

    message: Found | Done | Failed


def found(line: Json) -> Found | Done | Failed:
    """A message of this worker. Raises ValueError for anything else."""
    return decode(Line, line, "message").message


class Refused(ProbeError):
    """A fork that can't even begin: the rest would end the same way."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason, failed.hint)
        self.failed = failed


class Searcher:
    """Tries sizes and reports each; keeps to a time limit."""

    def __init__(self, hunt: Hunt, tell: Callable[[Found], None]) -> None:
        from probes.fit import trial as onetrial

        self._hunt, self._tell, self._onetrial = hunt, tell, onetrial
        self._config: Mapping[str, Any] = json.loads(hunt.config)
        self._until = time.monotonic() + hunt.limit_s
        self._longest_s = 0.0
        self._tries = 0
        self._groups: Parent | Unknown = Unknown("the cap of a GPU is torch's own")

    def run(self) -> None:
        """Search, then trace the largest size that fits."""
        hunt = self._hunt
        self._begin()
        largest = search(self._fits, hunt.hint, hunt.axis, most=hunt.most, budget=hunt.budget)
        if largest.fits:
            self._trace(largest.fits)

    def _begin(self) -> None:
        """Import what the model needs, choose the cap, and say so. Raises DeviceUnusable."""
        hunt = self._hunt
        if hunt.device == "gpu":
            built, notes = self._built()
            self._tell(Found(began=Began(built, limits.GPU_LIMIT, (*notes, *_threads()))))
            return
        built, notes = self._onetrial.warm(self._config, hunt.asked, hunt.axis)
        notes = (*notes, *_threads())
        asked_for_process = Unknown("the process's own limit was asked for")
        self._groups = asked_for_process if hunt.cap == "process" else parent()
        if isinstance(self._groups, Unknown) and hunt.cap == "cgroup":
            raise DeviceUnusable(
                f"{self._groups.reason}", "run as root, or use the process's own limit: --cap process"
            )
        if isinstance(self._groups, Unknown):
            cap, notes = limits.DATA_LIMIT, (*notes, f"no cgroup for each trial: {self._groups.reason}")
        else:
            cap = limits.CGROUP_LIMIT
        self._tell(Found(began=Began(built, cap, notes)))

    def _built(self) -> tuple[Built | Unknown, tuple[str, ...]]:
        """What the model's modules say, in a fork: what they import may ask the driver. Raises Refused."""
        hunt = self._hunt

        def work() -> Answer:
            built, notes = self._onetrial.warm(self._config, hunt.asked, hunt.axis)
            return Answer(built=built, notes=notes)

        answer = forked(work, max(self._until - time.monotonic(), 1.0)).answer
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
        self._tell(Found(trial))
        if trial.verdict == "out_of_time":
            return None
        phases = () if isinstance(trial.parts, Unknown) else trial.parts.phases
        return Tried(trial.verdict == "fits", tuple(phase.peak_bytes for phase in phases))

    def _try(self, size: int, left: float) -> Trial:
        self._tries += 1
        if isinstance(self._groups, Unknown):
            return self._tried(size, left, None, partial(oom_kills, Path("/")))
        with group(self._groups, self._hunt.budget, self._tries) as own:
            return self._tried(size, left, own, own.kills)

    def _tried(self, size: int, left: float, own: Group | None, kills: Callable[[], int | Unknown]) -> Trial:
        hunt, began, killed = self._hunt, time.monotonic(), kills()
        asked = with_size(hunt.asked, hunt.axis, size)

        def work() -> Answer:
            return Answer(
                trial=self._onetrial.run(
                    self._config, asked, hunt.device, budget=hunt.budget, size=size, group=own
                )
            )

        ended = forked(work, left)
        if ended.answer is not None:
            if ended.answer.refused is not None:
                raise Refused(ended.answer.refused)
            if ended.answer.trial is not None:
                return ended.answer.trial
            if ended.answer.failed:
                return _failed(ended.answer.failed, size, time.monotonic() - began)
        now = kills()
        by_cgroup = isinstance(now, int) and isinstance(killed, int) and now > killed
        return _without_answer(ended, size, time.monotonic() - began, by_cgroup=by_cgroup)

    def _trace(self, size: int) -> None:
        hunt = self._hunt
        asked = with_size(hunt.asked, hunt.axis, size)

        def work() -> Answer:
            name = self._onetrial.device_name(hunt.device)
            return Answer(taken=self._onetrial.traced(self._config, asked, hunt.device), name=name)

        ended = forked(work, max(self._until - time.monotonic(), 1.0))
        taken = ended.answer.taken if ended.answer else None
        why = Unknown(_why_untraced(ended))
        self._tell(Found(taken=taken or why, device=ended.answer.name if ended.answer else ""))


def _threads() -> tuple[str, ...]:
    """A note where libraries have threads already: a fork has none of them, and may wait for one."""
    count = threads(Path("/"))
    return (f"{count} threads were there when trials were forked",) if count > 1 else ()


def _failed(said: str, size: int, seconds: float) -> Trial:
    """The trial of a fork in which something else than the model's own code failed."""
    kind, _, message = said.partition(": ")
    return Trial(size, limits.verdict_of(kind, message), seconds, NOT_SAID, NOT_SAID, NOT_SAID, said)


def _why_untraced(ended: Fork) -> str:
    if ended.answer is None:
        return "the trace didn't end in time" if ended.code is None else _how_ended(ended.code)
    said = ended.answer.failed or (ended.answer.refused.reason if ended.answer.refused else "")
    return f"torch couldn't trace the model: {said}" if said else "torch couldn't trace the model"


def _how_ended(code: int) -> str:
    number = -code
    if number <= 0:
        return f"ended by exit code {code}"
    return f"ended by {signal.Signals(number).name if number in list(signal.Signals) else f'signal {number}'}"


def _without_answer(ended: Fork, size: int, seconds: float, *, by_cgroup: bool) -> Trial:
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


def _answer(hunt: Hunt, tell: Callable[[Found], None]) -> Done | Failed:
    try:
        require_torch("run it where torch is; to predict needs none: leave --measure out")
        Searcher(hunt, tell).run()
    except Refused as error:
        return error.failed
    except ProbeError as error:
        return Failed(error.message, error.hint, int(error.exit_code), wedged=False)
    return Done()


def main(argv: list[str]) -> int:
    """Do the job on stdin; returns 0 when a last message was written, of any kind."""
    descriptor, parent = int(argv[0]), int(argv[1])
    die_with(parent)
    preload()
    line = sys.stdin.readline()
    if not line:  # there was no job
        return 0
    hunt = decode(Hunt, load(line), "job")
    with open(descriptor, "w", encoding="utf-8") as out:

        def tell(message: Found | Done | Failed) -> None:
            out.write(json.dumps({"message": encode(message)}, allow_nan=False) + "\n")
            out.flush()

        tell(_answer(hunt, tell))
    return 0


NOT_BEGUN: Final = Began(NOT_BUILT, "No trial was begun.")
IMPORT_S: Final = 60.0  # beyond the limit, for a cold import of torch and transformers


@dataclass(frozen=True)
class Ask:
    """What to measure. `hint` is where the search begins."""

    config: Mapping[str, Any]
    asked: Question
    device: Literal["cpu", "gpu"]
    axis: Axis
    budget: int
    hint: Hint
    most: int
    limit_s: float
    cap: Cap = "auto"


def measure(ask: Ask, heard: Callable[[Trial], None], *, root: Path = Path("/")) -> Measured:
    """Try sizes until the largest that fits is known, or until time is up.

    Raises DeviceUnusable where the host hasn't the memory or torch is missing, and what refuses the model.
    """
    if ask.device == "cpu":
        refuse_what_the_host_lacks(ask.budget, root)
    trials: list[Trial] = []

    def hear(message: Found) -> None:
        if message.trial is not None:
            trials.append(message.trial)
            heard(message.trial)

    hunt = Hunt(
        json.dumps(dict(ask.config)),
        ask.asked,
        ask.device,
        ask.axis,
        ask.budget,
        ask.hint,
        ask.most,
        ask.limit_s,
        ask.cap,
    )
    ended = supervisor.oversee(
        hunt,
        found,
        limit_s=ask.limit_s + IMPORT_S,
        heard=hear,
        command=supervisor.running(__name__),
    )
    why = ""
    if isinstance(ended.outcome, Failed):
        if not trials and ended.outcome.exit_code != Exit.INTERRUPTED:
            raise _raised(ended.outcome)
        why = ended.outcome.reason
    traced = next((message for message in ended.records if message.taken is not None), None)
    began = next((message.began for message in ended.records if message.began is not None), None)
    return assembled(ask, trials, traced, began or NOT_BEGUN, seconds=ended.seconds, why=why)


def assembled(
    ask: Ask, trials: list[Trial], traced: Found | None, began: Began, *, seconds: float, why: str
) -> Measured:
    """What the trials say together. Pure."""
    tries = [(trial.size, trial.verdict == "fits") for trial in trials if trial.verdict != "out_of_time"]
    largest = summary(tries, ask.axis, most=ask.most)
    at = next((trial for trial in trials if trial.size == largest.fits), None)
    if not why and not largest.ended:
        why = f"the limit of {ask.limit_s:.0f} s was reached"
    return Measured(
        device=(traced.device if traced else "") or ask.device.upper(),
        cap=began.cap,
        largest=largest,
        trials=tuple(trials),
        at_size=traced.taken
        if traced and traced.taken is not None
        else Unknown("nothing that fits was traced"),
        peak_bytes=at.peak_bytes if at else Unknown("nothing fits"),
        seconds=seconds,
        ended=why,
        built=began.built,
        notes=began.notes,
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
            f"give a budget of at most that: --budget {most}",
        )


def _raised(failed: Failed) -> ProbeError:
    """The worker's refusal, with its exit code."""
    kinds = {int(kind.exit_code): kind for kind in (DeviceUnusable, UsageError)}
    return kinds.get(failed.exit_code, ProbeError)(failed.reason, failed.hint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
