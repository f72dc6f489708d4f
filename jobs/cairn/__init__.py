"""Stateful batch processing: a `Pipeline` is declared here, and each of its data intervals is run as a Spark micro-batch.

    from cairn import Interval, Pipeline, register, run_interval

Names are looked up when they are first used, so that a DAG that imports its pipeline's declaration imports no Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.data_sources.register import register
    from cairn.operations.output_files import output_files
    from cairn.operations.run_interval import run_interval
    from cairn.operations.run_intervals import run_intervals
    from cairn.pipeline import Interval, Pipeline
    from state_backend.values.retention import AllOf, AnyOf, KeepLast, KeepPerDay, KeepYounger

__all__ = [
    "AllOf",
    "AnyOf",
    "Interval",
    "KeepLast",
    "KeepPerDay",
    "KeepYounger",
    "Pipeline",
    "output_files",
    "register",
    "run_interval",
    "run_intervals",
]

_MODULES = {
    "Interval": "cairn.pipeline",
    "Pipeline": "cairn.pipeline",
    "output_files": "cairn.operations.output_files",
    "register": "cairn.data_sources.register",
    "run_interval": "cairn.operations.run_interval",
    "run_intervals": "cairn.operations.run_intervals",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "state_backend.values.retention")), name)
