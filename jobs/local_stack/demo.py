"""Demo: two weeks of flights through Airflow and Spark, during which one Spark driver is killed.

    python -m local_stack.demo        # DAYS=14 by default; `make demo` sets up what is missing first

The demo stores its state in data/demo, and deletes the state of an earlier demo when it starts. Its runs stay in
Airflow's database in the repository, so that the UI shows them afterwards. A second demo runs the same days again.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cairn.command.airflow_rest import ADMIN
from local_stack.airflow_server import AirflowClient, AirflowServer, RestError, parse_time, task_log
from local_stack.owned_process import OwnedProcesses, command_line
from local_stack.spark_server import SparkConnectServer

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "demo"
# The input files are shared with the UI: runs that a user starts there find their input. A second landing of the same
# days changes nothing.
FLIGHTS = ROOT / "data" / "flights"
DAG = "aircraft"
FIRST_DAY = datetime(2013, 1, 1, tzinfo=UTC)
_ENDED = ("success", "failed")

_start_s = time.monotonic()


def say(text: str = "") -> None:
    """Print a line with the seconds since the program's start."""
    print(f"{time.monotonic() - _start_s:6.1f} s  {text}" if text else "", flush=True)


def main() -> int:
    """Run the demo, and stop all processes that it started.

    Returns:
        The exit code: 0 if every day was processed, 1 if not, and 130 after an interruption.
    """
    days = int(os.environ.get("DAYS", "14"))
    if not 1 <= days <= 365:
        print(f"DAYS={days} is out of range: the flights are of 2013, so set DAYS to 1 to 365")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if problem := no_semaphores():
        print(problem)
        return 1
    try:
        return run_demo(days)
    except KeyboardInterrupt:
        say("interrupted; all processes that the demo started have stopped")
        return 130
    except (RuntimeError, OSError) as error:
        say(f"failed: {error}; logs: {_short(DATA / 'logs')}")
        return 1


def no_semaphores() -> str | None:
    """Return advice for the user if the system provides no semaphores, else None.

    Airflow's LocalExecutor needs semaphores.
    """
    try:
        multiprocessing.get_context("fork").Semaphore()
    except OSError as error:
        return (
            f"Airflow's LocalExecutor can't run here: it needs semaphores, which need a writable /dev/shm ({error})\nMount one "
            "(mount -t tmpfs tmpfs /dev/shm; docker run --shm-size=64m), then run the demo again"
        )
    return None


def run_demo(days: int) -> int:
    """Run the demo over a number of days, and return the exit code: 0 if every day was processed."""
    say(f"Cairn demo: {days} days of flights from New York, the history of every aircraft as keyed state")
    for name in ("state", "savepoints", "docs", "logs"):
        shutil.rmtree(DATA / name, ignore_errors=True)
    with ExitStack() as stack:
        spark = SparkConnectServer(ROOT, log_dir=DATA / "logs", port=15002)
        stack.callback(spark.stop)
        # Validation restores the checkpoint of every simulated day. The pipeline's expectations run only once in seven
        # simulated days, because to import Great Expectations would take most of the seconds that such a day takes. In a
        # demo of less than seven days, the expectations run for every day.
        env = pipeline_env(DATA, FLIGHTS, spark) | {"CAIRN_EXPECTATIONS_DAYS": "7" if days >= 7 else "1"}
        airflow = AirflowServer(ROOT, home=ROOT, port=8080, log_dir=DATA / "logs", env=env)
        stack.callback(airflow.stop)
        try:
            code = show(days, spark, airflow, env, stack)
        finally:
            # A second Ctrl-C during the stop would leave processes running.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
    if code:
        return code
    say("Airflow and Spark are stopped")
    runs = f"the runs in Airflow, at http://127.0.0.1:8080/dags/{DAG}"
    print(f"  {runs:<64} CAIRN_DATA=$PWD/{_short(DATA)} make ui")
    return 0


def show(days: int, spark: SparkConnectServer, airflow: AirflowServer, env: dict[str, str], stack: ExitStack) -> int:
    """Start Spark and Airflow, run the days and report the results.

    Args:
        days: The number of days.
        spark: The Spark Connect server, not started yet.
        airflow: The Airflow server, not started yet.
        env: The environment of the pipeline.
        stack: The stack that receives the callback which ends unfinished runs.

    Returns:
        The exit code: 0 if every day was processed.
    """
    # Start both servers without waiting, so that they start up while the flights are written. Start them from this
    # thread, because the kernel ends a child process when the thread that started it ends.
    say(f"starting Spark Connect ({spark.url}) and Airflow ({airflow.client.url}); logs: {_short(DATA / 'logs')}")
    spark.start()
    airflow.start()
    land_flights(env)
    spark.wait_until_ready()
    say("Spark Connect is ready")
    airflow.wait_until_ready()
    airflow.wait_for_dag(DAG)
    say(f"Airflow is ready; log in as {ADMIN} with the password {airflow.password}")

    client = airflow.client
    last_day = FIRST_DAY + timedelta(days=days - 1)
    prepare(client, last_day)
    began = datetime.now(tz=UTC)
    stack.callback(settle, client, last_day)
    client.backfill(DAG, FIRST_DAY.isoformat(), last_day.isoformat())
    say(f"backfill of {FIRST_DAY.date()} to {last_day.date()} created; Airflow runs one day after the other")
    killer = DriverKiller(airflow.processes, FIRST_DAY + timedelta(days=min(5, days) - 1))
    failed = watch(airflow, killer, last_day, began)
    say()
    if failed is not None:
        report_failure(client, airflow.task_logs, failed)
        return 1
    report(client, last_day, began)
    if not killer.done:
        say("no driver was killed: each driver ended before the demo could kill it")
    return 0


def pipeline_env(data: Path, flights: Path, spark: SparkConnectServer) -> dict[str, str]:
    """Return the environment variables with which Airflow's components run the pipeline.

    Args:
        data: The folder for the pipeline's state and other results.
        flights: The folder of the input files, one for each day.
        spark: The Spark Connect server that the pipeline's tasks use.
    """
    return {
        "CAIRN_DATA": str(data),
        "CAIRN_ROOT": f"file://{data}/state",
        "CAIRN_FLIGHTS": str(flights),
        "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
    }


# --- before ---------------------------------------------------------------------------------------------------------------


def land_flights(env: dict[str, str]) -> None:
    """Write the input files of the whole year, so that a user can continue in the UI after the demo.

    Raises:
        RuntimeError: The program `pipelines.land_flights` failed.
    """
    command = [sys.executable, "-m", "pipelines.land_flights", "--to", str(FLIGHTS)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the flights could not be written:\n{done.stdout}{done.stderr}")
    say(f"the flights of 2013, a file for each day, are in {_short(FLIGHTS)}")


def prepare(client: AirflowClient, last_day: datetime) -> None:
    """Cancel the active backfills of the DAG, and fail the unfinished runs of the demo's days.

    An earlier demo may have left them in Airflow's database. Airflow creates a backfill only if no other backfill of
    the DAG is active. It notices the end of a backfill up to 30 s late.

    Args:
        client: The client of Airflow's REST API.
        last_day: The last day of the demo. Runs from 2013-01-01 up to this day are failed.
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

    Args:
        client: The client of Airflow's REST API.
        last_day: The last day of the demo.
    """
    # An Airflow that is shutting down may not answer. `prepare` of the next demo ends the remaining runs.
    with suppress(RestError, OSError):
        for run in reversed(demo_runs(client, last_day)):
            if run["state"] not in _ENDED:
                client.fail_run(DAG, run["dag_run_id"])


# --- while it runs ----------------------------------------------------------------------------------------------------------


class DriverKiller:
    """Killer of one Spark driver of this program's Airflow, after the driver has run for some time.

    If the driver of the chosen day ends earlier, the killer tries the next day with half the time.

    Args:
        processes: Airflow's processes.
        day: The day whose driver is killed.
        after_s: The age at which the driver is killed, in seconds.
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
        pid = next((pid for pid in self._processes.pids() if self._is_driver(command_line(pid))), None)
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
                    if not self._is_driver(command_line(pid)):
                        return
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    self.done = True
                    say(
                        f"{self.day.date()}  kill -9 of the Spark driver (pid {pid}), {self.after_s:.1f} s after it started"
                    )
            finally:
                os.close(handle)

    def _is_driver(self, arguments: list[str]) -> bool:
        options = " ".join(arguments[1:])
        return options.startswith("-m cairn.driver.driver process ") and f" --start {self.day.isoformat()} " in options


def watch(airflow: AirflowServer, killer: DriverKiller, last_day: datetime, began: datetime) -> dict[str, Any] | None:
    """Print the progress until all days have ended.

    Args:
        airflow: The Airflow server that runs the days.
        killer: The killer of one Spark driver, which is called several times a second.
        last_day: The last day of the demo.
        began: The time at which the demo began. Tries of tasks that started earlier belong to an earlier demo.

    Returns:
        The first run that failed, or the first unfinished run if no run ended for 300 s; None if all days succeeded.
    """
    client, finished, retried = airflow.client, set[str](), set[tuple[str, int]]()
    total, ended_s = (last_day - FIRST_DAY).days + 1, time.monotonic()
    next_poll_s = 0.0
    while len(finished) < total:
        killer.look()
        time.sleep(0.2)
        if time.monotonic() < next_poll_s:
            continue
        next_poll_s = time.monotonic() + 1
        airflow.processes.check_alive()
        runs = demo_runs(client, last_day)
        for run in runs:
            run_id, day = run["dag_run_id"], run["logical_date"][:10]
            if run_id in finished or run["state"] == "queued":
                continue
            if run["state"] == "running":
                for number, task in enumerate(tries(client, run_id, "process", began), 1):
                    if number > 1 and task["state"] == "running" and (day, number) not in retried:
                        retried.add((day, number))
                        say(f"{day}  process: try {number} started, from the checkpoint of the day before")
                continue
            finished.add(run_id)
            if run["state"] == "failed":
                return run
            done = client.xcom(DAG, run_id, "checkpoint") or {}
            took_s, ended_s = time.monotonic() - ended_s, time.monotonic()
            say(f"{day}  checkpoint {done.get('checkpoint')}, {done.get('input_rows')} flights, {took_s:.1f} s")
        if time.monotonic() - ended_s > 300:
            say("no day has ended for 300 s")
            return next(run for run in runs if run["dag_run_id"] not in finished)
    return None


def demo_runs(client: AirflowClient, last_day: datetime) -> list[dict[str, Any]]:
    """Return the runs of the days from 2013-01-01 up to `last_day`, ascending by date."""
    runs = [run for run in client.dag_runs(DAG) if run["logical_date"] is not None]
    return [run for run in runs if FIRST_DAY <= datetime.fromisoformat(run["logical_date"]) <= last_day]


def tries(client: AirflowClient, run_id: str, task_id: str, began: datetime) -> list[dict[str, Any]]:
    """Return the tries of a task that started at or after `began`, the time at which this demo began.

    Airflow also returns the tries of earlier demos. It continues their numbers, so the first try of this demo may have
    number 3.
    """
    found = client.tries(DAG, run_id, task_id)
    return [task for task in found if (start := parse_time(task["start_date"])) is not None and start >= began]


# --- after ------------------------------------------------------------------------------------------------------------------

_COLUMNS = "{:10}  {:>10}  {:>4}  {:>11}  {:>11}  {:>13}  {:>5}  {:>6}  {:>7}  {:>5}"


def report(client: AirflowClient, last_day: datetime, began: datetime) -> None:
    """Print the sizes of each day's checkpoint and the locations of the results.

    Args:
        client: The client of Airflow's REST API.
        last_day: The last day of the demo. The first day is 2013-01-01.
        began: The time at which the demo began. Tries of tasks that started earlier belong to an earlier demo and are
            not counted.
    """
    print(
        _COLUMNS.format(
            "day", "checkpoint", "base", "new bytes", "full bytes", "changed bytes", "files", "keys", "seconds", "tries"
        )
    )
    runs = demo_runs(client, last_day)
    new = full = 0
    checked: list[dict[str, Any]] = []
    savepoints: list[str] = []
    for run in runs:
        run_id = run["dag_run_id"]
        done = client.xcom(DAG, run_id, "checkpoint")
        sizes = [
            f"{done[name]:,}" for name in ("uploaded_bytes", "state_bytes", "changed_bytes", "state_files", "keys")
        ]
        seconds = (datetime.fromisoformat(run["end_date"]) - datetime.fromisoformat(run["start_date"])).total_seconds()
        base = "-" if done["base"] is None else done["base"]
        count = len(tries(client, run_id, "process", began))
        print(_COLUMNS.format(run["logical_date"][:10], done["checkpoint"], base, *sizes, f"{seconds:.1f}", count))
        new += done["uploaded_bytes"]
        full += done["state_bytes"]
        # Airflow has deleted the results of an earlier demo, because the backfill cleared its tasks. A skipped task has
        # no result.
        if validation := client.xcom(DAG, run_id, "validate"):
            checked.append(validation)
        if savepoint := client.xcom(DAG, run_id, "savepoint"):
            savepoints.append(savepoint["savepoint"])
    print(
        f"\nuploaded in total: {new:,} bytes; full checkpoints would have been {full:,} bytes ({new / max(full, 1):.0%})"
    )
    if checked:
        last = checked[-1]
        print(
            f"validated: {len(checked)} checkpoints, each restored from storage into an empty folder; the last one has "
            f"{last['entries']:,} entries of {last['keys']:,} keys, as recorded. {sum(v['expectations'] for v in checked)} "
            f"data checks passed, in {sum(v['expectations'] > 0 for v in checked)} of these checkpoints"
        )
    print("\nwhere to look now:")
    if checked:
        _point("the validation report of each checkpoint", DATA / "docs" / "index.html")
    _point("the features of each flight, as Parquet", DATA / "state" / DAG / "output")
    if savepoints:
        _point(f"{len(savepoints)} savepoint(s), copies of the state that retention never deletes", DATA / "savepoints")


def _point(meaning: str, path: Path) -> None:
    print(f"  {meaning:<64} {_short(path)}")


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
            # The first line of a logged exception names the event only. The exception itself is on the last line.
            return (line.splitlines()[1:] or [event])[-1].strip()
    return None


def _short(path: Path) -> Path:
    return path.relative_to(ROOT)


if __name__ == "__main__":
    sys.exit(main())
