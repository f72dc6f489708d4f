"""Parse the names of checkpoints and durations that users give in Spark reader options and on the command line."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.formats import paths
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant

if TYPE_CHECKING:
    from state_backend.inspection.state_table import StateSource


def parse_checkpoint(text: str) -> str | int | datetime:
    """Return "latest", a checkpoint id, or the end of an interval, which must have a time zone."""
    if text == "latest":
        return text
    if text.isdigit():
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"checkpoint {text!r} is neither 'latest', nor an id, nor the end of an interval like 2013-01-02T00:00:00+00:00"
        ) from None
    if instant.tzinfo is None:
        raise UsageError(
            f"checkpoint {text!r} has no time zone; for UTC, write {format_instant(instant.replace(tzinfo=UTC))}"
        )
    return instant


def parse_duration(text: str) -> timedelta:
    """Return a duration from a text like 90s, 30m, 12h or 3d."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise UsageError(f"not a duration: {text!r}; expected a number and one of s, m, h, d, like 12h")
    return int(match[1]) * timedelta(**{{"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[match[2]]: 1})


def find_state(
    checkpoint: str = "latest",
    *,
    root: str | None = None,
    pipeline: str | None = None,
    path: str | None = None,
    attempt: str | None = None,
) -> StateSource:
    """Find the state that a user names, and the status of the checkpoint."""
    # These imports bring Arrow and RocksDB, which a command that only parses a duration need not load.
    from state_backend.checkpoint.coordinator import Coordinator
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
    coordinator = Coordinator(open_storage(path), pipeline)
    if attempt is not None:
        return StateSource(url=path, content=coordinator.load_prepared(attempt).content, checkpoint_id=0)
    log, record = coordinator.find(parse_checkpoint(checkpoint))
    return replace(StateSource.of_record(path, record), status=state_of(log, record))
