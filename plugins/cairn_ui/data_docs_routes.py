"""Serve Data Docs in Airflow's UI: files below `docs_root()`, of pipelines that the user may read.

The pages run in a browser sandbox, because they contain values from user data: a script in such a value must not act
with the user's session. Only the list of the pages is not sandboxed, since Cairn's own template renders it.
"""

from __future__ import annotations

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, Response

from cairn_operators.data_docs_link import URL_PREFIX, add_style, docs_root, page_in
from cairn_ui import shown_page
from cairn_ui.access import Asks
from cairn_ui.data_docs import page_at, pages_in
from cairn_ui.error_pages import add_error_pages
from cairn_ui.next_steps import without_docs
from cairn_ui.read_logs import Look

_SANDBOX = {
    "Content-Security-Policy": "sandbox allow-scripts allow-popups allow-downloads",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

app = FastAPI(
    dependencies=[Depends(requires_access_view(AccessView.WEBSITE))], docs_url=None, redoc_url=None, openapi_url=None
)


def _checkpoints(request: Request) -> str:
    """Return the path at which Airflow serves the pages about checkpoints."""
    return f"{str(request.scope.get('root_path', '')).rstrip('/').removesuffix(URL_PREFIX)}{shown_page.URL_PREFIX}"


add_error_pages(app, _checkpoints)


@shown_page.router.get("/p/{key}/docs/{path:path}")
def framed(request: Request, rights: Asks, key: str, path: str) -> Response:
    ref = shown_page.find_ref(rights, key)
    page = page_at(path) if rights.may_read_docs(ref.name, shown_page.dags.pipelines()) else None
    if page is None or page.pipeline != ref.name or page_in(docs_root(), path) is None:
        raise HTTPException(404, "This page of Data Docs does not exist")
    shown = shown_page.PipelinePage(request, rights, ref, Look(reading=None))
    return shown.show("docs.html", page=page, docs_prefix=URL_PREFIX)


@app.get("/", response_model=None)
def listing(request: Request, rights: Asks) -> Response:
    pages, refs = pages_in(docs_root()), shown_page.dags.pipelines()
    keys = {ref.name: ref.key for ref in rights.readable(refs)}
    names = [name for name in sorted({page.pipeline for page in pages}) if rights.may_read_docs(name, refs)]
    return shown_page.page_of(
        request,
        "docs_list.html",
        base=_checkpoints(request),
        ui="",
        next=without_docs(),
        groups=[(name, keys.get(name), [page for page in pages if page.pipeline == name]) for name in names],
        running=False,
    )


@app.get("/{path:path}", response_model=None)
def page(path: str, rights: Asks) -> Response:
    """Serve a file of the Data Docs. A folder stands for its `index.html`."""
    root = docs_root()
    file = page_in(root, path)
    if file is None:
        raise HTTPException(
            404, "This page does not exist. A full validation writes Data Docs when it evaluates expectations"
        )
    name = file.relative_to(root.resolve()).parts[0]
    refs = shown_page.dags.pipelines()
    if not rights.may_read_docs(name, refs):
        raise HTTPException(403, _why_not(name, any(ref.name == name for ref in refs)))
    shown = page_at(file.relative_to(root.resolve()).as_posix())
    is_own = shown is not None and shown.table is None
    if file.suffix == ".html" and not is_own:
        return HTMLResponse(add_style(file.read_text(encoding="utf-8")), headers=_SANDBOX)
    return FileResponse(file, headers=_SANDBOX)


def _why_not(name: str, known: bool) -> str:
    if known:
        return "You may not read the DAG of this pipeline"
    return (
        f"No DAG in Airflow has a pipeline named {name!r}, so Airflow can't tell who may read its Data Docs. Add the URL of the "
        "pipeline's folder to CAIRN_UI_PIPELINES. Then users who may read Airflow's configuration may read these Data Docs"
    )
