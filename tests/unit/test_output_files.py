"""`output_files` of a pipeline that does not exist, and between times without a zone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC

import pytest

from cairn import output_files
from state_backend.adapters.memory_storage import forget_memory
from state_backend.adapters.open_storage import open_storage
from state_backend.values.errors import UsageError
from tests.support.checkpoints import PIPELINE, Folder, day

ROOT = "memory://output-files"


@pytest.fixture(autouse=True)
def folder() -> Iterator[Folder]:
    made = Folder(open_storage(f"{ROOT}/{PIPELINE}"), days=3)
    yield made
    forget_memory(ROOT)


def test_a_pipeline_that_does_not_exist_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=f"no pipeline at .*\n.*Did you mean '{PIPELINE}'"):
        output_files(ROOT, f"{PIPELINE}s")


def test_only_times_with_a_zone_limit_the_intervals() -> None:
    assert len(output_files(ROOT, PIPELINE)) == 3
    assert len(output_files(ROOT, PIPELINE, start=day(2).start)) == 2
    assert len(output_files(ROOT, PIPELINE, start=day(2).start, end=day(2).end)) == 1
    naive = day(2).start.astimezone(UTC).replace(tzinfo=None)
    for limits in ({"start": naive}, {"end": naive}):
        with pytest.raises(UsageError, match="has no time zone"):
            output_files(ROOT, PIPELINE, **limits)  # type: ignore[arg-type]
