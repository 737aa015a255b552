"""Waste, by cause: each finding has its bytes, where they are and what to type against it. Pure functions."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from buildtool.audit.facts import Facts, Tally
from buildtool.audit.kinds import Kind
from buildtool.audit.shown import show_path
from buildtool.gpucode.errors import BadTarget
from buildtool.gpucode.target import TargetId, serves_any

SHOWN_PATHS = 20
REGISTRY_LAYER_BYTES = 10_000 << 20  # Amazon ECR's quota "layer size"; GHCR's is 10 GB
_REMOVE = "RUN rm -rf {places}   # in the layer that installs them"
WORTH_BYTES = 1 << 20  # less than this isn't worth a line, except where the image is wrong


class Severity(Enum):
    """`error`: the image isn't what it says. `warning`: waste. `info`: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One cause of bytes that needn't be there. Bytes are unpacked bytes; 0 where it isn't about size."""

    id: str
    severity: Severity
    title: str
    unpacked_bytes: int
    paths: tuple[str, ...]
    remedy: str


def find_waste(facts: Facts) -> tuple[Finding, ...]:
    """Every finding, the gravest and largest first."""
    order = list(Severity)
    found = [finding for check in CHECKS for finding in [check(facts)] if finding]
    return tuple(sorted(found, key=lambda row: (order.index(row.severity), -row.unpacked_bytes)))


def _cuda_in_cpu_image(facts: Facts) -> Finding | None:
    meant = _meant_hardware(facts)
    if meant == "cuda":
        return None
    n_bytes = facts.cuda.unpacked_bytes
    if not n_bytes:
        return None
    if meant in ("cpu", "rocm"):
        severity, title = Severity.ERROR, f"CUDA in an image for {meant}"
    else:
        severity, title = (
            Severity.INFO,
            "this image holds CUDA; on machines without NVIDIA GPUs it is dead weight",
        )
    index = "rocm6.4" if meant == "rocm" else "cpu"
    return Finding(
        "cuda-in-cpu-image",
        severity,
        title,
        n_bytes,
        tuple(show_path(path) for path in facts.cuda.top(SHOWN_PATHS)),
        f"RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/{index}\n"
        "# not --extra-index-url: with both in view pip takes the highest version, which is CUDA's",
    )


def _torch_without_gpu_kernels(facts: Facts) -> Finding | None:
    variant, build = facts.labels.get("io.weir.variant", ""), facts.labels.get("io.weir.torch.build", "")
    if build != "cpu" or not variant.startswith(("rocm", "cuda")):
        return None
    return Finding(
        "torch-without-gpu-kernels",
        Severity.WARNING,
        f"variant {variant} holds a CPU build of torch: tensors can't be put on a GPU",
        0,
        (),
        f"make a GPU build of torch reachable (see `torch:` of {variant} in images/variants.yaml), then:\n"
        f"python -m buildtool build {variant}",
    )


def _foreign_files(facts: Facts) -> Finding | None:
    foreign, n_bytes, title = _foreign(facts, facts.gpu_files)
    if not n_bytes:
        return None
    places = _merged_places(foreign.values())
    names = " -o ".join(f"-name '*{key}*'" for key in sorted(foreign) if "+" not in key)
    directories = " ".join(_shell_word(place) for place in places[:6])
    return Finding(
        "foreign-gfx",
        Severity.WARNING,
        f"files of {title}",
        n_bytes,
        tuple(show_path(place) for place in places[:SHOWN_PATHS]),
        f"RUN find {directories} -type f \\( {names} \\) -delete\n# in the layer that installs them",
    )


def _foreign_code_in_libraries(facts: Facts) -> Finding | None:
    foreign, n_bytes, title = _foreign(facts, facts.gpu_in_libraries)
    if not n_bytes:
        return None
    places = _merged_places(foreign.values())
    return Finding(
        "foreign-gfx-in-libraries",
        Severity.WARNING,
        f"inside libraries, {title}",
        n_bytes,
        tuple(show_path(place) for place in places[:SHOWN_PATHS]),
        f"python -m buildtool prune TREE --targets {','.join(facts.wanted_targets)}"
        "   # TREE: what is copied into the image",
    )


def _foreign(facts: Facts, code: Mapping[str, Tally]) -> tuple[dict[str, Tally], int, str]:
    """Code that no wanted target can run, its bytes, and how to say so. Nothing where none is wanted."""
    try:
        wanted = [TargetId.parse(name) for name in facts.wanted_targets]
    except BadTarget:
        wanted = []  # the label is free text; the command line's list was checked before
    foreign = {key: tally for key, tally in code.items() if wanted and _is_foreign(key, wanted)}
    title = f"GPU code for {', '.join(sorted(foreign))}; wanted is {', '.join(facts.wanted_targets)}"
    return foreign, sum(tally.unpacked_bytes for tally in foreign.values()), title


def _caches(facts: Facts) -> Finding | None:
    return _of_kind(
        facts,
        (Kind.CACHE,),
        "caches",
        "caches of package managers",
        "RUN apt-get update && apt-get install -y --no-install-recommends PACKAGES \\\n"
        " && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old\n"
        "RUN pip install --no-cache-dir PACKAGES   # or --mount=type=cache,target=/root/.cache",
    )


def _bytecode(facts: Facts) -> Finding | None:
    found = _of_kind(
        facts,
        (Kind.BYTECODE,),
        "bytecode",
        "compiled Python beside its source",
        "RUN pip install --no-compile PACKAGES   # costs start-up time at every start: measure before",
    )
    return found and Finding(**{**vars(found), "severity": Severity.INFO})


def _headers_and_static(facts: Facts) -> Finding | None:
    kinds = (Kind.HEADER, Kind.STATIC_LIBRARY, Kind.BUILD_FILE)
    return _of_kind(
        facts,
        kinds,
        "headers-and-static",
        "headers, static libraries and build files",
        f"{_REMOVE}\n# torch.compile on CPUs needs torch/include",
    )


def _tests(facts: Facts) -> Finding | None:
    return _of_kind(facts, (Kind.TEST,), "tests", "tests of installed packages", _REMOVE)


def _docs_and_locale(facts: Facts) -> Finding | None:
    return _of_kind(
        facts,
        (Kind.DOC, Kind.LOCALE),
        "docs-and-locale",
        "documentation and translations",
        "# before packages are installed:\n"
        "RUN printf 'path-exclude=%s\\n' '/usr/share/man/*' '/usr/share/locale/*' '/usr/share/doc/*' \\\n"
        "  > /etc/dpkg/dpkg.cfg.d/slim\n"
        "RUN echo 'path-include=/usr/share/doc/*/copyright' >> /etc/dpkg/dpkg.cfg.d/slim",
    )


def _debug(facts: Facts) -> Finding | None:
    return _of_kind(facts, (Kind.DEBUG,), "debug-info", "debug information", _REMOVE)


def _overwritten(facts: Facts) -> Finding | None:
    n_bytes = facts.overwritten.unpacked_bytes
    if n_bytes < WORTH_BYTES:
        return None
    same = f", {facts.rewritten_bytes:,} bytes of it by the same content" if facts.rewritten_bytes else ""
    return Finding(
        "overwritten",
        Severity.WARNING,
        f"replaced in a later layer{same}",
        n_bytes,
        tuple(show_path(path) for path in facts.overwritten.top(SHOWN_PATHS)),
        "COPY --chown=USER --chmod=MODE ...   # instead of RUN chown or chmod in a later layer\n"
        "# and install a package once, in the layer that settles its version",
    )


def _deleted(facts: Facts) -> Finding | None:
    if facts.deleted.unpacked_bytes < WORTH_BYTES:
        return None
    return Finding(
        "deleted",
        Severity.WARNING,
        "deleted in a later layer, but still stored and pulled",
        facts.deleted.unpacked_bytes,
        tuple(show_path(path) for path in facts.deleted.top(SHOWN_PATHS)),
        "RUN install-something && rm -rf what-is-not-needed   # in the same RUN, or COPY --from=STAGE",
    )


def _duplicates(facts: Facts) -> Finding | None:
    n_bytes = sum(row.wasted_bytes for row in facts.duplicates)
    if n_bytes < WORTH_BYTES:
        return None
    rocm_twice = any(
        any(path.startswith(b"opt/rocm") for path in row.paths)
        and any(b"/torch/lib/" in path for path in row.paths)
        for row in facts.duplicates
    )
    cause = "; ROCm is there twice, in /opt/rocm and in torch/lib" if rocm_twice else ""
    return Finding(
        "duplicates",
        Severity.WARNING,
        f"the same content at several paths{cause}",
        n_bytes,
        tuple(
            " = ".join(show_path(path) for path in row.paths[:3]) for row in facts.duplicates[:SHOWN_PATHS]
        ),
        "RUN ln -sf FIRST SECOND   # in the layer that makes the copy; hard links don't survive layers",
    )


def _huge_layer(facts: Facts) -> Finding | None:
    """Amazon ECR Public and GitHub's registry refuse layers above some 10 GB."""
    huge = [n for n, stored in enumerate(facts.layer_stored_bytes) if (stored or 0) > REGISTRY_LAYER_BYTES]
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


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    _cuda_in_cpu_image,
    _torch_without_gpu_kernels,
    _foreign_files,
    _foreign_code_in_libraries,
    _overwritten,
    _deleted,
    _duplicates,
    _huge_layer,
    _caches,
    _headers_and_static,
    _tests,
    _debug,
    _docs_and_locale,
    _bytecode,
)


def _of_kind(facts: Facts, kinds: tuple[Kind, ...], name: str, title: str, remedy: str) -> Finding | None:
    """A finding of all visible files of some kinds; `{places}` in the remedy becomes the largest places."""
    tallies = [facts.shown[kind] for kind in kinds if kind in facts.shown]
    n_bytes = sum(tally.unpacked_bytes for tally in tallies)
    if n_bytes < WORTH_BYTES:
        return None
    places = _merged_places(tallies)
    listed = " ".join(_shell_word(place) for place in places[:8])
    paths = tuple(show_path(place) for place in places[:SHOWN_PATHS])
    return Finding(name, Severity.WARNING, title, n_bytes, paths, remedy.replace("{places}", listed))


def _is_foreign(key: str, wanted: list[TargetId]) -> bool:
    """Is code for these processors of no use to any wanted target? What isn't AMD's is judged elsewhere."""
    names = key.split("+")
    return all(name.startswith("gfx") for name in names) and not any(
        serves_any(TargetId.parse(name), wanted) for name in names
    )


def _shell_word(place: bytes) -> str:
    """A place for a command that is pasted: names come from the image and may hold anything."""
    directory, star, ending = place.partition(b"/*.")
    return shlex.quote(f"/{show_path(directory)}") + (star + ending).decode()


def _merged_places(tallies: Iterable[Tally]) -> list[bytes]:
    total = sum((tally.places for tally in tallies), Tally().places)
    return [place for place, _ in total.most_common()]


def _meant_hardware(facts: Facts) -> str:
    """What the image says it is for: cpu, rocm, cuda, or nothing."""
    words = f"{facts.labels.get('io.weir.variant', '')} {facts.ref}".lower()
    told = next((name for name in ("rocm", "cuda", "cpu") if name in words), "")
    return told or facts.labels.get("io.weir.torch.build", "")
