"""A checkpoint replaced by an equal one with fewer files: what is rewritten, what is inherited, who may not. Without Spark."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.operations.savepoints import take_savepoint
from cairn.operations.savepoints.take_savepoint import check_destination, consolidate_checkpoint
from cairn.shard_jobs.consolidate import ConsolidationJob
from state_backend.adapters.rocks import EngineOptions
from state_backend.checkpoint.choose_base import plan_base
from state_backend.checkpoint.location import Location
from state_backend.checkpoint.prepare_content import ShardAck
from state_backend.formats import paths
from state_backend.shard.manifest import manifest_of
from state_backend.values.errors import CheckpointDropped, CorruptFile, Fenced, StateUnusable, UsageError
from state_backend.values.records import Permissions, Record
from state_backend.values.retention import KeepLast
from tests.support.bare_pipeline import bare_pipeline
from tests.support.checkpoints import PIPELINE, day, start_ms
from tests.support.coordinator import Coordinator
from tests.support.in_process import run_here
from tests.support.real_shards import MAX_PARALLELISM, PARALLELISM, RealPipeline
from tests.support.savepoints import findings

pytestmark = pytest.mark.long("five seconds: long histories", runs_in="ci")
SPARK: Any = None
ENGINE = EngineOptions(cache_dir=None)
COUNTING = bare_pipeline(name=PIPELINE, parallelism=PARALLELISM, max_parallelism=MAX_PARALLELISM, engine=ENGINE)
# Long, and of no pattern: what is left of a shard is more than what travels inline.
KEYS = [hashlib.sha512(str(n).encode()).hexdigest() for n in range(600)]


@pytest.fixture(autouse=True)
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """Tasks run in this process; then, before the commit, what the test put in here."""
    then: list[Callable[[], object]] = []

    finish = ConsolidationJob.finish

    def finished(job: ConsolidationJob, at: Location, h0: int, acks: list[ShardAck]) -> None:
        finish(job, at, h0, acks)
        for act in then:
            act()

    monkeypatch.setattr(take_savepoint, "run_on_shards", partial(run_here, first_task=50))
    monkeypatch.setattr(ConsolidationJob, "finish", finished)
    yield then


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    roots = {}
    for inline in (False, True):
        made = RealPipeline(tmp_path_factory.mktemp("original"), inline=inline)
        for n in range(1, 7):
            made.run(n, f"a{n}", {key: n for key in KEYS})
        roots[inline] = made.root
    return roots


@pytest.fixture
def pipeline(originals: dict[bool, Path], tmp_path: Path, inline: bool) -> RealPipeline:
    """Six days, each of which rewrites every key."""
    return RealPipeline(Path(shutil.copytree(originals[inline], tmp_path / "root")), inline=inline)


@pytest.fixture
def inline() -> bool:
    return False


def consolidate(pipeline: RealPipeline, which: Any = "latest", **changes: Any) -> Record:
    record = pipeline.coordinator.record(which)
    return consolidate_checkpoint(SPARK, replace(COUNTING, **changes), str(pipeline.root), record)


def next_base(pipeline: RealPipeline, n: int) -> int | None:
    log = pipeline.coordinator.log()
    base = plan_base(log, PIPELINE, day(n), Permissions(), start_ms())
    return base.id if base is not None else None


@pytest.mark.parametrize("inline", [False, True])
def test_a_consolidation_reduces_files_and_bytes_and_is_the_next_base(pipeline: RealPipeline, tmp_path: Path) -> None:
    """Six files per shard become one; digest, entries and time are those of the base; the next day shares the new files."""
    before = pipeline.coordinator.record("latest")
    made = consolidate(pipeline)
    assert (made.id, made.reproduces, made.content.kind, made.content.base_id) == (7, 6, "consolidate", 6)
    assert (made.content.digest, made.content.time, made.content.interval) == (
        before.content.digest,
        before.content.time,
        before.content.interval,
    )
    totals = made.content.totals
    assert before.content.totals.state_files == 6 * PARALLELISM
    assert (totals.state_files, totals.entries) == (PARALLELISM, len(KEYS))
    assert totals.state_bytes < before.content.totals.state_bytes / 3
    assert (totals.input_rows, totals.changed_bytes, totals.uploaded_files) == (0, 0, PARALLELISM)
    assert findings(pipeline.root / PIPELINE, made.content, tmp_path) == []

    assert next_base(pipeline, 7) == 7
    pipeline.run(7, "a7", {KEYS[0]: 7})
    after = pipeline.coordinator.record("latest")
    assert after.content.base_id == 7
    mine, theirs = (
        {h.path for ref in r.content.shards for h in manifest_of(ref, pipeline.storage).handles} for r in (after, made)
    )
    assert theirs < mine and len(mine) == PARALLELISM + 1


def test_the_replaced_checkpoint_stays_until_the_next_commit(pipeline: RealPipeline) -> None:
    """An interval that started from it may be under way, and commits; from then on it is not even one of the last ten."""
    waiting = pipeline.prepare(7, "waiting", {KEYS[0]: 7})
    consolidate(pipeline)
    assert waiting.content.base_id == 6
    assert {*pipeline.coordinator.log().retained} == {*range(1, 8)}
    assert pipeline.coordinator.commit("waiting").outcome == "committed"
    assert {*pipeline.coordinator.log().retained} == {1, 2, 3, 4, 5, 7, 8}
    pipeline.coordinator.clean_up()
    # The interval that started from the old files has them still, and only them.
    head = pipeline.coordinator.record(8)
    own = [h for ref in head.content.shards for h in manifest_of(ref, pipeline.storage).handles]
    assert len(own) == 6 * PARALLELISM + 1 and all(pipeline.storage.stat(h.path) for h in own)


def test_a_consolidated_stale_checkpoint_stays_stale_and_is_not_consolidated_twice(tmp_path: Path) -> None:
    pipeline = RealPipeline(tmp_path / "root", policy=KeepLast(3))
    for n, values in ((1, 1), (2, 2), (3, 3)):
        pipeline.run(n, f"a{n}", {key: values for key in KEYS})
    pipeline.run(2, "again", {KEYS[0]: 99})
    assert {r.id: r.stale_by for r in pipeline.coordinator.log().retained.values()} == {2: None, 3: 4, 4: None}
    made = consolidate(pipeline, 3)
    assert pipeline.coordinator.log().retained[made.id].stale_by == 4
    # A shard of one file that deletes nothing has nothing to rewrite: then there is no commit.
    assert consolidate(pipeline, made.id) == made
    assert pipeline.coordinator.log().head_id == made.id


def test_a_repeated_consolidation_returns_the_existing_checkpoint(pipeline: RealPipeline) -> None:
    made = consolidate(pipeline, 6)
    assert consolidate(pipeline, 6).id == made.id == pipeline.coordinator.log().head_id


def test_refused_or_damaged_attempts_do_not_stop_a_consolidation(pipeline: RealPipeline) -> None:
    """A refused attempt, and one that can't be read."""
    pipeline.prepare(7, "wrong", {KEYS[0]: 7})
    pipeline.coordinator.refuse("wrong", "validation refused it", ("a total is negative",))
    pipeline.storage.create(paths.prepared("damaged"), b"{")
    assert consolidate(pipeline).id == 7


def test_a_damaged_older_checkpoint_stops_the_clean_up_but_not_the_consolidation(tmp_path: Path) -> None:
    pipeline = RealPipeline(tmp_path / "root")
    for n in range(1, 4):
        pipeline.run(n, f"a{n}", {key: n for key in KEYS})
    pipeline.prepare(4, "a4", {key: 4 for key in KEYS})
    Coordinator(pipeline.storage, PIPELINE, policy=KeepLast(2)).commit("a4")
    (damaged, *_) = (ref.manifest for ref in pipeline.coordinator.record(3).content.shards)
    assert damaged is not None
    (pipeline.root / PIPELINE / damaged.path).write_bytes(b"{")
    assert consolidate(pipeline, 4).id == 5
    assert isinstance(pipeline.coordinator.log().entries[1], Record)


def test_the_error_for_a_checkpoint_dropped_meanwhile_lists_the_usable_checkpoints(
    pipeline: RealPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dropped_first(spark: Any, job: ConsolidationJob) -> list[ShardAck]:
        tight = RealPipeline(pipeline.root, policy=KeepLast(1))
        tight.run(7, "a7", {key: 7 for key in KEYS})
        return run_here(spark, job, first_task=50)

    monkeypatch.setattr(take_savepoint, "run_on_shards", dropped_first)
    with pytest.raises(CheckpointDropped, match=r"checkpoint 5, .* is no longer retained: .*\nUsable checkpoints: 7 "):
        consolidate(pipeline, 5)


def test_a_quarantined_checkpoint_is_refused_before_anything_is_rewritten(
    pipeline: RealPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewritten(spark: Any, job: ConsolidationJob) -> list[ShardAck]:
        raise AssertionError("rewritten")

    monkeypatch.setattr(take_savepoint, "run_on_shards", rewritten)
    pipeline.coordinator.quarantine(6, "a total is negative")
    with pytest.raises(StateUnusable, match=r"checkpoint 6 .* is quarantined.*a total is negative"):
        consolidate(pipeline, 6)


def test_a_checkpoint_that_a_rerun_replaced_does_not_come_back(pipeline: RealPipeline) -> None:
    pipeline.run(6, "again", {KEYS[0]: 99})
    with pytest.raises(UsageError, match=r"checkpoint 6 .* a re-run of .* replaced it"):
        consolidate(pipeline, 6)
    assert next_base(pipeline, 7) == 7


def test_a_rerun_meanwhile_fences_consolidation(pipeline: RealPipeline, meanwhile: list[Callable[[], object]]) -> None:
    meanwhile.append(lambda: pipeline.run(6, "again", {KEYS[0]: 99}))
    files = {i.path for i in pipeline.storage.list("shared/")}
    with pytest.raises(Fenced):
        consolidate(pipeline, 6)
    assert next_base(pipeline, 7) == 7
    new = {i.path for i in pipeline.storage.list("shared/")} - files
    assert new and all(path.startswith("shared/again/") for path in new)


@pytest.mark.parametrize("what", ["total", "key group"])
def test_a_digest_that_does_not_match_the_files_is_refused(pipeline: RealPipeline, what: str) -> None:
    record = pipeline.coordinator.record("latest")
    content = record.content
    if what == "total":
        content = replace(content, digest=content.digest ^ 1)
    else:
        (first, *rest) = [manifest_of(ref, pipeline.storage) for ref in content.shards]
        state, *states = first.key_group_states
        wrong = replace(first, key_group_states=(replace(state, digest=state.digest ^ 1), *states))
        refs = [replace(ref, manifest=None, inline=m) for ref, m in zip(content.shards, [wrong, *rest], strict=True)]
        content = replace(content, shards=tuple(refs), digest=(content.digest + wrong.digest - first.digest) % 2**64)
    with pytest.raises(CorruptFile, match="checkpoint 6"):
        consolidate_checkpoint(SPARK, COUNTING, str(pipeline.root), replace(record, content=content))
    assert pipeline.coordinator.log().head_id == 6


@pytest.mark.parametrize("inside", ["", "/", "/savepoints/1"])
def test_a_savepoint_inside_the_pipelines_own_folder_is_refused(pipeline: RealPipeline, inside: str) -> None:
    root = str(pipeline.root / PIPELINE)
    with pytest.raises(UsageError, match="lies inside the folder"):
        check_destination(root, root + inside, "native")
    check_destination(root, f"{root}-savepoints", "native")
