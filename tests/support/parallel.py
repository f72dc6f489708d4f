"""How xdist's workers share the tests: a worker takes whole files, because tests of a file share servers and sessions.

A few files would each keep one worker busy too long. Workers share the tests of such a file, by function and by value of the first parameter.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

OF_PROPERTIES = ("chunks", "commit_machine", "join_laws", "readers_agree", "ready_made_laws", "window_laws")
OF_SCENARIOS = ("chain_histories", "random_histories", "rescale_grid")
SPLIT = (
    *("tests/contract/test_sinks.py", "tests/conformance/test_zones.py"),
    *(f"tests/property/test_{name}.py" for name in OF_PROPERTIES),
    *(f"tests/scenarios/test_{name}.py" for name in OF_SCENARIOS),
)

# These share one Airflow (tests/integration/conftest.py), so one worker takes all of them.
ON_ONE_AIRFLOW = tuple(
    f"tests/integration/test_{name}.py" for name in ("airflow", "order_of_days", "openlineage", "corrections")
)


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """The scheduler of `--dist loadfile`, but several workers share the tests of the files in `SPLIT`."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def begin_with_airflow(items: list[pytest.Item]) -> None:
    """Run the tests of the shared Airflow first: they take longest and mostly wait, so the other workers of pytest use the cores."""
    items.sort(key=lambda item: group_of(item.nodeid) != ON_ONE_AIRFLOW[0])


def group_of(nodeid: str) -> str:
    """Return the name of the tests that one worker runs together with this test.

    Of the parameters `[postgres-55]` the first one belongs to the name.
    """
    file, _, test = nodeid.partition("::")
    if file in ON_ONE_AIRFLOW:
        return ON_ONE_AIRFLOW[0]
    if file not in SPLIT:
        return file
    function, _, parameters = test.partition("[")
    return f"{file}::{function}[{parameters.rstrip(']').partition('-')[0]}"
