"""Answer errors with a page that names the next step."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as AnyHTTPException

from cairn_ui.next_steps import after_error
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.shown_page import page_of


class NotInPipeline(HTTPException):
    """The error 404 for a part of a pipeline that the user may read. The page then links to the pipeline's history."""

    def __init__(self, ref: PipelineRef, detail: str) -> None:
        super().__init__(404, detail)
        self.ref = ref


def add_error_pages(app: FastAPI, base_of: Callable[[Request], str]) -> None:
    def answer(request: Request, status: int, detail: str, ref: PipelineRef | None = None) -> Response:
        refusal = after_error(status, ref)
        shown = page_of(
            request, "error.html", base=base_of(request), status=status, detail=detail, refusal=refusal, running=False
        )
        shown.status_code = status
        return shown

    @app.exception_handler(AnyHTTPException)
    def refused(request: Request, error: AnyHTTPException) -> Response:
        return answer(request, error.status_code, str(error.detail), getattr(error, "ref", None))

    @app.exception_handler(RequestValidationError)
    def unreadable(request: Request, error: RequestValidationError) -> Response:
        wrong = "\n".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
        return answer(request, 422, wrong)

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> Response:
        # The page shows only the error's type, since the message may name secrets. The server's log has the message.
        return answer(request, 500, f"{type(error).__name__} in the code of this page")
