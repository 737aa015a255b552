"""Ranks' reports as tests make them."""

from dataclasses import replace

from probes.core.unknown import Unknown
from probes.training.report import Epoch, Fault, RankReport, Run, Settings

SETTINGS = Settings("bert-base", batch=8, samples=160, device="gpu")


def epoch(number: int, wall_s: float = 1.0, **parts: float) -> Epoch:
    """An epoch of so long, whose rest is computing."""
    given = {"data_s": 0.0, "exchange_s": 0.0, "waiting_s": 0.0, **parts}
    return Epoch(
        number,
        begun_s=1000.0 + number,
        wall_s=wall_s,
        steps=10,
        samples=80,
        compute_s=wall_s - sum(given.values()),
        last=0,
        **given,
    )


def rank(
    number: int, world: int, *epochs: Epoch, settings: Settings = SETTINGS, fault: Fault | None = None
) -> RankReport:
    """What a rank reports, done unless it has a fault."""
    return RankReport(
        settings=settings,
        rank=number,
        world=world,
        node="n1",
        device_name="card",
        torch="2.11",
        library="transformers",
        backend="nccl",
        state="failed" if fault else "done",
        fault=fault,
        epochs=epochs,
        losses=(2.0, 1.0),
        peak_bytes=1 << 30,
        reserved_bytes=2 << 30,
    )


def run(world: int, wall_s: float, *, name: str = "run", first_s: float = 5.0, **more: object) -> Run:
    """A run of equal ranks, whose second epoch takes so long."""
    settings = replace(SETTINGS, **more)
    ranks = tuple(
        rank(at, world, epoch(0, first_s), epoch(1, wall_s), settings=settings) for at in range(world)
    )
    return Run(name, ranks, Unknown("no watch ran beside it"))
