"""Warn about operations in a source that compare rows, because in a source they see the rows of one interval only.

A DataFrame of classic Spark gives its analysed plan as text. A DataFrame of Spark Connect has its plan as a message of
the protocol, so no request is needed. But this message does not show the plan of a view, which only the server knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cairn.rows.connect_frames import parts_of
from cairn.rows.local_rows import LocalRows
from cairn.spark_versions import analyzed_plan, connect_plan, is_connect

if TYPE_CHECKING:
    from cairn.pipeline import Pipeline

log = logging.getLogger("cairn")

DEDUPLICATE = "dropDuplicates or distinct (use cairn.processors.Deduplicate)"
WINDOW_FUNCTION = "a window function (use cairn.processors.Deduplicate, Latest, History or TopN)"
TIME_WINDOW = "an aggregation by time window (use cairn.processors.TumblingWindow, SlidingWindow or SessionWindow)"
RANGE_JOIN = "a join over a range (use cairn.processors.IntervalJoin or LookupJoin)"
_OPERATIONS = (DEDUPLICATE, WINDOW_FUNCTION, TIME_WINDOW, RANGE_JOIN)

# Matches the start of a line of an analysed plan: the branches of the tree, up to the name of the node.
_NODE = r"^[\s:+\-!]*"
_IN_TEXT = {
    DEDUPLICATE: re.compile(_NODE + r"(Deduplicate|DeduplicateWithinWatermark|Distinct)\b", re.M),
    WINDOW_FUNCTION: re.compile(_NODE + r"Window \[", re.M),
    TIME_WINDOW: re.compile(_NODE + r"Aggregate \[[^\]]*\b(session_)?window#", re.M),
    RANGE_JOIN: re.compile(_NODE + r"Join \w+,.*( (<|<=|>|>=) |\bbetween\()", re.M),
}
_IN_SQL = {
    DEDUPLICATE: re.compile(r"\bselect\s+distinct\b", re.I),
    WINDOW_FUNCTION: re.compile(r"\bover\s*\(", re.I),
    TIME_WINDOW: re.compile(r"\bgroup\s+by\b[^)]*\b(session_)?window\s*\(", re.I),
    RANGE_JOIN: re.compile(r"\bjoin\b.*?\bon\b[^;]*?(<|>|\bbetween\b)", re.I | re.S),
}
# Matches a comparison in a function's name, such as `<=`, or in the text of an `F.expr`.
_RANGE = re.compile(r"[<>]|\bbetween\b", re.I)
_warned: set[str] = set()


def warn_of_stateful_source(pipeline: Pipeline, rows: Any) -> None:
    """Log a warning if the source's plan compares rows with each other.

    A process warns once for each pipeline. A plan that can't be read causes no warning.
    """
    if pipeline.stateful_source == "allow" or pipeline.name in _warned or isinstance(rows, LocalRows):
        return
    _warned.add(pipeline.name)
    try:
        found = stateful_operations(rows)
    except Exception as error:
        log.debug("%s: the plan of the source could not be read: %s", pipeline.name, error)
        return
    if found:
        log.warning(
            "pipeline %r: the source has %s. In a source it sees the rows of one interval only\n"
            "If one interval is enough, set Pipeline(stateful_source='allow')",
            pipeline.name,
            ", and ".join(found),
        )


def stateful_operations(rows: Any) -> list[str]:
    """Return a description of each operation in a DataFrame's plan whose result depends on several rows.

    The operations are those of `_OPERATIONS`: duplicates, window functions, time windows, joins over a range.
    """
    if not is_connect(rows):
        text = str(analyzed_plan(rows).toString())
        found = {operation for operation, pattern in _IN_TEXT.items() if pattern.search(text)}
    else:
        found = set(_of_message(connect_plan(rows)))
    return [operation for operation in _OPERATIONS if operation in found]


def _of_message(message: Any) -> Iterator[str]:
    name = message.DESCRIPTOR.full_name
    if name.endswith(".Deduplicate"):
        yield DEDUPLICATE
    elif name.endswith(".Expression.Window"):
        yield WINDOW_FUNCTION
    elif name.endswith(".Aggregate") and {"window", "session_window"} & set(_functions(message.grouping_expressions)):
        yield TIME_WINDOW
    elif name.endswith(".Join") and any(map(_RANGE.search, _functions([message.join_condition]))):
        yield RANGE_JOIN
    elif name.endswith(".SQL"):
        yield from (operation for operation, pattern in _IN_SQL.items() if pattern.search(message.query))
    for part in parts_of(message):
        yield from _of_message(part)


def _functions(expressions: Any) -> Iterator[str]:
    """Yield the name of each function and each SQL text, at any depth of these expressions of Spark Connect."""
    for expression in expressions:
        kind = expression.DESCRIPTOR.full_name
        if kind.endswith(".UnresolvedFunction"):
            yield expression.function_name
        elif kind.endswith(".ExpressionString"):
            yield expression.expression
        yield from _functions(parts_of(expression))
