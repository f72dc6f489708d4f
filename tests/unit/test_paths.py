"""Every path that is built can be read back, and sorts as what it names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_backend.formats import paths
from state_backend.values.errors import UsageError
from state_backend.values.handles import check_path
from state_backend.values.intervals import Interval
from tests.support.checkpoints import day

ids = st.integers(1, 10**20 - 1)


@given(ids)
def test_a_record_path_names_its_id(checkpoint_id: int) -> None:
    assert paths.record_id(paths.record(checkpoint_id)) == checkpoint_id
    check_path(paths.record(checkpoint_id))


@given(st.lists(ids, min_size=2, unique=True))
def test_record_paths_sort_by_id(some: list[int]) -> None:
    """F51: ids are zero-padded, so that lexical order is numeric order."""
    assert [paths.record_id(p) for p in sorted(map(paths.record, some))] == sorted(some)


@pytest.mark.parametrize(
    "path", ["", "checkpoints/1.json", "checkpoints/x.json", "shared/a/0-0-0.sst", "checkpoints/" + "1" * 21 + ".json"]
)
def test_a_path_that_is_no_record_path_has_no_checkpoint_id(path: str) -> None:
    assert paths.record_id(path) is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (paths.record(1), "record"),
        (paths.HEAD, "head"),
        (paths.settled(day(1), 1, "replaced"), "settled"),
        (paths.attempt_end("a"), "attempt-end"),
        (paths.shared("a", 0, 0, 0, "sst"), "state"),
        (paths.shared("a", 0, 0, 0, "log"), "state"),
        (paths.shared("a", 0, 0, 0, "manifest"), "state"),
        (paths.prepared("a"), "prepared"),
        (paths.refused("a"), "refused"),
        (f"{paths.failing('a', 'check')}x.parquet", "failing"),
        (paths.output(day(1), "a", 0, 0), "output"),
        (paths.output(day(1), "a", 0, 0, late=True), "output"),
        (paths.published(day(1), 1), "published"),
        (paths.validated(1, "full"), "validated"),
        (paths.quarantine(1), "quarantine"),
        (paths.names(paths.QUARANTINE), "names"),
        (paths.CLOCK, "clock"),
        (paths.lease(1, 900, "0" * 36), "lease"),
    ],
)
def test_every_storage_path_has_a_kind_and_stray_files_have_none(path: str, kind: str) -> None:
    assert paths.kind_of(path) == kind
    folder, slash, name = path.rpartition("/")
    for stray in (f"{path}.bak", f"{path}/{name}", f"{folder}{slash}.nfs0001", f"{folder}{slash}.{name}", f"x/{path}"):
        assert paths.kind_of(stray) is None, stray
    for stray in (".DS_Store", "checkpoints/1.json", "quarantine/checkpoints/" + name, "settled/" + name, "README", ""):
        assert paths.kind_of(stray) is None, stray
        assert paths.marked_id(stray) is None, stray


def test_every_path_of_an_attempt_contains_its_attempt_id() -> None:
    made = [
        paths.shared("a-1", 3, 7, 2, "sst"),
        paths.prepared("a-1"),
        f"{paths.failing('a-1', 'check')}x.parquet",
        paths.output(day(1), "a-1", 3, 7),
        paths.output(day(1), "a-1", 3, 7, late=True),
    ]
    assert {paths.attempt_of(p) for p in made} == {"a-1"}
    assert len(set(made)) == 5
    assert [check_path(p) for p in made] == made
    assert paths.attempt_of(paths.record(1)) is None
    assert paths.attempt_of(paths.published(day(1), 1)) is None


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(0, 10**12), st.integers(1, 10**9))
def test_interval_names_are_unique_and_sort_by_start(a: int, a_ms: int, b: int, b_ms: int) -> None:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    one, other = (
        Interval(epoch + timedelta(milliseconds=s), epoch + timedelta(milliseconds=s + n))
        for s, n in ((a, a_ms), (b, b_ms))
    )
    assert (paths.interval_name(one) == paths.interval_name(other)) == (one == other)
    assert (paths.interval_name(one) < paths.interval_name(other)) == (one < other)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a" * 101, "a b", "a..b", "ä", "a\n"])
def test_names_that_cannot_stand_in_a_path_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="can't be a name"):
        paths.check_name(name)


@pytest.mark.parametrize("name", ["a", "flights_2013", "A.b-c", "9"])
def test_plain_names_are_accepted(name: str) -> None:
    assert paths.check_name(name) == name
