"""The runs of the suite, and the questions that the report asks about them.

A run is one variant of one section. It has a process and a Spark session of its own.
"""

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
    """Error: the feature to be measured does not exist yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The size and the folders of one run.

    Attributes:
        section: The section.
        variant: The variant.
        scale: The sizes of all sections.
        inputs: The folder of the section's input files.
        scratch: The folder for state and output, deleted after the run.
        results: The folder for tables that are compared after all runs.
    """

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
        """Write a table for the comparison, sorted by all columns."""
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
    """Return the file name of a kept table."""
    return f"{section}-{variant.replace(' ', '-')}-{what}.parquet"


# --- a keyed processor on either engine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """A StatefulProcessor for input with one row for each key and batch.

    Attributes:
        processor: The class of the processor.
        api: The API of the processor, such as "row".
        output_schema: The output schema.
        state: The name of the state that is compared.
        peer_columns: The value columns in Spark's table of the state.
        compared: The output columns that must be equal in both engines; empty for all columns.
    """

    processor: type
    api: str
    output_schema: str
    state: str
    peer_columns: str = "value.*"
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
    """Return the pipeline of a processor over the files.

    Raises:
        NotBuilt: The pipeline does not support the processor's API yet.
    """
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
    """Return the CPU seconds of one batch, summed over all processes, as the mean over all batches.

    The first batch counts too, because the CPU time between two batches of a streaming query can't be assigned to
    either of them.
    """
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
    """Return the progress reports if there is exactly one with rows for each batch.

    With other batches, the figures would not be of the same input as Cairn's.

    Raises:
        RuntimeError: The micro-batches are not one for each file.
    """
    found = [p["batchId"] for p in progress if p["numInputRows"]]
    if found != list(range(batches)):
        raise RuntimeError(f"expected {batches} micro-batches, one for each file, and found {found}")
    return progress


def _cairn_rates(timed: Sequence[engines.Timed]) -> dict[str, list[float]]:
    """Return, for each interval, the keys per second and the seconds from which these rates are computed."""
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
    """Run the row processor with so many keys that an interval's fixed cost no longer matters."""
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
    """Return the microseconds for each append: in the processing phase, and in the calls themselves.

    Cairn writes the elements after the calls, so the time in the calls lacks this work.
    """
    appends = bench.scale.list_keys * bench.scale.list_appends
    appended = output.filter(pc.equal(output["appended"], bench.scale.list_appends))
    batches = len(processing_s)
    if appended.num_rows != bench.scale.list_keys * batches:
        raise RuntimeError(f"expected {bench.scale.list_keys * batches} rows of appends, and found {appended.num_rows}")
    return {
        "phase_us_per_append": [s * 1e6 / appends for s in processing_s],
        # One sample for each key and batch: the output does not say which batch a row comes from.
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
    """Return the pipeline of the running aggregate.

    Raises:
        NotBuilt: `cairn.aggregates` does not exist, or no engine runs it.
    """
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
    """Run Spark's own streaming aggregation, which runs in the JVM only."""
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
    """Measure the peak memory of the Python worker of a single shard with all keys, after each interval."""
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
        # The peak over all intervals is a single sample.
        {"peak_mib": [max(peaks_mib)], "after_interval_mib": peaks_mib, "batch_s": [t.wall_s for t in timed]},
        {"api": "row", "parallelism": 1, "master": "local[2]", "keys": totals.keys, "state_bytes": totals.state_bytes},
    )


def _worker_peak_mib(record: Record) -> float:
    """Return the peak resident memory of the process that ran the interval's shard, with RocksDB and Arrow, in MiB.

    The worker lives on for the next interval. So this process can read the worker's peak after the upload.
    """
    (pid,) = record.content.worker_pids
    status = Path(f"/proc/{pid}/status").read_text()
    (peak,) = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak[1]) / 1024


# --- where the rest goes --------------------------------------------------------------------------------------------------------


def floor_engine(bench: Bench) -> Run:
    """Measure rocksdict alone, and keyed state over rocksdict, in this process."""
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
    """Run one shard's task over captured batches in this process.

    The task is timed three times. Then it runs once under cProfile. cProfile adds a cost to each call, so small
    functions look more expensive than they are.
    """
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
    """Run one way of `airflow_backfill`, and keep the totals of each aircraft for the comparison of the engines."""
    # If this process runs as root, PostgreSQL runs as another user, who must be able to enter its folder.
    os.umask(0o022)
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
    """Return the keys of each input file of a run.

    The variants of a section that are compared have the same input.
    """
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


# The tables of each section that Cairn's run and a peer's run keep for the comparison.
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
