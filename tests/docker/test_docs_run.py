"""Every command that README and the site show is run, page by page, as a reader would run it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from free_ports import free_port

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "shown"))

import shown  # noqa: E402

LEFT_OUT = {".git", "reports", "models", ".weir"}
PAGES = [page for page in shown.pages() if any(c.text not in shown.NOT_RUN for c in shown.commands(page))]
PATIENCE_S = 900  # a build may wait for that of another test


@dataclass
class Reader:
    """Somebody who follows the pages in a checkout: its files, but reports and models of his own."""

    folder: Path
    environment: dict[str, str]
    port: int
    tls_port: int
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, command: str) -> None:
        """Run a command as it is shown, once, with the service on a port that is free here."""
        if command in self.seconds:
            return
        words = command.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        words = words.replace("localhost:8443", f"localhost:{self.tls_port}")
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-euc", words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        self.seconds[command] = time.monotonic() - begun
        assert done.returncode == 0, (
            f"{command}: exit {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, nginx_image: str) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    for path in ROOT.iterdir():
        if path.name not in LEFT_OUT:
            (folder / path.name).symlink_to(path)
    for report, name in (("rocm", "rocm"), ("cpu", "main")):  # to compare with
        shutil.copy(ROOT / f"reports/images/{report}.json", folder / f"{name}.json")
    port, tls_port = free_port(), free_port()
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("WEIR_", "APP_", "COMPOSE_", "HF_", "OTEL_"))
    }
    own = {
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "COMPOSE_PROJECT_NAME": f"t-docs-{os.getpid()}",
        "WEIR_PORT": str(port),
        "WEIR_EXTRAS_PORT": "0",
        "WEIR_TLS_PORT": str(tls_port),
        "WEIR_TLS_IMAGE": nginx_image,
        "WEIR_GRPC_PORT": "0",
    }
    reader = Reader(folder, kept | own, port, tls_port)
    yield reader
    down = ["docker", "compose", "--profile", "*", "down", "-v"]
    subprocess.run(down, cwd=folder, env=reader.environment, capture_output=True, check=False)
    print(f"\n{len(reader.seconds)} commands in {sum(reader.seconds.values()):.1f} s; the slowest:")
    for command, seconds in sorted(reader.seconds.items(), key=lambda item: -item[1])[:8]:
        print(f"{seconds:6.1f} s  {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_works_in_its_order(page: Path, reader: Reader) -> None:
    for command in shown.commands(page):
        if command.text not in shown.NOT_RUN:
            reader.run(command.text)
