"""The command that repairs a pipeline: in Airflow, or in this process for a pipeline that runs without Airflow."""

from __future__ import annotations

from state_backend.checkpoint.log import Log, run_of
from state_backend.values.airflow_commands import repair_command
from state_backend.values.environment import Variable
from state_backend.values.errors import Rerun
from state_backend.values.records import Record, Tombstone


def command_to_repair(
    log: Log, again: Rerun, *, root: str, pipeline: str, dag: str | None, code: str | None = None, chain: bool = False
) -> str:
    if dag is None and ran_here(log):
        return repair_command(root, pipeline, again, code=code or code_of(log), chain=chain)
    return repair_command(root, pipeline, again, dag_id=dag or pipeline, chain=chain)


def code_of(log: Log) -> str:
    """Return the pipeline as `module:NAME` for a printed command: the variable CAIRN_CODE, else the recorded name."""
    return Variable.CODE.given or log.code


def ran_here(log: Log) -> bool:
    """Return True if the newest interval ran without Airflow, as by `cairn run`. Restores do not count."""
    newest = max((kept.id for kept in log.kept if kept.kind == "interval"), default=None)
    if newest is None:  # All retained checkpoints come from restores. So look at dropped ones too.
        newest = max((fact.id for fact in log.facts(None) if fact.kind == "interval"), default=None)
    entry = None if newest is None else log.entries[newest]
    return isinstance(entry, Record | Tombstone) and run_of(entry).run_id.startswith("direct__")
