"""A watch beside a real command: exit codes, signals, the terminal, a kill, Prometheus."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
HEEDING = ("env", "--default-signal")  # tests in the background, or behind nohup, ignore some signals
WATCH = [sys.executable, "-m", "probes", "watch", "--interval", "0.05"]


def run(*words: str, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*WATCH, *options, "--", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
def test_the_commands_exit_code_is_the_watchs(script: str, code: int) -> None:
    assert run("sh", "-c", script).returncode == code


def test_a_command_that_is_not_there_and_one_that_is_no_program(tmp_path: Path) -> None:
    assert run("no-such-program").returncode == 127
    (tmp_path / "text").write_text("words")
    found = run(str(tmp_path / "text"))
    assert found.returncode == 126
    assert "Traceback" not in found.stderr


def test_the_commands_output_is_its_own_and_the_report_comes_beside_it() -> None:
    found = run("sh", "-c", 'printf "%s|" "$@"', "name", "a b", "", "--plain")
    assert found.stdout == "a b||--plain|"
    assert "the command: exit code 0" in found.stderr


def test_the_watchs_own_memory_is_not_said_to_be_the_commands(tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    run("true", options=("--report", str(kept)))
    assert json.loads(kept.read_text())["ended"]["largest_process_bytes"]["is"] == "unknown"
    run(sys.executable, "-c", "bytearray(300 << 20)", options=("--report", str(kept)))
    assert json.loads(kept.read_text())["ended"]["largest_process_bytes"] > 300 << 20


def test_the_memory_of_the_program_that_started_the_watch_hides_no_commands_memory(tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    watched = [*WATCH, "--report", str(kept), "--", sys.executable, "-c", "bytearray(300 << 20)"]
    large = "import os, sys; memory = bytearray(600 << 20); del memory; os.execv(sys.argv[1], sys.argv[1:])"
    subprocess.run([sys.executable, "-c", large, *watched], cwd=ROOT, timeout=PATIENCE_S, check=True)
    assert 300 << 20 < json.loads(kept.read_text())["ended"]["largest_process_bytes"] < 500 << 20


def test_a_commands_peak_memory_includes_its_children(tmp_path: Path) -> None:
    kept = tmp_path / "samples.jsonl"
    child = f"""
import pathlib, time
held, seen = bytearray(80 << 20), 0
while seen < 30:  # samples while it is held: children are looked for every second
    seen += 1
    before = pathlib.Path({str(kept)!r}).stat().st_size
    while pathlib.Path({str(kept)!r}).stat().st_size == before:
        time.sleep(0.01)
"""
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = run(sys.executable, "-c", command, options=("--jsonl", str(kept)))
    (mib,) = re.findall(r"command's RAM .* most ([\d.]+) MiB", found.stderr)
    assert float(mib) > 90


def started(*words: str, options: tuple[str, ...] = ()) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*HEEDING, *WATCH, *options, "--", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


TRAPPED = "trap 'echo got {0}; exit 5' {0}; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT", "USR1"])
def test_a_signal_is_passed_on_and_the_command_decides(name: str) -> None:
    with started("sh", "-c", TRAPPED.format(name)) as watch:
        assert watch.stdout
        assert watch.stdout.readline() == b"ready\n"
        watch.send_signal(getattr(signal, f"SIG{name}"))
        assert watch.stdout.readline() == f"got {name}\n".encode()
        assert watch.wait(PATIENCE_S) == 5


def test_samples_are_kept_when_the_watch_is_killed(tmp_path: Path) -> None:
    kept = tmp_path / "a.jsonl"
    with started("sleep", "20", options=("--jsonl", str(kept))) as watch:
        until(lambda: kept.exists() and kept.read_text().count("\n") > 6)
        watch.kill()
    lines = kept.read_text().splitlines()
    assert len(lines) > 5
    assert json.loads(lines[-1])["at_s"] > 0.2
    shown = subprocess.run(
        [sys.executable, "-m", "probes", "show", str(tmp_path / "a.jsonl")],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert shown.returncode == 0
    assert b"samples" in shown.stdout


# makes the terminal on its standard input its own, then becomes the command
IN_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A process in a terminal of its own, seen from that terminal's other end.

    `pty.fork` runs the handlers of gRPC, whose threads other tests leave behind: the child sometimes hangs.
    """

    def __init__(self, words: list[str]) -> None:
        self._other_end, end = pty.openpty()
        self._unread = b""
        self._process = subprocess.Popen(
            [*HEEDING, sys.executable, "-I", "-S", "-c", IN_TERMINAL, *words],
            cwd=ROOT,
            stdin=end,
            stdout=end,
            stderr=end,
        )
        os.close(end)

    def type(self, keys: bytes) -> None:
        os.write(self._other_end, keys)

    def read_until(self, words: bytes) -> None:
        """Read past these words. What came with them is kept: on a busy machine that is all there will be."""
        end = time.monotonic() + PATIENCE_S
        while words not in self._unread and time.monotonic() < end:
            ready, _, _ = select.select([self._other_end], [], [], 0.5)
            if ready:
                try:
                    self._unread += os.read(self._other_end, 4096)
                except OSError:
                    break
        before, found, after = self._unread.partition(words)
        assert found, before
        self._unread = after

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._other_end)
        self._process.kill()
        self._process.wait(PATIENCE_S)


def test_a_terminals_words_that_come_at_once_are_all_read() -> None:
    with Terminal(["echo", "first second"]) as terminal:
        assert terminal.wait() == 0
        terminal.read_until(b"first")
        terminal.read_until(b"second")


def test_the_command_has_the_terminals_keys_and_ctrl_c() -> None:
    script = "trap 'echo stopped; exit 9' INT; read answer; echo heard $answer; while :; do sleep 0.05; done"
    with Terminal([*WATCH, "--", "sh", "-c", script]) as terminal:
        terminal.type(b"hello\n")
        terminal.read_until(b"heard hello")
        terminal.type(b"\x03")
        terminal.read_until(b"stopped")
        terminal.read_until(b"exit code 9")
        assert terminal.wait() == 9


def test_a_command_that_reads_before_the_terminal_is_its_own_goes_on_once_it_is() -> None:
    slow = (
        "import os, sys, time; from probes.cli.program import main; hand_over = os.tcsetpgrp; "
        "os.tcsetpgrp = lambda *words: (time.sleep(0.5), hand_over(*words)); sys.exit(main(sys.argv[1:]))"
    )
    with Terminal(
        [sys.executable, "-c", slow, *WATCH[3:], "--", "sh", "-c", "read answer; echo heard $answer"]
    ) as terminal:
        terminal.type(b"hello\n")
        terminal.read_until(b"heard hello")
        terminal.read_until(b"exit code 0")
        assert terminal.wait() == 0


def test_a_command_in_the_foreground_does_not_stay_stopped_for_want_of_the_terminal() -> None:
    with Terminal([*WATCH, "--", "sh", "-c", "kill -TTIN $$; echo went on"]) as terminal:
        terminal.read_until(b"went on")
        assert terminal.wait() == 0


def test_ctrl_z_stops_both_and_a_shell_can_continue_them() -> None:
    """What the command reads shows that the terminal is its own, before and after."""
    command = "read first; echo begun $first; read second; echo ended $second"
    shell = f"set -m; {' '.join(WATCH)} -- sh -c '{command}'; echo back; fg; echo done"
    with Terminal(["bash", "-c", shell]) as terminal:
        terminal.type(b"one\n")
        terminal.read_until(b"begun one")
        terminal.type(b"\x1a")
        terminal.read_until(b"back")
        terminal.type(b"two\n")
        terminal.read_until(b"ended two")
        terminal.read_until(b"done")
        terminal.wait()


def test_ctrl_c_ends_a_watch_without_a_command_with_its_report() -> None:
    with Terminal([*WATCH, "--plain"]) as terminal:
        terminal.read_until(b"RAM")  # of the first sample
        terminal.type(b"\x03")
        terminal.read_until(b"duration")
        assert terminal.wait() == 0


def test_prometheus_gets_the_latest_sample_and_nothing_else() -> None:
    with subprocess.Popen(
        [*HEEDING, *WATCH, "--for", "600", "--listen", "127.0.0.1:0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watch:
        assert watch.stdout
        port = 0
        while not port:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", watch.stdout.readline())
            port = int(found[1]) if found else 0

        def text() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
                return str(answer.read().decode())

        until(lambda: "weir_watch_machine_ram_bytes" in text())
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S)
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_S) == 0


def test_an_address_in_use_is_an_error_and_the_command_isnt_started(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = run("touch", str(tmp_path / "made"), options=("--listen", address))
    assert found.returncode == 2
    assert not (tmp_path / "made").exists()


def test_the_allocators_hook_leaves_the_program_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "print(sys.argv, __name__, sys.path[0], os.environ.get('WEIR_ALLOCATOR_FD'))\n"
        "sys.exit(3)\n"
    )
    plain = subprocess.run([sys.executable, str(script), "a b"], capture_output=True, text=True, check=False)
    found = run(sys.executable, str(script), "a b", options=("--torch-allocator",))
    assert found.stdout == plain.stdout
    assert found.returncode == plain.returncode == 3


@pytest.mark.parametrize("flag", ["-P", "-I", "-u"])
def test_the_hook_leaves_the_places_of_modules_as_they_were(flag: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys\nprint(sys.path)\n")
    plain = subprocess.run([sys.executable, flag, str(script)], capture_output=True, text=True, check=False)
    found = run(sys.executable, flag, str(script), options=("--torch-allocator",))
    assert found.stdout == plain.stdout


@pytest.mark.parametrize(
    "words", [["-m", "json.tool", "--help"], ["-c", "import sys; print(sys.argv, __name__)", "x"]]
)
def test_the_hook_runs_modules_and_code_as_python_does(words: list[str]) -> None:
    plain = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    found = run(sys.executable, *words, options=("--torch-allocator",))
    assert found.stdout == plain.stdout


def test_callers_who_hang_up_or_never_finish_leave_no_traceback_and_do_not_keep_others_out() -> None:
    import socket

    from probes.records.watch import Subject
    from probes.watch.metrics_server import MOST_CALLERS, MetricsServer

    endpoint = MetricsServer(Subject("2026-11-21T23:00:00Z", "made", 0.25, (), ()), "::1", 0)
    port = int(endpoint.address.rpartition(":")[2].partition("/")[0])
    assert endpoint.address.startswith("http://[::1]:")
    slow = [socket.create_connection(("::1", port)) for _ in range(MOST_CALLERS)]
    try:
        for one in slow:
            one.settimeout(PATIENCE_S)
            one.sendall(b"GET /metrics HTTP/1.1\r\nA: ")
        for one in slow:
            assert one.recv(100) == b""
        until(lambda: is_answered(endpoint.address))  # there is room once the thread of one has ended
    finally:
        for one in slow:
            one.close()
        endpoint.close()


def is_answered(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return answer.status == 200
    return False


@pytest.mark.parametrize("host", ["ä..b", "a" * 70 + ".example"])
def test_a_host_that_cannot_be_is_an_error_and_no_traceback(host: str) -> None:
    found = run("true", options=("--listen", f"{host}:0"))
    assert found.returncode == 2
    assert "Traceback" not in found.stderr


def test_a_stopped_command_that_is_asked_to_end_is_continued_for_it() -> None:
    """A stopped process receives nothing but SIGKILL until SIGCONT comes."""
    script = "trap 'echo ended; exit 6' TERM; echo $$; while :; do sleep 0.05; done"
    with started("sh", "-c", script) as watch:
        assert watch.stdout
        pid = int(watch.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        while "T" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.01)
        watch.send_signal(signal.SIGTERM)
        try:
            assert watch.wait(PATIENCE_S) == 6
            assert watch.stdout.readline() == b"ended\n"
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small file system needs rights that this user lacks")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_for_a_while_costs_samples_and_not_the_command(small_disk: Path) -> None:
    samples, table = small_disk / "a.jsonl", small_disk / "a.csv"
    script = f"""
        trap 'echo stopped' TERM
        is_cut() {{ [ $(( $(stat -c %s $1) % 4096 )) = 0 ]; }}  # a page is full, and there are no more
        head -c 1M /dev/zero > {small_disk}/fill 2>/dev/null
        until is_cut {samples} && is_cut {table}; do sleep 0.02; done
        sleep 0.4
        rm {small_disk}/fill
        while is_cut {samples} || is_cut {table}; do sleep 0.02; done
        sleep 0.1
        echo done
        exit 7"""
    found = run("sh", "-c", script, options=("--jsonl", str(samples), "--csv", str(table)))
    assert found.returncode == 7
    assert found.stdout == "done\n"
    for file in (samples, table):
        why = "No space left on device"
        assert found.stderr.count(f"note: {file} doesn't take every sample: {why}; the watch goes on") == 1
        assert re.search(rf"error: {file} lacks \d+ of \d+ samples: {why}", found.stderr)
    assert "the command: exit code 7" in found.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "probes", "show", str(samples)], cwd=ROOT, capture_output=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    times = [json.loads(line)["at_s"] for line in samples.read_text().splitlines()[1:]]
    assert max(b - a for a, b in pairwise(times)) > 0.3  # lines follow the lost ones
    assert len({len(line.split(",")) for line in table.read_text().splitlines()}) == 1


def test_a_report_for_which_the_disk_has_no_room_at_the_end_leaves_the_commands_exit_code(
    small_disk: Path,
) -> None:
    script = f"head -c 1M /dev/zero > {small_disk}/fill; exit 7"
    found = run("sh", "-c", script, options=("--report", str(small_disk / "r.json")))
    assert found.returncode == 7
    assert f"error: can't write {small_disk}/r.json: No space left on device" in found.stderr
    assert "the command: exit code 7" in found.stderr
    assert [path.name for path in small_disk.iterdir()] == ["fill"]


@pytest.mark.parametrize("option", ["--report", "--jsonl", "--csv"])
def test_a_file_that_cannot_be_written_is_noticed_before_the_command_starts(
    option: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "pipe", tmp_path / "file" / "x", Path("/proc/nothing/x")):
        found = run("touch", str(tmp_path / "made"), options=(option, str(place)))
        assert found.returncode == 5, found.stderr
        assert f"can't write {place}" in found.stderr
        assert not (tmp_path / "made").exists()


def test_show_reads_a_report_or_samples_from_a_pipe_and_a_fifo(tmp_path: Path) -> None:
    report, samples, fifo = tmp_path / "r.json", tmp_path / "a.jsonl", tmp_path / "fifo"
    assert run("true", options=("--report", str(report), "--jsonl", str(samples))).returncode == 0
    os.mkfifo(fifo)
    program = f"{sys.executable} -m probes show"
    for file in (report, samples):
        for shown in (
            f"cat {file} | {program} /dev/stdin",
            f"cat {file} | {program} //dev/stdin",
            f"{program} /dev/stdin < {file}",
            f"{program} <(cat {file})",
            f"cat {file} > {fifo} & {program} {fifo}; wait",
        ):
            done = subprocess.run(
                ["bash", "-c", shown], cwd=ROOT, capture_output=True, check=False, timeout=PATIENCE_S
            )
            assert done.returncode == 0, (shown, done.stderr)
            assert b"samples" in done.stdout
