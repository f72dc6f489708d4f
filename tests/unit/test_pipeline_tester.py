"""`PipelineTester`: what a user's tests see. That it equals Spark is in tests/integration/test_pipeline_tester.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from cairn.aggregates import Count, RunningAggregate
from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch
from cairn.change_expectations import ChangeExpectations
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.operations.output_files import output_files
from cairn.pipeline import Interval, Pipeline
from cairn.rows import local_rows
from cairn.rows.input_batches import InputBatches
from cairn.runners.arrow_states import ArrowListState
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import (
    ProcessorError,
    SourceError,
    StaleStateError,
    StateGapError,
    StateSchemaError,
    StateUnusable,
    UsageError,
    UserCodeError,
)
from tests.support.bare_pipeline import bare_pipeline
from tests.support.counting import INPUT_SCHEMA, counting

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = "user string, n int, at timestamp"


class Visits(StatefulProcessor):
    """Counts rows; a timer at the hour after a row's own forgets the user. n = -1 fails."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "rows long", 7_200_000 if TTL else None)
        self._pages = handle.getMapState("pages", "n int", "rows long")
        self._all = handle.getListState("all", "n int")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._count.update((initialState.rows,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        for row in rows:
            if row.n == -1:
                raise ValueError("minus one")
            count += 1
            self._pages.updateValue((row.n,), (count,))
            self._all.appendValue((row.n,))
            if row.at is not None:
                self._handle.registerTimer(round(row.at.timestamp() * 1000) + 3_600_000)
        self._count.update((count,))
        yield Row(user=key[0], rows=count, first=count == 1)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self._count.clear()
        yield Row(user=key[0], rows=0, first=None)


TTL = False


class FrameVisits(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "rows long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        (count,) = self._count.get() or (0,)
        count += sum(map(len, rows))
        self._count.update((count,))
        yield pd.DataFrame({"user": [key[0]], "rows": [count], "first": [count == 1]})


class ColumnVisits(RunningAggregate):
    rows = Count()


def no_source(spark: Any, interval: Interval) -> Any:
    raise AssertionError("the tester never reads the source")


VISITS = bare_pipeline(
    Visits,
    name="visits",
    source=no_source,
    key=["user"],
    output_schema="user string, rows long, first boolean",
    order_by=["n"],
)
EVENT = replace(
    VISITS, time_mode="event", event_time="at", watermark_delay=timedelta(0), watermark="interval", order_by=()
)


def visiting(pipeline: Pipeline = VISITS, **more: Any) -> PipelineTester:
    return PipelineTester(pipeline, input_schema=SCHEMA, **more)


def counts(tester: PipelineTester) -> dict[str | None, int]:
    return {row["key_user"]: row["rows"] for row in tester.state("count")}


def test_output_and_state_are_rows() -> None:
    tester = visiting()
    first = tester.run([("bob", 2, None), ("ann", 1, None), {"user": None, "n": 3}, Row(user="ann", n=0, at=None)])
    assert first.interval == Interval(START, START + HOUR)
    assert sorted(map(repr, first.output)) == [
        "{'user': 'ann', 'rows': 2, 'first': False}",
        "{'user': 'bob', 'rows': 1, 'first': True}",
        "{'user': None, 'rows': 1, 'first': True}",
    ]
    assert first.frame()["rows"].sum() == first.input_rows == 4
    assert tester.state("count") == [
        {"key_user": None, "rows": 1},
        {"key_user": "ann", "rows": 2},
        {"key_user": "bob", "rows": 1},
    ]
    assert tester.state("pages")[1] == {"key_user": "ann", "user_key_n": 0, "rows": 1}
    assert [(r["key_user"], r["pos"], r["n"]) for r in tester.state("all")][1:3] == [("ann", 0, 0), ("ann", 1, 1)]
    with pytest.raises(
        UsageError, match=r"no state 'cont'\nDid you mean 'count'\?\nIts states: count, pages, all, \$timers"
    ):
        tester.state("cont")


@pytest.mark.parametrize(
    "rows",
    [
        pd.DataFrame({"user": ["ann", None], "n": [1, None], "at": pd.to_datetime(["2024-01-01 00:30", None])}),
        pa.table({"user": ["ann", None], "n": [1, None], "at": [datetime(2024, 1, 1, 0, 30), None]}),
        [("ann", 1, datetime(2024, 1, 1, 0, 30)), (None, None, None)],
        [{"user": "ann", "n": 1, "at": datetime(2024, 1, 1, 1, 30, tzinfo=UTC) - HOUR}, {}],
    ],
)
def test_rows_may_come_in_any_form(rows: Any) -> None:
    tester = visiting()
    tester.run(rows)
    assert counts(tester) == {"ann": 1, None: 1}
    assert tester.timers() == [{"key_user": "ann", "expires_at": START + timedelta(minutes=90)}]


def test_an_input_may_have_no_column_but_the_key() -> None:
    class Seen(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self._n = handle.getValueState("n", "n long")

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            n = (self._n.get() or (0,))[0] + sum(1 for _ in rows)
            self._n.update((n,))
            yield Row(user=key[0], n=n)

    pipeline = bare_pipeline(Seen, key=["user"], output_schema="user string, n long")
    rows = PipelineTester(pipeline, input_schema="user string").run([("ann",), ("bob",), ("ann",)]).output
    assert sorted(row["n"] for row in rows) == [1, 2]


@pytest.mark.parametrize("deployed", [False, True])
def test_a_naive_datetime_is_wall_time_in_the_zone_of_the_session_or_the_deployed_pipeline(deployed: bool) -> None:
    tester = visiting(time_zone="UTC" if deployed else "Europe/Berlin")
    tester.deploy(replace(VISITS, time_zone="Europe/Berlin" if deployed else None))
    tester.run([("ann", 1, datetime(2024, 1, 1, 1, 30))])
    assert tester.timers() == [{"key_user": "ann", "expires_at": START + timedelta(minutes=90)}]


class LastSeen(StatefulProcessor):
    """Yields what its state gave: an instant, wall time without a zone, and instants in a struct, a list and a map."""

    frames = False

    def init(self, handle: Any) -> None:
        self._last = handle.getValueState("last", "at timestamp, wall timestamp_ntz")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            at = row["at"][0] if self.frames else row.at
            self._last.update((at, datetime(2024, 7, 1, 2, 30)))
        at, wall = self._last.get()
        if self.frames:
            yield pd.DataFrame({"user": [key[0]], "at": [at], "wall": [wall]})
        else:
            yield Row(user=key[0], at=at, wall=wall, deep=Row(of=[at], by={"k": at}, pairs=[(at, 1)]))


class LastSeenInFrames(LastSeen):
    frames = True


@pytest.mark.parametrize("zone", ["Europe/Vienna", "UTC"])
@pytest.mark.parametrize("own", [True, False], ids=["the pipeline's zone", "the session's"])
@pytest.mark.parametrize("processor", [LastSeen, LastSeenInFrames])
def test_a_timestamp_from_state_is_the_same_instant_in_the_output(zone: str, own: bool, processor: Any) -> None:
    """Rows: also in both of the hours that clocks repeat."""
    deep = ", deep struct<of: array<timestamp>, by: map<string, timestamp>, pairs: map<timestamp, int>>"
    pipeline = replace(
        VISITS,
        api="pandas" if processor.frames else "row",
        processor=processor,
        output_schema="user string, at timestamp, wall timestamp_ntz" + ("" if processor.frames else deep),
        order_by=["at"],
        time_zone=zone if own else None,
    )
    tester = PipelineTester(pipeline, input_schema="user string, at timestamp", time_zone="UTC" if own else zone)
    repeated = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)
    # Frames know no fold, here as under Spark.
    for at in [datetime(2024, 7, 1, 0, 30, tzinfo=UTC), *([] if processor.frames else [repeated, repeated + HOUR])]:
        (row,) = tester.run([("ann", at)]).output
        assert (row["at"], row["wall"]) == (at, datetime(2024, 7, 1, 2, 30))
        assert processor.frames or row["deep"] == {"of": [at], "by": [("k", at)], "pairs": [(at, 1)]}
        assert tester.state("last")[0]["at"] == at


def test_state_rows_show_their_ttl_expiry_and_are_removed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor runs in this process, so that what a test patches counts."""
    monkeypatch.setattr(f"{__name__}.TTL", True)
    tester = visiting()
    tester.run([("ann", 1, None)])
    assert tester.state("count") == [{"key_user": "ann", "rows": 1, "expires_at": START + 3 * HOUR}]
    tester.run()
    tester.run()
    assert tester.state("count") == []


def test_rows_behind_the_watermark_are_returned_as_late() -> None:
    tester = visiting(EVENT)
    first = tester.run([("ann", 1, START - 9 * HOUR)])
    assert (first.late, first.clock.watermark) == ([], START + HOUR)
    second = tester.run([("ann", 2, START), ("bob", 3, START + 90 * timedelta(minutes=1))])
    assert second.late == [{"user": "ann", "n": 2, "at": START}]
    assert second.clock.late_until == tester.clock.late_until == START + 2 * HOUR
    observed = visiting(replace(EVENT, watermark="observed"))
    assert observed.run([("ann", 1, START + HOUR / 2)]).clock.watermark == START + HOUR / 2
    assert observed.clock.late_until == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.long("half a second", runs_in="ci")
def test_rescale_restart_and_a_lost_attempt_do_not_change_the_state(tmp_path: Path) -> None:
    rows = [(f"user{n % 7}", n, None) for n in range(30)]
    straight, disturbed = visiting(), visiting(root=str(tmp_path))
    for _ in range(3):
        straight.run(rows)
    disturbed.run(rows)
    lost = disturbed.run(rows[:3], commit=False)
    assert (lost.record, len(lost.output)) == (None, 3)
    disturbed.rescale(5)
    disturbed.run(rows)
    disturbed = visiting(root=str(tmp_path), mode="changelog")
    disturbed.run(rows)
    for state in ("count", "pages", "all"):
        assert disturbed.state(state) == straight.state(state)
    assert [record.content.parallelism for record in disturbed.checkpoints] == [2, 5, 2]
    assert counts(disturbed)["user0"] == 15
    assert {row["rows"] for row in disturbed.state("count", checkpoint=START + HOUR)} == {4, 5}


def test_a_re_run_starts_from_where_its_interval_did() -> None:
    tester = visiting()
    first = tester.run([("ann", 1, None)])
    second = tester.run([("ann", 2, None)])
    again = tester.run([("ann", 1, None), ("ann", 5, None)], first.interval)
    assert [row["rows"] for row in again.output] == [2]
    with pytest.raises(StaleStateError):
        tester.run([("ann", 3, None)], Interval(second.interval.end, second.interval.end + HOUR))
    assert [row["rows"] for row in tester.run([("ann", 2, None)], second.interval).output] == [3]
    assert tester.next_interval.start == second.interval.end
    with pytest.raises(StateGapError):
        tester.run([], Interval(START + 9 * HOUR, START + 10 * HOUR))


class FirstRow(StatefulProcessor):
    """Leaves all rows of a key but the first unread."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(user=key[0], rows=next(rows).n, first=None)


def test_a_key_whose_rows_come_in_several_batches_is_one_call_and_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rows, "BATCH_ROWS", 2)
    tester = visiting(replace(VISITS, processor=FirstRow, parallelism=1))
    ran = tester.run([*(("ann", n, None) for n in range(5)), ("bob", 7, None)])
    assert sorted((row["user"], row["rows"]) for row in ran.output) == [("ann", 0), ("bob", 7)]
    assert ran.record is not None and ran.record.content.totals.keys_touched == 2


def test_initial_state_is_given_as_rows() -> None:
    starting = replace(VISITS, initial_state=no_source)
    with pytest.raises(UsageError, match="Give its rows to the tester"):
        visiting(starting).run([("ann", 1, None)])
    tester = visiting(starting, initial_state=[("ann", 40), ("bob", 7)], initial_schema="user string, rows long")
    tester.run([("ann", 1, None)])
    assert counts(tester) == {"ann": 41, "bob": 7}
    with pytest.raises(UsageError, match="declares no initial_state"):
        visiting(initial_state=[], initial_schema="user string")
    with pytest.raises(UsageError, match="go together"):
        visiting(starting, initial_state=[])


def test_the_tester_raises_the_errors_of_a_real_run() -> None:
    tester = visiting()
    with pytest.raises(
        ProcessorError, match=r"handleInputRows, key .'ann',., interval .*ValueError: minus one"
    ) as found:
        tester.run([("ann", -1, None)])
    assert "in handleInputRows" in found.value.__notes__[0]
    with pytest.raises(StateUnusable, match="no checkpoint yet; run an interval first"):
        tester.state("count")
    for counted in (5, 0):
        with pytest.raises(SourceError, match=f"the source counted {counted} rows, but 1 reached"):
            tester.run([("ann", 1, None)], position={"counts": {"rows": counted}})
    with pytest.raises(UsageError, match="order_by names when, which the input lacks"):
        visiting(replace(VISITS, order_by=["when"])).run([("ann", 1, None)])
    with pytest.raises(SourceError, match="lacks the key column name"):
        visiting(replace(VISITS, key=["name"])).run()
    with pytest.raises(UsageError, match="output_schema is not a schema: 'user strin'"):
        visiting(replace(VISITS, output_schema="user strin")).run()
    with pytest.raises(UsageError, match="deploy got pipeline 'other'"):
        tester.deploy(replace(VISITS, name="other"))


class ForgetfulVisits(FrameVisits):
    def init(self, handle: Any) -> None:
        handle.deleteIfExists("count")
        self._count = handle.getValueState("other", "rows long")


@pytest.mark.parametrize("mode", ["incremental", "changelog"])
def test_a_deploy_keeps_the_state(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also a state that the new processor does not declare, until one deletes it."""
    tester, frames = visiting(), replace(VISITS, api="pandas", processor=FrameVisits)
    tester.mode = mode
    found = []
    for deployed in (VISITS, frames, replace(frames, processor=ForgetfulVisits), frames):
        tester.deploy(deployed)
        ran = tester.run([("ann", 1, None)])
        assert ran.record is not None
        found.append((ran.output[0]["rows"], ran.record.content.totals.entries))
        segments = [segment for ref in ran.record.content.shards if ref.inline for segment in ref.inline.segments]
        assert bool(segments) == (mode == "changelog")
    assert found == [(1, 3), (2, 3), (1, 3), (1, 4)]
    told = "visits: states that the processor no longer declares, but that are kept: {}; to drop a state, call deleteIfExists in init()"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [told.format(names) for names in ("all, pages", "all, pages", "all, other, pages")]


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ("user string, tags map<string,int>", "column 'tags' is map<string,int>"),
        ("user string, tags array<struct<a: map<int,int>>>", "only Spark can sort values of type map<int,int>"),
    ],
)
def test_map_columns_that_only_spark_can_sort_are_refused(schema: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        PipelineTester(VISITS, input_schema=schema)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"usr": "ann"}, "row 0 has 'usr', which the schema lacks; the schema has user, n, at"),
        (("ann", 1), "row 0 has 2 values, but the schema has 3 columns"),
        (("ann", "1", None), "column 'n', row 0: expected int, found str '1'"),
        (("ann", True, None), "column 'n', row 0: expected int, found bool True"),
        (("ann", 2**31, None), "column 'n', row 0: expected int, found int 2147483648"),
        ((7, 1, None), "column 'user', row 0: expected string, found int 7"),
        (
            ("ann", 1, "2024-01-01"),
            "column 'at', row 0: expected timestamp, found str '2024-01-01': expected a datetime",
        ),
        ("ann", "row 0 is a str; expected a dict, a tuple or a Row"),
    ],
)
def test_an_input_row_that_does_not_fit_the_schema_is_refused_and_named(row: Any, why: str) -> None:
    with pytest.raises(UsageError) as found:
        visiting().run([row])
    assert why in str(found.value)


def test_nested_values_and_not_null_columns_are_checked_against_the_schema() -> None:
    schema = "user string NOT NULL, n int, at timestamp, more struct<a: array<timestamp_ntz>, b: decimal(5,2)>"
    tester = PipelineTester(VISITS, input_schema=schema)
    tester.run([("ann", 1, None, {"a": [datetime(2024, 1, 1), None]}), ("ann", 1, None, (None, Decimal("1.50")))])
    assert counts(tester) == {"ann": 2}
    for row, why in (
        ((None, 1, None, None), "it is null, and the column is NOT NULL"),
        (("ann", 1, None, {"c": 1}), "no field 'c'"),
        (("ann", 1, None, {"a": [START]}), "expected a datetime without time zone"),
    ):
        with pytest.raises(UsageError, match=why):
            tester.run([row])


def test_the_sink_is_called_only_with_call_sink() -> None:
    called: list[Any] = []

    def sink(spark: Any, files: list[str], interval: Interval, checkpoint: int) -> None:
        called.append((spark, len(files), interval, checkpoint))

    quiet, loud = visiting(replace(VISITS, sink=sink)), visiting(replace(VISITS, sink=sink), call_sink=True)
    quiet.run([("ann", 1, None)])
    assert called == []
    found = loud.run([("ann", 1, None)])
    assert found.record is not None
    assert called == [(None, 1, found.interval, found.record.id)]


def test_the_memory_storage_of_a_tester_is_freed_with_the_tester() -> None:
    tester = visiting()
    tester.run([("ann", 1, None)])
    root = tester.root
    assert next(open_storage(root).list(""), None) is not None
    del tester
    assert next(open_storage(root).list(""), None) is None


def test_output_files_lists_only_the_files_of_current_results(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tester = visiting(EVENT, root=f"file://{tmp_path}")
    first = tester.run([("ann", 1, START + HOUR / 2)])
    tester.run([("ann", 1, START), ("bob", 1, START + 3 * HOUR / 2)])
    before = output_files(tester.root, "visits")

    def notices() -> list[str]:
        # On a busy machine, other warnings may be in the log.
        return [message for message in caplog.messages if "whose result is not valid" in message]

    assert not notices()
    again = tester.run([("ann", 1, START + HOUR / 2), ("cid", 1, START + HOUR / 2)], first.interval)
    now = output_files(tester.root, "visits")
    assert again.record is not None
    # The second interval is stale now: its rows stay current until it runs again, and each reader says so.
    options = {"root": tester.root, "pipeline": "visits"}
    KeyedOutput(options).schema()
    notice = f"{tester.next_interval.start - HOUR:%H}:00:00Z, {tester.next_interval.start:%Y-%m-%dT%H}:00:00Z): checkpoint 3 made it stale"
    assert len(notices()) == 2 and all(notice in message for message in notices())
    with pytest.raises(StateUnusable, match="the current output has the rows of 1 interval"):
        KeyedOutput(options | {"valid": "true"}).schema()
    KeyedOutput(options | {"valid": "true", "end": first.interval.end.isoformat()}).schema()
    of_first = {f"{tmp_path}/visits/{f.handle.path}" for f in again.record.content.outputs}
    assert of_first == {*output_files(tester.root, "visits", end=first.interval.end)}
    assert {*now} - of_first == {*output_files(tester.root, "visits", start=first.interval.end)} < {*before}
    assert of_first.isdisjoint(before)
    (late,) = output_files(tester.root, "visits", late=True)
    assert pa.parquet.read_table(late)["user"].to_pylist() == ["ann"]


# --- what a processor of columns may not do ----------------------------------------------------------------------------------------


class Silent(ArrowProcessor):
    def init(self, handle: Any) -> None:
        handle.getValueState("total", "sum long")

    def handleBatch(self, batch: KeyedBatch) -> Any:
        raise NotImplementedError


def wrong(batch: KeyedBatch, **columns: Any) -> BatchResult:
    return BatchResult(states={"total": pa.table(columns)})


def giving(**output: Any) -> dict[str, Any]:
    return {"handleBatch": lambda s, b: BatchResult(output=pa.table(output))}


def using(call: Any) -> dict[str, Any]:
    """Declares states, and makes a call in ``handleBatch``."""

    def init(processor: Any, handle: Any) -> None:
        processor.handle = handle
        processor.list = handle.getListState("l", "n long")
        processor.map = handle.getMapState("m", "u long", "n long")

    def handle_batch(processor: Any, batch: KeyedBatch) -> BatchResult:
        call(processor)
        return BatchResult()

    return {"init": init, "handleBatch": handle_batch}


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"handleBatch": lambda s, b: None},
        "the method returned a NoneType; it must return cairn.arrow_processor.BatchResult",
    ),
    ({"handleBatch": lambda s, b: wrong(b, sum=[1, 2, 3])}, r"BatchResult.states\['total'\] has 3 rows for 1 keys"),
    (
        {"handleBatch": lambda s, b: BatchResult(states={"totals": pa.table({"sum": [1]})})},
        "BatchResult.states names 'totals', but init.. declared total",
    ),
    (
        {"handleBatch": lambda s, b: wrong(b, sum=["x"] * len(b.keys))},
        "state 'total' field 'sum': expected bigint .Arrow int64., found Arrow string",
    ),
    ({"handleBatch": lambda s, b: wrong(b, sun=pa.nulls(len(b.keys), pa.int64()))}, "state 'total'.*sum"),
    (
        giving(user=["a"], totals=[1]),
        "BatchResult.output has the columns user, totals, but output_schema has user, rows, first; they",
    ),
    (
        giving(user=["a"], rows=["x"], first=[True]),
        "output column 'rows' must be int64, but BatchResult.output has string",
    ),
    (
        giving(user=["a"], rows=[1], first=[datetime(2024, 1, 1)]),
        r"'first' must be timestamp\[us, tz=UTC\], but BatchResult.output has timestamp\[us\], whose times have no zone\nGive",
    ),
    (giving(user=["a"], rows=[None], first=[True]), "output column 'rows' is NOT NULL, but a row has no value for it"),
    ({"handleBatch": lambda s, b: 1 / 0}, "handleBatch, interval .*ZeroDivisionError"),
    (
        using(lambda s: s.list.appendList([0, 0], pa.table({"n": [1]}))),
        "list state 'l': found 2 keys for 1 rows; give one key for each row",
    ),
    (
        using(lambda s: s.list.get(np.ones(9, np.bool_))),
        "list state 'l': found a mask of 9 values for 1 keys; give one bool for each key",
    ),
    (
        using(lambda s: s.list.clear([0, 0])),
        "list state 'l': chosen keys must ascend without repetition; sort them, or",
    ),
    (
        using(lambda s: s.map.exists([-1])),
        "map state 'm': keys must be positions in batch.keys from 0 to 0; found -1 to -1",
    ),
    (using(lambda s: s.map.exists(["ann"])), "one integer for each row; found an array of <U3 with 1 dimensions"),
    (
        using(lambda s: s.map.getValue([0], pa.table({"n": [1]}))),
        "map state 'm': its user key has the fields u; the given table has n",
    ),
    (
        using(lambda s: s.handle.registerTimer([0], [1.5])),
        "whole number of milliseconds since the epoch; found float64",
    ),
    (
        {**using(lambda s: None), "close": lambda s: isinstance(s.list, ArrowListState) and s.list.get()},
        "close, interval .*list state 'l' was used outside a batch; only handleBatch and handleExpiredTimers",
    ),
    ({"init": lambda s, h: h.registerTimer(0, 5)}, "registerTimer can't be called when the handle is CREATED"),
    ({"init": lambda s, h: h.deleteTimer(0, 5)}, "deleteTimer can't be called when the handle is CREATED"),
    ({"init": lambda s, h: h.listTimers()}, "listTimers can't be called when the handle is CREATED"),
]


@pytest.mark.parametrize(("behaviour", "message"), BAD, ids=range(len(BAD)))
def test_an_arrow_processor_that_breaks_its_contract_is_refused(behaviour: dict[str, Any], message: str) -> None:
    bad = type("Bad", (Silent,), {"__module__": __name__, **behaviour})
    output = "user string, rows long not null, first timestamp"
    with pytest.raises((UsageError, UserCodeError), match=f"(?s){message}"):
        visiting(
            replace(VISITS, api="arrow", order_by=(), processor=bad, output_schema=output, time_zone="Europe/Berlin")
        ).run([("ann", 1, None), ("bob", 2, None)])


class Batch:
    """What user code may make of a batch: held by a cycle, where only Python's collector frees it."""

    def __init__(self, batch: KeyedBatch) -> None:
        self.batch, self.itself = batch, self


class Cyclic(Silent):
    made: ClassVar[WeakSet[Batch]] = WeakSet()
    alive: ClassVar[list[int]] = []

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        self.made.add(Batch(batch))
        self.alive.append(len(self.made))
        return BatchResult()


@pytest.mark.parametrize("limit", ["ROUND_ROWS", "ROUND_BYTES"])
def test_a_batch_is_freed_when_its_call_is_over(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector counts objects, and of a batch there are few: a hot key's were all there until the end."""
    monkeypatch.setattr(f"cairn.runners.arrow_runner.{limit}", 1)
    monkeypatch.setattr(Cyclic, "alive", [])
    monkeypatch.setattr("cairn.rows.input_batches.InputBatches.__iter__", one_by_one(InputBatches.__iter__))
    output = "user string, rows long not null, first boolean"
    visiting(replace(VISITS, api="arrow", order_by=(), processor=Cyclic, output_schema=output)).run(
        [(f"u{n}", n, None) for n in range(20)]
    )
    assert len(Cyclic.alive) > 10 and max(Cyclic.alive) <= 1


def one_by_one(batches: Callable[[InputBatches], Iterator[pa.RecordBatch]]) -> Callable[[InputBatches], Any]:
    return lambda self: (batch[at : at + 1] for batch in batches(self) for at in range(batch.num_rows))


def test_an_invalid_input_schema_is_refused_and_named() -> None:
    with pytest.raises(UsageError, match="PipelineTester: input_schema is not a schema: 'user strin'"):
        PipelineTester(VISITS, input_schema="user strin")


def forgetting(**more: Any) -> PipelineTester:
    """On the hour after a user's row the count is forgotten. The amounts of ann are 1 and 2, that of bob is 3."""
    tester = visiting(replace(VISITS, **more))
    tester.run([("ann", 1, START + HOUR), ("ann", 2, START + HOUR), ("bob", 3, START + 2 * HOUR)])
    return tester


@pytest.mark.long("seconds: it imports Great Expectations", runs_in="ci")
def test_expectations_are_tried_on_each_kind_of_state() -> None:
    import great_expectations.expectations as gxe

    def rules() -> dict[str, list[Any]]:
        return {
            "count": [gxe.ExpectColumnValuesToBeBetween(column="rows", max_value=1)],
            "pages": [gxe.ExpectColumnValuesToBeInSet(column="user_key_n", value_set=[1, 3])],
            "all": [gxe.ExpectColumnValuesToBeBetween(column="pos", max_value=0)],
            "$timers": [gxe.ExpectColumnValuesToBeBetween(column="expires_at", max_value=START + 2 * HOUR)],
        }

    tester = forgetting(
        expectations=rules, expectations_over_time=lambda: {"count": ChangeExpectations(no_row_lost=True)}
    )
    found = {finding.state: finding for finding in tester.validate()}
    assert {state: (f.rows, f.column + f.observed.rpartition(" as")[2], *f.keys) for state, f in found.items()} == {
        "count": (1, "rows 2", '{"key_user":"ann"}'),
        "pages": (1, "user_key_n 2", '{"key_user":"ann","user_key_n":2}'),
        "all": (1, "pos 1", '{"key_user":"ann","pos":1}'),
        "$timers": (1, "expires_at 2024-01-01 03:00:00", '{"key_user":"bob","expires_at":"2024-01-01T03:00:00.000Z"}'),
    }
    assert str(found["count"]) == (
        "state 'count': expect_column_values_to_be_between rows: expected max_value=1.0; 1 of 2 rows fail, with values such as 2; keys: "
        '{"key_user":"ann"}'
    )
    tester.run()
    lost = [finding for finding in tester.validate() if finding.over_time]
    assert [(f.state, f.column, f.observed, f.keys) for f in lost] == [
        ("count", "lost_row", "1 of 2 rows fail", ('{"key_user":"ann"}',))
    ]
    assert [f.over_time for f in tester.validate({"count": rules()["count"]}, checkpoint=1)] == [False]


@pytest.mark.long("seconds: it imports Great Expectations", runs_in="ci")
def test_an_expectation_that_can_not_run_in_the_tester_is_refused_with_the_reason() -> None:
    import great_expectations.expectations as gxe

    tester = forgetting()
    with pytest.raises(UsageError, match="declares no expectations"):
        tester.validate()
    with pytest.raises(
        UsageError, match=r"expect_column_values_to_match_regex needs Spark\nPass a session: validate\(spark="
    ):
        tester.validate({"count": [gxe.ExpectColumnValuesToMatchRegex(column="key_user", regex="a")]})
    with pytest.raises(UsageError, match="The columns of the table are key_user, rows, expires_at, key_group, shard\n"):
        tester.validate({"count": [gxe.ExpectColumnValuesToNotBeNull(column="user")]})
    with pytest.raises(UsageError, match="no such state exists; its states are"):
        tester.validate({"counts": [gxe.ExpectColumnValuesToNotBeNull(column="rows")]})
    tester.run()
    with pytest.raises(UsageError, match="removable is an SQL condition"):
        tester.validate(None, {"count": ChangeExpectations(no_row_lost=True, removable="value.rows = 1")})
    with pytest.raises(StateUnusable, match="no checkpoint yet"):
        visiting().validate({"count": []})


class RenamedVisits(FrameVisits):
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "visits long")


def test_a_removed_state_field_is_refused_unless_declared_renamed_or_dropped(tmp_path: Path) -> None:
    """As in every run: nothing is computed or written before."""

    def tester(**changes: Any) -> PipelineTester:
        pipeline = replace(VISITS, api="pandas", **{"processor": RenamedVisits} | changes)
        return PipelineTester(pipeline, input_schema=SCHEMA, root=f"file://{tmp_path}")

    rows = [("ann", 1, None), ("ann", 2, None)]
    tester(processor=FrameVisits).run(rows)
    written = {file for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(StateSchemaError, match=r"'visits', state 'count' no longer declares rows: (?s:.*)'visits'"):
        tester().run(rows)
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == written
    kept = tester(renamed={"count.rows": "visits"})
    kept.run([("ann", 3, None)])
    assert [row["visits"] for row in kept.state("count")] == [3]
    # Again with the loss declared, as a correction of the interval.
    lost = tester(dropped=["count.rows"])
    lost.run([], Interval(START + HOUR, START + 2 * HOUR))
    assert [row["visits"] for row in lost.state("count")] == [None]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dropped": "count.rows"}, "dropped is 'count.rows'; list states with fields"),
        ({"dropped": ["rows"]}, r"dropped is \['rows'\]; list states with fields"),
        ({"renamed": {"rows": "visits"}}, "renamed has 'rows': 'visits'; give the old name with the state"),
        (
            {"renamed": {"count.rows": "count.visits"}},
            "'count.visits'; give the old name with the state, and the new name",
        ),
        ({"renamed": {"s.a": "b", "s.b": "c"}}, "'s.a': 'b', but renames 'b' too; give 's.a' its last name at once"),
    ],
)
def test_wrong_declarations_of_fields_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"pipeline 'visits': .*{says}"):
        replace(VISITS, **changes)


@pytest.mark.parametrize("changes", [{"dropped": ["aggregates.rows_n"]}, {"renamed": {"aggregates.rows_n": "n"}}])
def test_dropped_and_renamed_are_refused_for_ready_made_processors(changes: dict[str, Any]) -> None:
    pipeline = replace(VISITS, processor=ColumnVisits, output_schema=None, **changes)
    with pytest.raises(
        UsageError, match="ColumnVisits follow its settings and its input: leave dropped and renamed out"
    ):
        PipelineTester(pipeline, input_schema=SCHEMA).run([])


def test_the_rows_of_one_key_may_fill_several_batches() -> None:
    tester = PipelineTester(counting(parallelism=1), input_schema=INPUT_SCHEMA)
    [row] = tester.run([("ann", "fig", 1)] * 25_000).output
    assert row["total"] == 25_000
