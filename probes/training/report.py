"""What a rank reports of a run, all runs together, and their files. Needs no torch.

A run's folder has a `rank-N.json` of each rank. An epochs report holds any number of runs; figures are
derived from them whenever they are shown (`figures`). Times are in seconds.
"""

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, Literal

from probes.core import files
from probes.core.codec import Misfit, check_figures, decode, to_json
from probes.core.errors import ReportError
from probes.core.invocation import probe_command, tool_version
from probes.core.unknown import Unknown
from probes.records.files import json_of, of_schema, reading, word_under, writing
from probes.records.json_schema import document
from probes.records.watch import Energy, Subject, Track
from probes.watch.recording import named_samples, watched_cards
from probes.watch.totals import EnergyTotal, WatchTotals

Precision = Literal["fp32", "tf32", "amp-bf16", "amp-fp16", "bf16"]
Strategy = Literal["ddp", "fsdp"]
Scaling = Literal["strong", "weak"]
Attention = Literal["own", "eager", "sdpa"]
Device = Literal["auto", "cpu", "gpu"]
State = Literal["done", "checkpointed", "failed"]

PRECISIONS: Final = typing.get_args(Precision)
ATTENTIONS: Final = typing.get_args(Attention)
STRATEGIES: Final = typing.get_args(Strategy)
SCALINGS: Final = typing.get_args(Scaling)
SYNTHETIC: Final = "synthetic"
RANK_SCHEMA: Final = "weir-training-rank/1"
EPOCHS_SCHEMA: Final = "weir-epochs/1"
MOST_BYTES: Final = 256 << 20
MOST_RANK_BYTES: Final = 64 << 20
MOST_RUNS: Final = 4096
MOST_WORLD: Final = 65536
TEMPFAIL: Final = 75  # <sysexits.h> EX_TEMPFAIL: checkpointed, start it again with --resume


@dataclass(frozen=True)
class Settings:
    """What a run trains, and how: the options of the worker."""

    model: str  # a name, a config.json, or module:function
    data: str = SYNTHETIC  # or module:function
    batch: int = 32  # samples at once on each rank
    precision: Precision = "fp32"
    accumulate: int = 1  # batches whose gradients are added up for one step of the optimizer
    strategy: Strategy = "ddp"
    scaling: Scaling = "strong"
    samples: int = 2048  # of an epoch: strong, of all ranks together; weak, of each rank
    tokens: int = 128  # of each sequence
    lora: int = 0  # rank of the adapters; 0: all weights are trained
    checkpointing: bool = False  # activations are computed again
    attention: Attention = "own"  # the model's own choice, or by name
    workers: int = 0  # processes of each rank's loader
    threads: int = 0  # of each rank on a CPU; 0: torch's own choice
    epochs: int = 2  # the first one stands apart
    seed: int = 0
    device: Device = "auto"  # resolved where a rank reports


@dataclass(frozen=True)
class Epoch:
    """One epoch on one rank. The parts are those of the wall time."""

    number: int
    begun_s: float  # Unix time
    wall_s: float
    steps: int  # of the optimizer
    samples: int  # on this rank
    data_s: float  # waiting for the loader and the copy to the device
    compute_s: float  # forward, backward, optimizer; with FSDP, the exchange that can't be told from it
    exchange_s: float | Unknown  # gradients, as long as nothing else went on and all ranks took part
    waiting_s: float | Unknown  # for ranks whose gradients weren't ready
    last: int | Unknown  # steps in which this rank's gradients were ready last
    checkpoint_s: float = 0.0  # in which it wrote checkpoints
    is_whole: bool = True  # false where a checkpoint divided it


@dataclass(frozen=True)
class Fault:
    """Why a rank failed."""

    step: int
    cause: str
    exit_code: int


@dataclass(frozen=True)
class RankReport:
    """What one rank says of a run."""

    settings: Settings
    rank: int
    world: int
    node: str
    device_name: str
    torch: str
    library: str  # whose model it is
    backend: str  # of the exchange
    state: State
    fault: Fault | None
    epochs: tuple[Epoch, ...]
    losses: tuple[float, ...]  # of this rank's batches, a mean for each step
    peak_bytes: int | Unknown  # GPU: handed out by torch's allocator; CPU: resident
    reserved_bytes: int | Unknown  # GPU: taken by torch's allocator from the driver
    repetition: int = 1
    resumed_at: int = 0  # step; 0: it began at the beginning
    schema: str = RANK_SCHEMA


@dataclass(frozen=True)
class Watched:
    """What a watch saw of one card beside a run."""

    host: str
    card: str
    epochs: tuple[Energy | Unknown, ...]  # energy of each of the run's epochs
    tracks: tuple[Track, ...]
    step_s: float  # of the tracks' curves


@dataclass(frozen=True)
class Run:
    """One run: the ranks that reported, and what was watched."""

    name: str  # its folder
    ranks: tuple[RankReport, ...]
    watched: tuple[Watched, ...] | Unknown

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks without a report: killed, or on a node that is gone."""
        known = {report.rank for report in self.ranks}
        return tuple(rank for rank in range(self.ranks[0].world) if rank not in known)

    @property
    def state(self) -> State:
        """Of all ranks together."""
        if self.silent or any(report.state == "failed" for report in self.ranks):
            return "failed"
        return "done" if all(report.state == "done" for report in self.ranks) else "checkpointed"


@dataclass(frozen=True)
class EpochsReport:
    """Runs of training, each rank's epochs apart. Means and efficiencies are derived, not stored."""

    runs: tuple[Run, ...]
    tool_version: str
    schema: str = EPOCHS_SCHEMA


def words_of(settings: Settings) -> list[str]:
    """The worker's words for settings, those that are defaults left out."""
    words = [settings.model]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name == "model" or value == field.default:
            continue
        words += [f"--{field.name}"] if value is True else [f"--{field.name}", str(value)]
    return words


# ---- files -------------------------------------------------------------------------------------------

_RANK: Final = re.compile(r"rank-(\d{1,6})\.json")
GAUGES: Final = ("power_w", "edge_celsius", "vram_bytes", "busy_percent")  # kept of a watch
AGAIN: Final = "run it again into an empty folder: --out DIR"


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank reports."""
    return folder / f"rank-{rank}.json"


def rank_files(folder: Path) -> list[tuple[Path, int]]:
    """All ranks' reports in a folder, by name, each with its rank's number. Raises OSError."""
    found = ((path, _RANK.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [(path, int(match[1])) for path, match in found if match and path.is_file()]


def write_rank(report: RankReport, folder: Path) -> None:
    """Write a rank's report as a whole, or nothing. Raises ReportError."""
    path = rank_file(folder, report.rank)
    with writing(path, "free space there, or choose another folder: --out DIR"):
        files.write_text(path, to_json(report))


def run_in(folder: Path, *, name: str = "") -> Run:
    """The run in a folder. Raises ReportError, also where no rank reported or ranks contradict each other."""
    reports = []
    with reading(folder, AGAIN):
        paths = [path for path, _ in rank_files(folder)]
    for path in paths:
        with reading(path, AGAIN):
            value = json_of(files.read_text(path, most_bytes=MOST_RANK_BYTES))
            check_figures(value)
            report = decode(RankReport, value, "rank")
            if report.schema != RANK_SCHEMA or rank_file(folder, report.rank) != path:
                raise ReportError(f"not a report of this rank of {RANK_SCHEMA}")
            reports.append(report)
    if not reports:
        raise ReportError(f"no rank has reported into {folder}", "see what the ranks printed, and repeat")
    ranks = tuple(sorted(reports, key=lambda report: report.rank))
    with reading(folder, AGAIN):
        _check_ranks(ranks)
    return Run(name or folder.name, ranks, _watched(folder, ranks[0].epochs))


def _check_ranks(ranks: Sequence[RankReport]) -> None:
    """Raises Misfit where reports can't be those of one run's ranks, or can't be compared."""
    first = ranks[0]
    if not 0 < first.world <= MOST_WORLD:
        raise Misfit(f"rank {first.rank} is of {first.world} ranks, and 1 to {MOST_WORLD} can be read")
    numbers = [each.rank for each in ranks]
    if numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < first.world:
        raise Misfit(f"its ranks aren't some of 0 to {first.world - 1}, each once")
    for each in ranks:
        # a rank that ended early may not have known its device yet
        theirs = replace(each.settings, device=first.settings.device)
        if (theirs, each.world) != (first.settings, first.world):
            raise Misfit(f"it has ranks of different runs: {first.rank} and {each.rank}")
        if any(epoch.wall_s <= 0 or epoch.samples <= 0 or epoch.steps <= 0 for epoch in each.epochs):
            raise Misfit(f"rank {each.rank} has an epoch without time, steps or samples")
        if each.state == "done" and not (each.epochs and each.losses):
            raise Misfit(f"rank {each.rank} is done, and has no epoch or no loss")


def _watched(folder: Path, epochs: tuple[Epoch, ...]) -> tuple[Watched, ...] | Unknown:
    cards: list[Watched] = []
    samples = sorted(folder.glob("watch-*.jsonl"))
    for path in samples:
        cards += _cards_of(path, epochs)
    if cards:
        return tuple(cards)
    return Unknown("no card was seen" if samples else "no watch ran beside it")


def _cards_of(path: Path, epochs: tuple[Epoch, ...]) -> Iterator[Watched]:
    """Each card in a file of samples, which a resumed run's watches have written one after another.

    Energy is that between an epoch's begin and end.
    """
    found: dict[tuple[str, ...], tuple[Subject, WatchTotals, list[list[EnergyTotal]]]] = {}
    with named_samples(path) as watches:
        for subject, samples in watches:
            if same := found.get(watched_cards(subject)):
                _, totals, energies = same
                totals.goes_on(subject.interval_s)
            else:
                totals = WatchTotals(subject.interval_s, len(subject.cards))
                energies = [[EnergyTotal() for _ in epochs] for _ in subject.cards]
                found[watched_cards(subject)] = subject, totals, energies
            for sample in samples:
                totals.add(sample)
                at_s = subject.begun_s + sample.at_s
                for number, epoch in enumerate(epochs):
                    if epoch.begun_s <= at_s <= epoch.begun_s + epoch.wall_s:
                        for each, seen in zip(energies, sample.cards, strict=False):
                            each[number].add(at_s, seen.look.get("power_w"), seen.look.get("energy_j"))
    for subject, totals, energies in found.values():
        for card, energy, watch in zip(subject.cards, energies, totals.cards(), strict=True):
            tracks = tuple(track for track in watch.tracks if track.gauge in GAUGES)
            yield Watched(
                subject.host, card.name, tuple(total.energy() for total in energy), tracks, totals.step_s
            )


def runs_below(folder: Path) -> tuple[tuple[Run, ...], tuple[ReportError, ...]]:
    """All runs in a folder and those below it, by name, and why others can't be read.

    Raises ReportError where none can.
    """
    with reading(folder, "name the folder that runs were written to"):
        if not folder.is_dir():
            raise ReportError("it is not a folder")
        found = (path for path in folder.rglob("rank-*.json") if _RANK.fullmatch(path.name))
        places = sorted({path.parent for path in found if path.is_file()})
    if not places or len(places) > MOST_RUNS:
        raise ReportError(
            f"{folder} has {len(places)} runs, and 1 to {MOST_RUNS} can be read",
            "name the folder that workers wrote to: --out DIR",
        )
    runs, refused = [], []
    for place in places:
        try:
            runs.append(run_in(place, name=str(place.relative_to(folder))))
        except ReportError as failure:
            refused.append(failure)
    if not runs:
        raise refused[0]
    return tuple(runs), tuple(refused)


def report_of(runs: tuple[Run, ...]) -> EpochsReport:
    """The report of runs."""
    return EpochsReport(runs, tool_version())


def is_epochs(path: Path) -> bool:
    """Whether a file holds an epochs report, of any version; a file that can't be read doesn't."""
    return bool(word_under(path, "schema", "weir-epochs/", most_bytes=MOST_BYTES))


def named_epochs(path: Path, *, name: Path | None = None) -> tuple[EpochsReport, str]:
    """The report in a file, and its text. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} epochs MODEL --json FILE"):
        value, text = of_schema(path, EPOCHS_SCHEMA, most_bytes=MOST_BYTES)
        report = decode(EpochsReport, value, "report")
        if not report.runs or not all(run.ranks for run in report.runs):
            raise Misfit("report.runs: expected runs, each with a rank")
        for run in report.runs:
            _check_ranks(run.ranks)
            if not isinstance(run.watched, Unknown) and any(
                len(card.epochs) != len(run.ranks[0].epochs) for card in run.watched
            ):
                raise Misfit("a watched card has other epochs than its run")
        return report, text


def epochs_schema() -> str:
    """The JSON Schema of epochs reports."""
    return document(
        EpochsReport,
        title="Weir epochs",
        description="Runs of training: each rank's epochs and what their time went into. Derived figures "
        'are not stored. A figure that may be {"is": "unknown", "reason": ...} is never 0.',
        versions={"schema": (EPOCHS_SCHEMA,)},
    )
