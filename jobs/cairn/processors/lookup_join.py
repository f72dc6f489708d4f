"""A ready-made processor that joins facts with the version of a table that was valid at the fact's time."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pyspark.sql.types import BooleanType, StructType

from cairn.arrow_processor import BatchResult, KeyedBatch
from cairn.numpy_columns import Bools, Int64s, booleans
from cairn.processors.ready_made import ReadyMade, ceil_ms, check_choice, check_deleted, made_with
from cairn.processors.two_inputs import (
    NO_TIME,
    SideRows,
    check_kinds,
    earliest,
    held_rows,
    no_rows,
    output_rows,
    output_schema,
    positions,
    register_first,
    remove_rows,
    sides_of,
    split_sides,
)
from cairn.spark_versions import to_arrow_schema
from state_backend.values.errors import UsageError

STATES = ("facts", "versions")


class LookupJoin(ReadyMade):
    """Processor that adds to each fact the version of a table that was valid at the fact's event time.

    A row of the table is a version: it is valid from its event time until the next version of its key. A later row with
    the same key and event time replaces the earlier row. The source returns facts and versions as one input, as
    `union_by_kind` does.

    The output has the key columns, the columns of the fact, and those of the version. A fact is emitted once, in the
    interval in which the watermark passes its event time. So versions may be late by the pipeline's `watermark_delay`.

    As in SQL, a row with a null in its key or its event time matches nothing.

    The state `facts` is a list of the facts that wait for the watermark. The state `versions` is a list of each key's
    versions: those after the watermark, and the last one before it.

    Attributes:
        facts: The value of the column `kind` in facts.
        table: The value of the column `kind` in versions of the table.
        how: "left" emits a fact without version too, with nulls for the version. "inner" leaves such facts out.
        deleted: A boolean column of the table's rows; True in it deletes the key from the row's event time on. It is
            not in the output. None: no row deletes.

    Example:
        class PricedSales(LookupJoin):
            facts, table = "sale", "price"
            deleted = "price_is_deleted"
    """

    settings: ClassVar[tuple[str, ...]] = ("facts", "table", "how", "deleted")
    column_settings: ClassVar[tuple[str, ...]] = ("deleted",)
    facts: str
    table: str
    how: Literal["left", "inner"] = "left"
    deleted: str | None = None

    @classmethod
    def check_settings(cls) -> None:
        check_kinds(cls, "facts", "table")
        check_choice(cls, "how", ("left", "inner"))
        check_deleted(cls, f"{cls.table}_is_deleted")

    def init(self, handle: Any) -> None:
        self._schema = to_arrow_schema(self.deriveOutputSchema(handle))
        self._handle = handle
        self._sides = sides_of(type(self).__name__, "LookupJoin", handle, (self.facts, self.table))
        self._no_version = no_rows(self._sides[1])
        self._facts, self._versions = (
            handle.getListState(name, made_with(self, ("facts", "table"), list(side.fields)))
            for name, side in zip(STATES, self._sides, strict=True)
        )

    def deriveOutputSchema(self, handle: Any) -> StructType:
        self.check_settings()
        owner = type(self).__name__
        sides = sides_of(owner, "LookupJoin", handle, (self.facts, self.table))
        self._deleted = None if self.deleted is None else sides[1].columns.get(self.deleted, "")
        types = {field.name: field.dataType for field in sides[1].fields}
        if self._deleted is not None and not isinstance(types.get(self._deleted), BooleanType):
            found = (
                f"which is {types[self._deleted].simpleString()}" if self._deleted in types else "which the table lacks"
            )
            raise UsageError(
                f"{owner}.deleted names column {self.deleted!r}, {found}; name a boolean column of the table: one of the input's columns {', '.join(sides[1].columns)}"
            )
        return output_schema(handle, sides, without=self._deleted)

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        (facts, unmatched), (versions, _) = split_sides(
            type(self).__name__, batch, self._handle.event_time, self._sides
        )
        keys = batch.keys.num_rows
        begins = np.zeros(len(versions.owners), np.bool_)
        begins[np.unique(versions.owners, return_index=True)[1]] = True
        begins &= ~self._versions.exists()[versions.owners]
        self._facts.appendList(facts.owners, facts.rows)
        self._versions.appendList(versions.owners, versions.rows)
        # A key's only version stays in the state. A further version or a deletion makes older versions removable, and
        # needs a timer for that.
        timed = ~begins | self._deletions(versions)
        first = earliest(keys, (facts.owners, facts.times), (versions.owners[timed], versions.times[timed]))
        self._set_timers(first)
        if self.how == "inner" or not len(unmatched.owners):
            return BatchResult()
        return BatchResult(output=self._output(batch, unmatched, self._no_version, np.full(len(unmatched.owners), -1)))

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        """Emit the facts that the watermark has passed, and remove the versions that no later fact needs."""
        keys, watermark_ms = batch.keys.num_rows, batch.time.getCurrentWatermarkInMs()
        facts = held_rows(self._facts.get(), self._sides[0])
        versions = held_rows(self._versions.get(), self._sides[1])
        due = ceil_ms(facts.times) <= watermark_ms
        passed, waiting = facts.chosen(due), facts.chosen(~due)
        order, (behind,) = positions(versions.owners, versions.times, [(passed.owners, passed.times, "right")])
        of_key, times, deletes = versions.owners[order], versions.times[order], self._deletions(versions)[order]
        before = np.maximum(behind - 1, 0)
        found = behind > 0
        if len(order):
            found &= (of_key[before] == passed.owners) & ~deletes[before]
            at = np.where(found, order[before], -1)
        else:
            at = np.full(len(passed.owners), -1)
        if self.how == "inner":
            passed, at = passed.chosen(found), at[found]
        output = self._output(batch, passed, versions, at)
        remove_rows(self._facts, facts, due)
        next_of_key = np.append(of_key[1:] == of_key[:-1], [False]) if len(order) else np.zeros(0, np.bool_)
        settled = ceil_ms(times) <= watermark_ms
        next_settled = np.append(settled[1:], [False])[: len(order)] & next_of_key
        same = np.append(np.diff(times) == 0, [False])[: len(order)] & next_of_key
        gone = same | (settled & (next_settled | deletes))
        unneeded = np.zeros(len(order), np.bool_)
        unneeded[order] = gone
        remove_rows(self._versions, versions, unneeded)
        kept = ~gone
        many = np.bincount(of_key[kept], minlength=keys)[of_key] > 1
        timed = kept & ~settled & (many | deletes)
        first = earliest(keys, (waiting.owners, waiting.times), (of_key[timed], times[timed]))
        register_first(self._handle, first)
        return BatchResult(output=output)

    def _set_timers(self, first: Int64s) -> None:
        """Leave one timer for each key, at the earliest of its timers and of the time `first`, in microseconds.

        The rows of a key may come in several batches. With a timer for each batch, the state would depend on how the
        rows are split into batches.
        """
        due = np.flatnonzero(first < NO_TIME)
        wanted = ceil_ms(first[due])
        old = self._handle.listTimers(due)
        keys, times = old.key_of_row, np.asarray(old.rows["expiry_ms"])
        np.minimum.at(wanted, keys, times)
        later = times > wanted[keys]
        self._handle.deleteTimer(due[keys[later]], times[later])
        self._handle.registerTimer(due, wanted)

    def _deletions(self, versions: SideRows) -> Bools:
        if self._deleted is None:
            return np.zeros(len(versions.owners), np.bool_)
        return booleans(versions.rows[self._deleted])

    def _output(self, batch: KeyedBatch, facts: SideRows, versions: SideRows, at: Int64s) -> Any:
        parts = [(self._sides[0], facts.rows, np.arange(len(facts.owners))), (self._sides[1], versions.rows, at)]
        return output_rows(batch, facts.owners, parts, self._schema)
