"""Make the `Coordinator` of a pipeline, which reads and writes its log: it begins, prepares and commits attempts."""

from __future__ import annotations

from cairn.pipeline import Pipeline
from state_backend.checkpoint.coordinator import Coordinator


def coordinator_of(pipeline: Pipeline, root: str, *, remembers: bool = False) -> Coordinator:
    return Coordinator.of(root, pipeline.name, remembers=remembers)
