"""Stateful batch processing: declare a `Pipeline` and run each of its data intervals as a Spark micro-batch.

    from cairn import Interval, Pipeline, register_data_sources, run_interval

The first use of a name imports its module. So a DAG file that imports a pipeline's declaration does not import Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.change_expectations import ChangeExpectations
    from cairn.data_sources.register import register_data_sources
    from cairn.operations.copy_output import copy_output
    from cairn.operations.intervals.plan_chunk import ChunkLimits
    from cairn.operations.intervals.plan_range import Progress
    from cairn.operations.intervals.run_interval import run_interval
    from cairn.operations.intervals.run_intervals import Outcome, run_intervals
    from cairn.operations.output_files import output_files
    from cairn.operations.read_log import read_log
    from cairn.operations.savepoints.streaming import (
        continue_from_savepoint,
        from_streaming_checkpoint,
        initial_state_of,
    )
    from cairn.pipeline import Interval, Pipeline
    from cairn.range_sources import range_source
    from cairn.trials.compare_trial import compare_trial
    from cairn.trials.promote_trial import plan_promotion, promote_past
    from cairn.trials.try_code import try_code
    from cairn.upstream_sources import upstream, upstreams
    from state_backend.adapters.rocks import EngineOptions
    from state_backend.inspection.publication_group import group_marker
    from state_backend.shard.changelog_store import ChangelogOptions
    from state_backend.values.retention import AllOf, AnyOf, KeepLast, KeepPerDay, KeepQuarantined, KeepYounger
    from state_backend.values.schedule import Cron

__all__ = [
    "AllOf",
    "AnyOf",
    "ChangeExpectations",
    "ChangelogOptions",
    "ChunkLimits",
    "Cron",
    "EngineOptions",
    "Interval",
    "KeepLast",
    "KeepPerDay",
    "KeepQuarantined",
    "KeepYounger",
    "Outcome",
    "Pipeline",
    "Progress",
    "compare_trial",
    "continue_from_savepoint",
    "copy_output",
    "from_streaming_checkpoint",
    "group_marker",
    "initial_state_of",
    "output_files",
    "plan_promotion",
    "promote_past",
    "range_source",
    "read_log",
    "register_data_sources",
    "run_interval",
    "run_intervals",
    "try_code",
    "upstream",
    "upstreams",
]

_MODULES = {
    "ChangeExpectations": "cairn.change_expectations",
    "ChangelogOptions": "state_backend.shard.changelog_store",
    "ChunkLimits": "cairn.operations.intervals.plan_chunk",
    "Cron": "state_backend.values.schedule",
    "EngineOptions": "state_backend.adapters.rocks",
    "Interval": "cairn.pipeline",
    "Outcome": "cairn.operations.intervals.run_intervals",
    "Pipeline": "cairn.pipeline",
    "Progress": "cairn.operations.intervals.plan_range",
    "compare_trial": "cairn.trials.compare_trial",
    "continue_from_savepoint": "cairn.operations.savepoints.streaming",
    "copy_output": "cairn.operations.copy_output",
    "from_streaming_checkpoint": "cairn.operations.savepoints.streaming",
    "group_marker": "state_backend.inspection.publication_group",
    "initial_state_of": "cairn.operations.savepoints.streaming",
    "output_files": "cairn.operations.output_files",
    "plan_promotion": "cairn.trials.promote_trial",
    "promote_past": "cairn.trials.promote_trial",
    "range_source": "cairn.range_sources",
    "read_log": "cairn.operations.read_log",
    "register_data_sources": "cairn.data_sources.register",
    "run_interval": "cairn.operations.intervals.run_interval",
    "run_intervals": "cairn.operations.intervals.run_intervals",
    "try_code": "cairn.trials.try_code",
    "upstream": "cairn.upstream_sources",
    "upstreams": "cairn.upstream_sources",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "state_backend.values.retention")), name)
