"""Decide which commands make sense for a checkpoint. The page of the checkpoint only prints them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.checkpoint.log import Log
from state_backend.checkpoint.newest_state import newest_state
from state_backend.values.airflow_commands import repair_command
from state_backend.values.errors import Rerun
from state_backend.values.records import Record


class Action(NamedTuple):
    """An action on a checkpoint: a command to copy, and perhaps a DAG that does the same."""

    title: str
    why: str
    command: str
    # The DAG that does the same; None if no DAG does it.
    dag_id: str | None = None


def actions_of(ref: PipelineRef, log: Log, record: Record, airflow: str | None = None) -> Iterator[Action]:
    """Yield what a user can do with the retained checkpoint `record`. `airflow`: URL for commands that ask Airflow."""
    number, root = str(record.id), ["--root", ref.root]
    where, code = [*root, "--pipeline", ref.name], ["--code", ref.code or ""]
    newest, kept, refused = newest_state(log), log.retained.get(record.id), log.quarantine_above(record.id)
    spoilt = refused is not None or (kept is not None and kept.stale_by is not None)
    if spoilt and ref.dag_id is not None:
        start = record.content.interval.start
        yield Action(
            "Run its interval again",
            "No interval can start from this checkpoint. The command also repairs the intervals before it. Those after it "
            "may need a re-run too: the overview has the command for all of them.",
            repair_command(ref.root, ref.name, Rerun(first=start, last=start), dag_id=ref.dag_id, airflow=airflow),
        )
    elif not spoilt and (newest is None or newest.id != record.id):
        yield from _restores(ref, number, where)
    if ref.code is not None:
        words = ["cairn", "savepoint", number, *root, *code, "--folder"]
        yield Action(
            "Keep it as a savepoint",
            "Copies the checkpoint into a folder that Cairn never deletes. Replace DESTINATION with the URL of a new folder.",
            f"{shlex.join(words)} DESTINATION",
        )
    yield Action(
        "Look up a key",
        "Shows the key's states and timers in this checkpoint. Replace KEY by the key: u1, or user=u1, or JSON.",
        shlex.join(["cairn", "key", "KEY", number, *where]),
    )
    yield Action(
        "See what changed a key",
        "Lists the retained checkpoints that changed the key, with each change.",
        shlex.join(["cairn", "key", "KEY", "--history", *where]),
    )
    if ref.code is not None:
        base = record.content.base_id
        if record.content.kind == "interval" and (base is None or base in log.retained):
            yield Action(
                "Replay its interval for a key",
                "Runs the interval again for this key in one process, and writes nothing.",
                shlex.join(["cairn", "replay", "KEY", number, *root, *code]),
            )
        yield Action(
            "Validate it",
            "Checks the files and the restored state, and evaluates the expectations. A checkpoint with findings is quarantined.",
            shlex.join(["cairn", "validate", number, *root, *code]),
        )
    if record.id in log.quarantined:
        yield Action(
            "Release it",
            "Ends the quarantine: intervals may start from this checkpoint again.",
            shlex.join(["cairn", "quarantine", number, *where, "--release"]),
        )
    elif refused is None:
        yield Action(
            "Quarantine it",
            "No interval starts from this checkpoint or from its descendants. Without --dry-run the command refuses the checkpoint.",
            shlex.join(["cairn", "quarantine", number, *where, "--dry-run"]),
        )


def _restores(ref: PipelineRef, target: str, where: list[str]) -> Iterator[Action]:
    title = f"Go back to checkpoint {target}"
    for dag_id in ref.restore_dags:
        yield Action(
            title,
            "The DAG lists the checkpoints that it would discard. If there are any, it waits for a person to agree.",
            shlex.join(["airflow", "dags", "trigger", dag_id, "--conf", json.dumps({"target": target})]),
            dag_id,
        )
    if not ref.restore_dags:
        yield Action(
            title,
            "Lists the checkpoints that it would discard; without --dry-run it restores. To restore from Airflow, add a DAG with "
            "restore_pipeline.",
            shlex.join(["cairn", "restore", target, *where, "--dry-run"]),
        )
