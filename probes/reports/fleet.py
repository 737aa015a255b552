"""Probe reports of many machines that should be alike: which one is the odd one, and in what. Pure.

A row is compared with the same row of all machines: the logarithm of its figure, less the median over
machines. Rows of one path are put together by their median, so that a slow spell in one row names nobody.
How far machines differ by nature is taken from all of them: 1.4826 times the median distance (the MAD of
normal values).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from probes.core.errors import ReportError
from probes.records.schema import ProbeReport
from probes.records.stats import median, summarize
from probes.reports.document import Document, Section, Table
from probes.reports.run_compare import LARGE, REMARKED, UNLIKE, rows_of

FEWEST: Final = 3  # of two that differ, either may be the odd one
NOTABLE: Final = 0.10  # of a time: below it no machine is called odd
CLEAR: Final = 5.0  # times what machines differ by
MAD: Final = 1.4826

Group = tuple[str, str, str]  # probe, path or scenario, large or small


@dataclass(frozen=True)
class Oddity:
    """In what one machine differs: `ratio` is its time over that of the median machine."""

    node: str
    group: Group
    ratio: float

    def __str__(self) -> str:
        word = "slower" if self.ratio > 1 else "faster"
        return f"{word} by {max(self.ratio, 1 / self.ratio):.2f} x in {' '.join(self.group)}"


@dataclass(frozen=True)
class Fleet:
    """All machines by name, each one's ratio in every group, and who is odd, the oddest first."""

    nodes: tuple[str, ...]
    groups: tuple[Group, ...]
    ratios: tuple[tuple[float, ...], ...]  # of each node, in each group
    oddities: tuple[Oddity, ...]
    facts: tuple[tuple[str, str, tuple[str, ...]], ...]  # what, a value, the nodes that have it
    left_out: int  # rows that not all machines have

    @property
    def odd(self) -> tuple[str, ...]:
        """The odd machines, the oddest first."""
        return tuple(dict.fromkeys(oddity.node for oddity in self.oddities))


def fleet_of(reports: Sequence[ProbeReport], names: Sequence[str]) -> Fleet:
    """Compare machines with their median. Raises ReportError for too few, and for no row that all have."""
    if len(reports) < FEWEST:
        raise ReportError(f"{len(reports)} reports can't tell which is odd", f"name {FEWEST} or more")
    rows = [rows_of(report) for report in reports]
    every = [
        key
        for key in rows[0]
        if all(key in other and other[key].leading == rows[0][key].leading for other in rows)
    ]
    if not every:
        raise ReportError("no measured row is in all reports", "run the same probes on all machines")
    offs: dict[Group, list[list[float]]] = defaultdict(list)
    for key in every:
        logs = [math.log(summarize(each[key].times_s).median) for each in rows]
        middle = median(logs)
        size = getattr(rows[0][key], "payload_bytes", LARGE)
        offs[key[0], key[1], "large" if size >= LARGE else "small"].append([log - middle for log in logs])
    groups = tuple(offs)
    ratios = tuple(
        tuple(math.exp(median([row[node] for row in offs[group]])) for group in groups)
        for node in range(len(names))
    )
    typical = MAD * median([abs(math.log(ratio)) for each in ratios for ratio in each])
    limit = max(math.log1p(NOTABLE), CLEAR * typical)
    oddities = [
        Oddity(name, group, ratio)
        for name, each in zip(names, ratios, strict=True)
        for group, ratio in zip(groups, each, strict=True)
        if abs(math.log(ratio)) > limit
    ]
    oddities.sort(key=lambda oddity: -abs(math.log(oddity.ratio)))
    left_out = len({key for each in rows for key in each}) - len(every)
    return Fleet(tuple(names), groups, ratios, tuple(oddities), _facts(reports, names), left_out)


def _facts(
    reports: Sequence[ProbeReport], names: Sequence[str]
) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Facts in which machines differ, but their hosts' names; the values that few have come first."""
    found = []
    for what, fact in (*UNLIKE, *REMARKED):
        having: dict[str, list[str]] = defaultdict(list)
        for report, name in zip(reports, names, strict=True):
            having[fact(report)].append(name)
        if what != "host" and len(having) > 1:
            found += [(what, value, tuple(nodes)) for value, nodes in having.items()]
    return tuple(sorted(found, key=lambda each: (each[0], len(each[2]))))


def fleet_document(fleet: Fleet) -> Document:
    """The comparison in words and tables."""
    headers = ("node", *(" ".join(group) for group in fleet.groups))
    rows = tuple(
        (name, *(f"{ratio:.3f}" for ratio in each))
        for name, each in zip(fleet.nodes, fleet.ratios, strict=True)
    )
    notes = [f"a node is odd from {NOTABLE:.0%} on, and {CLEAR:g} times what nodes differ by"]
    if fleet.left_out:
        notes.append(f"{fleet.left_out} rows are left out: not every node has them")
    times = Table("Time over that of the median node", tuple(notes), headers, rows, frozenset({"node"}))
    facts = Table(
        "Facts that differ",
        (),
        ("fact", "value", "nodes"),
        tuple((what, value, _few(nodes)) for what, value, nodes in fleet.facts),
        frozenset({"fact", "value", "nodes"}),
    )
    return Document(
        kicker="Fleet",
        title="Weir fleet",
        subject=f"{len(fleet.nodes)} nodes",
        details=(),
        headline=_headline(fleet),
        sections=(Section(title="Nodes", tables=(times, facts)),),
    )


def _headline(fleet: Fleet) -> tuple[str, ...]:
    if not fleet.odd:
        return (f"No node is odd: {len(fleet.nodes)} nodes, {len(fleet.groups)} kinds of rows.",)
    sentences = []
    for node in fleet.odd:
        own = [str(oddity) for oddity in fleet.oddities if oddity.node == node]
        alone = [f"it alone has {what} {value}" for what, value, nodes in fleet.facts if nodes == (node,)]
        sentences.append(f"{node} is odd: {_few((*alone, *own), '; ')}.")
    return tuple(sentences)


def _few(texts: Sequence[str], between: str = ", ") -> str:
    shown = between.join(texts[:8])
    return f"{shown}{between}and {len(texts) - 8} more" if len(texts) > 8 else shown
