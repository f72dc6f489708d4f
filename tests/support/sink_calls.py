"""The sink calls that tests interrupt, and the marker of tests that need a system other than Delta."""

from __future__ import annotations

import pytest

# `make test-fast` runs the tests of Delta only.
SECONDS = pytest.mark.long("seconds for some tests of this table format", runs_in="ci")
# The methods of each sink that talk to the other system.
CALLS = {
    "bigquery": ["_read_stored", "_create_ids", "_fit", "_stage", "_write", "_drop"],
    "delta": ["_table", "_write"],
    "iceberg": ["_table", "_create", "_write"],
    "postgres": ["_lock", "_create_ids", "_read_stored", "_delete", "_fit", "_insert", "_store"],
}
