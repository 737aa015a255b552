"""Who uses the processors of this machine while it loads a server: the client, the server, other programs.

Counters are read before and after a level, from /proc. A server's processes are those that listen on its
port on this machine, and what these have started. A program's name is the kernel's (`comm`), and a program
can choose it.
"""

import ipaddress
import math
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probes.core.codec import LARGEST
from probes.core.unknown import Unknown
from probes.hardware.sysfs import listed, read_text
from probes.throughput.served.results import Conditions, ProgramUse

NAMED = 3  # programs at most
LEAST = 0.05  # of a processor: what uses less isn't named
METRIC = "process_cpu_seconds_total"  # what Prometheus' client libraries call it
# listen for others, so that their time isn't the server's
FORWARDERS = frozenset(
    {"docker-proxy", "rootlessport", "rootlesskit", "slirp4netns", "pasta", "nginx", "haproxy", "envoy",
     "traefik", "caddy", "ssh", "kubectl"}
)  # fmt: skip
_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENING = "0A"  # TCP_LISTEN, Linux' include/net/tcp_states.h
_METRIC_LINE = re.compile(rf"^{METRIC}(?:\{{[^}}]*\}})? ([0-9.eE+-]{{1,40}})(?: [0-9-]+)?$", re.MULTILINE)


@dataclass(frozen=True)
class Process:
    """One process at one moment. `started` tells it from another one of the same number."""

    pid: int
    started: int
    parent: int
    name: str
    cpu_s: float


@dataclass(frozen=True)
class Snapshot:
    """All counters at one moment, in processor seconds."""

    at_s: float
    used_s: float | Unknown  # by programs and the kernel for them
    stolen_s: float
    client_s: float
    processes: Mapping[int, Process]
    serving: frozenset[int] | Unknown | None  # the server's processes; None: it is on another machine
    reported_s: float | Unknown  # by the server's /metrics


def is_own_address(address: str) -> bool | Unknown:
    """Whether an address is one of this machine's: the kernel lets a socket be bound to those only."""
    try:
        if ipaddress.ip_address(address).is_loopback:
            return True
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except ValueError:
        return Unknown("its address can't be read")
    except OSError:
        return False
    return True


def reported_cpu_s(metrics: bytes) -> float | Unknown:
    """The processor seconds that a server's metrics tell, of all its processes there."""
    found = _METRIC_LINE.findall(metrics.decode(errors="replace"))
    if not found:
        return Unknown(f"its /metrics has no {METRIC}")
    try:
        total = sum(map(float, found))
    except ValueError:
        total = math.inf
    return total if 0 <= total <= LARGEST else Unknown(f"its /metrics has no such figure for {METRIC}")


def snapshot(root: Path, reported_s: float | Unknown, *, port: int | None) -> Snapshot:
    """The counters now. `port`: of a server on this machine; None where it is on another."""
    used = _used_s(root)
    processes = {one.pid: one for one in map(_process, _places(root)) if one}
    serving = None if port is None else _serving(root, port, processes)
    return Snapshot(
        time.monotonic(),
        used if isinstance(used, Unknown) else used[0],
        0.0 if isinstance(used, Unknown) else used[1],
        time.process_time(),
        processes,
        serving,
        reported_s,
    )


def _used_s(root: Path) -> tuple[float, float] | Unknown:
    """User, nice and system time, and stolen time, of proc(5)'s first line of /proc/stat."""
    text = read_text(root / "proc/stat")
    if isinstance(text, Unknown):
        return text
    match = re.match(r"cpu +((?:\d+ ?)+)", text)
    if not match:
        return Unknown("no processor times in /proc/stat")
    user, nice, system, _idle, _iowait, _irq, _softirq, stolen, *_ = [*map(int, match[1].split()), *[0] * 8]
    return (user + nice + system) / _TICKS, stolen / _TICKS


def _places(root: Path) -> list[Path]:
    return [place for place in listed(root / "proc") if place.name.isdecimal()]


def _process(place: Path) -> Process | None:
    text = read_text(place / "stat")
    if isinstance(text, Unknown):
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    # of proc(5)'s fields those 4, 14, 15 and 22; the first two are before the bracket
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    return Process(int(place.name), int(fields[19]), int(fields[1]), head.partition("(")[2], cpu_s)


def _serving(root: Path, port: int, processes: Mapping[int, Process]) -> frozenset[int] | Unknown:
    """The processes that hold a socket which listens on this port, and their descendants."""
    sockets = {f"socket:[{inode}]" for inode in _listening(root, port)}
    if not sockets:
        return Unknown("no process is seen to listen on its port; it may be in a container")
    found = {pid for pid in processes if _holds(root / f"proc/{pid}/fd", sockets)}
    if not found:
        return Unknown("the process that listens on its port belongs to another user")
    passing = sorted({processes[pid].name for pid in found} & FORWARDERS)
    if passing:
        return Unknown(f"{passing[0]} passes its port on")
    while more := {one.pid for one in processes.values() if one.parent in found} - found:
        found |= more
    return frozenset(found - {os.getpid()})


def _listening(root: Path, port: int) -> list[str]:
    """The inodes of sockets that listen on a port, in /proc/net/tcp and tcp6."""
    inodes = []
    for table in ("tcp", "tcp6"):
        text = read_text(root / "proc/net" / table)
        for line in [] if isinstance(text, Unknown) else text.splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTENING and words[1].endswith(f":{port:04X}"):
                inodes.append(words[9])
    return inodes


def _holds(folder: Path, sockets: set[str]) -> bool:
    for descriptor in listed(folder):
        try:
            if str(descriptor.readlink()) in sockets:
                return True
        except OSError:
            continue
    return False


def between(before: Snapshot, after: Snapshot, *, cpus: int) -> Conditions | Unknown:
    """Who used the processors between two moments."""
    seconds = after.at_s - before.at_s
    if isinstance(before.used_s, Unknown) or isinstance(after.used_s, Unknown):
        return before.used_s if isinstance(before.used_s, Unknown) else Unknown("/proc/stat vanished")
    if seconds <= 0:
        return Unknown("no time passed")
    used = _used_by_process(before, after)
    reported = _reported(before, after)
    here = _of_server(after, used)
    used_s, client_s = after.used_s - before.used_s, after.client_s - before.client_s
    server_s, by = (reported, METRIC) if isinstance(reported, float) else (here, "its processes here")
    taken: float | Unknown = 0.0
    if after.serving is not None:  # the larger one, as a server's metric may be that of one of its processes
        known = [one for one in (here, reported) if isinstance(one, float)]
        taken = max(known) if known else Unknown(f"the server's can't be told from theirs: {_reason(here)}")
    other = taken if isinstance(taken, Unknown) else max(used_s - client_s - taken, 0.0) / seconds
    both = Unknown(f"{_reason(reported)}; {_reason(here)}")
    return Conditions(
        cpus=cpus,
        used_cpus=round(max(used_s, 0.0) / seconds, 3),
        client_cpus=round(client_s / seconds, 3),
        server_cpus=round(server_s / seconds, 3) if isinstance(server_s, float) else both,
        server_by=by if isinstance(server_s, float) else "",
        other_cpus=round(other, 3) if isinstance(other, float) else other,
        stolen_cpus=round(max(after.stolen_s - before.stolen_s, 0.0) / seconds, 3),
        others=_named(after, used, seconds),
    )


def _reason(value: object) -> str:
    return value.reason if isinstance(value, Unknown) else ""


def _used_by_process(before: Snapshot, after: Snapshot) -> dict[int, float]:
    """Seconds of each process that is there at the end; one that began meanwhile has all of its time."""
    used = {}
    for pid, process in after.processes.items():
        then = before.processes.get(pid)
        same = then is not None and then.started == process.started
        used[pid] = process.cpu_s - (then.cpu_s if then and same else 0.0)
    return used


def _reported(before: Snapshot, after: Snapshot) -> float | Unknown:
    if isinstance(before.reported_s, Unknown):
        return before.reported_s
    if isinstance(after.reported_s, Unknown):
        return after.reported_s
    if after.reported_s < before.reported_s:
        return Unknown(f"its {METRIC} went back: several processes, or a restart")
    return after.reported_s - before.reported_s


def _of_server(after: Snapshot, used: Mapping[int, float]) -> float | Unknown:
    if after.serving is None:
        return Unknown("it runs on another machine")
    if isinstance(after.serving, Unknown):
        return after.serving
    return sum((used.get(pid, 0.0) for pid in after.serving), 0.0)


def _named(after: Snapshot, used: Mapping[int, float], seconds: float) -> tuple[ProgramUse, ...]:
    serving = after.serving if isinstance(after.serving, frozenset) else frozenset()
    by_name: dict[str, float] = defaultdict(float)
    for pid, cpu_s in used.items():
        if pid != os.getpid() and pid not in serving:
            by_name[after.processes[pid].name] += cpu_s / seconds
    most = sorted(by_name.items(), key=lambda item: -item[1])[:NAMED]
    return tuple(ProgramUse(name, round(cpus, 3)) for name, cpus in most if cpus >= LEAST)
