"""Data Docs in Airflow's UI: where links lead, and that nothing but the docs is served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn_operators import ValidateStateOperator
from cairn_operators.data_docs_link import DataDocsLink, docs_root, docs_url, page_in


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    (root / "a b").mkdir(parents=True)
    for name in ("index.html", "a b/index.html", "a b/page#1.html"):
        (root / name).write_text(name)
    (tmp_path / "secret.html").write_text("secret")
    (tmp_path / "docs-of-others").mkdir()
    (tmp_path / "docs-of-others" / "index.html").write_text("secret")
    return root


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("index.html", "index.html"),
        ("", "index.html"),
        ("/", "index.html"),
        ("a b", "a b/index.html"),
        ("a b/../index.html", "index.html"),
        ("a b/page#1.html", "a b/page#1.html"),
        ("none.html", None),
        ("../secret.html", None),
        ("a b/../../secret.html", None),
        ("../docs-of-others/index.html", None),
        ("//etc/passwd", None),
        ("/etc/passwd", None),
        ("link.html", None),
        ("folder/index.html", None),
        ("folder", None),
        ("a\x00b", None),
        ("x" * 5000, None),
    ],
)
def test_only_pages_inside_are_served(docs: Path, path: str, found: str | None) -> None:
    (docs / "link.html").symlink_to(docs.parent / "secret.html")
    (docs / "folder").symlink_to(docs.parent / "docs-of-others")
    page = page_in(docs, path)
    assert (page.read_text() if page else None) == found


def test_links_lead_through_the_ui_where_it_shows_the_page(docs: Path) -> None:
    page = str(docs / "a b" / "page#1.html")
    assert docs_url(page, docs, "http://127.0.0.1:8080") == "/cairn/docs/a%20b/page%231.html"
    assert docs_url(page, docs, "https://host/airflow/") == "/airflow/cairn/docs/a%20b/page%231.html"
    assert docs_url(page, docs / "other", "") == f"file://{docs}/a%20b/page%231.html"


def test_the_docs_folder_comes_from_cairn_docs_cairn_data_or_airflow_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CAIRN_DOCS", "CAIRN_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AIRFLOW_HOME", "/home/a")
    assert docs_root() == Path("/home/a/data/docs")
    monkeypatch.setenv("CAIRN_DATA", "/d")
    assert docs_root() == Path("/d/docs")
    monkeypatch.setenv("CAIRN_DOCS", "/x")
    assert docs_root() == Path("/x")


def test_the_operator_links_what_its_run_wrote(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAIRN_DOCS", str(docs))
    operator = ValidateStateOperator(task_id="v", code="m:P", root="r", checkpoint="5")
    (link,) = operator.operator_extra_links
    assert isinstance(link, DataDocsLink)
    assert link.get_link(operator, ti_key=SimpleNamespace()) == ""
    operator.docs_page = str(docs / "index.html")
    assert link.get_link(operator, ti_key=SimpleNamespace()).endswith("/cairn/docs/index.html")
