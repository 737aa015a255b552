"""The served scan over real sockets: a queue that is known, servers that misbehave, and Ctrl-C."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median

import pytest
from waiting import PATIENCE_S, free_ports

from probes.core.errors import Exit
from probes.throughput.report import named_scan
from probes.throughput.served.http import resolve
from probes.throughput.served.level import Load

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

import scan_served  # noqa: E402

QUICK = ("--quick-load", "--most-callers", "2", "--rate", "20", "--timeout-s", str(PATIENCE_S))
OUTPUTS = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1,2],"data":[0.5,0.25]}]}'
EMPTY = b'{"outputs":[]}'
MODEL = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]}
TRIES = 3  # a machine busy with other things delays both sides


def scan(port: int, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = _command(port, folder, *words)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=ROOT)


def _command(port: int, folder: Path, *words: str) -> list[str]:
    url = f"http://127.0.0.1:{port}/v2/models/m/infer"
    return [sys.executable, "-m", "probes", "throughput", "--url", url, "--out", str(folder), *QUICK, *words]


def saved(folder: Path):
    return named_scan(next(folder.glob("*.json")))[0].served


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@contextmanager
def server(
    infer: Callable[[socket.socket, int], bool], host: str = "127.0.0.1", *, metrics: bool = False
) -> Iterator[int]:
    """A server whose answer to the n-th inference is what `infer` does; false: it closes the connection.

    `metrics`: it tells its processor time, that of this process.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    numbers = iter(range(1 << 30))
    open_ones: list[socket.socket] = []

    def one(line: socket.socket) -> None:
        with line, suppress(OSError):
            while head := _request(line):
                if metrics and head.startswith(b"GET /metrics "):
                    line.sendall(answer(b"process_cpu_seconds_total %r\n" % time.process_time()))
                elif head.startswith(b"GET"):
                    line.sendall(
                        answer(json.dumps(MODEL if b"models" in head.split(b"\r\n")[0] else {}).encode())
                    )
                elif not infer(line, next(numbers)):
                    return

    def accept() -> None:
        with suppress(OSError):
            while True:
                line = listening.accept()[0]
                open_ones.append(line)
                threading.Thread(target=one, args=(line,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for line in open_ones:
            line.close()


def _request(line: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = line.recv(65536)
        if not piece:
            return b""
        data += piece
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) if b"ontent-" in head else 0
    while len(body) < length:
        body += line.recv(65536)
    return head


def good(line: socket.socket, _number: int) -> bool:
    time.sleep(0.005)
    line.sendall(answer(OUTPUTS))
    return True


def test_requests_take_as_long_as_a_known_queue_makes_them() -> None:
    """Of the fifth that others delay least: `make bench-scan` judges the mean, on a machine that is quiet."""
    for _ in range(TRIES):
        with scan_served.exact("0.05") as port:
            level = scan_served.apart((port, 10.0, 3, 6.0))
        known = scan_served.of_these_arrivals(level, 3, 0.05)
        excess = sorted(a - b for a, b in zip(level.latency_s, known, strict=True))
        assert len(excess) > 40
        assert median(excess) >= 0
        if near := excess[len(excess) // 5] <= 0.25 * fmean(known):
            break
    assert near


def test_a_pause_shows_in_the_corrected_latency_and_hides_in_the_naive_one() -> None:
    """A busy machine delays short answers as well, so that one of some tries has to be clear."""
    for _ in range(TRIES):
        with scan_served.exact("0.001", "--pause-every", "3", "--pause", "0.5") as port:
            level = scan_served.apart((port, 50.0, 1, 6.0), connections=1)
        naive = sorted(whole - wait for whole, wait in zip(level.latency_s, level.waited_s, strict=True))
        corrected = sorted(level.latency_s)
        shown = corrected[int(0.9 * len(corrected))]
        assert shown > 0.15  # a sixth of all came in a pause
        if hidden := naive[int(0.9 * len(naive))] < shown / 3:
            break
    assert hidden


def test_new_connections_are_measured_as_well(tmp_path: Path) -> None:
    with server(good) as port:
        found = scan(port, tmp_path, "--new-connections", "--most-callers", "1")
    assert found.returncode == 0, found.stderr
    assert saved(tmp_path).levels[0].answered > 20


def test_a_name_with_two_addresses_is_asked_at_the_one_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with free_ports(1) as (port,):
        both = [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in ADDRESSES]
        monkeypatch.setattr(socket, "getaddrinfo", _instead(socket.getaddrinfo, both))
        with socket.create_server(("127.0.0.1", port)):
            assert resolve("two.test", port, tls=False).address == "127.0.0.1"
        assert resolve("two.test", port, tls=False).address == "::1"  # nobody listens: the first


ADDRESSES = ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))


def _instead(real: Callable[..., object], both: list[tuple[object, ...]]) -> Callable[..., object]:
    return lambda host, *words, **more: both if host == "two.test" else real(host, *words, **more)


def test_a_server_is_asked_at_its_ipv6_address(tmp_path: Path) -> None:
    with server(good, "::1") as port:
        url = f"http://[::1]:{port}/v2/models/m/infer"
        found = scan(port, tmp_path, "--url", url, "--most-callers", "1")
    assert found.returncode == 0, found.stderr
    assert saved(tmp_path).by.url == f"http://[::1]:{port}/v2/models/m/infer"


def test_an_old_server_that_closes_every_connection_is_measured(tmp_path: Path) -> None:
    def old(line: socket.socket, _number: int) -> bool:
        line.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + OUTPUTS)
        return False

    with server(old) as port:
        found = scan(port, tmp_path, "--most-callers", "1")
    assert found.returncode == 0, found.stderr
    level = saved(tmp_path).levels[0]
    assert level.answered > 20
    assert level.failed == ()


def test_a_server_that_speaks_no_tls_is_named_with_what_to_type(tmp_path: Path) -> None:
    def speaks_http(listening: socket.socket) -> None:
        with listening.accept()[0] as line, suppress(ConnectionError):
            line.recv(65536)
            line.sendall(answer(b"", "400 Bad Request"))
            while line.recv(65536):  # until the caller hangs up
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=speaks_http, args=(listening,), daemon=True).start()
        port = listening.getsockname()[1]
        found = scan(port, tmp_path, "--url", f"https://127.0.0.1:{port}/v2/models/m/infer")
    assert found.returncode == Exit.DEVICE
    assert "TLS: " in found.stderr
    assert "a server without TLS: http://" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with free_ports(1) as (port,):
        found = scan(port, tmp_path)
    assert found.returncode == Exit.DEVICE
    assert f"can't ask 127.0.0.1:{port}: connection refused" in found.stderr
    assert "Traceback" not in found.stderr


def _hangs(line: socket.socket, _number: int) -> bool:
    time.sleep(30)
    return False


def _garbage(line: socket.socket, _number: int) -> bool:
    line.sendall(b"\x00\x01garbage" * 100)
    return False


def _huge(line: socket.socket, _number: int) -> bool:
    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
    return False


def _dribbles(line: socket.socket, _number: int) -> bool:
    for byte in answer(b"{}" * 100):
        line.sendall(bytes([byte]))
        time.sleep(0.05)
    return True


def _closes(line: socket.socket, _number: int) -> bool:
    return False


def _redirects(line: socket.socket, _number: int) -> bool:
    line.sendall(b"HTTP/1.1 308 Permanent\r\nLocation: https://other.test/v2\r\nContent-Length: 0\r\n\r\n")
    return True


def _is_full(line: socket.socket, _number: int) -> bool:
    line.sendall(answer(b"", "503 Service Unavailable"))
    return True


def _refuses(line: socket.socket, _number: int) -> bool:
    line.sendall(answer(b'{"error":"no"}', "400 Bad Request"))
    return True


def _says_nothing(line: socket.socket, _number: int) -> bool:
    line.sendall(answer(EMPTY))
    return True


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (_hangs, "no answer within 2 s"),
        (_garbage, "not HTTP"),
        (_huge, "more than 64 MiB"),
        (_dribbles, "no answer within 2 s"),
        (_closes, "connection lost before the answer"),
        (_redirects, "redirects (status 308) to https://other.test/v2"),
        (_is_full, "status 503"),
        (_refuses, 'status 400: {"error":"no"}'),
        (_says_nothing, 'status 200, but without outputs: {"outputs":[]}'),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_server_that_answers_no_request_is_refused_before_anything_is_timed(
    does: Callable[[socket.socket, int], bool], said: str, tmp_path: Path
) -> None:
    patience = ("--timeout-s", "2") if "2 s" in said else ()
    with server(does) as port:
        found = scan(port, tmp_path, *patience)
    assert found.returncode == Exit.DEVICE
    assert said in found.stderr
    assert "Traceback" not in found.stderr


def test_a_model_may_have_any_name_that_json_can_say(tmp_path: Path) -> None:
    def asked(line: socket.socket, number: int) -> bool:
        line.sendall(answer(rb'[{"name": "\ud800"}]') if number == 0 else answer(b"", "503 Busy"))
        return True

    with server(asked) as port:
        found = scan(port, tmp_path, "--url", f"http://127.0.0.1:{port}")
    assert found.returncode == Exit.DEVICE
    assert "status 503" in found.stderr
    assert "Traceback" not in found.stderr


def test_refusals_under_load_are_counted_apart_from_errors(tmp_path: Path) -> None:
    def infer(line: socket.socket, number: int) -> bool:
        if number % 3 == 2:
            line.sendall(answer(b"", "429 Too Many Requests"))
        elif number % 7 == 6:
            line.sendall(answer(b"", "500 Internal Server Error"))
        else:
            return good(line, number)
        return True

    with server(infer) as port:
        found = scan(port, tmp_path)
    assert found.returncode == 0, found.stderr
    level = saved(tmp_path).of("closed")[1]
    assert level.refused > 5
    assert [one.what for one in level.failed] == ["status 500"]


def test_an_answer_without_outputs_counts_as_none(tmp_path: Path) -> None:
    """However fast it comes: a server that soon answers 200 and nothing else isn't a fast one."""

    def infer(line: socket.socket, number: int) -> bool:
        return good(line, number) if number % 2 == 0 else _says_nothing(line, number)

    with server(infer) as port:
        found = scan(port, tmp_path)
    assert found.returncode == 0, found.stderr
    for level in saved(tmp_path).levels:
        assert [one.what for one in level.failed] == ["status 200, but much shorter than the first answer"]
    assert "Traceback" not in found.stderr


def test_a_body_that_is_no_utf_8_is_a_message(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_bytes(b'{"inputs": "\xff"}')
    with server(good) as port:
        found = scan(port, tmp_path / "out", "--payload", str(body))
    assert (found.returncode, found.stderr.splitlines()) == (
        Exit.DATA,
        [
            f"error: can't read {body}: not UTF-8 text",
            "  name a file with a request's body, JSON in UTF-8: --payload FILE",
        ],
    )


class Once:
    """Answers while one caller asks at a time: the first level. Afterwards it does `then`."""

    def __init__(self, then: Callable[[], bool]) -> None:
        self._then = then
        self._lock = threading.Lock()
        self._inside = 0
        self._over = False

    def __call__(self, line: socket.socket, number: int) -> bool:
        with self._lock:
            self._inside += 1
            self._over |= self._inside > 1
        try:
            time.sleep(0.02)  # another one may come meanwhile
            return self._then() if self._over else good(line, number)
        finally:
            with self._lock:
                self._inside -= 1


def test_a_server_that_dies_leaves_the_finished_levels_and_exit_code_4(tmp_path: Path) -> None:
    with server(Once(lambda: False)) as port:
        found = scan(port, tmp_path)
    assert "1 caller:" in found.stdout
    assert found.returncode == Exit.BROKEN, found.stderr
    assert "no answer was good: connection lost before the answer" in found.stdout
    kept = saved(tmp_path)
    assert kept.levels[0].answered > 0
    assert not kept.complete


def test_ctrl_c_keeps_the_finished_levels(tmp_path: Path) -> None:
    over = threading.Event()
    with server(Once(lambda: over.wait(PATIENCE_S))) as port:
        running = subprocess.Popen(
            ["env", "--default-signal=INT", *_command(port, tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert running.stdout is not None
        assert running.stdout.readline().startswith("Asks http://127.0.0.1:")
        assert "1 caller:" in running.stdout.readline()  # so it is kept
        os.kill(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=PATIENCE_S)
        over.set()
    assert running.returncode == Exit.INTERRUPTED
    assert "holds what was measured, levels: 1" in err
    assert "Traceback" not in err
    kept = saved(tmp_path)
    assert (len(kept.levels), kept.complete) == (1, False)


def test_a_scan_says_first_what_it_will_do_and_last_whether_the_server_is_saturated(tmp_path: Path) -> None:
    """Whichever it is: other programs may run on this machine."""
    with scan_served.exact("0.005") as port:
        found = scan(port, tmp_path, "--payload", _body(tmp_path), "--most-callers", "4")
    assert found.returncode == 0, found.stderr
    first, *_, last = found.stdout.splitlines()
    assert first.startswith(f"Asks http://127.0.0.1:{port}/v2/models/m/infer with 1, 2 and 4 callers at once")
    assert "at one rate: 4 levels of 3.5 to 4.5 s, 14 to 18 s in all" in first
    kept = saved(tmp_path)
    assert kept.saturated is not None
    assert last == kept.saturated.sentence
    assert "Client and server share this machine's" in found.stdout
    assert kept.by.same_machine is True
    assert all(level.conditions.cpus == os.cpu_count() for level in kept.levels)


def _body(folder: Path) -> str:
    body = folder / "body"
    body.write_text('{"inputs":[]}')
    return str(body)


def test_another_program_that_computes_is_named_and_spoils_a_yes(tmp_path: Path) -> None:
    spin = shutil.copy(shutil.which("sh") or "/bin/sh", tmp_path / "spinner")
    computes = [spin, "-c", "while :; do :; done"]
    with scan_served.exact("0.005") as port, subprocess.Popen(computes) as other:
        try:
            found = scan(port, tmp_path, "--payload", _body(tmp_path), "--most-callers", "1")
        finally:
            other.kill()
    assert found.returncode == 0, found.stderr
    for level in saved(tmp_path).levels:
        assert level.conditions.other_cpus > 0.1 * level.conditions.cpus or os.cpu_count() > 9
        most = level.conditions.others
        named = "spinner" in [one.name for one in most]
        assert named or (len(most) == 3 and most[-1].cpus > 0.1)  # others use more of a busy machine


def test_a_server_that_tells_its_processor_time_is_believed(tmp_path: Path) -> None:
    with server(good, metrics=True) as port:
        found = scan(port, tmp_path, "--most-callers", "1")
    assert found.returncode == 0, found.stderr
    for level in saved(tmp_path).levels:
        assert level.conditions.server_by == "process_cpu_seconds_total"
        assert level.conditions.server_cpus > 0
    assert "by process_cpu_seconds_total" in found.stdout


def test_two_lengths_in_an_answer_are_no_good_answer(tmp_path: Path) -> None:
    def smuggles(line: socket.socket, _number: int) -> bool:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n" % len(OUTPUTS)
        line.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(OUTPUTS), OUTPUTS))
        return True

    with server(smuggles) as port:
        found = scan(port, tmp_path)
    assert found.returncode == Exit.DEVICE
    assert "both Transfer-Encoding and Content-Length" in found.stderr


def test_thirty_two_callers_over_real_sockets_share_a_known_server() -> None:
    """However fast the machine is: 32 are inside all the while (Little's law), and each takes 5 ms of it.

    In a window of half a second, at whose ends the machine may be quicker or slower than between them; those
    who are inside at its beginning may all be answered at once, when it is.
    """
    with scan_served.exact("0.005") as port:
        how = scan_served.replace(scan_served.SETTINGS, window_s=0.5)
        level = scan_served.measure(port, Load("closed", 32), how)
    mean_s, rate_per_s = fmean(level.latency_s), level.answered / level.seconds
    assert 20 < mean_s * rate_per_s < 48
    assert level.answered <= 200 * level.seconds + 32
