"""Read states as Spark tables, in the two forms that expectations use: a state, or its rows joined with the base's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def state_table(spark: SparkSession, options: Mapping[str, str], state: str) -> DataFrame:
    """Return a state as `format("keyed_state")` with the given options reads it."""
    from cairn.data_sources.keyed_state import KeyedState

    spark.dataSource.register(KeyedState)
    return spark.read.format("keyed_state").options(**options).option("state", state).load()


def identity_of(table: DataFrame) -> dict[str, Column]:
    """Return the columns that identify a row of a state, by the names that expectations use.

    A value is identified by its key, a list element also by its position, a map pair by its user key, and a timer by
    its time.
    """
    from pyspark.sql import functions as F

    columns: dict[str, Column] = {}
    for part in ("key", "user_key"):
        if part in table.columns:
            names = table.schema[part].dataType.fieldNames()
            columns |= {f"{part}_{f}": F.col(part).getField(f) for f in names}
    # A key may have many timers: only key and time together identify a timer.
    last = "pos" if "pos" in table.columns else "expires_at" if "value" not in table.columns else None
    return columns | ({last: F.col(last)} if last is not None else {})


def flat(table: DataFrame) -> DataFrame:
    """Return a state with one column per field, as expectations name the columns.

    Key fields become `key_<name>`, user key fields `user_key_<name>`, and value fields `<name>`.
    """
    from pyspark.sql import functions as F

    columns = []
    for name in table.columns:
        if name in ("key", "user_key", "value"):
            start = "" if name == "value" else f"{name}_"
            columns += [F.col(name).getField(f).alias(start + f) for f in table.schema[name].dataType.fieldNames()]
        else:
            columns.append(F.col(name))
    return table.select(*columns)


def pairs(before: DataFrame, now: DataFrame, *, now_ms: int, removable: str | None) -> DataFrame:
    """Join the state of a base with the same state of a later checkpoint, and tell the `fate` of each row.

    The fate is new, kept, expired (by `now_ms`), removed (`removable`, an SQL condition, selects the old row) or lost.
    The column `lost_row` has the key of a lost row as JSON, else null.
    """
    from pyspark.sql import functions as F

    def side(table: DataFrame, name: str) -> DataFrame:
        columns = [F.lit(True).alias(f"{name}_there"), F.col("expires_at").alias(f"{name}_expires_at")]
        fields = table.schema["value"].dataType.fieldNames() if "value" in table.columns else []
        columns += [F.col("value").getField(f).alias(f"{name}_{f}") for f in fields]
        if name == "before":
            columns.append((F.expr(removable) if removable else F.lit(False)).alias("removable"))
        keys = [column.alias(name) for name, column in identity_of(table).items()]
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
    lost = F.when(fate == "lost", F.to_json(F.struct(*there), {"ignoreNullFields": "false"})).alias("lost_row")
    return joined.select(*there, *values, fate.alias("fate"), lost)
