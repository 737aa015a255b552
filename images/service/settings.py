"""The service's settings: environment and profile, checked and combined into one value."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from service.errors import SettingsError
from service.listen import DEFAULT_LISTEN, parse_listen

HERE = Path(__file__).resolve().parent
MAX_POSITIONS = 512

Weights = Literal["auto", "mounted", "random"]
Dtype = Literal["float32", "bfloat16", "float16"]
WEIGHTS: tuple[Weights, ...] = ("auto", "mounted", "random")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all requests together."""

    max_body_bytes: int = 1 << 20
    max_texts: int = 32
    max_text_chars: int = 20_000
    max_tokens: int = (
        MAX_POSITIONS  # per text, [CLS] and [SEP] included; longer texts are cut, and the answer shows it
    )
    max_in_flight: int = 64  # requests whose body has arrived; further ones get 429
    max_queue_tokens: int = 8192  # of the texts of all requests in flight; further requests get 429
    max_batch_tokens: int = 512  # computed together, padding included; a CPU gains nothing from more
    max_wait_ms: int = 5  # that the device idles at most, for callers who come together to share a batch
    max_connections: int = 512  # open at once; each may hold a body of max_body_bytes in memory
    header_timeout_s: int = 10  # from the connection, or the answer before, to the end of a request's head
    body_timeout_s: int = 10  # from the end of the head to the end of the body
    drain_s: int = 30  # of stop_grace_period, for those who are in already
    canary_s: int = 30  # of idleness, after which a small inference checks the device
    stall_s: int = 60  # that one batch may take before the service is no longer ready


@dataclass(frozen=True)
class Placement:
    """Where weights are placed: by a plan for `machine`, within `vram_budget` bytes (None: what is free)."""

    machine: str  # a profile's name of `weir plan`, or the path of a probe report
    vram_budget: int | None = None


@dataclass(frozen=True)
class Hub:
    """A model of a Hugging Face hub: `owner/name` and the commit, so that its files can't change."""

    repository: str
    revision: str
    max_bytes: int = 4 * 10**9  # of all its files together; BERT's largest have 1.4 GB

    def __str__(self) -> str:
        return f"{self.repository} at {self.revision}"


@dataclass(frozen=True)
class Settings:
    """Everything that decides how the service starts."""

    profile: str
    device: str
    model_dir: Path
    weights: Weights
    host: str
    port: int
    limits: Limits
    grpc: tuple[str, int] | None = None  # host and port; None: no gRPC
    threads: int | None = None  # of torch on the CPU; None: what the container's CPU quota gives
    dtype: Dtype = "float32"  # of the weights on the device
    compile: bool = False  # by torch.compile
    capture: bool | None = None  # passes on a GPU as CUDA graphs; None: unless the GPU is AMD's
    capture_bytes: int = 512 * 10**6  # of VRAM that they may take
    model_control: bool = False  # whether callers may load and unload models
    placement: Placement | None = None  # None: all weights are on the device
    spans: bool = False  # for OpenTelemetry
    hub: Hub | None = None  # where the default model comes from; None: from model_dir


# profile key -> smallest and largest value; each is a field of Limits, or `threads`
NUMBERS = {
    "max_body_bytes": (1 << 10, 64 << 20),
    "max_texts": (1, 256),
    "max_text_chars": (1, 1_000_000),
    "max_tokens": (3, MAX_POSITIONS),
    "max_in_flight": (1, 1024),
    "max_connections": (2, 8192),
    "header_timeout_s": (1, 300),
    "body_timeout_s": (1, 300),
    "drain_s": (0, 600),
    "max_queue_tokens": (MAX_POSITIONS, 1 << 22),
    "max_batch_tokens": (1, 1 << 20),
    "max_wait_ms": (0, 1000),
    "canary_s": (1, 3600),
    "stall_s": (1, 3600),
    "threads": (1, 1024),
}
FLAGS = (
    "compile",
    "capture",
    "model_control",
)  # profile keys that are true or false; each is a field of Settings
PLACEMENT_KEYS = ("placement", "machine", "vram_budget")
PROFILE_KEYS = ("device", "model", "dtype", "capture_vram", *PLACEMENT_KEYS, *FLAGS, *NUMBERS)
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNITS = {"MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}


def profile_path(env: Mapping[str, str]) -> Path:
    """The YAML file of APP_PROFILE. Raises SettingsError for a name that could leave the directory."""
    name = env.get("APP_PROFILE") or "experiment1"
    if not name.replace("-", "").replace("_", "").isalnum():
        raise SettingsError(f"APP_PROFILE {name!r} is not a profile's name", "letters, digits, - and _ only")
    directory = Path(env.get("WEIR_PROFILES_DIR") or HERE.parent / "profiles")
    return directory / f"application-{name}.yaml"


def build_settings(env: Mapping[str, str], profile: Mapping[str, object], source: Path) -> Settings:
    """One Settings of the environment and the profile that `source` held. Raises SettingsError.

    The environment's WEIR_DEVICE wins over the profile's `device`.
    """
    unknown = [key for key in profile if key not in PROFILE_KEYS]
    if unknown:
        raise SettingsError(f"{source}: unknown key {unknown[0]!r}", f"known keys: {', '.join(PROFILE_KEYS)}")
    device = env.get("WEIR_DEVICE") or profile.get("device")
    if not isinstance(device, str):
        raise SettingsError(f"{source}: device is {device!r}", "write one of cpu, rocm, cuda: `device: cpu`")
    numbers = {key: _number(source, key, profile[key]) for key in NUMBERS if key in profile}
    threads = numbers.pop("threads", None)
    dtype = profile.get("dtype", "float32")
    if dtype not in DTYPES:
        raise SettingsError(f"{source}: dtype is {dtype!r}", f"write one of {', '.join(DTYPES)}")
    flags = {key: _flag(source, key, profile[key]) for key in FLAGS if key in profile}
    capture_bytes = Settings.capture_bytes
    if "capture_vram" in profile:
        capture_bytes = _bytes(source, "capture_vram", profile["capture_vram"])
    weights = env.get("WEIR_WEIGHTS") or "auto"
    if weights not in WEIGHTS:
        raise SettingsError(f"WEIR_WEIGHTS {weights!r} is not known", f"use one of {', '.join(WEIGHTS)}")
    host, port = parse_listen(env.get("WEIR_LISTEN") or DEFAULT_LISTEN)
    limits = replace(Limits(), **numbers)
    if limits.max_connections <= limits.max_in_flight:  # health checks need a place too
        raise SettingsError(
            f"{source}: max_connections is {limits.max_connections}, max_in_flight {limits.max_in_flight}",
            f"write max_connections: {2 * limits.max_in_flight} or more",
        )
    return Settings(
        profile=source.stem.removeprefix("application-"),
        device=device,
        model_dir=Path(env.get("WEIR_MODEL_DIR") or "/models"),
        weights=weights,
        host=host,
        port=port,
        limits=limits,
        grpc=parse_listen(grpc, "WEIR_GRPC_LISTEN") if (grpc := env.get("WEIR_GRPC_LISTEN")) else None,
        threads=threads,
        dtype=dtype,
        compile=flags.get("compile", False),
        capture=flags.get("capture"),
        capture_bytes=capture_bytes,
        model_control=flags.get("model_control", False),
        placement=_placement(source, profile),
        spans=_wants_spans(env),
        hub=_hub(source, profile.get("model"), weights),
    )


def _wants_spans(env: Mapping[str, str]) -> bool:
    """By the variables of OpenTelemetry itself: off unless an endpoint is named."""
    named = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return bool(named) and not off and env.get("OTEL_TRACES_EXPORTER") != "none"


def _hub(source: Path, model: object, weights: Weights) -> Hub | None:
    if model is None:
        return None
    example = "model: {hub: owner/name, revision: 40 hexadecimal digits}"
    if not isinstance(model, dict) or set(model) - {"max_size"} != {"hub", "revision"}:
        raise SettingsError(f"{source}: model is {model!r}", f"write {example}")
    repository, revision = model["hub"], model["revision"]
    if not isinstance(repository, str) or not _REPOSITORY.fullmatch(repository):
        raise SettingsError(f"{source}: hub is {repository!r}", "write owner/name, as the hub does")
    _require_commit(source, repository, revision)
    if weights != "auto":
        raise SettingsError(
            f"{source} takes its model from a hub, but WEIR_WEIGHTS (or WEIR_MODEL_DIR) says {weights}",
            "unset it, or remove `model` from the profile",
        )
    if "max_size" not in model:
        return Hub(repository, revision)
    return Hub(repository, revision, _bytes(source, "max_size", model["max_size"]))


def _require_commit(source: Path, repository: str, revision: object) -> None:
    if not isinstance(revision, str):
        raise SettingsError(f"{source}: revision is {revision!r}, a number to YAML", "put it in quotes")
    if not _COMMIT.fullmatch(revision):
        raise SettingsError(
            f"{source}: revision {revision!r} is no commit: a branch or a tag can be moved to other files",
            f"write the commit's 40 hexadecimal digits, from the hub's list of commits of {repository}",
        )


def _placement(source: Path, profile: Mapping[str, object]) -> Placement | None:
    wanted = profile.get("placement", "none")
    if wanted not in ("none", "auto"):
        raise SettingsError(f"{source}: placement is {wanted!r}", "write none or auto")
    machine, budget = profile.get("machine"), profile.get("vram_budget")
    if wanted == "none":
        if machine is not None or budget is not None:
            raise SettingsError(
                f"{source}: machine and vram_budget need a placement", "write placement: auto"
            )
        return None
    if not isinstance(machine, str) or not machine:
        raise SettingsError(
            f"{source}: machine is {machine!r}", "write a profile's name or a probe report: machine: wx4100"
        )
    if profile.get("compile") is True:
        raise SettingsError(f"{source}: a placed model can't be compiled", "write compile: false")
    return Placement(machine, None if budget is None else _bytes(source, "vram_budget", budget))


def _bytes(source: Path, key: str, value: object) -> int:
    number, _, unit = str(value).partition(" ")
    try:
        found = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        found = 0
    if found <= 0:
        raise SettingsError(f"{source}: {key} is {value!r}", f"write a size in {', '.join(_UNITS)}: 2 GB")
    return found


def _flag(source: Path, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{source}: {key} is {value!r}", "write true or false")
    return value


def _number(source: Path, key: str, value: object) -> int:
    low, high = NUMBERS[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SettingsError(f"{source}: {key} is {value!r}", f"write a whole number from {low} to {high}")
    return value


def quota_cpus(cpu_max: str) -> int | None:
    """CPUs that a cgroup's `cpu.max` ("QUOTA PERIOD", in microseconds) allows, at least 1; None: no quota."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))
