"""Great Expectations' Data Docs, linked from the task that wrote them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink

URL_PREFIX = "/cairn/docs"
# Great Expectations takes its styles and the marks in its status column from other hosts. Where a browser does not get at those, a
# page looks like this; where it does, what it loads comes later and wins.
_STYLE = """<style>
body { font-family: system-ui, sans-serif; margin: 1.5rem; color: #222 }
td, th { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
table { border-collapse: collapse }
h4, h5, h6 { margin: 1rem 0 .4rem }
.ge-navigation-sidebar-container { background: #f6f6f6; padding: .5rem 1rem; max-width: 24rem }
.fas { font-style: normal; font-weight: bold }
.fa-check-circle::before { content: "\\2714" }
.fa-times::before { content: "\\2718" }
.fa-exclamation-triangle::before { content: "\\26A0" }
.text-success { color: #1a7f37 }
.text-danger { color: #cf222e }
.text-warning { color: #9a6700 }
footer { display: none }
</style>"""


def docs_root() -> Path:
    """The folder that Airflow's UI shows: ``CAIRN_DOCS``, else ``docs`` in ``CAIRN_DATA``, else ``data/docs`` in AIRFLOW_HOME."""
    data = os.environ.get("CAIRN_DATA") or str(Path(os.environ.get("AIRFLOW_HOME", Path.cwd())) / "data")
    return Path(os.environ.get("CAIRN_DOCS") or Path(data) / "docs")


def docs_url(page: str, root: Path, base_url: str) -> str:
    """Where a browser finds a page of Data Docs: by way of Airflow's UI at ``base_url`` if the page lies in the folder that it shows,
    else the file itself, which only a browser on that machine opens."""
    path = Path(page).resolve()
    try:
        inside = path.relative_to(root.resolve())
    except ValueError:
        return path.as_uri()
    return f"{urlsplit(base_url).path.rstrip('/')}{URL_PREFIX}/{quote(inside.as_posix())}"


def page_in(root: Path, path: str) -> Path | None:
    """The file that a request for ``path`` below the folder gets, links resolved; None if it is not there, or lies outside."""
    try:
        file = (root / path.lstrip("/")).resolve()
        if file.is_dir():
            file /= "index.html"
        inside = file.resolve().is_relative_to(root.resolve()) and file.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a zero byte
        return None
    return file if inside else None


def styled(html: str) -> str:
    """The page as a browser shows it without other hosts."""
    return html.replace("<head>", f"<head>{_STYLE}", 1)


class DataDocsLink(BaseOperatorLink):  # type: ignore[misc]  # Airflow is not type-checked here
    """The button on the task in Airflow's UI. Also of a failed task: that is when one wants to look."""

    name = "Data Docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Called where the task ran, with the operator that ran it; empty if no docs were written."""
        page = getattr(operator, "docs_page", None)
        if not page:
            return ""
        from airflow.sdk.configuration import conf

        return docs_url(page, docs_root(), conf.get("api", "base_url", fallback="") or "")
