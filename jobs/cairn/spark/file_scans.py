"""Tell what a query has read from files and from Spark's cache, by the metrics of its executed plan.

Spark plans a query over files with a list of the files and their lengths. The list may be older than the query, because
Spark keeps lists with plans and tables. Spark reads a file only up to the length in the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from cairn.spark_versions import connect_metrics, executed_plan, is_connect
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CACHED, _REUSED = "InMemoryTableScan", "ReusedExchange"
_FILES, _BYTES = "numFiles", "filesSize"
_UNION, _WRAPPERS = "Union", ("WholeStageCodegen", "InputAdapter")


@frozen
class Scans:
    """The reads of an executed query."""

    # For each scan of files, the number of files and the sum of their lengths in bytes, by Spark's list of files.
    files: tuple[tuple[int, int], ...] = ()
    cached: bool = False  # True if rows come from Spark's cache.
    # True if rows come from another part of the query's plan, whose scans are not among `files`.
    reused: bool = False


@frozen
class _Node:
    """A node of an executed plan. Only leaves have metrics."""

    name: str
    below: tuple[_Node, ...]  # Its children.
    metrics: Mapping[str, int] = field(default_factory=dict)


def scans_of(frame: DataFrame) -> Scans:
    """Return what a DataFrame that was collected, classic or of Spark Connect, has read."""
    return _scans(_executed(frame))


def scans_of_each(frame: DataFrame, count: int) -> list[Scans] | None:
    """Return the reads of each of `count` frames. `frame`: The collected union of one other frame and these frames.

    Return None if the executed plan has another number of branches: then it does not tell which frame has read what.
    """
    node = _executed(frame)
    while node.name != _UNION and len(node.below) == 1:
        node = node.below[0]
    branches = [*_branches(node)]
    return [*map(_scans, branches[1:])] if len(branches) == count + 1 else None


def _branches(node: _Node) -> Iterator[_Node]:
    """Yield the branches of a union. If a branch is a union itself, yield its branches instead."""
    inner = node
    while inner.name.startswith(_WRAPPERS):
        (inner,) = inner.below
    if inner.name == _UNION:
        for child in inner.below:
            yield from _branches(child)
    else:
        yield node


def _scans(node: _Node) -> Scans:
    leaves = [*_leaves(node)]
    return Scans(
        files=tuple(
            (leaf.metrics[_FILES], leaf.metrics[_BYTES])
            for leaf in leaves
            if _FILES in leaf.metrics and _BYTES in leaf.metrics
        ),
        cached=any(leaf.name.startswith(_CACHED) for leaf in leaves),
        reused=any(leaf.name == _REUSED for leaf in leaves),
    )


def _leaves(node: _Node) -> Iterator[_Node]:
    if not node.below:
        yield node
    for child in node.below:
        yield from _leaves(child)


def _executed(frame: DataFrame) -> _Node:
    if not is_connect(frame):
        return _of_jvm(executed_plan(frame))
    found, of = connect_metrics(frame), dict[int, list[Any]]()
    for node in found:
        of.setdefault(node.parent_plan_id, []).append(node)

    def of_message(node: Any) -> _Node:
        below = tuple(of_message(child) for child in of.get(node.plan_id, ()) if child is not node)
        return _Node(name=node.name, below=below, metrics={metric.name: metric.value for metric in node.metrics})

    # The first node is the plan's root. Spark gives it itself as parent, hence `child is not node` above.
    return _Node(name="", below=tuple(map(of_message, found[:1])))


def _of_jvm(node: Any) -> _Node:
    name = node.nodeName()
    # With adaptive execution, these nodes have no children: the part of the plan below them is a member.
    if name == "AdaptiveSparkPlan":
        return _Node(name=name, below=(_of_jvm(node.executedPlan()),))
    if name.endswith("QueryStage"):
        return _Node(name=name, below=(_of_jvm(node.plan()),))
    children = node.children()
    if below := tuple(_of_jvm(children.apply(n)) for n in range(children.size())):
        return _Node(name=name, below=below)
    metrics = node.metrics()
    values = {key: metrics.apply(key).value() for key in (_FILES, _BYTES) if metrics.contains(key)}
    return _Node(name=name, below=(), metrics=values)
