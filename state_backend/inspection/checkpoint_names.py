"""Find the state that a user names in Spark reader options or on the command line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.formats import paths
from state_backend.values.errors import UsageError

if TYPE_CHECKING:
    from state_backend.inspection.state_table import StateSource


def find_state(
    checkpoint: str = "latest",
    *,
    root: str | None = None,
    pipeline: str | None = None,
    path: str | None = None,
    attempt: str | None = None,
) -> StateSource:
    """Find the state that a user names, and the status of the checkpoint."""
    # These imports bring Arrow and RocksDB, which `cairn.command` need not load to print a help.
    from state_backend.checkpoint.find_checkpoint import find_checkpoint
    from state_backend.checkpoint.location import Location
    from state_backend.checkpoint.prepared_attempts import load_prepared
    from state_backend.checkpoint.savepoints import read_savepoint
    from state_backend.inspection.describe import state_of
    from state_backend.inspection.state_table import StateSource

    if path is None and "/" in checkpoint:
        path, checkpoint = checkpoint, "latest"
    if path is None:
        if root is None or pipeline is None:
            raise UsageError(
                "no state is named\nGive root and pipeline, or the path of a pipeline's folder or of a savepoint"
            )
        path = join_url(root, pipeline)
    else:
        storage = open_storage(path)
        if storage.stat(paths.record(1)) is not None:
            pipeline = pipeline or path.rstrip("/").rpartition("/")[2]
        elif pipeline is None or storage.stat(paths.SAVEPOINT_RECORD) is not None:
            return StateSource.of_savepoint(path, read_savepoint(storage))
        else:
            path = join_url(path, pipeline)
    at = Location(root=path.rstrip("/").rpartition("/")[0], pipeline=pipeline, storage=open_storage(path))
    if attempt is not None:
        return StateSource(url=path, content=load_prepared(at, attempt).content, checkpoint_id=0)
    log, record = find_checkpoint(at, checkpoint)
    return replace(StateSource.of_record(path, record), status=state_of(log, record))
