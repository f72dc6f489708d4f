"""State as tables, without Spark: equal to what processors see, whatever it is read from, and little is read for a key."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cairn.data_sources.state_selection import parse_numbers, plan_read
from cairn.operations.export_state import export_state
from cairn.spark.session import SessionOnDemand
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions, RocksStore
from state_backend.formats.arrow_columns import arrow_type
from state_backend.formats.json_keys import keys_of_json
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.row_columns import RowColumns
from state_backend.formats.spark_hash import key_group
from state_backend.formats.types import parse_struct
from state_backend.inspection.describe import plain, self_describing
from state_backend.inspection.state_diff import manifests_of
from state_backend.inspection.state_source import Part, StateSource, find_state, needed_for, open_part
from state_backend.inspection.verify import offering_intact
from state_backend.shard.restore import restore_shard
from state_backend.state import layout
from state_backend.state.canonical_columns import StateRows
from state_backend.state.entries import decode_entry
from state_backend.state.entry_columns import expiries
from state_backend.state.state_variables import ListState, ValueState
from state_backend.values.errors import CheckpointDropped, CorruptFile, StateGapError, StateSchemaError, UsageError
from state_backend.values.key_groups import KeyGroupRange, range_of, shard_of
from state_backend.values.records import SchemaVersion, ShardManifest, StateDescriptor
from state_backend.values.retention import KeepLast
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import PIPELINE, content, day
from tests.support.real_shards import RealPipeline
from tests.support.savepoints import SmallPipeline
from tests.support.shards import KEYS, STATES, snapshot_of, struct
from tests.support.state_sources import (
    KEY,
    NAMES,
    USERS,
    CountingStorage,
    Seen,
    StateChain,
    paths_of,
    random_changes,
    rows,
)
from tests.support.validating import validate_checkpoint

COUNTING = bare_pipeline(name=PIPELINE)


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


@pytest.mark.long("seconds", runs_in="ci")
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


@pytest.mark.long("seconds", runs_in="ci")
def test_a_look_up_by_key_or_key_group_returns_only_its_rows(tmp_path: Path) -> None:
    chain = StateChain(tmp_path)
    chain.step(3, "incremental", random_changes(1))
    chain.step(3, "incremental", random_changes(2))
    sources = [chain.step(3, "changelog", random_changes(3)), chain.savepoint("canonical", "canonical")]
    for source in sources:
        everything = {state: rows(source, state, tmp_path) for state in ("map", "list_ttl", "$timers")}
        for user in [*USERS[:9], "nobody"]:
            plan = plan_read(source.content, keys=[(user,)])
            assert plan.shards == (shard_of(chain.group_of(user), 3, 16),)
            for state, whole in everything.items():
                assert rows(source, state, tmp_path, plan) == [r for r in whole if r["key"]["k"] == user]
        for group in range(0, 16, 5):
            plan = plan_read(source.content, key_groups=[group])
            assert rows(source, "map", tmp_path, plan) == [r for r in everything["map"] if r["key_group"] == group]


def test_a_shard_with_other_entries_than_recorded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = StateChain(tmp_path).step(1, "incremental", random_changes(0), after_ms=40)
    assert rows(source, "list", tmp_path)
    monkeypatch.setattr("state_backend.inspection.state_table.stored_batches", lambda *_: iter(()))
    with pytest.raises(CorruptFile, match=r"shard 0 has 0 entries of state 'list', but its manifest says \d+$"):
        rows(source, "list", tmp_path)


def test_a_checkpoint_dropped_by_retention_during_a_read_is_not_reported_as_damage(tmp_path: Path) -> None:
    """It is not told as damage: by a reader of rows, by a savepoint or restore, and by a validation, which marks nothing."""
    pipeline = RealPipeline(tmp_path / "root", policy=KeepLast(1))
    pipeline.run(1, "a1", {"a": 1, "b": 1})
    record = pipeline.coordinator.record(1)
    source = StateSource.of_record(str(pipeline.root / PIPELINE), record)
    state, damaged = source.content.states[0].name, pipeline.coordinator.record(1).content.shards[0].manifest
    pipeline.run(2, "a2", {"a": 2})
    again = r"^checkpoint 1, the state at 2024-01-02T00:00:00Z, is no longer retained: .*\nUsable checkpoints: 2 "
    with pytest.raises(CheckpointDropped, match=again):
        rows(source, state, tmp_path)
    with pytest.raises(CheckpointDropped, match=again):
        manifests_of(source, pipeline.storage)
    with pytest.raises(CheckpointDropped, match=again), offering_intact(pipeline.storage, record):
        assert damaged is not None
        pipeline.storage.download(damaged, tmp_path / "manifest")
    with pytest.raises(CheckpointDropped, match=again):
        validate_checkpoint(None, COUNTING, str(pipeline.root), record, fast=True)
    assert pipeline.coordinator.log().quarantined == {}
    # Without a log that says so, what is missing is damage.
    shutil.rmtree(pipeline.root / PIPELINE / "checkpoints")
    with pytest.raises(CorruptFile, match="is missing"):
        rows(source, state, tmp_path)


def no_spark() -> Any:
    raise UsageError("a session is opened")


def test_a_small_state_is_validated_without_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its restored entries are compared with the record in this process; the session of a larger state is opened."""
    pipeline = RealPipeline(tmp_path / "root")
    pipeline.run(1, "a1", {"a": 1, "b": 1})
    record = pipeline.coordinator.record(1)

    def validate(of: Any) -> Any:
        return validate_checkpoint(SessionOnDemand(no_spark), COUNTING, str(pipeline.root), of, dry_run=True)

    found = validate(record)
    assert found.success and found.entries == record.content.totals.entries > 0
    assert found.pids == (os.getpid(),)
    with monkeypatch.context() as patch:
        patch.setattr(
            "cairn.shard_jobs.check_restored.verify_shard", lambda *_: (2, ["an entry is in another key group"])
        )
        assert validate(record).findings[0] == "an entry is in another key group"
    totals = record.content.totals
    limits = {"_SMALL_STATE_BYTES": totals.state_bytes, "_SMALL_STATE_ENTRIES": totals.entries, "_FEW_SHARDS": 1}
    for name, value in limits.items():
        with monkeypatch.context() as patch, pytest.raises(UsageError, match="a session is opened"):
            patch.setattr(f"cairn.operations.validation.validate_checkpoint.{name}", value - 1)
            validate(record)


@pytest.mark.long("seconds", runs_in="ci")
def test_expectations_open_a_session_only_if_spark_evaluates_them(tmp_path: Path) -> None:
    import great_expectations.expectations as gxe

    pipeline = RealPipeline(tmp_path / "root")
    pipeline.run(1, "a1", {"a": 1, "b": 1})
    record, folder = pipeline.coordinator.record(1), str(pipeline.root)

    def validate(*expectations: Any, **more: Any) -> Any:
        owner = replace(COUNTING, expectations=lambda: {"value": expectations}, **more)
        return validate_checkpoint(SessionOnDemand(no_spark), owner, folder, record, dry_run=True)

    rows = gxe.ExpectTableRowCountToEqual(value=2)
    assert validate(rows).success
    assert not validate(gxe.ExpectTableRowCountToEqual(value=3)).success
    for owner in ({"expectations_memory_bytes": 0}, {"expectations_memory_bytes": 1}):
        with pytest.raises(UsageError, match="a session is opened"):
            validate(rows, **owner)
    with pytest.raises(UsageError, match="a session is opened"):
        validate(rows, gxe.ExpectColumnMedianToBeBetween(column="v", min_value=1))


def test_a_struct_without_fields_can_be_read_but_not_exported_to_parquet(tmp_path: Path) -> None:
    """Which Parquet can't hold, but a table can."""
    empty = {"name": "e", "type": struct(), "nullable": True, "metadata": {}}
    value = {"type": "struct", "fields": [*struct(("n", "long"))["fields"], empty]}
    version = SchemaVersion(version=1, value=value, user_key=None)
    chain = StateChain(tmp_path)
    chain.chain.states = [replace(STATES[0], versions=(version,))]
    source = chain.step(1, "full", lambda state, user: ValueState(state, "value").update((len(user or ""), ())))
    assert [r["value"] for r in rows(source, "value", tmp_path) if r["key"]["k"] == "user-7"] == [{"n": 6, "e": {}}]
    with pytest.raises(UsageError, match="struct without fields, which Parquet can't store"):
        export_state(source, str(tmp_path / "out"))


CONTENT = content(day(1), "a", parallelism=4, max_parallelism=16, key_schema=struct(("k", "string")), states=STATES)


def keys_of(*users: Any) -> list[tuple[int, bytes]]:
    return sorted((key_group((user,), KEY, 16), KEYS.encode((user,))) for user in users)


@pytest.mark.parametrize(
    ("asked", "keys", "groups"),
    [
        ({}, None, None),
        ({"keys": [("a",)]}, ["a"], None),
        ({"keys": [("a",), (None,), ("a",)]}, ["a", None], None),
        ({"keys": []}, [], None),
        ({"key_groups": [3]}, None, [3]),
        ({"key_groups": [5, 3, 99, -1]}, None, [3, 5]),
        ({"keys": [("a",), ("b",)], "key_groups": [key_group(("b",), KEY, 16)]}, ["b"], None),
    ],
)
def test_a_read_is_limited_to_the_shards_of_the_chosen_keys_and_key_groups(
    asked: dict[str, Any], keys: list[Any] | None, groups: list[int] | None
) -> None:
    plan = plan_read(CONTENT, **asked)
    wanted = None if keys is None else tuple(keys_of(*keys))
    assert plan.part == Part(key_groups=None if groups is None else tuple(groups), keys=wanted)
    named = groups if groups is not None else None if wanted is None else [g for g, _ in wanted]
    expected = range(4) if named is None else sorted({shard_of(g, 4, 16) for g in named})
    assert plan.shards == tuple(expected)


def test_chosen_shards_are_intersected_with_those_of_keys_and_key_groups() -> None:
    assert plan_read(CONTENT, shards=[3, 1, 9]).shards == (1, 3)
    (shard,) = plan_read(CONTENT, keys=[("a",)]).shards
    assert plan_read(CONTENT, keys=[("a",)], shards=[(shard + 1) % 4]).shards == ()
    assert plan_read(CONTENT, key_groups=[0, 15], shards=[3]).shards == (3,)
    with pytest.raises(
        UsageError,
        match="the key does not fit the key columns of pipeline 'counting': key column 'k': expected string, found list",
    ):
        plan_read(CONTENT, keys=[([7],)])


def test_keys_survive_a_round_trip_through_json() -> None:
    """What ``cairn diff --json`` writes for a key finds it again: every type, the ends of their ranges, and null."""
    point = struct(("x", "integer"), ("y", "string"))
    days = {"type": "array", "elementType": "date", "containsNull": True}
    schema = struct(
        ("s", "string"), ("n", "long"), ("f", "double"), ("b", "boolean"), ("x", "binary"), ("d", "date"),
        ("t", "timestamp"), ("l", "timestamp_ntz"), ("c", "decimal(38,10)"),
    )  # fmt: skip
    for name, nested in (("p", point), ("a", days)):
        schema["fields"].append({"name": name, "type": nested, "nullable": True, "metadata": {}})
    codec = KeyCodec(parse_struct(schema))
    values: tuple[Any, ...] = (
        "\x00", -(2**63), float("nan"), True, b"\x00\xff", date(1, 1, 1), datetime(2024, 1, 2, 3, 4, 5, 6),
        datetime(9998, 12, 31), Decimal("-1.0000000001"), (None, "y"), [date(2024, 2, 29), None],
    )  # fmt: skip
    for key in (values, (None,) * len(values)):
        written = plain(self_describing(codec.decode(codec.encode(key)), codec.schema))
        (parsed,) = keys_of_json(json.dumps(written), parse_struct(schema))
        assert codec.encode(parsed) == codec.encode(key)
    of = parse_struct(struct(("k", "date"), ("n", "long")))
    several = '[{"k": null, "n": 1}, {"n": 2, "k": "2024-01-02"}]'
    assert keys_of_json(several, of, for_spark=True) == [(None, 1), (date(2024, 1, 2), 2)]
    for text, says in (
        ("k", "is not JSON"),
        ('{"k": null}', "does not name the key's columns; expected"),
        ('{"k": null, "n": 1, "m": 1}', "does not name the key's columns; expected"),
        ("7", "does not name the key's columns; expected"),
        (several, "does not name the key's columns; expected"),
        ('{"k": "yesterday", "n": 1}', 'does not fit: .*; expected {"k": date, "n": bigint}'),
    ):
        with pytest.raises(UsageError, match=says):
            keys_of_json(text, of)
    assert parse_numbers("3, 5", "shard") == [3, 5]
    with pytest.raises(UsageError, match="shard: expected a number"):
        parse_numbers("3-5", "shard")


@pytest.mark.long("seconds", runs_in="ci")
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
        plan = plan_read(source.content, keys=[(user,)])
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
    plan = plan_read(source.content, keys=[("a",)])
    counted = CountingStorage(source.url)
    assert [r["value"]["n"] for r in rows(source, "value", tmp_path, plan, storage=counted)] == [1]
    (shard,) = plan.shards
    assert paths_of(counted.reads) == {f"shared/a1/{shard}-0-0.manifest", f"shared/a1/{shard}-{shard}-0.sst"}


@pytest.mark.parametrize("seed", range(4))
def test_files_chosen_for_a_key_range_give_the_same_entries_as_all_files(tmp_path: Path, seed: int) -> None:
    """Overwrites, deletes, deleted ranges and merges in random order. Each span is read in several scans: a seek may also end in
    a file behind the span."""
    pick, storage = random.Random(seed), MemoryStorage()
    with RocksStore(tmp_path / "db", EngineOptions(target_file_bytes=16 * 1024)) as store:
        for interval in range(12):
            low = pick.randrange(6)
            keys = [bytes([0, pick.randint(low, low + 2), 1]) + b"%05d" % pick.randrange(500) for _ in range(400)]
            store.write([(key, None if pick.random() < 0.2 else os.urandom(40)) for key in keys])
            if pick.random() < 0.3:
                store.delete_range(bytes([0, low]), bytes([0, low, 1]) + b"00300")
            if interval == 8 or pick.random() < 0.2:
                store.compact()
            elif len(store.sorted_runs()) > 2 and pick.random() < 0.3:
                store.merge_newest(2)
        whole = snapshot_of(store, storage, tmp_path / "image", KeyGroupRange(first=0, last=7)).manifest
        spare = 0
        for n in range(24):
            start = bytes([0, n % 8]) + (b"\x01%05d" % pick.randrange(500) if n > 7 else b"")
            end = bytes([0, n % 8 + 1]) if n < 16 else start + b"\xff"
            needed = needed_for(whole, [(start, end)])
            spare += len(whole.files) - len(needed.files)
            alone = restore_shard(whole.key_groups, [needed], storage, tmp_path / f"{n}", EngineOptions(), partial=True)
            with alone.store:
                found = list[tuple[bytes, bytes]]()
                at, ended = start, False
                while not ended:
                    keys, values, ended = alone.store.read_range(at, end, rows=pick.choice([1, 3, 50]))
                    found += zip(keys, values, strict=True)
                    at = keys[-1] + b"\0" if keys else at
                assert found == list(store.scan(start, end))
    assert spare


def test_a_look_up_above_the_deleted_range_of_an_earlier_split_reads_the_whole_shard(tmp_path: Path) -> None:
    """2, 3, then 2 shards: entries are copied above a range that a split had deleted, and a seek into the range ends behind it."""
    storage, options = MemoryStorage(), EngineOptions(target_file_bytes=4 * 1024)
    want: dict[bytes, bytes] = {}
    manifests: list[ShardManifest] = []
    for number, shards in enumerate((2, 3, 2)):
        earlier, manifests = manifests, []
        for shard in range(shards):
            owned, place = range_of(shard, shards, 12), tmp_path / f"{number}-{shard}"
            of_range = [m for m in earlier if m.key_groups.intersect(owned)]
            restored = restore_shard(owned, of_range, storage, place, options)
            with restored.store as store:
                if not earlier:
                    for group in range(owned.first, owned.last + 1):
                        new = {layout.prefix(group, 1) + b"%04d" % n: os.urandom(100) for n in range(200)}
                        store.write([*new.items()])
                        want |= new
                    store.compact()
                given = {"attempt": place.name, "shard": shard, "opened": restored.opened}
                snapshot = snapshot_of(store, storage, place.with_suffix(".image"), owned, **given)
            manifests.append(snapshot.manifest)
    whole = 0
    for stored, value in [*want.items()][::50]:
        span = stored, layout.after(stored)
        manifest = next(m for m in manifests if int.from_bytes(stored[:2], "big") in m.key_groups)
        part = open_part(manifest, [span], storage, tmp_path / "part", None)
        whole += part is None
        if part is not None:
            with part:
                assert [*part.scan(*span)] == [(stored, value)]
            shutil.rmtree(tmp_path / "part")
        assert not (tmp_path / "part").exists()
    assert 0 < whole < len(want) // 50 / 4


def test_a_read_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    chain = StateChain(tmp_path)
    chain.step(1, "full", random_changes(1))
    (manifest,) = chain.chain.manifests
    without = replace(manifest, files=())
    restored = restore_shard(
        manifest.key_groups, [without], chain.chain.storage, tmp_path / "db", EngineOptions(), partial=True
    )
    with restored.store as store, pytest.raises(CorruptFile, match=r"No such file.*\.sst"):
        list(store.scan(b"", None))
    with pytest.raises(CorruptFile, match="can't open the state"):
        restore_shard(manifest.key_groups, [without], chain.chain.storage, tmp_path / "whole", EngineOptions())


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
    with pytest.raises(UsageError, match=r"no state 'other'\nIts states: value, list, .*\$timers"):
        find_state(folder).descriptor("other")


def test_a_state_source_gives_each_shard_its_range_of_key_groups() -> None:
    source = StateSource(url="/", content=CONTENT, checkpoint_id=1)
    assert [source.key_groups(shard) for shard in range(4)] == [range_of(shard, 4, 16) for shard in range(4)]


def test_the_error_names_a_missing_savepoint_file(tmp_path: Path) -> None:
    chain = StateChain(tmp_path)
    chain.step(1, "full", lambda state, user: ValueState(state, "value").update((1, user)))
    source = chain.savepoint("saved", "canonical")
    gone = next((tmp_path / "saved").glob("*/state-value/*.parquet"))
    gone.unlink()
    with pytest.raises(CorruptFile, match=f"a file of the savepoint is missing from .*{gone.name}"):
        rows(source, "value", tmp_path)


def test_a_manifest_that_belongs_to_another_shard_is_refused(tmp_path: Path) -> None:
    source = StateChain(tmp_path).step(2, "full")
    swapped = replace(source, content=replace(source.content, shards=source.content.shards[::-1]))
    with pytest.raises(CorruptFile) as raised:
        rows(swapped, "value", tmp_path)
    assert "the manifest of shard 0 belongs to shard 1, key groups 8 .. 15; expected key groups 0 .. 7" in str(
        raised.value
    )


VALUE, LIST = (next(d for d in STATES if d.name == name) for name in ("value", "list"))
STORED = KEYS.encode(("a",))
ELEMENT = layout.LIST_ELEMENT + (0).to_bytes(8, "big")
ROW = RowColumns("value", parse_struct(VALUE.versions[-1].value), 1).encode(pa.table({"n": [1], "s": ["x"]}))[0].as_py()


@pytest.mark.parametrize(
    ("state", "entries", "says"),
    [
        (VALUE, {b"": b"\x02short"}, "an entry with an expiry time is truncated"),
        (VALUE, {b"": b"\x09\x01"}, "an entry does not begin with a row's header"),
        (LIST, {b"\x07": b""}, "a stored key is neither an element nor the positions of a list"),
        (LIST, {layout.LIST_META: b"\0" * 9}, "the positions of a list are not 16 bytes"),
        (LIST, {layout.LIST_META: b"\0" * 16, ELEMENT: ROW}, "an element lies behind the end of its list"),
    ],
)
def test_malformed_entries_raise_corrupt_file(state: StateDescriptor, entries: dict[bytes, bytes], says: str) -> None:
    """Their file is whole, and their checksums are right."""
    stored = pa.array([b"\x00\x00" + bytes([state.state_id]) + STORED + rest for rest in entries], pa.binary())
    with pytest.raises(CorruptFile, match=f"state '{state.name}': {says}"):
        StateRows(state, KEY).table(stored, pa.array(entries.values(), pa.binary()))


def test_an_entry_truncated_within_its_expiry_is_reported() -> None:
    """To who reads or writes many keys at a time."""
    with pytest.raises(CorruptFile, match="an entry with an expiry time is truncated"):
        expiries(pa.array([b"\x02" + bytes(8), b"\x02short"], pa.binary()), "value")


@pytest.mark.parametrize(
    ("state", "rest", "entry", "says"),
    [
        (
            LIST,
            b"\x07",
            ROW,
            r"list state 'list', key \('a',\): the stored key ends with 07, which is neither an element",
        ),
        (VALUE, b"more", ROW, r"value state 'value', key \('a',\): 4 extra bytes follow the key"),
        (VALUE, b"", b"\x09", r"state 'value', key \('a',\): an entry begins with 09"),
        (VALUE, b"", b"", r"state 'value', key \('a',\): an entry begins with nothing"),
    ],
)
def test_the_error_names_a_malformed_entrys_key(state: StateDescriptor, rest: bytes, entry: bytes, says: str) -> None:
    stored_key = b"\x00\x00" + bytes([state.state_id]) + STORED + rest
    with pytest.raises(CorruptFile, match=says):
        decode_entry(state, stored_key, entry, KEYS, None)


def test_a_recorded_column_type_that_state_cant_store_is_refused() -> None:
    """By a release that knows more types."""
    with pytest.raises(StateSchemaError, match="interval day to second can't be stored"):
        arrow_type(parse_struct(struct(("i", "interval day to second"))))
