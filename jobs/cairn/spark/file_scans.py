"""What a query has read from files and from Spark's cache, by the metrics of its executed plan.

Spark plans a query over files with a list of files and their lengths. The list may be older than the query: Spark keeps
lists with plans and tables. Spark reads a file only up to the length in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cairn.spark_versions import connect_metrics, executed_plan, is_connect
from state_backend.values.frozen import frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CACHED = "InMemoryTableScan"
_FILES, _BYTES = "numFiles", "filesSize"


@frozen
class Scans:
    """The reads of an executed query."""

    # For each scan of files, the number of files and the sum of their lengths in bytes, by Spark's list of files.
    files: tuple[tuple[int, int], ...] = ()
    cached: bool = False


def scans_of(frame: DataFrame) -> Scans:
    """Return the reads of a frame that was collected, classic or of Spark Connect."""
    if is_connect(frame):
        nodes = connect_metrics(frame)
        leaves = [(node.name, {metric.name: metric.value for metric in node.metrics}) for node in nodes]
    else:
        leaves = [*_leaves(executed_plan(frame))]
    return Scans(
        files=tuple((values[_FILES], values[_BYTES]) for _, values in leaves if _FILES in values and _BYTES in values),
        cached=any(name.startswith(_CACHED) for name, _ in leaves),
    )


def _leaves(node: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield name and metrics of each leaf below a node of a plan in the JVM."""
    children = node.children()
    if children.size():
        for n in range(children.size()):
            yield from _leaves(children.apply(n))
        return
    name = node.nodeName()
    # With adaptive execution, a part of the plan lies in a leaf.
    if name == "AdaptiveSparkPlan":
        yield from _leaves(node.executedPlan())
    elif name.endswith("QueryStage"):
        yield from _leaves(node.plan())
    else:
        metrics = node.metrics()
        yield name, {key: metrics.apply(key).value() for key in (_FILES, _BYTES) if metrics.contains(key)}
