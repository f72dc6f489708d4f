"""Every interleaving of a few programs over one storage, with real code, at the granularity of storage calls.

A program is deterministic: what it does next is a function of the answers that it got so far. So an actor is a *node* in the
tree of its answers, and a state of the whole is (contents of the storage, node of each actor, faults left, writes under way).
A node's next call is found by running the program from its start on the recorded answers, once per node; states that are equal
are visited once. That is exhaustive: equal states have equal futures.

Two reads commute, and so do a read and a write that leaves its answer as it was; a write that is refused, or finds its work done,
is a read. ``reduced`` visits one of the orders that
differ in nothing else: a step is a write, and before it the others make those reads that it would answer otherwise, or leave
them for later. Whatever all of them can ever read and write is visited still, and so is every contents of the storage.

A crash needs no step of its own: an actor that died is one that is never scheduled again, and every state is checked as if all
that are not done had died in it. A lost answer is a step: the write takes effect and its caller hears UnknownOutcome, or it is
under way and lands at any later moment, or never.

``stale``: a listing is a step, too, with several answers: what is there, what was there when the actors began, and what is there
but for any one file that was written since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from unittest import mock
from uuid import UUID

import google_crc32c

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint import append_record as appending
from state_backend.checkpoint import (
    begin_attempt,
    commit_attempt,
    find_checkpoint,
    prepared_attempts,
    publish_output,
    quarantine,
)
from state_backend.checkpoint import clean_up_dropped as cleaning
from state_backend.checkpoint import dropped_checkpoint as dropping
from state_backend.checkpoint import fresh_listing as listing
from state_backend.checkpoint import leases as leasing
from state_backend.checkpoint import log as logs
from state_backend.checkpoint import record_reader as readers
from state_backend.checkpoint import rewind as rewinding
from state_backend.checkpoint import settled_files as settling
from state_backend.checkpoint import sweep_files as sweeping
from state_backend.formats import paths, record_codec
from state_backend.ports.storage import Storage
from state_backend.values.errors import AlreadyExists, CairnError, NotFound, PreconditionFailed, UnknownOutcome
from state_backend.values.handles import FileInfo, Handle
from state_backend.values.marks import AttemptEnd, Head, Published, Settled
from state_backend.values.records import Tombstone
from tests.support import coordinator as coordinating

OLD_MS, NOW_MS, LATER_MS = 0, 10_000_000, 1_000_000_000
"""Times of files: from before the actors began, written by them, and when the last sweep looks."""

GHOST = "~"
"""Paths that no actor sees: what was ever created in the log, and by whom it was prepared."""

T = TypeVar("T")
WRITES = frozenset({"create", "replace", "delete", "put"})
Stage = Callable[["Replay"], object]
Contents = Mapping[str, tuple[bytes, int]]
_State = tuple[int, tuple[int, ...], int, tuple[int, ...]]


class Violation(AssertionError):
    """What the checker found."""


class _NextCall(BaseException):
    """The program asks for an answer that was not recorded."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self.call = call


class Replay(Storage):
    """Answers from a list; then stops the program at its next call."""

    url = "replay://"

    def __init__(
        self,
        known: _Interned[Any],
        answers: Sequence[int],
        sees: Callable[[logs.Log], Any] | None,
        start: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        """``start``: entries that every process has read."""
        self.known, self._answers, self._sees = known, list(answers), sees
        self._start = logs.Log(readers.RecordReader(self, 0, start))
        self.trail: list[int] = []
        self.lists_what_is_there = True
        self.stamp_ms = NOW_MS

    def read_log(
        self, before: logs.Log | None, read: Callable[[Storage, logs.Log | None], logs.Log] = logs.read_log
    ) -> logs.Log:
        """A log is one answer once it was read, whole or as far as ``read`` does."""
        at, start = len(self.trail), self._answers[len(self.trail) :][:1]
        told = self.known[start[0]] if start else None
        if isinstance(told, _ReadLog):
            self.trail.append(start[0])
            return self._own(told.log)
        log = read(self, before if before is not None and before.head_id else self._start)
        whole = {n: id(entry) for n, entry in _read_of(log).items()}
        everything = (log.hint, log.head_id, *sorted(whole.items()), None, *sorted(map(str, log.quarantined.values())))
        key = everything if self._sees is None else self._sees(log)
        number = self.known.id(_ReadLog(key, log))
        self._answers[at : len(self.trail)] = [number]
        self.trail[at:] = [number]
        return self._own(self.known[number].log)

    def _own(self, log: logs.Log) -> logs.Log:
        """What else is asked of the log is asked here."""
        return replace(log, entries=log.entries.over(self))

    def _ask(self, *call: Any) -> Any:
        if len(self.trail) == len(self._answers):
            raise _NextCall(call)
        number = self._answers[len(self.trail)]
        self.trail.append(number)
        answer = self.known[number]
        if isinstance(answer, _Raised):
            raise answer.kind(answer.text)
        return answer

    def read(self, path: str) -> bytes:
        return self._ask("read", path)  # type: ignore[no-any-return]

    def create(self, path: str, data: bytes) -> Handle:
        return self._ask("create", path, data, self.stamp_ms)  # type: ignore[no-any-return]

    def replace(self, path: str, data: bytes, *, generation: int) -> Handle:
        return self._ask("replace", path, data, self.stamp_ms, generation)  # type: ignore[no-any-return]

    def stat(self, path: str) -> FileInfo | None:
        return self._ask("stat", path)  # type: ignore[no-any-return]

    def list(self, prefix: str) -> Iterator[FileInfo]:
        return iter(self._ask("list", prefix))

    def settled_below(self, folder: str, head_id: int) -> Iterator[FileInfo]:
        """A listing of what counts for who has seen that record as the newest. It never changes, so it is no choice."""
        return iter(self._ask("list", folder, head_id))

    def delete(self, path: str, *, generation: int | None = None) -> bool:
        return self._ask("delete", path, generation)  # type: ignore[no-any-return]

    def put(self, path: str, data: bytes) -> None:
        """Writes over what is there: what a sink that is no storage of ours does."""
        self._ask("put", path, data, self.stamp_ms)

    def upload(self, path: str, local: Path) -> Handle:
        raise NotImplementedError

    def download(self, handle: Handle, destination: Path) -> None:
        raise NotImplementedError

    def copy_from(self, source: Storage, handle: Handle, path: str) -> Handle:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Raised:
    kind: type[CairnError]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A process: its stages one after the other, each of which knows nothing but what it reads. A stage may have an attribute
    ``sees``: what of a log it depends on, if not on all; logs that agree in it are one answer. ``may``: errors that end it.
    ``attempt``: the one that it commits. ``ahead_ms``: what its host's clock is ahead of the storage's, or behind it."""

    name: str
    stages: tuple[Stage, ...]
    may: tuple[type[CairnError], ...] = ()
    attempt: str | None = None
    ahead_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """``interleavings``: schedules of all actors from their start to their end, of which the ``states`` are the different
    situations. ``contents``: different contents of the storage, each checked and recovered from."""

    states: int
    steps: int
    contents: int
    interleavings: int
    nodes: int
    outcomes: dict[tuple[str, ...], int]

    def __str__(self) -> str:
        return (
            f"{self.states:,} states, {self.steps:,} steps, {self.contents:,} contents of the storage, "
            f"{self.interleavings:.3g} interleavings"
        )


@dataclass(slots=True)
class _Node:
    """``trail``: the answers that decide what comes next, a log that was read whole as one of them. ``story``: the first way here."""

    actor: int
    stage: int
    said: tuple[str, ...]
    trail: tuple[int, ...]
    story: tuple[str, ...]
    call: int | None = None
    outcome: str | None = None
    after: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ReadLog:
    """A log that was read."""

    key: tuple[Any, ...]
    log: logs.Log = field(compare=False)


def creates_of_records(method: str, path: str) -> bool:
    return method == "create" and path.startswith("checkpoints/")


class Explorer:
    """``check`` looks at every contents once and raises a Violation; ``faults`` answers may be lost, of calls for which ``lossy``
    is true. A write to a path for which ``merges`` is true is no step of its own: it is one with the next write of its process.
    ``stale``: a listing may be old. ``host_dates_files``: a planted fault, files are dated by the clock of the host that writes them."""

    def __init__(
        self,
        scene: MemoryStorage,
        actors: Sequence[Actor],
        check: Callable[[Contents], None],
        *,
        faults: int = 0,
        reduced: bool = False,
        lossy: Callable[[str, str], bool] = creates_of_records,
        merges: Callable[[str], bool] = lambda path: False,
        check_end: Callable[[Contents, list[tuple[Actor, str]]], None] = lambda contents, ends: None,
        max_states: int = 20_000_000,
        stale: bool = False,
        host_dates_files: bool = False,
    ) -> None:
        self._stale, self._host_dates_files = stale, host_dates_files
        self._actors, self._check, self._faults, self._lossy = actors, check, faults, lossy
        self._reduced, self._merges = reduced, merges
        self._check_end, self._max_states = check_end, max_states
        self._files = _Interned[tuple[bytes, int]]()
        self._contents = _Interned[frozenset[tuple[str, int]]]()
        self._calls = _Interned[tuple[Any, ...]]()
        self._answers = _Interned[Any]()
        self._nodes: list[_Node] = []
        self._equal: dict[tuple[Any, ...], int] = {}
        self._roots: dict[tuple[int, int, tuple[str, ...]], int] = {}
        self._applied: dict[tuple[int, int], tuple[int, int]] = {}
        self._passed: dict[tuple[int, int], tuple[int, ...]] = {}
        self._listed: dict[tuple[int, int], tuple[int, ...]] = {}
        self._chosen: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._known = dict[int, Any]()
        start = {i.path: (scene.read(i.path), OLD_MS) for i in scene.list("")}
        for path, (data, _) in [*start.items()]:
            if path.startswith(("checkpoints/", "attempts/")):
                start.setdefault(GHOST + path, (data, OLD_MS))  # a scene says what was in a record that is shrunk
        self._start = self._contents.id(frozenset((p, self._files.id(f)) for p, f in start.items()))
        # Every process has read the log as it was; entries are immutable under their generation.
        for info in self._answer_list(self._start, "checkpoints/"):
            entry = record_codec.decode(start[info.path][0], info.path, logs.Record, logs.SweepRecord, logs.Tombstone)
            self._known[entry.id] = entry

    def run(self) -> Figures:
        """Visits all states, level by level. Raises: Violation."""
        with _deterministic():
            roots = tuple(self._root(n, 0, ()) for n in range(len(self._actors)))
            level: dict[_State, int] = {(self._start, roots, self._faults, ()): 1}
            states = steps = interleavings = 0
            checked: set[int] = set()
            outcomes: dict[tuple[str, ...], int] = {}
            while level:
                states += len(level)
                if states > self._max_states:
                    raise AssertionError(f"more than {self._max_states:,} states")
                following: dict[_State, int] = {}
                for state, ways in level.items():
                    contents = state[0]
                    if contents not in checked:
                        checked.add(contents)
                        self._check(self.contents(contents))
                    last = [self._reads(contents, n)[-1] if self._reduced else n for n in state[1]]
                    if all(self._nodes[n].call is None for n in last):
                        ends = tuple(self._nodes[n].outcome or "" for n in last)
                        outcomes[ends] = outcomes.get(ends, 0) + ways
                        interleavings += ways
                        self._check_end(self.contents(contents), list(zip(self._actors, ends, strict=True)))
                    for successor in self._successors(state):
                        steps += 1
                        following[successor] = following.get(successor, 0) + ways
                level = following
        return Figures(
            states=states,
            steps=steps,
            contents=len(checked),
            interleavings=interleavings,
            nodes=len(self._nodes),
            outcomes=outcomes,
        )

    def contents(self, number: int) -> Contents:
        return {path: self._files[file] for path, file in self._contents[number]}

    # --- steps -------------------------------------------------------------------------------------------------------------------

    def _successors(self, state: _State) -> Iterator[_State]:
        contents, nodes, faults, pending = state
        for n, node in enumerate(nodes):
            writer = self._reads(contents, node)[-1] if self._reduced else node
            if self._nodes[writer].call is None:
                continue
            between, writer = self._merged(contents, writer)
            call = self._nodes[writer].call
            if call is None:
                for others in self._others(contents, between, nodes, n):
                    yield between, _with(others, n, writer), faults, pending
                continue
            if self._may_be_stale(between, call):
                for others in self._others(contents, between, nodes, n):
                    for answer in self._listings(between, call):
                        yield between, _with(others, n, self._follow(writer, answer)), faults, pending
                continue
            after, answer = self._apply(between, call)
            for others in self._others(contents, after, nodes, n):
                yield after, _with(others, n, self._follow(writer, answer)), faults, pending
            method, path = self._calls[call][:2]
            if faults and method in WRITES and self._lossy(method, path):
                lost = self._follow(writer, self._answers.id(_Raised(UnknownOutcome, f"injected at {method} {path}")))
                for others in self._others(contents, after, nodes, n):
                    yield after, _with(others, n, lost), faults - 1, pending
                for others in self._others(contents, between, nodes, n):
                    yield between, _with(others, n, lost), faults - 1, tuple(sorted((*pending, call)))
        for n, call in enumerate(pending):
            after = self._apply(contents, call)[0]
            for others in self._others(contents, after, nodes, None):
                yield after, others, faults, pending[:n] + pending[n + 1 :]

    def _merged(self, contents: int, writer: int) -> tuple[int, int]:
        """The contents and the node after the writes that are no steps of their own: where the one is that ends the step."""
        while self._reduced and (call := self._nodes[writer].call) is not None:
            method, path = self._calls[call][:2]
            if method not in WRITES or not self._merges(path) or (self._faults and self._lossy(method, path)):
                break
            contents, answer = self._apply(contents, call)
            writer = self._reads(contents, self._follow(writer, answer))[-1]
        return contents, writer

    def _others(
        self, contents: int, after: int, nodes: tuple[int, ...], mover: int | None
    ) -> Iterable[tuple[int, ...]]:
        """Where the others may be when the mover writes."""
        if not self._reduced:
            return (nodes,)
        return product(
            *((node,) if n == mover else self._choices(contents, after, node) for n, node in enumerate(nodes))
        )

    def _reads(self, contents: int, node: int) -> tuple[int, ...]:
        """The nodes that an actor passes by reading, up to where it writes or ends."""
        known = self._passed.get((contents, node))
        if known is None:
            found, at = [node], node
            while (call := self._nodes[at].call) is not None and self._changes_nothing(contents, call):
                at = self._follow(at, self._apply(contents, call)[1])
                found.append(at)
            known = self._passed[contents, node] = tuple(found)
        return known

    def _changes_nothing(self, contents: int, call: int) -> bool:
        """A read, or a write that would find its work done or be refused."""
        method, path = self._calls[call][:2]
        if method not in WRITES:
            return not self._may_be_stale(contents, call)
        return self._apply(contents, call)[0] == contents and not (self._faults and self._lossy(method, path))

    def _choices(self, contents: int, after: int, node: int) -> tuple[int, ...]:
        known = self._chosen.get((contents, after, node))
        if known is None:
            found = [node]
            for before, there in pairwise(self._reads(contents, node)):
                call = self._nodes[before].call
                assert call is not None
                same = self._apply(contents, call)[1] == self._apply(after, call)[1]
                if not (same and self._changes_nothing(after, call)):
                    found.append(there)
            known = self._chosen[contents, after, node] = tuple(found)
        return known

    def _follow(self, node: int, answer: int) -> int:
        known = self._nodes[node].after.get(answer)
        if known is None:
            known = self._node(node, answer)
            self._nodes[node].after[answer] = known
        return known

    def _node(self, parent: int, answer: int) -> int:
        """Where the actor is when its stage ran up to the next call, or ended."""
        before = self._nodes[parent]
        assert before.call is not None
        told = f"{self._calls[before.call][:2]} -> {str(self._answers[answer])[:200]}"
        return self._run_stage(before.actor, before.stage, before.said, (*before.trail, answer), (*before.story, told))

    def _root(self, actor: int, stage: int, said: tuple[str, ...], story: tuple[str, ...] = ()) -> int:
        """The beginning of a stage: what the actor read before is forgotten."""
        known = self._roots.get((actor, stage, said))
        if known is None:
            known = self._roots[actor, stage, said] = self._run_stage(actor, stage, said, (), story)
        return known

    def _run_stage(
        self, actor: int, stage: int, said: tuple[str, ...], trail: tuple[int, ...], story: tuple[str, ...]
    ) -> int:
        who = self._actors[actor]
        replay = Replay(self._answers, trail, getattr(who.stages[stage], "sees", None), self._known)
        replay.lists_what_is_there = not self._stale
        replay.stamp_ms += who.ahead_ms if self._host_dates_files else 0
        made = _Node(actor, stage, said, trail, story)
        try:
            with (
                mock.patch.object(time, "time_ns", lambda: (NOW_MS + who.ahead_ms) * 1_000_000)
                if who.ahead_ms
                else nullcontext()
            ):
                last_words = who.stages[stage](replay)
        except _NextCall as asked:
            made.call = self._calls.id(asked.call)
        except who.may as error:
            made.outcome = type(error).__name__
        except Exception as error:
            told = "\n  ".join(story)
            raise Violation(f"{who.name} failed: {type(error).__name__}: {error}\n  {told}") from error
        else:
            all_said = (*said, last_words) if isinstance(last_words, str) else said
            if stage + 1 < len(who.stages):
                return self._root(actor, stage + 1, all_said, story)
            made.outcome = " ".join(all_said) or "done"
        made.trail = tuple(replay.trail) if made.call is not None else ()
        key = (actor, stage, said, made.trail, made.outcome)
        known = self._equal.get(key)
        if known is None:
            self._nodes.append(made)
            known = self._equal[key] = len(self._nodes) - 1
        return known

    # --- the storage --------------------------------------------------------------------------------------------------------------

    def _apply(self, contents: int, call: int) -> tuple[int, int]:
        known = self._applied.get((contents, call))
        if known is None:
            known = self._applied[contents, call] = self._applied_anew(contents, *self._calls[call])
        return known

    def _applied_anew(self, contents: int, method: str, path: str, *rest: Any) -> tuple[int, int]:
        answer: Any = None
        if method == "list":
            return contents, self._listing(contents, path, *rest)
        files = dict(self._contents[contents])
        there = files.get(path)
        if method == "stat":
            answer = None if there is None else self._info(path, there)
        elif method == "read":
            answer = _Raised(NotFound, f"no file {path!r}") if there is None else self._files[there][0]
        elif method == "create" and there is not None:
            answer = _Raised(AlreadyExists, f"{path} exists")
        elif method == "delete" and there is None:
            answer = True  # as if it had been there: nobody does anything else then
        elif method == "replace" and there is None:
            answer = _Raised(NotFound, f"no file {path!r}")
        elif method in ("replace", "delete") and rest[-1] not in (None, there):
            answer = _Raised(PreconditionFailed, f"{path} was rewritten")
        elif method == "delete":
            del files[path]
            answer = True
        else:
            data = rest[0]
            files[path] = self._files.id((data, rest[1]))
            if method != "replace" and path.startswith(("checkpoints/", "attempts/")):
                files.setdefault(GHOST + path, files[path])
            answer = Handle(path=path, size_bytes=len(data), crc32c=google_crc32c.value(data))
        return self._contents.id(frozenset(files.items())), self._answers.id(answer)

    def _listing(self, contents: int, path: str, head_id: int | None = None) -> int:
        listed = self._answer_list(contents, path)
        if head_id is not None:
            listed = (i for i in listed if (fact := paths.parse_settled(i.path)) is not None and fact[1] < head_id)
        return self._answers.id(tuple(listed))

    def _may_be_stale(self, contents: int, call: int) -> bool:
        return self._stale and self._calls[call][0] == "list" and len(self._listings(contents, call)) > 1

    def _listings(self, contents: int, call: int) -> tuple[int, ...]:
        """What a listing may answer: the last of it is what is there."""
        known = self._listed.get((contents, call))
        if known is None:
            _, path, *rest = self._calls[call]
            now, before = dict(self._contents[contents]), dict(self._contents[self._start])
            new = [p for p, file in sorted(now.items()) if p.startswith(path) and before.get(p) != file]
            without = [{p: f for p, f in now.items() if p != one} | _only(before, one) for one in new]
            old = [self._start, *(self._contents.id(frozenset(files.items())) for files in without), contents]
            known = self._listed[contents, call] = tuple(dict.fromkeys(self._listing(n, path, *rest) for n in old))
        return known

    def _answer_list(self, contents: int, prefix: str) -> Iterator[FileInfo]:
        for path, file in sorted(self._contents[contents]):
            if path.startswith(prefix) and not path.startswith((GHOST, "sink/")):
                yield self._info(path, file)

    def _info(self, path: str, file: int) -> FileInfo:
        """A file's generation is the number of its bytes and time: another one after every write that changes anything."""
        data, modified_ms = self._files[file]
        crc32c: int = google_crc32c.value(data)
        return FileInfo(path=path, size_bytes=len(data), generation=file, modified_ms=modified_ms, crc32c=crc32c)


class _Interned(Generic[T]):
    """Values by small numbers, from 1 on."""

    def __init__(self) -> None:
        self._ids: dict[T, int] = {}
        self._values: list[T] = []

    def id(self, value: T) -> int:
        known = self._ids.get(value)
        if known is None:
            self._values.append(value)
            known = self._ids[value] = len(self._values)
        return known

    def __getitem__(self, number: int) -> T:
        return self._values[number - 1]


def _only(files: dict[str, int], path: str) -> dict[str, int]:
    return {path: files[path]} if path in files else {}


def _with(nodes: tuple[int, ...], n: int, node: int) -> tuple[int, ...]:
    return (*nodes[:n], node, *nodes[n + 1 :])


def _read_of(log: logs.Log) -> dict[int, Any]:
    """The newest record, and what is known of those that it retains: a retained record is the same whenever it is read."""
    known = log.entries.known
    return {n: known[n] for n in {log.head_id, *log.retained} if n in known}


def storage_now_ms(storage: Storage, *, dry_run: bool) -> int:
    return NOW_MS


def _read_newest(storage: Storage, before: logs.Log | None = None) -> logs.Log:
    return storage.read_log(before, _NEWEST) if isinstance(storage, Replay) else _NEWEST(storage, before)


_NEWEST = logs.read_newest


def _read_log(storage: Storage, before: logs.Log | None = None) -> logs.Log:
    return storage.read_log(before) if isinstance(storage, Replay) else logs.read_log(storage, before)


def _read_whole(storage: Storage) -> logs.Log:
    log = _read_log(storage)
    log.entries.load(range(1, log.head_id + 1))
    return log


def _list_settled(past: readers.RecordReader, folder: str) -> list[readers.Fact]:
    storage = past.storage
    if isinstance(storage, Replay) and storage.lists_what_is_there:
        below = storage.settled_below(folder, past.head_id)
        return [readers.Fact(*found) for info in below if (found := paths.parse_settled(info.path)) is not None]
    return _LIST_SETTLED(past, folder)


_LIST_SETTLED = readers.RecordReader._list


def _encoded_once() -> Callable[[object], bytes]:
    """Of what has no dictionaries, and so is a key."""
    plain, keys = record_codec.encode, AttemptEnd | Head | Published | Settled | Tombstone
    remembered = lru_cache(maxsize=100_000)(plain)
    return lambda value: remembered(value) if isinstance(value, keys) else plain(value)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sweeps one file at a time and under one name; records are decoded once, marks encoded once, paths built once; a log that was read is one answer."""
    decode = lru_cache(maxsize=100_000)(record_codec.decode)
    with ExitStack() as stack:
        readers_of_all = (coordinating, find_checkpoint, prepared_attempts, quarantine, dropping, sweeping, rewinding)
        for module in readers_of_all:
            stack.enter_context(mock.patch.object(module, "read_log", _read_log))
        for module in (coordinating, begin_attempt, commit_attempt, publish_output, cleaning):
            stack.enter_context(mock.patch.object(module, "read_newest", _read_newest))
        stack.enter_context(mock.patch.object(settling, "read_whole_log", _read_whole))
        for module in (appending, cleaning, commit_attempt, listing, logs, readers, settling, sweeping):
            stack.enter_context(
                mock.patch.object(module, "at_once", lambda work, items: [work(item) for item in items])
            )
        stack.enter_context(mock.patch.object(readers.RecordReader, "_list", _list_settled))
        # One answer, and no three steps: it depends on nobody, and nobody on the file that it takes.
        stack.enter_context(mock.patch.object(sweeping, "storage_now_ms", storage_now_ms))
        stack.enter_context(mock.patch.object(sweeping, "uuid4", lambda: "the-sweep"))
        stack.enter_context(mock.patch.object(leasing, "uuid4", lambda: UUID(int=1)))
        stack.enter_context(mock.patch.object(record_codec, "decode", decode))
        stack.enter_context(mock.patch.object(record_codec, "encode", _encoded_once()))
        for name in ("interval_name", "settled", "settled_folders"):
            once = lru_cache(maxsize=100_000)(getattr(paths, name))
            stack.enter_context(mock.patch.object(paths, name, once))
        yield
