"""The doctor's overlay as compose reads it, and the doctor inside a container of an image."""

import json
import os
import subprocess
from pathlib import Path

from buildtool.doctor.fix import OVERLAY, overlay_text
from buildtool.doctor.host import EngineFacts, Host, Node, User
from buildtool.doctor.prove import COMMAND
from buildtool.engine.client import Engine
from probes.core.unknown import Unknown

ROOT = Path(__file__).parents[2]
NONE = Unknown("not asked")
ENGINE = EngineFacts("28.5.1", True, False, ("runc",), ("/etc/cdi",), "2.40.0", "0.29.0")


def host(*nodes: Node, cdi: tuple[str, ...] = ()) -> Host:
    return Host(
        name="here",
        platform="linux",
        distribution=NONE,
        kernel=NONE,
        machine="x86_64",
        virtual=NONE,
        container="none seen",
        cpus=2,
        cpu_limit=NONE,
        ram_total_bytes=NONE,
        ram_available_bytes=NONE,
        ram_limit_bytes=NONE,
        disk_free_bytes=NONE,
        gpu_driver=NONE,
        displays=(),
        nodes=nodes,
        cdi_kinds=cdi,
        user=User(0, "root", (0,)),
        pythons=(),
        engine=ENGINE,
        override="",
    )


def configured(overlay: str, folder: Path, profile: str) -> dict[str, dict[str, object]]:
    """The services as compose sees them with the overlay, which is set by .env's COMPOSE_FILE."""
    file = folder / OVERLAY
    file.write_text(overlay)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WEIR_", "COMPOSE_"))}
    done = subprocess.run(
        ["docker", "compose", "--profile", profile, "config", "--format", "json"],
        cwd=ROOT,
        env=env | {"COMPOSE_FILE": f"{ROOT / 'compose.yaml'}:{file}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["services"])


def sources(service: dict[str, object]) -> list[str]:
    devices = service["devices"]
    assert isinstance(devices, list)
    return [one["source"] for one in devices]


def test_two_amd_cards_reach_the_service_with_numeric_groups(tmp_path: Path) -> None:
    nodes = [Node("/dev/kfd", 0, 992, "render", "0660")]
    nodes += [Node(f"/dev/dri/renderD{n}", 0, 993, "render", "0660") for n in (128, 129)]
    service = configured(overlay_text(host(*nodes)), tmp_path, "rocm")["api-rocm"]
    assert sources(service) == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert service["group_add"] == ["992", "993"]


def test_nvidias_cdi_device_replaces_the_reservation(tmp_path: Path) -> None:
    node = Node("/dev/nvidiactl", 0, 0, "root", "0666")
    service = configured(overlay_text(host(node, cdi=("nvidia.com/gpu",))), tmp_path, "cuda")["api-cuda"]
    assert sources(service) == ["nvidia.com/gpu=all"]
    assert not service.get("deploy")


def test_the_doctor_runs_in_the_image_without_a_card() -> None:
    image = os.environ.get("WEIR_CPU_IMAGE", "weir/cpu:latest")
    done = Engine().run(image, COMMAND)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["checks"] == []
    assert found["machine"]["torch"]["api"] == "none"


def test_a_host_that_needs_none_gets_no_overlay() -> None:
    assert overlay_text(host()) == ""
