"""Which of the tasks that wait for a worker slot gets one: what the next interval waits for first, what may only wait last.

In Airflow's own order each process goes before each checkpoint: with several active runs and few slots all would be held by runs that wait.
"""

from __future__ import annotations

from typing import Any

COMMITS_FIRST: dict[str, Any] = {"weight_rule": "absolute", "priority_weight": 5}
THEN_VALIDATES = COMMITS_FIRST | {"priority_weight": 4}
THEN_PROCESSES = COMMITS_FIRST | {"priority_weight": 3}
