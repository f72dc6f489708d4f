"""What is left to do with damaged files and logs, and that nothing changes behind links. Each kind of damage: test_every_file.py."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.data_sources.keyed_output import _File, _OutputReader
from state_backend.adapters.local_storage import LocalStorage
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.checkpoint.savepoints import claim_savepoint, delete_savepoint, read_savepoint, remove_leftovers
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import (
    create_trial,
    list_trials,
    remove_trial,
    remove_trial_named,
    root_of_trial,
    sweep_trials,
)
from state_backend.formats import paths
from state_backend.inspection.verify import offering_intact, verify_pipeline
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import CairnError, CorruptFile
from state_backend.values.marks import Claim
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, day, run, trial_of
from tests.support.coordinator import Coordinator
from tests.support.crash_matrix import FAR_MS, HOME, NEW, SAVED, Try, live_files, restore, take, values_of
from tests.support.layout import flip
from tests.support.real_shards import RealPipeline

OTHER = "other savepoint"
NO_COLUMNS: dict[str, Any] = {"type": "struct", "fields": []}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days 1 to 5, the last one of a changelog; 1 and 2 are dropped, a sweep is in the log, two marks of quarantine on what nothing
    descends from; two prepared attempts; two savepoints of each format, and claimed ones."""
    root = tmp_path_factory.mktemp("original")
    made = RealPipeline(root, policy=KeepLast(5))
    for n in (1, 2, 3, 4, 5):
        made.prepare(n, f"a{n}", values_of(n), mode="changelog" if n == 5 else "incremental")
        made.coordinator.commit(f"a{n}")
        made.coordinator.publish(None)
    made.storage.create(paths.shared("crashed", 0, 0, 0, "sst"), b"x")
    sweep(made.storage, PIPELINE, now_ms=FAR_MS)
    made = RealPipeline(root, policy=KeepLast(6))
    for n in (7, 8):  # dead ends: day 2 was made from the first try of day 1
        made.run(1, f"again{n}", values_of(1))
        made.coordinator.quarantine(n, "a test says so")
    for attempt in ("waiting", "another"):
        made.prepare(6, attempt, values_of(6), mode="changelog")
    for format in ("native", "canonical"):
        for name in (SAVED, OTHER):
            folders = {HOME: made.storage, SAVED: LocalStorage(root / format / name)}
            take(Try(folders, root, "take"), format)  # type: ignore[arg-type]
    claim_savepoint(LocalStorage(root / "native" / OTHER), Claim(savepoint="s", owner="file:///theirs", attempt="a"))
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "root"))


# --- who needs it -------------------------------------------------------------------------------------------------------------------


def process(root: Path) -> None:
    """What the next interval does: begin, restore, capture, prepare."""
    RealPipeline(root, policy=KeepLast(6)).prepare(6, "next", values_of(6))


def commit(root: Path) -> None:
    Coordinator(LocalStorage(root / PIPELINE), PIPELINE).commit("waiting")


def sweep_all(root: Path) -> None:
    sweep(LocalStorage(root / PIPELINE), PIPELINE, now_ms=FAR_MS, min_age=timedelta(0))


def restore_saved(format: str) -> Callable[[Path], None]:
    def into_new(root: Path) -> None:
        source = LocalStorage(root / format / SAVED)
        restore(Try({SAVED: source, NEW: LocalStorage(root / NEW)}, root, "new"), "NO_CLAIM")

    return into_new


def test_a_query_of_output_that_is_missing_or_replaced_fails_with_advice(root: Path) -> None:
    """A query that was planned before: it fails as a whole and says to ask again, it does not show rows of two results."""
    made = RealPipeline(root, policy=KeepLast(1))
    (_, files) = read_log(made.storage).current_outputs()[day(5)]
    planned = [_File(day(5), file) for file in files]
    reader = _OutputReader(str(root / PIPELINE), planned, NO_COLUMNS, None)
    file = root / PIPELINE / files[0].handle.path
    away = file.rename(root / "away")
    with pytest.raises(CorruptFile, match=r"is missing from .*; put the file back from a copy, or run its inter"):
        list(reader.read(planned[0]))
    away.rename(file)
    made.run(5, "again5", {"a": 50})
    with pytest.raises(CairnError, match=r"a re-run replaced .* while this query ran; run the query again"):
        list(reader.read(planned[0]))


# --- what can be restored instead ---------------------------------------------------------------------------------------------------


def refused(root: Path) -> str:
    made = RealPipeline(root, policy=KeepLast(6))
    base = read_log(made.storage).entries[5]
    with pytest.raises(CorruptFile) as raised, offering_intact(made.storage, base):  # type: ignore[arg-type]
        process(root)
    return str(raised.value)


def test_the_error_of_a_damaged_checkpoint_offers_the_newest_intact_checkpoint(root: Path) -> None:
    """With the intervals to run from it; each damaged one makes the next older the newest."""
    segment = root / PIPELINE / paths.shared("a5", 0, 0, 0, "log")
    segment.unlink()
    said = refused(root)
    assert segment.name in said
    assert "By a quick check, the newest intact checkpoint before it is 4, the state at 2024-01-05T00:00:00Z" in said
    assert "run the interval that starts at 2024-01-05T00:00:00Z" in said
    (root / PIPELINE / paths.shared("a4", 0, 0, 0, "manifest")).unlink()
    said = refused(root)
    assert "By a quick check, the newest intact checkpoint before it is 3, the state at 2024-01-04T00:00:00Z" in said
    assert "run the intervals that start from 2024-01-04T00:00:00Z to 2024-01-05T00:00:00Z" in said
    for file in (root / PIPELINE / "shared").rglob("*.manifest"):
        file.unlink()
    said = refused(root)
    assert "No earlier checkpoint is intact" in said
    assert "run the intervals that start from 2024-01-01T00:00:00Z" in said


@pytest.mark.long("half a second", runs_in="ci")
def test_a_manifest_that_is_damaged_stops_deleting_until_its_checkpoint_is_dropped(root: Path) -> None:
    """In doubt nothing is deleted; intervals go on being committed, and when retention drops that checkpoint all is cleaned up. A
    clean-up reads the manifests of those whose base was dropped, and tells by the names of the files what the others need."""
    manifest = root / PIPELINE / paths.shared("a4", 0, 0, 0, "manifest")
    flip(manifest, manifest)
    made = RealPipeline(root, policy=KeepLast(2))
    made.prepare(6, "six", values_of(6))
    made.coordinator = Coordinator(made.storage, PIPELINE, policy=KeepLast(6))
    assert made.coordinator.commit("six").outcome == "committed"
    made.coordinator.publish(None)
    made.coordinator.clean_up()
    for record in made.coordinator.log().completed():
        for handle in (
            h for ref in record.content.shards if record.id != 4 for h in manifest_of(ref, made.storage).handles
        ):
            assert made.storage.stat(handle.path) is not None
    with pytest.raises(CorruptFile, match=manifest.name):
        sweep_all(root)
    made.coordinator = Coordinator(made.storage, PIPELINE, policy=KeepLast(1))
    made.prepare(7, "seven", values_of(7))
    made.coordinator.commit("seven")
    made.coordinator.publish(None)
    seven = root / PIPELINE / paths.shared("seven", 0, 0, 0, "manifest")
    sound = seven.read_bytes()
    flip(seven, seven)
    with pytest.raises(CorruptFile, match=seven.name):
        made.coordinator.clean_up()
    seven.write_bytes(sound)
    assert 4 in made.coordinator.clean_up().shrunk
    sweep_all(root)
    assert {info.path for info in made.storage.list("")} == live_files(made.storage)


# --- symbolic links -----------------------------------------------------------------------------------------------------------------

VICTIMS = ("auth.log", "0-0-0.sst", "victim.parquet", "victim.part", "lock", "room", "prepared.json", "authorized_keys")


@pytest.fixture(scope="module")
def tried(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original with a trial, and a trial whose record is gone."""
    root = Path(shutil.copytree(original, tmp_path_factory.mktemp("tried") / "root"))
    trial = trial_of(day(6), ends_ms=0)
    create_trial(str(root), trial)
    for name in ("trial", "removed"):
        own = LocalStorage(Path(root_of_trial(str(root), PIPELINE, name), PIPELINE))
        fork(LocalStorage(root / PIPELINE), 5, Coordinator(own, PIPELINE).at, run=run(), attempt="fork")
    return root


def kind_of(path: Path) -> str:
    """The same for paths of one kind: without what names an interval, an attempt or a savepoint."""
    varies = r"[0-9]|again|waiting|another|crashed|fork"
    return "/".join(f"<>{Path(name).suffix}" if re.search(varies, name) else name for name in path.parts)


def by_kind(root: Path) -> list[Path]:
    """The files and folders below a root, relative to it, one of each kind; a pipeline's own folder and a savepoint's may be links."""
    below = sorted(path.relative_to(root) for path in root.rglob("*"))
    allowed = {Path(PIPELINE), *(Path(f) for f in ("native", "canonical", "work"))}
    allowed |= {Path(f, name) for f in ("native", "canonical") for name in (SAVED, OTHER)}
    return list({kind_of(path): path for path in below if path not in allowed}.values())


def put_elsewhere(path: Path, elsewhere: Path) -> None:
    """Moves a file or folder out of the root and leaves a link to it. In the folder, files of others lie beside the root's own."""
    elsewhere.mkdir()
    target = elsewhere / path.name
    path.rename(target)
    path.symlink_to(target)
    for folder in (target, target / "victim", target / "victim" / "victim") if target.is_dir() else ():
        folder.mkdir(exist_ok=True)
        for name in VICTIMS:
            file = folder / name
            if not file.exists():
                file.write_bytes(b"of others")
            os.utime(file, (0, 0))


def seen_in(folder: Path) -> dict[str, tuple[bytes, int] | None]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob("*")
    }


def use_all(root: Path, *, shards: bool) -> None:
    """Commits, drops checkpoints, sweeps, verifies, goes back, claims a savepoint and removes trials. ``shards``: also runs an
    interval, and takes and restores savepoints."""
    storage = LocalStorage(root / PIPELINE)
    coordinator = Coordinator(storage, PIPELINE, policy=KeepLast(1))
    url = str(root)

    def claim() -> None:
        source = LocalStorage(root / "native" / SAVED)
        claim_savepoint(source, Claim(savepoint="s", owner="file:///ours", attempt="a"))
        delete_savepoint(source, read_savepoint(source))
        remove_leftovers(source, None)

    uses: list[Callable[[], object]] = [
        *(partial(need, root) for need in (process, restore_saved("canonical"), restore_saved("native")) if shards),
        lambda: coordinator.commit("waiting"),
        lambda: coordinator.publish(None),
        lambda: rewind(coordinator.at, coordinator.log().head_id, run=run(), attempt="back"),
        lambda: coordinator.quarantine(coordinator.log().head_id, "a test"),
        coordinator.clean_up,
        lambda: sweep_all(root),
        lambda: verify_pipeline(storage, work=root / "work"),
        claim,
        lambda: sweep_all(root / "native" / SAVED),
        lambda: sweep_trials(url, PIPELINE, now_ms=FAR_MS),
        lambda: [remove_trial(url, trial) for trial in list_trials(url, PIPELINE)],
        lambda: remove_trial_named(url, PIPELINE, "removed"),
    ]
    for use in uses:
        (root / "work").mkdir(exist_ok=True)
        with suppress(CairnError):
            use()


def check_links(tried: Path, folder: Path, kinds: Collection[str] = (), *, shards: bool) -> list[str]:
    """Replaces each kind of file and folder, or only these kinds, by a link; the kinds of those behind which something was changed."""
    changed = []
    for n, linked in enumerate(f for f in by_kind(tried) if not kinds or kind_of(f) in kinds):
        root, elsewhere = folder / str(n) / "root", folder / str(n) / "elsewhere"
        shutil.copytree(tried, root)
        put_elsewhere(root / linked, elsewhere)
        before = seen_in(elsewhere)
        use_all(root, shards=shards)
        if seen_in(elsewhere) != before:
            changed.append(kind_of(linked))
        shutil.rmtree(folder / str(n))
    return changed


LINKED = {
    *(
        f"{PIPELINE}/{name}"
        for name in (".tmp", "checkpoints", "leases", "output/<>/<>", "settled", "shared", "shared/<>")
    ),
    *(f".trials{name}" for name in ("", f"/{PIPELINE}", f"/{PIPELINE}/roots", f"/{PIPELINE}/roots/trial")),
    f".trials/{PIPELINE}/roots/removed/{PIPELINE}",
    f"native/{SAVED}/shared",
}


@pytest.mark.long("seconds", runs_in="ci")
def test_files_behind_a_symbolic_link_in_place_of_a_folder_are_not_changed(
    tried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {kind_of(path) for path in by_kind(tried)} >= LINKED
    monkeypatch.setattr(os, "fsync", lambda _: None)  # most of the time
    assert check_links(tried, tmp_path, LINKED, shards=False) == []


@pytest.mark.long("three minutes")
def test_files_behind_any_symbolic_link_are_not_changed_when_intervals_run(tried: Path, tmp_path: Path) -> None:
    """Every kind of folder and file, and with shards, which restore and upload."""
    assert len(by_kind(tried)) > 80
    assert check_links(tried, tmp_path, shards=True) == []
