"""The command `cairn`: the table of its commands.

The modules of the commands are imported lazily. `cairn --help` and the completion of names import none of them.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib.abc import MetaPathFinder
from typing import Annotated

import typer

from cairn.command.lazy_group import LazyGroup, Row
from cairn.command.progress import CHANGED_NOTHING, CONTINUES, REMOVE_FIRST
from state_backend.values.hide_secrets import hide_title

HELP = """
Show and check the state of a pipeline, run intervals, and take, restore and fork state.

Most commands need neither Spark nor Airflow. Only run, heal --code, try, promote, validate, savepoints and spark need Spark, and replay for some sources. Only backfill, heal, pause and savepoint --stop need Airflow.

Exit codes: 0 success, 1 the command found a problem or can't use the state, the input or the pipeline's code, 2 the call is wrong, 3 the storage failed or refused.
"""
# The commands by their group in `cairn --help`: `module:function`, where the function has the command's name, and the
# short help. `cairn COMMAND --help` prints the short help and the function's docstring.
_TABLE = {
    "Look": {
        "status:status": "Show the next interval, whether it can start, all stale, quarantined and unpublished intervals, and the command that repairs them; or list all pipelines of the root, those with problems first.",
        "list_checkpoints:checkpoints": "List the checkpoints, newest first; or show everything that Cairn has recorded about one.",
        "key:key": "Show all states and timers of one key, or with --history the checkpoints that changed the key.",
        "replay:replay": "Run one key of one committed interval again in this process, and compare the result with the committed one.",
        "diff:diff": "Show what changed from one checkpoint to another: totals, states, key groups, files, and keys.",
        "check:check": "Check the log, every file that it names, and the state in the files. Change nothing.",
        "plan:plan": "Show which intervals of which pipelines would run, in order, why, and what they cost: those that are open now, and those that an assumed change adds. Run nothing.",
    },
    "Run": {
        "new_pipeline:new": "Write a new pipeline that can run at once: code, DAG, tests and sample data. Never overwrite a file.",
        "run:run": "Process and commit intervals of a pipeline here and now, without Airflow.",
        "backfill:backfill": "Run a chosen range of a DAG's intervals in order, again if they ran before, by a backfill of Airflow. Unpause the DAG.",
        "pause:pause": "Pause a pipeline's DAG, and wait until none of its tasks runs.",
        "spark_server:spark": "Run a Spark Connect server in the foreground, until Ctrl-C; or with --prepare make Spark start faster.",
    },
    "Repair": {
        "publish:publish": "Call the sink for output that it has not accepted yet; or mark such output as published (--skip), compare the sink's table with the output (--check), or fill the table again (--rebuild).",
        "heal:heal": "Run every stale, failed, quarantined and missing interval up to a date, in order.",
        "validate:validate": "Validate a checkpoint: files, restored state, and the expectations of the pipeline's code. Quarantine it if there are findings.",
        "validate:quarantine": "Quarantine a checkpoint, so that no interval starts from it or from its descendants; or end its quarantine (--release), or let its state be deleted (--drop).",
        "state_commands:restore": "Make a savepoint or an earlier checkpoint the state that the next interval starts from.",
        "sweep:sweep": "Delete the files of attempts that died, and expired trials.",
        "erase:erase": "Remove keys from the newest state and its timers, and list the places that may still hold the keys.",
    },
    "Copy": {
        "state_commands:savepoint": "Copy a checkpoint into a folder of its own, which needs no other file and which retention never deletes.",
        "state_commands:fork": "Give a checkpoint or a native savepoint to a new pipeline, of another name or in another root.",
        "export:export": "Write state as Parquet files, one folder for each state.",
    },
    "Try": {
        "trial_commands:try_": "Run intervals with other code beside production, from production's state before them. Production does not change.",
        "trial_commands:compare": "Show what a trial changes: output rows, late rows and states beside production's, interval by interval.",
        "trial_commands:promote": "Check that a trial's code can continue from production's state; with --past, also run the trial's intervals again in production.",
        "trial_commands:trials": "List the trials of a pipeline with their intervals, code and end; or with --remove delete one.",
    },
}
# What remains after Ctrl-C, by group or command. A command that is not listed continues when it is called again.
_LEAVES = {"Look": CHANGED_NOTHING, "trial_commands:compare": CHANGED_NOTHING, "export:export": REMOVE_FIRST}
COMMANDS = tuple(
    Row(function, panel, text, _LEAVES.get(function) or _LEAVES.get(panel, CONTINUES))
    for panel, commands in _TABLE.items()
    for function, text in commands.items()
)


class _Cairn(LazyGroup):
    rows = COMMANDS


app = typer.Typer(
    name="cairn",
    cls=_Cairn,
    help=HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _NoPandas(MetaPathFinder):
    """An import hook that hides pandas from PyArrow, since the import of pandas takes longer than a short command."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this command needs no pandas", name=fullname)


def main() -> None:
    hide_title(shlex.join(["cairn", *sys.argv[1:]]))
    if {*sys.argv[1:2]} & {"status", "checkpoints", "key", "diff"}:  # They need no pandas.
        sys.meta_path.insert(0, _NoPandas())
        # For a faster start: Pydantic does not search all installed packages for plugins, NumPy starts only one thread.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    app(prog_name="cairn")


def _print_version(wanted: bool) -> None:
    if wanted:
        from state_backend.values.release import RELEASE

        typer.echo(f"cairn {RELEASE}")
        raise typer.Exit


def _print_all(wanted: bool) -> None:
    if not wanted:
        return
    options: dict[str, None] = {}
    for row in COMMANDS:
        command = row.command()
        context = command.context_class(command, info_name=row.name)
        typer.echo(f"cairn {row.name}\n  {command.help.replace(chr(10), chr(10) + '  ')}")
        for one in command.params:
            if one.name == "help":
                continue
            if one.param_type_name == "option":
                options[one.opts[0]] = None
            typer.echo("    {}  {}".format(*one.get_help_record(context)))
    typer.echo(f"{len(COMMANDS)} commands, {len(options)} options")
    raise typer.Exit


@app.callback()
def _cairn(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of Cairn.")
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all",
            callback=_print_all,
            is_eager=True,
            help="Print all commands with their options, and count them.",
        ),
    ] = False,
) -> None:
    """Declare the options of `cairn` without a command: `--version` and `--help-all`."""


if __name__ == "__main__":
    main()
