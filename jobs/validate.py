"""Validation: a checkpoint is restored from the storage into empty folders and examined there, on Spark.

First the engine's own proof (every file as acked, every entry in its place, counts and digest as recorded), then the owner's
Great Expectations suite on each state as a DataFrame. A checkpoint that fails is quarantined: no interval builds on it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.runtime.first_cause import first_cause
from jobs.runtime.keyed_state import CHECK, KeyedState
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.values.errors import UsageError
from state_backend.values.records import Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.pipeline import Pipeline

log = logging.getLogger("cairn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What validation found; ``docs`` is the index page of the Data Docs, ``pids`` the processes that restored."""

    checkpoint_id: int
    findings: tuple[str, ...]
    entries: int
    expectations: int
    docs: str | None
    pids: tuple[int, ...]

    @property
    def success(self) -> bool:
        return not self.findings


def validate_checkpoint(
    spark: SparkSession,
    pipeline: Pipeline,
    root: str,
    record: Record,
    *,
    docs: Path | None = None,
    with_expectations: bool = True,
) -> Validation:
    """Examines a committed checkpoint, its owner's expectations included or not, and quarantines it if it is wrong. UsageError if an expectation itself can't be
    evaluated: that says nothing about the data, so nothing is quarantined."""
    spark.dataSource.register(KeyedState)
    with first_cause():
        rows = _state(spark, pipeline, root, record, CHECK).collect()
    findings = [row.finding for row in rows if row.finding is not None]
    entries = sum({row.shard: row.entries for row in rows}.values())
    if not findings and entries != record.content.totals.entries:
        findings.append(f"{entries} entries were restored, {record.content.totals.entries} are recorded")
    expectations = 0
    docs_page = None
    if not findings and with_expectations and pipeline.expectations is not None:
        suites = pipeline.expectations()
        with first_cause():
            expectations, found, docs_page = _expect(spark, pipeline, root, record, suites, docs)
        findings += found
    if findings:
        coordinator = Coordinator(open_storage(join_url(root, pipeline.name)), pipeline.name)
        coordinator.quarantine(record.id, "validation refused it", tuple(findings))
    return Validation(
        checkpoint_id=record.id,
        findings=tuple(findings),
        entries=entries,
        expectations=expectations,
        docs=docs_page,
        pids=tuple(sorted({row.pid for row in rows})),
    )


def _state(spark: SparkSession, pipeline: Pipeline, root: str, record: Record, state: str) -> DataFrame:
    reader = spark.read.format("keyed_state").option("root", root).option("pipeline", pipeline.name)
    return reader.option("checkpoint", str(record.id)).option("state", state).load()


def flat_state(spark: SparkSession, pipeline: Pipeline, root: str, record: Record, state: str) -> DataFrame:
    """A state with one column per field, as expectations want it: value fields by their names, key fields as ``key_<name>``,
    user key fields as ``user_key_<name>``, and ``expires_at``, ``key_group``, ``shard``."""
    from pyspark.sql import functions as F

    table = _state(spark, pipeline, root, record, state)
    columns = []
    for name in table.columns:
        if name in ("key", "user_key", "value"):
            start = "" if name == "value" else f"{name}_"
            columns += [F.col(name).getField(f).alias(start + f) for f in table.schema[name].dataType.fieldNames()]
        else:
            columns.append(F.col(name))
    return table.select(*columns)


def _expect(
    spark: SparkSession,
    pipeline: Pipeline,
    root: str,
    record: Record,
    suites: Mapping[str, Sequence[Any]],
    docs: Path | None,
) -> tuple[int, list[str], str | None]:
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    actions = []
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs)}
        index = {"class_name": "DefaultSiteIndexBuilder"}
        context.add_data_docs_site(
            "local", {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": store}
        )
        actions.append(gx.checkpoint.UpdateDataDocsAction(name="docs", site_names=["local"]))
    source = context.data_sources.add_spark("restored_state")
    evaluated, findings = 0, []
    for state, expectations in suites.items():
        batch = source.add_dataframe_asset(state).add_batch_definition_whole_dataframe("all")
        suite = context.suites.add(
            gx.ExpectationSuite(name=f"{pipeline.name}.{state}", expectations=list(expectations))
        )
        definition = context.validation_definitions.add(gx.ValidationDefinition(name=state, data=batch, suite=suite))
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(
                name=state,
                validation_definitions=[definition],
                actions=actions,
                result_format={"result_format": "SUMMARY"},
            )
        )
        # One restore for all expectations of the suite, not one for each.
        table = flat_state(spark, pipeline, root, record, state).cache()
        try:
            name = f"{pipeline.name} checkpoint {record.id} {record.content.interval}"
            result = checkpoint.run(batch_parameters={"dataframe": table}, run_id=gx.RunIdentifier(run_name=name))
        finally:
            table.unpersist()
        for run in result.run_results.values():
            for one in run.results:
                evaluated += 1
                found = _finding(state, one)
                if found is not None:
                    findings.append(found)
    return evaluated, findings, str(docs / "index.html") if docs is not None else None


def _finding(state: str, result: Any) -> str | None:
    config = result.expectation_config
    what = f"state {state!r}: {config.type} {config.kwargs.get('column', '')}".rstrip()
    for raised in _exceptions(result.exception_info):
        raise UsageError(f"{what} could not be evaluated: {raised}; the expectation is wrong, not the data")
    if result.success:
        return None
    seen = {
        k: v
        for k, v in result.result.items()
        if k in ("observed_value", "unexpected_count", "element_count", "partial_unexpected_list")
    }
    return f"{what}: {seen}"


def _exceptions(info: Mapping[str, Any]) -> list[str]:
    """What an expectation raised: one flat dict if nothing was, else one dict per metric."""
    entries = [info] if "raised_exception" in info else [v for v in info.values() if isinstance(v, Mapping)]
    return [str(e.get("exception_message")) for e in entries if e.get("raised_exception")]
