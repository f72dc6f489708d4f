"""Compare a replayed key with the committed one, and find the reason of a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from cairn.operations.intervals.what_changed import MadeOf, made_of, what_changed
from state_backend.inspection.key_entries import KeyEntries
from state_backend.inspection.state_diff import EntryChange, changes_of_group
from state_backend.values.frozen import frozen
from state_backend.values.records import Content


@frozen
class RowsDifference:
    known: bool = True
    only_committed: tuple[dict[str, Any], ...] = ()
    only_replayed: tuple[dict[str, Any], ...] = ()
    other_order: bool = False
    other_types: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not (self.only_committed or self.only_replayed or self.other_order or self.other_types)


@frozen
class Comparison:
    state: tuple[EntryChange, ...]
    output: RowsDifference
    late: RowsDifference

    @property
    def same(self) -> bool:
        """True if state, output and late rows are equal in values and types."""
        return not self.state and self.output.same and self.late.same


def compare_key(
    committed: KeyEntries,
    replayed: KeyEntries,
    group: int,
    output: tuple[pa.Table | None, pa.Table],
    late: tuple[pa.Table | None, pa.Table],
    *,
    ordered: bool,
) -> Comparison:
    """Return what differs between a key's committed and replayed results. `group`: The key's key group.

    `output`, `late`: (committed, replayed) rows. None for committed rows: they are unknown, so nothing is compared.
    `ordered`: Rows in another order differ.
    """
    return Comparison(
        state=tuple(changes_of_group(committed, replayed, group)),
        output=compare_rows(*output, ordered=ordered),
        late=compare_rows(*late, ordered=ordered),
    )


def compare_rows(committed: pa.Table | None, replayed: pa.Table, *, ordered: bool) -> RowsDifference:
    """Return rows that only one table has, and changed types. `committed`: None if unknown. `ordered`: Also order."""
    if committed is None:
        return RowsDifference(known=False)
    before, after = committed.to_pylist(), replayed.to_pylist()
    types = [
        f"{name}: {old.type} -> {new.type}"
        for name, old, new in _columns(committed, replayed)
        if before and after and old.type != new.type
    ]
    counts = Counter(map(repr, before)), Counter(map(repr, after))
    return RowsDifference(
        only_committed=_more(before, counts[0] - counts[1]),
        only_replayed=_more(after, counts[1] - counts[0]),
        other_order=ordered and counts[0] == counts[1] and [*map(repr, before)] != [*map(repr, after)],
        other_types=tuple(types),
    )


def _columns(first: pa.Table, second: pa.Table) -> list[tuple[str, pa.Field, pa.Field]]:
    both = [name for name in first.schema.names if name in second.schema.names]
    return [(name, first.schema.field(name), second.schema.field(name)) for name in both]


def _more(rows: Sequence[dict[str, Any]], counts: Counter[str]) -> tuple[dict[str, Any], ...]:
    left, found = Counter(counts), []
    for row in rows:
        if left[repr(row)] > 0:
            left[repr(row)] -= 1
            found.append(row)
    return tuple(found)


def reasons_for(content: Content, now: MadeOf, *, deterministic: bool) -> list[str]:
    """Return the possible reasons, as sentences, why a replay differs. `deterministic`: Two replays were equal."""
    found = [*what_changed(made_of(content), now)]
    if not deterministic:
        found.append("the processor is not deterministic: two replays of the same rows and state differ")
    if found:
        return found
    if not content.source_position:
        found.append("the source recorded no position, so Cairn can't tell whether it returned other rows")
    return found or [
        "code, source position and settings are equal, and two replays agree: the source returned other rows for the same position, "
        "or the processor depends on other keys, on files, or on the process that ran it"
    ]
