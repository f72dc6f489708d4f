"""The rights that every route asks for before it reads anything, as FastAPI's dependencies."""

from __future__ import annotations

from typing import Annotated, Any

from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import get_user, requires_access_view
from fastapi import Depends
from fastapi.responses import HTMLResponse

from cairn_ui.access import Rights


def rights_of(user: Annotated[Any, Depends(get_user)]) -> Rights:
    """Return the object that tells which DAGs and pipelines the logged-in user may read.

    Without a user, `get_user` answers with status 401.
    """
    return Rights(user)


Asks = Annotated[Rights, Depends(rights_of)]
PAGE: dict[str, Any] = {
    "response_class": HTMLResponse,
    "dependencies": [Depends(requires_access_view(AccessView.WEBSITE))],
}
