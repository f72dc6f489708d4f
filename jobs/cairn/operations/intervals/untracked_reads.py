"""Find what a source's own query reads. A record names the pipelines that it reads, but later changes go unnoticed.

The plan of classic Spark shows views and subqueries. The plan of Spark Connect does not show what a view or SQL reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cairn.rows.connect_frames import parts_of
from cairn.rows.local_rows import LocalRows
from cairn.spark_versions import analyzed_plan, connect_plan, is_connect
from state_backend.values.hide_secrets import hide
from state_backend.values.inputs import Untracked

# Matches the start of a line in a plan's text, up to the name of the line's node.
_NODE = r"^[ :+|!-]*"
_UNION = re.compile(_NODE + r"Union\b", re.MULTILINE)
_COMBINES = re.compile(
    _NODE
    + r"(Aggregate|Deduplicate\w*|Distinct|Except|GlobalLimit|Intersect|Join|LocalLimit|Offset|Sample|Tail|Window)\b",
    re.MULTILINE,
)
_COMBINING = (".Aggregate", ".Deduplicate", ".Window", ".Join", ".Limit", ".Offset", ".SQL", ".Sample", ".SetOperation", ".Tail")  # fmt: skip
# Matches a URL or a path. Groups: the host or bucket, and the path.
_URL = re.compile(r"(?:[A-Za-z][\w+.-]*:)?(?://([^/]*))?(/.*)?.*", re.DOTALL)
_WILDCARD = re.compile(r"[*?\[{]")
_TABLE = "DataSourceV2Relation"
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
    """Return True if a query has a union. With Spark Connect, a union within a view or an SQL text is not found."""
    if isinstance(rows, LocalRows):
        return False
    if is_connect(rows):
        return _has_message(rows, ".SetOperation")
    return _UNION.search(analyzed_plan(rows).toString()) is not None


def reads_once(rows: Any) -> bool:
    """Return True if a query reads at most one table or one set of files. A view of Spark Connect counts as a table."""
    if isinstance(rows, LocalRows):
        return True
    if is_connect(rows):
        found = [one.DESCRIPTOR.name for one in _messages(connect_plan(rows), ".connect.Read", ".connect.SQL")]
        return found in ([], ["Read"])
    return len([*_leaves(analyzed_plan(rows))]) == 1


def combines_rows(rows: Any) -> bool:
    """Return True if a query may combine rows, or choose among them. A view of Spark Connect is not looked into."""
    if is_connect(rows):
        return _has_message(rows, *_COMBINING)
    return _COMBINES.search(analyzed_plan(rows).toString()) is not None


def reads_below(rows: Any, folder: str) -> bool:
    """Return True if a query reads files in `folder`, or in a folder that contains it. `folder` is a URL or a path."""
    if isinstance(rows, LocalRows):
        return False
    paths = _paths_of_message(connect_plan(rows)) if is_connect(rows) else _paths_of_plan(analyzed_plan(rows))
    return any(overlap(folder, path) for path in paths)


def overlap(folder: str, path: str) -> bool:
    """Return True if a path, perhaps with wildcards, is in a folder or contains it. Both are URLs or absolute paths."""
    (host, inside), (other, read) = (_URL.fullmatch(text).groups() for text in (folder, path))  # type: ignore[union-attr]
    if not read or not read.strip("/") or (host and other and host != other):
        return False
    inside, read = f"{inside.rstrip('/')}/", f"{read.rstrip('/')}/"
    return read.startswith(inside) or inside.startswith(_WILDCARD.split(read, maxsplit=1)[0])


def _paths_of_message(message: Any) -> Iterator[str]:
    for read in _messages(message, ".Read.DataSource"):
        yield from read.paths
        yield from _paths_of_options(read.format, dict(read.options))


def _paths_of_plan(plan: Any) -> Iterator[str]:
    for leaf in _leaves(plan):
        if leaf.nodeName() == _TABLE:
            yield from _paths_of_options(leaf.table().name(), dict(leaf.options().asCaseSensitiveMap()))
        elif leaf.nodeName() == "LogicalRelation":
            of = leaf.relation().getClass()
            # Delta's class is a subclass of `HadoopFsRelation`. Other relations, such as those of JDBC, have no files.
            if "HadoopFsRelation" in (of.getSimpleName(), of.getSuperclass().getSimpleName()):
                yield from leaf.relation().location().rootPaths().mkString("\n").split("\n")


def _paths_of_options(name: str, options: Mapping[str, str]) -> Iterator[str]:
    if name.lower() in _FORMATS:
        root, pipeline = _pipeline_of({option.lower(): value for option, value in options.items()})
        yield f"{root}/{pipeline}"
        return
    for value in options.values():
        # If an option has several paths, its value is one JSON list.
        yield from re.findall(r'"([^"]+)"', value) if value.startswith('["') else [value]


def _has_message(rows: Any, *names: str) -> bool:
    return any(True for _ in _messages(connect_plan(rows), *names))


def _messages(message: Any, *names: str) -> Iterator[Any]:
    """Yield the parts of a protobuf message, at any depth, whose type's name ends with one of the names."""
    pending = [message]
    while pending:  # Without recursion: a message may be deep.
        one = pending.pop()
        if one.DESCRIPTOR.full_name.endswith(names):
            yield one
        pending += parts_of(one)


def _of_plan(plan: Any) -> Iterator[tuple[str, Mapping[str, str]]]:
    text = plan.toString().lower()
    if not any(name in text for name in _FORMATS):
        return
    for leaf in _leaves(plan):
        if leaf.nodeName() == _TABLE:
            yield leaf.table().name(), dict(leaf.options().asCaseSensitiveMap())


def _leaves(plan: Any) -> Iterator[Any]:
    subqueries = plan.subqueriesAll()
    for tree in (plan, *(subqueries.apply(n) for n in range(subqueries.size()))):
        leaves = tree.collectLeaves()
        yield from (leaves.apply(n) for n in range(leaves.size()))


def _of_message(message: Any) -> Iterator[tuple[str, Mapping[str, str]]]:
    data = message.SerializeToString().lower()  # To search these bytes is cheap, even if a plan has 100,000 literals.
    if any(name.encode() in data for name in _FORMATS):
        for one in _messages(message, ".Read.DataSource"):
            yield one.format, dict(one.options) | ({"path": one.paths[0]} if one.paths else {})


def _untracked(name: str, options: Mapping[str, str]) -> Untracked | None:
    """Return the pipeline that the data source `name` reads; None if it reads none, or reads checkpoints by id."""
    given = {option.lower(): value for option, value in options.items()}
    checkpoint = given.get("checkpoint", "latest")
    if name.lower() not in _FORMATS or "checkpoints" in given or checkpoint.isdigit() or "attempt" in given:
        return None
    root, pipeline = _pipeline_of(given)
    return Untracked(pipeline=pipeline, root=hide(root))


def _pipeline_of(given: Mapping[str, str]) -> tuple[str, str]:
    """Return (root, pipeline) by the options of `keyed_output` or `keyed_state`, whose names are in lower case."""
    if "path" not in given and "/" in given.get("checkpoint", ""):  # `checkpoint` is a pipeline's folder.
        given = {"path": given["checkpoint"]}
    root, pipeline = given.get("root", given.get("path", "")).rstrip("/"), given.get("pipeline", "")
    if "root" not in given and (not pipeline or root.endswith(f"/{pipeline}")):
        root, _, pipeline = root.rpartition("/")
    return root, pipeline
