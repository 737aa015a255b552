"""One rank of a training run, started by torchrun, srun or any other launcher.

Environment, signals, exit codes and files are a contract: docs/decisions/0122.
"""

import os
import platform
import pwd
import resource
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from probes.core import files
from probes.core.errors import DeviceUnusable, Exit, Failure, ProbeError, ReportError, UsageError
from probes.core.output import error, harden
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.fit.limits import verdict_of
from probes.fit.report import SHORT_OF_MEMORY, VERDICTS
from probes.measure.worker import exit_now, require_torch
from probes.training.guard import LOADING, OTHERS_S, Guard, StopAgreement
from probes.training.options import Start, start_of
from probes.training.report import (
    SYNTHETIC,
    TEMPFAIL,
    Device,
    Fault,
    RankReport,
    State,
    rank_file,
    rank_files,
    write_rank,
)

if TYPE_CHECKING:
    import torch

    from probes.training.loop import Trainer

MEETING: Final = "meeting the other ranks"
LEAST_SHM: Final = 64 << 20  # bytes; Docker gives a container no more unless it is asked to
COLLECTIVES: Final = 2.0  # times the time-out: torch's own comes after the guard's, which says more


class Rank:
    """One rank from its start to its report."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.guard = Guard(start.rank, start.world, start.timeout_s, self._end)
        self.trainer: Trainer | None = None
        self.device_name, self.library, self.backend = "not known yet", "not known yet", "none"
        self.resumed_at = 0
        self.code: int | None = None  # once it is known how the run ended
        self._pid = os.getpid()  # a user's code may fork

    def _end(self, step: int, cause: str, code: int) -> None:
        """End the process from the guard's thread."""
        if self.code is None:
            more = self._room_for_batches() if code == Exit.BROKEN else ""
            self.report("failed", Fault(step, f"{cause}{more}", code))
        exit_now(code if self.code is None else self.code)

    def report(self, state: State, fault: Fault | None = None) -> None:
        """Write the rank's report, and say on stderr why it failed."""
        if fault:
            error(f"error: rank {self.start.rank}, step {fault.step}: {fault.cause}")
        trainer = self.trainer
        try:
            write_rank(self._report(state, fault, trainer), self.start.folder)
        except Failure as failure:
            error(f"error: rank {self.start.rank}: {failure}")

    def _report(self, state: State, fault: Fault | None, trainer: "Trainer | None") -> RankReport:
        peak, reserved = _memory(self.start)
        return RankReport(
            settings=self.start.settings,
            rank=self.start.rank,
            world=self.start.world,
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            device_name=self.device_name,
            torch=_torch_version(),
            library=self.library,
            backend=self.backend,
            state=state,
            fault=fault,
            epochs=tuple(trainer.epochs) if trainer else (),
            losses=tuple(trainer.losses) if trainer else (),
            peak_bytes=peak,
            reserved_bytes=reserved,
            repetition=self.start.repetition,
            resumed_at=self.resumed_at,
        )

    def run(self) -> int:
        """The whole run. Returns the exit code; never raises for what a run can meet."""
        rank, folder = self.start.rank, self.start.folder
        lock = folder / f".rank-{rank}.lock"
        try:
            is_free = files.lock_of_process(lock)
        except OSError as fault:
            error(f"error: rank {rank}: {_cant_lock(lock, fault)}")
            return int(Exit.DATA)
        if not is_free:  # no report: the other run's stays
            busy = UsageError(
                f"{folder} is used by another run, which isn't over", "give each run its own --out"
            )
            error(f"error: rank {rank}: {busy}")
            return int(Exit.USAGE)
        if not os.access(folder, os.W_OK | os.X_OK):  # now, and not after an epoch
            error(f"error: rank {rank}: {folder} can't be written into; choose another folder: --out DIR")
            return int(Exit.DATA)
        self._clear()
        self.guard.start()
        try:
            return self._run()
        except BaseException as fault:  # a user's code may raise anything
            if os.getpid() != self._pid:  # what it forked reports nothing, and closes nothing of the rank's
                return _child_code(rank, fault)
            try:
                step, cause, code = self._judged(fault)
            except Exception:  # its own text can't be had
                step, cause, code = self.guard.step, type(fault).__name__, int(Exit.BROKEN)
            self.report("failed", Fault(step, cause, code))
            return code

    def _clear(self) -> None:
        """Remove what an earlier start said of this run, and what it half wrote: the report of a rank that is
        killed now must not be one that it wrote then."""
        rank, world, folder = self.start.rank, self.start.world, self.start.folder
        stale = [rank_file(folder, rank)]
        if rank == 0:
            files.sweep_partials(folder)
            stale += [path for path, number in rank_files(folder) if number >= world]
        for path in stale:
            with suppress(OSError):
                path.unlink()

    def _judged(self, fault: BaseException) -> tuple[int, str, int]:
        from probes.training.models import described

        step, phase = getattr(fault, "step", self.guard.step), self.guard.phase
        ended = self.trainer.ended_loader() if self.trainer else ""
        if isinstance(fault, Failure):
            cause, code = f"{fault.message}; {fault.hint}" if fault.hint else fault.message, fault.exit_code
        elif (verdict := verdict_of(type(fault).__name__, str(fault))) in SHORT_OF_MEMORY:
            hint = "a smaller --batch with --accumulate, --checkpointing or --lora takes less"
            cause, code = f"out of memory in {phase}: {VERDICTS[verdict]}; {hint}", Exit.DEVICE
        elif ended:
            cause, code = f"a process of the loader ended by {ended} (in {phase})", Exit.BROKEN
        elif isinstance(fault, OSError) and fault.filename:
            cause, code = f"{fault.filename}: {fault.strerror or fault}", Exit.DATA
        elif isinstance(fault, KeyboardInterrupt):
            cause, code = f"interrupted in {phase}", Exit.INTERRUPTED
        elif (
            self.start.world > 1 and _lost(fault) and not (phase.startswith(MEETING) and not self.start.rank)
        ):
            cause, code = f"another rank is gone: {described(fault)} (in {phase})", Exit.BROKEN
        else:
            cause, code = f"{described(fault)} (in {phase})", Exit.BROKEN
        if ended or "No space left" in str(fault):
            cause += self._room_for_batches()
        return step, cause, int(code)

    def _room_for_batches(self) -> str:
        """What to say of /dev/shm where the loader's processes may have had too little of it."""
        if not self.start.settings.workers or self.guard.phase != LOADING:
            return ""
        with suppress(OSError):
            room = os.statvfs("/dev/shm")
            if (free := room.f_bavail * room.f_frsize) < LEAST_SHM:
                left = f"/dev/shm, through which --workers hand over batches, has {binary_bytes(free)} left"
                return f"; {left}: docker run --shm-size 2g, or --workers 0"
        return ""

    def _run(self) -> int:
        self.guard.moved("importing torch")
        require_torch("install torch: a build for this machine's cards")
        import torch

        from probes.training import checkpoint
        from probes.training.loop import Trainer
        from probes.training.models import workload

        if self.start.settings.device == "auto":  # here, since importing torch takes seconds
            chosen: Device = "gpu" if torch.cuda.is_available() else "cpu"
            self.start = replace(self.start, settings=replace(self.start.settings, device=chosen))
        start, settings, guard = self.start, self.start.settings, self.guard
        device = self._device()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        store = self._join()
        guard.moved("building the model")
        torch.manual_seed(settings.seed)
        if settings.scaling == "weak" and settings.data != SYNTHETIC and start.world > 1:
            raise UsageError(
                "a dataset has as many samples with more ranks: its scaling is strong",
                "leave out --scaling weak, or --data",
            )
        count = settings.samples * (start.world if settings.scaling == "weak" else 1)
        work = workload(settings, count)
        if os.getpid() != self._pid:
            raise RuntimeError("a function that the command names forked, and returned in both processes")
        self._compare(len(work.samples))
        self.library = work.library
        trainer = Trainer(settings, work, device, guard)
        if trainer.batches.steps == 0:
            each = start.world * settings.batch * settings.accumulate
            raise UsageError(
                f"an epoch has {len(work.samples)} samples, and one step of all ranks takes {each}",
                "give more --samples, or smaller batches",
            )
        self.trainer = trainer
        checkpoint.seed_generators(settings.seed * 1_000_003 + start.rank + 1)
        if start.resumes:
            guard.moved("reading the checkpoint")
            checkpoint.resume(trainer, start.folder)
            self.resumed_at = guard.step = trainer.place.step
        agreement = StopAgreement(guard, store)

        def keep() -> None:
            guard.moved("writing a checkpoint")
            checkpoint.save(trainer, start.folder)

        def after_step() -> bool:
            stops = agreement.here(trainer.place.step)
            if not stops and start.every and trainer.place.step % start.every == 0:
                keep()
            return stops

        while trainer.place.epoch < settings.epochs:
            if not trainer.epoch(after_step) and trainer.place.epoch < settings.epochs:
                keep()
                self.report("checkpointed")
                self.code = TEMPFAIL
                return TEMPFAIL
        self.report("done")
        self.code = int(Exit.OK)
        self._leave()
        return int(Exit.OK)

    def _device(self) -> "torch.device":
        import torch

        settings, local = self.start.settings, self.start.local
        if settings.device == "cpu":
            if settings.precision == "tf32":
                raise UsageError("TF32 is a format of NVIDIA's GPUs", "for a CPU: --precision fp32")
            self.device_name = platform.processor() or platform.machine()
            return torch.device("cpu")
        seen = torch.cuda.device_count()
        if local >= seen:
            raise DeviceUnusable(
                f"rank {self.start.rank} is process {local} of its node, and torch sees {seen} cards there",
                "start as many processes a node as it has cards, or use --device cpu",
            )
        torch.cuda.set_device(local)
        self.device_name = torch.cuda.get_device_name(local)
        return torch.device("cuda", local)

    def _join(self) -> Any:  # torch's store
        """Meet the other ranks; returns the store that all share. Raises RuntimeError, also without them."""
        from torch import distributed

        at = ":".join(os.environ.get(name, "not set")[:80] for name in ("MASTER_ADDR", "MASTER_PORT"))
        self.guard.moved(f"{MEETING} at {at}")
        if self.start.world == 1:
            return distributed.HashStore()
        limit = timedelta(seconds=COLLECTIVES * (self.start.timeout_s + OTHERS_S))
        store, rank, world = next(distributed.rendezvous("env://", timeout=limit))
        on_gpu = self.start.settings.device == "gpu"
        self.backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        distributed.init_process_group(
            self.backend,
            store=distributed.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=limit,
        )
        ours = distributed.PrefixStore("weir", store)
        self.guard.store = ours
        return ours

    def _compare(self, samples: int) -> None:
        """Raises UsageError where ranks have different numbers of samples: one would wait for the other."""
        if self.start.world == 1:
            return
        from torch import distributed

        counts: list[int] = [0] * self.start.world
        distributed.all_gather_object(counts, samples)
        if other := next((at for at, count in enumerate(counts) if count != counts[0]), None):
            raise UsageError(
                f"the dataset has {counts[0]} samples on rank 0 and {counts[other]} on rank {other}",
                "let it be the same on all ranks: each takes its own share of it",
            )

    def _leave(self) -> None:
        from torch import distributed

        if distributed.is_initialized():
            with suppress(RuntimeError):
                distributed.barrier()  # rank 0 has the store: it leaves with the others


def _cant_lock(lock: Path, fault: OSError) -> ProbeError:
    """Why a rank can't have a lock's file that is there, and what to do about it."""
    why = f"can't lock {lock}: {fault.strerror or fault}"
    with suppress(OSError):
        if (uid := lock.lstat().st_uid) != os.geteuid():
            why += f"; it belongs to user {_user(uid)}, whose run in this folder may not be over"
    return ReportError(
        why, f"choose another folder: --out DIR; or, once that run is over: rm {shlex.quote(str(lock))}"
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # as in most containers
        return str(uid)


def _child_code(rank: int, fault: BaseException) -> int:
    """The exit code of a process that a user's code has forked."""
    if isinstance(fault, SystemExit) and (fault.code is None or isinstance(fault.code, int)):
        return fault.code or 0
    error(f"error: a process that rank {rank} forked: {type(fault).__name__}: {fault}")
    return 1


def _lost(fault: BaseException) -> bool:
    """Whether an error comes from an exchange with other ranks."""
    words = str(fault).lower()
    return isinstance(fault, RuntimeError) and any(
        word in words for word in ("gloo", "nccl", "connection", "tcpstore", "socket", "broken pipe")
    )


def _memory(start: Start) -> tuple[int | Unknown, int | Unknown]:
    """The most that torch handed out, or that was resident; and what torch took from the driver."""
    if start.settings.device != "gpu":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return resident, Unknown("a CPU has no allocator that takes memory ahead")
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return (Unknown("no card was used"),) * 2
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _torch_version() -> str:
    torch = sys.modules.get("torch")
    return str(getattr(torch, "__version__", "not imported"))


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit code."""
    try:
        start = start_of(argv)
    except ProbeError as failure:
        error(f"error: {failure}")
        return int(failure.exit_code)
    return Rank(start).run()


if __name__ == "__main__":
    harden()
    exit_now(main(sys.argv[1:]))
