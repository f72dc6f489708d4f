"""What two ways to the same checkpoints left, to be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cairn.operations.intervals.run_intervals import Outcome
from cairn.pipeline import Pipeline
from tests.support.coordinator import coordinator_of


def made(pipeline: Pipeline, root: Path) -> list[Any]:
    """All of each checkpoint that does not depend on when, where and by which attempt it was made."""
    return [
        (
            *(record.id, record.reproduces, record.retained),
            *(record.content.base_id, record.content.interval, record.content.digest, record.content.time),
            *(
                record.content.states,
                record.content.source_position,
                record.content.input_hash,
                record.content.permissions,
            ),
            [(o.handle.size_bytes, o.handle.crc32c, o.rows, o.late) for o in record.content.outputs],
            [ref.inline and (ref.inline.key_group_states, len(ref.inline.files)) for ref in record.content.shards],
        )
        for record in coordinator_of(pipeline, str(root)).log().completed()
    ]


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def ran(outcomes: list[Outcome]) -> list[bool]:
    return [outcome.computed for outcome in outcomes]
