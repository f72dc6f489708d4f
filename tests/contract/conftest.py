"""Fixtures of the contracts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres_server import postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL."""
    with postgres_server() as address:
        yield address
