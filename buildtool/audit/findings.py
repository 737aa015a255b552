"""Waste, by cause: each finding has its bytes, where they are, and what to type to remove them.

A check is a function from Facts to a finding, or to None where there is nothing to find. To add one, write it
and list it in CHECKS; a finding of visible files of some kinds only needs a row in _NEEDLESS.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from buildtool.audit.claims import (
    BUILD_ONLY,
    CARD_CHOICE,
    CUDA,
    DELETED,
    DUPLICATES,
    FOREIGN_CODE,
    FOREIGN_FILES,
    OF_KIND,
    OVERWRITTEN,
    STRIPPABLE,
    is_foreign,
    saved_by_card,
    saved_bytes,
    targets_if_valid,
)
from buildtool.audit.counts import LATER_RUN, ONE_LAYER, ROCM_TWICE, TWO_COPIES, Facts, Tally
from buildtool.audit.kinds import Location, PackageName, command_naming, display
from buildtool.gpucode.scan import UNKNOWN
from buildtool.gpucode.target import GENERIC_ISAS, PROCESSORS, SPIRV, TargetId, known_targets
from probes.core.quoting import command, terminal
from probes.core.units import counted, decimal_bytes

MAX_PATHS = 20
MAX_SECRETS = 500
WORTH_BYTES = 1 << 20  # a smaller finding isn't listed, except where the image is wrong
_CHOICE = 2  # cards, of which one can be chosen
_NAMED_CARDS = 4
_PLAIN = re.compile(r"gfx[0-9a-f]+")  # one processor, no family and no list


class Severity(Enum):
    """`error`: the image isn't what it claims to be. `warning`: waste. `info`: useful to know."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One cause of unneeded bytes. `bytes` are unpacked bytes; 0 where it isn't about size.

    Where a choice decides how many (`is_upper_bound`), they are the most that a remedy removes.
    """

    id: str
    severity: Severity
    title: str
    bytes: int
    paths: tuple[str, ...]
    remedy: str
    predicted_unpacked_bytes: int | None = None  # of the image after this remedy alone; None: not about size

    @property
    def is_upper_bound(self) -> bool:
        """Whether the bytes depend on the card that is kept."""
        return self.id == CARD_CHOICE


@dataclass(frozen=True)
class Prediction:
    """The image after the remedies of all errors and warnings: bytes that several would remove count once."""

    unpacked_bytes: int
    saved_bytes: int


def size_text(finding: Finding) -> str:
    """A finding's bytes for people: "8.31 MB", "up to 815.12 MB"; empty where it isn't about size."""
    if not finding.bytes:
        return ""
    return f"{'up to ' if finding.is_upper_bound else ''}{decimal_bytes(finding.bytes)}"


_NO_PATHS = ("secrets", "build-only", "huge-layer")  # name places in words, packages, layers


def display_paths(finding: Finding) -> list[str]:
    """A finding's places for people, paths with the slash that they begin with inside the image."""
    if finding.id in _NO_PATHS:
        return list(finding.paths)
    return [" = ".join(f"/{part}" for part in path.split(" = ")) for path in finding.paths]


def find_waste(facts: Facts) -> tuple[Finding, ...]:
    """Every finding: errors, warnings about no bytes, then all others, the largest first."""
    total = sum(facts.layer_bytes)
    claiming = {cause for causes in facts.claims for cause in causes}
    findings = [
        replace(finding, predicted_unpacked_bytes=total - saved_bytes(facts.claims, {finding.id}))
        if finding.id in claiming
        else finding
        for finding in (*(check(facts) for check in CHECKS), *(_needless(facts, name) for name in _NEEDLESS))
        if finding
    ]
    return tuple(sorted(findings, key=_rank))


def _rank(row: Finding) -> tuple[int, int]:
    is_first = row.severity is Severity.ERROR, row.severity is Severity.WARNING and not row.bytes
    return (is_first.index(True) if any(is_first) else len(is_first)), -row.bytes


def predict(facts: Facts, findings: Iterable[Finding]) -> Prediction:
    """The size after all remedies except those of severity `info`."""
    saved = saved_bytes(facts.claims, {row.id for row in findings if row.severity is not Severity.INFO})
    return Prediction(sum(facts.layer_bytes) - saved, saved)


# GPU code.


def cuda_in_cpu_image(facts: Facts) -> Finding | None:
    """CUDA's distributions and libraries where the image isn't for CUDA."""
    hardware = _intended_hardware(facts)
    if hardware == "cuda":
        return None
    n_bytes = facts.cuda.unpacked_bytes
    if not n_bytes:
        return None
    if hardware in ("cpu", "rocm"):
        severity, title = Severity.ERROR, f"CUDA in an image for {hardware}"
    else:
        severity, title = (
            Severity.INFO,
            "this image holds CUDA; on machines without NVIDIA GPUs it is dead weight",
        )
    index = "rocm6.4" if hardware == "rocm" else "cpu"
    return Finding(
        CUDA,
        severity,
        title,
        n_bytes,
        tuple(map(display, facts.cuda.top(MAX_PATHS))),
        f"RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/{index}\n"
        "# not --extra-index-url: with both, pip takes the highest version, which is CUDA's",
    )


def torch_without_gpu_kernels(facts: Facts) -> Finding | None:
    """A CPU build of torch in a variant for GPUs."""
    variant = _label(facts, "variant")
    if _label(facts, "torch.build") != "cpu" or not variant.startswith(("rocm", "cuda")):
        return None
    return Finding(
        "torch-without-gpu-kernels",
        Severity.WARNING,
        f"variant {terminal(variant)} holds a CPU build of torch: tensors can't be put on a GPU",
        0,
        (),
        "# make a GPU build of torch reachable: see this variant's `torch:` in images/variants.yaml; then\n"
        + command("weir", "build", "--", variant),
    )


def foreign_files(facts: Facts) -> Finding | None:
    """Files of GPU code that no wanted target can run."""
    return _foreign(facts, facts.gpu_files, FOREIGN_FILES, "files of")


def foreign_code_in_libraries(facts: Facts) -> Finding | None:
    """GPU code inside libraries that no wanted target can run."""
    return _foreign(facts, facts.cuttable, FOREIGN_CODE, "inside libraries,")


def card_savings(facts: Facts) -> Mapping[str, int]:
    """What a prune to one card alone takes out, by card: unpacked bytes, the least first.

    The cards are those of AMD that the image is for, or those that its libraries have code for, or its files
    where no library has any; and this host's, where some code serves it. Names that LLVM's table doesn't have
    are left out: an image may hold thousands of invented ones.
    """
    keys = facts.gpu_in_libraries or facts.gpu_files
    names = {name.partition(":")[0] for key in keys for name in key.split("+")}
    present = known_targets(names & (PROCESSORS | GENERIC_ISAS.keys() | {SPIRV}))
    wanted = targets_if_valid(facts.wanted_targets)
    here = set(targets_if_valid(facts.host_cards))
    cards = {
        card
        for card in (wanted or present | here)
        if card.processor in PROCESSORS and any(code.serves(card) for code in present)
    }
    files = _merged({key: tally.unpacked_bytes for key, tally in facts.gpu_files.items()})
    libraries = [row._replace(code=_merged(row.code)) for row in facts.libraries]
    saved = {str(card): saved_by_card(files, libraries, str(card)) for card in sorted(cards)}
    return dict(sorted(saved.items(), key=lambda row: (row[1], len(row[0]), row[0])))


def _merged(code: Mapping[str, int]) -> Mapping[str, int]:
    """Bytes by target, all those for processors that no card here is under the first one's name."""
    sums: Counter[str] = Counter()
    other = ""
    for name, n_bytes in code.items():
        if name in PROCESSORS or not _PLAIN.fullmatch(name):
            sums[name] += n_bytes
        else:
            other = other or name
            sums[other] += n_bytes
    return sums


def card_choice(facts: Facts) -> Finding | None:
    """GPU code for several cards, where a machine has one of them; None where all are known to be needed."""
    saved = card_savings(facts)
    if facts.all_needed or len(saved) < _CHOICE or max(saved.values()) < WORTH_BYTES:
        return None
    least, *_, most = saved
    if saved[least] == saved[most]:
        range_of = f"keeping one saves {decimal_bytes(saved[most])}"
    else:
        saves = decimal_bytes(saved[least]), decimal_bytes(saved[most])
        range_of = f"keeping {least} saves {saves[0]}, keeping {most} {saves[1]}"
    here = next((card for card in facts.host_cards if card in saved), None)
    card = here or least
    which = "this machine's card" if here else "for example; put your own card there: weir doctor names it"
    each = ", ".join(f"{name} {decimal_bytes(n_bytes)}" for name, n_bytes in saved.items())
    code = merged_places([*facts.gpu_files.values(), *facts.gpu_in_libraries.values()])
    return Finding(
        CARD_CHOICE,
        Severity.INFO,
        f"GPU code for {named_cards(tuple(saved))}: {range_of}",
        saved[most],
        tuple(map(display, code[:MAX_PATHS])),
        f"{command('weir', 'prune', '--targets', card, '--', facts.ref)}\n# {card}: {which}\n# saves: {each}",
        sum(facts.layer_bytes) - saved[most],
    )


def named_cards(cards: Sequence[str]) -> str:
    """How many cards, and the first of them."""
    listed = sorted(cards, key=lambda name: (len(name), name))
    more = ", ..." if len(cards) > _NAMED_CARDS else ""
    return f"{counted(len(cards), 'card')} ({', '.join(listed[:_NAMED_CARDS])}{more})"


def no_code_for_target(facts: Facts) -> Finding | None:
    """A card that the image is for, and for which no GPU code is in any section of any library, or in a file.

    A warning where a file couldn't be inspected; none where some code's form doesn't name its card.
    """
    names, kept = _code_names(facts), _kept_targets(facts)
    vendors = {code.is_cuda for code in known_targets(names)}
    wanted = [target for target in targets_if_valid(facts.wanted_targets) if target.is_cuda in vendors]
    missing = [target for target in wanted if target not in kept]
    if not missing or UNKNOWN in names:
        return None
    unread = tuple(display(path) for path, _ in facts.unread[:MAX_PATHS])
    consequence = (
        f"; {counted(len(facts.unread), 'file')} couldn't be inspected"
        if unread
        else ": the libraries here can't use that card"
    )
    return Finding(
        "no-code-for-target",
        Severity.WARNING if unread else Severity.ERROR,
        f"no GPU code for {', '.join(map(str, missing))}, only for {', '.join(sorted(names))}{consequence}",
        0,
        unread,
        f"{command('weir', 'doctor', '--card', missing[0].processor)}\n"
        "# shows which torch and which ROCm have code for the card; prune can only keep what is here",
    )


def _foreign(facts: Facts, code: Mapping[str, Tally], name: str, what: str) -> Finding | None:
    """A finding of the code that no wanted target can run; None where nothing would be kept."""
    wanted = targets_if_valid(facts.wanted_targets)
    names = ", ".join(map(str, wanted))
    foreign = {key: tally for key, tally in code.items() if is_foreign(key, wanted)}
    n_bytes = sum(tally.unpacked_bytes for tally in foreign.values())
    if not n_bytes or not _kept_targets(facts):
        return None
    return Finding(
        name,
        Severity.WARNING,
        f"{what} GPU code for {', '.join(sorted(foreign))}; the image is for {names}",
        n_bytes,
        tuple(map(display, merged_places(foreign.values())[:MAX_PATHS])),
        _prune(facts),
    )


def _prune(facts: Facts) -> str:
    """What to type to remove foreign code of both forms: one command removes both."""
    saved = saved_bytes(facts.claims, {FOREIGN_FILES, FOREIGN_CODE})
    targets = ",".join(map(str, _kept_targets(facts)))
    left = decimal_bytes(sum(facts.layer_bytes) - saved)
    prune = "weir", "prune", "--targets", targets
    return (
        f"{command(*prune, '--', facts.ref)}\n"
        f"# takes {decimal_bytes(saved)} out of files and libraries, leaves {left}\n"
        f"# or prune what is copied into an image: {command(*prune, 'DIRECTORY')}"
    )


def _code_names(facts: Facts) -> set[str]:
    """What the image's GPU code is for, by the names in its files."""
    return {name for key in (*facts.gpu_files, *facts.gpu_in_libraries) for name in key.split("+")}


def _kept_targets(facts: Facts) -> tuple[TargetId, ...]:
    """The wanted targets that the image has code for: prune refuses to keep others."""
    present = known_targets(_code_names(facts))
    return tuple(
        target
        for target in targets_if_valid(facts.wanted_targets)
        if any(code.serves(target) for code in present)
    )


def _intended_hardware(facts: Facts) -> str:
    """What the image claims to be for: cpu, rocm, cuda, or nothing."""
    words = f"{_label(facts, 'variant')} {facts.ref}".lower()
    named = next((name for name in ("rocm", "cuda", "cpu") if name in words), "")
    return named or _label(facts, "torch.build")


def _label(facts: Facts, name: str) -> str:
    """The value of a label of weir's; empty for an image without it."""
    return facts.labels.get(f"io.weir.{name}", "")


# What layers store needlessly.


def _overwritten(facts: Facts) -> Finding | None:
    same = "".join(f"; {why}, same content: {decimal_bytes(n)}" for why, n in _largest_first(facts.rewritten))
    return _finding_of(
        facts.overwritten,
        OVERWRITTEN,
        f"replaced in a later layer{same}",
        "COPY --chown=USER --chmod=MODE ...   # instead of RUN chown or chmod in a later layer\n"
        "# and install a package once, in the layer that settles its version",
    )


def _deleted(facts: Facts) -> Finding | None:
    return _finding_of(
        facts.deleted,
        DELETED,
        "deleted in a later layer, but still stored and pulled",
        "RUN install-something && rm -rf what-is-not-needed   # in the same RUN, or COPY --from=STAGE",
    )


_REMEDY_OF_COPIES = {
    ROCM_TWICE: "RUN ln -sf /opt/rocm/lib/LIBRARY TORCH/lib/LIBRARY   # in the layer that installs torch,"
    " or install torch's wheel on a base without ROCm",
    TWO_COPIES: "COPY --from=STAGE ...   # once, and RUN ln -s FIRST SECOND in the same layer",
    LATER_RUN: "RUN install-it && ln FIRST SECOND   # in one RUN: linking to a lower layer's file copies it",
    ONE_LAYER: "RUN ln -sf FIRST SECOND   # in the layer that makes the copy",
}


def _duplicates(facts: Facts) -> Finding | None:
    n_bytes = sum(row.wasted_bytes for row in facts.duplicates)
    if n_bytes < WORTH_BYTES:
        return None
    causes: Counter[str] = Counter()
    for row in facts.duplicates:
        causes[row.cause] += row.wasted_bytes
    reasons = ", ".join(f"{why}: {decimal_bytes(n)}" for why, n in _largest_first(causes))
    if len(causes) == 1:
        reasons = next(iter(causes))
    return Finding(
        DUPLICATES,
        Severity.WARNING,
        f"the same content at several paths ({reasons})",
        n_bytes,
        tuple(" = ".join(row.paths[:3]) for row in facts.duplicates[:MAX_PATHS]),
        "\n".join(_REMEDY_OF_COPIES[why] for why, _ in _largest_first(causes)),
    )


# the smallest documented quota of large public registries; some take 10 GB
REGISTRY_LAYER_BYTES = 10_000 << 20


def _huge_layer(facts: Facts) -> Finding | None:
    known = [(n, stored) for n, stored in enumerate(facts.layer_stored_bytes) if stored is not None]
    huge = [n for n, stored in known if stored > REGISTRY_LAYER_BYTES]
    if not huge:
        return None
    return Finding(
        "huge-layer",
        Severity.WARNING,
        "a layer larger than public registries take (10,000 MiB compressed)",
        sum(facts.layer_bytes[n] for n in huge),
        tuple(f"layer {n}" for n in huge),
        "RUN one-half-of-the-packages\nRUN the-other-half   # layers are pushed and pulled in parallel, too",
    )


# What nobody needs at run time.


def _build_only(facts: Facts) -> Finding | None:
    locations = facts.build_only.top(MAX_PATHS)
    packages = [location for location in locations if isinstance(location, PackageName)]
    purge = command_naming(
        packages[:8],
        lambda names: f"# or in the layer that installs them: apt-get purge --auto-remove -- {names}",
    )
    return _finding_of(
        facts.build_only,
        BUILD_ONLY,
        "compilers, build systems and -dev packages, not needed at run time",
        "FROM BASE AS build   # install these and build here\nFROM BASE\nCOPY --from=build WHAT-IS-NEEDED /\n"
        f"{purge}".rstrip("\n"),
    )


def _strippable(facts: Facts) -> Finding | None:
    if facts.strippable.unpacked_bytes < WORTH_BYTES:
        return None
    places = facts.strippable.top(MAX_PATHS)
    left_out = len(facts.strippable.places) - len(places)
    more = f"# and {left_out} more directories, with less in each\n" if left_out else ""
    return Finding(
        STRIPPABLE,
        Severity.WARNING,
        "debug information and linkers' symbols inside libraries and programs",
        facts.strippable.unpacked_bytes,
        tuple(map(display, places)),
        command_naming(
            places,
            lambda listed: (
                f"RUN find {listed} -maxdepth 1 -type f \\\n"
                "  -exec strip --strip-unneeded {} \\;   # reports an error for files that aren't programs"
            ),
        )
        + f"\n{more}# in the layer that installs them, with binutils there; never after weir prune;\n"
        "# then test what was stripped: libraries that patchelf changed may no longer load",
    )


_REMOVE = "RUN rm -rf {places}   # in the layer that installs them"


class _Needless(NamedTuple):
    """A finding of files that nobody needs at run time; `{places}` in it becomes the largest places."""

    title: str
    remedy: str = _REMOVE
    severity: Severity = Severity.WARNING


_NEEDLESS = {  # by their names in OF_KIND
    "caches": _Needless(
        "caches of package managers",
        "RUN apt-get update && apt-get install -y --no-install-recommends PACKAGES \\\n"
        " && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old\n"
        "RUN pip install --no-cache-dir PACKAGES   # or --mount=type=cache,target=/root/.cache\n"
        "RUN conda install -y PACKAGES && conda clean -afy",
    ),
    "headers-and-static": _Needless(
        "headers, static libraries and build files",
        f"{_REMOVE}\n# torch.compile on CPUs needs torch/include",
    ),
    "tests": _Needless("tests of installed packages"),
    "debug-info": _Needless("debug information"),
    "docs-and-locale": _Needless(
        "documentation and translations",
        "# before packages are installed:\n"
        "RUN printf 'path-exclude=%s\\n' '/usr/share/man/*' '/usr/share/locale/*' '/usr/share/doc/*' \\\n"
        "  > /etc/dpkg/dpkg.cfg.d/slim\n"
        "RUN echo 'path-include=/usr/share/doc/*/copyright' >> /etc/dpkg/dpkg.cfg.d/slim",
    ),
    "bytecode": _Needless(
        "compiled Python next to its source",
        "RUN pip install --no-compile PACKAGES   # costs start-up time at every start: measure before",
        Severity.INFO,
    ),
}


def _needless(facts: Facts, name: str) -> Finding | None:
    """A finding of all visible files of the kinds that have this name."""
    row = _NEEDLESS[name]
    tallies = [tally for kind, tally in facts.visible_by_kind.items() if OF_KIND.get(kind) == name]
    n_bytes = sum(tally.unpacked_bytes for tally in tallies)
    if n_bytes < WORTH_BYTES:
        return None
    places = merged_places(tallies)
    remedy = row.remedy
    if "{places}" in remedy:
        remedy = command_naming(places[:8], lambda listed: row.remedy.replace("{places}", listed))
    paths = tuple(map(display, places[:MAX_PATHS]))
    return Finding(name, row.severity, row.title, n_bytes, paths, remedy)


# Credentials.


def _secrets(facts: Facts) -> Finding | None:
    """Lists far more places than other findings: somebody has to handle each of them."""
    if not facts.secrets:
        return None
    return Finding(
        "secrets",
        Severity.ERROR,
        f"credentials in {counted(len(facts.secrets), 'place')}; anyone who can pull the image can read them",
        sum(row.unpacked_bytes for row in facts.secrets),
        tuple(f"{row.where}: {', '.join(row.kinds)}" for row in facts.secrets[:MAX_SECRETS]),
        "RUN --mount=type=secret,id=NAME ...   # available during this step only, and not in the history\n"
        "# revoke what was found: deleting it in a later layer leaves it in the earlier one",
    )


# What checks have in common.


def merged_places(tallies: Iterable[Tally]) -> list[Location]:
    """The places of several tallies, those with most bytes first."""
    total = sum((tally.places for tally in tallies), Tally().places)
    return [place for place, _ in total.most_common()]


def _finding_of(group: Tally, name: str, title: str, remedy: str) -> Finding | None:
    """A warning about bytes that Facts counts apart; None below WORTH_BYTES."""
    if group.unpacked_bytes < WORTH_BYTES:
        return None
    paths = tuple(map(display, group.top(MAX_PATHS)))
    return Finding(name, Severity.WARNING, title, group.unpacked_bytes, paths, remedy)


def _largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda row: (-row[1], row[0]))


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    cuda_in_cpu_image,
    _secrets,
    torch_without_gpu_kernels,
    no_code_for_target,
    foreign_files,
    foreign_code_in_libraries,
    card_choice,
    _overwritten,
    _deleted,
    _duplicates,
    _build_only,
    _huge_layer,
    _strippable,
)
