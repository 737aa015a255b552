"""`weir observe IMAGE -- COMMAND`: which files an image's containers open; adds them to a keep-list."""

import argparse
import os
from pathlib import Path

from buildtool.cli.arguments import add_container_arguments
from buildtool.core.errors import DataError, Exit
from buildtool.core.files import require_writable
from buildtool.core.progress import ProgressLog
from buildtool.doctor import gather
from buildtool.doctor.prove import devices_of
from buildtool.engine import host as engine_host
from buildtool.engine.client import Devices, Engine
from buildtool.keep.imports import source_of
from buildtool.keep.keep_list import is_line, merge_into, read_keep_list
from buildtool.observe.runs import (
    FANOTIFY,
    INOTIFY,
    Workload,
    environments,
    loaded_code,
    mounts,
    observe,
    watching_gpu_code,
    words_of,
)
from probes.core.output import Parser, echo, flag, option
from probes.core.quoting import terminal
from probes.core.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    assert isinstance(parser, Parser)
    parser.behind = "command"
    parser.add_argument("image", metavar="IMAGE", help="image by name, as the engine has it")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="COMMAND",
        help="what the container runs, after -- (default: what the image says)",
    )
    option(parser, "--keep", "FILE", "keep-list to add the files to (default: print them)", Path)
    option(
        parser,
        "--workload",
        "PROGRAM",
        "program on this host that uses the service once it is healthy; WEIR_URL and WEIR_CONTAINER tell it "
        "where (default: the container's command ends by itself)",
    )
    add_container_arguments(parser)
    flag(parser, "--gpus", "give the container this host's GPUs")
    flag(
        parser,
        "--gpu-code",
        "also see which GPU code its Python processes load: by CUPTI, or by ROCr's list, which was never "
        "tried (default: files alone)",
    )
    parser.add_argument(
        "--method",
        choices=(FANOTIFY, INOTIFY),
        help="how opened files are seen: from the host, as root, or from inside the container, which needs "
        "Python in the image (default: the first that works)",
    )


def run(args: argparse.Namespace) -> int:
    """Observe the runs; print the files, or merge them into the keep-list."""
    workload = Workload(
        args.workload or "",
        (*args.words, *args.command),
        environments(args.env),
        mounts(args.volume),
        _devices() if args.gpus else None,
    )
    if args.workload:
        words_of(args.workload)
    if args.keep:  # before minutes go into runs
        require_writable(args.keep.absolute().parent, "name another file: --keep FILE")
        if args.keep.exists():
            read_keep_list(args.keep)
    gpu_code: frozenset[str] = frozenset()
    with ProgressLog() as log:
        engine, method = Engine(), args.method or ""
        if args.gpu_code:
            with watching_gpu_code(engine, args.image, workload) as (watched, rows):
                seen = observe(engine, args.image, watched, method=method, progress=log.line)
                gpu_code = loaded_code(rows, log.line)
        else:
            seen = observe(engine, args.image, workload, method=method, progress=log.line)
    # a module by its source, whether or not the image has bytecode of it: the margin keeps both
    opened = {source_of(path) or path for path in seen.paths}
    lines = sorted(filter(is_line, opened))
    if odd := sorted(opened.difference(lines)):
        named = ", ".join(terminal(path[:200]) for path in odd[:3])
        raise DataError(
            f"no line of a keep-list can hold the names of {counted(len(odd), 'opened file')}: {named}",
            "rename what has them, or write a line for its directory and don't let the run open it",
        )
    lines += sorted(gpu_code)
    if args.keep:
        keep, n_new = merge_into(args.keep, lines)
        loaded = f", {len(gpu_code):,} pieces of GPU code loaded" if args.gpu_code else ""
        echo(
            f"{len(lines) - len(gpu_code):,} files were opened{loaded}; "
            f"{terminal(str(args.keep))} has {len(keep.lines):,} lines, "
            f"{n_new:,} of them new"
        )
    else:
        echo("\n".join(lines))
    return Exit.OK


def _devices() -> Devices:
    """This host's GPUs. Raises EnvironmentMissing where it has none."""
    return devices_of(gather.gather(Path("/"), os.environ, engine_host.gather(), cwd=Path.cwd()))
