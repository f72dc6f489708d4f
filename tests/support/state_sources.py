"""State to read as a table or to compare: chains of shards without Spark, as checkpoints and as savepoints, and what processors
see of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.data_sources.state_selection import ReadPlan, plan_read
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.inspection.state_source import StateSource
from state_backend.inspection.state_table import read_table, table_schema
from state_backend.ports.storage import Storage
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import delete_timer, register_timer, timers
from state_backend.values.handles import FileInfo, Handle
from state_backend.values.key_groups import KeyGroupRange, range_of
from state_backend.values.records import InlineShard, Record, Retained
from tests.support.chains import ENGINE, Chain
from tests.support.checkpoints import content, day
from tests.support.savepoints import Format, take
from tests.support.shards import KEY_SCHEMA, KEYS, STATES

USERS: list[Any] = ["", "a", "b", "\x00", "ä", None, *(f"user-{n}" for n in range(60))]
TTL_MS = 100
Seen = dict[str, list[tuple[Any, ...]]]
KEY = parse_struct(KEY_SCHEMA)


class StateChain:
    """A chain over a local root, whose checkpoints can be read as sources. ``now_ms`` is the clock of its next step."""

    def __init__(self, folder: Path, *, max_parallelism: int = 16, engine: EngineOptions = ENGINE) -> None:
        self.folder, self.root = folder, folder / "root"
        self.chain = Chain(folder / "work", LocalStorage(self.root), max_parallelism=max_parallelism, engine=engine)
        self.parallelism = 1
        self.now_ms = 0

    def group_of(self, user: Any) -> int:
        return key_group((user,), KEY, self.chain.max_parallelism)

    def step(self, parallelism: int, mode: Any, change: Any = None, *, after_ms: int = 10) -> StateSource:
        """The next checkpoint; ``change(state, user)`` is called for each user with its key set, then what is due expires."""
        self.now_ms += after_ms
        self.chain.now_ms, self.parallelism = self.now_ms, parallelism

        def change_shard(state: ShardState, owned: KeyGroupRange) -> None:
            for user in USERS if change is not None else ():
                if self.group_of(user) in owned:
                    state.set_key(self.group_of(user), KEYS.encode((user,)))
                    change(state, user)
            expire(state)

        self.chain.step(parallelism, mode, change_shard)
        return self.source()

    def record(self) -> Record:
        chain = self.chain
        made = content(
            day(1),
            f"attempt-{chain.runs}",
            parallelism=self.parallelism,
            max_parallelism=chain.max_parallelism,
            key_schema=KEY_SCHEMA,
            states=tuple(chain.states),
            digest=chain.digest,
            shards=tuple(InlineShard(shard=m.shard, inline=m) for m in chain.manifests),
        )
        time, totals = replace(made.time, processing_time_ms=self.now_ms), replace(made.totals, entries=chain.entries)
        made = replace(made, time=time, totals=totals)
        return Record(id=chain.runs, retained=(Retained(id=1, stale_by=None),), reproduces=None, content=made)

    def source(self) -> StateSource:
        return StateSource.of_record(str(self.root), self.record())

    def savepoint(self, name: str, format: Format) -> StateSource:
        """Taken, then moved."""
        made = take(str(self.root), self.record(), self.folder / f"{name}-taken", format)
        moved = shutil.move(self.folder / f"{name}-taken", self.folder / name)
        return StateSource.of_savepoint(str(moved), made)

    def seen(self) -> Seen:
        """What processors see of the last checkpoint: by state (key, user key or position, value), timers (key, time), sorted."""
        found: Seen = {d.name: [] for d in STATES} | {"$timers": []}
        self.chain.runs += 1  # another folder to open in
        for shard in range(self.parallelism):
            owned = range_of(shard, self.parallelism, self.chain.max_parallelism)
            restored, state = self.chain.open(owned, "seen")
            with restored.store:
                for user in (u for u in USERS if self.group_of(u) in owned):
                    state.set_key(self.group_of(user), KEYS.encode((user,)))
                    _look(state, user, found)
        self.chain.runs -= 1
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        (self.folder / "work").mkdir()
        return {name: sorted(rows, key=repr) for name, rows in found.items()}


def _look(state: ShardState, user: Any, found: Seen) -> None:
    for ending in ("", "_ttl"):
        value = ValueState(state, f"value{ending}").get()
        found[f"value{ending}"] += [(user, None, value)] if value is not None else []
        elements = ListState(state, f"list{ending}").get()
        found[f"list{ending}"] += [(user, n, element) for n, element in enumerate(elements)]
        entries = MapState(state, f"map{ending}").iterator()
        found[f"map{ending}"] += [(user, key[0], value) for key, value in entries]
    found["$timers"] += [(user, time) for time in timers(state)]


def random_changes(seed: int) -> Any:
    """A change of some states of some users."""
    pick = random.Random(seed)

    def row() -> tuple[Any, ...]:
        return pick.choice([None, pick.randrange(-(2**63), 2**63)]), pick.choice(
            [None, "", "ä", "x" * pick.randrange(40)]
        )

    def change(state: ShardState, user: Any) -> None:
        for ending in ("", "_ttl"):
            if pick.random() < 0.4:
                value = ValueState(state, f"value{ending}")
                value.clear() if pick.random() < 0.2 else value.update(row())
            if pick.random() < 0.4:
                elements = ListState(state, f"list{ending}")
                if pick.random() < 0.2:
                    elements.clear()
                elif pick.random() < 0.3:
                    elements.put([row() for _ in range(pick.randint(1, 3))])
                else:
                    elements.append_list([row() for _ in range(pick.randint(1, 3))])
            if pick.random() < 0.4:
                entries = MapState(state, f"map{ending}")
                for _ in range(3):
                    key = (pick.choice([None, "", "p", "pq", "\x00"]),)
                    entries.remove_key(key) if pick.random() < 0.2 else entries.update_value(key, row())
        if pick.random() < 0.3:
            register_timer(state, pick.randrange(-1000, 1000))
            delete_timer(state, next(iter(timers(state))))
            register_timer(state, pick.randrange(-1000, 1000))

    return change


class CountingStorage:
    """A storage that notes what is read through it: (path, bytes)."""

    def __init__(self, url: str) -> None:
        self._storage: Storage = open_storage(url)
        self.url = self._storage.url
        self.reads: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def read(self, path: str) -> bytes:
        data = self._storage.read(path)
        self.reads.append((path, len(data)))
        return data

    def download(self, handle: Handle, destination: Path) -> None:
        self._storage.download(handle, destination)
        self.reads.append((handle.path, handle.size_bytes))

    def stat(self, path: str) -> FileInfo | None:
        return self._storage.stat(path)

    @property
    def bytes_read(self) -> int:
        return sum(size for _, size in self.reads)


def paths_of(reads: Sequence[tuple[str, int]]) -> set[str]:
    return {path for path, _ in reads}


NAMES = [*(d.name for d in STATES), "$timers"]


def rows(source: StateSource, state: str, work: Path, plan: ReadPlan | None = None, storage: Any = None) -> list[Any]:
    plan = plan or plan_read(source.content)
    storage = storage or CountingStorage(source.url)
    found: list[Any] = []
    for shard in plan.shards:
        folder = work / f"{state}-{random.getrandbits(64):x}"
        folder.mkdir()
        for table in read_table(source, state, shard, storage, folder, plan.part_of(shard, source.content)):
            assert table.schema == table_schema(source, state)
            found += table.to_pylist()
    return found
