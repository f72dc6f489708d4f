"""`make docs` builds a site from the pages: strict, offline, with search and an API reference."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.layout import REPOSITORY

# The licence of an icon set and the maker of the site are links, not loads.
pytestmark = pytest.mark.long("five seconds: builds the site", runs_in="ci")
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}


class Loads(HTMLParser):
    """Collects the addresses that a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if (tag, name) in LOADED and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site of a copy of the repository."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "jobs", "plugins", "state_backend"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "zensical.toml", folder)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "No issues found" in done.stderr, done.stdout + done.stderr
    yield folder / "site"


def test_every_page_has_its_file_and_loads_nothing_from_another_host(site: Path) -> None:
    for page in (REPOSITORY / "docs").glob("*.md"):
        built = (site / f"{page.stem}.html").read_text()
        loads = Loads()
        loads.feed(built)
        foreign = [address for address in loads.found if re.match(r"(https?:)?//", address)]
        # Read on file:// only, by a browser that can't start a worker there.
        assert [address for address in foreign if "iframe-worker" not in address] == [], page.name


def test_the_menu_has_every_page() -> None:
    menu = (REPOSITORY / "zensical.toml").read_text()
    assert {page.name for page in (REPOSITORY / "docs").glob("*.md")} == set(re.findall(r'"([a-z0-9-]+\.md)"', menu))


def test_the_reference_shows_arguments_of_public_names(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", " ", (site / "api.html").read_text()))
    for word in ("max_parallelism", "watermark_delay", "stateful_pipeline", "run_intervals", "PipelineTester"):
        assert word in text
    # mkdocstrings has replaced its lines, which are in comments of `docs/api.md`.
    assert "Example" in text and ":::" not in text
