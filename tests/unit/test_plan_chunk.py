"""Which intervals of a range one job computes: as tables, without Spark."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cairn import testing
from cairn.operations.intervals import plan_chunk, process_chunk, run_intervals, untracked_reads
from cairn.operations.intervals.plan_chunk import Chunk, ChunkLimits, narrowed, next_size, surely_computed, why_never
from cairn.operations.intervals.run_intervals import Outcome
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.shard_jobs.interval import IntervalJob
from cairn.spark.ddl import parse_ddl_locally
from cairn.spark.file_scans import Scans
from cairn.spark.session import _LOST
from cairn.upstream_sources import upstream, upstreams
from state_backend.adapters import rocks
from state_backend.checkpoint.interval_results import Result
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_newest
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import NotAsTried, ProcessorError, SourceError
from state_backend.values.records import RunRef
from state_backend.values.retention import KeepLast
from state_backend.values.zones import zone_of
from tests.support import in_chunks
from tests.support.coordinator import coordinator_of
from tests.support.counting import Counting, counting, day
from tests.support.in_chunks import results, without_spark

LIMITS = ChunkLimits(intervals=64, shards=512, rows=10_000, uploaded_bytes=1_000_000, seconds=10.0)


def chunk(planned: int, **changes: Any) -> Chunk:
    used: dict[str, Any] = {"committed": planned, "rows": planned, "uploaded_bytes": 0, "seconds": 0.1}
    return Chunk(planned=planned, **{**used, **changes})


@pytest.mark.parametrize(
    ("last", "parallelism", "size"),
    [
        (None, 2, 1),  # the first interval of a call
        (chunk(1), 2, 2),
        (chunk(8), 2, 16),
        (chunk(8, committed=7), 2, 1),  # it did not end as planned
        (chunk(64), 2, 64),
        (chunk(1, rows=0), 2, 2),
        (chunk(4, rows=3), 2, 8),
        (chunk(8, rows=0), 2, 8),  # no rows tell nothing about the next ones
        (chunk(64, rows=63), 2, 8),
        (chunk(64), 16, 32),  # 512 acknowledgements
        (chunk(64), 1024, 1),
        (chunk(8, rows=8_000), 2, 10),  # 1,000 rows each
        (chunk(1, rows=50_000), 2, 1),
        (chunk(8, uploaded_bytes=4_000_000), 2, 2),
        (chunk(8, seconds=16.0), 2, 5),
        (chunk(1, seconds=60.0), 2, 1),
        (chunk(1, seconds=0.0), 2, 2),
    ],
)
def test_the_next_chunk_doubles_at_most_and_obeys_all_limits(last: Chunk | None, parallelism: int, size: int) -> None:
    assert next_size(last, LIMITS, parallelism) == size


def test_a_larger_chunk_that_was_slower_for_each_interval_was_too_large() -> None:
    slow = {"seconds": 13.0}
    for last, most in (
        (chunk(8, seconds=6.0), 64),
        (chunk(8, **slow), 4),
        (chunk(8, rows=80, **slow), 64),
        (chunk(8, committed=7, **slow), 64),
        (chunk(2, **slow), 64),
    ):
        assert narrowed(LIMITS, chunk(4, seconds=4.0), last).intervals == most, last


OURS, OTHERS = RunRef(run_id="r", clear_number=0, try_number=1), RunRef(run_id="o", clear_number=0, try_number=1)


def result(spoilt: str | None = None, run: RunRef = OTHERS) -> Result:
    return mock.Mock(spec=Result, id=7, run=run, spoilt=spoilt)


@pytest.mark.parametrize(
    ("there", "reprocess", "count"),
    [
        ({}, "changed", 4),
        ({}, "none", 4),
        ({2: result()}, "changed", 2),  # kept, if the state before it and its input stay
        ({0: result()}, "changed", 0),
        ({0: result("stale"), 1: result("stale")}, "changed", 4),
        ({0: result(), 1: result(), 2: result(), 3: result()}, "all", 4),
        ({1: result(run=OURS)}, "all", 1),  # an earlier try has committed it
        ({1: result()}, "none", 1),
    ],
)
def test_a_chunk_has_only_intervals_that_must_be_computed(there: dict[int, Result], reprocess: Any, count: int) -> None:
    intervals = [day(n) for n in range(4)]
    assert surely_computed(intervals, {day(n): one for n, one in there.items()}, reprocess, OURS) == count


def test_changelog_mode_own_output_and_back_reads_exclude_chunks() -> None:
    plain = counting()
    of_events = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(hours=1)}
    assert why_never(plain, "incremental") is None
    assert why_never(counting(**of_events, watermark="observed"), "full") is None
    assert why_never(counting(source=upstream("b")), "incremental") is None
    for pipeline, mode in (
        (plain, "changelog"),
        (counting(read_ahead=False), "incremental"),
        (counting(source=upstreams(lambda *_, **__: None, a=upstream("b", back=1))), "incremental"),
    ):
        assert why_never(pipeline, mode) is not None


# --- calls ------------------------------------------------------------------------------------------------------------------------

SESSION: Any = testing.PlanningSession("UTC")
SCHEMA = "user string, item string, amount long"
DAYS = [day(n) for n in range(12)]


def read(_: Any, interval: Interval) -> Any:
    number = DAYS.index(interval)
    wide = ", more long" if number == 9 else ""
    rows = [(f"u{number % 3}", "fig", number, *([1] if wide else []))]
    return LocalRows(rows, parse_ddl_locally(SCHEMA + wide), zone_of("UTC"), "the input"), {"day": number}


def pipeline_of(**changes: Any) -> Pipeline:
    made = counting(**{"source": read, "retention": KeepLast(50), **changes})
    return replace(made, engine=replace(made.engine, cache_dir=None))


PIPELINE = pipeline_of()


@contextmanager
def sizes() -> Iterator[list[int]]:
    """The sizes of the chunks that are computed."""
    found: list[int] = []
    real = run_intervals.process_chunk

    def noted(spark: Any, plans: Any, limits: Any) -> Any:
        found.append(len(plans))
        return real(spark, plans, limits)

    with mock.patch.object(run_intervals, "process_chunk", noted):
        yield found


def run(root: Path, pipeline: Pipeline = PIPELINE, days: list[Interval] = DAYS, **more: Any) -> list[Outcome]:
    with without_spark(pipeline):
        return run_intervals.run_intervals(SESSION, pipeline, days, str(root), **{"limits": LIMITS, **more})


def range_of(root: Path, pipeline: Pipeline, stack: ExitStack) -> Any:
    aside = run_intervals._Aside
    given: dict[str, Any] = dict.fromkeys(("on_shards", "before_commit")) | {"known": {}, "limits": LIMITS}
    return run_intervals._Range(
        **given,
        spark=SESSION,
        pipeline=pipeline,
        root=str(root),
        mode="incremental",
        reprocess="changed",
        run=OURS,
        first=run_intervals.NO_PERMISSIONS,
        reading=aside(stack),
        finishing=aside(stack),
    )


def expected(root: Path, pipeline: Pipeline = PIPELINE, **more: Any) -> list[Any]:
    run(root, pipeline, limits=ChunkLimits(intervals=1), **more)
    return results(pipeline, root)


def test_chunks_grow_and_end_where_the_columns_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cairn")
    # With the limits by default. Each store is opened again after each interval, as if its MANIFEST had grown.
    with sizes() as found, without_spark(PIPELINE), mock.patch.object(rocks, "_MANIFEST_BYTES", 0):
        outcomes = run_intervals.run_intervals(SESSION, PIPELINE, DAYS, str(tmp_path / "chunks"))
    assert found == [2, 4, 2, 2] and [o.checkpoint for o in outcomes] == [*range(1, 13)]
    assert "columns, states or settings differ from those of the interval before" in caplog.text
    assert results(PIPELINE, tmp_path / "chunks") == expected(tmp_path / "alone")
    chunks, alone = (coordinator_of(PIPELINE, str(tmp_path / name)) for name in ("chunks", "alone"))
    for ref, other in zip(chunks.record(12).content.shards, alone.record(12).content.shards, strict=True):
        ours, theirs = manifest_of(ref, chunks.at.storage), manifest_of(other, alone.at.storage)
        assert [file.name for file in ours.inline_files] == [file.name for file in theirs.inline_files]


class Failing(Counting):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for out in super().handleInputRows(key, rows, timerValues):
            if out.total >= 10:
                raise ValueError("too much")
            yield out


def test_an_error_of_the_processor_names_its_interval_and_those_before_it_are_committed(tmp_path: Path) -> None:
    failing = pipeline_of(processor=Failing)
    with sizes() as found, pytest.raises(ProcessorError, match=r"2024-01-08T.*too much") as error:
        run(tmp_path, failing)
    assert found == [2, 4, 2]
    assert [one["interval"] for one in results(failing, tmp_path)] == DAYS[:7]
    assert "7 of 12 intervals were computed and committed before the failure" in error.value.__notes__[-1]


def test_a_source_that_fails_fails_for_its_own_interval(tmp_path: Path) -> None:
    asked: list[Interval] = []

    def broken(spark: Any, interval: Interval) -> Any:
        asked.append(interval)
        if interval == DAYS[6]:
            raise OSError("gone")
        return read(spark, interval)

    with pytest.raises(SourceError, match=r"2024-01-07T.*gone"):
        run(tmp_path, pipeline_of(source=broken))
    assert len(results(PIPELINE, tmp_path)) == 6 and asked == [*DAYS[:7], DAYS[6]]


def test_a_source_runs_in_one_thread_and_is_asked_once_also_when_chunks_are_cut(tmp_path: Path) -> None:
    """Each job ends its part of the chunk after two intervals."""
    asked: list[Interval] = []
    busy = threading.Lock()

    def source(spark: Any, interval: Interval) -> Any:
        assert busy.acquire(blocking=False), "the source runs in two threads"
        time.sleep(0.01)
        asked.append(interval)
        busy.release()
        return read(spark, interval)

    real = run_intervals.process_chunk

    def cut(spark: Any, plans: Any, limits: Any) -> Any:
        return real(spark, plans, limits)[:2]

    pipeline = pipeline_of(source=source)
    with mock.patch.object(run_intervals, "process_chunk", cut):
        run(tmp_path / "chunks", pipeline)
    assert sorted(asked) == DAYS
    for one, alone in zip(results(pipeline, tmp_path / "chunks"), expected(tmp_path / "alone", pipeline), strict=True):
        assert one | {"input_hash": None} == alone | {"input_hash": None}  # The hash counts what `source` has noted.


def test_a_direct_read_of_the_source_waits_for_the_read_ahead_thread(tmp_path: Path) -> None:
    """Day 2 is not among the days that the thread is asked for."""
    log: list[str] = []

    def source(spark: Any, interval: Interval) -> Any:
        log.append(f"begin {DAYS.index(interval)}")
        time.sleep(0.05)
        log.append(f"end {DAYS.index(interval)}")
        return read(spark, interval)

    with ExitStack() as stack:
        made = range_of(tmp_path, pipeline_of(source=source), stack)
        made._read_ahead(DAYS[:2])
        made._read(DAYS[2])
        made._read(DAYS[0])
    assert log == [f"{what} {n}" for n in range(3) for what in ("begin", "end")]


def test_a_refusal_before_a_commit_ends_the_call_and_the_next_call_continues(tmp_path: Path) -> None:
    def refuse(content: Any) -> None:
        if content.interval == DAYS[5]:
            raise NotAsTried("not as tried")

    with pytest.raises(NotAsTried):
        run(tmp_path / "chunks", before_commit=refuse)
    assert len(results(PIPELINE, tmp_path / "chunks")) == 5
    run(tmp_path / "chunks")
    assert results(PIPELINE, tmp_path / "chunks") == expected(tmp_path / "alone")


def test_a_conflicting_commit_ends_the_chunk_early(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another run commits a day of the chunk, or a day before it, while the chunk is committed."""
    for name, between in (("before", DAYS[0]), ("later", DAYS[11])):
        root, done = tmp_path / name, []

        def meddle(content: Any, root: Path = root, between: Interval = between, done: list[int] = done) -> None:
            if content.interval == DAYS[4] and not done:
                done.append(1)
                with without_spark(PIPELINE):
                    allowed: Any = {"allow_gap": True}
                    permissions = replace(run_intervals.NO_PERMISSIONS, **allowed) if between == DAYS[11] else None
                    more = {"permissions": permissions} if permissions else {}
                    run_intervals.run_intervals(
                        SESSION,
                        PIPELINE,
                        [between],
                        str(root),
                        reprocess="all",
                        limits=ChunkLimits(intervals=1),
                        **more,
                    )

        with sizes() as found:
            run(root, before_commit=meddle)
        assert "the rest of the chunk is planned again" in caplog.text
        assert found[:3] == [2, 4, 2]
        log = read_newest(locate(str(root), PIPELINE.name).storage)
        assert [r.content.interval for r in log.completed() if log.retained[r.id].stale_by is None][-1] == DAYS[11]
        by_interval = {one["interval"]: one["groups"] for one in results(PIPELINE, root)}
        assert by_interval[DAYS[10]] == expected(tmp_path / f"{name} alone")[10]["groups"]


def test_chunks_are_given_up_after_three_failed_chunk_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with mock.patch.object(run_intervals, "process_chunk", fails):
        outcomes = run(tmp_path)
    assert all(o.computed for o in outcomes) and caplog.text.count("no memory") == 3


def failing_once(error: Exception) -> Any:
    """The first chunk of a call fails."""
    real, errors = run_intervals.process_chunk, [error]

    def fails(*given: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*given)

    return mock.patch.object(run_intervals, "process_chunk", fails)


@pytest.mark.parametrize(
    ("error", "limit", "found"),
    [
        (RuntimeError("no memory"), 8, [2, 2, 4]),
        (RuntimeError("no memory"), 4, [2, 2, 2, 2]),  # of 2 at most
        (RuntimeError("no memory"), 2, [2]),
        (process_chunk.Unproven("whose files?"), 8, [2]),
    ],
)
def test_after_a_job_that_fails_chunks_are_smaller(
    tmp_path: Path, error: Exception, limit: int, found: list[int]
) -> None:
    with failing_once(error), sizes() as of:
        outcomes = run(tmp_path, days=DAYS[:9], limits=replace(LIMITS, intervals=limit))
    assert all(o.computed for o in outcomes)
    assert of == found


@pytest.mark.parametrize("where", ["plan_begun", "source"])
def test_a_lost_server_is_reported_at_once(tmp_path: Path, where: str) -> None:
    lost = RuntimeError(f"the plan failed: {_LOST[0]}")

    def gone(spark: Any, interval: Interval) -> Any:
        if interval == DAYS[2]:
            raise lost
        return read(spark, interval)

    planning = mock.patch.object(process_chunk, "plan_begun", side_effect=lost)
    made = pipeline_of(source=gone) if where == "source" else PIPELINE
    with sizes() as found, pytest.raises(Exception, match="the plan failed"), ExitStack() as stack:
        if where == "plan_begun":
            stack.enter_context(planning)
        run(tmp_path, made)
    assert not found and len(results(PIPELINE, tmp_path)) == 1


def test_an_interrupted_run_waits_for_at_most_one_call_of_the_source(tmp_path: Path) -> None:
    asked: list[Interval] = []

    def source(spark: Any, interval: Interval) -> Any:
        asked.append(interval)
        time.sleep(0.3 if interval in DAYS[3:] else 0)
        return read(spark, interval)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with mock.patch.object(run_intervals, "process_chunk", interrupted), pytest.raises(KeyboardInterrupt):
        run(tmp_path, pipeline_of(source=source))
    assert len(asked) <= 4


# --- what each interval has read ---------------------------------------------------------------------------------------------------


FILES = {"files": [{"bytes": 6}]}


@pytest.mark.parametrize(
    ("positions", "each", "whole", "proven"),
    [
        (({}, {}), None, Scans(cached=True), True),  # a classic session, and nothing to prove
        (({},), None, Scans(), True),  # a dropped branch, also of a server, and nothing is cached
        ((FILES, {}), None, Scans(files=((1, 6),)), False),
        ((FILES, {}), [Scans(files=((1, 6),)), Scans(reused=True)], Scans(), True),
        ((FILES, FILES), [Scans(files=((1, 6),)), Scans(reused=True)], Scans(), False),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_chunk_with_unproven_reads_fails(positions: Any, each: Any, whole: Scans, proven: bool, shared: bool) -> None:
    jobs: Any = [mock.Mock(**{"content.source_position": position}) for position in positions]
    proven = proven and not (shared and whole.cached)
    with (
        mock.patch.multiple(process_chunk, is_connect=lambda _: shared, scans_of_each=lambda *_: each),
        mock.patch.object(process_chunk, "scans_of", lambda _: whole),
        nullcontext() if proven else pytest.raises(process_chunk.Unproven),
    ):
        process_chunk._check_reads(jobs, mock.Mock())


@pytest.mark.parametrize(
    ("read", "proven"), [((1, 100), True), ((2, 200), True), ((1, 99), False), ((3, 300), False), ((1, 200), False)]
)
def test_intervals_read_together_may_share_a_file(read: tuple[int, int], proven: bool) -> None:
    """Or each may have a file of its own, with equal entries."""
    of = {"content.source_position": {"files": [{"bytes": 100}]}}
    jobs: Any = [mock.Mock(**of, **{"content.interval": day(n)}) for n in range(2)]
    with (
        mock.patch.multiple(process_chunk, is_connect=lambda _: False, scans_of=lambda _: Scans(files=(read,))),
        nullcontext() if proven else pytest.raises(SourceError, match=r"01-01T.*01-03T.*lists files: 2"),
    ):
        process_chunk._check_reads_together(jobs, mock.Mock())


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("Project [a#1]\n+- Union false, false\n   :- Relation [a#1] json\n   +- Relation [a#2] json\n", True),
        ("Union false, false\n", True),
        ("Project [Union#1]\n+- Relation [Union#1] json\n", False),
        ("Unionized [a#1]\n", False),
    ],
)
def test_a_union_is_found_in_a_plan(plan: str, found: bool) -> None:
    with mock.patch.multiple(
        untracked_reads, is_connect=lambda _: False, analyzed_plan=lambda _: mock.Mock(toString=lambda: plan)
    ):
        assert untracked_reads.has_union(mock.Mock()) == found


@pytest.mark.parametrize(
    ("found", "position", "alone"),
    [
        ({"a union"}, {}, False),
        ({}, FILES, False),
        ({"a union"}, FILES, True),
        ({"a name"}, {}, True),
        ({"a sink"}, {}, True),
        ({"a sink"}, FILES, False),
        ({"a sink"}, {"files": []}, False),
        ({"a sink", "a join"}, FILES, True),
        ({"a sink", "an upstream", "a join"}, {}, False),
    ],
)
def test_an_interval_with_untraceable_reads_is_in_no_chunk(found: Any, position: Any, alone: bool) -> None:
    plan: Any = mock.Mock(**{"job.content.source_position": position, "job.content.inputs": "an upstream" in found})
    reads = {"looks_up_names": "a name" in found, "has_union": "a union" in found, "reads_once": "a join" not in found}
    with mock.patch.multiple(plan_chunk, **{name: lambda _, of=of: of for name, of in reads.items()}):
        pipeline = counting(sink=mock.Mock() if "a sink" in found else None)
        assert (plan_chunk.why_not_any(pipeline, plan, None) is not None) == alone


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("file:/data/root/p/output/x", True),
        ("s3a://bucket/data/root/p", True),
        ("s3a://another/data/root/p", False),
        ("/data/root/", True),
        ("file:///data/*/p/output", True),
        ("/data/root/p2/output", False),
        ("/", False),
    ],
)
def test_a_read_path_that_overlaps_the_pipelines_folder_is_found(path: str, found: bool) -> None:
    assert untracked_reads.overlap("s3://bucket/data/root/p", path) == found


def test_a_source_that_reads_its_own_output_is_called_after_the_previous_commit(tmp_path: Path) -> None:
    seen: dict[Interval, int] = {}

    def source(spark: Any, interval: Interval) -> Any:
        seen[interval] = coordinator_of(PIPELINE, str(tmp_path)).log().head_id
        if interval == DAYS[4] and seen[interval] < 4:
            raise ValueError("no output of the day before")
        rows, position = read(spark, interval)
        rows.own = interval == DAYS[6]
        return rows, position

    with mock.patch.object(run_intervals, "reads_below", lambda rows, _: rows.own), sizes() as found:
        run(tmp_path, pipeline_of(source=source), DAYS[:9])
    assert found == [2, 2] and [seen[DAYS[n]] for n in (1, 4, 6, 7, 8)] == [1, 4, 6, 7, 8]


def test_a_chunk_ends_before_an_interval_whose_plan_names_a_table(tmp_path: Path) -> None:
    why = {DAYS[3]: "the plan names a table"}
    with (
        mock.patch.object(process_chunk, "why_not_any", lambda _, p, __: why.get(p.job.content.interval)),
        sizes() as found,
    ):
        run(tmp_path, days=DAYS[:7])
    assert found == [2, 2]


def test_a_task_that_spark_repeats_writes_other_files_and_counts_once(tmp_path: Path) -> None:
    """A task dies after its third interval, and Spark runs it again."""
    real, died = IntervalJob.process, []

    def dying(self: IntervalJob, *given: Any) -> Any:
        ack = real(self, *given)
        if not died and self.content.interval == DAYS[5]:
            died.append(self.content.interval)
            raise ConnectionError("lost")
        return ack

    again = in_chunks.chunk_on_shards

    def repeated(processor: Any, session: Any, job: Any, *given: Any) -> Any:
        try:
            return again(processor, session, job, *given)
        except ConnectionError:
            return again(processor, session, job, *given, first_task=5000)

    with mock.patch.object(IntervalJob, "process", dying), mock.patch.object(in_chunks, "chunk_on_shards", repeated):
        run(tmp_path / "chunks")
    assert died
    assert results(PIPELINE, tmp_path / "chunks") == expected(tmp_path / "alone")
