"""Find and link the Data Docs of Great Expectations: their folder, their URLs, and the button on Airflow's task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink

from cairn_operators.airflow_versions import conf

URL_PREFIX = "/cairn/docs"
# Pages of Great Expectations load their styles and status icons from other hosts. In a browser that can't reach those
# hosts, the styles below make the pages readable. In other browsers the loaded styles override the styles below.
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
    """Return the folder of Data Docs (Great Expectations' HTML reports of validations) that Airflow's UI shows.

    Environment variables decide: the folder is `$CAIRN_DOCS`, else `$CAIRN_DATA/docs`, else `$AIRFLOW_HOME/data/docs`,
    else `data/docs` in the working directory.
    """
    from state_backend.values.environment import Variable

    data = Variable.DATA.given or str(Path(os.environ.get("AIRFLOW_HOME", Path.cwd())) / "data")
    return Path(Variable.DOCS.given or Path(data) / "docs")


def docs_url(page: str, root: Path, base_url: str) -> str:
    """Return the URL at which a browser opens `page`, a file of Data Docs (HTML validation reports) below `root`."""
    path = Path(page).resolve()
    try:
        inside = path.relative_to(root.resolve())
    except ValueError:
        return path.as_uri()
    return f"{urlsplit(base_url).path.rstrip('/')}{URL_PREFIX}/{quote(inside.as_posix())}"


def page_in(root: Path, path: str) -> Path | None:
    """Return the file for a request of `path` below `root`, with symbolic links resolved.

    A folder stands for its `index.html`. The result is None if the file does not exist or lies outside of `root`.
    """
    try:
        file = (root / path.lstrip("/")).resolve()
        if file.is_dir():
            file /= "index.html"
        inside = file.resolve().is_relative_to(root.resolve()) and file.is_file()
    except (OSError, ValueError):  # The name is too long, or contains a zero byte.
        return None
    return file if inside else None


def add_style(html: str) -> str:
    """Add styles to a page, so that it is readable in a browser that can't load styles from other hosts."""
    return html.replace("<head>", f"<head>{_STYLE}", 1)


class DataDocsLink(BaseOperatorLink):  # type: ignore[misc]  # Airflow is not type-checked here
    """The button on a task in Airflow's UI that opens the task's Data Docs, also if the task failed."""

    name = "Data Docs"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the URL of the Data Docs that the task wrote; an empty text if it wrote none.

        Airflow calls this in the task's process, after the operator has run.
        """
        page = getattr(operator, "docs_page", None)
        if not page:
            return ""
        return docs_url(page, docs_root(), conf.get("api", "base_url", fallback="") or "")
