"""After any history of a pipeline, every reader and command takes the newest state and the current output, as `status` does.

A history runs intervals, runs old ones again with equal or other input, restores, quarantines, releases, deploys code with other
columns and types of output and input, runs an old interval with the code that it had, forgets keys, consolidates old checkpoints,
validates, and changes the retention. The sink is a function or a Delta table. The oracle knows each commit's state and rows from the
inputs alone. It takes from the log which checkpoints are retained and which commits reproduced a state; which checkpoint is valid, the
newest, or current, it finds out by itself. Without Spark.

``CAIRN_READERS=300`` runs that many histories.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import deltalake
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from typer.testing import CliRunner

from cairn import sinks
from cairn.command.cli import app
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.output_files import output_files
from cairn.operations.savepoints import take_savepoint
from cairn.operations.savepoints.take_savepoint import consolidate_checkpoint
from cairn.pipeline import Interval, Pipeline
from cairn.runners.output_schema import arrow_schema
from cairn.sinks.table_sink import CHECKPOINT, TableSink
from cairn.sinks.table_sink import END as END_COLUMN
from cairn.sinks.table_sink import START as START_COLUMN
from cairn.testing import PipelineTester
from cairn_ui.pipeline_overview import latest_usable, newest_validated, unvalidated_since
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Reader
from state_backend.adapters.memory_storage import forget_memory
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint import newest_state as newest_states
from state_backend.checkpoint.log import Log, interval_of, kind_of
from state_backend.checkpoint.rewind import rewind
from state_backend.inspection.compare_logs import made_within
from state_backend.inspection.pipeline_status import status_of
from state_backend.values.errors import CairnError
from state_backend.values.intervals import format_instant
from state_backend.values.records import Record, RunRef, SweepRecord
from state_backend.values.retention import AnyOf, KeepLast, KeepQuarantined
from tests.support.coordinator import coordinator_of
from tests.support.in_process import run_here
from tests.support.tiers import at_tier

NAME, START, HOUR, HOURS = "totals", datetime(2024, 1, 1, tzinfo=UTC), timedelta(hours=1), 6
HISTORIES = int(os.environ.get("CAIRN_READERS", "0")) or at_tier(fast=2, ci=8, all=150)
STEPS = 14
USERS = ("ann", "bob", "cid", "dan")
READS: Counter[str] = Counter()
Columns = dict[str, str]


def hour(n: int) -> Interval:
    return Interval(START + n * HOUR, START + (n + 1) * HOUR)


@dataclass(frozen=True, kw_only=True)
class Code:
    """The columns of one version of the pipeline's code."""

    output: Columns
    input: Columns

    @classmethod
    def any(cls, random: random.Random) -> Code:
        def columns(fixed: Columns, *others: str) -> Columns:
            return {**fixed, **{name: "string" for name in others if random.random() < 0.5}}

        total, amount = random.choice(("int", "bigint")), random.choice(("int", "bigint"))
        return cls(
            output=columns({"user": "string", "total": total}, "note", "mark"),
            input=columns({"user": "string", "amount": amount, "at": "timestamp"}, "place", "shop"),
        )

    def processor(self) -> type[Totals]:
        return type("Versioned", (Totals,), {"columns": tuple(self.output)})

    def read(self, user: str, amount: int, at: datetime) -> dict[str, Any]:
        return _row(self.input, user=user, amount=amount, at=at)


def _row(columns: Iterable[str], **values: Any) -> dict[str, Any]:
    return {name: values.get(name, f"{name} of {values['user']}") for name in columns}


def ddl(columns: Columns) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


class Totals(StatefulProcessor):
    """Adds up the amounts of a user."""

    columns: tuple[str, ...] = ()

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (before,) = self._total.get() or (0,)
        total = before + sum(row.amount for row in rows)
        self._total.update((total,))
        yield Row(**_row(self.columns, user=key[0], total=total))


# --- the oracle -----------------------------------------------------------------------------------------------------------------


State = dict[str, int]
# Of each row the columns that are not null.
Rows = Counter[frozenset[tuple[str, Any]]]


def rows_of(found: Iterable[dict[str, Any]], without: Iterable[str] = ()) -> Rows:
    return Counter(frozenset((n, v) for n, v in row.items() if v is not None and n not in without) for row in found)


def total_of(commits: Iterable[Commit], *, late: bool = False) -> Rows:
    return sum((c.late if late else c.rows for c in commits), Rows())


@dataclass(frozen=True, kw_only=True)
class Commit:
    """``hour``: the interval. ``forgets``: the key that it removed, and the end of all intervals at that time."""

    id: int
    kind: str
    hour: int
    base: int | None
    state: State
    rows: Rows = field(default_factory=Counter)
    late: Rows = field(default_factory=Counter)
    code: Code | None = None
    reproduces: bool = False
    forgets: tuple[str, int] | None = None


@dataclass
class Oracle:
    commits: dict[int, Commit] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    retained: set[int] = field(default_factory=set)

    def add(self, made: Commit) -> None:
        if made.kind in ("interval", "restore") and not made.reproduces:
            self.stale |= {c.id for c in self.commits.values() if c.hour != made.hour and made.hour <= c.hour}
        if made.kind == "consolidate" and made.base in self.stale:
            self.stale.add(made.id)
        self.commits[made.id] = made

    def good(self, at: int | None) -> bool:
        while at is not None:
            if at in self.refused:
                return False
            at = self.commits[at].base
        return True

    def valid(self) -> list[Commit]:
        found = []
        for c in self.commits.values():
            later = [o for o in self.commits.values() if o.id > c.id and o.hour == c.hour and o.kind != "consolidate"]
            replaced = any(o.state != c.state and self.good(o.id) for o in later)
            if c.id in self.retained and c.id not in self.stale and self.good(c.id) and not replaced:
                found.append(c)
        return found

    def newest(self, ids: set[int] | None = None, end: int | None = None) -> Commit | None:
        found = [c for c in self.valid() if (ids is None or c.id in ids) and end in (None, c.hour)]
        return max(found, key=lambda c: (c.hour, c.id), default=None)

    def outputs(self) -> dict[int, Commit]:
        """The current output by hour."""
        return {c.hour: c for c in self.commits.values() if c.kind == "interval"}

    def columns(self, *, late: bool) -> Columns:
        """All columns that output has had, or late rows, each with its widest type."""
        made: Columns = {}
        for code in (c.code for c in self.commits.values() if c.code is not None):
            for name, kind in (code.input if late else code.output).items():
                made[name] = "bigint" if "bigint" in (kind, made.get(name)) else kind
        return made

    def spoilt(self) -> set[int]:
        """The hours with current output whose result is stale or quarantined, behind the last restored state."""
        since = max((c.hour + 1 for c in self.valid() if c.kind == "restore"), default=0)
        bad = {h for h, c in self.outputs().items() if c.id in self.stale or not self.good(c.id)}
        return {h for h in bad if h >= since}

    def restored(self) -> set[int]:
        """The hours at whose end other state was restored since their output: whether readers name them depends on what is retained."""
        restores = [c for c in self.commits.values() if c.kind == "restore"]
        return {h for h, c in self.outputs().items() if any(r.hour == h and r.id > c.id for r in restores)}

    def left_out(self, start: int, base: int | None) -> tuple[set[str], set[str]]:
        """The keys whose rows, and the keys whose state of before, an interval leaves out."""
        forgets = [(c.id, *c.forgets) for c in self.commits.values() if c.forgets is not None]
        rows = {key for _, key, until in forgets if start < until}
        return rows, {key for n, key, _ in forgets if key in rows or (base is not None and base < n)}


# --- a history ------------------------------------------------------------------------------------------------------------------


class History:
    def __init__(self, seed: int) -> None:
        self.random, self.oracle = random.Random(seed), Oracle()
        self.root = f"memory://readers-{seed}-{uuid.uuid4().hex[:6]}"
        self.folder = tempfile.TemporaryDirectory(prefix="cairn-readers-")
        self.table: dict[datetime, tuple[int, Rows]] = {}
        self.inputs = {n: self.new_rows() for n in range(HOURS)}
        # The code that is deployed, each version that was, and the one that each hour ran with last.
        self.code = Code.any(self.random)
        self.codes, self.ran = [self.code], dict[int, Code]()
        # The Delta tables of output and of late rows, of those histories that have them.
        has_tables = self.random.random() < 0.4
        self.urls = [f"file://{self.folder.name}/{name}" for name in ("table", "late")] if has_tables else []
        pipeline = Pipeline(
            name=NAME,
            start=START,
            source=lambda spark, interval: None,
            key=["user"],
            processor=self.code.processor(),
            output_schema=ddl(self.code.output),
            parallelism=self.random.choice((1, 2)),
            max_parallelism=4,
            time_mode="event",
            event_time="at",
            watermark="interval",
            watermark_delay=timedelta(0),
            sink=self.table_sink() if self.urls else self.sink,
        )
        self.mode: Any = self.random.choice(("incremental", "changelog"))
        self.deploy(self.code, pipeline)
        self.storage = open_storage(join_url(self.root, NAME))
        self.validated: dict[str, set[int]] = {"fast": set(), "full": set()}
        self.forgetting: str | None = None
        self.retracting = set[int]()
        self.keep()

    def deploy(self, code: Code, pipeline: Pipeline) -> None:
        self.code = code
        pipeline = replace(pipeline, processor=code.processor(), output_schema=ddl(code.output))
        kept: Any = {"root": self.root, "every": HOUR, "mode": self.mode, "call_sink": True}
        self.tester = PipelineTester(pipeline, input_schema=ddl(code.input), **kept)

    def close(self) -> None:
        forget_memory(self.root)
        self.folder.cleanup()

    @property
    def coordinator(self) -> Any:
        return coordinator_of(self.tester.pipeline, self.root)

    def new_rows(self) -> list[tuple[str, int]]:
        return [(self.random.choice(USERS), self.random.randint(1, 99)) for _ in range(self.random.randint(0, 3))]

    def sink(self, spark: Any, files: list[str], interval: Interval, checkpoint_id: int) -> None:
        """A table that replaces the rows of an interval, and refuses an older call."""
        before, _ = self.table.get(interval.start, (0, Counter()))
        if checkpoint_id >= before:
            self.table[interval.start] = checkpoint_id, self.rows_in(files)

    def table_sink(self) -> TableSink:
        return sinks.delta(self.urls[0]).with_late_rows(sinks.delta(self.urls[1]))

    def in_table(self, *, late: bool) -> Rows:
        if not self.urls:
            return sum((seen for _, seen in self.table.values()), Rows())
        table = deltalake.DeltaTable(self.urls[late]).to_pyarrow_table()
        return rows_of(table.to_pylist(), without=(START_COLUMN, END_COLUMN, CHECKPOINT))

    def rows_in(self, files: list[str]) -> Rows:
        found = Rows()
        for url in files:
            table = pq.read_table(io.BytesIO(self.storage.read(url.removeprefix(f"{join_url(self.root, NAME)}/"))))
            found.update(rows_of(table.to_pylist()))
        return found

    # --- what happens -------------------------------------------------------------------------------------------------------------

    def step(self) -> str:
        log = self.coordinator.log()
        often = {"next": 6, "again": 3, "columns": 3, "old_code": 2, "heal": 2, "consolidate": 2, "validate": 2}
        once = ("correct", "restore", "quarantine", "release", "forget", "keep")
        names = [*once, *(name for name, times in often.items() for _ in range(times))]
        name = self.random.choice(names)
        try:
            getattr(self, name)(log)
        except CairnError as error:
            name = f"{name}: {type(error).__name__}"
        self.take_up()
        return name

    def run(self, n: int) -> None:
        rows = [self.code.read(user, amount, hour(n).start + timedelta(minutes=5)) for user, amount in self.inputs[n]]
        self.tester.run([*rows, *self.late_rows(n, self.code)], hour(n))
        self.ran[n] = self.code

    def late_rows(self, n: int, code: Code) -> list[dict[str, Any]]:
        """Rows whose event time is at or before the watermark of the interval before."""
        return [code.read("eve", 1, START - HOUR)] if n else []

    def next(self, log: Log) -> None:
        last = max((c.hour for c in self.oracle.commits.values()), default=-1)
        self.run(min(last + 1, HOURS - 1))

    def again(self, log: Log) -> None:
        if self.oracle.commits:
            self.run(self.random.choice(sorted(self.oracle.outputs())))

    def old_code(self, log: Log) -> None:
        """Run an hour with the code that it had, and go on with that code, or with that of now."""
        now = self.code
        if self.oracle.commits:
            n = self.random.choice(sorted(self.oracle.outputs()))
            self.deploy(self.ran[n], self.tester.pipeline)
            try:
                self.run(n)
            finally:
                if self.random.random() < 0.7:
                    self.deploy(now, self.tester.pipeline)

    def correct(self, log: Log) -> None:
        if self.oracle.commits:
            n = self.random.choice(sorted(self.oracle.outputs()))
            self.inputs[n] = self.new_rows()
            self.run(n)

    def heal(self, log: Log) -> None:
        rerun = status_of(log, NAME, self.storage).rerun
        for n in range(HOURS) if rerun is not None else ():
            if rerun is not None and rerun.first <= hour(n).start <= rerun.last:
                self.run(n)

    def restore(self, log: Log) -> None:
        if valid := self.oracle.valid():
            target, attempt = self.random.choice(valid).id, str(uuid.uuid4())
            retracts = self.random.random() < 0.3
            done = rewind(self.coordinator.at, target, run=_run(attempt), attempt=attempt, retract_output=retracts)
            self.retracting |= {done.id} if retracts else set()

    def quarantine(self, log: Log) -> None:
        if log.retained:
            self.coordinator.quarantine(self.random.choice(sorted(log.retained)), "wrong")

    def release(self, log: Log) -> None:
        if log.quarantined:
            self.coordinator.release(self.random.choice(sorted(log.quarantined)))

    def columns(self, log: Log) -> None:
        """Deploy new code, or roll back."""
        self.codes.append(Code.any(self.random))
        self.deploy(self.random.choice((self.codes[-1], *self.codes)), self.tester.pipeline)

    def forget(self, log: Log) -> None:
        self.forgetting = self.random.choice(USERS)
        asked = ["erase", *self.where(), json.dumps({"user": self.forgetting}), "--on-rerun", "filter", "--yes"]
        CliRunner().invoke(app, asked)

    def consolidate(self, log: Log) -> None:
        if valid := self.oracle.valid():
            with mock.patch.object(take_savepoint, "run_on_shards", run_here):
                record = log.whole(self.random.choice(valid).id)
                consolidate_checkpoint(None, self.tester.pipeline, self.root, record)  # type: ignore[arg-type]

    def keep(self, log: Log | None = None) -> None:
        policy = AnyOf((KeepLast(self.random.randint(1, 5)), KeepQuarantined(self.random.choice((0, 14)))))
        self.tester.deploy(replace(self.tester.pipeline, retention=policy))

    def validate(self, log: Log) -> None:
        if log.retained:
            mode: Any = self.random.choice(("fast", "full"))
            n = self.random.choice(sorted(log.retained))
            self.coordinator.mark_validated(n, mode)
            self.validated[mode].add(n)

    def take_up(self) -> None:
        """Tell the oracle what was committed, published and cleaned up."""
        self.tester.pipeline.call_sink(self.coordinator.at, None)
        self.coordinator.clean_up()
        log, before = self.coordinator.log(), len(self.oracle.commits)
        for n in range(max(self.oracle.commits, default=0) + 1, log.head_id + 1):
            entry = log.entry(n)
            if entry is not None and not isinstance(entry, SweepRecord):
                self.oracle.add(self.commit_of(entry))
        if len(self.oracle.commits) == before + 1:
            # Of what was there before this one commit, and of the commit itself, the newest state and the newest validated state stay.
            self.oracle.retained.add(max(self.oracle.commits))
            for ids in (None, *self.validated.values()):
                newest = self.oracle.newest(ids)
                assert newest is None or newest.id in log.retained, ("dropped", newest, ids)
        self.oracle.retained, self.oracle.refused = {*log.retained}, {*log.quarantined}

    def commit_of(self, entry: Any) -> Commit:
        n, kind = int((interval_of(entry).start - START) / HOUR), kind_of(entry)
        base = entry.content.base_id if isinstance(entry, Record) else entry.base_id
        state = {} if base is None else dict(self.oracle.commits[base].state)
        made = {"id": entry.id, "kind": kind, "hour": n, "base": base, "reproduces": entry.reproduces is not None}
        if kind == "forget":
            assert self.forgetting is not None
            state.pop(self.forgetting, None)
            until = max(c.hour + 1 for c in self.oracle.commits.values())
            return Commit(state=state, forgets=(self.forgetting, until), **made)
        if kind != "interval":
            return Commit(state=state, **made)
        no_rows, no_state = self.oracle.left_out(n, base)
        state = {user: total for user, total in state.items() if user not in no_state}
        code, seen = self.ran[n], []
        for user in {user for user, _ in self.inputs[n]} - no_rows:
            state[user] = state.get(user, 0) + sum(amount for other, amount in self.inputs[n] if other == user)
            seen.append(_row(code.output, user=user, total=state[user]))
        return Commit(state=state, rows=rows_of(seen), late=rows_of(self.late_rows(n, code)), code=code, **made)

    # --- what readers see ---------------------------------------------------------------------------------------------------------

    def where(self) -> list[str]:
        return ["--root", self.root, "--pipeline", NAME]

    def told(self, *words: str, refusal: str = "no usable checkpoint") -> Any:
        """The JSON that a command prints; None if it refuses, by default because there is no such state."""
        READS[f"cairn {words[0]}"] += 1
        result = CliRunner().invoke(app, [*words, *self.where(), "--json"])
        assert result.exit_code in (0, 1, 2) and "Traceback" not in result.output, (words, result.output)
        refused = not result.stdout.strip()
        assert not refused or refusal in result.stderr, (words, result.stderr)
        return None if refused else json.loads(result.stdout)

    def check(self, *, commands: bool) -> None:
        log, oracle = self.coordinator.log(), self.oracle
        if not oracle.commits:
            return
        newest = oracle.newest()
        assert newest is not None or not oracle.valid()
        self.check_status(log, newest)
        named = newest_states.checkpoint_named(log, "latest")
        assert named == (None if newest is None else newest.id), ("latest", named, newest)
        for n in range(HOURS):
            at, found = oracle.newest(end=n), newest_states.checkpoint_named(log, hour(n).end)
            assert found == (None if at is None else at.id), (hour(n), found, at)
        self.check_state(newest)
        self.check_output(log)
        self.check_page(newest)
        if commands:
            self.check_commands(newest)

    def check_status(self, log: Log, newest: Commit | None) -> None:
        READS["status"] += 1
        found = status_of(log, NAME, self.storage)
        assert found.next is not None
        goes_on = newest is not None and hour(newest.hour).end == found.next.start
        assert (found.problem is None) == goes_on, (found, newest)
        assert found.base == (newest.id if goes_on and newest is not None else None)
        assert not found.unpublished

    def check_state(self, newest: Commit | None) -> None:
        for what, end in (
            ("latest", None),
            *((format_instant(hour(n).end), n) for n in self.random.sample(range(HOURS), 1)),
        ):
            expected = newest if end is None else self.oracle.newest(end=end)
            checkpoint: Any = what if end is None else datetime.fromisoformat(what)
            if expected is None:
                with pytest.raises(CairnError, match="no usable checkpoint"):
                    self.tester.state("total", checkpoint)
                continue
            READS["PipelineTester.state"] += 1
            assert {r["key_user"]: r["n"] for r in self.tester.state("total", checkpoint)} == expected.state, what
            READS["keyed_state"] += 1
            source = KeyedState({"root": self.root, "pipeline": NAME, "state": "total", "checkpoint": what})
            assert {r["key"]["user"]: r["value"]["n"] for r in _read(source)[1]} == expected.state, what

    def check_output(self, log: Log) -> None:
        current, spoilt, oracle_restored = self.oracle.outputs(), self.oracle.spoilt(), self.oracle.restored()
        # A person who restores decides whether later output is retracted.
        retracts = [c for c in self.oracle.commits.values() if c.id in self.retracting]
        gone = {h for h, c in current.items() if any(r.id > c.id and r.hour < h for r in retracts)}
        current = {h: c for h, c in current.items() if h not in gone}
        spoilt -= gone
        assert {i: n for i, (n, _) in log.current_outputs().items()} == {hour(h): c.id for h, c in current.items()}, (
            gone
        )
        low = self.random.choice((None, self.random.randrange(HOURS)))
        start = None if low is None else hour(low).start
        mine = [c for h, c in current.items() if low is None or h >= low]
        asked = {"root": self.root, "pipeline": NAME, **({} if start is None else {"start": start.isoformat()})}
        told = {h for h in spoilt - oracle_restored if low is None or h >= low}
        with Warnings() as said:
            READS["output_files"] += 1
            assert self.rows_in(output_files(self.root, NAME, start=start)) == total_of(mine)
        self.check_notice(said, told)
        assert self.rows_in(output_files(self.root, NAME, late=True, start=start)) == total_of(mine, late=True)
        if self.oracle.outputs():  # also if all of it was retracted
            with Warnings() as said:
                self.check_table(asked, mine, late=False)
            self.check_notice(said, told)
            if told:
                with pytest.raises(CairnError, match="whose result is not valid"):
                    KeyedOutput(asked | {"valid": "true"}).schema()
            self.check_table(asked | {"late": "true"}, mine, late=True)
        for late in (False, True) if self.urls else (False,):
            assert self.in_table(late=late) == total_of(current.values(), late=late)
        READS["Delta table" if self.urls else "table"] += 1
        whole = Interval(START, START + HOURS * HOUR)
        made = made_within(log, whole)
        assert {i: one.id for i, one in made.items()} == {hour(h): c.id for h, c in current.items()}
        for h, state in ((h, made[hour(h)].state) for h in current):
            of_state = [c for c in self.oracle.commits.values() if c.hour == h and self.oracle.good(c.id)]
            if state is not None and of_state:
                assert self.oracle.commits[state.id].state == of_state[-1].state

    def check_table(self, asked: dict[str, str], mine: list[Commit], *, late: bool) -> None:
        """Compare the rows and the columns of `keyed_output`."""
        READS["keyed_output, late" if late else "keyed_output"] += 1
        schema, rows = _read(KeyedOutput(asked))
        assert {f.name: f.dataType.simpleString() for f in schema} == self.oracle.columns(late=late)
        assert rows_of(rows) == total_of(mine, late=late)

    def check_notice(self, said: list[str], spoilt: set[int]) -> None:
        assert len(said) <= 1, said
        for h in {*range(HOURS)} - self.oracle.restored():
            assert (str(hour(h)) in "".join(said)) == (h in spoilt), (h, said)

    def check_page(self, newest: Commit | None) -> None:
        READS["page"] += 1
        ref = PipelineRef(name=NAME, root=self.root, dag_id=None, code=None, restore_dags=())
        reading = Reader(lambda _: self.storage).look(ref).reading
        assert reading is not None
        shown = latest_usable(reading)
        assert (None if shown is None else shown.id) == (None if newest is None else newest.id)
        passed = self.oracle.newest(ids={*self.validated["fast"], *self.validated["full"]})
        found = newest_validated(reading)
        assert (None if found is None else found.id) == (None if passed is None else passed.id)
        valid = self.oracle.valid()
        later = [c for c in valid if passed is None or (c.hour, c.id) > (passed.hour, passed.id)]
        assert unvalidated_since(reading) == ((len(later), None if passed is None else passed.id) if valid else None)

    def check_commands(self, newest: Commit | None) -> None:
        end = None if newest is None else format_instant(hour(newest.hour).end)
        user = self.random.choice(USERS)
        got = self.told("key", user)
        shown = self.told("checkpoints", "latest")
        # A key was forgotten since, by a commit that is quarantined now: no command makes the state of before the newest one.
        holds = newest is not None and any(c.forgets and c.id > newest.id for c in self.oracle.commits.values())
        refusal = "may hold a key that `cairn erase` removed" if holds else "no usable checkpoint"
        for command in (["restore", "latest", "--dry-run"], ["fork", "--as", "other", "--dry-run"]):
            plan = self.told(*command, refusal=refusal)
            assert (None if plan is None else plan["end"]) == (None if holds else end), command
        exported = self.told("export", "--folder", f"memory://exports/{uuid.uuid4().hex}", "--state", "total")
        verified = self.told("check", "--fast")
        listed = self.told("status")
        (line,) = json.loads(CliRunner().invoke(app, ["status", "--root", self.root, "--json"]).stdout)
        assert verified["newest_intact"] == (None if newest is None else newest.id)
        if newest is None:
            assert (got, shown, exported, line["last"]) == (None, None, None, None)
            return
        rows = got["states"].get("total", [])
        assert (got["checkpoint"], got["interval"]) == (newest.id, str(hour(newest.hour)))
        assert [row["value"]["n"] for row in rows] == ([newest.state[user]] if user in newest.state else [])
        assert (shown["id"], shown["end"], line["last"][1]) == (newest.id, end, end)
        assert sum(file["rows"] for file in exported["files"]) == len(newest.state)
        assert listed["base"] in (newest.id, None)
        compared = self.told("diff", str(newest.id), "--fast")
        assert compared["second"] == newest.id and compared["same_state"] is True


def _run(attempt: str) -> RunRef:
    return RunRef(run_id=f"restore__{attempt}", clear_number=0, try_number=1)


def _read(source: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The schema and the rows that Spark would get from a data source."""
    schema = source.schema()
    reader = source.reader(schema)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert all(batch.schema == arrow_schema(schema.jsonValue()) for batch in batches)
    return schema, [row for batch in batches for row in batch.to_pylist()]


class Warnings(logging.Handler):
    """The warnings of readers of output within the block."""

    def __enter__(self) -> list[str]:
        self.said: list[str] = []
        logging.getLogger("cairn").addHandler(self)
        return self.said

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("cairn").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "whose result is not valid" in record.getMessage():
            self.said.append(record.getMessage())


def explore(seeds: range) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed)
        steps = []
        try:
            for n in range(STEPS):
                steps.append(history.step())
                history.check(commands=n % 5 == 4 or n == STEPS - 1)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"history {seed}, after {steps}: {error}") from error
        finally:
            history.close()
        happened.update(steps)
    return happened


@pytest.mark.parametrize("part", range(at_tier(fast=1, ci=2, all=10)))
def test_readers_and_commands_take_the_newest_state_and_the_current_output(part: int) -> None:
    parts = at_tier(fast=1, ci=2, all=10)
    happened = explore(range(part * HISTORIES // parts, (part + 1) * HISTORIES // parts))
    print(dict(sorted(happened.items())), dict(sorted(READS.items())))
    assert happened["next"] and happened["again"]


def _highest_id(log: Log, which: Any) -> int | None:
    if isinstance(which, int):
        return which if which in log.retained else None
    fitting = (k.id for k in reversed(log.kept) if which in ("latest", k.interval.end))
    return next((n for n in fitting if log.quarantine_above(n) is None), None)


FAULTS: dict[str, Mapping[str, Any]] = {
    "the highest id is the newest": {"state_backend.checkpoint.find_checkpoint.checkpoint_named": _highest_id},
    "the page goes by ids": {
        "cairn_ui.pipeline_overview.newest_of": lambda states: max(states, key=lambda kept: kept.id, default=None)
    },
    "a replaced state counts": {"state_backend.checkpoint.newest_state.is_superseded": lambda log, candidate: False},
}


@pytest.mark.long("it tests this test")
@pytest.mark.parametrize("fault", FAULTS)
def test_random_histories_of_readers_find_each_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, instead in FAULTS[fault].items():
        monkeypatch.setattr(what, instead)
    with pytest.raises(AssertionError, match="history"):
        explore(range(60))
