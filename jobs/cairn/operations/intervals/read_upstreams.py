"""Read what an interval takes from other pipelines: exactly the commits that its record will name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cairn.data_sources.register import register_data_sources
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Reader, pin, position_of
from state_backend.checkpoint.trials import production_root
from state_backend.values.errors import UsageError
from state_backend.values.inputs import InputRead
from state_backend.values.intervals import format_instant

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_upstreams(
    spark: SparkSession, source: Upstreams, reader: Reader, own_schema: Any
) -> tuple[Any, tuple[InputRead, ...]]:
    """Return the rows with their position, as a source does, and the reads for the record.

    `own_schema`: The output schema of the pipeline itself, for an upstream that is itself and has no output yet.
    """
    register_data_sources(spark)
    chains, frames, reads = Chains(), dict[str, Any](), dict[str, InputRead]()
    if reader.schedule is None and any(edge.back for edge in source.edges.values()):
        reader = replace(reader, schedule=chains.log(reader.root, reader.pipeline).schedule)
    reader = replace(reader, root=production_root(reader.root))
    for name, edge in source.edges.items():
        read, ids = pin(chains, reader, edge)
        reads[name] = read
        if read.log:
            frames[name] = _frame(spark, reader, read, ids, source.states.get(name))
        elif own_schema is None:
            raise UsageError(f"{reader}: a pipeline that reads its own output needs output_schema")
        else:
            frames[name] = spark.createDataFrame([], own_schema)
    position: dict[str, Any] = {"upstreams": {name: position_of(read) for name, read in reads.items()}}
    if source.function is not None:
        return (source.function(spark, reader.interval, **frames), position), tuple(reads.values())
    (read,), (rows,) = reads.values(), frames.values()
    if read.edge.reads != "state":
        position["counts"] = {"rows": sum(part.rows for part in read.parts)}
    return (rows, position), tuple(reads.values())


def _frame(spark: SparkSession, reader: Reader, read: InputRead, ids: tuple[int, ...], state: str | None) -> DataFrame:
    options: dict[str, Any] = {"root": read.edge.root or reader.root, "pipeline": read.edge.pipeline}
    if state is not None:
        # Before the upstream's start there is no state; the newest one has the columns.
        rows = spark.read.format("keyed_state").options(
            **options, state=state, checkpoint=str(ids[0]) if ids else "latest"
        )
        return rows.load() if ids else rows.load().limit(0)
    span = {"start": format_instant(read.span.start), "end": format_instant(read.span.end)}
    late = "true" if read.edge.reads == "late" else "false"
    return (
        spark.read.format("keyed_output")
        .options(**options, **span, late=late, checkpoints=",".join(map(str, ids)))
        .load()
    )
