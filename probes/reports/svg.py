"""Makes an SVG from matplotlib fit into a page: colours become variables, ids unique; it gets a name.

Knows what matplotlib writes and nothing of matplotlib. Pure.
"""

import re

from probes.core.quoting import html
from probes.reports.palette import PALETTE

HALO = "halo"  # the id that words on top of lines are given; it becomes a class


def embed(svg: str, *, name: str, title: str, description: str) -> str:
    """The SVG element alone, for a page that may hold several; `name` is part of every id."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = body.replace(f'id="{HALO}"', f'class="{HALO}"')
    body = _own_ids(body, name)
    for colour, (drawn, _) in PALETTE.items():
        body = re.sub(drawn, f"var(--{colour})", body, flags=re.IGNORECASE)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)  # would rule the page
    body = re.sub(r" ?font-family: [^;\"]*;?", "", body)  # the page's
    start, rest = body.split(">", 1)
    start = re.sub(r' (width|height)="[^"]*"', "", start)
    labels = f'role="img" aria-labelledby="{name}-title {name}-description"'
    return (
        f'{start} {labels}><title id="{name}-title">{html(title)}</title>'
        f'<desc id="{name}-description">{html(description)}</desc>{rest.rstrip()}'
    )


def _own_ids(body: str, name: str) -> str:
    """Ids that something refers to get the name in front, the others go: two plots would share them."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda f: f' id="{name}-{f[1]}"' if f[1] in used else "", body)
    return re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", body)
