"""DataFrames whose plans compare rows with each other, and some whose plans do not: for classic Spark and for Spark Connect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cairn.operations.intervals.stateful_source import DEDUPLICATE, RANGE_JOIN, TIME_WINDOW, WINDOW_FUNCTION


def stateful_frames(
    events: Any, others: Any, F: Any, window: Any, sql: Callable[[str], Any]
) -> dict[str, tuple[Any, list[str]]]:
    """Return DataFrames and the operations that a warning must name, by the name of the case.

    Args:
        events: A DataFrame with the columns user, n and at; a view "events" has the same rows.
        others: A DataFrame with the columns customer, m and then.
        F: The module of functions.
        window: The class `Window`.
        sql: A function that makes a DataFrame of a query.
    """
    same, later = F.col("user") == F.col("customer"), F.col("then") >= F.col("at")
    return {
        "rows": (events.filter("n > 0").withColumn("twice", F.col("n") * 2), []),
        "lookup": (events.join(others, same, "left"), []),
        "counts": (events.groupBy("user").count(), []),
        "union": (events.unionByName(others, allowMissingColumns=True), []),
        "dropDuplicates": (events.dropDuplicates(["user"]).select("user"), [DEDUPLICATE]),
        "distinct": (events.distinct(), [DEDUPLICATE]),
        "window function": (
            events.withColumn("r", F.row_number().over(window.partitionBy("user").orderBy("n"))),
            [WINDOW_FUNCTION],
        ),
        "time window": (events.groupBy(F.window("at", "1 hour"), "user").count(), [TIME_WINDOW]),
        "session window": (events.groupBy("user", F.session_window("at", "1 hour")).count(), [TIME_WINDOW]),
        "range join": (events.join(others, same & later, "left"), [RANGE_JOIN]),
        "range join of F.expr": (
            events.join(others, same & F.expr("then BETWEEN at AND at + INTERVAL 1 DAY")),
            [RANGE_JOIN],
        ),
        "join of F.expr": (events.join(others, F.expr("user = customer")), []),
        # docs/sources.md names what is not recognised.
        "range after the join": (events.join(others, same).filter(later), []),
        "SQL BETWEEN": (
            sql(
                "SELECT a.* FROM events a JOIN events b ON a.user = b.user AND b.at BETWEEN a.at AND a.at + INTERVAL 1 DAY"
            ),
            [RANGE_JOIN],
        ),
        "SQL EXISTS": (
            sql("SELECT * FROM events a WHERE EXISTS (SELECT 1 FROM events b WHERE a.user = b.user AND b.n = a.n + 1)"),
            [],
        ),
        "SQL": (sql("SELECT user, n + 1 AS next FROM events WHERE n < 5"), []),
        "SQL DISTINCT": (sql("SELECT DISTINCT user FROM events"), [DEDUPLICATE]),
        "SQL OVER": (
            sql("SELECT *, row_number() OVER (PARTITION BY user ORDER BY n) AS r FROM events"),
            [WINDOW_FUNCTION],
        ),
        "SQL JOIN": (sql("SELECT a.* FROM events a JOIN events b ON a.user = b.user AND b.at > a.at"), [RANGE_JOIN]),
    }
