"""The page of one checkpoint, and the comparison of two."""

from __future__ import annotations

import shlex
from typing import Any

from fastapi.responses import Response

from cairn_ui.checkpoint_actions import actions_of
from cairn_ui.error_pages import NotInPipeline
from cairn_ui.read_logs import Reading
from cairn_ui.shown_page import Number, Shown, router, written_ms
from state_backend.checkpoint.choose_base import why_stale
from state_backend.inspection.describe import describe_checkpoint, describe_difference, describe_entry, load_states
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.records import Record, ShardManifest


@router.get("/p/{key}/checkpoint/{number}")
def of_checkpoint(page: Shown, number: int) -> Response:
    """Show one checkpoint.

    A sweep adds a record without a checkpoint to the log, with a number of the same series. The page of a sweep or of a
    dropped checkpoint shows only what its row in the history shows.
    """

    def view(reading: Reading) -> dict[str, Any]:
        log = reading.log
        if not 1 <= number <= log.head_id:
            raise NotInPipeline(page.ref, f"Checkpoint {number} does not exist; the newest one is {log.head_id}")

        def read(storage: Storage) -> dict[str, Any]:
            load_states(log, [number])
            row = describe_entry(log, number, written_ms(page.ref, log, [number]).get(number))
            if not row["retained"]:
                return {"row": row, "detail": None}
            record = log.whole(number)
            detail = describe_checkpoint(log, record, _manifests(record, storage))
            kept = log.retained[number].stale_by
            why = None if kept is None else why_stale(log, kept)
            actions = [*actions_of(page.ref, log, record, page.airflow)]
            return {"row": row, "detail": detail, "stale": why, "actions": actions}

        found = page.ask(f"checkpoint {number} {page.airflow}", read)  # Its commands have this URL.
        there = page.runs_there([found["row"]])
        return found | {"in_airflow": there, "docs": page.docs, "validated": reading.validated}

    return page.show("checkpoint.html", view, number=number)


@router.get("/p/{key}/compare")
def compare(page: Shown, first: Number = None, second: Number = None) -> Response:
    """Show the difference between two checkpoints. Without two ids, show a form to choose them."""

    def view(reading: Reading) -> dict[str, Any] | None:
        if first is None or second is None:
            return None
        gone = [n for n in (first, second) if n not in reading.log.retained]
        if gone:
            numbers = ", ".join(map(str, gone))
            raise NotInPipeline(
                page.ref, f"Checkpoint {numbers} is not retained. Only retained checkpoints can be compared"
            )
        one, two = reading.log.whole(first), reading.log.whole(second)
        return page.ask(
            f"compare {first} {second}",
            lambda storage: describe_difference(one, _manifests(one, storage), two, _manifests(two, storage)),
        )

    kept = sorted(page.look.reading.log.retained, reverse=True) if page.look.reading is not None else []
    words = ["cairn", "diff", "--root", page.ref.root, "--pipeline", page.ref.name, str(first), str(second)]
    chosen = {"first": first or next(iter(kept[1:]), None), "second": second or next(iter(kept), None)}
    return page.show("compare.html", view, kept=kept, chosen=chosen, command=shlex.join(words))


def _manifests(record: Record, storage: Storage) -> list[ShardManifest]:
    return [manifest_of(ref, storage) for ref in record.content.shards]
