"""What a build says of its images: bills of materials by their files, and how they were made.

Nothing in it depends on when or where the build ran: the same inputs give the same statements.
"""

from typing import Any

from buildtool.audit.audit import PROGRESS_EVERY_S, read_engine, throttled
from buildtool.build.pipeline import Written
from buildtool.build.plan import ImagePlan
from buildtool.build.workplace import Workplace, tool_fingerprint
from buildtool.core.model import PinnedBase, Wheel
from buildtool.image.written import Referrer, WrittenImage
from buildtool.sbom import attest, documents
from buildtool.sbom.binaries import inspect
from buildtool.sbom.inventory import take_inventory
from buildtool.sbom.keys import PrivateKey
from buildtool.sbom.libraries import purl_of
from probes.core.invocation import tool_version
from probes.core.units import decimal_bytes

BUILD_TYPE = "urn:gpu-weir:build:1"  # in docs/howto/sbom.md


def attestations(
    workplace: Workplace, planned: ImagePlan, image: WrittenImage, *, epoch: int, key: PrivateKey | None
) -> tuple[Referrer, ...]:
    """The manifests with what is said of a written image, signed where there is a key.

    Raises ImageError, DataError for layers that can't be read.
    """
    ref, name = planned.variant.ref, planned.variant.name
    workplace.progress(f"{name}: listing what is in {ref}")
    contents = read_engine(
        ref,
        Written(image, workplace.layers),
        tick=throttled(
            lambda done: workplace.progress(f"{name}: {decimal_bytes(done)} read"), every_s=PROGRESS_EVERY_S
        ),
        inspect=inspect,
    )
    inventory = take_inventory(
        contents,
        name=f"weir/{name}",
        created=contents.config.created,
        wheels=planned.resolved.wheels,
    )
    predicates = {
        "https://cyclonedx.org/bom": documents.cyclonedx(inventory),
        "https://spdx.dev/Document": documents.spdx(inventory),
        attest.PROVENANCE: provenance(planned, epoch),
    }
    statements = {
        kind: attest.statement(kind, predicate, name=f"weir/{name}", digest=image.digest)
        for kind, predicate in predicates.items()
    }
    return attest.referrers(image.descriptor({}), statements, key)


def provenance(planned: ImagePlan, epoch: int) -> dict[str, Any]:
    """How an image is made, as SLSA provenance v1: what was asked for, and every input by content."""
    variant, resolved = planned.variant, planned.resolved
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"variant": variant.name, "targets": [*variant.gpu_targets]},
            "internalParameters": {
                "SOURCE_DATE_EPOCH": epoch,
                "prune": variant.prune,
                "torch": resolved.torch_build.value,
                "torchSource": resolved.torch_source,
                "python": resolved.python,
            },
            "resolvedDependencies": [_base(resolved.base), *map(_wheel, resolved.wheels)],
        },
        "runDetails": {
            "builder": {
                "id": "urn:gpu-weir:builder",
                "version": {"weir": tool_version(), "sources": f"sha256:{tool_fingerprint()}"},
            }
        },
    }


def _base(base: PinnedBase) -> dict[str, Any]:
    sha256 = base.pin.removeprefix("sha256:")
    if base.origin == "registry":
        name = base.name.partition("@")[0]
        purl = purl_of(
            "oci", name.rpartition("/")[2].partition(":")[0], f"sha256:{sha256}", repository_url=name
        )
    else:
        purl = purl_of("generic", "debian-root-file-system", base.name)
    return {"name": "base", "uri": purl, "digest": {"sha256": sha256}}


def _wheel(wheel: Wheel) -> dict[str, Any]:
    purl = purl_of("pypi", wheel.distribution, wheel.version)
    return {"name": wheel.filename, "uri": purl, "digest": {"sha256": wheel.sha256}}
