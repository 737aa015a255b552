"""The TLS front's bars: half headers, half handshakes, slow bodies and wrong keys beside good callers.

`make bench-front`: this machine's nginx with compose/nginx.conf, on the loopback; no engine and no image.
Each attacker has one address. Good callers have others; what becomes of those at an attacker's is shown.
"""

import argparse
import socket
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from board import Board, tell
from service_front import HALF_HANDSHAKE, HALF_HEAD, SLOW_BODY, Front, asked_on, attack, front

ATTACKS = {  # name -> (the attacker's address, what a connection sends, how many, whether with TLS)
    "half-headers": ("127.0.2.1", HALF_HEAD, 2400, True),
    "half-handshakes": ("127.0.2.2", HALF_HANDSHAKE, 2400, False),
    "slow-bodies": ("127.0.2.3", SLOW_BODY, 200, True),
}
PROBES = 100
PROBE_S = 5.0  # what compose gives a health check


def probe(made: Front, source: str) -> bool:
    """Whether a caller without a connection is answered in time."""
    try:
        return made.ask("/v2/health/live", key="", source=source, timeout_s=PROBE_S) == 200
    except OSError:
        return False


def answered(wire: socket.socket) -> bool:
    """Whether a caller with an open connection is answered."""
    try:
        return asked_on(wire, "/predict") == 200
    except OSError:
        return False


def attacked(board: Board, made: Front, names: tuple[str, ...], seconds: float) -> None:
    """Probes from ten addresses, spread over the time in which these attacks go on."""
    title = names[0] if len(names) == 1 else "together"
    tell(title)
    lines = len(made.log)
    until_s = time.monotonic() + seconds
    with (
        made.secure("127.0.1.100") as kept,
        ProcessPoolExecutor(len(names), mp_context=get_context("spawn")) as pool,
    ):
        before = answered(kept)  # from then on nginx keeps it open between requests
        running = [
            pool.submit(attack, made, source, first, count, tls=tls, until_s=until_s)
            for source, first, count, tls in (ATTACKS[name] for name in names)
        ]
        time.sleep(seconds / 4)  # until they are all there
        pause_s = seconds / 2 / PROBES
        failed = sum(_after(pause_s, made, f"127.0.1.{1 + at % 10}") for at in range(PROBES))
        same = sum(not probe(made, ATTACKS[names[0]][0]) for _ in range(10))
        kept_on = before and answered(kept)
        closed = sum(each.result() for each in running)
    board.bar(f"{title}-probes", failed, 0, f"of {PROBES} failed", connections_closed=closed)
    board.bar(f"{title}-kept", int(not kept_on), 0, "callers failed who were connected before")
    board.bar(f"{title}-log", len(made.log) - lines, 100, "lines")
    board.figure(f"{title}-same-address", same, f"of 10 probes from the address of {names[0]} failed")


def _after(pause_s: float, made: Front, source: str) -> bool:
    """Whether a probe failed that came after a pause."""
    time.sleep(pause_s)
    return not probe(made, source)


def wrong_keys(board: Board, made: Front, seconds: float) -> None:
    """As fast as one address can, on one connection, once its burst is spent."""
    tell("wrong keys")
    with made.secure("127.0.2.4") as wire:
        for _ in range(150):
            asked_on(wire, "/predict", key="wrong")
        begun, n_answers = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            asked_on(wire, "/predict", key="wrong")
            n_answers += 1
        rate = n_answers / (time.monotonic() - begun)
    board.bar("wrong-keys", rate, 55, "answers a second to one address; 50 are promised")


def main() -> int:
    """Each attack by itself, and all together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25, help="of one attack")
    args = parser.parse_args()
    board = Board(whole=args.seconds >= 25)
    with TemporaryDirectory() as folder, front(Path(folder)) as made:
        for names in (*((name,) for name in ATTACKS), tuple(ATTACKS)):
            attacked(board, made, names, args.seconds)
        wrong_keys(board, made, args.seconds / 5)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
