"""The log of a pipeline for user code: commits, outputs and quarantines. Reading the log needs no Spark."""

from __future__ import annotations

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint import log
from state_backend.checkpoint.log import Log


def read_log(root: str, pipeline: str) -> Log:
    """Return the pipeline's log as it is now. Later commits do not change the returned log.

    Args:
        root: URL of the folder that holds the pipelines.
        pipeline: Name of the pipeline.

    Example:
        for record in read_log("file:///data/state", "clicks").completed():
            print(record.id, record.content.interval)
    """
    return log.read_log(open_storage(join_url(root, pipeline)))
