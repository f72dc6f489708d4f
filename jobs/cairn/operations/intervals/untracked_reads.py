"""Reads of other pipelines in a source's own query. A record names them; a change of these pipelines is not noticed.

The plan of classic Spark has views and subqueries in it. In the message of Spark Connect, views and SQL stay unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cairn.operations.intervals.stateful_source import parts_of
from cairn.rows.local_rows import LocalRows
from cairn.spark_versions import analyzed_plan, connect_plan, is_connect
from state_backend.values.hide_secrets import hide
from state_backend.values.inputs import Untracked

# A node of a plan's text, which has a line for each node.
_UNION = re.compile(r"^[ :+|-]*Union\b", re.MULTILINE)
_FORMATS = ("keyed_output", "keyed_state")


def untracked_in(rows: Any) -> set[Untracked]:
    """Return the pipelines that a query reads by `keyed_output` or `keyed_state` without naming checkpoints."""
    if isinstance(rows, LocalRows):
        return set()
    read = _of_message(connect_plan(rows)) if is_connect(rows) else _of_plan(analyzed_plan(rows))
    return {found for name, options in read if (found := _untracked(name, options)) is not None}


def looks_up_names(rows: Any) -> bool:
    """Return True if a server of Spark Connect looks up a table or view by its name when it runs the query."""
    return is_connect(rows) and _has_message(rows, ".Read.NamedTable", ".connect.SQL")


def has_union(rows: Any) -> bool:
    """Return True if a query has a union anywhere. Views and SQL of Spark Connect stay unknown."""
    if isinstance(rows, LocalRows):
        return False
    if is_connect(rows):
        return _has_message(rows, ".SetOperation")
    return _UNION.search(analyzed_plan(rows).toString()) is not None


def _has_message(rows: Any, *names: str) -> bool:
    pending = [connect_plan(rows)]
    while pending:
        one = pending.pop()
        if one.DESCRIPTOR.full_name.endswith(names):
            return True
        pending += parts_of(one)
    return False


def _of_plan(plan: Any) -> Iterator[tuple[str, Mapping[str, str]]]:
    text = plan.toString().lower()
    if not any(name in text for name in _FORMATS):
        return
    subqueries = plan.subqueriesAll()
    for tree in (plan, *(subqueries.apply(n) for n in range(subqueries.size()))):
        leaves = tree.collectLeaves()
        for leaf in (leaves.apply(n) for n in range(leaves.size())):
            if leaf.nodeName() == "DataSourceV2Relation":
                yield leaf.table().name(), dict(leaf.options().asCaseSensitiveMap())


def _of_message(message: Any) -> Iterator[tuple[str, Mapping[str, str]]]:
    data = message.SerializeToString().lower()  # A search in it costs little, also with 100,000 literals.
    pending = [message] if any(name.encode() in data for name in _FORMATS) else []
    while pending:  # Without recursion: a message may be deep.
        one = pending.pop()
        if one.DESCRIPTOR.full_name.endswith(".Read.DataSource"):
            yield one.format, dict(one.options) | ({"path": one.paths[0]} if one.paths else {})
        pending += parts_of(one)


def _untracked(name: str, options: Mapping[str, str]) -> Untracked | None:
    """Return the pipeline that a data source reads; None if it reads no pipeline, or checkpoints by their ids."""
    given = {option.lower(): value for option, value in options.items()}
    checkpoint = given.get("checkpoint", "latest")
    if name.lower() not in _FORMATS or "checkpoints" in given or checkpoint.isdigit() or "attempt" in given:
        return None
    if "path" not in given and "/" in checkpoint:  # the folder of a pipeline
        given = {"path": checkpoint}
    root, pipeline = given.get("root", given.get("path", "")).rstrip("/"), given.get("pipeline", "")
    if "root" not in given and (not pipeline or root.endswith(f"/{pipeline}")):
        root, _, pipeline = root.rpartition("/")
    return Untracked(pipeline=pipeline, root=hide(root))
