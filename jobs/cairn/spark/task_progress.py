"""Report the progress of the Spark tasks that run inside a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cairn.spark_versions import is_connect

_POLL_S = 0.5


@contextmanager
def task_progress(session: Any, on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """Call `on_progress(finished tasks, all tasks)` for the running stages again and again while the block runs."""
    if is_connect(session):
        with _connect_progress(session, on_progress):
            yield
        return
    ended = threading.Event()
    tracker = session.sparkContext.statusTracker()

    def follow() -> None:
        while not ended.wait(_POLL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            tasks = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage is not None]
            if tasks:
                on_progress(sum(done for done, _ in tasks), sum(total for _, total in tasks))

    thread = threading.Thread(target=follow, name="cairn-tasks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _connect_progress(session: Any, on_progress: Callable[[int, int], None]) -> Iterator[None]:
    def handler(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        tasks = [(stage.num_completed_tasks, stage.num_tasks) for stage in stages or ()]
        if tasks and not done:
            on_progress(sum(ended for ended, _ in tasks), sum(total for _, total in tasks))

    session.registerProgressHandler(handler)
    try:
        yield
    finally:
        session.removeProgressHandler(handler)
