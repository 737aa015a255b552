"""The audit's page as a browser shows it: map drawn and zoomed, files searched, nothing fetched."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from browser_pipe import Browser, Page

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"
sys.path += [str(UNIT), str(UNIT / "audit")]  # made reports, in one place

from report_maker import HOSTILE, a_finding, a_row, small_report  # noqa: E402

from buildtool.audit.packages import PackageRow  # noqa: E402
from buildtool.audit.report import AuditReport, to_json  # noqa: E402
from buildtool.audit.treemap import FileRow, Tree  # noqa: E402

GPU, LIB = "gpu code", "shared libraries"
GB = 10**9
N_FILES = 2000  # rows of the file list
DESK, PHONE = (1280, 900), (390, 844)


def rocm_like() -> AuditReport:
    """Shaped as a ROCm image is: GPU code in libraries and in files of its own, a folder deleted later."""
    lib = "usr/lib/x86_64-linux-gnu"
    targets = ("gfx803", "gfx906", "gfx90a", "gfx1030", "gfx1100")
    inside = [
        a_row(f"{lib}/librocsolver.so.0", GB // 5, is_file=True, kind=GPU, target=name, owner="librocsolver0")
        for name in targets
    ]
    files = [
        a_row(
            f"{lib}/rocblas/library/T_{name}.co",
            GB // 4,
            is_file=True,
            kind=GPU,
            target=name,
            owner="librocblas0",
        )
        for name in targets
    ]
    rest = (
        a_row(f"{lib}/librocsolver.so.0", GB // 50, is_file=True, kind=LIB, owner="librocsolver0"),
        a_row(lib, GB // 2, kind=LIB, owner="", n_files=300),
        a_row("app", GB // 20, layer=1, group="service", owner="service", kind="python source", n_files=40),
        a_row(
            "opt/old", GB // 10, layer=0, group="unowned", owner="unowned", kind="other data", visible_bytes=0
        ),
    )
    rows = (*inside, *files, *rest)
    total = sum(row.unpacked_bytes for row in rows)
    report = small_report()
    return replace(
        report,
        totals=replace(report.totals, unpacked_bytes=total, visible_bytes=total - GB // 10),
        tree=Tree(1_000_000, rows),
        top_files=tuple(
            FileRow(f"{lib}/file{n}.so", GB // (n + 1), 0, f"package{n % 7}") for n in range(N_FILES)
        ),
        packages=tuple(PackageRow("deb", f"package{n}", "1.0", "", n, n, 1) for n in range(300)),
        findings=(a_finding(), a_finding("foreign-gfx", title="files of GPU code for gfx803")),
    )


def hostile() -> AuditReport:
    names = [name for name in HOSTILE if "\udc80" not in name]
    report = rocm_like()
    return replace(
        report,
        image=replace(report.image, ref=names[0]),
        tree=Tree(
            1, tuple(a_row(f"{name}/{name}", 5, is_file=True, owner=name, group=name) for name in names)
        ),
        top_files=tuple(FileRow(name, 5, 0, name) for name in names),
        packages=tuple(PackageRow("deb", name, name, name, 5, 5, 1) for name in names),
        findings=tuple(a_finding(title=name, paths=(name,), remedy=name) for name in names),
        notes=tuple(names),
    )


REPORTS = {"rocm": rocm_like, "hostile": hostile}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each report's page, made by the command line as a user makes it."""
    place = tmp_path_factory.mktemp("pages")
    for name, make in REPORTS.items():
        source, page = place / f"{name}.json", place / f"{name}.html"
        source.write_text(to_json(make()))
        command = [sys.executable, "-m", "buildtool", "audit", str(source), "--html", str(page)]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return {name: (place / f"{name}.html").as_uri() for name in REPORTS}


@pytest.fixture
def page(browser: Browser, pages: dict[str, str]) -> Page:
    """The page of `rocm_like`, as on a desk."""
    return browser.open(pages["rocm"], width=DESK[0], height=DESK[1])


def frames(page: Page) -> None:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def quiet(page: Page) -> bool:
    return not page.requests() and not page.complaints()


def names(page: Page, selector: str) -> list[str]:
    found = page.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText.trim())")
    assert isinstance(found, list)
    return found


def box(name: str) -> str:
    return (
        f"[...document.querySelectorAll('.box')].find(e => e.querySelector('bdi')?.textContent === {name!r})"
    )


@pytest.mark.parametrize(("size", "dark"), [(DESK, False), (PHONE, False), (DESK, True)])
def test_the_map_is_drawn_and_fills_its_frame(
    browser: Browser, pages: dict[str, str], size: tuple[int, int], dark: bool
) -> None:
    page = browser.open(pages["rocm"], width=size[0], height=size[1], dark=dark)
    boxes = page.boxes(".box.leaf")
    assert len(boxes) >= 10
    assert all(width >= 2 and height >= 2 for width, height in boxes)
    (frame,) = page.boxes("#map")
    top = page.boxes(".box[data-level='1']")
    assert sum(width * height for width, height in top) > 0.97 * frame[0] * frame[1]
    assert frame[0] > 0.85 * size[0] - 60
    sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert sideways == 0, "the page scrolls sideways"
    assert quiet(page)


def test_areas_are_in_proportion_to_bytes(page: Page) -> None:
    sizes = {
        name: page.evaluate(f"(({box(name)}).offsetWidth + 1) * (({box(name)}).offsetHeight + 1)")
        for name in ("gfx803", "T_gfx803.co")
    }
    assert sizes["T_gfx803.co"] / sizes["gfx803"] == pytest.approx(250 / 200, rel=0.25)  # type: ignore[operator]


def test_every_way_to_group_draws_its_groups(page: Page) -> None:
    for view, wanted in {
        "layers": "layer 1",
        "owners": "librocblas0",
        "kinds": "gpu code",
        "folders": "usr/lib/x86_64-linux-gnu",
    }.items():
        page.evaluate(f"document.querySelector('input[value={view}]').click()")
        told = "[...document.querySelectorAll('.box[aria-label]')].map(e => e.getAttribute('aria-label'))"
        found = [*names(page, ".box > bdi"), *page.evaluate(told)]  # type: ignore[misc]
        assert any(wanted in name for name in found), (view, found)
    assert quiet(page)


def test_a_click_zooms_in_and_the_trail_leads_back(page: Page) -> None:
    assert names(page, "#crumbs li") == ["weir/tiny:1"]
    page.evaluate(f"({box('librocsolver.so.0')}).click()")
    assert names(page, "#crumbs li")[-1] == "librocsolver.so.0"
    assert sorted(names(page, ".box > bdi")) == sorted(
        ["gfx803", "gfx906", "gfx90a", "gfx1030", "gfx1100", LIB]
    )
    page.evaluate(f"({box('gfx906')}).click()")
    assert "200.00 MB" in page.text("#detail")
    assert "gpu code for gfx906" in page.text("#detail")
    page.evaluate("document.querySelector('#crumbs button').click()")
    assert names(page, "#crumbs li") == ["weir/tiny:1"]
    assert quiet(page)


def test_the_keyboard_moves_zooms_and_goes_back(page: Page) -> None:

    def press(key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            page.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
        frames(page)

    page.evaluate("document.querySelector('.box[tabindex=\"0\"]').focus()")
    first = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert str(first).startswith("usr/lib/x86_64-linux-gnu, 2.77 GB")
    press("ArrowRight", 39)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") != first
    press("ArrowLeft", 37)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == first
    page.evaluate("document.activeElement.click()")
    assert len(names(page, "#crumbs li")) == 2
    assert page.evaluate("document.activeElement.classList.contains('box')")
    press("Escape", 27)
    assert len(names(page, "#crumbs li")) == 1
    assert quiet(page)


def test_hidden_bytes_are_hatched_and_a_kind_can_be_picked_out(page: Page) -> None:
    assert len(page.boxes(".hidden-bytes")) == 1
    page.evaluate("document.querySelector('#legend .k-gpu').click()")
    lit = page.evaluate(
        "[...document.querySelectorAll('.box.leaf:not(.dim)')].every(e => e.matches('.k-gpu'))"
    )
    assert lit
    assert page.boxes(".box.dim")
    page.evaluate("document.querySelector('#legend .k-gpu').click()")
    assert not page.boxes(".box.dim")


def search(page: Page, name: str, words: str) -> None:
    page.evaluate(
        f"(input => {{ input.value = {words!r}; input.dispatchEvent(new Event('input')); }})"
        f"(document.querySelector('#{name} input'))"
    )


def test_files_are_searched_and_sorted_and_only_those_in_view_are_in_the_page(
    page: Page,
) -> None:
    assert page.text("#files output").startswith("2,000 of 2,000 rows")
    assert 5 < len(names(page, "#files tbody tr:not(.spacer)")) < 60
    search(page, "files", "FILE19 package5")
    found = names(page, "#files tbody td:first-child bdi")
    assert found
    assert all("file19" in name for name in found)
    assert set(names(page, "#files tbody td:nth-child(2) bdi")) == {"package5"}
    search(page, "files", "no such file")
    assert page.text("#files output") == "0 of 2,000 rows, 0 B"
    search(page, "files", "")
    assert names(page, "#files tbody td:first-child bdi")[0] == "file0.so"
    page.evaluate("document.querySelector('#files th:nth-child(3) button').click()")
    assert names(page, "#files tbody td:first-child bdi")[0] == "file1999.so"
    assert page.evaluate("document.querySelector('#files th:nth-child(3)').ariaSort") == "ascending"
    search(page, "packages", "package17")
    assert "11 of 300 rows" in page.text("#packages output")
    assert quiet(page)


def test_the_end_of_the_list_is_reached_by_scrolling(page: Page) -> None:
    page.evaluate("(e => { e.scrollTop = e.scrollHeight; })(document.querySelector('#files .scroller'))")
    frames(page)
    assert names(page, "#files tbody td:first-child bdi")[-1] == "file1999.so"


def test_remedies_can_be_copied(page: Page) -> None:
    told = page.evaluate(
        """new Promise(done => {
            const button = document.querySelector('button.copy');
            const seen = () => done(button.textContent);
            new MutationObserver(seen).observe(button, {childList: true, characterData: true, subtree: true});
            button.click();
            setTimeout(seen, 60000);
        })"""
    )
    assert told in ("Copied", "Selected: copy it")


def test_hostile_names_run_nothing(browser: Browser, pages: dict[str, str]) -> None:
    page = browser.open(pages["hostile"])
    for view in ("layers", "owners", "kinds", "folders"):
        page.evaluate(f"document.querySelector('input[value={view}]').click()")
    assert page.evaluate("document.querySelectorAll('img, [onerror], [onmouseover]').length") == 0
    assert page.evaluate("document.scripts.length") == 2
    assert "<script>alert(1)</script>" in page.text("h1")
    assert "שלום" in " ".join(names(page, "#files td bdi, #files td small"))
    assert len(page.boxes(".box.leaf")) >= 5
    assert quiet(page)


def test_what_is_worse_than_the_baseline_stands_above_the_map(browser: Browser, tmp_path: Path) -> None:
    for name, report in {"now": rocm_like(), "before": small_report()}.items():
        (tmp_path / f"{name}.json").write_text(to_json(report))
    command = [sys.executable, "-m", "buildtool", "audit", "now.json", "--baseline", "before.json"]
    done = subprocess.run(
        [*command, "--html", "page.html"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
    )
    assert done.returncode == 1
    page = browser.open((tmp_path / "page.html").as_uri())
    assert "Since the baseline before.json: 3 worse" in page.text("main")
    assert "+2.92 GB" in page.text(".finding.error .bytes")
    top = "document.querySelector({}).getBoundingClientRect().top"
    assert page.evaluate(f"{top.format(repr('.finding.error'))} < {top.format(repr('#map'))}")
    assert quiet(page)
