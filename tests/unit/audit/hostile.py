"""Hostile images, generated: classes of tricks in several variants, each as the bytes of an archive."""

import struct
from collections.abc import Iterator

import image_maker as make
from image_maker import END, Image, file, folder, gnu_long, hardlink, header, pax, symlink, tar

Case = tuple[str, str, bytes]


def corpus() -> Iterator[Case]:
    """Every case. What wraps a layer is an honest OCI archive unless the trick is in the wrapping."""
    for name, layers in _layer_stacks():
        group, _, variant = name.partition(": ")
        yield group, variant, make.archive(make.docker_25(Image(layers)))
    yield from _streams()
    yield from _documents()
    yield from _archives()


def _layer_stacks() -> Iterator[tuple[str, list[bytes]]]:
    for path in (
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "./././x",
        "..",
        "/",
        "",
        "a//b",
        "a/./b/..",
    ):
        yield f"traversal: {path!r}", [tar(file(path, b"x"))]
    for raw in (
        b"\xff\xfe",
        b"a\x00b",
        b"a\nb",
        b"a\x1b[31mb",
        "\u202egpj.exe".encode(),
        b"x" * 100,
        b"\\..\\x",
    ):
        yield f"odd names: {raw!r}", [tar(file(raw, b"x"))]
    for length in (255, 4000, 4095, 4096, 70_000, 1_100_000):
        yield f"long paths: pax {length}", [tar(pax({"path": "p" * length}) + file("s"))]
        yield f"long paths: gnu {length}", [tar(gnu_long(b"p" * length) + file("s"))]
    yield "long paths: deep", [tar(pax({"path": "d/" * 2000 + "f"}) + file("s", b"x"))]
    for target in ("/etc/passwd", "../../x", "", ".", "self", "missing", "/", "a" * 99):
        yield (
            f"symbolic links: {target!r}",
            [tar(symlink("self", target)), tar(file("self/x", b"1"), file("self/.wh.y"))],
        )
    yield "link circles: two", [tar(symlink("a", "b"), symlink("b", "a")), tar(file("a/x", b"1"))]
    yield "link circles: itself", [tar(symlink("a", "a")), tar(file("a/x", b"1"))]
    yield "link circles: below itself", [tar(symlink("a", "a/a")), tar(file("a/a/x", b"1"))]
    yield (
        "link circles: chain of 60",
        [
            tar(*(symlink(f"l{n}", f"l{n + 1}") for n in range(60)), folder("l60")),
            tar(file("l0/x", b"1")),
        ],
    )
    yield (
        "link circles: doubling",
        [
            tar(*(symlink(f"l{n}", f"l{n + 1}/l{n + 1}") for n in range(39)), folder("l39")),
            tar(file("l0/x", b"1")),
        ],
    )
    for target in ("/etc/passwd", "../../x", "missing", "d", "self", ""):
        members = (folder("d"), hardlink("self", target), file("after", b"x"))
        yield f"hard links: {target!r}", [tar(*members), tar(hardlink("again", "self"), file(".wh.self"))]
    yield "doubled paths: file", [tar(file("a", b"1"), file("a", b"22"), file("./a", b"333"))]
    yield (
        "doubled paths: file and directory",
        [tar(file("a", b"1"), folder("a"), file("a/b", b"1"), file("a", b"2"))],
    )
    yield "doubled paths: below a file", [tar(file("a", b"1"), file("a/b/c", b"2"))]
    yield "doubled paths: below a link", [tar(symlink("a", "/x"), file("a/b", b"2"), folder("a"))]
    yield "doubled paths: 2,000 times", [tar(*[file("a", b"1")] * 2_000)]
    for name in (
        ".wh.",
        ".wh..",
        ".wh...",
        "d/.wh.",
        ".wh..wh..opq",
        ".wh..wh.plnk",
        ".wh..wh.aufs",
        ".wh.none",
        ".wh.d",
    ):
        yield f"whiteouts: {name}", [tar(folder("d"), file("d/x", b"1")), tar(file(name), file("d/y", b"1"))]
    yield (
        "whiteouts: through a link",
        [tar(symlink("l", "/d"), file("d/x", b"1")), tar(file("l/.wh.x"), file("l/.wh..wh..opq"))],
    )
    for size in ("-1", "99999999999999999999", "9" * 5000, "x", "", "+5", "1_0", " 7"):
        yield f"pax sizes: {size[:24]!r}", [tar(pax({"size": size}) + file("a", b"x"))]
    for body in (
        b"",
        b"0\n",
        b"5 a=b\n",
        b"99 a=b\n",
        b"6 a=b\n",
        b"-6 a=b\n",
        b"6 =bb\n",
        b"\xff" * 50,
        b"6 abc\n",
    ):
        yield (
            f"pax records: {body[:12]!r}",
            [tar(header(b"x", len(body), b"x") + make.padded(body) + file("a"))],
        )
    for path in (b"a\0b", b"", b"/", b"\xff"):
        yield f"pax paths: {path!r}", [tar(pax({"path": path}) + file("a"))]
    for flag in (b"x", b"g", b"L", b"K"):
        yield f"huge metadata: {flag!r}", [tar(header(b"m", 1 << 30, flag), bytes(4096))]
        yield (
            f"chained metadata: {flag!r}",
            [tar((header(b"m", 4, flag) + make.padded(b"4 a=")) * 30, file("a"))],
        )
        yield f"metadata at the end: {flag!r}", [tar(header(b"m", 0, flag))]
    for field in (
        b"\xff" * 12,
        b"\x80" + b"\x7f" * 11,
        b"\x80" + bytes(10) + b"\x07",
        b"-0000000001\0",
        b"0x000000001\0",
        bytes(12),
    ):
        yield f"sizes: {field!r}", [tar(header(b"a", field), bytes(512))]
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "r"}
    for size in ("9223372036854775807", "-1", "x"):
        yield (
            f"sparse: 1.0 {size}",
            [tar(pax({**sparse, "GNU.sparse.realsize": size}) + file("s", b"20000000\n"))],
        )
    yield (
        "sparse: 0.1",
        [tar(pax({"GNU.sparse.map": "0,1,99999999,1", "GNU.sparse.size": "9" * 18}) + file("s", b"x"))],
    )
    tail = bytes(137) + b"\1" + bytes(29)
    yield (
        "sparse: endless map",
        [tar(header(b"s", 0, b"S", magic=b"ustar  \0", tail=tail), (bytes(504) + b"\1" + bytes(7)) * 2100)],
    )
    for flag in b"3467DMNVZ\x01\xff":
        yield f"types: {bytes([flag])!r}", [tar(header(b"dev", flag=bytes([flag])), file("after", b"x"))]
    yield "checksums: wrong", [tar(file("a")[:140] + b"9" + file("a")[141:])]
    yield "checksums: blank", [tar(file("a")[:148] + b" " * 8 + file("a")[156:])]
    yield "zero blocks: lone", [file("a", b"x") + bytes(512) + file("b", b"x") + END]
    yield "zero blocks: rubbish behind the end", [tar(file("a", b"x")) + b"rubbish" * 500]
    yield "zero blocks: no end", [file("a", b"x")]
    yield "zero blocks: nothing else", [bytes(10240)]
    whole = tar(pax({"path": "long"}) + file("a", b"x" * 600), file("b", b"y"))
    for cut in range(512, len(whole), 512):
        yield f"truncated tars: {cut}", [whole[:cut]]
    yield "many layers: 200", [tar(file(f"f{n}", b"x")) for n in range(200)]
    yield "many layers: 520", [tar(file("f"))] * 520
    yield "many layers: none", []
    yield (
        "package databases: status",
        [tar(file("var/lib/dpkg/status", b"Package: \nStatus: installed\n\n\xff\nPackage: a" * 50))],
    )
    record = b'"../../../../etc/passwd",,\n"unclosed,,\n,,,\n\xff\n' + b"/" * 3000 + b",,\n"
    yield (
        "package databases: RECORD",
        [tar(file("s/x-1.dist-info/RECORD", record), file("s/x-1.dist-info/METADATA", b"Name\n"))],
    )
    evil = b"Name: nvidia-\xff\x1b[31m\nVersion: \xed\xa0\x80|`\n"
    members = (file("s\x1b/x-1.dist-info/METADATA", evil), file("s\x1b/x-1.dist-info/RECORD", b"big.so,,\n"))
    yield "package databases: names", [tar(*members, file("s\x1b/big.so", bytes(99_000)))]
    for text in (b"[" * 5000, b"{}", b'{"name": 1, "version": 2, "files": "abc"}', b'{"files": 5}', b"\xff"):
        yield f"package databases: conda {text[:9]!r}", [tar(file("c/conda-meta/x.json", text))]
    for text in (
        b"\x7fELF" + bytes(70_000),
        b"CCOB" + b"\xff" * 70_000,
        b"__CLANG_OFFLOAD_BUNDLE__" + b"\xff" * 70_000,
    ):
        yield f"gpu code: {text[:8]!r}", [tar(file("lib/x.so", text))]
    elf = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack(
        "<QIHHHHHH", 2**63, 0, 64, 56, 9, 64, 65535, 1
    )
    yield (
        "gpu code: section headers elsewhere",
        [tar(file("lib/x.so", elf.ljust(4096, b"\0") + b"CCOB".ljust(70_000, b"\1")))],
    )


def _streams() -> Iterator[Case]:
    layer = tar(file("f", b"content" * 300))
    packers = {
        "gzip": make.gzipped,
        "gzip members": make.gzip_members,
        "zstd": make.zstandard,
        "zstd frames": make.zstd_frames,
    }
    for name, pack in packers.items():
        for cut in (1, 9, 40):
            yield (
                "truncated streams",
                f"{name} {cut}",
                _packed(layer, pack, lambda blob, cut=cut: blob[:-cut]),
            )
        for at in (4, 20, 60):
            yield (
                "damaged streams",
                f"{name} {at}",
                _packed(layer, pack, lambda blob, at=at: _flipped(blob, at)),
            )
        yield "rubbish behind streams", name, _packed(layer, pack, lambda blob: blob + b"rubbish")
        yield "zeros behind streams", name, _packed(layer, pack, lambda blob: blob + bytes(600))
    for magic in (
        b"\x1f\x8b",
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18\xff\xff\xff\xff",
        b"BZh9",
        b"\xfd7zXZ\0",
        b"",
        b"{}",
    ):
        yield "wrong magic", repr(magic), _packed(layer, make.gzipped, lambda blob, magic=magic: magic)
    zeros = tar(file("zeros", bytes(5 << 20)))
    for name in ("gzip", "zstd"):
        yield "bombs", name, make.archive(make.docker_25(Image([zeros], packers[name])))
        nested = lambda content, pack=packers[name]: pack(pack(content))  # noqa: E731
        yield "bombs", f"nested {name}", _packed(layer, nested, lambda blob: blob)


def _packed(layer: bytes, pack: make.Packer, damage: make.Packer) -> bytes:
    return make.archive(make.docker_25(Image([layer], lambda content: damage(pack(content)))))


def _flipped(content: bytes, at: int) -> bytes:
    at = min(at, len(content) - 1)
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def _documents() -> Iterator[Case]:
    image = Image([tar(file("f", b"x"))])
    good = make.docker_25(image)
    evil = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"[" * 9000,
        b'{"a":' * 9000,
        b'{"manifests": 5}',
        b'{"manifests": [7]}',
    ]
    evil += [
        b'{"manifests": [{"digest": "sha256:..", "size": 1}]}',
        b"NaN",
        b'{"a": 1e400, "manifests": []}',
        b"\xff\xfe{}",
    ]
    evil += [
        b'{"manifests": [], "manifests": []}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"manifests": [], "layers": []}',
    ]
    for name in ("index.json", "manifest.json"):
        for text in evil:
            yield f"documents: {name}", repr(text[:30]), make.archive(good | {name: text})
        yield f"documents: {name}", "absent", make.archive({k: v for k, v in good.items() if k != name})
        yield f"documents: {name}", "5 MiB", make.archive(good | {name: b"[" + b" " * (5 << 20) + b"]"})
    for path in list(good):
        if path.startswith("blobs/"):
            missing = {k: v for k, v in good.items() if k != path}
            yield "missing blobs", path[-6:], make.archive(missing)
            yield "exchanged blobs", path[-6:], make.archive(good | {path: b"{}"})
            yield "longer blobs", path[-6:], make.archive(good | {path: good[path] + b" "})
    yield "extra blobs", "unnamed", make.archive(good | make.stored(b"who am I", make.gzipped(b"no tar")))
    loop = make.index_of(*[make.descriptor(make.index_of())] * 50)
    yield (
        "nested indexes",
        "empty",
        make.archive(good | make.stored(loop) | {"index.json": make.index_of(make.descriptor(loop))}),
    )
    yield (
        "nested indexes",
        "10,000 manifests",
        make.archive(good | {"index.json": make.index_of(*[make.named(image)] * 10_000)}),
    )
    for config in (
        b"{}",
        b"[]",
        b'{"rootfs": {"diff_ids": "x"}}',
        b'{"rootfs": {"diff_ids": [1]}}',
        b'{"rootfs": {"diff_ids": []}}',
        b'{"config": {"Labels": 5}, "rootfs": {"diff_ids": []}}',
    ):
        manifest = make.dump(
            {"config": make.descriptor(config), "layers": [make.descriptor(blob) for blob in image.blobs()]}
        )
        members = make.stored(config, manifest, *image.blobs()) | {
            "index.json": make.index_of(make.descriptor(manifest))
        }
        yield "configs", repr(config), make.archive(members)
    history = Image(
        [tar(file("f", b"x"))], history=[{"created_by": "a"}] * 9, labels={"io.weir.gpu-targets": "rx580"}
    )
    words = "\x1b[31m\ud800\u202e|<b>"
    labels = {"io.weir.variant": f"cpu{words}", words: words, "io.weir.torch.build": words}
    steps = [{"created_by": words}]
    odd = Image(
        [tar(file("f", b"x"))], labels=labels, ref=f"weir/{words}", architecture="amd64", history=steps
    )
    yield "configs", "odd words", make.archive(make.docker_25(odd))
    yield "configs", "history that doesn't fit", make.archive(make.docker_25(history))


def _archives() -> Iterator[Case]:
    good = make.archive(make.docker_25(Image([tar(file("f", b"x"))])))
    for cut in range(0, len(good), 1536):
        yield "truncated archives", str(cut), good[:cut]
    legacy = make.docker_legacy(Image([tar(file("f", b"x"))]))
    rows = (
        '[{"Config": "../x", "Layers": []}]',
        '[{"Config": "a", "Layers": ["/etc/passwd"]}]',
        "[{}, {}]",
        '[{"Layers": 1}]',
    )
    for row in rows:
        yield "legacy manifests", row, make.archive(legacy | {"manifest.json": row.encode()})
    body = b"".join(file(path, content) for path, content in legacy.items() if not path.endswith("layer.tar"))
    layer = next(path for path in legacy if path.endswith("layer.tar"))
    for target in ("/etc/passwd", "../../../etc/passwd", layer, "missing"):
        yield "legacy links", target, body + symlink(layer, target) + END
        yield "legacy hard links", target, body + hardlink(layer, target) + END
    yield "doubled members", "manifest.json", body + file("manifest.json", b"[]") + END
