"""Evaluate a pipeline's expectations on the states of a checkpoint, and on their changes since the base checkpoint.

A state that fits into memory is read into Arrow tables in this process. Spark reads any other state, and a state with
an expectation that `arrow_conditions` can't evaluate. Both ways give the same checks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from cairn.change_expectations import ChangeExpectations
from cairn.operations.validation import arrow_tables, state_tables
from cairn.operations.validation.arrow_conditions import find_unsupported
from cairn.operations.validation.checks import Check
from cairn.operations.validation.expectation_suites import OVER_TIME, Rows, Suites, Table, over_changes, read_declared
from cairn.operations.validation.row_json import has_json
from cairn.pipeline import Pipeline
from cairn.spark.session import SessionOnDemand, open_now, zone_of_session
from cairn.spark_versions import from_arrow_schema
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import table_schema
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.records import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("cairn")


@dataclass(frozen=True, slots=True)
class Declared:
    """The expectations of a pipeline that are evaluated."""

    suites: Mapping[str, Sequence[Any]]  # By state: the expectations on the state.
    over_time: Mapping[str, ChangeExpectations]  # By state: the expectations on its changes since the base.

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.suites, *self.over_time]))


@frozen
class Compared:
    """The checkpoint whose expectations are evaluated, and its base."""

    now: StateSource
    # The base; None if it is not retained, or if no expectation needs the base.
    before: StateSource | None

    def base_of(self, state: str, over_time: ChangeExpectations | None) -> StateSource | None:
        """Return the base if a state is compared with it; else None, also if the base does not have the state yet."""
        if over_time is None or self.before is None:
            return None
        known = {TIMERS_NAME, *(d.name for d in self.before.content.states)}
        return self.before if state in known else None


class StateTables(Protocol):
    @property
    def identity(self) -> tuple[str, ...]:
        """Names of the columns that identify a row."""

    def flat(self) -> Any:
        """Return the state as a table with a column for each field of key, user key and value."""

    def rows_before(self) -> int:
        """Return the number of rows of the base's state."""

    def changes(self, now_ms: int, removable: str | None) -> Any:
        """Return the table of changes since the base: the rows of both states, joined (`state_tables.pairs`)."""


# A function of (state, whether the base's table is needed). It returns the kind of the state's tables, and the tables.
EngineOf = Callable[[str, bool], tuple[Rows, AbstractContextManager[StateTables]]]


@frozen
class Evaluated:
    checks: tuple[Check, ...]
    counts: Mapping[str, tuple[int, int]]  # By state: numbers of evaluated and failed expectations.
    pages: Mapping[str, str]  # By table: path of its page in Great Expectations' Data Docs.


def evaluate(
    pipeline: Pipeline, rules: Declared, compared: Compared, engine_of: EngineOf, *, run_name: str, docs: Path | None
) -> Evaluated:
    suites = Suites(pipeline, run_name, docs)
    for state in rules.states:
        over_time = rules.over_time.get(state)
        base = compared.base_of(state, over_time)
        if base is None and over_time is not None and compared.before is not None:
            log.info("state %r is new: the base does not have it, so ChangeExpectations is not evaluated", state)
        rows, opened = engine_of(state, base is not None)
        with opened as tables:
            expectations = list(rules.suites.get(state, ()))
            if over_time is not None and base is not None:
                expectations += _growth(over_time, tables, base.checkpoint_id)
            with_expectations = [Table("", tables.flat(), tables.identity, expectations)]
            if over_time is not None and base is not None and over_time.needs_pairs:
                time = compared.now.content.time
                # Timers leave the state when they fire. All other rows leave it when they expire, by processing time.
                now_ms = time.fired_until_ms if state == TIMERS_NAME else time.processing_time_ms
                changes = tables.changes(now_ms, over_time.removable)
                with_expectations.append(Table(OVER_TIME, changes, tables.identity, over_changes(over_time)))
            suites.run(state, with_expectations, rows)
    return Evaluated(checks=tuple(suites.checks), counts=suites.counts, pages=suites.build_docs())


def _growth(over_time: ChangeExpectations, tables: StateTables, base_id: int) -> Iterator[Any]:
    """Yield an expectation of Great Expectations that limits the rows of the new state; yield nothing without limits.

    Great Expectations evaluates the limits itself, so that the Data Docs show the numbers.
    """
    if over_time.least_rows is None and over_time.most_rows is None:
        return
    import great_expectations.expectations as gxe

    rows = tables.rows_before()
    yield gxe.ExpectTableRowCountToBeBetween(
        min_value=None if over_time.least_rows is None else math.ceil(rows * over_time.least_rows),
        max_value=None if over_time.most_rows is None else math.floor(rows * over_time.most_rows),
        meta={"notes": f"checkpoint {base_id}, the base, has {rows} rows"},
    )


class SparkState:
    """The tables of one state as Spark DataFrames, which are cached until `close`."""

    def __init__(self, now: DataFrame, before: DataFrame | None) -> None:
        self.now, self.before = now.cache(), before.cache() if before is not None else None
        self._held = [frame for frame in (self.now, self.before) if frame is not None]
        self.identity = (*state_tables.identity_of(now),)

    def flat(self) -> DataFrame:
        return state_tables.flat(self.now)

    def rows_before(self) -> int:
        assert self.before is not None
        return int(self.before.count())

    def changes(self, now_ms: int, removable: str | None) -> DataFrame:
        assert self.before is not None
        self._held.append(state_tables.pairs(self.before, self.now, now_ms=now_ms, removable=removable).cache())
        return self._held[-1]

    def close(self) -> None:
        for frame in self._held:
            frame.unpersist()


@frozen
class ArrowState:
    """The tables of one state as Arrow tables."""

    now: pa.Table
    # The same state in the base; None if the base lacks the state or no expectation compares with the base.
    before: pa.Table | None
    zone: str  # The session's time zone, for instants in the JSON of keys.
    # A function of (SQL condition, table) that returns which rows the condition selects; None without Spark.
    selects: Callable[[str, pa.Table], pa.Array] | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        return arrow_tables.identity_of(self.now.schema)

    def flat(self) -> pa.Table:
        return arrow_tables.flat(self.now)

    def rows_before(self) -> int:
        assert self.before is not None
        return int(self.before.num_rows)

    def changes(self, now_ms: int, removable: str | None) -> pa.Table:
        assert self.before is not None
        may = None
        if removable is not None:
            assert self.selects is not None, "needs_spark refuses `removable` without Spark"
            may = partial(self.selects, removable)
        return arrow_tables.pairs(self.before, self.now, now_ms=now_ms, removable=may, zone=self.zone)


def needs_spark(
    state: str, expectations: Sequence[Any], over_time: ChangeExpectations | None, compared: Compared, *, selects: bool
) -> str | None:
    base = compared.base_of(state, over_time)
    now = table_schema(compared.now, state)
    before = now if base is None else table_schema(base, state)
    tables = ArrowState(now=now.empty_table(), before=before.empty_table(), zone="UTC")
    schema, identity = tables.flat().schema, tables.identity
    if len({*schema.names}) < len(schema):
        return "two columns have the same name"
    if odd := [name for name in identity if not has_json(schema.field(name).type)]:
        return f"column {odd[0]} is {schema.field(odd[0]).type}"
    reasons = [find_unsupported(e.configuration.type, e.configuration.kwargs, schema) for e in expectations]
    if over_time is not None and base is not None and over_time.needs_pairs:
        if over_time.removable is not None and not selects:
            return "removable is an SQL condition"
        of_base = arrow_tables.flat(before.empty_table()).schema
        if [of_base.field(name).type for name in identity] != [schema.field(name).type for name in identity]:
            return "the types of the key have changed"
        changes = tables.changes(0, None).schema
        if len({*changes.names}) < len(changes):
            return "two columns of the table of changes have the same name"
        reasons += [
            find_unsupported(e.configuration.type, e.configuration.kwargs, changes) for e in over_changes(over_time)
        ]
    return next((reason for reason in reasons if reason is not None), None)


def read_compared(
    states: Mapping[str, int], rules: Declared, compared: Compared, *, zone: str, most_bytes: int | None = None
) -> dict[str, ArrowState] | None:
    """Return the tables of states, with those of the base for states that `rules` compare with the base.

    Return None if they would take more than `most_bytes` in all. `states`: The number of entries of each state.
    """
    now = arrow_tables.read_states(compared.now, states, most_bytes)
    if now is None:
        return None
    with_base = {s: n for s, n in states.items() if compared.base_of(s, rules.over_time.get(s)) is not None}
    before: dict[str, pa.Table] | None = {}
    if with_base and compared.before is not None:
        left = None if most_bytes is None else most_bytes - sum(table.nbytes for table in now.values())
        before = arrow_tables.read_states(compared.before, with_base, left)
    if before is None:
        return None
    return {state: ArrowState(now=table, before=before.get(state), zone=zone) for state, table in now.items()}


def try_expectations(
    pipeline: Pipeline,
    url: str,
    record: Record,
    base: Record | None,
    *,
    zone: str,
    spark: SparkSession | None,
    who: str,
) -> tuple[Check, ...]:
    """Evaluate a pipeline's expectations on a checkpoint that this process reads. Store no rows, and mark nothing.

    `base`: The base's record; None skips expectations on changes. `spark`: None evaluates with Arrow, and raises
    `UsageError` for an expectation that needs Spark. `who`: Begins messages.
    """
    now = StateSource.of_record(url, record)
    compared = Compared(now=now, before=None if base is None else StateSource.of_record(url, base))
    names = [*(d.name for d in record.content.states), TIMERS_NAME]
    rules = Declared(*read_declared(pipeline, names, with_base=base is not None))
    for state in rules.states if spark is None else ():
        expectations, over_time = rules.suites.get(state, ()), rules.over_time.get(state)
        if (reason := needs_spark(state, expectations, over_time, compared, selects=False)) is not None:
            raise UsageError(
                f"{who}: the expectations of state {state!r} can't be evaluated without Spark: {reason}\n"
                "Pass a session: validate(spark=...)"
            )
    # The size is not limited. So the numbers of entries, from which it would be estimated, are 0.
    tables = read_compared(dict.fromkeys(rules.states, 0), rules, compared, zone=zone) or {}
    stored: dict[str, Any] = {"root": None, "attempt": record.content.attempt}

    def engine_of(state: str, with_base: bool) -> tuple[Rows, AbstractContextManager[StateTables]]:
        if spark is None:
            return _arrow_rows(zone, stored), nullcontext(tables[state])
        return _spark_rows(stored), _on_spark(spark, tables[state])

    return evaluate(pipeline, rules, compared, engine_of, run_name=who, docs=None).checks


def _arrow_rows(zone: str, stored: Mapping[str, Any]) -> Rows:
    from cairn.operations.validation.arrow_rows import ArrowRows

    return ArrowRows(zone=zone, **stored)


def _spark_rows(stored: Mapping[str, Any]) -> Rows:
    from cairn.operations.validation.failing_rows import SparkRows

    return SparkRows(**stored)


def _on_spark(spark: SparkSession, tables: ArrowState) -> AbstractContextManager[SparkState]:
    before = None if tables.before is None else _frame(spark, tables.before)
    return closing(SparkState(_frame(spark, tables.now), before))


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Return an Arrow table as a DataFrame. If no schema were given, Spark would take wall times for instants."""
    return spark.createDataFrame(table, from_arrow_schema(table.schema))


class Engines:
    """Callable that returns a state's tables (`EngineOf`): Arrow tables if Arrow and memory suffice, else Spark's."""

    def __init__(
        self,
        spark: SparkSession | SessionOnDemand,
        rules: Declared,
        compared: Compared,
        *,
        options: tuple[Mapping[str, str], Mapping[str, str]],
        entries: Mapping[str, int],
        most_bytes: int,
        root: str | None,
    ) -> None:
        self._spark, self._options = spark, options
        self._stored: dict[str, Any] = {
            "root": root,
            "attempt": compared.now.content.attempt,
            "not_stored": "the rows are not stored, because a savepoint is read-only",
        }
        self._zone = zone_of_session(spark)
        self._in_memory = self._read(rules, compared, entries, most_bytes)

    def _read(
        self, rules: Declared, compared: Compared, entries: Mapping[str, int], most_bytes: int
    ) -> dict[str, ArrowState]:
        states = {}
        for state in rules.states if most_bytes else ():
            expectations, over_time = rules.suites.get(state, ()), rules.over_time.get(state)
            if (reason := needs_spark(state, expectations, over_time, compared, selects=True)) is None:
                states[state] = entries[state]
            else:
                log.info("Spark evaluates the expectations of state %r: %s", state, reason)
        found = read_compared(states, rules, compared, zone=self._zone, most_bytes=most_bytes) if states else {}
        if found is None:
            log.info("Spark evaluates the expectations: the states need more than %d bytes of memory", most_bytes)
        return {s: replace(tables, selects=partial(_select, self._spark)) for s, tables in (found or {}).items()}

    def __call__(self, state: str, with_base: bool) -> tuple[Rows, AbstractContextManager[StateTables]]:
        if (tables := self._in_memory.pop(state, None)) is not None:
            return _arrow_rows(self._zone, self._stored), nullcontext(tables)
        spark = open_now(self._spark)
        now, before = (
            state_tables.state_table(spark, options, state) if wanted else None
            for options, wanted in zip(self._options, (True, with_base), strict=True)
        )
        assert now is not None
        return _spark_rows(self._stored), closing(SparkState(now, before))


def _select(spark: SparkSession | SessionOnDemand, condition: str, table: pa.Table) -> pa.Array:
    """Return a boolean column that tells which rows of a table an SQL condition selects."""
    from pyspark.sql import functions as F

    frame = _frame(open_now(spark), table).select(F.expr(condition).alias("selected"))
    return frame.toArrow()["selected"].combine_chunks()
