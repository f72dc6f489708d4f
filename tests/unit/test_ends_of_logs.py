"""A record keeps where logs ended when no result was out of date. Tests: what makes that end invalid, and when none is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from state_backend.chains import judge_inputs
from state_backend.chains.ends_of_logs import changed_only_by, has_only_grown, mark_of
from state_backend.chains.inputs_of import attempt_at
from state_backend.chains.judge_inputs import Chains, followed_in
from state_backend.chains.pin_inputs import Reader, check_earlier, pin
from state_backend.checkpoint.log import Log, read_log
from state_backend.inspection.pipeline_status import status_of
from state_backend.values.errors import CorruptRecord
from state_backend.values.inputs import Edge, LogMark, followed_after
from state_backend.values.records import Permissions, own_run
from state_backend.values.retention import KeepLast
from tests.support.chain_world import ROOT, World
from tests.support.checkpoints import Folder, day

UP, GONE = Edge(pipeline="up"), Edge(pipeline="gone")
READER = Reader(root=ROOT, pipeline="down", interval=day(3), schedule=None)


def mark_at(log: Log, head: int) -> LogMark:
    end_ms = max((log.whole(n).content.interval.end_ms for n in range(1, head + 1)), default=None)
    return LogMark(pipeline="up", root=None, head=head, attempt=attempt_at(log, head) or "", end_ms=end_ms)


def days_1_2_4() -> Folder:
    folder = Folder(days=2)
    folder.run(day(4), "a4", permissions=Permissions(allow_gap=True))
    return folder


def test_a_log_has_only_grown_if_each_interval_lies_behind_all_earlier_ones() -> None:
    log = read_log(days_1_2_4().storage)
    assert all(has_only_grown(log, mark_at(log, n)) for n in range(4)) and changed_only_by(log, mark_of(log, "up"), ())
    for differs in ({"attempt": "another folder"}, {"quarantined": (1,)}, {"head": 4}, {"head": 2, "end_ms": 1 << 50}):
        assert not has_only_grown(log, replace(mark_at(log, 3 if "end_ms" not in differs else 2), **differs))
    assert changed_only_by(log, mark_at(log, 1), {2, 3}) and not changed_only_by(log, mark_at(log, 1), {3})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: folder.run(day(2), "b2"), id="a correction"),
        pytest.param(lambda folder: folder.run(day(3), "b3"), id="an interval between others"),
        pytest.param(lambda folder: folder.coordinator.rewind(1, run=own_run("back"), attempt="back"), id="a restore"),
        pytest.param(lambda folder: folder.coordinator.quarantine(2, "wrong"), id="a quarantine"),
    ],
)
def test_a_log_with_a_correction_restore_or_quarantine_has_not_only_grown(change: Callable[[Folder], object]) -> None:
    folder = days_1_2_4()
    mark = mark_of(read_log(folder.storage), "up")
    change(folder)
    assert not has_only_grown(read_log(folder.storage), mark)


def test_a_read_from_before_the_upstream_was_restored_from_backup_is_out_of_date() -> None:
    world = World({"up": (), "down": (UP,)})
    for n, name in ((1, "up"), (2, "up"), (1, "down"), (2, "down")):
        world.run(name, n)
    storage = world.folders["up"].storage
    backup = {info.path: storage.read(info.path) for info in storage.list("")}
    world.run("up", 3)
    read, _ = pin(world.chains(), READER, UP)
    world.folders["up"] = Folder()
    for path, data in backup.items():
        world.folders["up"].storage.create(path, data)
    world.raw["up", 3] = 7
    world.run("up", 3)
    chains = world.chains()
    check_earlier(chains, READER, chains.log(ROOT, "down"))
    followed = followed_after(followed_in(chains.log(ROOT, "down")), [read])
    fresh_at = chains.fresh_at(ROOT, "down", [read])
    world.folders["down"].run(day(3), "d3", inputs=(read,), followed=followed, fresh_at=fresh_at)
    assert {*world.chains().judged(ROOT, "down")} == {day(3)}


def test_a_stale_result_that_is_committed_while_a_later_interval_is_computed_is_found() -> None:
    world = World({"up": (), "down": (UP,)})
    world.run("up", 1)
    old, _ = pin(world.chains(), replace(READER, interval=day(1)), UP)
    world.raw["up", 1] = 5
    for n, name in ((1, "up"), (1, "down"), (2, "up")):
        world.run(name, n)
    chains, down = world.chains(), world.folders["down"]
    read, _ = pin(chains, replace(READER, interval=day(2)), UP)
    known = {"followed": followed_in(chains.log(ROOT, "down")), "fresh_at": chains.fresh_at(ROOT, "down", [read])}
    down.run(day(1), "late", inputs=(old,), followed=known["followed"])
    down.run(day(2), "d2", inputs=(read,), **known)
    assert known["fresh_at"] and {*world.chains().judged(ROOT, "down")} == {day(1), day(2)}


def test_an_upstream_that_is_no_longer_read_and_unreadable_stops_no_run() -> None:
    world = World({"up": (), "gone": (), "down": (UP, GONE)})
    for name in world.edges:
        world.run(name, 1)
    world.edges["down"] = (UP,)
    world.run("down", 1)

    def opened(_: str, name: str) -> Log:
        if name == "gone":
            raise CorruptRecord("no access")
        return world.log(name)

    chains, reader = Chains(open_log=opened), replace(READER, interval=day(1))
    check_earlier(chains, reader, chains.log(ROOT, "down"))
    assert chains.fresh_at(ROOT, "down", [pin(chains, reader, UP)[0]]) is None


def test_an_upstream_with_lost_files_makes_its_readers_unreadable_and_raises_nothing() -> None:
    world = World({"up": (), "down": (UP,)})
    for n, name in ((1, "up"), (2, "up"), (1, "down"), (2, "down"), (1, "up")):
        world.raw["up", 1] = 5
        world.run(name, n)
    storage = world.folders["up"].storage
    world.folders["up"].run(day(1), "again", digest=9)
    for info in [*storage.list("settled/commits/")]:
        storage.delete(info.path)
    assert {verdict.kind for verdict in world.chains().judged(ROOT, "down").values()} == {"unreadable"}


def test_a_status_needs_no_record_that_a_later_commit_drops() -> None:
    folder = Folder(days=3, policy=KeepLast(5))
    folder.run(day(1), "b1", digest=7)
    with mock.patch.object(judge_inputs, "locate", lambda *_: folder.coordinator.at):
        log = Chains().log(ROOT, "up")
    folder.coordinator.policy = KeepLast(1)
    for n in (2, 3):
        folder.run(day(n), f"b{n}")
    folder.publish_and_clean_up()
    assert "stale" in str(status_of(log, "up", folder.storage).problem)
