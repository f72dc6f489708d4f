"""A log over entries in memory: answers every question from the entries alone, and reads no storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.log import (
    Log,
    attempt_of,
    facts_of_entries,
    interval_of,
    kept_of,
    kind_of,
    last_facts,
    left_same_state,
    outputs_of,
)
from state_backend.checkpoint.record_reader import Entry, Fact, RecordReader
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.intervals import Interval
from state_backend.values.marks import Quarantine
from state_backend.values.records import (
    Forgotten,
    OutputFile,
    Record,
    Summary,
    Superseded,
    SweepRecord,
    Tombstone,
    Unpublished,
)


def log_in_memory(
    entries: Mapping[int, Entry] | None = None, quarantined: Mapping[int, Quarantine] | None = None
) -> Log:
    return Log(RecordsInMemory(entries or {}), quarantined or {})


class RecordsInMemory(RecordReader):
    """Entries in memory. The summary follows from the entries: the summary of the newest entry is ignored."""

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        self.head_id = max(entries, default=0)
        self.storage = MemoryStorage("memory:///p")
        self._entries = dict(entries)
        head = entries.get(self.head_id)
        if isinstance(head, Record) and not head.replaced:
            replaced = sorted(f.interval for f in self._facts if f.id == head.id and f.kind == "replaced")
            self._entries[head.id] = replace(head, replaced=tuple(replaced))

    def __getitem__(self, checkpoint_id: int) -> Entry:
        return self._entries[checkpoint_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, checkpoint_id: object) -> bool:
        return checkpoint_id in self._entries

    @property
    def known(self) -> dict[int, Entry]:
        return self._entries

    def load(self, ids: Iterable[int]) -> None:
        pass

    def find(self, checkpoint_id: int) -> Entry | None:
        return self._entries.get(checkpoint_id)

    def fresh(self, checkpoint_id: int) -> Entry:
        return self._entries[checkpoint_id]

    def over(self, storage: Storage) -> RecordsInMemory:
        return self

    def facts(self, interval: Interval | None, levels: Iterable[int]) -> list[Fact]:
        below = [fact for fact in self._facts if fact.id < self.head_id]
        return [fact for fact in below if interval is None or fact.interval.overlaps(interval)]

    def outputs(self, fact: Fact) -> tuple[OutputFile, ...]:
        entry = self._entries[fact.id]
        assert not isinstance(entry, SweepRecord)
        return outputs_of(entry)

    def ended(self, attempt: str) -> int | None:
        return self._ends.get(attempt)

    def all_ended(self, asked: Collection[str]) -> set[str]:
        return {*self._ends}

    @cached_property
    def _facts(self) -> list[Fact]:
        return facts_of_entries(self._entries)

    @cached_property
    def _ends(self) -> dict[str, int]:
        ends = {}
        for entry in self._entries.values():
            attempts = entry.abandoned if isinstance(entry, SweepRecord) else (attempt_of(entry),)
            ends |= dict.fromkeys(attempts, entry.id)
        return ends

    @cached_property
    def _summary(self) -> Summary:
        head = self._entries[self.head_id]
        retained = set() if isinstance(head, Tombstone) else {r.id for r in head.retained}
        commits = [e for _, e in sorted(self._entries.items()) if not isinstance(e, SweepRecord)]
        current = {fact.id for fact in last_facts(self._facts) if fact.kind == "interval"}
        dropping = {
            e.id
            for e in commits
            if (e.id not in retained if isinstance(e, Record) else e.outputs and e.id not in current)
        }
        return Summary(
            dropping=tuple(sorted(dropping)),
            unpublished=tuple(
                Unpublished(interval=i, id=n)
                for i, n in {f.interval: f.id for f in self._facts if f.kind in ("interval", "replaced")}.items()
            ),
            superseded=tuple(Superseded(id=c.id, by=by) for c in commits if (by := self._superseding(c, commits))),
            levels=tuple(sorted({paths.settled_level(interval_of(e)) for e in commits})),
            kept=tuple(kept_of(e) for n in sorted(retained) if isinstance(e := self._entries.get(n), Record)),
            latest_end_ms=max((interval_of(e).end_ms for e in commits), default=Summary().latest_end_ms),
            replaced_outputs=tuple(
                n
                for n in sorted(retained | dropping)
                if isinstance(e := self._entries.get(n), Record | Tombstone)
                and kind_of(e) == "interval"
                and n not in current
            ),
            settled=len({*self._facts}),
            forgotten=self._forgotten(commits),
        )

    @staticmethod
    def _forgotten(commits: list[Record | Tombstone]) -> tuple[Forgotten, ...]:
        last: dict[str, Forgotten] = {}
        for commit in commits:
            said = commit.content.forget if isinstance(commit, Record) else None
            for key in said.keys if said is not None else ():
                if kind_of(commit) == "forget" or key.key_hash not in last:
                    last[key.key_hash] = Forgotten(id=commit.id, key=key)
        return tuple(sorted(last.values(), key=lambda f: (f.id, f.key.key_hash)))

    @property
    def summary(self) -> Summary:
        return self._summary if self._entries else Summary()

    @staticmethod
    def _superseding(commit: Record | Tombstone, commits: list[Record | Tombstone]) -> tuple[int, ...]:
        return tuple(
            e.id
            for e in commits
            if e.id > commit.id
            and kind_of(e) in ("interval", "restore", "forget")
            and interval_of(e) == interval_of(commit)
            and not left_same_state(e, commit)
        )
