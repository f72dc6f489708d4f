"""All interleavings of the processes that write to one pipeline, and a bug planted for every check that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from state_backend.checkpoint import append_record as appending
from state_backend.checkpoint import choose_base as lineage
from state_backend.checkpoint import clean_up_dropped as cleaning
from state_backend.checkpoint import commit_attempt, output_schemas, publish_output
from state_backend.checkpoint import decide_commit as committing
from state_backend.checkpoint import leases as leasing
from state_backend.checkpoint import log as logs
from state_backend.checkpoint import plan_retention as retaining
from state_backend.checkpoint import quarantine as quarantining
from state_backend.checkpoint import record_reader as readers
from state_backend.checkpoint import settled_files as settling
from state_backend.checkpoint import summary as summaries
from state_backend.checkpoint import sweep_files as sweeping
from state_backend.checkpoint.clean_up_dropped import Needed, files_of
from state_backend.checkpoint.leases import plan_leases
from state_backend.checkpoint.log import Log
from state_backend.formats import paths, record_codec
from state_backend.values.errors import AlreadyExists, BaseMoved, StateUnusable, UnknownOutcome
from state_backend.values.marks import Published
from state_backend.values.records import Record, SweepRecord
from state_backend.values.retention import KeepLast
from tests.support import commit_world, interleavings
from tests.support.commit_scenarios import SCENARIOS, TIGHT, Scenario, nothing_lost
from tests.support.coordinator import Coordinator
from tests.support.interleavings import Replay, Violation
from tests.support.log_in_memory import log_in_memory

BY_NAME = {s.name: s for s in SCENARIOS}


# Each takes three seconds or more.
SLOWEST = {
    "a re-run that a sweep takes for dead, and the next day",
    "a key is forgotten with all older checkpoints, beside an attempt and a clean-up",
    "two attempts and a sweeper that takes them for dead",
    "an interval that replaced two days, and the day after",
    "a re-run whose output is published, and an interval that replaces two days",
    "an attempt, a re-run of an earlier interval, and a reproduction that moves the base",
    "skewed clocks: a lease, an attempt that ends what it is on, and a sweep an hour ahead",
    "stale listings: an attempt, a re-run of the first day, and who reads their output",
    "every write a step: an attempt, and a re-run of the first day",
    "a release, and an attempt that started without the checkpoint, and a second release",
}
# Each takes half a second to three seconds.
SLOW = {
    "two that remember, of different days",
    "every write a step: an attempt and a sweeper that takes it for dead",
    "a sweeper finds a day lost whose record is there, and an attempt",
    "an attempt whose answer is lost, its retry, a quarantine",
    "a release, and an attempt that started without the checkpoint, and the next begin",
    "a zombie and its retry, manifests in files, and a re-run of the base that drops it",
    "an attempt, a re-run that widens the output otherwise, and a rewind",
    "a commit and a clean-up, any one answer lost",
    "a release, and an attempt that started without the checkpoint, one answer lost",
    "stale listings: a quarantine, and then a begin",
    "a sweeper finds two days lost whose records are shrunk, and the next day",
    "stale listings: two attempts at one interval, and the next day",
    "skewed clocks: a lease an hour behind, and an attempt an hour ahead that ends what it is on",
    "two forgets of one state, and who holds its files",
    "two attempts, a third committer, tight retention",
    "a key is forgotten while the day before it is prepared anew, and the next one begins",
    "two attempts, one lost answer",
}


def of_tier(scenario: Scenario) -> Any:
    marks: list[pytest.MarkDecorator] = []
    if scenario.name in SLOW | SLOWEST:
        marks = [pytest.mark.long("seconds", runs_in="all" if scenario.name in SLOWEST else "ci")]
    return pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.parametrize("scenario", [of_tier(s) for s in SCENARIOS if not s.big])
def test_all_interleavings(scenario: Scenario) -> None:
    """F36, F49, F53, F54, F55, S13, S14: whoever crashes, sleeps or loses an answer, wherever."""
    figures = scenario.explore()
    print(f"{scenario.name}: {figures}")
    assert figures.interleavings > 1 and len(figures.outcomes) > 0


@pytest.mark.parametrize("scenario", SCENARIOS[:2], ids=lambda s: s.name)
@pytest.mark.long("seconds: every order of every two calls")
def test_the_reduction_leaves_nothing_out(scenario: Scenario) -> None:
    """Every order of every two calls against one order of those that commute: the same contents and the same ends."""
    seen: list[set[frozenset[Any]]] = [set(), set()]
    ends = []
    for reduced in (False, True):
        figures = replace(scenario, fine=True).explore(
            reduced=reduced, check=lambda c, r=reduced: seen[r].add(frozenset(c.items()))
        )
        ends.append(set(figures.outcomes))
    assert seen[0] == seen[1] and ends[0] == ends[1]
    assert len(seen[0]) > 10


# --- planted bugs ---------------------------------------------------------------------------------------------------------------

Bug = Callable[[], Any]
BUGS: dict[str, tuple[Bug, str]] = {}


def bug(scenario: str) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    def add(plant: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        (found,) = [name for name in BY_NAME if scenario in name]
        BUGS[plant.__name__] = (contextmanager(plant), found)
        return plant

    return add


def _own_files(record: Record) -> Iterator[str]:
    for ref in record.content.shards:
        for handle in ref.inline.handles if ref.inline is not None else ():
            if paths.attempt_of(handle.path) == record.content.attempt:
                yield handle.path


def _deleting_own(kind: type[Exception]) -> Any:
    """Creates of records that take this answer for a reason to delete their own files."""
    real = Replay.create

    def create(self: Replay, path: str, data: bytes) -> Any:
        try:
            return real(self, path, data)
        except kind:
            if path.startswith(paths.CHECKPOINTS):
                for own in _own_files(record_codec.decode(data, path, Record)):
                    self.delete(own)
            raise

    return mock.patch.object(Replay, "create", create)


@bug("a zombie, its retry, and the next")
def own_attempt_is_not_looked_for() -> Iterator[None]:
    with mock.patch.object(Log, "of_attempt", lambda log, attempt: None):
        yield


@bug("a sweeper that takes them for dead")
def a_sweep_that_names_me_is_overlooked() -> Iterator[None]:
    real = commit_attempt.plan_commit

    def blind(log: Log, *rest: Any) -> Any:
        entries = {n: replace(e, abandoned=()) if isinstance(e, SweepRecord) else e for n, e in log.entries.items()}
        return real(log_in_memory(entries, log.quarantined), *rest)

    with mock.patch.object(commit_attempt, "plan_commit", blind):
        yield


@bug("two attempts at one interval, and a quarantine")
def no_fence() -> Iterator[None]:
    with mock.patch.object(committing, "_fences", lambda entry, content: False):
        yield


@bug("a re-run of an earlier interval")
def the_base_is_not_planned_anew() -> Iterator[None]:
    with mock.patch.object(committing, "_check_base", lambda log, prepared: None):
        yield


@bug("a key is forgotten while the day before")
def what_was_forgotten_is_not_looked_for() -> Iterator[None]:
    with mock.patch.object(committing, "check_commit", lambda log, prepared, who: None):
        yield


@bug("a re-run of an earlier interval")
def nothing_becomes_stale() -> Iterator[None]:
    with mock.patch.object(committing, "stale_marks", lambda log, content, new_id: {}):
        yield


@bug("a file that was acked")
def files_are_not_verified() -> Iterator[None]:
    with mock.patch.object(commit_attempt, "_verify_written", lambda storage, prepared: None):
        yield


@bug("behind a stale day")
def a_stale_state_is_kept_for_the_newest() -> Iterator[None]:
    with mock.patch.object(retaining, "valid_states", lambda log, new, marks: ()):
        yield


@bug("a third committer, tight retention")
def retention_apart_from_the_commit() -> Iterator[None]:
    """Records retain all; whoever cleans up applies the policy to the log that it read."""
    plan, clean_up = committing.plan_retention, cleaning.clean_up

    def keep_all(log: Log, new: Record, marks: Any, *rest: Any) -> Any:
        return plan(log, new, marks, KeepLast(1000))

    def thinned(read: Callable[..., Log], *what: Any) -> Log:
        log = read(*what)
        kept = TIGHT.keep(log.kept)
        head = log.entries[log.head_id]
        assert isinstance(head, Record)
        summary = replace(
            head.summary,
            dropping=tuple(sorted(log.retained.keys() - kept)),
            kept=tuple(k for k in head.summary.kept if k.id in kept),
        )
        log.entries._here[log.head_id] = replace(head, summary=summary)
        log.__dict__["retained"] = {n: r for n, r in log.retained.items() if n in kept}
        return log

    def apart(*what: Any) -> Any:
        with mock.patch.object(cleaning, "read_newest", partial(thinned, cleaning.read_newest)):
            return clean_up(*what)

    with mock.patch.object(committing, "plan_retention", keep_all), mock.patch.object(cleaning, "clean_up", apart):
        yield


@bug("two attempts at one interval, and a quarantine")
def a_record_is_written_over() -> Iterator[None]:
    real = Replay.create

    def create(self: Replay, path: str, data: bytes) -> Any:
        return self.put(path, data) if path.startswith(paths.CHECKPOINTS) else real(self, path, data)

    with mock.patch.object(Replay, "create", create):
        yield


@bug("a reproduction that changes nothing for it")
def whoever_loses_an_id_deletes() -> Iterator[None]:
    with _deleting_own(AlreadyExists):
        yield


@bug("answer is lost, its retry")
def whoever_hears_no_answer_deletes() -> Iterator[None]:
    with _deleting_own(UnknownOutcome):
        yield


@bug("answer is lost, its retry")
def whose_base_moved_deletes() -> Iterator[None]:
    real = Coordinator.commit

    def commit(self: Coordinator, attempt: str) -> Any:
        try:
            return real(self, attempt)
        except BaseMoved:
            commit_attempt._delete_own(self.storage, self.log(), self.load_prepared(attempt).content)
            raise

    with mock.patch.object(Coordinator, "commit", commit):
        yield


@bug("a zombie, its retry, and the next")
def what_others_need_is_deleted() -> Iterator[None]:
    with mock.patch.object(cleaning, "_find_needed", lambda storage, now: Needed(paths=set(), attempts=frozenset())):
        yield


@bug("after a later one was quarantined")
def what_an_interval_wrote_itself_is_looked_for_at_its_base() -> Iterator[None]:
    real = cleaning._find_needed

    def needed(storage: Any, now: Log) -> Needed:
        return replace(real(storage, now), attempts=frozenset())

    with mock.patch.object(cleaning, "_find_needed", needed):
        yield


@bug("a re-run of an earlier interval")
def an_id_is_freed() -> Iterator[None]:
    with mock.patch.object(Replay, "replace", lambda self, path, data, *, generation: self.delete(path)):
        yield


@bug("a re-run of an earlier interval")
def shrunk_before_its_files_are_deleted() -> Iterator[None]:
    real = Coordinator.clean_up

    def clean_up(self: Coordinator) -> Any:
        doomed: list[str] = []
        with mock.patch.object(type(self.storage), "delete", lambda storage, path, **_: doomed.append(path) or True):
            result = real(self)
        for path in doomed:
            self.storage.delete(path)
        return result

    with mock.patch.object(Coordinator, "clean_up", clean_up):
        yield


@bug("run again while its output is published")
def marked_before_the_hook_ran() -> Iterator[None]:
    real = publish_output._publish

    def publish(storage: Any, now: Log, interval: Any, checkpoint_id: int, hook: Any, **more: Any) -> Any:
        mark = record_codec.encode(Published(id=checkpoint_id, interval=interval))
        with suppress(AlreadyExists):
            storage.create(paths.published(interval, checkpoint_id), mark)
        return real(storage, now, interval, checkpoint_id, hook, **more)

    with mock.patch.object(publish_output, "_publish", publish):
        yield


@bug("run again while its output is published")
def what_was_published_meanwhile_is_not_looked_at() -> Iterator[None]:
    def publish(storage: Any, now: Log, interval: Any, checkpoint_id: int, hook: Any, **_: Any) -> Any:
        entry = readers.RecordReader(storage, checkpoint_id).fresh(checkpoint_id)
        if not isinstance(entry, Record):
            return []
        hook(entry)
        with suppress(AlreadyExists):
            mark = record_codec.encode(Published(id=checkpoint_id, interval=interval))
            storage.create(paths.published(interval, checkpoint_id), mark)
        return [checkpoint_id]

    with mock.patch.object(publish_output, "_publish", publish):
        yield


@bug("a sweeper that takes them for dead")
def a_sweep_does_not_tell_the_log() -> Iterator[None]:
    real = sweeping.plan_sweep
    with mock.patch.object(sweeping, "plan_sweep", lambda *a, **o: replace(real(*a, **o), abandon=())):
        yield


@bug("which may replace nothing")
def output_of_another_cut_is_looked_for_at_begin_only() -> Iterator[None]:
    real = committing.choose_base

    def blind(log: Log, *rest: Any, **options: Any) -> Any:
        with mock.patch.object(lineage, "overlapping_outputs", lambda log, interval: []):
            return real(log, *rest, **options)

    with mock.patch.object(committing, "choose_base", blind):
        yield


@bug("which may replace what is there")
def a_permission_covers_what_came_later() -> Iterator[None]:
    real = committing.choose_base

    def at_any_time(*rest: Any, as_of: int) -> Any:
        return real(*rest)

    with mock.patch.object(committing, "choose_base", at_any_time):
        yield


@bug("replaced two days, and the day after")
def a_commit_does_not_say_what_it_replaced() -> Iterator[None]:
    with mock.patch.object(committing, "_find_replaced", lambda log, content: ()):
        yield


def _summaries(change: Callable[[Any, Record], Any]) -> Any:
    """Records with another summary than the right one."""
    real = appending.next_summary
    return mock.patch.object(appending, "next_summary", lambda log, new, **o: change(real(log, new, **o), new))


@bug("and a re-run of the first day")
def what_is_below_is_settled_behind_the_next_record() -> Iterator[None]:
    settle, real = appending.settle, appending.append

    def append(storage: Any, log: Log, entry: Any) -> Any:
        with mock.patch.object(appending, "settle", lambda storage, log: None):
            made = real(storage, log, entry)
        settle(storage, log)
        return made

    with mock.patch.object(commit_attempt, "append", append):
        yield


@bug("and a re-run of the first day")
def the_hint_comes_before_the_record() -> Iterator[None]:
    real = appending.append

    def append(storage: Any, log: Log, entry: Any) -> Any:
        appending.note_head(storage, log, entry.id)
        return real(storage, log, entry)

    with mock.patch.object(commit_attempt, "append", append):
        yield


@bug("a re-run that a sweep takes for dead")
def what_a_sweep_abandons_is_not_settled() -> Iterator[None]:
    with mock.patch.object(appending, "ends_of", lambda entries: iter(())):
        yield


@bug("a third committer, tight retention")
def what_is_dropping_is_forgotten_by_the_next() -> Iterator[None]:
    with _summaries(lambda s, new: replace(s, dropping=s.dropping[-1:])):
        yield


@bug("a third committer, tight retention")
def what_is_unpublished_is_forgotten_by_the_next() -> Iterator[None]:
    with _summaries(lambda s, new: replace(s, unpublished=tuple(u for u in s.unpublished if u.id == new.id))):
        yield


@bug("and a re-run of the first day")
def output_that_was_replaced_is_nobodys_to_delete() -> Iterator[None]:
    with mock.patch.object(summaries, "_replaced_outputs", lambda log, new: set()):
        yield


@bug("and an interval that replaces two days")
def a_sink_is_not_told_what_was_replaced() -> Iterator[None]:
    def own(summary: Any, new: Any) -> Any:
        mine = (u for u in summary.unpublished if u.id != new.id or u.interval == new.content.interval)
        return replace(summary, unpublished=tuple(mine))

    # The mark of what the sink has stays, so that nobody can have died in the hook.
    with _summaries(own), mock.patch.object(sweeping, "_outdated_marks", lambda files, now: set()):
        yield


@bug("its own former result")
def what_replaces_passes_for_a_reproduction() -> Iterator[None]:
    with mock.patch.object(committing, "reproduces", lambda log, content: 1 if content.attempt == "s" else None):
        yield


@bug("widens the output otherwise")
def output_schemas_are_compared_at_begin_only() -> Iterator[None]:
    with mock.patch.object(output_schemas, "check_output_schema", lambda *of: None):
        yield


@bug("widens the output otherwise")
def a_rewind_takes_the_schemas_back() -> Iterator[None]:
    real = committing.with_schemas

    def with_schemas(log: Log, content: Any) -> Any:
        target = log.entries[content.base_id] if content.kind == "restore" else None
        content, output, late = real(log, content)
        return content, target.output_schemas if isinstance(target, Record) else output, late

    with mock.patch.object(committing, "with_schemas", with_schemas):
        yield


@bug("retracts output, and an attempt")
def a_restore_retracts_nothing() -> Iterator[None]:
    with mock.patch.object(committing, "_find_replaced", lambda log, content: ()):
        yield


@bug("retracts output, and a re-run")
def files_of_retracted_output_stay() -> Iterator[None]:
    with mock.patch.object(summaries, "_replaced_outputs", lambda log, new: set()):
        yield


@bug("after its first result was quarantined")
def what_marks_mean_for_the_retained_is_not_carried_on() -> Iterator[None]:
    with mock.patch.object(summaries, "_find_refused", lambda log, new, asked_of: ()):
        yield


@bug("two that remember")
def a_re_run_brings_back_how_far_commits_reach() -> Iterator[None]:
    def only_its_own(summary: Any, new: Record) -> Any:
        return replace(summary, latest_end_ms=new.interval.end_ms) if isinstance(new, Record) else summary

    with _summaries(only_its_own):
        yield


@bug("an interval that replaced two days, and the day after")
def whose_output_was_replaced_is_not_carried_on() -> Iterator[None]:
    with _summaries(lambda summary, new: replace(summary, replaced_outputs=())):
        yield


@bug("two that remember")
def what_is_kept_is_not_what_is_retained() -> Iterator[None]:
    def without_bases(summary: Any, new: Record) -> Any:
        return replace(summary, kept=tuple(replace(k, base_id=None) for k in summary.kept))

    with _summaries(without_bases):
        yield


@bug("an attempt that drops what it reads")
def leases_are_listed_before_the_log_is_read() -> Iterator[None]:
    real = Coordinator.clean_up

    def clean_up(self: Coordinator) -> Any:
        early = [*self.storage.list(paths.LEASES)]
        with mock.patch.object(cleaning, "plan_leases", lambda leases, newest: plan_leases(early, newest)):
            return real(self)

    with mock.patch.object(Coordinator, "clean_up", clean_up):
        yield


@bug("an attempt that drops what it reads")
def a_reader_looks_at_the_log_before_its_lease_is_there() -> Iterator[None]:
    real, looks = leasing.take_lease, leasing.check_retained

    def take_lease(storage: Any, checkpoint_id: int, what: str) -> str | None:
        looks(storage, checkpoint_id)
        with mock.patch.object(leasing, "check_retained", lambda storage, checkpoint_id: None):
            return real(storage, checkpoint_id, what)

    with mock.patch.object(commit_world, "take_lease", take_lease):
        yield


@bug("an attempt that drops what it reads")
def a_clean_up_asks_nobody_who_reads() -> Iterator[None]:
    with mock.patch.object(cleaning, "leased_checkpoints", lambda storage, now: ({}, [])):
        yield


@bug("two sweepers find a day lost whose record is shrunk")
def lost_files_are_written_anew_after_the_sweep() -> Iterator[None]:
    real = sweeping._sweep

    def sweep(storage: Any, *rest: Any) -> Any:
        with (
            mock.patch.object(sweeping, "rebuild_settled", nothing_lost),
            mock.patch.object(Log, "_check_settled", lambda log, below, own: None),
        ):
            found = real(storage, *rest)
        settling.rebuild_settled(storage)
        return found

    with mock.patch.object(sweeping, "_sweep", sweep):
        yield


@bug("two days lost whose records are shrunk")
def lost_files_are_not_written_anew() -> Iterator[None]:
    with (
        mock.patch.object(sweeping, "rebuild_settled", nothing_lost),
        mock.patch.object(Log, "_check_settled", lambda log, below, own: None),
    ):
        yield


@bug("two sweepers find a day lost whose record is shrunk")
def a_file_written_anew_lists_no_output() -> Iterator[None]:
    with mock.patch.object(settling, "outputs_of", lambda entry: ()):
        yield


def _no_kept_facts() -> Any:
    """The newest record also says what it retains, which hides an old listing of a commit that is not dropped yet."""
    return mock.patch.object(Log, "_kept_facts", frozenset())


@bug("stale listings: two attempts")
def a_fence_is_looked_for_in_a_listing_only() -> Iterator[None]:
    with mock.patch.object(readers, "list_fresh", _only_listed), _no_kept_facts():
        yield


@bug("stale listings: an attempt, a re-run")
def output_is_looked_for_in_a_listing_only() -> Iterator[None]:
    with mock.patch.object(readers, "list_fresh", _only_listed), _no_kept_facts():
        yield


@bug("stale listings: two attempts")
def what_is_settled_is_noted_behind_the_next_record() -> Iterator[None]:
    real, note = appending.append, appending.note_names

    def append(storage: Any, log: Log, entry: Any) -> Any:
        noted: list[Any] = []
        with mock.patch.object(appending, "note_names", lambda *what: noted.append(what)):
            made = real(storage, log, entry)
        for what in noted:
            note(*what)
        return made

    with mock.patch.object(commit_attempt, "append", append), _no_kept_facts():
        yield


@bug("without the checkpoint, one answer lost")
def commits_go_on_during_a_release() -> Iterator[None]:
    with mock.patch.object(committing, "_check_no_release", lambda log, who: None):
        yield


@bug("without the checkpoint, and the next begin")
def a_release_adds_no_record() -> Iterator[None]:
    with mock.patch.object(quarantining, "_append_fence", lambda at, name: None):
        yield


@bug("without the checkpoint, and a second release")
def a_release_looks_only_before_it_begins() -> Iterator[None]:
    real = quarantining._check_release

    def before(at: Any, log: Log, checkpoint_id: int) -> None:
        if not log.quarantined[checkpoint_id].releasing:
            real(at, log, checkpoint_id)

    with mock.patch.object(quarantining, "_check_release", before):
        yield


@bug("stale listings: a quarantine")
def a_quarantine_is_looked_for_in_a_listing_only() -> Iterator[None]:
    with mock.patch.object(logs, "list_fresh", _only_listed):
        yield


@bug("stale listings: a lease")
def a_lease_is_looked_for_in_a_listing_only() -> Iterator[None]:
    with mock.patch.object(cleaning, "listed_files", lambda storage, folder: list(storage.list(folder))):
        yield


@bug("skewed clocks: a lease, ")
def a_sweep_goes_by_the_clock_of_its_host() -> Iterator[None]:
    def host_ms(storage: Any, *, dry_run: bool) -> int:
        return time.time_ns() // 1_000_000

    with mock.patch.object(interleavings, "storage_now_ms", host_ms):
        yield


@bug("skewed clocks: a lease an hour behind")
def a_host_dates_the_files_that_it_writes() -> Iterator[None]:
    real = Scenario.explore
    with mock.patch.object(Scenario, "explore", lambda self: real(self, host_dates_files=True)):
        yield


def _only_listed(storage: Any, folder: str) -> list[str]:
    return [info.path for info in storage.list(folder)]


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.long("seconds", runs_in="ci")
def test_planted(name: str) -> None:
    """Without the check some interleaving breaks a rule: the checker can fail, and the check is needed."""
    plant, scenario = BUGS[name]
    # That a process finds a file missing and says so is not what is looked for.
    actors = [replace(a, may=(*a.may, StateUnusable)) for a in BY_NAME[scenario].actors]
    with plant(), pytest.raises(Violation) as found:
        replace(BY_NAME[scenario], actors=actors).explore()
    print(f"{name}: {str(found.value).splitlines()[0]}")


# --- second lines of defence ------------------------------------------------------------------------------------------------------


@contextmanager
def shrunk_whatever_is_there() -> Iterator[None]:
    """What a log no longer retains, no later log does, and a tombstone with output that was replaced is shrunk again: whoever
    shrinks late on what it read long ago does no harm. Matching the generation saves that second round."""
    with mock.patch.object(Replay, "replace", lambda self, path, data, *, generation: self.put(path, data)):
        yield


@contextmanager
def own_files_whoever_needs_them() -> Iterator[None]:
    """Files of an attempt are needed by its own record or by those that started from it, and who finds its own attempt in the
    log, dropped or not, is not fenced."""

    def delete_own(storage: Any, now: Log, content: Any) -> None:
        files = {h.path for h in files_of(content, storage, gone_before=True)}
        for path in sorted(p for p in files if paths.attempt_of(p) == content.attempt):
            storage.delete(path)
        storage.delete(paths.prepared(content.attempt))

    with mock.patch.object(commit_attempt, "_delete_own", delete_own):
        yield


@pytest.mark.parametrize(
    "scenario", ["quarantine of their base", "two tries", "its retry, manifests", "run again while"]
)
@pytest.mark.parametrize("plant", [shrunk_whatever_is_there, own_files_whoever_needs_them])
@pytest.mark.long("seconds", runs_in="ci")
def test_redundant(plant: Any, scenario: str) -> None:
    """Two checks that nothing depends on as long as the others are made: no interleaving goes wrong without them."""
    (name,) = [n for n in BY_NAME if scenario in n]
    with plant():
        BY_NAME[name].explore()


def test_the_second_line_of_defence_is_one() -> None:
    """Without the first look for its own attempt, a retry believes that it lost; then the references are what saves the files."""
    (name,) = [n for n in BY_NAME if "its retry, and the next" in n]
    blind, _ = BUGS["own_attempt_is_not_looked_for"]
    with blind(), own_files_whoever_needs_them(), pytest.raises(Violation, match="what is needed is there"):
        BY_NAME[name].explore()
