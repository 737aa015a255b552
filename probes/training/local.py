"""Runs on this machine: torchrun starts the ranks, and a watch beside it samples the cards."""

import os
import socket
from pathlib import Path
from typing import Final

from probes.core import files
from probes.core.errors import ProbeError
from probes.measure.supervisor import module_words
from probes.training.report import Run, Settings, run_in, words_of
from probes.watch.watcher import Watch, WatchOptions

INTERVAL_S: Final = 0.25
MOST_LOG: Final = 1 << 20
TAIL: Final = 6  # lines of what the ranks printed that an error shows
# However this process ends, torchrun ends with it, and each rank with torchrun, whose id it has to compare:
# torchrun may be gone before the rank asks. Linux looks at the thread that starts them, the main one in both.
_DIES: Final = "from probes.measure.worker import die_with; die_with({parent})"
_TORCHRUN_FIRST: Final = f"{_DIES}; os.environ['WEIR_TORCHRUN'] = str(os.getpid())"
_RANK_FIRST: Final = _DIES.format(parent="int(os.environ.pop('WEIR_TORCHRUN'))")


def run_here(
    settings: Settings, world: int, folder: Path, *, repetition: int = 1, more: tuple[str, ...] = ()
) -> Run:
    """One run of `world` processes into an empty folder; `more` are further words for the worker.

    Whatever becomes of the ranks is in the run. Raises ProbeError where none of them reported, ReportError
    where the folder can't be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    words = [
        *("sh", "-c", 'exec "$@" >"$0" 2>&1', str(log)),  # what libraries print belongs to no table
        *module_words("torch.distributed.run", first=_TORCHRUN_FIRST.format(parent=os.getpid())),
        # its own store on a free port of this host; a name of the host may lead elsewhere
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(world), "--no-python"),
        *module_words("probes.training.worker", first=_RANK_FIRST),
        *words_of(settings),
        *("--out", str(folder), "--repetition", str(repetition)),
        *more,
    ]
    watch = Watch(
        WatchOptions(
            interval_s=INTERVAL_S,
            longest_s=None,
            command=tuple(words),
            jsonl=folder / f"watch-{socket.gethostname()}.jsonl",
            csv=None,
            listen=None,
            plain=True,
            torch_allocator=False,
        )
    )
    watch.run()
    if not any(folder.glob("rank-*.json")):
        raise ProbeError(f"the ranks ended without a report; the last they printed:\n  {_tail(log)}")
    return run_in(folder)


def threads_each(processes: int) -> int:
    """Threads of each rank on a CPU, the same for all numbers of processes up to this one."""
    return max(len(os.sched_getaffinity(0)) // processes, 1)


def _tail(log: Path) -> str:
    """The last lines of the ranks' output."""
    try:
        text = files.read_text(log, most_bytes=MOST_LOG)
    except (OSError, UnicodeDecodeError):
        return "(it can't be read)"
    return "\n  ".join([line for line in text.splitlines() if line.strip()][-TAIL:]) or "(nothing)"
