"""Content for other hardware than the image's: CUDA, foreign GPU targets, a torch without GPU kernels."""

from collections.abc import Mapping

from buildtool.audit.count.claims import (
    CUDA,
    FOREIGN_CODE,
    FOREIGN_FILES,
    is_foreign,
    parse_targets,
    saved_bytes,
)
from buildtool.audit.count.counts import Facts, Tally
from buildtool.audit.count.spot import shown
from buildtool.audit.judge.finding import SHOWN_PATHS, Finding, Severity, merged_places
from buildtool.gpucode.formats.scan import SECTIONS_READ, UNKNOWN
from buildtool.gpucode.target import TargetId, known_targets
from probes.shared.quoting import command, terminal
from probes.shared.units import counted, decimal_bytes

SECTIONS = ", ".join(SECTIONS_READ)


def cuda_in_cpu_image(facts: Facts) -> Finding | None:
    """CUDA's distributions and libraries where the image isn't for CUDA."""
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
        CUDA,
        severity,
        title,
        n_bytes,
        tuple(map(shown, facts.cuda.top(SHOWN_PATHS))),
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


def no_code_for_target(facts: Facts) -> Finding | None:
    """A card that the image is for, and for which no GPU code was found.

    A warning where some may be in sections that aren't read: the libraries that may hold it are named.
    """
    names, kept = _code_names(facts), _kept(facts)
    makers = {code.is_cuda for code in known_targets(names)}
    wanted = [target for target in parse_targets(facts.wanted_targets) if target.is_cuda in makers]
    missing = [target for target in wanted if target not in kept]
    if not missing or UNKNOWN in names:
        return None
    lacking = f"no GPU code for {', '.join(map(str, missing))}"
    hidden = facts.unsearched.top(SHOWN_PATHS)
    if hidden:
        title = (
            f"{lacking} was found, only for {', '.join(sorted(names))}; not read: what "
            f"{counted(len(facts.unsearched.places), 'library')} may hold outside {SECTIONS}"
        )
    else:
        title = f"{lacking}, only for {', '.join(sorted(names))}: the libraries here can't use that card"
    return Finding(
        "no-code-for-target",
        Severity.WARNING if hidden else Severity.ERROR,
        title,
        0,
        tuple(map(shown, hidden)),
        f"{command('weir', 'doctor', '--card', missing[0].processor)}\n"
        "# shows which torch and which ROCm have code for the card; prune can only keep what is here",
    )


def _code_names(facts: Facts) -> set[str]:
    """What the image's GPU code is for, by the names in its files."""
    return {name for key in (*facts.gpu_files, *facts.gpu_in_libraries) for name in key.split("+")}


def _kept(facts: Facts) -> tuple[TargetId, ...]:
    """The wanted targets that the image has code for: prune refuses to keep others."""
    had = known_targets(_code_names(facts))
    return tuple(one for one in parse_targets(facts.wanted_targets) if any(code.serves(one) for code in had))


def _prune(facts: Facts) -> str:
    """What to type to remove foreign code of both forms: one command removes both."""
    saved = saved_bytes(facts.claims, {FOREIGN_FILES, FOREIGN_CODE})
    targets = ",".join(map(str, _kept(facts)))
    left = decimal_bytes(sum(facts.layer_bytes) - saved)
    prune = "weir", "prune", "--targets", targets
    return (
        f"{command(*prune, '--', facts.ref)}\n"
        f"# takes {decimal_bytes(saved)} out of files and libraries, leaves {left}\n"
        f"# or prune what is copied into an image: {command(*prune, 'DIRECTORY')}"
    )


def _foreign(facts: Facts, code: Mapping[str, Tally], name: str, what: str) -> Finding | None:
    """A finding of the code that no wanted target can run; None where nothing would be kept."""
    wanted = parse_targets(facts.wanted_targets)
    names = ", ".join(map(str, wanted))
    foreign = {key: tally for key, tally in code.items() if is_foreign(key, wanted)}
    n_bytes = sum(tally.unpacked_bytes for tally in foreign.values())
    if not n_bytes or not _kept(facts):
        return None
    return Finding(
        name,
        Severity.WARNING,
        f"{what} GPU code for {', '.join(sorted(foreign))}; the image is for {names}",
        n_bytes,
        tuple(map(shown, merged_places(foreign.values())[:SHOWN_PATHS])),
        _prune(facts),
    )


def _meant_hardware(facts: Facts) -> str:
    """What the image claims to be for: cpu, rocm, cuda, or nothing."""
    words = f"{_label(facts, 'variant')} {facts.ref}".lower()
    names = next((name for name in ("rocm", "cuda", "cpu") if name in words), "")
    return names or _label(facts, "torch.build")


def _label(facts: Facts, name: str) -> str:
    """The value of one of our labels; empty for an image without it."""
    return facts.labels.get(f"io.weir.{name}", "")
