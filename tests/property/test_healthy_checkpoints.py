"""No false alarm: whatever random programs make, by every kind of checkpoint and savepoint, passes both modes of validation.

``CAIRN_HEALTHY`` is how many of them are made at least; the default is for a suite that somebody waits for.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.shard.manifest import manifest_of
from state_backend.state.expiry import expire
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import delete_timer, due_timers, register_timer, timers
from state_backend.values.key_groups import KeyGroupRange
from state_backend.values.records import Content, Record, SchemaVersion, StateDescriptor
from tests.support.chains import Chain
from tests.support.checkpoints import PIPELINE
from tests.support.savepoints import Format, restore, take
from tests.support.shards import KEY_SCHEMA, KEYS, STATES, struct
from tests.support.validated import content_of, look

WANTED = int(os.environ.get("CAIRN_HEALTHY", "40"))
USERS = [None, "", "\x00", "ä", *(f"user-{n}" for n in range(30))]
KEY = parse_struct(KEY_SCHEMA)
# An interval is so long, and what expires lives for twice that.
STEP_MS, TTL_MS = 50, 100


class Program:
    """One pipeline's life: intervals with random calls, rescaled, evolved, saved and restored at random."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.n, self.saved = folder, 0, 0
        self.kinds: Counter[str] = Counter()
        self.parallelism = self.rng.randint(1, 4)
        self.chain = self._chain(self.rng.choice((8, 16, 100)))

    def _chain(self, max_parallelism: int) -> Chain:
        self.root = self.folder / f"root-{self.saved}" / PIPELINE
        budget = self.rng.choice((0, 100_000))  # small files and segments inline, or not
        return Chain(
            self.folder / f"work-{self.saved}",
            LocalStorage(self.root),
            max_parallelism=max_parallelism,
            states=(getattr(self, "chain", None) and self.chain.states) or STATES,
            inline_budget_bytes=budget,
        )

    def interval(self) -> None:
        """One more checkpoint, looked at."""
        rng, chain = self.rng, self.chain
        self.n += 1
        chain.now_ms += STEP_MS
        kinds = set()
        if rng.random() < 0.3 and self.n > 1:
            before, self.parallelism = self.parallelism, rng.randint(1, 5)
            kinds |= {"rescaled up"} if self.parallelism > before else set()
            kinds |= {"rescaled down"} if self.parallelism < before else set()
        if rng.random() < 0.15 and len(chain.states[0].versions) < 4:
            chain.states = [_evolved(d) for d in chain.states]
        if rng.random() < 0.6:
            ttl_ms = rng.choice((None, TTL_MS))
            chain.states = [replace(d, ttl_ms=ttl_ms) if d.name.endswith("_ttl") else d for d in chain.states]
        mode: Any = rng.choice(("incremental", "incremental", "changelog", "changelog", "changelog", "full"))
        kinds |= {mode} | ({"evolved"} if len(chain.states[0].versions) > 1 else set())
        consolidated = rng.random() < 0.2
        kinds |= {"consolidated"} if consolidated else set()
        expired: list[int] = []
        calls = self._calls()

        def change(state: ShardState, owned: KeyGroupRange) -> None:
            calls(state, owned)
            for due in due_timers(state, chain.now_ms):
                delete_timer(state, due.expiry_ms)
            expired.append(expire(state))
            if consolidated:
                state.store.compact()

        chain.step(self.parallelism, mode, change)
        kinds |= {"expired"} if sum(expired) else set()
        self.check(self.content(), self.root, kinds)

    def content(self) -> Content:
        return content_of(self.chain, self.n, f"attempt-{self.chain.runs}", None)

    def check(self, made: Content, root: Path, kinds: set[str], **more: Any) -> None:
        for mode in ("fast", "full"):
            assert look(root, made, mode, **more) == [], (mode, kinds)
        self.kinds.update(["all", *kinds])

    def _calls(self) -> Callable[[ShardState, KeyGroupRange], None]:
        """What the interval does, key by key; the same however many shards there are."""
        rng, chain, n = self.rng, self.chain, self.n
        chosen = rng.sample(USERS, rng.randint(0, len(USERS)))
        seeds = {user: rng.random() for user in chosen}

        def change(state: ShardState, owned: KeyGroupRange) -> None:
            for user in chosen:
                group = key_group((user,), KEY, chain.max_parallelism)
                if group in owned:
                    state.set_key(group, KEYS.encode((user,)))
                    _some_calls(state, random.Random(seeds[user]), n, len(chain.states[0].versions))

        return change

    def save(self, format: Format) -> None:
        """A savepoint, looked at; then a new pipeline starts from it and goes on."""
        rng, made = self.rng, self.content()
        to = self.folder / f"savepoint-{self.saved}"
        record = Record(id=1, retained=(), reproduces=None, content=made)
        savepoint = take(str(self.root), record, to, format)
        self.check(savepoint.content, to, {format}, savepoint=savepoint.files)
        moved = to.rename(self.folder / f"moved-{self.saved}")
        self.saved += 1
        canonical = format == "canonical"
        if canonical:
            self.parallelism = rng.randint(1, 4)
        max_parallelism = rng.choice((8, 16, 50)) if canonical else self.chain.max_parallelism
        now_ms = self.chain.now_ms
        self.chain = self._chain(max_parallelism)
        self.chain.now_ms, self.chain.runs = now_ms, 1
        restored = restore(self.root, moved, f"restored-{self.saved}", self.parallelism, max_parallelism).content
        self.chain.manifests = [manifest_of(ref, self.chain.storage) for ref in restored.shards]
        self.parallelism = restored.parallelism
        self.check(restored, self.root, {f"restored from {format}"})
        shutil.rmtree(moved)


def _evolved(descriptor: StateDescriptor) -> StateDescriptor:
    """One more schema version: a field more, which may be null."""
    last = descriptor.versions[-1]
    number = last.version + 1
    fields = [(f["name"], f["type"]) for f in last.value["fields"]] + [(f"added_{number}", "double")]
    return replace(
        descriptor,
        versions=(*descriptor.versions, SchemaVersion(version=number, value=struct(*fields), user_key=last.user_key)),
    )


def _some_calls(state: ShardState, rng: random.Random, n: int, versions: int) -> None:
    """A handful of calls for the key that was chosen."""

    def row() -> tuple[Any, ...]:
        return (rng.choice((None, n, -n)), rng.choice((None, "", "x" * n)), *[rng.choice((None, 0.5))] * (versions - 1))

    for _ in range(rng.randint(1, 6)):
        ttl = rng.choice(("", "_ttl"))
        value, elements, entries = (
            ValueState(state, "value" + ttl),
            ListState(state, "list" + ttl),
            MapState(state, "map" + ttl),
        )
        other = rng.choice(USERS)
        match rng.randrange(12):
            case 0 | 1:
                value.update(row())
            case 2:
                value.clear()
            case 3 | 4:
                elements.append_list([row() for _ in range(rng.randint(0, 4))])
            case 5:
                elements.put([row() for _ in range(rng.randint(0, 4))])
            case 6:
                elements.clear()
            case 7 | 8:
                entries.update_value((other,), row())
            case 9:
                rng.choice((entries.clear, partial(entries.remove_key, (other,))))()
            case 10:
                register_timer(state, state.now_ms + rng.randint(-60, 200))
            case 11:
                for timer in list(timers(state))[:1]:
                    delete_timer(state, timer)


@pytest.mark.long("seconds", runs_in="ci")
def test_healthy_checkpoints_and_savepoints_pass_fast_and_full_validation(tmp_path: Path) -> None:
    """Fast and full, over checkpoints and savepoints of all kinds, none of which a test chose by hand."""
    kinds: Counter[str] = Counter()
    seed = 0
    while kinds["all"] < WANTED:
        program = Program(tmp_path / str(seed), seed)
        for life in range(3):
            for _ in range(program.rng.randint(2, 5)):
                program.interval()
            if life < 2:
                program.save(program.rng.choice(("native", "canonical")))
        shutil.rmtree(tmp_path / str(seed))
        kinds += program.kinds
        seed += 1
    print(dict(kinds))
    every = {
        "incremental",
        "full",
        "changelog",
        "native",
        "canonical",
        "restored from native",
        "restored from canonical",
    }
    every |= {"rescaled up", "rescaled down", "expired", "evolved", "consolidated"}
    assert every <= kinds.keys()
