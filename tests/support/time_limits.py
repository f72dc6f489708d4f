"""A time limit for each test: the process prints the stacks of all its threads and ends with exit code 1.

The watchdog of `faulthandler` is a thread of C, so the limit also holds while native code keeps the GIL. pytest's own option has one limit for
all tests, and takes the limit away once a test has failed, before the teardown.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

from tests.support.tiers import at_tier

STDERR = pytest.StashKey[int]()
# For each of a test's setup, call and teardown. The limits are far above what a busy machine takes; `all` has tests of a quarter of an hour.
LIMIT_S = at_tier(fast=180.0, ci=600.0, all=3600.0)


def pytest_configure(config: pytest.Config) -> None:
    # Later the descriptor belongs to the capture of a test's output.
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def _limited(item: pytest.Item) -> Generator[None, None, None]:
    limit_s = float(item.config.getini("faulthandler_timeout") or LIMIT_S)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _limited
