"""A flattened image says in its Dockerfile all that the original's configuration said."""

import pytest

from buildtool.errors import DataError
from buildtool.flat import created, flat_plan
from buildtool.gpucode.target import parse_targets
from buildtool.imageprune import default_tag

CONFIG = {
    "Env": ["PATH=/bin", 'ODD=a "b" \\ $HOME', "EMPTY="],
    "User": "10001:10001",
    "WorkingDir": "/srv/app",
    "ExposedPorts": {"8000/tcp": {}},
    "Volumes": {"/data": {}},
    "Labels": {"io.weir.variant": "rocm", "io.weir.pruned": "no"},
    "Healthcheck": {"Test": ["CMD", "python3", "-m", "x"], "Interval": 10**10, "Retries": 3},
    "Entrypoint": ["tini", "--"],
    "Cmd": ["python3", "-m", "service"],
    "StopSignal": "SIGINT",
    "Shell": None,
    "OnBuild": None,
}
RECORD = {"Config": CONFIG, "Os": "linux", "Architecture": "amd64", "Created": "2026-01-01T00:00:00.5Z"}


def lines(**changes: object) -> list[str]:
    record = {**RECORD, "Config": CONFIG | changes}
    plan = flat_plan(record, "ctx", "weir/rocm:x", targets="gfx906", zstd=True)
    return str(plan["target"]["pruned"]["dockerfile-inline"]).splitlines()


def test_every_instruction_is_there() -> None:
    assert lines() == [
        "FROM scratch",
        "ADD rootfs.tar /",
        'ENV PATH="/bin"',
        'ENV ODD="a \\"b\\" \\\\ \\$HOME"',
        'ENV EMPTY=""',
        'WORKDIR "/srv/app"',
        "USER 10001:10001",
        "EXPOSE 8000/tcp",
        'VOLUME ["/data"]',
        "STOPSIGNAL SIGINT",
        'HEALTHCHECK --interval=10000ms --retries=3 CMD ["python3", "-m", "x"]',
        'ENTRYPOINT ["tini", "--"]',
        'CMD ["python3", "-m", "service"]',
    ]


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (["NONE"], "HEALTHCHECK NONE"),
        (["CMD-SHELL", "curl -f x || exit 1"], "HEALTHCHECK CMD curl -f x || exit 1"),
    ],
)
def test_other_health_checks(test: list[str], said: str) -> None:
    assert said in lines(Healthcheck={"Test": test})


def test_an_empty_configuration_gives_only_the_files() -> None:
    assert lines(**dict.fromkeys(CONFIG)) == ["FROM scratch", "ADD rootfs.tar /"]


def test_labels_stay_and_the_targets_are_told() -> None:
    image = flat_plan(RECORD, "ctx", "weir/rocm:x", targets="gfx906", zstd=False)["target"]["pruned"]
    assert image["labels"] == {
        "io.weir.variant": "rocm",
        "io.weir.pruned": "yes",
        "io.weir.gpu-targets": "gfx906",
    }
    assert image["args"] == {"SOURCE_DATE_EPOCH": str(created(RECORD))}
    assert image["tags"] == ["weir/rocm:x"]
    assert image["platforms"] == ["linux/amd64"]


def test_a_line_break_in_a_variable_is_refused() -> None:
    with pytest.raises(DataError, match="BROKEN holds a line break"):
        lines(Env=["BROKEN=a\nRUN x"])


def test_when_an_image_was_made() -> None:
    assert created(RECORD) == 1767225600
    assert created({"Created": None}) == 0
    assert created({"Created": "0001-01-01T00:00:00Z"}) == 0


@pytest.mark.parametrize(
    ("ref", "targets", "tag"),
    [
        ("weir/rocm:latest", "gfx906", "weir/rocm:gfx906"),
        ("weir/rocm", "gfx906,gfx1100", "weir/rocm:gfx1100-gfx906"),
        ("registry:5000/a/b", "gfx906", "registry:5000/a/b:gfx906"),
        ("a/b@sha256:00", "gfx90a:xnack+", "a/b:gfx90axnack-on"),
    ],
)
def test_the_copys_own_name(ref: str, targets: str, tag: str) -> None:
    assert default_tag(ref, parse_targets(targets)) == tag
