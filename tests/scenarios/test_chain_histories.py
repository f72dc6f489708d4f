"""Random chains of pipelines through the real runtime, without Spark, against plain Python that computes them from scratch.

A history corrects raw input, changes code, restores, quarantines, rescales, fills gaps, and heals with `cairn heal --chain`, which is
killed in between. After each step, no wrong result counts as valid, and nothing that was just computed is out of date. What heal runs is a
part of what `cairn plan` said before, in its order.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from typer.testing import CliRunner

from cairn import Pipeline, testing, upstream, upstreams
from cairn.command import heal, plan
from cairn.command.cli import app
from cairn.command.terminal import Terminal
from cairn.operations.intervals import plan_chain, process_interval
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.operations.output_files import output_files
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters import memory_storage
from state_backend.adapters.open_storage import open_storage
from state_backend.chains import inputs_of, judge_inputs
from state_backend.chains.judge_inputs import Chains, Verdict
from state_backend.checkpoint import clean_up_dropped, parallel
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import base_of, interval_of, kind_of, read_log
from state_backend.checkpoint.quarantine import quarantine_checkpoint, release_checkpoint
from state_backend.checkpoint.rewind import rewind
from state_backend.formats import paths, record_codec
from state_backend.inspection.chain_of import chain_of
from state_backend.values.errors import InputNotReady, StateUnusable, UsageError
from state_backend.values.inputs import Edge, InputRead
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.marks import Settled
from state_backend.values.records import Permissions, Record, Tombstone, own_run
from state_backend.values.retention import KeepLast
from state_backend.values.schedule import Cron
from tests.support.faulty_storage import FaultyStorage, StopHere, stop_at
from tests.support.in_process import SESSION, UTC_ZONE
from tests.support.tiers import ALL

RAW, ROWS = parse_ddl_locally("k string, n long, at timestamp"), parse_ddl_locally("k string, n long")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
# Days on which clocks change, each with the day before or after.
CHANGES = (("America/New_York", (2024, 3, 10)), ("America/New_York", (2024, 11, 3)), ("Europe/Berlin", (2024, 10, 27)))
Rows, RawRows, Code = Counter[tuple[str, int]], tuple[tuple[str, int, int], ...], tuple[int, int]
# A pipeline's name and the index of an interval.
At = tuple[str, int]


class Fold(StatefulProcessor):  # type: ignore[misc]
    """State and output are numbers from few: often one of them stays equal while the other changes."""

    def __init__(self, weight: int, bump: int) -> None:
        self.code = weight, bump

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        total, n = folded((self._total.get() or (0,))[0], [row.n for row in rows], *self.code)
        self._total.update((total,))
        yield Row(k=key[0], n=n)


def folded(before: int, values: list[int], weight: int, bump: int) -> tuple[int, int]:
    total = (before + weight * sum(values)) % 3
    return total, (total + 2 * len(values) + bump) % 4


HERE, ROOTS = sys.modules[__name__], ("memory://chains-a", "memory://chains-b")
IN_TURN = mock.MagicMock()  # in the place of a pool of threads
IN_TURN.return_value.__enter__.return_value.map = map


def gather(spark: Any, interval: Interval, **frames: Any) -> LocalRows:
    """The function of `upstreams`: all rows as k and n; entries of a state as rows."""
    rows = [row for one in frames.values() for row in one.table.to_pylist()]
    pairs = [(r["key"]["k"], r["value"]["n"]) if "key" in r else (r["k"], r["n"]) for r in rows]
    return LocalRows(pairs, ROWS, UTC_ZONE)


def read_raw(spark: Any, interval: Interval, name: str) -> Any:
    rows = [(k, n, interval.start + timedelta(minutes=m)) for k, n, m in WORLDS[-1].raw[name, interval]]
    return LocalRows(rows, RAW, UTC_ZONE), {"rows": repr(rows)}


# --- pipelines -------------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    out: Rows
    late: Rows
    state: Mapping[str, int]


def without(rows: Any) -> Any:
    """Return rows, or a state, after `cairn erase` of the key a."""
    return type(rows)({row: n for row, n in rows.items() if row[0] != "a"})


@dataclass(frozen=True)
class Commit:
    """What an interval's commit was made of, and its result; of a restored state only `n`, `base` and `state`.

    `reads`: by edge, what was read of each interval. `refused`: the commits that did not count at that time.
    """

    n: int
    base: int | None
    state: Mapping[str, int]
    raw: RawRows = ()
    code: Code = (1, 0)
    reads: tuple[Mapping[int, Any], ...] = ()
    result: Result | None = None
    refused: frozenset[int] = frozenset()


@dataclass
class Pipe:
    """A pipeline, and what plain Python knows of its commits.

    `grid`: its intervals, from the start of time on; `first`: the index of its own first one.
    """

    root: str
    grid: tuple[Interval, ...]
    first: int
    edges: tuple[Edge, ...]
    declared: Pipeline
    code: Code = (1, 0)
    # True if a pipeline reads the state: it is kept, and no interval is left out.
    read_as_state: bool = False
    commits: dict[int, Commit] = field(default_factory=dict)
    head: int = 0
    # The commit of each interval's current output.
    current: dict[int, int] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)
    # Commits without inputs and digests, as an older release wrote them.
    old: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name, self.event = self.declared.name, self.declared.time_mode == "event"
        self.at = self.root, self.name

    def runs(self, n: int) -> list[int]:
        return [i for i, made in self.commits.items() if made.n == n and made.result is not None]

    def is_plain(self, up: str) -> bool:
        """Return True if the pipeline reads one upstream, as it is."""
        return [edge.pipeline for edge in self.edges] == [up] and self.declared.source.function is None

    def made(self, n: int) -> Commit:
        return self.commits[self.current[n]]

    def changed(self, number: int) -> bool:
        """True if an interval's commit left another state than its commit before, or than the last one that counted."""
        earlier = [i for i in self.runs(self.commits[number].n) if i < number]
        valid = [i for i in earlier if i not in self.commits[number].refused]
        states = [self.commits[i].state for i in (*earlier[-1:], *valid[-1:])]
        return not earlier or any(state != self.commits[number].state for state in states)

    def counts(self, number: int | None) -> bool:
        """Return False if the commit or one that it was made from is quarantined."""
        while number is not None and number not in self.quarantined:
            number = self.commits[number].base
        return number is None

    def restored_until(self) -> tuple[int, int]:
        """The interval at whose end a person's restored state counts, since nothing changed it later, and the restore; -1 without one."""
        found = [(-1, 0)]
        for number, made in self.commits.items():
            if made.result is None and self.counts(number):
                later = [(i, one) for i, one in self.commits.items() if i > number and one.n <= made.n]
                if not any(one.n < made.n if one.result is None else self.changed(i) for i, one in later):
                    found.append((made.n, number))
        return max(found)

    def compute(
        self, n: int, before: Mapping[str, int], raw: RawRows, code: Code, reads: Iterable[Mapping[int, Any]]
    ) -> Result:
        late, rows, out, state = Rows(), Rows(), Rows(), dict(before)
        for k, v, minutes in raw:
            (late if self.event and n > self.first and minutes <= 0 else rows)[k, v] += 1
        for content in itertools.chain.from_iterable(one.values() for one in reads):
            rows.update(content if isinstance(content, Counter) else Counter(content.items()))
        for key in sorted({k for k, _ in rows}):
            values = [v for k, v in rows.elements() if k == key]
            state[key], made = folded(state.get(key, 0), values, *code)
            out[key, made] += 1
        return Result(out, late, state)


def pieces(first: datetime, count: int, length: timedelta, zone: str = "UTC") -> tuple[Interval, ...]:
    """Days and weeks count local time: one may have 23 or 25 hours more or less."""
    ends = [(first.replace(tzinfo=ZoneInfo(zone)) + n * length).astimezone(UTC) for n in range(count + 1)]
    return tuple(map(Interval, ends, ends[1:]))


def grids(chance: random.Random) -> tuple[list[tuple[tuple[Interval, ...], Any]], int]:
    """Return fine and coarse intervals with their schedules, and the most pipelines of fine ones."""
    what, first = chance.choice(["equal", "equal", "days", "days", "weeks", "weeks", "zone"]), datetime(2024, 1, 1)
    if what == "zone":
        zone, changes = chance.choice(CHANGES)
        coarse = pieces(datetime(*changes), 2, DAY, zone)
        begin, hours = coarse[0].start.replace(tzinfo=None), (coarse[-1].end - coarse[0].start) // HOUR
        return [(pieces(begin, hours, HOUR), "@hourly"), (coarse, Cron("0 0 * * *", zone))], 1
    days = (pieces(first, 14 if what == "weeks" else 4, DAY), "@daily")
    if what == "weeks":
        return [days, (pieces(first, 2, 7 * DAY), Cron("0 0 * * 1"))], 3
    return [(pieces(first, 16, 6 * HOUR), 6 * HOUR) if what == "days" else days, days], 3


def some_upstream(chance: random.Random, up: Pipe, root: str) -> Any:
    """Another upstream: its state, its late rows, all before, or what is inside."""
    what = chance.choices([{"state": "total"}, {"late": True}, {"mapping": "all"}, {}], [5, 10 * up.event, 3, 12])
    how: Any = {"root": None if up.root == root else up.root, "tracked": chance.random() < 0.95, **what[0]}
    return upstream(up.name, back=chance.choice([0, 0, 0, 1]), **how)


def graph(chance: random.Random, sink: Any) -> list[Pipe]:
    """3 to 6 pipelines, in an order in which they can run."""
    levels, most = grids(chance)
    count = chance.randint(3, 4 if most == 1 else 6)
    fine, made = min(most, chance.randint(1, count - 1)), list[Pipe]()
    for n in range(count):
        grid, schedule = levels[n >= fine]
        name, root = f"p{n}", chance.choice([ROOTS[0], ROOTS[0], ROOTS[1]])
        reads = chance.sample(made, min(n, chance.choice([1, 1, 2]))) if n >= fine or chance.random() < 0.4 else []
        ups = {up.name: some_upstream(chance, up, root) for up in reads}
        edges = tuple(edge for one in ups.values() for edge in one.edges.values())
        source: Any = partial(read_raw, name=name)
        if edges:
            alone = len(edges) == 1 and edges[0].reads != "state"
            source = ups[reads[0].name] if alone else upstreams(gather, **ups)
        first = 1 if n and chance.random() < 0.15 else 0
        how: dict[str, Any] = {"time_mode": "none"}
        if not edges and chance.random() < 0.4:
            how = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(0), "watermark": "interval"}
        declared = Pipeline(
            name=name,
            start=grid[first].start,
            schedule=schedule,
            source=source,
            key=["k"],
            processor=Fold,
            output_schema="k string, n long",
            version="1",
            parallelism=1,
            max_parallelism=4,
            retention=KeepLast(chance.choice([1, 3, 500])),
            sink=partial(sink, name) if n == count - 1 else None,
            **how,
        )
        declared = replace(declared, engine=replace(declared.engine, cache_dir=None))
        made.append(Pipe(root, grid, first, edges, declared))
    for up in {e.pipeline for p in made for e in p.edges if e.reads == "state"}:
        pipe = made[int(up[1:])]
        pipe.read_as_state, pipe.declared = True, replace(pipe.declared, retention=KeepLast(500))
    return made


# --- what must be true -----------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Pipelines below two roots, and what plain Python knows of them."""

    chance: random.Random
    raw: dict[tuple[str, Interval], RawRows] = field(default_factory=dict)
    # Intervals that ran, each as pipeline and start.
    ran: list[tuple[str, str]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    started, sink_dies = False, False
    # A pipeline, its files, and what was known of it then.
    backup: tuple[Pipe, dict[str, Any], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for root in ROOTS:
            memory_storage.forget_memory(root)
        self.table = sqlite3.connect(":memory:", check_same_thread=False)
        self.table.execute("CREATE TABLE t (start, id, k, n)")
        self.pipes = graph(self.chance, self.sink)
        self.by_name = {pipe.name: pipe for pipe in self.pipes}
        self.raw_pipes = [pipe for pipe in self.pipes if not pipe.edges]
        self.raw = {(pipe.name, interval): self.some_rows() for pipe in self.raw_pipes for interval in pipe.grid}
        self.now = self.actual()
        self.deploy()

    def some_rows(self) -> RawRows:
        one = lambda: (self.chance.choice("ab"), self.chance.randrange(3), self.chance.choice([-5, 5, 5]))  # noqa: E731
        return tuple(one() for _ in range(self.chance.randint(1, 3)))

    def sink(self, name: str, spark: Any, found: list[str], interval: Interval, checkpoint_id: int) -> None:
        """A table with the rows of each interval; of two calls, the one with the larger id counts."""
        if self.sink_dies and interval == self.pipes[-1].grid[-1]:
            raise StopHere  # between the last commit and the publication
        start = format_instant(interval.start)
        if self.table.execute("SELECT 1 FROM t WHERE start = ? AND id > ?", (start, checkpoint_id)).fetchone() is None:
            self.table.execute("DELETE FROM t WHERE start = ?", (start,))
            rows = [(start, checkpoint_id, *row) for row in (*rows_of(found).elements(), (None, None))]
            self.table.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)

    def deploy(self) -> None:
        """Commands load a pipeline by its name in this module."""
        for pipe in self.pipes:
            pipe.declared = replace(pipe.declared, processor=partial(Fold, *pipe.code))
            setattr(HERE, pipe.name.upper(), pipe.declared)

    def on_shards(self, spark: Any, job: Any, inputs: Any) -> Any:
        self.ran.append((job.content.pipeline, format_instant(job.content.interval.start)))
        return testing._on_shards(self.by_name[job.content.pipeline].declared.processor, spark, job, inputs)

    def sync(self) -> None:
        """Follow the logs. What each new commit wrote is what plain Python computes of its base and of what it read."""
        for pipe in self.pipes:
            log = read_log(_OPEN(f"{pipe.root}/{pipe.name}"))
            if log.head_id == pipe.head:
                continue
            index = {interval: n for n, interval in enumerate(pipe.grid)}
            for number in range(pipe.head + 1, log.head_id + 1):
                if isinstance(entry := log.entries[number], Record | Tombstone):
                    self._follow(pipe, number, entry, index[interval_of(entry)])
            pipe.head, pipe.current = log.head_id, {index[i]: n for i, (n, _) in log.current_outputs().items()}
            self.now = self.actual()

    def _follow(self, pipe: Pipe, number: int, entry: Record | Tombstone, n: int) -> None:
        base = base_of(entry)
        before = {} if base is None else pipe.commits[base].state
        if kind_of(entry) == "forget":
            before = without(before)
            for i, made in ((i, pipe.commits[i]) for i in pipe.current.values()):
                result = Result(without(made.result.out), without(made.result.late), made.state)
                reads = tuple({m: without(read) for m, read in one.items()} for one in made.reads)
                pipe.commits[i] = replace(made, result=result, reads=reads)
        if kind_of(entry) != "interval":
            pipe.commits[number] = Commit(n, base, before)
            return
        raw, reads = self.raw.get((pipe.name, pipe.grid[n]), ()), self.reads(pipe, n, *self.now)
        result = pipe.compute(n, before, raw, pipe.code, reads)
        refused = frozenset(i for i in pipe.commits if not pipe.counts(i))
        pipe.commits[number] = Commit(n, base, result.state, raw, pipe.code, reads, result, refused)
        outputs = entry.content.outputs if isinstance(entry, Record) else entry.outputs
        for late, expected in ((False, result.out), (True, result.late)):
            found = rows_of(f"{pipe.root}/{pipe.name}/{f.handle.path}" for f in outputs if f.late == late)
            assert found == expected, f"{pipe.name} {number} wrote other rows than Python computes"

    def actual(self) -> tuple[dict[At, Any], dict[At, Mapping[str, int]]]:
        """The results that are current, and the state at each end."""
        results, states = dict[At, Any](), dict[At, Mapping[str, int]]()
        for pipe in self.pipes:
            given = [(i, made.n) for i, made in pipe.commits.items() if made.result is None]
            # A later one that goes further back takes a restored state out of use.
            restores = [(i, n) for i, n in given if not any(j > i and m < n for j, m in given)]
            results |= {(pipe.name, n): pipe.commits[i].result for n, i in pipe.current.items()}
            ends = sorted([*((i, n) for n, i in pipe.current.items()), *restores])
            states |= {(pipe.name, n): pipe.commits[i].state for i, n in ends}
        return results, states

    def reads(self, pipe: Pipe, n: int, results: Mapping[At, Any], states: Mapping[At, Any]) -> Any:
        return tuple(self._read(pipe, n, edge, results, states) for edge in pipe.edges)

    def _read(
        self, pipe: Pipe, n: int, edge: Edge, results: Mapping[At, Any], states: Mapping[At, Any]
    ) -> dict[int, Any]:
        if n < edge.back:
            return {}
        name, anchor = edge.pipeline, pipe.grid[n - edge.back]
        grid, found = self.by_name[name].grid, states if edge.reads == "state" else results
        if edge.reads == "state":
            inside = [m for m, i in enumerate(grid) if i.end == anchor.end]
        else:
            begin = grid[0].start if edge.mapping == "all" else anchor.start
            inside = [m for m, i in enumerate(grid) if i.start >= begin and i.end <= anchor.end]
        part = {"state": lambda r: r, "late": lambda r: r.late, "output": lambda r: r.out}[edge.reads]
        return {m: part(found[name, m]) for m in inside if (name, m) in found}

    def differs(self, pipe: Pipe, n: int) -> bool:
        reads = zip(pipe.edges, pipe.made(n).reads, self.reads(pipe, n, *self.now), strict=True)
        return any(then != now for edge, then, now in reads if edge.tracked)

    def from_scratch(self, given: set[At]) -> tuple[dict[At, Any], dict[At, Mapping[str, int]]]:
        """Compute everything anew with the input and the code of the last runs; take the results in `given` as they are."""
        results, states = dict[At, Any](), dict[At, Mapping[str, int]]()
        for pipe in self.pipes:
            at, state, (restored, restore) = pipe.name, dict[str, int](), pipe.restored_until()
            for n, number in sorted(pipe.current.items()):
                made, valid = pipe.made(n), [i for i in pipe.runs(n) if pipe.counts(i)]
                last = pipe.commits[valid[-1] if valid else number]
                reads = zip(pipe.edges, self.reads(pipe, n, results, states), made.reads, strict=True)
                read = [now if edge.tracked else then for edge, now, then in reads]
                anew = made.result if (at, n) in given else pipe.compute(n, state, last.raw, last.code, read)
                state = dict(pipe.commits[restore].state if n == restored else anew.state)
                results[at, n], states[at, n] = anew, state
        return results, states

    def judge(self) -> tuple[dict[At, Verdict], set[At], set[At]]:
        """Return all verdicts, what is out of date by verdicts or by its own log, and what is not known or given by a person."""
        self.sync()
        chains, verdicts, out, given = Chains(), dict[At, Verdict](), set[At](), set[At]()
        for pipe in self.pipes:
            name, index = pipe.name, {interval: n for n, interval in enumerate(pipe.grid)}
            verdicts |= {(name, index[i]): verdict for i, verdict in chains.judged(*pipe.at).items()}
            out |= {(name, index[i]) for i in chains.node(*pipe.at).spoilt}
            given |= {(name, n) for n, i in pipe.current.items() if i in pipe.old or n <= pipe.restored_until()[0]}
        given |= {at for at, verdict in verdicts.items() if verdict.kind == "unknown"}
        return verdicts, out | {at for at, verdict in verdicts.items() if verdict.kind != "unknown"}, given

    def check(self, just: Iterable[At] = ()) -> set[At]:
        """Compare what Cairn says with plain Python. Return what is out of date."""
        verdicts, out, given = self.judge()
        late = [(at, verdicts.get(at)) for at in just if at in out or at in verdicts]
        assert not late, f"it was just computed: {late}"
        scratch = self.from_scratch(given)[0]
        fresh = [at for at, result in self.now[0].items() if result != scratch[at] and at not in out]
        assert not fresh, f"wrong, but fresh: {fresh[0]}: {self.now[0][fresh[0]]}, not {scratch[fresh[0]]}"
        for (name, n), verdict in verdicts.items():
            pipe, self.seen[verdict.kind] = self.by_name[name], self.seen[verdict.kind] + 1
            read = {(e.pipeline, m) for e, one in zip(pipe.edges, pipe.made(n).reads, strict=True) for m in one}
            earlier = any(one == name and m < n and v.kind != "unknown" for (one, m), v in verdicts.items())
            old = any({*self.by_name[up].runs(m)} & self.by_name[up].old for up, m in read)
            because = {
                "stale": self.differs(pipe, n),
                "pending": out & read or earlier or self.differs(pipe, n),
                "unknown": old or pipe.current[n] in pipe.old or n <= pipe.restored_until()[0],
            }
            assert because[verdict.kind], f"{name} {n}: nothing makes it {verdict}"
        return out

    # --- steps ---

    def run(self, pipe: Pipe, ns: Iterable[int], reprocess: Any = "all", **more: Any) -> None:
        computed = list[At]()

        def note(one: Any, _: object) -> None:
            computed.extend([(pipe.name, pipe.grid.index(one.interval))] if one.computed else [])

        own, intervals = own_run(f"direct__{self.chance.random()}"), [pipe.grid[n] for n in ns]
        restored = pipe.restored_until()
        with suppress(InputNotReady, StateUnusable):
            run_intervals(
                SESSION, pipe.declared, intervals, pipe.root, reprocess=reprocess, run=own, on_outcome=note, **more
            )
        self.seen["ran"] += len(computed)
        if self.started:
            # If a run replaces a restored state, the results that the restore had discarded count again.
            self.check(at for at in computed if at[1] > restored[0] or pipe.restored_until() == restored)

    def begin(self) -> None:
        """All pipelines run for the first time, some of them on an older release, some with a gap."""
        for pipe in self.pipes:
            last = len(pipe.grid)
            upgraded = self.chance.choice([pipe.first] * 3 + [(pipe.first + last) // 2, last])
            if upgraded > pipe.first:
                self.run(pipe, range(pipe.first, upgraded))
                self.sync()
                pipe.old = {*pipe.current.values()}
                as_an_older_release_wrote(open_storage(f"{pipe.root}/{pipe.name}"))
            whole = pipe.edges or pipe.event or pipe.read_as_state or upgraded > pipe.first
            if not whole and self.chance.random() < 0.6:
                gap = self.chance.randrange(pipe.first + 1, last - 1)
                self.run(pipe, range(pipe.first, gap))
                self.run(pipe, range(gap + 1, last), permissions=Permissions(allow_gap=True))
            elif upgraded < last:
                self.run(pipe, range(upgraded, last))
        self.started = True
        assert not self.check(), "something of the beginning is out of date"

    def some_interval(self, pipes: list[Pipe]) -> tuple[Pipe, int]:
        pipe = self.chance.choice(pipes)
        return pipe, self.chance.randrange(pipe.first, len(pipe.grid))

    def correct(self) -> None:
        pipe, n = self.some_interval(self.raw_pipes)
        self.raw[pipe.name, pipe.grid[n]] = self.some_rows()
        self._run_on(pipe, n)

    def run_again(self) -> None:
        self._run_on(*self.some_interval(self.pipes))

    def _run_on(self, pipe: Pipe, n: int) -> None:
        count, reprocess = self.chance.choice([1, 1, 3, 99]), self.chance.choice(["all", "changed"])
        self.run(pipe, range(n, min(n + count, len(pipe.grid))), reprocess)

    def change_code(self) -> None:
        pipe, n = self.some_interval(self.pipes)
        # The second changes the output only.
        pipe.code = self.chance.choice([(3 - pipe.code[0], pipe.code[1]), (pipe.code[0], 1 - pipe.code[1])])
        self.deploy()
        self.run(pipe, range(self.chance.choice([pipe.first, n]), len(pipe.grid)))

    def rescale(self) -> None:
        pipe, n = self.some_interval(self.pipes)
        pipe.declared = replace(pipe.declared, parallelism=self.chance.choice([1, 2, 3]))
        self.deploy()
        self.run(pipe, [n])

    def quarantine(self) -> None:
        pipe, n = self.some_interval(self.pipes)
        if n in pipe.current:
            quarantine_checkpoint(locate(*pipe.at), pipe.current[n], "a person does not like it")
            pipe.quarantined.add(pipe.current[n])
            self.check()

    def release(self) -> None:
        for pipe, number in [(one, number) for one in self.pipes for number in sorted(one.quarantined)]:
            with suppress(UsageError):
                release_checkpoint(locate(*pipe.at), number)
                pipe.quarantined.remove(number)
                self.check()

    def restore(self) -> None:
        pipe = self.chance.choice(self.pipes)
        target = self.chance.choice(sorted(read_log(locate(*pipe.at).storage).retained))
        how: Any = {"run": own_run("rewind"), "attempt": str(self.chance.random())}
        with suppress(StateUnusable, UsageError):
            rewind(locate(*pipe.at), target, **how, retract_output=self.chance.random() < 0.3)
            self.check()

    def put_back(self) -> None:
        """Put the folder of a pipeline back as it was, run what was lost, and make a backup of another pipeline."""
        if self.backup is not None:
            pipe, folder, known = self.backup
            lost = {made.n for i, made in pipe.commits.items() if i > known["head"] and made.result is not None}
            for key in files_of(pipe):
                memory_storage.open_url(pipe.root)._files.pop(key)
            memory_storage.open_url(pipe.root)._files.update(folder)
            vars(pipe).update(known)
            self.now = self.actual()
            self.check()
            for n in lost if not pipe.edges else ():
                self.raw[pipe.name, pipe.grid[n]] = self.some_rows()
            self.run(pipe, range(min(lost, default=0), max(lost, default=-1) + 1))
        pipe = self.chance.choice(self.pipes[:-1])
        names = ("commits", "head", "current", "quarantined", "old")
        self.backup = pipe, files_of(pipe), {name: copy(getattr(pipe, name)) for name in names}

    def erase(self) -> bool:
        """Erase a key from raw output, and from some of the pipelines that read this output as it is."""
        raw = self.chance.choice(self.raw_pipes)
        same = [p for p in self.pipes[:-1] if p.is_plain(raw.name) and self.chance.random() < 0.5]
        for pipe in same:
            self.run(pipe, range(pipe.first, len(pipe.grid)))  # Of what it read before a re-run, it can't tell.
        for pipe in (raw, *same):
            how = ["--root", pipe.root, "--pipeline", pipe.name, '{"k": "a"}', "--rewrite-output", "--yes"]
            done = CliRunner().invoke(app, ["erase", *how])
            assert done.exit_code == 0, done.output
            self.check()
        return True

    def fill_gap(self) -> None:
        for pipe in self.pipes:
            if gaps := {*range(pipe.first, max(pipe.current, default=0))} - pipe.current.keys():
                self.run(pipe, [min(gaps)])

    # --- healing ---

    def heal(self, *, assumed: bool = False) -> None:
        """Heal from each pipeline that nobody reads. `assumed`: something is corrected after the plan."""
        # What an older release computed last is in no chain: each pipeline is typed then.
        old = any(max(pipe.runs(n)[-1] for n in pipe.current) in pipe.old for pipe in self.pipes)
        read = set() if old else {edge.pipeline for pipe in self.pipes for edge in pipe.edges}
        last = format_instant(max(pipe.grid[-1].start for pipe in self.pipes))
        for pipe in (pipe for pipe in self.pipes if pipe.name not in read):
            self._heal(pipe, ["--root", pipe.root, "--pipeline", pipe.name, "--to", last], assumed=assumed)
            assumed = False  # A reader below another root is healed from another pipeline.
        left = self.check()
        assert not left, f"heal left {left}"
        results, states = self.from_scratch(self.judge()[2])
        for pipe in self.pipes:
            found = {late: output_files(pipe.root, pipe.name, late=late) for late in (False, True)}
            for n, number in pipe.current.items():
                folder, expected = f"/{paths.interval_name(pipe.grid[n])}/", results[pipe.name, n]
                mine = {late: rows_of(f for f in files if folder in f) for late, files in found.items()}
                assert mine == {False: expected.out, True: expected.late}
                if pipe.declared.sink is not None:
                    start = (format_instant(pipe.grid[n].start),)
                    stored = self.table.execute("SELECT k, n FROM t WHERE start = ? AND k IS NOT NULL", start)
                    assert Rows(stored) == expected.out, f"the table lacks checkpoint {number} of {pipe.grid[n]}"
            assert rows_of(found[False]) == sum((results[pipe.name, n].out for n in pipe.current), Rows())
            entries = SESSION.read.format("keyed_state").options(root=pipe.root, pipeline=pipe.name, state="total")
            state = {row["key"]["k"]: row["value"]["n"] for row in entries.load().table.to_pylist()}
            assert state == states[pipe.name, max(pipe.current)]

    def _heal(self, pipe: Pipe, where: list[str], *, assumed: bool) -> None:
        """Type `cairn plan`, then `cairn heal --chain`, and type it again after a kill. What ran is part of the plan, in its order."""
        chain = {*chain_of(*pipe.at)}
        ups = [(up, n) for up in self.raw_pipes if up.at in chain for n in up.current] if assumed else []
        up, n = self.chance.choice(ups or [(pipe, 0)])
        rerun = ["--rerun", f"{up.name}={format_instant(up.grid[n].start)}"] if ups else []
        said = CliRunner().invoke(app, ["plan", *where, *rerun, "--json"])
        assert said.exit_code < 2, said.output
        plan = [(row["pipeline"], one) for row in json.loads(said.stdout)["pipelines"] for one in row["intervals"]]
        sure = {(name, one["start"]): one["sure"] for name, one in plan}
        self.ran.clear()
        if ups:
            self.raw[up.name, up.grid[n]] = self.some_rows()
            starts = {format_instant(up.grid[m].start): m for m in range(n + 1)}
            self.run(up, [m for start, m in starts.items() if (up.name, start) in sure])
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            self.sink_dies = self.chance.random() < 0.4
            most = 400 if not self.sink_dies else 1_000_000  # The sink is called late.
            with suppress(StopHere), dying(self.chance.randrange(most), self.chance.choice(["before", "after"])):
                CliRunner().invoke(app, ["heal", *where, "--chain"])
            self.sink_dies = False
            self.check()
        done = CliRunner().invoke(app, ["heal", *where, "--chain"])
        assert done.exit_code == 0, done.output
        self.sync()
        ran = [*dict.fromkeys(self.ran)]
        assert ran == [at for at in sure if at in ran], f"{ran} ran, which is no part of {sure}"
        assert all(at in ran for at in sure if sure[at]), f"{sure} was sure to run, but only {ran} ran"
        self.seen["healed"] += len(ran)
        self.seen["ended"] += len(sure) - len(ran)

    def check_need(self, here: Any, step: Any) -> None:
        """Check that `cairn heal` runs nothing without need."""
        self.sync()
        pipe = self.by_name[here.pipeline.name]
        for one in step.to_run:
            n = pipe.grid.index(one.interval)
            if n not in pipe.current or one.reason == "base dropped":
                continue
            number = pipe.current[n]
            later = [(i, made) for i, made in pipe.commits.items() if i > number and made.n <= n]
            moved = any(made.result is None or (made.n < n and pipe.changed(i)) for i, made in later)
            need = self.differs(pipe, n) if one.reason == "input changed" else moved or not pipe.counts(number)
            assert need, f"{pipe.name} {one.interval} runs without need: {one.reason}"


# What a test reads by itself, also while a process dies.
_OPEN, _CARRY_OUT = memory_storage.open_url, heal._Here.carry_out
WORLDS = list[World]()


def carry_out(here: Any, step: Any) -> None:
    WORLDS[-1].check_need(here, step)
    _CARRY_OUT(here, step)


def files_of(pipe: Pipe) -> dict[str, Any]:
    files = memory_storage.open_url(pipe.root)._files
    return {key: file for key, file in files.items() if key.startswith(f"{pipe.name}/")}


def rows_of(files: Iterable[str]) -> Rows:
    parts = [file.rpartition("/output/") for file in files]
    tables = [pq.read_table(pa.BufferReader(_OPEN(folder).read(f"output/{path}"))) for folder, _, path in parts]
    return Rows((row["k"], row["n"]) for table in tables for row in table.to_pylist())


def as_an_older_release_wrote(storage: Any) -> None:
    """Take what chains need out of all records and out of what repeats their outputs."""
    for info in [*storage.list(paths.CHECKPOINTS), *storage.list(f"{paths.SETTLED}commits/")]:
        entry = record_codec.decode(storage.read(info.path), info.path, Record, Tombstone, Settled)
        bare: Any = entry.content if isinstance(entry, Record) else entry
        bare = replace(bare, outputs=tuple(replace(file, digest=None) for file in bare.outputs))
        bare = bare if isinstance(entry, Settled) else replace(bare, inputs=())
        entry = replace(entry, content=replace(bare, followed=())) if isinstance(entry, Record) else bare
        storage.replace(info.path, record_codec.encode(entry), generation=info.generation)


@contextmanager
def dying(at: int, when: Any) -> Iterator[None]:
    """The process dies at a request."""
    process = FaultyStorage(memory_storage.MemoryStorage(), stop_at(at, when))
    with mock.patch.object(memory_storage, "open_url", lambda url, **more: process.beside(_OPEN(url, **more))):
        yield


STEPS: list[Callable[[World], None]] = [
    *(World.correct, World.correct, World.correct, World.run_again, World.change_code, World.rescale),
    *(World.quarantine, World.release, World.restore, World.fill_gap, World.fill_gap, World.put_back, World.put_back),
]


def play(seed: int, steps: int = 8) -> Counter[str]:
    """Play a history. Return what it met."""
    with ExitStack() as stack:
        world = World(random.Random(seed))
        WORLDS.append(world)
        stack.callback(WORLDS.clear)
        stack.enter_context(mock.patch.object(process_interval, "_on_spark", world.on_shards))
        stack.enter_context(mock.patch.object(parallel, "ThreadPoolExecutor", IN_TURN))
        stack.enter_context(mock.patch.object(Terminal, "connect", lambda *_, **__: SESSION))
        stack.enter_context(mock.patch.object(heal._Here, "carry_out", carry_out))
        # Half of the time is decoding equal bytes again.
        stack.enter_context(mock.patch.object(record_codec, "decode", cache(record_codec.decode)))
        world.begin()
        for _ in range(2):
            for _ in range(steps):
                world.chance.choice(STEPS)(world)
            world.heal()
        erased = world.chance.random() < 0.4 and world.erase()
        world.heal(assumed=not erased)
    return world.seen


@pytest.mark.parametrize("first", range(1, 61, 20) if ALL else [20])
def test_every_outdated_result_of_a_chain_is_reported_and_healed(first: int) -> None:
    seen = sum((play(seed) for seed in range(first, first + (20 if ALL else 4))), Counter[str]())
    print(dict(seen))
    assert seen["pending"] and seen["healed"] and seen["ended"] and not seen["unreadable"]


def digest_of_the_state(was: Any, edge: Edge, interval: Interval, number: int, files: Any) -> Any:
    entry: Any = Chains().log(*WORLDS[-1].by_name[edge.pipeline].at).entries[number]
    state = entry.content.digest if isinstance(entry, Record) else entry.digest
    return replace(was(edge, interval, number, files), digest=state)


def intervals_in(read: InputRead) -> int:
    return sum(part.intervals for part in read.parts)


def downstream_first(was: Any, root: str, pipeline: str) -> Any:
    found = was(root, pipeline)
    return {at: [one for one, ups in found.items() if at in ups] for at in found}


# What each fault replaces, and by what: a function of the original, and of its arguments.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "one of several edges is forgotten": (judge_inputs, "inputs_in", lambda was, entry: was(entry)[:1]),
    "new and missing intervals are overlooked": (
        judge_inputs,
        "_judge_parts",
        lambda was, *given, **more: was(*given, **more) if len(given[2]) == intervals_in(given[1]) else None,
    ),
    "an erased key is overlooked": (
        judge_inputs,
        "_judge_parts",
        lambda was, *given, erased, **more: was(*given, erased=set(), **more),
    ),
    "a folder that was put back is overlooked": (judge_inputs, "_is_there", lambda *_: True),
    "a recorded end counts after a correction": (judge_inputs, "has_only_grown", lambda *_: True),
    "what was committed before a kill is not published": (heal._Here, "publish", lambda *_: None),
    "no upstream is looked at": (Chains, "_unsettled", lambda *_: None),
    "content is not compared": (judge_inputs, "judge_part", lambda *_, **__: None),
    "equal content counts as changed": (judge_inputs, "part_of", lambda was, p: replace(was(p), digest=p[0].id)),
    "an equal state counts as an equal output": (inputs_of, "_output_piece", digest_of_the_state),
    "late rows have no digest": (
        inputs_of,
        "_output_piece",
        lambda was, edge, *read: replace(was(edge, *read), **({"digest": 0} if edge.reads == "late" else {})),
    ),
    "the order is reversed": (heal, "chain_order", downstream_first),
    "a quarantine is overlooked": (
        judge_inputs,
        "spoilt_results",
        lambda was, *given: {i: r for i, r in was(*given).items() if "quarantined" not in str(r.spoilt)},
    ),
    "a tombstone has no inputs": (clean_up_dropped, "tombstone_of", lambda was, r: replace(was(r), inputs=())),
    "a plan forgets an edge": (plan_chain, "_touched", lambda *_: ({}, ())),
    "a plan is sure of all": (plan_chain, "Planned", lambda was, why, _, cause: was(why, True, cause)),
    "a plan has the order reversed": (plan, "plan_chain", lambda was, *given: was(*given)[::-1]),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    where, name, other = FAULTS[fault]
    was = getattr(where, name)
    with mock.patch.object(where, name, lambda *given, **more: other(was, *given, **more)):
        yield


@pytest.mark.long("a minute for each fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_random_histories_of_chains_find_each_planted_fault(fault: str) -> None:
    with planted(fault), pytest.raises(AssertionError):
        for seed in range(1, 41):
            play(seed)
