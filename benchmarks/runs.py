"""What each run of the suite does. A run is one variant of one section, in a process and a Spark of its own; the questions
at the end are what the report asks of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from benchmarks import airflow_backfill, available_now, cpu_profile, engines, floors, inputs, processors
from benchmarks.processes import with_cpu_s
from benchmarks.report import OURS, Question, Run
from benchmarks.scales import Scale
from cairn.pipeline import Pipeline
from pipelines import land_flights
from state_backend.values.errors import UsageError
from state_backend.values.records import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MIB = 1024 * 1024


class NotBuilt(Exception):
    """What was to be measured does not exist yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One run: its size, and its folders. ``inputs`` holds the section's files, ``scratch`` is gone after the run,
    ``results`` takes the tables that are compared after all runs."""

    section: str
    variant: str
    scale: Scale
    inputs: Path
    scratch: Path
    results: Path

    @property
    def files(self) -> list[Path]:
        return sorted(self.inputs.glob("*.parquet"))

    def keep(self, what: str, table: pa.Table) -> None:
        """Writes a table for the comparison, its rows in order of all columns."""
        columns = [(name, "ascending") for name in table.column_names]
        pq.write_table(
            table.combine_chunks().sort_by(columns), self.results / result_name(self.section, self.variant, what)
        )

    def measured(
        self,
        samples: Mapping[str, Sequence[float]],
        settings: Mapping[str, str | int | float],
        texts: Mapping[str, str] | None = None,
    ) -> Run:
        return Run(
            section=self.section,
            variant=self.variant,
            status="measured",
            settings=settings,
            samples=samples,
            texts=texts or {},
        )


def result_name(section: str, variant: str, what: str) -> str:
    """The file of a kept table."""
    return f"{section}-{variant.replace(' ', '-')}-{what}.parquet"


# --- a keyed processor on either engine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """A StatefulProcessor of one input row per key and batch."""

    processor: type
    api: str
    output_schema: str
    state: str
    # How the peer's state table calls the value columns.
    peer_columns: str = "value.*"
    # The output columns that must be equal in both engines.
    compared: Sequence[str] = ()


ROW = Keyed(processor=processors.RowTotals, api="row", output_schema=processors.TOTALS_SCHEMA, state="total")
PANDAS = Keyed(processor=processors.PandasTotals, api="pandas", output_schema=processors.TOTALS_SCHEMA, state="total")
LIST = Keyed(
    processor=processors.Appends,
    api="row",
    output_schema=processors.APPENDS_SCHEMA,
    state="values",
    peer_columns="list_element.*",
    compared=("k", "appended"),
)


def pipeline_of(keyed: Keyed, files: Sequence[Path], **settings: Any) -> Pipeline:
    """Raises: NotBuilt if the pipeline refuses the processor's interface."""
    try:
        return engines.pipeline_over(files, keyed.processor, keyed.output_schema, api=keyed.api, **settings)
    except UsageError as error:
        if "not built" in str(error):
            raise NotBuilt(str(error)) from None
        raise


def _keyed_cairn(
    bench: Bench, keyed: Keyed
) -> tuple[list[engines.Timed], pa.Table, dict[str, str | int | float], dict[str, list[float]]]:
    pipeline = pipeline_of(keyed, bench.files)
    spark = engines.start_spark()
    timed, cpu_s = with_cpu_s(lambda: engines.run_cairn(spark, pipeline, bench.scratch, len(bench.files)))
    output = engines.cairn_output(bench.scratch, timed)
    if bench.section in COMPARED:
        bench.keep("output", output.select(list(keyed.compared)) if keyed.compared else output)
        bench.keep("state", engines.cairn_state(spark, bench.scratch, keyed.state))
    spark.stop()
    settings = {"api": keyed.api, "parallelism": pipeline.parallelism, "master": "local[2]"}
    return timed[1:], output, settings, _cpu(bench, cpu_s)


def _cpu(bench: Bench, cpu_s: float) -> dict[str, list[float]]:
    """CPU seconds of a batch, of all processes, the first batch included: what is between two batches of a query can't be told."""
    return {"cpu_s": [cpu_s / len(bench.files)]}


def _keyed_spark(
    bench: Bench, keyed: Keyed
) -> tuple[list[dict[str, Any]], pa.Table, dict[str, str | int | float], dict[str, list[float]]]:
    spark = engines.start_spark()
    output_folder, checkpoint = bench.scratch / "output", bench.scratch / "checkpoint"

    def query(rows: DataFrame) -> Any:
        grouped = rows.groupBy("k")
        transform = grouped.transformWithState if keyed.api == "row" else grouped.transformWithStateInPandas
        result = transform(keyed.processor(), keyed.output_schema, "append", "none")
        return result.writeStream.outputMode("append").format("parquet").option("path", str(output_folder))

    settings = engines.PEERS[bench.variant]
    progress, cpu_s = with_cpu_s(
        lambda: engines.run_streaming(spark, bench.inputs, settings, query, checkpoint=checkpoint)
    )
    output = engines.streaming_output(output_folder)
    bench.keep("output", output.select(list(keyed.compared)) if keyed.compared else output)
    bench.keep("state", engines.streaming_state(spark, checkpoint, keyed.state, keyed.peer_columns))
    spark.stop()
    return _whole(progress, len(bench.files))[1:], output, {**settings, "master": "local[2]"}, _cpu(bench, cpu_s)


def _whole(progress: list[dict[str, Any]], batches: int) -> list[dict[str, Any]]:
    """The progress, if it is one of each batch: else a figure would be of another input than ours."""
    found = [p["batchId"] for p in progress if p["numInputRows"]]
    if found != list(range(batches)):
        raise RuntimeError(f"expected {batches} micro-batches, one for each file, and found {found}")
    return progress


def _cairn_rates(timed: Sequence[engines.Timed]) -> dict[str, list[float]]:
    """Rates of keys and the seconds that they are made of, per interval."""
    keys = [t.record.content.totals.keys_touched for t in timed]
    phases = {
        f"{phase}_s": [t.record.content.durations_us[phase] / 1e6 for t in timed]
        for phase in ("plan", "restore", "process", "timers", "upload")
    }
    return {
        "processing_keys_per_s": [n / t.processing_s for n, t in zip(keys, timed, strict=True)],
        "batch_keys_per_s": [n / t.wall_s for n, t in zip(keys, timed, strict=True)],
        "processing_s": [t.processing_s for t in timed],
        "batch_s": [t.wall_s for t in timed],
        **phases,
    }


def _spark_rates(progress: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    keys = [p["stateOperators"][0]["numRowsUpdated"] for p in progress]
    processing_s = [engines.processing_s(p) for p in progress]
    durations = {
        f"{name}_s": [p["durationMs"][key] / 1e3 for p in progress]
        for name, key in (("add_batch", "addBatch"), ("batch", "triggerExecution"))
    }
    return {
        "processing_keys_per_s": [n / s for n, s in zip(keys, processing_s, strict=True)],
        "batch_keys_per_s": [n / s for n, s in zip(keys, durations["batch_s"], strict=True)],
        "add_batch_keys_per_s": [n / s for n, s in zip(keys, durations["add_batch_s"], strict=True)],
        "processing_s": processing_s,
        "commit_s": [p["stateOperators"][0]["commitTimeMs"] / 1e3 for p in progress],
        **durations,
    }


def row_cairn(bench: Bench) -> Run:
    timed, _, settings, cpu = _keyed_cairn(bench, ROW)
    return bench.measured(_cairn_rates(timed) | cpu, settings)


def row_spark(bench: Bench) -> Run:
    progress, _, settings, cpu = _keyed_spark(bench, ROW)
    return bench.measured(_spark_rates(progress) | cpu, settings)


def steady_cairn(bench: Bench) -> Run:
    """The row processor on so many keys that what an interval costs at any size no longer shows."""
    timed, _, settings, cpu = _keyed_cairn(bench, ROW)
    return bench.measured(_cairn_rates(timed) | cpu, settings)


def pandas_cairn(bench: Bench) -> Run:
    timed, _, settings, cpu = _keyed_cairn(bench, PANDAS)
    return bench.measured(_cairn_rates(timed) | cpu, settings)


def pandas_spark(bench: Bench) -> Run:
    progress, _, settings, cpu = _keyed_spark(bench, PANDAS)
    return bench.measured(_spark_rates(progress) | cpu, settings)


# --- appending to long lists ------------------------------------------------------------------------------------------------


def _append_samples(bench: Bench, output: pa.Table, processing_s: Sequence[float]) -> dict[str, list[float]]:
    """Microseconds per append: of the processing phase, and in the calls themselves (ours writes after them)."""
    appends = bench.scale.list_keys * bench.scale.list_appends
    appended = output.filter(pc.equal(output["appended"], bench.scale.list_appends))
    batches = len(processing_s)
    if appended.num_rows != bench.scale.list_keys * batches:
        raise RuntimeError(f"expected {bench.scale.list_keys * batches} rows of appends, and found {appended.num_rows}")
    return {
        "phase_us_per_append": [s * 1e6 / appends for s in processing_s],
        # Per key and batch, not per batch: the output does not tell batches apart.
        "calls_us_per_append": [ns / 1e3 / bench.scale.list_appends for ns in appended["in_calls_ns"].to_pylist()],
    }


def list_cairn(bench: Bench) -> Run:
    timed, output, settings, cpu = _keyed_cairn(bench, LIST)
    samples = _append_samples(bench, output, [t.processing_s for t in timed]) | cpu
    return bench.measured(samples | {"batch_s": [t.wall_s for t in timed]}, settings)


def list_spark(bench: Bench) -> Run:
    progress, output, settings, cpu = _keyed_spark(bench, LIST)
    samples = _append_samples(bench, output, [engines.processing_s(p) for p in progress]) | cpu
    return bench.measured(
        samples | {"batch_s": [p["durationMs"]["triggerExecution"] / 1e3 for p in progress]}, settings
    )


# --- a running aggregate ------------------------------------------------------------------------------------------------------


def aggregate_pipeline(files: Sequence[Path], **settings: Any) -> Pipeline:
    """Raises: NotBuilt while there is no RunningAggregate, or no engine for it."""
    try:
        from benchmarks.totals import TOTALS_SCHEMA, Totals
    except ModuleNotFoundError as error:
        if error.name != "cairn.aggregates":
            raise
        raise NotBuilt("cairn.aggregates does not exist") from None
    keyed = Keyed(processor=Totals, api="arrow", output_schema=TOTALS_SCHEMA, state="aggregates")
    return pipeline_of(keyed, files, **settings)


def aggregate_cairn(bench: Bench) -> Run:
    pipeline = aggregate_pipeline(bench.files)
    spark = engines.start_spark()
    timed, cpu_s = with_cpu_s(lambda: engines.run_cairn(spark, pipeline, bench.scratch, len(bench.files)))
    bench.keep("output", engines.cairn_output(bench.scratch, timed))
    bench.keep("state", engines.cairn_state(spark, bench.scratch, "aggregates"))
    spark.stop()
    settings = {"api": "arrow", "parallelism": 2, "master": "local[2]"}
    return bench.measured(_cairn_rates(timed[1:]) | _cpu(bench, cpu_s), settings)


def aggregate_spark(bench: Bench) -> Run:
    """Spark's own streaming aggregation, all of it in the JVM."""
    spark = engines.start_spark()
    output_folder, checkpoint = bench.scratch / "output", bench.scratch / "checkpoint"

    def query(rows: DataFrame) -> Any:
        totals = rows.groupBy("k").agg(
            F.count("*").alias("n"), F.sum("v").alias("total"), F.min("v").alias("low"), F.max("v").alias("high")
        )
        return totals.writeStream.outputMode("update").foreachBatch(engines.to_parquet(output_folder))

    settings = engines.PEERS[bench.variant]
    progress, cpu_s = with_cpu_s(
        lambda: engines.run_streaming(spark, bench.inputs, settings, query, checkpoint=checkpoint)
    )
    bench.keep("output", engines.streaming_output(output_folder))
    bench.keep("state", engines.streaming_state(spark, checkpoint, None))
    spark.stop()
    rates = _spark_rates(_whole(progress, len(bench.files))[1:])
    return bench.measured(rates | _cpu(bench, cpu_s), {**settings, "master": "local[2]"})


# --- memory -------------------------------------------------------------------------------------------------------------------


def rss_cairn(bench: Bench) -> Run:
    """The Python worker of the one shard that holds all keys: its peak, after each interval."""
    pipeline = pipeline_of(ROW, bench.files, parallelism=1)
    spark = engines.start_spark()
    peaks_mib: list[float] = []
    timed = engines.run_cairn(
        spark,
        pipeline,
        bench.scratch,
        len(bench.files),
        after=lambda record: peaks_mib.append(_worker_peak_mib(record)),
    )
    spark.stop()
    totals = timed[-1].record.content.totals
    if totals.keys != bench.scale.rss_keys:
        raise RuntimeError(f"expected {bench.scale.rss_keys} keys in the state, and found {totals.keys}")
    return bench.measured(
        # The peak of all is one number, whose median is itself.
        {"peak_mib": [max(peaks_mib)], "after_interval_mib": peaks_mib, "batch_s": [t.wall_s for t in timed]},
        {"api": "row", "parallelism": 1, "master": "local[2]", "keys": totals.keys, "state_bytes": totals.state_bytes},
    )


def _worker_peak_mib(record: Record) -> float:
    """Peak resident memory of the process that ran the interval's shard, RocksDB and Arrow included. The worker lives on
    for the next interval, so that it can be asked from here, after the upload too."""
    (pid,) = record.content.worker_pids
    status = Path(f"/proc/{pid}/status").read_text()
    (peak,) = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak[1]) / 1024


# --- where the rest goes --------------------------------------------------------------------------------------------------------


def floor_engine(bench: Bench) -> Run:
    """rocksdict, and keyed state over it, in this process."""
    entries = bench.scale.engine_entries
    rates = floors.rocksdict_rates(bench.scratch / "rocksdict", entries, rounds=3)
    rates |= floors.state_rates(bench.scratch / "state", entries, rounds=3)
    rates |= floors.copy_rates(bench.scratch, rounds=5)
    return bench.measured(rates, {"entries": entries, "batch": 10_000, "processes": 1})


def floor_row(bench: Bench) -> Run:
    return _profile(bench, pipeline_of(ROW, bench.files, parallelism=1))


def floor_pandas(bench: Bench) -> Run:
    return _profile(bench, pipeline_of(PANDAS, bench.files, parallelism=1))


def floor_arrow(bench: Bench) -> Run:
    return _profile(bench, aggregate_pipeline(bench.files, parallelism=1))


def _profile(bench: Bench, pipeline: Pipeline) -> Run:
    """One shard's task over captured batches in this process: timed three times, then once under cProfile, whose cost per
    call makes small functions look dearer than they are."""
    spark = engines.start_spark()
    engines.run_cairn(spark, pipeline, bench.scratch, 1)
    task, batches = floors.captured_shard(spark, pipeline, bench.scratch, 1)
    spark.stop()
    keys = bench.scale.profiled_frames if pipeline.api == "pandas" else bench.scale.profiled_rows
    floors.run_shard_s(task, batches, 1_000)
    seconds = [floors.run_shard_s(task, batches, 1_001 + n) for n in range(3)]
    stats = cpu_profile.profiled(lambda: floors.run_shard_s(task, batches, 2_000))
    shares = cpu_profile.shares(stats.stats, cpu_profile.owner_by_path)  # type: ignore[attr-defined]
    samples = {f"{owner}_share": [share] for owner, share in shares.items()}
    samples["pandas_and_user_share"] = [shares.get("pandas", 0.0) + shares.get("user", 0.0)]
    samples["shard_keys_per_s"] = [keys / s for s in seconds]
    return bench.measured(
        samples, {"api": pipeline.api, "parallelism": 1, "keys": keys}, {"cpu profile": cpu_profile.top(stats)}
    )


# --- days through Airflow's own backfill ----------------------------------------------------------------------------------------


def backfill_cairn(bench: Bench) -> Run:
    return _backfill(bench, "warm", {"1 active": "day_s", "4 active": "four_active_day_s"})


def backfill_spark(bench: Bench) -> Run:
    return _backfill(bench, "streaming", {"1 active": "day_s", "once": "once_day_s"})


def backfill_nothing(bench: Bench) -> Run:
    return _backfill(bench, "nothing", {"1 active": "day_s", "4 active": "four_active_day_s"})


def _backfill(bench: Bench, way: str, metrics: Mapping[str, str]) -> Run:
    """One way of `airflow_backfill`; what both engines know of each aircraft in the end is compared."""
    os.umask(0o022)  # PostgreSQL runs as another user, if this is root, and has to get to its folder
    days, flights = bench.scale.backfill_days, bench.scratch.parent / "flights"
    land_flights.main(["--to", str(flights), "--from", "2013-01-01", "--days", str(days)])
    found, totals = airflow_backfill.measure(bench.scratch / way, flights, (1, 4), days, way)
    if any(other != totals[0] for other in totals):
        raise RuntimeError("the states of two backfills of one engine differ")
    if totals:
        rows = [(tailnum, *known) for tailnum, known in totals[0].items()]
        bench.keep("state", pa.table([*map(list, zip(*rows, strict=True))], names=available_now.COMPARED))
    samples = {metric: [found[name]["seconds_per_day"]] for name, metric in metrics.items()}
    samples |= {f"cpu_{metric}": [found[name]["cpu_seconds_per_day"]] for name, metric in metrics.items()}
    return bench.measured(samples, {"days": days, "master": "local[2]", "airflow workers": 2})


# --- what there is ----------------------------------------------------------------------------------------------------------------

PEER_NAMES = tuple(engines.PEERS)
Measure = Callable[[Bench], Run]


def _beside(ours: Measure, peers: Measure) -> dict[str, Measure]:
    return {OURS: ours, **dict.fromkeys(PEER_NAMES, peers)}


SECTIONS: dict[str, dict[str, Measure]] = {
    "row": _beside(row_cairn, row_spark),
    "steady": {OURS: steady_cairn},
    "pandas": _beside(pandas_cairn, pandas_spark),
    "list": _beside(list_cairn, list_spark),
    "aggregate": _beside(aggregate_cairn, aggregate_spark),
    "rss": {OURS: rss_cairn},
    "backfill": {OURS: backfill_cairn, "spark": backfill_spark, "nothing": backfill_nothing},
    "floor": {"engine": floor_engine, "row": floor_row, "pandas": floor_pandas, "arrow": floor_arrow},
}


def batches_of(section: str, variant: str, scale: Scale) -> Iterator[npt.NDArray[np.int64]]:
    """The keys of each input file of a run; the variants of a section that are compared have the same."""
    match section, variant:
        case "row", _:
            return inputs.every_key_once(scale.row_keys, scale.batches)
        case "steady", _:
            return inputs.every_key_once(scale.steady_keys, scale.steady_batches)
        case "pandas", _:
            return inputs.every_key_once(scale.pandas_keys, scale.batches)
        case "list", _:
            return inputs.load_then_append(scale.list_keys, scale.list_preload, scale.list_appends, scale.batches)
        case "aggregate", _:
            return inputs.every_key_once(scale.aggregate_keys, scale.batches)
        case "rss", _:
            return inputs.load_then_update(scale.rss_keys, scale.rss_intervals)
        case "floor", "pandas":
            return inputs.every_key_once(scale.profiled_frames, 2)
        case "floor", ("row" | "arrow"):
            return inputs.every_key_once(scale.profiled_rows, 2)
        case _:
            return iter(())


# Compared after the runs: the tables that a peer and ours kept.
COMPARED = {"row": ("output", "state"), "pandas": ("output", "state"), "list": ("output", "state")}
COMPARED["aggregate"] = ("output", "state")
COMPARED["backfill"] = ("state",)

_BOTH: dict[str, Any] = {"peers": PEER_NAMES}
_PHASE: dict[str, Any] = {"metric": "processing_keys_per_s", "unit": "keys/s"}
_BATCH: dict[str, Any] = {"metric": "batch_keys_per_s", "unit": "keys/s"}
_CPU: dict[str, Any] = {"metric": "cpu_s", "unit": "s", "higher_is_better": False}

QUESTIONS = (
    Question(section="row", label="processing phase", **_PHASE, **_BOTH, at_least_ratio=40),
    Question(section="row", label="whole micro-batch", **_BATCH, **_BOTH, at_least_ratio=20),
    Question(section="row", label="CPU of a batch", **_CPU, **_BOTH),
    Question(section="steady", label="processing phase, large batches", **_PHASE, at_least=100_000),
    Question(section="steady", label="whole interval, large batches", **_BATCH),
    Question(section="pandas", label="processing phase", **_PHASE, **_BOTH, at_least_ratio=8),
    Question(section="pandas", label="whole micro-batch", **_BATCH, **_BOTH),
    Question(section="pandas", label="CPU of a batch", **_CPU, **_BOTH),
    Question(
        section="list",
        label="append, processing phase",
        metric="phase_us_per_append",
        unit="us",
        higher_is_better=False,
        **_BOTH,
        against=("spark",),
        at_least_ratio=100,
    ),
    Question(
        section="list",
        label="append, in the calls",
        metric="calls_us_per_append",
        unit="us",
        higher_is_better=False,
        **_BOTH,
        against=("spark",),
    ),
    Question(section="list", label="CPU of a batch", **_CPU, **_BOTH, against=("spark",)),
    Question(
        section="aggregate",
        label="whole micro-batch",
        metric="batch_s",
        unit="s",
        higher_is_better=False,
        **_BOTH,
        at_least_ratio=3,
    ),
    Question(section="aggregate", label="CPU of a batch", **_CPU, **_BOTH),
    Question(section="aggregate", label="processing phase", **_PHASE, **_BOTH),
    Question(
        section="rss",
        label="peak of a shard's worker",
        metric="peak_mib",
        unit="MiB",
        higher_is_better=False,
        at_most=1024,
    ),
    *(
        Question(
            section="backfill",
            label=f"a day through Airflow, {label}",
            variant=variant,
            metric=metric,
            unit="s",
            higher_is_better=False,
            **asked,
        )
        for label, variant, metric, asked in (
            ("one run at a time", OURS, "day_s", {"peers": ("spark",), "at_most": 1.5}),
            ("four runs at a time", OURS, "four_active_day_s", {"at_most": 1.5}),
            ("three tasks that do nothing", "nothing", "day_s", {}),
        )
    ),
    *(
        Question(section="floor", label=label, variant="engine", metric=metric, unit="/s")
        for label, metric in (
            ("rocksdict, batched puts", "puts_per_s"),
            ("rocksdict, sorted multi-gets", "gets_per_s"),
            ("keyed state, updates", "updates_per_s"),
        )
    ),
    *(
        Question(section="floor", label=label, variant="engine", metric=metric, unit="MB/s")
        for label, metric in (("a file copied, durable", "copied_mb_per_s"), ("checksum of a file", "checked_mb_per_s"))
    ),
    *(
        Question(
            section="floor", label=f"one shard's task, {api}", variant=api, metric="shard_keys_per_s", unit="keys/s"
        )
        for api in ("row", "pandas", "arrow")
    ),
    Question(
        section="floor",
        label="inside pandas and user code, pandas",
        variant="pandas",
        metric="pandas_and_user_share",
        unit="part",
        at_least=0.85,
    ),
)
