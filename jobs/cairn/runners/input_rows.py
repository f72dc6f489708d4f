"""The input of one shard as keys with their rows, for the row and the pandas API.

At the start of a round, the state of the round's keys is read ahead in one go. A batch of the input is one round. If
the keys' state is large, the batch is several rounds. The rows of a key may continue in the next batch. The key's
handler still sees one lazy iterator. Rows that the handler does not read are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from cairn.rows.input_batches import InputBatches
from cairn.rows.routing import INITIAL, INPUT, key_columns
from cairn.runners.processor_handle import row_maker
from state_backend.formats.key_columns import KeyColumns
from state_backend.state.shard_state import ShardState
from state_backend.values.doing import say_part
from state_backend.values.errors import ProcessorError

# `Slices`: a function for one batch. Called with the positions at which the rows of one key start and end, it returns
# the items (rows or DataFrames) that the handler iterates over.
# `SlicesOf`: a function that makes the `Slices` of a batch. Its argument is the batch's struct column.
Slices = Callable[[int, int], Iterable[Any]]
SlicesOf = Callable[[pa.StructArray], Slices]
# A `Joined` takes the items of one key from several batches, and returns the items that the handler iterates over.
Joined = Callable[[Iterator[Any]], Iterator[Any]]
KeyValues = Callable[[pa.Array], Sequence[Any]]


class KeyedInput:
    """Iterator over the keys of a shard: it yields `(kind, key group, key, encoded key, items)`.

    The order is ascending by key group, then by key, then by kind. `kind` is `INITIAL` for rows of the initial state,
    or `INPUT` for input rows. A key with rows of both kinds comes twice. `items` yields the rows of this key and kind:
    PySpark rows, or DataFrames for the pandas API.

    The caller must use the items of one key before it asks for the next key.
    """

    def __init__(
        self,
        batches: InputBatches,
        encoder: KeyColumns,
        slices_of: dict[int, SlicesOf],
        state: ShardState,
        *,
        key_values: KeyValues = pa.Array.to_pylist,
        joined: Joined = iter,
        refused: Callable[[str], ProcessorError] = ProcessorError,
    ) -> None:
        self.keys = 0
        self._refused = refused
        self._key_values = key_values
        self._joined = joined
        self._batches = iter(batches)
        self._key_columns = encoder
        self._key_names = key_columns(len(encoder.schema.fields))
        self._slices_of = slices_of
        self._state = state
        # The keys of the current batch as (kind, key group, key, encoded key, start, end). Rows `start` to `end - 1`
        # are the key's rows of this kind: `INITIAL` for the initial state, `INPUT` for input rows.
        self._segments: list[tuple[int, int, tuple[Any, ...], bytes, int, int]] = []
        self._slices: dict[int, Slices] = {}
        self._at = 0
        # The state of the first `_fetched` entries of `_segments` has been read ahead. `_wanted` holds two arrays with
        # the key group and the encoded key of every entry of `_segments`, whether read ahead or not.
        self._fetched = 0
        self._wanted: tuple[Any, Any] = (None, None)

    def __iter__(self) -> Iterator[tuple[int, int, tuple[Any, ...], bytes, Iterator[Any]]]:
        while self._at < len(self._segments) or self._load():
            slices = self._slices
            last = len(self._segments) - 1
            while self._at < last:
                if self._at >= self._fetched:
                    self._fetch()
                round_end = min(self._fetched, last)
                for kind, key_group, key, encoded_key, start, end in self._segments[self._at : round_end]:
                    yield kind, key_group, key, encoded_key, iter(slices[kind](start, end))
                self._at = round_end
            if self._at >= self._fetched:
                self._fetch()
            # The rows of the batch's last key may continue in the next batch, so its items are read across batches.
            kind, key_group, key, encoded_key, start, end = self._segments[self._at]
            items = self._joined(self._across_batches(kind, encoded_key))
            yield kind, key_group, key, encoded_key, items
            for _ in items:
                pass

    def _across_batches(self, kind: int, encoded_key: bytes) -> Iterator[Any]:
        while True:
            *_, start, end = self._segments[self._at]
            self._at += 1
            yield from self._slices[kind](start, end)
            if self._at < len(self._segments) or not self._load():
                return
            if (self._segments[0][0], self._segments[0][3]) != (kind, encoded_key):
                return
            self.keys -= kind == INPUT  # `_load` has counted this key again, since its rows continue in the next batch.

    def _load(self) -> bool:
        """Read the next batch of rows, and make it the current one. Return False if there is none."""
        batch = next(self._batches, None)
        self._state.flush()
        self._at = self._fetched = 0
        if batch is None:
            self._segments, self._slices = [], {}
            return False
        try:
            self._segments = self._split(batch)
            kinds = Counter([segment[0] for segment in self._segments])
            self._slices = {kind: self._slices_of[kind](batch.column(_COLUMNS[kind])) for kind in kinds}
        except (ValueError, OverflowError) as error:
            raise self._unfit(batch, error) from error
        self.keys += kinds[INPUT]
        self._fetch()
        return True

    def _unfit(self, batch: pa.RecordBatch, error: Exception) -> Exception:
        """Return an error with column and key of the first value that can't be converted; else `error` itself."""
        kinds = batch.column("__kind").to_pylist()
        for at, kind in enumerate(kinds):
            rows = batch.column(_COLUMNS[kind]).slice(at, 1)
            for field, values in zip(rows.type, rows.flatten(), strict=True):
                try:
                    [*self._slices_of[kind](pa.StructArray.from_arrays([values], fields=[field]))(0, 1)]
                    self._key_values(values)
                except (ValueError, OverflowError):
                    key = ", ".join(_text(batch.column(name).slice(at, 1)) for name in self._key_names)
                    return self._refused(f"input column {field.name!r}, value {_text(values)}, key ({key})")
        return error

    def _fetch(self) -> None:
        """Read the state of the next keys ahead: all keys of the batch, or fewer if their state is large."""
        self._state.flush()
        groups, encoded = self._wanted
        say_part(f"processing keys from key group {groups[self._fetched]} on")
        self._fetched += self._state.prefetch(groups[self._fetched :], encoded[self._fetched :])

    def _split(self, batch: pa.RecordBatch) -> list[tuple[int, int, tuple[Any, ...], bytes, int, int]]:
        keys = [batch.column(name) for name in self._key_names]
        encoded = self._key_columns.encode(keys)
        kinds = batch.column("__kind").to_numpy()
        starts = starts_of(encoded, kinds)
        ends = [*starts[1:].tolist(), len(encoded)]
        if len(starts) < len(encoded):
            keys = [column.take(pa.array(starts)) for column in keys]
            encoded = encoded.take(pa.array(starts))
        groups = batch.column("__key_group").to_numpy()[starts]
        self._wanted = groups, encoded
        return list(
            zip(
                kinds[starts].tolist(),
                groups.tolist(),
                zip(*[self._key_values(column) for column in keys], strict=True),
                encoded.to_pylist(),
                starts.tolist(),
                ends,
                strict=True,
            )
        )


_COLUMNS = {INPUT: "__input", INITIAL: "__initial"}


def _text(values: pa.Array) -> str:
    """Return the only value of an array as Arrow writes it, or the name of its type if Arrow has no text for it."""
    try:
        return str(values[0].cast(pa.string()))
    except pa.ArrowException:
        return f"of the type {values.type}"


def starts_of(encoded: pa.Array, kinds: Any) -> Any:
    """Return the positions of the rows at which another key or kind begins, from 0. `encoded`: Each row's key."""
    changed = pc.not_equal(encoded[1:], encoded[:-1]).to_numpy(zero_copy_only=False) | (kinds[1:] != kinds[:-1])
    return np.concatenate([[0], np.flatnonzero(changed) + 1])


def row_slices(schema: StructType) -> SlicesOf:
    """Return a function that converts a batch's struct column, and returns PySpark rows for a range of positions.

    The values have the Python types that Spark's `transformWithState` gives: instants with a zone, maps as lists of
    pairs, and nested structs as dicts.
    """
    make = row_maker(schema.names)

    def slices_of(column: pa.StructArray) -> Slices:
        rows = list(map(make, zip(*[python_values(values) for values in column.flatten()], strict=True)))
        return lambda start, end: rows[start:end]

    return slices_of


def python_values(column: pa.Array) -> list[Any]:
    """Return the same values as `column.to_pylist()`.

    For timestamps in UTC or without a zone, this function takes only a third of the time of `to_pylist`.
    """
    kind = column.type
    if not pa.types.is_timestamp(kind) or kind.unit != "us" or kind.tz not in (None, "UTC"):
        return column.to_pylist()  # type: ignore[no-any-return]
    some = column.drop_null()
    bounds = pc.min_max(some.cast(pa.int64()))
    if not len(some) or bounds["min"].as_py() < _FIRST_US or bounds["max"].as_py() > _LAST_US:
        return column.to_pylist()  # type: ignore[no-any-return]
    naive: list[Any] = column.to_numpy(zero_copy_only=False).astype(object).tolist()
    if kind.tz is None:
        return naive
    zone = some[0].as_py().tzinfo
    return [None if at is None else at.replace(tzinfo=zone) for at in naive]


# The range of Python's datetime, in microseconds since the epoch. Outside this range, NumPy would return integers.
_FIRST_US = (datetime.min - datetime(1970, 1, 1)) // timedelta(microseconds=1)
_LAST_US = (datetime.max - datetime(1970, 1, 1)) // timedelta(microseconds=1)
