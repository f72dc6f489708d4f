"""Options that several commands have, and the pipeline that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.command.from_request import option_of
from state_backend.checkpoint.location import Location
from state_backend.values.day_or_instant import parse_duration
from state_backend.values.environment import Variable
from state_backend.values.operation_parameters import Export, OfPipeline, RunRange, TakeSavepoint

if TYPE_CHECKING:
    from state_backend.checkpoint.log import Log

Root = Annotated[str, option_of(OfPipeline, "root")]
Pipeline = Annotated[str, option_of(OfPipeline, "pipeline")]
AnyRoot = Annotated[str | None, option_of(Export, "root")]
AnyPipeline = Annotated[str | None, option_of(Export, "pipeline")]
States = Annotated[list[str] | None, option_of(Export, "states")]
# The Spark that a command uses if neither `--spark` nor CAIRN_SPARK names one.
LOCAL_SPARK = Variable.SPARK.default


def spark_option(when: str = "") -> Any:
    """Return the option `--spark`. `when`: Words that say when the command uses Spark; empty if it always does."""
    what = "a Connect server (sc://host:port) or a master (local[2], spark://host:port)."
    return typer.Option(envvar=Variable.SPARK, help=f"Spark to use{when}: {what}")


Spark = Annotated[str, spark_option()]
AIRFLOW = "URL of Airflow's API server. The variable CAIRN_AIRFLOW_TOKEN may hold a token."
Airflow = Annotated[str, typer.Option(envvar=Variable.AIRFLOW, help=AIRFLOW)]
# The option `--dag`, for commands that print another command for Airflow.
Dag = Annotated[
    str | None,
    typer.Option(
        help="Id of the DAG in the repair command that is printed; left out: the pipeline's name; or, if cairn run made the "
        "newest interval, a command without Airflow."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
DryRun = Annotated[bool, option_of(RunRange, "dry_run")]
Wanted = Annotated[str, option_of(TakeSavepoint, "checkpoint")]

PUT_BACK = "Put the manifest back from a backup, or go back to an older checkpoint with cairn restore"


def airflow_wait_s() -> float:
    return parse_duration(Variable.AIRFLOW_WAIT.given or Variable.AIRFLOW_WAIT.default).total_seconds()


def open_log(root: str, pipeline: str, *, if_new: str = "", newest: bool = False) -> tuple[Location, Log]:
    from state_backend.checkpoint.location import locate
    from state_backend.checkpoint.log import read_log, read_newest
    from state_backend.inspection.find_pipelines import refuse_nothing

    at = locate(root, pipeline)
    log = read_newest(at.storage) if newest else read_log(at.storage)
    if not log.head_id:
        refuse_nothing(at.storage, root, pipeline, if_new=if_new)
    return at, log
