"""Wait, without a worker slot, until another pipeline has committed what an interval reads."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NoReturn

from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.commit_checkpoint import command_to_clear
from cairn_operators.driver_operator import DriverOperator
from cairn_operators.failures import InputMissing, convert_errors
from cairn_operators.storage_connection import as_storage_identity

# With `storage_conn_id`, the trigger can't read the upstream's log. So the task itself wakes up and looks at the input:
# first after half a minute, later every five minutes.
_LOOKS = timedelta(seconds=30), timedelta(minutes=5)


class WaitingOperator(DriverOperator):
    """A task with a driver that waits, without a worker slot, for other pipelines whose output the driver reads."""

    wait_timeout: timedelta
    waited_for: str | None = None  # The input that the task waited for before, as JSON; None if it has not waited.

    def wait_since_ms(self, missing: InputMissing, since_ms: int) -> int:
        """Return `since_ms` if the same interval has waited before. Otherwise, return the present time."""
        from state_backend.chains.pin_inputs import Awaited
        from state_backend.values.operation_parameters import from_json

        before, now = (one and from_json(Awaited, one).reader for one in (self.waited_for, missing.awaited))
        return since_ms if before == now else time.time_ns() // 1_000_000

    def wait_for_input(self, context: Any, missing: InputMissing, since_ms: int) -> NoReturn:
        """Defer the task until the input that `missing` names is ready. Fail the task if `wait_timeout` is over.

        `since_ms`: When the task began to wait, in ms since the epoch. The trigger reads the upstream's log from the
        record on that the driver has seen last, so it misses no later commit.
        """
        from cairn_operators.upstream_trigger import UpstreamTrigger
        from state_backend.adapters.open_storage import join_url
        from state_backend.chains.pin_inputs import Awaited
        from state_backend.values.operation_parameters import from_json

        awaited: Awaited = from_json(Awaited, missing.awaited)
        now_ms = time.time_ns() // 1_000_000
        deadline_ms = since_ms + self.wait_timeout // timedelta(milliseconds=1)
        if now_ms >= deadline_ms:
            again = command_to_clear(context, self) if context["dag_run"].logical_date else "clear this task"
            raise AirflowFailException(
                f"waited {self.wait_timeout} for another pipeline: {missing}\nThen run this task again:\n{again}"
            )
        own, until_ms = self.storage_conn_id is None, deadline_ms
        if not own:
            first_ms, most_ms = (look // timedelta(milliseconds=1) for look in _LOOKS)
            until_ms = min(deadline_ms, now_ms + max(first_ms, min(most_ms, (now_ms - since_ms) // 4)))
        self.log.info("waiting, without a worker slot, for another pipeline: %s", missing)
        self.defer(
            trigger=UpstreamTrigger(
                awaited=missing.awaited,
                url=join_url(awaited.root, awaited.edge.pipeline) if own else None,
                head_id=awaited.head,
                until_ms=until_ms,
            ),
            method_name="after_input",
            kwargs={"since_ms": since_ms, "awaited": missing.awaited, "waits": str(missing)},
            timeout=timedelta(milliseconds=deadline_ms - now_ms) + timedelta(minutes=10),
        )
        raise AssertionError("deferring raises")

    def after_input(self, context: Any, event: Any, since_ms: int, awaited: str, waits: str) -> dict[str, Any]:
        """Continue the task when the trigger has fired: begin its work again, or wait again.

        `awaited`: The input, as JSON. `waits`: Text that says what the task waits for. Only Cairn's pages read it, from
        Airflow's database.
        """
        from state_backend.chains.pin_inputs import Awaited
        from state_backend.values.operation_parameters import from_json, to_json

        waited_s = time.time() - since_ms / 1000
        self.log.info("waited %.0f s for another pipeline: %s", waited_s, (event or {}).get("why"))
        if self.storage_conn_id is not None:
            with convert_errors(self), as_storage_identity(self.storage_conn_id):
                problem = from_json(Awaited, awaited).problem()
            if problem is not None:
                self.wait_for_input(
                    context, InputMissing(f"InputNotReady: {problem}", to_json(problem.awaited)), since_ms
                )
        self.waited_for = awaited
        return self.go_on(context, since_ms)

    def go_on(self, context: Any, since_ms: int) -> dict[str, Any]:
        """Do the task's work, and return its result. `since_ms`: When the task began to wait, in ms since the epoch."""
        raise NotImplementedError
