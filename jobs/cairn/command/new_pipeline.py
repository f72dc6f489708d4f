"""The command `cairn new`: write the files of a runnable pipeline, in the layout of this repository.

jobs/pipelines/<name>.py          source, processor, expectations, and the Pipeline
dags/<name>.py                    the DAG, without other code
tests/pipelines/test_<name>.py    tests that need no Spark
data/<name>/*.json                made-up rows of three days, one file per interval and input

The folder `templates` has the texts: the three Python files, and for each ready-made processor and interface a file
with their parts.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import random
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen

FIRST = datetime(2024, 1, 1, tzinfo=UTC)
SAMPLE_DAYS = 3
_FILES = {
    "jobs/pipelines/$name.py": "pipeline.py.tmpl",
    "dags/$name.py": "dag.py.tmpl",
    "tests/pipelines/test_$name.py": "test.py.tmpl",
}
# Largest depth to which the replacement of a `$word` may contain other `$words`.
_NESTED = 5
_SEVERAL_KEYS = (
    "a new pipeline has one key column, as its sample data has; give one --key\nTo add key columns later, change the pipeline's module: add "
    "the columns to the source's rows and to output_schema, and name all of them in key=[...]. The processor gets the key as a tuple in this order"
)


def _text_of(file: str) -> str:
    return (files("cairn.command") / "templates" / file).read_text()


@cache
def parts_of(template: str) -> Mapping[str, Any]:
    """Return the texts of a template by name. What the template lacks comes from the one that it names as `like`."""
    own = tomllib.loads(_text_of(f"{template}.toml"))
    return {**parts_of(own["like"]), **own} if "like" in own else own


def _fill(text: str, words: Mapping[str, Any]) -> str:
    """Replace each `$word` by its value in `words`, also `$word` in values. What the user has typed contains no `$`."""
    for _ in range(_NESTED):
        text = Template(text).substitute(words)
    return text


def _sample_value(chance: random.Random, column: Any) -> Any:
    """Return a random value: one of a list of texts, a number in a range, or a bool with a chance (a float) of True."""
    if isinstance(column, float):
        return chance.random() < column
    if isinstance(column[0], str):
        return chance.choice(column)
    low, high = column
    return chance.randrange(low, high) if isinstance(low, int) else round(chance.uniform(low, high), 1)


class Schedule(StrEnum):
    """Values of `--schedule`: how often the pipeline runs."""

    hourly = "hourly"
    daily = "daily"


class Form(StrEnum):
    """Values of `--template`: the interface of a processor of the user's own, or a ready-made processor."""

    row = "row"
    pandas = "pandas"
    arrow = "arrow"
    dedupe = "dedupe"
    windows = "windows"
    sessions = "sessions"
    funnel = "funnel"
    latest = "latest"
    history = "history"
    topn = "topn"
    join = "join"  # type: ignore[assignment]  # a method of str has this name
    lookup = "lookup"


INTERFACES = (Form.row, Form.pandas, Form.arrow)


@frozen
class NewPipeline:
    """The user's answers, from which the files of a new pipeline are made."""

    name: str
    schedule: Schedule
    key: str
    template: Form

    def __post_init__(self) -> None:
        if "," in self.key:
            raise UsageError(_SEVERAL_KEYS)
        for what, value in (("name", self.name), ("key", self.key)):
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", value) or keyword.iskeyword(value):
                raise UsageError(
                    f"{what} {value!r} can't be used, because it becomes part of Python and file names\nUse small letters, digits and _, "
                    "and begin with a letter, as in clicks"
                )
        kinds = self.parts["columns"]
        taken = {"at", *kinds, *(name for columns in kinds.values() for name in columns)}
        if self.key in taken | ({"kind"} if len(kinds) > 1 else set()):
            raise UsageError(
                f"--key {self.key!r} is the name of another column of the sample data; choose another name, as in {self.parts['key']}"
            )

    @property
    def parts(self) -> Mapping[str, Any]:
        return parts_of(self.template.value)

    @property
    def every(self) -> timedelta:
        return timedelta(hours=1) if self.schedule == "hourly" else timedelta(days=1)

    @property
    def file_format(self) -> str:
        """A `strftime` format: the name of each sample file begins with the start of its interval in this format."""
        return "%Y-%m-%dT%H" if self.schedule == "hourly" else "%Y-%m-%d"

    def words(self) -> dict[str, Any]:
        hourly = self.schedule == "hourly"
        return {
            **self.parts,
            "name": self.name,
            "constant": self.name.upper(),
            "imported": ", ".join(sorted(["INPUT_SCHEMA", self.name.upper()])),
            "key": self.key,
            "api": (self.template if self.template in INTERFACES else Form.arrow).value,
            "class_name": re.findall(r"^class (\w+)", self.parts["processor"])[0],
            "schedule": self.schedule.value,
            "every": "hours=1" if hourly else "days=1",
            "file_format": self.file_format,
            "interval": "hour" if hourly else "day",
            "sample_hour": "0" if hourly else "23",
            "sample_hour_text": "In the first hour." if hourly else "In the last hour of the first day.",
            "last": "2024, 1, 3, 23" if hourly else "2024, 1, 3",
        }

    def files(self) -> dict[str, str]:
        words = self.words()
        return {_fill(path, words): _fill(_text_of(file), words) for path, file in _FILES.items()} | self.sample_data()

    def sample_data(self) -> dict[str, str]:
        """Return the JSON lines of made-up rows for three days, one file for each interval, by path in the repository.

        One interval has no rows. About 3 % of the rows arrive one interval late, and about 1 % three intervals late.
        """
        made = {}
        for kind, columns in self.parts["columns"].items():
            chance = random.Random(f"{self.name}{kind}")
            for start, rows in self._sample_rows(chance, columns).items():
                path = f"data/{self.name}/{kind}{'-' if kind else ''}{start:{self.file_format}}.json"
                made[path] = "".join(f"{json.dumps(row)}\n" for row in rows)
        return made

    def _sample_rows(self, chance: random.Random, columns: Mapping[str, Any]) -> dict[datetime, list[dict[str, Any]]]:
        """Return made-up rows of one input by the start of the interval in which they arrive."""
        landed_in: dict[datetime, list[dict[str, Any]]] = {}
        count = timedelta(days=SAMPLE_DAYS) // self.every
        for n in range(count):
            landed_in.setdefault(FIRST + n * self.every, [])
        empty = FIRST + count // 2 * self.every
        seconds = int(self.every.total_seconds())
        keys, repeats = self.parts["keys"], self.parts["repeats"]
        for n in range(count):
            start = FIRST + n * self.every
            for _ in range(60 if self.schedule == "hourly" else 600):
                at = start + timedelta(seconds=chance.randrange(seconds))
                delay = chance.choices((0, 1, 3), (96, 3, 1))[0]
                landed = start + delay * self.every
                if landed not in landed_in or landed == empty:
                    continue
                row = {self.key: f"{self.key}{chance.randrange(keys)}"}
                row |= {name: _sample_value(chance, column) for name, column in columns.items()}
                row["at"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
                landed_in[landed].append(row)
                again = landed + self.every
                if repeats and chance.random() < repeats and again in landed_in and again != empty:
                    landed_in[again].append(row)
        return landed_in


def write_files(into: Path, files: dict[str, str]) -> None:
    """Write `files` (texts by path) below the folder `into`. If one exists, write none and raise `UsageError`."""
    there = [path for path in files if (into / path).exists()]
    if there:
        named = "\n".join(f"  {into / path}" for path in there[:5])
        more = f"\n  and {len(there) - 5} more" if len(there) > 5 else ""
        raise UsageError(
            f"nothing was written, since these files exist already:\n{named}{more}\nChoose another name, or move the files away"
        )
    for path, text in files.items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        with (into / path).open("x") as file:
            file.write(text)


def path_to_add(into: Path) -> Path | None:
    """Return the folder to add to PYTHONPATH, so that Python imports `pipelines` from `into`; None if it already does.

    In the virtual environment of another clone of the repository, Python would import that clone's `pipelines`.
    """
    spec = importlib.util.find_spec("pipelines")
    there = [*(spec.submodule_search_locations or ())] if spec is not None else []
    wanted = into / "jobs" / "pipelines"
    return None if any(Path(folder).is_dir() and wanted.samefile(folder) for folder in there) else wanted.parent


def new(
    name: Annotated[str | None, typer.Argument(help="Name of the pipeline, as in clicks.")] = None,
    schedule: Annotated[str | None, typer.Option(help="How often the pipeline runs: hourly or daily.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Name of the key column, only one: rows with equal values in it share state."),
    ] = None,
    template: Annotated[
        Form | None,
        typer.Option(
            help="Processor to begin with: row (PySpark's StatefulProcessor), pandas (DataFrames of one key) and arrow "
            "(tables of many keys) are processors that you write; the others are ready-made. latest: the newest row of each key; "
            "history: rows with the time for which they were valid; lookup: rows with the newest value of another table."
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="Ask nothing. What is left out is then: hourly, template row, and the template's own key (row: user).",
        ),
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Root folder of the repository to write into; left out: the current folder.")
    ] = None,
) -> int:
    """The command asks for a name, schedule, key and template that are left out."""
    into = (folder or Path.cwd()).resolve()
    if not ((into / "jobs" / "pipelines").is_dir() and (into / "dags").is_dir()):
        raise UsageError(
            f"{into} has no folders jobs/pipelines and dags; make them, or go to the repository's folder, or name it with --folder"
        )
    if name is None:
        if yes:
            raise UsageError("a name is needed, as in: cairn new clicks --yes")
        name = typer.prompt("Name of the pipeline")
    if schedule is not None and schedule not in list(Schedule):
        raise UsageError(
            f"--schedule {schedule!r} is neither hourly nor daily. For another schedule:\n"
            f"1. Use --schedule hourly.\n2. In dags/{name}.py change schedule=, as in schedule='*/15 * * * *'.\n"
            f"3. In jobs/pipelines/{name}.py change the file name that the source computes from the interval."
        )
    if len(key or ()) > 1:
        raise UsageError(_SEVERAL_KEYS)
    usual_key = parts_of((template or Form.row).value)["key"]
    made = NewPipeline(
        name=name,
        schedule=Schedule(schedule)
        if schedule is not None
        else _ask("How often does the pipeline run", tuple(Schedule), Schedule.hourly, yes),
        key=key[0]
        if key
        else (usual_key if yes else typer.prompt("Key column: rows with equal values share state", default=usual_key)),
        template=template or _ask("Interface of the processor", INTERFACES, Form.row, yes),
    )
    files = made.files()
    jobs = path_to_add(into)
    if jobs is not None and not (jobs / "pipelines" / "__init__.py").exists():
        # Without an `__init__.py`, Python would prefer any other package `pipelines`, wherever it is in `sys.path`.
        files["jobs/pipelines/__init__.py"] = ""
    write_files(into, files)
    data = [path for path in files if path.startswith("data/")]
    for path in files:
        if path not in data:
            typer.echo(f"wrote {path}")
    typer.echo(f"wrote data/{name}/: {len(data)} files of sample data")
    every = "1h" if made.schedule == "hourly" else "1d"
    venv = into / ".venv"
    ours = ".venv/bin/" if venv.exists() and venv.samefile(sys.prefix) else ""
    found = "" if jobs is None else f"PYTHONPATH={shlex.quote(str(jobs))} "
    if found:
        typer.echo(
            f"\nThis environment does not import modules from {jobs}: set PYTHONPATH as in these commands, for Airflow too"
        )
    typer.echo(
        "\nTest it, without Spark:\n"
        f"  {found}{ours}python -m pytest tests/pipelines/test_{name}.py\n"
        "Run its first interval, without Airflow:\n"
        f"  {found}{ours}cairn run --code pipelines.{name}:{name.upper()} --every {every} --root file://{into}/data/state\n"
        "Then list its checkpoints:\n"
        f"  {ours}cairn checkpoints --root file://{into}/data/state --pipeline {name}"
    )
    return 0


def _ask(question: str, answers: Sequence[Any], default: Any, yes: bool) -> Any:
    if yes:
        return default
    known = [member.value for member in answers]
    while True:
        answer = typer.prompt(f"{question} ({', '.join(known)})", default=default.value)
        if answer in known:
            return answers[known.index(answer)]
        typer.echo(f"{answer!r} is not one of {', '.join(known)}", err=True)
