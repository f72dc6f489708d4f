"""Cairn's own page of a validation: what it says, and that it needs no other file."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cairn.operations.validation.checks import Check, FailingRows
from cairn.operations.validation.checks_page import checks_page, page_path, relative_link, write_page

HOSTILE = '<script>alert("x")</script> & \'"'
PASSED = Check(table="", what="files", observed="12 files are intact", success=True)
FAILED = Check(
    table="total",
    what="expect_column_values_to_be_between",
    column="sum",
    expected="min_value=1",
    observed="22 of 80 rows fail",
    success=False,
    failing=FailingRows(number=22, keys=tuple(f'{{"key_user":"{n}"}}' for n in range(20)), url="file:///rows"),
)


def page(*checks: Check, **more: Any) -> str:
    told = {"pipeline": "rides", "what": "checkpoint 7", "interval": "[a, b)", "mode": "full", "links": {}} | more
    return checks_page(at=datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), checks=checks, **told)


def cells(html: str) -> list[list[str]]:
    """The text of each row's cells."""
    rows = re.findall(r"<tr[^>]*>(<td.*?)</tr>", html)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def test_each_check_is_a_row_and_failed_ones_come_first() -> None:
    html = page(PASSED, FAILED)
    keys = "".join(f"{{&quot;key_user&quot;:&quot;{n}&quot;}}" for n in range(20)) + "and 2 moreall rows: file:///rows"
    assert cells(html) == [
        ["✗ failed", FAILED.what, "total", "sum", "min_value=1", "22 of 80 rows fail", keys],
        ["✓ passed", "files", "", "", "", "12 files are intact", ""],
    ]
    assert "✗ 1 of 2 checks failed" in html and "Validated at 2024-01-02 03:04:05 UTC" in html
    assert "✓ 1 check passed" in page(PASSED) and "✗" not in page(PASSED)


def test_values_are_escaped() -> None:
    texts: dict[str, Any] = dict.fromkeys(("table", "what", "column", "expected", "observed"), HOSTILE)
    failing = FailingRows(number=1, keys=(HOSTILE,), not_stored=HOSTILE)
    hostile = Check(success=False, failing=failing, **texts)
    html = page(hostile, pipeline=HOSTILE, what=HOSTILE, interval=HOSTILE, mode=HOSTILE, links={HOSTILE: HOSTILE})
    assert "<script" not in html and HOSTILE not in html and "0 more" not in html
    assert html.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &#x27;&quot;") >= 12


def test_the_page_loads_nothing_and_links_great_expectations(tmp_path: Path) -> None:
    """Links are relative, so that they work on disk and in Airflow's UI."""
    folder, run = tmp_path / "rides", "checkpoint 7 a_b"
    theirs = folder / "validations/rides/total over time/checkpoint 7 a_b/1/h.html"
    link = relative_link(page_path(folder, run), str(theirs))
    assert link == "../validations/rides/total%20over%20time/checkpoint%207%20a_b/1/h.html"
    html = page(FAILED, links={"total": link})
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == [link, link]
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img", html)
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html
    assert write_page(folder, run, html) == page_path(folder, run)
    write_page(folder, run, "again")
    assert [path.name for path in (folder / "checks").iterdir()] == [f"{run}.html"]
    assert page_path(folder, run).read_text() == "again"


@pytest.mark.parametrize("what", ["files", "restored state"])
def test_a_check_of_the_whole_checkpoint_shows_its_finding(what: str) -> None:
    check = Check(table="", what=what, observed="shard 1: file x is missing", success=False)
    assert check.finding == "shard 1: file x is missing"
    assert cells(page(check)) == [["✗ failed", what, "", "", "", "shard 1: file x is missing", ""]]


@pytest.mark.browser
def test_the_page_fits_a_phone_and_follows_the_theme(tmp_path: Path) -> None:
    """At 390 px nothing is cut, each cell says its heading, and no text is smaller than 11 px. Text has a contrast of at least 4.5."""
    from tests.support.browser import browser

    long_names = Check(
        table="state_with_a_long_name over time",
        what="expect_column_pair_values_a_to_be_greater_than_b",
        column="before_a_long_column_name, now_a_long_column_name",
        observed="x" * 300,
        success=False,
        failing=FailingRows(number=1, keys=("k" * 301,), url="gs://bucket/" + "f" * 100),
    )
    file = tmp_path / "page.html"
    file.write_text(page(long_names, FAILED, PASSED, links={"total": "x.html"}))
    with browser(390, 900) as chrome:
        chrome.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        )
        for theme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": theme}]
            chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            chrome.get(file.as_uri())
            assert chrome.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
            assert chrome.execute_script("return performance.getEntriesByType('resource').length") == 0
            sizes, contrasts = chrome.execute_script(_MEASURE)
            assert min(sizes) >= 11 and min(contrasts) >= 4.5, (theme, min(sizes), min(contrasts))
            label = "return getComputedStyle(document.querySelector('td[data-label=State]'), '::before').content"
            assert chrome.execute_script(label) == '"State"'


_MEASURE = """
const parts = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
const back = element => {
  for (; element; element = element.parentElement) {
    const found = parts(getComputedStyle(element).backgroundColor);
    if (found.length === 3 || found[3] > 0) return light(found);
  }
};
const written = [...document.querySelectorAll("body *")].filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
const contrast = e => {
  const [low, high] = [light(parts(getComputedStyle(e).color)), back(e)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
return [written.map(e => parseFloat(getComputedStyle(e).fontSize)), written.map(contrast)];
"""
