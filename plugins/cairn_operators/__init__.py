"""Airflow operators and DAG factories for stateful pipelines.

Importing them loads neither Spark nor RocksDB: only the driver process loads those.
"""

from cairn_operators.commit_checkpoint import CommitCheckpointOperator
from cairn_operators.pipeline_dag import stateful_pipeline
from cairn_operators.process_data_interval import ProcessIntervalOperator
from cairn_operators.range_tasks import RunIntervalsOperator, backfill_pipeline
from cairn_operators.restore_state import RestoreStateOperator, restore_pipeline
from cairn_operators.retries import retry_arguments
from cairn_operators.savepoint import SavepointOperator
from cairn_operators.sweep_state import SweepStateOperator
from cairn_operators.trial_tasks import PromoteTrialOperator, TryCodeOperator, trial_pipeline
from cairn_operators.validate_state import ValidateStateOperator

__all__ = [
    "CommitCheckpointOperator",
    "ProcessIntervalOperator",
    "PromoteTrialOperator",
    "RestoreStateOperator",
    "RunIntervalsOperator",
    "SavepointOperator",
    "SweepStateOperator",
    "TryCodeOperator",
    "ValidateStateOperator",
    "backfill_pipeline",
    "restore_pipeline",
    "retry_arguments",
    "stateful_pipeline",
    "trial_pipeline",
]
