"""The entrance to the state of a pipeline."""

from __future__ import annotations

from cairn.pipeline import Pipeline
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Coordinator


def coordinator_of(pipeline: Pipeline, root: str, *, remembers: bool = False) -> Coordinator:
    """The coordinator of the pipeline's folder under a root."""
    return Coordinator(open_storage(join_url(root, pipeline.name)), pipeline.name, remembers=remembers)
