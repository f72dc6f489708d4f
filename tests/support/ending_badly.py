"""Tests that end badly. No run collects them; tests/unit/test_runs_end.py names them on a command line of its own."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator

import pytest


def test_crash() -> None:
    # While the kernel writes a core file, the worker's pipes stay open, and pytest waits.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def test_hang_in_c() -> None:
    """A call of C that keeps the GIL, unlike `time.sleep`."""
    ctypes.PyDLL(None).sleep(300)


@pytest.fixture
def hangs_at_the_end() -> Iterator[None]:
    yield
    ctypes.PyDLL(None).sleep(300)


@pytest.mark.usefixtures("hangs_at_the_end")
def test_hang_after_a_failure() -> None:
    pytest.fail("pytest's own limit ends here")
