"""The shell: begin, prepare, commit, publish, clean up, over a storage that may die or lose an answer at any call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import commit_attempt, publish_output
from state_backend.checkpoint.end_of_log import missing_records
from state_backend.checkpoint.log import newest_interval, read_log, read_newest
from state_backend.checkpoint.record_reader import Fact, RecordReader, read_settled
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths, record_codec
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    CorruptRecord,
    Fenced,
    Rerun,
    SinkFailed,
    StaleStateError,
    StateGapError,
    StateUnusable,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.handles import FileInfo
from state_backend.values.marks import Settled
from state_backend.values.records import (
    FiledShard,
    OutputFile,
    Permissions,
    Prepared,
    Record,
    Segment,
    ShardChanges,
    ShardRef,
    Tombstone,
    own_run,
)
from state_backend.values.retention import AnyOf, KeepLast, KeepQuarantined
from tests.support.checkpoints import PIPELINE, Folder, content, day, run, sst, start_ms
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import FaultyStorage


def begin(folder: Folder, n: int, **permissions: bool) -> Any:
    return folder.coordinator.begin(day(n), permissions=Permissions(**permissions), pipeline_start_ms=start_ms())


def test_begin_is_not_durable() -> None:
    folder = Folder(days=1)
    before = folder.paths()
    begun = begin(folder, 2)
    assert (begun.h0, begun.base.id) == (1, 1)
    assert folder.paths() == before


def test_the_start_of_a_pipeline_cannot_change() -> None:
    folder = Folder(days=1)
    with pytest.raises(UsageError, match="start"):
        folder.coordinator.begin(day(2), permissions=Permissions(), pipeline_start_ms=start_ms() - 1)


def test_prepare_again_is_fine_with_the_same_content_only() -> None:
    folder = Folder()
    prepared = folder.prepare(day(1), "a1")
    folder.coordinator.prepare(prepared)
    with_tuple = Prepared(h0=0, content=content(day(1), "a2", source_position={"files": ("x", 1)}))
    for _ in range(2):
        folder.coordinator.prepare(with_tuple)
    assert folder.coordinator.load_prepared("a1") == prepared
    with pytest.raises(CairnError):
        folder.coordinator.prepare(Prepared(h0=0, content=content(day(1), "a1")))
    assert folder.coordinator.load_prepared("a1") == prepared


def test_a_commit_of_an_attempt_that_was_never_prepared_is_refused() -> None:
    with pytest.raises(CairnError, match="nobody"):
        Folder().coordinator.commit("nobody")


def test_a_commit_of_a_thousand_shards_makes_few_requests() -> None:
    """A state file, a manifest and an output of each: they are looked at by folder, and no manifest is read."""
    storage = MemoryStorage()
    Folder(storage).run(day(1), "a1")
    shards = range(1000)
    state = [storage.create(paths.shared("a2", n, 7, 0, "sst"), b"state") for n in shards]
    manifests = [storage.create(paths.shared("a2", n, 7, 0, "manifest"), b"not read") for n in shards]
    outputs = [OutputFile(handle=storage.create(paths.output(day(2), "a2", n, 7), b"rows"), rows=1) for n in shards]
    made = content(
        day(2),
        "a2",
        1,
        parallelism=1000,
        max_parallelism=4096,
        shards=tuple(FiledShard(shard=n, manifest=manifests[n]) for n in shards),
        outputs=tuple(outputs),
    )
    written = (*state, *manifests, *(o.handle for o in outputs))
    counted = FaultyStorage(storage, {})
    coordinator = Coordinator(counted, PIPELINE)
    coordinator.prepare(Prepared(h0=1, content=made, written=written))
    assert coordinator.commit("a2").outcome == "committed"
    # A store answers a listing with 1,000 names at a time.
    pages = sum(1 + len([*storage.list(path)]) // 1000 for method, path in counted.calls if method == "list")
    assert pages + sum(method != "list" for method, _ in counted.calls) <= 30
    assert len(storage.read(paths.record(2))) <= 64 * 1024

    storage.delete(manifests[500].path)
    with pytest.raises(CorruptFile, match="500-7-0"):
        commit_attempt._verify_written(storage, Prepared(h0=1, content=made, written=written))


def test_committing_again_is_a_no_op() -> None:
    folder = Folder()
    first = folder.run(day(1), "a1")
    before = folder.paths()
    again = folder.coordinator.commit("a1")
    assert (again.record, again.outcome) == (first.record, "already")
    assert folder.paths() == before


class WithoutChecksums(MemoryStorage):
    """Keeps no checksums, as a local disk."""

    def stat(self, path: str) -> FileInfo | None:
        info = super().stat(path)
        return None if info is None else replace(info, crc32c=None)


@pytest.mark.parametrize("damage", ["missing", "other bytes", "shorter", "shorter, without checksums"])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("suffix", ["sst", "log", "output"])
def test_a_new_file_that_is_not_as_acked_refuses_the_commit(damage: str, inline: bool, suffix: str) -> None:
    """F53 the other way round: a commit that can't be made names the file and deletes nothing."""
    storage = WithoutChecksums() if "without" in damage else None
    folder = Folder(storage, inline=inline, suffix="log" if suffix == "log" else "sst")
    folder.prepare(day(1), "a1")
    path = paths.output(day(1), "a1", 0, 0) if suffix == "output" else sst("a1", suffix)
    data = folder.storage.read(path)
    folder.storage.delete(path)
    if damage != "missing":
        folder.storage.create(path, data[::-1] if damage == "other bytes" else data[:-1])
    before = folder.paths()
    with pytest.raises(CorruptFile, match=path if damage == "missing" else f"{path}: expected {len(data)} bytes"):
        folder.coordinator.commit("a1")
    assert folder.paths() == before


class Before(FaultyStorage):
    """Lets something else happen just before the first read of a path."""

    def __init__(self, inner: MemoryStorage, path: str, action: Callable[[], object]) -> None:
        super().__init__(inner, {})
        self.path, self.action = path, action

    def read(self, path: str) -> bytes:
        if path == self.path:
            self.path = ""
            self.action()
        return super().read(path)


@pytest.mark.parametrize("head_moves", [True, False])
def test_a_clean_up_starts_again_if_a_concurrent_clean_up_deleted_its_manifest(head_moves: bool) -> None:
    """What its log retained was dropped and deleted by another: nothing is wrong. Without another it is."""
    folder = Folder(days=1, inline=False, policy=KeepLast(1))
    folder.run(day(2), "a2", keep=(sst("a1"),))
    folder.coordinator.publish(None)
    manifest_path = paths.shared("a2", 0, 0, 0, "manifest")

    def others() -> None:
        if not head_moves:
            folder.storage.delete(manifest_path)
            return
        folder.run(day(3), "a3")
        folder.publish_and_clean_up()

    slow = folder.over(Before(folder.memory, manifest_path, others))
    if head_moves:
        assert slow.clean_up().shrunk == ()
        assert folder.paths(paths.SHARED) == {sst("a3"), paths.shared("a3", 0, 0, 0, "manifest")}
    else:
        with pytest.raises(CorruptFile, match=manifest_path):
            slow.clean_up()


def test_fenced_deletes_its_own_files_and_only_those() -> None:
    """F33, F53, F55: a loser leaves nothing behind, and takes nothing with it."""
    folder = Folder(days=1)
    folder.prepare(day(2), "loser", keep=(sst("a1"),))
    folder.run(day(2), "winner", keep=(sst("a1"),))
    before = folder.paths()
    with pytest.raises(Fenced, match="checkpoint 2"):
        folder.coordinator.commit("loser")
    assert before - folder.paths() == {sst("loser"), paths.output(day(2), "loser", 0, 0), paths.prepared("loser")}


# --- lost answers and crashes ---------------------------------------------------------------------------------------------------


def scenario(inline: bool) -> Folder:
    """Three days, the second of them run again; the fourth is prepared. One is retained, so there is much to clean up."""
    folder = Folder(days=1, policy=KeepLast(1), inline=inline)
    folder.run(day(2), "a2", keep=(sst("a1"),))
    folder.run(day(3), "a3", keep=(sst("a2"),))
    folder.coordinator.publish(None)
    folder.prepare(day(4), "a4", keep=(sst("a3"),))
    return folder


def finish(coordinator: Any, hook: Callable[[Record], None] | None = None) -> None:
    coordinator.commit("a4")
    coordinator.publish(hook)
    coordinator.clean_up()


def state_of(storage: MemoryStorage) -> dict[str, bytes]:
    return {info.path: storage.read(info.path) for info in storage.list("")}


def test_a_hook_that_fails_runs_again() -> None:
    """F94: committed output is published by whoever comes next."""
    folder = Folder(days=1)

    def broken(record: Record) -> None:
        raise RuntimeError("sink is down")

    with pytest.raises(SinkFailed, match="RuntimeError: sink is down") as error:
        folder.coordinator.publish(broken)
    assert error.value.ids == {1} and isinstance(error.value.__cause__, RuntimeError)
    ran: list[int] = []
    assert folder.coordinator.publish(lambda r: ran.append(r.id)) == [(day(1), 1)]
    assert ran == [1]


class Refusing:
    """A sink that refuses the second day, as long as that is so."""

    def __init__(self) -> None:
        self.has: list[int] = []
        self.refuses = True

    def __call__(self, record: Record) -> None:
        if self.refuses and record.content.interval == day(2):
            raise ValueError("no partition for day 2")
        self.has.append(record.id)


@pytest.mark.parametrize("in_order", [False, True])
def test_an_interval_that_the_sink_refuses_holds_up_no_other_unless_order_matters(in_order: bool) -> None:
    folder, sink = Folder(), Refusing()
    for n in (1, 2, 3):
        folder.run(day(n), f"a{n}")
    with pytest.raises(SinkFailed, match="no partition for day 2") as error:
        folder.coordinator.publish(sink, in_order=in_order)
    assert sink.has == ([1] if in_order else [1, 3])
    assert error.value.ids == ({2, 3} if in_order else {2})
    # A commit further on: it is tried again, and what comes later is not held up by it either.
    folder.run(day(4), "a4")
    with pytest.raises(SinkFailed) as error:
        folder.coordinator.publish(sink, in_order=in_order)
    assert sink.has == ([1] if in_order else [1, 3, 4])
    assert (4 in error.value.ids) is in_order
    if in_order:
        with pytest.raises(UsageError, match="waits for the sink too"):
            folder.coordinator.publish(sink, in_order=in_order, only=[day(4).start])
    sink.refuses = False
    folder.coordinator.publish(sink, in_order=in_order, only=[day(2).start])
    assert sink.has == ([1, 2] if in_order else [1, 3, 4, 2])
    folder.coordinator.publish(sink, in_order=in_order)
    assert sorted(sink.has) == [1, 2, 3, 4] and folder.coordinator.unpublished() == []


def test_output_that_is_given_up_is_not_tried_again() -> None:
    folder, sink = Folder(), Refusing()
    for n in (1, 2):
        folder.run(day(n), f"a{n}")
    with pytest.raises(SinkFailed):
        folder.coordinator.publish(sink)
    with pytest.raises(
        UsageError, match=r"(?s)starts at 2024-01-09T.* has no unpublished output .* start at: 2024-01-02T00:00:00Z"
    ):
        publish_output.skip_publication(folder.coordinator.at, [day(2).start, day(9).start])
    folder.run(day(3), "a3")
    assert folder.coordinator.publish(None, of=3) == [(day(3), 3)] and folder.coordinator.unpublished() == [(day(2), 2)]
    assert publish_output.skip_publication(folder.coordinator.at, [day(2).start]) == [(day(2), 2)]
    assert folder.coordinator.publish(sink) == [] and sink.has == [1]


def test_a_re_run_is_published_again_under_its_own_id() -> None:
    folder = Folder(days=1)
    assert folder.coordinator.publish(None) == [(day(1), 1)]
    folder.run(day(1), "a2")
    assert folder.coordinator.publish(None) == [(day(1), 2)]
    assert folder.paths(paths.PUBLISHED) == {paths.published(day(1), 1), paths.published(day(1), 2)}


def test_segments_named_only_in_the_record_are_verified_retained_and_deleted() -> None:
    """The record names them, not the manifest's file: they must be there at commit, stay as long as a checkpoint needs them,
    and go with the last one, also when the file went before."""
    folder = Folder(days=1, policy=KeepLast(1), inline=False)
    old = {paths.shared("a1", 0, 0, 0, "manifest"), sst("a1")}
    logs: list[str] = []

    def over_a1(n: int) -> ShardRef:
        logs.append(paths.shared(f"a{n}", 0, 0, 1, "log"))
        folder.storage.create(logs[-1], b"changes")
        segments = tuple(Segment(handle=folder.handle(p), data=None, changes=1, content_bytes=7) for p in logs)
        changes = ShardChanges(segments=segments, key_group_states=())
        manifest = folder.handle(paths.shared("a1", 0, 0, 0, "manifest"))
        return FiledShard(shard=0, manifest=manifest, changes=changes)

    for n in (2, 3):
        folder.run(day(n), f"a{n}", shards=(over_a1(n),))
        folder.publish_and_clean_up()
        assert old | set(logs) <= folder.paths(paths.SHARED)
    folder.prepare(day(4), "a4", shards=(over_a1(4),))
    folder.storage.delete(logs[-1])
    with pytest.raises(CorruptFile, match=logs[-1]):
        folder.coordinator.commit("a4")
    folder.storage.delete(paths.shared("a1", 0, 0, 0, "manifest"))
    folder.run(day(4), "b4")
    folder.publish_and_clean_up()
    assert folder.paths(paths.SHARED).isdisjoint(logs)


def test_clean_up_shrinks_records_and_does_it_once() -> None:
    folder = scenario(inline=True)
    folder.coordinator.commit("a4")
    folder.coordinator.publish(None)
    first = folder.coordinator.clean_up()
    assert first.shrunk == (1, 2, 3)
    assert first.deleted_files > 0
    before = state_of(folder.memory)
    again = folder.coordinator.clean_up()
    assert (again.deleted_files, again.shrunk) == (0, ())
    assert state_of(folder.memory) == before
    assert all(len(before[paths.record(i)]) < 1024 for i in (1, 2, 3))


def test_output_outlives_its_checkpoint_until_the_interval_is_run_again() -> None:
    folder = scenario(inline=True)
    finish(folder.coordinator)
    log = folder.coordinator.log()
    assert isinstance(log.entries[2], Tombstone)
    old = paths.output(day(2), "a2", 0, 0)
    assert old in folder.paths()
    folder.run(day(1), "again")
    folder.coordinator.clean_up()
    assert paths.output(day(1), "a1", 0, 0) not in folder.paths()
    assert {old, paths.output(day(1), "again", 0, 0)} <= folder.paths()


@pytest.mark.parametrize("ends", ["by a person", "by the policy", "not"])
def test_a_quarantined_checkpoint_and_its_base_are_retained_until_dropped(ends: str) -> None:
    now_ms, policy = [0], AnyOf((KeepLast(2), KeepQuarantined(14)))
    folder = Folder(MemoryStorage(now_ms=lambda: now_ms[0]), days=2, policy=policy)
    folder.coordinator.quarantine(2, "wrong")
    if ends == "by a person":
        folder.coordinator.drop_quarantined(2)
    now_ms[0] += (14 if ends == "by the policy" else 13) * 86_400_000
    folder.run(day(2), "again")
    folder.run(day(3), "a3")
    assert [*folder.coordinator.log().retained] == ([1, 2, 3, 4] if ends == "not" else [3, 4])


def test_a_quarantined_checkpoint_with_a_missing_manifest_does_not_stop_a_clean_up() -> None:
    folder = scenario(inline=False)
    log = folder.coordinator.log()
    newest = log.head_id
    folder.coordinator.quarantine(newest, "its manifest is missing")
    for ref in log.whole(newest).content.shards:
        assert ref.manifest is not None
        folder.storage.delete(ref.manifest.path)
    assert folder.coordinator.clean_up().shrunk == (1, 2)


def test_failing_rows_go_with_their_quarantined_checkpoint() -> None:
    folder = Folder(days=1, policy=AnyOf((KeepLast(1), KeepQuarantined(0))))
    rows = folder.storage.create(f"{paths.failing('a1', 'check')}rows.parquet", b"rows").path
    folder.coordinator.quarantine(1, "wrong")
    folder.run(day(1), "again")
    folder.coordinator.publish(None)
    assert rows in folder.paths()
    folder.coordinator.clean_up()
    assert rows not in folder.paths()


def test_clean_up_keeps_files_that_no_record_names() -> None:
    """F41, S24: what no record names stays, for the sweeper to judge."""
    folder = scenario(inline=True)
    strays = {"shared/a1/stray.sst", "shared/inflight/0-0-0.sst", "output/x/a1/stray.parquet"}
    for path in strays:
        folder.storage.create(path, b"x")
    finish(folder.coordinator)
    assert strays <= folder.paths()


def test_each_missing_record_is_reported_and_an_unlisted_existing_record_is_not() -> None:
    folder = Folder(days=4)
    listed = [info.path for info in folder.storage.list("")]
    assert not [*missing_records(folder.storage, [path for path in listed if path != paths.record(3)])]
    folder.storage.delete(paths.record(2))
    mark = paths.published(day(4), 9)
    found = [*missing_records(folder.storage, [*(path for path in listed if path != paths.record(2)), mark])]
    assert found == [
        f"{paths.record(2)} is missing from the log, but later records exist",
        f"{paths.record(9)} is missing: {mark} refers to it, but the log ends at 4",
    ]


def test_a_record_under_another_name_is_refused() -> None:
    folder = Folder(days=1)
    folder.storage.create(paths.record(2), folder.storage.read(paths.record(1)))
    with pytest.raises(CorruptRecord, match="contains the record of another checkpoint, 1"):
        folder.coordinator.log()


def test_a_retained_checkpoint_is_found_by_latest_by_id_or_by_end() -> None:
    folder = Folder(days=3, policy=KeepLast(2))
    resolve = folder.coordinator.record
    assert [resolve(w).id for w in ("latest", 3, 2, day(2).end, day(3).end)] == [3, 3, 2, 2, 3]
    for absent in (1, 99, day(1).end, day(9).end):
        with pytest.raises(StateUnusable, match="Usable checkpoints: 2 "):
            resolve(absent)
    with pytest.raises(UsageError):
        resolve("newest")


def test_a_re_run_with_an_equal_state_does_not_end_the_quarantine_of_later_checkpoints() -> None:
    """Day 2 has a usable checkpoint again. Day 3 was computed from the quarantined one: it alone must run again. Retention keeps its
    checkpoint as the base of another quarantined one."""
    folder = Folder(days=4)
    folder.coordinator.quarantine(2, "wrong")
    folder.coordinator.quarantine(4, "wrong too")
    with pytest.raises(StateUnusable) as refused:
        folder.run(day(4), "b4")
    assert refused.value.rerun == Rerun(first=day(2).start, last=day(3).start)
    again = folder.run(day(2), "b2", digest=folder.coordinator.record(2).content.digest)
    assert again.record is not None and again.record.reproduces == 2
    with pytest.raises(
        StateUnusable, match="checkpoint 3, descends from checkpoint 2, which is quarantined"
    ) as refused:
        folder.run(day(4), "b4")
    assert refused.value.rerun == Rerun(first=day(3).start, last=day(3).start)
    folder.run(day(3), "b3")
    assert folder.run(day(4), "b4").record.content.base_id == 6


def test_latest_passes_over_what_is_quarantined_and_its_descendants() -> None:
    folder = Folder(days=3)
    folder.coordinator.quarantine(2, "wrong", ("total < 0",))
    folder.coordinator.quarantine(2, "wrong again")
    assert folder.coordinator.record("latest").id == 1
    assert folder.coordinator.record(3).id == 3  # by its id, for whoever looks into it
    with pytest.raises(StateUnusable, match="total < 0"):
        begin(folder, 4)


def test_clean_up_with_a_lost_manifest_deletes_no_shared_file() -> None:
    """A lost manifest of a retained checkpoint hides what it needs: files that a dropped one shares with it must stay."""
    folder = Folder(days=1, policy=KeepLast(1), inline=False)
    folder.run(day(2), "a2", keep=(sst("a1"),))
    folder.storage.delete(paths.shared("a2", 0, 0, 0, "manifest"))
    with suppress(CairnError):
        folder.publish_and_clean_up()
    assert sst("a1") in folder.paths()


@pytest.mark.parametrize("gone", [[], ["manifest"], ["manifest", "sst"]])
def test_a_fenced_attempt_also_deletes_files_that_only_its_manifest_names(gone: list[str]) -> None:
    """F53: the manifest names the attempt's other files, so it goes last; ``gone`` is what a try that crashed had deleted."""
    folder = Folder(days=1, inline=False)
    folder.prepare(day(2), "loser", run=run("other", 0, 1))
    folder.run(day(2), "winner")
    assert sst("loser") in folder.paths()
    for suffix in gone:
        folder.storage.delete(sst("loser") if suffix == "sst" else paths.shared("loser", 0, 0, 0, "manifest"))
    with pytest.raises(Fenced):
        folder.coordinator.commit("loser")
    left = {p for p in folder.paths() if "loser" in p}
    assert left == ({sst("loser")} if gone == ["manifest"] else set())


def test_a_dropped_checkpoint_does_not_take_the_place_of_a_usable_one() -> None:
    folder = Folder(days=2, policy=AnyOf((KeepLast(10), KeepQuarantined(0))))
    folder.run(day(2), "again", run=run("other"), digest=77)
    folder.coordinator.quarantine(3, "a test says so")
    folder.run(day(1), "a1 again", digest=folder.coordinator.record(1).content.digest)  # drops 3
    with pytest.raises(
        UsageError, match="its files are deleted, and it would replace checkpoint 2 of the same interval"
    ):
        folder.coordinator.release(3)
    assert begin(folder, 3).base.id == 2


def test_a_damaged_manifest_in_quarantine_costs_no_file_of_a_later_checkpoint() -> None:
    """Checkpoint 3 shares a file with 1, which is dropped. Only the manifests of 2 and 3 name this file, and that of 2 is lost."""
    folder = Folder(days=1, inline=False, policy=KeepLast(2))
    folder.run(day(2), "a2", keep=(sst("a1"),))
    folder.run(day(3), "a3", keep=(sst("a1"), sst("a2")))
    folder.storage.delete(paths.shared("a2", 0, 0, 0, "manifest"))
    folder.coordinator.quarantine(2, "its manifest is lost")
    folder.publish_and_clean_up()
    assert {1, 2, 3} - folder.coordinator.log().retained.keys() == {1}
    assert {sst("a1"), sst("a2"), sst("a3")} <= folder.paths()


# --- network disks list what was there some seconds ago ------------------------------------------------------------------------------


class StaleListing(MemoryStorage):
    """Lists nothing of ``unlisted``; whoever asks for a file by its name gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.unlisted: set[str] = set()

    def list(self, prefix: str) -> Iterator[FileInfo]:
        return (info for info in super().list(prefix) if info.path not in self.unlisted)


def stale_folder(*unlisted: int) -> tuple[Folder, StaleListing]:
    storage = StaleListing()
    folder = Folder(storage, days=4)
    folder.coordinator.publish(None)
    storage.unlisted = {paths.record(n) for n in unlisted}
    return folder, storage


@pytest.mark.parametrize("unlisted", [(2,), (1, 3), (1, 2, 3)])
def test_a_record_that_a_stale_listing_left_out_is_no_gap_in_the_log(unlisted: tuple[int, ...]) -> None:
    folder, storage = stale_folder(*unlisted)
    assert sorted(read_log(storage).entries) == [1, 2, 3, 4]
    assert folder.run(day(5), "a5").id == 5
    storage.delete(paths.record(unlisted[-1]))
    with pytest.raises(CorruptRecord, match=rf"{paths.record(unlisted[-1])} is missing from the log"):
        read_log(storage)


def test_a_newest_record_that_a_stale_listing_left_out_is_found_before_anything_is_refused() -> None:
    """The hosts of ``begin``, of ``commit``, of a reader and of a sweep do not list yet what another host committed."""
    folder, storage = stale_folder(3, 4)
    begun = begin(folder, 5)
    assert (begun.h0, begun.base and begun.base.id) == (4, 4)
    assert folder.coordinator.record(4).id == 4
    assert folder.coordinator.record(day(4).end).id == 4
    assert sweep(storage, PIPELINE, now_ms=0).plan.delete == ()
    folder.prepare(day(5), "a5")
    assert folder.coordinator.commit("a5").id == 5
    with pytest.raises(StateGapError, match="2024-01-06T00:00:00Z"):
        begin(folder, 7)


def test_a_file_that_a_stale_listing_left_out_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_attempt, "_FEW_FILES", 0)  # each folder is listed
    storage = StaleListing()
    folder = Folder(storage)
    folder.prepare(day(1), "a1")
    storage.unlisted = {sst("a1")}
    assert folder.coordinator.commit("a1").id == 1


def test_a_log_is_read_past_its_listed_end_if_the_end_is_a_tombstone() -> None:
    storage = StaleListing()
    folder = Folder(storage, days=3, policy=KeepLast(1))
    folder.publish_and_clean_up()
    assert isinstance(read_log(storage).entries[2], Tombstone)
    storage.unlisted = {paths.record(3)}
    assert read_log(storage).head_id == 3


def test_a_log_has_the_newest_interval_though_a_later_commit_drops_it_meanwhile() -> None:
    """Between the reads of the newest record, of a restore, and of the interval before, another process commits and cleans up."""
    folder = Folder(days=2, policy=KeepLast(2))
    folder.coordinator.rewind(1, run=own_run("back"), attempt="back")

    class Meanwhile(FaultyStorage):
        def read(self, path: str, *, offset: int = 0) -> bytes:
            if path == paths.record(2) and folder.coordinator.log().head_id == 3:
                folder.run(day(2), "a4")
                folder.run(day(3), "a5")
                folder.publish_and_clean_up()
            return super().read(path, offset=offset)

    newest = newest_interval(read_newest(Meanwhile(folder.storage, {})))
    assert isinstance(folder.coordinator.log().entries[2], Tombstone)
    assert newest is not None and newest.id == 5


# --- the same at any age ---------------------------------------------------------------------------------------------------------


def grown(intervals: int) -> Folder:
    folder = Folder(policy=KeepLast(3))
    for n in range(1, intervals + 1):
        folder.run(day(n), f"a{n}")
        folder.publish_and_clean_up()
    return folder


def requests_of_the_next(folder: Folder, n: int) -> dict[str, int]:
    """Requests of one more interval, and of looking at the newest checkpoints, each by a process of its own."""
    folder.prepare(day(n), f"a{n}")
    works: dict[str, Callable[[Coordinator], Any]] = {
        "begin": lambda c: c.begin(day(n), permissions=Permissions(), pipeline_start_ms=start_ms()),
        "commit": lambda c: c.commit(f"a{n}"),
        "publish": lambda c: c.publish(None),
        "clean up": lambda c: c.clean_up(),
        "list": lambda c: c.log().completed(),
    }
    counts = {}
    for name, work in works.items():
        counted = FaultyStorage(folder.storage, {})
        work(folder.over(counted))
        counts[name] = len(counted.calls)
    return counts


@pytest.mark.long("seconds", runs_in="ci")
def test_an_interval_makes_as_many_requests_in_an_old_pipeline_as_in_a_new_one() -> None:
    young, old = (requests_of_the_next(grown(n), n + 1) for n in (20, 200))
    assert all(abs(young[name] - old[name]) <= 8 for name in young), (young, old)
    assert old["begin"] <= 9 and old["commit"] <= 25 and old["publish"] <= 9 and old["clean up"] <= 21, old


def test_one_process_reads_a_retained_record_once() -> None:
    """What others commit meanwhile it sees all the same."""
    folder = grown(12)
    folder.prepare(day(13), "a13")
    counted = FaultyStorage(folder.storage, {})
    one = Coordinator(counted, PIPELINE, policy=KeepLast(3), remembers=True)
    one.commit("a13")
    one.publish(None)
    one.clean_up()
    assert len(counted.calls) <= 55
    read = [path for method, path in counted.calls if method == "read" and path.startswith(paths.CHECKPOINTS)]
    kept = [paths.record(n) for n in (11, 12)]
    assert [read.count(path) for path in kept] == [1, 1]
    folder.run(day(14), "a14")
    folder.run(day(13), "other")
    assert one.log() == folder.coordinator.log() and one.log().head_id == 15
    assert one.log().retained == folder.coordinator.log().retained
    with pytest.raises(StaleStateError):
        one.begin(day(15), permissions=Permissions(), pipeline_start_ms=start_ms())


def test_a_retried_commit_of_a_dropped_checkpoint_is_recognized_as_already_committed() -> None:
    folder = grown(12)
    assert folder.coordinator.commit("a1").outcome == "already"
    folder.storage.delete(paths.attempt_end("a1"))
    with pytest.raises(StateUnusable, match="did not finish"):
        folder.coordinator.commit("a1")


def test_a_lost_newest_record_is_noticed() -> None:
    folder = grown(5)
    folder.storage.delete(paths.HEAD)
    folder.run(day(6), "a6")
    assert folder.coordinator.log().hint == 6
    folder.storage.delete(paths.record(6))
    with pytest.raises(CorruptRecord, match=f"{paths.record(6)} is missing: {paths.HEAD} refers to it"):
        folder.coordinator.log()


@pytest.mark.parametrize("damage", [None, b"", b"\0" * 80, "flip", "format"])
def test_a_hint_that_is_lost_or_damaged_is_written_anew(damage: bytes | str | None) -> None:
    folder = grown(2)
    whole = folder.storage.read(paths.HEAD)
    folder.storage.delete(paths.HEAD)
    if damage is not None:
        data = whole.replace(b'"id":2', b'"id":3') if damage == "flip" else whole.replace(b'"format":1', b'"format":3')
        folder.storage.create(paths.HEAD, damage if isinstance(damage, bytes) else data)
    log = folder.coordinator.log()
    assert (log.head_id, log.hint) == (2, 0)
    folder.coordinator.clean_up()
    assert folder.storage.read(paths.HEAD) == whole


@pytest.mark.parametrize("damage", ["missing", "of another day", "an attempt's"])
def test_a_missing_or_misplaced_settled_file_is_refused(damage: str) -> None:
    folder = grown(5)
    past, fact = RecordReader(folder.storage, 5), Fact(day(1), 1, "interval")
    path = paths.settled(*fact)
    if damage == "an attempt's":
        path, other = paths.attempt_end("a1"), folder.storage.read(paths.attempt_end("a2"))
        folder.storage.delete(path)
        folder.storage.create(path, other)
        says, ask = "belongs to another attempt, a2\nPut the right file back", lambda: past.ended("a1")
    else:
        folder.storage.delete(path)
        if damage == "of another day":
            folder.storage.create(path, folder.storage.read(paths.settled(day(2), 2, "interval")))
        says = (
            "its content belongs to settled.*Put the right"
            if damage == "of another day"
            else "is missing\nTo write it again: cairn sweep"
        )
        ask = lambda: read_settled(folder.storage, fact)  # noqa: E731
    with pytest.raises(CorruptRecord, match=f"(?s){says}"):
        ask()


def test_a_read_of_output_that_a_re_run_replaced_meanwhile_fails_with_a_retry_hint() -> None:
    folder = grown(5)
    fact = Fact(day(1), 1, "interval")
    path = paths.settled(*fact)
    there = record_codec.decode(folder.storage.read(path), path, Settled)
    folder.storage.delete(path)
    folder.storage.create(path, record_codec.encode(replace(there, outputs=(), collected=True)))
    with pytest.raises(
        StorageUnavailable, match=r"a re-run replaced .*checkpoint 1, in .* during the read\nRead again"
    ):
        RecordReader(folder.storage, 5).outputs(fact)


def test_a_commit_or_sweep_that_always_loses_the_next_id_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others commit in between, again and again."""

    def taken(*_: Any) -> Any:
        raise AlreadyExists("another was faster")

    folder = Folder()
    folder.prepare(day(1), "a1")
    monkeypatch.setattr(commit_attempt, "append", taken)
    with pytest.raises(
        StorageUnavailable, match=r"nothing is committed, because .* faster .* times in a row; try again"
    ):
        folder.coordinator.commit("a1")
    monkeypatch.setattr("state_backend.checkpoint.sweep_files.append", taken)
    folder.storage.create(paths.shared("crashed", 0, 0, 0, "sst"), b"x")
    with pytest.raises(StorageUnavailable, match=r"nothing is deleted, because .* faster .* times in a row; try again"):
        sweep(folder.storage, PIPELINE, now_ms=4_102_444_800_000)
