"""Replay: run one key of one committed interval again, and compare the result with the committed one.

The state comes from the interval's base, the rows from the source in the recorded order, and clock and watermark from
the records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from cairn.operations.intervals.plan_interval import Attempt, would_be_made_of
from cairn.pipeline import Interval, Pipeline
from cairn.replay.compare_key import Comparison, compare_key, reasons_for
from cairn.replay.find_interval import Replayable, find_interval
from cairn.replay.key_input import OpenSpark, PlannedKey, plan_key
from cairn.replay.run_key import KeyRun, run_key
from cairn.rows.routing import INITIAL
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.begin_attempt import Begun
from state_backend.checkpoint.forgotten_keys import returning_keys
from state_backend.checkpoint.log import Log, read_log, read_newest
from state_backend.checkpoint.output_schemas import spelling
from state_backend.formats.json_keys import parse_key
from state_backend.formats.types import parse_struct
from state_backend.inspection.key_entries import KeyEntries, SearchedKey, entries_of, read_keys
from state_backend.inspection.key_rows import read_key_rows
from state_backend.inspection.state_source import StateSource
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptRecord, StateUnusable
from state_backend.values.frozen import frozen
from state_backend.values.key_groups import shard_of
from state_backend.values.records import Content, Record

Watch = Callable[[Any], None]


@frozen
class Replay:
    pipeline: Pipeline
    key: SearchedKey
    found: Replayable  # The committed interval, and its base.
    before: KeyEntries  # The key's state before the interval.
    planned: PlannedKey
    run: KeyRun
    comparison: Comparison
    # Possible reasons of a difference; empty if the results are the same.
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """True if the replay equals the committed result in values and types."""
        return self.comparison.same


def replay_key(
    pipeline: Pipeline,
    key: str | tuple[Any, ...] | SearchedKey,
    interval: str | Interval,
    root: str,
    *,
    spark: OpenSpark | None = None,
    made: Watch = lambda processor: None,
    log: Log | None = None,
) -> Replay:
    """Run one key of one committed interval again, and compare the result with the committed one. Write nothing.

    `spark`: Opens a session if the source needs one; None: raises `UsageError` then. `made`: Called with the processor.
    """
    url = join_url(root, pipeline.name)
    storage = open_storage(url)
    log = read_newest(storage) if log is None else log
    if log.newest is None:
        raise StateUnusable(f"pipeline {pipeline.name!r} has no checkpoint below {root}; run an interval first")
    try:
        found = find_interval(log, pipeline.name, interval, pipeline.declared_schedule)
    except CorruptRecord:  # A commit may have dropped the checkpoint since the newest record was read.
        found = find_interval(log := read_log(storage, log), pipeline.name, interval, pipeline.declared_schedule)
    content = found.record.content
    searched = key_of(key, content)
    begun = _begun(log, found)
    attempt = Attempt(id="replay", interval=content.interval, run=content.run, permissions=content.permissions)
    planned = plan_key(pipeline, root, attempt, begun, searched, zone=content.time.zone or "UTC", spark=spark)
    with work_folder("replay") as work:
        before = _entries(url, found.base, searched, storage, _new(work / "base"), content)
        committed = _entries(url, found.record, searched, storage, _new(work / "committed"), content)
        rows = _committed_rows(content, searched, storage, work)

        def once(name: str, made: Watch) -> tuple[KeyRun, Comparison]:
            job = planned.plan.job
            run = run_key(job, pipeline.processor, planned.batches, before, searched, _new(work / name), made=made)
            ordered = pipeline.api != "arrow"
            compared = compare_key(
                committed, run.entries, searched.group, (rows[0], run.output), (rows[1], run.late), ordered=ordered
            )
            return run, compared

        run, comparison = once("first", made)
        reasons: list[str] = []
        if not comparison.same:
            with quiet_logs():
                again, _ = once("second", lambda processor: None)
            same = (again.entries.stored, again.output.to_pylist()) == (run.entries.stored, run.output.to_pylist())
            now = would_be_made_of(planned.session, pipeline, content.interval, planned.read)
            now = replace(now, code_version=planned.plan.job.content.code_version)
            reasons = reasons_for(content, now, deterministic=same)
    return Replay(
        pipeline=pipeline,
        key=searched,
        found=found,
        before=before,
        planned=planned,
        run=run,
        comparison=comparison,
        reasons=tuple(reasons),
        notes=tuple(_notes(found, planned, content, rows, comparison)),
    )


def key_of(key: str | tuple[Any, ...] | SearchedKey, content: Content) -> SearchedKey:
    """Return the key that a user names by text or values, with the key schema in the record."""
    if isinstance(key, SearchedKey):
        return key
    schema = parse_struct(content.key_schema)
    values = parse_key(key, schema) if isinstance(key, str) else key
    return SearchedKey.of(values, schema, content.max_parallelism)


def _begun(log: Log, found: Replayable) -> Begun:
    content = found.record.content
    base_id = found.base.id if found.base is not None else None
    returning = returning_keys(log, content.interval.start_ms, base_id)
    return Begun(
        h0=0,
        base=found.base,
        spelling=spelling(log),
        returning=tuple(r for r in returning if r.key.forget in content.filtered),
    )


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _entries(
    url: str, record: Record | None, key: SearchedKey, storage: Storage, work: Path, content: Content
) -> KeyEntries:
    if record is None:
        return entries_of(key, content.states, ())
    ((_, entries),) = read_keys(StateSource.of_record(url, record), [key], record.content.states, storage, work)
    return entries


def _committed_rows(
    content: Content, key: SearchedKey, storage: Storage, work: Path
) -> tuple[pa.Table | None, pa.Table | None]:
    shard = shard_of(key.group, content.parallelism, content.max_parallelism)
    output, late = (
        read_key_rows([f for f in content.outputs if f.late == late], content.attempt, shard, key, storage, work)
        for late in (False, True)
    )
    return output, late


def _notes(
    found: Replayable,
    planned: PlannedKey,
    content: Content,
    rows: tuple[pa.Table | None, pa.Table | None],
    comparison: Comparison,
) -> Iterator[str]:
    job = planned.plan.job
    if found.status != "completed":
        yield f"checkpoint {found.record.id} is {found.status}"
    if found.base_status not in (None, "completed"):
        yield f"its base, checkpoint {content.base_id}, is {found.base_status}; the replay starts from it, as the interval did"
    if content.filtered:
        yield "the interval left out keys that `cairn erase` removed, and the replay leaves them out too"
    if comparison.same and job.content.code_hash != content.code_hash:
        yield "the code is not the recorded code, but gives the same result for this key"
    if rows[0] is None:
        yield "the output has no key columns, so its rows can't be compared"
    if planned.rows(INITIAL):
        yield "the interval read initial state, whose position no record has"
    if content.parallelism != planned.plan.job.parallelism:
        yield f"the interval ran on {content.parallelism} shards, which changes no key"


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Suppress log lines in the `with` block. A second run of a key would only repeat those of the first run."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
