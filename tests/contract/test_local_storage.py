"""A folder on a disk as storage: what a crash leaves, links, full disks, and syncs. What every storage keeps: test_storage.py."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.values.errors import (
    AlreadyExists,
    BehindLink,
    PermissionRefused,
    PreconditionFailed,
    StorageUnavailable,
    UnknownOutcome,
    UsageError,
)
from tests.support.storage_calls import generation, paths


def test_leftovers_of_a_crash_are_invisible_and_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S24: what a killed writer left is removed; what a running one writes is not."""
    LocalStorage(tmp_path).create("a", b"1")
    old, new, lock, room = (tmp_path / ".tmp" / name for name in ("old.part", "new.part", "lock", "room"))
    for leftover, age_s in ((old, 90_000), (new, 80_000), (lock, 90_000), (room, 90_000)):
        leftover.write_bytes(b"half")
        os.utime(leftover, (time.time() - age_s,) * 2)
    # The clock of this host is two days ahead.
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 2 * 86_400)

    storage = LocalStorage(tmp_path)
    assert paths(storage, "") == ["a"]
    assert paths(LocalStorage(tmp_path.parent), f"{tmp_path.name}/") == [f"{tmp_path.name}/a"]
    storage.create("b", b"2")
    assert not old.exists()
    assert new.exists()
    assert sorted(file.name for file in (tmp_path / ".tmp").iterdir()) == ["lock", "new.part", "room"]


@pytest.mark.parametrize("below", ["", "pipeline/"])
def test_error_names_a_storage_root_that_can_not_be_created(tmp_path: Path, below: str) -> None:
    """F65: a bad root is an error of its own, never an empty storage. (A parent that is a file, not a missing
    permission, because root may do everything.)"""
    (tmp_path / "blocker").touch()
    (tmp_path / "file").write_bytes(b"x")
    root = tmp_path / "blocker" / "state"
    storage = LocalStorage(root)
    for call in (
        lambda: storage.create(f"{below}a", b""),
        lambda: storage.upload(f"{below}a", tmp_path / "file"),
        lambda: storage.replace(f"{below}a", b"", generation=1),
        lambda: storage.read(f"{below}a"),
        lambda: storage.delete(f"{below}a"),
        lambda: list(storage.list(below)),
    ):
        with pytest.raises(StorageUnavailable, match=r"Not a directory; .*use another root") as caught:
            call()
        assert str(root) in str(caught.value)


@pytest.mark.parametrize("refused", [None, "EXDEV", "EPERM", "EMLINK"])
def test_a_local_copy_is_a_link_where_the_system_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str | None
) -> None:
    source, root = LocalStorage(tmp_path / "source"), LocalStorage(tmp_path / "root")
    handle = source.create("a", b"state")
    if refused is not None:
        link = os.link

        def across(name: str, new_name: str, **folders: Any) -> None:
            if name == "a":  # of the other root
                raise OSError(getattr(errno, refused), "refused")
            link(name, new_name, **folders)

        monkeypatch.setattr(os, "link", across)
    root.copy_from(source, handle, "b")
    assert (tmp_path / "root" / "b").samefile(tmp_path / "source" / "a") == (refused is None)
    assert root.read("b") == b"state"
    assert [f.name for f in (tmp_path / "root" / ".tmp").glob("*")] == []


def test_a_symbolic_link_is_copied_by_content(tmp_path: Path) -> None:
    """A link to it would leave the root depending on what it points to."""
    source, root = LocalStorage(tmp_path / "source"), LocalStorage(tmp_path / "root")
    handle = source.create("elsewhere", b"state")
    (tmp_path / "source" / "a").symlink_to(tmp_path / "source" / "elsewhere")
    root.copy_from(source, changed(handle, path="a"), "b")
    assert not (tmp_path / "root" / "b").is_symlink()
    (tmp_path / "source" / "elsewhere").write_bytes(b"other")
    assert root.read("b") == b"state"


def test_listing_is_complete_despite_cyclic_symbolic_links(tmp_path: Path) -> None:
    """To itself, to each other, to the folder, the root, or above the root; a link to another disk is followed."""
    storage = LocalStorage(tmp_path / "root")
    for path in ("checkpoints/1", "shared/one/0.sst", "shared/two/0.sst"):
        storage.create(path, b"state")
    elsewhere = tmp_path / "disk" / "three"
    elsewhere.mkdir(parents=True)
    (elsewhere / "0.sst").write_bytes(b"state")
    root = tmp_path / "root"
    for link, target in (
        ("itself", "itself"),
        ("shared/one/there", "../two/back"),
        ("shared/two/back", "../one/there"),
        ("shared/one/here", "."),
        ("shared/two/root", "../.."),
        ("shared/above", "/"),
        ("shared/nowhere", "missing"),
        ("shared/three", str(elsewhere)),
    ):
        (root / link).symlink_to(target)
    assert paths(storage, "") == ["checkpoints/1", "shared/one/0.sst", "shared/three/0.sst", "shared/two/0.sst"]
    # From one to the other and back: each file is met once more at most.
    (root / "shared/one/other").symlink_to("../two")
    (root / "shared/two/other").symlink_to("../one")
    assert paths(storage, "shared/one/") == ["shared/one/0.sst", "shared/one/other/0.sst"]
    # A folder that can't be looked into is not empty: what it holds may be needed.
    (root / "published").symlink_to("published")
    with pytest.raises(StorageUnavailable, match="Too many levels of symbolic links"):
        list(storage.list("published/"))


def linked_folder(root: Path, elsewhere: Path) -> Path:
    """Moves shared/a out of a root, and leaves a link to it; its file, where that lies now."""
    elsewhere.parent.mkdir(exist_ok=True)
    (root / "shared" / "a").rename(elsewhere)
    (root / "shared" / "a").symlink_to(elsewhere)
    return elsewhere / "0.sst"


def test_behind_a_symbolic_link_everything_is_read_and_nothing_is_changed(tmp_path: Path) -> None:
    storage, other = LocalStorage(tmp_path / "root"), LocalStorage(tmp_path / "other")
    handle = storage.create("shared/a/0.sst", b"state")
    storage.create("shared/b/0.sst", b"state")
    seen = generation(storage, handle.path)
    file = linked_folder(tmp_path / "root", tmp_path / "elsewhere" / "a")

    assert storage.read(handle.path) == b"state" and generation(storage, handle.path) == seen
    storage.download(handle, tmp_path / "got")
    for prefix in ("", "shared/", "shared/a", "shared/a/"):
        listed = {info.path: info.behind_link for info in storage.list(prefix) if "/a/" in info.path}
        assert listed == {"shared/a/0.sst": True}, prefix
    assert [info.behind_link for info in storage.list("shared/b/")] == [False]
    other.copy_from(storage, handle, "copy")
    assert not (tmp_path / "other" / "copy").samefile(file)
    for change in (
        lambda: storage.create("shared/a/new", b""),
        lambda: storage.create("shared/a/deeper/new", b""),
        lambda: storage.upload("shared/a/new", tmp_path / "got"),
        lambda: storage.copy_from(other, changed(handle, path="copy"), "shared/a/new"),
        lambda: storage.replace(handle.path, b"", generation=seen),
        lambda: storage.delete(handle.path),
        lambda: storage.delete(handle.path, generation=seen),
    ):
        with pytest.raises(BehindLink, match=r"'shared/a' is a symbolic link, .*\nReplace the link"):
            change()
    assert storage.delete("shared/a/absent") is False
    assert [f.name for f in file.parent.iterdir()] == ["0.sst"] and file.read_bytes() == b"state"


def test_replace_and_delete_change_a_symbolic_link_and_not_its_target(tmp_path: Path) -> None:
    root, file = tmp_path / "root", tmp_path / "elsewhere"
    storage = LocalStorage(root)
    file.write_bytes(b"of others")
    for folder in ("a", ".tmp"):
        (root / folder).mkdir(parents=True)
    for link in ("a/replaced", "a/deleted", "a/taken"):
        (root / link).symlink_to(file)
    (root / "a/dangling").symlink_to(tmp_path / "missing")

    storage.replace("a/replaced", b"ours", generation=generation(storage, "a/replaced"))
    assert storage.read("a/replaced") == b"ours" and not (root / "a/replaced").is_symlink()
    assert storage.delete("a/deleted", generation=generation(storage, "a/deleted"))
    for path in ("a/taken", "a/dangling"):
        with pytest.raises(AlreadyExists):
            storage.create(path, b"ours")
    (root / ".tmp" / "lock").unlink()
    (root / ".tmp" / "lock").symlink_to(tmp_path / "missing")
    with pytest.raises(BehindLink, match=r"'\.tmp/lock' is a symbolic link"):
        storage.delete("a/replaced")
    assert file.read_bytes() == b"of others" and not (tmp_path / "missing").exists()


def test_temp_files_behind_a_symbolic_link_are_left_unchanged(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    root.mkdir()
    elsewhere.mkdir()
    (root / ".tmp").symlink_to(elsewhere)
    storage = LocalStorage(root)
    storage.keep_room()
    assert [*elsewhere.iterdir()] == []
    for name in ("old.part", "room", "lock"):
        (elsewhere / name).write_bytes(b"of others")
        os.utime(elsewhere / name, (0, 0))
    for path in ("a", "b/c"):
        with pytest.raises(BehindLink, match=r"'\.tmp' is a symbolic link"):
            storage.create(path, b"")
    assert storage.free_room() is False
    assert {f.name: f.read_bytes() for f in elsewhere.iterdir()} == dict.fromkeys(
        ("old.part", "room", "lock"), b"of others"
    )


@pytest.mark.parametrize("call", ["link", "rename", "unlink"])
def test_a_folder_that_becomes_a_link_between_look_and_change_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The change takes effect in the folder that was looked at, wherever that is by now."""
    storage, victims, was = LocalStorage(tmp_path / "root"), tmp_path / "victims", tmp_path / "was"
    storage.create("a/0.sst", b"ours")
    seen = generation(storage, "a/0.sst")
    victims.mkdir()
    (victims / "0.sst").write_bytes(b"of others")
    real, rename = getattr(os, call), os.rename

    def swapped_before(*args: Any, **folders: Any) -> None:
        if not was.exists():
            rename(tmp_path / "root" / "a", was)
            (tmp_path / "root" / "a").symlink_to(victims)
        real(*args, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, swapped_before)
        if call == "link":
            storage.create("a/1.sst", b"new")
        elif call == "rename":
            storage.replace("a/0.sst", b"new", generation=seen)
        else:
            storage.delete("a/0.sst", generation=seen)
    wanted = {"link": {"0.sst": b"ours", "1.sst": b"new"}, "rename": {"0.sst": b"new"}, "unlink": {}}[call]
    assert {f.name: f.read_bytes() for f in was.iterdir()} == wanted
    assert {f.name: f.read_bytes() for f in victims.iterdir()} == {"0.sst": b"of others"}


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    """Users link their data disk. What lies above the root is theirs too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    for storage in (LocalStorage(tmp_path / "data"), LocalStorage(tmp_path / "data" / "pipeline")):
        storage.create("a/b", b"1")
        storage.replace("a/b", b"2", generation=generation(storage, "a/b"))
        assert [(f.path, f.behind_link) for f in storage.list("a/")] == [("a/b", False)]
        assert storage.delete("a/b")
    assert (tmp_path / "disk" / "pipeline" / "a").is_dir()


def test_full_or_read_only_disk_is_reported_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("before", b"")
    for number, advice in (
        (28, "free some space"),
        (30, "mount it writable"),
        (13, "permission"),
        (5, "check the disk"),
    ):

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        error = PermissionRefused if number in (13, 30) else StorageUnavailable
        with monkeypatch.context() as patch:
            patch.setattr("state_backend.adapters.local_storage.os.fsync", refuse)
            with pytest.raises(error, match=advice):
                storage.create("a", b"data")
    assert storage.stat("a") is None
    assert list((tmp_path / ".tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("call", "into"), [("create", "b/c"), ("copy", "b/c"), ("bytes", "b/c"), ("replace", "a"), ("room", "")]
)
def test_a_file_is_synced_before_it_is_visible_and_its_folder_afterwards(
    call: str, into: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure a file that is there is whole. Each new folder is synced into the one above, also the root."""
    storage = LocalStorage(tmp_path / "new/root")
    other: Any = MemoryStorage() if call == "bytes" else LocalStorage(tmp_path / "other")
    handle = other.create("file", b"2")
    known = generation(storage, "a/file") if into != "b/c" and storage.create("a/file", b"1") else 0
    happened: list[Any] = []

    def noted(do: Callable[..., None], *given: Any, **more: Any) -> None:
        found = os.fstat(given[0]) if isinstance(given[0], int) else None
        happened.append("visible" if found is None else found.st_ino if S_ISDIR(found.st_mode) else "file")
        do(*given, **more)

    for name in ("fsync", "link", "rename"):
        monkeypatch.setattr(os, name, partial(noted, getattr(os, name)))
    if call == "replace":
        storage.replace("a/file", b"2", generation=known)
    elif call == "room":
        storage.keep_room()
    else:
        storage.create("b/c/file", b"2") if call == "create" else storage.copy_from(other, handle, "b/c/file")
    folders = [path for path in (tmp_path, *tmp_path.rglob("*")) if path.is_dir()]
    of = {folder.stat().st_ino: str(folder.relative_to(tmp_path)) for folder in folders}
    order = [of.get(each, each) for each in happened]
    assert [each for each in order if each in ("file", "visible")] == ["file", "visible"]
    assert order[order.index("visible") + 1 :] == ([f"new/root/{into}"] if into else [])
    if into == "b/c":
        made = [each for each in order if each in (".", "new", "new/root/b")]
        assert made == [".", "new", "new/root/b"] and "new/root" in order


def test_a_file_that_is_visible_but_maybe_not_durable_is_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F54: an ambiguous answer is a type of its own."""
    storage = LocalStorage(tmp_path)
    storage.create("before", b"")

    def refuse(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("state_backend.adapters.no_follow.sync_folder", refuse)
    with pytest.raises(UnknownOutcome):
        storage.create("a", b"data")
    with pytest.raises(UnknownOutcome):
        storage.replace("before", b"data", generation=generation(storage, "before"))


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    storage.create("a/b/c", b"1")
    for path in sorted((tmp_path / "root").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "root").rmdir()
    storage.create("a/b/c", b"2")
    assert storage.read("a/b/c") == b"2"


def _count_up(root: str, times: int) -> None:
    storage = LocalStorage(Path(root))
    while times:
        seen, count = generation(storage, "counter"), int(storage.read("counter"))
        try:
            storage.replace("counter", b"%d" % (count + 1), generation=seen)
            times -= 1
        except PreconditionFailed:
            continue


@pytest.mark.long("seconds", runs_in="ci")
def test_processes_that_replace_one_file_lose_no_update(tmp_path: Path) -> None:
    LocalStorage(tmp_path).create("counter", b"0")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_count_up, args=(str(tmp_path), 40)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert LocalStorage(tmp_path).read("counter") == b"120"


def test_file_names_too_long_for_the_disk_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shorter"):
        LocalStorage(tmp_path).create("x" * 300, b"")
