"""The plain copy after crashes, re-runs and repeats; and that it is no link to what it copies."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from cairn.operations.copy_output import _copy, copy_output
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptFile, UsageError
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions, Record
from tests.support.checkpoints import DAY, Folder, day
from tests.support.faulty_storage import FaultyStorage, StaleStorage, StopHere, stop_at

HERE = "interval=20240101T000000000Z_20240102T000000000Z"


class Copying:
    """A pipeline whose sink is a plain copy; the copy's folder may fail."""

    def __init__(self, source: Storage) -> None:
        self.folder, self.copy = Folder(source), MemoryStorage()

    def publish(self, copy: Storage | None = None) -> list[int]:
        def opened(url: str) -> Storage:
            return (copy or self.copy) if url == "memory://copy" else self.folder.storage

        def hook(record: Record) -> None:
            files = [f"file:///root/{f.handle.path}" for f in record.content.outputs if not f.late]
            copy_output("memory://copy")(None, files, record.content.interval, record.id)

        with mock.patch("cairn.operations.copy_output.open_storage", opened):
            return self.folder.coordinator.publish(hook)

    def contents(self) -> dict[str, bytes]:
        return {info.path: self.copy.read(info.path) for info in self.copy.list("")}


def whole(checkpoint_id: int, attempt: str) -> dict[str, bytes]:
    return {f"{HERE}/{checkpoint_id:020d}-{attempt}-part-00000-0.parquet": f"output of {attempt}".encode()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_call_is_made_good_by_the_next_task(when: str) -> None:
    """F94: the first publication and the one of a re-run; there is never less than one whole result once one was there."""
    crashes = 0
    for at in range(20):
        this = Copying(MemoryStorage())
        this.folder.run(day(1), "a1")
        this.publish()
        assert this.contents() == whole(1, "a1")
        this.copy.create(f"{HERE}/notes.txt", b"somebody's")
        this.folder.run(day(1), "a2", digest=2)
        dying = FaultyStorage(this.copy, stop_at(at, when))  # type: ignore[arg-type]
        try:
            this.publish(dying)
        except StopHere:
            crashes += 1
        found = this.contents()
        assert any(found.items() >= kept.items() for kept in (whole(1, "a1"), whole(2, "a2")))
        this.publish()
        assert this.contents() == whole(2, "a2") | {f"{HERE}/notes.txt": b"somebody's"}
        if len(dying.calls) <= at:
            break
    assert crashes == at >= 3


def test_a_copy_is_correct_on_a_disk_with_stale_listings() -> None:
    """A copy on a network disk: files of the former result are deleted even if the listing lacks them, and files that are gone from the copy are written again even if the listing still shows them."""
    this = Copying(MemoryStorage())
    elsewhere = StaleStorage(this.copy)
    elsewhere.freeze("interval=")
    for attempt in ("a1", "a2"):
        this.folder.run(day(1), attempt, digest=int(attempt[1]))
        this.publish(FaultyStorage(this.copy, {}, late=True) if attempt == "a1" else elsewhere)
    there = {path: data for path, data in this.contents().items() if not path.startswith("_")}
    assert there == whole(2, "a2")
    elsewhere.freeze("interval=")
    this.copy.delete(f"{HERE}/{2:020d}-a2-part-00000-0.parquet")
    this.folder.storage.delete(paths.published(day(1), 2))
    this.publish(elsewhere)
    assert {path: data for path, data in this.contents().items() if not path.startswith("_")} == there


def test_the_copy_is_no_hard_link_and_damaged_output_is_not_copied(tmp_path: Path) -> None:
    """A hard link would let whoever edits the copy damage the output."""
    output = LocalStorage(tmp_path / "p").create("output/x/a/part-00000-0.parquet", b"rows")
    _copy(LocalStorage(tmp_path / "p"), output, LocalStorage(tmp_path / "copy"), "file")
    assert (tmp_path / "copy" / "file").stat().st_ino != (tmp_path / "p" / output.path).stat().st_ino
    (tmp_path / "p" / output.path).write_bytes(b"Rows")
    with pytest.raises(CorruptFile, match="part-00000-0"):
        _copy(LocalStorage(tmp_path / "p"), output, LocalStorage(tmp_path / "copy"), "again")


def test_new_results_replace_copies_with_the_same_id_and_copies_of_earlier_releases() -> None:
    before, this = Copying(MemoryStorage()), Copying(MemoryStorage())
    before.folder.run(day(1), "a1")
    before.publish()
    this.copy = before.copy
    this.copy.create(f"{HERE}/{1:020d}-part-00000-0.parquet", b"output of a1")
    this.folder.run(day(1), "b1")  # in a new folder of state, ids begin again
    this.publish()
    assert this.contents() == whole(1, "b1")


def test_an_interval_that_puts_nothing_out_any_more_loses_its_files() -> None:
    this = Copying(MemoryStorage())
    this.folder.run(day(1), "a1")
    this.publish()
    this.folder.run(day(1), "a2", digest=2, outputs=())
    this.publish()
    assert this.contents() == {}


def test_an_interval_replaced_by_a_shorter_interval_loses_its_copied_files() -> None:
    this = Copying(MemoryStorage())
    this.folder.run(day(1), "a1")
    this.publish()
    noon = day(1).start + DAY / 2
    this.folder.run(Interval(day(1).start, noon), "am", permissions=Permissions(replace_overlapping=True))
    this.publish()
    assert {path.split("/")[0] for path in this.contents()} == {HERE.replace("20240102T00", "20240101T12")}


def test_an_unsupported_url_is_refused_when_the_sink_is_declared() -> None:
    with pytest.raises(UsageError, match="not a storage URL"):
        copy_output("ftp://somewhere")


def test_a_file_that_is_no_output_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"'file:///mine/part.parquet' is not an output file of a pipeline; expected a file below"
    ):
        copy_output("memory://copy")(None, ["file:///mine/part.parquet"], day(1), 1)
