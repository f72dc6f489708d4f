"""State as tables, without Spark: equal to what processors see, whatever it is read from, and little is read for a key."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, GreaterThan, In, IsNotNull, IsNull

from jobs.export import export_state
from jobs.runtime.pushed_filters import ReadPlan, plan_read
from jobs.which_checkpoint import find_state
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats import version_log
from state_backend.formats.spark_hash import key_group
from state_backend.formats.version_log import live_spans, without
from state_backend.state.keyed_states import ListState, ValueState
from state_backend.table import WHOLE, Part, StateSource, needed_for, read_table, table_schema
from state_backend.values.errors import CorruptFile, StateGapError, UsageError
from state_backend.values.key_groups import range_of, shard_of
from state_backend.values.records import SchemaVersion
from tests.support.checkpoints import content, day
from tests.support.real_shards import RealPipeline
from tests.support.savepoints import SmallPipeline
from tests.support.shards import KEYS, STATES, struct
from tests.support.state_sources import KEY, USERS, CountingStorage, Seen, StateChain, paths_of, random_changes

NAMES = [*(d.name for d in STATES), "$timers"]


def rows(source: StateSource, state: str, work: Path, plan: ReadPlan | None = None, storage: Any = None) -> list[Any]:
    plan = plan or plan_read((), source.content)
    storage = storage or CountingStorage(source.url)
    found: list[Any] = []
    for shard in plan.shards:
        folder = work / f"{state}-{random.getrandbits(64):x}"
        folder.mkdir()
        for table in read_table(source, state, shard, storage, folder, plan.part_of(shard, source.content)):
            assert table.schema == table_schema(source, state)
            found += table.to_pylist()
    return found


def as_seen(state: str, found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows of a table as ``StateChain.seen`` has them. Positions of a list begin anywhere."""
    if state == "$timers":
        return sorted([(r["key"]["k"], round(r["expires_at"].timestamp() * 1000)) for r in found], key=repr)
    out: list[tuple[Any, ...]] = []
    counts: dict[Any, int] = {}
    for r in found:
        user = r["key"]["k"]
        place = r["user_key"]["u"] if "user_key" in r else None
        if "pos" in r:
            place = counts[user] = counts.get(user, -1) + 1
        out.append((user, place, tuple(r["value"].values())))
    return sorted(out, key=repr)


def test_the_table_is_what_processors_see_after_every_kind_of_snapshot(tmp_path: Path) -> None:
    """S30, S36, S37, S38, F96: incremental, changelog, full, rescaled up and down, and savepoints of each that were moved; all
    kinds of state with and without expiry, timers, null and empty keys."""
    chain = StateChain(tmp_path)
    steps: list[tuple[int, Any]] = [
        (2, "incremental"), (2, "changelog"), (2, "changelog"), (2, "full"), (3, "incremental"), (3, "changelog"),
        (1, "savepoint"), (4, "incremental"),
    ]  # fmt: skip
    for n, (parallelism, mode) in enumerate(steps):
        source = chain.step(parallelism, mode, random_changes(n), after_ms=40)
        seen: Seen = chain.seen()
        assert all(seen.values())
        readers = [source]
        if n in (2, 5):
            readers += [chain.savepoint(f"{format}-{n}", format) for format in ("native", "canonical")]
        for reader in readers:
            for state in NAMES:
                found = rows(reader, state, tmp_path)
                assert as_seen(state, found) == seen[state], f"{reader}, {state}"
                groups = [(r["shard"], r["key_group"]) for r in found]
                assert groups == sorted(groups)
                assert all(g == chain.group_of(r["key"]["k"]) for (_, g), r in zip(groups, found, strict=True))
                assert all(s == shard_of(g, parallelism, 16) for s, g in groups)


def test_every_key_is_found_by_its_filter_and_nothing_else(tmp_path: Path) -> None:
    chain = StateChain(tmp_path)
    chain.step(3, "incremental", random_changes(1))
    chain.step(3, "incremental", random_changes(2))
    sources = [chain.step(3, "changelog", random_changes(3)), chain.savepoint("canonical", "canonical")]
    for source in sources:
        everything = {state: rows(source, state, tmp_path) for state in ("map", "list_ttl", "$timers")}
        for user in [*USERS[:9], "nobody"]:
            plan = plan_read([EqualNullSafe(("key", "k"), user)], source.content)
            assert plan.shards == (shard_of(chain.group_of(user), 3, 16),)
            for state, whole in everything.items():
                assert rows(source, state, tmp_path, plan) == [r for r in whole if r["key"]["k"] == user]
        for group in range(0, 16, 5):
            plan = plan_read([EqualTo(("key_group",), group)], source.content)
            assert rows(source, "map", tmp_path, plan) == [r for r in everything["map"] if r["key_group"] == group]


def test_a_struct_without_fields_is_a_value(tmp_path: Path) -> None:
    """Which Parquet can't hold, but a table can."""
    empty = {"name": "e", "type": struct(), "nullable": True, "metadata": {}}
    value = {"type": "struct", "fields": [*struct(("n", "long"))["fields"], empty]}
    version = SchemaVersion(version=1, value=value, user_key=None)
    chain = StateChain(tmp_path)
    chain.chain.states = [replace(STATES[0], versions=(version,))]
    source = chain.step(1, "full", lambda state, user: ValueState(state, "value").update((len(user or ""), ())))
    assert [r["value"] for r in rows(source, "value", tmp_path) if r["key"]["k"] == "user-7"] == [{"n": 6, "e": {}}]
    with pytest.raises(UsageError, match="struct without fields, which Parquet can't hold"):
        export_state(source, str(tmp_path / "out"))


CONTENT = content(
    day(1), "a", parallelism=4, max_parallelism=16, key_schema=struct(("k", "string")), states=STATES
)  # fmt: skip
TWO = content(day(1), "a", parallelism=4, max_parallelism=16, key_schema=struct(("k", "string"), ("n", "long")))
K = ("key", "k")


def keys_of(*users: Any) -> list[tuple[int, bytes]]:
    return sorted((key_group((user,), KEY, 16), KEYS.encode((user,))) for user in users)


@pytest.mark.parametrize(
    ("filters", "keys", "groups"),
    [
        ([], None, None),
        ([EqualTo(K, "a")], ["a"], None),
        ([IsNotNull(K), EqualTo(K, "a")], ["a"], None),
        ([EqualNullSafe(K, "a")], ["a"], None),
        ([IsNull(K)], [None], None),
        ([In(K, ("a", "b", None))], ["a", "b"], None),
        ([EqualTo(("key",), {"k": "a"})], ["a"], None),
        ([In(("key",), ({"k": "a"}, {"k": None}))], ["a", None], None),
        ([EqualTo(K, "a"), In(K, ("a", "b"))], ["a"], None),
        ([EqualTo(("key_group",), 3)], None, [3]),
        ([In(("key_group",), (3, 5, 99, -1))], None, [3, 5]),
        ([GreaterThan(K, "a")], None, None),
        ([EqualTo(("value", "n"), 1)], None, None),
        ([EqualTo(("key", "k", "x"), 1)], None, None),
        ([EqualTo(("key",), {"other": 1})], None, None),
        ([EqualTo(K, 7)], None, None),  # no such key can be: left to Spark
    ],
)
def test_what_filters_leave_to_read(filters: list[Filter], keys: list[Any] | None, groups: list[int] | None) -> None:
    plan = plan_read(filters, CONTENT)
    wanted = None if keys is None else tuple(keys_of(*keys))
    assert plan.part == Part(key_groups=None if groups is None else tuple(groups), keys=wanted)
    named = groups if groups is not None else None if wanted is None else [g for g, _ in wanted]
    expected = range(4) if named is None else sorted({shard_of(g, 4, 16) for g in named})
    assert plan.shards == tuple(expected)


def test_filters_on_shards_and_on_some_of_the_key_columns() -> None:
    assert plan_read([In(("shard",), (1, 3, 9, None))], CONTENT).shards == (1, 3)
    (shard,) = plan_read([EqualTo(K, "a")], CONTENT).shards
    assert plan_read([EqualTo(K, "a"), EqualTo(("shard",), (shard + 1) % 4)], CONTENT).shards == ()
    group = plan_read([EqualTo(K, "a")], CONTENT).part.keys[0][0]  # type: ignore[index]
    assert plan_read([EqualTo(K, "a"), EqualTo(("key_group",), group ^ 1)], CONTENT).part.keys == ()
    assert plan_read([EqualTo(("key", "n"), 1)], TWO) == ReadPlan(shards=(0, 1, 2, 3))
    both = plan_read([In(K, ("a", "b")), In(("key", "n"), (1, 2))], TWO)
    assert len(both.part.keys or ()) == 4
    # 200 x 200 keys are no look-up any more.
    many = plan_read([In(K, tuple(map(str, range(200)))), In(("key", "n"), tuple(range(200)))], TWO)
    assert many == ReadPlan(shards=(0, 1, 2, 3), part=WHOLE)


def test_a_look_up_on_64_shards_reads_one_shard_and_the_files_that_can_hold_the_key(tmp_path: Path) -> None:
    """The bytes are counted at the storage."""
    chain = StateChain(tmp_path, max_parallelism=128, engine=EngineOptions(target_file_bytes=32 * 1024))

    def fill(state: Any, user: Any) -> None:
        ValueState(state, "value").update((0, os.urandom(300).hex()))
        ListState(state, "list").append_list([(n, os.urandom(500).hex()) for n in range(200)])

    chain.step(64, "full", fill)
    source = chain.step(64, "savepoint")  # the values of each shard in several files, by range
    full = CountingStorage(source.url)
    everything = rows(source, "value", tmp_path, storage=full)
    assert len(everything) == len(USERS)
    for user in ("user-7", None):
        counted = CountingStorage(source.url)
        plan = plan_read([EqualNullSafe(K, user)], source.content)
        found = rows(source, "value", tmp_path, plan, storage=counted)
        assert found == [r for r in everything if r["key"]["k"] == user] and len(found) == 1
        (shard,) = plan.shards
        own = {f.handle.path for f in chain.chain.manifests[shard].files}
        assert paths_of(counted.reads) < own
        shard_bytes = chain.chain.manifests[shard].files_bytes
        assert 0 < counted.bytes_read < shard_bytes / 2 and counted.bytes_read < full.bytes_read / 40
    print(f"look-up {counted.bytes_read:,} bytes, its shard {shard_bytes:,}, all {full.bytes_read:,}")


def test_only_the_manifest_of_the_shard_is_read(tmp_path: Path) -> None:
    """Where manifests are files of their own."""
    pipeline = RealPipeline(tmp_path)
    pipeline.run(1, "a1", dict.fromkeys("abcdefgh", 1))
    source = find_state(root=str(tmp_path), pipeline="counting")
    plan = plan_read([EqualTo(K, "a")], source.content)
    counted = CountingStorage(source.url)
    assert [r["value"]["n"] for r in rows(source, "value", tmp_path, plan, storage=counted)] == [1]
    (shard,) = plan.shards
    assert paths_of(counted.reads) == {f"shared/a1/{shard}-0-0.manifest", f"shared/a1/{shard}-{shard}-0.sst"}


# --- RocksDB's MANIFEST ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_without_the_files_that_hold_nothing_of_a_span_the_span_is_the_same(tmp_path: Path, seed: int) -> None:
    """Overwrites, deletes, deleted ranges and merges in random order; then the files that a span needs are opened alone."""
    pick = random.Random(seed)
    options = EngineOptions(target_file_bytes=16 * 1024)
    with RocksStore(tmp_path / "db", options) as store:
        for _ in range(12):
            low = pick.randrange(6)
            keys = [bytes([0, pick.randint(low, low + 2), 1]) + b"%05d" % pick.randrange(500) for _ in range(400)]
            store.write([(key, None if pick.random() < 0.2 else os.urandom(40)) for key in keys])
            if pick.random() < 0.3:
                store.delete_range(bytes([0, low]), bytes([0, low, 1]) + b"00300")
            if pick.random() < 0.2:
                store.compact()
            elif len(store.sorted_runs()) > 2 and pick.random() < 0.3:
                store.merge_newest(2)
        ssts, small = store.capture(tmp_path / "image")
        image = tmp_path / "image" / next(f.name for f in small if f.name.startswith("MANIFEST-"))
        spans = live_spans(image.read_bytes(), "it")
        assert {f"{s.number:06d}.sst" for s in spans} == {f.name for f in ssts}
        pruned = 0
        for group in range(8):
            start, end = bytes([0, group]), bytes([0, group + 1])
            spare = [s for s in spans if s.largest < start or s.smallest >= end]
            pruned += len(spare)
            folder = tmp_path / f"only-{group}"
            folder.mkdir()
            for file in (*small, *ssts):
                if file.name not in {f"{s.number:06d}.sst" for s in spare}:
                    (folder / file.name).write_bytes((tmp_path / "image" / file.name).read_bytes())
            (folder / image.name).write_bytes(without(image.read_bytes(), spare))
            with RocksStore(folder, options) as alone:
                assert list(alone.scan(start, end)) == list(store.scan(start, end))
    assert pruned


def test_a_record_that_crosses_blocks_of_the_manifest_is_one_record(tmp_path: Path) -> None:
    with RocksStore(tmp_path / "db") as store:
        store.write([(b"\0\0k", b"v")])
        _, small = store.capture(tmp_path / "image")
    image = next(f for f in small if f.name.startswith("MANIFEST-"))
    log = image.read_bytes()
    (span,) = live_spans(log, "it")
    fits = (32 * 1024 - len(log) - 7) // 3  # deletions, of three bytes each
    tails = set()
    for times in (*range(fits - 5, fits + 5), 40_000):
        longer = without(log, [span] * times)
        tails.add(-len(longer) % (32 * 1024))
        assert len(longer) > 32_700 and live_spans(longer, "it") == []
        longer = without(longer, [span])
        assert live_spans(longer, "it") == []
    assert tails & {*range(1, 7)}  # too little for a header: the next record begins in the next block
    # RocksDB follows such a log too: here with an edit of 100,000 bytes that it ignores before the one that counts.
    ignored = b"\xff\x40" + b"\xa0\x8d\x06" + bytes(100_000)
    image.write_bytes(without(log + version_log._framed(ignored, len(log)), [span]))
    assert live_spans(image.read_bytes(), "it") == []
    with RocksStore(tmp_path / "image") as store:
        assert list(store.scan(b"", None)) == []


def test_a_manifest_that_cannot_be_followed_costs_all_files_of_the_shard(tmp_path: Path) -> None:
    chain = StateChain(tmp_path)
    chain.step(1, "full", random_changes(1))
    (manifest,) = chain.chain.manifests
    (log,) = (f for f in manifest.inline_files if f.name.startswith("MANIFEST-"))
    with pytest.raises(CorruptFile, match="MANIFEST"):
        live_spans(log.data[:20] + b"\xff" + log.data[21:], "the MANIFEST")
    object.__setattr__(log, "data", log.data[:-1])
    assert needed_for(manifest, [(b"\xff\xff", None)]) is manifest


# --- which state -------------------------------------------------------------------------------------------------------------------


def test_a_state_is_found_by_root_and_pipeline_by_path_and_as_a_savepoint(tmp_path: Path) -> None:
    pipeline = SmallPipeline(tmp_path)
    pipeline.take(tmp_path / "native", "native")
    root, folder = str(tmp_path / "root"), pipeline.url
    for found in (
        find_state(root=root, pipeline="p"),
        find_state("1", path=folder),
        find_state("2024-01-02T00:00:00+00:00", path=root, pipeline="p"),
        find_state(folder),
        find_state(path=f"{folder}/"),
    ):
        assert (found.content, found.checkpoint_id, found.savepoint) == (pipeline.record.content, 1, None)  # type: ignore[union-attr]
    for found in (find_state(str(tmp_path / "native")), find_state(path=str(tmp_path / "native"), pipeline="p")):
        assert found.savepoint is not None and not found.canonical
    with pytest.raises(UsageError, match=r"no savepoint\.json"):
        find_state(path=root)
    with pytest.raises(UsageError, match="root and pipeline"):
        find_state()
    with pytest.raises(StateGapError, match="no usable checkpoint 9"):
        find_state("9", path=folder)
    with pytest.raises(UsageError, match=r"no state 'other'; it has value, list, .*\$timers"):
        find_state(folder).descriptor("other")


def test_shards_of_a_source() -> None:
    source = StateSource(url="/", content=CONTENT, checkpoint_id=1)
    assert [source.key_groups(shard) for shard in range(4)] == [range_of(shard, 4, 16) for shard in range(4)]
