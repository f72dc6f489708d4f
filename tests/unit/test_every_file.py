"""Every kind of file below a root, lost and damaged one at a time: somebody names the file, or all is as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.leases import take_lease
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.savepoints import claim_savepoint, read_claim
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import create_trial, list_trials
from state_backend.formats import paths, record_codec
from state_backend.inspection.verify import verify_pipeline
from state_backend.values.errors import CairnError, CorruptRecord
from state_backend.values.handles import Handle
from state_backend.values.marks import Claim
from state_backend.values.records import Record, SweepRecord, Tombstone
from state_backend.values.release import RELEASE
from state_backend.values.retention import AnyOf, KeepLast, KeepQuarantined
from tests.support.checkpoints import PIPELINE, day, trial_of
from tests.support.coordinator import Coordinator
from tests.support.crash_matrix import FAR_MS, HOME, NEW, SAVED, Try, restore, take, values_of
from tests.support.layout import empty, flip, remove, truncate
from tests.support.real_shards import RealPipeline

TAKEN = "taken"
FORMATS: tuple[Any, ...] = ("native", "canonical")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days 1 to 5 of which three are retained, one of them quarantined and made again; each kind of file at least once."""
    root = tmp_path_factory.mktemp("original")
    made = RealPipeline(root, policy=AnyOf((KeepLast(3), KeepQuarantined(0))))
    for n in (1, 2, 3, 4, 5):
        made.prepare(n, f"a{n}", values_of(n), mode="changelog" if n == 5 else "incremental")
        made.coordinator.commit(f"a{n}")
        made.coordinator.publish(None)
        made.coordinator.clean_up()
    made.storage.create(paths.shared("crashed", 0, 0, 0, "sst"), b"x")
    sweep(made.storage, PIPELINE, now_ms=FAR_MS)
    made.coordinator.quarantine(5, "a test says so")
    made.run(5, "again5", values_of(5))
    made.coordinator.mark_validated(7, "fast")
    assert take_lease(made.storage, 7, "a test") is not None
    made.storage.create(f"{paths.failing('again5', 'check')}rows.parquet", b"rows")
    for attempt in ("waiting", "refused"):
        made.prepare(6, attempt, values_of(6), mode="changelog")
    made.coordinator.refuse("refused", "a test says so")
    for format in FORMATS:
        take(Try({HOME: made.storage, SAVED: LocalStorage(root / format)}, root, "take"), format)  # type: ignore[arg-type]
    taken = LocalStorage(root / TAKEN)
    shutil.copytree(root / "native", root / TAKEN, dirs_exist_ok=True)
    claim_savepoint(taken, Claim(savepoint="s", owner="file:///theirs", attempt="a"))
    create_trial(str(root), trial_of(day(6), ends_ms=FAR_MS * 2))
    shutil.rmtree(root / "work", ignore_errors=True)
    return root


def kind_of(root: Path, file: Path) -> str:
    """Finer than `paths.kind_of` where files of one kind are needed by others."""
    folder, _, path = file.relative_to(root).as_posix().partition("/")
    if folder != PIPELINE:
        return f"{folder}: {file.suffix if file.suffix != '.json' else file.name}"
    kind = paths.kind_of(path)
    assert kind is not None, path
    if kind == "record":
        entry: Any = record_codec.decode(file.read_bytes(), path, Record, SweepRecord, Tombstone)
        newest = read_log(LocalStorage(root / PIPELINE))
        kept = "newest" if entry.id == newest.head_id else "retained" if entry.id in newest.retained else ""
        return f"{kept or type(entry).__name__} record"
    if kind in ("state", "output"):
        return f"{file.suffix} of {file.parent.name}, {file.name.partition('-')[0]}"
    return kind


# --- what is done to a file ---------------------------------------------------------------------------------------------------------


def zero(file: Path, _: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def link(file: Path, outside: Path) -> None:
    """To an equal file of others."""
    file.rename(outside)
    file.symlink_to(outside)


def link_to_another(file: Path, outside: Path) -> None:
    outside.write_bytes(b"of others")
    file.unlink()
    file.symlink_to(outside)


def folder(file: Path, _: Path) -> None:
    file.unlink()
    file.mkdir()


def another(file: Path, _: Path) -> None:
    """Whole in itself, but the content of another file."""
    suffix = file.suffix
    others = sorted(path for path in file.parents[1].rglob(f"*{suffix}") if path.read_bytes() != file.read_bytes())
    file.write_bytes(others[0].read_bytes())


Damage = Callable[[Path, Path], None]
DAMAGES: tuple[Damage, ...] = (remove, truncate, zero, empty, flip, link, link_to_another, folder)


# --- what happens then --------------------------------------------------------------------------------------------------------------


def use(root: Path) -> tuple[dict[str, Any], list[str]]:
    """Results of all that uses a root, and what was said against it."""
    said: list[str] = []
    results: dict[str, Any] = {}
    storage = LocalStorage(root / PIPELINE)
    made = RealPipeline(root, policy=KeepLast(3))
    work = root / "work" / "verify"
    work.mkdir(parents=True)
    found = verify_pipeline(storage, work=work)
    said += [*found.findings, *(f for c in found.checkpoints for f in c.findings)]

    def outputs() -> dict[str, list[bytes]]:
        current = read_log(storage).current_outputs()
        return {str(i): [whole(f.handle) for f in files] for i, (_, files) in sorted(current.items())}

    def whole(handle: Handle) -> bytes:
        storage.download(handle, root / "work" / "output")
        return (root / "work" / "output").read_bytes()

    def usable() -> list[int]:
        log = read_log(storage)
        return [n for n in log.retained if log.quarantine_above(n) is None]

    def restored(source: str) -> int:
        folders = {SAVED: LocalStorage(root / source), NEW: LocalStorage(root / f"new {source}")}
        restore(Try(folders, root, "new"), "NO_CLAIM")  # type: ignore[arg-type]
        return Coordinator(folders[NEW], PIPELINE).record("latest").content.digest

    uses: dict[str, Callable[[], object]] = {
        "next": lambda: made.prepare(6, "next", values_of(6)).content.digest,
        "outputs before": outputs,
        "commit": lambda: made.coordinator.commit("waiting").outcome,
        "commit what is refused": lambda: made.coordinator.commit("refused").outcome,
        "publish": lambda: made.coordinator.publish(None) and None,
        "clean up": lambda: made.coordinator.clean_up() and None,
        "sweep": lambda: sweep(storage, PIPELINE, now_ms=FAR_MS, min_age=timedelta(0)) and None,
        "outputs": outputs,
        "usable": usable,
        "trials": lambda: [t.name for t in list_trials(str(root), PIPELINE)],
        "claim": lambda: read_claim(LocalStorage(root / TAKEN)),
        **{source: partial(restored, source) for source in FORMATS},
    }
    for name, work_ in uses.items():
        try:
            results[name] = work_()
        except CairnError as error:
            said.append(f"{type(error).__name__}: {error}")
            results[name] = type(error).__name__
    return results, said


def seen(file: Path) -> tuple[bytes, int] | None:
    return (file.read_bytes(), file.stat().st_mtime_ns) if file.exists() else None


def files_by_kind(root: Path) -> dict[str, Path]:
    """One file of each kind, relative to the root."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and ".tmp" not in path.parts]
    return {kind_of(root, file): file.relative_to(root) for file in files}


def harm(original: Path, folder: Path, file: Path, damage: Damage, whole: tuple[dict[str, Any], list[str]]) -> str:
    """What a damaged file changed without anybody naming the file; empty if nothing."""
    root, outside = folder / "root", folder / "outside"
    shutil.copytree(original, root)
    damage(root / file, outside)
    before = seen(outside)
    results, said = use(root)
    changed = [name for name in whole[0] if results[name] != whole[0][name]]
    named = any(file.name in text for text in said if text not in whole[1])
    unseen = changed if not named or file.name == paths.HEAD else []  # a hint must not matter
    after = seen(outside)
    shutil.rmtree(folder)
    return ", ".join([*unseen, *(["a file outside of the root"] if after != before else [])])


@pytest.fixture(scope="module")
def whole(original: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """What is used and said if nothing is damaged."""
    found = use(Path(shutil.copytree(original, tmp_path_factory.mktemp("whole") / "root")))
    (refused,) = found[1]
    assert refused.startswith("ValidationRefused") and "next" in found[0]
    return found


BRIEF = {
    "head": (remove, flip, folder),
    "settled": (remove, flip, folder),
    "attempt-end": (remove,),
    "quarantine": (remove, zero),
    "lease": (empty,),
    "prepared": (link_to_another, flip),
    "newest record": (truncate,),
    "retained record": (flip,),
    "Tombstone record": (remove,),
    "SweepRecord record": (zero,),
    ".manifest of again5, 0": (flip, remove),
    ".sst of a2, 1": (flip, another, remove),
    ".parquet of a4, part": (flip,),
    "published": (empty,),
    "native: savepoint.json": (flip,),
    "native: .sst": (another,),
    "canonical: savepoint.json": (truncate,),
    "canonical: .parquet": (flip,),
    "taken: claimed.json": (empty,),
}
UNSEEN = ("refused", "taken: claimed.json", ".trials: trial.json")
SILENT = {(kind, damage) for kind in UNSEEN for damage in (remove, folder)}
"""Nobody can tell that such a file was there; docs/design-commits.md says what that means ("Lost or damaged files")."""


@pytest.mark.parametrize("kind", BRIEF)
@pytest.mark.long("seconds", runs_in="ci")
def test_a_lost_or_damaged_file_is_reported_or_harmless(original: Path, tmp_path: Path, whole: Any, kind: str) -> None:
    file = files_by_kind(original)[kind]
    for damage in BRIEF[kind]:
        assert harm(original, tmp_path / damage.__name__, file, damage, whole) == "", damage.__name__


@pytest.mark.long("five minutes")
def test_every_damage_to_every_kind_of_file_is_reported_or_harmless(original: Path, tmp_path: Path, whole: Any) -> None:
    """Prints what it counted."""
    files = files_by_kind(original)
    cells = [(kind, damage) for kind in files for damage in DAMAGES]
    found = {cell: harm(original, tmp_path / str(n), files[cell[0]], cell[1], whole) for n, cell in enumerate(cells)}
    silent = {cell for cell, what in found.items() if what}
    print(f"{len(files)} kinds of files, {len(cells)} cells, {len(silent)} silent")
    assert silent == SILENT, {f"{kind}, {damage.__name__}": found[kind, damage] for kind, damage in silent ^ SILENT}


STRAYS = (
    "checkpoints/.nfs000000000001",
    "checkpoints/00000000000000000003.json.bak",
    "settled/commits/1d-2024-01-01/.nfs000000000002",
    "settled/commits/.DS_Store",
    "settled/commits/1d-2024-01-01/folder/notes.txt",
    "settled/attempts/.DS_Store",
    "quarantine/.nfs000000000003",
    "quarantine/folder/00000000000000000003.json",
    "leases/.DS_Store",
    "published/.DS_Store",
    f"published/{paths.interval_name(day(1))}/.nfs000000000004",
    "validated/Thumbs.db",
    "attempts/waiting/.nfs000000000005",
    f"output/{paths.interval_name(day(1))}/a1/.part-00000-0.parquet.crc",
    "shared/a4/.nfs000000000006",
    "HEAD.json.tmp",
    ".DS_Store",
)


@pytest.mark.long("seconds", runs_in="ci")
def test_stray_files_are_reported_and_kept_and_stop_no_operation(original: Path, tmp_path: Path, whole: Any) -> None:
    """Sweeps and `verify` name them, and they stay."""
    root = Path(shutil.copytree(original, tmp_path / "root"))
    for stray in (*STRAYS, f"../.trials/{PIPELINE}/trials/.DS_Store"):
        file = root / PIPELINE / stray
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"not ours")
    storage = LocalStorage(root / PIPELINE)
    assert set(verify_pipeline(storage).unknown) == {*STRAYS}
    assert use(root) == whole
    assert set(sweep(storage, PIPELINE, now_ms=FAR_MS, min_age=timedelta(0)).plan.unknown) == {*STRAYS}
    assert all((root / PIPELINE / stray).exists() for stray in STRAYS)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_sweep_writes_lost_files_anew(original: Path) -> None:
    """As they were, but for output that was replaced and is deleted. Before, `verify` names each of them, and a reader of all output
    refuses; a reader of a retained day does not need them."""
    storage = MemoryStorage(f"memory://root/{PIPELINE}")  # on a disk, readers know the names
    home = LocalStorage(original / PIPELINE)
    for info in home.list(""):
        if not info.path.startswith(paths.NAMES):
            storage.create(info.path, home.read(info.path))
    files = {info.path: storage.read(info.path) for info in storage.list(paths.SETTLED)}
    outputs = read_log(storage).current_outputs()
    assert len(files) == 9
    for path in files:
        storage.delete(path)
    assert set(read_log(storage).outputs_near(day(4))) == {(day(4), 4)}
    assert set(read_log(storage).outputs_near(day(1))) == set()  # nothing that costs no request says it
    with pytest.raises(
        CorruptRecord, match="5 files are missing, 0 exist\nTo write them again: cairn sweep --root memory://root"
    ):
        read_log(storage).current_outputs()
    found = verify_pipeline(storage)
    assert all(any(path in finding for finding in found.findings) for path in files)
    planned = sweep(storage, PIPELINE, now_ms=FAR_MS, dry_run=True)
    assert (set(planned.rebuilt), planned.plan.delete) == ({*files}, ())
    assert set(sweep(storage, PIPELINE, now_ms=FAR_MS).rebuilt) == {*files}
    assert {path: storage.read(path) for path in files} == files
    assert read_log(storage).current_outputs() == outputs
    assert verify_pipeline(storage).success


@pytest.mark.parametrize(
    "kind", ["newest record", "retained record", "Tombstone record", "prepared", "native: savepoint.json", "settled"]
)
@pytest.mark.long("half a second", runs_in="ci")
def test_the_error_for_a_newer_format_names_the_release_to_use(original: Path, tmp_path: Path, kind: str) -> None:
    """Whoever reads the file names both releases and the one to use."""
    root = Path(shutil.copytree(original, tmp_path / "root"))
    file = root / files_by_kind(original)[kind]
    newer = (
        file.read_bytes()
        .replace(b'"format":1,', b'"format":2,')
        .replace(f'"release":"{RELEASE}"'.encode(), b'"release":"0.7.0"')
    )
    assert newer != file.read_bytes() and b"0.7.0" in newer
    file.write_bytes(newer)
    said = [text for text in use(root)[1] if file.name in text]
    assert said
    for text in said:
        assert f"Cairn 0.7.0 wrote format 2; this is Cairn {RELEASE}, which reads format 1" in text
        assert "Use Cairn 0.7.0 or a newer release" in text and "copy" not in text
    if kind != "prepared":  # of an attempt that never commits, which a sweep takes for dead in time
        assert file.read_bytes() == newer
