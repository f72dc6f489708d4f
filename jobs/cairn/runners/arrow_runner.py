"""Runner of a vectorised processor over one shard.

The runner calls the processor with many keys at a time. It reads and writes the keys' state as Arrow tables.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import UTC, tzinfo
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch
from cairn.rows.input_batches import InputBatches
from cairn.rows.output_file import LocalParquet
from cairn.rows.routing import key_columns
from cairn.runners.arrow_states import EXPIRY
from cairn.runners.input_rows import starts_of
from cairn.runners.output_rows import no_nulls_if_none_may_be
from cairn.runners.processor_handle import ArrowHandle, Clock, HandleState, InputColumns
from cairn.runners.user_code import UserCode
from state_backend.formats.arrow_columns import one_batch
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.state.entry_columns import Groups
from state_backend.state.shard_state import ShardState
from state_backend.values.doing import say_part
from state_backend.values.errors import ProcessorError
from state_backend.values.frozen import frozen

# Rows in one call: enough to make the fixed cost of Arrow and NumPy calls small, and few enough to stay in the CPU's
# caches.
ROUND_ROWS = 65_536
# Bytes in one call, for wide rows: a batch more is still far below 2 GiB, where Arrow's offsets in a string column end.
ROUND_BYTES = 256 * 1024 * 1024


@frozen
class _Round:
    """Input rows for one call of `handleBatch`: all rows of some keys, but perhaps only a part of the last key's."""

    rows: pa.RecordBatch
    encoded: pa.Array  # The encoded key of each row.
    starts: Any  # Position of the first row of each key.
    last_key_continues: bool


class ArrowRunner:
    def __init__(
        self,
        processor: Callable[[], Any],
        state: ShardState,
        columns: InputColumns,
        output: LocalParquet,
        user_code: UserCode,
        clock: Clock,
        zone: tzinfo = UTC,
    ) -> None:
        self.keys = 0
        self._zone = zone
        self._state = state
        self._key_names = columns.key_schema.names
        self._input_names = columns.input_schema.names
        self._key_columns = KeyColumns(parse_struct(columns.key_schema.jsonValue()))
        self._output = output
        self._user_code = user_code
        self._clock = clock
        with user_code.call("init"):
            self._processor = processor()
            # This is safe if the session does not ignore case too: the driver has then refused any other spelling.
            self._processor._spell_columns(columns.input_schema.names)
            self._handle = ArrowHandle(state, clock, columns)
            self._processor.init(self._handle)
            self._handle.end_init()
        self._states = self._handle.states

    def process(self, batches: InputBatches) -> None:
        """Call `handleBatch` for all input rows: once for about 65,536 rows or 256 MiB at a time.

        A call gets all rows of its keys. Only a processor with `splits_keys` may get the rows of one key in several
        calls.
        """
        for round_ in self._rounds(batches):
            self._run(round_)
        self._handle.state = HandleState.DATA_PROCESSED

    def _rounds(self, batches: InputBatches) -> Iterator[_Round]:
        batches.counts_until = self._processor._counts_until
        held: list[pa.RecordBatch] = []
        count, size, most_rows, most_bytes = 0, 0, ROUND_ROWS, ROUND_BYTES
        for batch in batches:
            held.append(batch)
            count, size = count + batch.num_rows, size + batch.nbytes
            if count < most_rows and size < most_bytes:
                continue
            rows, encoded, starts = self._split(held)
            cut, last_key_continues = int(starts[-1]), False
            if cut == 0 and self._processor.splits_keys:
                # Keep one row for the next round: `last_key_continues` promises that more rows follow.
                cut, last_key_continues = len(encoded) - 1, True
            if cut:
                # Copy the rows of the next round, because the processor may write to the buffers of this round's rows
                # through NumPy.
                kept = rows.take(pa.array(np.arange(cut, rows.num_rows)))
                yield _Round(
                    rows=rows[:cut],
                    encoded=encoded[:cut],
                    starts=starts[starts < cut],
                    last_key_continues=last_key_continues,
                )
                held, count, size = [kept], kept.num_rows, kept.nbytes
                most_rows, most_bytes = ROUND_ROWS + count, ROUND_BYTES + size
            else:
                most_rows, most_bytes = 2 * most_rows, 2 * most_bytes
        if held:
            rows, encoded, starts = self._split(held)
            yield _Round(rows=rows, encoded=encoded, starts=starts, last_key_continues=False)

    def _split(self, held: list[pa.RecordBatch]) -> tuple[pa.RecordBatch, pa.Array, Any]:
        rows = one_batch(held)
        encoded = self._key_columns.encode(self._keys_of(rows))
        return rows, encoded, starts_of(encoded, rows.column("__kind").to_numpy())

    def _keys_of(self, rows: pa.RecordBatch) -> list[pa.Array]:
        return [rows.column(name) for name in key_columns(len(self._key_names))]

    def _run(self, round_: _Round) -> None:
        rows, encoded, starts = round_.rows, round_.encoded, round_.starts
        keys = pa.Table.from_arrays(self._keys_of(rows), names=self._key_names)
        groups = rows.column("__key_group").to_numpy()
        if len(starts) < len(encoded):
            first_rows = pa.array(starts)
            keys, encoded, groups = keys.take(first_rows), encoded.take(first_rows), groups[starts]
        self.keys += len(encoded) - round_.last_key_continues
        self._call(
            "handleBatch",
            groups.astype(np.uint16),
            encoded,
            keys=keys,
            rows=pa.Table.from_arrays(rows.column("__input").flatten(), names=self._input_names),
            row_offsets=np.append(starts, rows.num_rows).astype(np.int64),
            time=self._clock.now,
            last_key_continues=round_.last_key_continues,
        )

    def _call(self, handler: str, key_groups: Groups, encoded: pa.Array, **given: Any) -> None:
        """Call a handler for the given keys with their value states. Store the new state, and write the output."""
        say_part(f"{handler} of keys from key group {key_groups[0]} on" if len(key_groups) else handler)
        read = {name: columns.read(key_groups, encoded) for name, columns in self._states.items()}
        batch = KeyedBatch(
            states={name: table for name, (table, _) in read.items()},
            exists={name: exists for name, (_, exists) in read.items()},
            **given,
        )
        self._handle.begin(key_groups, encoded)
        with self._user_code.call(handler):
            result = getattr(self._processor, handler)(batch)
            self._check(result, len(encoded))
            for name, columns in self._states.items():
                cleared = result.cleared.get(name)
                if name in result.states:
                    columns.write(result.states[name], cleared)
                elif cleared is not None:
                    columns.clear(cleared)
            if result.output is not None and result.output.num_rows:
                self._output.write(self._output_table(result.output))
        self._handle.end()
        # A reference cycle in user code may keep the batch alive. Python starts its garbage collector by the number of
        # objects, and a batch is few objects with much memory. So the collector is called here.
        gc.collect(1)

    def _check(self, result: Any, keys: int) -> None:
        if not isinstance(result, BatchResult):
            raise ProcessorError(
                f"the method returned a {type(result).__name__}; it must return cairn.arrow_processor.BatchResult"
            )
        for what, given in (("states", result.states), ("cleared", result.cleared)):
            for name, rows in given.items():
                if name not in self._states:
                    raise ProcessorError(
                        f"BatchResult.{what} names {name!r}, but init() declared {', '.join(self._states) or 'no state'}"
                    )
                if len(rows) != keys:
                    raise ProcessorError(
                        f"BatchResult.{what}[{name!r}] has {len(rows)} rows for {keys} keys; it must have one row for each key"
                    )

    def _output_table(self, table: pa.Table) -> pa.Table:
        schema = self._output.schema
        if set(table.column_names) != set(schema.names):
            derives = type(self._processor).deriveOutputSchema is not ArrowProcessor.deriveOutputSchema
            hint = "\nThe processor derives its columns: leave out output_schema" if derives else ""
            raise ProcessorError(
                f"BatchResult.output has the columns {', '.join(table.column_names)}, but output_schema has {', '.join(schema.names)}; they must be the same{hint}"
            )
        columns = []
        for field in schema:
            column = table.column(field.name)
            instants = [of.tz is not None for of in (column.type, field.type) if pa.types.is_timestamp(of)]
            if self._zone is not UTC and sorted(instants) == [False, True] and column.null_count < len(column):
                done = "have no zone\nGive them their zone with pyarrow.compute.assume_timezone"
                if column.type.tz is not None:
                    done = "have a zone\nTake it away with pyarrow.compute.local_timestamp"
                raise ProcessorError(
                    f"output column {field.name!r} must be {field.type}, but BatchResult.output has {column.type}, whose times {done}"
                )
            try:
                column = column if column.type == field.type else column.cast(field.type)
            except pa.ArrowException as error:
                raise ProcessorError(
                    f"output column {field.name!r} must be {field.type}, but BatchResult.output has {column.type}: {error}"
                ) from error
            columns.append(no_nulls_if_none_may_be(field, column))
        return pa.Table.from_arrays(columns, schema=schema)

    def fire_timers(self) -> None:
        if self._clock.mode != "none":
            for due in self._handle.timers.due(self._clock.due_ms, ROUND_ROWS):
                keys = self._key_columns.decode(due.keys)
                self._call(
                    "handleExpiredTimers",
                    due.key_groups,
                    due.keys,
                    keys=pa.Table.from_arrays(keys, names=self._key_names),
                    # The runner later deletes the fired timers by the arrays in `due`. So the processor gets copies,
                    # which it may change.
                    rows=pa.table({EXPIRY: due.times_ms.copy()}),
                    row_offsets=due.offsets.copy(),
                    time=self._clock.expired,
                )
        self._handle.state = HandleState.TIMER_PROCESSED

    def close(self) -> None:
        with self._user_code.call("close"):
            self._processor.close()
        self._handle.state = HandleState.CLOSED
