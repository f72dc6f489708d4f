"""The rules of forgotten keys: who would bring a key back, and when a forget may be committed. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from cairn.rows.forgotten_rows import ForgottenRows
from state_backend.checkpoint.choose_base import choose_base
from state_backend.checkpoint.decide_commit import Create, plan_commit
from state_backend.checkpoint.forgotten_keys import (
    check_rerun,
    forgets_of,
    is_free_of,
    is_key,
    key_hash,
    next_forgotten,
    returning_keys,
)
from state_backend.checkpoint.log import Log
from state_backend.formats import record_codec
from state_backend.formats.types import parse_struct
from state_backend.values.errors import BaseMoved, CorruptRecord, Fenced, UsageError
from state_backend.values.handles import Handle
from state_backend.values.marks import Quarantine
from state_backend.values.records import (
    Forget,
    ForgottenKey,
    OutputFile,
    Permissions,
    Prepared,
    Record,
    RewrittenOutput,
    Summary,
)
from tests.support.checkpoints import content, day, record, start_ms
from tests.support.log_in_memory import log_in_memory
from tests.support.shards import KEY_SCHEMA, KEYS

ENCODED, SALT = b"\x01u1\x00\x01", "a5" * 16


def key(forget: str = "f", *, until: int = 3, on_rerun: Any = "refuse", salt: str = SALT) -> ForgottenKey:
    """Return the key u1, forgotten up to the end of the day ``until``."""
    return ForgottenKey(
        forget=forget,
        salt=salt,
        key_hash=key_hash(salt, ENCODED),
        key_group=3,
        max_parallelism=16,
        until_ms=day(until).end_ms,
        on_rerun=on_rerun,
    )


def log_of(*records: Record, quarantined: tuple[int, ...] = ()) -> Log:
    """Return a log of these records."""
    marks = {n: Quarantine(id=n, reason="a test says so") for n in quarantined}
    return log_in_memory({r.id: r for r in records}, marks)


DAYS = tuple(record(n, day(n), n - 1 or None) for n in (1, 2, 3))
FORGET = record(4, day(3), 3, kind="forget", attempt="f", forget=Forget(keys=(key(),)))
FILTER = record(4, day(3), 3, kind="forget", attempt="f", forget=Forget(keys=(key(on_rerun="filter"),)))
REFUSED, FILTERED = log_of(*DAYS, FORGET), log_of(*DAYS, FILTER)


@pytest.mark.parametrize(
    ("start", "base", "rows", "old_base"),
    [
        (4, 4, False, False),  # the next day, from the forget
        (3, 2, True, True),  # the last day again
        (1, None, True, False),  # the first day again, from empty state
        (3, 5, True, False),  # a day of before, from a checkpoint that was made since
        (5, 3, False, True),  # a later day, from a checkpoint of before
        (None, 3, False, True),  # a rewind
        (None, 4, False, False),
        (None, None, False, False),
    ],
)
def test_reruns_may_bring_a_forgotten_key_back(start: int | None, base: int | None, rows: bool, old_base: bool) -> None:
    found = returning_keys(REFUSED, day(start).start_ms if start is not None else None, base)
    assert [(r.rows, r.base) for r in found] == ([(rows, old_base)] if rows or old_base else [])


def test_a_rerun_is_refused_at_begin_only_under_the_policy_refuse() -> None:
    check_rerun(FILTERED, "p", day(2), 1)
    with pytest.raises(UsageError, match="cairn erase --pipeline p --on-rerun filter JSON"):
        check_rerun(REFUSED, "p", day(2), 1)
    for n, base in ((1, None), (2, 1)):
        found = choose_base(FILTERED, "p", day(n), Permissions(), start_ms())
        assert (found.id if found is not None else None) == base
        with pytest.raises(UsageError, match="removed a key with checkpoint 4"):
            choose_base(REFUSED, "p", day(n), Permissions(), start_ms())
    chosen = choose_base(REFUSED, "p", day(4), Permissions(), start_ms())
    assert chosen is not None and chosen.id == 4


def prepared(n: int, base: int | None, h0: int = 4, **changes: Any) -> Prepared:
    return Prepared(h0=h0, content=content(day(n), "x", base, **changes))


@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        (prepared(4, 4), None),
        (prepared(4, 3, 3), "it started from checkpoint 3, but the interval now starts from checkpoint 4"),
        (prepared(2, 1), "checkpoint 1, which is older, may still hold the key"),
        (prepared(2, 1, filtered=("another",)), "may still hold the key"),
        (prepared(2, 1, filtered=("f",)), None),
        (prepared(1, None), "rows of before 2024-01-04T00:00:00Z may bring the key back"),
        (prepared(1, None, filtered=("f",)), None),
        (prepared(2, 2, kind="restore"), "may still hold the key"),
        (prepared(3, 4, kind="restore"), None),
        (prepared(3, None, kind="restore"), "the restored state may hold the key"),
        (prepared(3, None, kind="restore", forget=Forget(keys=(key(),))), None),
        (prepared(3, None, kind="restore", forget=Forget(keys=(key("again", until=5),))), None),
        (prepared(3, None, kind="restore", forget=Forget(keys=(key("g", until=2),))), "may hold the key"),
        (prepared(2, 2, kind="consolidate"), "may still hold the key"),
        (prepared(3, 4, kind="consolidate"), None),
        (prepared(3, 4, kind="forget", forget=Forget(keys=(key("g"),))), None),
        (prepared(3, 3, kind="forget", forget=Forget(keys=(key("g"),))), "not the newest state any more"),
    ],
)
def test_a_commit_that_may_bring_a_forgotten_key_back_is_refused(attempt: Prepared, refusal: str | None) -> None:
    if refusal is None:
        assert isinstance(plan_commit(FILTERED, attempt), Create)
    else:
        with pytest.raises(BaseMoved, match=refusal):
            plan_commit(FILTERED, attempt)


def test_a_forget_fences_a_re_run_of_its_own_interval() -> None:
    with pytest.raises(Fenced, match="committed checkpoint 4"):
        plan_commit(REFUSED, prepared(3, 2, h0=3))


def test_a_forget_drops_the_checkpoints_it_names_and_makes_no_checkpoint_stale() -> None:
    drops, log = Forget(keys=(key(),), drops=(2, 3)), log_of(*DAYS, record(4, day(4), 3), quarantined=(4,))
    decision = plan_commit(log, prepared(3, 3, kind="forget", forget=drops), protected=frozenset({4}))
    assert isinstance(decision, Create)
    assert [(r.id, r.stale_by) for r in decision.record.retained] == [(1, None), (4, None), (5, None)]
    assert decision.record.reproduces is None


def test_a_forget_is_refused_if_a_later_checkpoint_was_committed_meanwhile() -> None:
    log = log_of(*DAYS, record(4, day(1), reproduces=1))  # the newest state is still that of day 3
    with pytest.raises(BaseMoved, match="checkpoint 4 was committed meanwhile"):
        plan_commit(log, prepared(3, 3, h0=3, kind="forget", forget=Forget(keys=(key(),))))


def test_a_key_forgotten_again_replaces_its_earlier_entry() -> None:
    before = REFUSED.summary
    again = record(6, day(5), 5, kind="forget", forget=Forget(keys=(key("g", until=5, on_rerun="filter"),)))
    (found,) = next_forgotten(before, again)
    assert (found.id, found.key.forget, found.key.on_rerun) == (6, "g", "filter")
    other = record(6, day(5), 5, kind="forget", forget=Forget(keys=(key("g", salt="00" * 16),)))
    assert len(next_forgotten(before, other)) == 2
    restored = record(6, day(5), None, kind="restore", forget=Forget(keys=(key(),)))
    assert next_forgotten(before, restored) == before.forgotten
    later = record(6, day(5), None, kind="restore", forget=Forget(keys=(key("g", until=5),)))
    assert [(f.id, f.key.forget) for f in next_forgotten(before, later)] == [(6, "g")]
    assert next_forgotten(Summary(), restored)[0].id == 6
    assert next_forgotten(before, record(5, day(4), 4)) == before.forgotten


def test_a_copied_checkpoint_lists_the_keys_forgotten_before_the_copy() -> None:
    assert forgets_of(DAYS[2]) is None
    later = record(5, day(4), 4)
    later = replace(later, summary=replace(later.summary, forgotten=next_forgotten(Summary(), FORGET)))
    assert forgets_of(later) == Forget(keys=(key(),))


def test_only_the_forget_and_filtered_reruns_are_free_of_the_forgotten_key() -> None:
    log = log_of(*DAYS, FORGET, record(5, day(2), 1, filtered=("f",)), record(6, day(4), 4))
    free = {n: is_free_of(log, log.whole(n), ENCODED) for n in range(1, 7)}
    assert free == {1: False, 2: False, 3: False, 4: True, 5: True, 6: False}
    assert not is_free_of(log, log.whole(4), b"another")


def test_a_record_of_a_forget_is_decoded_strictly() -> None:
    file = OutputFile(handle=Handle(path="output/x/f/part-0.parquet", size_bytes=1, crc32c=2), rows=1)
    rewritten = RewrittenOutput(id=1, interval=day(1), outputs=(file,), replaces=("output/x/a1/part-0.parquet",))
    made = record(4, day(3), 3, kind="forget", forget=Forget(keys=(key(),), drops=(2,), rewritten=(rewritten,)))
    made = replace(made, summary=replace(made.summary, forgotten=next_forgotten(Summary(), made)))
    data = record_codec.encode(made)
    assert record_codec.decode(data, "p", Record) == made
    assert b"u1" not in data
    negative = replace(made, content=replace(made.content, forget=Forget(keys=(replace(key(), key_group=-1),))))
    with pytest.raises(CorruptRecord, match="key_group is -1"):
        record_codec.decode(record_codec.encode(negative), "p", Record)
    old = replace(made, content=replace(made.content, forget=Forget(keys=(replace(key(), until_ms=-5),))))
    assert record_codec.decode(record_codec.encode(old), "p", Record) == old


def test_a_salt_makes_another_hash() -> None:
    assert is_key(key(), ENCODED) and not is_key(key(), b"\x01u2\x00\x01")
    assert key_hash("00", ENCODED) != key_hash("01", ENCODED)


@pytest.mark.parametrize("max_parallelism", [16, 32])
def test_rows_of_a_forgotten_key_are_left_out_whatever_the_key_groups_are(max_parallelism: int) -> None:
    """A restored savepoint may have other key groups than at the time of the forget of u1; u4 is forgotten since."""
    first, since = (replace(key(), key_hash=key_hash(SALT, KEYS.encode((user,)))) for user in ("u1", "u4"))
    groups = pa.array([3, 3, 3, 5] if max_parallelism == 16 else [19, 3, 19, 21], pa.int32())
    rows = pa.RecordBatch.from_arrays([groups, pa.array(["u1", "u2", "u1", "u3"])], names=["__key_group", "__key_0"])
    both = [first, replace(since, max_parallelism=max_parallelism)]
    left = ForgottenRows(both, parse_struct(KEY_SCHEMA), max_parallelism).without(rows)
    assert left.column("__key_0").to_pylist() == ["u2", "u3"]
