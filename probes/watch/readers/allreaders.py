"""Finds the cards of this machine and makes a reader for each."""

import os
from collections.abc import Callable
from pathlib import Path

from probes.machine.nvml import Nvml
from probes.machine.sysfs import read_cards
from probes.records.samples import ProcessUse, Sample
from probes.shared.unknown import Unknown
from probes.watch.readers.amdcard import AmdCard
from probes.watch.readers.cardreader import CardReader
from probes.watch.readers.drmclients import DrmClients
from probes.watch.readers.machinereader import CommandTree, MachineReader
from probes.watch.readers.nvidiacard import NvidiaReader


class Readers:
    """Every reader of this machine."""

    def __init__(self, root: Path, nvml: Nvml | Unknown) -> None:
        self._root = root
        self._clients = DrmClients(root)
        self.machine = MachineReader(root, cpus=os.cpu_count() or 1)
        self.cards: tuple[CardReader, ...] = (*self._amd(), *self._nvidia(nvml))

    def _amd(self) -> list[CardReader]:
        of: Callable[[str], tuple[ProcessUse, ...] | Unknown] = self._clients.of
        return [AmdCard(self._root, card, of) for card in read_cards(self._root) if card.driver == "amdgpu"]

    def _nvidia(self, nvml: Nvml | Unknown) -> list[CardReader]:
        if isinstance(nvml, Unknown):
            return []
        return [NvidiaReader(self._root, nvml, card) for card in nvml.cards()]

    def follow(self, pid: int) -> None:
        """Watch the memory of this process and its descendants, too."""
        self.machine.command = CommandTree(self._root, pid)

    def sample(self, at_s: float, late_s: float | None) -> Sample:
        """Everything at this moment."""
        if any(reader.card.driver == "amdgpu" for reader in self.cards):
            self._clients.refresh(at_s)
        machine = self.machine.look(at_s)
        closing = late_s is None
        cards = tuple(reader.sample(at_s, closing=closing) for reader in self.cards)
        return Sample(at_s, late_s, machine, cards)
