"""The main job, watched: two weeks of flights through Airflow and Spark, with one driver killed on the way.

    python -m local_stack.demo        # DAYS=14 by default; `make demo` sets up what is missing first

It keeps its state under data/demo and begins with none. Its runs stay in Airflow's database in the repository, so that the
UI shows them afterwards; running it again runs the same days again.
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
# Not the demo's own: landing the same days again changes nothing, and runs started in the UI find their input here.
FLIGHTS = ROOT / "data" / "flights"
DAG = "aircraft"
FIRST_DAY = datetime(2013, 1, 1, tzinfo=UTC)
_ENDED = ("success", "failed")

_start_s = time.monotonic()


def say(text: str = "") -> None:
    """A line with the seconds since the start."""
    print(f"{time.monotonic() - _start_s:6.1f} s  {text}" if text else "", flush=True)


def main() -> int:
    """0 if every day was processed, 1 if not, 130 if it was interrupted. Whatever it started is stopped then."""
    days = int(os.environ.get("DAYS", "14"))
    if not 1 <= days <= 365:
        print(f"DAYS={days}: the flights are of 2013, so take 1 to 365")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if problem := no_semaphores():
        print(problem)
        return 1
    try:
        return run_demo(days)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return 130
    except (RuntimeError, OSError) as error:
        say(f"failed: {error}; logs: {_short(DATA / 'logs')}")
        return 1


def no_semaphores() -> str | None:
    """What to do where the system gives processes no semaphores, which Airflow's LocalExecutor can't do without."""
    try:
        multiprocessing.get_context("fork").Semaphore()
    except OSError as error:
        return (
            f"Airflow's LocalExecutor can't run here: no semaphores ({error}), which need a writable /dev/shm. Mount one "
            "(mount -t tmpfs tmpfs /dev/shm; docker run --shm-size=64m), then run this again"
        )
    return None


def run_demo(days: int) -> int:
    """Runs the demo over so many days; the exit code: 0 if every check held."""
    say(f"Cairn demo: {days} days of flights from New York, the history of every aircraft as keyed state")
    for name in ("state", "savepoints", "docs", "logs"):
        shutil.rmtree(DATA / name, ignore_errors=True)
    with ExitStack() as stack:
        spark = SparkConnectServer(ROOT, log_dir=DATA / "logs", port=15002)
        stack.callback(spark.stop)
        # Every day's checkpoint is restored and proven. The owner's expectations come once a week, since importing Great
        # Expectations would take most of a day's time here; of a few days they see each.
        env = pipeline_env(DATA, FLIGHTS, spark) | {"CAIRN_EXPECTATIONS_DAYS": "7" if days >= 7 else "1"}
        airflow = AirflowServer(ROOT, home=ROOT, port=8080, log_dir=DATA / "logs", env=env)
        stack.callback(airflow.stop)
        try:
            code = show(days, spark, airflow, env, stack)
        finally:
            # A second Ctrl-C while things are being stopped would leave some of them running.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
    if code:
        return code
    say("Airflow and Spark are stopped")
    runs = f"the runs in Airflow, at http://127.0.0.1:8080/dags/{DAG}"
    print(f"  {runs:<64} CAIRN_DATA=$PWD/{_short(DATA)} make ui")
    return 0


def show(days: int, spark: SparkConnectServer, airflow: AirflowServer, env: dict[str, str], stack: ExitStack) -> int:
    """Starts both, runs the days, reports; 0 if all went well. What has to be settled goes onto the stack."""
    # From this thread and without waiting: the three get ready at the same time.
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
    say(f"backfill of {FIRST_DAY.date()} to {last_day.date()} created; one day after the other")
    killer = DriverKiller(airflow.processes, FIRST_DAY + timedelta(days=min(5, days) - 1))
    failed = watch(airflow, killer, last_day, began)
    say()
    if failed is not None:
        report_failure(client, airflow.task_logs, failed)
        return 1
    report(client, last_day, began)
    if not killer.done:
        say("no driver could be killed: each was faster than that")
    return 0


def pipeline_env(data: Path, flights: Path, spark: SparkConnectServer) -> dict[str, str]:
    """What Airflow's components need to know to run the pipeline with its data in a folder of its own."""
    return {
        "CAIRN_DATA": str(data),
        "CAIRN_ROOT": f"file://{data}/state",
        "CAIRN_FLIGHTS": str(flights),
        "AIRFLOW_CONN_CAIRN_SPARK": spark.airflow_connection,
    }


# --- before ---------------------------------------------------------------------------------------------------------------


def land_flights(env: dict[str, str]) -> None:
    """Writes the input files, one per day: the whole year, so that a person can go on in the UI where the demo ended."""
    command = [sys.executable, "-m", "pipelines.land_flights", "--to", str(FLIGHTS)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the flights could not be written:\n{done.stdout}{done.stderr}")
    say(f"the flights of 2013, a file for each day, are in {_short(FLIGHTS)}")


def prepare(client: AirflowClient, last_day: datetime) -> None:
    """Ends what a former demo left in the database. A backfill runs only over days that have ended, and only if no other
    one is active; Airflow itself sees the end of one up to 30 s late."""
    for backfill in client.active_backfills(DAG):
        client.cancel_backfill(backfill["id"])
    for run in demo_runs(client, last_day):
        if run["state"] not in _ENDED:
            client.fail_run(DAG, run["dag_run_id"])


def settle(client: AirflowClient, last_day: datetime) -> None:
    """Nothing of the demo stays unfinished in the database, or the next Airflow would go on with it.

    Not by cancelling the backfill: that pauses it for ever, and a run of it that somebody clears later would never start.
    The last day first, so that no other starts meanwhile.
    """
    # An Airflow that is going down may not answer any more; the next demo settles the rest.
    with suppress(RestError, OSError):
        for run in reversed(demo_runs(client, last_day)):
            if run["state"] not in _ENDED:
                client.fail_run(DAG, run["dag_run_id"])


# --- while it runs ----------------------------------------------------------------------------------------------------------


class DriverKiller:
    """Kills the Spark driver of one day, once: of our own Airflow, after it has run for a little. If that day's is done
    sooner, the next day's after half the time."""

    def __init__(self, processes: OwnedProcesses, day: datetime, *, after_s: float = 0.8) -> None:
        self.day = day
        self.after_s = after_s
        self.done = False
        self._processes = processes
        self._seen: tuple[int, float] | None = None

    def look(self) -> None:
        """To be called often."""
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
                # Another process may have got the pid before `pidfd_open`, so the handle's process is checked again. The driver may
                # end before the signal; then a later one is killed.
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
    """Show the progress until all days have ended.

    Returns:
        The first run that failed, or that did not end within 300 s after the run before; None if all days succeeded.
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
                        say(f"{day}  process: try {number} runs, from the checkpoint of the day before")
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
    """The runs of the demo's days, in order."""
    runs = [run for run in client.dag_runs(DAG) if run["logical_date"] is not None]
    return [run for run in runs if FIRST_DAY <= datetime.fromisoformat(run["logical_date"]) <= last_day]


def tries(client: AirflowClient, run_id: str, task_id: str, began: datetime) -> list[dict[str, Any]]:
    """The tries of this demo; Airflow goes on counting where a former one ended."""
    found = client.tries(DAG, run_id, task_id)
    return [task for task in found if (start := parse_time(task["start_date"])) is not None and start >= began]


# --- after ------------------------------------------------------------------------------------------------------------------

_COLUMNS = "{:10}  {:>10}  {:>4}  {:>11}  {:>11}  {:>13}  {:>5}  {:>6}  {:>7}  {:>5}"


def report(client: AirflowClient, last_day: datetime, began: datetime) -> None:
    """What each day's checkpoint cost, and where everything is."""
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
        # Another demo's results are deleted with the clear, a skipped task has none.
        if validation := client.xcom(DAG, run_id, "validate"):
            checked.append(validation)
        if savepoint := client.xcom(DAG, run_id, "savepoint"):
            savepoints.append(savepoint["savepoint"])
    print(f"\nuploaded in all: {new:,} bytes; full snapshots would have been {full:,} ({new / max(full, 1):.0%})")
    if checked:
        last = checked[-1]
        print(
            f"validated: {len(checked)} checkpoints restored from storage into empty folders; the last one: "
            f"{last['entries']:,} entries of {last['keys']:,} keys as recorded. {sum(v['expectations'] for v in checked)} "
            f"expectations were met at {sum(v['expectations'] > 0 for v in checked)} of them"
        )
    print("\nwhat is there now:")
    if checked:
        _point("what validation found of each checkpoint", DATA / "docs" / "index.html")
    _point("the features of each flight, as Parquet", DATA / "state" / DAG / "output")
    if savepoints:
        _point(f"{len(savepoints)} savepoint(s), copies of the state that nothing deletes", DATA / "savepoints")


def _point(meaning: str, path: Path) -> None:
    """One line: what it is, where it is."""
    print(f"  {meaning:<64} {_short(path)}")


def report_failure(client: AirflowClient, task_logs: Path, run: dict[str, Any]) -> None:
    """Print the log's end of each task that failed or did not end; then the task, its error and the path of its log."""
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
            # The first line of an exception names only the event; the exception itself stands below.
            return (line.splitlines()[1:] or [event])[-1].strip()
    return None


def _short(path: Path) -> Path:
    return path.relative_to(ROOT)


if __name__ == "__main__":
    sys.exit(main())
