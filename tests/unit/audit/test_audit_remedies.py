"""What a finding offers to paste does what it says, whatever the image calls its files, labels and itself."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import image_maker as make
import jsonschema
import pytest
import strict_readers as read
from hostile_texts import CHOSEN, hostile_texts
from image_maker import file, tar
from report_maker import a_finding, small_report, with_findings
from test_audit_report import KERNELS, SCHEMA, audited, found, ids

from buildtool.audit.baseline import Comparison, Regression, Tolerance
from buildtool.audit.diff import diff, render_diff_markdown, render_diff_table
from buildtool.audit.html import render_html
from buildtool.audit.junit import render_junit
from buildtool.audit.kinds import PackageName, Pattern, command_naming
from buildtool.audit.options import RenderOptions
from buildtool.audit.report import AuditReport, DirectoryRow, GpuCode, to_json
from buildtool.audit.sarif import render_sarif
from buildtool.audit.text import render_markdown, render_table
from buildtool.cli.program import main
from probes.core.quoting import terminal

MB = 1_000_000
LARGE = bytes(2 * MB)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def commands(remedy: str) -> list[list[str]]:
    """The words of each command in a remedy; comments are not run."""
    lines = remedy.replace("\\\n", "").splitlines()
    return [
        read.shell_words(re.sub(r"   # .*", "", line.removeprefix("RUN ")).replace(" {} \\;", " X"))
        for line in lines
        if not line.startswith("#")
    ]


def test_a_command_in_a_path_is_not_run_by_the_remedy_against_it() -> None:
    """`opt/*.$(touch x)/tests` was split at `/*.`, and the rest stood unquoted in a RUN."""
    remedy = found(audited(tar(file("opt/*.$(touch x)/tests/big.py", LARGE))), "tests").remedy
    assert commands(remedy) == [["rm", "-rf", "/opt/*.$(touch x)/tests"]]


def test_a_command_in_a_label_is_not_run_by_the_remedy_against_it() -> None:
    labels = {"io.weir.variant": "rocm; touch x", "io.weir.torch.build": "cpu"}
    remedy = found(audited(tar(file("x", b"x")), labels=labels), "torch-without-gpu-kernels").remedy
    assert commands(remedy) == [["weir", "build", "--", "rocm; touch x"]]


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["gfx906;touch x", "gfx906 $(touch x)", "gfx906\n"])
def test_targets_named_by_a_label_are_targets_or_nothing(label: str) -> None:
    report = audited(KERNELS, labels={"io.weir.gpu-targets": label}, ref="$(touch x)")
    if "foreign-gfx" in ids(report):
        words = ["weir", "prune", "--targets", "gfx906", "--", "$(touch x)"]
        assert commands(found(report, "foreign-gfx").remedy) == [words]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [b"caf\xe9", b"a\x1b[201~", b"a\nRUN touch x", "\u202egpj".encode()])
def test_a_place_that_can_not_be_pasted_is_counted_instead(name: bytes) -> None:
    remedy = found(audited(tar(file(name + b"/tests/f", LARGE), file("q/tests/f", LARGE))), "tests").remedy
    assert commands(remedy) == [["rm", "-rf", "/q/tests"]]
    assert "# 1 place cannot be named here" in remedy
    alone = found(audited(tar(file(name + b"/tests/f", LARGE))), "tests").remedy
    assert commands(alone) == []


def test_remedies_name_exactly_what_hostile_images_call_their_places() -> None:
    named = 0
    for text in filter(None, hostile_texts(600)):
        place = text.encode("utf-8", "surrogatepass")
        path = command_naming([place], lambda words: f"rm {words}")
        pattern = command_naming([Pattern(place, b"so")], lambda words: f"rm {words}")
        assert path.startswith("#") == pattern.startswith("#")
        if not path.startswith("#"):
            named += 1
            assert read.shell_words(path) == ["rm", f"/{text}"]
            assert pattern.endswith("/*.so")  # its own star is the only sign that a shell reads
            assert read.shell_words(pattern.removesuffix("/*.so")) == ["rm", f"/{text}"]
    assert named > 100


def test_a_package_name_is_no_option_and_no_command() -> None:
    names = [PackageName(name) for name in ("gcc-12", "--allow-downgrades", "x-dev;touch x", "x\\x1b-dev")]
    remedy = command_naming(names, lambda words: f"apt-get purge -- {words}")
    assert commands(remedy) == [["apt-get", "purge", "--", "gcc-12"]]
    assert "# 3 places" in remedy


def hostile_report(text: str) -> AuditReport:
    """A report that says a text wherever a report says anything."""
    small = small_report()
    first = small.packages[0]
    return replace(
        with_findings(a_finding(title=text, paths=(text, text), remedy=text)),
        image=replace(small.image, ref=text, base_name=text, base_layers=1, labels={text: text}),
        layers=tuple(replace(row, command=text) for row in small.layers),
        packages=(replace(first, name=text, version=text, place=text),),
        owners={text: 5},
        kinds={text: 5},
        gpu_code=GpuCode({text: 5}, {}),
        top_files=tuple(replace(row, path=text, owner=text) for row in small.top_files),
        top_directories=(DirectoryRow(text, 5),),
        notes=(text,),
    )


def compared(text: str) -> Comparison:
    return Comparison(text, Tolerance(), (Regression(text, 1, 2, text, (text,)),), (text,))


@pytest.mark.thorough
def test_no_output_format_fails_on_or_interprets_a_hostile_name() -> None:
    plain_tags = [tags for _, tags, _ in read.markdown_renderings(_markdown("plain"))]
    for text in CHOSEN[::8]:
        report = hostile_report(text)
        table = render_table(report, RenderOptions(10, compared(text))) + render_diff_table(
            diff(report, small_report())
        )
        assert all(char.isprintable() or char == "\n" for char in table)
        if text.strip():
            rendered = read.markdown_renderings(_markdown(text))
            assert [[tag for tag in tags if tag != "code"] for _, tags, _ in rendered] == [
                [tag for tag in tags if tag != "code"] for tags in plain_tags
            ], text
        if text:
            VALIDATOR.validate(json.loads(to_json(report)))
        ElementTree.fromstring(render_junit(report, RenderOptions(comparison=compared(text))))
        sarif = json.loads(render_sarif(report, RenderOptions(comparison=compared(text))))
        assert "](" not in sarif["runs"][0]["results"][0]["message"]["text"]


def test_no_hostile_name_adds_an_element_to_the_page() -> None:
    tags = read.html_of(render_html(hostile_report("plain"), RenderOptions(comparison=compared("plain"))))[1]
    for text in CHOSEN[::12]:
        assert (
            read.html_of(render_html(hostile_report(text), RenderOptions(comparison=compared(text))))[1]
            == tags
        ), text


def _markdown(text: str) -> str:
    report = hostile_report(text)
    return render_markdown(report, RenderOptions(10, compared(text))) + render_diff_markdown(
        diff(report, small_report())
    )


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["table", "json", "markdown", "sarif", "junit"])
def test_an_archive_whose_own_name_is_not_utf_8_is_reported_in_every_format(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / os.fsdecode(b"caf\xe9\x1b[2J.tar")
    archive.write_bytes(make.archive(make.docker_25(make.Image([tar(file(b"caf\xe9/tests/f", LARGE))]))))
    saved = tmp_path / os.fsdecode(b"\xff.json")
    platform = ["--platform", "linux/amd64"]
    assert main(["audit", str(archive), "--format", form, "--json", str(saved), *platform]) == 0
    assert main(["audit", str(archive), "--format", form, "--baseline", str(saved), *platform]) == 0
    assert main(["diff", str(saved), str(archive)]) == 0
    told = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in told.out + told.err)


def test_bytes_that_are_not_utf_8_are_shown_in_every_format() -> None:
    report = audited(
        tar(file(b"caf\xe9/tests/f", LARGE), file(b"caf\xe9/d/x.so", LARGE)),
        tar(make.file(b"caf\xe9/tests/f", LARGE)),
    )
    for render in (render_table, render_markdown, render_html, to_json, render_junit, render_sarif):
        text = render(report)
        text.encode()
        assert "caf" in text
    assert terminal(b"caf\xe9") == "caf\\xe9"
