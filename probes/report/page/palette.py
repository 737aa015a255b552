"""Colours of page and plots, by name, for light and dark; chosen to be distinguishable with colour blindness.

Pure.

Hues after M. Okabe and K. Ito, "Color Universal Design" (2008), darkened or lightened to a contrast of at
least 3 : 1 on their background (WCAG 2.2, 1.4.11). No plot relies on colour alone: shapes and words carry the
same information.
"""

# name -> (on light, on dark). The plots are drawn in the light ones, each of which occurs once.
COLOURS = {
    "ink": ("#1b2330", "#e6eaf0"),
    "muted": ("#5a6675", "#a3aebc"),
    "grid": ("#dde2e9", "#333d4b"),
    "paper": ("#fefefe", "#12171f"),
    "panel": ("#f4f6f9", "#1a212c"),
    "blue": ("#0069a8", "#62b0ea"),
    "vermillion": ("#c14a00", "#f4884a"),
    "green": ("#007a58", "#3cc79e"),
    "purple": ("#a8487f", "#dd92c0"),
    "amber": ("#8f6400", "#e3b341"),
}


def light(name: str) -> str:
    """The colour that a plot is drawn in."""
    return COLOURS[name][0]


def css_variables(*, dark: bool) -> str:
    """The colours as CSS custom properties."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())
