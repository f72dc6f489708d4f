"""What is wrong with a DAG's arguments, told when its file is parsed: in the UI's import errors and not by a run at night."""

from __future__ import annotations

import re

from state_backend.adapters.schemes import ACCEPTED, scheme_of

_PIPELINE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_pipeline_and_root(dag_id: str, pipeline: str, root: str) -> None:
    """Templates are left for the task. The module of the pipeline is not looked for: it would be imported with every parse.

    Raises: ValueError for a pipeline that is not written as module:NAME, and for a root that is no storage URL.
    """
    if "{" not in pipeline and not _PIPELINE.fullmatch(pipeline):
        raise ValueError(f"DAG {dag_id}: pipeline {pipeline!r} is not module:NAME, as in pipelines.clicks:CLICKS")
    if "{" not in root and scheme_of(root) is None:
        raise ValueError(
            f"DAG {dag_id}: root {root!r} is no storage URL; expected {ACCEPTED}. "
            "A relative path is none: tasks run in folders of their own"
        )
