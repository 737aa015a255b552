"""Long texts that make a careless reader slow: runs of each kind of character, near misses of each grammar.

`READERS` is every reader of buildtool that text from outside reaches (images, reports, proofs), each with
words of its own grammar. A text repeats one unit, or two in turn, behind a word that begins something and
before one that spoils it. Used by the unit tests (short texts) and by `make bench-audit` (1 MiB).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product

import image_maker as make

from buildtool.audit.counts import LayerCommand, find_base
from buildtool.audit.kinds import Classifier, is_build_tool, is_tool_directory
from buildtool.audit.packages import (
    LINE_BYTES,
    Manager,
    Package,
    component_of,
    conda_package,
    deb_packages,
    lines,
    python_name,
    recorded_paths,
)
from buildtool.audit.report import parse_report
from buildtool.core.errors import ToolError
from buildtool.engine.proof import MARK, facts_of
from buildtool.engine.reference import parse_reference
from buildtool.gpucode.bundle import Entry
from buildtool.gpucode.target import TargetId, gfx_targets_of_path, parse_targets
from buildtool.image.debug_info import DebugCounter
from buildtool.image.documents import (
    ImageConfig,
    Platform,
    Step,
    parse_config,
    parse_index_or_manifest,
    parse_saved,
)
from buildtool.image.gpu_code import GpuCodeCounter
from buildtool.image.layer import capture_rule, split_path
from buildtool.image.secrets import (
    credentials_in_document,
    credentials_in_file,
    credentials_in_text,
    redacted,
    search_scope,
    should_search,
)
from buildtool.image.streams import decompressed, sniff
from buildtool.image.tar import TarReader
from buildtool.prune.flat_image import read_config
from probes.core.quoting import (
    bake_text,
    html,
    markdown,
    markdown_block,
    markdown_code,
    markdown_sentence,
    sarif,
    shell,
    terminal,
    xml,
)

MIB = 1 << 20
NAME_BYTES = 4095  # of a path in a tar
CHARACTERS = (
    *(bytes([code]) for code in b" \t\r\n\0\x1b!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~aZ09"),
    *(text.encode() for text in ("é", "\u202e", "\U0001f600")),
    b"\xff",
    b"\r\n",
)
SPOILERS = (b"", b"!", b"\n", b'"')


@dataclass(frozen=True)
class Reader:
    """One reader: what is called, and words of its grammar."""

    read: Callable[[bytes], object]
    words: tuple[bytes, ...] = ()

    def reads(self, text: bytes) -> None:
        """Read a text; a refusal with our own error, or of a ValueError that callers expect, is an answer."""
        try:
            self.read(text)
        except (ToolError, ValueError):
            return


def runs(words: Iterable[bytes], n_bytes: int, spoilers: tuple[bytes, ...] = SPOILERS[:2]) -> Iterator[bytes]:
    """A run of each character and of each word, plain and spoiled at its end."""
    for unit, spoiler in product(dict.fromkeys((*CHARACTERS, *words)), spoilers):
        yield repeated(unit, n_bytes) + spoiler


def pairs(words: tuple[bytes, ...], n_bytes: int) -> Iterator[bytes]:
    """Each word once before a run of each unit, and in turn with each unit."""
    for word, unit in product(words, dict.fromkeys((*CHARACTERS, *words))):
        for spoiler in (b"", b"!"):
            yield word + repeated(unit, n_bytes) + spoiler
            yield repeated(word + unit, n_bytes) + spoiler


def repeated(unit: bytes, n_bytes: int) -> bytes:
    return unit * (n_bytes // len(unit))


def _string(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _cut(text: bytes, n_bytes: int) -> Iterator[bytes]:
    return (text[at : at + n_bytes] for at in range(0, len(text), n_bytes))


def _all(found: Iterable[object]) -> int:
    return sum(1 for _ in found)


def _whole_base(text: bytes) -> object:
    steps = (Step(_string(text), has_layer=True), Step("CMD x", has_layer=False), Step("", has_layer=True))
    config = ImageConfig(Platform("linux", "amd64"), ("a", "b"), None, {}, (), "", steps)
    return find_base(config), LayerCommand.of(_string(text))


def _names(text: bytes) -> None:
    classifier = Classifier()
    for name in _cut(text, NAME_BYTES):
        directory, last = split_path(name)
        for place in (directory, name):
            classifier.classify(place, last)
            component_of(b"opt/rocm-6.4/" + place, last)
            capture_rule(place)
            should_search(last, search_scope(place))
            is_tool_directory(place)
            for ending in ("", ".co", ".dat", ".db"):
                gfx_targets_of_path(_string(place) + ending)


def _package_names(text: bytes) -> None:
    for name in _cut(text, LINE_BYTES):
        for manager in Manager:
            is_build_tool(Package(manager, _string(name), ""))


def _conda(text: bytes) -> None:
    package = conda_package(text.decode("utf-8", "replace"))
    _all(package.files if package else ())


def _targets(text: bytes) -> None:
    for name in _cut(text, 4096):
        for parse in (TargetId.parse, parse_targets):
            try:
                parse(_string(name))
            except ToolError:
                continue


def _bundle_ids(text: bytes) -> None:
    for part in _cut(text, 500):
        try:
            _ = Entry("hip-" + part.decode("ascii", "replace"), 0, 0).target
        except ToolError:
            continue


def _code(head: bytes) -> Callable[[bytes], object]:
    def read(text: bytes) -> None:
        content = head + text
        probe, debug = GpuCodeCounter(len(content)), DebugCounter(len(content))
        for piece in _cut(content, 1 << 18):
            probe.feed(piece)
            debug.feed(piece)
        debug.debug_bytes(other_bytes=0)
        probe.stored_bytes_by_processor()

    return read


def _secrets_of(*names: bytes) -> Callable[[bytes], object]:
    return lambda text: [credentials_in_file(b"app", name, text).kinds for name in names]


def _tar(text: bytes) -> None:
    _all(TarReader(iter([make.tar(make.file("a", text)) + text]), place="t"))


def _packed(text: bytes) -> None:
    for pack in (make.gzipped, make.zstandard):
        packed = pack(text)
        _all(decompressed(iter([packed]), sniff(packed), place="t"))


def _wrapped(before: bytes, after: bytes, read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    return lambda text: read(before + text + after)


_JSON = (
    b"{",
    b"[",
    b'"a":',
    b"{}",
    b"[],",
    b'{"a":',
    b'"",',
    b'"\\u',
    b"\\\\",
    b"null,",
    b"1",
    b"1.",
    b"1e9",
)
_DOCUMENT = (
    *_JSON,
    b'"manifests":[',
    b'"layers":[',
    b'"config":{',
    b'"rootfs":{"diff_ids":[',
    b'"history":[',
)
_SECRET = (
    b"token=", b"token: '", b'"password": "', b"secret_", b"api_key", b"-----BEGIN ", b"PRIVATE KEY-----",
    b"-----BEGIN PRIVATE KEY-----", b"eyJ", b"eyJaaaaaaaaaaaa.", b"-eyJaaaaaaaaaaaa", b"://", b"://a:", b"://a:bcd@",
    b"curl -u ", b" -u a", b" -u a:", b" --password ", b"Authorization: Basic ", b'"auth": "', b"AccountKey=",
    b"hooks.slack.com/services/T", b"ghp_", b"github_pat_", b"glpat-", b"hf_", b"xoxb-", b"AKIA", b"AIza",
    b"GOCSPX-", b"1//0", b"ya29.", b"pypi-", b"npm_", b"dckr_pat_", b"sk_live_", b"sk-", b"SG.", b"hvs.",
    b"machine a ", b"machine a login ", b"machine a login b password ", b"default login ",
)  # fmt: skip
_LOGINS = (
    b"password ",
    b"a:",
    b"a:b:c:d:",
    b"a:$apr1$",
    b"a:$6$",
    b'"key": "',
    b"pass = ",
    b"client-key-data: ",
)
_STATUS = (
    b"Package: ",
    b"Package: a\n\n",
    b"Status: ",
    b"\n\n",
    b"\n \n",
    b"Version:",
    b"Package: a\nVersion: 1\n",
)
_PATHS = (
    b"a/", b"../", b"./", b"gfx90", b"gfx11xx", b"gfx1x1.", b"amd-gfx90a/", b"lib", b".so", b".so.1",
    b"conda", b"/pkgs", b"site-packages/", b"__editable__", b".cpython-311", b".pyc", b"opt/rocm-",
    b"Tensile", b"-generic", b".dist-info/",
)  # fmt: skip
_STEPS = (
    b"ADD ",
    b"ADD rootfs",
    b"ADD file:",
    b".tar",
    b"/bin/sh -c #(nop) ",
    b"COPY ",
    b"chown ",
    b"CMD ",
    b" in / ",
)
_PACKAGES = (
    b"lib",
    b"-dev",
    b"gcc-1",
    b"binutils-",
    b"nvidia-cuda-nvcc",
    b"rocm-",
    b"swig",
    b"golang-",
    b"linux-gnu",
)
_TARGETS = (
    b"gfx",
    b"gfx90a",
    b":xnack+",
    b",",
    b";",
    b"-generic",
    b"sm_",
    b"-gfx1",
    b"--gfx90a:",
    b"host-",
    b"hipv4-",
)
_MAGIC = (
    b"__CLANG_OFFLOAD_BUNDLE__",
    b"CCOB",
    b"\x10\xff\x10\xad",
    b"\x50\xed\x55\xba",
    b"\x7fELF",
    bytes(8),
)

READERS: dict[str, Reader] = {
    "config": Reader(lambda text: parse_config(text, place="config"), _DOCUMENT),
    "config, inside": Reader(
        _wrapped(b'{"x":[', b"]}", lambda text: parse_config(text, place="config")), _DOCUMENT
    ),
    "index or manifest": Reader(lambda text: parse_index_or_manifest(text, place="index.json"), _DOCUMENT),
    "manifest.json": Reader(lambda text: parse_saved(text, place="manifest.json"), _DOCUMENT),
    "config of an image to prune": Reader(read_config, _DOCUMENT),
    "saved report": Reader(lambda text: parse_report(_string(text), "report"), _JSON),
    "proof": Reader(lambda text: facts_of(MARK + _string(text)), _JSON),
    "secrets in settings": Reader(_secrets_of(b".env"), _SECRET),
    "secrets in code": Reader(_secrets_of(b"x.py"), _SECRET),
    "secrets in files of logins": Reader(
        _secrets_of(
            b".netrc", b".pgpass", b".htpasswd", b"shadow", b"kaggle.json", b"rclone.conf", b"config"
        ),
        _LOGINS,
    ),
    "secrets in labels and history": Reader(
        lambda text: credentials_in_text(text.decode("latin-1")).kinds, _SECRET
    ),
    "secrets in attestations": Reader(credentials_in_document, _SECRET),
    "redaction": Reader(lambda text: redacted(text.decode("latin-1")), _SECRET),
    "dpkg status": Reader(lambda text: _all(deb_packages(lines(_cut(text, 1 << 16)))), _STATUS),
    "dpkg lists": Reader(lambda text: _all(lines(_cut(text, 1 << 16))), (b"/usr/a\n", b"/a/./b\n")),
    "METADATA": Reader(
        lambda text: python_name(lines(_cut(text, 1 << 16))), (b"Name: ", b"Version: a\n", b"\n\n")
    ),
    "RECORD": Reader(
        lambda text: _all(recorded_paths(lines(_cut(text, 1 << 16)), b"usr/lib")),
        (b'"', b'""', b'",', b"../", b"a/./", b"a,sha256=,1\n", b"//", b"..\n"),
    ),
    "conda-meta": Reader(_conda, (*_JSON, b'{"files":[', b'"name":"a","version":"1","files":["')),
    "conda-meta, files": Reader(
        _wrapped(b'{"name":"a","version":"1","files":[', b"]}", _conda), (b'"a",', b'"\\ud800",', *_JSON)
    ),
    "history": Reader(_whole_base, _STEPS),
    "names of files": Reader(_names, _PATHS),
    "names of packages": Reader(_package_names, _PACKAGES),
    "names of targets": Reader(_targets, _TARGETS),
    "ids in bundles": Reader(_bundle_ids, _TARGETS),
    "references": Reader(
        lambda text: parse_reference(_string(text)), (b"a/", b"a.", b"a:", b"@sha256:", b"--", b"__")
    ),
    "GPU code: bundle": Reader(_code(b"__CLANG_OFFLOAD_BUNDLE__"), _MAGIC),
    "GPU code: compressed": Reader(_code(b"CCOB"), _MAGIC),
    "GPU code: CUDA": Reader(_code(b"\x50\xed\x55\xba"), _MAGIC),
    "GPU code: none": Reader(_code(b""), _MAGIC),
    "tar": Reader(
        _tar, (make.header(b"a"), make.header(b"a", 0, b"x"), make.header(b"a", 0, b"L"), bytes(512))
    ),
    "gzip and zstd": Reader(_packed),
    "quoting for a shell": Reader(lambda text: shell(_string(text)), (b"$(", b"'", b"\\'")),
    "quoting for bake": Reader(lambda text: bake_text(_string(text)), (b"${", b"%{", b'"')),
}
_MARKDOWN = (b"](", b"**", b"<a ", b"``", b"&#", b"http://a.", b"\\", b"__", b"||", b"# ", b"1. ", b"@a")
READERS |= {
    f"quoting: {quote.__name__}": Reader(lambda text, quote=quote: quote(_string(text)), words)
    for quotes, words in (
        ((terminal, html, xml, sarif, markdown_code, markdown_block), (b"``", b"&#", b"\\")),
        ((markdown, markdown_sentence), _MARKDOWN),
    )
    for quote in quotes
}


def screening(reader: Reader, n_bytes: int) -> Iterator[bytes]:
    """Every text for one reader."""
    return chain(runs(reader.words, n_bytes, SPOILERS), pairs(reader.words, n_bytes))
