"""Which results are out of date by what they read of other pipelines: random graphs in memory, against plain Python."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from cairn.command.repair_command import ran_here
from cairn.operations.intervals.plan_chain import plan_chain
from cairn.operations.intervals.plan_heal import plan_heal
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.chains.inputs_of import Piece, commits_in, parts_of
from state_backend.chains.judge_inputs import Chains, _is_fork, followed_in, judge_part, reached
from state_backend.chains.pin_inputs import Reader, check_earlier, pin
from state_backend.checkpoint.clean_up_dropped import tombstone_of
from state_backend.checkpoint.log import read_log
from state_backend.formats import paths
from state_backend.inspection.chain_of import chain_of
from state_backend.ports.storage import Storage
from state_backend.values.errors import InputNotReady, StateGapError, UsageError
from state_backend.values.inputs import Edge, followed_after, gaps_in
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions, own_run
from state_backend.values.retention import KeepLast
from state_backend.values.schedule import Every
from tests.support.chain_world import ROOT, SEEDS, World, planned, play, write_code
from tests.support.checkpoints import DAY, START, Folder, day, record
from tests.support.faulty_storage import FaultyStorage, StopHere, stop_at
from tests.support.tiers import ALL

JUDGE, PLAN = "state_backend.chains.judge_inputs", "cairn.operations.intervals.plan_chain"


def test_status_reports_results_that_an_upstream_correction_made_stale(tmp_path: Path) -> None:
    edges = {"sales": (), "report": (Edge(pipeline="sales"),), "board": (Edge(pipeline="report"),)}
    world = World(edges, root=f"file://{tmp_path}")
    for name in edges:
        for n in (1, 2):
            world.run(name, n)
    world.raw["sales", 2] = 4
    world.run("sales", 2)

    def cairn(*arguments: str) -> Result:
        return CliRunner().invoke(app, [arguments[0], "--root", world.root, *arguments[1:]])

    said = cairn("status", "--pipeline", "report")
    assert said.exit_code == 1
    assert f"{day(2)} is out of date: sales {day(2)} was changed by checkpoint 3 after it was read" in said.stdout
    shown = json.loads(cairn("status", "--pipeline", "board", "--json").stdout)
    assert [(one["start"], one["kind"]) for one in shown["outdated"]] == [("2024-01-02T00:00:00Z", "pending")]
    listed = {line.split()[0]: line for line in cairn("status").stdout.splitlines()[1:4]}
    assert "blocked" in listed["report"] and "1 stale by inputs" in listed["report"]
    assert "1 pending by inputs" in listed["board"] and "inputs" not in listed["sales"]
    assert chain_of(world.root, "report") == [(world.root, name) for name in edges]
    assert chain_of(world.root, "sales") == chain_of(world.root, "board") == chain_of(world.root, "report")
    (tmp_path / "sales").rename(tmp_path / "sold")
    gone = json.loads(cairn("status", "--pipeline", "report", "--json").stdout)
    assert [one["kind"] for one in gone["outdated"]] == ["unreadable"] * 2
    assert gone["outdated"][0]["why"] == f"there is no pipeline sales below {world.root}"


def test_status_why_lists_the_path_from_the_cause_and_prints_the_heal_command(tmp_path: Path) -> None:
    sales, prices = Edge(pipeline="sales"), Edge(pipeline="prices")
    edges = {"sales": (), "prices": (), "report": (sales,), "board": (Edge(pipeline="report"), prices)}
    world = World(edges, root=f"file://{tmp_path}")
    for name in edges:
        for n in (1, 2, 3):
            world.run(name, n)
    for name, n in (("sales", 2), ("prices", 3)):
        world.raw[name, n] = 4
        world.run(name, n)

    def asked(name: str, when: str) -> tuple[list[tuple[str, str, int | None]], str | None]:
        where = ["--root", world.root, "--pipeline", name, "--why", when]
        said, shown = (CliRunner().invoke(app, ["status", *where, *more]) for more in ([], ["--json"]))
        found = json.loads(shown.stdout)
        assert said.exit_code == shown.exit_code == (1 if found["path"] else 0)
        assert all(f"  {s['pipeline']} 2024" in said.stdout and s["why"] in said.stdout for s in found["path"])
        path = [(s["pipeline"], s["why"].split(" at ")[0], s["checkpoint"]) for s in found["path"]]
        return path, found["command"]

    heal = f"cairn heal --root {world.root} --pipeline board --to 2024-01-03T00:00:00Z --dag board --chain"
    follow = [("report", "stale", None), ("board", "pending", None)]
    assert asked("board", "2024-01-02T12:00") == ([("sales", "corrected", 4), *follow], heal)
    after = [
        ("sales", "corrected", 4),
        ("sales", f"stale: checkpoint 4 recomputed {day(2)} with another result", None),
        ("report", "pending", None),
    ]
    assert asked("report", "2024-01-03")[0] == after
    assert asked("board", "2024-01-03")[0] == [("prices", "corrected", 4), ("board", "stale", None)]
    assert asked("board", "2024-01-01") == asked("sales", "2024-01-02") == ([], None)
    (tmp_path / "sales").rename(tmp_path / "sold")
    where = ["status", "--root", world.root, "--pipeline", "report", "--why"]
    assert "\n  sales: can't be read\n" in CliRunner().invoke(app, [*where, "2024-01-02"]).stdout
    assert CliRunner().invoke(app, [*where, "2024-01-09"]).exit_code == 2


def test_status_summarises_results_from_before_input_tracking_in_one_line(tmp_path: Path) -> None:
    world = World({"sales": (), "report": (Edge(pipeline="sales"),)}, root=f"file://{tmp_path}")
    for n in (1, 2, 3):
        world.run("sales", n)
        world.folders["report"].run(day(n), f"old{n}") if n < 3 else world.run("report", n)
    world.raw["sales", 1] = 5
    world.run("sales", 1)
    why = CliRunner().invoke(app, ["status", "--root", world.root, "--pipeline", "report", "--why", "2024-01-01"])
    assert why.exit_code == 0 and "; unknown: its record does not say" in why.stdout
    said = CliRunner().invoke(app, ["status", "--root", world.root, "--pipeline", "report"]).stdout.splitlines()
    assert [one[2:9] for one in said if "unknown" in one] == ["2 from "]
    world.folders["report"].coordinator.policy = KeepLast(1)
    for name, n in itertools.product(("sales", "report"), (1, 2, 3)):
        world.run(name, n)
    world.raw["sales", 3] = 4
    world.run("sales", 3)
    said = CliRunner().invoke(app, ["status", "--root", world.root, "--pipeline", "report"]).stdout
    assert said.splitlines()[-1].endswith(" --to 2024-01-03T00:00:00Z --dag report")


def test_heal_over_a_chain_plans_upstream_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_code(tmp_path, monkeypatch, "sales", "report", "board", "longer")
    edges = {"sales": (), "report": (Edge(pipeline="sales"),), "board": (Edge(pipeline="report"),)}
    world = World(edges, root=f"file://{tmp_path}/root", code="three")
    for name in edges:
        for n in (1, 2):
            world.run(name, n)
    world.raw["sales", 2] = 4
    world.run("sales", 2)
    where = ["--root", world.root, "--to", "2024-01-02", "--dry-run"]
    board = CliRunner().invoke(app, ["heal", "--pipeline", "board", *where])
    assert board.exit_code == 1 and f"{day(2)} waits: report {day(2)}" in board.stdout
    printed = shlex.split(board.stdout.splitlines()[-1])
    assert printed[-1] == "--chain"
    chain = CliRunner().invoke(app, [*printed[1:], "--dry-run", "--json"])
    shown = json.loads(chain.stdout)
    assert [one["pipeline"] for one in shown] == [*edges] and [one["healthy"] for one in shown] == [True, False, False]
    assert (
        shown[1]["to_run"] == [{"start": "2024-01-02T00:00:00Z", "reason": "input changed"}]
        and shown[2]["to_run"] == []
    )
    assert {one["command"] for one in shown[1:]} == {shlex.join(printed)}

    # `longer` reads both days in one interval, which starts before the day that `report` must run again.
    longer, both = Folder(open_storage(f"{world.root}/longer")), Interval(START, START + 2 * DAY)
    reader = Reader(root=world.root, pipeline="longer", interval=both, schedule=None)
    with mock.patch("state_backend.chains.pin_inputs.find_problem", return_value=None):
        reads = (pin(Chains(), reader, Edge(pipeline="report"))[0],)
    how = {"code": "three:longer", "run": own_run("direct__"), "schedule": Every(2 * 86_400_000)}
    longer.run(both, "a", pipeline="longer", inputs=reads, followed=followed_after((), reads), **how)
    where = ["--root", world.root, "--pipeline", "longer", "--to", "2024-01-01", "--chain", "--dry-run", "--json"]
    found = CliRunner().invoke(app, ["heal", *where])
    to_run = {one["pipeline"]: one["to_run"] for one in json.loads(found.stdout)}
    assert to_run["report"] == shown[1]["to_run"] and to_run["sales"] == []


THREE = {"sales": (), "report": (Edge(pipeline="sales", mapping="all"),), "board": (Edge(pipeline="report"),)}


def reasons(shown: dict[str, Any]) -> dict[str, list[tuple[int, str, bool]]]:
    """Day, reason and whether it is sure, by pipeline."""
    return {
        row["pipeline"]: [(int(one["start"][8:10]), one["reason"], one["sure"]) for one in row["intervals"]]
        for row in shown["pipelines"]
    }


def test_a_plan_lists_the_intervals_that_a_correction_a_restore_or_a_later_end_date_adds(tmp_path: Path) -> None:
    world = World(THREE, root=f"file://{tmp_path}", code="shop")
    for name in THREE:
        for n in (1, 2, 3):
            world.run(name, n)
    files = sorted(tmp_path.rglob("*"))
    assert planned(world)[0]["pipelines"] == [] and planned(world)[1] == "no interval has to run\n"
    shown, said, code = planned(world, "--rerun", "sales=2024-01-02")
    follow = [(2, "input changed", False), (3, "input changed", False)]
    assert reasons(shown) == {"sales": [(2, "run again", True), (3, "stale", False)], "report": follow, "board": follow}
    assert [one["cause"]["start"][:10] for one in shown["pipelines"][1]["intervals"]] == ["2024-01-02"] * 2
    assert shown["total"] == {"intervals": 6, "sure": 1, "rows": 6, "unknown": 0, "seconds": 0.0} and code == 0
    missing = planned(world, "--rerun", "sales=2024-01-02", "--to", "2024-01-04")[0]
    assert reasons(missing)["sales"][-1] == (4, "missing", True) and missing["commands"][0] == shown["commands"][0]
    run, heal = shown["commands"]
    at = "2024-01-02T00:00:00Z"
    assert run == f"cairn run --code shop:sales --root {world.root} --from {at} --to {at} --reprocess all"
    assert heal == f"cairn heal --root {world.root} --pipeline sales --to 2024-01-03T00:00:00Z --chain"
    assert f"\n{run}\n{heal}\n" in said and "if sales 2024-01-02 to 2024-01-03 differs" in said
    new, *_ = planned(world, "--rerun", "sales=2024-01-02", "--code", "sales=other:SALES")
    assert (
        reasons(new)["sales"] == [(2, "run again", True), (3, "run again", True)]
        and "other:SALES" in new["commands"][0]
    )
    later, said, _ = planned(world, "--to", "2024-01-04", "--code", "report=other:REPORT")
    assert reasons(later) == {name: [(4, "missing", True)] for name in THREE} and later["total"]["unknown"] == 3
    assert "at least 0 rows" in said and shlex.split(later["commands"][0])[-3:] == ["--code", "other:REPORT", "--chain"]
    back, *_ = planned(world, "--restore", "sales=1", "--pipeline", "board")
    assert reasons(back) == {"sales": [(2, "stale", True), (3, "stale", True)], "report": follow, "board": follow}
    assert back["commands"][0] == f"cairn restore 1 --root {world.root} --pipeline sales --yes"
    assert sorted(tmp_path.rglob("*")) == files, "a plan writes nothing"
    both, *_ = planned(world, "--to", "2024-01-04", "--code", "board=other:BOARD", "--code", "report=other:REPORT")
    told = [(c[c.index("--pipeline") + 1], *c[8:]) for c in map(shlex.split, both["commands"])]
    assert told == [("sales",), ("report", "--code", "other:REPORT"), ("board", "--code", "other:BOARD")]
    twice = "--rerun=sales=2024-01-01 --rerun=sales=2024-01-02"
    for wrong in (
        "--to=9999-12-31",
        "--rerun=sales=2024-02-01",
        "--rerun=x=2024-01-01",
        "--code=sales",
        "--to=x",
        "--pipeline=x",
        twice,
    ):
        assert CliRunner().invoke(app, ["plan", "--root", world.root, *wrong.split()]).exit_code == 2
    assert CliRunner().invoke(app, shlex.split(back["commands"][0])[1:]).exit_code == 0
    health = world.health(world.chains(), "sales")
    assert [to_run.interval for to_run in plan_heal(health, [*map(day, (1, 2, 3))], None).to_run] == [day(2), day(3)]


def test_a_plan_leaves_out_unrepairable_intervals_and_reports_untracked_intervals(tmp_path: Path) -> None:
    world = World({**THREE, "old": (Edge(pipeline="sales"),)}, root=f"file://{tmp_path}")
    world.run("sales", 1)
    world.folders["old"].run(day(1), "untracked")
    for n in (2, 3):
        world.run("sales", n)
        world.run("old", n)
    shown, said, _ = planned(world, "--rerun", "sales=2024-01-01", "--pipeline", "old")
    assert reasons(shown)["old"] == [(2, "input changed", False), (3, "input changed", False)]
    assert [one["start"][:10] for one in shown["pipelines"][1]["untold"]] == ["2024-01-01"] and "not tracked" in said
    for name in ("report", "board"):
        for n in (1, 2, 3):
            world.run(name, n)
    head = tmp_path / "board" / paths.record(world.log("board").head_id)
    right, wrong = head.read_bytes(), head.write_bytes(b"no record")
    shown, said, code = planned(world, "--rerun", "report=2024-01-02")
    assert (
        wrong and code == 1 and [one["pipeline"] for one in shown["unread"]] == ["board"] and reasons(shown)["report"]
    )
    head.write_bytes(right)
    (tmp_path / "sales").rename(tmp_path / "sold")
    shown, said, code = planned(world, "--rerun", "report=2024-01-02")
    assert code == 1 and not any(reasons(shown).values())
    assert {row["pipeline"]: len(row["left_out"]) for row in shown["pipelines"]} == {"report": 3, "board": 3, "old": 2}
    assert "left out: 2024-01-01 to 2024-01-04, 3 intervals: sales can't be read\n" in said
    assert f"cairn status --root {world.root} --pipeline report\n" in said


def test_a_plan_reruns_from_a_retained_base_and_heals_only_planned_pipelines(tmp_path: Path) -> None:
    other = f"file://{tmp_path}/other"
    edges = {"sales": (), "beside": (Edge(pipeline="sales"),), "report": (Edge(pipeline="sales", root=other),)}
    world = World(edges, root=f"file://{tmp_path}/root", code="shop")
    for name in ("sales", "beside"):
        world.folders[name] = Folder(open_storage(f"{other}/{name}"))
    for n, name in itertools.product((1, 2, 3), edges):
        world.folders[name].coordinator.policy = KeepLast(1)
        world.run(name, n)
    shown, *_ = planned(world, "--rerun", "sales=2024-01-03")
    dropped = [(1, "base dropped", True), (2, "base dropped", True)]
    assert reasons(shown)["sales"] == [*dropped, (3, "run again", True)]
    world.folders["sales"].run(day(5), "gap", permissions=Permissions(allow_gap=True))
    over, *_ = planned(world, "--rerun", "sales=2024-01-05", "--to", "2024-01-05")
    assert reasons(over)["sales"] == [*dropped, (3, "base dropped", True), (5, "run again", True)]
    run, heal = map(shlex.split, shown["commands"])
    assert (
        run[run.index("--from") + 1] == "2024-01-01T00:00:00Z" and run[run.index("--to") + 1] == "2024-01-03T00:00:00Z"
    )
    assert heal[2:6] == ["--root", world.root, "--pipeline", "report"], (
        "heal would run `beside`, which the plan does not have"
    )


@pytest.mark.parametrize(
    ("edge", "reads", "message"),
    [
        (Edge(pipeline="up", back=1), [1], None),
        (Edge(pipeline="up", mapping="all"), [1, 2], None),
        (Edge(pipeline="up", reads="state"), [2], None),
        (Edge(pipeline="up"), None, "the upstream has not committed it"),
        (Edge(pipeline="none"), None, "the upstream has no checkpoint yet"),
        (Edge(pipeline="long"), None, "reaches beyond"),
        (Edge(pipeline="down"), None, "read each other's same interval: down reads down"),
    ],
)
def test_an_interval_reads_only_committed_upstreams(edge: Edge, reads: list[int] | None, message: str | None) -> None:
    """Day 3 of `down` where the upstream has days 1 and 2, and `long` one interval of four days."""
    world = World({"up": (), "down": (Edge(pipeline="up"),), "none": (), "long": ()})
    for n in (1, 2):
        world.run("up", n)
        world.run("down", n)
    world.folders["long"].run(Interval(START, START + 4 * DAY), "a")
    reader = Reader(root=ROOT, pipeline="down", interval=day(2 if reads else 3), schedule=None)
    if reads is None:
        with pytest.raises((InputNotReady, UsageError), match=message):
            pin(world.chains(), reader, edge)
        return
    read, ids = pin(world.chains(), reader, edge)
    assert list(ids) == reads and sum(part.intervals for part in read.parts) == len(reads)
    assert read.head == 2 and all(part.digest is not None for part in read.parts)


def test_results_are_judged_by_the_upstreams_they_read_and_allowed_gaps_are_skipped() -> None:
    world = World({"up": (), "other": (), "down": (Edge(pipeline="up"),)})
    for name in ("up", "other", "down"):
        for n in (1, 2, 3):
            world.run(name, n)
    world.edges["down"] = (Edge(pipeline="other"),)  # the code changes: earlier results have still read `up`
    world.run("down", 3)
    world.raw["up", 1] = 5
    world.run("up", 1)
    judged = world.chains().judged(ROOT, "down")
    assert {interval: verdict.kind for interval, verdict in judged.items()}[day(1)] == "stale"
    assert [*gaps_in(Interval(START, START + 5 * DAY), [day(2), day(4)])] == [day(1), day(3), day(5)]

    begins = World({"up": (), "down": (Edge(pipeline="up", mapping="all"),)})
    begins.folders["up"].run(day(1), "a")
    begins.folders["up"].run(day(3), "c", permissions=Permissions(allow_gap=True))
    chains, reader = begins.chains(), Reader(root=ROOT, pipeline="down", interval=day(3), schedule=None)
    assert pin(chains, reader, begins.edges["down"][0])[1] == (1, 2)  # day 2 was left out on purpose
    with pytest.raises(InputNotReady, match="has not committed it"):
        pin(chains, replace(reader, interval=day(4)), begins.edges["down"][0])
    assert pin(chains, replace(reader, interval=day(2)), Edge(pipeline="up"))[1] == ()

    begins.folders["up"].run(day(5), "saved", kind="restore", base_id=None, h0=2, outputs=())
    begins.folders["up"].run(day(6), "d")
    assert begins.health(begins.chains(), "up").begin == day(6).end
    assert pin(begins.chains(), replace(reader, interval=day(6)), begins.edges["down"][0])[1] == (1, 2, 4)
    assert reached(begins.chains().node(ROOT, "up")) == day(6).end


@pytest.mark.parametrize("ran", [True, False], ids=["day 4 ran", "no day ran"])
@pytest.mark.parametrize(
    ("edge", "days", "fork", "reads"),
    [
        (Edge(pipeline="up"), (1, 3), "fork", None),
        (Edge(pipeline="up"), (2, 4), "fork", None),
        (Edge(pipeline="up", mapping="all"), (4, 4), "fork", None),
        (Edge(pipeline="up", reads="state"), (2, 2), "fork", None),
        (Edge(pipeline="up", back=1), (4, 4), "fork", None),
        (Edge(pipeline="up", back=1), (4, 4), "fork --from", []),
        (Edge(pipeline="up", reads="state"), (2, 3), "fork", [1]),
        (Edge(pipeline="up"), (4, 4), "fork", [2]),
        (Edge(pipeline="up", mapping="all"), (4, 4), "fork --from", [2]),
        (Edge(pipeline="up", mapping="all"), (4, 4), "import__", [2]),
    ],
)
def test_output_before_a_fork_is_an_error_unless_its_start_excludes_it(
    edge: Edge, days: tuple[int, int], fork: str, reads: list[int] | None, ran: bool
) -> None:
    """`up` began with the state of another pipeline at the end of day 3. With `--from`, its start lies within day 3."""
    world = World({"up": (), "down": ()})
    up = world.folders["up"] = Folder(MemoryStorage("memory://up"))
    how = {"pipeline_start_ms": day(3).start_ms + 1 if fork == "fork --from" else day(1).start_ms}
    up.coordinator.fork(Folder(days=3).storage, 3, run=own_run(fork), attempt="fork", **how)
    if ran:
        up.run(day(4), "u4", base_id=1, h0=1, **how)
    reader = Reader(root=ROOT, pipeline="down", interval=Interval(day(days[0]).start, day(days[1]).end), schedule=None)
    if reads is None or (reads == [2] and not ran):
        error, why = (InputNotReady, "has not committed it") if reads else (UsageError, "with the state of another pip")
        with pytest.raises(error, match=why):
            pin(world.chains(), reader, edge)
        return
    assert [*pin(world.chains(), reader, edge)[1]] == reads


@pytest.mark.parametrize(
    ("run_id", "saved", "is_fork"), [("fork__a", None, True), ("manual__a", None, True), ("restore__a", "s", False)]
)
def test_a_pipeline_that_began_with_a_savepoint_is_no_fork(run_id: str, saved: str | None, is_fork: bool) -> None:
    first = record(1, day(1), kind="restore", run=own_run(run_id), restored_from=saved)
    assert _is_fork(first) is is_fork
    assert _is_fork(tombstone_of(first)) is (run_id == "fork__a")  # a tombstone has only the run's id


def test_a_pipeline_that_reads_its_own_previous_interval_can_start_and_is_judged_stale() -> None:
    world = World({"up": (), "down": (Edge(pipeline="down", back=1), Edge(pipeline="up"))})
    for n in (1, 2, 3):
        world.run("up", n)
        reader = Reader(root=ROOT, pipeline="down", interval=day(n), schedule=None, start=START)
        reads = tuple(pin(world.chains(), reader, edge)[0] for edge in world.edges["down"])
        world.folders["down"].run(day(n), f"d{n}", inputs=reads, retention=KeepLast(1))
    planned = plan_chain(world.stages(down=3), START + 99 * DAY)[1]
    assert [one.reason for one in planned.planned.values()] == ["base dropped"] * 2 + ["run again"]
    world.raw["up", 1] = 5
    world.run("up", 1)
    chains = world.chains()
    assert chains.judged(ROOT, "up") == {}
    kinds = [verdict.kind for verdict in chains.judged(ROOT, "down").values()]
    assert kinds == [verdict.kind for verdict in world.chains().judged(ROOT, "down").values()]
    assert kinds[0] == "stale" and {*kinds[1:]} == {"pending"}


@pytest.mark.parametrize("other", [0, 1])
def test_changed_output_of_an_upstream_restored_from_backup_makes_its_readers_stale(tmp_path: Path, other: int) -> None:
    world = World({"up": (), "down": (Edge(pipeline="up"),)}, root=f"file://{tmp_path}/root")
    for n in (1, 2, 3):
        world.run("up", n)
        world.run("down", n)
        if n == 1:
            shutil.copytree(tmp_path / "root/up", tmp_path / "backup")
    shutil.rmtree(tmp_path / "root/up")
    shutil.copytree(tmp_path / "backup", tmp_path / "root/up")
    for n in (2, 3):
        world.raw["up", n] = n + other
        world.run("up", n)
    assert world.out_of_date()["down"] == ({2, 3} if other else set())  # compares with what is expected
    if other:
        world.run("down", 2)
        assert world.out_of_date()["down"] == {3}  # this one still has rows of the lost commit


def test_an_upstream_state_that_retention_dropped_is_refused_with_the_rerun_command() -> None:
    world, edge = World({"up": (), "down": ()}), Edge(pipeline="up", reads="state")
    up, reader = world.folders["up"], Reader(root=ROOT, pipeline="down", interval=day(1), schedule=None)
    up.run(day(1), "u1", digest=1, retention=KeepLast(1))
    read, _ = pin(world.chains(), reader, edge)
    world.folders["down"].run(day(1), "d1", inputs=(read,), followed=followed_after((), [read]))
    up.run(day(2), "u2", digest=2, retention=KeepLast(1))
    assert world.chains().judged(ROOT, "down") == {}  # the state is gone, and what was read of it is right
    with pytest.raises(
        StateGapError, match=r"checkpoint 1\n.*\ncairn backfill --dag up --from 2024-01-01T00:00:00Z --to"
    ):
        pin(world.chains(), reader, edge)
    up.run(day(1), "u3", digest=3, run=own_run("direct__"))
    assert pin(world.chains(), reader, edge)[1] == (3,)
    up.run(day(2), "u4", digest=4, run=own_run("direct__"))
    assert (
        world.chains().judged(ROOT, "down")[day(1)].why.endswith("after it was read; retention has dropped this state")
    )
    with pytest.raises(StateGapError, match=r"cairn run --code module:NAME --root .* --reprocess all"):
        pin(world.chains(), reader, edge)
    planned = plan_chain(world.stages(), START + 99 * DAY)[1]
    assert planned.left_out == {day(1): "retention has dropped the state of up at 2024-01-02T00:00:00Z"}


def test_results_accepted_by_a_restore_are_not_stale_after_retention_drops_the_restore() -> None:
    world = World({"up": (), "down": (Edge(pipeline="up"),)}, code="module")
    for name in ("up", "down"):
        for n in (1, 2, 3):
            world.run(name, n)
    folder = world.folders["down"]
    folder.coordinator.rewind(2, run=own_run("back"), attempt="back2")
    folder.coordinator.policy = KeepLast(1)
    world.raw["up", 1] = 5
    for n in (1, 2, 3):
        world.run("up", n)
    world.run("down", 3)  # drops the restore
    assert [kept.kind for kept in world.log("down").kept] == ["interval"]
    kinds = {interval: verdict.kind for interval, verdict in world.chains().judged(ROOT, "down").items()}
    assert kinds == {day(1): "unknown"}
    for rerun, first in (({"up": 1}, "base dropped"), ({"up": 1, "down": 2}, "input changed")):
        planned = plan_chain(world.stages(**rerun), START + 99 * DAY)[1].planned
        assert planned[day(1)].reason == first, "a run of day 2 would replace the restored state"
    world.run("down", 1)  # with the state of before, so the restore still counts
    world.raw["up", 1] = 6
    world.run("up", 1)
    kinds = {interval: verdict.kind for interval, verdict in world.chains().judged(ROOT, "down").items()}
    assert kinds[day(1)] == "stale"  # it ran again after the restore
    folder.coordinator.rewind(5, run=own_run("back"), attempt="back5")
    assert [kept.kind for kept in world.log("down").kept] == ["restore"] and ran_here(world.log("down"))


def test_a_restored_state_that_a_later_restore_took_out_of_use_is_no_input() -> None:
    folder, edge = Folder(days=2), Edge(pipeline="up", reads="state")
    folder.coordinator.rewind(2, run=own_run("back"), attempt="back2")
    assert commits_in(read_log(folder.storage), edge, day(2)) == {day(2): 3}
    folder.coordinator.rewind(1, run=own_run("back"), attempt="back1", retract_output=True)
    log = read_log(folder.storage)
    assert commits_in(log, edge, day(2)) == {} and commits_in(log, edge, day(1)) == {day(1): 4}


def test_many_inputs_are_recorded_as_ranges_that_still_reveal_a_changed_input() -> None:
    pieces = [Piece(interval=day(n), id=n, rows=1, digest=n) for n in range(1, 201)]
    parts = parts_of(pieces)
    assert len(parts) <= 64 and sum(part.intervals for part in parts) == sum(part.rows for part in parts) == 200
    for part, group in ((parts[0], pieces[: parts[0].intervals]), (parts[-1], pieces[-parts[-1].intervals :])):
        assert judge_part(part, group, "up", known_until=0) is None
        other = [replace(group[0], digest=7, id=300), *group[1:]]
        verdict = judge_part(part, other, "up", known_until=200)
        assert verdict is not None and verdict.kind == "stale"
        unknown = judge_part(part, [replace(group[0], digest=None, id=300), *group[1:]], "up", known_until=200)
        assert unknown is not None and unknown.kind == "unknown"


class Meeting(FaultyStorage):
    """The storage of a process, during whose call with the number `at` another process does `other`."""

    def __init__(self, inner: Storage, at: int, other: Callable[[], object]) -> None:
        super().__init__(inner, {})
        self.at, self.other = [at], other

    def beside(self, other: Storage) -> Meeting:
        twin = Meeting(other, 0, self.other)
        twin.at, twin._process = self.at, self._process
        return twin

    def _call(self, name: str, path: str, action: Callable[[], Any]) -> Any:
        if self.at == [len(self.calls)]:
            self.at.clear()
            self.other()
        return super()._call(name, path, action)


def run_again(world: World, attempt: str) -> int:
    """Run the reader's day, and return the commit that it read."""
    chains, reader = world.chains(), Reader(root=ROOT, pipeline="down", interval=day(1), schedule=None)
    check_earlier(chains, reader, chains.log(ROOT, "down"))
    read, (n,) = pin(chains, reader, world.edges["down"][0])
    how = {"followed": followed_in(chains.log(ROOT, "down")), "fresh_at": chains.fresh_at(ROOT, "down", [read])}
    world.folders["down"].run(day(1), attempt, inputs=(read,), **how)
    return n


def to_heal(world: World) -> list[Interval]:
    return [one.interval for one in plan_heal(world.health(world.chains(), "down"), [day(1)], None).to_run]


def planned_of(world: World) -> list[Interval]:
    return [*plan_chain(world.stages(), START + 99 * DAY)[1].planned]


LOOKS = {"status": lambda world: {*world.chains().judged(ROOT, "down")}, "plan": lambda world: {*planned_of(world)}}


def meet(at: int, dies: int, doing: str) -> bool | None:
    """Let an upstream commit other rows at a request of a run of its reader, of its heal, or of a look. Return True if the reader is stale
    at the end; None if the reader makes fewer requests. `dies`: the request of its own at which the upstream dies.
    """
    world, n = World({"up": (), "down": (Edge(pipeline="up"),)}), 1
    for name in world.edges:
        world.run(name, 1)
    if doing == "heal":  # The reader is stale before, too.
        world.raw["up", 1] = 3
        world.run("up", 1)
    world.raw["up", 1] = 5
    whole = world.folders

    def correct() -> None:
        met, world.folders = world.folders, {"up": Folder(FaultyStorage(whole["up"].storage, stop_at(dies, "after")))}
        with suppress(StopHere):
            world.run("up", 1)
        world.folders = met

    own = Meeting(whole["up"].storage, at, correct)
    world.folders, said = {"up": Folder(own), "down": Folder(own.beside(whole["down"].storage))}, None
    if doing in LOOKS:
        said = LOOKS[doing](world)
    elif doing == "a run" or to_heal(world):
        n = run_again(world, "again")
    world.folders = whole
    (current, _) = world.log("up").current_outputs()[day(1)]
    judged = {*world.chains().judged(ROOT, "down")}
    assert bool(judged) == (n != current), "it has read other rows than there are now"
    assert said in (None, set(), judged), "it is neither what was there before nor what is there after"
    assert {*to_heal(world)} == judged == {*planned_of(world)}
    if judged:
        assert run_again(world, "at last") == current and not world.chains().judged(ROOT, "down")
    return None if own.at else bool(judged)


@pytest.mark.parametrize("doing", ["a run", "heal", *LOOKS])
def test_a_stale_reader_is_detected_if_its_upstream_commits_or_dies_at_any_request(doing: str) -> None:
    ends = Counter[bool | None]()
    for dies in (*range(0, 40, 1 if ALL else 20), 999):
        for at in itertools.count():
            ends[end := meet(at, dies, doing)] += 1
            if end is None:
                break
    assert ends[True] > 5 and ends[False] > 5


def test_the_upstream_race_check_fails_if_inputs_are_not_compared() -> None:
    where = "state_backend.chains.judge_inputs._judge_parts"
    with mock.patch(where, lambda *_, **__: None), pytest.raises(AssertionError, match="other rows"):
        for at in range(40):
            meet(at, 999, "a run")


def test_no_wrong_result_is_fresh_and_none_is_stale_that_was_just_computed() -> None:
    assert sum(map(play, SEEDS)) > len(SEEDS)


def fresh_in_any_case(chains: Chains, *at: Any, was: Any = Chains.fresh_at) -> Any:
    with mock.patch.object(chains, "judged", lambda *_: {}):
        return was(chains, *at)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        pytest.param(f"{JUDGE}.Chains.judge_read", lambda *_: None, id="an edge is forgotten"),
        pytest.param(f"{JUDGE}.Chains.fresh_at", fresh_in_any_case, id="an end is kept even if a result is stale"),
    ],
)
def test_the_oracle_finds_each_planted_fault(where: str, fault: object) -> None:
    """Other faults: tests/scenarios/test_chain_histories.py."""
    with mock.patch(where, fault), pytest.raises(AssertionError):
        for seed in range(50):
            play(seed)
