"""Draws the small part of Mermaid that our pages use, flowcharts of boxes and arrows, as SVG.

GitHub draws Mermaid in the reader's browser, with a script of 3 MB. The site has a drawing instead, made when
it is built: boxes in layers, each above everything that it points at, with arrows that pass between boxes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from statistics import fmean

NODE = re.compile(r"(\w+)\[([^\]]+)\]$")
GROUP = re.compile(r"subgraph (\w+)\[([^\]]+)\]$")
EDGE = re.compile(r"(\w+) --> (\w+)$")
HEADER = "flowchart TD"
LETTER, PADDING, BOX_HEIGHT = 7.2, 12.0, 26.0  # pixels, for a font of 13 pixels
GAP, PASSAGE, LAYER_HEIGHT = 18.0, 10.0, 58.0
SWEEPS = 8  # the order within layers settles in three or four


class NotDrawn(ValueError):
    """A line of Mermaid that isn't a box, a group or an arrow."""


@dataclass
class Chart:
    """Boxes by name, with label and group; groups in their order; arrows."""

    labels: dict[str, str] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    arrows: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Stop:
    """A place in a layer: a box, or the passage of an arrow that goes further down."""

    name: str
    group: int
    width: float


def parse(source: str) -> Chart:
    """A flowchart's text as boxes and arrows. Raises NotDrawn for anything else."""
    chart, group = Chart(), ""
    for line in filter(None, map(str.strip, source.splitlines())):
        if found := GROUP.match(line):
            group = found[2]
            chart.groups.append(group)
        elif found := NODE.match(line):
            chart.labels[found[1]] = found[2]
            chart.group_of[found[1]] = group
        elif (found := EDGE.match(line)) and {found[1], found[2]} <= chart.labels.keys():
            chart.arrows.append((found[1], found[2]))
        elif line not in (HEADER, "end"):
            raise NotDrawn(f"can't draw {line!r}: docs/tools/diagram.py knows boxes, groups and arrows")
    return chart


def levels(chart: Chart) -> dict[str, int]:
    """Each box's layer: one below the lowest box that points at it. Raises NotDrawn for a circle."""
    level = dict.fromkeys(chart.labels, 0)
    for _ in chart.labels:
        before = dict(level)
        for upper, lower in chart.arrows:
            level[lower] = max(level[lower], level[upper] + 1)
        if level == before:
            return level
    raise NotDrawn("can't draw arrows that go in a circle")


def layered(chart: Chart) -> tuple[list[list[Stop]], list[list[str]]]:
    """The stops of each layer, and each arrow as the names of the stops that it connects."""
    level = levels(chart)
    layers: list[list[Stop]] = [[] for _ in range(max(level.values(), default=0) + 1)]
    number = {name: chart.groups.index(group) if group else 0 for name, group in chart.group_of.items()}
    for name, label in chart.labels.items():
        layers[level[name]].append(Stop(name, number[name], len(label) * LETTER + 2 * PADDING))
    routes = []
    for upper, lower in chart.arrows:
        between = [f"{upper} {lower} {depth}" for depth in range(level[upper] + 1, level[lower])]
        for depth, name in enumerate(between, level[upper] + 1):
            layers[depth].append(Stop(name, number[upper], PASSAGE))
        routes.append([upper, *between, lower])
    return layers, routes


def placed(layers: list[list[Stop]], routes: Sequence[Sequence[str]]) -> dict[str, float]:
    """Where the middle of each stop is, from the left: near what it is connected with, without overlaps."""
    neighbours: dict[str, list[str]] = {stop.name: [] for layer in layers for stop in layer}
    for route in routes:
        for one, other in pairwise(route):
            neighbours[one].append(other)
            neighbours[other].append(one)
    middle = {stop.name: float(index) for layer in layers for index, stop in enumerate(layer)}
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = {
                stop.name: fmean([middle[n] for n in neighbours[stop.name]] or [middle[stop.name]])
                for stop in layer
            }
            layer.sort(key=lambda stop: (stop.group, wanted[stop.name]))
            middle |= spread(layer, wanted)
    left = min((middle[s.name] - s.width / 2 for layer in layers for s in layer), default=0.0)
    return {name: x - left + GAP for name, x in middle.items()}


def spread(layer: Sequence[Stop], wanted: Mapping[str, float]) -> dict[str, float]:
    """The wanted places, moved apart where stops would overlap, and back by what they moved on average."""
    found: dict[str, float] = {}
    edge = float("-inf")
    for stop in layer:
        found[stop.name] = max(wanted[stop.name], edge + GAP + stop.width / 2)
        edge = found[stop.name] + stop.width / 2
    moved = fmean(found[name] - wanted[name] for name in found) if found else 0.0
    return {name: x - moved for name, x in found.items()}


def svg(source: str) -> str:
    """A flowchart as an SVG element. Raises NotDrawn."""
    chart = parse(source)
    layers, routes = layered(chart)
    middle = placed(layers, routes)
    depth = {stop.name: index for index, layer in enumerate(layers) for stop in layer}
    top = {name: LAYER_HEIGHT * (index + (0.8 if chart.groups else 0.2)) for name, index in depth.items()}
    width = max((middle[s.name] + s.width / 2 for layer in layers for s in layer), default=0.0) + GAP
    height = max(top.values(), default=0.0) + BOX_HEIGHT + GAP
    parts = [
        f'<svg class="diagram" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width:{width:.0f}px">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    parts += [arrow(route, middle, top) for route in routes]
    x = GAP
    for index, group in enumerate(chart.groups):
        parts.append(box(group, x, 4.0, len(group) * LETTER + 2 * PADDING, kind=f"key group{index}"))
        x += len(group) * LETTER + 2 * PADDING + GAP
    for stop in (stop for layer in layers for stop in layer if stop.name in chart.labels):
        left = middle[stop.name] - stop.width / 2
        parts.append(
            box(chart.labels[stop.name], left, top[stop.name], stop.width, kind=f"group{stop.group}")
        )
    return "".join([*parts, "</svg>"])


def box(label: str, left: float, top: float, width: float, *, kind: str) -> str:
    """A box with its label."""
    middle, baseline = left + width / 2, top + 17.5
    return (
        f'<g class="{kind}"><rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BOX_HEIGHT:g}" '
        f'rx="4"/><text x="{middle:.1f}" y="{baseline:.1f}" text-anchor="middle">{escape(label)}</text></g>'
    )


def arrow(route: Sequence[str], middle: Mapping[str, float], top: Mapping[str, float]) -> str:
    """An arrow from below its first stop, straight down through its passages, to the top of its last."""
    first, *between, last = route
    points = [(middle[first], top[first] + BOX_HEIGHT)]
    for name in between:
        points += [(middle[name], top[name]), (middle[name], top[name] + BOX_HEIGHT)]
    points.append((middle[last], top[last]))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (y0 + y1) / 2
        path += f"C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'
