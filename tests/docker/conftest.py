"""Tests against a real engine. The service's image is WEIR_CPU_IMAGE, else the one `make images` builds."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_packages import unpacked

ROOT = Path(__file__).parents[2]
VARIABLES = ("WEIR_", "APP_", "COMPOSE_", "HF_", "OTEL_")


@pytest.fixture(scope="session", autouse=True)
def without_pip_constraints() -> Iterator[None]:
    """The stand-ins' versions were never published; a constraint of the host's pip may exclude them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONSTRAINT", os.devnull)
        yield


@pytest.fixture(scope="session", autouse=True)
def _files_for_containers() -> Iterator[None]:
    """Their users read what tests write and mount, whatever umask the tests were started with."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def compose_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """compose.yaml's variables for a run that disturbs nobody: any free port, reports in a directory that
    doesn't exist yet (it is what this gives), no model. Leaves the checkout as it was.
    """
    reports = tmp_path_factory.mktemp("compose") / "reports"
    models = ROOT / "models"
    had_models = models.exists()
    with pytest.MonkeyPatch.context() as patch:
        for name in [each for each in os.environ if each.startswith(VARIABLES)]:
            if name != "WEIR_CPU_IMAGE":
                patch.delenv(name)
        patch.setenv("WEIR_PORT", "0")
        patch.setenv("WEIR_MAX_QUEUE_TOKENS", "2048")  # four of the longest texts: overload is soon over
        patch.setenv("WEIR_REPORTS_DIR", str(reports))
        yield reports
    if models.exists() and not had_models:  # the engine made the mount's source
        models.rmdir()


@pytest.fixture(scope="session")
def docker_compose_file(compose_env: Path) -> str:
    return str(ROOT / "compose.yaml")


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    return ["up -d --wait"]


@pytest.fixture(scope="session")
def docker_cleanup() -> list[str]:
    return ['--profile "*" down -v']


@pytest.fixture(scope="session")
def nginx_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's nginx on the service's image, whose libraries it uses: nginx's own needs a registry."""
    folder = tmp_path_factory.mktemp("nginx")
    root = unpacked(folder / "packages", "nginx", "libnginx-mod-stream")
    context = folder / "image"
    context.mkdir()
    (root / "usr/sbin/nginx").rename(context / "nginx")
    (root / "usr/lib/nginx/modules/ngx_stream_module.so").rename(context / "stream.so")
    (context / "stream.conf").write_text("load_module /usr/lib/nginx/modules/stream.so;\n")
    base = os.environ.get("WEIR_CPU_IMAGE") or "weir/cpu:latest"
    (context / "Dockerfile").write_text(
        f"FROM {base}\nCOPY nginx /usr/sbin/nginx\nCOPY stream.so /usr/lib/nginx/modules/stream.so\n"
        "COPY stream.conf /etc/nginx/modules-enabled/50-mod-stream.conf\n"
    )
    tag = f"t-tls/nginx:{os.getpid()}"
    build = ["docker", "build", "-q", "-t", tag, str(context)]
    subprocess.run(build, check=True, capture_output=True)
    yield tag
    subprocess.run(["docker", "rmi", tag], check=False, capture_output=True)
