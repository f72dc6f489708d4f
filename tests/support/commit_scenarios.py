"""Who meets whom in the checker; run it as ``python -m tests.support.commit_scenarios`` for the figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import append_record as appending
from state_backend.checkpoint import clean_up_dropped as cleaning
from state_backend.checkpoint import commit_attempt
from state_backend.checkpoint import sweep_files as sweeping
from state_backend.formats import paths
from state_backend.values.errors import (
    AttemptLost,
    CorruptFile,
    StateUnusable,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions
from state_backend.values.retention import AnyOf, KeepLast, KeepQuarantined, RetentionPolicy
from tests.support.checkpoints import DAY, content, day, run, sst
from tests.support.commit_actors import (
    careful,
    checkpoint_task,
    chunk_task,
    cleaner,
    coordinator,
    forgetter,
    prepare,
    quarantiner,
    reader,
    releaser,
    remembering_task,
    rewinder,
    sweeper,
    viewer,
    whole_interval,
)
from tests.support.commit_world import check, check_end, scene, sink
from tests.support.interleavings import GHOST, NOW_MS, Actor, Explorer, Figures, creates_of_records

TIGHT = KeepLast(1)
HOUR_MS = 3_600_000
X, Y = ("x", day(3), run("rx"), None), ("y", day(3), run("ry"), None)
FIRST, SECOND = ("x", day(3), run("r", 0, 1), None), ("y", day(3), run("r", 0, 2), None)
RERUN = ("z", day(1), run("rz"), None)
TWO_DAYS = Interval(day(1).start, day(2).end)
REPLACING = Permissions(replace_overlapping=True)
HALF = Interval(day(1).start, day(1).start + DAY / 2)
DAY_1_AGAIN = ("s", day(1), run("rs"), content(day(1), "a1").digest)
SAME_AGAIN = ("s", day(2), run("rs"), content(day(2), "a2").digest)


def task(attempt: str, name: str | None = None, *, policy: RetentionPolicy = TIGHT) -> Actor:
    return checkpoint_task(name or attempt.upper(), attempt, policy)


def remembering(attempt: str, *, policy: RetentionPolicy = TIGHT) -> Actor:
    return remembering_task(attempt.upper(), attempt, policy)


def unpublished(actor: Actor) -> Actor:
    """Commits and cleans up."""
    return replace(actor, stages=(actor.stages[0], actor.stages[-1]))


def next_day(policy: RetentionPolicy, **options: Any) -> Actor:
    """Processes and commits."""
    made = whole_interval("next", day(4), "w", policy, **options)
    return replace(made, stages=made.stages[:2])


def refused(attempt: str) -> Actor:
    made = task(attempt)
    return replace(made, may=(*made.may, CorruptFile))


def of_the_settled(path: str) -> bool:
    """What a committer writes down again of what is in the log. A few scenes show that it matters not where it stops there; in the
    others such a write is one with the next, since states are many enough."""
    if path in (paths.names(paths.LEASES), paths.names(paths.QUARANTINE)):
        return False
    return path.startswith(paths.SETTLED) or path == paths.HEAD


def no_note(storage: Any, log: Any, head_id: int) -> None:
    """``HEAD.json`` stays where the scene left it."""


def nothing_lost(storage: Any, *, dry_run: bool = False) -> tuple[str, ...]:
    """In a scene that lost no file a rebuild reads, and nothing goes by what it reads."""
    return ()


def any_but_the_sink(method: str, path: str) -> bool:
    return method != "put"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``scene`` is made anew for each exploration; ``big``: not in the suite; ``fine``: every write is a step; ``stale``: a listing may be
    old; ``loses``: a file in `settled/` is lost, and a sweep writes it anew."""

    name: str
    scene: Callable[[], MemoryStorage]
    actors: Sequence[Actor]
    faults: int = 0
    lossy: Callable[[str, str], bool] = creates_of_records
    big: bool = False
    fine: bool = False
    loses: bool = False
    stale: bool = False

    def explore(self, **options: Any) -> Figures:
        with ExitStack() as stack:
            # A commit that looks which ids are done makes records that differ by when others were done.
            for looks in () if self.fine else ("_read_published", "_done"):
                stack.enter_context(patch.object(appending, looks, lambda *_: set()))
            if not self.loses:
                stack.enter_context(patch.object(sweeping, "rebuild_settled", nothing_lost))
            if not self.fine:  # a write more after every commit, of what only tells where to begin to read
                stack.enter_context(patch.object(appending, "note_head", no_note))
                stack.enter_context(patch.object(commit_attempt, "note_head", no_note))
                stack.enter_context(patch.object(cleaning, "note_head", no_note))
            return self._explore(**options)

    def _explore(self, **options: Any) -> Figures:
        return Explorer(
            self.scene(),
            self.actors,
            **{
                "check": check,
                "check_end": check_end,
                "faults": self.faults,
                "lossy": self.lossy,
                "reduced": True,
                "stale": self.stale,
                "merges": (lambda path: False) if self.fine else of_the_settled,
                **options,
            },
        ).run()


def lost_file() -> MemoryStorage:
    """A file that was acked is not there."""
    storage = scene(2, [X])
    storage.delete(sst("x"))
    return storage


def lost_settled(days: int, lost: Sequence[int], *rest: Any, dropped: bool = False, **options: Any) -> MemoryStorage:
    """What the commits of these days did is not in `settled/`. ``dropped``: two days more are there, and the days before are tombstones
    whose clean-up is over."""
    storage = scene(days, *rest, **options)
    for n in (days + 1, days + 2) if dropped else ():
        made = coordinator(storage, TIGHT)
        prepare(storage, day(n), f"a{n}", run(f"run-{n}"))
        made.commit(f"a{n}")
        made.publish(lambda record: storage.create(sink(record.content.interval), str(record.id).encode()))
        for path in [info.path for info in storage.list(paths.CHECKPOINTS) if storage.stat(GHOST + info.path) is None]:
            storage.create(GHOST + path, storage.read(path))
        made.clean_up()
    for n in lost:
        assert storage.delete(paths.settled(day(n), n, "interval"))
    return storage


def quarantined_result() -> MemoryStorage:
    """Day 2 has two results, checkpoints 2 and 3. Checkpoint 3 is quarantined, and an attempt at day 3 has started from 2."""
    storage = scene(2, outputs=False)
    prepare(storage, day(2), "b2", run("run-b2"), outputs=False)
    made = coordinator(storage, KeepLast(5))
    made.commit("b2")
    made.quarantine(3, "wrong")
    prepare(storage, day(3), "x", run("rx"), outputs=False)
    return storage


def behind_a_stale_day() -> MemoryStorage:
    """Days 1 and 2 of three ran again with other results, so the newest state is day 2's, checkpoint 5. An attempt reproduces day 1."""
    storage = scene(3, outputs=False)
    made = coordinator(storage, KeepLast(9))
    for n in (1, 2):
        prepare(storage, day(n), f"b{n}", run(f"run-b{n}"), outputs=False)
        made.commit(f"b{n}")
    prepare(storage, day(1), "c", run("rc"), digest=content(day(1), "b1").digest, outputs=False)
    return storage


def waiting(actor: Actor) -> Actor:
    """A commit that meets a release is told to try again."""
    return replace(actor, may=(*actor.may, StorageUnavailable))


def together(policy: RetentionPolicy = TIGHT) -> Actor:
    """Computes days 3 and 4 at once, by the first try of a run."""
    return chunk_task("chunk", ((day(3), "x"), (day(4), "v")), run("r", 0, 1), policy)


SCENARIOS = (
    *(
        Scenario(
            name=f"a release, and an attempt that started without the checkpoint{how}",
            scene=quarantined_result,
            actors=(waiting(unpublished(task("x", policy=KeepLast(5)))), releaser(3), *more),
            **options,
        )
        for how, more, options in (
            ("", (), {}),
            (", one answer lost", (), {"faults": 1, "lossy": any_but_the_sink}),
            (", and a second release", (releaser(3, "again"),), {}),
            (", and the next begin", (waiting(next_day(KeepLast(5), outputs=False)),), {}),
        )
    ),
    Scenario(
        name="two attempts at one interval, and a quarantine of their base",
        scene=partial(scene, 2, [X, Y]),
        actors=(task("x", policy=KeepLast(5)), task("y", policy=KeepLast(5)), quarantiner(2)),
    ),
    Scenario(
        name="a reproduction of the first day behind a stale day, and a quarantine of the newest state",
        scene=behind_a_stale_day,
        actors=(unpublished(task("c")), quarantiner(5)),
    ),
    *(
        Scenario(
            name=f"two days at once, and {who}",
            scene=partial(scene, 2, there, outputs=False),
            actors=(together(), *others),
            faults=faults,
        )
        for who, there, others, faults in (
            ("another try of the first", [SECOND], [unpublished(task("y"))], 0),
            ("another run of the first", [Y], [unpublished(task("y"))], 0),
            ("a re-run of the day before", [SAME_AGAIN], [unpublished(task("s"))], 0),
            ("day 1 run again", [RERUN], [unpublished(task("z"))], 0),
            ("a forget", [], [forgetter("forget", "f", TIGHT, drops=True)], 0),
            ("another try, and a sweep", [SECOND], [unpublished(task("y")), sweeper()], 0),
            ("a quarantine of the day before, one answer lost", [], [quarantiner(2)], 1),
        )
    ),
    Scenario(
        name="two tries of one run",
        scene=partial(scene, 2, [FIRST, SECOND]),
        actors=(task("x", policy=KeepLast(3)), task("y", policy=KeepLast(3)), quarantiner(1)),
    ),
    Scenario(
        name="a zombie, its retry, and the next interval",
        scene=partial(scene, 2, [X], outputs=False),
        actors=(task("x", "zombie"), task("x", "retry"), whole_interval("next", day(4), "w", TIGHT, outputs=False)),
        big=True,
    ),
    Scenario(
        name="a zombie and its retry, manifests in files, and a re-run of the base that drops it",
        scene=partial(scene, 2, [X, SAME_AGAIN], inline=False, outputs=False),
        actors=(task("x", "zombie"), task("x", "retry"), task("s")),
    ),
    Scenario(
        name="an attempt, a re-run of an earlier interval, and a reproduction that moves the base",
        scene=partial(scene, 2, [X, RERUN, SAME_AGAIN]),
        actors=(task("x"), task("z"), task("s")),
    ),
    Scenario(
        name="two attempts, a third committer, tight retention",
        scene=partial(scene, 2, [X, Y, RERUN]),
        actors=(task("x"), task("y"), task("z")),
    ),
    Scenario(
        name="two attempts and a sweeper that takes them for dead",
        scene=partial(scene, 2, [X, Y]),
        actors=(task("x"), task("y"), sweeper()),
    ),
    Scenario(
        name="an attempt whose answer is lost, its retry, a quarantine",
        scene=partial(scene, 2, [X]),
        actors=(task("x", "zombie"), task("x", "retry"), quarantiner(2)),
        faults=1,
    ),
    Scenario(
        name="two attempts, one lost answer", scene=partial(scene, 2, [X, Y]), actors=(task("x"), task("y")), faults=1
    ),
    Scenario(
        name="a commit and a clean-up, any one answer lost",
        scene=partial(scene, 2, [X, SAME_AGAIN]),
        actors=(task("x"), task("s")),
        faults=1,
        lossy=any_but_the_sink,
    ),
    Scenario(
        name="an interval that is run again while its output is published",
        scene=partial(scene, 2, [X]),
        actors=(task("x", policy=KeepLast(3)), whole_interval("again", day(3), "y", KeepLast(3))),
    ),
    Scenario(
        name="an attempt, and a reproduction that changes nothing for it",
        scene=partial(scene, 2, [X, ("s", day(1), run("rs"), content(day(1), "a1").digest)]),
        actors=(task("x", policy=KeepLast(3)), task("s", policy=KeepLast(3))),
    ),
    Scenario(name="a file that was acked is not there", scene=lost_file, actors=(refused("x"), quarantiner(2))),
    Scenario(
        name="two attempts, a third committer, a quarantine",
        scene=partial(scene, 2, [X, Y, RERUN], outputs=False),
        actors=(task("x"), task("y"), task("z"), quarantiner(2)),
        big=True,
    ),
    Scenario(
        name="two attempts, a third committer, a sweeper",
        scene=partial(scene, 2, [X, Y, SAME_AGAIN], outputs=False),
        actors=(task("x"), task("y"), task("s"), sweeper()),
        big=True,
    ),
    Scenario(
        name="two attempts, a third committer, a sweeper, a quarantine; publishing apart",
        scene=partial(scene, 2, [X, Y, SAME_AGAIN], outputs=False),
        actors=(*map(unpublished, (task("x"), task("y"), task("s"))), sweeper(), quarantiner(2)),
        big=True,
    ),
    Scenario(
        name="a re-run whose output is published, and an interval that replaces two days",
        scene=partial(scene, 2, [RERUN]),
        actors=(task("z"), whole_interval("wide", TWO_DAYS, "w", TIGHT, permissions=REPLACING)),
    ),
    Scenario(
        name="an interval that replaced two days, and the day after",
        scene=partial(scene, 2, [("w", TWO_DAYS, run("rw"), None)], may_replace={"w"}),
        actors=(task("w"), whole_interval("next", day(3), "y", TIGHT)),
    ),
    Scenario(
        name="an interval that replaces two days, a re-run of one, and the day after",
        scene=partial(scene, 2, [("w", TWO_DAYS, run("rw"), None), RERUN], may_replace={"w"}),
        actors=(task("w"), task("z"), whole_interval("next", day(3), "y", TIGHT)),
        big=True,
    ),
    *(
        Scenario(
            name=f"a day whose output is current again while a half of it is computed, {how}",
            scene=partial(
                scene,
                1,
                [("x", HALF, run("rx"), None), DAY_1_AGAIN],
                recut=[("w", TWO_DAYS), ("v", day(2))],
                may_replace=may_replace,
            ),
            actors=(task("x", policy=KeepLast(5)), task("s", policy=KeepLast(5))),
        )
        for how, may_replace in (("which may replace nothing", ""), ("which may replace what is there", "x"))
    ),
    Scenario(
        name="a day that replaces two with its own former result, and the day after those",
        scene=partial(scene, 1, [DAY_1_AGAIN], recut=[("w", TWO_DAYS)], may_replace={"s"}),
        actors=(task("s", policy=KeepLast(5)), whole_interval("next", day(3), "y", KeepLast(5))),
    ),
    Scenario(
        name="an attempt, a re-run that widens the output otherwise, and a rewind",
        scene=partial(
            scene, 2, [X, DAY_1_AGAIN], columns={"a1": "integer", "a2": "integer", "x": "long", "s": "double"}
        ),
        actors=(task("x", policy=KeepLast(5)), task("s", policy=KeepLast(5)), rewinder("back", 1, "b", KeepLast(5))),
    ),
    Scenario(
        name="a rewind, an attempt, and a re-run",
        scene=partial(scene, 3, [("x", day(4), run("rx"), None)]),
        actors=(task("x"), rewinder("back", 2, "b", TIGHT), whole_interval("again", day(3), "y", TIGHT)),
        big=True,
    ),
    Scenario(
        name="a rewind and an attempt",
        scene=partial(scene, 3, [("x", day(4), run("rx"), None)]),
        actors=(task("x"), rewinder("back", 2, "b", TIGHT)),
    ),
    Scenario(
        name="a rewind that retracts output, and an attempt",
        scene=partial(scene, 3, [("x", day(4), run("rx"), None)]),
        actors=(task("x"), rewinder("back", 2, "b", TIGHT, retracts=True)),
    ),
    Scenario(
        name="a rewind that retracts output, and a re-run of a retracted interval",
        scene=partial(scene, 3, [("z", day(3), run("rz"), None)]),
        actors=(task("z", policy=KeepLast(5)), rewinder("back", 1, "b", KeepLast(5), retracts=True)),
    ),
    Scenario(
        name="every write a step: an attempt, and a re-run of the first day",
        scene=partial(scene, 2, [X, RERUN]),
        actors=(task("x"), task("z")),
        fine=True,
    ),
    Scenario(
        name="a re-run that a sweep takes for dead, and the next day",
        scene=partial(scene, 2, [RERUN], outputs=False),
        actors=(task("z"), sweeper(), whole_interval("next", day(3), "y", TIGHT, outputs=False)),
    ),
    Scenario(
        name="every write a step: an attempt and a sweeper that takes it for dead",
        scene=partial(scene, 2, [X], outputs=False),
        actors=(task("x"), sweeper()),
        fine=True,
    ),
    Scenario(
        name="a day that is made again after its first result was quarantined",
        scene=partial(scene, 2, [DAY_1_AGAIN], outputs=False),
        actors=(task("s", policy=KeepLast(5)), quarantiner(1)),
    ),
    Scenario(
        name="a day that is made again after a later one was quarantined",
        scene=partial(scene, 3, [DAY_1_AGAIN], outputs=False),
        # The quarantined checkpoint is dropped at once. Without a dropped checkpoint, a clean-up deletes nothing.
        actors=(task("s", policy=AnyOf((KeepLast(5), KeepQuarantined(0)))), quarantiner(3)),
    ),
    Scenario(
        name="a reader, and an attempt that drops what it reads",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(replace(task("x"), stages=task("x").stages[:1]), cleaner(TIGHT), reader(2)),
        faults=1,
        lossy=any_but_the_sink,
    ),
    Scenario(
        name="two that remember, of different days",
        scene=partial(scene, 2, [X, RERUN]),
        actors=(remembering("x"), remembering("z")),
    ),
    Scenario(
        name="one that remembers, a quarantine, and one answer that is lost",
        scene=partial(scene, 2, [X, SAME_AGAIN]),
        actors=(remembering("x"), task("s"), quarantiner(2)),
        faults=1,
        big=True,
    ),
    Scenario(
        name="one that remembers while its interval is run again",
        scene=partial(scene, 2, [X]),
        actors=(remembering("x", policy=KeepLast(3)), whole_interval("again", day(3), "y", KeepLast(3))),
    ),
    Scenario(
        name="one that remembers, a sweeper that takes it for dead, and a reader of what it drops",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(remembering("x"), sweeper(), reader(2)),
        big=True,
    ),
    Scenario(
        name="one that remembers, and a reader of what it drops",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(remembering("x"), reader(2)),
    ),
    Scenario(
        name="a reader of a checkpoint, an attempt that drops it, and a sweeper",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(task("x"), reader(2), sweeper()),
        big=True,
    ),
    Scenario(
        name="a reader of a checkpoint that one of two attempts drops",
        scene=partial(scene, 2, [X, RERUN], inline=False, outputs=False),
        actors=(task("x"), task("z"), reader(1)),
        big=True,
    ),
    Scenario(
        name="a sweeper finds a day lost whose record is there, and an attempt",
        scene=partial(lost_settled, 2, [1], [X]),
        actors=(task("x"), sweeper()),
        loses=True,
    ),
    Scenario(
        name="two sweepers find a day lost whose record is shrunk",
        scene=partial(lost_settled, 2, [1], dropped=True),
        actors=(sweeper(), sweeper("another")),
        fine=True,
        loses=True,
    ),
    Scenario(
        name="a sweeper finds a day lost that is run again meanwhile",
        scene=partial(lost_settled, 2, [1], [RERUN]),
        actors=(refused("z"), sweeper()),
        loses=True,
    ),
    Scenario(
        name="a sweeper finds two days lost whose records are shrunk, and the next day",
        scene=partial(lost_settled, 2, [1, 2], dropped=True),
        actors=(sweeper(), whole_interval("next", day(5), "y", TIGHT)),
        loses=True,
    ),
    Scenario(
        name="every write a step: a day that replaces two, a retry whose record is gone, and the day after",
        scene=partial(scene, 1, [DAY_1_AGAIN], recut=[("w", TWO_DAYS)], may_replace={"s"}),
        actors=(task("s"), task("s", "retry")),
        fine=True,
    ),
    Scenario(
        name="a key is forgotten with all older checkpoints, beside an attempt and a sweeper",
        scene=partial(scene, 2, [X], outputs=False),
        actors=(task("x"), forgetter("forget", "f", TIGHT, drops=True), sweeper()),
        big=True,
    ),
    Scenario(
        name="a key is forgotten with all older checkpoints, beside an attempt and a clean-up",
        scene=partial(scene, 2, [X], outputs=False),
        actors=(task("x"), forgetter("forget", "f", TIGHT, drops=True), cleaner(TIGHT)),
    ),
    Scenario(
        name="a key is forgotten while the day before it is prepared anew, and the next one begins",
        scene=partial(scene, 2, [RERUN], outputs=False),
        actors=(
            task("z", policy=KeepLast(5)),
            forgetter("forget", "f", KeepLast(5), drops=False),
            replace(
                whole_interval("next", day(3), "w", KeepLast(5), outputs=False),
                may=(AttemptLost, UnknownOutcome, StateUnusable, UsageError),
            ),
        ),
    ),
    Scenario(
        name="two forgets of one state, and who holds its files",
        scene=partial(scene, 2, outputs=False),
        actors=(forgetter("one", "f", TIGHT, drops=True), forgetter("other", "g", TIGHT, drops=True), reader(2)),
    ),
    Scenario(
        name="stale listings: two attempts at one interval, and the next day",
        scene=partial(scene, 2, [X, Y], outputs=False),
        actors=(
            *map(unpublished, (task("x", policy=KeepLast(5)), task("y", policy=KeepLast(5)))),
            next_day(KeepLast(5), outputs=False),
        ),
        stale=True,
    ),
    Scenario(
        name="stale listings: an attempt, a re-run of the first day, and who reads their output",
        scene=partial(scene, 2, [X, RERUN]),
        actors=(*map(unpublished, (task("x"), task("z"))), viewer(3)),
        stale=True,
    ),
    Scenario(
        name="stale listings: a lease, and an attempt that ends what it is on",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(replace(task("x"), stages=task("x").stages[:1]), cleaner(TIGHT), reader(2)),
        stale=True,
    ),
    Scenario(
        name="stale listings: a quarantine, and then a begin",
        scene=partial(scene, 3, [("x", day(4), run("rx"), None)], outputs=False),
        actors=(careful(3), unpublished(task("x", policy=KeepLast(5)))),
        stale=True,
    ),
    Scenario(
        name="stale listings: an attempt, the next day, and a sweep of what is old",
        scene=partial(scene, 2, [X]),
        actors=(unpublished(task("x")), next_day(TIGHT), sweeper()),
        stale=True,
        big=True,
    ),
    Scenario(
        name="stale listings: a re-run, a sweep of what is old, and who reads the outputs",
        scene=partial(scene, 2, [RERUN]),
        actors=(unpublished(task("z")), sweeper(), viewer(2)),
        stale=True,
        big=True,
    ),
    Scenario(
        name="skewed clocks: a lease an hour behind, and an attempt an hour ahead that ends what it is on",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(
            replace(task("x"), stages=task("x").stages[:1], ahead_ms=HOUR_MS),
            cleaner(TIGHT),
            replace(reader(2), ahead_ms=-HOUR_MS),
        ),
    ),
    Scenario(
        name="skewed clocks: a lease, an attempt that ends what it is on, and a sweep an hour ahead",
        scene=partial(scene, 2, [X], inline=False, outputs=False),
        actors=(
            replace(task("x"), stages=task("x").stages[:1]),
            cleaner(TIGHT),
            reader(2),
            replace(sweeper(min_age_ms=NOW_MS // 5), ahead_ms=HOUR_MS),
        ),
    ),
)


def main(names: Sequence[str]) -> None:
    for scenario in SCENARIOS:
        if names and not any(n in scenario.name for n in names):
            continue
        began = time.monotonic()
        figures = scenario.explore()
        print(f"{scenario.name}\n  {figures}, {figures.nodes} nodes, {time.monotonic() - began:.1f} s", flush=True)
        for outcome, ways in figures.outcomes.items():
            print(
                f"    {', '.join(f'{a.name} {o}' for a, o in zip(scenario.actors, outcome, strict=True))}: {ways:.3g}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
