"""Observed runs and the least privilege on a real engine, with small programs in the service's image."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import load_image, shell_files

from buildtool.engine.client import Engine

IMAGE = os.environ.get("WEIR_CPU_IMAGE") or "weir/cpu:latest"
READS = (
    "import os, threading\n"
    "open('/tmp/mine', 'w').close(); os.remove('/tmp/mine')\n"
    "t = threading.Thread(target=lambda: open('/etc/os-release').close()); t.start(); t.join()\n"
    "if not os.fork(): os.execv('/usr/bin/env', ['env', 'true'])\n"
    "os.wait()\n"
)
SERVES = (
    "import http.server as h\n"
    "class H(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "h.HTTPServer(('', 8000), H).serve_forever()\n"
)


def weir(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "buildtool", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="fanotify watches other processes as root alone")
def test_both_ways_of_watching_see_the_same_files_of_threads_children_and_programs(tmp_path: Path) -> None:
    lists = {}
    for method in ("fanotify", "inotify"):
        keep = tmp_path / method
        done = weir(
            "observe", "--method", method, "--keep", str(keep), IMAGE, "--", "python3", "-S", "-c", READS
        )
        assert done.returncode == 0, done.stderr
        lists[method] = keep.read_text().splitlines()
    assert lists["fanotify"] == lists["inotify"]
    assert {"/usr/bin/env", "/usr/bin/true", "/usr/bin/python3.11"} <= set(lists["inotify"])
    assert any("os-release" in line for line in lists["inotify"])
    assert "/tmp/mine" not in lists["inotify"], "what a run makes and removes is no file of its image"


def test_where_fanotify_is_refused_the_container_watches_itself(tmp_path: Path) -> None:
    refuses = (
        "import sys\nfrom buildtool.cli.program import main\nfrom buildtool.observe import runs\n"
        "runs.is_local = lambda *_: False\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["observe", "--keep", str(tmp_path / "keep"), IMAGE, "--", "python3", "-S", "-c", READS]
    done = subprocess.run(
        [sys.executable, "-c", refuses, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fanotify can't watch: the engine is on another machine" in done.stderr
    assert "/usr/bin/env" in (tmp_path / "keep").read_text().splitlines()


def test_a_run_that_fails_leaves_the_list_as_it_was(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.write_text("/a\n")
    done = weir("observe", "--keep", str(keep), IMAGE, "--", "python3", "-S", "-c", "raise SystemExit('no')")
    assert done.returncode == 4
    assert "its command ended with 1\nno" in done.stderr
    assert keep.read_text() == "/a\n"


def test_files_whose_names_no_line_can_hold_are_named() -> None:
    name = f"weir-test-{os.getpid()}/odd-names:1"
    load_image(name, {"Cmd": ["/bin/sh"]}, {**shell_files(), "odd/a\nb": b"x", "odd/c": b"x"})
    try:
        done = weir(
            "observe", name, "--", "/bin/sh", "-c", 'for f in /odd/*; do read -r x < "$f"; done; true'
        )
    finally:
        subprocess.run(["docker", "rmi", name], check=False, capture_output=True)
    assert done.returncode == 5
    assert "no line of a keep-list can hold the names of 1 opened file: /odd/a\\x0ab\n" in done.stderr


def test_an_image_without_a_shell_says_so() -> None:
    name = f"weir-test-{os.getpid()}/no-shell:1"
    load_image(name, {"Cmd": ["/x"]}, {"x": b"#!/x\n"})
    try:
        done = weir("observe", name)
    finally:
        subprocess.run(["docker", "rmi", name], check=False, capture_output=True)
    assert done.returncode == 5
    assert "has no /bin/sh, in which its program waits until it is watched" in done.stderr


def test_a_service_that_is_killed_under_its_workload_gives_no_list(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    kill = "sh -c 'docker kill $WEIR_CONTAINER'"
    words = ["observe", "--keep", str(keep), "--workload"]
    done = weir(*words, kill, IMAGE, "--", "python3", "-S", "-c", SERVES)
    assert done.returncode == 4
    assert "its program ended with 137 while the workload used it" in done.stderr
    assert not keep.exists()
    done = weir(*words, "/no/such/program", IMAGE)
    assert done.returncode == 2, "before anything is started"
    assert "/no/such/program, which can't be run" in done.stderr


def test_networks_of_a_killed_run_are_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    engine, name = Engine(), f"weir-test-{os.getpid()}"

    def there() -> str:
        engine.sweep_containers()
        done = subprocess.run(
            ["docker", "network", "ls", "-q", "-f", f"name={name}"],
            capture_output=True,
            check=True,
            text=True,
        )
        return done.stdout

    with engine.owning() as (_, label):
        labels = [f"--label={key}={value}" for key, value in label.items()]
        subprocess.run(["docker", "network", "create", *labels, name], check=True, capture_output=True)
        assert there()
    assert not there()


def test_the_least_is_printed_as_a_compose_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o755)
    service = {
        "image": IMAGE,
        "user": "0",
        "read_only": True,
        "cap_drop": ["ALL"],
        "cap_add": ["CHOWN", "KILL"],
        "volumes": [f"{tmp_path}/data:/data:ro"],
        "environment": {"TOKEN": "s3cret"},
        "command": [
            "python3",
            "-S",
            "-c",
            "import os; open('/dev/shm/x', 'w'); os.chown('/dev/shm/x', 5, 5)",
        ],
    }
    path = tmp_path / "compose.yaml"
    path.write_text(json.dumps({"services": {"s": service}}))
    done = subprocess.run(
        [sys.executable, "-m", "buildtool", "ablate", str(path), "s"],
        capture_output=True, text=True, check=False, env={**os.environ, "TOKEN": "s3cret"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "#   cap_add: CHOWN\nservices:" in done.stdout
    for gone in ("KILL", "/data", "s3cret"):
        assert gone not in done.stdout
    assert "no-new-privileges:true" in done.stdout
