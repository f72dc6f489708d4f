"""Make the `Coordinator` of a pipeline, which reads and writes its log: it begins, prepares and commits attempts."""

from __future__ import annotations

from cairn.pipeline import Pipeline
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Coordinator


def coordinator_of(pipeline: Pipeline, root: str, *, remembers: bool = False) -> Coordinator:
    """Return an object that begins, prepares and commits attempts in the pipeline's folder.

    Args:
        pipeline: The pipeline, which gives the folder's name.
        root: URL of the folder that holds the pipelines.
        remembers: True keeps the log in memory between calls, for a process that commits several times.
    """
    return Coordinator(open_storage(join_url(root, pipeline.name)), pipeline.name, remembers=remembers)
