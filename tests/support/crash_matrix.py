"""What a fault at any storage call may leave: operations on real shards, broken at each call and recovered as Airflow would.

Each cell is a fresh copy of the same folders. The operation runs in a process that dies before or after its n-th call took
effect, or that loses the answer to a write, or finds the storage out of reach for one call; then it ends by itself. Then what is there must be, bit by bit, what was there before or what the operation makes; a new try finishes it, and a
sweep past the grace period leaves exactly the files that the records name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest import mock

import google_crc32c

from cairn.operations.erase_keys import forget
from cairn.operations.savepoints.restore_savepoint import restore_savepoint
from cairn.operations.savepoints.take_savepoint import take_savepoint
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.schema_evolution import row_reader
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.shard.canonical_files import read_canonical
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.state.check_shard import verify_shard
from state_backend.values.errors import CorruptRecord, RetryableError, StorageUnavailable
from state_backend.values.key_groups import range_of
from state_backend.values.marks import Savepoint
from state_backend.values.operation_parameters import Erase
from state_backend.values.records import Content
from state_backend.values.retention import AnyOf, KeepLast, KeepQuarantined
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import PIPELINE, day
from tests.support.coordinator import Coordinator
from tests.support.faulty_storage import Fault as Planned
from tests.support.faulty_storage import FaultyStorage, StopHere, lost_answer_at, stop_at
from tests.support.in_process import run_here
from tests.support.reading import read_entries
from tests.support.real_shards import MAX_PARALLELISM, RealPipeline
from tests.support.shards import KEYS

When = Literal["before", "after"]
Fault = Literal["dies", "answer lost", "out of reach"]
Folders = Mapping[str, Storage]
Values = dict[str, int]
FAR_MS = 4_102_444_800_000  # the year 2100: everything is old
HOME, SAVED, NEW = PIPELINE, "savepoint", "new"
POLICY = AnyOf((KeepLast(3), KeepQuarantined(14)))
ANY: Any = None


# --- places ------------------------------------------------------------------------------------------------------------------------


class Place(Protocol):
    """A root with a few folders: a pipeline's, a savepoint's, another pipeline's."""

    name: str

    def folder(self, name: str) -> Storage: ...

    def copy(self) -> Place:
        """The same files, elsewhere."""

    def remove(self) -> None: ...


class InMemory:
    name = "memory"

    def __init__(self) -> None:
        self._storage = MemoryStorage("memory://matrix")

    def folder(self, name: str) -> Storage:
        return self._storage.below(name)

    def copy(self) -> InMemory:
        twin = InMemory()
        for info in self._storage.list(""):
            twin._storage.create(info.path, self._storage.read(info.path))
        return twin

    def remove(self) -> None:
        pass


class OnDisk:
    """The copies are hard links: no file is ever written to in place."""

    name = "local"

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, name: str) -> Storage:
        return LocalStorage(self._root / name)

    def copy(self) -> OnDisk:
        target = Path(tempfile.mkdtemp(dir=self._root.parent))
        shutil.copytree(self._root, target, copy_function=os.link, dirs_exist_ok=True)
        return OnDisk(target)

    def remove(self) -> None:
        shutil.rmtree(self._root)


# --- operations --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Try:
    """One try of an operation as one process: the folders as it sees them. ``prepared``: how far it came, for the next try.
    ``sink`` gets (interval, checkpoint id) of every publication."""

    folders: Folders
    work: Path
    attempt: str
    sink: list[tuple[str, int]] = field(default_factory=list)
    prepared: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """``run`` does it, also after a try that died at any point; ``folders`` are what it may change."""

    name: str
    setup: Callable[[Place, Path], None]
    run: Callable[[Try], None]
    changes: tuple[str, ...] = (HOME,)


def pipeline(storage: Storage, work: Path) -> RealPipeline:
    return RealPipeline(work, storage=storage, policy=POLICY)


def values_of(n: int) -> Values:
    return dict.fromkeys("abcdefgh"[: 8 - n], n) | {f"day-{n}": n}


def some_days(place: Place, work: Path) -> None:
    """Days 1 to 4 of which three are retained; the second one changed what the first one wrote, and so on."""
    made = pipeline(place.folder(HOME), work)
    for n in (1, 2, 3, 4):
        made.prepare(n, f"a{n}", values_of(n), mode="changelog" if n == 4 else "incremental")
        made.coordinator.commit(f"a{n}")
        made.coordinator.publish(None)
        made.coordinator.clean_up()


def crashed_tries(place: Place, work: Path) -> None:
    """And what the sweeper is for: a try that prepared and one that did not get so far."""
    some_days(place, work)
    home = place.folder(HOME)
    pipeline(home, work).prepare(5, "silent", values_of(5))
    home.create(paths.shared("crashed", 0, 0, 0, "sst"), b"x")
    home.create(paths.output(day(5), "crashed", 0, 0), b"x")


def lost_files(place: Place, work: Path) -> None:
    """And all files are lost that only repeat what the records say."""
    crashed_tries(place, work)
    home = place.folder(HOME)
    lost = [info.path for info in home.list(paths.SETTLED)]
    # On a disk, three more files keep the names of the commits' folders.
    assert len(lost) == (7 if isinstance(place, OnDisk) else 4) and all(home.delete(path) for path in lost)


def refused_day(place: Place, work: Path) -> None:
    """Day 4 is refused, and held with its base until somebody decides."""
    some_days(place, work)
    pipeline(place.folder(HOME), work).coordinator.quarantine(4, "a loss")


def a_savepoint(format: Literal["native", "canonical"]) -> Callable[[Place, Path], None]:
    def setup(place: Place, work: Path) -> None:
        some_days(place, work)
        take(Try({name: place.folder(name) for name in (HOME, SAVED)}, work, "setup"), format)

    return setup


def interval(n: int, values: Values) -> Callable[[Try], None]:
    """The process task, then the checkpoint task. Once the first has ended, only the second is tried again."""

    def run(this: Try) -> None:
        home = pipeline(this.folders[HOME], this.work)
        if this.prepared is None:
            home.prepare(n, this.attempt, values, mode="changelog")
            this.prepared = this.attempt
        home.coordinator.commit(this.prepared)
        home.coordinator.publish(lambda record: this.sink.append((str(record.content.interval), record.id)))
        home.coordinator.clean_up()

    return run


def sweeping(this: Try) -> None:
    sweep(this.folders[HOME], PIPELINE, now_ms=FAR_MS, min_age=timedelta(hours=1))


def take(this: Try, format: Literal["native", "canonical"]) -> None:
    with without_spark(this.folders):
        record = Coordinator(this.folders[HOME], PIPELINE).record("latest")
        take_savepoint(ANY, DECLARED, f"memory://{HOME}", record, f"memory://{SAVED}", format)


def restore(this: Try, claim: Literal["NO_CLAIM", "CLAIM"]) -> None:
    with without_spark(this.folders):
        restore_savepoint(ANY, DECLARED, f"memory://{NEW}", f"memory://{SAVED}", claim=claim)


def forgetting(this: Try) -> None:
    home, encoded = Coordinator(this.folders[HOME], PIPELINE, policy=POLICY), [KEYS.encode(("a",))]
    numbers = count()
    forget(
        home.at,
        encoded,
        Erase(root="", pipeline="", key=(), drop_checkpoints=True, on_rerun="filter"),
        EngineOptions(cache_dir=None),
        new_attempt=lambda: f"{this.attempt}-{next(numbers)}",
        new_salt=lambda: "00" * 16,
    )


def quarantining(this: Try) -> None:
    pipeline(this.folders[HOME], this.work).coordinator.quarantine(4, "a loss")


def releasing(this: Try) -> None:
    coordinator = pipeline(this.folders[HOME], this.work).coordinator
    if 4 in coordinator.log().quarantined:
        coordinator.release(4)


def dropping(this: Try) -> None:
    """Drop the refused day, and compute the day again."""
    coordinator = pipeline(this.folders[HOME], this.work).coordinator
    if 4 in coordinator.log().retained:
        coordinator.drop_quarantined(4)
    interval(4, values_of(4) | {"a": 99})(this)


OPERATIONS = (
    Operation(name="interval", setup=some_days, run=interval(5, values_of(5))),
    Operation(name="re-run", setup=some_days, run=interval(3, {"a": 99, "z": 1})),
    Operation(name="sweep", setup=crashed_tries, run=sweeping),
    Operation(name="sweep of lost files", setup=lost_files, run=sweeping),
    Operation(name="forget", setup=some_days, run=forgetting),
    Operation(name="quarantine", setup=some_days, run=quarantining),
    Operation(name="release", setup=refused_day, run=releasing),
    Operation(name="drop of a quarantined day", setup=refused_day, run=dropping),
    Operation(name="native savepoint", setup=some_days, run=lambda t: take(t, "native"), changes=(SAVED,)),
    Operation(name="canonical savepoint", setup=some_days, run=lambda t: take(t, "canonical"), changes=(SAVED,)),
    Operation(
        name="restore, native", setup=a_savepoint("native"), run=lambda t: restore(t, "NO_CLAIM"), changes=(NEW,)
    ),
    Operation(
        name="restore, canonical", setup=a_savepoint("canonical"), run=lambda t: restore(t, "NO_CLAIM"), changes=(NEW,)
    ),
    Operation(name="claim", setup=a_savepoint("native"), run=lambda t: restore(t, "CLAIM"), changes=(NEW, SAVED)),
)

DECLARED = bare_pipeline(name=PIPELINE, max_parallelism=MAX_PARALLELISM)


@contextmanager
def without_spark(folders: Folders) -> Iterator[None]:
    """The tasks of savepoints and restores run in this process, over these storages: ``memory://new/counting`` is ``new``."""

    def opened(url: str) -> Storage:
        return folders[url.removeprefix("memory://").split("/")[0]]

    with ExitStack() as stack:
        modules = [
            f"cairn.{m}"
            for m in (
                "operations.savepoints.restore_savepoint",
                "operations.savepoints.take_savepoint",
                "shard_jobs.fill_from_savepoint",
                "shard_jobs.write_savepoint",
            )
        ]
        for module in (*modules, "state_backend.checkpoint.location"):
            stack.enter_context(mock.patch(f"{module}.open_storage", opened))
        for operation, first_task in (("restore_savepoint", 70), ("take_savepoint", 0)):
            run = partial(run_here, first_task=first_task)
            stack.enter_context(mock.patch(f"cairn.operations.savepoints.{operation}.run_on_shards", run))
        yield


# --- what is there -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What counts of one folder: per interval the values, digest and output of what is current; which checkpoints are quarantined;
    a savepoint's values."""

    states: Mapping[str, tuple[Values, int]]
    quarantined: frozenset[int]
    outputs: Mapping[str, tuple[bytes, ...]]
    saved: Values | None


class Surveyor:
    """Reads folders as a stranger would: every file that a completed checkpoint names is compared with its handle, restored
    and walked. The same bytes are restored once."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._known: dict[str, tuple[Values, int, int]] = {}
        self.restored = 0

    def see(self, storage: Storage) -> Seen:
        log = read_log(storage)
        states = {}
        for record in log.completed():
            values, digest, entries = self._values(storage, record.content)
            assert (digest, entries) == (record.content.digest, record.content.totals.entries)
            states[str(record.content.interval)] = values, digest
        try:
            outputs = {
                str(interval): tuple(self._read(storage, o.handle) for o in files)
                for interval, (_, files) in log.current_outputs().items()
            }
        except CorruptRecord as error:
            assert "cairn sweep" in str(error)
            outputs = {"lost": ()}
        return Seen(states=states, quarantined=frozenset(log.quarantined), outputs=outputs, saved=self._saved(storage))

    def _saved(self, storage: Storage) -> Values | None:
        if storage.stat(paths.SAVEPOINT_RECORD) is None:
            return None
        savepoint = read_savepoint(storage)
        content = savepoint.content
        if savepoint.format == "native":
            values, digest, entries = self._values(storage, content)
        else:
            values, digest, entries = self._canonical(storage, savepoint)
        assert (digest, entries) == (content.digest, content.totals.entries)
        return values

    def _values(self, storage: Storage, content: Content) -> tuple[Values, int, int]:
        manifests = [manifest_of(ref, storage) for ref in content.shards]
        named = sha256()
        for m in manifests:
            named.update(repr((m.key_groups, m.inline_files, m.key_group_states)).encode())
            for handle in m.handles:
                named.update(self._read(storage, handle))
        name = named.hexdigest()
        if name not in self._known:
            self.restored += 1
            values: Values = {}
            for m in manifests:
                folder = self._work / f"survey-{self.restored}-{m.shard}"
                with restore_shard(m.key_groups, [m], storage, folder, EngineOptions()).store as store:
                    findings = verify_shard(store, m, content.states, content.key_schema, content.max_parallelism)[1]
                    assert findings == []
                    values |= values_in(store, content)
                shutil.rmtree(folder)
            self._known[name] = values, sum(m.digest for m in manifests) % 2**64, sum(m.entries for m in manifests)
        return self._known[name]

    def _canonical(self, storage: Storage, savepoint: Savepoint) -> tuple[Values, int, int]:
        from state_backend.adapters.rocks import RocksStore

        content = savepoint.content
        named = sha256(b"".join(self._read(storage, f.handle) for f in savepoint.files)).hexdigest()
        if named not in self._known:
            self.restored += 1
            work = self._work / f"survey-{self.restored}"
            with RocksStore(work / "db") as store:
                groups = read_canonical(
                    savepoint.files,
                    content.states,
                    parse_struct(content.key_schema),
                    storage,
                    store,
                    work=work,
                    owned=range_of(0, 1, content.max_parallelism),
                    max_parallelism=content.max_parallelism,
                    recorded_max_parallelism=content.max_parallelism,
                )
                digest, entries = sum(g.digest for g in groups) % 2**64, sum(sum(g.entries.values()) for g in groups)
                self._known[named] = values_in(store, content), digest, entries
            shutil.rmtree(work)
        return self._known[named]

    def _read(self, storage: Storage, handle: Any) -> bytes:
        data = storage.read(handle.path)
        assert (len(data), google_crc32c.value(data)) == (handle.size_bytes, handle.crc32c), handle.path
        return data


def values_in(store: Any, content: Content) -> Values:
    descriptor = next(d for d in content.states if d.name == "value")
    keys, decode = KeyCodec(parse_struct(content.key_schema)), row_reader(descriptor.name, descriptor.versions)
    return {e.key[0]: decode(e.row)[0] for e in read_entries(store, descriptor, keys, None)}


def live_files(storage: Storage) -> set[str]:
    """Every path that something which counts names, found by walking the JSON and not by the sweeper's own rules."""
    log = read_log(storage)
    live = {
        info.path
        for info in storage.list("")
        if info.path.startswith((paths.CHECKPOINTS, paths.QUARANTINE, paths.SETTLED, paths.HEAD))
    }
    counts: list[Any] = [json.loads(storage.read(paths.record(r.id)))["body"]["content"] for r in log.completed()]
    live |= {paths.prepared(made["attempt"]) for made in counts}
    if storage.stat(paths.SAVEPOINT_RECORD) is not None:
        counts.append(json.loads(storage.read(paths.SAVEPOINT_RECORD))["body"])
        live.add(paths.SAVEPOINT_RECORD)
    if storage.stat(paths.CLAIM) is not None:
        live.add(paths.CLAIM)
    handles = [path for made in counts for path in _paths_in(made)]
    live |= {*handles}
    for manifest in (path for path in handles if path.endswith(".manifest")):
        live |= {*_paths_in(json.loads(storage.read(manifest))["body"])}
    for current, (checkpoint_id, files) in log.current_outputs().items():
        live |= {paths.published(current, checkpoint_id), *(f.handle.path for f in files)}
    return live


def _paths_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.keys() == {"path", "size_bytes", "crc32c"}:
            yield value["path"]
        for inner in value.values():
            yield from _paths_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths_in(inner)


# --- the matrix --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Totals:
    """What was run: ``calls`` of the storage in undisturbed runs, ``faults`` injected, ``old`` and ``new`` of them after
    which the state was the one before or after the operation; ``restored`` states were walked entry by entry."""

    calls: int = 0
    faults: int = 0
    old: int = 0
    new: int = 0
    restored: int = 0

    def add(self, other: Totals) -> None:
        self.calls += other.calls
        self.faults += other.faults
        self.old += other.old
        self.new += other.new
        self.restored += other.restored

    def __str__(self) -> str:
        return (
            f"{self.calls} calls, {self.faults} faults: {self.old} left the old state, {self.new} the new one, none another; "
            f"{self.restored} states restored and walked"
        )


def broken(place: Place, at: int | None, when: When, fault: Fault = "dies") -> tuple[Folders, FaultyStorage]:
    """The folders as one process sees them to which something happens at a call, or nothing ever (None)."""
    plan = {
        "dies": stop_at(at or 0, when),
        "answer lost": lost_answer_at(at or 0, when),
        "out of reach": {at or 0: Planned(error=StorageUnavailable(f"injected at call {at}"), when="before")},
    }
    first = FaultyStorage(place.folder(HOME), plan[fault] if at is not None else {})
    return {HOME: first, **{name: first.beside(place.folder(name)) for name in (SAVED, NEW)}}, first


def crash_matrix(
    operation: Operation, empty: Place, work: Path, *, fault: Fault = "dies", only_writes: bool = False
) -> Totals:
    """Breaks the operation at every call (or write), before and after; asserts the laws of the module's docstring."""
    surveyor, totals = Surveyor(work), Totals()
    operation.setup(empty, work)
    folders = {name: empty.folder(name) for name in (HOME, SAVED, NEW)}
    before = {name: surveyor.see(storage) for name, storage in folders.items()}
    twin = empty.copy()
    alive, counting = broken(twin, None, "before")
    operation.run(Try(alive, work, "whole"))
    after = {name: surveyor.see(twin.folder(name)) for name in folders}
    assert [name for name in folders if before[name] != after[name]] == [
        n for n in folders if n in operation.changes and operation.name != "sweep"
    ]
    check_swept(twin, operation, surveyor, after)
    calls = [*counting.calls]
    totals.calls = len(calls)
    for at, (method, _) in enumerate(calls):
        if (only_writes or fault == "answer lost") and method in ("read", "stat", "list", "download"):
            continue
        for when in ("before", "after") if fault != "out of reach" else ("before",):
            cell(operation, empty.copy(), work, surveyor, before, after, totals, at, when, fault)
    totals.restored = surveyor.restored
    return totals


def cell(
    operation: Operation,
    place: Place,
    work: Path,
    surveyor: Surveyor,
    before: Mapping[str, Seen],
    after: Mapping[str, Seen],
    totals: Totals,
    at: int,
    when: When,
    fault: Fault,
) -> None:
    """One cell. An operation that goes on in spite of a fault has to end where an undisturbed one does."""
    case = f"{operation.name} on {place.name}, {fault} {when} call {at}"
    folders, process = broken(place, at, when, fault)
    this = Try(folders, work, "first")
    ended = False
    try:
        operation.run(this)
        ended = True
    except StopHere:
        assert fault == "dies", case
    except RetryableError:
        assert fault != "dies", case
    # Threads share calls out: a run may need fewer than the one that was counted.
    if len(process.calls) <= at:
        return
    totals.faults += 1
    assert not (ended and fault == "dies"), case
    for name in folders:
        seen = surveyor.see(place.folder(name))
        if ended:
            assert seen == after[name], f"{case}: {name} though it ended well"
        elif name in operation.changes:
            assert seen in (before[name], after[name]), f"{case}: {name} is neither the old nor the new one"
        else:
            assert seen == before[name], f"{case}: {name}"
    moved = surveyor.see(place.folder(operation.changes[0])) == after[operation.changes[0]]
    totals.new += moved
    totals.old += not moved
    alive, _ = broken(place, None, "before")
    operation.run(Try(alive, work, "again", this.sink, this.prepared))
    for name in folders:
        assert surveyor.see(place.folder(name)) == after[name], f"{case}: {name} after the next try"
    check_published(place, this.sink, case)
    check_swept(place, operation, surveyor, after)
    shutil.rmtree(work / "work", ignore_errors=True)  # what the dead left
    place.remove()


def check_published(place: Place, sink: list[tuple[str, int]], case: str) -> None:
    """What the sink got last for an interval is the current output."""
    log = read_log(place.folder(HOME))
    current = {str(interval): checkpoint_id for interval, (checkpoint_id, _) in log.current_outputs().items()}
    for name, checkpoint_id in dict(sink).items():
        assert checkpoint_id == current[name], f"{case}: the sink has {checkpoint_id} of {name}"


def check_swept(place: Place, operation: Operation, surveyor: Surveyor, after: Mapping[str, Seen]) -> None:
    """A sweep past the grace period leaves what is live, and nothing else."""
    for name in (HOME, NEW):
        storage = place.folder(name)
        if any(True for _ in storage.list("")):
            sweep(storage, PIPELINE, now_ms=FAR_MS, min_age=timedelta(hours=1))
    for name in (HOME, SAVED, NEW):
        storage = place.folder(name)
        found, live = {info.path for info in storage.list("")}, live_files(storage)
        assert found == live, f"{operation.name}, {name}: orphans {found - live}, missing {live - found}"
        assert surveyor.see(storage) == after[name]
