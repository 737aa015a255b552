"""An epoch of training on one rank, and what its time went into.

Every moment of an epoch belongs to one phase, since a mark ends one and begins the next. On a GPU the marks
are events in the stream that computes, so a phase is the GPU's own time: a loader that is done before the GPU
asks costs nothing. Gradients count as ready when autograd has made the last one; what is left until their
exchange is over was hidden behind nothing. The rank whose gradients are ready last waits for nobody, so the
least such rest of all ranks is the exchange of a step, and what others have beyond it they waited.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from probes.core.errors import ProbeError
from probes.core.unknown import Unknown
from probes.measure.worker import die_with
from probes.training.guard import LOADING, Guard
from probes.training.models import Workload, loss_of
from probes.training.report import Epoch, Settings

Phase: TypeAlias = Literal["data", "compute", "exchange", "checkpoint"]

HALVES: Final = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
ENDS_S: Final = 0.2  # until a process whose end was noticed has ended
RATE: Final = 1e-4  # of learning: any that trains
CHECKED: Final = 64  # steps between two looks at the losses of a GPU, each of which waits for it
NOT_APART: Final = Unknown("FSDP exchanges while it computes: the two can't be told apart by marks")


class NotFinite(ProbeError):
    """A loss that is no number any more."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss is {loss}", "lower the rate of learning, clip gradients, or take a wider precision"
        )
        self.step = step


class Batches(Sampler[list[int]]):  # type: ignore[misc]  # torch isn't there when types are checked
    """Which samples each rank takes in which step: by seed and epoch, so a resumed run goes on with them.

    All ranks have equally many, full batches; what is left over of an epoch isn't taken. From the epoch and
    the step that are set, the batches of all epochs follow each other to the run's end: so processes of a
    loader make the first ones of an epoch while the last steps of the one before are computed.
    """

    def __init__(self, count: int, rank: int, world: int, settings: Settings) -> None:
        self._count, self._rank, self._world, self._settings = count, rank, world, settings
        self._each = settings.batch * settings.accumulate
        self.steps = count // (world * self._each)
        self.epoch, self.skip = 0, 0  # optimizer steps that are done already

    @property
    def end(self) -> int:
        """The epoch before which they end: after the run's last one, or after one that is beyond it."""
        return max(self._settings.epochs, self.epoch + 1)

    def __iter__(self) -> Iterator[list[int]]:
        size, skip = self._settings.batch, self.skip
        for epoch in range(self.epoch, self.end):
            order = torch.randperm(self._count, generator=seeded(self._settings.seed, epoch)).tolist()
            mine = order[self._rank :: self._world]
            for at in range(skip * self._each, self.steps * self._each, size):
                yield mine[at : at + size]
            skip = 0

    def __len__(self) -> int:
        return ((self.end - self.epoch) * self.steps - self.skip) * self._settings.accumulate


def seeded(seed: int, number: int) -> torch.Generator:
    """A generator for one epoch."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


class Clock:
    """Marks that end phases; the host's clock, or events in the GPU's stream, read when they are over."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._phases: list[tuple[Phase, int]] = []  # of the marks after the first
        self._marks: list[Any] = []
        self._spare: list[Any] = []  # events that were read
        self.times: dict[Phase, float] = defaultdict(float)
        self.exposed: dict[int, float] = defaultdict(float)  # by step

    def _now(self) -> Any:  # a time, or an event
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """The first mark."""
        self._spare += self._marks if self._on_gpu else []
        self._marks = [self._now()]

    def ends(self, phase: Phase, step: int) -> None:
        """A phase is over, and the next one begins."""
        self._phases.append((phase, step))
        self._marks.append(self._now())

    def read(self) -> None:
        """Add up the phases so far. On a GPU all marks must have been reached."""
        for at, (phase, step) in enumerate(self._phases):
            before, after = self._marks[at], self._marks[at + 1]
            took_s = before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
            self.times[phase] += took_s
            if phase == "exchange":
                self.exposed[step] += took_s
        self._spare += self._marks[:-1] if self._on_gpu else []
        self._phases, self._marks = [], self._marks[-1:]


@dataclass
class Place:
    """Where a run is: what a checkpoint holds of it besides weights."""

    epoch: int = 0
    done: int = 0  # steps of this epoch
    step: int = 0  # of the whole run


class Trainer:
    """One rank's model, optimizer and loop."""

    def __init__(self, settings: Settings, work: Workload, device: torch.device, guard: Guard) -> None:
        self.settings, self.device, self.guard = settings, device, guard
        self.rank, self.world = guard.rank, guard.world
        self.on_gpu = device.type == "cuda"
        _set_tf32(settings)
        module = work.module.to(device).train()
        self._dtype = torch.bfloat16 if settings.precision == "bf16" else None  # of everything
        module = module.to(self._dtype)
        self.clock = Clock(on_gpu=self.on_gpu)
        self._sync: Callable[[bool], AbstractContextManager[Any]] = lambda _: nullcontext()
        self.module = self._divided(module)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "amp-fp16")
        self.batches = Batches(len(cast("Any", work.samples)), self.rank, self.world, settings)
        self._loader_seed = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            work.samples,
            batch_sampler=self.batches,
            num_workers=settings.workers,
            pin_memory=self.on_gpu,
            generator=self._loader_seed,  # else a new iterator would move on the one that dropout takes from
            worker_init_fn=partial(_of_loader, os.getpid()),
            persistent_workers=settings.workers > 0,
        )
        self._coming: Iterator[Any] | None = None  # what the loader makes, to the end of `self.batches`
        self.place = Place()
        self.epochs: list[Epoch] = []
        self.losses: list[float] = []
        self._pending: list[torch.Tensor] = []  # losses that weren't looked at yet

    def _divided(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.world == 1:
            return module
        if self.settings.strategy == "ddp":
            ids = [self.device.index] if self.on_gpu else None
            divided = DistributedDataParallel(module, device_ids=ids)
            self._sync = lambda last: nullcontext() if last else divided.no_sync()
            return divided
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in list(_blocks(module)):
            fully_shard(block, mesh=mesh)
        whole = cast("FSDPModule", fully_shard(module, mesh=mesh))

        def sync(last: bool) -> AbstractContextManager[Any]:
            whole.set_requires_gradient_sync(last)
            return nullcontext()

        self._sync = sync
        return module

    def _mark_ready(self, loss: torch.Tensor) -> None:
        """Mark the end of a backward, before DDP waits there for its exchange.

        Once all gradients are made, autograd calls what was queued meanwhile, in that order: this with the
        first gradient, DDP's wait with its last bucket. A communication hook in Python would run for each
        bucket, which took 2 to 4 % of a small model's epochs.
        """
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(self._ready))

    def _ready(self) -> None:
        self.clock.ends("compute", self.place.step)
        self.guard.phase = "the exchange of gradients"

    # ---- an epoch ------------------------------------------------------------------------------------

    def epoch(self, after_step: Callable[[], bool]) -> bool:
        """Train to the end of the epoch, or until `after_step` says that all ranks stop here: then False.

        Raises NotFinite, and whatever the model, the dataset and torch raise.
        """
        place, clock = self.place, self.clock
        if distributed.is_initialized():
            self.guard.moved("the beginning of an epoch")
            distributed.barrier()
        self._finish()
        first, began, begun_s = place.done, time.perf_counter(), time.time()
        clock.begin()
        self.guard.moved(LOADING)
        if self._coming is None or place.epoch == self.batches.end:
            self.batches.epoch, self.batches.skip = place.epoch, place.done
            self._loader_seed.manual_seed(self.settings.seed + place.epoch)
            self._coming = iter(self._loader)
            if self.settings.workers:
                # torch's handler, which a loader of the user's may have set before, raises wherever the rank
                # is when a process of a loader ends; without it the next wait for a batch finds that in 5 s
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stops = self._steps(self._coming, after_step)
        clock.ends("compute", place.step)  # what came after the last step, such as a look into the store
        self._finish()
        wall_s = time.perf_counter() - began
        clock.read()
        self.look(place.step)
        self.epochs.append(self._measured(begun_s, wall_s, first))
        clock.times.clear()
        clock.exposed.clear()
        self.begin_next()
        return not stops

    def begin_next(self) -> None:
        """After the last step of an epoch the place is the beginning of the next one."""
        if self.place.done == self.batches.steps:
            self.place.epoch, self.place.done = self.place.epoch + 1, 0

    def _finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _steps(self, batches: Iterator[Any], after_step: Callable[[], bool]) -> bool:
        place, clock, guard, accumulate = self.place, self.clock, self.guard, self.settings.accumulate
        half = HALVES.get(self.settings.precision)
        exchanges = self.world > 1 and self.settings.strategy == "ddp"
        while place.done < self.batches.steps:
            for part in range(accumulate):
                guard.moved(LOADING, place.step + 1)
                batch = _moved(next(batches), self.device, self._dtype)
                clock.ends("data", place.step)
                guard.moved("compute")
                last = part == accumulate - 1
                with self._sync(last):
                    with torch.autocast(self.device.type, dtype=half, enabled=half is not None):
                        loss = loss_of(self.module, batch)
                    self._pending.append(loss.detach())
                    if exchanges and last:
                        self._mark_ready(loss)
                    self.scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
                if exchanges and last:
                    clock.ends("exchange", place.step)
                    guard.moved("compute")
                elif not last:
                    clock.ends("compute", place.step)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            clock.ends("compute", place.step)
            place.step, place.done = place.step + 1, place.done + 1
            if not self.on_gpu or place.done % CHECKED == 0:
                self.look(place.step)
                self._finish()
                clock.read()
            if after_step():
                return True
        return False

    def ended_loader(self) -> str:
        """How a process of the loader ended that should be there; empty where all are."""
        if self.guard.phase != LOADING:
            return ""
        for process in getattr(getattr(self._loader, "_iterator", None), "_workers", ()):
            process.join(ENDS_S)
            if (code := process.exitcode) is not None:
                return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ""

    def look(self, step: int) -> None:
        """Keep the losses since the last look. Raises NotFinite for the first that is no number."""
        if not self._pending:
            return
        each = torch.stack(self._pending).float().view(-1, self.settings.accumulate)
        losses: list[float] = each.mean(dim=1).tolist()
        self._pending = []
        for at, loss in enumerate(losses):
            if not abs(loss) < float("inf"):  # false for NaN, too
                raise NotFinite(step - len(losses) + at + 1, loss)
        self.losses += losses

    def _measured(self, begun_s: float, wall_s: float, first: int) -> Epoch:
        """The epoch, its exchange divided by what all ranks measured of each step."""
        place, times, exposed = self.place, self.clock.times, self.clock.exposed
        exchange: float | Unknown = 0.0
        waiting: float | Unknown = 0.0
        last: int | Unknown = 0
        if self.world > 1 and self.settings.strategy == "fsdp":
            exchange = waiting = NOT_APART
            last = NOT_APART
        elif self.world > 1:
            mine = torch.tensor([exposed[step] for step in sorted(exposed)], dtype=torch.float64)
            each = [torch.empty_like(mine) for _ in range(self.world)]
            self.guard.moved("the end of an epoch")
            distributed.all_gather(each, mine)
            least, who = torch.stack(each).min(dim=0)
            exchange, waiting = float(least.sum()), float((mine - least).sum())
            last = int((who == self.rank).sum())
        steps = place.done - first
        return Epoch(
            number=place.epoch,
            begun_s=begun_s,
            wall_s=wall_s,
            steps=steps,
            samples=steps * self.settings.accumulate * self.settings.batch,
            data_s=times["data"],
            compute_s=times["compute"],
            exchange_s=exchange,
            waiting_s=waiting,
            last=last,
            checkpoint_s=times["checkpoint"],
            is_whole=steps == self.batches.steps,
        )


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of the outermost lists of modules: the layers of a transformer."""
    for child in module.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else _blocks(child)


def _set_tf32(settings: Settings) -> None:
    """TF32 everywhere or nowhere: by default torch has it for convolutions and not for products."""
    if settings.precision in ("fp32", "tf32"):
        allowed = settings.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def _moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A batch on the device, fractions in a number format; containers as the loader's collation has them."""
    if isinstance(batch, torch.Tensor):
        to = dtype if batch.is_floating_point() else None
        return batch.to(device, dtype=to, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, Iterable) and not isinstance(batch, str):
        return [_moved(value, device, dtype) for value in batch]
    return batch


def _of_loader(rank_pid: int, _number: int) -> None:
    """In a process of the loader: it ends with its rank, and the rank's own signals aren't for it."""
    die_with(rank_pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
