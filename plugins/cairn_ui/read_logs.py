"""Read and cache the logs of pipelines for pages, with a limit on the time that a page waits.

Every read runs in its own thread, and a page waits for the thread only a limited time. The read continues after that,
and the next page of the pipeline gets its result. While a read is running, no second thread begins the same read. So a
storage that never answers costs one thread per pipeline and kind of read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from cairn_ui.pipelines_of_dags import PipelineRef
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths
from state_backend.inspection.pipeline_status import Status, status_of
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, CorruptRecord
from state_backend.values.frozen import frozen
from state_backend.values.inputs import InputRead
from state_backend.values.records import Record

T = TypeVar("T")
_log = logging.getLogger("cairn")

# Seconds for which a reading counts as new and is used again, so that one page reads a log only once.
FRESH_S = 2.0
# Longest wait of a page for one read, in seconds.
WAIT_S = 5.0
# Seconds after which the size of a pipeline's folder is counted again. A count lists the whole folder.
COUNT_AGAIN_S = 600.0


class NotAnswered(Exception):
    """The error for a storage that has not answered within the time that a page waits."""


@frozen
class Reading:
    log: Log
    status: Status
    validated: dict[int, frozenset[str]]
    # For each input of the newest interval from another pipeline, what was read.
    reads: tuple[InputRead, ...]
    # Time of the read, in seconds since the epoch.
    read_s: float
    # Duration of the read in seconds.
    took_s: float

    @property
    def newest(self) -> Record | None:
        """The retained checkpoint whose interval ends last; None without checkpoints.

        If several checkpoints have intervals that end at this time, the one with the highest id is returned.
        """
        return max(self.log.completed(), key=lambda c: (c.content.interval.end, c.id), default=None)

    @property
    def newest_end(self) -> datetime | None:
        """The end of the last interval with a retained checkpoint; None without checkpoints."""
        return None if self.newest is None else self.newest.content.interval.end


@frozen
class Look:
    # The newest successful reading; None if the pipeline was never read.
    reading: Reading | None
    # Error of the latest read, after which `reading` is an older one or None; None if the latest read succeeded.
    problem: str | None = None


@frozen
class Stored:
    total: int
    files: int
    # Time of the count, in seconds since the epoch.
    counted_s: float


class Reader:
    """A reader and cache of pipelines' logs, for all pages of this process. Several threads may use it at once.

    Each read runs in a thread. If a page asks for a read that is still running, it waits for the same read.
    """

    def __init__(self, opened: Callable[[PipelineRef], Storage], *, clock: Callable[[], float] = time.time) -> None:
        self._open = opened
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], Future[Any]] = {}
        self._readings: dict[str, Reading] = {}
        # By connection and folder.
        self._logs: dict[tuple[str | None, str], tuple[float, Log]] = {}
        self._storages: dict[tuple[str | None, str], Storage] = {}
        self._written: dict[tuple[str | None, str], dict[int, int]] = {}
        self._stored: dict[str, Stored] = {}

    def look(self, ref: PipelineRef, wait_s: float = WAIT_S) -> Look:
        """Read a pipeline's log and status, or return the last reading if that is younger than two seconds.

        If the read fails or takes longer than `wait_s`, the result has the last reading and the error as text.
        """
        return self.look_at_all([ref], wait_s)[ref.key]

    def _look(self, ref: PipelineRef, wait_s: float, fresh_since_s: float) -> Look:
        known = self._readings.get(ref.key)
        if ref.unreadable:
            return Look(reading=None, problem=ref.unreadable)
        if known is not None and known.read_s > fresh_since_s:
            return Look(reading=known)
        try:
            return Look(reading=self._run(ref, "log", lambda: self._read(ref), wait_s))
        except (CairnError, NotAnswered) as error:
            return Look(reading=known, problem=str(error))
        except Exception as error:
            _log.exception("pipeline %s can't be read for a page", ref.folder)
            return Look(
                reading=known, problem=f"{type(error).__name__}: {error}\nThe API server's log has the details."
            )

    def look_at_all(self, refs: Collection[PipelineRef], wait_s: float = WAIT_S / 2) -> dict[str, Look]:
        """Read several pipelines at the same time, as `look` does, and return the results by `PipelineRef.key`."""
        # `fresh_since_s` is fixed now: a reading that is new now counts as new until this call ends.
        until_s, fresh_since_s = time.monotonic() + wait_s, self._clock() - FRESH_S
        for ref in refs:
            known = self._readings.get(ref.key)
            if ref.unreadable is None and (known is None or known.read_s <= fresh_since_s):
                self._begin(ref, "log", lambda ref=ref: self._read(ref))  # type: ignore[misc]
        return {ref.key: self._look(ref, max(0.0, until_s - time.monotonic()), fresh_since_s) for ref in refs}

    def ask(self, ref: PipelineRef, what: str, work: Callable[[Storage], T], wait_s: float = WAIT_S) -> T:
        return self._run(ref, what, lambda: work(self._storage(ref)), wait_s)

    def written(self, ref: PipelineRef, log: Log, ids: Collection[int]) -> dict[int, int]:
        """Return the time at which the storage wrote each of the records `ids`, in ms since the epoch, by id.

        Sweeps are left out. Dropped checkpoints are left out too: retention wrote their files anew long after the
        commit.
        """
        known = self._written.setdefault(_place(ref), {})
        whole = [n for n in ids if n not in known and isinstance(log.entry(n), Record)]
        if whole:
            infos = self.ask(
                ref, f"written {min(whole)} {max(whole)}", lambda s: at_once(lambda n: s.stat(paths.record(n)), whole)
            )
            known.update({n: i.modified_ms for n, i in zip(whole, infos, strict=True) if i is not None})
        return {n: known[n] for n in ids if n in known}

    def find_size(self, ref: PipelineRef) -> Stored | None:
        """Return the size of the pipeline's folder by the last count, without waiting; None before the first count.

        If the last count is older than ten minutes, a thread begins to count again.
        """
        known = self._stored.get(ref.key)
        if ref.unreadable is None and (known is None or self._clock() - known.counted_s > COUNT_AGAIN_S):
            self._begin(ref, "bytes", lambda: self._count(ref))
        return known

    def _run(self, ref: PipelineRef, what: str, work: Callable[[], T], wait_s: float) -> T:
        try:
            found: T = self._begin(ref, what, work).result(wait_s)
        except TimeoutError:
            raise NotAnswered(
                f"{ref.folder} did not answer within {wait_s:.1f} s.\n"
                "Check that the API server can reach the storage. The read goes on, and this page refreshes by itself."
            ) from None
        return found

    def _begin(self, ref: PipelineRef, what: str, work: Callable[[], Any]) -> Future[Any]:
        with self._lock:
            call = self._calls.get((ref.key, what))
            if call is not None:
                return call
            call = self._calls[(ref.key, what)] = Future()

        def run() -> None:
            result, problem = None, None
            try:
                result = work()
            except BaseException as error:
                problem = error
                if isinstance(error, CairnError):
                    self._forget(ref)
            del self._calls[(ref.key, what)]
            if problem is not None:
                call.set_exception(problem)
            else:
                call.set_result(result)

        # The thread is a daemon, so that the API server can end even if the storage never answers.
        threading.Thread(target=run, name=f"cairn-ui {ref.name} {what}", daemon=True).start()
        return call

    def _storage(self, ref: PipelineRef) -> Storage:
        storage = self._storages.get(_place(ref))
        if storage is None:
            storage = self._storages[_place(ref)] = self._open(ref)
        return storage

    def _forget(self, ref: PipelineRef) -> None:
        """Let the next read open the storage again: the connection may have other credentials by then."""
        for cache in (self._logs, self._storages, self._written):
            cache.pop(_place(ref), None)

    def _read(self, ref: PipelineRef) -> Reading:
        began_s = time.perf_counter()
        storage, log = self._storage(ref), self._log(ref)
        validated: dict[int, set[str]] = {}
        for info in storage.list(paths.VALIDATED):
            if (found := paths.validated_id(info.path)) is not None:
                validated.setdefault(found[0], set()).add(found[1])
        chains = self._chains(ref)
        reading = Reading(
            log=log,
            status=status_of(log, ref.name, storage, chains.judged(ref.root, ref.name, log)),
            reads=chains.inputs(ref.root, ref.name),
            validated={n: frozenset(modes) for n, modes in validated.items()},
            read_s=self._clock(),
            took_s=time.perf_counter() - began_s,
        )
        self._readings[ref.key] = reading
        return reading

    def _log(self, ref: PipelineRef, fresh_s: float = 0.0) -> Log:
        """Return a pipeline's log: the cached one if it was read less than `fresh_s` seconds ago, else read again."""
        read_s, known = self._logs.get(_place(ref), (0.0, None))
        if known is None or self._clock() - read_s >= fresh_s:
            if known is not None and not _is_there(known):
                self._forget(ref)
                known = None
            log = read_log(self._storage(ref), known)
            if known is None or (log.head_id, log.quarantined) != (known.head_id, known.quarantined):
                known = log  # If nothing changed, `known` is better: it has earlier records in memory.
            self._logs[_place(ref)] = self._clock(), known
        return known

    def _chains(self, ref: PipelineRef) -> Chains:
        """Return a `Chains`, which judges by inputs whether results are out of date. It takes logs from this cache."""

        def open_log(root: str, name: str) -> Log:
            upstream = replace(ref, root=root, name=name)
            try:
                return self._log(upstream, FRESH_S)
            except CairnError:
                self._forget(upstream)
                raise

        return Chains(open_log=open_log)

    def _count(self, ref: PipelineRef) -> None:
        total = files = 0
        with contextlib.suppress(CairnError):  # The page shows the same error from its read of the log.
            for info in self._storage(ref).list(""):
                total, files = total + info.size_bytes, files + 1
            self._stored[ref.key] = Stored(total=total, files=files, counted_s=self._clock())


def _place(ref: PipelineRef) -> tuple[str | None, str]:
    return ref.storage_conn_id, ref.folder


def _is_there(log: Log) -> bool:
    """Return True if the storage still has the log that was read before (`log`).

    After a person has deleted the pipeline's folder and started the pipeline again, the newest known record is missing,
    or differs from the stored one.
    """
    if not log.head_id:
        return False
    with contextlib.suppress(CorruptRecord):
        return bool(log.entries.fresh(log.head_id) == log.entry(log.head_id))
    return False
