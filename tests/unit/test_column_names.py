"""Which column a name stands for. Classic columns need a session: ``tests/integration/test_pipeline.py``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.connect import functions as connect
from pyspark.sql.types import ArrayType, LongType, StructField, StructType, TimestampType

from cairn import copy_output, sinks
from cairn.aggregates import Count, Last, RunningAggregate, Sum
from cairn.operations.intervals.plan_interval import _check_sink
from cairn.pipeline import Interval, Pipeline
from cairn.processors import Latest, TopN, union_by_kind
from cairn.rows.column_names import ColumnNames, check_spelling, plain_name, remove_quotes
from state_backend.values.errors import SourceError, UsageError

START = datetime(2024, 1, 1, tzinfo=UTC)


def columns(*names: str, case_sensitive: bool = False) -> ColumnNames:
    return ColumnNames(names=names, case_sensitive=case_sensitive, what="pipeline 'p': the input")


@pytest.mark.parametrize(
    ("names", "name", "case_sensitive", "found"),
    [
        (("user", "n"), "user", False, "user"),
        (("User", "n"), "uSER", False, "User"),
        (("User", "n"), "uSER", True, "uSER"),
        (("Gönüllü",), "GÖNÜLLÜ", False, "Gönüllü"),
        (("a.b", "a b"), "a.b", False, "a.b"),
        (("a.b", "a b"), "`a.b`", False, "a.b"),
        (("a b", "b"), "A B", False, "a b"),
        (("a`b", "b"), "a`b", False, "a`b"),
        (("a`b", "b"), "`a``b`", False, "a`b"),
        (("`a`", "a"), "`a`", False, "`a`"),
        # There is none: the error of whoever looks for it says so.
        (("n",), "user", False, "user"),
    ],
)
def test_a_column_is_found_as_spark_finds_it(
    names: tuple[str, ...], name: str, case_sensitive: bool, found: str
) -> None:
    assert columns(*names, case_sensitive=case_sensitive).find(name) == found


@pytest.mark.parametrize(
    ("names", "recorded", "case_sensitive", "spelled"),
    [
        (("K", "V", "new"), ("k", "v"), False, ["k", "v", "new"]),
        (("K", "V"), ("k", "v"), True, ["K", "V"]),
        (("v",), ("V", "v"), False, ["V"]),  # the first interval's spelling
        (("GÖNÜLLÜ",), ("Gönüllü",), False, ["Gönüllü"]),
        (("v",), (), False, ["v"]),
    ],
)
def test_a_column_takes_the_recorded_spelling(
    names: tuple[str, ...], recorded: tuple[str, ...], case_sensitive: bool, spelled: list[str]
) -> None:
    assert columns(*names, case_sensitive=case_sensitive).spell(recorded) == spelled


def test_names_that_differ_in_case_only_are_refused() -> None:
    twins = StructType([StructField(name, LongType()) for name in ("v", "n", "V")])
    nested = StructType([StructField("list", ArrayType(twins))])
    for schema, where in ((twins, ""), (nested, " in 'list.element'")):
        told = f"^output has two columns 'v' and 'V'{where}, which differ in case only; rename one of them$"
        with pytest.raises(UsageError, match=told):
            check_spelling(schema, False, "output")
        check_spelling(schema, True, "output")
    one = StructType([StructField("V", LongType())])
    with pytest.raises(UsageError, match="output has a column 'V', but earlier output spells it 'v'"):
        check_spelling(one, False, "output", ["v"])
    check_spelling(one, False, "output", ["v", "V"])


def test_a_table_gets_no_names_that_differ_in_case_only() -> None:
    """Also from a session that minds case. And no names of the sink's own columns."""
    one, twins = (StructType([StructField(name, LongType()) for name in names]) for names in (["v"], ["v", "V"]))
    reserved = StructType([StructField("Interval_Start", LongType())])
    settings: dict[str, Any] = {"source": lambda *_: None, "key": ["v"], "processor": object, "output_schema": "v long"}
    tables = sinks.delta("file:///t"), sinks.iceberg("a.t", "c", dict), sinks.postgres("t", ""), sinks.bigquery("a.t")
    for sink in tables:
        made = Pipeline(name="p", start=START, sink=sink.with_late_rows(sinks.delta("file:///late")), **settings)
        _check_sink(made, one, one)
        with pytest.raises(UsageError, match="the table of its output has two columns 'v' and 'V'"):
            _check_sink(made, twins, one)
        with pytest.raises(UsageError, match="the table of its late rows has two columns 'v' and 'V'"):
            _check_sink(made, one, twins)
        with pytest.raises(UsageError, match="has a column 'Interval_Start', but the sink writes the interval into"):
            _check_sink(made, reserved, one)
    copies = Pipeline(name="p", start=START, sink=copy_output("memory://copy"), **settings)
    _check_sink(copies, one, reserved)
    with pytest.raises(UsageError, match="has a column 'Interval', but copy_output names its folders interval="):
        _check_sink(copies, StructType([StructField("Interval", LongType())]), one)


def test_a_setting_names_its_column_in_any_case() -> None:
    class Top(TopN):
        n, order = 1, ("SEQ desc", "at")

    class Newest(Latest):
        version = "SEQ"

    class Total(RunningAggregate):
        total, rows, last = Sum("v"), Count(), Last("V", ignore_nulls=True)

    top, total, newest = Top(), Total(), Newest()
    for processor in (top, total, newest):
        processor._spell_columns(["Seq", "at", "V"])
    assert (top.order, Top.order, newest.version) == (("Seq desc", "at"), ("SEQ desc", "at"), "Seq")
    assert [str(a) for a in total.declared_aggregates.values()] == ["Sum('V')", "Count()", "Last('V')"]
    top._spell_columns(["Seq", "SEQ"])
    assert top.order == ("Seq desc", "at")


def test_kinds_that_differ_in_case_only_are_refused() -> None:
    frame: Any = SimpleNamespace(schema=StructType([StructField("at", TimestampType())]))
    with pytest.raises(UsageError, match="the kinds 'order' and 'Order' differ in case only"):
        union_by_kind({"order": frame, "Order": frame}, shared=["at"])


def test_a_key_that_is_not_there_or_ambiguous_is_refused() -> None:
    assert columns("User", "n").find_key(["N", "user"]) == ["n", "User"]
    with pytest.raises(SourceError, match=r"lacks the key columns user, item; found: a, b"):
        columns("a", "b").find_key(["user", "item"])
    with pytest.raises(UsageError, match="the key names a column twice: user, USER"):
        columns("user").find_key(["user", "USER"])
    with pytest.raises(SourceError, match=r"'user' and 'USER', which Spark can't tell apart \(spark.sql.caseSensitive"):
        columns("user", "n", "USER")
    assert columns("user", "USER", case_sensitive=True).find_key(["USER"]) == ["USER"]
    with pytest.raises(SourceError, match="'n' and 'n', which Spark can't tell apart; rename or drop one"):
        columns("n", "n", case_sensitive=True)


@pytest.mark.parametrize(
    ("column", "name"),
    [("user", "user"), (connect.col("user"), "user"), (connect.col("`a.b`"), "a.b"), (connect.col("a b"), "a b")],
)
def test_a_plain_column_stands_for_its_name(column: Any, name: str) -> None:
    assert plain_name(column, "key") == name


@pytest.mark.parametrize(
    "column", [connect.col("s.x"), connect.upper("user"), connect.col("user").alias("u"), connect.lit(1), 5, None]
)
def test_an_expression_is_no_key(column: Any) -> None:
    """Nor does Spark take them in transformWithState."""
    with pytest.raises(UsageError, match=r"'p': key: .* is not a plain column of the input\nAdd the expression"):
        Pipeline(name="p", start=START, source=lambda *_: None, key=[column], processor=object, output_schema="a int")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("name", "plain"), [("`a``b`", "a`b"), ("`a`.`b`", "`a`.`b`"), ("a", "a"), ("``", "")])
def test_quotes_of_a_column_name_are_removed(name: str, plain: str) -> None:
    assert remove_quotes(name) == plain


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"start": datetime(2024, 1, 1)}, r"'p': start: .* has no time zone.*start=datetime\(2024, 1, 1, tzinfo=UTC\)"),
        ({"start": "2024-01-01"}, "'p': start: '2024-01-01' is a str, not a datetime"),
        ({"key": "user"}, r"'p': key must be a list of columns, as in key=\['user'\]"),
        ({"key": ["user", connect.col("user")]}, "key must name one or more different columns"),
        ({"api": "arrow", "initial_state": print}, "'p': initial_state needs api='row' or 'pandas'"),
    ],
)
def test_a_pipeline_with_an_invalid_declaration_is_refused(changes: dict[str, Any], says: str) -> None:
    settings = {"name": "p", "start": START, "source": None, "key": ["user"], "processor": object, "output_schema": ""}
    with pytest.raises(UsageError, match=says):
        Pipeline(**settings | changes)  # type: ignore[arg-type]


def test_an_interval_of_naive_datetimes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"an interval's start: .* has no time zone"):
        Interval(datetime(2024, 1, 1), START)
    with pytest.raises(UsageError, match=r"an interval's end: .* has no time zone"):
        Interval(START, datetime(2024, 1, 2))


def test_an_instant_has_whole_milliseconds() -> None:
    with pytest.raises(UsageError, match=r"00:00:00.000005\+00:00 is not a whole millisecond; leave out its last"):
        Interval(START, START + timedelta(microseconds=5)).end_ms  # noqa: B018
