"""``python -m tests.support.large_values keys value_bytes kind``: a keyed runner over one batch of keys with large state, twice in
a row, in a process of its own. Prints the most memory that it took, in bytes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from cairn.rows.routing import INPUT, key_columns
from cairn.runners.input_rows import KeyedInput, row_slices
from cairn.runners.keyed_runner import KeyedRunner
from cairn.runners.processor_handle import Clock, row_maker
from cairn.runners.user_code import UserCode
from state_backend.adapters.rocks import RocksStore
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.key_columns import KeyColumns
from state_backend.formats.types import parse_struct
from state_backend.state.shard_state import ShardState
from state_backend.values.intervals import Interval
from state_backend.values.records import KeyGroupState, SchemaVersion, StateDescriptor

KEY = {"type": "struct", "fields": [{"name": "k", "type": "long", "nullable": True, "metadata": {}}]}
VALUE = {"type": "struct", "fields": [{"name": "b", "type": "binary", "nullable": True, "metadata": {}}]}
ELEMENTS = 4


class _Grows(StatefulProcessor):
    """Puts a number into each value's first bytes, which says how often it was written."""

    kind, value_bytes = "value", 0

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._value = handle.getValueState("value", "b binary") if self.kind == "value" else None
        self._list = handle.getListState("list", "b binary") if self.kind == "list" else None
        self._map = handle.getMapState("map", "k long", "b binary") if self.kind == "map" else None

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        part_bytes = self.value_bytes // ELEMENTS
        if self._value is not None:
            held = self._value.get()
            count = 1 if held is None else held[0][0] + 1
            self._value.update((bytes([count]) * self.value_bytes,))
        elif self._list is not None:
            counts = [element[0][0] for element in self._list.get()] or [0]
            count = counts[-1] + 1
            for _ in range(ELEMENTS):
                self._list.appendValue((bytes([count]) * part_bytes,))
        else:
            count = 1
            for (user_key,), (held,) in self._map.iterator():
                count = held[0] + 1
                self._map.updateValue((user_key,), (bytes([count]) * part_bytes,))
            for n in range(ELEMENTS if count == 1 else 0):
                self._map.updateValue((n,), (bytes([1]) * part_bytes,))
        self._handle.registerTimer(1)
        yield count

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        if self._value is not None:
            yield self._value.get()[0][0]


class _Output:
    full = False

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, item: Any) -> None:
        self.rows.append(item)

    def settle(self) -> None:
        pass

    def flush(self) -> None:
        """Nothing is held."""


def main(keys: int, value_bytes: int, kind: Any) -> None:
    _Grows.kind, _Grows.value_bytes = kind, value_bytes
    version = SchemaVersion(version=1, value=VALUE, user_key=KEY if kind == "map" else None)
    state_of = StateDescriptor(name=kind, kind=kind, state_id=1, ttl_ms=None, versions=(version,))
    numbers = pa.array(range(keys), pa.int64())
    columns = [numbers, pa.array([0] * keys, pa.int32()), pa.array([INPUT] * keys, pa.int32())]
    columns.append(pa.StructArray.from_arrays([numbers], names=["k"]))
    batch = pa.RecordBatch.from_arrays(columns, [key_columns(1)[0], "__key_group", "__kind", "__input"])
    codec = KeyCodec(parse_struct(KEY), struct_factory=row_maker)
    begin = datetime(2024, 1, 1, tzinfo=UTC)
    groups: tuple[KeyGroupState, ...] = ()
    with tempfile.TemporaryDirectory(prefix="cairn-test-") as work, RocksStore(Path(work) / "db") as store:
        for count in (1, 2):
            state = ShardState(store, key_groups=groups, descriptors=[state_of], now_ms=1, struct_factory=row_maker)
            output = _Output()
            runner = KeyedRunner(
                _Grows,
                state,
                codec,
                output,
                UserCode(Interval(begin, begin + timedelta(hours=1)), "large_values"),
                Clock(mode="processing", now=TimerValues(1, 0), expired=TimerValues(1, 0), due_ms=1),
            )
            slices = {INPUT: row_slices(StructType.fromJson(KEY))}
            runner.process(KeyedInput(iter([batch]), KeyColumns(codec.schema), slices, state))
            runner.fire_timers()
            runner.close()
            assert output.rows == [count] * (2 * keys if kind == "value" else keys), output.rows[:20]
            groups = state.key_group_states()
            per_key = {"value": 1, "map": ELEMENTS, "list": count * ELEMENTS}[kind]
            assert [g.entries for g in groups] == [{kind: keys * per_key}], groups
    # Not ru_maxrss: after exec it still counts what the process that started this one had.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
