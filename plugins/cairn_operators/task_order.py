"""Priorities for worker slots: first the tasks that the next interval waits for, then validation, then processing.

By default Airflow starts each `process` task before each `checkpoint` task. With several active runs and few slots,
`process` tasks that wait for a checkpoint would then hold all slots, and the `checkpoint` task could not start.
"""

from __future__ import annotations

from typing import Any

COMMITS_FIRST: dict[str, Any] = {"weight_rule": "absolute", "priority_weight": 5}
THEN_VALIDATES = COMMITS_FIRST | {"priority_weight": 4}
THEN_PROCESSES = COMMITS_FIRST | {"priority_weight": 3}
