"""Asks doctor, `plan` and `fit` one question about a model and a card, and puts their answers together.

Everything but the torch is predicted.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

from buildtool.fits.card import CardFacts, ChosenCard, TorchAnswer
from probes.core.errors import ModelUnknown, PlanImpossible
from probes.core.invocation import probe_line
from probes.core.quoting import command
from probes.core.units import binary_bytes, typed_bytes
from probes.core.unknown import Unknown
from probes.fit.answer import LORA_RANK
from probes.fit.answer import answer as fit_answer
from probes.fit.forecast import most_of
from probes.fit.placed import plan_line, whole_mib
from probes.fit.precision import default_precision
from probes.fit.report import FitReport, Knob, Largest, Precision, Question
from probes.placement.models.description import ModelDescription
from probes.placement.planner.compute_dtype import computed_in
from probes.placement.planner.machine import ASSUMED_HOST, Constants
from probes.placement.planner.plan import make_plan
from probes.placement.types import TIERS, Objective, Plan, Tier, Workload

Task = Literal["inference", "lora", "training"]
TASKS: Final[tuple[Task, ...]] = ("inference", "lora", "training")
TOKENS: Final = 1024  # of a sequence, where nothing is said and the model has as many positions
MOST_AT_ONCE: Final = 16  # sequences, of a larger batch that is suggested
NOTABLE: Final = 1.05  # times as fast, from which on a change is named
FAST: Final = "--objective fast"  # of `plan` and `place`
NO_SPEEDS: Final = "nobody has written a profile for this card, so its speeds aren't known"


@dataclass(frozen=True)
class Asked:
    """What a user asks. Bytes; None: not said."""

    model: str
    task: Task = "inference"
    batch: int = 1
    tokens: int | None = None  # of each sequence
    vram_bytes: int | None = None  # that torch may take
    host_bytes: int | None = None  # of host memory, for weights


@dataclass(frozen=True)
class Speed:
    """Predicted speed: the middle, and the ends of the interval that should hold 9 of 10 measurements."""

    tag: ClassVar[str] = "speed"
    of: Literal["tokens", "sequences"]  # in all sequences of the batch
    per_second: float
    low_per_second: float
    high_per_second: float


@dataclass(frozen=True)
class TierBytes:
    """Weights that are kept in one way, in bytes as the model has them."""

    tier: Tier
    weight_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where `plan` keeps the weights for inference. Bytes."""

    tag: ClassVar[str] = "placement"
    is_whole: bool  # all weights are in VRAM, in the dtype that is computed in
    tiers: tuple[TierBytes, ...]
    converted_bytes: int  # of these, what stays bfloat16 and is converted in each pass
    vram_bytes: int  # of torch's allocator
    pinned_bytes: int
    pageable_bytes: int
    disk_bytes: int  # read in each pass
    speed: Speed | Unknown


@dataclass(frozen=True)
class Change:
    """One change, what it brings and what it costs."""

    tag: ClassVar[str] = "change"
    name: str
    brings: str
    costs: str


@dataclass(frozen=True)
class Memory:
    """What `fit` says of one task, everything in VRAM. Bytes are torch's, without the driver's context."""

    tag: ClassVar[str] = "memory"
    fits: bool
    precision: Precision
    smallest_budget_bytes: int
    largest_batch: int
    largest_tokens: int  # of a sequence, at the batch that is asked for
    change: Change | Unknown  # after which the largest batch fits


@dataclass(frozen=True)
class Answer:
    """The whole answer; `weir fits --json` prints it."""

    model: str
    weight_bytes: int  # as the model has them
    card: CardFacts
    torch: TorchAnswer | Unknown
    task: Task
    batch: int
    tokens: int
    stored_dtype: str  # of most weights
    compute_dtype: str  # of inference
    vram_budget_bytes: int
    host_budget_bytes: int
    host_is_assumed: bool
    has_room: bool  # memory is enough: whole, or placed where the task is inference
    runs: bool  # and a published torch computes on the card
    placement: Placement | Unknown  # of inference
    memory: Memory | Unknown  # of the task
    lora: Memory | Unknown  # of rank 16, at the same batch and tokens
    cpu: Speed | Unknown  # of inference on the host's processors, where no torch computes on the card
    change: Change | Unknown
    next_command: str
    notes: tuple[str, ...]


def ask(asked: Asked, model: ModelDescription, card: ChosenCard) -> Answer:
    """The answer. Raises UsageError for a batch or a sequence that the model can't have."""
    return _Asking(asked, model, card).answer()


class _Asking:
    """One question with what was found out so far."""

    def __init__(self, asked: Asked, model: ModelDescription, card: ChosenCard) -> None:
        self.asked, self.model, self.card = asked, model, card
        self.machine = card.machine
        self.tokens = asked.tokens or min(TOKENS, most_of(model, "tokens"))
        most = max(self.machine.vram_bytes - self.machine.context_bytes, 0)
        self.budget = whole_mib(most if asked.vram_bytes is None else min(asked.vram_bytes, most))

    def answer(self) -> Answer:
        """Ask, and put the answers together."""
        task, torch = self.asked.task, self.card.torch
        report = self.fit(task)
        work = Workload(self.asked.batch, self.tokens, self.tokens if self.generates else 0)
        plan = self.plan(self.machine, work) if task == "inference" else Unknown("plans are of inference")
        there = not isinstance(torch, TorchAnswer) or torch.computes_on_card
        fits = isinstance(report, FitReport) and report.fits
        has_room = isinstance(plan, Plan) if task == "inference" else fits
        host = self.asked.host_bytes if self.asked.host_bytes is not None else self.machine.host_bytes
        change = self.change(report, plan, work)
        return Answer(
            model=self.model.name,
            weight_bytes=sum(block.weight_bytes for block in self.model.blocks),
            card=self.card.facts,
            torch=torch,
            task=task,
            batch=self.asked.batch,
            tokens=self.tokens,
            stored_dtype=computed_in(self.model, None),
            compute_dtype=computed_in(self.model, self.machine),
            vram_budget_bytes=self.budget,
            host_budget_bytes=ASSUMED_HOST if host is None else host,
            host_is_assumed=host is None,
            has_room=has_room,
            runs=there and has_room,
            placement=_placement(plan, speeds=self.card.has_speeds) if isinstance(plan, Plan) else plan,
            memory=_memory(report),
            lora=_memory(self.fit("lora")) if task == "inference" else Unknown(f"{task} is asked about"),
            cpu=self.on_cpu(work) if task == "inference" and not there else Unknown("not asked about"),
            change=change,
            next_command=self.next_command(work, report, change, there=there),
            notes=self.card.notes,
        )

    @property
    def generates(self) -> bool:
        """Whether the model makes tokens, and so keeps keys and values."""
        return any(block.looked_up or "lm_head" in block.name for block in self.model.blocks)

    def fit(self, task: Task) -> FitReport | Unknown:
        """What `weir probe fit` answers."""
        question = Question(
            self.asked.model,
            "inference" if task == "inference" else "training",
            self.asked.batch,
            self.tokens,
            lora_rank=LORA_RANK if task == "lora" else 0,
        )
        try:
            question = replace(question, precision=default_precision(self.model, self.machine, question))
            return fit_answer(self.model, question, self.machine, budget=self.budget)
        except ModelUnknown as unknown:
            return Unknown(unknown.message)

    def plan(self, machine: Constants, work: Workload, objective: Objective = "exact") -> Plan | Unknown:
        """What `weir probe plan` answers; why it can't where nothing runs."""
        try:
            return make_plan(
                self.model,
                machine,
                vram=self.budget if machine.has_gpu else 0,
                host=self.asked.host_bytes,
                workload=work,
                objective=objective,
            ).plan
        except PlanImpossible as impossible:
            return Unknown(f"{impossible.message}; {impossible.hint}")

    def on_cpu(self, work: Workload) -> Speed | Unknown:
        """The speed on the processors of the profile's host."""
        plan = self.plan(replace(self.machine, vram_bytes=0), work)
        if isinstance(plan, Unknown):
            return plan
        return _speed(plan) if self.card.has_speeds else Unknown(NO_SPEEDS)

    def change(self, report: FitReport | Unknown, plan: Plan | Unknown, work: Workload) -> Change | Unknown:
        """What helps most: what makes it faster, or where memory is what lacks, what saves most of that."""
        if self.asked.task != "inference":
            return _saving(report)
        if isinstance(plan, Unknown):
            return plan
        changes = self.faster(report, plan, work) if self.card.has_speeds else []
        if changes:
            return max(changes, key=lambda change: change[0])[1]
        if isinstance(report, FitReport) and not report.fits:
            needs = binary_bytes(report.smallest_budget_bytes + self.machine.context_bytes)
            return Change(f"a card with {needs}", "it holds the whole model", "another card")
        return _saving(report)

    def faster(self, report: FitReport | Unknown, plan: Plan, work: Workload) -> list[tuple[float, Change]]:
        """The changes after which notably more is made each second, with how many times as much."""
        found = []
        fast = self.plan(self.machine, work, "fast")
        if (times := _times(plan, fast)) >= NOTABLE and isinstance(fast, Plan):
            halves = fast.bfloat16_becomes == "float16"
            lossy = "weights in float16 if none is beyond 65504, and " if halves else ""
            costs = f"{lossy}sums rounded in another order"
            found.append((times, Change(FAST, f"{times:.2g} times as fast", costs)))
        most = report.predicted_largest_batch if isinstance(report, FitReport) else None
        batch = min(most.fits, MOST_AT_ONCE) if isinstance(most, Largest) else 1
        if batch > work.batch:
            more = self.plan(self.machine, replace(work, batch=batch))
            if (times := _times(plan, more)) >= NOTABLE and isinstance(more, Plan):
                waits = more.time.middle_s / plan.time.middle_s
                costs = "each takes about as long as one alone"
                costs = f"each takes {waits:.2g} times as long" if waits >= NOTABLE else costs
                brings = f"{times:.2g} times as many {_made(work)}/s in all"
                found.append((times, Change(f"--batch {batch}", brings, costs)))
        return found

    def next_command(
        self, work: Workload, report: FitReport | Unknown, change: Change | Unknown, *, there: bool
    ) -> str:
        """The command to type next: the plan, or the training step with the change that makes it fit."""
        if not there or not self.card.has_speeds:
            return command("weir", "doctor", "--card", self.card.facts.target)
        if self.asked.task == "inference":
            host, ram = self.asked.host_bytes, self.machine.host_bytes
            if host is None and self.card.named is None and ram is not None:
                host = whole_mib(ram)  # of this host, which `plan` doesn't ask
            line = plan_line(self.asked.model, self.card.named, self.budget, work, host=host)
            return f"{line} {FAST}" if isinstance(change, Change) and change.name == FAST else line
        if isinstance(report, Unknown):
            return command("weir", "fits", self.asked.model, *filter(None, [self.card.named]))
        options = {
            "--machine": self.card.named,
            "--vram": typed_bytes(self.budget),
            "--task": "training",
            "--lora": str(LORA_RANK) if self.asked.task == "lora" else None,
            "--batch": str(self.asked.batch),
            "--tokens": str(self.tokens),
        }
        best = _best(report) if isinstance(report, FitReport) and not report.fits else None
        if best and best.largest_batch >= self.asked.batch:
            options |= _options_of(best, self.tokens)
        words = [
            word for name, value in options.items() if value is not None for word in (name, value) if word
        ]
        return probe_line("fit", self.asked.model, *words)


def _options_of(knob: Knob, tokens: int) -> dict[str, str]:
    """The options of `weir probe fit` that make a change; empty values are of options without one."""
    first, _, rest = knob.name.partition(" ")
    if first in ("precision", "optimizer"):
        return {f"--{first}": rest}
    if first == "sequences":
        return {"--tokens": str((tokens + 1) // 2)}
    if first == "LoRA":
        return {"--lora": str(LORA_RANK)}
    return {"--checkpointing": ""} if knob.name == "gradient checkpointing" else {}


def _memory(report: FitReport | Unknown) -> Memory | Unknown:
    if isinstance(report, Unknown):
        return report
    batch, tokens = report.predicted_largest_batch, report.predicted_largest_tokens
    assert isinstance(batch, Largest), "by rules"
    assert isinstance(tokens, Largest), "by rules"
    return Memory(
        report.fits,
        report.question.precision,
        report.smallest_budget_bytes,
        largest_batch=batch.fits,
        largest_tokens=tokens.fits,
        change=_saving(report),
    )


def _placement(plan: Plan, *, speeds: bool) -> Placement:
    by_tier: dict[Tier, int] = {}
    for block in plan.blocks:
        by_tier[block.tier] = by_tier.get(block.tier, 0) + block.weight_bytes
    return Placement(
        is_whole=all(block.tier == "resident" and not block.kept for block in plan.blocks),
        tiers=tuple(TierBytes(tier, by_tier[tier]) for tier in TIERS if tier in by_tier),
        converted_bytes=sum(block.weight_bytes for block in plan.blocks if block.kept),
        vram_bytes=plan.vram.total - plan.vram.context,
        pinned_bytes=plan.host.pinned,
        pageable_bytes=plan.host.pageable,
        disk_bytes=plan.host.disk,
        speed=_speed(plan) if speeds else Unknown(NO_SPEEDS),
    )


def _speed(plan: Plan) -> Speed | Unknown:
    time, work = plan.time, plan.workload
    if not time.low_s:
        return Unknown("the plan takes no time")
    low, middle, high = (work.batch / seconds for seconds in (time.high_s, time.middle_s, time.low_s))
    return Speed(_made(work), middle, low, high)


def _made(work: Workload) -> Literal["tokens", "sequences"]:
    """Return the unit of a forward pass's output: tokens or sequences."""
    return "tokens" if work.context_tokens else "sequences"


def _times(plan: Plan, other: Plan | Unknown) -> float:
    """How many times as many tokens or sequences a second another plan makes; 0 where there is none."""
    if isinstance(other, Unknown) or not other.time.middle_s:
        return 0.0
    return other.workload.batch / other.time.middle_s * plan.time.middle_s / plan.workload.batch


def _best(report: FitReport) -> Knob | None:
    """The single change of `fit` after which the largest batch fits, or that saves most where none does."""
    best = max(report.knobs, key=lambda knob: (knob.largest_batch, knob.saves), default=None)
    return best if best and best.saves > 0 else None


def _saving(report: FitReport | Unknown) -> Change | Unknown:
    if isinstance(report, Unknown):
        return report
    best = _best(report)
    if best is None:
        return Unknown("no single change saves memory")
    needs = binary_bytes(best.total - report.predicted.context)
    then = f"largest batch {best.largest_batch}" if best.largest_batch else "still too much"
    return Change(best.name, f"needs {needs}, {then}", best.cost)
