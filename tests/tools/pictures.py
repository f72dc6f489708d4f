"""Take the pictures of the Checkpoints pages, in a headless browser and without Airflow.

    make pictures                                # those of the docs
    python -m tests.tools.pictures FOLDER --all  # ten views, light and dark, 1,440 and 390 px wide

Six pipelines are in different situations at noon of 10 January 2024, and 27 more are well. With `--all`, three further
roots have a pipeline without checkpoints, one with 400, and a chain. A picture says nothing about Airflow or a storage:
what they would answer is made up here.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock
from urllib.parse import quote

from cairn_ui import airflow_database, database_runs, page_of_overview, page_of_pipelines, page_of_run, shown_page
from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.ports.storage import Storage
from state_backend.values.airflow_runs import DagRun, DagSchedule, FailingTask, TaskTry
from state_backend.values.inputs import Edge
from state_backend.values.intervals import to_ms
from tests.support.browser import browser, save_picture
from tests.support.chain_world import World
from tests.support.checkpoints import day
from tests.support.readability import set_window
from tests.support.shown_app import shown_app
from tests.support.shown_pipelines import STATES, ShownFolder, run_id

ROOT = "gs://shop-data/state"
NOW = day(9).end + timedelta(hours=12)
STATE = (STATES[0],)
REASON = "ProcessorError: pipeline 'clicks': handleInputRows, key ('ann',), interval [2024-01-09, 2024-01-10): KeyError: 'b' (clicks.py:54)"


@dataclass
class Shown:
    """What Airflow and the storage say about a pipeline."""

    name: str
    days: int = 9
    runs: list[DagRun] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    failing: tuple[FailingTask, ...] = ()
    tries: tuple[TaskTry, ...] = ()
    root: str = ROOT
    # The last day that has ended.
    today: int = 9

    def __post_init__(self) -> None:
        self.now = day(1).end
        self.storage: Storage = MemoryStorage(f"{ROOT}/{self.name}", now_ms=lambda: to_ms(self.now))
        if self.root != ROOT:
            self.storage, self.days = open_storage(f"{self.root}/{self.name}"), 0
            stat, at = self.storage.stat, to_ms(NOW) - 3_600_000
            dated = lambda path: (found := stat(path)) and replace(found, modified_ms=at)  # noqa: E731
            mock.patch.object(self.storage, "stat", dated).start()
        self.folder = ShownFolder(self.storage)
        for number in range(1, self.days + 1):
            self.commit(number)
        self.runs = [run_of(n) for n in range(1, (self.days or 9 * (self.root != ROOT)) + 1)] + self.runs

    def commit(
        self, number: int, attempt: str | None = None, after: timedelta = timedelta(minutes=4), **more: Any
    ) -> None:
        self.now = day(number).end + after
        self.folder.day(number, attempt, states=STATE, **more)

    @property
    def schedule(self) -> DagSchedule:
        said = {"asked_end": day(self.today).end, "next_due": day(self.today + 1).end, "paused": False}
        return DagSchedule(**(said | {"running": sum(run.unfinished for run in self.runs)} | self.changes))


def run_of(number: int, state: str = "success") -> DagRun:
    began = day(number).end + timedelta(minutes=1)
    return DagRun(
        run_id=run_id(number),
        state=state,
        start=day(number).start,
        end=day(number).end,
        due=day(number).end,
        queued=began - timedelta(seconds=8),
        began=began,
        ended=None if state == "running" else began + timedelta(minutes=2 + number % 3),
    )


def situations() -> list[Shown]:
    corrected = Shown("sales")
    corrected.commit(5, "corrected", timedelta(days=4, hours=11), clear_number=1)
    at = [day(9).end + timedelta(seconds=seconds) for seconds in (65, 98, 104, 117)]
    corrected.tries = tuple(
        TaskTry(task_id=name, try_number=1, state="success", queued=began, began=began, ended=ended)
        for name, began, ended in (("process", *at[:2]), ("checkpoint", *at[2:]))
    )
    ends = [NOW - timedelta(minutes=11 - 5 * n) for n in range(3)]
    failing = Shown("clicks", 8, [run_of(9, "running")])
    failing.failing = (
        FailingTask(
            dag_id="clicks", run_id=run_id(9), interval=day(9), task_id="process", try_number=3, tries=4, ended=ends[2]
        ),
    )
    failing.tries = tuple(
        TaskTry(
            task_id="process", try_number=n, state="failed", began=at - timedelta(minutes=2), ended=at, most_retries=3
        )
        for n, at in enumerate(ends, 1)
    )
    missing = Shown("orders", 5, [run_of(9, "running")], {"waiting": frozenset({run_id(9)})})
    refused = Shown("visits", 8, [run_of(9, "failed")])
    refused.now = day(8).end + timedelta(minutes=6)
    found = ("total: 14 of 2,162 values of n are not between 0 and 10,000", "total: n is missing in 3 rows")
    refused.folder.coordinator.quarantine(8, "full validation: 2 findings", found)
    late = Shown("weather", 6, changes={"asked_end": day(6).end, "next_due": day(7).end})
    return [corrected, failing, missing, refused, late, Shown("rides"), *(Shown(f"team_{n:02}") for n in range(27))]


def chain(folder: Path) -> list[Shown]:
    """Return three pipelines that read each other. A day of the first one was corrected."""
    names = ("sales", "report", "mail")
    edges = {
        name: tuple(Edge(pipeline=up) for up in ups)
        for name, ups in zip(names, ([], names[:1], names[1:2]), strict=True)
    }
    world = World(edges, root=f"file://{folder}", code="shop")
    for name in names:
        for number in range(1, 10):
            world.run(name, number)
    world.raw["sales", 5] = 4
    world.run("sales", 5)
    for name in names:
        world.folders[name].coordinator.publish(None)
    return [Shown(name, root=world.root) for name in names]


class _Noon(datetime):
    ended = 9

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return day(cls.ended).end + timedelta(hours=12)


@contextmanager
def served(shown: list[Shown]) -> Iterator[str]:
    """Serve the pages, and yield the URL of the list."""
    import uvicorn

    of = {one.name: one for one in shown}
    refs = [PipelineRef(name=name, root=one.root, dag_id=name, code=f"shop:{name.upper()}") for name, one in of.items()]
    storages: dict[str, Storage] = {name: one.storage for name, one in of.items()}
    said: dict[tuple[Any, str], Any] = {
        (airflow_database, "schedules_of"): lambda ids: {name: of[name].schedule for name in ids},
        (airflow_database, "last_savepoint"): lambda *_: None,
        (airflow_database, "airflow_url"): lambda _: "https://airflow.shop.example",
        (database_runs, "last_runs"): lambda ids, most: {name: tuple(of[name].runs[-most:]) for name in ids},
        (database_runs, "runs_after"): lambda name, at, _: tuple(
            r for r in of[name].runs if at is None or r.start >= at
        ),
        (database_runs, "failing_tasks"): lambda ids: {name: [*of[name].failing] for name in ids if of[name].failing},
        (database_runs, "tries_of"): lambda name, _: of[name].tries,
        (database_runs, "run_of"): lambda name, run_id: next(r for r in of[name].runs if r.run_id == run_id),
        (database_runs, "runs_there"): lambda _, run_ids: {*run_ids},
        (database_runs, "scheduled_by_assets"): lambda: (
            {"cairn://sales": ["report"]},
            {"report": ["s3://reports/day"]},
        ),
        (shown_page.reasons, "reason"): lambda *_: REASON,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_Noon, "ended", shown[0].today))
        app = stack.enter_context(shown_app(storages, refs, refused={}))
        for (where, name), answer in said.items():
            stack.enter_context(mock.patch.object(where, name, answer))
        for module in (page_of_overview, page_of_pipelines, page_of_run, shown_page):
            stack.enter_context(mock.patch.object(module, "datetime", _Noon))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until_s = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until_s, "the server did not start"
            time.sleep(0.05)
        (socket,) = server.servers[0].sockets
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}/cairn/checkpoints"
        finally:
            server.should_exit = True
            thread.join(30)


def views() -> dict[str, str]:
    """Return the path of each view, by the name of its picture."""
    at = {
        name: f"/p/{quote(PipelineRef(name=name, root=ROOT, dag_id=name).key)}"
        for name in ("sales", "clicks", "orders", "visits", "weather", "rides")
    }
    return {
        "pipelines": "/",
        "overview": f"{at['sales']}/",
        "healthy": f"{at['rides']}/",
        **{f"overview-{name}": f"{path}/" for name, path in at.items() if name not in ("sales", "rides")},
        "history": f"{at['sales']}/history",
        "lineage": f"{at['sales']}/lineage",
        "trends": f"{at['rides']}/trends",
        "compare": f"{at['sales']}/compare?first=5&second=10",
        "detail": f"{at['rides']}/checkpoint/9",
        "task": f"/task/sales/checkpoint/{quote(run_id(9), safe='')}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="all views, at both widths")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.all:
        take(
            situations(),
            {name: path for name, path in views().items() if not name.startswith("overview-")},
            options.folder,
        )
        return
    with TemporaryDirectory() as root:
        for shown, paths in (situations(), views()), *extremes(Path(root)):
            take(shown, paths, options.folder, widths=(1440, 390))


def extremes(folder: Path, many: int = 400) -> list[tuple[list[Shown], dict[str, str]]]:
    """Return pipelines without checkpoints, with many, and in a chain; and the paths of the views to take of them."""
    empty, long, chained = [Shown("empty", 0)], [Shown("long", many, today=many)], chain(folder)
    at = [
        f"/p/{quote(PipelineRef(name=one.name, root=one.root, dag_id=one.name).key)}"
        for one in (empty[0], long[0], chained[1])
    ]
    of_long = ("", "history", "lineage", "trends", f"checkpoint/{many}", f"compare?first={many - 1}&second={many}")
    return [
        (empty, {"pipelines-empty": "/", "overview-empty": f"{at[0]}/", "trends-empty": f"{at[0]}/trends"}),
        (long, {f"{re.split('[/?]', path)[0] or 'overview'}-many": f"{at[1]}/{path}" for path in of_long}),
        (chained, {"pipelines-chain": "/", "overview-chain": f"{at[2]}/"}),
    ]


def take(shown: list[Shown], paths: dict[str, str], folder: Path, widths: Sequence[int] = ()) -> None:
    """Take a picture of each view in both themes, at each of the widths; without widths, at 1,280 px."""
    with served(shown) as url:
        for width in widths or (1280,):
            with browser(width, 900) as chrome:
                set_window(chrome, width, 900 if widths else 760)
                chrome.get(f"{url}/static/cairn.css")
                chrome.add_cookie({"name": "_token", "value": "admin", "path": "/"})
                for theme in ("light", "dark"):
                    chrome.execute_script("localStorage.setItem('theme', arguments[0])", theme)
                    for name, path in paths.items():
                        chrome.get(f"{url}{path}")
                        time.sleep(0.3)  # The script writes the times.
                        size = f"-{width}" if widths else ""
                        save_picture(chrome, folder / f"checkpoints-{name}{size}-{theme}.png", colours=256)


if __name__ == "__main__":
    main()
