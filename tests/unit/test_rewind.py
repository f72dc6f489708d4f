"""Going back within a pipeline, and going on from it under another name, without Spark."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any, Literal

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.commit_attempt import CommitResult
from state_backend.checkpoint.leases import take_lease
from state_backend.checkpoint.log import facts_of_entries, read_whole_log
from state_backend.checkpoint.rewind import Discarded, fork, plan_rewind
from state_backend.checkpoint.savepoints import claim_savepoint
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import (
    CheckpointDropped,
    CorruptFile,
    Fenced,
    Rerun,
    StaleStateError,
    StateUnusable,
    Swept,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.handles import handles_in
from state_backend.values.intervals import Interval
from state_backend.values.marks import Claim
from state_backend.values.records import FiledShard, InlineShard, Permissions, Record, Segment, ShardChanges, Tombstone
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import Folder, day, files_in, run, sst, start_ms
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import FaultyStorage, StopHere, lost_answer_at, stop_at
from tests.support.savepoints import SmallPipeline, findings
from tests.support.tiers import long_after

When = Literal["before", "after"]
STALE, QUARANTINED = Permissions(allow_stale_base=True), Permissions(allow_quarantined=True)


def history(**options: Any) -> Folder:
    """Days 1 to 4, each sharing the file of the day before."""
    folder = Folder(**options)
    suffix = folder.suffix
    for n in range(1, 5):
        folder.run(day(n), f"a{n}", keep=(sst(f"a{n - 1}", suffix),) if n > 1 else ())
    folder.coordinator.publish(None)
    return folder


def back(
    folder: Folder, target: int, attempt: str = "back", over: Storage | None = None, **options: Any
) -> CommitResult:
    coordinator = folder.coordinator if over is None else folder.over(over)
    return coordinator.rewind(target, run=run("rewind"), attempt=attempt, **options)


def base_of(folder: Folder, n: int, **permissions: bool) -> int | None:
    begun = folder.coordinator.begin(day(n), permissions=Permissions(**permissions), pipeline_start_ms=start_ms())
    return begun.base.id if begun.base else None


@pytest.mark.parametrize("suffix", ["sst", "log"])
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "manifest files"])
def test_a_rewind_references_its_target_and_makes_the_rest_stale(inline: bool, suffix: str) -> None:
    folder = history(inline=inline, suffix=suffix)
    before = folder.paths()
    result = back(folder, 2)
    record = result.record
    assert record is not None and (result.id, result.outcome) == (5, "committed")
    target = folder.coordinator.record(2).content
    made = record.content
    assert (made.kind, made.base_id, made.interval, made.outputs) == ("restore", 2, day(2), ())
    assert (made.shards, made.digest, made.time, made.source_position, made.states) == (
        target.shards,
        target.digest,
        target.time,
        target.source_position,
        target.states,
    )
    assert folder.paths() - before == {paths.record(5), paths.prepared("back")}
    assert {r.id: r.stale_by for r in record.retained} == {1: None, 2: None, 3: 5, 4: 5, 5: None}
    assert base_of(folder, 3) == 5
    with pytest.raises(StaleStateError):
        base_of(folder, 5)
    # Output of the discarded days stays until they are run again.
    assert outputs(folder) == {day(n): n for n in range(1, 5)}


def test_files_of_a_rewind_target_are_kept_after_retention_drops_the_target() -> None:
    """Its files go on living with the record that went back to it."""
    folder = history(policy=KeepLast(4), inline=False)
    back(folder, 2)
    folder.options["policy"] = KeepLast(1)
    tight = folder.over(folder.storage)
    folder.coordinator = tight
    folder.run(day(3), "b3", keep=(sst("a1"), sst("a2")))
    folder.coordinator.publish(None)
    tight.clean_up()
    log = tight.log()
    assert isinstance(log.entries[2], Tombstone)
    needed = {
        h.path for r in log.completed() for ref in r.content.shards for h in manifest_of(ref, folder.storage).handles
    }
    assert {sst("a1"), sst("a2"), sst("b3")} <= needed <= folder.paths()


def test_the_plan_names_what_it_discards_and_how_to_run_it_again() -> None:
    folder = history()
    plan = plan_rewind(folder.coordinator.log(), 2)
    assert plan.discards == (Discarded(id=3, interval=day(3)), Discarded(id=4, interval=day(4)))
    assert plan.rerun == Rerun(first=day(3).start, last=day(4).start)
    assert "discards 2 checkpoint(s):\n  3 of" in str(plan)
    newest = plan_rewind(folder.coordinator.log(), 4)
    assert (newest.discards, newest.rerun) == ((), None)
    assert "Nothing is discarded" in str(newest)


def test_a_rewind_plan_re_runs_intervals_whose_checkpoints_retention_dropped() -> None:
    """After day 2 only the last day's checkpoint is retained: running that day again alone would meet a gap."""
    folder = history()
    folder.options["policy"] = KeepLast(1)
    folder.coordinator = folder.over(folder.storage)
    folder.run(day(2), "again", keep=(sst("a1"),))
    log = folder.coordinator.log()
    assert sorted(log.retained) == [4, 5]
    assert plan_rewind(log, 5).rerun == Rerun(first=day(3).start, last=day(4).start)


def test_the_error_for_an_unknown_target_lists_every_usable_checkpoint() -> None:
    folder = Folder(days=14)
    log = folder.coordinator.log()
    with pytest.raises(UsageError, match=r"usable checkpoints: 1 to 14$"):
        plan_rewind(log, 99)


def test_a_rewind_discards_the_checkpoints_of_its_plan() -> None:
    folder = history()
    folder.run(day(2), "again")  # 5; makes 3 and 4 stale
    folder.run(day(3), "b3")  # 6
    plan = plan_rewind(folder.coordinator.log(), 2)
    assert {d.id for d in plan.discards} == {5, 6}
    usable = {n: base_of(folder, n + 1) for n in (2, 3)}
    assert usable == {2: 5, 3: 6}
    assert back(folder, 2).id == 7
    assert base_of(folder, 3) == 7
    with pytest.raises(StaleStateError):
        base_of(folder, 4)


def test_running_the_target_s_interval_again_with_the_same_result_changes_nothing() -> None:
    folder = history()
    back(folder, 2)
    folder.run(day(3), "b3")
    target = folder.coordinator.record(2).content
    again = folder.run(day(2), "again", digest=target.digest)
    assert again.record is not None and again.record.reproduces == 5
    assert base_of(folder, 4) == 6


def test_a_rewind_undoes_a_re_run() -> None:
    """Day 1 is run again by mistake, so that 4 is stale: going back to it needs saying so, and then days go on from there."""
    folder = history()
    folder.run(day(1), "mistake")
    with pytest.raises(StaleStateError, match="allow_stale_base"):
        back(folder, 4)
    assert back(folder, 4, permissions=STALE).id == 6
    assert base_of(folder, 5) == 6


@pytest.mark.parametrize(("refused", "target"), [(2, 2), (2, 3), (1, 4)])
def test_a_rewind_to_a_quarantined_checkpoint_needs_allow_quarantined(refused: int, target: int) -> None:
    folder = history()
    folder.coordinator.quarantine(refused, "wrong")
    before = folder.paths()
    with pytest.raises(StateUnusable, match="allow_quarantined"):
        back(folder, target)
    assert folder.paths() == before
    made = back(folder, target, permissions=QUARANTINED)
    assert made.record is not None and made.record.content.permissions == QUARANTINED
    assert base_of(folder, target + 1) == 5
    # What descends from it is usable too, also when the record has become a tombstone; a mark on itself counts.
    folder.run(day(target + 1), "next")
    folder.options["policy"] = KeepLast(1)
    folder.coordinator = folder.over(folder.storage)
    folder.run(day(target + 2), "after")
    folder.publish_and_clean_up()
    assert isinstance(folder.coordinator.log().entries[5], Tombstone)
    assert base_of(folder, target + 3) == 7
    folder.coordinator.quarantine(5, "wrong after all")
    with pytest.raises(StateUnusable):
        base_of(folder, target + 3)


def test_a_rewind_to_an_unknown_or_dropped_checkpoint_is_refused() -> None:
    folder = history(policy=KeepLast(2))
    folder.coordinator.clean_up()
    with pytest.raises(UsageError, match=r"no checkpoint 99.*usable checkpoints: 3, 4"):
        back(folder, 99)
    with pytest.raises(StateUnusable, match=r"retention has dropped .*usable checkpoints: 3, 4"):
        back(folder, 1)


def test_no_more_is_discarded_than_was_agreed() -> None:
    folder = history()
    agreed = frozenset(d.id for d in plan_rewind(folder.coordinator.log(), 2).discards)
    folder.run(day(5), "a5")
    with pytest.raises(UsageError, match="did not agree to discard these checkpoints: 5"):
        back(folder, 2, agreed=agreed)
    assert folder.coordinator.log().head_id == 5
    assert back(folder, 2, agreed=agreed | {5}).id == 6


def test_a_repeated_rewind_attempt_commits_only_once() -> None:
    """A late retry of it must not discard what was made since."""
    folder = history()
    back(folder, 2)
    folder.run(day(3), "b3")
    assert back(folder, 2).outcome == "already"
    assert base_of(folder, 4) == 6
    with pytest.raises(UsageError, match="new uuid"):
        back(folder, 1)


def outputs(folder: Folder) -> dict[Interval, int]:
    return {i: n for i, (n, _) in folder.coordinator.log().current_outputs().items()}


def told_to_the_sink(folder: Folder) -> list[tuple[Interval, int, int]]:
    """The calls of the sink: interval, checkpoint and number of files."""
    calls: list[tuple[Interval, int, int]] = []

    def hook(record: Record) -> None:
        calls.append((record.content.interval, record.id, len(record.content.outputs)))

    folder.coordinator.publish(hook)
    return calls


def test_a_rewind_retracts_the_output_of_later_intervals() -> None:
    folder = history(policy=KeepLast(2))
    plan = plan_rewind(folder.coordinator.log(), 3, retract_output=True)
    assert plan.retracts == (day(4),)
    assert f"It retracts the output of 1 interval(s):\n  {day(4)}" in str(plan)
    made = back(folder, 3, retract_output=True)
    assert made.record is not None and made.record.replaced == (day(4),)
    assert outputs(folder) == {day(n): n for n in (1, 2, 3)}
    assert folder.coordinator.unpublished() == [(day(4), 5)]
    folder.coordinator.clean_up()
    assert told_to_the_sink(folder) == [(day(4), 5, 0)]
    assert told_to_the_sink(folder) == []
    # The run of the interval makes new output.
    folder.run(day(4), "b4", keep=(sst("a3"),))
    assert told_to_the_sink(folder) == [(day(4), 6, 1)]
    folder.coordinator.clean_up()
    assert outputs(folder) == {**{day(n): n for n in (1, 2, 3)}, day(4): 6}
    there = folder.paths(paths.OUTPUT)
    assert paths.output(day(4), "a4", 0, 0) not in there and paths.output(day(4), "b4", 0, 0) in there
    whole = read_whole_log(folder.storage)
    assert isinstance(whole.entries[4], Tombstone)
    assert sorted(facts_of_entries(whole.entries)) == sorted(whole.facts(None))


def test_retracted_output_stays_retracted() -> None:
    """Also after the way forward, to a checkpoint of a retracted interval. A second rewind finds nothing to retract."""
    folder = history()
    back(folder, 1, retract_output=True)
    assert outputs(folder) == {day(1): 1}
    back(folder, 4, "forward", permissions=STALE)
    assert outputs(folder) == {day(1): 1}
    assert plan_rewind(folder.coordinator.log(), 1, STALE, retract_output=True).retracts == ()
    assert {i: n for i, n, _ in told_to_the_sink(folder)} == {day(n): 5 for n in (2, 3, 4)}


def test_a_rewind_retracts_output_of_intervals_with_other_boundaries_too() -> None:
    folder = history()
    both = Interval(day(3).start, day(4).end)
    folder.run(both, "b", permissions=Permissions(replace_overlapping=True))
    with pytest.raises(UsageError, match=r"can't be retracted alone: the interval begins before 2024-01-04T00:00:00Z"):
        plan_rewind(folder.coordinator.log(), 3, STALE, retract_output=True)
    back(folder, 2, retract_output=True)
    assert outputs(folder) == {day(1): 1, day(2): 2}
    # The sink has not heard of the commit of both days yet. It hears of the retraction only.
    assert {i: n for i, n, _ in told_to_the_sink(folder)} == {day(3): 5, day(4): 5, both: 6}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_retraction_that_dies_at_any_call_is_completed_by_the_same_call(when: When) -> None:
    """The output is that of before, or that of the restored checkpoint; and then the sink hears of each retracted interval."""
    whole = FaultyStorage(history().storage, {})
    back(history(), 2, over=whole, retract_output=True)
    for at in range(len(whole.calls)):
        folder = history()
        with pytest.raises(StopHere):
            back(folder, 2, over=FaultyStorage(folder.storage, stop_at(at, when)), retract_output=True)
        committed = folder.coordinator.log().head_id == 5
        assert outputs(folder) == {day(n): n for n in range(1, 3 if committed else 5)}
        assert back(folder, 2, retract_output=True).id == 5
        assert outputs(folder) == {day(1): 1, day(2): 2}
        assert sorted(told_to_the_sink(folder)) == [(day(3), 5, 0), (day(4), 5, 0)]


# --- fork -----------------------------------------------------------------------------------------------------------------------


def split(folder: Folder, target: int, into: Storage, attempt: str = "fork", **options: Any) -> CommitResult:
    coordinator = Coordinator(into, "other")
    return coordinator.fork(folder.storage, target, run=run(f"run-of-{attempt}"), attempt=attempt, **options)


def check_own(into: Storage, attempt: str = "fork") -> Record:
    """The fork's newest record has every file it names, all under its own attempt."""
    record = Coordinator(into, "other").record("latest")
    handles = {*handles_in(record), *(h for ref in record.content.shards for h in handles_in(manifest_of(ref, into)))}
    for handle in handles:
        info = into.stat(handle.path)
        assert info is not None and info.size_bytes == handle.size_bytes
        assert paths.attempt_of(handle.path) == attempt
    return record


@pytest.mark.parametrize("suffix", ["sst", "log"])
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "manifest files"])
def test_a_fork_goes_on_when_its_source_is_gone(inline: bool, suffix: str) -> None:
    folder = history(inline=inline, suffix=suffix)
    before = {info.path: info.generation for info in folder.storage.list("")}
    into = MemoryStorage("memory://other")
    result = split(folder, 3, into)
    assert (result.id, result.outcome) == (1, "committed")
    assert {info.path: info.generation for info in folder.storage.list("")} == before
    source = folder.coordinator.record(3).content
    contents = [folder.storage.read(h.path) for h in manifest_of(source.shards[0], folder.storage).handles]
    for path in before:
        folder.storage.delete(path)
    made = check_own(into).content
    assert (made.kind, made.pipeline, made.base_id, made.interval) == ("restore", "other", None, day(3))
    assert isinstance(made.shards[0], InlineShard)  # a record has room for 40 KiB of manifests
    assert (made.digest, made.source_position, made.time) == (source.digest, source.source_position, source.time)
    assert [into.read(h.path) for h in manifest_of(made.shards[0], into).handles] == contents
    other = Folder(into)
    assert base_of(other, 4) == 1
    other.run(day(4), "b4", pipeline="other")


def test_a_fork_of_a_changelog_takes_what_changed_since_the_manifest(tmp_path: Path) -> None:
    """Files, segments in files and inline, and key groups that are other than in the manifest's file."""
    folder = Folder(days=1, inline=False)
    first = folder.coordinator.record(1).content.shards[0]
    log_file = folder.storage.create(sst("a2", "log"), b"changes of a2")
    inline = Segment(handle=None, data=b"small", changes=1, content_bytes=5)
    segments = (Segment(handle=log_file, data=None, changes=1, content_bytes=9), inline)
    changes = ShardChanges(segments=segments, key_group_states=())
    ref = FiledShard(shard=0, manifest=first.manifest, changes=changes)
    folder.run(day(2), "a2", shards=(ref,))
    into = MemoryStorage("memory://other")
    split(folder, 2, into)
    taken = manifest_of(check_own(into).content.shards[0], into)
    assert [into.read(h.path) for h in taken.handles] == [b"state of a1", b"changes of a2"]
    assert taken.segments[1] == inline
    assert taken.key_group_states == manifest_of(ref, folder.storage).key_group_states


def test_real_state_is_forked_by_links_and_found_sound(tmp_path: Path) -> None:
    """Local files share their blocks, and nothing else: every entry is there when the origin is deleted."""
    origin = SmallPipeline(tmp_path)
    into = LocalStorage(tmp_path / "elsewhere" / "q")
    result = fork(origin.storage, 1, Coordinator(into, "q").at, run=run("fork"), attempt="fork")
    assert result.record is not None and origin.record is not None
    files = [*(tmp_path / "elsewhere").rglob("*.sst")]
    assert files and all(f.stat().st_nlink == 2 for f in files)
    for file in (tmp_path / "root").rglob("*"):
        if file.is_file():
            file.unlink()
    assert result.record.content.digest == origin.record.content.digest
    assert findings(tmp_path / "elsewhere" / "q", result.record.content, tmp_path) == []


@pytest.mark.long("half a second", runs_in="ci")
def test_a_native_savepoint_can_be_forked_and_a_canonical_or_claimed_savepoint_is_refused(tmp_path: Path) -> None:
    origin = SmallPipeline(tmp_path)
    native = origin.take(tmp_path / "native", "native")
    source, into = LocalStorage(tmp_path / "native"), Coordinator(LocalStorage(tmp_path / "q"), "q").at
    result = fork(source, native, into, run=run("fork"), attempt="fork")
    assert result.record is not None
    assert findings(tmp_path / "q", result.record.content, tmp_path) == []
    canonical = origin.take(tmp_path / "canonical", "canonical")
    with pytest.raises(UsageError, match="restore_savepoint"):
        fork(LocalStorage(tmp_path / "canonical"), canonical, into, run=run("fork"), attempt="second")
    claim_savepoint(source, Claim(savepoint="native", owner="another", attempt="a"))
    with pytest.raises(UsageError, match="claimed by another"):
        fork(source, native, into, run=run("fork"), attempt="third")


def test_a_second_fork_into_a_pipeline_is_refused_unless_its_checkpoint_is_later() -> None:
    folder, into = history(), MemoryStorage("memory://other")
    split(folder, 3, into)
    assert split(folder, 3, into).outcome == "already"
    before = {info.path for info in into.list("")}
    for target in (1, 3):
        with pytest.raises(UsageError, match=r"(?s)at or after.*another name"):
            split(folder, target, into, "second")
    assert {info.path for info in into.list("")} == before
    assert split(folder, 4, into, "second").id == 2  # behind what is there: a fork may be followed by a later one
    with pytest.raises(UsageError, match="into itself"):
        fork(folder.storage, 3, folder.coordinator.at, run=run("fork"), attempt="third")


def test_a_fork_of_a_stale_or_quarantined_checkpoint_is_refused() -> None:
    folder, into = history(), MemoryStorage("memory://other")
    folder.run(day(2), "again")
    folder.coordinator.quarantine(5, "wrong")
    with pytest.raises(StaleStateError):
        split(folder, 4, into)
    with pytest.raises(StateUnusable, match="quarantined"):
        split(folder, 5, into)
    with pytest.raises(UsageError, match="earlier time"):
        split(folder, 2, into, pipeline_start_ms=day(2).end_ms)
    assert not list(into.list(""))
    assert split(folder, 5, into, permissions=QUARANTINED).id == 1
    assert base_of(Folder(into), 3) == 1  # the mark stays where it was


@pytest.mark.parametrize("damage", ["missing", "other bytes"])
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "manifest files"])
def test_a_fork_of_a_damaged_checkpoint_names_the_file(damage: str, inline: bool) -> None:
    folder, into = history(inline=inline), MemoryStorage("memory://other")
    data = folder.storage.read(sst("a2"))
    folder.storage.delete(sst("a2"))
    if damage != "missing":
        folder.storage.create(sst("a2"), data[::-1])
    with pytest.raises(CorruptFile, match=sst("a2")):
        split(folder, 3, into)
    assert not list(into.list(""))


@pytest.mark.parametrize(
    "inline", long_after(1, [pytest.param(True, id="inline"), pytest.param(False, id="manifest files")], "seconds")
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_fork_that_dies_at_any_call_leaves_only_what_a_sweep_finds(when: When, inline: bool) -> None:
    """The same call completes it; without that a sweep leaves nothing, and the attempt can't come back."""
    whole = FaultyStorage(MemoryStorage("memory://other"), {})
    split(history(inline=inline), 3, whole)
    assert {m for m, _ in whole.calls} >= {"copy_from", "create"}
    swept = 0
    for at in range(len(whole.calls)):
        folder, clock = history(inline=inline), {"ms": 0}
        for go_on in (True, False):
            into = MemoryStorage("memory://other", now_ms=lambda c=clock: c["ms"])
            with pytest.raises(StopHere):
                split(folder, 3, FaultyStorage(into, stop_at(at, when)))
            committed = Coordinator(into, "other").log().head_id == 1
            if go_on:
                assert split(folder, 3, into).id == 1
                check_own(into)
                continue
            result = sweep(into, "other", now_ms=10**9)
            if committed:
                check_own(into)
            elif result.record is not None:
                swept += 1
                assert files_in(into) == {paths.record(1)}
                with pytest.raises(Swept):
                    split(folder, 3, into)
                assert split(folder, 3, into, "second").id == 2
    assert swept > 2


def test_a_fork_whose_answer_is_lost_is_completed_by_the_same_call() -> None:
    whole = FaultyStorage(MemoryStorage("memory://other"), {})
    split(history(), 3, whole)
    for at, (method, _) in enumerate(whole.calls):
        if method not in ("copy_from", "create"):
            continue
        for when in ("before", "after"):
            folder, into = history(), MemoryStorage("memory://other")
            try:
                split(folder, 3, FaultyStorage(into, lost_answer_at(at, when)))
            except UnknownOutcome:
                split(folder, 3, into)
            assert check_own(into).id == 1


def test_of_two_concurrent_forks_into_one_name_the_later_is_fenced() -> None:
    """One of them is the pipeline; the other leaves nothing behind."""
    folder, into = history(), MemoryStorage("memory://other")

    class Meanwhile(FaultyStorage):
        def create(self, path: str, data: bytes) -> Any:
            if path.startswith(paths.ATTEMPTS):
                split(folder, 3, into, "first")
            return super().create(path, data)

    with pytest.raises(Fenced):
        split(folder, 3, Meanwhile(into, {}), "second")
    check_own(into, "first")
    assert {paths.attempt_of(i.path) for i in into.list(paths.SHARED)} == {"first"}


def test_a_fork_completes_although_retention_drops_its_source_meanwhile() -> None:
    folder, into = history(policy=KeepLast(4)), MemoryStorage("memory://other")

    once = Lock()  # files are copied several at a time

    class Meanwhile(FaultyStorage):
        def copy_from(self, source: Storage, handle: Any, path: str) -> Any:
            tight = Folder(folder.storage, policy=KeepLast(1))
            with once:
                if tight.coordinator.log().head_id == 4:
                    tight.run(day(5), "a5")
                    tight.publish_and_clean_up()
            return super().copy_from(source, handle, path)

    split(folder, 3, Meanwhile(into, {}))
    assert folder.coordinator.log().retained.keys() == {5}  # the lease kept its files and not the checkpoint
    folder.coordinator.clean_up()
    assert folder.paths(paths.LEASES) == set()
    with pytest.raises(CheckpointDropped, match=r"checkpoint 3, .* is no longer retained.*\nUsable checkpoints: 5 "):
        take_lease(folder.storage, 3, "a fork")
