"""Tables for the terminal."""

from collections.abc import Sequence
from dataclasses import astuple

from buildtool.audit.report.render import SummaryRow, text_table
from buildtool.builder.plan import ImagePlan
from buildtool.engine.proof import Proof
from buildtool.model import BuiltImage
from probes.shared.quoting import terminal


def built(targets: Sequence[ImagePlan], images: Sequence[BuiltImage], proofs: Sequence[Proof]) -> str:
    """Where each image came from and what its proof showed; below, why other sources weren't used."""
    rows = [
        (
            image.ref,
            image.digest[:19],
            f"{target.resolved.base.origin}: {target.resolved.base.name}",
            f"{proof.torch_version} ({proof.torch_build.value}, from {target.resolved.torch_source})",
            proof.python,
            proof.rocminfo,
        )
        for target, image, proof in zip(targets, images, proofs, strict=True)
    ]
    headers = ("image", "manifest digest", "base", "torch", "python", "rocminfo")
    notes = [
        f"  {target.variant.name}: skipped {note}" for target in targets for note in target.resolved.notes
    ]
    return "\n".join([text_table(headers, rows), *map(terminal, notes)])


def audited(rows: Sequence[SummaryRow]) -> str:
    """One line per image: its bytes, its budget, its biggest finding."""
    headers = ("image", "torch build", "layers", "unpacked", "compressed", "budget", "biggest finding")
    return text_table(headers, [astuple(row) for row in rows])
