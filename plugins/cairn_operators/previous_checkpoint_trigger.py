"""Waits, without a worker slot, until something has become of the runs that an interval waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from state_backend.adapters.schemes import is_over_network

_FIRST_LOOK_S = 1.0
# The storage says what is waited for; Airflow only whether the wait is in vain. Each answer costs its API some 10 ms.
_AIRFLOW_EVERY_S = 5.0
_SLOWEST_S = 2.0
_SHARE_OF_WAIT = 20


def pause_s(waited_s: float, poll_s: float, *, local: bool) -> float:
    """Seconds to the next look, after a wait of ``waited_s``. ``local``: a look is a file's, and costs nothing. A look at an object
    store, or at Airflow's API alone, costs a request: there it comes ever later, by a twentieth of the wait and by two seconds
    at most. So a wait of up to ten seconds is over within half a second of what it waits for, a longer one within two."""
    return poll_s if local else max(poll_s, min(_SLOWEST_S, waited_s / _SHARE_OF_WAIT))


class PreviousCheckpointTrigger(BaseTrigger):  # type: ignore[misc]  # Airflow is not type-checked here
    """Fires ``{"why": ...}`` once one of the runs has committed the checkpoint that ends at ``end_ms``, once their tasks have
    ended in another way, or at ``until_ms``. What follows from it, the task decides: it looks at everything again.

    Every ``poll_s`` seconds, ever later on an object store (``pause_s``), it asks the storage for the next record (one look-up by name;
    it reads those that are there), and every five seconds Airflow for the states of the runs' tasks. Storage that does not answer is
    asked again. Without a ``url`` it asks Airflow only, at each look.
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

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """As Airflow's: where the class is, and its arguments."""
        names = ["url", "head_id", "end_ms", "dag_id", "clear_numbers", "task_ids", "queued", "until_ms", "poll_s"]
        return f"{type(self).__module__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event, with the reason, when the wait is over."""
        # Airflow may fail a task that goes on before its scheduler has noticed that it was deferred.
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
        if self.url is not None and (checkpoint_id := await asyncio.to_thread(self.committed, self.url)) is not None:
            return f"checkpoint {checkpoint_id} is there"
        # Airflow's answers come through one channel of the triggerer, which has an async lock: not from a thread of ours.
        if ask_airflow and (ended := await self._ended()) is not None:
            return ended
        return "time is up" if time.time() * 1000 >= self.until_ms else None

    def committed(self, url: str) -> int | None:
        """The id of the checkpoint that is waited for; goes on where the last look ended."""
        from state_backend.adapters.open_storage import open_storage
        from state_backend.checkpoint.log import interval_of, run_of
        from state_backend.formats import paths, record_codec
        from state_backend.values.errors import NotFound, RetryableError
        from state_backend.values.records import Record, SweepRecord, Tombstone

        storage = open_storage(url)
        try:
            while True:
                path = paths.record(self.head_id + 1)
                entry: Any = record_codec.decode(storage.read(path), path, Record, SweepRecord, Tombstone)
                self.head_id += 1
                if isinstance(entry, SweepRecord):
                    continue
                run = run_of(entry)
                if interval_of(entry).end_ms != self.end_ms:
                    continue
                if self.clear_numbers.get(run.run_id) == run.clear_number:
                    return self.head_id
        except NotFound:
            return None
        except RetryableError as error:
            self.log.warning("the storage does not answer, it is asked again: %s", error)
            return None

    async def _ended(self) -> str | None:
        """What became of the runs in Airflow, if they are no longer what the task has seen: started, ended, or gone."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from asgiref.sync import sync_to_async

        from cairn_operators.predecessor import is_unfinished

        runs = list(self.clear_numbers)
        states = await sync_to_async(RuntimeTaskInstance.get_task_states)(
            dag_id=self.dag_id, run_ids=runs, task_ids=self.task_ids
        )
        over = await sync_to_async(RuntimeTaskInstance.get_dr_count)(
            dag_id=self.dag_id, run_ids=runs, states=["success", "failed"]
        )
        if over:
            return f"{over} of {', '.join(runs)} ended"
        for run_id in runs:
            tasks = states.get(run_id)
            if tasks is None:
                return f"{run_id} is gone"
            if not is_unfinished(self.task_ids, tasks):
                return f"{run_id} has ended: {tasks}"
            if run_id in self.queued and any(state is not None for state in tasks.values()):
                return f"{run_id} has started"
        return None
