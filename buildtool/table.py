"""Tables for the terminal."""

from collections.abc import Sequence

from tabulate import tabulate

from buildtool.model import BuiltImage
from buildtool.proof import Proof


def images(built: Sequence[BuiltImage], proofs: Sequence[Proof]) -> str:
    """Built images and what they were proved to hold."""
    rows = [
        (
            image.ref,
            image.digest[:19],
            proof.python,
            f"{proof.torch_version} ({proof.torch_build.value})",
            proof.rocminfo,
        )
        for image, proof in zip(built, proofs, strict=True)
    ]
    return tabulate(rows, headers=("image", "manifest digest", "python", "torch", "rocminfo"))
