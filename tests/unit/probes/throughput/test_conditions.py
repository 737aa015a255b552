"""Who used the processors: counters of a made /proc, and of a server's metrics."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from probes.core.unknown import Unknown
from probes.throughput.served import conditions
from probes.throughput.served.conditions import Snapshot, between, reported_cpu_s, snapshot
from probes.throughput.served.results import Conditions, ProgramUse

TICKS = os.sysconf("SC_CLK_TCK")
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0"


def machine(
    root: Path, *, used_s: float, processes: dict[int, tuple[str, int, float]], stolen_s: float = 0
) -> Path:
    """/proc of a machine: user time, processes by number (name, parent, seconds); 7001 serves port 8000."""
    net = root / "proc/net"
    net.mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text(
        f"cpu  {used_s * TICKS:.0f} 0 0 999 0 50000 50000 {stolen_s * TICKS:.0f} 0 0\n"
    )
    (net / "tcp").write_text(
        HEAD
        + f"   0: 0100007F:1F40 00000000:0000 0A {REST} 4242 1\n"
        + f"   1: 0100007F:1F40 0100007F:9999 01 {REST} 4243 1\n"
    )
    for pid, (name, parent, cpu_s) in processes.items():
        place = root / f"proc/{pid}"
        (place / "fd").mkdir(parents=True, exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, f"{cpu_s * TICKS:.0f}", "0", *["0"] * 6, "77", "0"]
        (place / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    link = root / "proc/7001/fd/5"
    if 7001 in processes and not link.is_symlink():
        link.symlink_to("socket:[4242]")
    return root


BEFORE = {
    7001: ("server", 1, 10.0),
    7002: ("worker", 7001, 5.0),
    8001: ("make", 1, 1.0),
    8002: ("cc) (x", 1, 0.0),
}
AFTER = {
    7001: ("server", 1, 12.0),
    7002: ("worker", 7001, 9.0),
    8001: ("make", 1, 7.0),
    8002: ("cc) (x", 1, 3.0),
}
NO_METRICS = Unknown("its /metrics: status 404")


def two(
    tmp_path: Path,
    *,
    port: int | None = 8000,
    reported: tuple[float | Unknown, ...] = (NO_METRICS, NO_METRICS),
) -> tuple[Snapshot, Snapshot]:
    """Two moments, ten seconds apart, between which the client used a second."""
    first = snapshot(machine(tmp_path, used_s=100, processes=BEFORE), reported[0], port=port)
    last = snapshot(machine(tmp_path, used_s=116, stolen_s=2, processes=AFTER), reported[1], port=port)
    return replace(first, at_s=50.0, client_s=1.0), replace(last, at_s=60.0, client_s=2.0)


def found(before: Snapshot, after: Snapshot) -> Conditions:
    conditions_found = between(before, after, cpus=2)
    assert isinstance(conditions_found, Conditions)
    return conditions_found


def test_other_programs_are_what_neither_client_nor_server_used(tmp_path: Path) -> None:
    seen = found(*two(tmp_path))
    assert (seen.server_cpus, seen.server_by) == (0.6, "its processes here")  # 2 + 4 s, its worker too
    assert (seen.client_cpus, seen.other_cpus, seen.stolen_cpus) == (0.1, 0.9, 0.2)
    assert seen.used_cpus == 1.6
    assert seen.others == (ProgramUse("make", 0.6), ProgramUse("cc) (x", 0.3))


def test_a_server_elsewhere_is_no_part_of_this_machines_programs(tmp_path: Path) -> None:
    seen = found(*two(tmp_path, port=None))
    assert seen.other_cpus == 1.5
    assert seen.server_cpus == Unknown("its /metrics: status 404; it runs on another machine")


def test_a_server_that_tells_its_time_is_believed(tmp_path: Path) -> None:
    seen = found(*two(tmp_path, reported=(20.0, 28.0)))
    assert (seen.server_cpus, seen.server_by) == (0.8, "process_cpu_seconds_total")
    assert seen.other_cpus == 0.7
    away = found(*two(tmp_path, port=None, reported=(20.0, 39.0)))
    assert (away.server_cpus, away.other_cpus) == (1.9, 1.5)


def test_a_metric_that_goes_back_is_unknown(tmp_path: Path) -> None:
    seen = found(*two(tmp_path, port=None, reported=(20.0, 3.0)))
    assert isinstance(seen.server_cpus, Unknown)
    assert "went back" in seen.server_cpus.reason


def test_a_server_behind_a_forwarder_is_not_taken_for_the_forwarder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "FORWARDERS", {"server"})
    seen = found(*two(tmp_path))
    assert seen.other_cpus == Unknown("the server's can't be told from theirs: server passes its port on")
    with_metrics = found(*two(tmp_path, reported=(20.0, 28.0)))
    assert with_metrics.other_cpus == 0.7


def test_a_port_that_nobody_is_seen_to_listen_on_is_unknown(tmp_path: Path) -> None:
    seen = found(*two(tmp_path, port=9))
    assert isinstance(seen.other_cpus, Unknown)
    assert "no process is seen to listen on its port" in seen.other_cpus.reason


def test_another_process_of_the_same_number_has_all_of_its_own_time(tmp_path: Path) -> None:
    before, after = two(tmp_path)
    other = replace(before.processes[8001], started=1)
    seen = found(replace(before, processes={**before.processes, 8001: other}), after)
    assert seen.others[0] == ProgramUse("make", 0.7)


def test_a_machine_without_counters_is_unknown(tmp_path: Path) -> None:
    nothing = snapshot(tmp_path, NO_METRICS, port=None)
    assert between(nothing, nothing, cpus=2) == Unknown("no stat here")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 12.5\n", 12.5),
        (b'process_cpu_seconds_total{pid="1"} 1e1\nprocess_cpu_seconds_total{pid="2"} 2 1700000\n', 12.0),
        (b"process_cpu_seconds_total_of_others 3\n", None),
        (b"process_cpu_seconds_total 1-1\n", None),
        (b"process_cpu_seconds_total 1e999\n", None),
        (b"\xff\x00{}", None),
    ],
)
def test_metrics_may_hold_anything(text: bytes, seconds: float | None) -> None:
    told = reported_cpu_s(text)
    assert isinstance(told, Unknown) if seconds is None else told == seconds
