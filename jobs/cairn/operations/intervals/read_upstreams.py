"""Read the rows that an interval takes from other pipelines: those of exactly the commits that its record names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

from cairn.data_sources.register import register_data_sources
from cairn.range_sources import INTERVAL
from cairn.upstream_sources import Upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Pinned, Reader, pin, pin_each, position_of
from state_backend.checkpoint.newest_state import newest_state
from state_backend.checkpoint.trials import production_root
from state_backend.values.errors import InputNotReady, UsageError
from state_backend.values.inputs import Edge, InputRead
from state_backend.values.intervals import Interval, format_instant

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_upstreams(
    spark: SparkSession, source: Upstreams, reader: Reader, own_schema: Any, chains: Chains
) -> tuple[Any, tuple[InputRead, ...]]:
    """Return ((rows, position), reads): the answer of a source that reads upstreams, and what it read, for the record.

    `own_schema`: The pipeline's output schema. If it reads its own output before it has any, these rows are empty.
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
            # Production's rows and a trial's rows may differ in columns, because a trial has other code.
            frames[name] = reduce(lambda one, more: one.unionByName(more, allowMissingColumns=True), rows)
        elif own_schema is None:
            raise UsageError(f"{reader}: a pipeline that reads its own output needs output_schema")
        else:
            frames[name] = spark.createDataFrame([], own_schema)
    if source.function is not None:
        return (source.function(spark, reader.interval, **frames), _position(reads)), tuple(chain(*reads.values()))
    (rows,) = frames.values()
    position, plain = _of_one(reads)
    return (rows, position), plain


def output_alone(source: Upstreams) -> Edge | None:
    """Return the only edge of a source that passes an upstream's rows on, of intervals within its own; else None."""
    edges = [*source.edges.values()]
    if len(edges) != 1 or source.function is not None or source.states or source.tried:
        return None
    return edges[0] if edges[0].mapping == "within" and not edges[0].back else None


def read_output(
    spark: SparkSession, source: Upstreams, readers: Sequence[Reader]
) -> tuple[DataFrame, list[tuple[dict[str, Any], tuple[InputRead, ...]]]]:
    """Return (rows, answers) of consecutive intervals by one query. `readers`: One for each interval.

    `rows` has the rows of all intervals; the column `INTERVAL` tells them apart. `answers` has (position, reads) of
    each. Stop before the first interval whose upstream is not ready. If that is the first one, raise `InputNotReady`.
    """
    register_data_sources(spark)
    readers = [replace(reader, root=production_root(reader.root)) for reader in readers]
    ((name, edge),) = source.edges.items()
    chains, pinned = Chains(), list[Pinned]()
    for reader in readers:
        try:
            pinned.append(pin(chains, reader, edge))
        except InputNotReady:
            if not pinned:
                raise
            break
    reads, span = [read for read, _ in pinned], Interval(pinned[0][0].span.start, pinned[-1][0].span.end)
    whole = replace(reads[0], span=span), tuple(n for _, ids in pinned for n in ids)
    return _frame(spark, readers[0], whole, None, interval_column=INTERVAL), [_of_one({name: [read]}) for read in reads]


def _position(reads: Mapping[str, Sequence[InputRead]]) -> dict[str, Any]:
    return {"upstreams": {name: position_of(read) for name, read in reads.items()}}


def _of_one(reads: Mapping[str, Sequence[InputRead]]) -> tuple[dict[str, Any], tuple[InputRead, ...]]:
    """Return (position, reads) of a source that passes on the rows of one upstream unchanged."""
    position, (parts,) = _position(reads), reads.values()
    plain = parts[0].edge.reads != "state"
    if plain:
        position["counts"] = {"rows": sum(part.rows for read in parts for part in read.parts)}
    return position, tuple(replace(read, plain=plain) for read in parts)


def _frame(spark: SparkSession, reader: Reader, pinned: Pinned, state: str | None, **more: str) -> DataFrame:
    read, ids = pinned
    options: dict[str, Any] = {"root": read.edge.root or reader.root, "pipeline": read.edge.pipeline}
    if state is not None:
        # No `ids`: the upstream had no state yet. Take only the columns, from its newest state.
        newest = None if ids else newest_state(Chains().log(options["root"], options["pipeline"]))
        named = str(ids[0] if ids else "latest" if newest is None else newest.id)
        rows = spark.read.format("keyed_state").options(**options, state=state, checkpoint=named)
        return rows.load() if ids else rows.load().limit(0)
    span = {"start": format_instant(read.span.start), "end": format_instant(read.span.end)}
    late = "true" if read.edge.reads == "late" else "false"
    return (
        spark.read.format("keyed_output")
        .options(**options, **span, **more, late=late, checkpoints=",".join(map(str, ids)))
        .load()
    )
