"""`weir ablate FILE SERVICE`: the least that a compose service needs, found by starting it with less."""

import argparse
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from buildtool.core.command import CommandFailed
from buildtool.core.errors import ConfigError, Exit, ProofFailed, ToolError
from buildtool.core.progress import Progress, ProgressLog
from buildtool.core.yaml_text import text_of
from buildtool.engine.client import Engine
from buildtool.engine.compose import project, resolved
from buildtool.observe.ablation import (
    PRIVILEGED,
    Grant,
    granted,
    grants_of,
    host_capabilities,
    host_devices,
    least,
    names_of,
    networks_of_its_own,
    without_host_values,
    without_privileged,
)
from buildtool.observe.runs import run_program, words_of
from probes.core.output import option, write
from probes.core.quoting import terminal
from probes.core.units import counted

_WAIT_S, _MOST_WAIT_S = 300, 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="compose file")
    parser.add_argument("service", metavar="SERVICE", help="a service in it")
    option(
        parser,
        "--workload",
        "PROGRAM",
        "program on this host that the service has to pass each time it was started; WEIR_URL tells it where "
        "(default: the service ends by itself, with 0)",
    )
    option(
        parser, "--wait", "SECONDS", "how long a service may take to get healthy", _seconds, default=_WAIT_S
    )


def _seconds(text: str) -> int:
    """Of --wait. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 0 < int(text[:10]) <= _MOST_WAIT_S:
        raise argparse.ArgumentTypeError(f"write a number of seconds from 1 to {_MOST_WAIT_S}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Find the least, and print the compose file with it."""
    if args.workload:
        words_of(args.workload)
    document = resolved([args.file], args.service)
    if not document["services"][args.service].get("image"):
        raise ConfigError(
            f"{terminal(args.service)} names no image, and nothing is built here",
            "write `image: NAME` beside its `build`, and build it first: docker compose build",
        )
    with ProgressLog() as log, Engine().owning() as (folder, label):
        trials = _Trials(document, args, folder, label, log.line)
        kept = trials.least()
    service = granted(without_host_values(trials.service), kept)
    service = {key: value for key, value in service.items() if value is not None}
    if service.get("networks") == {"default": None}:
        del service["networks"]
    parts = ("volumes", "configs", "secrets", *(["networks"] if service.get("networks") else []))
    printed = {key: document[key] for key in parts if key in document}
    names = "".join(f"#   {terminal(name)}\n" for name in names_of(trials.service, kept)) or "#   nothing\n"
    write(
        f"# weir ablate: {counted(trials.count, 'start')}; without any one of these, the workload fails:\n"
        + names
        + text_of({"services": {args.service: service}, **printed})
    )
    return Exit.OK


class _Trials:
    """Starts of a service, each with a part of what it is granted."""

    def __init__(
        self,
        document: Mapping[str, Any],
        args: argparse.Namespace,
        folder: Path,
        label: Mapping[str, str],
        progress: Progress,
    ) -> None:
        self.count = 0
        self._document, self._args = document, args
        self._folder, self._label, self._progress = folder, label, progress
        self._capabilities = host_capabilities()
        self._known: dict[frozenset[Grant], str] = {}
        self.service: dict[str, Any] = dict(document["services"][args.service])
        self._name = f"weir-ablate-{secrets.token_hex(4)}"

    def least(self) -> tuple[Grant, ...]:
        """The grants that the workload needs. Raises ProofFailed where it fails with all of them."""
        every = grants_of(self.service, self._capabilities)
        if fault := self._fault(frozenset(every)):
            raise ProofFailed(
                f"{self._args.service} fails with all that it is granted: {fault}", "correct that first"
            )
        if PRIVILEGED in every:
            whole, self.service = self.service, without_privileged(self.service, host_devices())
            self._known.clear()
            pieces = grants_of(self.service, self._capabilities)
            if self._fault(frozenset(pieces)):
                self._progress("it needs `privileged` itself")
                self._known.clear()
                self.service = whole
            else:
                every = pieces
        return least(every, lambda kept: not self._fault(kept))

    def _fault(self, kept: frozenset[Grant]) -> str:
        """Why the service fails with these grants; empty where it passes. What was tried is remembered."""
        if kept not in self._known:
            self.count += 1
            self._known[kept] = self._try(granted(self.service, kept))
            verdict = "fails" if self._known[kept] else "passes"
            self._progress(f"start {self.count}, with {counted(len(kept), 'grant')}: {verdict}")
        return self._known[kept]

    def _try(self, service: dict[str, Any]) -> str:
        name = self._args.service
        ports: Sequence[dict[str, Any]] = service.get("ports") or ()
        service = {key: value for key, value in service.items() if key not in ("container_name", "build")}
        service["restart"] = "no"
        if ports:  # beside the service that may run already
            service["ports"] = [{**port, "published": "0", "host_ip": "127.0.0.1"} for port in ports]
        document = {**self._document, "services": {**self._document["services"], name: service}}
        document.pop("name", None)
        document["networks"] = networks_of_its_own(document.get("networks") or {})
        # which the next run knows them by, if this one is killed
        document["services"] = {key: self._owned(each) for key, each in document["services"].items()}
        document["networks"] = {
            key: each if each.get("external") else self._owned(each)
            for key, each in document["networks"].items()
        }
        with project(self._folder, document, self._name, name) as started:
            try:
                if not self._args.workload:
                    started.run_to_end()
                    return ""
                started.up(self._args.wait)
                run_program(self._args.workload, started.url(ports), {}, lambda _line: None)
            except (CommandFailed, ProofFailed) as error:
                return _last_line(error)
        return ""

    def _owned(self, part: Mapping[str, Any]) -> dict[str, Any]:
        return {**part, "labels": {**(part.get("labels") or {}), **self._label}}


def _last_line(error: ToolError) -> str:
    lines = (error.hint or error.message).strip().splitlines()
    lines = [line for line in lines if line != "Aborting on container exit..."]
    return terminal(lines[-1][:300]) if lines else error.message
