"""Compose files: the shape of services, and what their containers lack."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from buildtool.core.errors import ConfigError
from buildtool.core.yaml_text import Document, KeyPath, Limits, parse
from buildtool.doctor.lint import containers, shell
from buildtool.doctor.lint.rules import Fault, Word
from buildtool.doctor.lint.shell import Context

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
LISTS = (
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
COPIED = {
    "devices": "device",
    "group_add": "group-add",
    "cap_add": "cap-add",
    "security_opt": "security-opt",
    "volumes": "volume",
    "tmpfs": "tmpfs",
}
SINGLE = {"runtime": "runtime", "ipc": "ipc", "shm_size": "shm-size"}


def lint_compose(text: str, name: str) -> Iterator[Fault]:
    """Every fault of a compose file."""
    try:
        document = parse(text, name, LIMITS)
    except ConfigError as error:
        yield from unreadable(error, name)
        return
    data = document.data
    services = data.get("services") if isinstance(data, dict) else None
    if not isinstance(data, dict) or (services is not None and not isinstance(services, dict)):
        yield Fault(1, "unreadable", "there is no mapping of services")
        return
    for key in data:
        if key not in TOP_KEYS and not key.startswith("x-"):
            yield from _unknown(key, TOP_KEYS, document.line((key,)))
    for service, own in (services or {}).items():
        if isinstance(own, dict):
            yield from _service(own, ("services", service), document)
        else:
            yield Fault(document.line(("services", service)), "compose-wrong-type", f"service {service}")


def unreadable(error: ConfigError, name: str) -> Iterator[Fault]:
    """A parser's complaint, at the line that it names."""
    found = re.match(rf"{re.escape(name)}:(\d+): (.*)", error.message, re.S)
    yield Fault(int(found[1]) if found else 1, "unreadable", (found[2] if found else error.message)[:200])


def _unknown(key: str, known: "frozenset[str] | set[str]", line: int) -> Iterator[Fault]:
    close = difflib.get_close_matches(key, sorted(known), 1)
    yield Fault(line, "compose-unknown-key", f"{key}, for {close[0]}?" if close else key)


def _service(own: dict[str, Any], at: KeyPath, document: Document) -> Iterator[Fault]:
    for key, value in own.items():
        line = document.line((*at, key))
        if key == "device":
            yield Fault(line, "compose-device-key", "device:")
        elif key not in SERVICE_KEYS and not key.startswith("x-"):
            yield from _unknown(key, SERVICE_KEYS, line)
        elif key in LISTS and isinstance(value, str | int):
            yield Fault(line, "compose-wrong-type", f"{key}: {value}")
    yield from _mappings(own, at, document)
    yield from _reservations(own, at, document)
    box = _container_of_service(own, at, document)
    yield from containers.container_faults(box)
    yield from shell.container_command_faults(box.command, box.line, Context())


def _mappings(own: dict[str, Any], at: KeyPath, document: Document) -> Iterator[Fault]:
    devices = own.get("devices")
    for number, one in enumerate(devices if isinstance(devices, list) else []):
        if isinstance(one, dict) and not {"source", "target"} & set(one):
            yield Fault(
                document.line((*at, "devices", number)), "compose-cdi-mapping", "devices: - {driver: ...}"
            )


def _reserved(own: dict[str, Any]) -> list[Any]:
    value: Any = own.get("deploy")
    for key in ("resources", "reservations", "devices"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, list) else []


def _reservations(own: dict[str, Any], at: KeyPath, document: Document) -> Iterator[Fault]:
    place = (*at, "deploy", "resources", "reservations", "devices")
    image = str(own.get("image") or "")
    for number, one in enumerate(_reserved(own)):
        if not isinstance(one, dict):
            continue
        line = document.line((*place, number))
        if "capabilities" not in one and one.get("driver") != "cdi":
            yield Fault(line, "compose-capabilities-missing", str(one.get("driver") or "devices"))
        if "count" in one and "device_ids" in one:
            yield Fault(line, "compose-count-and-ids", "count, device_ids")
        if one.get("driver") == "nvidia" and containers.AMD_IMAGE.search(image):
            yield Fault(line, "nvidia-runtime-for-amd", "driver: nvidia")


def _container_of_service(own: Mapping[str, Any], at: KeyPath, document: Document) -> containers.Container:
    """A service as the container that it starts."""

    def at_key(key: str, *more: str | int) -> int:
        return document.line((*at, key, *more))

    options = []
    for key, name in COPIED.items():
        written = "device" if key == "devices" and "device" in own else key
        values = own.get(written)
        for number, value in enumerate(values if isinstance(values, list) else []):
            shown = (
                value
                if isinstance(value, str | int)
                else value.get("source")
                if isinstance(value, dict)
                else ""
            )
            options.append((name, Word(str(shown), at_key(written, number))))
    options += [(name, Word(str(own[key]), at_key(key))) for key, name in SINGLE.items() if own.get(key)]
    if own.get("privileged") is True:
        options.append(("privileged", Word("", at_key("privileged"))))
    if own.get("gpus"):
        options.append(("gpus", Word(str(own["gpus"])[:40], at_key("gpus"))))
    elif any(isinstance(one, dict) for one in _reserved(dict(own))):
        options.append(("reserved", Word("", at_key("deploy"))))
    image = own.get("image")
    command = own.get("command")
    return containers.Container(
        line=document.line(at),
        image=Word(str(image), at_key("image")) if image else None,
        options=tuple(options),
        environment=_environment(own.get("environment"), at, document),
        command=" ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
        builds="build" in own,
    )


def _environment(value: object, at: KeyPath, document: Document) -> dict[str, Word]:
    if isinstance(value, dict):
        return {
            key: Word("" if one is None else str(one), document.line((*at, "environment", key)))
            for key, one in value.items()
        }
    found = {}
    for number, one in enumerate(value if isinstance(value, list) else []):
        key, _, text = str(one).partition("=")
        found[key] = Word(text, document.line((*at, "environment", number)))
    return found


DEVCONTAINER_LIMITS = Limits(depth=40, nodes=100_000)


def lint_devcontainer(text: str, name: str) -> Iterator[Fault]:
    """Every fault of a devcontainer."""
    try:
        document = parse(uncommented(text), name, DEVCONTAINER_LIMITS)
    except ConfigError as error:
        yield from unreadable(error, name)
        return
    data = document.data
    if not isinstance(data, dict):
        yield Fault(1, "unreadable", "there is no object")
        return
    yield from containers.container_faults(_container_of_devcontainer(data, document))


def _container_of_devcontainer(data: dict[str, Any], document: Document) -> containers.Container:
    raw = data.get("runArgs")
    words = (
        [Word(str(one), document.line(("runArgs", n))) for n, one in enumerate(raw)]
        if isinstance(raw, list)
        else []
    )
    options = containers.run_arguments(words)
    for key, option in (("capAdd", "cap-add"), ("securityOpt", "security-opt")):
        values = data.get(key)
        options += (
            [(option, Word(str(one), document.line((key, n)))) for n, one in enumerate(values)]
            if isinstance(values, list)
            else []
        )
    if data.get("privileged") is True:
        options.append(("privileged", Word("", document.line(("privileged",)))))
    image, variables = data.get("image"), data.get("containerEnv")
    environment = {
        str(key): Word(str(value), document.line(("containerEnv", key)))
        for key, value in (variables.items() if isinstance(variables, dict) else ())
    }
    for option, word in options:
        if option == "env":
            key, _, value = word.text.partition("=")
            environment[key] = Word(value, word.line)
    shown = Word(str(image), document.line(("image",))) if image else None
    return containers.Container(
        1, shown, tuple(options), environment, "", "build" in data or "dockerComposeFile" in data
    )


def uncommented(text: str) -> str:
    """JSON with comments as JSON that YAML reads: comments and tabs become spaces, lines stay."""
    kept, place, inside = [], 0, False
    while place < len(text):
        char, two = text[place], text[place : place + 2]
        if inside and char == "\\":
            kept.append(two)
            place += 2
        elif not inside and two in ("//", "/*"):
            end = text.find("\n" if two == "//" else "*/", place + 2)
            end = len(text) if end < 0 else end + (0 if two == "//" else 2)
            kept.append("\n" * text.count("\n", place, end))
            place = end
        else:
            inside ^= char == '"'
            kept.append(" " if char == "\t" and not inside else char)
            place += 1
    return "".join(kept)
