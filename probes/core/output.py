"""Standard output and error of both programs, which write through this module alone.

`echo` and `write` go to standard output, `error`, `progress` and `redraw` to standard error. All but `write`
quote control characters: names and messages come from images, trees and drivers.

`paint` is the one place that writes colours; it leaves text alone unless standard output is a terminal
that can show them.

A reader that goes away (`| head`) wants no more: what follows is dropped, and the exit code stays the verb's.
A full disk or a closed descriptor raises `OutputLost`. Characters that the stream's encoding lacks are
written as escapes.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeAlias

from probes.core.quoting import command, log_text
from probes.core.spelling import close_names

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_OUT, _ERR = 1, 2
_LAYOUT = "\n\t"  # what programs use for layout
_CLEAR_LINE = "\r\x1b[K"
_USUAL_COLUMNS = 80


class Style(Enum):
    """How words stand out on a terminal: parameters of ECMA-48's SGR."""

    HEADING = "1"  # bold
    BAD = "1;31"  # red
    NOTABLE = "33"  # yellow
    GOOD = "32"  # green


Paint: TypeAlias = Callable[[str, Style], str]


class OutputLost(Exception):
    """Standard output doesn't take what is written to it. The message is the system's reason."""


class _Descriptor(io.RawIOBase):
    """Writes to a file descriptor until that fails, and drops everything after that."""

    def __init__(self, number: int, *, must_arrive: bool) -> None:
        super().__init__()
        self._number = number
        self._must_arrive = must_arrive
        self._dropping = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write some of the data; returns how many bytes. Raises OutputLost, once."""
        n_bytes = memoryview(data).nbytes
        if self._dropping:
            return n_bytes
        try:
            return os.write(self._number, data)
        except OSError as error:
            self._dropping = True
            if self._must_arrive and not isinstance(error, BrokenPipeError):
                raise OutputLost(error.strerror or str(error)) from error
            return n_bytes


class Parser(argparse.ArgumentParser):
    """An argument parser for text that somebody else may have chosen: a shell's `*`, a script's variable.

    It repeats arguments without their control characters, and refuses empty ones: `--tag "$TAG"` with an
    unset variable asks for something, and must not pass for an argument that wasn't given. An option's name
    has to be whole: a script that shortens it would break with the next option that begins alike.

    For a choice or an option that isn't there it names those that are spelt alike. `elsewhere` says what
    other commands do, by the word that somebody may have typed here for one: `fit` is `weir probe fit`.

    `behind` names the argument that is everything behind the first `--`, wherever options stand before it:
    argparse would give that to the first positional argument, and refuse it where that has been given.
    """

    behind = ""

    elsewhere: Callable[[], Mapping[str, str]] = staticmethod(dict)
    # the arguments as they were probably meant, of those given and those of them that aren't known; or none
    meant: Callable[[Sequence[str], Sequence[str]], Sequence[str]] = staticmethod(lambda _given, _unknown: ())

    def __init__(self, **how: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(allow_abbrev=False, **how)

    def parse_known_args(  # type: ignore[override]  # argparse's own overloads say less
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """A verb's parser refuses what it doesn't know itself; argparse would leave that to the program's."""
        given = list(sys.argv[1:] if args is None else args)
        at = given.index("--") if self.behind and "--" in given else len(given)
        parsed, unknown = super().parse_known_args(given[:at], namespace)
        if self.behind:
            setattr(parsed, self.behind, given[at + 1 :])
        if unknown:
            if meant := self.meant(given, unknown):
                self.error(
                    f"unrecognized arguments: {' '.join(unknown)}", then=command(*self.prog.split(), *meant)
                )
            options = [word.split("=")[0] for word in unknown if word.startswith("-")]
            close = close_names(options[0], self._option_string_actions) if options else []
            guess = f"; did you mean {' or '.join(close)}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{guess}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 - argparse's own
        """Refuse what isn't one of the choices, which argparse asks for before it keeps a value."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as refused:
            others = self.elsewhere()
            known = {str(choice): str(choice) for choice in action.choices or ()}
            meant = [others.get(name, name) for name in close_names(str(value), {**others, **known})]
            guess = f"; did you mean {' or '.join(meant)}?" if meant else ""
            raise argparse.ArgumentError(action, f"{refused.message}{guess}") from refused

    def error(self, message: str, *, then: str = "") -> NoReturn:
        """The usage, the message and what to type next, on standard error, and exit code 2."""
        meant = f"  did you mean: {log_text(then)}\n" if then else ""
        super().error(f"{log_text(message)}\n{meant}  see: {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> object:
        """One value of an argument, which argparse asks for before it converts it."""
        theirs = (argparse.PARSER, argparse.REMAINDER)  # of a subcommand's own parser, or of another program
        if not arg_string and action.nargs not in theirs:
            name = action.option_strings[-1] if action.option_strings else ""
            shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            way_out = f"write `{name} {shown}`, or leave {name} out" if name else f"write {shown}"
            raise argparse.ArgumentError(action, f"its value is empty; {way_out}")
        return super()._get_value(action, arg_string)


def flag(to: argparse._ActionsContainer, name: str, what: str) -> None:
    """Add an option without a value: true where it is given."""
    to.add_argument(name, action="store_true", help=what)


def option(
    to: argparse._ActionsContainer,
    name: str,
    metavar: str,
    what: str,
    read: Callable[[str], object] = str,
    *,
    default: object = None,
) -> None:
    """Add an option with a value. Its help ends with the default; where that is None, `what` says it."""
    end = "" if default is None else " (default: %(default)s)"
    to.add_argument(name, metavar=metavar, help=f"{what}{end}", type=read, default=default)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Returns what reads a whole number within these bounds, or raises argparse.ArgumentTypeError."""

    def read(text: str) -> int:
        is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
        if not (is_short and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return int(text)

    return read


def echo(text: str) -> None:
    """Print lines of text on standard output."""
    print(log_text(text, keep=_LAYOUT), flush=True)


def error(text: str) -> None:
    """Print lines of text on standard error: errors, warnings, notes."""
    print(log_text(text, keep=_LAYOUT), file=sys.stderr, flush=True)


def error_from_handler(text: str) -> None:
    """`error` from a signal handler, where the stream may be in the middle of a write."""
    with contextlib.suppress(OSError):
        os.write(_ERR, f"{log_text(text)}\n".encode("ascii", "backslashreplace"))


def progress(line: str) -> None:
    """Print one line of progress on standard error; a line break in it is quoted."""
    print(log_text(line), file=sys.stderr, flush=True)


def redraw(line: str) -> None:
    """Replace the line of progress on a terminal; an empty one removes it.

    It is cut to the terminal's width: only the last row of a line that goes over several can be cleared.
    """
    sys.stderr.write(_CLEAR_LINE + log_text(line)[: max(_columns() - 1, 0)])
    sys.stderr.flush()


def can_redraw(*, output: bool = False) -> bool:
    """Whether standard error, or standard output, is a terminal that knows more than printing."""
    return (sys.stdout if output else sys.stderr).isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, style: Style) -> str:
    """The text in a style, where standard output shows colours: not in pipes, with NO_COLOR or TERM=dumb.

    The text must be quoted already.
    """
    if not text or os.environ.get("NO_COLOR") or not can_redraw(output=True):
        return text
    return f"\x1b[{style.value}m{text}\x1b[0m"


def plain(text: str, _style: Style) -> str:
    """The text as it is: what stands for `paint` in files."""
    return text


def _columns() -> int:
    try:
        return os.get_terminal_size(_ERR).columns or _USUAL_COLUMNS  # 0: a terminal that doesn't know
    except OSError:
        return _USUAL_COLUMNS


def write(document: str) -> None:
    """Write a document (JSON, Markdown) to standard output as it is; it must be quoted for its format."""
    sys.stdout.write(document)


def flush() -> None:
    """Write out what the streams hold back, where the process then ends without Python's own end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def harden() -> None:
    """Replace standard output and error by streams that fail as this module says.

    Call once, at the start of a process. A closed descriptor is occupied first, so that no file that is
    opened later gets its number and with it the output.
    """
    descriptor = os.open(os.devnull, os.O_RDONLY)
    while descriptor <= _ERR:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 - for the process's life
    sys.stdout = _stream(_OUT, sys.stdout, must_arrive=True)
    sys.stderr = _stream(_ERR, sys.stderr, must_arrive=False)


def _stream(number: int, old: TextIO | None, *, must_arrive: bool) -> TextIO:
    encoding = old.encoding if old else "utf-8"
    raw = _Descriptor(number, must_arrive=must_arrive)
    at_once = raw.isatty() or not must_arrive
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=at_once
    )
