"""compose.yaml against a real engine: the service comes up, serves, sheds, drains; the probe can write."""

import http.client
import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("WEIR_CPU_IMAGE") or "weir/cpu:latest"
PROFILES = ("", "rocm", "wsl", "cuda", "grpc", "tls", "probe", "probe-rocm", "probe-wsl", "probe-cuda")
LONG = "profits rose " * 500  # 512 tokens: about a second of two cores
QUEUE = 4  # of those; the service holds 16 where nothing else is set


def compose(*args: str, project: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    named = ["-p", project] if project else []
    return subprocess.run(
        ["docker", "compose", "--ansi", "never", "--progress", "quiet", *named, *args],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_an_image_that_is_not_built_is_said_to_be_built_by_what_the_doctor_says() -> None:
    project = f"t-unbuilt-{os.getpid()}"
    for service in ("api-cuda", "probe-cuda"):
        done = compose("up", "--no-deps", service, project=project, WEIR_CUDA_IMAGE="weir/unbuilt:latest")
        assert done.returncode
        assert "type `weir doctor`, which says what does" in done.stderr
    compose("--profile", "*", "down", project=project)


class Client:
    """One connection per request, as a stranger would come."""

    def __init__(self, ip: str, port: int) -> None:
        self.address = (ip, port)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=240)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def predict(self, *texts: str) -> tuple[int, dict[str, str], bytes]:
        return self.ask("POST", "/predict", json.dumps({"texts": texts}).encode())


@pytest.fixture
def client(docker_ip: str, docker_services: Any) -> Client:
    return Client(docker_ip, docker_services.port_for("api", 8000))


@pytest.fixture
def project(docker_compose_project_name: str) -> str:
    return docker_compose_project_name


# ---- the files ---------------------------------------------------------------------------------------


def services(compose_env: Path, profile: str) -> dict[str, Any]:
    done = compose("--profile", profile or "none", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid_and_hardened(compose_env: Path, profile: str) -> None:
    found = services(compose_env, profile)
    assert "api" in found
    assert len(found) > 1 or not profile
    for name, service in found.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] > 0, name
        assert service["pull_policy"] == ("missing" if name == "tls" else "never"), name
        assert not {"privileged", "ipc", "pid"} & set(service), name
        if name.startswith("reports"):
            assert service["cap_add"] == ["CHOWN", "FOWNER"]
            assert service["network_mode"] == "none"
            continue
        assert service["user"] == "10001:10001", name
        assert "cap_add" not in service, name
        assert service["init"], name
        assert service["tmpfs"] == ["/tmp:uid=10001,gid=10001,mode=0700,size=512m"], name
        if name != "tls":  # which asks for a key
            assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name


def test_without_a_profile_only_the_cpu_service_is_started(compose_env: Path) -> None:
    assert set(services(compose_env, "")) == {"api"}


def test_gpus_are_passed_by_device_file_and_group_number(compose_env: Path) -> None:
    rocm = services(compose_env, "rocm")["api-rocm"]
    assert [each["source"] for each in rocm["devices"]] == ["/dev/kfd", "/dev/dri/renderD128"]
    assert all(group.isdigit() for group in rocm["group_add"])
    assert rocm["environment"]["APP_PROFILE"] == "experiment2"
    wsl = services(compose_env, "wsl")["api-wsl"]
    assert [each["source"] for each in wsl["devices"]] == ["/dev/dxg"]
    assert wsl["environment"]["HSA_ENABLE_DXG_DETECTION"] == "1"
    assert {mount["target"] for mount in wsl["volumes"]} >= {"/usr/lib/libdxcore.so", "/usr/lib/librocdxg.so"}
    cuda = services(compose_env, "cuda")["api-cuda"]
    (reserved,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])


def test_the_render_node_and_groups_are_the_hosts_to_say(compose_env: Path) -> None:
    done = compose(
        "--profile",
        "probe-rocm",
        "config",
        "--format",
        "json",
        RENDER_NODE="/dev/dri/renderD129",
        RENDER_GID="993",
        VIDEO_GID="39",
    )
    probe = json.loads(done.stdout)["services"]["probe-rocm"]
    assert probe["devices"][1]["source"] == "/dev/dri/renderD129"
    assert probe["group_add"] == ["993", "39"]


APIS = (("", "api"), ("rocm", "api-rocm"), ("wsl", "api-wsl"), ("cuda", "api-cuda"), ("grpc", "api-grpc"))


def composed(profile: str, **env: str) -> dict[str, Any]:
    done = compose("--profile", profile or "none", "config", "--format", "json", **env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize(("profile", "name"), APIS)
def test_settings_of_the_hub_and_of_opentelemetry_reach_every_service(
    compose_env: Path, profile: str, name: str
) -> None:
    given = {
        "HF_TOKEN": "hf_made",
        "HF_ENDPOINT": "http://mirror.example",
        "HF_HUB_OFFLINE": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=b",
        "OTEL_SERVICE_NAME": "prices",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
    }
    service = composed(profile, HF_HOME="/data/hub", **given)[name]
    assert given.items() <= service["environment"].items()
    assert service["environment"]["HF_HOME"] == "/hub"
    (hub,) = [mount for mount in service["volumes"] if mount["target"] == "/hub"]
    assert hub["source"] == "/data/hub"
    assert not hub.get("read_only")
    assert not hub.get("bind", {}).get("create_host_path")  # root would own it


@pytest.mark.parametrize(("profile", "name"), APIS)
def test_what_the_host_does_not_set_is_not_set_in_the_container(
    compose_env: Path, profile: str, name: str
) -> None:
    service = composed(profile)[name]
    there = {key for key, value in service["environment"].items() if value is not None}
    assert not {key for key in there if key.startswith("OTEL_")}
    assert {key for key in there if key.startswith("HF_")} == {"HF_HOME"}
    assert service["environment"]["HF_HOME"] == ""
    assert [mount["source"] for mount in service["volumes"] if mount["target"] == "/hub"] == ["/dev/null"]


def test_grpc_has_a_port_of_its_own_on_the_loopback(compose_env: Path) -> None:
    service = composed("grpc", WEIR_GRPC_PORT="9005")["api-grpc"]
    assert service["image"] == "weir/cpu-extras:latest"
    assert service["environment"]["WEIR_GRPC_LISTEN"] == "0.0.0.0:8001"
    ports = [(port["host_ip"], port["published"], port["target"]) for port in service["ports"]]
    assert ports == [("127.0.0.1", "8004", 8000), ("127.0.0.1", "9005", 8001)]


def test_a_hubs_cache_of_the_host_can_be_read_and_written(
    compose_env: Path, project: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hf_made")
    tmp_path.chmod(0o777)
    see = 'import os; print(os.environ["HF_HOME"], os.listdir("/hub")); open("/hub/made", "w")'
    run = ("run", "--rm", "--no-deps", "--entrypoint", "python3", "api", "-c")
    done = compose(*run, see, project=f"{project}-hub", HF_HOME=str(tmp_path))
    assert done.stdout == "/hub ['token']\n", done.stderr
    assert (tmp_path / "made").exists()
    seen = 'import os, stat; print(repr(os.environ["HF_HOME"]), stat.S_ISCHR(os.stat("/hub").st_mode))'
    done = compose(*run, seen, project=f"{project}-hub")
    assert done.stdout == "'' True\n", done.stderr
    compose("down", project=f"{project}-hub")


# ---- the service -------------------------------------------------------------------------------------


def test_it_comes_up_ready_with_weights_called_random(client: Client) -> None:
    assert client.ask("GET", "/v2/health/live")[0] == 200
    assert client.ask("GET", "/v2/health/ready")[0] == 200
    described = json.loads(client.ask("GET", "/v2/models/finbert")[2])["parameters"]
    assert (described["weights"], described["parameter_count"]) == ("random", 109_484_547)


def test_both_forms_answer_alike(client: Client) -> None:
    status, _, body = client.predict("Profits rose.", "Losses widened.")
    plain = json.loads(body)
    assert (status, plain["weights"], plain["device"]) == (200, "random", "cpu")
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["Profits rose.", "Losses widened."]}
    status, _, body = client.ask(
        "POST", "/v2/models/finbert/infer", json.dumps({"inputs": [tensor]}).encode()
    )
    outputs = {each["name"]: each["data"] for each in json.loads(body)["outputs"]}
    assert status == 200
    assert outputs["label"] == [each["label"] for each in plain["predictions"]]
    flat = [score for each in plain["predictions"] for score in each["scores"].values()]
    assert outputs["probabilities"] == pytest.approx(flat, abs=1e-5)


def test_a_text_scores_the_same_alone_and_beside_a_longer_one(client: Client) -> None:
    alone = json.loads(client.predict("Profits rose.")[2])["predictions"][0]["scores"]
    beside = json.loads(client.predict("Profits rose.", LONG)[2])["predictions"]
    assert beside[0]["scores"] == pytest.approx(alone, abs=1e-5)
    assert [each["truncated"] for each in beside] == [False, True]


def test_no_malformed_request_is_a_500(client: Client) -> None:
    bodies = [
        b"",
        b"{",
        b"\xff",
        b"[" * 9999,
        b'{"texts": ["\\ud800"]}',
        b'{"token_ids": [[30522]]}',
        b"9" * 9999,
    ]
    for path in ("/predict", "/v2/models/finbert/infer"):
        assert {client.ask("POST", path, body)[0] for body in bodies} == {400}
    assert client.ask("POST", "/predict", b" " * ((1 << 20) + 1))[0] == 413


def test_overload_is_shed_and_health_answers_all_the_while(client: Client) -> None:
    with ThreadPoolExecutor(16) as pool:
        pending = [pool.submit(client.predict, LONG) for _ in range(16)]
        health = []  # status, and how many were answered before it and after it
        while (before := n_done(pending)) < len(pending):
            status = client.ask("GET", "/v2/health/ready")[0]
            health.append((status, before, n_done(pending)))
            time.sleep(0.05)
        answers = [each.result() for each in pending]
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= QUEUE
    waits = [int(headers["retry-after"]) for status, headers, _ in answers if status == 429]
    assert all(1 <= wait <= 120 for wait in waits)  # what 8192 tokens take here, not a constant
    assert {status for status, _, _ in health} == {200}
    # a pass takes a second: an answer that waits for none comes between two of them
    assert any(before == after for _, before, after in health)


def n_done(asked: Sequence[Future[Any]]) -> int:
    return sum(each.done() for each in asked)


def test_metrics_show_what_the_container_computed(client: Client) -> None:
    client.predict("Profits rose.")
    status, headers, body = client.ask("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert re.search(rb"^weir_tokens_total [1-9]", body, re.MULTILINE)
    assert b"weir_ready 1.0" in body


def test_embeddings_and_the_page_are_served_from_the_container(client: Client) -> None:
    status, _, body = client.ask("POST", "/v1/embeddings", b'{"model": "finbert", "input": "Profits rose."}')
    (found,) = json.loads(body)["data"]
    assert (status, len(found["embedding"])) == (200, 768)
    assert sum(x * x for x in found["embedding"]) == pytest.approx(1, abs=1e-4)
    assert b"Ask the model" in client.ask("GET", "/")[2]


def test_slow_and_half_open_callers_lock_nobody_out(client: Client) -> None:
    slow = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    with ExitStack() as stack:
        for sent in [slow] * 32 + [b"GET / HTTP/1.1\r\nHost:"] * 600:
            stack.enter_context(socket.create_connection(client.address, timeout=60)).sendall(sent)
        time.sleep(1)  # the port's proxy passes the last of them on
        assert client.ask("GET", "/v2/health/ready")[0] == 200
        assert client.predict("Profits rose.")[0] == 200


def test_it_runs_without_privilege_or_a_place_to_write(docker_services: Any, project: str) -> None:
    script = "id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; stat -c %u /tmp; touch /opt/x"
    done = compose("exec", "-T", "api", "sh", "-c", script, project=project)
    zero = "0" * 16
    assert done.stdout.split() == ["10001", "CapEff:", zero, "CapBnd:", zero, "NoNewPrivs:", "1", "10001"]
    assert "Read-only file system" in done.stderr


def test_sigterm_answers_those_inside_and_exits_0(client: Client, project: str) -> None:
    identity = compose("ps", "-aq", "api", project=project).stdout.strip()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            while n_inside(client):
                time.sleep(0.05)
            # a tenth of the 30 s that a drain may take, on two idle cores; other tests may be running on them
            inside = [pool.submit(client.predict, LONG) for _ in range(3)]
            while n_inside(client) < 3 and not any(each.done() for each in inside):
                pass
            if not any(each.done() for each in inside):  # else they came one after the other
                break
        docker("kill", "--signal", "TERM", identity)
        assert [each.result()[0] for each in inside] == [200] * 3
    code = docker("wait", identity)
    try:
        assert code == "0"
        log = compose("logs", "api", project=project).stdout
        assert re.search(r"SIGTERM: not ready any more, [1-3] in flight", log)
    finally:
        compose("up", "-d", "--wait", project=project)


def n_inside(client: Client) -> int:
    found = re.search(rb"^weir_in_flight (\d+)", client.ask("GET", "/metrics")[2], re.MULTILINE)
    assert found
    return int(found[1])


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"APP_PROFILE": "experiment2"}, 3, "device 'rocm' needs a ROCm (HIP) build of torch"),
        ({"APP_PROFILE": "experiment9"}, 2, "known profiles: experiment1, experiment2"),
        ({"WEIR_DEVICE": "gpu"}, 2, "device 'gpu' is not known"),
        ({"WEIR_MODEL_DIR": "{open}"}, 5, "/models holds no model"),
        ({"WEIR_MODEL_DIR": "{closed}"}, 5, "/models can't be read"),
    ],
)
def test_what_can_not_work_ends_with_a_message_and_its_code(
    compose_env: Path, project: str, tmp_path: Path, env: dict[str, str], code: int, said: str
) -> None:
    for name, mode in (("open", 0o755), ("closed", 0o700)):
        (tmp_path / name).mkdir(mode=mode)
    places = {name: tmp_path / name for name in ("open", "closed")}
    filled = {name: value.format(**places) for name, value in env.items()}
    done = compose("run", "--rm", "--no-deps", "api", project=project, **filled)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


# ---- a mounted model ---------------------------------------------------------------------------------

TINY = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 8,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "id2label": {"0": "up", "1": "down"},
}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "profit", "##s", "rose", "."]
SQUARE, HIDDEN = (8, 8), (8,)
SHAPES = {
    "bert.embeddings.word_embeddings.weight": (8, 8),
    "bert.embeddings.position_embeddings.weight": (16, 8),
    "bert.embeddings.token_type_embeddings.weight": (2, 8),
    "bert.embeddings.LayerNorm.weight": HIDDEN,
    "bert.embeddings.LayerNorm.bias": HIDDEN,
    **{
        f"bert.encoder.layer.0.{name}.{kind}": (rows, columns) if kind == "weight" and columns else (rows,)
        for name, rows, columns in (
            ("attention.self.query", 8, 8),
            ("attention.self.key", 8, 8),
            ("attention.self.value", 8, 8),
            ("attention.output.dense", 8, 8),
            ("attention.output.LayerNorm", 8, 0),
            ("intermediate.dense", 16, 8),
            ("output.dense", 8, 16),
            ("output.LayerNorm", 8, 0),
        )
        for kind in ("weight", "bias")
    },
    "bert.pooler.dense.weight": SQUARE,
    "bert.pooler.dense.bias": HIDDEN,
    "classifier.weight": (2, 8),
    "classifier.bias": (2,),
}


def write_model(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Weights of 0 but for the classifier's bias: whatever is said, the odds are e to 1 for `up`."""
    header, data = {}, b""
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [1.0, 0.0] if name == "classifier.bias" else [0.0] * count
        start, data = len(data), data + struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (directory / "config.json").write_text(json.dumps(TINY))
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    directory.chmod(0o755)


def ask_inside(directory: Path, project: str) -> subprocess.CompletedProcess[str]:
    """Start the service over `directory`, wait, ask it one thing, all in one throw-away container."""
    script = (
        "python3 -m service & server=$!; for i in $(seq 500); do "
        "kill -0 $server 2>/dev/null || { wait $server; exit; }; "
        "python3 -m service.health 2>/dev/null && break; sleep 0.2; done; "
        "python3 -c 'import urllib.request as r; print(r.urlopen(r.Request("
        '"http://127.0.0.1:8000/predict", b"{\\"texts\\": [\\"Profits rose.\\"]}")).read().decode())\'; '
        "kill $server; wait $server"
    )
    return compose(
        "run", "--rm", "--no-deps", "api", "sh", "-c", script, project=project, WEIR_MODEL_DIR=str(directory)
    )


def test_a_mounted_model_with_its_vocabulary_answers(compose_env: Path, project: str, tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES)
    done = ask_inside(tmp_path, project)
    assert done.returncode == 0, done.stderr
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"model"')))
    assert (answer["weights"], answer["tokenizer"]) == ("mounted", "wordpiece")
    (prediction,) = answer["predictions"]
    assert prediction["tokens"] == 6  # [CLS] profit ##s rose . [SEP]
    assert prediction["scores"] == pytest.approx({"up": 0.731059, "down": 0.268941}, abs=1e-5)


def test_a_model_of_another_shape_is_refused_by_name(compose_env: Path, project: str, tmp_path: Path) -> None:
    odd = {name: shape for name, shape in SHAPES.items() if name != "bert.pooler.dense.bias"}
    write_model(tmp_path, odd | {"classifier.weight": (3, 8)})
    done = ask_inside(tmp_path, project)
    assert done.returncode == 5
    said = done.stdout + done.stderr
    assert "1 missing: bert.pooler.dense.bias" in said
    assert "classifier.weight [3, 8] instead of [2, 8]" in said


def test_the_forward_pass_is_that_of_torchs_own_layers() -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", "-i", "--network", "none", IMAGE, "python3", "-"],
        input=(ROOT / "tests/docker/bert_reference.py").read_text(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr


# ---- the probe ---------------------------------------------------------------------------------------


def test_a_probe_writes_where_no_directory_was(compose_env: Path, project: str) -> None:
    assert not compose_env.exists()
    done = compose("run", "--rm", "probe", "sh", "-c", "id -u && touch /reports/new", project=project)
    assert (done.returncode, done.stdout.strip()) == (0, "10001"), done.stderr
    written = compose_env / "probes" / "new"
    assert written.stat().st_uid == 10001
    written.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a directory of somebody else's")
def test_a_probe_writes_into_somebodys_directory_that_stays_theirs(
    compose_env: Path, project: str, tmp_path: Path
) -> None:
    directory = tmp_path / "probes"
    directory.mkdir(mode=0o755)
    os.chown(directory, 1000, 1000)
    done = compose(
        "run", "--rm", "probe", "touch", "/reports/new", project=project, WEIR_REPORTS_DIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert (directory / "new").exists()
    assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (1000, 0o775)


def test_the_probe_leaves_a_report_that_is_json(compose_env: Path, project: str) -> None:
    done = compose("run", "--rm", "probe", project=project)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (compose_env / "probes").glob("*.json")
    assert "schema_version" in json.loads(report.read_text())
