"""The pure decisions of snapshot and restore, as tables. Those of states: test_schema_evolution.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.shard.changelog_store import ChangelogOptions, kept_segments, plan_changelog
from state_backend.shard.restore import plan_restore
from state_backend.shard.snapshot import INLINE_FILE_BYTES, plan_snapshot
from state_backend.values.errors import InvariantViolated, StateUnusable, UsageError
from state_backend.values.handles import Handle
from state_backend.values.key_groups import KeyGroupRange, check_parallelism, check_whole, range_of, shard_of
from state_backend.values.records import LocalFile, Segment, ShardManifest

BIG = INLINE_FILE_BYTES + 1


def shared(name: str, size_bytes: int = BIG) -> LocalFile:
    return LocalFile(name=name, handle=Handle(path=f"shared/base/0-0-{name}", size_bytes=size_bytes, crc32c=1))


def manifest(first: int, last: int) -> ShardManifest:
    owned = KeyGroupRange(first=first, last=last)
    return ShardManifest(shard=first, key_groups=owned, files=(), inline_files=(), segments=(), key_group_states=())


@given(st.integers(1, 300), st.data())
def test_every_key_group_belongs_to_one_shard(max_parallelism: int, data: st.DataObject) -> None:
    """F68: ranges are contiguous, cover everything once, differ in size by at most one, and agree with ``shard_of``."""
    parallelism = data.draw(st.integers(1, max_parallelism))
    ranges = [range_of(shard, parallelism, max_parallelism) for shard in range(parallelism)]
    check_whole(ranges, max_parallelism)
    assert max(len(r) for r in ranges) - min(len(r) for r in ranges) <= 1
    for shard, owned in enumerate(ranges):
        for key_group in range(owned.first, owned.last + 1):
            assert shard_of(key_group, parallelism, max_parallelism) == shard


@pytest.mark.parametrize(("parallelism", "max_parallelism"), [(0, 1), (2, 1), (1, 32_769), (-1, 4)])
def test_impossible_parallelism_is_refused(parallelism: int, max_parallelism: int) -> None:
    with pytest.raises(UsageError, match="1 <= parallelism <= max_parallelism <= 32768"):
        check_parallelism(parallelism, max_parallelism)
    check_parallelism(1, 32_768)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (3, 2), (0, 32_768)])
def test_ranges_outside_the_key_groups_are_refused(first: int, last: int) -> None:
    with pytest.raises(UsageError, match="not a valid range"):
        KeyGroupRange(first=first, last=last)


def test_only_files_of_the_opened_base_are_shared() -> None:
    """F1, F37: a file is new unless this very store was opened from one of that name."""
    plan = plan_snapshot({"1.sst": BIG, "2.sst": BIG, "3.sst": 10}, [shared("1.sst")], inline_budget_bytes=100)
    assert (plan.shared, plan.inline, plan.upload) == ((shared("1.sst"),), ("3.sst",), ("2.sst",))


@pytest.mark.parametrize(
    ("sizes", "budget", "inline"),
    [
        ({"a": INLINE_FILE_BYTES}, 10**6, ("a",)),
        ({"a": BIG}, 10**6, ()),
        ({"a": 60, "b": 60}, 100, ("a",)),
        ({"a": 60, "b": 40, "c": 1}, 100, ("a", "b")),
        ({"a": 1}, 0, ()),
    ],
)
def test_small_files_are_inlined_within_the_budget(sizes: dict[str, int], budget: int, inline: tuple[str, ...]) -> None:
    """F66: below, at and above the threshold."""
    plan = plan_snapshot(sizes, [], inline_budget_bytes=budget)
    assert plan.inline == inline
    assert set(plan.inline) | set(plan.upload) == set(sizes)


def test_a_shared_file_of_another_size_is_a_bug() -> None:
    """S18: a name that stands for other bytes than the base's must never be shared."""
    with pytest.raises(InvariantViolated, match=r"1\.sst"):
        plan_snapshot({"1.sst": BIG + 1}, [shared("1.sst")], inline_budget_bytes=0)


def over_files(size_bytes: int, *segments: Segment) -> ShardManifest:
    return replace(manifest(0, 7), files=(shared("1.sst", size_bytes),) if size_bytes else (), segments=segments)


def segment(content_bytes: int, *, inline: bool = False) -> Segment:
    handle = None if inline else Handle(path="shared/base/0-0-0.log", size_bytes=5, crc32c=1)
    return Segment(handle=handle, data=b"x" if inline else None, changes=1, content_bytes=content_bytes)


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("base", "content_bytes", "as_segment"),
    [
        (over_files(0), 0, True),
        (over_files(100 * MIB), 10 * MIB, True),
        # More than max_bytes, alone or with what there is.
        (over_files(100 * MIB), 10 * MIB + 1, False),
        (over_files(100 * MIB, segment(4 * MIB), segment(4 * MIB)), 2 * MIB, True),
        (over_files(100 * MIB, segment(4 * MIB), segment(4 * MIB)), 2 * MIB + 1, False),
        # The recorder let go of it.
        (over_files(100 * MIB), None, False),
        # One more than max_segments.
        (over_files(100 * MIB, segment(1), segment(1)), 1, True),
        (over_files(100 * MIB, segment(1), segment(1), segment(1)), 1, False),
        # An inline one at the end is taken over: its bytes are in the new one's, and it is no longer there.
        (over_files(100 * MIB, segment(1), segment(1), segment(10 * MIB, inline=True)), 1, True),
        (over_files(100 * MIB, segment(1), segment(10 * MIB, inline=True), segment(1)), 1, False),
        # A share of the files; a little is always allowed.
        (over_files(8 * MIB), 2 * MIB, True),
        (over_files(8 * MIB), 2 * MIB + 1, False),
        (over_files(8 * MIB, segment(MIB)), MIB + 1, False),
        (over_files(1), 256 * 1024, True),
        (over_files(1), 256 * 1024 + 1, False),
        (over_files(0), 256 * 1024 + 1, False),
    ],
)
def test_changes_stay_segments_until_a_threshold(
    base: ShardManifest, content_bytes: int | None, as_segment: bool
) -> None:
    options = ChangelogOptions(max_bytes=10 * MIB, max_segments=3, max_share_of_state=0.25)
    assert plan_changelog(base, content_bytes, options) is as_segment


def test_a_changelog_threshold_of_zero_always_writes_files() -> None:
    for options in (ChangelogOptions(max_segments=0), ChangelogOptions(max_bytes=0)):
        assert plan_changelog(over_files(100 * MIB), 1, options) is False
    with pytest.raises(UsageError, match="changelog thresholds can't be negative"):
        ChangelogOptions(max_bytes=-1)


def test_only_an_inline_segment_at_the_end_is_taken_over() -> None:
    stored, inline = segment(1), segment(2, inline=True)
    assert kept_segments(over_files(0, stored, inline)) == (stored,)
    assert kept_segments(over_files(0, inline, stored)) == (inline, stored)
    assert kept_segments(over_files(0)) == ()


@pytest.mark.parametrize(
    ("target", "opened"), [((3, 6), (4, 7)), ((5, 12), (8, 12)), ((4, 11), (4, 7)), ((3, 12), (8, 12))]
)
def test_restore_opens_the_shard_with_most_of_the_key_groups(target: tuple[int, int], opened: tuple[int, int]) -> None:
    """F70, with Flink's golden cases: most of the range first; of equals, the one of which the larger part is wanted."""
    handles = [manifest(0, 3), manifest(4, 7), manifest(8, 12)]
    wanted = KeyGroupRange(first=target[0], last=target[1])
    first, *others = plan_restore(wanted, handles)
    assert (first.key_groups.first, first.key_groups.last) == opened
    assert {m.key_groups.first for m in others} == {
        m.key_groups.first for m in handles if m is not first and m.key_groups.intersect(wanted)
    }
    assert plan_restore(wanted, []) == []


@pytest.mark.parametrize("ranges", [[(0, 3)], [(0, 3), (5, 7)], [(0, 4), (4, 7)], [(1, 7)], [(0, 8)]])
def test_shards_that_leave_out_or_repeat_key_groups_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(StateUnusable):
        check_whole([KeyGroupRange(first=first, last=last) for first, last in ranges], 8)
