"""Sources that read other pipelines. Importing this module does not import Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from state_backend.formats.paths import check_name
from state_backend.values.errors import UsageError
from state_backend.values.inputs import Edge, TriedUpstream, check_edge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_backend.values.intervals import Interval

__all__ = ["Upstreams", "upstream", "upstreams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstreams:
    """A source that reads other pipelines. Cairn calls it; make it with `upstream` or `upstreams`.

    Attributes:
        edges: The upstreams by name.
        states: For an upstream whose state is read, the state's name, by the upstream's name in `edges`.
        function: Makes the rows from one DataFrame for each upstream; None for the unchanged rows of a single upstream.
        tried: In a trial of a chain, the upstreams that are read from the trial instead of production, by (root, name).
    """

    edges: Mapping[str, Edge]
    states: Mapping[str, str]
    function: Callable[..., DataFrame] | None = None
    tried: Mapping[tuple[str, str], TriedUpstream] = field(default_factory=dict)

    def __call__(self, spark: SparkSession, interval: Interval) -> Any:
        """Raise an error, since only a driver can read upstreams: it knows the root below which they lie."""
        raise UsageError("a source of upstream() is read by Cairn, which knows the root; do not call it")


def upstream(
    pipeline: str,
    *,
    root: str | None = None,
    late: bool = False,
    state: str | None = None,
    mapping: Literal["within", "all"] = "within",
    back: int = 0,
    tracked: bool = True,
) -> Upstreams:
    """Return a source that reads the committed output of another pipeline, as in `Pipeline(source=upstream("sales"))`.

    An interval waits until the upstream has committed all that it reads. The interval's record keeps digests of the
    rows. If the upstream later commits other rows, the interval is stale: `cairn status` names it, and `cairn heal`
    runs it again. If the upstream commits equal rows again, nothing changes.

    Args:
        pipeline: Name of the upstream.
        root: URL of the folder that holds the upstream. None: the root of the pipeline that reads.
        late: True reads the late rows instead of the output.
        state: Name of a state. Then the rows are the entries of this state at the end of the interval, as
            `format("keyed_state")` gives them. A change of any state of the upstream makes the interval stale.
        mapping: "within": the intervals of the upstream that lie inside the interval, such as 24 hours in a day. "all":
            those from the upstream's start to the end of the interval.
        back: Number of intervals by which the mapped interval is earlier. In a daily pipeline, 1 is the day before.
        tracked: False: changes of the upstream don't make results stale.

    Returns:
        The source.

    Raises:
        UsageError: The name or an argument is not allowed.
    """
    check_name(pipeline)
    edge = Edge(
        pipeline=pipeline,
        root=root,
        reads="state" if state is not None else "late" if late else "output",
        mapping=mapping,
        back=back,
        tracked=tracked,
    )
    check_edge(edge, f"upstream({pipeline!r})")
    if state is not None and (late or mapping != "within"):
        raise UsageError(
            f"upstream({pipeline!r}): a state is read as it is at the interval's end; leave out late and mapping"
        )
    return Upstreams(edges={pipeline: edge}, states={} if state is None else {pipeline: state})


def upstreams(function: Callable[..., DataFrame], **sources: Upstreams) -> Upstreams:
    """Return a source that makes its rows from the output of other pipelines.

    Args:
        function: `(spark, interval, **frames) -> DataFrame`. It gets one DataFrame for each upstream, by the names of
            `sources`. It may also read other data, which must never change.
        sources: The upstreams, each made by `upstream`.

    Returns:
        The source.

    Raises:
        UsageError: There is no upstream, or one of `sources` was not made by `upstream`.

    Example:
        upstreams(lambda spark, interval, sales, prices: sales.join(prices, "product"), sales=upstream("sales"),
            prices=upstream("prices", state="price"))
    """
    named = {name: one for name, one in sources.items() if isinstance(one, Upstreams) and one.function is None}
    if not sources or named.keys() != sources.keys():
        raise UsageError("upstreams(function, ...): give each source a name, as in sales=upstream('sales')")
    one_edge = {name: next(iter(one.edges.values())) for name, one in named.items()}
    states = {name: state for name, one in named.items() for state in one.states.values()}
    return replace(next(iter(named.values())), edges=one_edge, states=states, function=function)
