"""The command `cairn`: the table of its commands.

The modules of the commands are imported lazily. `cairn --help` and the completion of names import none of them.
"""

from __future__ import annotations

import shlex
import sys
from types import MappingProxyType
from typing import Annotated

import typer

from cairn.command.lazy_group import LazyGroup, Row
from cairn.command.progress import CHANGED_NOTHING, REMOVE_FIRST
from state_backend.values.hide_secrets import hide_title

HELP = """
Show and check the state of a pipeline, run intervals, and take, restore and fork state.

Most commands need neither Spark nor Airflow. Only run, heal --local, try, deploy, validate, savepoints, spark and prepare-spark need Spark. Only backfill, heal and stopping a DAG need Airflow.

Exit codes: 0 success, 1 the command found a problem or can't use the state, the input or the pipeline's code, 2 the call is wrong, 3 the storage failed or refused.
"""
LOOK, RUN, REPAIR, COPY, TRY = "Look", "Run", "Repair", "Copy", "Try"

# Each command: what the user types, the function, the group in `cairn --help`, the docstring's first paragraph.
COMMANDS = (
    Row(
        "status",
        "status:status",
        LOOK,
        "Show the next interval, all stale, quarantined and unpublished intervals, and the command that repairs them.",
        CHANGED_NOTHING,
    ),
    Row(
        "pipelines",
        "pipelines:pipelines",
        LOOK,
        "List the pipelines of a root, those with problems first.",
        CHANGED_NOTHING,
    ),
    Row("list", "list_checkpoints:list_", LOOK, "List the checkpoints, newest first.", CHANGED_NOTHING),
    Row("show", "show:show", LOOK, "Show everything that Cairn has recorded about one checkpoint.", CHANGED_NOTHING),
    Row("get", "get:get", LOOK, "Show all states and timers of one key.", CHANGED_NOTHING),
    Row(
        "history",
        "history:history",
        LOOK,
        "Show the retained checkpoints that changed one key, with each change.",
        CHANGED_NOTHING,
    ),
    Row(
        "replay",
        "replay:replay",
        LOOK,
        "Run one key of one committed interval again in this process, and compare the result with the committed one.",
        CHANGED_NOTHING,
    ),
    Row(
        "diff",
        "diff:diff",
        LOOK,
        "Show what changed from one checkpoint to another: totals, states, key groups, files, and keys.",
        CHANGED_NOTHING,
    ),
    Row(
        "verify",
        "verify:verify",
        LOOK,
        "Check the log, every file that it names, and the state itself.",
        CHANGED_NOTHING,
    ),
    Row(
        "new",
        "new_pipeline:new",
        RUN,
        "Write a new pipeline that can run at once: code, DAG, tests and sample data. Never overwrite a file.",
    ),
    Row("run", "run:run", RUN, "Process and commit intervals of a pipeline here and now, without Airflow."),
    Row(
        "backfill",
        "backfill:backfill",
        RUN,
        "Run a DAG's intervals again, in order: create Airflow's backfill, and check that it has all of its runs.",
    ),
    Row("spark", "spark_server:spark", RUN, "Run a Spark Connect server in the foreground, until Ctrl-C."),
    Row(
        "prepare-spark",
        "prepare_spark:prepare_spark",
        RUN,
        "Make Spark start faster: write the classes that it loads to an archive.",
    ),
    Row(
        "publish",
        "publish:publish",
        REPAIR,
        "Call the sink for output that it has not accepted yet, or mark output as published without the sink.",
    ),
    Row(
        "heal",
        "heal:heal",
        REPAIR,
        "Run every stale, failed, quarantined and missing interval up to a date, in order.",
    ),
    Row(
        "validate",
        "validate:validate",
        REPAIR,
        "Validate a checkpoint: files, restored state, and the expectations of the pipeline's code.",
    ),
    Row(
        "quarantine",
        "validate:quarantine",
        REPAIR,
        "Refuse a checkpoint, or with --release accept a refused one again.",
    ),
    Row(
        "restore",
        "state_commands:restore",
        REPAIR,
        "Make a savepoint or an earlier checkpoint the state that the next interval starts from.",
    ),
    Row("sweep", "sweep:sweep", REPAIR, "Delete the files of attempts that died, and expired trials."),
    Row(
        "forget",
        "forget:forget",
        REPAIR,
        "Remove keys from all states and timers, and list the places that may still hold them.",
    ),
    Row(
        "savepoint",
        "state_commands:savepoint",
        COPY,
        "Copy a checkpoint into a folder of its own, which needs no other file and which retention never deletes.",
    ),
    Row("fork", "state_commands:fork", COPY, "Give a checkpoint to a pipeline of another name."),
    Row("export", "export:export", COPY, "Write state as Parquet files, one folder for each state.", REMOVE_FIRST),
    Row(
        "try",
        "trial_commands:try_",
        TRY,
        "Run intervals with other code beside production, from production's state before them. Production does not change.",
    ),
    Row(
        "compare",
        "trial_commands:compare",
        TRY,
        "Show what a trial changes: output rows, late rows and states beside production's, interval by interval.",
        CHANGED_NOTHING,
    ),
    Row(
        "deploy",
        "trial_commands:deploy",
        TRY,
        "Take over the code of a trial from the next interval on, or with --past also for the trial's intervals.",
    ),
    Row("trials list", "trial_commands:list_", TRY, "List the trials of a pipeline.", CHANGED_NOTHING),
    Row("trials remove", "trial_commands:remove", TRY, "Remove a trial with its state and output."),
)


NESTED = MappingProxyType({"trials": "List and remove trials."})


class _Cairn(LazyGroup):
    rows = COMMANDS
    nested = NESTED


app = typer.Typer(
    name="cairn",
    cls=_Cairn,
    help=HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the `cairn` command line."""
    hide_title(shlex.join(["cairn", *sys.argv[1:]]))
    app(prog_name="cairn")


def _print_version(wanted: bool) -> None:
    if wanted:
        from state_backend.values.release import RELEASE

        typer.echo(f"cairn {RELEASE}")
        raise typer.Exit


@app.callback()
def _cairn(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of Cairn.")
    ] = False,
) -> None:
    """Take the options of `cairn` itself."""


if __name__ == "__main__":
    main()
