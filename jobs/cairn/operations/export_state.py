"""Export of state as Parquet files: one folder for each state, and one for the timers.

    <to>/state-<name>/00000-0.parquet   rows of shard 0, with the columns of `state_backend.inspection.state_table`
    <to>/timers/00000-0.parquet
    <to>/export.json                    written last: the exported checkpoint, and the number of rows of each state

Cairn does not track or delete exported files.

An export needs no Spark. It restores one shard after the other, or several shards at a time in separate processes. It
writes about 64 MiB of entries at a time. Each shard needs local disk for its files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from state_backend.adapters.open_storage import check_outside, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.formats import paths
from state_backend.formats.canonical_tables import CanonicalFiles, fits_parquet
from state_backend.formats.types import parse_struct
from state_backend.inspection.state_source import StateSource, find_state
from state_backend.inspection.state_table import read_shard, table_schema
from state_backend.shard.transfer import upload_all
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import UsageError
from state_backend.values.intervals import format_instant
from state_backend.values.operation_parameters import Export

REPORT = "export.json"
_LARGE_BYTES = 64 << 20


def carry_out_export(request: Export, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    source = find_state(request.checkpoint, root=request.root or None, pipeline=request.pipeline or None)
    # To export shards in separate processes pays off for a large state only.
    jobs = (os.cpu_count() or 1) if source.content.totals.state_bytes > _LARGE_BYTES else 1
    on_progress(0, source.content.parallelism)
    return export_state(source, request.folder, states=request.states, jobs=jobs, on_progress=on_progress)


def export_state(
    source: StateSource,
    to: str,
    *,
    states: Sequence[str] = (),
    jobs: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write states into the folder `to`, which must be empty, and return the contents of `export.json`.

    No `states` means all states and the timers. States without entries get no file. `jobs` processes export the shards;
    with 1, this process does. `on_progress` gets the numbers of finished shards and of all shards. If the export fails
    half-way, its files remain without `export.json`. Delete the folder before the next try.
    """
    check_outside(source.url, to, "export")
    destination = open_storage(to)
    if next(iter(destination.list("")), None) is not None:
        raise UsageError(f"{to} is not empty; export into an empty folder")
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    chosen = tuple(dict.fromkeys(states or (*(d.name for d in source.content.states), TIMERS_NAME)))
    for state in chosen:
        _check_fits(source, state)
    with ExitStack() as stack:
        stack.enter_context(source.held("an export"))
        shards = range(source.content.parallelism)
        write = partial(_export_shard, source, chosen, to)
        done: Iterator[list[dict[str, Any]]] = map(write, shards)
        if jobs > 1:
            # Spawn the processes: a forked process would inherit broken threads of RocksDB and Arrow.
            pool = ProcessPoolExecutor(min(jobs, len(shards)), mp_context=multiprocessing.get_context("spawn"))
            done = stack.enter_context(pool).map(write, shards)
        files = list[dict[str, Any]]()
        for n, of_shard in enumerate(done, 1):
            files += of_shard
            if on_progress is not None:
                on_progress(n, len(shards))
    content = source.content
    report = {
        "of": str(source),
        "pipeline": content.pipeline,
        "checkpoint": source.checkpoint_id,
        "start": format_instant(content.interval.start),
        "end": format_instant(content.interval.end),
        "digest": f"{content.digest:016x}",
        "rows": {state: sum(one["rows"] for one in files if one["state"] == state) for state in chosen},
        "files": files,
    }
    destination.create(REPORT, json.dumps(report, indent=2).encode())
    return report


def _check_fits(source: StateSource, state: str) -> None:
    descriptor = source.descriptor(state)
    structs = [source.content.key_schema]
    if descriptor is not None:
        structs.append(descriptor.versions[-1].value)
    if not all(fits_parquet(parse_struct(struct)) for struct in structs):
        raise UsageError(f"{source}: state {state!r} has a struct without fields, which Parquet can't store")


def _export_shard(source: StateSource, states: Sequence[str], to: str, shard: int) -> list[dict[str, Any]]:
    storage, destination = open_storage(source.url), open_storage(to)
    exported: list[dict[str, Any]] = []
    with work_folder(f"export-{shard}") as work:
        (work / "read").mkdir()
        writers: dict[str, CanonicalFiles] = {}
        for state, table in read_shard(source, states, shard, storage, work / "read"):
            if state not in writers:
                writers[state] = CanonicalFiles(work / f"write-{len(writers)}", table_schema(source, state))
            writers[state].write(table)
        for state, writer in writers.items():
            writer.close()
            name = None if state == TIMERS_NAME else state
            targets = [(paths.exported(name, shard, n), local) for n, (local, _) in enumerate(writer.written)]
            for handle, (_, rows) in zip(upload_all(destination, targets), writer.written, strict=True):
                exported.append({"state": state, "path": handle.path, "rows": rows, "bytes": handle.size_bytes})
    return exported
