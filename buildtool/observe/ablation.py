"""The least that a compose service needs: what it is granted is left out, and what its workload misses stays.

A service's grants are its privileges, capabilities, devices, groups, mounts, namespaces of the host, and what
it may write. Docker's own default capabilities count: each is tried by itself.
"""

import copy
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# by number: linux/capability.h of Linux 6.12
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
# of a container that asks for nothing: moby's oci/caps/defaults.go
DEFAULT_CAPABILITIES = frozenset({
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
})  # fmt: skip
_HOSTS = ("pid", "ipc", "uts", "network_mode", "userns_mode", "cgroup")
_LISTS = ("devices", "device_cgroup_rules", "group_add", "volumes", "tmpfs", "security_opt")
_NO_NEW = ("no-new-privileges:true", "no-new-privileges")


@dataclass(frozen=True)
class Grant:
    """Something that a service is granted: the key of its document, and which item of that."""

    key: str
    item: str = ""  # a capability, or an item's position in its list

    def shown(self, service: Mapping[str, Any]) -> str:
        """It in words of compose."""
        if self.key in _LISTS and service.get(self.key):
            item = service[self.key][int(self.item)]
            return f"{self.key}: {_item_text(item)}"
        if self.key == "gpu":
            return "deploy.resources.reservations.devices"
        return f"{self.key}: {self.item or 'true'}"


def _item_text(item: object) -> str:
    if isinstance(item, Mapping):
        return ":".join(str(item[key]) for key in ("source", "target", "permissions") if item.get(key))
    return str(item)


WRITABLE, NEW_PRIVILEGES, PRIVILEGED, GPU = (
    Grant("read_only", "false"), Grant("security_opt", "no-new-privileges:false"), Grant("privileged"),
    Grant("gpu"),
)  # fmt: skip


def grants_of(service: Mapping[str, Any], capabilities: Collection[str] = CAPABILITIES) -> tuple[Grant, ...]:
    """All that a service in compose's canonical form is granted; `capabilities` are this host's."""
    grants = [PRIVILEGED] if service.get("privileged") else []
    if not grants:
        grants = [Grant("cap_add", name) for name in sorted(_capabilities(service) & set(capabilities))]
    for key in _LISTS:
        for at, item in enumerate(service.get(key) or ()):
            if item not in _NO_NEW:
                grants.append(Grant(key, str(at)))
    grants += [
        Grant(key, str(service[key])) for key in _HOSTS if str(service.get(key) or "").startswith("host")
    ]
    if not service.get("read_only"):
        grants.append(WRITABLE)
    if not set(service.get("security_opt") or ()) & set(_NO_NEW):
        grants.append(NEW_PRIVILEGES)
    if _reserved(service):
        grants.append(GPU)
    return tuple(grants)


def _capabilities(service: Mapping[str, Any]) -> set[str]:
    dropped, added = (
        {str(name).upper().removeprefix("CAP_") for name in service.get(key) or ()}
        for key in ("cap_drop", "cap_add")
    )
    base = set() if "ALL" in dropped else set(DEFAULT_CAPABILITIES) - dropped
    return base | (set(CAPABILITIES) if "ALL" in added else added)


def host_capabilities(status: Path = Path("/proc/self/status")) -> tuple[str, ...]:
    """The capabilities that this host's kernel can grant at all: CapBnd."""
    lines = dict(
        line.split(":\t") for line in status.read_text(encoding="utf-8").splitlines() if ":\t" in line
    )
    mask = int(lines["CapBnd"], 16)
    return tuple(name for number, name in enumerate(CAPABILITIES) if mask >> number & 1)


def _reserved(service: Mapping[str, Any]) -> object:
    value: Any = service
    for key in ("deploy", "resources", "reservations", "devices"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def granted(service: Mapping[str, Any], grants: Iterable[Grant]) -> dict[str, Any]:
    """The service with these of its grants alone."""
    kept = set(grants)
    result = copy.deepcopy(dict(service))
    for key in ("cap_add", "cap_drop", "privileged", "read_only", *_HOSTS, *_LISTS):
        result.pop(key, None)
    for key in _HOSTS:  # a value of its own, such as a network, stays
        value = str(service.get(key) or "")
        if value and (not value.startswith("host") or Grant(key, value) in kept):
            result[key] = service[key]
    if PRIVILEGED not in kept:
        result["cap_drop"] = ["ALL"]
    if capabilities := sorted(grant.item for grant in kept if grant.key == "cap_add"):
        result["cap_add"] = capabilities
    for key in _LISTS:
        items = [item for at, item in enumerate(service.get(key) or ()) if Grant(key, str(at)) in kept]
        if key == "security_opt" and NEW_PRIVILEGES not in kept:
            items.append(_NO_NEW[0])
        if items:
            result[key] = items
    if PRIVILEGED in kept:
        result["privileged"] = True
    if WRITABLE not in kept:
        result["read_only"] = True
    if GPU not in kept and _reserved(service):
        del result["deploy"]["resources"]["reservations"]["devices"]
    return result


def without_privileged(service: Mapping[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """A privileged service with what that stands for, piece by piece: to be ablated by itself."""
    result = {key: value for key, value in service.items() if key not in ("privileged", "cap_drop")}
    result["cap_add"] = ["ALL"]
    result["security_opt"] = [
        *(service.get("security_opt") or ()),
        "seccomp=unconfined",
        "apparmor=unconfined",
    ]
    listed = [*(service.get("devices") or ())]
    result["devices"] = [
        *listed,
        *({"source": path, "target": path, "permissions": "rwm"} for path in devices),
    ]
    return result


def host_devices(root: Path = Path("/dev")) -> tuple[str, ...]:
    """The device files of this host that a privileged container gets."""
    found = []
    for path in itertools.chain(
        root.glob("*"), *(root.glob(f"{name}/*") for name in ("dri", "net", "input", "snd"))
    ):
        if not path.is_symlink() and (path.is_char_device() or path.is_block_device()):
            found.append(str(path))
    given = {
        "console",
        "full",
        "null",
        "ptmx",
        "random",
        "tty",
        "urandom",
        "zero",
    }  # every container has them
    return tuple(sorted(path for path in found if Path(path).name not in given))


def least(grants: Sequence[Grant], passes: Callable[[frozenset[Grant]], bool]) -> tuple[Grant, ...]:
    """A smallest part of `grants` that passes: leaving out any one of it fails. All of them must pass.

    QuickXplain (Junker, AAAI 2004): for k of n, some k log2(n/k) calls of `passes`. What fails and then
    passes with less would mislead it, so each of the result is left out once more, until that fails for all.
    """
    kept = list(_quick_explain(frozenset(), [*grants], passes, is_new=False))
    while True:
        needless = next((each for each in kept if passes(frozenset(kept) - {each})), None)
        if needless is None:
            return tuple(grant for grant in grants if grant in kept)
        kept.remove(needless)


def _quick_explain(
    background: frozenset[Grant],
    candidates: list[Grant],
    passes: Callable[[frozenset[Grant]], bool],
    *,
    is_new: bool,
) -> list[Grant]:
    if is_new and passes(background):
        return []
    if len(candidates) <= 1:
        return candidates if is_new or not passes(background) else []
    half = len(candidates) // 2
    first, second = candidates[:half], candidates[half:]
    of_second = _quick_explain(background | frozenset(first), second, passes, is_new=bool(first))
    of_first = _quick_explain(background | frozenset(of_second), first, passes, is_new=bool(of_second))
    return of_first + of_second


def without_host_values(
    service: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The service to be printed: variables with the host's own value are passed on, not written down."""
    host = os.environ if environment is None else environment
    values = service.get("environment")
    if not isinstance(values, Mapping):
        return dict(service)
    own = {
        name: None if value is not None and host.get(name) == value else value
        for name, value in values.items()
    }
    return {**service, "environment": own}


def networks_of_its_own(networks: Mapping[str, Any]) -> dict[str, Any]:
    """Networks that a started copy doesn't share with the service that may run: there it would have its name.

    External networks stay, and those with addresses of their own, which can't be there twice.
    """
    own = {}
    for key, network in networks.items():
        shared = network.get("external") or (network.get("ipam") or {}).get("config")
        own[key] = network if shared else {name: network[name] for name in network if name != "name"}
    return own


def names_of(service: Mapping[str, Any], grants: Iterable[Grant]) -> Iterator[str]:
    """Grants in words."""
    return (grant.shown(service) for grant in grants)
