"""Demo: two weeks of flights through Airflow and Spark, during which one Spark driver is killed.

    python -m local_stack.demo        # DAYS=14 by default; `make demo` sets up what is missing first

The demo stores its state in data/demo, and deletes the state of an earlier demo when it starts. Its runs stay in
Airflow's database in the repository, so that the UI shows them afterwards. A second demo runs the same days again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Hashable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cairn.command.airflow_rest import ADMIN
from local_stack.airflow_server import AirflowClient, AirflowServer, RestError, parse_time, task_log
from local_stack.connect_server import SparkConnectServer
from local_stack.demo_report import DayResult, sums_of, table_of, verdict_of
from local_stack.host_check import problems
from local_stack.owned_process import OwnedProcesses
from local_stack.patience import Patience
from local_stack.progress_lines import ProgressLines, fold
from local_stack.running_driver import RunningDriver
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from state_backend.values.environment import Variable
from state_backend.values.records import Record

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "demo"
# The input files are shared with the UI: runs that a user starts there find their input. A second landing of the same
# days changes nothing.
FLIGHTS = ROOT / "data" / "flights"
DAG = "aircraft"
FIRST_DAY = datetime(2013, 1, 1, tzinfo=UTC)
_ENDED = ("success", "failed")

# Seconds without any sign of progress after which the demo ends. On a slow machine the limit grows.
_LEAST_PATIENCE_S = 300

_lines = ProgressLines()
say = _lines.say


def main() -> int:
    """Run the demo, and stop all processes that it started."""
    days = int(os.environ.get("DAYS", "14"))
    if not 1 <= days <= 365:
        print(f"DAYS={days} is out of range: the flights are of 2013, so set DAYS to 1 to 365")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if found := problems():
        print("\n".join(map(fold, [*found, "Then run the demo again"])))
        return 1
    try:
        with _lines:
            return run_demo(days)
    except KeyboardInterrupt:
        say("interrupted; all processes that the demo started have stopped")
        return 130
    except (RuntimeError, OSError) as error:
        say(f"failed: {error}; logs: {_short(DATA / 'logs')}")
        return 1


def run_demo(days: int) -> int:
    """Run the demo over a number of days, and return the exit code: 0 if every day was processed."""
    say(f"Cairn demo: {days} days of flights from New York")
    for name in ("state", "savepoints", "docs", "logs"):
        shutil.rmtree(DATA / name, ignore_errors=True)
    with ExitStack() as stack:
        spark = SparkConnectServer(ROOT, log_dir=DATA / "logs", port=15002)
        stack.callback(spark.stop)
        # Validation restores the checkpoint of every simulated day. The pipeline's expectations run only once in seven
        # simulated days, because to import Great Expectations would take most of the seconds that such a day takes. In
        # a demo of less than seven days, the expectations run for every day.
        env = pipeline_env(DATA, FLIGHTS, spark) | {Variable.EXPECTATIONS_DAYS: "7" if days >= 7 else "1"}
        airflow = AirflowServer(ROOT, home=ROOT, port=8080, log_dir=DATA / "logs", env=env)
        stack.callback(airflow.stop)
        try:
            verdict = show(days, spark, airflow, env, stack)
        finally:
            # Ignore signals during the stop, since a second Ctrl-C would leave processes running.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            _lines.do("Airflow and Spark stop")
    if verdict is None:
        return 1
    say("Airflow and Spark are stopped")
    print("\n" + fold(f"Verdict: {verdict}"), flush=True)
    return 0


def show(
    days: int, spark: SparkConnectServer, airflow: AirflowServer, env: dict[str, str], stack: ExitStack
) -> str | None:
    """Start Spark and Airflow, run the days and report the results. Return the verdict; None if a day failed."""
    start(spark, airflow, env)
    client = airflow.client
    last_day = FIRST_DAY + timedelta(days=days - 1)
    prepare(client, last_day)
    began = datetime.now(tz=UTC)
    stack.callback(settle, client, last_day)
    client.create_backfill(DAG, FIRST_DAY, last_day, timeout_s=60)
    say(f"Airflow runs {FIRST_DAY.date()} to {last_day.date()}, one day after the other")
    # This day is no late one: if its driver ends before the kill, the driver of the day after it is killed instead.
    killer = DriverKiller(airflow.processes, FIRST_DAY + timedelta(days=min(4, (days - 1) // 2)))
    failed = DayWatcher(airflow, killer, last_day, began).watch()
    if failed is not None:
        report_failure(client, airflow.task_logs, failed)
        return None
    _lines.do("the demo reads the results from Airflow")
    results = results_of(client, last_day, began)
    report(results)
    if not killer.done:
        say("no driver was killed: each driver ended before the demo could kill it")
    return verdict_of(results, str(killer.day.date()) if killer.done else None)


def start(spark: SparkConnectServer, airflow: AirflowServer, env: dict[str, str]) -> None:
    """Start Spark and Airflow, write the flights, and wait until Airflow knows the DAG."""
    # Start both servers without waiting, so that they start up while the flights are written. Start them from this
    # thread, because the kernel ends a child process when the thread that started it ends.
    say(f"starting Spark Connect ({spark.url}) and Airflow ({airflow.client.url}); logs: {_short(DATA / 'logs')}")
    spark.start()
    _lines.do("Airflow sets up its database")
    airflow.start()
    _lines.do(f"the flights are written to {_short(FLIGHTS)}")
    land_flights(env)
    _lines.do("Spark Connect starts")
    spark.wait_until_ready()
    say("Spark Connect is ready")
    _lines.do("Airflow starts")
    airflow.wait_until_ready()
    _lines.do(f"Airflow parses the DAG {DAG}")
    airflow.wait_for_dag(DAG, timeout_s=_LEAST_PATIENCE_S)
    say(f"Airflow is ready, with {airflow.client.url}\nlog in as {ADMIN}, password {airflow.password}")
    _lines.do("Airflow creates a backfill")


def pipeline_env(data: Path, flights: Path, spark: SparkConnectServer) -> dict[str, str]:
    return {
        Variable.DATA: str(data),
        Variable.ROOT: f"file://{data}/state",
        Variable.FLIGHTS: str(flights),
        "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
    }


def land_flights(env: dict[str, str]) -> None:
    """Write the input files of the whole year, so that a user can continue in the UI after the demo."""
    command = [sys.executable, "-m", "pipelines.land_flights", "--to", str(FLIGHTS)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the flights could not be written:\n{done.stdout}{done.stderr}")
    say(f"the flights of 2013 are in {_short(FLIGHTS)}, a file for each day")


def prepare(client: AirflowClient, last_day: datetime) -> None:
    """Cancel the active backfills of the DAG, and fail the unfinished runs of the demo's days.

    An earlier demo may have left them in Airflow's database. Airflow creates a backfill only if no other backfill of
    the DAG is active. It notices the end of a backfill up to 30 s late.
    """
    for backfill in client.active_backfills(DAG):
        client.cancel_backfill(backfill["id"])
    for run in demo_runs(client, last_day):
        if run["state"] not in _ENDED:
            client.fail_run(DAG, run["dag_run_id"])


def settle(client: AirflowClient, last_day: datetime) -> None:
    """Fail all unfinished runs of the demo, so that the next Airflow does not continue them.

    The backfill is not cancelled. Cancelling would pause the backfill for ever. If a user cleared one of its runs
    later, that run would never start. The last day is failed first, so that no other day starts meanwhile.
    """
    # An Airflow that is shutting down may not answer. `prepare` of the next demo ends the remaining runs.
    with suppress(RestError, OSError):
        for run in reversed(demo_runs(client, last_day)):
            if run["state"] not in _ENDED:
                client.fail_run(DAG, run["dag_run_id"])


class DriverKiller:
    """Killer of one Spark driver of this program's Airflow, after the driver has run for some time.

    If the driver of the chosen day ends earlier, the killer tries the next day with half the time.
    """

    def __init__(self, processes: OwnedProcesses, day: datetime, *, after_s: float = 0.8) -> None:
        self.day = day
        self.after_s = after_s
        self.done = False
        self._processes = processes
        self._seen: tuple[int, float] | None = None

    def look(self) -> None:
        """Check once for a Spark driver of the chosen day, and kill it if it has run for `after_s` seconds.

        `watch` calls this method several times a second. The kill shows that Airflow's retry continues from the
        checkpoint of the day before.
        """
        if self.done:
            return
        pid = next((pid for pid in self._processes.pids() if self._is_driver(pid)), None)
        if pid is None:
            if self._seen is not None:
                self._seen, self.day, self.after_s = None, self.day + timedelta(days=1), self.after_s / 2
        elif self._seen is None or self._seen[0] != pid:
            self._seen = (pid, time.monotonic())
        elif time.monotonic() - self._seen[1] >= self.after_s:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            try:
                # Another process may have taken the pid before `pidfd_open`, so check the process again. The demo kills
                # one driver on purpose, and each day of its data has a driver of its own. If this day's driver ends
                # before the signal, `done` stays False, and a later call of `look` kills the next day's driver.
                with suppress(ProcessLookupError):
                    if not self._is_driver(pid):
                        return
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    self.done = True
                    say(f"{self.day.date()}  kill -9 of the Spark driver, {self.after_s:.1f} s after it started")
            finally:
                os.close(handle)

    def _is_driver(self, pid: int) -> bool:
        driver = RunningDriver.of(pid)
        return driver is not None and driver.interval_start() == self.day


class DayWatcher:
    """Watcher of the demo's days, which prints their progress."""

    def __init__(self, airflow: AirflowServer, killer: DriverKiller, last_day: datetime, began: datetime) -> None:
        self._airflow = airflow
        self._client = airflow.client
        self._killer = killer
        self._last_day = last_day
        self._began = began
        self._finished: set[str] = set()
        self._retried: set[tuple[str, int]] = set()
        self._log = read_log(open_storage(f"file://{DATA}/state/{DAG}"))
        self._patience = Patience(time.monotonic(), least_s=_LEAST_PATIENCE_S)

    def watch(self) -> dict[str, Any] | None:
        """Print the progress until all days have ended. Return the failed or stuck run; None if all succeeded."""
        total, next_poll_s = (self._last_day - FIRST_DAY).days + 1, 0.0
        while len(self._finished) < total:
            self._killer.look()
            time.sleep(0.2)
            if time.monotonic() < next_poll_s:
                continue
            next_poll_s = time.monotonic() + 1
            self._airflow.processes.check_alive()
            self._tell_commits()
            runs = demo_runs(self._client, self._last_day)
            for run in runs:
                if run["dag_run_id"] not in self._finished and self._tell_end(run):
                    return run
            if self._patience.is_over(self._signs(runs), time.monotonic()):
                say(f"nothing has made progress for {self._patience.limit_s:.0f} s")
                return next(run for run in runs if run["dag_run_id"] not in self._finished)
        return None

    def _tell_commits(self) -> None:
        """Print the checkpoints that were committed since the last call. The pipeline's log shows a commit first."""
        before = self._log.head_id
        self._log = read_log(open_storage(f"file://{DATA}/state/{DAG}"), self._log)
        for checkpoint_id in range(before + 1, self._log.head_id + 1):
            record = self._log.entry(checkpoint_id)
            if isinstance(record, Record):
                totals = record.content.totals
                say(
                    f"{record.interval.start.date()}  committed: checkpoint {checkpoint_id}, {totals.input_rows:,} flights, "
                    f"{totals.keys:,} aircraft"
                )

    def _tell_end(self, run: dict[str, Any]) -> bool:
        """Print that a run has succeeded, and return True if the run has failed."""
        if run["state"] == "success":
            self._finished.add(run["dag_run_id"])
            validated = "validated; " if self._client.xcom(DAG, run["dag_run_id"], "validate") else ""
            say(f"{run['logical_date'][:10]}  {validated}the day took {seconds_of(run):.1f} s")
        return bool(run["state"] == "failed")

    def _signs(self, runs: list[dict[str, Any]]) -> Hashable:
        """Return values that change when Airflow makes progress, and tell the demo's output which task runs now.

        They are the finished days, the newest checkpoint, the states of tasks, and the sizes of logs.
        """
        tasks: list[tuple[str, str, str | None, int]] = []
        running = [run for run in runs if run["state"] == "running" and run["dag_run_id"] not in self._finished]
        for run in running:
            run_id, day = run["dag_run_id"], run["logical_date"][:10]
            found = self._client.task_instances(DAG, run_id)
            tasks += [(day, task["task_id"], task["state"], task["try_number"]) for task in found]
            for number, task in enumerate(tries(self._client, run_id, "process", self._began), 1):
                if number > 1 and task["state"] == "running" and (day, number) not in self._retried:
                    self._retried.add((day, number))
                    say(f"{day}  process: try {number} started, from the checkpoint of the day before")
        _lines.do(activity_of([task[:3] for task in tasks]))
        folders = [self._airflow.task_logs / f"dag_id={DAG}" / f"run_id={run['dag_run_id']}" for run in running]
        written = sum(file.stat().st_size for folder in folders for file in folder.rglob("*.log"))
        return (len(self._finished), self._log.head_id, *sorted(map(str, tasks)), written)


def activity_of(tasks: Sequence[tuple[str, str, str | None]]) -> str:
    active = [(day, name, state) for day, name, state in tasks if state not in (None, "success", "skipped")]
    if not active:
        return f"{tasks[0][0]}: Airflow schedules the next task" if tasks else "Airflow starts the next day"
    # If several tasks are active, name a running one rather than a waiting one.
    day, name, state = min(active, key=lambda task: task[2] != "running")
    return f"{day}: {name} runs" if state == "running" else f"{day}: {name} is {str(state).replace('_', ' ')}"


def demo_runs(client: AirflowClient, last_day: datetime) -> list[dict[str, Any]]:
    runs = [run for run in client.dag_runs(DAG) if run["logical_date"] is not None]
    return [run for run in runs if FIRST_DAY <= datetime.fromisoformat(run["logical_date"]) <= last_day]


def tries(client: AirflowClient, run_id: str, task_id: str, began: datetime) -> list[dict[str, Any]]:
    """Return the tries of a task that started at or after `began`, the time at which this demo began.

    Airflow also returns the tries of earlier demos. It continues their numbers, so the first try of this demo may have
    number 3.
    """
    found = client.tries(DAG, run_id, task_id)
    return [task for task in found if (start := parse_time(task["start_date"])) is not None and start >= began]


def seconds_of(run: dict[str, Any]) -> float:
    """Return the duration in seconds of a run that has ended, by Airflow's timestamps."""
    return (datetime.fromisoformat(run["end_date"]) - datetime.fromisoformat(run["start_date"])).total_seconds()


def results_of(client: AirflowClient, last_day: datetime, began: datetime) -> list[DayResult]:
    """Return the results of the demo's days, ascending by day."""
    results = []
    for run in demo_runs(client, last_day):
        run_id = run["dag_run_id"]
        done = client.xcom(DAG, run_id, "checkpoint")
        # The result is from this demo: when the backfill cleared the tasks, Airflow deleted results of earlier demos.
        validation = client.xcom(DAG, run_id, "validate") or {}
        results.append(
            DayResult(
                day=run["logical_date"][:10],
                **{n: done[n] for n in ("checkpoint", "input_rows", "keys", "uploaded_bytes", "state_bytes")},
                seconds=seconds_of(run),
                tries=len(tries(client, run_id, "process", began)),
                expectations=validation.get("expectations"),
                entries=validation.get("entries"),
            )
        )
    return results


def report(results: Sequence[DayResult]) -> None:
    print("\n".join(["", *table_of(results), "", *map(fold, sums_of(results)), "", "where to look now:"]))
    if any(r.expectations is not None for r in results):
        _point("validation report of each checkpoint", DATA / "docs" / "index.html")
    _point("features of each flight, as Parquet", DATA / "state" / DAG / "output")
    # The task `savepoint` creates the folder with its first savepoint.
    if (DATA / "savepoints").exists():
        _point("savepoints, which retention keeps", DATA / "savepoints")
    print(f"  {'runs of the days, in Airflow':<38}  CAIRN_DATA=$PWD/{_short(DATA)} make ui", flush=True)


def _point(meaning: str, path: Path) -> None:
    print(f"  {meaning:<38}  {_short(path)}", flush=True)


def report_failure(client: AirflowClient, task_logs: Path, run: dict[str, Any]) -> None:
    """Print the end of the log of each task that failed or did not end, then the task's error and the log's path."""
    run_id, day = run["dag_run_id"], run["logical_date"][:10]
    tasks = client.task_instances(DAG, run_id)
    shown = [task for task in tasks if task["state"] == "failed"] or [
        task for task in tasks if task["try_number"] and task["state"] not in ("success", "skipped")
    ]
    for task in shown:
        name, number = task["task_id"], task["try_number"]
        lines = client.log(DAG, run_id, name, number)
        print("\n".join(lines[-40:]))
        error = last_error(lines) or f"its log has no error; see {_short(DATA / 'logs' / 'scheduler.log')}"
        say(f"failed: {day}, task {name} ({task['state']}, try {number}): {error}")
        print(f"  log: {task_log(task_logs, DAG, run_id, name, number)}")
    if not shown:
        say(f"failed: {day}: no task of the run has started; see {_short(DATA / 'logs' / 'scheduler.log')}")


def last_error(lines: Sequence[str]) -> str | None:
    """Return the last error in a task's log as one line; None if the log has no error."""
    for line in reversed(lines):
        level, _, event = line.partition(" ")
        if level in ("ERROR", "CRITICAL"):
            # In a logged exception, the first line is only the log message. The exception itself is in the last line.
            return (line.splitlines()[1:] or [event])[-1].strip()
    return None


def _short(path: Path) -> Path:
    return path.relative_to(ROOT)


if __name__ == "__main__":
    sys.exit(main())
