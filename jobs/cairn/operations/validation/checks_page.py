"""Make the Data Docs page of a validation: one HTML file with a row for each check.

The page loads nothing from other files or hosts. It follows the browser's light or dark theme. On a narrow screen each
row becomes a block of lines. The page lies at `<pipeline>/checks/<run name>.html` in the folder of the Data Docs; a
later validation of the same checkpoint replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

from cairn.operations.validation.checks import Check, FailingRows

FOLDER = "checks"
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --quiet: #5b6470; --line: #d9dde3; --link: #0b5cad; --good: #12703a; --bad: #a3161c; --bad-back: #fde7e7 }
@media (prefers-color-scheme: dark) {
  :root { --back: #161d2d; --text: #f8fafc; --quiet: #a3afbe; --line: #2b3e55; --link: #7ab8ff; --good: #7fdba0; --bad: #ffa8aa; --bad-back: #4b1b29 }
}
* { box-sizing: border-box }
body { margin: 0; padding: 1rem; background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.3rem; margin: 0 }
p { margin: .3rem 0 }
a { color: var(--link) }
.quiet { color: var(--quiet) }
.good { color: var(--good); font-weight: 600 }
.bad { color: var(--bad); font-weight: 600 }
table { border-collapse: collapse; width: 100%; margin-top: 1rem }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid var(--line) }
th { color: var(--quiet); font-weight: 600 }
tr.failed { background: var(--bad-back) }
code { font: 12px/1.5 ui-monospace, monospace }
ul { margin: .2rem 0; padding-left: 1.1rem }
@media (max-width: 700px) {
  thead { position: absolute; left: -10000px }
  table, tbody, tr, td { display: block }
  tr { border-bottom: 1px solid var(--line); padding: .5rem 0 }
  td { border: 0; padding: .1rem .5rem }
  td:empty { display: none }
  td::before { content: attr(data-label); display: block; color: var(--quiet); font-size: 12px }
}
"""
_HEADINGS = ("Result", "Check", "State", "Column", "Expected", "Observed", "Keys of failing rows")


def checks_page(
    *,
    pipeline: str,
    what: str,
    interval: str,
    mode: str,
    at: datetime,
    checks: Sequence[Check],
    links: Mapping[str, str],
) -> str:
    """Return the page as HTML, with all values escaped.

    `what`: Name of the validated checkpoint, attempt or savepoint. `at`: Time of the validation. `links`: By table, the
    URL of its Great Expectations page.
    """
    failed = sum(not check.success for check in checks)
    passed = "1 check" if len(checks) == 1 else f"{len(checks):,} checks"
    verdict = f'<span class="good">✓ {passed} passed</span>'
    if failed:
        verdict = f'<span class="bad">✗ {failed:,} of {len(checks):,} checks failed</span>'
    title = f"{what} of {pipeline}"
    rows = "\n".join(_row(check, links.get(check.table)) for check in sorted(checks, key=lambda check: check.success))
    headings = "".join(f'<th scope="col">{heading}</th>' for heading in _HEADINGS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{"✗" if failed else "✓"} {escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Validation of {escape(title)}</h1>
<p>{verdict}</p>
<p class="quiet">Interval {escape(interval)}. Mode {escape(mode)}. Validated at {at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC.</p>
<table>
<thead><tr>{headings}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
{_links(links)}
</body>
</html>
"""


def _row(check: Check, link: str | None) -> str:
    state = escape(check.table)
    if link is not None:
        state = f'<a href="{escape(link)}">{state}</a>'
    result = '<span class="good">✓</span> passed' if check.success else '<span class="bad">✗</span> failed'
    what, column, expected, observed = map(escape, (check.what, check.column, check.expected, check.observed))
    cells = (result, f"<code>{what}</code>", state, column, expected, observed, _keys(check.failing))
    written = "".join(
        f'<td data-label="{label}">{cell}</td>' if cell else "<td></td>"
        for label, cell in zip(_HEADINGS, cells, strict=True)
    )
    return f"<tr>{written}</tr>" if check.success else f'<tr class="failed">{written}</tr>'


def _keys(failing: FailingRows | None) -> str:
    if failing is None:
        return ""
    keys = "".join(f"<li><code>{escape(key)}</code></li>" for key in failing.keys)
    more = failing.number - len(failing.keys)
    told = [f"and {more:,} more"] if more > 0 else []
    told += [f"all rows: {failing.url}"] if failing.url else [failing.not_stored] if failing.not_stored else []
    return f"<ul>{keys}</ul>{''.join(f'<p>{escape(text)}</p>' for text in told)}"


def _links(links: Mapping[str, str]) -> str:
    if not links:
        return ""
    listed = "".join(f'<li><a href="{escape(url)}">{escape(table)}</a></li>' for table, url in links.items())
    return f"<p>Pages of Great Expectations:</p>\n<ul>{listed}</ul>"


def write_page(folder: Path, run_name: str, html: str) -> Path:
    """Write a page, and return its path. The file appears whole, so another process never reads half a page."""
    path = page_path(folder, run_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(html, encoding="utf-8")
    part.replace(path)
    return path


def page_path(folder: Path, run_name: str) -> Path:
    return folder / FOLDER / f"{run_name}.html"


def relative_link(page: Path, target: str) -> str:
    """Return the URL of a file relative to a page, so that the link works both on disk and in Airflow's UI."""
    return quote(Path(os.path.relpath(target, page.parent)).as_posix())
