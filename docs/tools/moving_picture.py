"""Draws README's moving picture: real commands with their real output, and the map of an image.

Run after `make images`, in the repository root: `.venv/bin/python docs/tools/moving_picture.py`. It types
the commands of SCENES, keeps the first lines of what each prints, and writes docs/first-minute.svg. That
moves by CSS alone, and stands still for readers who asked their system for less motion.
"""

import base64
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PICTURE: Final = ROOT / "docs" / "first-minute.svg"
MAP: Final = ROOT / "docs" / "map-of-rocm.png"
SCENES: Final = (  # a command, and how the first line of its output that is shown begins
    ("weir audit weir/rocm:latest", ""),
    ("weir doctor --card 'WX 4100'", "card: "),
    ("weir fits qwen2.5-3b 'RX 7900 XTX'", ""),
)
ROWS: Final = 13  # lines that a scene shows
SECONDS: Final = 7  # that each scene is shown
WIDTH, HEIGHT = 960, 330  # pixels
COLUMNS: Final = 108  # characters of a line; a longer one is wrapped
LINE: Final = 19  # pixels from line to line
ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Scene:
    """A command and the lines that it printed."""

    command: str
    lines: tuple[str, ...]


def run(command: str, begin: str) -> Scene:
    """The scene of a command. Raises CalledProcessError where it fails in another way than by its answer."""
    program = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "110"}
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, 1):  # 1: the answer is no
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    lines = [line for line in ESCAPES.sub("", done.stdout).splitlines() if line.strip()]
    first = next(number for number, line in enumerate(lines) if line.startswith(begin))
    shown = [row for line in lines[first:] for row in wrap(line, COLUMNS, subsequent_indent="    ")]
    return Scene(command, tuple(shown[:ROWS]))


def draw(scenes: tuple[Scene, ...], picture: bytes) -> str:
    """The SVG: one group for each scene, and last the picture (a PNG), shown in turns for ever."""
    count = len(scenes) + 1
    shown = 100 / count
    style = (
        ".scene{opacity:0;animation:turn "
        f"{count * SECONDS}s infinite}}"
        f"@keyframes turn{{0%,{shown - 1:.1f}%{{opacity:1}}{shown:.1f}%,100%{{opacity:0}}}}"
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d8dee9;white-space:pre}"
        ".typed{fill:#a3be8c}"
        "@media (prefers-reduced-motion:reduce){.scene{animation:none}.scene:first-of-type{opacity:1}}"
    )
    groups = [_group(number, _text(scene)) for number, scene in enumerate(scenes)]
    data = base64.b64encode(picture).decode()
    image = f'<image href="data:image/png;base64,{data}" x="0" y="0" width="{WIDTH}" height="{HEIGHT}"/>'
    groups.append(_group(len(scenes), image))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape('; '.join(scene.command for scene in scenes))}</title><style>{style}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#14191f"/>{"".join(groups)}</svg>\n'
    )


def _group(number: int, content: str) -> str:
    return f'<g class="scene" style="animation-delay:{number * SECONDS}s">{content}</g>'


def _text(scene: Scene) -> str:
    rows = [f'<text class="typed" x="18" y="{LINE + 12}">$ {escape(scene.command)}</text>']
    rows += [
        f'<text x="18" y="{(number + 2) * LINE + 18}">{escape(line)}</text>'
        for number, line in enumerate(scene.lines)
    ]
    return "".join(rows)


def main() -> None:
    """Type the commands, draw, write."""
    PICTURE.write_text(draw(tuple(run(*scene) for scene in SCENES), MAP.read_bytes()), encoding="utf-8")


if __name__ == "__main__":
    main()
