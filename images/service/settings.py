"""The service's settings: every limit (`Limits`), and the environment and the profile as one checked value
(`build_settings`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from service.errors import SettingsError
from service.listen import DEFAULT_LISTEN, parse_listen

HERE = Path(__file__).resolve().parent
MAX_POSITIONS = 512  # of BERT's position embeddings

Weights = Literal["auto", "mounted", "random"]
Dtype = Literal["float32", "bfloat16", "float16"]
N = TypeVar("N", int, float)
WEIGHTS: tuple[Weights, ...] = ("auto", "mounted", "random")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Limit:
    """What a field of `Limits` is for. docs/service.md has all of them in one table, tested against this."""

    unit: str
    exceeded: str  # what a caller sees
    why: str  # what it protects, and how it follows from other limits
    within: tuple[int, int] | None = None  # smallest and largest value that may be set; None: fixed


def _limit(default: N, unit: str, exceeded: str, why: str, *, within: tuple[int, int] | None = None) -> N:
    return field(default=default, metadata={"limit": Limit(unit, exceeded, why, within)})


@dataclass(frozen=True)
class Limits:
    """Every limit of the service, each stated once: default, unit, what a caller sees, what it protects.

    Those with a range (`within`) are keys of the profile; the environment variable of `variable_of` wins.
    """

    # one request
    max_body_bytes: int = _limit(
        1 << 20,
        "bytes",
        "413",
        "memory: each of `max_connections` may hold a body; nginx's `client_max_body_size` is the same",
        within=(1 << 10, 64 << 20),
    )
    max_texts: int = _limit(32, "", "400", "how long one request keeps the queue", within=(1, 256))
    max_text_chars: int = _limit(
        20_000,
        "",
        "400",
        "the time of tokenizing; of use only within `max_body_bytes`",
        within=(1, 1_000_000),
    )
    max_tokens: int = _limit(
        MAX_POSITIONS,
        "",
        "a text is cut, `token_ids` get 400",
        "the model's positions ([CLS] and [SEP] included); fewer where the model has fewer",
        within=(3, MAX_POSITIONS),
    )
    max_timeout_s: int = _limit(3600, "s", "400", "the queue, from requests that never leave it")
    head_bytes: int = _limit(16 << 10, "bytes", "431", "memory of a connection before its request is known")
    head_fields: int = _limit(256, "", "431", "the event loop's time")
    body_free_chunks: int = _limit(1024, "", "400", "the event loop's time: each chunk costs some 15 us")
    body_bytes_per_chunk: int = _limit(
        64, "bytes", "400", "one more chunk for each, beyond `body_free_chunks`: 1 MiB takes 0.3 s at most"
    )

    # all requests together
    max_in_flight: int = _limit(
        64,
        "requests",
        "429",
        "waiting time and memory, of requests whose body has arrived. Less than `max_connections`, or the "
        "start fails; lowered, with a warning, where open files allow fewer connections",
        within=(1, 1024),
    )
    max_queue_tokens: int = _limit(
        8192,
        "tokens",
        "429",
        "waiting time: without padding, waiting and running. A request that finds the queue empty is taken "
        "whatever its size. A warning where it is less than `max_batch_tokens`",
        within=(MAX_POSITIONS, 1 << 22),
    )
    min_load_share: float = _limit(
        0.25,
        "",
        "429",
        "while requests are refused and batches get slower, `max_in_flight` and `max_queue_tokens` shrink, "
        "but not below this share",
    )
    max_batch_tokens: int = _limit(
        512,
        "tokens",
        "more batches",
        "a batch's time, padding included; a single row may have more. A CPU gains nothing from more",
        within=(1, 1 << 20),
    )
    max_wait_ms: int = _limit(
        5,
        "ms",
        "the batch starts",
        "idle time of the device, for callers who come back together",
        within=(0, 1000),
    )

    # connections
    max_connections: int = _limit(
        512,
        "",
        "503, or one without a whole request is closed",
        "memory and open files. Lowered, with a warning, to the open files less `reserved_files` and "
        "`backlog`; half of the files with gRPC",
        within=(2, 8192),
    )
    backlog: int = _limit(
        128,
        "",
        "waits in the kernel",
        "open files: so many connections are open before older ones are closed for them. At most half of "
        "what `reserved_files` leave",
    )
    reserved_files: int = _limit(64, "files", "-", "files of torch, the model, the log and the event loop")
    header_timeout_s: int = _limit(
        10,
        "s",
        "408; closed if nothing came",
        "connections, from callers who send slowly, or read nothing of their answer for as long",
        within=(1, 300),
    )
    body_timeout_s: int = _limit(
        10, "s", "408", "connections, from the end of the head to that of the body", within=(1, 300)
    )
    keep_alive_s: int = _limit(5, "s", "closed", "connections, from callers who ask nothing more")
    linger_s: float = _limit(1.0, "s", "closed", "after a refusal, time to send the rest and to read why")
    grpc_max_connections: int = _limit(
        8192, "", "closed", "memory. Lowered as `max_connections` is, with the other half of the files"
    )
    grpc_idle_s: int = _limit(15, "s", "closed", "connections for new callers: time without a call")
    grpc_age_s: int = _limit(60, "s", "closed; calls get `drain_s` to end", "connections for new callers")
    grpc_ping_s: int = _limit(10, "s", "closed", "between two pings, and until the answer to one")
    grpc_extra_bytes: int = _limit(4 << 10, "bytes", "-", "of a message around its tensors")

    # the device
    canary_s: int = _limit(
        30, "s", "-", "time until a fault is noticed: after it, an idle device is checked", within=(1, 3600)
    )
    stall_s: int = _limit(
        60,
        "s",
        "503",
        "callers, from a device that hangs: one batch. After twice as long the process ends",
        within=(1, 3600),
    )

    # the end
    drain_s: int = _limit(
        30,
        "s",
        "503",
        "the time from SIGTERM to the end, for requests in flight. `drain_s`, `close_s` and `flush_s` "
        "together must be less than compose's `stop_grace_period` (45 s)",
        within=(0, 600),
    )
    close_s: int = _limit(
        5, "s", "closed", "the time to the end, for connections to close after their last answer"
    )
    last_request_s: float = _limit(
        0.5, "s", "closed", "the time to the end, for a request that is just being sent"
    )
    flush_s: int = _limit(2, "s", "lost", "the time to the end, for spans")

    @property
    def grpc_message_bytes(self) -> int:
        """The most bytes of a gRPC message."""
        return self.max_body_bytes + self.grpc_extra_bytes

    @property
    def grpc_streams(self) -> int:
        """The most calls of one gRPC connection at a time; clients keep further calls waiting."""
        return 2 * self.max_in_flight

    def contradictions(self) -> tuple[str, ...]:
        """Return a message for each limit that can't be reached because of another."""
        messages = []
        if self.max_body_bytes < self.max_text_chars:
            messages.append(
                f"max_body_bytes is {self.max_body_bytes}: "
                f"a text of max_text_chars ({self.max_text_chars}) gets 413"
            )
        if self.max_queue_tokens < self.max_batch_tokens:
            messages.append(
                f"max_queue_tokens is {self.max_queue_tokens}: batches don't reach max_batch_tokens "
                f"({self.max_batch_tokens})"
            )
        if self.header_timeout_s < self.keep_alive_s:
            messages.append(
                f"header_timeout_s is {self.header_timeout_s}: idle connections are closed after that, "
                f"before keep_alive_s ({self.keep_alive_s})"
            )
        return tuple(messages)

    def within_open_files(self, open_files: int, *, grpc: bool) -> "tuple[Limits, tuple[str, ...]]":
        """Return the limits that so many open files allow, and a message for each that was lowered.

        A burst's connections are open before older ones are closed for them. With gRPC, each protocol gets
        half of the files, so that neither can lock the other out. At least one connection each.
        """
        share = open_files // 2 if grpc else open_files
        free = max(2, share - self.reserved_files)
        backlog = min(self.backlog, free // 2)
        connections = min(self.max_connections, free - backlog)
        in_flight = min(self.max_in_flight, max(1, connections - 1))  # one is for health checks
        messages = []
        if connections < self.max_connections:
            messages.append(
                f"{share} open files allow {connections} connections, not the {self.max_connections} of "
                "max_connections"
            )
            if in_flight < self.max_in_flight:
                messages.append(
                    f"{connections} connections allow {in_flight} requests at a time, not the "
                    f"{self.max_in_flight} of max_in_flight"
                )
        fitted = replace(
            self,
            backlog=backlog,
            max_connections=connections,
            max_in_flight=in_flight if messages else self.max_in_flight,
            grpc_max_connections=min(self.grpc_max_connections, free - backlog),
        )
        return fitted, tuple(messages)


LIMITS: dict[str, Limit] = {limit.name: limit.metadata["limit"] for limit in fields(Limits)}
DERIVED_LIMITS = {
    "grpc_message_bytes": Limit("bytes", "`RESOURCE_EXHAUSTED`", "`max_body_bytes` + `grpc_extra_bytes`"),
    "grpc_streams": Limit("calls", "waits; `UNAVAILABLE`", "2 x `max_in_flight`, of one connection"),
}


def variable_of(name: str) -> str:
    """Return the environment variable of a limit with a range."""
    return f"WEIR_{name.upper()}"


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
    """Everything that decides how the service runs."""

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


SETTABLE_LIMITS = {name: limit.within for name, limit in LIMITS.items() if limit.within}
THREADS = (1, 1024)
FLAGS = ("compile", "capture", "model_control")  # true or false; each is a field of Settings
PLACEMENT_KEYS = ("placement", "machine", "vram_budget")
PROFILE_KEYS = (
    "device",
    "model",
    "dtype",
    "capture_vram",
    *PLACEMENT_KEYS,
    *FLAGS,
    *SETTABLE_LIMITS,
    "threads",
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNITS = {"MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}


def profile_path(env: Mapping[str, str]) -> Path:
    """Return the YAML file of APP_PROFILE. Raises SettingsError for a name that could leave the directory."""
    name = env.get("APP_PROFILE") or "experiment1"
    if not name.replace("-", "").replace("_", "").isalnum():
        raise SettingsError(f"APP_PROFILE {name!r} is not a profile's name", "letters, digits, - and _ only")
    directory = Path(env.get("WEIR_PROFILES_DIR") or HERE.parent / "profiles")
    return directory / f"application-{name}.yaml"


def build_settings(env: Mapping[str, str], profile: Mapping[str, object], source: Path) -> Settings:
    """Combine the environment and the profile that `source` held. Raises SettingsError.

    The environment wins over the profile: WEIR_DEVICE over `device`, WEIR_MAX_TEXTS over `max_texts`.
    """
    unknown = [key for key in profile if key not in PROFILE_KEYS]
    if unknown:
        raise SettingsError(f"{source}: unknown key {unknown[0]!r}", f"known keys: {', '.join(PROFILE_KEYS)}")
    device = env.get("WEIR_DEVICE") or profile.get("device")
    if not isinstance(device, str):
        raise SettingsError(f"{source}: device is {device!r}", "write one of cpu, rocm, cuda: `device: cpu`")
    threads = _number(f"{source}: threads", profile["threads"], THREADS) if "threads" in profile else None
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
    return Settings(
        profile=source.stem.removeprefix("application-"),
        device=device,
        model_dir=Path(env.get("WEIR_MODEL_DIR") or "/models"),
        weights=weights,
        host=host,
        port=port,
        limits=_limits(env, profile, source),
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


def _limits(env: Mapping[str, str], profile: Mapping[str, object], source: Path) -> Limits:
    values: dict[str, Any] = {}
    for name, within in SETTABLE_LIMITS.items():
        variable = variable_of(name)
        if text := env.get(variable):
            values[name] = _number(variable, int(text) if re.fullmatch("[0-9]{1,9}", text) else text, within)
        elif name in profile:
            values[name] = _number(f"{source}: {name}", profile[name], within)
    limits = Limits(**values)
    if limits.max_connections <= limits.max_in_flight:  # health checks need a connection, too
        raise SettingsError(
            f"{source}: max_connections is {limits.max_connections}, max_in_flight {limits.max_in_flight}",
            f"write max_connections: {2 * limits.max_in_flight} or more",
        )
    return limits


def _wants_spans(env: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's own variables name an endpoint and don't turn it off."""
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return bool(endpoint) and not off and env.get("OTEL_TRACES_EXPORTER") != "none"


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
    placement = profile.get("placement", "none")
    if placement not in ("none", "auto"):
        raise SettingsError(f"{source}: placement is {placement!r}", "write none or auto")
    machine, budget = profile.get("machine"), profile.get("vram_budget")
    if placement == "none":
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
        n_bytes = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        n_bytes = 0
    if n_bytes <= 0:
        raise SettingsError(f"{source}: {key} is {value!r}", f"write a size in {', '.join(_UNITS)}: 2 GB")
    return n_bytes


def _flag(source: Path, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{source}: {key} is {value!r}", "write true or false")
    return value


def _number(where: str, value: object, within: tuple[int, int]) -> int:
    low, high = within
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SettingsError(f"{where} is {value!r}", f"write a whole number from {low} to {high}")
    return value


def quota_cpus(cpu_max: str) -> int | None:
    """Return the CPUs of a cgroup's `cpu.max` ("QUOTA PERIOD", in us), at least 1; None: no quota."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))
