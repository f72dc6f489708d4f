"""Rewrite the output and late rows of committed intervals without the rows of keys that `cairn erase` removes.

The steps, and the files on disk after each step:

    write       new files under the forget's attempt, which no record names until it is prepared
    commit      the forget's record names the new files; readers still get the old ones
    exchange    file by file: `settled/commits/…`, then the record or tombstone of the interval, name the new files
    delete      the old files, which no record names any longer, are deleted

If a process stops during a step, the next call of `exchange_outputs` continues there. At the latest, a clean-up does so
before the forget's record becomes a tombstone. A reader that read the log before the exchange may find an old file
deleted, as it may after a re-run. The reader must then read the log again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from state_backend.checkpoint.clean_up_dropped import delete_files
from state_backend.checkpoint.exchange_names import exchange
from state_backend.checkpoint.log import Log
from state_backend.formats import paths
from state_backend.formats.content_digest import digest_of
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import StructType
from state_backend.ports.storage import Storage
from state_backend.values.errors import StateTypeError
from state_backend.values.frozen import frozen
from state_backend.values.records import OutputFile, RewrittenOutput


@frozen
class OutputsWithout:
    """Output that `cairn erase` rewrites."""

    rewritten: tuple[RewrittenOutput, ...]
    files: int  # files with rows of the keys
    rows: int  # rows of the keys
    unknown: tuple[str, ...]  # paths of files in which the key's columns can't be read


def write_outputs_without(
    storage: Storage, log: Log, keys: Collection[bytes], key_schema: StructType, attempt: str | None, work: Path
) -> OutputsWithout:
    """Write a new file, without the rows of the forgotten keys, for each current output file that has such rows.

    The function reads all current output, and deletes no file. With `attempt` None, it only counts, and writes nothing.
    """
    rewritten, files, rows, unknown = [], 0, 0, []
    for interval, (checkpoint_id, outputs) in sorted(log.current_outputs().items()):
        now: list[OutputFile] = []
        replaced: list[str] = []
        for number, output in enumerate(outputs):
            found = _Filtered(storage, output, keys, key_schema, work)
            if found.gone is None:
                unknown.append(output.handle.path)
            if not found.gone:
                now.append(output)
                continue
            files, rows = files + 1, rows + found.gone
            replaced.append(output.handle.path)
            if attempt is not None and found.left:
                path = paths.output(interval, attempt, number, 0, late=output.late)
                now.append(
                    replace(output, handle=storage.upload(path, found.local), rows=found.left, digest=found.digest)
                )
        if replaced:
            made = RewrittenOutput(id=checkpoint_id, interval=interval, outputs=tuple(now), replaces=tuple(replaced))
            rewritten.append(made)
    return OutputsWithout(rewritten=tuple(rewritten), files=files, rows=rows, unknown=tuple(unknown))


class _Filtered:
    """Local copy of an output file without the rows of `keys`. `gone`: number of these rows; None: no key columns."""

    def __init__(
        self, storage: Storage, output: OutputFile, keys: Collection[bytes], key_schema: StructType, work: Path
    ) -> None:
        self.gone: int | None = 0
        self.left = self.digest = 0
        self.local = work / "filtered.parquet"
        whole = work / "whole.parquet"
        storage.download(output.handle, whole)
        wanted, encoder = pa.array(sorted(keys), pa.binary()), KeyColumns(key_schema)
        with pq.ParquetFile(whole) as file:
            names = {name.lower(): name for name in file.schema_arrow.names}
            columns = [names.get(name.lower()) for name in key_schema.names]
            if None in columns:
                self.gone = None
                return
            with pq.ParquetWriter(self.local, file.schema_arrow, compression="zstd") as writer:
                for batch in file.iter_batches():
                    try:
                        encoded = encoder.encode([batch.column(name) for name in columns])
                    except StateTypeError:
                        self.gone = None
                        return
                    stays = pc.invert(pc.is_in(encoded, wanted))
                    kept = batch.filter(stays)
                    self.gone += batch.num_rows - kept.num_rows
                    self.left += kept.num_rows
                    self.digest = (self.digest + digest_of(kept)) % 2**64
                    writer.write_batch(kept)


def exchange_outputs(storage: Storage, log: Log) -> int:
    """Make rewritten output files current, delete the files that they replace, and return how many files were deleted.

    The function does so for each retained checkpoint that `cairn erase` committed. A repeated call changes nothing.
    """
    return sum(delete_files(storage, old) for record in log.completed() for old in exchange(storage, record.content))
