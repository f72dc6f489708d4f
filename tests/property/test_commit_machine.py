"""Random histories of a few pipelines against a model of them that shares no rule with the code.

The model knows sections 5 and 6 of the design as plain loops over plain values: which attempt may commit, what becomes stale, what
is kept, what an interval starts from. What the model foretells has to happen, by class of error too. Processes die at any storage
call or lose an answer; then the log says whether the call took effect, and nothing else than one or the other may be seen. Folders
are listed as they were some time ago, and the clocks of the hosts are an hour wrong.

``CAIRN_MODEL_EXAMPLES=2000`` runs that many histories instead of the few of the suite, at random.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.forgotten_keys import forgets_of
from state_backend.checkpoint.rewind import plan_rewind
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.shard.manifest import manifest_of
from state_backend.shard.transfer import copy_all
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval, to_ms
from state_backend.values.marks import Savepoint
from state_backend.values.records import Forget, ForgottenKey, InlineShard, OutputFile, Permissions, Prepared
from tests.support.checkpoints import content, day, files_in, manifest, sst, start_ms
from tests.support.commit_model import (
    DAY_MS,
    HOST,
    HOUR_MS,
    INTERVALS,
    SEEN,
    Entry,
    Forgets,
    House,
    Late,
    LosesOne,
    Model,
    Try,
    run_ref,
)
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import FaultyStorage, StopHere, stop_at
from tests.support.tiers import ALL, at_tier

EXAMPLES = int(os.environ.get("CAIRN_MODEL_EXAMPLES", "0"))
STEPS = 50
WHICH = st.integers(0, 10**6)
LAST = st.integers(1, 4)


class Pipelines(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.names = 0
        self.houses = [House("main", self.storage_ms)]
        self.savepoints: list[tuple[MemoryStorage, Savepoint, Try, tuple[Forgets, ...]]] = []
        # Each history begins with a right clock: its replay would go another way with the last one's.
        HOST.ahead_ms, HOST.now_ms = 0, lambda: self.now_ms
        SEEN["examples"] += 1

    def storage_ms(self) -> int:
        """The clock of the file server, which dates its files."""
        return self.now_ms

    # Hypothesis shrinks better over numbers than over values that come and go.
    def house(self, which: int) -> House:
        return self.houses[which % len(self.houses)]

    def attempt(self, house: House, which: int) -> Try:
        """Mostly one that sleeps."""
        every = list(house.model.tries.values())
        asleep = [t for t in every if t.prepared and house.model.of(t.name) is None]
        among = asleep if asleep and which % 4 else every
        return among[which // 4 % len(among)]

    def name(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def happens(self, expected: str, call: Callable[[], Any]) -> Any:
        """The call's result, or None after the error that was foretold."""
        SEEN["steps"] += 1
        try:
            result = call()
        except CairnError as error:
            assert type(error).__name__ == expected, f"{type(error).__name__}: {error}"
            SEEN[expected] += 1
            return None
        outcome = getattr(result, "outcome", "")
        assert expected in ("", outcome), f"foretold {expected}, got {outcome or result}"
        SEEN[outcome or "ok"] += 1
        return result

    @initialize(days=st.integers(0, 4))
    def some_days(self, days: int) -> None:
        for n in range(1, days + 1):
            made = self.begin_and_prepare(self.houses[0], day(n), None)
            assert made is not None
            self.commit_now(self.houses[0], made, 4)

    # --- attempts ---------------------------------------------------------------------------------------------------------------

    @rule(
        which=WHICH,
        pick=WHICH,
        gap=st.booleans(),
        stale=st.booleans(),
        replaces=st.booleans(),
        same_run_as=st.none() | WHICH,
        cleared=st.booleans(),
        fresh_files=st.booleans(),
        equal=st.booleans(),
        stops=st.sampled_from(["", "", "", "", "before it prepared", "its file is lost"]),
        then=st.sampled_from(["commit", "commit", "sleep", "another host sweeps"]),
        last=LAST,
    )
    def process(
        self,
        which: int,
        pick: int,
        gap: bool,
        stale: bool,
        replaces: bool,
        same_run_as: int | None,
        cleared: bool,
        fresh_files: bool,
        equal: bool,
        stops: str,
        then: str,
        last: int,
    ) -> None:
        """Begins and prepares, or dies between; the same run tries again, or another one does. Commits, or falls asleep, or works on
        while a host with another clock sweeps."""
        house = self.house(which)
        run, interval = None, self.some_interval(house, pick, gap, stale, replaces)
        if same_run_as is not None and house.model.tries:
            earlier = self.attempt(house, same_run_as)
            interval, (of, clear, attempt) = earlier.interval, earlier.run
            run = (of, clear + 1, 1) if cleared else (of, clear, attempt + 1)
        made = self.begin_and_prepare(house, interval, run, gap, stale, replaces, fresh_files, equal, stops)
        if made is not None and then == "commit":
            self.commit_now(house, made, last)
        if made is not None and then == "another host sweeps":
            self.sweep(which=which, hours=1, at=None, when="before", ahead=pick % 3 - 1)

    @rule(which=WHICH, pick=WHICH, one_run=st.booleans(), cleared=st.booleans(), turned=st.booleans(), last=LAST)
    def race(self, which: int, pick: int, one_run: bool, cleared: bool, turned: bool, last: int) -> None:
        """Two attempts at one interval, begun before either commits: of one run, of one that a person cleared, or of two."""
        house = self.house(which)
        interval = self.some_interval(house, pick)
        first = self.begin_and_prepare(house, interval, None)
        if first is None:
            return
        of, clear, attempt = first.run
        run = None if not one_run else (of, clear + 1, 1) if cleared else (of, clear, attempt + 1)
        second = self.begin_and_prepare(house, interval, run)
        assert second is not None
        for made in (second, first) if turned else (first, second):
            self.commit_now(house, made, last)

    def some_interval(
        self, house: House, pick: int, gap: bool = False, stale: bool = False, replaces: bool = False
    ) -> Interval:
        """Mostly one that can be processed."""
        base = partial(house.model.base, gap=gap, stale=stale, replace=replaces)
        possible = [i for i in INTERVALS if not isinstance(base(i), str)]
        among = possible if possible and pick % 5 else INTERVALS
        return among[pick // 5 % len(among)]

    def begin_and_prepare(
        self,
        house: House,
        interval: Interval,
        run: tuple[str, int, int] | None,
        gap: bool = False,
        stale: bool = False,
        replaces: bool = False,
        fresh_files: bool = False,
        equal: bool = False,
        stops: str = "",
    ) -> Try | None:
        """None after the error that was foretold, or if it stops before it prepared."""
        model, name = house.model, self.name()
        run = run or (name, 0, 1)
        permissions = Permissions(allow_gap=gap, allow_stale_base=stale, replace_overlapping=replaces)
        expected = model.base(interval, gap=gap, stale=stale, replace=replaces)
        begun = self.happens(
            expected if isinstance(expected, str) else "",
            lambda: house.coordinator().begin(interval, permissions=permissions, pipeline_start_ms=start_ms()),
        )
        if begun is None:
            return None
        base_id = begun.base.id if begun.base else None
        assert (base_id, begun.h0) == (expected, model.head)
        before = [e.made for e in model.entries() if e.made.interval == interval]
        digest = before[-1].digest if equal and before else self.names
        mine = f"state of {name}".encode()
        inherited = () if fresh_files or base_id is None else model.entry(base_id).made.state
        made = Try(
            name=name,
            kind="interval",
            interval=interval,
            run=run,
            h0=begun.h0,
            base=base_id,
            gap=gap,
            stale=stale,
            replace=replaces,
            quarantine_allowed=False,
            digest=digest,
            state=(*inherited, mine),
            written_ms=self.now_ms,
            filtered=frozenset(r.key.forget for r in begun.returning),
        )
        assert made.filtered == {f.name for f in model.returning(interval.start, base_id)}
        model.tries[name] = made
        new = house.storage.create(sst(name), mine)
        output = house.storage.create(paths.output(interval, name, 0, 0), b"output of " + mine)
        old = manifest_of(begun.base.content.shards[0], house.storage).handles if inherited else ()
        if stops == "before it prepared":
            return None
        ref = InlineShard(shard=0, inline=manifest([*old, new]))
        made_content = content(
            interval,
            name,
            base_id,
            run=run_ref(run),
            permissions=permissions,
            digest=digest,
            shards=(ref,),
            outputs=(OutputFile(handle=output, rows=1),),
            pipeline=house.name,
            filtered=tuple(sorted(made.filtered)),
        )
        house.coordinator().prepare(Prepared(h0=begun.h0, content=made_content))
        made.prepared = True
        if stops:
            house.storage.delete(sst(name))
            made.damaged = True
        return made

    @rule(which=WHICH, attempt=WHICH, last=LAST)
    def commit(self, which: int, attempt: int, last: int) -> None:
        """Any attempt at any time: a zombie wakes, a retry finds itself committed, a loser loses again."""
        house = self.house(which)
        if not house.model.tries:
            return
        self.commit_now(house, self.attempt(house, attempt), last)

    def commit_now(self, house: House, made: Try, last: int) -> None:
        expected, planned = self.foretold(house, made, last)
        result = self.happens(expected, lambda: house.coordinator(last).commit(made.name))
        self.follow(house, made, expected, planned)
        if result is not None:
            mine, run = house.model.of(made.name), made.run[:2]
            ours = [mine] if mine else [e for e in house.model.entries() if e.made.run[:2] == run and e.id > made.h0]
            assert result.id == ours[0].id, expected
            self.finish(house)

    def foretold(self, house: House, made: Try, last: int) -> tuple[str, tuple[Entry, dict[int, int | None]] | None]:
        if house.model.of(made.name) is not None:
            return "already", None
        verdict = house.model.judge(made)
        return ("committed", house.model.planned(made, last)) if verdict == "create" else (verdict, None)

    def follow(
        self, house: House, made: Try, expected: str, planned: tuple[Entry, dict[int, int | None]] | None
    ) -> None:
        if planned is not None:
            entry, house.model.kept = planned
            house.model.log.append(entry)
        if expected == "Fenced":
            made.lost = True

    def finish(self, house: House) -> None:
        """The rest of the task: publish, clean up."""
        house.coordinator().publish(house.hook)
        house.coordinator().clean_up()

    @rule(which=WHICH, attempt=WHICH, last=LAST, at=st.integers(0, 25), when=st.sampled_from(["before", "after"]))
    def commit_and_die(self, which: int, attempt: int, last: int, at: int, when: Any) -> None:
        """The process stops at a storage call of commit, publish or clean-up."""
        house = self.house(which)
        if not house.model.tries:
            return
        made = self.attempt(house, attempt)
        expected, planned = self.foretold(house, made, last)
        dying = FaultyStorage(house.storage, stop_at(at, when))

        def work() -> Any:
            result = house.coordinator(last, dying).commit(made.name)
            Coordinator(dying, house.name).publish(house.hook)
            Coordinator(dying, house.name).clean_up()
            return result

        try:
            self.happens(expected, work)
        except StopHere:
            SEEN["died"] += 1
            happened = house.storage.stat(paths.record(house.model.head + 1)) is not None
            assert planned is not None or not happened
            planned = planned if happened else None
            gone = house.storage.stat(paths.prepared(made.name)) is None
            if expected == "Fenced" and not gone:
                expected = ""
        self.follow(house, made, expected, planned)

    @rule(which=WHICH, attempt=WHICH, last=LAST, arrives=st.booleans())
    def commit_without_an_answer(self, which: int, attempt: int, last: int, arrives: bool) -> None:
        """UnknownOutcome: the create took effect, or is still under way."""
        house = self.house(which)
        fresh = attempt % 2 or not house.model.tries
        interval = self.some_interval(house, attempt)
        made = self.begin_and_prepare(house, interval, None) if fresh else self.attempt(house, attempt)
        if made is None:
            return
        expected, planned = self.foretold(house, made, last)
        if planned is None:
            return
        before = files_in(house.storage)
        losing = LosesOne(house.storage, {})
        losing.arrives = arrives
        if arrives:
            self.happens("already", lambda: house.coordinator(last, losing).commit(made.name))
            self.follow(house, made, expected, planned)
            return
        self.happens("UnknownOutcome", lambda: house.coordinator(last, losing).commit(made.name))
        assert files_in(house.storage) == before
        assert losing.sent is not None
        house.late.append(Late(*losing.sent, *planned))

    @rule(which=WHICH)
    def a_late_create_lands(self, which: int) -> None:
        house = self.house(which)
        if not house.late:
            return
        late = house.late.pop()
        free = late.entry.id == house.model.head + 1
        self.happens("" if free else "AlreadyExists", lambda: house.storage.create(late.path, late.data))
        if free:
            SEEN["landed late"] += 1
            house.model.log.append(late.entry)
            house.model.kept = late.kept

    # --- everything else ----------------------------------------------------------------------------------------------------------

    @rule(which=WHICH, goal=WHICH)
    def quarantine(self, which: int, goal: int) -> None:
        house = self.house(which)
        ids = [e.id for e in house.model.entries()]
        if ids:
            house.coordinator().quarantine(ids[goal % len(ids)], "wrong")
            id = ids[goal % len(ids)]
            if id not in house.model.refused:
                house.model.since_ms[id] = self.now_ms
            house.model.refused.add(id)

    @rule(which=WHICH, goal=WHICH, waits=st.booleans())
    def give_up_a_quarantined_one(self, which: int, goal: int, waits: bool) -> None:
        """A person drops it, or a day passes. The next commit does not retain it."""
        if waits:
            self.now_ms += DAY_MS
            return
        house = self.house(which)
        ids = sorted(house.model.refused)
        if ids:
            house.coordinator().drop_quarantined(ids[goal % len(ids)])
            house.model.since_ms.pop(ids[goal % len(ids)], None)
            SEEN["given up"] += 1

    @rule(which=WHICH, goal=WHICH)
    def release(self, which: int, goal: int) -> None:
        house = self.house(which)
        model, ids = house.model, sorted(house.model.refused)
        if not ids:
            return
        id = ids[goal % len(ids)]
        refused = model.computed_without(id) or model.hides(id)
        self.happens("UsageError" if refused else "", lambda: house.coordinator().release(id))
        SEEN["kept in quarantine" if refused else "released"] += 1
        if not refused:
            model.refused.remove(id)
            model.log.append(None)

    def goal(self, model: Model, goal: int) -> int:
        """An id, or rarely one too high."""
        return max(model.head - goal + 1, 1) if goal < 12 else model.head + 1

    def restorable(self, model: Model, target: int, stale: bool, quarantine_allowed: bool) -> str:
        if target > model.head or model.log[target - 1] is None:
            return "UsageError"
        if model.returning(None, target):
            return "UsageError"
        if target not in model.kept:
            return "StateUnusable"
        if not model.good(target) and not quarantine_allowed:
            return "StateUnusable"
        return "" if model.forgiven(target, stale) else "StaleStateError"

    @rule(
        which=WHICH,
        goal=st.integers(1, 12),
        stale=st.booleans(),
        quarantine_allowed=st.booleans(),
        retracts=st.booleans(),
        last=LAST,
        at=st.none() | st.integers(0, 12),
        when=st.sampled_from(["before", "after"]),
    )
    def go_back(
        self,
        which: int,
        goal: int,
        stale: bool,
        quarantine_allowed: bool,
        retracts: bool,
        last: int,
        at: int | None,
        when: Any,
    ) -> None:
        """A rewind, which may die; then the same call again. It may retract the output of later intervals."""
        house = self.house(which)
        model, name = house.model, self.name()
        target = self.goal(model, goal)
        permissions = Permissions(allow_stale_base=stale, allow_quarantined=quarantine_allowed)
        refused = self.restorable(model, target, stale, quarantine_allowed)
        run = (name, 0, 1)

        def go(over: Storage | None = None) -> Any:
            return house.coordinator(last, over).rewind(
                target, run=run_ref(run), attempt=name, permissions=permissions, retract_output=retracts
            )

        if refused:
            self.happens(refused, go)
            return
        source = model.entry(target).made
        allowed = {"stale": stale, "replace": retracts, "quarantine_allowed": quarantine_allowed}
        made = self.at_once(source, name, "restore", h0=model.head, base=target, **allowed)
        entry, kept = model.planned(made, last)
        plan = plan_rewind(house.coordinator().log(), target, permissions, retract_output=retracts)
        later = sorted(i for i in model.outputs() if i.end > made.interval.end)
        assert [*plan.retracts] == (later if retracts else [])
        SEEN["retracted"] += bool(plan.retracts)
        discards = plan.discards
        newly = {n for n, by in model.planned(made, 1000)[1].items() if by == entry.id}
        fresh = {n for n in model.kept if model.kept[n] is None and not model.replaced(n)}
        others = {n for n in fresh if model.entry(n).made.interval == made.interval}
        others = {n for n in others if model.entry(n).made.digest != made.digest}
        unusable = {n for n in model.kept if not model.good(n)}
        assert {d.id for d in discards} - unusable == (newly | others) - unusable
        if at is not None:
            try:
                go(FaultyStorage(house.storage, stop_at(at, when)))
            except StopHere:
                SEEN["died"] += 1
        before = house.storage.stat(paths.record(model.head + 1)) is not None
        self.happens("already" if before else "committed", go)
        model.tries[name] = made
        self.follow(house, made, "committed", (entry, kept))
        self.finish(house)

    def at_once(self, source: Try, name: str, kind: str, **changes: Any) -> Try:
        """An attempt of a command, which prepares and commits. Of its source it has the interval and the state, and no permission."""
        nothing: dict[str, Any] = dict.fromkeys(
            ("gap", "stale", "replace", "quarantine_allowed", "lost", "damaged"), False
        )
        nothing |= {"forgets": (), "filtered": frozenset(), "drops": frozenset()}
        own = {"run": (name, 0, 1), "written_ms": self.now_ms, "prepared": True}
        return replace(source, name=name, kind=kind, **nothing | own | changes)

    @precondition(lambda self: len(self.houses) < 3)
    @rule(
        which=WHICH,
        goal=st.integers(1, 12),
        stale=st.booleans(),
        quarantine_allowed=st.booleans(),
        at=st.none() | st.integers(0, 12),
        when=st.sampled_from(["before", "after"]),
    )
    def split_off(
        self, which: int, goal: int, stale: bool, quarantine_allowed: bool, at: int | None, when: Any
    ) -> None:
        """A fork, which may die, with the same call again; the new pipeline then lives on its own."""
        house, name = self.house(which), self.name()
        model = house.model
        target = self.goal(model, goal)
        permissions = Permissions(allow_stale_base=stale, allow_quarantined=quarantine_allowed)
        refused = self.restorable(model, target, stale, quarantine_allowed)
        other = House(f"fork-{name}", self.storage_ms)

        def go(over: Storage | None = None) -> Any:
            into = other.coordinator(3, over)
            return into.fork(house.storage, target, run=run_ref((name, 0, 1)), attempt=name, permissions=permissions)

        if refused:
            self.happens(refused, go)
            assert not list(other.storage.list(""))
            return
        known = tuple(f for e in model.entries() for f in e.made.forgets)
        self.settle_fork(other, model.entry(target).made, name, go, at, when, permissions, known)

    def settle_fork(
        self,
        other: House,
        source: Try,
        name: str,
        go: Callable[..., Any],
        at: int | None,
        when: Any,
        permissions: Permissions,
        known: tuple[Forgets, ...],
    ) -> None:
        if at is not None:
            try:
                go(FaultyStorage(other.storage, stop_at(at, when)))
            except StopHere:
                SEEN["died"] += 1
        before = other.storage.stat(paths.record(1)) is not None
        self.happens("already" if before else "committed", go)
        allowed = {"stale": permissions.allow_stale_base, "quarantine_allowed": permissions.allow_quarantined}
        made = self.at_once(source, name, "restore", h0=0, base=None, forgets=known, **allowed)
        other.model.tries[name] = made
        self.follow(other, made, "committed", other.model.planned(made, 3))
        self.houses.append(other)
        SEEN["forks"] += 1

    @rule(which=WHICH, goal=WHICH)
    def save(self, which: int, goal: int) -> None:
        """A native savepoint: its own folder, which outlives everything."""
        house = self.house(which)
        if not house.model.kept:
            return
        ids = sorted(house.model.kept)
        record = house.coordinator().record(ids[goal % len(ids)])
        folder, name = MemoryStorage("memory://savepoint"), self.name()
        made = manifest_of(record.content.shards[0], house.storage)
        handles = copy_all(
            house.storage, folder, [(h, paths.shared(name, 0, 0, n, "sst")) for n, h in enumerate(made.handles)]
        )
        ref = InlineShard(shard=0, inline=manifest(handles))
        saved = replace(record.content, shards=(ref,), outputs=(), forget=forgets_of(record))
        savepoint = Savepoint(savepoint=name, format="native", checkpoint_id=record.id, content=saved)
        known = tuple(f for e in house.model.entries() if e.id <= record.id for f in e.made.forgets)
        self.savepoints.append((folder, savepoint, house.model.entry(record.id).made, known))
        SEEN["savepoints"] += 1

    @precondition(lambda self: len(self.houses) < 3 and self.savepoints)
    @rule(which=WHICH, at=st.none() | st.integers(0, 12), when=st.sampled_from(["before", "after"]))
    def split_off_a_savepoint(self, which: int, at: int | None, when: Any) -> None:
        folder, savepoint, source, known = self.savepoints[which % len(self.savepoints)]
        name = self.name()
        other = House(f"fork-{name}", self.storage_ms)

        def go(over: Storage | None = None) -> Any:
            into = other.coordinator(3, over)
            return into.fork(folder, savepoint, run=run_ref((name, 0, 1)), attempt=name)

        self.settle_fork(other, source, name, go, at, when, Permissions(), known)

    @rule(which=WHICH, refuses=st.integers(0, 3), drops=st.booleans(), commits=st.booleans(), last=LAST)
    def forget(self, which: int, refuses: int, drops: bool, commits: bool, last: int) -> None:
        """A key is forgotten: the newest state in a file of its own. Commits, or falls asleep."""
        house, name = self.house(which), self.name()
        model = house.model
        base = model.newest()
        if base is None or model.returning(None, base):
            return
        source, mine = model.entry(base).made, f"state of {name}".encode()
        until = max(e.made.interval.end for e in model.entries())
        made = self.at_once(
            source,
            name,
            "forget",
            h0=model.head,
            base=base,
            digest=self.names,
            state=(mine,),
            forgets=(Forgets(name=name, until=until, refuses=not refuses),),
            drops=frozenset(model.kept) if drops else frozenset(),
        )
        key = ForgottenKey(
            forget=name,
            salt="00",
            key_hash=name,
            key_group=0,
            max_parallelism=16,
            until_ms=to_ms(until),
            on_rerun="filter" if refuses else "refuse",
        )
        handle = house.storage.create(sst(name), mine)
        made_content = content(
            source.interval,
            name,
            base,
            kind="forget",
            run=run_ref(made.run),
            digest=made.digest,
            shards=(InlineShard(shard=0, inline=manifest([handle])),),
            pipeline=house.name,
            forget=Forget(keys=(key,), drops=tuple(sorted(made.drops))),
        )
        house.coordinator().prepare(Prepared(h0=made.h0, content=made_content))
        model.tries[name] = made
        SEEN["forgets"] += 1
        if commits:
            self.commit_now(house, made, last)

    @rule(which=WHICH, pick=WHICH, last=LAST)
    def forget_during_a_rerun(self, which: int, pick: int, last: int) -> None:
        """A key is forgotten after an earlier interval has read its rows again. Only the rule of forgotten keys refuses that commit."""
        house = self.house(which)
        model = house.model
        newest = model.newest()
        latest = model.entry(newest).made.interval.start if newest is not None else day(1).start
        earlier = [
            i for i in INTERVALS if i.end <= latest and not isinstance(model.base(i, gap=False, stale=False), str)
        ]
        if not earlier:
            return
        made = self.begin_and_prepare(house, earlier[pick % len(earlier)], None)
        assert made is not None
        self.forget(which=which, refuses=1, drops=False, commits=True, last=last)
        self.commit_now(house, made, last)

    @rule(
        which=WHICH,
        hours=st.integers(0, 3),
        at=st.none() | st.integers(0, 30),
        when=st.sampled_from(["before", "after"]),
        ahead=st.integers(-1, 1),
    )
    def sweep(self, which: int, hours: int, at: int | None, when: Any, ahead: int) -> None:
        """Attempts that were silent for two hours are abandoned; the sweep may die at any call, and its host's clock is so many hours
        ahead."""
        self.now_ms += hours * HOUR_MS
        HOST.ahead_ms = ahead * HOUR_MS
        house = self.house(which)
        model = house.model
        there = {paths.attempt_of(i.path) for i in house.storage.list("")}
        dead = {
            t.name
            for t in model.tries.values()
            if t.name in there - model.abandoned
            and model.of(t.name) is None
            and t.written_ms <= self.now_ms - 2 * HOUR_MS
        }
        storage: Storage = house.storage if at is None else FaultyStorage(house.storage, stop_at(at, when))
        SEEN["steps"] += 1
        try:
            result = sweep(storage, house.name, min_age=timedelta(hours=2))
            assert (set(result.record.abandoned) if result.record else set()) == dead
        except StopHere:
            SEEN["died"] += 1
            if house.storage.stat(paths.record(model.head + 1)) is None:
                return
        if dead:
            SEEN["sweeps"] += 1
            model.log.append(None)
            model.abandoned |= dead

    @rule(which=WHICH, ahead=st.integers(-1, 1))
    def another_host(self, which: int, ahead: int) -> None:
        """It lists these folders as they are now, until the next host is at work; its clock is so many hours ahead."""
        self.house(which).storage.freeze(paths.CHECKPOINTS, paths.SETTLED, paths.QUARANTINE, paths.PUBLISHED)
        HOST.ahead_ms = ahead * HOUR_MS
        SEEN["hosts"] += 1

    @rule(which=WHICH)
    def settle(self, which: int) -> None:
        """Whoever comes next publishes and cleans up: what is there is exactly what is needed, and every attempt's own."""
        house = self.house(which)
        self.finish(house)
        model, outputs = house.model, house.model.outputs()
        committed = {e.made.name for e in model.entries()}
        kept = [house.coordinator().record(id) for id in model.kept]
        needed = {h.path for r in kept for h in manifest_of(r.content.shards[0], house.storage).handles}
        needed |= {paths.output(i, e.made.name, 0, 0) for i, e in outputs.items()}
        needed |= {paths.prepared(r.content.attempt) for r in kept}
        there = {i.path for i in house.storage.list("") if paths.attempt_of(i.path) in committed}
        # Output of a retained checkpoint that a later run of its interval replaced may stay as long as that.
        old = {o.handle.path for r in kept for o in r.content.outputs}
        assert needed - old <= there <= needed | old | self.orphans(house), (needed - there, there - needed)
        for interval, entry in model.published().items():
            assert house.published[interval] == entry.id
        SEEN["settled"] += 1

    def orphans(self, house: House) -> set[str]:
        """Files that a fork or a rewind copied before it died, under the attempt that was committed later."""
        return {i.path for i in house.storage.list(paths.SHARED) if house.name.startswith("fork-")}

    # --- always -------------------------------------------------------------------------------------------------------------------

    @invariant()
    def everything_that_is_completed_can_be_restored(self) -> None:
        for house in self.houses:
            house.check_log()

    @invariant()
    def every_interval_starts_from_what_the_rules_say(self) -> None:
        for house in self.houses:
            for interval in INTERVALS:
                expected = house.model.base(interval, gap=False, stale=False)
                try:
                    begun = house.coordinator().begin(interval, permissions=Permissions(), pipeline_start_ms=start_ms())
                    found: int | str | None = begun.base.id if begun.base else None
                except CairnError as error:
                    found = type(error).__name__
                    SEEN[found] += 1
                assert found == expected, (house.name, interval)


@mock.patch("time.time_ns", HOST.time_ns)
def explore(examples: int) -> None:
    SEEN.clear()
    run_state_machine_as_test(
        Pipelines,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=not EXAMPLES,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_histories_of_pipelines_are_what_the_model_says() -> None:
    """F25, F38, F49, F53, F54, F56, S2, S3: begin, prepare, commit, crashes, zombies, re-runs, rewinds, forks, savepoints, retention,
    sweeps, quarantine and lost answers in any order."""
    explore(EXAMPLES or at_tier(fast=2, ci=8, all=100))
    print(dict(sorted(SEEN.items())))
    assert SEEN["committed"]
    if not ALL:
        return  # Few histories don't meet every outcome.
    for outcome in ("committed", "already", "adopted", "Fenced", "BaseMoved", "StateGapError", "StaleStateError"):
        assert SEEN[outcome], outcome
    for happening in (
        "Swept",
        "died",
        "sweeps",
        "forks",
        "savepoints",
        "UnknownOutcome",
        "CorruptFile",
        "settled",
        "hosts",
        "forgets",
        "released",
        "held in quarantine",
        "given up",
        "retracted",
    ):
        assert SEEN[happening], happening
