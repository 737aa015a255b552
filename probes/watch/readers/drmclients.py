"""Which processes use which AMD card, by the fdinfo of their open render nodes.

Finding them means looking through every process that this one may look into, so that is done seldom; the
files that were found are read at every sample.
"""

from collections import defaultdict
from pathlib import Path

from probes.machine.sysfs import Client, parse_fdinfo, read_text
from probes.records.samples import ProcessUse
from probes.shared.kfd import listed
from probes.shared.unknown import Unknown
from probes.watch.readers.keptfile import KeptFile

SEARCH_EVERY_S = 5.0
NODES = "/dev/dri/"
_UNSEEN = Unknown("no fdinfo of it has this figure")


class DrmClients:
    """The clients of all cards, read at most once for each moment."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: list[tuple[int, str, KeptFile]] = []
        self._searched_s = -SEARCH_EVERY_S
        self._read_s = -1.0
        self._uses: dict[str, tuple[ProcessUse, ...]] = {}

    def refresh(self, at_s: float) -> None:
        """Read the clients at this moment."""
        if at_s == self._read_s:
            return
        self._read_s = at_s
        if at_s - self._searched_s >= SEARCH_EVERY_S:
            self._searched_s = at_s
            self._search()
        found: dict[tuple[str, str], tuple[int, str, Client]] = {}
        for pid, name, file in self._files:
            text = file.text()
            client = None if isinstance(text, Unknown) else parse_fdinfo(text)
            if client:
                found.setdefault((client.pci_id, client.client_id), (pid, name, client))
        self._uses = _by_card(list(found.values()))

    def _search(self) -> None:
        for _, _, file in self._files:
            file.close()
        self._files = []
        for place in listed(self._root / "proc"):
            if not place.name.isdecimal():
                continue
            for descriptor in listed(place / "fd"):
                try:
                    target = str(descriptor.readlink())
                except OSError:
                    continue
                if target.startswith(NODES):
                    name = read_text(place / "comm")
                    file = KeptFile(place / "fdinfo" / descriptor.name)
                    self._files.append((int(place.name), name if isinstance(name, str) else "", file))

    def of(self, pci_id: str) -> tuple[ProcessUse, ...]:
        """The processes seen on one card."""
        return self._uses.get(pci_id, ())


def _by_card(clients: list[tuple[int, str, Client]]) -> dict[str, tuple[ProcessUse, ...]]:
    by_process: dict[tuple[str, int, str], list[Client]] = defaultdict(list)
    for pid, name, client in clients:
        by_process[client.pci_id, pid, name].append(client)
    found: dict[str, tuple[ProcessUse, ...]] = defaultdict(tuple)
    for (pci_id, pid, name), mine in sorted(by_process.items()):
        vram, gtt = (_sum([dict(one.resident_bytes).get(kind) for one in mine]) for kind in ("vram", "gtt"))
        evicted = _sum([None if isinstance(c, Unknown) else c for c in (m.evicted_vram_bytes for m in mine)])
        found[pci_id] += (ProcessUse(pid, name, vram, gtt, evicted),)
    return found


def _sum(figures: list[int | None]) -> int | Unknown:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else _UNSEEN
