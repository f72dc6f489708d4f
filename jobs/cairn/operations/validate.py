"""Validation of a checkpoint, a prepared attempt or a savepoint.

Validation has three steps. The first step with a finding is the last step:

    files          Every file exists with its size and crc32c. Record and manifests agree. Mode "fast" ends here.
    restored state Spark restores every shard from the storage into an empty folder. Each key is in its key group, each
                   value decodes, indexes and list positions are correct, and counts and digest of each key group are as
                   recorded.
    expectations   The owner's Great Expectations suites run on each state as a DataFrame, and compare it with the base.

A refused checkpoint is quarantined: no interval starts from it. A refused attempt can't be committed. A savepoint gets
no mark: the caller decides.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cairn.change_expectations import OverTime
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.checkpoint.dropped_checkpoint import check_retained, telling_drops
from state_backend.checkpoint.leases import holding
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.formats.paths import interval_name
from state_backend.inspection.verify import verify_files
from state_backend.shard.manifest import manifest_of
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import UsageError
from state_backend.values.records import CanonicalFile, Content, LogicalTime, Record, ValidationMode
from state_backend.values.release import WHEEL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cairn.pipeline import Pipeline

log = logging.getLogger("cairn")

MODES: tuple[ValidationMode, ...] = ("fast", "full")
REASON = "validation refused it"
_SITE = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """The validation of one state.

    Attributes:
        state: Name of the state.
        entries: Recorded number of entries.
        expectations: Number of expectations that were evaluated.
        failed: Number of expectations that failed.
    """

    state: str
    entries: int
    expectations: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of a validation.

    Attributes:
        what: Name of the validated thing, such as "checkpoint 7".
        checkpoint_id: Id of the checkpoint, also of a savepoint's; None for an attempt.
        mode: "fast" or "full".
        findings: A sentence for each problem.
        files: Number of checked files.
        entries: Number of entries that were read one by one; 0 in mode "fast".
        states: A report for each state.
        docs: Path of the first Data Docs page to read; None without Data Docs.
        pids: Ids of the processes that restored shards.
    """

    what: str
    checkpoint_id: int | None
    mode: ValidationMode
    findings: tuple[str, ...]
    files: int
    entries: int
    states: tuple[StateReport, ...]
    docs: str | None = None
    pids: tuple[int, ...] = ()

    @property
    def success(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    @property
    def expectations(self) -> int:
        """Number of evaluated expectations over all states."""
        return sum(s.expectations for s in self.states)

    def table(self) -> list[str]:
        """Return the states as a table for the log: a heading, then a line for each state."""
        width = max([5, *(len(s.state) for s in self.states)])
        lines = [f"{'state':{width}}  {'entries':>13}  {'expectations':>12}  {'failed':>6}"]
        lines += [f"{s.state:{width}}  {s.entries:13,}  {s.expectations:12,}  {s.failed:6,}" for s in self.states]
        return lines


def validate_checkpoint(
    spark: SparkSession | None,
    pipeline: Pipeline,
    root: str,
    record: Record,
    *,
    mode: ValidationMode = "full",
    docs: Path | None = None,
    with_expectations: bool = True,
    quarantine: bool = True,
) -> Validation:
    """Validate a committed checkpoint, and mark it as validated or quarantined.

    Args:
        spark: A session; None is allowed in mode "fast".
        pipeline: The pipeline.
        root: URL of the folder that holds the pipelines.
        record: Record of the checkpoint.
        mode: "fast" checks the files, "full" also restores the state.
        docs: Folder for Data Docs. Pages of earlier validations stay. None writes none.
        with_expectations: False skips the owner's expectations.
        quarantine: False does not quarantine a checkpoint with findings.

    Raises:
        UsageError: An expectation itself can't be evaluated. This says nothing about the data, so nothing is marked.
        CheckpointDropped: Retention dropped the checkpoint meanwhile, so files are missing. Nothing is marked.
    """
    options = {"root": root, "pipeline": pipeline.name, "checkpoint": str(record.id)}
    target = _Target(
        f"checkpoint {record.id}",
        join_url(root, pipeline.name),
        record.content,
        _before(pipeline, root, record),
        options,
        checkpoint_id=record.id,
    )
    storage, before = open_storage(target.folder), target.before
    with holding(storage, record.id, "a validation"), holding(storage, before.id if before else None, "a validation"):
        found = _validate(spark, pipeline, target, mode, docs, with_expectations)
    found = replace(found, checkpoint_id=record.id)
    coordinator = Coordinator(storage, pipeline.name)
    if found.success:
        coordinator.mark_validated(record.id, mode)
    elif quarantine:
        coordinator.quarantine(record.id, REASON, found.findings)
    return found


def validate_attempt(
    spark: SparkSession | None,
    pipeline: Pipeline,
    root: str,
    attempt: str,
    *,
    mode: ValidationMode = "full",
    docs: Path | None = None,
    with_expectations: bool = True,
) -> Validation:
    """Validate a prepared attempt before its commit.

    After a validation with findings, `commit` raises `ValidationRefused` for this attempt.

    Args:
        spark: A session; None is allowed in mode "fast".
        pipeline: The pipeline.
        root: URL of the folder that holds the pipelines.
        attempt: Id of the attempt.
        mode: "fast" checks the files, "full" also restores the state.
        docs: Folder for Data Docs; None writes none.
        with_expectations: False skips the owner's expectations.

    Raises:
        StateUnusable: The attempt was never prepared.
        UsageError: An expectation itself can't be evaluated. Nothing is marked.
    """
    folder = join_url(root, pipeline.name)
    coordinator = Coordinator(open_storage(folder), pipeline.name)
    content = coordinator.load_prepared(attempt).content
    record = Record(id=0, retained=(), reproduces=None, content=content)
    options = {"root": root, "pipeline": pipeline.name, "attempt": attempt}
    target = _Target(f"attempt {attempt}", folder, content, _before(pipeline, root, record), options)
    found = _validate(spark, pipeline, target, mode, docs, with_expectations)
    if not found.success:
        coordinator.refuse(attempt, REASON, found.findings)
    return found


def validate_savepoint(
    spark: SparkSession | None,
    pipeline: Pipeline,
    folder: str,
    *,
    mode: ValidationMode = "full",
    docs: Path | None = None,
    with_expectations: bool = True,
) -> Validation:
    """Validate a savepoint of either format. Nothing is marked: the caller decides.

    Args:
        spark: A session; None is allowed in mode "fast".
        pipeline: The pipeline whose expectations are evaluated.
        folder: URL of the savepoint's folder.
        mode: "fast" checks the files, "full" also restores the state.
        docs: Folder for Data Docs; None writes none.
        with_expectations: False skips the owner's expectations.

    Raises:
        UsageError: The folder holds no savepoint, or an expectation itself can't be evaluated.
    """
    savepoint = read_savepoint(open_storage(folder))
    target = _Target(
        f"savepoint {savepoint.savepoint}", folder, savepoint.content, None, {"checkpoint": folder}, savepoint.files
    )
    found = _validate(spark, pipeline, target, mode, docs, with_expectations)
    return replace(found, checkpoint_id=savepoint.checkpoint_id)


@dataclass(frozen=True, slots=True)
class _Target:
    """The checkpoint, attempt or savepoint that is validated.

    Attributes:
        name: Name for findings and Data Docs.
        folder: URL of the folder that the file handles are relative to.
        content: The recorded content.
        before: Record of the base, to evaluate `expectations_over_time`; None skips them.
        options: Options with which Cairn's Spark source `format("keyed_state")` reads the state.
        savepoint: The canonical files of a savepoint; None for a checkpoint or attempt.
        checkpoint_id: Id of the checkpoint; None for an attempt or savepoint.
    """

    name: str
    folder: str
    content: Content
    before: Record | None
    options: dict[str, str]
    savepoint: tuple[CanonicalFile, ...] | None = None
    checkpoint_id: int | None = None


def _before(pipeline: Pipeline, root: str, record: Record) -> Record | None:
    """Return the base's record if the pipeline has `expectations_over_time`, which need it, and the base is retained."""
    base_id = record.content.base_id
    if base_id is None or pipeline.expectations_over_time is None:
        return None
    checkpoints = Coordinator(open_storage(join_url(root, pipeline.name)), pipeline.name).log()
    entry = checkpoints.entries.get(base_id)
    if base_id in checkpoints.retained and isinstance(entry, Record):
        return entry
    log.info("checkpoint %d, the base, was dropped: expectations_over_time are not evaluated", base_id)
    return None


def _validate(
    spark: SparkSession | None,
    pipeline: Pipeline,
    target: _Target,
    mode: ValidationMode,
    docs: Path | None,
    with_expectations: bool,
) -> Validation:
    if mode not in MODES:
        raise UsageError(f"validation mode {mode!r} is not one of {', '.join(MODES)}")
    content = target.content
    with work_folder("verify") as work:
        files = verify_files(content, open_storage(target.folder), work=work, savepoint=target.savepoint)
    found = Validation(
        what=target.name,
        checkpoint_id=None,
        mode=mode,
        findings=files.findings,
        files=files.files,
        entries=0,
        states=(),
    )
    storage = open_storage(target.folder)
    if found.findings:
        check_retained(storage, target.checkpoint_id)
        return found
    with telling_drops(storage, target.checkpoint_id):
        found = replace(found, states=_reports(target))
    if mode == "fast":
        return found
    if spark is None:
        raise UsageError("a full validation restores the state, so it needs a Spark session; mode fast needs none")
    found = _restored(spark, pipeline, target, found)
    if found.findings:
        check_retained(storage, target.checkpoint_id)
    if found.findings or not with_expectations:
        return found
    return _expected(spark, pipeline, target, found, docs)


def _reports(target: _Target) -> tuple[StateReport, ...]:
    content = target.content
    entries = dict.fromkeys([*(d.name for d in content.states), TIMERS_NAME], 0)
    storage = open_storage(target.folder)
    for ref in content.shards:
        for state in manifest_of(ref, storage).key_group_states:
            for name, count in state.entries.items():
                entries[name] += count
    for file in target.savepoint or ():
        entries[file.state] += file.rows
    return tuple(StateReport(state=name, entries=n, expectations=0, failed=0) for name, n in entries.items())


def _restored(spark: SparkSession, pipeline: Pipeline, target: _Target, found: Validation) -> Validation:
    """Restore every shard in a Spark job, and return `found` with the job's findings added."""
    from cairn.shard_jobs.run_on_shards import run_on_shards
    from cairn.shard_jobs.validate import ValidationJob

    content = target.content
    job = ValidationJob(
        root=target.folder,
        content=content,
        canonical=target.savepoint or (),
        engine=replace(pipeline.engine, cache_dir=None),
    )
    shards = run_on_shards(spark, job)
    pids = tuple(sorted({s.pid for s in shards}))
    return replace(found, findings=job.findings(shards), entries=sum(s.entries for s in shards), pids=pids)


# --- states as tables -------------------------------------------------------------------------------------------------


def _state(spark: SparkSession, options: Mapping[str, str], state: str) -> DataFrame:
    from cairn.data_sources.keyed_state import KeyedState

    spark.dataSource.register(KeyedState)
    return spark.read.format("keyed_state").options(**options).option("state", state).load()


def _flat(table: DataFrame, value_prefix: str = "") -> DataFrame:
    """Return a state with one column per field, as expectations name the columns.

    Key fields become `key_<name>`, user key fields `user_key_<name>`, and value fields `<value_prefix><name>`.
    """
    from pyspark.sql import functions as F

    columns = []
    for name in table.columns:
        if name in ("key", "user_key", "value"):
            start = value_prefix if name == "value" else f"{name}_"
            columns += [F.col(name).getField(f).alias(start + f) for f in table.schema[name].dataType.fieldNames()]
        else:
            columns.append(F.col(name))
    return table.select(*columns)


def pairs(before: DataFrame, now: DataFrame, *, now_ms: int, removable: str | None) -> DataFrame:
    """Join the state of a base with the same state of a later checkpoint, for expectations over time.

    Args:
        before: The state of the base, as `format("keyed_state")` returns it.
        now: The state of the checkpoint, in the same form.
        now_ms: Time in milliseconds since the epoch. A row of the base that is missing from `now` counts as expired if
            its expiry time is not later.
        removable: SQL condition on a row of the base. A missing row that meets it counts as removed on purpose, any
            other missing row as lost. None: no row may be removed.

    Returns:
        A row for each row of either state: its key, the values before and now, and its `fate`, which is new, kept,
        expired, removed or lost. `OverTime.pairs` lists all columns.
    """
    from pyspark.sql import functions as F

    def side(table: DataFrame, name: str) -> DataFrame:
        columns = [F.lit(True).alias(f"{name}_there"), F.col("expires_at").alias(f"{name}_expires_at")]
        fields = table.schema["value"].dataType.fieldNames() if "value" in table.columns else []
        columns += [F.col("value").getField(f).alias(f"{name}_{f}") for f in fields]
        if name == "before":
            columns.append((F.expr(removable) if removable else F.lit(False)).alias("removable"))
        keys = []
        for part in ("key", "user_key"):
            if part in table.columns:
                names = table.schema[part].dataType.fieldNames()
                keys += [F.col(part).getField(f).alias(f"{part}_{f}") for f in names]
        keys += [F.col("pos")] if "pos" in table.columns else []
        # A key may have many timers: only key and time together identify a timer.
        keys += [F.col("expires_at")] if "value" not in table.columns else []
        return table.select(*keys, *columns)

    left, right = side(before, "before").alias("l"), side(now, "now").alias("r")
    keys = [name for name in right.columns if not name.startswith("now_")]
    same = [F.col(f"l.`{name}`").eqNullSafe(F.col(f"r.`{name}`")) for name in keys]
    joined = left.join(right, on=same, how="full_outer")
    gone = F.col("now_there").isNull()
    fate = (
        F.when(F.col("before_there").isNull(), "new")
        .when(~gone, "kept")
        .when(F.col("before_expires_at") <= F.timestamp_millis(F.lit(now_ms)), "expired")
        .when(F.col("removable"), "removed")
        .otherwise("lost")
    )
    there = [F.when(gone, F.col(f"l.`{n}`")).otherwise(F.col(f"r.`{n}`")).alias(n) for n in keys]
    values = [F.col(f"l.`{n}`") for n in left.columns if n.startswith("before_") and n != "before_there"]
    values += [F.col(f"r.`{n}`") for n in right.columns if n.startswith("now_") and n != "now_there"]
    lost = F.when(fate == "lost", F.to_json(F.struct(*there))).alias("lost_row")
    return joined.select(*there, *values, fate.alias("fate"), lost)


# --- expectations -----------------------------------------------------------------------------------------------------


def _expected(
    spark: SparkSession, pipeline: Pipeline, target: _Target, found: Validation, docs: Path | None
) -> Validation:
    suites = dict(pipeline.expectations()) if pipeline.expectations is not None else {}
    over_time: dict[str, OverTime] = {}
    if pipeline.expectations_over_time is not None and target.before is not None:
        over_time = dict(pipeline.expectations_over_time())
    if not suites and not over_time:
        return found
    known = {s.state for s in found.states}
    for name in {*suites, *over_time} - known:
        raise UsageError(
            f"pipeline {pipeline.name!r} has expectations for a state {name!r}, but no such state exists; its states are {', '.join(sorted(known))}"
        )
    from cairn.spark.first_cause import first_cause

    with first_cause():
        suite = _Suites(pipeline, target, docs)
        for state in dict.fromkeys([*suites, *over_time]):
            suite.run(state, *_tables(spark, target, state, suites.get(state, ()), over_time.get(state)))
    counted = ((s, *suite.counts.get(s.state, (0, 0))) for s in found.states)
    reports = tuple(replace(s, expectations=evaluated, failed=failed) for s, evaluated, failed in counted)
    return replace(found, findings=tuple(suite.findings), states=reports, docs=suite.docs_page)


@dataclass(frozen=True, slots=True)
class _Table:
    """A table and its expectations.

    Attributes:
        label: Suffix of the state's name in findings.
        make: Makes the table.
        expectations: Great Expectations expectations.
    """

    label: str
    make: Callable[[], DataFrame]
    expectations: list[Any]


def _tables(
    spark: SparkSession, target: _Target, state: str, expectations: Sequence[Any], over_time: OverTime | None
) -> tuple[_Table, ...]:
    own = _Table("", lambda: _flat(_state(spark, target.options, state)), list(expectations))
    before = target.before
    if over_time is None or before is None:
        return (own,)
    options = {name: target.options[name] for name in ("root", "pipeline")}
    earlier = _state(spark, {**options, "checkpoint": str(before.id)}, state)
    own.expectations.extend(_growth(over_time, earlier, before))
    if not over_time.needs_pairs:
        return (own,)
    import great_expectations.expectations as gxe

    beside = list(over_time.pairs)
    if over_time.no_row_lost:
        beside.append(gxe.ExpectColumnValuesToBeNull(column="lost_row"))
    now_ms = _expired_until_ms(state, target.content.time)

    def make() -> DataFrame:
        return pairs(earlier, _state(spark, target.options, state), now_ms=now_ms, removable=over_time.removable)

    return own, _Table(" over time", make, beside)


def _expired_until_ms(state: str, time: LogicalTime) -> int:
    """Return the time up to which rows of the base have expired or, as timers, have fired, in ms since the epoch.

    All rows expire by the processing time, except event-time timers. These fire up to a watermark. With
    `Pipeline(watermark="interval")` that is the interval's new watermark, `time.watermark_ms`. With
    `watermark="observed"` it is the watermark of the base, which the record keeps as `time.late_watermark_ms`.

    Args:
        state: Name of the state; `$timers` for the timers.
        time: The clock that the validated checkpoint records.
    """
    if state != TIMERS_NAME or time.mode != "event":
        return time.processing_time_ms
    fired_until_ms = time.watermark_ms if time.late_watermark_ms is None else time.late_watermark_ms
    return fired_until_ms or 0


def _growth(over_time: OverTime, earlier: DataFrame, before: Record) -> Iterator[Any]:
    """Yield one Great Expectations expectation that limits the number of rows of the new state; none without limits.

    Great Expectations evaluates the limits itself, so that the Data Docs show the numbers.

    Args:
        over_time: The owner's limits, as multiples of the number of rows of the base.
        earlier: The rows of the same state in the base. They are counted.
        before: Record of the base, whose id the Data Docs show.
    """
    if over_time.least_rows is None and over_time.most_rows is None:
        return
    import great_expectations.expectations as gxe

    rows = earlier.count()
    yield gxe.ExpectTableRowCountToBeBetween(
        min_value=None if over_time.least_rows is None else math.ceil(rows * over_time.least_rows),
        max_value=None if over_time.most_rows is None else math.floor(rows * over_time.most_rows),
        meta={"notes": f"checkpoint {before.id}, the base, has {rows} rows"},
    )


class _Suites:
    """Runner of one expectation suite per table, which collects the findings."""

    def __init__(self, pipeline: Pipeline, target: _Target, docs: Path | None) -> None:
        try:
            import great_expectations as gx
        except ModuleNotFoundError as error:
            raise UsageError(
                f"pipeline {pipeline.name!r} has expectations, but {socket.gethostname()} lacks Great Expectations ({error}); install it "
                f"where drivers run: pip install './{WHEEL}[validation]'"
            ) from None

        self.findings: list[str] = []
        self.counts: dict[str, tuple[int, int]] = {}  # By state: numbers of evaluated and failed expectations.
        self.docs_page: str | None = None
        self._pipeline = pipeline
        # Data Docs use the run name in paths. So the interval is written as in Cairn's own paths.
        self._run_name = f"{target.name} {interval_name(target.content.interval)}"
        self._actions: list[Any] = []
        if docs is None:
            self._context = gx.get_context(mode="ephemeral")
        else:
            self._context = _with_docs(docs / pipeline.name)
            self._actions.append(gx.checkpoint.UpdateDataDocsAction(name="docs", site_names=[_SITE]))
        self._context.variables.progress_bars = {"globally": False}
        self._source = self._context.data_sources.add_spark("restored_state")

    def run(self, state: str, *tables: _Table) -> None:
        """Evaluate the expectations on the tables of one state.

        Raises:
            UsageError: An expectation can't be evaluated.
        """
        evaluated = failed = 0
        for table in tables:
            if not table.expectations:
                continue
            for result, columns in self._run(f"{state}{table.label}", table):
                evaluated += 1
                finding = _finding(f"{state}{table.label}", result, columns)
                if finding is not None:
                    failed += 1
                    self.findings.append(finding)
        self.counts[state] = evaluated, failed

    def _run(self, name: str, table: _Table) -> Iterator[tuple[Any, list[str]]]:
        """Evaluate the expectations of one table. Yield each expectation's result with the table's column names.

        Args:
            name: Name of the state, followed by the table's label. Great Expectations and the Data Docs show it.
            table: The table.
        """
        import great_expectations as gx

        context = self._context
        batch = self._source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        suite = context.suites.add(
            gx.ExpectationSuite(name=f"{self._pipeline.name}.{name}", expectations=table.expectations)
        )
        definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=suite))
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(
                name=name,
                validation_definitions=[definition],
                actions=self._actions,
                result_format={"result_format": "SUMMARY"},
            )
        )
        # Cache the table: without the cache each expectation would restore the state again.
        frame = table.make().cache()
        try:
            run_id = gx.RunIdentifier(run_name=self._run_name)
            result = checkpoint.run(batch_parameters={"dataframe": frame}, run_id=run_id)
        finally:
            frame.unpersist()
        for identifier, run in result.run_results.items():
            first = self.docs_page is None or (not run.success and not self.findings)
            if self._actions and first:
                # Show the page of the first failure, else the first page. Do not show the index page: it loads scripts from
                # other hosts.
                (site,) = self._context.get_docs_sites_urls(resource_identifier=identifier, site_name=_SITE)
                self.docs_page = unquote(urlsplit(site["site_url"]).path)
            yield from ((found, frame.columns) for found in run.results)


def _with_docs(folder: Path) -> Any:
    """Return a Great Expectations context that writes Data Docs into the folder.

    The results are kept beside the pages, in `results`. Great Expectations deletes the pages of results that it does
    not find. So without this store it would delete the pages of all earlier runs.
    """
    import great_expectations as gx
    from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults

    folder.mkdir(parents=True, exist_ok=True)

    def files(path: Path) -> dict[str, str]:
        return {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(path)}

    stores = InMemoryStoreBackendDefaults()
    stores.stores[stores.validation_results_store_name]["store_backend"] = files(folder / "results")
    context = gx.get_context(project_config=DataContextConfig(store_backend_defaults=stores), mode="ephemeral")
    index = {"class_name": "DefaultSiteIndexBuilder"}
    site = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": files(folder)}
    context.add_data_docs_site(_SITE, {**site, "show_how_to_buttons": False})
    return context


def _finding(state: str, result: Any, columns: Sequence[str]) -> str | None:
    config = result.expectation_config
    what = f"state {state!r}: {config.type} {config.kwargs.get('column', '')}".rstrip()
    for raised in _exceptions(result.exception_info):
        raise UsageError(
            f"{what} could not be evaluated: {raised}\n"
            f"The expectation is wrong, not the data. The columns of the table are {', '.join(columns)}\n"
            "Fix the expectation in the pipeline, then validate again. Nothing was marked"
        )
    if result.success:
        return None
    seen = {
        k: v
        for k, v in result.result.items()
        if k in ("observed_value", "unexpected_count", "element_count", "partial_unexpected_list")
    }
    return f"{what}: {seen}"


def _exceptions(info: Mapping[str, Any]) -> list[str]:
    """Return the messages of the exceptions that an expectation raised.

    Great Expectations returns one flat dict if the expectation raised nothing, else one dict per metric.
    """
    entries = [info] if "raised_exception" in info else [v for v in info.values() if isinstance(v, Mapping)]
    return [str(e.get("exception_message")) for e in entries if e.get("raised_exception")]
