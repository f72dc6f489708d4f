"""What validation leaves in the log: refusals that a commit sees, marks that retention respects, and what a refusal costs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cairn.operations.validation.validate_checkpoint import carry_out_validation
from cairn.testing import PipelineTester
from state_backend.checkpoint.quarantine_consequences import plan_consequences
from state_backend.checkpoint.sweep_files import sweep
from state_backend.formats import paths, record_codec
from state_backend.inspection.verify import verify_pipeline
from state_backend.values.errors import CorruptRecord, Rerun, ValidationRefused
from state_backend.values.marks import Refused, Validated
from state_backend.values.operation_parameters import Validate
from state_backend.values.retention import KeepLast
from tests.support.checkpoints import PIPELINE, Folder, day
from tests.support.counting import INPUT_SCHEMA, counting
from tests.support.real_shards import RealPipeline

_LATER_MS = 10_000_000_000_000


def days(folder: Folder, first: int, last: int) -> None:
    for n in range(first, last + 1):
        folder.run(day(n), f"a{n}")


def test_a_refused_attempt_is_never_committed() -> None:
    """Whoever tries: the mark lies beside what was prepared. A new attempt of the interval is not concerned."""
    folder = Folder()
    folder.prepare(day(1), "bad")
    folder.coordinator.refuse("bad", "validation refused it", ("total: -3",))
    folder.coordinator.refuse("bad", "again", ())  # the first one stays
    for _ in range(2):
        with pytest.raises(ValidationRefused, match="validation refused it: total: -3"):
            folder.coordinator.commit("bad")
    assert folder.coordinator.log().head_id == 0
    assert folder.run(day(1), "good").id == 1


def test_an_attempt_that_is_committed_already_is_beyond_refusal() -> None:
    folder = Folder(days=1)
    folder.coordinator.refuse("a1", "too late", ())
    assert folder.coordinator.commit("a1").outcome == "already"


def test_a_gate_validates_the_checkpoint_of_a_kept_result_even_if_retention_dropped_it(tmp_path: Path) -> None:
    tester = PipelineTester(counting(retention=KeepLast(1)), input_schema=INPUT_SCHEMA, root=f"file://{tmp_path}")
    attempts = [tester.run([("ann", "fig", n)]).record.content.attempt for n in range(4)]
    place: Any = SimpleNamespace(load=lambda _: tester.pipeline, say=lambda _: None, connect=pytest.fail, conf={})
    request = Validate(code="m:P", root=f"file://{tmp_path}", fast=True)
    found = [carry_out_validation(replace(request, attempt=attempt), place) for attempt in attempts]
    assert [(one["success"], one["checkpoint"], one["files"] > 0) for one in found[::3]] == [
        (True, 1, False),
        (True, 4, True),
    ]
    assert [*(tmp_path / "counting").glob("validated/*4-fast.json")]


def test_a_damaged_refusal_stops_the_commit() -> None:
    folder = Folder()
    folder.prepare(day(1), "a1")
    folder.storage.create(paths.refused("a1"), b"{}")
    with pytest.raises(CorruptRecord):
        folder.coordinator.commit("a1")


def test_the_newest_validated_checkpoint_is_kept() -> None:
    """Of each mode one, beside what the policy keeps; it is let go when a newer one is validated, or when it is quarantined."""
    folder = Folder(policy=KeepLast(1))
    days(folder, 1, 2)
    folder.coordinator.mark_validated(2, "full")
    folder.coordinator.mark_validated(2, "full")
    days(folder, 3, 4)
    assert set(folder.coordinator.log().retained) == {2, 4}
    folder.coordinator.mark_validated(4, "fast")
    days(folder, 5, 6)
    assert set(folder.coordinator.log().retained) == {2, 4, 6}
    folder.coordinator.mark_validated(6, "full")
    days(folder, 7, 7)
    assert set(folder.coordinator.log().retained) == {4, 6, 7}
    folder.coordinator.mark_validated(7, "full")
    folder.coordinator.quarantine(7, "found later")
    folder.run(day(7), "again")
    assert set(folder.coordinator.log().retained) == {4, 6, 7, 8}  # 7 is held in quarantine
    folder.coordinator.drop_quarantined(7)
    folder.run(day(8), "next")
    assert set(folder.coordinator.log().retained) == {4, 6, 9}


def test_marks_of_dropped_checkpoints_and_refusals_are_swept(tmp_path: Path) -> None:
    """Swept when they are old, verified until then: neither is taken for a file that is not ours."""
    pipeline = RealPipeline(tmp_path, policy=KeepLast(1))
    for n in (1, 2):
        pipeline.run(n, f"a{n}", {"a": n})
        pipeline.coordinator.mark_validated(n, "fast")
        pipeline.coordinator.clean_up()
    pipeline.run(3, "a3", {"a": 3})
    pipeline.prepare(4, "bad", {"a": 4})
    pipeline.coordinator.refuse("bad", "why", ("a",))
    assert verify_pipeline(pipeline.storage).success
    assert set(pipeline.coordinator.log().retained) == {2, 3}
    swept = sweep(pipeline.storage, PIPELINE, now_ms=_LATER_MS, min_age=timedelta(days=1)).plan
    gone = {f.path for f in swept.delete}
    assert paths.validated(1, "fast") in gone and paths.validated(2, "fast") not in gone
    assert {paths.refused("bad"), paths.prepared("bad")} <= gone and swept.unknown == ()


def test_validation_marks_and_refusals_are_read_back_as_written() -> None:
    mark = Validated(id=7, mode="full")
    assert record_codec.decode(record_codec.encode(mark), "p", Validated) == mark
    assert paths.validated_id(paths.validated(7, "full")) == (7, "full")
    for other in ("validated/7-full.json", "validated/00000000000000000007-slow.json", paths.quarantine(7)):
        assert paths.validated_id(other) is None
    refused = Refused(attempt="a", reason="r", findings=("f",))
    assert record_codec.decode(record_codec.encode(refused), "p", Refused) == refused
    assert paths.attempt_of(paths.refused("a")) == "a"


def test_verification_reports_a_validation_mark_that_belongs_to_another_checkpoint(tmp_path: Path) -> None:
    pipeline = RealPipeline(tmp_path)
    pipeline.run(1, "a1", {"a": 1})
    pipeline.storage.create(paths.validated(1, "full"), record_codec.encode(Validated(id=2, mode="full")))
    pipeline.storage.create(paths.validated(9, "full"), record_codec.encode(Validated(id=9, mode="full")))
    found = verify_pipeline(pipeline.storage).findings
    assert any("belongs to" in f for f in found) and any("ends at 1" in f for f in found)


def test_a_quarantine_affects_the_output_of_all_descendants_not_yet_replaced() -> None:
    """The output of the refused checkpoint and of all that descends from it, but not what a re-run has replaced since."""
    folder = Folder()
    days(folder, 1, 4)
    folder.coordinator.quarantine(2, "refused")
    found = plan_consequences(folder.coordinator.log(), 2)
    assert found.published == ((day(2), 2), (day(3), 3), (day(4), 4))
    assert found.rerun == Rerun(first=day(2).start, last=day(4).start)
    folder.run(day(2), "again")  # from checkpoint 1
    found = plan_consequences(folder.coordinator.log(), 2)
    assert found.published == ((day(3), 3), (day(4), 4)) and found.rerun == Rerun(first=day(3).start, last=day(4).start)
    assert plan_consequences(folder.coordinator.log(), 4).published == ((day(4), 4),)
    for n in (3, 4):
        folder.run(day(n), f"again-{n}")
    # All output is replaced, and only the interval of the refused checkpoint is left to run.
    found = plan_consequences(folder.coordinator.log(), 2)
    assert (found.published, found.rerun) == ((), Rerun(first=day(2).start, last=day(2).start))
