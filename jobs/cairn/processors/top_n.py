"""A ready-made processor that keeps the best rows of each key."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from cairn.aggregates.state_fields import check_ttl, nullable
from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import array_of, whole
from cairn.processors.ordering import check_order, order_codes, order_columns
from cairn.processors.ready_made import (
    ChangedKeys,
    ReadyMade,
    check_choice,
    check_free,
    fields_beside_key,
    keys_at,
    made_with,
    wrong_setting,
)
from state_backend.values.errors import UsageError

STATE = "top"
RANK = "rank"


class TopN(ReadyMade):
    """Processor that emits the first rows of each key in an order.

    In each interval, the output has all best rows of each key whose best rows changed: the columns of the input, and
    the `rank`. A sink that replaces all rows of the key keeps a table of the best rows.

    Rows come interval by interval, and within an interval in the order of the pipeline's `order_by`. Of rows that are
    equal in `order`, an earlier row is better.

    The state `top` is a list of each key's best rows, the best first.

    Attributes:
        n: Number of best rows per key, from 1 to 10,000.
        order: One or more columns, such as "score desc" or ("score desc", "at"). Nulls come first; with desc, last.
        ties: "first" keeps at most `n` rows and numbers them: SQL's ROW_NUMBER. "all" also keeps all rows that are
            equal to the n-th row in `order`, and gives equal rows an equal rank: SQL's RANK.
        ttl_ms: Time to live of a key's best rows, in milliseconds. Each change of these rows starts it again. After
            this time without a change, Cairn forgets the best rows of the key. None keeps them for ever.

    Example:
        class BestScores(TopN):
            n = 3
            order = "score desc"
    """

    settings: ClassVar[tuple[str, ...]] = ("n", "order", "ties", "ttl_ms")
    column_settings: ClassVar[tuple[str, ...]] = ("order",)
    n: int
    order: str | tuple[str, ...]
    ties: Literal["first", "all"] = "first"
    ttl_ms: int | None = None

    @classmethod
    def check_settings(cls) -> None:
        for name, example in (("n", "n = 3"), ("order", 'order = "score desc"')):
            if not hasattr(cls, name):
                raise wrong_setting(cls, name, f"write {example}")
        if type(cls.n) is not int or not 1 <= cls.n <= 10_000:
            raise wrong_setting(cls, "n", "write a whole number from 1 to 10,000, as in n = 3")
        order_columns(cls.__name__, "order", cls.order)
        check_choice(cls, "ties", ("first", "all"))
        check_ttl(cls.__name__, cls.ttl_ms)

    @classmethod
    def check_pipeline(cls, pipeline: Any) -> None:
        super().check_pipeline(pipeline)
        check_ttl(cls.__name__, cls.ttl_ms, pipeline)

    def init(self, handle: Any) -> None:
        self.check_settings()
        owner = type(self).__name__
        check_free(owner, RANK, handle.input_schema.names, "TopN")
        self._changed = ChangedKeys()
        self._order = order_columns(owner, "order", self.order)
        check_order(owner, "order", self._order, handle)
        in_key = [column.name for column in self._order if column.name in handle.key_schema.names]
        if in_key:
            raise UsageError(
                f"{owner}.order names the key column {in_key[0]!r}, which is equal in all rows of a key; leave it out"
            )
        row = fields_beside_key(handle)
        self._names = [f.name for f in row]
        self._top = handle.getListState(STATE, made_with(self, ("order",), row), self.ttl_ms)

    def deriveOutputSchema(self, handle: Any) -> StructType:
        check_free(type(self).__name__, RANK, handle.input_schema.names, "TopN")
        return StructType([*nullable(handle.input_schema), StructField(RANK, LongType())])

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        held = self._top.get()
        owners = np.concatenate([held.key_of_row, batch.key_of_row])
        columns = {name: self._join(held.rows[name], batch.rows[name]) for name in self._names}
        codes = order_codes(self._order, [columns[column.name] for column in self._order])
        order = np.lexsort((codes, owners))
        of_key, of_rank = owners[order], codes[order]
        places = np.arange(len(order))
        begins = np.diff(of_key, prepend=-1) != 0
        if self.ties == "all":
            differs = begins.copy()
            differs[1:] |= np.diff(of_rank) != 0
            places_of_rank = np.maximum.accumulate(np.where(differs, places, 0))
        else:
            places_of_rank = places
        ranks = places_of_rank - np.maximum.accumulate(np.where(begins, places, 0)) + 1
        best = ranks <= self.n
        chosen, of_key, ranks = order[best], of_key[best], ranks[best]
        changed = np.zeros(batch.keys.num_rows, np.bool_)
        changed[of_key[chosen >= len(held.rows)]] = True
        new = changed[of_key]
        self._top.put(of_key[new], pa.table({name: columns[name].take(pa.array(chosen[new])) for name in self._names}))
        put_out = self._changed.select_changed(batch, changed)[of_key]
        rows = pa.array(chosen[put_out])
        output = keys_at(batch, of_key[put_out]) | {name: columns[name].take(rows) for name in self._names}
        output[RANK] = array_of(ranks[put_out].astype(np.int64), pa.int64())
        return BatchResult(output=pa.table(output))

    @staticmethod
    def _join(old: pa.ChunkedArray, new: pa.ChunkedArray) -> pa.Array:
        return pa.concat_arrays([whole(old).cast(new.type), whole(new)])
