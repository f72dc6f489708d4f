"""The trigger that waits, without a worker slot, for what an interval reads of another pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from cairn_operators.previous_checkpoint_trigger import committed_since, pause_s

_FIRST_LOOK_S = 1.0
_SLOWEST_S = 30.0
# Seconds after which the trigger judges the input again although the upstream has committed nothing: an input also
# becomes ready when a person lifts a quarantine, or when the upstream's own input gets its old content back.
_JUDGE_EVERY_S = 300.0


class UpstreamTrigger(BaseTrigger):  # type: ignore[misc]  # Airflow is not type-checked here
    """The trigger that ends a task's wait for what it reads of another pipeline, the upstream.

    The trigger asks for the next record of the upstream's log, one request each time, at first every second and later
    every 30 seconds. After a new record, it checks whether the input is ready. It fires `{"why": text}` if the input is
    ready, if the check fails for good, or at the time `until_ms`. If the storage does not answer, it asks again.

    Args:
        awaited: The input, a `state_backend.chains.pin_inputs.Awaited`, as JSON.
        url: URL of the upstream's log. None: the trigger can't read the log, and fires at `until_ms`.
        head_id: Id of the last record of the upstream's log that the task has seen.
        until_ms: The time, in ms since the epoch, at which the trigger fires at the latest.
    """

    def __init__(self, *, awaited: str, url: str | None, head_id: int, until_ms: int) -> None:
        super().__init__()
        self.awaited, self.url, self.head_id, self.until_ms = awaited, url, head_id, until_ms
        self._judged_s, self._due = time.monotonic(), False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the path of this class and the arguments with which Airflow creates the trigger in the triggerer."""
        names = ("awaited", "url", "head_id", "until_ms")
        return f"{type(self).__module__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then yield one event `{"why": text}`. The text says for the task log what ended the wait."""
        began_s, pause = time.monotonic(), _FIRST_LOOK_S
        while True:
            left_s = self.until_ms / 1000 - time.time()
            # The trigger never fires within the first second, for the reason in `PreviousCheckpointTrigger.run`.
            await asyncio.sleep(max(_FIRST_LOOK_S, min(pause, left_s)))
            why = await asyncio.to_thread(self.find_end, self.url) if self.url is not None else None
            if why is None and time.time() * 1000 >= self.until_ms:
                why = "it is time to look again"
            if why is not None:
                yield TriggerEvent({"why": why})
                return
            pause = pause_s(time.monotonic() - began_s, _FIRST_LOOK_S, local=False, slowest_s=_SLOWEST_S)

    def find_end(self, url: str) -> str | None:
        """Return why the wait is over, for the task log; None if it goes on. `url`: Address of the upstream's log."""
        from state_backend.chains.pin_inputs import Awaited
        from state_backend.values.errors import CairnError, RetryableError
        from state_backend.values.operation_parameters import from_json

        self._due |= time.monotonic() - self._judged_s >= _JUDGE_EVERY_S
        try:
            for n, _ in committed_since(url, self.head_id):
                self.head_id, self._due = n, True
            if not self._due:
                return None
            awaited: Awaited = from_json(Awaited, self.awaited)
            problem = awaited.problem()
            self._judged_s, self._due = time.monotonic(), False
            return f"{awaited.edge.pipeline} has what the interval reads" if problem is None else None
        except RetryableError as error:
            self.log.warning("the storage does not answer; the trigger asks again: %s", error)
            return None
        except CairnError as error:  # The wait ends: the task's driver meets the same error, and fails with it.
            return str(error)
