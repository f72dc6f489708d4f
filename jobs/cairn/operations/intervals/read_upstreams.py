"""Read what an interval takes from other pipelines: exactly the commits that its record will name."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

from cairn.data_sources.register import register_data_sources
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Pinned, Reader, pin_each, position_of
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.trials import production_root
from state_backend.values.errors import UsageError
from state_backend.values.inputs import InputRead
from state_backend.values.intervals import format_instant

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_upstreams(
    spark: SparkSession, source: Upstreams, reader: Reader, own_schema: Any, chains: Chains
) -> tuple[Any, tuple[InputRead, ...]]:
    """Return the rows with their position, as a source does, and the reads for the record.

    `own_schema`: The output schema of the pipeline itself, for an upstream that is itself and has no output yet.
    """
    register_data_sources(spark)
    frames, reads = dict[str, Any](), dict[str, list[InputRead]]()
    reader = replace(reader, root=production_root(reader.root))
    if reader.schedule is None and any(edge.back for edge in source.edges.values()):
        reader = replace(reader, schedule=chains.log(reader.root, reader.pipeline).schedule)
    for name, edge in source.edges.items():
        pinned = pin_each(chains, reader, edge, source.tried)
        reads[name] = [read for read, _ in pinned]
        if pinned[0][0].log:
            rows = [_frame(spark, reader, one, source.states.get(name)) for one in pinned]
            # The trial's code may have added or removed a column.
            frames[name] = reduce(lambda one, more: one.unionByName(more, allowMissingColumns=True), rows)
        elif own_schema is None:
            raise UsageError(f"{reader}: a pipeline that reads its own output needs output_schema")
        else:
            frames[name] = spark.createDataFrame([], own_schema)
    position: dict[str, Any] = {"upstreams": {name: position_of(read) for name, read in reads.items()}}
    if source.function is not None:
        return (source.function(spark, reader.interval, **frames), position), tuple(chain(*reads.values()))
    (parts,), (rows,) = reads.values(), frames.values()
    if parts[0].edge.reads != "state":
        position["counts"] = {"rows": sum(part.rows for read in parts for part in read.parts)}
    return (rows, position), tuple(replace(read, plain=read.edge.reads != "state") for read in parts)


def _frame(spark: SparkSession, reader: Reader, pinned: Pinned, state: str | None) -> DataFrame:
    read, ids = pinned
    options: dict[str, Any] = {"root": read.edge.root or reader.root, "pipeline": read.edge.pipeline}
    if state is not None:
        # Before the upstream's start there is no state; the newest one has the columns.
        newest = None if ids else newest_state(Chains().log(options["root"], options["pipeline"]))
        named = str(ids[0] if ids else "latest" if newest is None else newest.id)
        rows = spark.read.format("keyed_state").options(**options, state=state, checkpoint=named)
        return rows.load() if ids else rows.load().limit(0)
    span = {"start": format_instant(read.span.start), "end": format_instant(read.span.end)}
    late = "true" if read.edge.reads == "late" else "false"
    return (
        spark.read.format("keyed_output")
        .options(**options, **span, late=late, checkpoints=",".join(map(str, ids)))
        .load()
    )
