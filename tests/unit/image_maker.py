"""Makes tars, images and archives of every dialect in memory. Shares no code with the reader."""

import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

END = bytes(1024)


def octal(number: int, width: int) -> bytes:
    return f"{number:0{width - 1}o}".encode() + b"\0"


def header(
    name: bytes,
    size: int | bytes = 0,
    flag: bytes = b"0",
    *,
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    tail: bytes | None = None,
) -> bytes:
    """One raw header; `size` as bytes goes in as it is, `tail` replaces what follows the device numbers."""
    size_field = size if isinstance(size, bytes) else octal(size, 12)
    block = b"".join(
        (
            name.ljust(100, b"\0")[:100],
            octal(0o644, 8),
            octal(0, 8),
            octal(0, 8),
            size_field,
            octal(0, 12),
            b" " * 8,
            flag,
            link.ljust(100, b"\0")[:100],
            magic,
            bytes(32 + 32),
            octal(0, 8),
            octal(0, 8),
            tail if tail is not None else prefix.ljust(155, b"\0") + bytes(12),
        )
    )
    assert len(block) == 512
    return block[:148] + octal(sum(block), 7) + b" " + block[156:]


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(records: Mapping[str, str | bytes], flag: bytes = b"x") -> bytes:
    body = b"".join(pax_record(key.encode(), value) for key, value in records.items())
    return header(b"PaxHeaders/x", len(body), flag) + padded(body)


def pax_record(key: bytes, value: str | bytes) -> bytes:
    text = b" " + key + b"=" + (value.encode() if isinstance(value, str) else value) + b"\n"
    length = len(text) + 1
    while len(str(length)) + len(text) != length:
        length += 1
    return str(length).encode() + text


def gnu_long(text: bytes, flag: bytes = b"L") -> bytes:
    return header(b"././@LongLink", len(text) + 1, flag, magic=b"ustar  \0") + padded(text + b"\0")


def file(name: str | bytes, content: bytes = b"") -> bytes:
    raw = name.encode() if isinstance(name, str) else name
    return header(raw, len(content)) + padded(content)


def folder(name: str) -> bytes:
    return header(name.encode() + b"/", flag=b"5")


def symlink(name: str, target: str) -> bytes:
    return header(name.encode(), flag=b"2", link=target.encode())


def hardlink(name: str, target: str) -> bytes:
    return header(name.encode(), flag=b"1", link=target.encode())


def tar(*members: bytes) -> bytes:
    return b"".join(members) + END


def sha(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def chunks(content: bytes, size: int = 1 << 16) -> Iterator[bytes]:
    return (content[at : at + size] for at in range(0, len(content), size))


Packer = Callable[[bytes], bytes]


def plain(content: bytes) -> bytes:
    return content


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def gzip_members(content: bytes) -> bytes:
    """As estargz and pigz write it: many members, one after the other."""
    return b"".join(gzip.compress(content[at : at + 700], 1, mtime=0) for at in range(0, len(content), 700))


def zstandard(content: bytes) -> bytes:
    return zstd.compress(content, 3)


def zstd_frames(content: bytes) -> bytes:
    """Several frames with a skippable one first and in between."""
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    return skipped + b"".join(
        zstd.compress(content[at : at + 700], 3) + skipped for at in range(0, len(content), 700)
    )


_MEDIA = {plain: "", gzipped: "+gzip", gzip_members: "+gzip", zstandard: "+zstd", zstd_frames: "+zstd"}


@dataclass
class Image:
    """An image to be written: layers as tars, bottom first."""

    layers: list[bytes]
    pack: Packer = gzipped
    architecture: str = "amd64"
    labels: Mapping[str, str] = field(default_factory=dict)
    ref: str = "weir/tiny:1"
    history: list[Mapping[str, object]] | None = None
    env: list[str] = field(default_factory=list)
    provenance: Mapping[str, object] = field(default_factory=dict)

    def config(self) -> bytes:
        steps = self.history
        if steps is None:
            steps = [{"created_by": f"RUN step {n}"} for n in range(len(self.layers))]
        return dump(
            {
                "architecture": self.architecture,
                "os": "linux",
                "config": {"Labels": self.labels, "Env": self.env},
                "rootfs": {"type": "layers", "diff_ids": self._diff_ids},
                "history": steps,
            }
        )

    def __post_init__(self) -> None:
        self._blobs = [self.pack(layer) for layer in self.layers]
        self._diff_ids = [sha(layer) for layer in self.layers]

    def blobs(self) -> list[bytes]:
        return self._blobs

    def manifest(self) -> bytes:
        media = "application/vnd.oci.image.layer.v1.tar" + _MEDIA.get(self.pack, "")
        return dump(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": descriptor(self.config(), "application/vnd.oci.image.config.v1+json"),
                "layers": [descriptor(blob, media) for blob in self.blobs()],
            }
        )


Members = dict[str, bytes]


def dump(value: object) -> bytes:
    return json.dumps(value).encode()


def descriptor(content: bytes, media: str = "", **more: object) -> dict[str, object]:
    return {"mediaType": media, "digest": sha(content), "size": len(content), **more}


def blob_path(content: bytes) -> str:
    return "blobs/" + sha(content).replace(":", "/")


def stored(*contents: bytes) -> Members:
    return {blob_path(content): content for content in contents}


def index_of(*manifests: Mapping[str, object]) -> bytes:
    return dump(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": list(manifests),
        }
    )


def pointing_to(*documents: bytes) -> bytes:
    """An index of documents that say nothing else of themselves."""
    return index_of(*(descriptor(document) for document in documents))


def manifest_of(config: bytes, *layers: Mapping[str, object]) -> bytes:
    """A bare manifest."""
    return dump({"config": descriptor(config), "layers": list(layers)})


def named(image: Image, **more: object) -> dict[str, object]:
    notes = {"io.containerd.image.name": f"docker.io/{image.ref}"}
    return descriptor(
        image.manifest(), "application/vnd.oci.image.manifest.v1+json", annotations=notes, **more
    )


def oci_layout(image: Image) -> Members:
    """What buildx's OCI exporter and skopeo write."""
    return {
        **stored(*image.blobs(), image.config(), image.manifest()),
        "index.json": index_of(named(image)),
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
    }


def docker_25(image: Image) -> Members:
    """`docker save` from Docker 25 on: an OCI layout that also has manifest.json."""
    blobs = [blob_path(blob) for blob in image.blobs()]
    row = {"Config": blob_path(image.config()), "RepoTags": [image.ref], "Layers": blobs}
    return {**oci_layout(image), "manifest.json": dump([row])}


def containerd_nested(image: Image) -> Members:
    """`docker save` with the containerd store of a built image: an index in the index, attestations."""
    statement = dump({"_type": "https://in-toto.io/Statement/v0.1", "predicate": image.provenance})
    config = dump({"architecture": "unknown", "os": "unknown", "rootfs": {"diff_ids": [sha(statement)]}})
    attestation = dump(
        {
            "schemaVersion": 2,
            "config": descriptor(config),
            "layers": [descriptor(statement, "application/vnd.in-toto+json")],
        }
    )
    inner = index_of(
        descriptor(image.manifest(), platform={"os": "linux", "architecture": image.architecture}),
        descriptor(
            attestation,
            platform={"os": "unknown", "architecture": "unknown"},
            annotations={"vnd.docker.reference.type": "attestation-manifest"},
        ),
    )
    notes = {"io.containerd.image.name": f"docker.io/{image.ref}"}
    return {
        **docker_25(image),
        **stored(statement, config, attestation, inner),
        "index.json": index_of(descriptor(inner, annotations=notes)),
    }


def docker_legacy(image: Image) -> Members:
    """`docker save` before Docker 25: plain layers in directories, named only by manifest.json."""
    config = f"{sha(image.config()).removeprefix('sha256:')}.json"
    members: Members = {config: image.config(), "repositories": b"{}"}
    paths = []
    for n, layer in enumerate(image.layers):
        paths.append(f"{n:064x}/layer.tar")
        members |= {f"{n:064x}/VERSION": b"1.0", f"{n:064x}/json": b"{}", paths[-1]: layer}
    members["manifest.json"] = dump([{"Config": config, "RepoTags": [image.ref], "Layers": paths}])
    return members


def artifact_attestation(image: Image) -> Members:
    """As newer BuildKit: the attestation is an OCI artifact that names its subject."""
    statement = dump({"_type": "https://in-toto.io/Statement/v0.1"})
    artifact = dump(
        {
            "schemaVersion": 2,
            "artifactType": "application/vnd.docker.attestation.manifest.v1+json",
            "config": descriptor(b"{}", "application/vnd.oci.empty.v1+json"),
            "layers": [descriptor(statement, "application/vnd.in-toto+json")],
            "subject": descriptor(image.manifest()),
        }
    )
    parts = stored(b"{}", artifact, statement)
    return {**docker_25(image), **parts, "index.json": index_of(named(image), descriptor(artifact))}


def kaniko(image: Image) -> Members:
    """go-containerregistry's tarball, which kaniko and ko write: names are digests."""
    config = sha(image.config())
    blobs = {sha(blob).removeprefix("sha256:") + ".tar.gz": blob for blob in image.blobs()}
    row = {"Config": config, "RepoTags": [image.ref], "Layers": list(blobs)}
    return {config: image.config(), **blobs, "manifest.json": dump([row])}


def skopeo_archive(image: Image) -> Members:
    """skopeo's and podman's docker-archive: layers are named by their content."""
    config = sha(image.config()).removeprefix("sha256:") + ".json"
    layers = {sha(layer).removeprefix("sha256:") + ".tar": layer for layer in image.layers}
    row = {"Config": config, "RepoTags": [image.ref], "Layers": list(layers)}
    return {**layers, config: image.config(), "manifest.json": dump([row])}


def skopeo_directory(image: Image) -> Members:
    """skopeo's `dir:`: one manifest, blobs named by hex digits."""
    parts = {sha(part).removeprefix("sha256:"): part for part in (*image.blobs(), image.config())}
    return {"version": b"Directory Transport Version: 1.1\n", "manifest.json": image.manifest(), **parts}


DIALECTS: dict[str, tuple[Callable[[Image], Members], Packer]] = {
    "docker before 25": (docker_legacy, plain),
    "docker 25, classic store": (docker_25, plain),
    "docker 29, containerd store": (containerd_nested, gzipped),
    "containerd store, zstd": (containerd_nested, zstandard),
    "BuildKit OCI, gzip": (oci_layout, gzipped),
    "BuildKit OCI, zstd": (oci_layout, zstandard),
    "BuildKit OCI, plain": (oci_layout, plain),
    "BuildKit, artifact attestations": (artifact_attestation, gzipped),
    "estargz": (oci_layout, gzip_members),
    "zstd:chunked": (oci_layout, zstd_frames),
    "kaniko": (kaniko, gzipped),
    "skopeo and podman docker-archive": (skopeo_archive, plain),
    "skopeo dir": (skopeo_directory, gzipped),
    "nerdctl": (docker_25, gzipped),
}


def archive(members: Members, order: Iterable[str] | None = None) -> bytes:
    """The members as one tar, written by the standard library."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as writer:
        for path in order if order is not None else members:
            info = tarfile.TarInfo(path)
            info.size = len(members[path])
            writer.addfile(info, io.BytesIO(members[path]))
    return out.getvalue()


def layout_directory(members: Members, root: Path) -> Path:
    for path, content in members.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root
