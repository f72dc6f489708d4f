"""A day of flights through Airflow, in milliseconds from the start of its run to the end.

    python -m benchmarks.trace_day [--days 8] [--active 1] [--ways cold,warm] [--flights FOLDER] [--svg FILE] [--json FILE]
        [--setting NAME=VALUE]

The ways are *cold*, with drivers that tasks start, and *warm*, with warm drivers. Each way runs a backfill of the days in
an Airflow of its own, as in `benchmarks.airflow_backfill`. For each day the program takes the times from Airflow's
API and from the task logs. It prints the steps of the median day, and draws them: one bar for each step. The first
two days of each way warm up and do not count. `--setting` sets an environment variable of Airflow.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import airflow_backfill
from local_stack.airflow_server import task_log
from pipelines import land_flights
from tests.support.local_stack import AirflowServer, SparkConnectServer

WAYS = ("cold", "warm")
WARM_UP = 2
# Who works in a step, with the colour of its bar.
WHO = {
    "Airflow's scheduler": "#d9822b",
    "Airflow's task": "#8a6fb0",
    "Cairn's task": "#2f7d4f",
    "driver": "#2b6ca3",
    "Spark": "#c0392b",
}
# For each task, the steps from its start: the name, who works, and a part of the log line that ends the step.
# The last step of a task ends with the task.
STEPS = {
    "process": [
        ("start of the task", "Airflow's task", "::endgroup::"),
        ("order of the intervals", "Cairn's task", "Spark runs at"),
        ("start of the driver", "driver", "starts from"),
        ("source and plan", "driver", "source position"),
        ("Spark job", "Spark", "prepared:"),
        ("end of the driver", "driver", "::group::Post Execute"),
        ("result and end", "Airflow's task", None),
    ],
    "checkpoint": [
        ("start of the task", "Airflow's task", "::endgroup::"),
        ("commit and clean-up", "Cairn's task", "::group::Post Execute"),
        ("result and end", "Airflow's task", None),
    ],
    "validate": [
        ("start of the task", "Airflow's task", "::endgroup::"),
        ("validation in a driver", "driver", "no findings"),
        ("end of the driver", "driver", "::group::Post Execute"),
        ("result and end", "Airflow's task", None),
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a day.

    Attributes:
        task: The id of the Airflow task.
        name: The name of the step.
        who: Who works in the step; a key of `WHO`.
        start_ms: Milliseconds from the start of the run to the start of the step.
        end_ms: Milliseconds from the start of the run to the end of the step.
    """

    task: str
    name: str
    who: str
    start_ms: float
    end_ms: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=int, default=8)
    parser.add_argument("--active", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--flights", type=Path, help="where the flights are landed; left out: they are landed")
    parser.add_argument("--svg", type=Path, help="the picture to write")
    parser.add_argument("--json", type=Path, help="the file for the steps of every day")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="a variable of Airflow")
    options = parser.parse_args()
    settings = airflow_backfill.settings_of(options.setting)
    found: dict[str, list[list[Step]]] = {}
    with tempfile.TemporaryDirectory(prefix="cairn-trace-") as text:
        folder = Path(text)
        folder.chmod(0o711)  # If this process runs as root, PostgreSQL runs as another user, who must enter the folder.
        flights = options.flights or folder / "flights"
        if options.flights is None:
            land_flights.main(["--to", str(flights), "--from", "2013-01-01", "--days", str(options.days)])
        for way in options.ways.split(","):
            found[way] = trace(
                folder / way, flights.resolve(), options.days, options.active, settings, warm=way == "warm"
            )
            print("\n".join(table(way, median_day(found[way]))), flush=True)
            print(f"load average: {os.getloadavg()[0]:.1f}", flush=True)
    if options.json is not None:
        days = {way: [[asdict(step) for step in day] for day in known] for way, known in found.items()}
        options.json.write_text(json.dumps(days, indent=1))
    if options.svg is not None:
        options.svg.write_text(picture({way: median_day(known) for way, known in found.items()}))


def trace(
    folder: Path, flights: Path, days: int, active: int, settings: Mapping[str, str], *, warm: bool
) -> list[list[Step]]:
    """Run a backfill, and return the steps of each day after the first two.

    Args:
        folder: The folder for Airflow, the servers and the state.
        flights: The folder of the landed flights.
        days: The number of days.
        active: The number of active runs.
        settings: More environment variables for Airflow.
        warm: True for warm drivers.
    """
    (folder / "dags").mkdir(parents=True)
    text = airflow_backfill.DAGS.replace("@ACTIVE@", repr([active])).replace("@FOLDER@", str(folder))
    (folder / "dags" / "traced.py").write_text(text)
    dag_id = f"active_{active}"
    with SparkConnectServer(airflow_backfill.ROOT, log_dir=folder / "logs") as spark:
        env = {
            "CAIRN_FLIGHTS": str(flights),
            "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW__CAIRN__WARM_DRIVERS": str(warm),
            **settings,
        }
        with AirflowServer(airflow_backfill.ROOT, home=folder / "home", log_dir=folder / "logs", env=env) as airflow:
            airflow.wait_for_dag(dag_id)
            airflow_backfill.backfill(airflow, dag_id, 0, WARM_UP, active)
            airflow_backfill.backfill(airflow, dag_id, WARM_UP, days, active)
            runs = airflow.client.dag_runs(dag_id)[WARM_UP:]
            return [_steps_of_run(airflow, dag_id, run) for run in runs]


def _steps_of_run(airflow: AirflowServer, dag_id: str, run: Mapping[str, Any]) -> list[Step]:
    run_id = run["dag_run_id"]
    logs = {name: task_log(airflow.task_logs, dag_id, run_id, name, 1).read_text() for name in STEPS}
    return steps_of(run, airflow.client.task_instances(dag_id, run_id), logs)


def steps_of(run: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], logs: Mapping[str, str]) -> list[Step]:
    """Return the steps of one run, in the order of time.

    Args:
        run: The run, as Airflow's API returns it.
        tasks: Its task instances, as Airflow's API returns them.
        logs: The log of each task, by task id.
    """
    began_ms = _ms(run["start_date"])
    steps: list[Step] = []
    free_ms = 0.0
    for task in sorted(tasks, key=lambda t: _ms(t["start_date"])):
        name = task["task_id"]
        start_ms, end_ms = (_ms(task[field]) - began_ms for field in ("start_date", "end_date"))
        steps.append(
            Step(task=name, name="wait for the scheduler", who="Airflow's scheduler", start_ms=free_ms, end_ms=start_ms)
        )
        free_ms = end_ms
        lines = [(line["timestamp"], line["event"]) for line in map(json.loads, logs[name].splitlines())]
        at_ms = start_ms
        for step, who, mark in STEPS[name]:
            found = [_ms(time) - began_ms for time, event in lines if mark is not None and mark in event]
            until_ms = end_ms if mark is None else next((ms for ms in found if ms >= at_ms), at_ms)
            steps.append(Step(task=name, name=step, who=who, start_ms=at_ms, end_ms=until_ms))
            at_ms = until_ms
    last_ms = _ms(run["end_date"]) - began_ms
    steps.append(Step(task="run", name="end of the run", who="Airflow's scheduler", start_ms=free_ms, end_ms=last_ms))
    return steps


def _ms(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() * 1000


def median_day(days: Sequence[Sequence[Step]]) -> list[Step]:
    """Return the day of median length."""
    lengths = [day[-1].end_ms for day in days]
    return [*days[lengths.index(statistics.median_low(lengths))]]


def table(way: str, day: Sequence[Step]) -> list[str]:
    """Return a day's steps as lines of text, with milliseconds."""
    lines = [f"{way}: {day[-1].end_ms:.0f} ms", f"{'from':>7} {'lasts':>6}  step"]
    return lines + [
        f"{step.start_ms:7.0f} {step.end_ms - step.start_ms:6.0f}  {step.task}: {step.name} ({step.who})"
        for step in day
    ]


_ROW, _LEFT, _WIDTH = 17, 260, 900


def picture(days: Mapping[str, Sequence[Step]]) -> str:
    """Draw one day of each way as an SVG picture, all on one time axis.

    Args:
        days: The steps of one day, by way.
    """
    longest_ms = max(day[-1].end_ms for day in days.values())
    scale = (_WIDTH - _LEFT - 70) / longest_ms
    parts: list[str] = []
    y = 34
    x = 8.0
    for who, colour in WHO.items():
        parts.append(f'<rect x="{x:.0f}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="20">{html.escape(who)}</text>')
        x += 34 + 7 * len(who)
    for way, day in days.items():
        parts.append(f'<text x="8" y="{y + 18}" font-weight="bold">{html.escape(way)}: {day[-1].end_ms:,.0f} ms</text>')
        y += 26
        for step in day:
            x, width = _LEFT + step.start_ms * scale, max(1.0, (step.end_ms - step.start_ms) * scale)
            label = html.escape(f"{step.task}: {step.name}")
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{label}</text>')
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" fill="{WHO[step.who]}"/>'
            )
            parts.append(
                f'<text x="{x + width + 4:.1f}" y="{y + 12}" fill="#555">{step.end_ms - step.start_ms:,.0f}</text>'
            )
            y += _ROW
        y += 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}"'
            ' font-family="sans-serif" font-size="11">',
            f'<rect width="{_WIDTH}" height="{y}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
