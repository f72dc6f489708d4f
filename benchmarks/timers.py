"""The cost of timers, without Spark: their registration, and their firing one interval later.

    python -m benchmarks.timers

The handler that fires is small and has a value state. The program prints CPU seconds and wall time for 2,058 sessions
with one timer each, for 100,000 such sessions, and for 1,000,000 timers on one key.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import LongType, StringType, StructField, StructType

from cairn.runners.keyed_runner import KeyedRunner
from cairn.runners.processor_handle import Clock, row_maker
from cairn.runners.user_code import UserCode
from cairn.shard_jobs.interval import rare_garbage_collection
from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import parse_struct
from state_backend.state.shard_state import ShardState
from state_backend.values.intervals import Interval
from state_backend.values.records import KeyGroupState, SchemaVersion, StateDescriptor

KEY = StructType([StructField("user", StringType())])
VALUE = StructType([StructField("n", LongType()), StructField("last", StringType())])
SESSION = StateDescriptor(
    name="session",
    kind="value",
    state_id=1,
    ttl_ms=None,
    versions=(SchemaVersion(version=1, value=VALUE.jsonValue(), user_key=None),),
)
KEY_GROUPS = 64
DUE_MS = 10_000_000


class Sessions(StatefulProcessor):
    """A session for each key. `begin` registers its timers, and each timer that fires adds 1 to the session's count."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._session = handle.getValueState("session", VALUE)

    def begin(self, timers: int) -> None:
        self._session.update((0, "begun"))
        for at_ms in range(timers):
            self._handle.registerTimer(at_ms)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        count, last = self._session.get()
        self._session.update((count + 1, last))
        yield count


class Discarded:
    """Output that is counted and discarded."""

    full = False

    def __init__(self) -> None:
        self.rows = 0

    def add(self, item: Any) -> None:
        self.rows += 1

    def settle(self) -> None:
        """Do nothing, because the rows are discarded."""

    def flush(self) -> None:
        """Do nothing, because the rows are discarded."""


class _Clock:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return f"{cpu:7.2f} s CPU, {wall:7.2f} s wall"


def run(keys: int, timers: int) -> None:
    """Register and fire `timers` timers for each of `keys` keys, and print the times."""
    begin = datetime(2024, 1, 1, tzinfo=UTC)
    interval = Interval(begin, begin + timedelta(hours=1))
    codec = KeyCodec(parse_struct(KEY.jsonValue()), struct_factory=row_maker)
    values = TimerValues(DUE_MS, 0)
    with (
        rare_garbage_collection(),
        tempfile.TemporaryDirectory() as work,
        RocksStore(Path(work) / "db") as store,
    ):

        def runner_of(groups: tuple[KeyGroupState, ...]) -> tuple[ShardState, KeyedRunner, Discarded]:
            state = ShardState(store, key_groups=groups, descriptors=[SESSION], now_ms=DUE_MS, struct_factory=row_maker)
            output = Discarded()
            runner = KeyedRunner(
                Sessions,
                state,
                codec,
                output,
                UserCode(interval, "timers"),
                Clock(mode="processing", now=values, expired=values, due_ms=DUE_MS),
            )
            return state, runner, output

        state, runner, _ = runner_of(())
        clock = _Clock()
        for n in range(keys):
            state.set_key(n % KEY_GROUPS, codec.encode((f"user-{n:06d}",)))
            runner._processor.begin(timers)
        state.flush()
        print(f"{keys:9,} keys x {timers:9,} timers: registered in {clock}", flush=True)
        state, runner, output = runner_of(state.key_group_states())
        clock = _Clock()
        runner.fire_timers()
        runner.close()
        total = keys * timers
        assert output.rows == total
        per_timer = (time.process_time() - clock._cpu) / total * 1e6
        print(f"{'':39} fired in {clock}: {per_timer:.1f} us CPU each", flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    for keys, timers in ((2_058, 1), (100_000, 1), (1, 1_000_000)):
        run(keys, timers)


if __name__ == "__main__":
    main()
