"""Data Docs in Airflow's UI: the pages below ``docs_root()``, read-only, for whoever may see plugins.

Airflow loads it as a plugin of the provider (`cairn_provider`). Pages are sandboxed: what they show comes out of the data, and a script in it must not act
with the session of who looks at it.
"""

from __future__ import annotations

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import requires_access_view
from airflow.plugins_manager import AirflowPlugin
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse, Response

from cairn_operators.data_docs import URL_PREFIX, docs_root, listing, page_in, styled

_HEADERS = {
    "Content-Security-Policy": "sandbox allow-scripts allow-popups allow-downloads",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

app = FastAPI(
    dependencies=[Depends(requires_access_view(AccessView.PLUGINS))], docs_url=None, redoc_url=None, openapi_url=None
)


@app.get("/{path:path}", response_model=None)
def page(path: str) -> Response:
    """A file of the Data Docs; a folder's is its index.html. Of the folder itself, what there is."""
    if not path:
        return HTMLResponse(styled(listing(docs_root())), headers=_HEADERS)
    file = page_in(docs_root(), path)
    if file is None:
        raise HTTPException(404, "no such page: Data Docs are written when a full validation evaluates expectations")
    if file.suffix == ".html":
        return HTMLResponse(styled(file.read_text(encoding="utf-8")), headers=_HEADERS)
    return FileResponse(file, headers=_HEADERS)


class CairnDocsPlugin(AirflowPlugin):  # type: ignore[misc]  # Airflow is not type-checked here
    """Serves the pages under /cairn/docs, and lists them under Browse."""

    name = "cairn_data_docs"
    fastapi_apps = [{"app": app, "url_prefix": URL_PREFIX, "name": "cairn Data Docs"}]  # noqa: RUF012
    external_views = [  # noqa: RUF012
        {
            "name": "Data Docs",
            "href": f"{URL_PREFIX.lstrip('/')}/",
            "destination": "nav",
            "category": "browse",
            "url_route": "cairn-docs",
        }
    ]
