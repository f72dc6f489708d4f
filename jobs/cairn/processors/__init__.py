"""Ready-made processors for the usual stateful jobs. A subclass declares its settings as class attributes.

class OncePerOrder(Deduplicate):
    horizon = timedelta(days=7)

Pipeline(..., key=["order_id"], processor=OncePerOrder)
"""

from __future__ import annotations

from cairn.processors.deduplicate import Deduplicate
from cairn.processors.funnel import Funnel
from cairn.processors.history import History
from cairn.processors.interval_join import IntervalJoin
from cairn.processors.latest import Latest
from cairn.processors.lookup_join import LookupJoin
from cairn.processors.session_window import SessionWindow
from cairn.processors.sliding_window import SlidingWindow
from cairn.processors.top_n import TopN
from cairn.processors.tumbling_window import TumblingWindow
from cairn.processors.two_inputs import union_by_kind

__all__ = [
    "Deduplicate",
    "Funnel",
    "History",
    "IntervalJoin",
    "Latest",
    "LookupJoin",
    "SessionWindow",
    "SlidingWindow",
    "TopN",
    "TumblingWindow",
    "union_by_kind",
]
