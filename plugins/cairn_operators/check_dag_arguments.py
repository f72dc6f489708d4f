"""Check a DAG's arguments when its file is parsed. So the UI shows a mistake as an import error before any run."""

from __future__ import annotations

import re
from typing import Any

from state_backend.adapters.schemes import check_url
from state_backend.values.errors import UsageError
from state_backend.values.hide_secrets import hide

# A DAG that runs only when a person starts it.
BY_HAND: dict[str, Any] = {"schedule": None, "catchup": False, "max_active_runs": 1}
_PIPELINE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def checked_place(dag_id: str, code: str, root: str, spark_conn_id: str, storage_conn_id: str | None) -> dict[str, Any]:
    """Check the form of `code` and `root`, and return the arguments that all tasks of the DAG share, by name."""
    check_code_and_root(dag_id, code, root)
    return {"code": code, "root": root, "spark_conn_id": spark_conn_id, "storage_conn_id": storage_conn_id}


def check_code_and_root(dag_id: str, code: str, root: str) -> None:
    """Raise an error if the pipeline or the root of a DAG is malformed.

    The function checks only the form of both values, and accepts any template. It does not search for the pipeline's
    module, since a search would import packages with each parse of the DAG file.
    """
    if "{" not in code and not _PIPELINE.fullmatch(code):
        raise ValueError(f"DAG {dag_id}: code {code!r} is not module:NAME, as in pipelines.clicks:CLICKS")
    if "{" in root:
        return
    try:
        check_url(root)
    except UsageError as error:
        raise ValueError(
            f"DAG {dag_id}: root {hide(root)!r} is no storage URL: {error}. "
            "A relative path does not work, since each task runs in another folder"
        ) from None
