"""An inventory as CycloneDX 1.6 and as SPDX 2.3, in JSON. The same inventory gives the same bytes.

Neither says when it was written: CycloneDX needn't, and SPDX gets the time that the image itself says.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from buildtool.sbom.inventory import Inventory
from buildtool.sbom.libraries import Component, purl_of
from probes.core.invocation import tool_version

CYCLONEDX, SPDX = "cyclonedx", "spdx"
_NO_TIME = "1970-01-01T00:00:00Z"
_TIME = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d")
_ID_CHARS = re.compile(r"[^A-Za-z0-9.-]+")
Json = dict[str, Any]


def render(inventory: Inventory, format_name: str) -> str:
    """The document as a file: `cyclonedx` or `spdx`."""
    return json.dumps(DOCUMENTS[format_name](inventory), indent=1) + "\n"


# CycloneDX


def cyclonedx(inventory: Inventory) -> Json:
    """The inventory as a CycloneDX 1.6 document."""
    numbers = count(1)  # with which a document's identifiers end, each once
    image = f"image:{inventory.digest}"
    rows = [_cyclonedx_row(each, numbers) for each in (*inventory.components, *inventory.unowned)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{_uuid(inventory, 'cyclonedx')}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "weir", "version": tool_version()}]},
            "component": {
                "type": "container",
                "bom-ref": image,
                "name": inventory.name,
                "version": inventory.digest,
                "purl": _image_purl(inventory),
                "properties": _properties(
                    {
                        "platform": inventory.platform,
                        "files": inventory.n_files,
                        "unowned-files": len(inventory.unowned),
                    }
                ),
            },
        },
        "components": rows,
        "dependencies": [{"ref": image, "dependsOn": [row["bom-ref"] for row in rows]}],
    }


def _cyclonedx_row(component: Component, numbers: Iterator[int]) -> Json:
    """A component with those inside it, which CycloneDX nests."""
    hashes = [{"alg": kind, "content": value} for kind, value in _digests(component)]
    origin = {"type": "distribution", "url": quote(component.archive), "hashes": hashes}
    method = {
        "technique": component.technique,
        "confidence": component.confidence,
        "value": component.evidence,
    }
    identity = {
        "field": "purl" if component.purl else "name",
        "confidence": component.confidence,
        "methods": [_filled(method)],
    }
    places = [{"location": f"/{component.path}"}] if component.path else []
    properties = {
        "files": component.n_files or "",
        "version-unknown": component.why_unknown,
        "build-id": component.build_id,
    }
    row = {
        "type": component.kind,
        "bom-ref": f"{component.purl or component.name}:{next(numbers)}",
        "name": component.name,
        "version": component.version,
        "purl": component.purl,
        "externalReferences": [origin] if component.archive and hashes else [],
        "hashes": [] if component.archive else hashes,
        "evidence": _filled({"identity": [identity], "occurrences": places}),
        "properties": _properties(properties),
        "components": [_cyclonedx_row(part, numbers) for part in component.parts],
    }
    return _filled(row)


def _properties(values: Mapping[str, object]) -> list[Json]:
    return [{"name": f"weir:{key}", "value": str(value)} for key, value in values.items() if value != ""]


# SPDX


def spdx(inventory: Inventory) -> Json:
    """The inventory as an SPDX 2.3 document: packages, and files that no package owns."""
    known_time = _TIME.match(inventory.created)
    image, numbers = "SPDXRef-image", count(1)
    row = {
        "name": inventory.name,
        "SPDXID": image,
        "versionInfo": inventory.digest,
        "primaryPackagePurpose": "CONTAINER",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": inventory.digest.removeprefix("sha256:")}],
        "externalRefs": [_purl_reference(_image_purl(inventory))],
        "comment": f"{inventory.n_files} files for {inventory.platform}; no package owns "
        f"{len(inventory.unowned)} of them, which are listed as files",
    }
    packages = [(row, _related("SPDXRef-DOCUMENT", "DESCRIBES", image))]
    for component in inventory.components:
        packages += _spdx_packages(component, image, numbers)
    files: list[tuple[Json, Json]] = []
    for component in inventory.unowned:
        identifier = f"SPDXRef-File-{next(numbers)}"
        file = {
            "fileName": f"./{component.path}",
            "SPDXID": identifier,
            "checksums": _checksums(component),
            "comment": component.why_unknown,
        }
        files.append((file, _related("SPDXRef-DOCUMENT", "DESCRIBES", identifier)))
        for part in component.parts:  # what is linked into it
            packages += _spdx_packages(part, identifier, numbers)
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": inventory.name,
        "documentNamespace": f"https://spdx.org/spdxdocs/image-{_uuid(inventory, 'spdx')}",
        "creationInfo": {
            "created": f"{known_time[0]}Z" if known_time else _NO_TIME,
            "creators": [f"Tool: weir-{_ID_CHARS.sub('-', tool_version())}"],
            "comment": "the time is the image's own"
            if known_time
            else "the image doesn't say when it was made, and the same image gives the same document",
        },
        "packages": [row for row, _ in packages],
        "files": [row for row, _ in files],
        "relationships": [relation for _, relation in (*packages, *files)],
    }


def _related(origin: str, kind: str, target: str) -> Json:
    return {"spdxElementId": origin, "relationshipType": kind, "relatedSpdxElement": target}


def _spdx_packages(component: Component, holder: str, numbers: Iterator[int]) -> Iterator[tuple[Json, Json]]:
    """A component as a package, what is inside it, and that the holder contains each."""
    named = _ID_CHARS.sub("-", component.name)[:160]
    identifier = f"SPDXRef-{component.kind}-{named}-{next(numbers)}"
    is_model = component.kind == "machine-learning-model"
    row = {
        "name": component.name,
        "SPDXID": identifier,
        "primaryPackagePurpose": "OTHER" if is_model else component.kind.upper().replace("-", "_"),
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "comment": _comment(component),
        "versionInfo": component.version,
        "packageFileName": component.archive or (component.path and f"./{component.path}"),
        "checksums": _checksums(component),
        "externalRefs": [_purl_reference(component.purl)] if component.purl else [],
    }
    yield _filled(row), _related(holder, "CONTAINS", identifier)
    for part in component.parts:
        yield from _spdx_packages(part, identifier, numbers)


def _checksums(component: Component) -> list[Json]:
    return [
        {"algorithm": kind.replace("-", ""), "checksumValue": value} for kind, value in _digests(component)
    ]


def _comment(component: Component) -> str:
    parts = {
        "": component.evidence,
        "version unknown: ": component.why_unknown,
        "build id ": component.build_id,
        "files: ": component.n_files,
    }
    start = f"identified by {component.technique}, confidence {component.confidence}"
    return "; ".join([start, *(f"{name}{value}" for name, value in parts.items() if value)])


def _purl_reference(purl: str) -> Json:
    return {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}


# Both


def _filled(row: Json) -> Json:
    """A row without its empty values."""
    return {key: value for key, value in row.items() if value or value is False}


def _digests(component: Component) -> list[tuple[str, str]]:
    return [
        (kind, value) for kind, value in (("SHA-1", component.sha1), ("SHA-256", component.sha256)) if value
    ]


def _uuid(inventory: Inventory, kind: str) -> str:
    """Of an image in a format, the same wherever it is made."""
    return str(uuid5(NAMESPACE_URL, f"{kind}:{tool_version()}:{inventory.digest}"))


def _image_purl(inventory: Inventory) -> str:
    name = inventory.name.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return purl_of("oci", name.lower() or "image", inventory.digest)


DOCUMENTS: Mapping[str, Callable[[Inventory], Json]] = {CYCLONEDX: cyclonedx, SPDX: spdx}
