"""Savepoints as tasks write and restore them, claims, and what a savepoint of somebody else may not say. Without Spark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cairn.operations.savepoints.restore_savepoint import _would_restore, restore_savepoint
from cairn.shard_jobs.fill_from_savepoint import RestoreJob
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.checkpoint.savepoints import (
    check_unclaimed,
    claim_savepoint,
    delete_savepoint,
    read_claim,
    read_savepoint,
    release_claim,
)
from state_backend.formats import paths, record_codec
from state_backend.formats.canonical_tables import state_schema
from state_backend.formats.types import parse_struct
from state_backend.values.errors import CorruptFile, CorruptRecord, Fenced, UnknownOutcome, UsageError
from state_backend.values.marks import Claim, Savepoint
from state_backend.values.records import Permissions
from state_backend.values.retention import KeepLast
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import Folder, content, day, start_ms
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import Fault, FaultyStorage, StopHere, stop_at
from tests.support.in_process import run_here
from tests.support.savepoints import MAX_PARALLELISM, Format, SmallPipeline, findings, prepare, restore, restore_task
from tests.support.shards import KEY_SCHEMA, STATES, struct

FORMATS: tuple[Format, ...] = ("native", "canonical")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_restored_state_is_the_state_that_was_saved(tmp_path: Path, format: Format, parallelism: int) -> None:
    """F71, F75: saved, moved, its origin deleted, restored under another name: equal digest, every index and value in place."""
    origin = SmallPipeline(tmp_path)
    savepoint = origin.take(tmp_path / "savepoint", format)
    shutil.rmtree(origin.url)
    moved = (tmp_path / "savepoint").rename(tmp_path / "moved")
    record = restore(tmp_path / "elsewhere" / "q", moved, parallelism=parallelism)
    shutil.rmtree(moved)
    made = record.content
    assert origin.record is not None
    before = origin.record.content
    assert (made.kind, made.pipeline, made.base_id, made.interval) == ("restore", "q", None, day(1))
    assert (made.digest, made.states, made.time) == (before.digest, before.states, before.time)
    assert made.restored_from == savepoint.savepoint
    assert made.parallelism == (parallelism if format == "canonical" else 2)
    assert made.totals.entries == before.totals.entries and made.outputs == ()
    assert findings(tmp_path / "elsewhere" / "q", made, tmp_path) == []


def test_a_pipeline_without_state_is_saved_and_restored(tmp_path: Path) -> None:
    """F21: nothing is a state too."""
    origin = SmallPipeline(tmp_path, fill=lambda state, users: None)
    for format in FORMATS:
        origin.take(tmp_path / format, format)
        record = restore(tmp_path / f"of-{format}", tmp_path / format)
        assert (record.content.digest, record.content.totals.entries) == (0, 0)
        assert findings(tmp_path / f"of-{format}", record.content, tmp_path) == []


def test_a_native_restore_links_and_copies_nothing(tmp_path: Path) -> None:
    origin = SmallPipeline(tmp_path)
    savepoint = origin.take(tmp_path / "savepoint", "native")
    record = restore(tmp_path / "q", tmp_path / "savepoint")
    for before, after in zip(savepoint.content.shards, record.content.shards, strict=True):
        assert before.inline is not None and after.inline is not None
        for source, copy in zip(before.inline.files, after.inline.files, strict=True):
            assert (tmp_path / "q" / copy.handle.path).samefile(tmp_path / "savepoint" / source.handle.path)
            assert paths.attempt_of(copy.handle.path) == "restored"
    assert record.content.totals.uploaded_bytes == 0


def test_a_failed_task_leaves_no_rows_in_a_canonical_savepoint(tmp_path: Path) -> None:
    """Whoever reads a folder of Parquet files reads all that is in it."""
    origin = SmallPipeline(tmp_path)
    assert origin.record is not None
    leftover = LocalStorage(tmp_path / "savepoint").create(
        paths.canonical("savepoint-savepoint", "value", 0, 1, 0), b"of an attempt that failed"
    )
    savepoint = origin.take(tmp_path / "savepoint", "canonical")
    assert leftover.path not in {f.handle.path for f in savepoint.files}
    stored = {info.path for info in LocalStorage(tmp_path / "savepoint").list("")}
    assert stored == {f.handle.path for f in savepoint.files} | {paths.SAVEPOINT_RECORD}


# --- what a foreign savepoint may not say ----------------------------------------------------------------------------------------


def tampered(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The record changed, with its checksum made right again: what a hostile writer would do."""
    file = folder / paths.SAVEPOINT_RECORD
    envelope = json.loads(file.read_text())
    change(envelope["body"])
    body = json.dumps(envelope["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    envelope["crc32c"] = f"{google_crc32c.value(body):08x}"
    file.write_text(json.dumps(envelope))


@pytest.mark.parametrize(
    ("format", "change", "says"),
    [
        ("canonical", lambda b: b["files"][0]["handle"].update(path="../../etc/passwd"), "not a storage path"),
        ("canonical", lambda b: b["files"][0]["handle"].update(path="/etc/passwd"), "not a storage path"),
        ("canonical", lambda b: b["files"][0].update(state="other"), "state 'other'"),
        ("canonical", lambda b: b["files"][0].update(shard=2), "shard 2"),
        ("canonical", lambda b: b["files"][0]["key_groups"].update(last=9), "not those of shard 0"),
        ("canonical", lambda b: b["files"].reverse(), "order of their shards"),
        ("canonical", lambda b: b["files"][0].pop("rows"), "rows"),
        ("canonical", lambda b: b.update(format="pickle"), "format"),
        ("canonical", lambda b: b["content"].update(max_parallelism=1), "parallelism 2"),
        ("canonical", lambda b: b["content"]["states"][0].update(state_id=0xFB), "from 1 to 250"),
        ("canonical", lambda b: b["content"]["states"][0].update(state_id=2), "share a name or an id"),
        ("canonical", lambda b: b["content"]["states"][0].update(name="$timers"), "share a name or an id"),
        ("canonical", lambda b: b["content"]["states"][0].update(versions=[]), "no schema"),
        ("canonical", lambda b: b["content"].update(key_schema={"type": "long"}), "Spark struct type"),
        ("native", lambda b: b["content"]["shards"][0]["inline"].update(shard=1), "belongs to shard 1"),
        ("native", lambda b: b["content"]["shards"].pop(), "lists shards [0], expected each of 2 shards"),
        (
            "native",
            lambda b: b["content"]["shards"][0]["inline"]["files"][0].update(name="../000001.sst"),
            "local file '../000001.sst'",
        ),
        (
            "native",
            lambda b: b["content"]["shards"][0]["inline"]["inline_files"][0].update(name="a/b"),
            "local file 'a/b'",
        ),
    ],
)
@pytest.mark.long("seconds", runs_in="ci")
def test_a_record_that_cannot_be_true_is_refused(tmp_path: Path, format: Format, change: Any, says: str) -> None:
    SmallPipeline(tmp_path).take(tmp_path / "savepoint", format)
    tampered(tmp_path / "savepoint", change)
    with pytest.raises(CorruptRecord) as raised:
        restore(tmp_path / "q", tmp_path / "savepoint")
    assert says in str(raised.value)
    assert not (tmp_path / "q" / "checkpoints").exists()


def value_file(folder: Path) -> Path:
    return next(folder.glob("*/state-value/00000-*.parquet"))


def rewritten(folder: Path, change: Callable[[pa.Table], pa.Table], file: Path | None = None) -> None:
    """One file's rows changed, with handle, count and record made right again."""
    file = file or value_file(folder)
    table = change(pq.ParquetFile(file).read())
    pq.write_table(table, file)
    data, path = file.read_bytes(), file.relative_to(folder).as_posix()

    def point(body: dict[str, Any]) -> None:
        (entry,) = (f for f in body["files"] if f["handle"]["path"] == path)
        entry["handle"] |= {"size_bytes": len(data), "crc32c": google_crc32c.value(data)}

    tampered(folder, point)


def column(table: pa.Table, name: str, values: Any) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.take(list(range(t.num_rows))[::-1]), "do not ascend"),
        (lambda t: pa.concat_tables([t.slice(0, 1), t]), "do not ascend"),
        (lambda t: column(t, "key_group", [0] * t.num_rows), "another key group than"),
        (lambda t: column(t, "schema_version", [2] * t.num_rows), "schema version than its column"),
        (lambda t: t.drop_columns(["expires_at_ms"]), "found the columns"),
        (lambda t: t.rename_columns([*t.column_names[:-1], "other"]), "found the columns"),
        (lambda t: t.slice(1), "digest"),
        (lambda t: column(t, "expires_at_ms", [5] * t.num_rows), "digest"),
    ],
)
def test_rows_that_are_not_what_was_saved_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    SmallPipeline(tmp_path).take(tmp_path / "savepoint", "canonical")
    rewritten(tmp_path / "savepoint", change)
    with pytest.raises(CorruptFile, match=says):
        restore(tmp_path / "q", tmp_path / "savepoint")
    assert not (tmp_path / "q" / "attempts").exists()


@pytest.mark.long("half a second", runs_in="ci")
def test_untouched_rows_written_by_another_tool_are_accepted(tmp_path: Path) -> None:
    """The counterpart: what the test above changes is what is refused, not that it was written again."""
    SmallPipeline(tmp_path).take(tmp_path / "savepoint", "canonical")
    rewritten(tmp_path / "savepoint", lambda t: t)
    restore(tmp_path / "q", tmp_path / "savepoint")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named(tmp_path: Path, format: Format, damage: str) -> None:
    """S32: and nothing is prepared."""
    SmallPipeline(tmp_path).take(tmp_path / "savepoint", format)
    file = value_file(tmp_path / "savepoint") if format == "canonical" else next(tmp_path.glob("savepoint/shared/*/*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    if damage != "remove":
        file.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(CorruptFile, match=file.name):
        restore(tmp_path / "q", tmp_path / "savepoint")
    assert not (tmp_path / "q" / "attempts").exists()


def test_a_key_that_parquet_cannot_hold_is_refused() -> None:
    key = struct(("a", {"type": "struct", "fields": []}))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="native savepoint"):
        state_schema(STATES[0], parse_struct(key))


# --- claims --------------------------------------------------------------------------------------------------------------------


def claim(owner: str, attempt: str = "a") -> Claim:
    return Claim(savepoint="s", owner=owner, attempt=attempt)


def test_the_owner_may_claim_again_and_nobody_else_may_restore(tmp_path: Path) -> None:
    SmallPipeline(tmp_path).take(tmp_path / "saved", "native")
    claim_savepoint(storage := LocalStorage(tmp_path / "saved"), claim("mine", "first"))
    claim_savepoint(storage, claim("mine", "second"))
    assert read_claim(storage) == check_unclaimed(storage, "mine") == claim("mine", "second")
    with pytest.raises(UsageError, match="claimed by mine"):
        restore_savepoint(ANY, PIPELINE, str(tmp_path / "new"), str(tmp_path / "saved"))
    with pytest.raises(UsageError, match="claimed by mine"):
        _would_restore(PIPELINE, str(tmp_path / "new"), str(tmp_path / "saved"), "NO_CLAIM")


def test_a_claim_fails_if_another_try_of_its_owner_claims_at_the_same_time() -> None:
    storage = MemoryStorage()
    claim_savepoint(storage, claim("mine", "first"))

    class Meanwhile(FaultyStorage):
        def replace(self, path: str, data: bytes, *, generation: int) -> Any:
            self.inner.replace(path, record_codec.encode(claim("mine", "third")), generation=generation)
            return super().replace(path, data, generation=generation)

    with pytest.raises(UnknownOutcome, match="same time"):
        claim_savepoint(Meanwhile(storage, {}), claim("mine", "second"))
    assert read_claim(storage) == claim("mine", "third")


@pytest.mark.parametrize("format", FORMATS)
def test_deleting_begins_with_the_record_and_leaves_the_claim(tmp_path: Path, format: Format) -> None:
    savepoint = SmallPipeline(tmp_path).take(tmp_path / "savepoint", format)
    storage = FaultyStorage(LocalStorage(tmp_path / "savepoint"), {})
    claim_savepoint(storage, claim("file:///root/mine"))
    other = (tmp_path / "savepoint" / "the user's notes.txt").write_text("keep")
    deleted = delete_savepoint(storage, savepoint)
    deletes = [path for name, path in storage.calls if name == "delete"]
    assert deletes[0] == paths.SAVEPOINT_RECORD and len(deletes) == deleted > 1
    assert {i.path for i in storage.inner.list("")} == {paths.CLAIM, "the user's notes.txt"} and other
    with pytest.raises(UsageError, match="file:///root/mine claimed it"):
        read_savepoint(storage)


def test_a_folder_without_a_savepoint_record_is_refused(tmp_path: Path) -> None:
    """F75: an unknown path."""
    with pytest.raises(UsageError, match=r"not a savepoint: it has no savepoint\.json"):
        read_savepoint(LocalStorage(tmp_path / "nowhere"))


@contextmanager
def without_spark(folder: Path, source: dict[int, Fault], root: dict[int, Fault]) -> Iterator[dict[str, FaultyStorage]]:
    """``restore_savepoint`` with its tasks in this process, over storages that fail as planned."""
    storages = {
        "source": FaultyStorage(LocalStorage(folder / "savepoint"), source),
        "root": FaultyStorage(LocalStorage(folder / "new" / "p"), root),
    }

    def opened(url: str) -> FaultyStorage:
        return storages["source" if url == str(folder / "savepoint") else "root"]

    with ExitStack() as stack:
        for module in (
            "cairn.operations.savepoints.restore_savepoint",
            "cairn.shard_jobs.fill_from_savepoint",
            "state_backend.checkpoint.location",
        ):
            stack.enter_context(mock.patch(f"{module}.open_storage", opened))
        stack.enter_context(mock.patch("cairn.operations.savepoints.restore_savepoint.run_on_shards", run_here))
        yield storages


ANY: Any = None
PIPELINE = bare_pipeline(parallelism=1, max_parallelism=MAX_PARALLELISM)


@pytest.mark.parametrize(
    ("claim", "format"),
    [
        ("NO_CLAIM", "canonical"),
        ("CLAIM", "native"),
        pytest.param("NO_CLAIM", "native", marks=pytest.mark.long("ten seconds")),
        pytest.param("CLAIM", "canonical", marks=pytest.mark.long("ten seconds")),
    ],
)
@pytest.mark.long("seconds", runs_in="ci")
def test_the_same_attempt_restores_once_wherever_the_try_before_it_died(
    tmp_path: Path, format: Format, claim: Literal["NO_CLAIM", "CLAIM"]
) -> None:
    """The first try wrote files, or prepared, or committed. Spark counts its tasks from 0 again."""
    SmallPipeline(tmp_path / "origin", parallelism=1).take(tmp_path / "savepoint", format)
    attempt = "0e0c9f2e-0000-4000-8000-000000000000"

    def attempted(folder: Path, fault: dict[int, Fault]) -> tuple[int, dict[str, FaultyStorage]]:
        with without_spark(folder, {}, fault) as storages:
            made = restore_savepoint(
                ANY, PIPELINE, str(folder / "new"), str(folder / "savepoint"), claim=claim, attempt=attempt
            )
        return made.id, storages

    shutil.copytree(tmp_path / "savepoint", tmp_path / "count" / "savepoint")
    _, storages = attempted(tmp_path / "count", {})
    for at in range(len(storages["root"].calls)):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "savepoint", folder / "savepoint")
        with pytest.raises(StopHere):
            attempted(folder, stop_at(at, "after"))
        prepared = (folder / "new" / "p" / paths.prepared(attempt)).exists()
        with mock.patch(f"{__name__}.run_here", side_effect=run_here) as computed:
            assert attempted(folder, {})[0] == attempted(folder, {})[0] == 1
        assert not (prepared and computed.called)
        log = Coordinator(LocalStorage(folder / "new" / "p"), "p").log()
        assert log.head_id == 1 and log.completed()[0].content.attempt == attempt
        assert findings(folder / "new" / "p", log.completed()[0].content, folder) == []
        assert (folder / "savepoint" / paths.SAVEPOINT_RECORD).exists() == (claim == "NO_CLAIM")
        shutil.rmtree(folder)


def test_an_attempt_can_not_be_reused_for_a_different_savepoint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        SmallPipeline(tmp_path / f"origin-{name}").take(tmp_path / name, "native")

    def stop(*_: Any) -> None:
        raise StopHere

    with mock.patch("cairn.operations.savepoints.restore_savepoint.run_on_shards", run_here):
        with mock.patch("cairn.operations.savepoints.restore_savepoint.commit", stop), pytest.raises(StopHere):
            restore_savepoint(ANY, PIPELINE, str(tmp_path / "new"), str(tmp_path / "one"), attempt="a")
        with pytest.raises(UsageError, match=r"attempt a began to restore savepoint .* use a new uuid"):
            restore_savepoint(ANY, PIPELINE, str(tmp_path / "new"), str(tmp_path / "two"), attempt="a")
        assert restore_savepoint(ANY, PIPELINE, str(tmp_path / "new"), str(tmp_path / "one"), attempt="a").id == 1


def test_a_fenced_claim_gives_the_savepoint_back(tmp_path: Path) -> None:
    """A re-run of the interval is committed before the restore: the savepoint is whole, and anybody's again."""
    origin = SmallPipeline(tmp_path / "origin")
    origin.take(tmp_path / "savepoint", "native")
    source, root = LocalStorage(tmp_path / "savepoint"), tmp_path / "new" / "p"
    claimed = []

    def rerun(spark: Any, job: RestoreJob) -> list[ShardAck]:
        acks = run_here(spark, job)
        claimed.append(read_claim(source))
        restore(root, tmp_path / "savepoint", "meanwhile")
        return acks

    with mock.patch("cairn.operations.savepoints.restore_savepoint.run_on_shards", rerun), pytest.raises(Fenced):
        restore_savepoint(ANY, PIPELINE, str(tmp_path / "new"), str(tmp_path / "savepoint"), claim="CLAIM")
    assert claimed[0] is not None and read_claim(source) is None
    saved = read_savepoint(source)
    assert findings(tmp_path / "savepoint", saved.content, tmp_path) == []
    assert check_unclaimed(source, "file:///somebody/else") is None


def test_a_repeated_claim_keeps_the_files_of_a_savepoint_that_is_being_taken(tmp_path: Path) -> None:
    SmallPipeline(tmp_path / "origin").take(tmp_path / "savepoint", "native")
    source, where = LocalStorage(tmp_path / "savepoint"), (str(tmp_path / "new"), str(tmp_path / "savepoint"))
    with mock.patch("cairn.operations.savepoints.restore_savepoint.run_on_shards", run_here):
        assert restore_savepoint(ANY, PIPELINE, *where, claim="CLAIM").id == 1
        newer = source.create(paths.shared("newer", 0, 0, 0, "sst"), b"")
        assert restore_savepoint(ANY, PIPELINE, *where, claim="CLAIM").id == 1
    assert [info.path for info in source.list("shared/")] == [newer.path]


@pytest.mark.parametrize(("attempt", "meanwhile", "id"), [(None, False, 1), ("other", False, 2), (None, True, 3)])
def test_a_claim_is_only_finished_if_nothing_came_after_it(
    tmp_path: Path, attempt: str | None, meanwhile: bool, id: int
) -> None:
    SmallPipeline(tmp_path / "origin").take(tmp_path / "savepoint", "native")
    root, where = tmp_path / "new" / "p", (str(tmp_path / "new"), str(tmp_path / "savepoint"))
    module = "cairn.operations.savepoints.restore_savepoint"
    with mock.patch(f"{module}.run_on_shards", run_here):
        with mock.patch(f"{module}.delete_savepoint", side_effect=StopHere), pytest.raises(StopHere):
            restore_savepoint(ANY, PIPELINE, *where, claim="CLAIM", attempt="first")
        if meanwhile:
            restore(root, tmp_path / "savepoint", "meanwhile")
        record = restore_savepoint(ANY, PIPELINE, *where, claim="CLAIM", attempt=attempt)
    assert record.id == id and findings(root, record.content, tmp_path) == []
    assert not (tmp_path / "savepoint" / paths.SAVEPOINT_RECORD).exists()


def test_a_savepoint_claim_is_released_only_by_its_owner() -> None:
    storage = MemoryStorage()
    claim_savepoint(storage, claim("mine", "later"))
    release_claim(storage, "earlier")
    assert read_claim(storage) == claim("mine", "later")
    release_claim(storage, "later")
    release_claim(storage, "later")
    assert read_claim(storage) is None


# --- in the log ------------------------------------------------------------------------------------------------------------------


def begin_restore(folder: Folder, n: int, **changes: Any) -> Any:
    arguments = {"pipeline_start_ms": start_ms()} | changes
    return folder.coordinator.begin_restore(content(day(n), "saved"), **arguments)


def committed_restore(folder: Folder, n: int, attempt: str, **changes: Any) -> Any:
    return folder.run(day(n), attempt, kind="restore", base_id=None, h0=folder.coordinator.log().head_id, **changes)


def next_base(folder: Folder, n: int) -> Any:
    begun = folder.coordinator.begin(day(n), permissions=Permissions(), pipeline_start_ms=start_ms())
    return begun.base.id if begun.base else None


def test_an_empty_pipeline_goes_on_from_a_restored_savepoint() -> None:
    folder = Folder()
    assert begin_restore(folder, 5).h0 == 0
    result = committed_restore(folder, 5, "restored", outputs=())
    assert (result.id, result.outcome) == (1, "committed")
    assert next_base(folder, 6) == 1
    assert folder.run(day(6), "a6").record.content.base_id == 1
    assert folder.coordinator.publish(None) == [(day(6), 2)]  # a restore has no output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pipeline_start_ms": start_ms() + 1}, "The start of a pipeline never changes"),
        ({"pipeline_start_ms": day(3).start_ms - 86_400_000}, "The start of a pipeline never changes"),
    ],
)
def test_a_pipeline_with_another_start_is_refused(changes: Any, says: str) -> None:
    folder = Folder(days=1)
    with pytest.raises(UsageError, match=says):
        begin_restore(folder, 2, **changes)


def test_a_savepoint_that_no_interval_would_start_from_is_refused() -> None:
    with pytest.raises(UsageError, match="no interval would start from it"):
        begin_restore(Folder(), 2, pipeline_start_ms=day(3).start_ms)
    begin_restore(Folder(), 2, pipeline_start_ms=day(2).start_ms)


def test_a_savepoint_by_another_key_is_refused() -> None:
    folder = Folder()
    folder.run(day(1), "a1", key_schema=KEY_SCHEMA)
    with pytest.raises(UsageError, match="Restore it into a pipeline of another name"):
        begin_restore(folder, 1)


def test_a_savepoint_whose_key_has_a_comment_more_is_of_the_same_key() -> None:
    folder, fields = Folder(), KEY_SCHEMA["fields"]
    commented = [f | {"nullable": not f["nullable"], "metadata": {"comment": "who"}} for f in fields]
    folder.run(day(1), "a1", key_schema=KEY_SCHEMA)
    saved = content(day(1), "saved", key_schema=KEY_SCHEMA | {"fields": commented})
    assert folder.coordinator.begin_restore(saved, pipeline_start_ms=start_ms()).h0 == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_restore_is_fenced_by_what_was_committed_meanwhile(tmp_path: Path, format: Format) -> None:
    origin = SmallPipeline(tmp_path)
    origin.take(tmp_path / "savepoint", format)
    root = tmp_path / "q"
    slow = restore_task(root, tmp_path / "savepoint", "slow", 2, MAX_PARALLELISM)
    prepare(slow)
    first = restore(root, tmp_path / "savepoint", "fast")
    with pytest.raises(Fenced, match="checkpoint 1"):
        Coordinator(LocalStorage(root), "q").commit("slow")
    # What the loser wrote is gone, and neither the winner nor the savepoint, whose files are the same ones, lost any.
    assert not [i.path for i in LocalStorage(root).list("") if "slow" in i.path]
    assert findings(root, first.content, tmp_path) == []
    restore(tmp_path / "again", tmp_path / "savepoint")


def test_retention_deletes_what_a_restore_linked_and_not_the_savepoint(tmp_path: Path) -> None:
    """F30, F39: with NO_CLAIM nothing of the source goes, ever."""
    origin = SmallPipeline(tmp_path)
    origin.take(tmp_path / "savepoint", "native")
    root = tmp_path / "q"
    coordinator = Coordinator(LocalStorage(root), "q", policy=KeepLast(1))
    before = {i.path for i in LocalStorage(tmp_path / "savepoint").list("")}
    for n in range(3):
        restore_task_ = restore_task(root, tmp_path / "savepoint", f"r{n}", 2, MAX_PARALLELISM)
        prepare(restore_task_)
        coordinator.commit(f"r{n}")
        coordinator.clean_up()
    assert {paths.attempt_of(i.path) for i in LocalStorage(root).list("shared/")} == {"r2"}
    assert {i.path for i in LocalStorage(tmp_path / "savepoint").list("")} == before
    record = coordinator.record("latest")
    assert record.id == 3 and findings(root, record.content, tmp_path) == []


def test_a_native_savepoint_record_without_a_file_list_is_read(tmp_path: Path) -> None:
    """The record alone says what is where; without files it is the format of native savepoints before there was another."""
    savepoint = SmallPipeline(tmp_path).take(tmp_path / "savepoint", "native")
    envelope = json.loads((tmp_path / "savepoint" / paths.SAVEPOINT_RECORD).read_text())
    assert envelope["body"].pop("files") == []
    body = json.dumps(envelope["body"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    envelope["crc32c"] = f"{google_crc32c.value(body):08x}"
    assert record_codec.decode(json.dumps(envelope).encode(), "p", Savepoint) == savepoint


def test_a_claim_that_meets_a_concurrent_release_fails_and_advises_a_retry() -> None:
    """The owner's other try releases it between the refusal and the look."""
    storage = MemoryStorage()
    claim_savepoint(storage, claim("mine", "first"))

    class Released(FaultyStorage):
        def stat(self, path: str) -> None:
            return None

    with pytest.raises(UnknownOutcome, match=r"try again: claimed.json in .* was deleted just now"):
        claim_savepoint(Released(storage, {}), claim("mine", "second"))


def list_file(folder: Path) -> Path:
    return next(folder.glob("*/state-list/00000-*.parquet"))


def test_positions_behind_the_end_of_a_list_are_refused(tmp_path: Path) -> None:
    SmallPipeline(tmp_path).take(tmp_path / "savepoint", "canonical")
    rewritten(
        tmp_path / "savepoint",
        lambda t: column(t, "position", [n + 9 for n in t["position"].to_pylist()]),
        list_file(tmp_path / "savepoint"),
    )
    with pytest.raises(CorruptFile, match=r"list state 'list': a position is not in 0 \.\. next_position - 1"):
        restore(tmp_path / "q", tmp_path / "savepoint")
