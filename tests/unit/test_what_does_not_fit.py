"""What operations refuse before anything is computed or written: settings, input and state that do not go together. Without Spark;
that Spark's own rows and answers get there is in tests/integration."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pyspark.sql import types as t
from pyspark.sql.connect import functions as connect

from cairn.change_expectations import ChangeExpectations
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.data_sources.keyed_state import KeyedState
from cairn.operations.intervals import plan_interval
from cairn.operations.intervals.plan_interval import Attempt
from cairn.operations.savepoints import streaming, take_savepoint
from cairn.operations.savepoints.restore_savepoint import restore_savepoint
from cairn.operations.savepoints.take_savepoint import check_destination, check_free, consolidate_checkpoint
from cairn.operations.validation import expectation_suites
from cairn.operations.validation import validate_checkpoint as validate
from cairn.rows.column_names import ColumnNames, grouping_names
from cairn.spark_versions import grouping_of
from state_backend.checkpoint.commit_attempt import CommitResult
from state_backend.values.errors import (
    CairnError,
    ProcessorError,
    SourceError,
    StateSchemaError,
    StateUnusable,
    UsageError,
)
from state_backend.values.operation_parameters import TakeSavepoint
from state_backend.values.retention import KeepLast
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import Folder, content, day, run
from tests.support.savepoints import MAX_PARALLELISM, SmallPipeline
from tests.support.shards import KEY_SCHEMA, STATES, struct
from tests.support.validating import validate_checkpoint

ANY: Any = None
PIPELINE = bare_pipeline(max_parallelism=MAX_PARALLELISM)
EVENT: dict[str, Any] = {
    "time_mode": "event",
    "event_time": "at",
    "watermark_delay": datetime(2024, 1, 2) - datetime(2024, 1, 1),
}


def fields(**types: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, type_) for name, type_ in types.items()])


def refused(error: type[CairnError], says: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert says in str(raised.value)


# --- an interval -----------------------------------------------------------------------------------------------------------------


class FakeSpark:
    """Parses every schema as this type."""

    def __init__(self, parsed: t.DataType | None = None) -> None:
        self._parse_ddl = lambda _: parsed
        self.conf = SimpleNamespace(get=lambda *_: "false")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (
            "int",
            "output_schema is not a schema of columns: 'int'; write each column as name and type, as in 'user string",
        ),
        (5, "output_schema is a int; it must be DDL or a StructType"),
        (
            t.StructType([t.StructField(n, t.LongType()) for n in "aba"]),
            "output_schema names a more than once; give each column",
        ),
    ],
)
def test_an_invalid_output_schema_is_refused(schema: Any, says: str) -> None:
    spark: Any = FakeSpark(t.IntegerType())
    refused(
        UsageError,
        f"pipeline 'p': {says}",
        lambda: plan_interval._output_schema(spark, replace(PIPELINE, output_schema=schema), t.StructType()),
    )


def test_an_unknown_checkpoint_mode_is_refused() -> None:
    def process() -> object:
        return Attempt(id="a", interval=day(1), mode="partial", run=run())

    refused(UsageError, "mode 'partial' is not one of incremental, full, changelog", process)


@pytest.mark.parametrize(
    ("given", "says"),
    [(fields(at=t.StringType()), "found string"), (fields(other=t.TimestampType()), "found no such column")],
)
def test_an_event_time_column_that_is_absent_or_no_timestamp_is_refused(given: t.StructType, says: str) -> None:
    names = ColumnNames(names=tuple(given.names), case_sensitive=False, what="the input")
    refused(SourceError, says, lambda: plan_interval._event_time(replace(PIPELINE, **EVENT), names, given, ANY, None))


class Rows:
    """An initial state, grouped or not, as Spark Connect has it."""

    def __init__(self, schema: t.StructType, *grouping: Any) -> None:
        self.schema = schema
        self._df, self._group_type, self._grouping_cols = self, "groupby", grouping


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        (
            Rows(fields(k=t.StringType(), n=t.LongType()), connect.col("n")),
            UsageError,
            "the initial state is grouped by n, but the pipeline's key is k; group it by the key",
        ),
        (
            Rows(fields(k=t.LongType()), connect.col("k")),
            SourceError,
            "the initial state's key is struct<k:bigint>, but the input's key is struct<k:string>; cast one of them",
        ),
    ],
)
def test_an_initial_state_with_another_key_is_refused(rows: Any, error: type[CairnError], says: str) -> None:
    spark: Any = FakeSpark()
    pipeline = replace(PIPELINE, initial_state=lambda _: rows)
    refused(error, says, lambda: plan_interval._initial_state(spark, pipeline, fields(k=t.StringType())))


def test_a_grouping_by_an_expression_is_refused() -> None:
    rows = Rows(fields(k=t.StringType()), connect.upper("k"))
    refused(
        UsageError,
        "the rows must be grouped with groupBy, by plain columns only\nAdd the expression",
        lambda: grouping_names(grouping_of(rows) or pytest.fail("not grouped"), "the rows"),
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_parallelism": 8}, "max_parallelism is 8, but its state was made with 16; it can't change"),
        ({"time_mode": "none"}, "time_mode is none, but its state was made with processing"),
        (
            {"start": datetime(2023, 1, 1, tzinfo=UTC)},
            "start is 2023-01-01T00:00:00Z, but its state was made with 2024-01-01T00:00:00Z",
        ),
        ({}, "the key is struct<k: bigint>, but its state was made with struct<k: string>"),
    ],
)
def test_a_change_of_key_time_mode_max_parallelism_or_start_is_refused(changes: dict[str, Any], says: str) -> None:
    base = content(day(1), "a", key_schema=KEY_SCHEMA, max_parallelism=16)
    pipeline = replace(PIPELINE, **{"time_mode": "processing", **changes})
    names = ColumnNames(names=("k",), case_sensitive=False, what="the input")
    key = fields(k=t.StringType() if changes else t.LongType())
    keeping = ["To keep the state, take a canonical savepoint, and restore"] if "max_parallelism" in changes else []
    for told in (
        says,
        "to begin with empty state\n",
        *keeping,
        "\nIf you never changed it, another pipeline of this name writes below",
    ):
        refused(UsageError, told, lambda: plan_interval._check_unchanged(pipeline, base, key, names))


class Raises:
    def init(self, handle: Any) -> None:
        raise ValueError("no such table")

    def close(self) -> None: ...


def test_an_init_that_raises_is_reported_as_a_processor_error() -> None:
    pipeline = replace(PIPELINE, processor=Raises)
    says = "pipeline 'p': Raises.init failed on the driver: ValueError: no such table"
    refused(ProcessorError, says, lambda: plan_interval.declared_states(ANY, pipeline))


# --- savepoints and checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key": ["device"]}, "key is ['device'], but the savepoint of 'p' has ['k']"),
        ({"time_mode": "none"}, "time_mode is none, but the savepoint of 'p' has processing"),
        (
            {"max_parallelism": 8},
            "max_parallelism is 8, but the native savepoint has 16, and its files are split by key group",
        ),
    ],
)
def test_a_savepoint_of_other_settings_is_refused_unclaimed(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """F79: it is refused, and not claimed."""
    SmallPipeline(tmp_path).take(tmp_path / "saved", "native")
    pipeline = replace(PIPELINE, **{"time_mode": "processing", **changes})
    where = str(tmp_path / "new"), str(tmp_path / "saved")
    refused(UsageError, says, lambda: restore_savepoint(ANY, pipeline, *where, claim="CLAIM"))
    assert not (tmp_path / "saved" / "claimed.json").exists()


def test_an_unknown_claim_mode_is_refused() -> None:
    taken: Any = "TAKE"
    refused(
        UsageError,
        "claim mode 'TAKE' is not one of NO_CLAIM, CLAIM",
        lambda: restore_savepoint(ANY, PIPELINE, "memory://m", "memory://s", claim=taken),
    )


def test_a_restore_by_an_attempt_whose_checkpoint_was_dropped_is_refused() -> None:
    folder = Folder(policy=KeepLast(1))
    for n in (1, 2, 3):
        folder.run(day(n), f"a{n}")
        folder.publish_and_clean_up()
    with mock.patch("cairn.operations.savepoints.restore_savepoint.locate", lambda *_: folder.coordinator.at):
        refused(
            UsageError,
            "attempt a1 was committed, but its checkpoint has been dropped since; nothing is left to do",
            lambda: restore_savepoint(ANY, PIPELINE, "memory://m", "memory://s", attempt="a1"),
        )


def test_a_savepoint_into_an_occupied_folder_or_of_unknown_format_is_refused(tmp_path: Path) -> None:
    SmallPipeline(tmp_path).take(tmp_path / "saved", "native")
    refused(
        UsageError,
        "holds a savepoint already; choose another folder",
        lambda: check_free("memory://root/p", TakeSavepoint(root="", code="", folder=str(tmp_path / "saved"))),
    )
    refused(
        UsageError,
        "savepoint format 'pickle' is not one of native, canonical",
        lambda: check_destination("memory://root/p", "memory://saved", "pickle"),
    )


def test_a_consolidation_that_retention_drops_at_once_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to its commit was lost, and by the time that it is looked at others have committed beyond what is kept."""
    record = SmallPipeline(tmp_path).record
    assert record is not None
    monkeypatch.setattr(take_savepoint, "run_on_shards", lambda *_: ())
    monkeypatch.setattr(take_savepoint.ConsolidationJob, "finish", lambda *_: None)
    monkeypatch.setattr(take_savepoint, "is_prepared", lambda *_: True)
    monkeypatch.setattr(take_savepoint, "commit", lambda *_: CommitResult(id=2, record=None, outcome="already"))
    refused(
        UsageError,
        "checkpoint 1 of 'p' was dropped by retention at once; leave out consolidate",
        lambda: consolidate_checkpoint(ANY, PIPELINE, str(tmp_path / "root"), record),
    )


# --- validation --------------------------------------------------------------------------------------------------------------------


def test_a_full_validation_without_a_spark_session_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "a full validation restores the state, so it needs a Spark session; mode fast needs none"
    monkeypatch.setattr(validate, "verify_files", lambda *_, **__: SimpleNamespace(findings=(), files=1))
    record = SmallPipeline(tmp_path).record
    assert record is not None
    refused(UsageError, says, lambda: validate_checkpoint(None, PIPELINE, str(tmp_path / "root"), record))


def test_expectations_of_an_unknown_state_or_without_their_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = SimpleNamespace(before=None)
    found: Any = SimpleNamespace(
        states=[SimpleNamespace(state="counts", entries=1), SimpleNamespace(state="$timers", entries=0)]
    )
    pipeline = replace(PIPELINE, expectations=lambda: {"count": []})
    refused(
        UsageError,
        "pipeline 'p' has expectations for a state 'count', but no such state exists; its states are $timers, counts",
        lambda: validate._check_expected(ANY, pipeline, target, found, None),
    )
    monkeypatch.setitem(sys.modules, "great_expectations", None)
    refused(UsageError, "lacks Great Expectations (import of", lambda: expectation_suites.Suites(pipeline, "run", None))


def test_an_expectation_on_a_missing_column_is_reported_as_a_wrong_expectation() -> None:
    config = SimpleNamespace(type="expect_column_max_to_be_between", kwargs={"column": "m"})
    info = {"raised_exception": True, "exception_message": "no column m"}
    result = SimpleNamespace(expectation_config=config, exception_info=info)
    says = "state 'n': expect_column_max_to_be_between m could not be evaluated: no column m\nThe expectation is wrong, not the data. The columns of the table are key_k, n\nFix the expectation"
    refused(UsageError, says, lambda: expectation_suites._check_evaluated("n", result, ["key_k", "n"]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"least_rows": 1.5, "most_rows": 1.0},
            "least_rows=1.5 and most_rows=1.0: expected 0 <= least_rows <= most_rows",
        ),
        ({"least_rows": -1.0}, "expected 0 <= least_rows"),
        ({"removable": "n > 1"}, "removable allows some rows to be missing, so it needs no_row_lost=True"),
    ],
)
def test_contradictory_change_expectations_are_refused(settings: dict[str, Any], says: str) -> None:
    refused(UsageError, says, lambda: ChangeExpectations(**settings))


# --- data sources ------------------------------------------------------------------------------------------------------------------


def test_data_sources_refuse_missing_options_absent_output_and_unreadable_states(tmp_path: Path) -> None:
    made = SmallPipeline(tmp_path)
    made.take(tmp_path / "saved", "canonical")
    here = {"root": str(tmp_path / "root"), "pipeline": "p"}
    refused(
        UsageError,
        "format(\"keyed_output\") needs the options root and pipeline; 'pipeline' is missing",
        lambda: KeyedOutput({"root": "/r"}).schema(),
    )
    refused(StateUnusable, "has no committed output yet; run an interval first", lambda: KeyedOutput(here).schema())
    with pytest.raises(UsageError) as raised:
        KeyedState(here).schema()
    assert 'needs the option "state", one of: value, list, map' in str(raised.value)
    # Spark shows the traceback above the message: of ours it has one frame.
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("keyed_state.py") == 1 and raised.value.__suppress_context__
    check = KeyedState({"path": str(tmp_path / "saved"), "state": "$check"})
    refused(
        UsageError,
        "is a canonical savepoint, which $check can't read; to check it, restore it",
        lambda: check.reader(check.schema()),
    )


# --- from and to a streaming query --------------------------------------------------------------------------------------------------


class Reader:
    """Spark's reader, which gives these rows, or fails."""

    def __init__(self, rows: list[Any] | Exception) -> None:
        self._rows, self.read = rows, self

    def format(self, _: str) -> Reader:
        return self

    def options(self, **_: str) -> Reader:
        return self

    def load(self, _: str) -> Reader:
        return self.collect() if isinstance(self._rows, Exception) else self

    def collect(self) -> Any:
        if isinstance(self._rows, Exception):
            raise self._rows
        return self._rows


FAILS = RuntimeError("[STDS_FAILED] failed\n\tat org.x")
OTHER = SimpleNamespace(operatorId=0, operatorName="stateStoreSave")


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        (FAILS, SourceError, "/c is not the checkpoint of a streaming query with state: [STDS_FAILED] failed"),
        ([], SourceError, "it has no operator metadata; pass the query's checkpointLocation"),
        (
            [OTHER],
            UsageError,
            "operator 0 of the query in /c is not a transformWithState; the query has 0, a stateStoreSave",
        ),
    ],
)
def test_a_folder_without_a_streaming_checkpoint_is_refused(rows: Any, error: type[CairnError], says: str) -> None:
    spark: Any = Reader(rows)
    refused(error, says, lambda: streaming._operator(spark, "/c", 0))


def test_unreadable_state_of_a_streaming_query_is_reported_as_a_source_error() -> None:
    reader = streaming._StateReader(Reader(FAILS), "/c", 3, 0)  # type: ignore[arg-type]
    refused(SourceError, "the streaming checkpoint /c can't be read: [STDS_FAILED] failed", lambda: reader.state("v"))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: streaming.from_streaming_checkpoint(ANY, replace(PIPELINE, api="arrow"), "/c", "/r", day(1)),
            UsageError,
            "pipeline 'p': its api is 'arrow', but the processor of a streaming query has api='row' or 'pandas'",
        ),
        (
            lambda: streaming._check_mode(PIPELINE, "/c", {"timeMode": "EventTime"}),
            UsageError,
            "but the query in /c runs with EventTime; declare the query's",
        ),
        (
            lambda: streaming._check_states(PIPELINE, "/c", STATES, {"value": "list"}),
            StateSchemaError,
            "the query in /c has the list state 'value', which is differently (as a value state) declared in init(); declare the query's state",
        ),
        (
            lambda: streaming._check_states(PIPELINE, "/c", STATES, {"new": "list"}),
            StateSchemaError,
            "has the list state 'new', which is not declared in init(); declare the query's state, or its entries would be lost",
        ),
        (
            lambda: streaming._key_schema(PIPELINE, "/c", []),
            UsageError,
            "pipeline 'p' and the query in /c have no state in common; declare one of its states",
        ),
        (
            lambda: streaming._key_schema(
                PIPELINE, "/c", [SimpleNamespace(schema={"key": SimpleNamespace(dataType=fields(b=t.LongType()))})]
            ),  # type: ignore[list-item]
            UsageError,
            "key is ['k'], but the query in /c groups by struct<b:bigint>; declare the query's",
        ),
        (
            lambda: streaming._check_type("/c", "v", fields(n=t.LongType()), fields(n=t.StringType()).jsonValue()),
            StateSchemaError,
            "state v: the query in /c has struct<n: bigint>, but init() declares struct<n: string>; declare the query's types",
        ),
        (
            lambda: streaming._check_type("/c", "v", fields(n=t.StructType()), fields(n=t.StructType()).jsonValue()),
            StateSchemaError,
            "has a struct without fields, which can't be imported",
        ),
    ],
)
def test_a_query_unlike_the_pipeline_is_refused(call: Callable[[], object], error: type[CairnError], says: str) -> None:
    refused(error, says, call)


def test_a_key_column_with_the_name_of_the_state_column_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(content=content(day(1), "a", key_schema=struct((streaming._HELD, "string"))))
    monkeypatch.setattr(streaming, "find_state", lambda *_, **__: source)
    spark: Any = SimpleNamespace(dataSource=SimpleNamespace(register=lambda _: None))
    refused(
        UsageError,
        "but the column with the state has this name; rename the key column",
        lambda: streaming.initial_state_of(spark, "/s"),
    )


def test_initial_state_that_the_query_does_not_declare_is_refused() -> None:
    held = {streaming.TIMERS_NAME: None, "v": (1,)}
    handle = streaming._Remembering(None)
    says = "the initial state has a state 'v', which the query's processor does not declare in this form; declare it as in the pipeline"
    refused(UsageError, says, lambda: handle.put_back(held, {"v": (ANY, None)}))
