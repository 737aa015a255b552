"""Everything that can go wrong on the host, with the exit code a script can rely on.

A message says what happened and to which thing; a hint says what to type next.
Only `buildtool.cli.program` turns these into an exit.
"""

from enum import IntEnum

from probes.core.errors import Failure


class Exit(IntEnum):
    """Exit codes of `weir`."""

    OK = 0
    FINDINGS = 1  # done, but a budget or a check failed, something was left, or the answer is no
    USAGE = 2  # wrong arguments or configuration
    ENVIRONMENT = 3  # engine, tool, network source or disk space is missing
    BUILD = 4  # a build, a proof or another step failed, or a file was refused
    DATA = 5  # an image, archive, wheel or report can't be read or written
    INTERRUPTED = 130


class ToolError(Failure):
    """A failure that a user can cause or encounter. Never shown as a traceback."""

    exit_code: Exit = Exit.BUILD


class ConfigError(ToolError):
    """The command line or a YAML file asks for something that isn't valid."""

    exit_code = Exit.USAGE


class EnvironmentMissing(ToolError):
    """Something this machine lacks: an engine, a program, a reachable source, disk space."""

    exit_code = Exit.ENVIRONMENT


class EngineUnavailable(EnvironmentMissing):
    """No Docker engine answers, or it went away."""


class EngineForbidden(EngineUnavailable):
    """There is an engine, but this user may not talk to it."""


class SourceUnreachable(EnvironmentMissing):
    """None of a list of sources (registry, package index, mirror) answered."""


class BuildFailed(ToolError):
    """The engine or a build step reported a failure."""


class ProofFailed(ToolError):
    """A built image doesn't do what its variant promises."""


class DataError(ToolError):
    """Content that can't be read or trusted: a corrupt wheel, a malformed archive, a bad report."""

    exit_code = Exit.DATA
