"""Rules for services of compose files; devcontainer.json, whose containers the same rules judge."""

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from buildtool.core.errors import ConfigError
from buildtool.core.yaml_text import Document, KeyPath, Limits, parse
from buildtool.doctor.lint.containers import AMD_IMAGE, Container, container_checks, run_arguments
from buildtool.doctor.lint.rules import Checks, Fault, Word
from buildtool.doctor.lint.shell import Context, container_command_faults

LIMITS = Limits(depth=40, nodes=100_000, merge=True)
# keys of a service in the Compose Specification
SERVICE_KEYS = frozenset({
    "annotations", "attach", "blkio_config", "build", "cap_add", "cap_drop", "cgroup", "cgroup_parent",
    "command", "configs", "container_name", "cpu_count", "cpu_percent", "cpu_period", "cpu_quota",
    "cpu_rt_period", "cpu_rt_runtime", "cpu_shares", "cpus", "cpuset", "credential_spec", "depends_on",
    "deploy", "develop", "device_cgroup_rules", "devices", "dns", "dns_opt", "dns_search", "domainname",
    "driver_opts", "entrypoint", "env_file", "environment", "expose", "extends", "external_links",
    "extra_hosts", "gpus", "group_add", "healthcheck", "hostname", "image", "init", "ipc", "isolation",
    "label_file", "labels", "links", "logging", "mac_address", "mem_limit", "mem_reservation",
    "mem_swappiness", "memswap_limit", "models", "network_mode", "networks", "oom_kill_disable",
    "oom_score_adj", "pid", "pids_limit", "platform", "ports", "post_start", "pre_stop", "privileged",
    "profiles", "provider", "pull_policy", "pull_refresh_after", "read_only", "restart", "runtime", "scale",
    "secrets", "security_opt", "shm_size", "stdin_open", "stop_grace_period", "stop_signal", "storage_opt",
    "sysctls", "tmpfs", "tty", "ulimits", "use_api_socket", "user", "userns_mode", "uts", "volumes",
    "volumes_from", "working_dir"
})  # fmt: skip
TOP_KEYS = {"services", "networks", "volumes", "configs", "secrets", "include", "name", "version", "models"}
LIST_KEYS = (
    "devices",
    "group_add",
    "cap_add",
    "cap_drop",
    "security_opt",
    "ports",
    "volumes",
    "profiles",
    "device_cgroup_rules",
)
# keys of a service -> options of `docker run`
LIST_OPTIONS = {
    "devices": "device",
    "group_add": "group-add",
    "cap_add": "cap-add",
    "security_opt": "security-opt",
    "volumes": "volume",
    "tmpfs": "tmpfs",
}
SINGLE_OPTIONS = {"runtime": "runtime", "ipc": "ipc", "shm_size": "shm-size"}
RESERVATIONS = ("deploy", "resources", "reservations", "devices")
DEVCONTAINER_LIMITS = Limits(depth=40, nodes=100_000)


@dataclass(frozen=True)
class Service:
    """A service of a compose file: its keys and values, and where they stand."""

    values: dict[str, Any]
    path: KeyPath
    document: Document

    def line(self, *keys: str | int) -> int:
        """The line of the service, or of a key in it."""
        return self.document.line((*self.path, *keys))

    def items(self, key: str) -> list[Any]:
        """The items of a list; none where the key is missing or has another kind of value."""
        value = self.values.get(key)
        return value if isinstance(value, list) else []

    def reservations(self) -> list[Any]:
        """The items of deploy.resources.reservations.devices."""
        value: Any = self.values.get("deploy")
        for key in RESERVATIONS[1:]:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, list) else []


service_checks = Checks[[Service]]()


def lint_compose(text: str, name: str) -> Iterator[Fault]:
    """Every fault of a compose file."""
    try:
        document = parse(text, name, LIMITS)
    except ConfigError as error:
        yield from _unreadable(error, name)
        return
    data = document.data
    services = data.get("services") if isinstance(data, dict) else None
    if not isinstance(data, dict) or (services is not None and not isinstance(services, dict)):
        yield Fault(1, "unreadable", "there is no mapping of services")
        return
    for key in data:
        if key not in TOP_KEYS and not key.startswith("x-"):
            yield from _unknown_key(key, TOP_KEYS, document.line((key,)))
    for service, values in (services or {}).items():
        path = ("services", service)
        if isinstance(values, dict):
            yield from service_checks(Service(values, path, document))
        else:
            yield Fault(document.line(path), "compose-wrong-type", f"service {service}")


def _unreadable(error: ConfigError, name: str) -> Iterator[Fault]:
    """A parser's error as a fault, at the line that it names."""
    match = re.match(rf"{re.escape(name)}:(\d+): (.*)", error.message, re.S)
    yield Fault(int(match[1]) if match else 1, "unreadable", (match[2] if match else error.message)[:200])


def _unknown_key(key: str, known: Collection[str], line: int) -> Iterator[Fault]:
    close = difflib.get_close_matches(key, sorted(known), 1)
    yield Fault(line, "compose-unknown-key", f"{key}, for {close[0]}?" if close else key)


@service_checks.add
def _keys(service: Service) -> Iterator[Fault]:
    for key, value in service.values.items():
        line = service.line(key)
        if key == "device":
            yield Fault(line, "compose-device-key", "device:")
        elif key not in SERVICE_KEYS and not key.startswith("x-"):
            yield from _unknown_key(key, SERVICE_KEYS, line)
        elif key in LIST_KEYS and isinstance(value, str | int):
            yield Fault(line, "compose-wrong-type", f"{key}: {value}")


@service_checks.add
def _device_mappings(service: Service) -> Iterator[Fault]:
    for index, device in enumerate(service.items("devices")):
        if isinstance(device, dict) and not {"source", "target"} & set(device):
            yield Fault(service.line("devices", index), "compose-cdi-mapping", "devices: - {driver: ...}")


@service_checks.add
def _reservations(service: Service) -> Iterator[Fault]:
    image = str(service.values.get("image") or "")
    for index, reservation in enumerate(service.reservations()):
        if not isinstance(reservation, dict):
            continue
        line, driver = service.line(*RESERVATIONS, index), reservation.get("driver")
        if "capabilities" not in reservation and driver != "cdi":
            yield Fault(line, "compose-capabilities-missing", str(driver or "devices"))
        if "count" in reservation and "device_ids" in reservation:
            yield Fault(line, "compose-count-and-ids", "count, device_ids")
        if driver == "nvidia" and AMD_IMAGE.search(image):
            yield Fault(line, "nvidia-runtime-for-amd", "driver: nvidia")


@service_checks.add
def _container(service: Service) -> Iterator[Fault]:
    container = _container_of_service(service)
    yield from container_checks(container)
    yield from container_command_faults(container.command, container.line, Context())


def _container_of_service(service: Service) -> Container:
    """A service as the container that it starts."""
    values = service.values
    options: list[tuple[str, Word]] = []
    for key, name in LIST_OPTIONS.items():
        written = "device" if key == "devices" and "device" in values else key
        for index, item in enumerate(service.items(written)):
            options.append((name, Word(_list_item(item), service.line(written, index))))
    for key, name in SINGLE_OPTIONS.items():
        if values.get(key):
            options.append((name, Word(str(values[key]), service.line(key))))
    if values.get("privileged") is True:
        options.append(("privileged", Word("", service.line("privileged"))))
    if values.get("gpus"):
        options.append(("gpus", Word(str(values["gpus"])[:40], service.line("gpus"))))
    elif any(isinstance(reservation, dict) for reservation in service.reservations()):
        options.append(("reserved", Word("", service.line("deploy"))))
    image, command = values.get("image"), values.get("command")
    return Container(
        line=service.line(),
        image=Word(str(image), service.line("image")) if image else None,
        options=tuple(options),
        environment=_environment(service),
        command=" ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
        builds="build" in values,
    )


def _list_item(item: object) -> str:
    """An item of a list of devices or mounts: a text, or the source of a mapping."""
    if isinstance(item, str | int):
        return str(item)
    return str(item.get("source")) if isinstance(item, dict) else ""


def _environment(service: Service) -> dict[str, Word]:
    variables = service.values.get("environment")
    if isinstance(variables, dict):
        return {
            key: Word("" if value is None else str(value), service.line("environment", key))
            for key, value in variables.items()
        }
    pairs = [str(item).partition("=") for item in service.items("environment")]
    return {
        key: Word(value, service.line("environment", index)) for index, (key, _, value) in enumerate(pairs)
    }


# ---- devcontainer.json -------------------------------------------------------------------------------


def lint_devcontainer(text: str, name: str) -> Iterator[Fault]:
    """Every fault of a devcontainer.json."""
    try:
        document = parse(uncommented(text), name, DEVCONTAINER_LIMITS)
    except ConfigError as error:
        yield from _unreadable(error, name)
        return
    if not isinstance(document.data, dict):
        yield Fault(1, "unreadable", "there is no object")
        return
    yield from container_checks(_container_of_devcontainer(document.data, document))


def _container_of_devcontainer(data: dict[str, Any], document: Document) -> Container:
    options = run_arguments(_words(data, "runArgs", document))
    for key, name in (("capAdd", "cap-add"), ("securityOpt", "security-opt")):
        options += [(name, word) for word in _words(data, key, document)]
    if data.get("privileged") is True:
        options.append(("privileged", Word("", document.line(("privileged",)))))
    image, variables = data.get("image"), data.get("containerEnv")
    environment = {
        str(key): Word(str(value), document.line(("containerEnv", key)))
        for key, value in (variables.items() if isinstance(variables, dict) else ())
    }
    for name, word in options:
        if name == "env":
            key, _, value = word.text.partition("=")
            environment[key] = Word(value, word.line)
    return Container(
        line=1,
        image=Word(str(image), document.line(("image",))) if image else None,
        options=tuple(options),
        environment=environment,
        builds="build" in data or "dockerComposeFile" in data,
    )


def _words(data: dict[str, Any], key: str, document: Document) -> list[Word]:
    """The items of a list with their lines; none where the value isn't a list."""
    items = data.get(key)
    if not isinstance(items, list):
        return []
    return [Word(str(item), document.line((key, index))) for index, item in enumerate(items)]


def uncommented(text: str) -> str:
    """JSON with comments as JSON that YAML reads: comments go, tabs become spaces, line numbers stay."""
    kept, index, inside = [], 0, False
    while index < len(text):
        char, two = text[index], text[index : index + 2]
        if inside and char == "\\":
            kept.append(two)
            index += 2
        elif not inside and two in ("//", "/*"):
            end = text.find("\n" if two == "//" else "*/", index + 2)
            end = len(text) if end < 0 else end + (0 if two == "//" else 2)
            kept.append("\n" * text.count("\n", index, end))
            index = end
        else:
            inside ^= char == '"'
            kept.append(" " if char == "\t" and not inside else char)
            index += 1
    return "".join(kept)
