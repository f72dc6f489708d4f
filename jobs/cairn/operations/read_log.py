"""The log of a pipeline for user code: commits, outputs and quarantines. Needs no Spark."""

from __future__ import annotations

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint import log
from state_backend.checkpoint.log import Log


def read_log(root: str, pipeline: str) -> Log:
    """Read the log as it is now; later commits do not change the returned value.

    Args:
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the pipeline.
    """
    return log.read_log(open_storage(join_url(root, pipeline)))
