"""All interleavings of the processes that write to one pipeline, and a bug planted for every check that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
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
from tests.support import commit_actors, interleavings
from tests.support.commit_scenarios import SCENARIOS, TIGHT, Scenario, nothing_lost
from tests.support.coordinator import Coordinator
from tests.support.interleavings import Replay, Violation
from tests.support.log_in_memory import log_in_memory


def named(part: str) -> Scenario:
    (found,) = [one for one in SCENARIOS if part in one.name]
    return found


# Each takes three seconds or more.
SLOWEST = {
    "two days at once, and another try, and a sweep",
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
    "two days at once, and a forget",
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
def test_no_interleaving_breaks_a_rule(scenario: Scenario) -> None:
    """F36, F49, F53, F54, F55, S13, S14: whoever crashes, sleeps or loses an answer, wherever."""
    figures = scenario.explore()
    print(f"{scenario.name}: {figures}")
    assert figures.interleavings > 1 and len(figures.outcomes) > 0


@pytest.mark.parametrize("scenario", SCENARIOS[:2], ids=lambda s: s.name)
@pytest.mark.long("seconds: every order of every two calls")
def test_the_reduced_exploration_reaches_the_same_contents_and_outcomes(scenario: Scenario) -> None:
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

# What is done in place of an attribute of the code: its owner, its name, and the value.
Patch = tuple[Any, str, Any]


def _only_listed(storage: Any, folder: str) -> list[str]:
    return [info.path for info in storage.list(folder)]


def _summaries(change: Callable[[Any, Record], Any]) -> Patch:
    """Records with another summary than the right one."""
    real = appending.next_summary
    return appending, "next_summary", lambda log, new, **o: change(real(log, new, **o), new)


def _deleting_own(kind: type[Exception]) -> Patch:
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

    return Replay, "create", create


def _own_files(record: Record) -> Iterator[str]:
    for ref in record.content.shards:
        for handle in ref.inline.handles if ref.inline is not None else ():
            if paths.attempt_of(handle.path) == record.content.attempt:
                yield handle.path


# The newest record also says what it retains, which hides an old listing of a commit that is not dropped yet.
NO_KEPT_FACTS: Patch = (Log, "_kept_facts", frozenset())
LISTED_ONLY: Patch = (readers, "list_fresh", _only_listed)
NOTHING_REPLACED: Patch = (summaries, "_replaced_outputs", lambda log, new: set())
NOTHING_RETRACTED: Patch = (committing, "_find_replaced", lambda log, content: ())
NO_LOSS: Patch = (sweeping, "rebuild_settled", nothing_lost)
NO_LOOK_FOR_LOSS: Patch = (Log, "_check_settled", lambda log, below, own: None)
plan_sweep, find_needed, explore = sweeping.plan_sweep, cleaning._find_needed, Scenario.explore

# For each bug its scenario, by a part of the name, and its patches.
BUGS: dict[str, tuple[str, list[Patch]]] = {
    "its own attempt is not looked for": (
        "a zombie, its retry, and the next",
        [(Log, "of_attempt", lambda log, attempt: None)],
    ),
    "no fence": (
        "two attempts at one interval, and a quarantine",
        [(committing, "_fences", lambda entry, content: False)],
    ),
    "the base is not planned anew": (
        "a re-run of an earlier interval",
        [(committing, "_check_base", lambda log, prepared: None)],
    ),
    "what was forgotten is not looked for": (
        "a key is forgotten while the day before",
        [(committing, "check_commit", lambda log, prepared, who: None)],
    ),
    "nothing becomes stale": (
        "a re-run of an earlier interval",
        [(committing, "stale_marks", lambda log, content, new_id: {})],
    ),
    "files are not verified": (
        "a file that was acked",
        [(commit_attempt, "_verify_written", lambda storage, prepared: None)],
    ),
    "a stale state is kept for the newest": (
        "behind a stale day",
        [(retaining, "valid_states", lambda log, new, marks: ())],
    ),
    "whoever loses an id deletes": ("a reproduction that changes nothing for it", [_deleting_own(AlreadyExists)]),
    "whoever hears no answer deletes": ("answer is lost, its retry", [_deleting_own(UnknownOutcome)]),
    "what others need is deleted": (
        "a zombie, its retry, and the next",
        [(cleaning, "_find_needed", lambda storage, now: Needed(paths=set(), attempts=frozenset()))],
    ),
    "what an interval wrote itself is looked for at its base": (
        "after a later one was quarantined",
        [(cleaning, "_find_needed", lambda storage, now: replace(find_needed(storage, now), attempts=frozenset()))],
    ),
    "an id is freed": (
        "a re-run of an earlier interval",
        [(Replay, "replace", lambda self, path, data, *, generation: self.delete(path))],
    ),
    "a sweep does not tell the log": (
        "a sweeper that takes them for dead",
        [(sweeping, "plan_sweep", lambda *a, **o: replace(plan_sweep(*a, **o), abandon=()))],
    ),
    "a commit does not say what it replaced": ("replaced two days, and the day after", [NOTHING_RETRACTED]),
    "what a sweep abandons is not settled": (
        "a re-run that a sweep takes for dead",
        [(appending, "ends_of", lambda entries: iter(()))],
    ),
    "what is dropping is forgotten by the next": (
        "a third committer, tight retention",
        [_summaries(lambda s, new: replace(s, dropping=s.dropping[-1:]))],
    ),
    "what is unpublished is forgotten by the next": (
        "a third committer, tight retention",
        [_summaries(lambda s, new: replace(s, unpublished=tuple(u for u in s.unpublished if u.id == new.id)))],
    ),
    "output that was replaced is nobody's to delete": ("and a re-run of the first day", [NOTHING_REPLACED]),
    "what replaces passes for a reproduction": (
        "its own former result",
        [(committing, "reproduces", lambda log, content: 1 if content.attempt == "s" else None)],
    ),
    "output schemas are compared at begin only": (
        "widens the output otherwise",
        [(output_schemas, "check_output_schema", lambda *of: None)],
    ),
    "a restore retracts nothing": ("retracts output, and an attempt", [NOTHING_RETRACTED]),
    "files of retracted output stay": ("retracts output, and a re-run", [NOTHING_REPLACED]),
    "what marks mean for the retained is not carried on": (
        "after its first result was quarantined",
        [(summaries, "_find_refused", lambda log, new, asked_of: ())],
    ),
    "whose output was replaced is not carried on": (
        "an interval that replaced two days, and the day after",
        [_summaries(lambda summary, new: replace(summary, replaced_outputs=()))],
    ),
    "what is kept is not what is retained": (
        "two that remember",
        [_summaries(lambda s, new: replace(s, kept=tuple(replace(k, base_id=None) for k in s.kept)))],
    ),
    "a clean-up asks nobody who reads": (
        "an attempt that drops what it reads",
        [(cleaning, "leased_checkpoints", lambda storage, now: ({}, []))],
    ),
    "lost files are not written anew": ("two days lost whose records are shrunk", [NO_LOSS, NO_LOOK_FOR_LOSS]),
    "a file written anew lists no output": (
        "two sweepers find a day lost whose record is shrunk",
        [(settling, "outputs_of", lambda entry: ())],
    ),
    "a fence is looked for in a listing only": ("stale listings: two attempts", [LISTED_ONLY, NO_KEPT_FACTS]),
    "output is looked for in a listing only": ("stale listings: an attempt, a re-run", [LISTED_ONLY, NO_KEPT_FACTS]),
    "commits go on during a release": (
        "without the checkpoint, one answer lost",
        [(committing, "_check_no_release", lambda log, who: None)],
    ),
    "a release adds no record": (
        "without the checkpoint, and the next begin",
        [(quarantining, "_append_fence", lambda at, name: None)],
    ),
    "a quarantine is looked for in a listing only": (
        "stale listings: a quarantine",
        [(logs, "list_fresh", _only_listed)],
    ),
    "a lease is looked for in a listing only": (
        "stale listings: a lease",
        [(cleaning, "listed_files", lambda storage, folder: list(storage.list(folder)))],
    ),
    "of a chunk, the day after an adopted one is committed": (
        "two days at once, and another try of the first",
        [(commit_attempt.CommitResult, "created", lambda self, checkpoint_id: True)],
    ),
    "a sweep goes by the clock of its host": (
        "skewed clocks: a lease, ",
        [(interleavings, "storage_now_ms", lambda storage, *, dry_run: time.time_ns() // 1_000_000)],
    ),
    "a host dates the files that it writes": (
        "skewed clocks: a lease an hour behind",
        [(Scenario, "explore", lambda self: explore(self, host_dates_files=True))],
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in BUGS[name][1]:
            stack.enter_context(mock.patch.object(*patch))
        yield


def bug(scenario: str, where: Any, name: str, *more: Patch) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function, which gets what it replaces as its first argument, take the place of an attribute."""
    real = getattr(where, name)

    def add(instead: Callable[..., Any]) -> Callable[..., Any]:
        patch = (where, name, lambda *rest, **options: instead(real, *rest, **options))
        BUGS[instead.__name__.replace("_", " ")] = (scenario, [patch, *more])
        return instead

    return add


@bug("a sweeper that takes them for dead", commit_attempt, "plan_commit")
def a_sweep_that_names_me_is_overlooked(real: Any, log: Log, *rest: Any) -> Any:
    entries = {n: replace(e, abandoned=()) if isinstance(e, SweepRecord) else e for n, e in log.entries.items()}
    return real(log_in_memory(entries, log.quarantined), *rest)


def _keep_all(log: Log, new: Record, marks: Any, *rest: Any) -> Any:
    return retaining.plan_retention(log, new, marks, KeepLast(1000))


@bug("a third committer, tight retention", cleaning, "clean_up", (committing, "plan_retention", _keep_all))
def retention_apart_from_the_commit(clean_up: Any, *what: Any) -> Any:
    """Records retain all; whoever cleans up applies the policy to the log that it read."""
    read_newest = cleaning.read_newest

    def thinned(*what: Any) -> Log:
        log = read_newest(*what)
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

    with mock.patch.object(cleaning, "read_newest", thinned):
        return clean_up(*what)


@bug("two attempts at one interval, and a quarantine", Replay, "create")
def a_record_is_written_over(real: Any, self: Replay, path: str, data: bytes) -> Any:
    return self.put(path, data) if path.startswith(paths.CHECKPOINTS) else real(self, path, data)


@bug("answer is lost, its retry", Coordinator, "commit")
def whose_base_moved_deletes(real: Any, self: Coordinator, attempt: str) -> Any:
    try:
        return real(self, attempt)
    except BaseMoved:
        commit_attempt._delete_own(self.storage, self.log(), self.load_prepared(attempt).content)
        raise


@bug("a re-run of an earlier interval", Coordinator, "clean_up")
def shrunk_before_its_files_are_deleted(real: Any, self: Coordinator) -> Any:
    doomed: list[str] = []
    with mock.patch.object(type(self.storage), "delete", lambda storage, path, **_: doomed.append(path) or True):
        result = real(self)
    for path in doomed:
        self.storage.delete(path)
    return result


def _mark_published(storage: Any, interval: Any, checkpoint_id: int) -> None:
    with suppress(AlreadyExists):
        mark = record_codec.encode(Published(id=checkpoint_id, interval=interval))
        storage.create(paths.published(interval, checkpoint_id), mark)


@bug("run again while its output is published", publish_output, "_publish")
def marked_before_the_hook_ran(real: Any, storage: Any, now: Log, interval: Any, which: int, *a: Any, **o: Any) -> Any:
    _mark_published(storage, interval, which)
    return real(storage, now, interval, which, *a, **o)


@bug("run again while its output is published", publish_output, "_publish")
def what_was_published_meanwhile_is_not_looked_at(
    real: Any, storage: Any, now: Log, interval: Any, checkpoint_id: int, hook: Any, **_: Any
) -> Any:
    entry = readers.RecordReader(storage, checkpoint_id).fresh(checkpoint_id)
    if not isinstance(entry, Record):
        return []
    hook(entry)
    _mark_published(storage, interval, checkpoint_id)
    return [checkpoint_id]


@bug("which may replace nothing", committing, "choose_base")
def output_of_another_cut_is_looked_for_at_begin_only(real: Any, log: Log, *rest: Any, **options: Any) -> Any:
    with mock.patch.object(lineage, "overlapping_outputs", lambda log, interval: []):
        return real(log, *rest, **options)


@bug("which may replace what is there", committing, "choose_base")
def a_permission_covers_what_came_later(real: Any, *rest: Any, as_of: int) -> Any:
    return real(*rest)


@bug("and a re-run of the first day", commit_attempt, "append")
def what_is_below_is_settled_behind_the_next_record(real: Any, storage: Any, log: Log, entry: Any) -> Any:
    with mock.patch.object(appending, "settle", lambda storage, log: None):
        made = real(storage, log, entry)
    appending.settle(storage, log)
    return made


@bug("and a re-run of the first day", commit_attempt, "append")
def the_hint_comes_before_the_record(real: Any, storage: Any, log: Log, entry: Any) -> Any:
    appending.note_head(storage, log, entry.id)
    return real(storage, log, entry)


# The mark of what the sink has stays, so that nobody can have died in the hook.
@bug(
    "and an interval that replaces two days",
    appending,
    "next_summary",
    (sweeping, "_outdated_marks", lambda files, now: set()),
)
def a_sink_is_not_told_what_was_replaced(real: Any, log: Log, new: Any, **options: Any) -> Any:
    summary = real(log, new, **options)
    mine = (u for u in summary.unpublished if u.id != new.id or u.interval == new.content.interval)
    return replace(summary, unpublished=tuple(mine))


@bug("widens the output otherwise", committing, "with_schemas")
def a_rewind_takes_the_schemas_back(real: Any, log: Log, content: Any) -> Any:
    target = log.entries[content.base_id] if content.kind == "restore" else None
    content, output, late = real(log, content)
    return content, target.output_schemas if isinstance(target, Record) else output, late


@bug("two that remember", appending, "next_summary")
def a_re_run_brings_back_how_far_commits_reach(real: Any, log: Log, new: Any, **options: Any) -> Any:
    summary = real(log, new, **options)
    return replace(summary, latest_end_ms=new.interval.end_ms) if isinstance(new, Record) else summary


@bug("an attempt that drops what it reads", Coordinator, "clean_up")
def leases_are_listed_before_the_log_is_read(real: Any, self: Coordinator) -> Any:
    early = [*self.storage.list(paths.LEASES)]
    with mock.patch.object(cleaning, "plan_leases", lambda leases, newest: plan_leases(early, newest)):
        return real(self)


@bug("an attempt that drops what it reads", commit_actors, "take_lease")
def a_reader_looks_at_the_log_before_its_lease_is_there(real: Any, storage: Any, checkpoint_id: int, what: str) -> Any:
    leasing.check_retained(storage, checkpoint_id)
    with mock.patch.object(leasing, "check_retained", lambda storage, checkpoint_id: None):
        return real(storage, checkpoint_id, what)


@bug("two sweepers find a day lost whose record is shrunk", sweeping, "_sweep")
def lost_files_are_written_anew_after_the_sweep(real: Any, storage: Any, *rest: Any) -> Any:
    with mock.patch.object(*NO_LOSS), mock.patch.object(*NO_LOOK_FOR_LOSS):
        found = real(storage, *rest)
    settling.rebuild_settled(storage)
    return found


@bug("stale listings: two attempts", commit_attempt, "append", NO_KEPT_FACTS)
def what_is_settled_is_noted_behind_the_next_record(real: Any, storage: Any, log: Log, entry: Any) -> Any:
    noted: list[Any] = []
    with mock.patch.object(appending, "note_names", lambda *what: noted.append(what)):
        made = real(storage, log, entry)
    for what in noted:
        appending.note_names(*what)
    return made


@bug("without the checkpoint, and a second release", quarantining, "_check_release")
def a_release_looks_only_before_it_begins(real: Any, at: Any, log: Log, checkpoint_id: int) -> None:
    if not log.quarantined[checkpoint_id].releasing:
        real(at, log, checkpoint_id)


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.long("seconds", runs_in="ci")
def test_each_planted_bug_breaks_a_rule(name: str) -> None:
    """Without the check some interleaving breaks a rule: the checker can fail, and the check is needed."""
    scenario = named(BUGS[name][0])
    # That a process finds a file missing and says so is not what is looked for.
    actors = [replace(a, may=(*a.may, StateUnusable)) for a in scenario.actors]
    with planted(name), pytest.raises(Violation) as found:
        replace(scenario, actors=actors).explore()
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
def test_removing_a_redundant_second_check_breaks_no_rule(plant: Any, scenario: str) -> None:
    """Two checks that nothing depends on as long as the others are made: no interleaving goes wrong without them."""
    with plant():
        named(scenario).explore()


def test_removing_two_redundant_checks_together_breaks_a_rule() -> None:
    """Without the first look for its own attempt, a retry believes that it lost; then the references are what saves the files."""
    blind = planted("its own attempt is not looked for")
    with blind, own_files_whoever_needs_them(), pytest.raises(Violation, match="what is needed is there"):
        named("its retry, and the next").explore()
