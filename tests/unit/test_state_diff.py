"""``diff_states`` and ``cairn diff`` against dicts of both states; ``cairn export``; and what of the storage they read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from cairn.operations import export_state as operation
from cairn.operations.export_state import export_state
from state_backend.inspection import state_diff
from state_backend.inspection.describe import plain
from state_backend.inspection.state_diff import EntryChange, diff_states, merge_entries, plan_groups
from state_backend.inspection.state_source import StateSource
from state_backend.state.shard_state import ShardState
from state_backend.state.state_variables import ListState, MapState, ValueState
from state_backend.state.timers import register_timer
from state_backend.values.errors import UsageError
from state_backend.values.records import KeyGroupState
from tests.support.checkpoints import PIPELINE
from tests.support.coordinator import coordinator_of
from tests.support.counting import DAYS, day
from tests.support.real_shards import RealPipeline
from tests.support.savepoints import SmallPipeline
from tests.support.shards import STATES, struct
from tests.support.state_sources import NAMES, USERS, CountingStorage, StateChain, random_changes, rows
from tests.support.trials import OLD, run

Place = tuple[str, str, str, int | None]


def entries(source: StateSource, work: Path) -> dict[Place, Any]:
    """All of a state, read as tables: value and expiry by state, key, and user key or position."""
    found: dict[Place, Any] = {}
    for state in NAMES:
        for row in rows(source, state, work):
            at_ms = round(row["expires_at"].timestamp() * 1000) if row["expires_at"] is not None else None
            key, user_key = repr(row["key"]), repr(row.get("user_key"))
            if state == "$timers":
                found[state, key, repr(None), at_ms] = None
            else:
                found[state, key, user_key, row.get("pos")] = (row["value"], at_ms)
    return found


def changes(first: StateSource, second: StateSource, work: Path, **options: Any) -> dict[Place, EntryChange]:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: dict[Place, EntryChange] = {}
    for change in diff_states(first, second, work, **options):
        timer = (change.before or change.after) if change.state == "$timers" else None
        last = timer.value["at_ms"] if timer is not None else change.position
        place = (change.state, repr(change.key), repr(change.user_key), last)
        assert place not in found
        found[place] = change
    return found


def check(first: StateSource, second: StateSource, tmp_path: Path, seen: dict[int, dict[Place, Any]]) -> int:
    """How many entries differ, after comparing all of them. ``seen``: what was read of a source before."""
    for source in (first, second):
        if id(source) not in seen:
            seen[id(source)] = entries(source, tmp_path)
    before, after = seen[id(first)], seen[id(second)]
    found = changes(first, second, tmp_path / "diff")
    for place in before.keys() | after.keys():
        if before.get(place, "none") == after.get(place, "none"):
            assert place not in found
            continue
        change = found.pop(place)
        assert change.change == ("added" if place not in before else "removed" if place not in after else "changed")
        if place[0] != "$timers":
            for entry, side in ((change.before, before), (change.after, after)):
                assert (None if entry is None else (entry.value, entry.expiry_ms)) == side.get(place)
    assert not found
    return sum(before.get(p, "none") != after.get(p, "none") for p in before.keys() | after.keys())


@pytest.mark.long("seconds", runs_in="ci")
def test_the_diff_equals_the_difference_of_the_two_state_tables(tmp_path: Path) -> None:
    """Between checkpoints of every mode, at other parallelisms, and savepoints of either format, in both directions."""
    chain = StateChain(tmp_path)
    sources = [chain.step(2, "incremental", random_changes(0))]
    for n, (parallelism, mode) in enumerate([(2, "changelog"), (3, "incremental"), (3, "full"), (1, "incremental")]):
        sources.append(chain.step(parallelism, mode, random_changes(n + 1), after_ms=35))  # type: ignore[arg-type]
    canonical, native = chain.savepoint("canonical", "canonical"), chain.savepoint("native", "native")
    pairs = [*pairwise(sources), (sources[0], sources[-1]), (sources[-1], sources[0])]
    pairs += [(sources[2], canonical), (canonical, sources[2]), (sources[1], native)]
    seen: dict[int, dict[Place, Any]] = {}
    for first, second in pairs:
        assert check(first, second, tmp_path, seen) > 50
    for same in (canonical, native):
        assert check(sources[-1], same, tmp_path, seen) == 0
    only = changes(sources[0], sources[-1], tmp_path / "diff", states=["map", "$timers"])
    assert {place[0] for place in only} == {"map", "$timers"}


def test_checkpoints_whose_shards_have_only_segments_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first interval in changelog mode leaves no file of RocksDB."""
    for n, user in enumerate(["ann", "bob"]):
        monkeypatch.setitem(DAYS, day(n).start, [(user, "tea", n + 1)])
    run(OLD, tmp_path, [0, 1], mode="changelog")
    coordinator = coordinator_of(OLD, str(tmp_path))
    first, second = (StateSource.of_record(f"{tmp_path}/counting", coordinator.record(n)) for n in (1, 2))
    found = list(diff_states(first, second, tmp_path / "diff"))
    assert [c.change for c in found if c.state == "total"] == ["added"]


@pytest.mark.long("half a second", runs_in="ci")
def test_a_diff_reads_only_the_shards_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of 60 is changed: of eight shards one is restored on each side, its shared files are fetched once, and nothing is
    where nothing differs."""
    chain = StateChain(tmp_path)
    first = chain.step(8, "full", lambda state, user: ValueState(state, "value").update((1, user)))
    whole = sum(m.files_bytes for m in chain.chain.manifests)

    def one(state: ShardState, user: Any) -> None:
        if user == "user-7":
            ValueState(state, "value").update((2, None))

    second = chain.step(8, "incremental", one)
    counted: list[CountingStorage] = []
    monkeypatch.setattr(state_diff, "open_storage", lambda url: counted.append(CountingStorage(url)) or counted[-1])
    (change,) = changes(first, second, tmp_path / "diff").values()
    assert (change.state, change.change, change.key) == ("value", "changed", {"k": "user-7"})
    assert (change.before, change.after) == (
        state_diff.Entry(value={"n": 1, "s": "user-7"}, expiry_ms=None),
        state_diff.Entry(value={"n": 2, "s": None}, expiry_ms=None),
    )
    reads = [path for storage in counted for path, _ in storage.reads]
    shard = chain.group_of("user-7") * 8 // 16
    assert len(reads) == len({*reads}) == 2 and all(path.split("/")[-1].startswith(f"{shard}-") for path in reads)
    assert sum(storage.bytes_read for storage in counted) < whole
    counted.clear()
    assert changes(second, chain.step(8, "changelog"), tmp_path / "diff") == {}
    assert not [read for storage in counted for read in storage.reads]


def test_states_are_told_apart_by_name_and_kind(tmp_path: Path) -> None:
    """Another state id alone is no difference; a state that was dropped and declared anew as a map loses its values and gains
    entries."""
    first, renumbered, redeclared = (StateChain(tmp_path / name) for name in "abc")
    value, map_ = STATES[0], STATES[2]

    def fill(value_name: str) -> Any:
        return lambda state, user: ValueState(state, value_name).update((1, user))

    def fill_map(state: ShardState, user: Any) -> None:
        MapState(state, "value").update_value((user,), (1, user))

    before = first.step(1, "full", fill("value"))
    renumbered.chain.states = [replace(value, state_id=20)]
    assert changes(before, renumbered.step(1, "full", fill("value")), tmp_path / "diff") == {}
    redeclared.chain.states = [replace(map_, name="value")]
    found = changes(before, redeclared.step(1, "full", fill_map), tmp_path / "diff")
    assert sorted(c.change for c in found.values()) == ["added"] * len(USERS) + ["removed"] * len(USERS)
    assert {c.change: c.user_key is not None for c in found.values()} == {"added": True, "removed": False}
    assert {c.state for c in found.values()} == {"value"}


def group(number: int, digest: int = 1, **counts: int) -> KeyGroupState:
    return KeyGroupState(key_group=number, entries=counts, digest=digest)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, []),
        ({1: group(1, a=1)}, {1: group(1, a=1)}, []),
        ({1: group(1, a=1)}, {}, [1]),
        ({}, {7: group(7, a=1), 1: group(1, a=1)}, [1, 7]),
        ({1: group(1, digest=1, a=1)}, {1: group(1, digest=2, a=1)}, [1]),
        ({1: group(1, a=1)}, {1: group(1, b=1)}, [1]),  # the digest alone is a sum of hashes
        (None, {1: group(1, a=1)}, [0, 1, 2, 3]),
        ({}, None, [0, 1, 2, 3]),
        # An older version did not record how many bytes there are.
        ({1: replace(group(1, 7, s=1), size_bytes=9)}, {1: group(1, 7, s=1)}, []),
    ],
)
def test_key_groups_of_other_digest_or_counts_are_compared(first: Any, second: Any, expected: list[int]) -> None:
    assert plan_groups(first, second, 4) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", ""),
        ("ab", "", "a- b-"),
        ("", "ab", "-a -b"),
        ("abd", "bcd", "a- bb -c dd"),
        ("ac", "bd", "a- -b c- -d"),
    ],
)
def test_two_sorted_runs_are_merged_into_pairs_by_key(first: str, second: str, expected: str) -> None:
    def run(text: str) -> Any:
        return iter([(c.encode(), c.encode()) for c in text])

    found = merge_entries(run(first), run(second))
    assert " ".join("".join(e.decode() if e else "-" for e in pair) for _, pair in found) == expected


@pytest.mark.long("half a second", runs_in="ci")
def test_a_diff_of_states_with_different_key_group_counts_needs_a_canonical_savepoint(tmp_path: Path) -> None:
    first, second = StateChain(tmp_path / "a"), StateChain(tmp_path / "b", max_parallelism=32)

    def fill(state: ShardState, user: Any) -> None:
        ValueState(state, "value").update((7, user))
        ListState(state, "list_ttl").append_list([(n, user) for n in range(3)])
        register_timer(state, len(user or ""))

    a, b = first.step(2, "full", fill), second.step(3, "full", fill)
    canonical = second.savepoint("canonical", "canonical")
    for other in (b, canonical):  # equal digests: nothing is read
        assert changes(a, other, tmp_path / "diff") == {} == changes(other, a, tmp_path / "diff")
    first.step(2, "full", lambda state, user: ValueState(state, "value").clear() if user == "a" else None)
    key = first.source().content.key_schema
    strict = [field | {"nullable": False, "metadata": {"comment": "who"}} for field in key["fields"]]
    source = first.source()
    same_key = replace(source, content=replace(source.content, key_schema=key | {"fields": strict}))
    assert len(changes(a, same_key, tmp_path / "diff")) == 1
    with pytest.raises(UsageError, match=r"has 16 key groups, but .* has 32\nTake a canonical savepoint"):
        changes(first.source(), b, tmp_path / "diff")
    (change,) = changes(canonical, first.source(), tmp_path / "diff").values()
    assert (change.state, change.change, change.key) == ("value", "removed", {"k": "a"})
    with pytest.raises(UsageError, match="no state 'other'"):
        changes(a, a, tmp_path / "diff", states=["other"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    pipeline = RealPipeline(folder)
    pipeline.run(1, "a1", dict.fromkeys("abcdefgh", 1))
    pipeline.run(2, "a2", {"a": 2, "z": 3})
    pipeline.run(3, "a3", {})
    return folder


def cairn(root: Path, *arguments: str) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(app, [command, "--root", str(root), "--pipeline", PIPELINE, *rest])


@pytest.mark.long("half a second", runs_in="ci")
def test_cairn_diff_lists_the_keys(root: Path) -> None:
    found = json.loads(cairn(root, "diff", "1", "2", "--json").stdout)
    assert found["entries"] == {"value": {"added": 1, "removed": 0, "changed": 1}}
    assert sorted(found["changes"], key=lambda c: c["change"]) == [
        {"state": "value", "change": "added", "key": {"k": "z"}, "after": {"n": 3, "s": "z"}},
        {
            "state": "value",
            "change": "changed",
            "key": {"k": "a"},
            "before": {"n": 1, "s": "a"},
            "after": {"n": 2, "s": "a"},
        },
    ]
    text = cairn(root, "diff", "2", "1").stdout
    assert '- value k="z": n=3, s="z"\n~ value k="a": n 2 -> 1\n' in text and "value: 1 removed, 1 changed" in text
    assert '~ value k="a": n 2 -> 1' in text
    limited = cairn(root, "diff", "1", "2", "--limit", "1").stdout
    assert "not listed: 1 more; a larger --limit lists them" in limited and limited.count(" k=") == 1
    assert json.loads(cairn(root, "diff", "1", "2", "--state", "list", "--json").stdout)["entries"] == {}


@pytest.mark.long("half a second", runs_in="ci")
def test_diff_exits_with_0_for_equal_and_different_states_and_2_for_usage_errors(root: Path, tmp_path: Path) -> None:
    for extra in ((), ("--fast",)):
        found = [cairn(root, "diff", *which, "--json", *extra) for which in (("1", "2"), ("2", "3"))]
        assert [(one.exit_code, json.loads(one.stdout)["same_state"]) for one in found] == [(0, False), (0, True)]
    assert cairn(root, "diff", "1", "2", "--state", "nothing").exit_code == 2
    assert cairn(root, "diff", "1", str(tmp_path)).exit_code == 2


def test_a_fast_diff_reads_no_state_files(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    for file in (tmp_path / "root").rglob("*.sst"):
        file.unlink()
    found = json.loads(cairn(tmp_path / "root", "diff", "1", "2", "--fast", "--json").stdout)
    assert "entries" not in found and found["key_groups"]
    assert cairn(tmp_path / "root", "diff", "1", "2").exit_code == 1


@pytest.mark.long("half a second", runs_in="ci")
def test_savepoints_are_compared_and_exported_without_a_root(tmp_path: Path) -> None:
    pipeline = SmallPipeline(tmp_path)
    for format in ("native", "canonical"):
        pipeline.take(tmp_path / format, format)  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "root")
    native, canonical = str(tmp_path / "native"), str(tmp_path / "canonical")
    same = CliRunner().invoke(app, ["diff", native, canonical, "--json"])
    assert (same.exit_code, json.loads(same.stdout)["changes"]) == (0, [])
    counts = []
    for folder in (native, canonical):
        done = CliRunner().invoke(app, ["export", folder, "--folder", f"{folder}-exported", "--json"])
        assert done.exit_code == 0, done.output
        report = json.loads(Path(f"{folder}-exported/export.json").read_text())
        counts.append(report["rows"])
        assert report["rows"]["value"] == 66 and report["rows"]["value_ttl"] == 0  # their time is up
    assert counts[0] == counts[1]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.long("seconds", runs_in="ci")
def test_an_export_is_the_tables_as_parquet(tmp_path: Path, jobs: int) -> None:
    chain = StateChain(tmp_path)
    source = chain.step(3, "incremental", random_changes(3))
    told: list[tuple[int, int]] = []
    with mock.patch.object(operation, "ProcessPoolExecutor", wraps=operation.ProcessPoolExecutor) as pool:
        report = export_state(
            source, str(tmp_path / "out"), jobs=jobs, on_progress=lambda *numbers: told.append(numbers)
        )
    assert pool.called == (jobs > 1)
    assert told == [(1, 3), (2, 3), (3, 3)]
    for state in NAMES:
        folder = tmp_path / "out" / ("timers" if state == "$timers" else f"state-{state}")
        found = [row for file in sorted(folder.iterdir()) for row in pq.ParquetFile(file).read().to_pylist()]
        assert found == rows(source, state, tmp_path)
        assert report["rows"][state] == len(found)
    assert {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").glob("*/*.parquet")} == {
        file["path"] for file in report["files"]
    }


def test_an_export_writes_only_the_chosen_states_and_needs_an_empty_folder(root: Path, tmp_path: Path) -> None:
    done = cairn(root, "export", "2", "--folder", str(tmp_path / "out"), "--state", "value")
    assert done.exit_code == 0 and "value: 9 rows in 2 files" in done.stdout
    assert {f.name for f in (tmp_path / "out").iterdir() if f.name != ".tmp"} == {"state-value", "export.json"}
    again = cairn(root, "export", "2", "--folder", str(tmp_path / "out"))
    assert (again.exit_code, "is not empty" in again.stderr) == (2, True)
    for wrong in (("--state", "nothing"), ("77",)):
        extra = [*wrong] if wrong[0] == "77" else ["latest", *wrong]
        assert cairn(root, "export", *extra, "--folder", str(tmp_path / "other")).exit_code == 2
    (root_copy := tmp_path / "damaged").mkdir()
    shutil.copytree(root, root_copy, dirs_exist_ok=True)
    next(root_copy.rglob("*.sst")).write_bytes(b"x")
    broken = cairn(root_copy, "export", "2", "--folder", str(tmp_path / "partial"))
    assert broken.exit_code == 1 and not (tmp_path / "partial" / "export.json").exists()


def test_special_floats_bytes_decimals_and_dates_become_json_strings() -> None:
    value = {"f": float("nan"), "i": float("-inf"), "b": b"\x00\xff", "d": Decimal("1.50"), "l": (1, [None, True])}
    assert plain(value) == {"f": "NaN", "i": "-Infinity", "b": "00ff", "d": "1.50", "l": [1, [None, True]]}
    assert plain({"m": {date(2024, 1, 2): datetime(2024, 1, 2, 3, tzinfo=UTC)}}) == {
        "m": {"2024-01-02": "2024-01-02T03:00:00+00:00"}
    }


def test_states_of_other_keys_are_not_compared(tmp_path: Path) -> None:
    source = StateChain(tmp_path).step(1, "full")
    other = replace(source, content=replace(source.content, key_schema=struct(("device", "string"))))
    with pytest.raises(UsageError, match=r"have different key columns, so they can't be compared"):
        changes(source, other, tmp_path / "compared")
