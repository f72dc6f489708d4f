"""The vectorised API against the row API: the same logic leaves the same bytes in RocksDB, the same digests, and the same output, over
expiry, timers, re-sharding, changed schemas, and changes from one API to the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from cairn.arrow_processor import ArrowProcessor, BatchResult, KeyedBatch, with_keys
from cairn.pipeline import Pipeline
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.adapters.work_folders import work_folder
from state_backend.shard.manifest import needed_manifest
from state_backend.shard.restore import restore_shard
from state_backend.state import stored_entries, timer_columns
from state_backend.state.check_shard import verify_shard
from tests.support.tiers import at_tier

START = datetime(1970, 1, 2, tzinfo=UTC)
HOUR_MS = 3_600_000
INPUT = "user string, op string, n long, s string, at timestamp"
OUTPUT = "user string, said string"
# Steps of a handler, in this order; each has the rows of the key's input that name it.
OPS = ["clear list", "put", "append", "clear map", "set", "remove", "register", "delete", "value"]
TTLS = (None, 2 * HOUR_MS)


def ms_of(at: datetime) -> int:
    return round(at.timestamp() * 1000)


class Rows(StatefulProcessor):
    """Does what its input says, to states with and without expiry."""

    def __init__(self, ttls: tuple[int | None, ...], wider: bool) -> None:
        self._ttls, self._wider = ttls, wider

    def init(self, handle: Any) -> None:
        self._handle = handle
        value = "s string, n long, more double" if self._wider else "n long, s string"
        self._values = [handle.getValueState(f"v{i}", "n long", ttl) for i, ttl in enumerate(self._ttls)]
        self._lists = [handle.getListState(f"l{i}", value, ttl) for i, ttl in enumerate(self._ttls)]
        self._maps = [handle.getMapState(f"m{i}", "s string, n long", value, ttl) for i, ttl in enumerate(self._ttls)]

    def _row(self, row: Any) -> Any:
        return (row.s, row.n, None) if self._wider else (row.n, row.s)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        of = {op: [] for op in OPS}
        for row in rows:
            of[row.op].append(row)
        said = [str(list(self._handle.listTimers()))]
        for values, entries, elements in zip(self._values, self._maps, self._lists, strict=True):
            said.append(self._seen(values, elements, entries, of))
            if of["clear list"]:
                elements.clear()
            if of["put"]:
                elements.put([self._row(row) for row in of["put"]])
            for row in of["append"]:
                elements.appendValue(self._row(row))
            if of["clear map"]:
                entries.clear()
            for row in of["set"]:
                entries.updateValue((row.s, row.n % 2), self._row(row))
            for row in of["remove"]:
                entries.removeKey((row.s, row.n % 2))
            if of["value"]:
                values.update((of["value"][-1].n,))
        for row in of["register"]:
            self._handle.registerTimer(ms_of(row.at))
        for row in of["delete"]:
            self._handle.deleteTimer(ms_of(row.at))
        yield Row(user=key[0], said="; ".join(said))

    def _seen(self, values: Any, elements: Any, entries: Any, of: Any) -> str:
        found = [entries.getValue((row.s, row.n % 2)) for row in of["set"]]
        listed = [tuple(row) for row in elements.get()]
        mapped = [(tuple(key), tuple(value)) for key, value in entries.iterator()]
        looked_up = [None if value is None else tuple(value) for value in found]
        return str([elements.exists(), entries.exists(), values.get(), listed, mapped, looked_up])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry_ms = expiredTimerInfo.getExpiryTimeInMs()
        self._lists[0].appendList([(None, expiry_ms, None) if self._wider else (expiry_ms, None)])
        # Fires in a later interval, also where it is due already.
        self._handle.registerTimer(expiry_ms + (HOUR_MS if expiry_ms % 2 else 5 * HOUR_MS))
        if expiry_ms % 3 == 0:
            # Goes all the same, when the handler is done.
            self._handle.deleteTimer(expiry_ms)
            self._handle.registerTimer(expiry_ms)
        yield Row(user=key[0], said=f"fired {expiry_ms} of {len(list(self._lists[0].get()))}")


class Columns(ArrowProcessor):
    """The same for many keys at a time."""

    __init__, _row = Rows.__init__, Rows._row
    init = Rows.init

    def _table(self, rows: pa.Table) -> pa.Table:
        if not self._wider:
            return rows.select(["s", "n"])
        return rows.select(["n", "s"]).append_column("more", pa.nulls(len(rows), pa.float64()))

    def handleBatch(self, batch: KeyedBatch) -> BatchResult:
        # In an order of no meaning between keys: only those of one key are in order.
        order = np.argsort(-batch.key_of_row, kind="stable")
        rows, keys = batch.rows.take(order), batch.key_of_row[order]
        ops = np.array(rows["op"].to_pylist())
        of = {op: (rows.filter(pa.array(ops == op)), keys[ops == op]) for op in OPS}
        timers = self._handle.listTimers()
        said = [[str(part) for part in cut(timers.rows["expiry_ms"].to_pylist(), timers.offsets)]]
        states = {}
        for i, (entries, elements) in enumerate(zip(self._maps, self._lists, strict=True)):
            said.append(self._seen(batch, i, elements, entries, of["set"]))
            elements.clear(np.unique(of["clear list"][1]))
            for op, call in (("put", elements.put), ("append", elements.appendList)):
                call(of[op][1], self._table(of[op][0]))
            cleared = np.zeros(len(batch.keys), np.bool_)
            cleared[of["clear map"][1]] = True
            entries.clear(cleared)
            some, owners = of["set"]
            entries.updateValue(owners, user_keys(some), self._table(some))
            some, owners = of["remove"]
            entries.removeKey(owners, user_keys(some))
            some, owners = of["value"]
            values = dict(zip(owners.tolist(), some["n"].to_pylist(), strict=True))
            states[f"v{i}"] = pa.table({"n": pa.array([values.get(k) for k in range(len(batch.keys))], pa.int64())})
        for op, call in (("register", self._handle.registerTimer), ("delete", self._handle.deleteTimer)):
            call(of[op][1], [ms_of(at) for at in of[op][0]["at"].to_pylist()] or np.zeros(0, np.int64))
        result = self._without(batch, states, of["value"][1])
        text = pa.table({"said": ["; ".join(parts) for parts in zip(*said, strict=True)]})
        return replace(result, output=with_keys(batch, text))

    def _without(self, batch: KeyedBatch, states: Any, owners: Any) -> BatchResult:
        """A value that no row names stays as it is, expiry included."""
        if len(np.unique(owners)) == len(batch.keys):
            return BatchResult(states=states)
        if not len(owners):
            return BatchResult()
        raise AssertionError("the input gives a value to every key or to none")

    def _seen(self, batch: KeyedBatch, i: int, elements: Any, entries: Any, looked_up: Any) -> list[str]:
        values = [
            (n,) if there else None
            for n, there in zip(batch.states[f"v{i}"]["n"].to_pylist(), batch.exists[f"v{i}"], strict=True)
        ]
        listed, mapped = elements.get(), entries.iterator()
        assert [len(part) for part in listed.lists()] == np.diff(listed.offsets).tolist()
        pairs = list(zip(tuples(mapped.keys), tuples(mapped.values), strict=True))
        found, there = entries.getValue(looked_up[1], user_keys(looked_up[0]))
        assert (entries.containsKey(looked_up[1], user_keys(looked_up[0])) == there).all()
        of: list[list[Any]] = [[] for _ in batch.keys["user"]]
        for key, value, exists in zip(looked_up[1].tolist(), tuples(found), there, strict=True):
            of[key].append(value if exists else None)
        parts = (elements.exists().tolist(), entries.exists().tolist(), values)
        lists = cut(tuples(listed.rows), listed.offsets), cut(pairs, mapped.offsets), of
        return [str(list(row)) for row in zip(*parts, *lists, strict=True)]

    def handleExpiredTimers(self, batch: KeyedBatch) -> BatchResult:
        times = batch.rows["expiry_ms"].to_numpy()
        before = np.diff(self._lists[0].get().offsets)
        self._lists[0].appendList(
            batch.key_of_row, self._table(pa.table({"n": times, "s": pa.nulls(len(times), pa.string())}))
        )
        self._handle.registerTimer(batch.key_of_row, times + np.where(times % 2, HOUR_MS, 5 * HOUR_MS))
        again = times % 3 == 0
        if again.any():
            self._handle.deleteTimer(batch.key_of_row[again], times[again])
            self._handle.registerTimer(batch.key_of_row[again], times[again])
        nth = np.arange(len(times)) - np.repeat(batch.row_offsets[:-1], np.diff(batch.row_offsets))
        said = [f"fired {t} of {n}" for t, n in zip(times, before[batch.key_of_row] + nth + 1, strict=True)]
        users = batch.keys["user"].take(pa.array(batch.key_of_row))
        return BatchResult(output=pa.table({"user": users, "said": said}))


def user_keys(rows: pa.Table) -> pa.Table:
    return pa.table({"n": pa.array([n % 2 for n in rows["n"].to_pylist()], pa.int64()), "s": rows["s"]})


def tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows.to_pylist()]


def cut(rows: list[Any], offsets: Any) -> list[list[Any]]:
    return [rows[begin:end] for begin, end in pairwise(offsets)]


def no_source(spark: Any, interval: Any) -> Any:
    raise AssertionError("the tester gives rows")


def pipeline(api: str, mode: str, ttls: tuple[int | None, ...], wider: bool, parallelism: int) -> Pipeline:
    timed = {"event_time": "at", "watermark_delay": timedelta(0), "watermark": "interval"} if mode == "event" else {}
    return Pipeline(
        name="same",
        start=START,
        source=no_source,
        key=["user"],
        processor=(Rows if api == "row" else Columns)(ttls, wider),
        api=api,  # type: ignore[arg-type]
        output_schema=OUTPUT,
        order_by=["n"],
        time_mode=mode,  # type: ignore[arg-type]
        parallelism=parallelism,
        max_parallelism=8,
        **timed,  # type: ignore[arg-type]
    )


def stored(tester: PipelineTester) -> list[tuple[bytes, bytes]]:
    """Every key and value in RocksDB, of all shards; each shard is checked."""
    content, storage = tester.checkpoints[-1].content, open_storage(f"{tester.root}/same")
    found = []
    for ref in content.shards:
        manifest = needed_manifest(ref, storage)
        with work_folder("compare") as work:
            restored = restore_shard(manifest.key_groups, [manifest], storage, Path(work) / "db", EngineOptions())
            with restored.store as store:
                found += list(store.scan(b"", None))
                findings = verify_shard(store, manifest, content.states, content.key_schema, content.max_parallelism)[1]
                assert findings == []
    return found


users = st.sampled_from([None, "a", "b\x00ä"])
ops = st.tuples(
    users,
    st.sampled_from(OPS[:-1]),
    st.integers(0, 3),
    st.sampled_from([None, "\x00y"]),
    st.integers(-2, 9).map(lambda hours: START + timedelta(hours=hours / 2, milliseconds=hours % 3)),
)


@st.composite
def intervals(draw: Any) -> tuple[str, list[tuple[Any, ...]], bool, int]:
    """API, rows, whether the schema is the wider one, and parallelism. Values are given to all keys or to none."""
    rows = draw(st.lists(ops, min_size=8, max_size=40, unique_by=lambda row: row[:4]))
    if draw(st.booleans()):
        rows += [
            (user, "value", draw(st.integers(0, 9)), None, START + timedelta(hours=9))
            for user in {row[0] for row in rows}
        ]
    return draw(st.sampled_from(["arrow", "row"])), rows, draw(st.booleans()), draw(st.integers(1, 3))


# Without shrinking, which takes minutes: an example is a few intervals of rows that can be read as they are.
@settings(
    max_examples=at_tier(fast=3, ci=5, all=12), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
@given(
    steps=st.lists(intervals(), min_size=2, max_size=5),
    mode=st.sampled_from(["processing", "event"]),
    dense=st.booleans(),
)
@pytest.mark.long("seconds", runs_in="ci")
def test_arrow_and_row_processors_leave_equal_state_and_output(steps: list[Any], mode: str, dense: bool) -> None:
    before = stored_entries.MIN_SCAN_ROWS, stored_entries.RANGE_KEYS, timer_columns.MIN_LATEST_ROWS
    stored_entries.MIN_SCAN_ROWS = stored_entries.RANGE_KEYS = timer_columns.MIN_LATEST_ROWS = 1 if dense else 1_000
    ttls = TTLS if mode == "processing" else (None,)
    try:
        by_row, mixed = (PipelineTester(pipeline("row", mode, ttls, False, 1), input_schema=INPUT) for _ in range(2))
        wide = False
        for api, rows, wider, parallelism in steps:
            wide = wide or wider
            found = []
            # The mixed one goes from one API to the other over its own checkpoints.
            for tester, of in ((by_row, "row"), (mixed, api)):
                tester.deploy(pipeline(of, mode, ttls, wide, parallelism))
                done = tester.run(rows)
                assert done.record is not None
                totals = done.record.content.totals
                counted = totals.keys_touched, totals.entries, totals.late_rows, totals.output_rows
                output = sorted(done.output, key=lambda row: (row["user"] or "", row["said"]))
                found.append((output, stored(tester), done.record.content.digest, counted))
            for what, of_rows, of_columns in zip(("output", "stored", "digest", "counts"), *found, strict=True):
                assert of_rows == of_columns, what
    finally:
        stored_entries.MIN_SCAN_ROWS, stored_entries.RANGE_KEYS, timer_columns.MIN_LATEST_ROWS = before
