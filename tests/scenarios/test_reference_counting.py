"""Flink's worked example of shared files (SCENARIOS.md, the table): a real coordinator, two checkpoints retained.

Here nobody stores a count. What a file's count would be is how many retained checkpoints name it, which is what these tests
ask after every step; registering and subsuming are one write, so that there is no moment in between to look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.checkpoint.coordinator import Coordinator
from state_backend.formats import paths
from state_backend.shard import manifest as manifests
from state_backend.values.handles import Handle
from state_backend.values.records import Permissions, Prepared, Record
from state_backend.values.retention import KeepLast, RetentionPolicy
from tests.support.checkpoints import PIPELINE, content, day, manifest, run, start_ms

# Per checkpoint: the SSTs of its store, by the table's labels, and those deleted once the oldest is subsumed. CP5 is the
# extrapolation. The sixth SST is born and merged between two checkpoints and never uploaded.
TABLE = [
    (["1", "2"], {"1": 1, "2": 1}, set()),
    (["1", "2", "3", "4"], {"1": 2, "2": 2, "3": 1, "4": 1}, set()),
    (["123", "4", "5"], {"1": 1, "2": 1, "3": 1, "123": 1, "4": 2, "5": 1}, set()),
    (["123", "456"], {"123": 2, "4": 1, "5": 1, "456": 1}, {"1", "2", "3"}),
    (["123", "456"], {"123": 2, "456": 2}, {"4", "5"}),
]


class Example:
    """One shard's checkpoints. ``files`` maps labels to what was uploaded for them."""

    def __init__(self, policy: RetentionPolicy) -> None:
        self.storage = MemoryStorage()
        self.coordinator = Coordinator(self.storage, PIPELINE, policy=policy)
        self.files: dict[str, Handle] = {}
        self.uploads = 0

    def prepare(self, n: int, attempt: str, labels: Sequence[str], *, try_number: int = 1) -> None:
        """Uploads what is not there yet, as ``attempt``, and prepares a checkpoint of the n-th day that names all."""
        begun = self.coordinator.begin(
            day(n),
            permissions=Permissions(),
            pipeline_start_ms=start_ms(),
            attempt=attempt,
        )
        for label in labels:
            if label not in self.files:
                path = paths.shared(attempt, 0, 0, self.uploads, "sst")
                self.files[label] = self.storage.create(path, f"bytes of {label}".encode())
                self.uploads += 1
        made = manifests.write_manifests([manifest([self.files[label] for label in labels])], attempt, self.storage)
        prepared = content(
            day(n),
            attempt,
            begun.base.id if begun.base else None,
            run=run(f"run-{n}", try_number=try_number),
            shards=made,
        )
        self.coordinator.prepare(Prepared(h0=begun.h0, content=prepared))

    def commit(self, attempt: str) -> set[str]:
        """Commits, publishes and cleans up; labels of the SSTs that are gone now."""
        before = self.there()
        self.coordinator.commit(attempt)
        assert self.there() == before, "a commit deletes nothing"
        self.coordinator.publish(None)
        self.coordinator.clean_up()
        return before - self.there()

    def there(self) -> set[str]:
        on_storage = {i.path for i in self.storage.list(paths.SHARED) if i.path.endswith(".sst")}
        labels = {label for label, handle in self.files.items() if handle.path in on_storage}
        assert len(labels) == len(on_storage), "an SST that nobody uploaded"
        return labels

    def counts(self) -> dict[str, int]:
        """How many retained checkpoints name each SST."""
        labels = {handle.path: label for label, handle in self.files.items()}
        retained = self.coordinator.log().completed()
        return dict(Counter(labels[path] for record in retained for path in self.named(record)))

    def named(self, record: Record) -> list[str]:
        return [h.path for ref in record.content.shards for h in manifests.manifest_of(ref, self.storage).handles]


@pytest.fixture(params=["manifests inline", "manifests in files"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "manifests in files":
        monkeypatch.setattr(manifests, "INLINE_MANIFESTS_BYTES", 0)


@pytest.mark.usefixtures("layout")
def test_the_table() -> None:
    """F16, F26, F28, F34, F40: after every checkpoint its counts, its deletions, and what is retained, as in the table."""
    example = Example(KeepLast(2))
    live: set[str] = set()
    deletes = 0
    for n, (labels, counts, deleted) in enumerate(TABLE, 1):
        new = {*labels} - live
        uploads = example.uploads
        example.prepare(n, f"cp{n}", labels)
        assert example.uploads - uploads == len(new)
        assert example.commit(f"cp{n}") == deleted
        live = (live | new) - deleted
        deletes += len(deleted)
        assert example.counts() == counts
        assert example.there() == live == {*counts}
        assert [r.id for r in example.coordinator.log().completed()] == [n - 1, n][n == 1 :]
        if n == 4:
            assert (example.uploads, deletes, len(live)) == (7, 3, 4)
    assert example.files["123"].path != example.files["456"].path
    assert (example.uploads, deletes) == (7, 5)


class PinFirst:
    """The last two, and checkpoint 1 for ever."""

    def keep(self, checkpoints: Sequence[Record]) -> frozenset[int]:
        return frozenset(c.id for c in checkpoints if c.id == 1) | KeepLast(2).keep(checkpoints)


@pytest.mark.usefixtures("layout")
def test_the_table_with_the_first_checkpoint_pinned() -> None:
    """F16, F29: where retained ids are no suffix of the log, "last used by" would keep 3 and 4 as long as the pin; counts
    delete them with the last checkpoint that names them."""
    example = Example(PinFirst())
    deleted = []
    for n, (labels, _, _) in enumerate(TABLE, 1):
        example.prepare(n, f"cp{n}", labels)
        deleted.append(example.commit(f"cp{n}"))
    assert deleted == [set(), set(), set(), {"3"}, {"4", "5"}]
    assert example.counts() == {"1": 1, "2": 1, "123": 2, "456": 2}
    assert [r.id for r in example.coordinator.log().completed()] == [1, 4, 5]


@pytest.mark.usefixtures("layout")
def test_a_file_that_two_attempts_uploaded_is_no_duplicate() -> None:
    """The race rule, F36, FLINK-29913: two tries begin before either is committed and each uploads the new SST. Both are
    committed: two objects, two references, none deleted; each goes with the last checkpoint that names it."""
    example = Example(KeepLast(2))
    example.prepare(1, "cp1", ["1"])
    example.commit("cp1")
    for attempt, try_number in (("b", 1), ("c", 2)):
        example.prepare(2, attempt, ["1", f"2 of {attempt}"], try_number=try_number)
    assert example.commit("b") == set()
    assert example.commit("c") == set()
    assert example.counts() == {"1": 2, "2 of b": 1, "2 of c": 1}
    example.prepare(3, "cp4", ["1", "2 of c"])
    assert example.commit("cp4") == {"2 of b"}
    assert example.counts() == {"1": 2, "2 of c": 2}


@pytest.mark.usefixtures("layout")
def test_an_attempt_that_fails_costs_no_count() -> None:
    """F25, F38: an attempt that is never committed leaves its SST to the sweeper and takes nothing with it; the retry goes on
    from what the base names, with an SST of its own."""
    example = Example(KeepLast(2))
    example.prepare(1, "cp1", ["1"])
    example.commit("cp1")
    example.prepare(2, "dead", ["1", "2 of dead"])
    example.prepare(2, "retry", ["1", "2"], try_number=2)
    assert example.commit("retry") == set()
    assert example.counts() == {"1": 2, "2": 1}
    assert example.there() == {"1", "2", "2 of dead"}
