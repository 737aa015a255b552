"""A small image with something of everything that an inventory tells apart."""

import json

from elf_maker import shared
from image_maker import Image, file, folder, hardlink, symlink, tar

LIB = "opt/lib"
OPENBLAS = shared("libopenblas.so.0", b"\0OpenBLAS 0.3.27 NO_LAPACKE\0")
GOMP = shared("libgomp.so.1", build_id="2244452c1de4759ccb52adc5352b501d4c2ee9ce")
ZSTD = shared("libzstd.so.1", b"\0v 1.5.7\0")
STRANGE = shared("libstrange.so.4", b"\x001.4.0\0")
XAU = shared("libXau.so.6")
OWN = shared("libdemo.so", b"\0onednn_verbose\0OpenSSL 3.0.1 14 Dec 2021\0")
EXTENSION = shared("")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DECLARED = {
    "bomFormat": "CycloneDX",
    "components": [
        {"type": "library", "name": "demo", "version": "1.0", "purl": "pkg:pypi/demo@1.0"},
        {
            "type": "library",
            "name": "libXau",
            "version": "1.0.9-3.el8",
            "purl": "pkg:rpm/almalinux/libXau@1.0.9-3.el8",
        },
        {"type": "library", "name": "hidden", "version": "7", "purl": "pkg:generic/hidden@7"},
    ],
}
WHEEL = {
    "demo/__init__.py": b"",
    "demo/_C.cpython-311-x86_64-linux-gnu.so": EXTENSION,
    "demo/lib/libdemo.so": OWN,
    "demo.libs/libopenblas-r0-0123abcd.so.0": OPENBLAS,
    "demo.libs/libgomp-e985bcbb.so.1.0.0": GOMP,
    "demo.libs/libzstd-40ad5e7e.so.1.5.7": ZSTD,
    "demo.libs/libstrange-0123abcd.so.4": STRANGE,
    "demo.libs/libXau-154567c4.so.6.0.0": XAU,
    "demo-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: Demo\nVersion: 1.0\n",
    "demo-1.0.dist-info/sboms/auditwheel.cdx.json": json.dumps(DECLARED).encode(),
}
RECORD = b"".join(b"%s,,\n" % path.encode() for path in (*WHEEL, "demo-1.0.dist-info/RECORD"))
STATUS = (
    b"Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nSource: glibc\n"
    b"Version: 2.36-9+deb12u4\n\n"
    b"Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n"
)
RELEASE = b'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\n'
CACHE = "models/models--acme--tiny"
UNOWNED = {
    "etc/hostname": b"here\n",
    "usr/local/lib/libcrypto.so.1.1.1k": shared("libcrypto.so.1.1", b"OpenSSL 1.1.1k  FIPS 25 Mar 2021"),
    "srv/\xff\x1b.txt": b"odd",
}
BASE = tar(
    folder("etc"),
    symlink("etc/os-release", "../usr/lib/os-release"),
    file("usr/lib/os-release", RELEASE),
    file("usr/lib/libc.so.6", b"c" * 70_000),
    file("var/lib/dpkg/status", STATUS),
    file("var/lib/dpkg/info/libc6:amd64.list", b"/.\n/usr/lib/libc.so.6\n/usr/lib/os-release\n"),
    file("var/log/removed.log", b"gone later"),
    *(file(path.encode("latin-1"), content) for path, content in UNOWNED.items()),
)
TOP = tar(
    *(file(f"{LIB}/{path}", content) for path, content in WHEEL.items()),
    file(f"{LIB}/demo-1.0.dist-info/RECORD", RECORD),
    hardlink("usr/bin/libc-again", "usr/lib/libc.so.6"),
    file("var/log/.wh.removed.log"),
    file(f"{CACHE}/blobs/abc", b"weights"),
    file(f"{CACHE}/refs/main", COMMIT.encode()),
    symlink(f"{CACHE}/snapshots/{COMMIT}/model.safetensors", "../../blobs/abc"),
    file("models/local/model.safetensors", b"more weights"),
    file(
        "models/local/.cache/huggingface/download/model.safetensors.metadata",
        f"{COMMIT}\netag\n1700000000.0\n".encode(),
    ),
)
LABELS = {"org.opencontainers.image.title": "acme/demo", "io.weir.variant": "demo"}


def image(**more: object) -> Image:
    return Image([BASE, TOP], labels=LABELS, ref="acme/demo:1", **more)  # type: ignore[arg-type]
