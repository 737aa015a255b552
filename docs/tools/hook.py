"""mkdocs hook: adds the generated pages, makes README the first page, refuses what loads from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path

import diagram
import pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pymdownx.superfences import SuperFencesException

ROOT = Path(__file__).parents[2]
# pages of the site that are kept where a visitor of the repository looks for them
ROOT_PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "howto/contribute.md": "CONTRIBUTING.md",
}
LINK = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FIGURE_MARK = re.compile(r"<!--/?f[^>]*-->\n?")
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of modules and decisions in the navigation, and have diagrams drawn."""
    drawn = {"name": "mermaid", "class": "diagram", "format": drawing}
    config["mdx_configs"]["pymdownx.superfences"] = {"custom_fences": [drawn]}
    modules = sorted(pages.module_pages())
    decisions = ["decisions/index.md", *(f"decisions/{path.name}" for path in decision_files())]
    config["nav"] = filled(config.nav, {"reference/modules": modules, "decisions": decisions})
    return config


def drawing(source: str, *_: object, **__: object) -> str:
    """A diagram's block as SVG; what can't be drawn fails the build, which passes over other exceptions."""
    try:
        return diagram.svg(source)
    except diagram.NotDrawn as error:
        raise SuperFencesException(str(error)) from error


def filled(nav: object, folders: dict[str, list[str]]) -> object:
    """The navigation with each folder's name replaced by its pages."""
    if isinstance(nav, list):
        return [filled(item, folders) for item in nav]
    if isinstance(nav, dict):
        return {title: filled(item, folders) for title, item in nav.items()}
    return folders.get(str(nav), nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that aren't files in docs/."""
    made = pages.reference() | pages.module_pages() | {"decisions/index.md": decisions_page()}
    made |= {path: from_root(path, ROOT / source) for path, source in ROOT_PAGES.items()}
    made["index.md"] = f"---\nhide: [toc]\n---\n{made['index.md']}"  # its examples are wide
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def from_root(page: str, source: Path) -> str:
    """A Markdown file of the repository's root as a page: its links start where the page is."""
    up = "../" * page.count("/")
    places = {source: page for page, source in ROOT_PAGES.items()}

    def relink(link: re.Match[str]) -> str:
        path = places.get(link["path"], link["path"].removeprefix("docs/"))
        return f"]({up}{path}{'index.md' if path.endswith('/') else ''}{link['anchor'] or ''})"

    return LINK.sub(relink, source.read_text(encoding="utf-8"))


def decision_files() -> list[Path]:
    """The decisions, oldest first."""
    return sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def decisions_page() -> str:
    """A list of all decisions."""
    lines = ["# Decisions", "", "Choices that others might have made differently, with their reasons.", ""]
    for path in decision_files():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Take the marks of figures away: Markdown would take what follows one for HTML."""
    return FIGURE_MARK.sub(lambda mark: "\n" if mark[0].endswith("\n") else "", markdown)


class Loaded(HTMLParser):
    """Collects what a page loads from another host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one element."""
        address = dict(attrs).get(LOADING.get(tag, "")) or ""
        if re.match(r"(\w+:)?//", address):
            self.found.append(f"<{tag}> {address}")


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if any page loads something from another host."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        page = Loaded()
        page.feed(path.read_text(encoding="utf-8"))
        if page.found:
            raise PluginError(f"{path.name} loads from another host: {', '.join(page.found)}")
