"""Airflow's REST API: one authenticated call, and a backfill that is whole.

Airflow creates a backfill in several transactions and allows one per DAG. So a database that refuses one of them (SQLite is locked
by the scheduler's writes) leaves a backfill with a part of its runs, which starts, and which is in the way of the next try. And for half
a minute after a backfill has ended it still counts as active. ``create_backfill`` gets through all of that:

1. It asks for the logical dates (dry run) before anything is changed.
2. It creates the backfill. If Airflow refuses for a moment, it tries again; a half that the failed call left is cancelled, with the DAG
   paused meanwhile so that none of its runs start.
3. It looks whether each of those dates has a run that is to come, under way, or ended since; else it begins again.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cairn.spark.local_server_secret import LOOPBACK, find_secret
from state_backend.values.errors import StorageUnavailable, UsageError
from state_backend.values.intervals import format_instant

TOKEN_VARIABLE = "CAIRN_AIRFLOW_TOKEN"
ADMIN = "admin"


class RestError(RuntimeError):
    """Airflow's API refused; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status

    @property
    def passes(self) -> bool:
        """Whether it is a refusal of the moment: SQLite refuses a write that began on an older view of the database than the scheduler
        has left by then. Airflow makes that 503, or 500 "Database error"."""
        return self.status == 503 or (self.status == 500 and "Database error" in str(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """A backfill that is whole. ``runs``: how many dates it covers; ``tries``: how often it was created until it was."""

    id: int
    dag_id: str
    runs: int
    tries: int


class AirflowRest:
    """``token``: of a user, where Airflow wants one; left out: the environment's, else Airflow is asked for one. Airflow gives one to
    the user ``admin`` with the ``password``; left out: that of an Airflow which this user runs on this machine. Without a password
    Airflow gives one where everybody is admin (``[core] simple_auth_manager_all_admins``)."""

    def __init__(self, url: str, token: str | None = None, *, password: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._token = token or os.environ.get(TOKEN_VARIABLE)
        at = urllib.parse.urlsplit(url)
        local = at.hostname in LOOPBACK
        self._password = password or (find_secret("airflow", at.port or 80) if local else None)
        # Never through a proxy of the environment if it is this machine.
        self._opener = (
            urllib.request.build_opener(urllib.request.ProxyHandler({})) if local else urllib.request.build_opener()
        )

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer, None for an empty one. A refusal of the moment changed nothing, so it is asked again, for
        ten seconds.

        Raises: RestError for a refusal, OSError if nobody answers.
        """
        for tries_left in range(20, -1, -1):
            try:
                return self.call_once(method, path, body)
            except RestError as error:
                if not error.passes or not tries_left:
                    raise
                time.sleep(0.5)

    def call_once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """As ``call``; a refusal of the moment is an error too."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if path != "/auth/token":
            headers["Authorization"] = f"Bearer {self.token()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:  # holds the connection
                raise RestError(error.code, error.read().decode(errors="replace")[:2000]) from None
        return json.loads(text) if text else None

    def token(self) -> str:
        """The token of the user: for the cookie ``_token`` of a browser too."""
        if self._token is not None:
            return self._token
        if self._password is None:
            answer = self.call("GET", "/auth/token")
        else:
            answer = self.call("POST", "/auth/token", {"username": ADMIN, "password": self._password})
        self._token = str(answer["access_token"])
        return self._token

    # --- what a backfill needs ------------------------------------------------------------------------------------------------

    def pause(self, dag_id: str, paused: bool) -> None:
        """Pauses a DAG, or lets it go on."""
        self.call("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": paused})

    def active_backfills(self, dag_id: str) -> list[dict[str, Any]]:
        """The backfills of a DAG that are not completed, as Airflow lists them."""
        found = self.call("GET", f"/api/v2/backfills?dag_id={dag_id}&limit=100")["backfills"]
        return [backfill for backfill in found if backfill["completed_at"] is None]

    def cancel_backfill(self, backfill_id: int) -> None:
        """Cancels a backfill; runs that have begun go on."""
        self.call("PUT", f"/api/v2/backfills/{backfill_id}/cancel")

    def runs_between(self, dag_id: str, first: str, last: str) -> list[dict[str, Any]]:
        """The runs of these logical dates, both included."""
        runs: list[dict[str, Any]] = []
        dates = urllib.parse.urlencode({"logical_date_gte": first, "logical_date_lte": last})
        while True:
            page = f"limit=100&offset={len(runs)}&order_by=logical_date&{dates}"
            answer = self.call("GET", f"/api/v2/dags/{dag_id}/dagRuns?{page}")
            runs += answer["dag_runs"]
            if not answer["dag_runs"] or len(runs) >= answer["total_entries"]:
                return runs

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
        """The logical dates from ``first`` to ``last``, both included; the DAG is unpaused then, since a backfill of a paused one waits
        for ever. ``reprocess``: none, failed or completed. ``say`` gets what is waited for.

        Raises: UsageError for what asking again can't help (no such DAG, nothing to run, no permission); StorageUnavailable if Airflow
        does not answer, or if it is not created within ``timeout_s``, naming the backfill that is in the way.
        """
        body = {
            "dag_id": dag_id,
            "from_date": first.isoformat(),
            "to_date": last.isoformat(),
            "max_active_runs": max_active_runs,
            "reprocess_behavior": reprocess,
            "dag_run_conf": dict(conf) if conf else None,
        }
        with _explained(self.url, dag_id):
            return self._create(body, time.monotonic() + timeout_s, say)

    def _create(self, body: dict[str, Any], deadline_s: float, say: Callable[[str], None]) -> Backfill:
        dag_id = body["dag_id"]
        dates = [r["logical_date"] for r in self.call("POST", "/api/v2/backfills/dry_run", body)["backfills"]]
        if not dates:
            raise UsageError(
                f"Airflow has nothing to run for DAG {dag_id} from {body['from_date']} to {body['to_date']}: no interval of its "
                "schedule that has ended starts there, or all of them are under way"
            )
        former, tries, paused = {b["id"] for b in self.active_backfills(dag_id)}, 0, False
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
                mine, other = list[dict[str, Any]](), list[dict[str, Any]]()
                for one in self.active_backfills(dag_id):
                    half_of_ours = one["id"] not in former or (
                        _same_dates(one, body) and self._missing(dag_id, dates, one["created_at"])
                    )
                    (mine if half_of_ours else other).append(one)
                if mine:
                    # Paused first: else the scheduler starts runs of the half while it is cancelled.
                    self.pause(dag_id, True)
                    paused = True
                    for half in mine:
                        self.cancel_backfill(half["id"])
                if time.monotonic() > deadline_s:
                    raise StorageUnavailable(_in_the_way(dag_id, other, problem))
                if tries == 1:
                    say(f"Airflow could not create it at once ({problem[:200]}); trying again")
                time.sleep(1)
        finally:
            if paused:
                self.pause(dag_id, False)
        self.pause(dag_id, False)
        return Backfill(id=made["id"], dag_id=dag_id, runs=len(dates), tries=tries)

    def _missing(self, dag_id: str, dates: Sequence[str], since: str) -> list[str]:
        """The dates that have no run which is to come, under way, or began after that instant."""
        covered = {
            _instant(run["logical_date"])
            for run in self.runs_between(dag_id, dates[0], dates[-1])
            if run["state"] in ("queued", "running")
            or (run["queued_at"] is not None and _instant(run["queued_at"]) >= _instant(since))
        }
        return [date for date in dates if _instant(date) not in covered]


@contextmanager
def _explained(url: str, dag_id: str) -> Iterator[None]:
    try:
        yield
    except RestError as error:
        if error.status in (401, 403):
            raise UsageError(
                f"Airflow at {url} refuses that ({error}); put a token of a user who may edit DAG {dag_id} into {TOKEN_VARIABLE}"
            ) from error
        if error.status == 404:
            raise UsageError(f"Airflow at {url} has no DAG {dag_id!r}; --dag names it, --airflow the server") from error
        if error.status < 500:
            raise UsageError(f"Airflow at {url} refuses the backfill: {error}") from error
        raise StorageUnavailable(f"Airflow at {url} failed: {error}; try again") from error
    except OSError as error:
        raise StorageUnavailable(
            f"no Airflow answers at {url} ({error}); start one with 'make ui', or name yours with --airflow"
        ) from error


def _in_the_way(dag_id: str, others: Sequence[Mapping[str, Any]], problem: str) -> str:
    if not others:
        return f"DAG {dag_id}: the backfill could not be created in time; nothing of it is left. The last answer: {problem}"
    one = others[0]
    return (
        f"DAG {dag_id}: backfill {one['id']} of {_short(one['from_date'])} to {_short(one['to_date'])} is not over, and Airflow runs one "
        "per DAG. Wait for its runs (it counts for half a minute longer), or cancel it in the UI; then try again, or with a longer --timeout"
    )


def _same_dates(one: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    return all(_instant(one[name]) == _instant(body[name]) for name in ("from_date", "to_date"))


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _short(text: str) -> str:
    return format_instant(_instant(text))
