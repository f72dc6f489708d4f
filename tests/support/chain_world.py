"""Pipelines that read each other's outputs: histories in memory, and what heals and plans make of them."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn.command.cli import app
from cairn.operations.intervals.plan_chain import Stage, plan_chain
from cairn.operations.intervals.plan_heal import Health, health_of, plan_heal
from state_backend.adapters.open_storage import open_storage
from state_backend.chains.judge_inputs import Chains, followed_in
from state_backend.chains.pin_inputs import Reader, check_earlier, pin
from state_backend.checkpoint.log import Log, read_log
from state_backend.formats import paths
from state_backend.values.errors import InputNotReady, StaleStateError
from state_backend.values.inputs import Edge, followed_after
from state_backend.values.records import OutputFile, own_run
from state_backend.values.schedule import Every
from tests.support.checkpoints import DAY, START, Folder, day
from tests.support.tiers import ALL

ROOT = "memory://root"
DAYS = 5


@dataclass
class World:
    """Pipelines of days. The output of a day is a number from few, so that a re-run often gives an equal one."""

    edges: dict[str, tuple[Edge, ...]]
    folders: dict[str, Folder] = field(default_factory=dict)
    raw: dict[tuple[str, int], int] = field(default_factory=dict)
    ran: dict[tuple[str, int], tuple[int, int, int]] = field(
        default_factory=dict
    )  # raw, output and state of the last run
    read: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    attempts: int = 0

    root: str = ROOT
    code: str | None = None
    members: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        on_disk = self.root != ROOT
        self.folders = {n: Folder(open_storage(f"{self.root}/{n}") if on_disk else None) for n in self.edges}

    def chains(self) -> Chains:
        return Chains(open_log=lambda _, name: self.log(name))

    def log(self, name: str) -> Log:
        return read_log(self.folders[name].storage)

    def file_of(self, output: int, read: list[int]) -> bytes:
        return b"rows"

    def after_step(self, chance: random.Random | None) -> None: ...

    def made(self, name: str, n: int, before: int, read: list[int]) -> tuple[int, int]:
        output = (self.raw.get((name, n), n) + sum(read)) % 3
        return output, (before + output) % 2

    def run(self, name: str, n: int) -> None:
        chains, reader = self.chains(), Reader(root=self.root, pipeline=name, interval=day(n), schedule=None)
        check_earlier(chains, reader, chains.log(self.root, name))
        pinned = [pin(chains, reader, edge)[0] for edge in self.edges[name]]
        read = [self.ran[up][1] for up in self.days_read(name, n)]
        output, state = self.made(name, n, self.ran.get((name, n - 1), (0, 0, 0))[2], read)
        self.attempts += 1
        attempt, folder = f"{name}{self.attempts}", self.folders[name]
        handle = folder.storage.create(paths.output(day(n), attempt, 1, 0), self.file_of(output, read))
        files = (OutputFile(handle=handle, rows=1, digest=output),)
        followed = followed_after(followed_in(self.log(name)), pinned)
        how = {} if self.code is None else {"code": f"{self.code}:{name}", "run": own_run("direct__"), "pipeline": name}
        how |= {"group": "board"} if name in self.members else {}
        how |= {"fresh_at": chains.fresh_at(self.root, name, pinned)} if pinned else {}
        folder.run(day(n), attempt, outputs=files, digest=state, inputs=tuple(pinned), followed=followed, **how)
        self.ran[name, n], self.read[name, n] = (self.raw.get((name, n), n), output, state), read

    def days_read(self, name: str, n: int) -> list[tuple[str, int]]:
        return [(edge.pipeline, n - edge.back) for edge in self.edges[name] if n > edge.back]

    def out_of_date(self) -> dict[str, set[int]]:
        """Days whose result may not be used: by their log, or by what they read. The latter are as expected."""
        chains, found = self.chains(), dict[str, set[int]]()
        for name in self.edges:  # in their order
            spoilt, judged = (
                {1 + (i.start - START) // DAY: why for i, why in some.items()}
                for some in (chains.node(self.root, name).spoilt, chains.judged(self.root, name))
            )
            expected: dict[int, str] = {}
            for n in sorted(n for one, n in self.ran if one == name):
                ups = self.days_read(name, n)
                waits = [day in found[up] for up, day in ups]
                differ = [value != self.ran[up][1] for value, up in zip(self.read[name, n], ups, strict=True)]
                if any(differs and not wait for differs, wait in zip(differ, waits, strict=True)):
                    expected[n] = "stale"
                elif any(waits) or expected:
                    expected[n] = "pending"
            assert {n: verdict.kind for n, verdict in judged.items()} == expected
            found[name] = {*spoilt, *judged}
        return found

    def health(self, chains: Chains, name: str) -> Health:
        return health_of(chains.log(self.root, name), chains.judged(self.root, name))

    def stages(self, last: datetime | None = None, **rerun: int) -> list[Stage]:
        """Return the input of `plan_chain`. `rerun`: for a pipeline, the day that is assumed to run again."""
        chains = self.chains()
        return [
            Stage(
                at=(self.root, name),
                node=chains.node(self.root, name),
                health=self.health(chains, name),
                judged=chains.judged(self.root, name),
                schedule=Every(86_400_000),
                last=last,
                reads=chains.inputs(self.root, name),
                rerun=frozenset({day(rerun[name])} if name in rerun else ()),
            )
            for name in self.edges
        ]

    def heal(self) -> list[tuple[str, int]]:
        """Do what `cairn heal --chain` does, and return the days that ran."""
        ran: list[tuple[str, int]] = []
        for name in self.edges:  # in their order
            while to_run := plan_heal(self.health(self.chains(), name), [*map(day, range(1, DAYS + 1))], None).to_run:
                for n in (1 + (one.interval.start - START) // DAY for one in to_run):
                    self.run(name, n)
                    ran.append((name, n))
        return ran

    def wrong(self, name: str) -> set[int]:
        """Days with a wrong result: it differs from a computation from scratch over the input that each day's last run had."""
        scratch: dict[tuple[str, int], tuple[int, int]] = {}
        for one in self.edges:  # in their order
            for n in range(1, DAYS + 1):
                if (one, n) in self.ran:
                    read = [scratch[e.pipeline, n - e.back][0] for e in self.edges[one] if n > e.back]
                    output = (self.ran[one, n][0] + sum(read)) % 3
                    scratch[one, n] = output, ((scratch[one, n - 1][1] if n > 1 else 0) + output) % 2
        return {n for one, n in self.ran if one == name and scratch[one, n] != self.ran[one, n][1:]}


def write_code(folder: Path, patch: pytest.MonkeyPatch, *names: str) -> None:
    """Write the module `three` with the pipelines, for commands that load the recorded code."""
    (folder / "three.py").write_text(
        "from cairn import Pipeline, upstream\nfrom tests.support.checkpoints import START\n"
        f"for name in {names}:\n"
        "    globals()[name] = Pipeline(name=name, start=START, source=upstream('x'), key=['k'], processor=object, schedule='@daily')\n"
    )
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, "three", raising=False)


def planned(world: World, *arguments: str) -> tuple[dict[str, Any], str, int]:
    said, shown = (CliRunner().invoke(app, ["plan", "--root", world.root, *arguments, *j]) for j in ([], ["--json"]))
    assert said.exit_code == shown.exit_code < 2, said.output
    return json.loads(shown.stdout), said.stdout, said.exit_code


def graph(chance: random.Random) -> dict[str, tuple[Edge, ...]]:
    names = [f"p{n}" for n in range(chance.randint(3, 6))]
    return {
        name: tuple(
            Edge(pipeline=up, back=chance.choice((0, 0, 1)))
            for up in chance.sample(names[:n], min(n, chance.randint(1, 2)))
        )
        for n, name in enumerate(names)
    }


def play(seed: int, kind: type[World] = World) -> int:
    """Play a history, and heal. Return how often a result was out of date."""
    chance = random.Random(seed)
    world, seen = kind(graph(chance)), 0
    for name in world.edges:
        for n in range(1, DAYS + 1):
            world.run(name, n)
    for _ in range(12):
        name, n = chance.choice([*world.edges]), chance.randint(1, DAYS)
        if chance.random() < 0.8:
            world.raw[name, n] = chance.randint(0, 5)
        try:
            world.run(name, n)
        except (InputNotReady, StaleStateError):
            continue
        found = world.out_of_date()
        assert n not in found[name], "it was just computed"
        assert all(world.wrong(one) <= found[one] for one in world.edges), "a wrong result is fresh"
        seen += sum(map(len, found.values()))
        world.after_step(chance)
    for _ in range(2):  # a plan of what is open, and then of corrections
        corrected = (
            (chance.choice([*world.edges]), chance.randint(1, DAYS)) if not any(world.out_of_date().values()) else None
        )
        planned = plan_chain(world.stages(**dict([corrected] if corrected else [])), START + 99 * DAY)
        before, ran = dict(world.ran), list[tuple[str, int]]()
        if corrected:
            world.raw[corrected] = chance.randint(0, 5)
            world.run(*corrected)
            ran.append(corrected)
        check_plan(world, planned, before, [*ran, *world.heal()])
        for name in world.edges:
            assert not world.out_of_date()[name] and not world.wrong(name), "heal left something"
    world.after_step(None)
    return seen


def check_plan(
    world: World,
    planned: tuple[Stage, ...],
    before: dict[tuple[str, int], tuple[int, int, int]],
    ran: list[tuple[str, int]],
) -> None:
    """What ran is part of the plan, in its order. What did not run was not sure, and each branch to it has ended."""
    plan = {(s.at[1], 1 + (i.start - START) // DAY): one for s in planned for i, one in s.planned.items()}
    assert {*ran} <= plan.keys(), "the plan does not have it"
    assert sorted(dict.fromkeys(ran), key=[*plan].index) == [*dict.fromkeys(ran)], "another order"
    for name, n in plan.keys() - {*ran}:
        assert not plan[name, n].sure, "it was sure to run"
        assert world.read[name, n] == [world.ran[up][1] for up in world.days_read(name, n)], "its input differs"
        assert n == 1 or world.ran[name, n - 1][2] == before[name, n - 1][2], "the state before differs"


SEEDS = range(60 if ALL else 4)
