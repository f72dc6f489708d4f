"""A change of the code beside production, what it changes, and taking over exactly that; without Spark."""

from __future__ import annotations

import shlex
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn import testing, upstream, upstreams
from cairn.command.cli import app
from cairn.pipeline import Interval
from cairn.trials.promote_trial import plan_promotion, promote_past, restore_command
from cairn.trials.try_code import _decided_by
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.checkpoint import trials
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import (
    find_trial,
    intervals_of_trial,
    list_trials,
    remove_trial,
    renew_trial,
    root_of_trial,
    sweep_trials,
    trials_url,
)
from state_backend.inspection.compare_runs import Comparison, compare_runs
from state_backend.values.errors import (
    CairnError,
    CheckpointDropped,
    CorruptRecord,
    NotAsTried,
    SourceError,
    StateGapError,
    UsageError,
)
from state_backend.values.inputs import TriedUpstream
from state_backend.values.records import RunRef
from state_backend.values.retention import KeepLast
from tests.support.coordinator import Coordinator, coordinator_of
from tests.support.counting import DAYS, day, fresh_days, put_days
from tests.support.faulty_storage import StopHere
from tests.support.savepoints import take
from tests.support.trials import SESSION, Averaging, Doubling, Narrowing, bytes_of, pipeline_of, run, try_days

OLD = pipeline_of()
DOUBLED = pipeline_of(processor=Doubling)
AVERAGED = pipeline_of(processor=Averaging)
NAME, ON_SHARDS = "counting", partial(testing._on_shards, Averaging)
RUN = RunRef(run_id="by-hand", clear_number=0, try_number=1)
ROWS: Any = {n: [("ann", "pear", n + 1), ("bob", "fig", 5)][: 2 - n % 2] for n in range(6)}
days = fresh_days(ROWS)


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five days of it."""
    put_days(ROWS)
    made = tmp_path_factory.mktemp("production")
    run(OLD, made, range(5))
    return made


@pytest.fixture
def root(production: Path, tmp_path: Path) -> Path:
    """A copy of production."""
    return Path(shutil.copytree(production, tmp_path / "state"))


def compared(root: Path, **more: Any) -> Comparison:
    trial = find_trial(str(root), NAME)
    sides = []
    for above in (str(root), root_of_trial(str(root), NAME, trial.name)):
        coordinator = coordinator_of(OLD, above)
        sides.append((join_url(above, NAME), coordinator.log(), coordinator.storage))
    work = root.parent / f"{root.name}-work-{time.monotonic_ns()}"
    return compare_runs(sides[0], sides[1], intervals_of_trial(trial), work, **{"key": ["user", "kind"], **more})


def digests(root: Path | str) -> list[tuple[Interval, int]]:
    log = coordinator_of(OLD, str(root)).log()
    counting = {r.content.interval: r for r in sorted(log.completed(), key=lambda r: r.id)}
    return [(i, r.content.digest) for i, r in sorted(counting.items())]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_quarantined_checkpoint_with_another_state_does_not_block_a_trial(root: Path) -> None:
    """The last day ran with another state and was quarantined: the code must fit the newest state, which is the day's base."""
    run(AVERAGED, root, [5])
    coordinator_of(OLD, str(root)).quarantine(6, "wrong")
    assert try_days(DOUBLED, root, [5]).outcomes
    plan = plan_promotion(SESSION, DOUBLED, str(root))
    assert plan.back is not None and plan.back.id == 5


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_differs_from_production_in_which_a_key_was_erased(root: Path) -> None:
    try_days(OLD, root, [3, 4])
    assert [i.state for i in compared(root).intervals] == ["same", "same"]
    words = ["erase", "--root", str(root), "--pipeline", NAME, '{"user": "ann"}', "--yes"]
    assert CliRunner().invoke(app, words).exit_code == 0
    found = compared(root)
    assert [i.state for i in found.intervals] == ["same", "other"]
    assert [s["added"] for s in found.states if s["state"] == "total"] == [1]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_of_the_same_code_gives_equal_digests_and_leaves_production_unchanged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bytes_of(root / NAME)
    called: list[int] = []
    sink = replace(OLD, sink=lambda spark, files, interval, n: called.append(n))
    tried = try_days(sink, root, range(2, 5))
    assert [o.computed for o in tried.outcomes] == [True] * 3 and not called
    assert tried.trial.base is not None and tried.trial.base.id == 2
    # Equal digests: nothing but records is read.
    monkeypatch.setattr("state_backend.inspection.compare_runs.compare_outputs", None)
    monkeypatch.setattr("state_backend.inspection.compare_runs.compare_states", None)
    found = compared(root)
    assert found.same and [i.position for i in found.intervals] == ["same"] * 3
    assert bytes_of(root / NAME) == before
    # And what the trial wrote is what the plain run wrote, within a fifth.
    written = []
    for above in (str(root), tried.root):
        records = {r.content.interval: r.content for r in coordinator_of(OLD, above).log().completed()}
        written.append(sum(records[day(n)].totals.uploaded_bytes for n in range(2, 5)))
    assert 0 < written[1] <= 1.2 * written[0]
    # Again: nothing is computed, and the trial is prolonged.
    again = try_days(sink, root, range(2, 5), keep_for=timedelta(days=9))
    assert not any(o.computed for o in again.outcomes) and again.trial.ends_ms > tried.trial.ends_ms
    remove_trial(str(root), again.trial)
    assert not (root / ".trials").exists() and bytes_of(root / NAME) == before


def test_a_repeat_keeps_results_only_with_the_same_settings_and_source() -> None:
    plan: Any = SimpleNamespace(trial=SimpleNamespace(code_hash="c"), asked={})
    sources = [upstream("a"), upstream("a", back=1), *(upstreams(f, a=upstream("a")) for f in (bytes_of, compared))]
    changes: list[Any] = [
        *({"source": source} for source in sources),
        *({"time_zone": "Asia/Tokyo"}, {"output_schema": "n int"}, {"initial_state": bytes_of}),
        *({"renamed": {"total.a": "b"}}, {"dropped": ["total.a"]}, {"key": ["item"]}),
    ]
    found = {_decided_by(replace(OLD, **changed), plan, "UTC") for changed in (*changes, {})}
    assert len(found) == len(changes) + 1 and _decided_by(OLD, plan, "CET") not in found
    grown = replace(sources[0], tried={("r", "a"): TriedUpstream(root="r", span=day(1))})
    assert _decided_by(replace(OLD, source=grown), plan, "UTC") in found
    # Without a position of each interval, no hash is the same twice.
    asked: Any = SimpleNamespace(trial=plan.trial, asked={day(1): SimpleNamespace(position={"rows": 1})})
    for changed in (
        {"read_ahead": False},
        {"source": upstream("a", tracked=False)},
        {"source": partial(bytes_of, Lock())},
    ):
        assert _decided_by(replace(OLD, **changed), asked, "UTC") != _decided_by(replace(OLD, **changed), asked, "UTC")
    assert _decided_by(OLD, asked, "UTC") == _decided_by(OLD, asked, "UTC")


def test_a_repeat_computes_changed_days_of_a_source_that_is_asked_in_turn(root: Path) -> None:
    in_turn = replace(AVERAGED, read_ahead=False)
    try_days(in_turn, root, range(2, 5))
    DAYS[day(4).start] = [("ann", "kiwi", 9)]
    assert [o.computed for o in try_days(in_turn, root, range(2, 5)).outcomes] == [False, False, True]


@pytest.mark.long("seconds", runs_in="ci")
def test_a_trial_with_other_code_under_the_same_name_is_promoted_anew(root: Path) -> None:
    try_days(OLD, root, range(1, 4), trial="x")
    try_days(DOUBLED, root, [1], trial="x")  # The states stay equal, so day 2 and 3 are not stale, but of other code.
    with pytest.raises(UsageError, match="out of date") as raised:
        plan_promotion(SESSION, DOUBLED, str(root), past=True)
    assert [str(day(n)) in str(raised.value) for n in (1, 2, 3)] == [False, True, True]
    for pipeline in (DOUBLED, AVERAGED):
        try_days(pipeline, root, range(1, 4), trial="x")
        plan = plan_promotion(SESSION, pipeline, str(root), past=True)
        on_shards = partial(testing._on_shards, pipeline.processor)
        assert all(o.computed for o in promote_past(SESSION, pipeline, str(root), plan, on_shards=on_shards))
        assert compared(root).same


@pytest.mark.long("seconds", runs_in="ci")
def test_a_promotion_of_the_past_gives_the_trials_results_and_can_be_taken_back(root: Path, tmp_path: Path) -> None:
    """What production has committed behind the trial is run again too, or it would be stale."""
    try_days(AVERAGED, root, range(1, 4))
    before, newest = digests(root), coordinator_of(OLD, str(root)).record("latest").content.digest
    plan = plan_promotion(SESSION, AVERAGED, str(root), past=True)
    assert (len(plan.again), plan.behind) == (3, (day(4),))
    outcomes = promote_past(SESSION, replace(AVERAGED, retention=KeepLast(1)), str(root), plan, on_shards=ON_SHARDS)
    assert all(o.computed for o in outcomes)
    trial = find_trial(str(root), NAME)
    tried = dict(digests(root_of_trial(str(root), NAME, trial.name)))
    assert all(tried[day(n)] == dict(digests(root))[day(n)] for n in range(1, 4))
    fresh = tmp_path / "fresh"
    run(OLD, fresh, [0])
    run(AVERAGED, fresh, range(1, 5))
    assert digests(fresh) == digests(root) and digests(root) != before
    assert compared(root).same
    # The same call again does nothing.
    assert not any(o.computed for o in promote_past(SESSION, AVERAGED, str(root), plan, on_shards=ON_SHARDS))

    coordinator = coordinator_of(OLD, str(root))
    assert restore_command(coordinator.log(), plan, "/r") == "cairn restore 1 --root /r --pipeline counting --yes"
    assert plan.back is not None
    rewind(coordinator.at, plan.back.id, run=RUN, attempt="0" * 8 + "-0000-0000-0000-" + "0" * 12)
    run(OLD, root, range(1, 5))
    assert coordinator.record("latest").content.digest == newest


@pytest.mark.long("half a second", runs_in="ci")
def test_another_input_stops_the_deployment_before_that_interval_is_committed(root: Path) -> None:
    try_days(AVERAGED, root, range(1, 5))
    plan = plan_promotion(SESSION, AVERAGED, str(root), past=True)
    DAYS[day(3).start] = [("bob", "fig", 7)]
    there = dict(digests(root))
    with pytest.raises(NotAsTried) as raised:
        promote_past(SESSION, AVERAGED, str(root), plan, on_shards=ON_SHARDS)
    assert str(day(3)) in str(raised.value) and "has other input: " in str(raised.value)
    # The same call would fail again: the only advice is that of the message.
    assert str(raised.value).endswith("Remove the trial, and try again")
    (note,) = raised.value.__notes__
    assert note.endswith(f"it stopped at {day(3)}")
    assert dict(digests(root))[day(3)] == there[day(3)] and dict(digests(root))[day(2)] != there[day(2)]


def test_only_tried_code_can_be_promoted_for_future_intervals(root: Path) -> None:
    try_days(AVERAGED, root, range(3, 5))
    plan = plan_promotion(SESSION, AVERAGED, str(root))
    assert plan.again == () and plan.back is not None and plan.back.id == 5
    with pytest.raises(UsageError, match="Only tried code can be promoted"):
        plan_promotion(SESSION, DOUBLED, str(root))


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_cant_be_promoted_or_resumed_if_its_base_was_recomputed(root: Path) -> None:
    begun = try_days(AVERAGED, root, range(2, 5), trial="one")
    run(OLD, root, [1], reprocess="all")  # An equal state under another id is the same base.
    again = try_days(AVERAGED, root, range(2, 5), trial="one")
    assert again.trial.base == begun.trial.base and not any(o.computed for o in again.outcomes)
    DAYS[day(1).start] = [("ann", "kiwi", 9)]
    run(OLD, root, range(1, 5))
    with pytest.raises(UsageError, match="is not the state that trial 'one' began from"):
        plan_promotion(SESSION, AVERAGED, str(root), past=True)
    with pytest.raises(UsageError, match="Give the new trial another name, or remove the existing trial first"):
        try_days(AVERAGED, root, range(2, 5), trial="one")


@pytest.mark.long("half a second", runs_in="ci")
def test_an_incomplete_trial_is_not_promoted_and_can_be_resumed(root: Path) -> None:
    def stop(outcome: Any, progress: Any) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        try_days(AVERAGED, root, range(1, 5), on_outcome=stop)
    with pytest.raises(UsageError, match="2 of its 4 intervals are missing"):
        plan_promotion(SESSION, AVERAGED, str(root), past=True)
    assert [o.computed for o in try_days(AVERAGED, root, range(1, 5)).outcomes] == [False, False, True, True]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_can_be_resumed_after_its_base_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = pipeline_of(retention=KeepLast(2))
    run(short, tmp_path, range(3))
    begun = try_days(AVERAGED, tmp_path, [2], trial="one")
    run(short, tmp_path, range(3, 5))
    assert 2 not in coordinator_of(OLD, str(tmp_path)).log().retained
    again = try_days(AVERAGED, tmp_path, range(2, 5), trial="one")
    assert [o.computed for o in again.outcomes] == [False, True, True] and again.trial.base == begun.trial.base
    for pipeline in (DOUBLED, AVERAGED, DOUBLED):  # The trial itself keeps its fork, however often an interval runs.
        assert [o.computed for o in try_days(pipeline, tmp_path, [2], trial="one").outcomes] == [True]
    # One that has not begun can't.
    with pytest.raises(UsageError, match="a trial can't begin at"):
        try_days(AVERAGED, tmp_path, range(2, 5), trial="other")
    monkeypatch.setattr("cairn.trials.try_code.MOST_STATES", 1)  # One with many intervals drops its fork, and says so.
    try_days(AVERAGED, tmp_path, range(4, 6), trial="long")
    with pytest.raises(StateGapError) as raised:
        try_days(DOUBLED, tmp_path, range(4, 6), trial="long")
    assert "--remove long" in raised.value.__notes__[-1]


def test_a_sweep_removes_only_expired_trials(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = time.time_ns() // 1_000_000
    later_ms = now_ms + 2 * 3_600_000
    swept = partial(sweep_trials, str(root), NAME)
    with monkeypatch.context() as ahead:  # the clock of a host, and no matter
        ahead.setattr(time, "time_ns", lambda: (now_ms + 30 * 86_400_000) * 1_000_000)
        found: list[Any] = []  # by a sweep while the trial runs, after more than the hour
        sweeps = lambda *_: found.extend(swept(now_ms=later_ms))  # noqa: E731
        try_days(OLD, root, [4], trial="short", keep_for=timedelta(hours=1), on_outcome=sweeps)
        try_days(DOUBLED, root, [4], trial="long")
        assert swept() == found == []
    assert [r.name for r in sweep_trials(str(root), NAME, now_ms=later_ms, dry_run=True)] == ["short"]
    # Production's own sweep sees nothing of it.
    storage = open_storage(join_url(str(root), NAME))
    assert sweep(storage, NAME, now_ms=later_ms, min_age=timedelta(0), dry_run=True).plan.unknown == ()
    assert [r.name for r in sweep_trials(str(root), NAME, now_ms=later_ms)] == ["short"]
    assert [t.name for t in list_trials(str(root), NAME)] == ["long"]
    with pytest.raises(UsageError, match="Its trials: long"):
        find_trial(str(root), NAME, "short")


def removed_at(root: Path, monkeypatch: pytest.MonkeyPatch, removed: int, killed: int | None) -> bool:
    """Runs a trial of two days that is removed before its write of that number, and killed before another one. True if it came to
    the removal."""
    writes = 0

    def counted(call: Any) -> Any:
        def write(self: LocalStorage, *args: Any, **more: Any) -> Any:
            nonlocal writes
            # Write 0 is the trial's record. No trial can be removed before that write.
            if "/.trials/" in self.url and (writes or str(args[0]).startswith("trials/")):
                writes += 1
                if writes - 1 == killed:
                    raise StopHere
                if writes - 1 == removed:
                    remove_trial(str(root), find_trial(str(root), NAME))
            return call(self, *args, **more)

        return write

    with monkeypatch.context() as patch:
        for name in ("create", "upload", "replace", "copy_from"):
            patch.setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))
        with suppress(StopHere, UsageError):
            try_days(DOUBLED, root, range(2, 4))
            assert writes <= removed, "it did not notice that it was removed"
    return writes > removed


def check_removed_at(production: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, removed: int) -> bool:
    for killed in (None, removed + 1, removed + 3):
        root = Path(shutil.copytree(production, folder / f"{removed}-{killed}"))
        if not removed_at(root, monkeypatch, removed, killed):
            return False
        if killed is not None:
            sweep_trials(str(root), NAME, now_ms=time.time_ns() // 1_000_000)
        assert not (root / ".trials").exists(), f"removed before write {removed}, killed before {killed}"
        assert bytes_of(root) == bytes_of(production)
    return True


@pytest.mark.parametrize("removed", [1, 6, 14])
@pytest.mark.long("half a second", runs_in="ci")
def test_files_written_by_a_removed_trial_are_deleted_by_it_or_by_a_sweep(
    production: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    assert check_removed_at(production, tmp_path, monkeypatch, removed)


@pytest.mark.long("half a minute")
def test_a_trial_removed_before_any_of_its_writes_leaves_no_files(
    production: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = 1
    while check_removed_at(production, tmp_path, monkeypatch, removed):
        removed += 1
    assert removed > 10, removed


@pytest.mark.long("half a second", runs_in="ci")
def test_a_removed_trial_stops_though_another_of_its_name_began(root: Path) -> None:
    """The other one neither goes on with the files of the first, nor loses its own."""

    def begin_again(outcome: Any, progress: Any) -> None:
        if progress.done == 1:
            remove_trial(str(root), find_trial(str(root), NAME))
            try_days(DOUBLED, root, [2], trial="same")

    with pytest.raises(UsageError, match="was removed while it ran"):
        try_days(DOUBLED, root, range(2, 4), trial="same", on_outcome=begin_again)
    assert [o.computed for o in try_days(DOUBLED, root, range(2, 4), trial="same").outcomes] == [False, True]


def test_a_renewal_writes_its_end_though_another_renewal_came_between(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, stat = try_days(DOUBLED, root, [2], trial="same").trial, LocalStorage.stat
    others = [lambda: renew_trial(str(root), replace(trial, ends_ms=trial.ends_ms + 1))]

    def overtaken(self: LocalStorage, path: str) -> Any:
        found = stat(self, path)
        if path.startswith("trials/") and others:
            others.pop()()
        return found

    monkeypatch.setattr(LocalStorage, "stat", overtaken)
    assert renew_trial(str(root), replace(trial, ends_ms=trial.ends_ms + 2))
    assert find_trial(str(root), NAME).ends_ms == trial.ends_ms + 2
    assert not renew_trial(str(root), replace(trial, attempt="of the trial that had this name before"))
    assert find_trial(str(root), NAME).ends_ms == trial.ends_ms + 2


CALLS = ("create", "upload", "replace", "copy_from", "delete", "list", "stat", "read", "remove_all")


def overtaken_at(root: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> bool:
    """Runs a new trial of two days, and a second one of its name as a whole before the first one's call of that number. True if
    the first one came to that call."""
    calls, refused = 0, []

    def counted(call: Any) -> Any:
        def made(self: LocalStorage, *args: Any, **more: Any) -> Any:
            nonlocal calls
            if "/.trials/" in self.url:
                calls += 1
                if calls == at + 1:
                    begin("the second")
            return call(self, *args, **more)

        return made

    def begin(which: str) -> None:
        try:
            try_days(DOUBLED, root, range(2, 4), trial="same")
        except CairnError as error:
            assert "at the same time" in str(error), error
            refused.append(which)

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))
        begin("the first")
    assert len(refused) < 2, refused
    return calls > at


def check_overtaken_at(production: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> bool:
    root = Path(shutil.copytree(production, folder / str(at)))
    came = overtaken_at(root, monkeypatch, at)
    again = try_days(DOUBLED, root, range(2, 4), trial="same")
    assert not any(o.computed for o in again.outcomes), f"overtaken before call {at}: an interval is missing"
    alone = Path(shutil.copytree(production, folder / f"{at}-alone"))
    assert digests(again.root)[-2:] == digests(try_days(DOUBLED, alone, range(2, 4), trial="same").root)[-2:]
    assert bytes_of(root / NAME) == bytes_of(production / NAME)
    return came


@pytest.mark.parametrize("at", [*range(8), 12])  # With the record after the files, call 6 is the wrong moment.
@pytest.mark.long("half a second", runs_in="ci")
def test_two_calls_that_begin_a_trial_at_once_leave_a_complete_trial(
    production: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    assert check_overtaken_at(production, tmp_path, monkeypatch, at)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_folder_with_results_of_an_older_trial_is_refused_with_a_repair_command(root: Path) -> None:
    """Two trials that began at once left this before."""
    trial = try_days(DOUBLED, root, [2], trial="same").trial
    open_storage(trials_url(str(root), NAME)).delete("trials/same.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "remove_all", lambda url: None)
        with pytest.raises(UsageError, match="results of another trial of this name") as stuck:
            try_days(DOUBLED, root, [2], trial="same")
    assert find_trial(str(root), NAME).attempt != trial.attempt
    command = str(stuck.value).splitlines()[-1]
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert [o.computed for o in try_days(DOUBLED, root, [2], trial="same").outcomes] == [True]


@pytest.mark.long("two minutes")
def test_a_trial_begun_a_second_time_before_any_storage_call_is_complete(
    production: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call up to the end of the fork, and before some of the later ones."""
    at = 0
    while check_overtaken_at(production, tmp_path, monkeypatch, at):
        at += 1 if at < 60 else 17
    assert at > 100, at


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_that_is_killed_during_its_fork_leaves_only_a_lease_in_production(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bytes_of(root / NAME)

    def killed(*_: Any, **__: Any) -> None:
        raise StopHere

    with monkeypatch.context() as patch:
        patch.setattr("state_backend.checkpoint.rewind.take_over", killed)
        patch.setattr("state_backend.checkpoint.leases.give_back", lambda storage, path: None)
        with pytest.raises(StopHere):
            try_days(DOUBLED, root, [2], trial="same")
    left = bytes_of(root / NAME)
    assert {path.partition("/")[0] for path in {*left} - {*before}} == {"leases"} and left.items() >= before.items()
    later = time.time_ns() // 1_000_000 + 4 * 86_400_000
    sweep(coordinator_of(OLD, str(root)).storage, NAME, now_ms=later)
    assert not [*(root / NAME / "leases").glob("*.json")]


def test_a_sweep_keeps_a_trial_that_its_listing_misses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk lists a folder as it was some seconds ago."""
    tried = try_days(DOUBLED, root, [2])
    with monkeypatch.context() as patch:
        patch.setattr(trials, "list_trials", lambda root, pipeline: [])
        assert sweep_trials(str(root), NAME) == []
    assert find_trial(str(root), NAME) == tried.trial


@pytest.mark.long("half a second", runs_in="ci")
def test_a_sweep_removes_a_folder_of_trials_without_a_trial(root: Path) -> None:
    """A removal that stopped behind the record, and a trial that stopped before its own."""
    trial = try_days(DOUBLED, root, [2]).trial
    remove_trial(str(root), trial)
    storage = open_storage(trials_url(str(root), NAME))
    storage.create("trials/t.json", b"")
    storage.delete("trials/t.json")
    storage.create("clock", b"")
    assert sweep_trials(str(root), NAME) == []
    assert not (root / ".trials").exists()

    trial = try_days(DOUBLED, root, [2]).trial
    storage.create("clock", b"")  # left by a sweep that was killed
    assert [r.name for r in sweep_trials(str(root), NAME, now_ms=trial.ends_ms + 1)] == [trial.name]
    assert not (root / ".trials").exists()


def test_a_sweep_refuses_a_record_that_belongs_to_another_trial(root: Path) -> None:
    tried = try_days(DOUBLED, root, [2])
    records = root / ".trials" / NAME / "trials"
    shutil.copyfile(records / f"{tried.trial.name}.json", records / "forged.json")
    with pytest.raises(CorruptRecord, match=f"forged.json contains the record of another trial, '{tried.trial.name}'"):
        sweep_trials(str(root), NAME, now_ms=time.time_ns() // 1_000_000 + 10 * 86_400_000)
    assert Path(tried.root, NAME, "HEAD.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key": ["item"]}, "the key is"),
        ({"time_mode": "none"}, "time_mode is none"),
        ({"max_parallelism": 32}, "max_parallelism is 32"),
        (
            {"output_schema": "user string, kind string, total string, items array<string>, last array<long>"},
            "does not fit the output of",
        ),
    ],
)
def test_a_trial_incompatible_with_production_is_refused_before_the_first_row(
    root: Path, changes: dict[str, Any], says: str
) -> None:
    for first in (0, 2):  # from empty state as well
        with pytest.raises(UsageError, match=says):
            try_days(pipeline_of(**changes), root, range(first, 4))
    assert not (root / ".trials").exists()


def test_a_trial_with_unsuitable_code_source_or_intervals_is_refused_and_leaves_no_files(root: Path) -> None:
    with pytest.raises(UsageError, match="total"):
        try_days(pipeline_of(processor=Narrowing), root, range(2, 4))
    tried = try_days(OLD, root, [4])
    with pytest.raises(UsageError, match=r"is the root of a trial, .* Not possible there: other trial"):
        try_days(OLD, tried.root, [4])
    remove_trial(str(root), tried.trial)
    del DAYS[day(3).start]
    with pytest.raises(SourceError, match="the source raised"):
        try_days(OLD, root, range(2, 5))
    with pytest.raises(UsageError, match=r"The trial can begin at .*2024-01-06T00:00:00Z, or from a savepoint"):
        try_days(OLD, root, [9])
    half = [Interval(day(2).start, day(2).start + timedelta(hours=12))]
    with pytest.raises(UsageError, match="the boundaries differ"):
        from cairn.trials.try_code import try_code

        try_code(SESSION, OLD, half, str(root), code="m:N", now_ms=0)
    with pytest.raises(UsageError, match="has no trial below"):
        plan_promotion(SESSION, OLD, str(root))
    assert not (root / ".trials").exists()


def test_a_trial_can_begin_from_a_savepoint_only_at_the_savepoints_end(root: Path, tmp_path: Path) -> None:
    """Also where retention has dropped the checkpoint; but its state is not production's, so that it is deployed for what comes next only."""
    record = coordinator_of(OLD, str(root)).record(day(1).end)
    take(join_url(str(root), NAME), record, tmp_path / "saved", "native")
    tried = try_days(OLD, root, [2, 3], savepoint=str(tmp_path / "saved"))
    assert tried.trial.base is not None and tried.trial.base.savepoint == str(tmp_path / "saved")
    assert compared(root).same
    with pytest.raises(UsageError, match="Begin the trial where the savepoint ends"):
        try_days(OLD, root, [3, 4], savepoint=str(tmp_path / "saved"), trial="later")


def test_a_trials_root_refuses_other_trials_forks_runs_and_savepoints(root: Path) -> None:
    tried = try_days(OLD, root, [3, 4])
    trial_folder = open_storage(join_url(tried.root, NAME))
    with pytest.raises(UsageError, match=r"Not possible there: fork"):
        fork(trial_folder, 2, Coordinator(open_storage(join_url(str(root), "other")), "other").at, run=RUN, attempt="a")
    for command in (
        ["run", "--code", "tests.support.trials:OLD", "--count", "1"],
        ["savepoint", "--code", "tests.support.trials:OLD", "--folder", "/tmp/s"],
    ):
        done = CliRunner().invoke(app, [*command, "--root", tried.root])
        assert done.exit_code == 2 and f"Use production's root: {root}" in done.output


def test_output_files_that_vanish_during_a_compare_are_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_days(DOUBLED, root, [4])
    for file in (root / NAME / "output").rglob("part-*.parquet"):
        file.unlink()
    with pytest.raises(CheckpointDropped, match="Compare again"):
        compared(root)


def test_a_compare_by_a_key_that_is_not_an_output_column_is_refused(root: Path) -> None:
    try_days(DOUBLED, root, [4])
    with pytest.raises(UsageError, match="the key column 'name' is not in the output of both sides"):
        compared(root, key=["name"])
