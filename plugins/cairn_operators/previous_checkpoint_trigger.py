"""The trigger that waits, without a worker slot, for the checkpoint of the interval before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from state_backend.adapters.schemes import is_over_network

_FIRST_LOOK_S = 1.0
# Seconds between two requests to Airflow. They are rarer than requests to the storage, because each one costs Airflow's
# API about 10 ms and only shows whether the awaited run has ended without a checkpoint.
_AIRFLOW_EVERY_S = 5.0
_SLOWEST_S = 2.0
_SHARE_OF_WAIT = 20


def pause_s(waited_s: float, poll_s: float, *, local: bool, slowest_s: float = _SLOWEST_S) -> float:
    """Return the pause in seconds before a trigger reads the storage again. `waited_s`: The wait so far.

    A read of a local file costs almost nothing, so the pause is always `poll_s`. An object store or Airflow's API
    charges each request, so there the pause grows: a twentieth of the wait so far, at least `poll_s` and at most
    `slowest_s`. So a trigger that has waited ten seconds notices the checkpoint at most half a second late, and later
    at most two seconds late.
    """
    return poll_s if local else max(poll_s, min(slowest_s, waited_s / _SHARE_OF_WAIT))


def committed_since(url: str, head_id: int) -> Iterator[tuple[int, Any]]:
    """Yield (id, entry) of each record that the log at `url` has after the record `head_id`, ascending by id."""
    from state_backend.adapters.open_storage import open_storage
    from state_backend.formats import paths, record_codec
    from state_backend.values.errors import NotFound
    from state_backend.values.records import Record, SweepRecord, Tombstone

    storage = open_storage(url)
    with suppress(NotFound):
        while True:
            path = paths.record(head_id + 1)
            entry: Any = record_codec.decode(storage.read(path), path, Record, SweepRecord, Tombstone)
            head_id += 1
            yield head_id, entry


class PreviousCheckpointTrigger(BaseTrigger):  # type: ignore[misc]  # Airflow is not type-checked here
    """The trigger that ends a task's wait for the checkpoint of the interval before.

    The trigger fires `{"why": text}` in one of these cases. The text names the case for the task log. The task then
    asks Airflow and reads the log again, and processes its interval, waits again or fails.

    1. An awaited run (`clear_numbers`) has committed the checkpoint that ends at `end_ms`. Without one, any run can.
    2. An awaited run ended without this checkpoint or was deleted, or a run of `queued` started.
    3. No run is awaited, since the checkpoint is stale, and a run of the DAG was queued: it may wait for the task's own
       run to end.
    4. The checkpoint that ends at `begins_ms` was committed: the awaited runs can now compute their interval. The task
       then waits for their commit in its worker slot, so it is already running at that moment.
    5. The time `until_ms` has come.

    The trigger asks a local storage for the next record every `poll_s` seconds, and an object store less and less often
    (`pause_s`). It asks Airflow every five seconds for the states of the runs' tasks. If the storage does not answer,
    the trigger asks again.
    """

    def __init__(
        self,
        *,
        url: str | None,
        head_id: int,
        end_ms: int,
        dag_id: str,
        clear_numbers: dict[str, int],
        task_ids: Sequence[str],
        queued: Sequence[str],
        until_ms: int,
        poll_s: float = 0.4,
        begins_ms: int | None = None,
    ) -> None:
        super().__init__()
        self.url = url
        self.head_id = head_id
        self.end_ms = end_ms
        self.dag_id = dag_id
        self.clear_numbers = clear_numbers
        self.task_ids = list(task_ids)
        self.queued = list(queued)
        self.until_ms = until_ms
        self.poll_s = poll_s
        self.begins_ms = begins_ms
        self._can_begin = False
        self._fewest_queued: int | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the path of this class and the arguments with which Airflow creates the trigger in the triggerer."""
        names = ["url", "head_id", "end_ms", "dag_id", "clear_numbers", "task_ids", "queued", "until_ms", "poll_s"]
        if self.begins_ms is not None:  # Left out if unused: during an upgrade, an older triggerer does not know it.
            names.append("begins_ms")
        return f"{type(self).__module__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then yield one event `{"why": text}`. The text says for the task log what ended the wait."""
        # The trigger waits a second before its first request. If it fired earlier, the scheduler might not have noticed
        # yet that the task was deferred, and would fail the task.
        began_s = time.monotonic()
        await asyncio.sleep(max(self.poll_s, _FIRST_LOOK_S))
        asked_s = -_AIRFLOW_EVERY_S
        local = self.url is not None and not is_over_network(self.url)
        while True:
            ask_airflow = self.url is None or time.monotonic() - asked_s >= _AIRFLOW_EVERY_S
            asked_s = time.monotonic() if ask_airflow else asked_s
            why = await self._look(ask_airflow)
            if why is not None:
                yield TriggerEvent({"why": why})
                return
            await asyncio.sleep(pause_s(time.monotonic() - began_s, self.poll_s, local=local))

    async def _look(self, ask_airflow: bool) -> str | None:
        if (
            self.url is not None
            and (checkpoint_id := await asyncio.to_thread(self.find_committed, self.url)) is not None
        ):
            return f"checkpoint {checkpoint_id} is committed"
        if self._can_begin:
            return "the interval before can begin"
        # This request does not run in a thread: all requests of a triggerer to Airflow share one channel, whose lock
        # works only in the event loop.
        if ask_airflow and (ended := await self._find_end()) is not None:
            return ended
        return "the longest wait is over" if time.time() * 1000 >= self.until_ms else None

    def find_committed(self, url: str) -> int | None:
        """Return the id of the awaited checkpoint; None if the log at `url` lacks it or the storage does not answer.

        Each call reads only the records that were added since the call before.
        """
        from state_backend.checkpoint.log import interval_of, run_of
        from state_backend.values.errors import RetryableError
        from state_backend.values.records import SweepRecord

        try:
            for n, entry in committed_since(url, self.head_id):
                self.head_id = n
                if isinstance(entry, SweepRecord):
                    continue
                run = run_of(entry)
                self._can_begin |= interval_of(entry).end_ms == self.begins_ms
                if interval_of(entry).end_ms != self.end_ms:
                    continue
                if not self.clear_numbers or self.clear_numbers.get(run.run_id) == run.clear_number:
                    return self.head_id
        except RetryableError as error:
            self.log.warning("the storage does not answer; the trigger asks again: %s", error)
        return None

    async def _find_end(self) -> str | None:
        """Return why the wait is over, for the task log; None if it goes on.

        The wait is over if an awaited run has started, ended or been deleted. Without awaited runs, it is over if
        another run of the DAG was queued.
        """
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from asgiref.sync import sync_to_async

        from cairn_operators.predecessor import is_unfinished

        runs = list(self.clear_numbers)
        if not runs:
            queued = await sync_to_async(RuntimeTaskInstance.get_dr_count)(dag_id=self.dag_id, states=["queued"])
            fewest = queued if self._fewest_queued is None else self._fewest_queued
            self._fewest_queued = min(queued, fewest)
            return "another run was queued" if queued > fewest else None
        states = await sync_to_async(RuntimeTaskInstance.get_task_states)(
            dag_id=self.dag_id, run_ids=runs, task_ids=self.task_ids
        )
        over = await sync_to_async(RuntimeTaskInstance.get_dr_count)(
            dag_id=self.dag_id, run_ids=runs, states=["success", "failed"]
        )
        if over:
            return f"{over} of these runs ended: {', '.join(runs)}"
        for run_id in runs:
            tasks = states.get(run_id)
            if tasks is None:
                return f"run {run_id} was deleted"
            if not is_unfinished(self.task_ids, tasks):
                return f"run {run_id} has ended: {tasks}"
            if run_id in self.queued and any(state is not None for state in tasks.values()):
                return f"run {run_id} has started"
        return None
