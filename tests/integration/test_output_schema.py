"""An output schema that changes from interval to interval, through Spark."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row

from cairn.data_sources.keyed_output import KeyedOutput
from cairn.operations.coordinator_of import coordinator_of
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.spark.ddl import parse_ddl_locally
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.rewind import fork
from state_backend.values.errors import UsageError
from state_backend.values.records import Permissions, RunRef

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
# By hour: what the input's schema is then.
INPUT = {0: "user string, at timestamp, n int", 3: "n bigint, at timestamp, user string, note string"}


def hour(n: int) -> Interval:
    return Interval(START + n * HOUR, START + (n + 1) * HOUR)


def read_hours(spark: SparkSession, interval: Interval) -> DataFrame:
    """A row in time, and from hour 2 on one that is late."""
    n = (interval.start - START) // HOUR
    ddl = INPUT[max(since for since in INPUT if since <= n)]
    rows = [("ann", interval.start + HOUR / 2, n)] + [("ann", START, -n)] * (n >= 2)
    values = [{"user": user, "at": at, "n": m, "note": f"note {m}"} for user, at, m in rows]
    names = [part.split()[0] for part in ddl.split(", ")]
    return spark.createDataFrame([tuple(v[name] for name in names) for v in values], ddl)


class Everything(StatefulProcessor):
    """Yields those of its columns that are asked for. Structs have more fields than any schema: these are dropped."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self._count.get() or (0,))[0] + len(list(rows))
        self._count.update((n,))
        part = Row(a=n, b=f"b{n}", c=n + 0.5)
        row = {
            "user": key[0],
            "n": n,
            "note": f"note {n}",
            "part": part,
            "parts": [part],
            "by": {"k": part},
            "at": START,
        }
        yield Row(**{name: value for name, value in row.items() if name in self.columns})


def pipeline(output_schema: str, name: str = "evolving") -> Pipeline:
    return Pipeline(
        name=name,
        start=START,
        source=read_hours,
        key=["user"],
        processor=Everything(parse_ddl_locally(output_schema).names),
        output_schema=output_schema,
        time_mode="event",
        event_time="at",
        watermark_delay=timedelta(0),
        parallelism=1,
        max_parallelism=8,
    )


def read(
    spark: SparkSession, root: Path, name: str = "evolving", **options: str
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns with their types, and the rows by ``n`` if there is one."""
    spark.dataSource.register(KeyedOutput)
    table = (
        spark.read.format("keyed_output").option("root", str(root)).option("pipeline", name).options(**options).load()
    )
    rows = table.orderBy("n").collect() if "n" in table.columns else table.collect()
    return [f"{f.name} {f.dataType.simpleString()}" for f in table.schema], [tuple(r) for r in rows]


FIRST = "user string, n int not null, part struct<a: int, b: string>, parts array<struct<a: int>>, by map<string, struct<a: int>>"
SECOND = (
    "by map<string, struct<b: string, a: bigint>>, note string, parts array<struct<c: double, a: double>>, n bigint, user string, "
    "part struct<b: string, c: double, a: bigint>"
)
THIRD = "n bigint, user string, at timestamp"
FOURTH = "n bigint, note string"


@pytest.mark.long("a quarter of a minute")
def test_a_schema_that_changes(spark: SparkSession, tmp_path: Path) -> None:
    """Added, dropped, reordered, widened, at every depth; then what can't follow is refused before anything was done."""
    root = str(tmp_path)
    run_interval(spark, pipeline(FIRST), hour(0), root)
    assert read(spark, tmp_path)[1] == [("ann", 1, Row(a=1, b="b1"), [Row(a=1)], {"k": Row(a=1)})]

    run_interval(spark, pipeline(SECOND), hour(1), root)
    columns, rows = read(spark, tmp_path)
    assert columns == [
        "by map<string,struct<b:string,a:bigint>>",
        "note string",
        "parts array<struct<c:double,a:double>>",
        "n bigint",
        "user string",
        "part struct<b:string,c:double,a:bigint>",
    ]
    assert rows == [
        ({"k": Row(b=None, a=1)}, None, [Row(c=None, a=1.0)], 1, "ann", Row(b="b1", c=None, a=1)),
        ({"k": Row(b="b2", a=2)}, "note 2", [Row(c=2.5, a=2.0)], 2, "ann", Row(b="b2", c=2.5, a=2)),
    ]

    # Dropped columns keep their values.
    run_interval(spark, pipeline(THIRD), hour(2), root)
    columns, rows = read(spark, tmp_path)
    assert [c.split()[0] for c in columns] == ["n", "user", "at", "by", "note", "parts", "part"]
    assert [row[:3] for row in rows] == [
        (1, "ann", None),
        (2, "ann", None),
        (3, "ann", START.replace(tzinfo=None)),
    ]
    assert [(row[4], row[6]) for row in rows] == [
        (None, Row(b="b1", c=None, a=1)),
        ("note 2", Row(b="b2", c=2.5, a=2)),
        (None, None),
    ]
    # A query of the past has the same columns, and a re-run of the past with its own code changes nothing.
    assert read(spark, tmp_path, end=hour(0).end.isoformat()) == (columns, rows[:1])
    run_interval(spark, pipeline(FIRST), hour(0), root)
    run_interval(spark, pipeline(SECOND), hour(1), root)
    assert read(spark, tmp_path) == (columns, rows)

    before = {info.path for info in open_storage(f"{root}/evolving").list("")}
    with pytest.raises(UsageError, match=r"(?s)field 'n': recorded as bigint, declared as string; .* cairn fork"):
        run_interval(spark, pipeline("n string"), hour(3), root)
    assert {info.path for info in open_storage(f"{root}/evolving").list("")} == before

    fourth = run_interval(spark, pipeline(FOURTH), hour(3), root)
    assert [row[:2] for row in read(spark, tmp_path)[1]] == [(1, None), (2, "note 2"), (3, None), (4, "note 4")]

    # Late rows have the input's schema, which changed before hour 3. A re-run of hour 2 takes no column out.
    for _ in range(2):
        columns, rows = read(spark, tmp_path, late="true")
        assert columns == ["n bigint", "at timestamp", "user string", "note string"]
        assert [(n, user, note) for n, _, user, note in rows] == [(-3, "ann", "note -3"), (-2, "ann", None)]
        run_interval(spark, pipeline(THIRD), hour(2), root)

    # The way out of a refusal: the state goes on under another name, and output begins anew.
    other = pipeline("n string, user string", name="other")
    into = coordinator_of(other, root)
    by = RunRef(run_id="f", clear_number=0, try_number=1)
    fork(open_storage(f"{root}/evolving"), fourth.id, into, run=by, attempt="f")
    with pytest.raises(Exception, match="does not fit"):
        run_interval(spark, other, hour(4), root)  # the processor still yields a number
    run_interval(spark, pipeline("n decimal(38,0), user string", name="other"), hour(4), root)
    assert [tuple(map(str, row)) for row in read(spark, tmp_path, "other")[1]] == [("5", "ann")]


@pytest.mark.long("half a minute of Spark")
def test_another_cut_through_spark(spark: SparkSession, tmp_path: Path) -> None:
    """An hour, then its halves: refused, then they replace it; nothing is read twice."""
    root, (whole, half) = str(tmp_path), (hour(0), HOUR / 2)
    run_interval(spark, pipeline(THIRD), whole, root)
    halves = [Interval(whole.start, whole.start + half), Interval(whole.start + half, whole.end)]
    with pytest.raises(UsageError, match="replace_overlapping"):
        run_interval(spark, pipeline(THIRD), halves[0], root)
    for n, interval in enumerate(halves):
        record = run_interval(spark, pipeline(THIRD), interval, root, permissions=Permissions(replace_overlapping=True))
        assert record.content.permissions.replace_overlapping
        assert len(read(spark, tmp_path)[1]) == n + 1
