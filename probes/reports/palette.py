"""The colours of everything that is drawn, on light and on dark. Pure.

Hues after M. Okabe and K. Ito, "Color Universal Design" (2008); words, shapes or letters always say the same.
"""

# (on light, on dark). Plots are drawn in the light ones, which `svg.embed` finds again: each occurs once.
PALETTE = {
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
    return PALETTE[name][0]


def css_variables(*, dark: bool) -> str:
    """The colours as CSS custom properties."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in PALETTE.items())


GREY = "#8b97a5"  # of bars that stand for no part, on light and on dark
