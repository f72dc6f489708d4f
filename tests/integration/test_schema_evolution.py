"""A processor is replaced by one with other schemas, between one interval and the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import Row

from cairn.operations.intervals.run_interval import run_interval
from state_backend.values.errors import StateSchemaError
from tests.support.counting import DAYS, counting, day, fresh_days
from tests.support.spark_tables import state_table
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class First(StatefulProcessor):
    """Per user: the last amount, all amounts, and a count per item; and a state that the next one does not know."""

    SEEN = "item string, amount int"
    AMOUNTS = "a struct<amount: int, item: string>"
    ITEMS = "n short"

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", self.SEEN)
        self._amounts = handle.getListState("amounts", self.AMOUNTS)
        self._items = handle.getMapState("items", "item string", self.ITEMS)
        self._old = handle.getValueState("old", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self._seen.update((row.item, row.amount))
            self._amounts.appendValue(((row.amount, row.item),))
            n = self._items.getValue((row.item,))
            self._items.updateValue((row.item,), ((n.n if n else 0) + 1,))
        self._old.update((1,))
        yield Row(user=key[0], kind="first", total=None, items=[], last=[])


class Second(StatefulProcessor):
    """Adds, widens and reorders; it reads what the first one wrote."""

    SEEN = "amount double, note string, item string"

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", self.SEEN)
        self._amounts = handle.getListState("amounts", "a struct<item: string, day: date, amount: bigint>")
        self._items = handle.getMapState("items", "item string", "last long, n int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen = self._seen.get()
        for row in rows:
            self._seen.update((row.amount / 4, "new", row.item))
            self._amounts.appendValue(((row.item, None, row.amount),))
            n = self._items.getValue((row.item,))
            self._items.updateValue((row.item,), (row.amount, (n.n if n else 0) + 1))
        amounts = [a[2] for (a,) in self._amounts.get()]
        yield Row(
            user=key[0], kind=repr(seen), total=None, items=[i for ((i,), _) in self._items.iterator()], last=amounts
        )


class Refused(Second):
    """What was a number is a text now."""

    SEEN = "amount string, note string, item string"


days = fresh_days(
    {
        0: [("ann", "pear", 1), ("ann", "fig", 2), ("bob", "fig", 5)],
        1: [("ann", "fig", 2**40), ("cid", "kiwi", 3)],
        2: [("bob", "fig", 1)],
    }
)


def values(spark: SparkSession, root: Path, name: str, checkpoint: int = 2) -> dict[Any, tuple[Any, ...]]:
    rows = state_table(spark, root, name, checkpoint=str(checkpoint)).collect()
    return {
        (r.key.user, *(r.user_key if "user_key" in r else ()), *((r.pos,) if "pos" in r else ())): tuple(r.value)
        for r in rows
    }


def test_a_processor_with_other_schemas_goes_on_with_the_state(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run_interval(spark, counting(processor=First), day(0), str(tmp_path))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cairn"):
        second = run_interval(spark, counting(processor=Second, parallelism=3), day(1), str(tmp_path))
    assert [r.getMessage() for r in caplog.records if r.name == "cairn"] == [
        "counting: states that the processor no longer declares, but that are kept: old; to drop a state, call deleteIfExists in init()"
    ]
    versions = {d.name: [v.version for v in d.versions] for d in second.content.states}
    assert versions == {"seen": [1, 2], "amounts": [1, 2], "items": [1, 2], "old": [1]}

    assert values(spark, tmp_path, "seen") == {
        ("ann",): (2.0**38, "new", "fig"),
        ("bob",): (5.0, None, "fig"),
        ("cid",): (0.75, "new", "kiwi"),
    }
    assert state_table(spark, tmp_path, "seen", checkpoint="2").schema["value"].dataType.simpleString() == (
        "struct<amount:double,note:string,item:string>"
    )
    assert values(spark, tmp_path, "amounts") == {
        ("ann", 0): (Row(item="pear", day=None, amount=1),),
        ("ann", 1): (Row(item="fig", day=None, amount=2),),
        ("ann", 2): (Row(item="fig", day=None, amount=2**40),),
        ("bob", 0): (Row(item="fig", day=None, amount=5),),
        ("cid", 0): (Row(item="kiwi", day=None, amount=3),),
    }
    assert values(spark, tmp_path, "items") == {
        ("ann", "fig"): (2**40, 2),
        ("ann", "pear"): (None, 1),
        ("bob", "fig"): (None, 1),
        ("cid", "kiwi"): (3, 1),
    }
    assert values(spark, tmp_path, "old") == {("ann",): (1,), ("bob",): (1,)}
    assert values(spark, tmp_path, "seen", first.id) == {("ann",): ("fig", 2), ("bob",): ("fig", 5)}
    outputs = {}
    for file in second.content.outputs:
        for row in spark.read.parquet(str(tmp_path / "counting" / file.handle.path)).collect():
            outputs[row.user] = (row.kind, row["items"], row.last)
    assert outputs == {"ann": ("(2.0, None, 'fig')", ["fig", "pear"], [1, 2, 2**40]), "cid": ("None", ["kiwi"], [3])}
    for record in (first, second):
        validation = validate_checkpoint(spark, counting(), str(tmp_path), record)
        assert (validation.findings, validation.entries) == ((), record.content.totals.entries)

    before = {f: f.read_bytes() for f in (tmp_path / "counting").rglob("*") if f.is_file()}
    with pytest.raises(StateSchemaError) as refusal:
        run_interval(spark, counting(processor=Refused), day(2), str(tmp_path))
    assert str(refusal.value) == (
        "pipeline 'counting', state 'seen' field 'amount': recorded as double, declared as string; some recorded "
        "values have no equal in the new type: declare it as recorded, or add a field of another name"
    )
    assert {f: f.read_bytes() for f in (tmp_path / "counting").rglob("*") if f.is_file()} == before
    third = run_interval(spark, counting(processor=Second), day(2), str(tmp_path))
    assert third.content.base_id == second.id
    assert values(spark, tmp_path, "seen", 3)["bob",] == (0.25, "new", "fig")


def test_an_idle_interval_rewrites_nothing_under_a_new_schema(spark: SparkSession, tmp_path: Path) -> None:
    """What a deploy costs: no entry is touched, so the digest stays and nothing is uploaded."""
    first = run_interval(spark, counting(processor=First), day(0), str(tmp_path))
    DAYS[day(1).start] = []
    second = run_interval(spark, counting(processor=Second), day(1), str(tmp_path))
    assert second.content.digest == first.content.digest
    assert second.content.totals.uploaded_bytes == second.content.totals.changed_bytes == 0
    assert values(spark, tmp_path, "seen") == {("ann",): (2.0, None, "fig"), ("bob",): (5.0, None, "fig")}
    assert validate_checkpoint(spark, counting(), str(tmp_path), second).success
