"""The page that looks up one key of a checkpoint.

The key comes in a form, not in the URL, because servers log URLs. `[cairn] show_values = false` in Airflow's
configuration switches the page off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import parse_qs

from airflow.configuration import conf
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response

from cairn_operators.storage_connection import storage_credentials
from cairn_ui import key_lookup
from cairn_ui.access import Rights
from cairn_ui.error_pages import NotInPipeline
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.human_units import size
from cairn_ui.page_rights import PAGE, Asks
from cairn_ui.values import Look, Reading


def shows_values() -> bool:
    """Return True if pages may show keys and values of state."""
    return bool(conf.getboolean("cairn", "show_values", fallback=True))


async def typed_key(request: Request) -> str:
    """Return the key in the request's form."""
    body = b""
    # A form writes one byte of the key as up to three, such as `%3D`.
    most = 3 * key_lookup.MOST_KEY_BYTES
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"The key is longer than {size(key_lookup.MOST_KEY_BYTES)}")
    try:
        fields = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=3, errors="strict")
    except ValueError:
        raise HTTPException(422, "The form can't be read") from None
    return fields.get("key", [""])[0]


TypedKey = Annotated[str, Depends(typed_key)]


def add_look_up(
    app: FastAPI, look: Callable[[Rights, str], tuple[PipelineRef, Look]], page: Callable[..., Response]
) -> None:
    """Add the page to the application."""

    @app.post("/p/{key}/checkpoint/{number}/key", **PAGE)
    def look_up_key(request: Request, rights: Asks, key: str, number: int, typed: TypedKey) -> Response:
        """Show state and history of one key."""
        ref, found = look(rights, key)
        if not shows_values():
            raise HTTPException(404, "This Airflow shows no keys and values ([cairn] show_values is false)")

        def view(reading: Reading) -> Any:
            if number not in reading.log.retained:
                raise NotInPipeline(ref, f"Checkpoint {number} is not retained, so its state is gone")
            try:
                with storage_credentials(ref.storage_conn_id) as environment:
                    return key_lookup.look_up(ref, number, typed, environment)
            except key_lookup.Busy:
                problem = "Another look-up is running, and only one runs at a time. Try again in a moment."
                return key_lookup.Found(typed=typed, problem=problem, too_much=True)

        return page(request, ref, found, "key.html", view, number=number)
