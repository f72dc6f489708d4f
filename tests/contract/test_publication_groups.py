"""Groups of pipelines: random histories over sinks that die, the sinks of `cairn.sinks`, and readers with a marker."""

from __future__ import annotations

import io
import json
import random
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cairn import Pipeline, group_marker, output_files, sinks
from cairn.command.cli import app
from cairn.data_sources.keyed_output import KeyedOutput
from cairn.operations.publish_group import _one_database, publish_group
from state_backend.inspection.publication_group import Output, group_of
from state_backend.values.errors import SinkFailed, StorageUnavailable
from state_backend.values.inputs import Edge
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions
from tests.support.chain_world import DAYS, SEEDS, World, play
from tests.support.checkpoints import DAY, START, day
from tests.support.clicks_table import Killed, die_at
from tests.support.sink_calls import CALLS, SECONDS
from tests.support.tiers import ALL

Table = dict[int, tuple[int, list[int]]]


@dataclass
class GroupWorld(World):
    """A world whose members write Parquet files, and have these tables or the tables of `sinks`."""

    root: str = field(default_factory=lambda: f"memory://{uuid.uuid4()}")
    code: str | None = "x"
    sinks: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    # The process dies before the first call of a sink if 1, after it if 2, before the second one if 3, …; 0: never.
    dies: int = 0
    # Called once, by the next sink, before it writes.
    meanwhile: Any = None
    torn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.members = tuple(self.edges)[:: 2 if len(self.edges) > 3 else 1]

    def file_of(self, output: int, read: list[int]) -> bytes:
        pq.write_table(pa.table({"value": [output], "read": [str(read)]}), made := io.BytesIO())
        return made.getvalue()

    def row(self, file: str) -> tuple[int, list[int]]:
        name, path = file.removeprefix(f"{self.root}/").split("/", 1)
        (row,) = pq.read_table(io.BytesIO(self.folders[name].storage.read(path))).to_pylist()
        return row["value"], json.loads(row["read"])

    def load(self, code: str) -> Pipeline:
        name = code.partition(":")[2]

        def sink(_: object, files: list[str], interval: Interval, checkpoint_id: int) -> None:
            self.dies -= 2
            if self.dies == -1:
                raise Killed
            other, self.meanwhile = self.meanwhile, None
            if other is not None:
                other()
            self.tables.setdefault(name, {})[1 + (interval.start - START) // DAY] = self.row(files[0])
            if self.dies == 0:
                raise Killed

        how: dict[str, Any] = {"source": print, "key": ["k"], "processor": object, "group": "board"}
        return Pipeline(name=name, start=START, sink=self.sinks.get(name) or sink, **how)

    def publish(self) -> tuple[list[Output], int, str]:
        return publish_group(self.root, "board", self.load)

    def check_fits(self, found: dict[str, Table]) -> None:
        """Each member's result was made of what the others have."""
        for name, n, read in [(name, n, read) for name, days in found.items() for n, (_, read) in days.items()]:
            for (up, at), value in zip(self.days_read(name, n), read, strict=True):
                assert up not in self.members or found.get(up, {}).get(at, (None,))[0] == value, (name, n, up, at)

    def after_step(self, chance: random.Random | None) -> None:
        for folder in self.folders.values():
            folder.coordinator.clean_up()
        marker, out_of_date = group_marker(self.root, "board"), self.out_of_date()
        files = {name: output_files(self.root, name, group=marker) for name in self.members}
        got = {name: {n + 1: self.row(file) for n, file in enumerate(some)} for name, some in files.items()}
        self.check_fits(got)
        last = min([DAYS, *(n - 1 for name in self.members for n in out_of_date[name])])
        assert group_of(self.root, "board").until == START + last * DAY
        assert not any(len(got[name]) != last or min(self.wrong(name), default=9) <= last for name in self.members)
        held = any(map(out_of_date.get, self.members))
        self.dies = chance.choice((0, 0, chance.randint(1, 8))) if chance else 0
        try:
            assert not (self.publish()[0] and held)
            self.torn = self.torn and held
        except SinkFailed:
            self.torn = True
        if not self.torn:
            self.check_fits(self.tables)
        assert chance or (self.tables == got and last == DAYS)


def test_tables_and_readers_of_a_group_stay_consistent_in_random_histories() -> None:
    assert sum(play(seed, GroupWorld) for seed in SEEDS) > len(SEEDS)


CHAIN = {"sales": (), "report": (Edge(pipeline="sales"),), "board": (Edge(pipeline="report"),)}


@pytest.mark.parametrize("kind", ["delta", pytest.param("postgres", marks=SECONDS)])
def test_a_publication_that_dies_anywhere_is_completed_by_the_next(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world, address = GroupWorld(CHAIN, root=f"file://{tmp_path}/root"), request.getfixturevalue("server")
    for name in CHAIN:
        tables = (sinks.delta(f"file://{tmp_path}/{name}"), sinks.postgres(name, lambda: address))
        world.sinks[name] = tables[kind == "postgres"]

    def shown() -> list[int]:
        schema = pa.schema([("value", pa.int64())])
        return [sum(one.rows(day(1), schema)["value"].to_pylist()) for one in world.sinks.values()]

    changes, at, old = set[int](), 999, [-1, -1, -1]  # First, nobody dies.
    while at < 1000:
        world.raw["sales", 1] = world.raw.get(("sales", 1), 0) + 1
        for name in CHAIN:
            world.run(name, 1)
        with pytest.MonkeyPatch.context() as patched, suppress(SinkFailed):
            die_at(patched, at, [(type(world.sinks["sales"]), one) for one in CALLS[kind]])
            world.publish()
            at = -1 if at == 999 else 2000
        changed = [a != b for a, b in zip(shown(), old, strict=True)]
        assert changed == sorted(changed, reverse=True), "a table is newer than one that it was made of"
        changes.add(sum(changed))
        world.publish()
        old, at = shown(), at + (1 if ALL or at < 0 else 5)
        assert old == [world.ran[name, 1][1] for name in CHAIN]
    assert changes == ({0, 3} if kind == "postgres" else {0, 1, 2, 3}), "PostgreSQL changes all in one transaction"


def test_one_transaction_covers_the_tables_of_one_database_only() -> None:
    one, same, other = (sinks.postgres(f"t{n}", lambda at=at: f"host={at}") for n, at in enumerate("aab"))
    for tables, joint in (([], None), ([one, same], one), ([same, one.with_late_rows(other)], None), ([one, id], None)):
        world = GroupWorld(CHAIN, sinks=dict(zip(CHAIN, tables, strict=False)))
        assert _one_database([world.load(f"x:{name}") for name in world.sinks]) is joint


@pytest.mark.parametrize("corrected", [1, 2, 3])
def test_of_two_commands_at_once_the_slower_one_leaves_no_older_rows(corrected: int) -> None:
    world = GroupWorld(CHAIN)
    for name in CHAIN:
        world.run(name, 1)

    def correct() -> None:
        world.raw["sales", 1] = 2
        for name in tuple(CHAIN)[:corrected]:
            world.run(name, 1)
        assert bool(world.publish()[0]) == (corrected == 3)

    world.meanwhile = correct
    world.publish()
    world.check_fits(world.tables)
    assert world.tables["sales"][1][0] == (2 if corrected == 3 else 1)
    for name in tuple(CHAIN)[corrected:]:
        world.run(name, 1)
    world.publish()
    assert {name: of[1][0] for name, of in world.tables.items()} == {name: world.ran[name, 1][1] for name in CHAIN}


def test_hours_that_replace_a_published_day_are_published_only_when_complete() -> None:
    world = GroupWorld({"sales": (), "report": ()})
    hours, how = [Interval(START + n * DAY / 24, START + (n + 1) * DAY / 24) for n in range(24)], {"group": "board"}
    for name, intervals in (("report", hours), ("sales", [day(1)]), ("sales", hours)):
        for interval in intervals:
            again = Permissions(replace_overlapping=True)
            code = f"x:{name}"
            world.folders[name].run(interval, str(uuid.uuid4()), code=code, outputs=(), permissions=again, **how)
            world.sinks[name] = lambda *_: None
            published = {interval for name, interval, _ in world.publish()[0] if name == "sales"}
            assert name == "report" or len(published) == {day(1): 1, hours[23]: 25}.get(interval, 0)


def test_daily_and_hourly_outputs_of_a_day_are_published_only_together() -> None:
    world, called = GroupWorld({"hours": (), "days": ()}), list[Output]()
    world.sinks = {n: lambda spark, files, i, at, n=n: called.append((n, i, at)) for n in world.edges}

    def run(name: str, interval: Interval) -> None:
        world.folders[name].run(interval, str(uuid.uuid4()), group="board", code=f"x:{name}", outputs=())

    for n in range(50):
        run("hours", Interval(START + n * DAY / 24, START + (n + 1) * DAY / 24))
    run("days", day(1))
    published, waiting, why = world.publish()
    assert published == called and sorted(name for name, *_ in called) == ["days", *["hours"] * 24]
    assert waiting == 26 and why == "all fits together up to 2024-01-02T00:00:00Z; then days has no result"
    for n, ready in ((2, 25), (3, 0)):  # The third day lacks hours.
        run("days", day(n))
        assert len(world.publish()[0]) == ready
    marker = group_marker(world.root, "board")
    run("hours", Interval(START, START + DAY / 24))  # The other hours continue from another first hour.
    assert world.publish()[0] == [] and group_of(world.root, "board").until == START
    with pytest.raises(StorageUnavailable, match="Make a new marker"):
        output_files(world.root, "hours", group=marker)


def test_status_prints_the_command_that_publishes_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = GroupWorld({name: CHAIN[name] for name in ("sales", "report")}, root=f"file://{tmp_path}")
    monkeypatch.setattr("cairn.command.publish.load_code", world.load)
    for name, n in (("sales", 1), ("sales", 2), ("report", 1)):
        world.run(name, n)
    assert world.load("x:sales").call_sink(world.folders["sales"].coordinator.at, None) == [] and not world.tables

    def cairn(command: str) -> Result:
        return CliRunner().invoke(app, [*command.split()[1:], "--root", world.root])

    said = cairn("cairn status --pipeline sales")
    assert said.exit_code == 0 and f"waiting for group 'board':\n  {day(1)}" in said.stdout
    printed = said.stdout.splitlines()[-1]
    assert printed == f"cairn publish --group board --root {world.root}"
    other = cairn("cairn publish 2024-01-01T00:00Z --pipeline report --code x:sales")
    assert other.exit_code == 2 and "is named 'sales', but 'report' is expected" in other.stderr and not world.tables
    for more in ("", " --rebuild"):
        assert printed in cairn(f"cairn publish --pipeline sales --code x:sales{more}").stderr and not world.tables
    monkeypatch.setattr("cairn.command.publish.load_code", lambda code: world.load("x:sales"))
    assert "x:report is named 'sales', not 'report'" in cairn(printed).stderr and not world.tables
    monkeypatch.setattr("cairn.command.publish.load_code", world.load)
    said = cairn("cairn publish --pipeline sales --code x:sales --check").stderr
    assert "--check and --rebuild need a sink of cairn.sinks, but x:sales has another sink or none" in said
    done = cairn(printed)
    wanted = f"published:\n  sales {day(1)} (checkpoint 1)\n  report {day(1)} (checkpoint 1)\n1 outputs wait"
    assert done.exit_code == 0 and wanted in done.stdout
    cairn("cairn publish 2024-01-02T00:00Z --pipeline sales --code x:sales")
    assert 2 in world.tables["sales"] and world.publish()[1] == 0
    world.run("report", 2)
    reader = KeyedOutput({"root": world.root, "pipeline": "sales", "group": "board"})
    assert [*reader._current(reader._log()).commits] == [day(1), day(2)]
    world.raw["sales", 2] = 4
    world.run("sales", 2)
    assert [*reader._current(reader._log()).commits] == [day(1)]
