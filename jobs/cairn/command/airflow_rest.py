"""Calls of Airflow's REST API, and the creation of complete backfills.

Airflow creates a backfill in several transactions, and allows one active backfill per DAG. If the database refuses a
transaction, an incomplete backfill remains: its runs start, and it blocks the next try. SQLite refuses writes while the
scheduler writes. A backfill counts as active for half a minute after its end.

`create_backfill` works around these limits:

1. It asks for the logical dates with a dry run, before it changes anything.
2. It creates the backfill, and tries again after a temporary refusal. Before a new try it cancels the incomplete
   backfill that the failed call has left, and pauses the DAG until then, so that no run of this backfill starts.
3. It checks that each logical date has a run that is queued, is running, or was queued since the creation. If a date
   has no run, it continues with step 2.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from cairn.spark.java_runtime import is_clone
from cairn.spark.local_server_secret import LOOPBACK, check_address, checked_token, find_secret
from state_backend.values.airflow_runs import DagRun, R, read_run
from state_backend.values.environment import Variable
from state_backend.values.errors import StorageUnavailable, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.intervals import format_instant
from state_backend.values.schedule import Cron, Schedule
from state_backend.values.zones import Zone, zone_of

ADMIN = "admin"


class RestError(RuntimeError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status

    @property
    def passes(self) -> bool:
        """True for a temporary refusal: the database refused a write, and the same request may succeed later.

        SQLite refuses a transaction that began before the scheduler's last write. Airflow reports this as status 503,
        or as status 500 with "Database error".
        """
        return self.status == 503 or (self.status == 500 and "Database error" in str(self))


@frozen
class Backfill:
    """A backfill that Airflow has created, after `tries` tries, with `runs` DAG runs, which need not have ended."""

    id: int
    dag_id: str
    runs: int
    tries: int


class AirflowRest:
    def __init__(self, url: str, token: str | None = None, *, password: str | None = None) -> None:
        check_address(url, f"put the token of a user into the environment variable {Variable.AIRFLOW_TOKEN}")
        self.url = url.rstrip("/")
        self._token = token or checked_token(Variable.AIRFLOW_TOKEN.given, Variable.AIRFLOW_TOKEN)
        at = urllib.parse.urlsplit(url)
        local = at.hostname in LOOPBACK
        self._password = password or (find_secret("airflow", at.port or 80) if local else None)
        # A request to this machine must not go through a proxy that the environment names.
        self._opener = (
            urllib.request.build_opener(urllib.request.ProxyHandler({})) if local else urllib.request.build_opener()
        )

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request with `body` as JSON, and return the JSON answer; None for an empty answer.

        After a temporary refusal (`RestError.passes`), which changed nothing, repeat the request for ten seconds.
        """
        for tries_left in range(20, -1, -1):
            try:
                return self.call_once(method, path, body)
            except RestError as error:
                if not error.passes or not tries_left:
                    raise
                time.sleep(0.5)

    def call_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request once, and return the JSON answer as `call` does. Raise `RestError` for each refusal."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if path != "/auth/token":
            headers["Authorization"] = f"Bearer {self.token()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:  # The error holds the connection, so it must be closed.
                raise RestError(error.code, error.read().decode(errors="replace")[:2000]) from None
        return json.loads(text) if text else None

    def token(self) -> str:
        """Return the user's token for Airflow's API, which the first call requests from Airflow.

        Airflow's pages accept the token as the cookie `_token`.
        """
        if self._token is not None:
            return self._token
        if self._password is None:
            answer = self.call("GET", "/auth/token")
        else:
            answer = self.call("POST", "/auth/token", {"username": ADMIN, "password": self._password})
        self._token = str(answer["access_token"])
        return self._token

    def zone_of_days(self, dag_id: str, recorded: Schedule | None) -> Zone:
        """Return the time zone in which a day of a DAG begins.

        `recorded`: Schedule of the pipeline's newest checkpoint; None without one. If it is a cron schedule, the result
        is its zone. Otherwise the result is Airflow's default time zone, the only one that Airflow's API tells: the
        field `timezone` of a DAG is the setting `[core] default_timezone` (seen with Airflow 3.3.2).
        """
        if isinstance(recorded, Cron):
            return zone_of(recorded.zone)
        with explain_errors(self.url, dag_id):
            zone = self.call("GET", f"/api/v2/dags/{dag_id}/details")["timezone"]
        return zone_of(zone or "UTC")

    def is_paused(self, dag_id: str) -> bool:
        with explain_errors(self.url, dag_id):
            return bool(self.call("GET", f"/api/v2/dags/{dag_id}")["is_paused"])

    def running(self, dag_id: str) -> dict[str, dict[str, str | None]]:
        """Return {run id: {task id: Airflow's state of the task}} for the running runs of a DAG."""
        found = {}
        runs_of_dag = f"/api/v2/dags/{dag_id}/dagRuns"
        with explain_errors(self.url, dag_id):
            for run in self._rows(runs_of_dag, "dag_runs", state="running", order_by="logical_date"):
                path = f"{runs_of_dag}/{urllib.parse.quote(run['dag_run_id'])}/taskInstances"
                tasks = self._rows(path, "task_instances")
                found[run["dag_run_id"]] = {task["task_id"]: task["state"] for task in tasks}
        return found

    def before_commit(self, dag_id: str) -> list[str]:
        """Return the ids of the tasks of a DAG that its task `checkpoint` waits for."""
        with explain_errors(self.url, dag_id):
            tasks = self.call("GET", f"/api/v2/dags/{dag_id}/tasks")["tasks"]
        return [task["task_id"] for task in tasks if "checkpoint" in task["downstream_task_ids"]]

    def _rows(self, path: str, name: str, **wanted: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while True:
            asked = urllib.parse.urlencode({"limit": 100, "offset": len(rows), **wanted}, doseq=True)
            answer = self.call("GET", f"{path}?{asked}")
            rows += answer[name]
            if not answer[name] or len(rows) >= answer["total_entries"]:
                return rows

    def pause(self, dag_id: str, paused: bool) -> None:
        with explain_errors(self.url, dag_id):
            self.call("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": paused})

    def active_backfills(self, dag_id: str) -> list[dict[str, Any]]:
        """Return the backfills of a DAG that are not completed, as Airflow's API describes them."""
        newest_first = f"/api/v2/backfills?dag_id={dag_id}&limit=100&order_by=-id"
        found = self.call("GET", newest_first)["backfills"]
        return [backfill for backfill in found if backfill["completed_at"] is None]

    def cancel_backfill(self, backfill_id: int) -> None:
        """Cancel a backfill. Runs that have begun continue."""
        self.call("PUT", f"/api/v2/backfills/{backfill_id}/cancel")

    def runs_between(self, of: type[R], dag_id: str, first: str, last: str, states: Sequence[str] = ()) -> list[R]:
        wanted = {"logical_date_gte": first, "logical_date_lte": last, "state": states, "order_by": "logical_date"}
        rows = self._rows(f"/api/v2/dags/{dag_id}/dagRuns", "dag_runs", **wanted)
        return [read_run(of, run) for run in rows]

    def create_backfill(
        self,
        dag_id: str,
        first: datetime,
        last: datetime,
        *,
        max_active_runs: int = 1,
        reprocess: str = "completed",
        conf: Mapping[str, Any] | None = None,
        timeout_s: float = 120,
        say: Callable[[str], None] = lambda _: None,
    ) -> Backfill:
        """Create a backfill with a DAG run for each date, and unpause the DAG, so that Airflow starts the runs.

        If Airflow creates runs for only some of the dates, cancel the backfill and create it again, until `timeout_s`
        is over. `reprocess`, `conf`: As in Airflow's API. `say`: Prints a line if the first try fails.
        """
        body = {
            "dag_id": dag_id,
            "from_date": first.isoformat(),
            "to_date": last.isoformat(),
            "max_active_runs": max_active_runs,
            "reprocess_behavior": reprocess,
            "dag_run_conf": dict(conf or {}),  # An empty object instead of null, which Airflow 3.1 refuses.
        }
        with explain_errors(self.url, dag_id):
            return self._create(body, time.monotonic() + timeout_s, say)

    def _create(self, body: dict[str, Any], deadline_s: float, say: Callable[[str], None]) -> Backfill:
        dag_id = body["dag_id"]
        body, dates = self.backfill_dates(body)
        if not dates:
            raise UsageError(
                f"Airflow has nothing to run for DAG {dag_id} from {_short(body['from_date'])} to {_short(body['to_date'])}: no ended "
                "interval of its schedule starts there, or the runs of all of them are queued or running"
            )
        former, tries, paused_before = {b["id"] for b in self.active_backfills(dag_id)}, 0, True
        try:
            while True:
                tries += 1
                try:
                    made = self.call_once("POST", "/api/v2/backfills", body)
                    if not (missing := self._missing(dag_id, dates, made["created_at"])):
                        break
                    problem = f"{len(missing)} of {len(dates)} runs are missing, the first {missing[0]}"
                except RestError as error:
                    if error.status != 409 and error.status < 500:
                        raise
                    problem = str(error)
                active = self.active_backfills(dag_id)
                same = [one for one in active if _same_dates(one, body)]
                incomplete = [one for one in same if self._missing(dag_id, dates, one["created_at"])]
                # Airflow may have created the whole backfill, although the request failed. Then take this backfill.
                new = [one for one in same if one not in incomplete and one["id"] not in former]
                if whole := [one for one in new if (one.get("dag_run_conf") or {}) == body["dag_run_conf"]]:
                    made = whole[0]
                    break
                if incomplete:
                    # Without the pause the scheduler would start runs of the incomplete backfill while it is cancelled.
                    paused_before &= self.is_paused(dag_id)
                    self.pause(dag_id, True)
                    for half in incomplete:
                        self.cancel_backfill(half["id"])
                if time.monotonic() > deadline_s:
                    others = [one for one in active if one not in incomplete]
                    raise StorageUnavailable(_in_the_way(dag_id, others, problem))
                if tries == 1:
                    say(f"Airflow could not create the backfill at once ({problem[:200]}); trying again")
                time.sleep(1)
        finally:
            if not paused_before:
                self.pause(dag_id, False)
        self.pause(dag_id, False)
        return Backfill(id=made["id"], dag_id=dag_id, runs=len(dates), tries=tries)

    def backfill_dates(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return (body, dates): the request for a backfill, changed to cover all of its runs, and their logical dates.

        If the clock skips the local time at which an interval ends, Airflow 3.3 leaves the interval out of a range that
        begins exactly at its start. So in this case the range in the body begins one second earlier.
        """
        body, dates = dict(body), self._dry_run(body)
        first = _instant(body["from_date"])
        if not dates or _instant(dates[0]) != first:
            earlier = (first - timedelta(seconds=1)).isoformat()
            left_out = self._dry_run({**body, "from_date": earlier, "to_date": body["from_date"]})
            if [_instant(date) for date in left_out] == [first]:
                return {**body, "from_date": earlier}, [*left_out, *dates]
        return body, dates

    def _dry_run(self, body: Mapping[str, Any]) -> list[str]:
        return [run["logical_date"] for run in self.call("POST", "/api/v2/backfills/dry_run", body)["backfills"]]

    def _missing(self, dag_id: str, dates: Sequence[str], since: str) -> list[str]:
        """Return those of `dates` without a run, or with one that has ended and was queued before `since`."""
        covered = {
            run.logical_date
            for run in self.runs_between(DagRun, dag_id, dates[0], dates[-1])
            if run.unfinished or (run.queued is not None and run.queued >= _instant(since))
        }
        return [date for date in dates if _instant(date) not in covered]


@contextmanager
def explain_errors(url: str, dag_id: str) -> Iterator[None]:
    """Convert an error of Airflow's API in the `with` block to a `CairnError` that says what the user has to do."""
    try:
        yield
    except RestError as error:
        if error.status in (401, 403):
            raise UsageError(
                f"Airflow at {url} refuses the request ({error})\n"
                f"Put the token of a user who may edit DAG {dag_id} into the environment variable {Variable.AIRFLOW_TOKEN}"
            ) from error
        if error.status == 404:
            raise UsageError(f"Airflow at {url} has no DAG {dag_id!r}; check --dag and --airflow") from error
        if error.status < 500:
            raise UsageError(f"Airflow at {url} refuses the request: {error}") from error
        raise StorageUnavailable(f"Airflow at {url} failed: {error}; try again") from error
    except OSError as error:
        start = "start one with 'make ui', or " if is_clone() else ""
        raise StorageUnavailable(
            f"no Airflow answers at {url} ({error}); {start}give the address of yours with --airflow"
        ) from error


def _in_the_way(dag_id: str, others: Sequence[Mapping[str, Any]], problem: str) -> str:
    if not others:
        return f"DAG {dag_id}: Airflow did not create the backfill in time, and nothing of it remains. Its last answer: {problem}"
    one = others[0]
    return (
        f"DAG {dag_id}: backfill {one['id']} of {_short(one['from_date'])} to {_short(one['to_date'])} is still active, and Airflow runs one "
        f"per DAG\nWait until half a minute after its last run, or cancel it in Airflow's UI. Then try again, or set {Variable.AIRFLOW_WAIT} to a longer time"
    )


def _same_dates(one: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    return all(_instant(one[name]) == _instant(body[name]) for name in ("from_date", "to_date"))


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _short(text: str) -> str:
    return format_instant(_instant(text))
