"""Compare a trial with production: the result of each interval, and the rows and state entries that differ.

    interval   Equal digests mean equal state, and equal sizes and checksums mean equal rows: nothing more is read.
    rows       If the files differ, output and late output of both sides are read and compared, one interval at a time.
    state      If the digests differ, the state of the last interval that both sides retain is compared entry by entry.

The comparison reads production's present files. If production has run an interval again since the trial began, the
interval may differ for that reason. Different source positions are a sign of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from state_backend.checkpoint.log import Log
from state_backend.inspection.compare_logs import IntervalDifference, Made, compare_intervals, describe_interval
from state_backend.inspection.compare_tables import TableDifference, compare_tables
from state_backend.inspection.describe import start_and_end
from state_backend.inspection.state_diff import EntryChange, describe_change, diff_states
from state_backend.inspection.state_source import StateSource
from state_backend.ports.storage import Storage
from state_backend.state.layout import TIMERS_NAME
from state_backend.values.errors import CheckpointDropped, NotFound
from state_backend.values.frozen import frozen
from state_backend.values.intervals import Interval, format_instant
from state_backend.values.records import OutputFile

_EXPIRY = "expires at, in ms"


def compare_outputs(
    old: Storage, new: Storage, found: IntervalDifference, key: Sequence[str], work: Path, *, late: bool = False
) -> TableDifference:
    """Read and compare both sides' output rows (`late`: late rows) of an interval. `key`: a row's key columns."""
    assert found.old is not None and found.new is not None
    tables = [
        _read(storage, [f for f in made.outputs if f.late == late], work)
        for storage, made in ((old, found.old), (new, found.new))
    ]
    # A side without rows may have no file, and then no schema. It gets the other side's schema.
    if not tables[0].num_columns or not tables[1].num_columns:
        schema = (tables[0] if tables[0].num_columns else tables[1]).schema
        tables = [table if table.num_columns else schema.empty_table() for table in tables]
    return compare_tables(tables[0], tables[1], key if tables[0].num_columns else ())


def _read(storage: Storage, files: Iterable[OutputFile], work: Path) -> pa.Table:
    tables = []
    for file in files:
        local = work / "output.parquet"
        try:
            storage.download(file.handle, local)
        except NotFound as error:
            raise CheckpointDropped(
                f"a re-run replaced output during the comparison: {error}\nCompare again"
            ) from error
        tables.append(pq.read_table(local))
    return pa.concat_tables(tables) if tables else pa.table({})


def compare_states(old: StateSource, new: StateSource, work: Path, limit: int) -> list[dict[str, Any]]:
    """Compare two states entry by entry. Return the differences by state, with up to `limit` examples for each.

    Leases keep the files of both checkpoints during the comparison.
    """
    with ExitStack() as stack:
        for source in (old, new):
            stack.enter_context(source.held("a comparison"))
        return summarise_changes(diff_states(old, new, work), limit)


def summarise_changes(changes: Iterable[EntryChange], limit: int) -> list[dict[str, Any]]:
    """Count the changes by state and field. Return, for each state, the counts and up to `limit` changes.

    A timer that a key has at another time counts as changed, with the distance in ms as the change of `at_ms`.
    """
    counted: dict[str, _Counted] = {}
    for change in _with_moved_timers(changes):
        counted.setdefault(change.state, _Counted(limit)).add(change)
    return [found.describe(state) for state, found in counted.items()]


def _with_moved_timers(changes: Iterable[EntryChange]) -> Iterator[EntryChange]:
    """Replace a removed and an added timer of one key by one changed timer."""
    of_key: list[EntryChange] = []
    for change in changes:
        if of_key and (change.state != TIMERS_NAME or change.key != of_key[0].key):
            yield from _find_moved(of_key)
            of_key = []
        if change.state == TIMERS_NAME:
            of_key.append(change)
        else:
            yield change
    yield from _find_moved(of_key)


def _find_moved(of_key: Sequence[EntryChange]) -> Iterator[EntryChange]:
    gone, there = ([c for c in of_key if c.change == what] for what in ("removed", "added"))
    pairs = min(len(gone), len(there))
    for before, after in zip(gone[:pairs], there[:pairs], strict=True):
        yield replace(before, change="changed", after=after.after)
    yield from [*gone[pairs:], *there[pairs:]]


class _Counted:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts = dict.fromkeys(("added", "removed", "changed"), 0)
        self._fields: dict[str, _Sizes] = {}
        self._examples: list[dict[str, Any]] = []

    def add(self, change: EntryChange) -> None:
        self._counts[change.change] += 1
        if len(self._examples) < self._limit:
            self._examples.append(describe_change(change))
        if change.before is None or change.after is None:
            return
        values = change.before.value, change.after.value
        for name in dict.fromkeys([*values[0], *values[1]]):
            before, after = values[0].get(name), values[1].get(name)
            if repr(before) != repr(after):
                self._fields.setdefault(name, _Sizes()).add(before, after)
        if change.before.expiry_ms != change.after.expiry_ms:
            self._fields.setdefault(_EXPIRY, _Sizes()).add(change.before.expiry_ms, change.after.expiry_ms)

    def describe(self, state: str) -> dict[str, Any]:
        fields = [sizes.describe(name) for name, sizes in self._fields.items()]
        return {"state": state, **self._counts, "fields": fields, "examples": self._examples}


class _Sizes:
    def __init__(self) -> None:
        self._changed, self._numbers, self._sum, self._largest = 0, 0, 0.0, 0.0

    def add(self, before: Any, after: Any) -> None:
        self._changed += 1
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in (before, after)):
            by = abs(after - before)
            self._numbers, self._sum, self._largest = self._numbers + 1, self._sum + by, max(self._largest, by)

    def describe(self, name: str) -> dict[str, Any]:
        mean, largest = (self._sum / self._numbers, self._largest) if self._numbers else (None, None)
        return {"name": name, "changed": self._changed, "mean": mean, "largest": largest}


@frozen
class Comparison:
    intervals: tuple[IntervalDifference, ...]
    outputs: tuple[dict[str, Any], ...]
    late: tuple[dict[str, Any], ...]
    states: tuple[dict[str, Any], ...]
    # The last interval whose checkpoint both sides retain; None if there is no such interval.
    states_at: Interval | None

    @property
    def same(self) -> bool:
        states = all(i.state == "same" for i in self.intervals)
        return states and not self.outputs and not self.late and all(i.old and i.new for i in self.intervals)


def compare_runs(
    old: tuple[str, Log, Storage],
    new: tuple[str, Log, Storage],
    intervals: Sequence[Interval],
    work: Path,
    *,
    key: Sequence[str] = (),
    limit: int = 5,
    on_rows: Callable[[Interval, TableDifference], None] | None = None,
) -> Comparison:
    found = compare_intervals(old[1], new[1], intervals)
    outputs, late = list[dict[str, Any]](), list[dict[str, Any]]()
    work.mkdir(parents=True, exist_ok=True)
    for one in found:
        for answer, described, is_late in ((one.output, outputs, False), (one.late, late, True)):
            if answer != "other":
                continue
            rows = compare_outputs(old[2], new[2], one, () if is_late else key, work, late=is_late)
            if not rows.same:
                described.append(_rows(one.interval, rows, limit))
                if on_rows is not None and not is_late:
                    on_rows(one.interval, rows)
    both = [(i.interval, i.old, i.new) for i in found if i.old and i.new and i.old.state and i.new.state]
    states: list[dict[str, Any]] = []
    if both and both[-1][1].digest != both[-1][2].digest:
        states = compare_states(_source(old[0], both[-1][1]), _source(new[0], both[-1][2]), work / "states", limit)
    return Comparison(
        intervals=tuple(found),
        outputs=tuple(outputs),
        late=tuple(late),
        states=tuple(states),
        states_at=both[-1][0] if both else None,
    )


def _source(url: str, made: Made) -> StateSource:
    assert made.state is not None
    return StateSource.of_record(url, made.state)


def describe_comparison(found: Comparison) -> dict[str, Any]:
    return {
        "same": found.same,
        "intervals": [describe_interval(i) for i in found.intervals],
        "outputs": list(found.outputs),
        "late": list(found.late),
        "states_at": None if found.states_at is None else format_instant(found.states_at.end),
        "states": list(found.states),
    }


def _rows(interval: Interval, rows: TableDifference, limit: int) -> dict[str, Any]:
    return {
        **start_and_end(interval),
        "only_old": len(rows.only_old),
        "only_new": len(rows.only_new),
        "changed": len(rows.changed),
        "repeated_keys": rows.repeated,
        "columns": [asdict(column) for column in rows.columns],
        "columns_added": list(rows.added),
        "columns_removed": list(rows.removed),
        "columns_retyped": list(rows.retyped),
        "examples": rows.examples(limit),
    }
