"""The throughput scan's bars, as far as a CPU can show them; those of a GPU are tests/device/run_scan.sh's.

Run by `make bench-scan`, in the environment that has torch. Prints one JSON line a bar; exit code 1 where one
is missed.
"""

import argparse
import sys
from collections.abc import Callable

import scan_direct
import scan_served
from board import Board, tell

GROUPS: dict[str, Callable[[Board], None]] = {
    "knee": scan_direct.knees,
    "loop": scan_direct.against_a_bare_loop,
    "errors": scan_direct.errors,
    "saturation": scan_direct.saturated,
    "cpu": scan_direct.this_cpu,
    "md1": scan_served.exact_queue,
    "omission": scan_served.omission,
}


def main() -> int:
    """Run all groups, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], metavar="GROUP", help=", ".join(GROUPS))
    args = parser.parse_args()
    board = Board(whole=not args.groups)
    for name in args.groups or GROUPS:
        tell(f"{name} ...")
        GROUPS[name](board)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())
