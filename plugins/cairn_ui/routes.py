"""The FastAPI application with the pages about checkpoints. It writes nothing to the storage or to Airflow's database.

Each route checks the user's rights, reads logs, and renders a template over what `state_backend.inspection` describes.

    /                              all pipelines that the user may read
    /dag/<dag>                     the pipelines of a DAG; if the DAG has one pipeline, its overview
    /run/<dag>/<run>               the checkpoints that a run restored and committed
    /task/<dag>/<task>/<run>       the same, as a tab of a task instance
    /p/<key>/…                     pages of the pipeline with this `PipelineRef.key`: overview, history, lineage,
                                   trends, compare, trials, trials/<name>, checkpoint/<id>, docs/<path>
    /static/<file>                 the style sheet and the script
"""

from __future__ import annotations

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, Response

# Each of these modules adds its routes to `router`.
from cairn_ui import (  # noqa: F401
    data_docs_routes,
    page_of_checkpoint,
    page_of_overview,
    page_of_pipelines,
    page_of_run,
    pages_of_log,
    pages_of_trials,
)
from cairn_ui.error_pages import add_error_pages
from cairn_ui.render_template import CONTENT_TYPES, STATIC
from cairn_ui.shown_page import base_of, router

# Static files hold no data, so anyone may read them. All other routes need a logged-in user.
app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
add_error_pages(app, base_of)
app.include_router(router)


@app.get("/static/{name}", response_model=None)
def static(name: str) -> Response:
    file = STATIC / name
    if "/" in name or file.suffix not in CONTENT_TYPES or not file.is_file():
        raise HTTPException(404, "This file does not exist")
    kept = {"Cache-Control": "public, max-age=86400", "X-Content-Type-Options": "nosniff"}
    return FileResponse(file, media_type=CONTENT_TYPES[file.suffix], headers=kept)
