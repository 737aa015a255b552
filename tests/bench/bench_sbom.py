"""Bills of materials and signatures of the `cpu` image: valid, complete, the same twice, read by others.

Run by `make bench-sbom` after `make images`; needs no engine. Wheels are fetched with pip (0.6 GB) unless
they lie in --wheels. What a bar needs and isn't here is waived with the reason: apt-get install
docker-registry skopeo. Which libraries are looked for, and by which rule, is in sbom_truth.toml.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import posixpath
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/docker"), str(ROOT / "tests/bench")]
sys.path += [str(ROOT / "tests/unit"), str(ROOT / "tests/unit/sbom")]

import jsonschema  # noqa: E402
from bench_layout import cpu_plan, usual  # noqa: E402
from board import Board, tell  # noqa: E402
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: E402
from referencing import Registry, Resource  # noqa: E402
from standins import registry  # noqa: E402

from buildtool.audit.audit import read_engine  # noqa: E402
from buildtool.build import pipeline, publish  # noqa: E402
from buildtool.build.attestations import attestations  # noqa: E402
from buildtool.build.layer_store import LayerStore  # noqa: E402
from buildtool.build.wheel_layer import install_wheels  # noqa: E402
from buildtool.cli import main as weir  # noqa: E402
from buildtool.core.errors import ToolError  # noqa: E402
from buildtool.engine.reference import parse_new_name  # noqa: E402
from buildtool.image.flatten import flattened  # noqa: E402
from buildtool.image.layer_writer import LayerWriter, TarMembers  # noqa: E402
from buildtool.image.written import LayerFile, Referrer, WrittenImage, written_image  # noqa: E402
from buildtool.sbom import binaries  # noqa: E402
from buildtool.sbom.inventory import Component, Inventory, take_inventory  # noqa: E402
from buildtool.sbom.keys import PrivateKey, PublicKey  # noqa: E402
from buildtool.sbom.verify import verify_registry  # noqa: E402

TRUTH = tomllib.loads((ROOT / "tests/bench/sbom_truth.toml").read_text("utf-8"))
PLACES = ({"LC_ALL": "C", "TZ": "UTC"}, {"LC_ALL": "de_DE.ISO-8859-1", "TZ": "Pacific/Kiritimati"})
JUDGES = ("spdx-tools==0.8.*", "cyclonedx-python-lib[json-validation]==11.*", "oras==0.2.*")


def cpu(board: Board, work: Path) -> None:
    """The real image: written to a layout with what is said of it, and judged."""
    workplace = usual()
    plan = cpu_plan(workplace)
    with workplace.alone():
        made = pipeline.write(workplace, plan)["cpu"]
    key = key_files(work)
    said = attestations(workplace, plan.images[0], made, epoch=plan.epoch, key=key)
    layout = work / "layout"
    workplace.layers.copy(made, "cpu", layout, said)
    schemas(board, layout, work)
    every_file(board, made, workplace.layers, layout, work)
    twice(board, layout, work)
    signature(board, layout, work)
    read_back(board, made, said, workplace.layers, work)


def key_files(work: Path) -> PrivateKey:
    secret = ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
    pem = serialization.Encoding.PEM
    formats = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (work / "key.pem").write_bytes(secret.private_bytes(pem, *formats))
    public = secret.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (work / "key.pub").write_bytes(public)
    return PrivateKey.read(work / "key.pem")


def document(layout: Path, kind: str, target: Path, **taste: str) -> bytes:
    """`weir sbom`, in a process of its own."""
    words = [
        sys.executable,
        "-m",
        "buildtool",
        "sbom",
        str(layout),
        "--format",
        kind,
        "--output",
        str(target),
    ]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **taste}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return target.read_bytes()


# ---- valid by the schemas


def schemas(board: Board, layout: Path, work: Path) -> None:
    place = files("lib4sbom") / "schemas"
    known: Registry[Any] = Registry()
    for name in ("spdx.schema.json", "jsf-0.82.schema.json"):
        schema = json.loads((place / "cyclonedx" / name).read_text())
        known = known.with_resource(schema["$id"], Resource.from_contents(schema))
    for kind, name, ending in (
        ("cyclonedx", "cyclonedx/bom-1.6.schema.json", ".cdx.json"),
        ("spdx", "spdx/2.3-schema.json", ".spdx.json"),
    ):
        text = document(layout, kind, work / f"cpu{ending}")
        schema = json.loads((place / name).read_text())
        errors = [
            error.message
            for error in jsonschema.Draft7Validator(schema, registry=known).iter_errors(json.loads(text))
        ]
        board.bar(
            f"{kind}: errors by the official schema",
            len(errors),
            0,
            "errors",
            which=errors[:3],
            n_bytes=len(text),
        )
    judges = work / "judges"
    words = [sys.executable, "-m", "pip", "install", "-q", "--target", str(judges), *JUDGES]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        board.waive("read by spdx-tools and cyclonedx-python-lib", "pip can't bring them")
        return
    program = (
        "import sys\n"
        "from spdx_tools.spdx.parser.parse_anything import parse_file\n"
        "from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document\n"
        "from cyclonedx.validation.json import JsonStrictValidator\n"
        "from cyclonedx.schema import SchemaVersion\n"
        "faults = validate_full_spdx_document(parse_file(sys.argv[1]))\n"
        "other = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[2]).read())\n"
        "print(len(faults) + (other is not None))\n"
    )
    files_read = [str(work / "cpu.spdx.json"), str(work / "cpu.cdx.json")]
    done = subprocess.run(
        [sys.executable, "-c", program, *files_read],
        env={**os.environ, "PYTHONPATH": str(judges)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    faults = int(done.stdout) if done.returncode == 0 else -1
    board.bar(
        "faults that spdx-tools and cyclonedx-python-lib (strict) see", abs(faults), 0, "faults",
        why=done.stderr[-300:],
    )  # fmt: skip


# ---- every file owned or listed, judged by another reader of layers and other readers of the databases


def every_file(board: Board, made: WrittenImage, store: LayerStore, layout: Path, work: Path) -> None:
    tree: dict[str, bytes | None] = {}
    links: dict[str, str] = {}
    for entry in flattened([partial(store.content, layer) for layer in made.layers]):
        if entry.info.issym():
            links[entry.info.name] = entry.info.linkname
        elif entry.info.isreg() or entry.info.islnk():
            keep = entry.info.name.endswith((".list", "/RECORD"))
            tree[entry.info.name] = b"".join(entry.content) if keep else None
    named = {place(path, links) for path in listed(tree)}  # links and directories, too
    owned = named & {*tree}
    compiled = {path for path in tree if source_of(path) in named}
    board.figure("bytecode that no list names, of sources that one does", len(compiled - owned), "files")
    owned |= compiled
    said = json.loads((work / "cpu.cdx.json").read_bytes())
    unowned = {
        row["evidence"]["occurrences"][0]["location"][1:]
        for row in said["components"]
        if row["type"] == "file"
    }
    counted = sum(
        int(prop["value"])
        for row in said["components"]
        for prop in row.get("properties", ())
        if prop["name"] == "weir:files"
    )
    board.bar(
        "files neither owned nor listed as unowned",
        len({*tree} - owned - unowned),
        0,
        "files",
        files=len(tree),
        unowned=len(unowned),
    )
    board.bar("files listed as unowned that aren't in the image", len(unowned - {*tree}), 0, "files")
    board.bar(
        "files of packages and unowned ones, less all files",
        abs(counted + len(unowned) - len(tree)),
        0,
        "files",
    )
    both = unowned & owned
    board.figure(
        "files that a list names and the inventory calls unowned", len(both), "files", which=sorted(both)[:5]
    )


def listed(tree: dict[str, bytes | None]) -> Iterator[str]:
    """Paths that dpkg's lists, its own files about packages and wheels' RECORDs name."""
    for path, content in tree.items():
        if path.startswith("var/lib/dpkg/info/"):
            yield path
        if path in ("var/lib/dpkg/status", "var/lib/dpkg/status-old", "var/lib/dpkg/available"):
            yield path
        if content and path.endswith(".list"):
            yield from (line.strip("/") for line in content.decode().splitlines())
        if content and path.endswith(".dist-info/RECORD"):
            site = posixpath.dirname(posixpath.dirname(path))
            yield path
            for row in csv.reader(io.StringIO(content.decode())):
                yield posixpath.normpath(posixpath.join(site, row[0]))
            for name in ("INSTALLER", "REQUESTED", "direct_url.json"):
                yield posixpath.join(posixpath.dirname(path), name)


def source_of(path: str) -> str:
    """The source that a file of bytecode is compiled from; empty for other files."""
    folder, name = posixpath.split(path)
    above, last = posixpath.split(folder)
    return posixpath.join(above, name.partition(".")[0] + ".py") if last == "__pycache__" else ""


def place(path: str, links: dict[str, str]) -> str:
    """A path with links on the way followed."""
    done = ""
    for part in path.split("/"):
        done = posixpath.join(done, part)
        if done in links and done != path:
            done = posixpath.normpath(posixpath.join("/", posixpath.dirname(done), links[done])).lstrip("/")
    return done


# ---- the same bytes twice


def twice(board: Board, layout: Path, work: Path) -> None:
    archive = work / "layout.tar"
    subprocess.run(["tar", "-C", str(layout), "-cf", str(archive), "."], check=True)
    for kind in ("cyclonedx", "spdx"):
        texts = {
            document(source, kind, work / "again.json", PYTHONHASHSEED=str(n), **PLACES[n])
            for n, source in enumerate((layout, archive))
        }
        texts.add((work / f"cpu{'.cdx.json' if kind == 'cyclonedx' else '.spdx.json'}").read_bytes())
        board.bar(
            f"{kind}: texts in three runs (layout, archive; locales, zones, hash seeds)",
            len(texts),
            1,
            "texts",
        )
    archive.unlink()
    workplace = usual()
    plan = cpu_plan(workplace)
    made = pipeline.write(workplace, plan)["cpu"]
    again = attestations(
        workplace, plan.images[0], made, epoch=plan.epoch, key=PrivateKey.read(work / "key.pem")
    )
    other = work / "other"
    workplace.layers.copy(made, "cpu", other, again)
    differing = subprocess.run(
        ["diff", "-rq", str(layout), str(other)], capture_output=True, text=True, check=False
    )
    board.bar("files that differ in two signed layouts", len(differing.stdout.splitlines()), 0, "files")
    shutil.rmtree(other)


# ---- signatures


def signature(board: Board, layout: Path, work: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = weir(["verify", str(layout), "--key", str(work / "key.pub")])
    board.bar("weir verify of the signed cpu layout: exit code", code, 0, "")
    from test_verify import TAMPERINGS, fresh, public_pem, written

    (work / "ours.pub").write_bytes(public_pem(1))
    passed = []
    for name, change in TAMPERINGS.items():
        tampered = fresh()
        change(tampered)
        where = written(tampered, work / "tampered" / name)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = weir(["verify", str(where), "--key", str(work / "ours.pub"), "--platform", "linux/amd64"])
        if code == 0:
            passed.append(name)
    board.bar(
        f"verified after one of {len(TAMPERINGS)} tamperings", len(passed), 0, "tamperings", which=passed
    )
    board.bar("tamperings", len(TAMPERINGS), 30, "tamperings", at_least=True)


def read_back(
    board: Board, made: WrittenImage, said: Sequence[Referrer], store: LayerStore, work: Path
) -> None:
    """Pushed to Debian's registry, and read by others."""
    if not shutil.which("docker-registry"):
        board.waive("pushed, and read back by skopeo and oras", "apt-get install docker-registry")
        return
    (work / "registry").mkdir()
    with registry(work / "registry") as host:
        name = parse_new_name(f"{host}/bench/cpu:1")
        publish.push(
            made, name, store=store, pushed=publish.Pushed(work / "pushed"), progress=tell, referrers=said
        )
        verified = verify_registry(name, PublicKey.read(work / "key.pub"))
        board.bar(
            "weir verify by name in a registry: statements", len(verified.statements), 3, "", at_least=True
        )
        tag = made.digest.replace(":", "-")
        if shutil.which("skopeo"):
            raw = ["skopeo", "inspect", "--raw", "--tls-verify=false"]
            index = json.loads(
                subprocess.run(
                    [*raw, f"docker://{host}/bench/cpu:{tag}"], capture_output=True, check=True
                ).stdout
            )
            rows = [row["digest"] for row in index["manifests"]]
            texts = [
                subprocess.run(
                    [*raw, f"docker://{host}/bench/cpu@{row}"], capture_output=True, check=True
                ).stdout
                for row in rows
            ]
            same = sum(text == each.manifest for text, each in zip(texts, said, strict=True))
            board.bar(
                "attached manifests that skopeo reads back unchanged",
                same,
                len(said),
                "manifests",
                at_least=True,
            )
            copied = ["skopeo", "copy", "-q", f"oci:{work / 'layout'}:cpu", f"dir:{work / 'copied'}"]
            board.bar(
                "skopeo copy of the image out of the layout: exit code",
                subprocess.run(copied, check=False).returncode,
                0,
                "",
            )
        else:
            board.waive("attached manifests that skopeo reads back unchanged", "apt-get install skopeo")
        program = (
            "import sys, json, oras.client, hashlib\n"
            "host, *digests = sys.argv[1:]\n"
            "client, good = oras.client.OrasClient(insecure=True, tls_verify=False), 0\n"
            "for digest in digests:\n"
            "    manifest = client.get_manifest(f'{host}/bench/cpu@{digest}')\n"
            "    for row in manifest['layers']:\n"
            "        content = client.get_blob(f'{host}/bench/cpu@{digest}', row['digest']).content\n"
            "        assert row['digest'] == 'sha256:' + hashlib.sha256(content).hexdigest()\n"
            "    good += 1\n"
            "print(good)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, host, *(each.digest for each in said)],
            env={**os.environ, "PYTHONPATH": str(work / "judges")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if "No module named" in done.stderr:
            board.waive("attached manifests that oras reads with their blobs", "pip can't bring oras")
        else:
            good = int(done.stdout) if done.returncode == 0 else 0
            board.bar(
                "attached manifests that oras reads with their blobs",
                good,
                len(said),
                "manifests",
                at_least=True,
                why=done.stderr[-300:],
            )


# ---- libraries inside wheels


def libraries(board: Board, wheels: Path, work: Path) -> None:
    for title, row in TRUTH.items():
        path = fetched(row["wheel"], wheels, work)
        if path is None:
            board.waive(f"{title}: libraries named", f"pip can't bring {row['wheel']}")
            continue
        inventory = inventory_of_wheel(path, work)
        found = {
            each.path.partition(row["place"])[2]: each
            for component in inventory.components
            for each in component.parts
            if row["place"] in each.path
        }
        wrong = [
            [file, name, version, found[file].purl if file in found else None]
            for file, name, version in row["libraries"]
            if not is_named(found.get(file), name, version)
        ]
        wrong += [[file, "", "", found[file].purl] for file in row.get("not_installed", ()) if file in found]
        known = {file for file, _, _ in row["libraries"]}
        n_named = len(row["libraries"]) - len(wrong)
        at_least = 95.0 if title.startswith("torch") else 0.0
        board.bar(
            f"{title}: share of its libraries named", 100 * n_named / len(known), at_least, "%",
            at_least=True,
            named=n_named, of=len(known), wrong=wrong,
            with_version=sum(bool(each.version) for each in found.values()),
            beyond_the_list=sorted({*found} - known),
        )  # fmt: skip
        inside = {part.name: part.version for each in found.values() for part in each.parts}
        if inside:
            board.figure(f"{title}: libraries linked into its own", len(inside), "libraries", which=inside)


def is_named(component: Component | None, name: str, version: str) -> bool:
    """Whether a component has this name in its package URL, and this version or a reason for none."""
    if component is None or not component.purl.startswith("pkg:"):
        return False
    own = component.purl.partition("#")[0].partition("@")[0].rpartition("/")[2].lower()
    return own == name.lower() and component.version == version and bool(version or component.why_unknown)


def fetched(wheel: str, wheels: Path, work: Path) -> Path | None:
    """A wheel: from a folder, what builds have, or a package index."""
    name, version = wheel.split("-")[:2]
    for folder in (wheels, *(ROOT / ".weir/wheels").glob("*")):
        if (folder / wheel).is_file():
            return folder / wheel
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version=3.11", "--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_27_x86_64"]
    words += ["-d", str(work), f"{name}=={version}"]
    tell(f"fetching {wheel}")
    plain = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
    subprocess.run(words, env={**plain, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, check=False)
    return work / wheel if (work / wheel).is_file() else None


def inventory_of_wheel(path: Path, work: Path) -> Inventory:
    """Of an image with this wheel alone, written as builds write one."""
    store = LayerStore(work / "state")

    def make(writer: LayerWriter) -> LayerFile:
        members = TarMembers(writer, 1)
        install_wheels({path.name: path}, members)
        return members.end()

    made = written_image(
        {"architecture": "amd64", "os": "linux"}, [store.bring(store.key(path.name), make)[0]], []
    )
    store.put(made)
    contents = read_engine(path.name, pipeline.Written(made, store), inspect=binaries.inspect)
    shutil.rmtree(store.layout)
    return take_inventory(contents, name="wheel")


PARTS = ("cpu", "libraries")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".weir/bench-wheels")
    args = parser.parse_args()
    board = Board(whole=args.only is None)
    try:
        with tempfile.TemporaryDirectory(prefix="weir-sbom-", dir="/var/tmp") as work:
            if args.only in (None, "cpu"):
                cpu(board, Path(work))
            if args.only in (None, "libraries"):
                libraries(board, args.wheels, Path(work))
    except ToolError as error:
        tell(f"{error.message}\n  {error.hint}")
        return 1
    return board.finish()


if __name__ == "__main__":
    raise SystemExit(main())
