"""`cairn erase` removes a key from state, timers and files, and re-runs do not bring the key back. No test needs Spark."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal
from unittest import mock
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from typer.testing import CliRunner, Result

from cairn import group_marker, output_files, upstream, upstreams
from cairn.command.cli import app
from cairn.operations import erase_keys
from cairn.operations.erase_keys import forget as forget_keys
from cairn.operations.erase_keys import newest_content
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from cairn.testing import PipelineTester
from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.chains.judge_inputs import Chains
from state_backend.checkpoint import exchange_names
from state_backend.checkpoint.forgotten_keys import is_key
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.checkpoint.rewrite_outputs import exchange_outputs
from state_backend.checkpoint.savepoints import read_savepoint
from state_backend.checkpoint.sweep_files import sweep
from state_backend.checkpoint.trials import root_of_trial
from state_backend.formats import paths
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.types import parse_struct
from state_backend.ports.storage import Storage
from state_backend.values.errors import CorruptFile, StorageUnavailable, UsageError
from state_backend.values.inputs import Followed
from state_backend.values.operation_parameters import Erase
from state_backend.values.records import Record, RunRef, Tombstone
from state_backend.values.retention import KeepLast
from state_backend.values.zones import zone_of
from tests.support import trials
from tests.support.coordinator import Coordinator, coordinator_of
from tests.support.counting import DAYS, OUTPUT_SCHEMA, Counting, day, fresh_days, put_days
from tests.support.faulty_storage import FaultyStorage, StopHere, stop_at
from tests.support.in_process import run_here
from tests.support.key_search import files_with
from tests.support.tiers import at_tier
from tests.support.trials import SESSION, Averaging, bytes_of, run, try_days

NAME = "counting"
SECRET = "zaphod-beeblebrox"
RUN = RunRef(run_id="by-hand", clear_number=0, try_number=1)
NEEDLE = SECRET.encode()
KEY, ANN = json.dumps({"user": SECRET}), json.dumps({"user": "ann"})
OTHERS = [f"user-{n}" for n in range(40)]


def read(spark: Any, interval: Interval) -> Any:
    """Return the rows of the day, and a position that does not quote them."""
    rows, _ = trials.read(spark, interval)
    return rows, {"rows": hashlib.sha256(repr(DAYS[interval.start]).encode()).hexdigest()}


PIPELINE = trials.pipeline_of(processor=Averaging, source=read)


def _long(seed: str) -> str:
    """Return a text that compresses badly, so that SSTs are too large to lie inline."""
    return "".join(hashlib.sha512(f"{seed} {n}".encode()).hexdigest() for n in range(16))


ROWS: Any = {
    n: [(user, _long(f"{user} {n}"), n) for user in OTHERS[n % 3 :: 3]]
    + ([(SECRET, "pear", n + 1), (SECRET, f"item {n}", 7)] if n > 0 else [])
    for n in range(7)
}
days = fresh_days(ROWS)


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five days; the secret user comes on the second. Three in SSTs, then changelog segments, the last of which are inline."""
    put_days(ROWS)
    made = tmp_path_factory.mktemp("production")
    run(PIPELINE, made, range(3))
    run(PIPELINE, made, range(3, 5), mode="changelog")
    return made


@pytest.fixture
def root(production: Path, tmp_path: Path) -> Path:
    """A copy of production."""
    return Path(shutil.copytree(production, tmp_path / "state"))


def storage_of(root: Path) -> LocalStorage:
    return LocalStorage(root / NAME)


def coordinator(root: Path) -> Coordinator:
    return coordinator_of(PIPELINE, str(root))


def cairn(root: Path | str, *arguments: str, name: str = NAME) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(app, [command, "--root", str(root), "--pipeline", name, *rest])


def forget(root: Path | str, *options: str, key: str = KEY, name: str = NAME) -> dict[str, Any]:
    done = cairn(root, "erase", key, "--yes", "--json", *options, name=name)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_erase_without_a_usable_state_is_refused(tmp_path: Path) -> None:
    done = cairn(tmp_path, "erase", KEY, "--yes")
    assert done.exit_code == 2 and "has no usable state to remove a key from; run an interval first" in done.output


def test_an_erase_that_damages_the_state_commits_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = newest(root)
    monkeypatch.setattr(erase_keys, "verify_shard", lambda *_: (1, ["an entry is in another key group"]))
    done = cairn(root, "erase", KEY, "--yes")
    assert "is damaged after the removal of the key: an entry is in another key group" in done.output
    assert done.exit_code == 1 and newest(root) == before


def newest(root: Path) -> Record:
    record = coordinator(root).log().newest
    assert record is not None
    return record


def users_of(root: Path, tmp_path: Path) -> set[str]:
    """The users of the newest state, by an export of all states and timers."""
    to = tmp_path / f"export-{len(list(tmp_path.iterdir()))}"
    assert (
        CliRunner().invoke(app, ["export", "--root", str(root), "--pipeline", NAME, "--folder", str(to)]).exit_code == 0
    )
    import pyarrow.parquet as pq

    return {row["key"]["user"] for file in to.rglob("*.parquet") for row in pq.read_table(file).to_pylist()}


def test_an_export_into_the_pipeline_folder_is_refused_and_an_old_export_there_is_listed(root: Path) -> None:
    run(PIPELINE, root, [5])
    refused = cairn(root, "export", "--folder", str(root / NAME / "exported"))
    assert (
        refused.exit_code == 2
        and "lies inside the folder" in refused.stderr
        and not (root / NAME / "exported").exists()
    )
    (root / NAME / "of-an-old-release").mkdir()
    (root / NAME / "of-an-old-release" / "export.json").write_text("{}")
    places = {place["what"]: place["where"] for place in forget(root, "--dry-run")["places"]}
    assert places["export"].endswith(f"/{NAME}/of-an-old-release")


def test_a_link_out_of_the_root_is_not_followed_to_other_pipelines(root: Path, tmp_path: Path) -> None:
    """A linked savepoint or export is a place all the same, since such a folder may be a link."""
    run(PIPELINE, root, [5])
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(root / NAME, elsewhere / "twin")
    (elsewhere / "export.json").write_text("{}")
    (root / "linked").symlink_to(elsewhere)
    (elsewhere / "twin" / "round").symlink_to("/")
    places = {place["what"]: place["where"] for place in forget(root, "--dry-run")["places"]}
    assert places["export"].endswith("/linked") and "pipeline with the same key" not in places


@pytest.mark.long("seconds", runs_in="ci")
def test_no_file_has_the_key_afterwards(root: Path, tmp_path: Path) -> None:
    """With all options only the savepoint, the trial and the export, which the command names, still have it."""
    run(PIPELINE, root, [5])
    take_savepoint_of(root, root / "saved")
    try_days(PIPELINE, root, [6], trial="tried")
    assert cairn(root, "export", "--folder", str(root / "exported")).exit_code == 0
    before = files_with(root, NEEDLE)
    assert {path.split("/")[1] for path in before if path.startswith(NAME)} >= {"checkpoints", "shared", "output"}
    was = newest(root)
    said = forget(root, "--drop-checkpoints", "--rewrite-output")
    assert said["entries"] == {"$timers": 1, "total": 1, "seen_at": 1, "items": 4, "amounts": 10}
    assert said["dropped"] == [2, 3, 4, 5, 6] and said["output_files"] == 5 and said["holding"] == []
    now = newest(root)
    left = files_with(root, NEEDLE)
    assert [path for path in left if path.startswith(NAME)] == []
    assert {path.split("/")[0] for path in left} == {"saved", ".trials", "exported"}
    places = {place["what"]: place for place in said["places"]}
    assert places["savepoint"]["where"].endswith("/saved") and places["export"]["where"].endswith("/exported")
    assert places["trial"]["then"] == f"cairn trials --root {root} --pipeline {NAME} --remove tried"
    assert now.content.kind == "forget" and now.content.base_id == was.id
    assert now.content.digest != was.content.digest
    assert now.content.totals.entries == was.content.totals.entries - 17
    assert cairn(root, "check").exit_code == 0
    assert SECRET not in users_of(root, tmp_path)
    run(PIPELINE, root, [6])  # the user comes again, as a new customer
    assert SECRET in users_of(root, tmp_path)
    assert cairn(root, "check").exit_code == 0


@pytest.mark.parametrize(("said", "key"), [(r'{"key_user":"a\"b"}', r'{"user": "a\"b"}'), (f"such as {SECRET}", KEY)])
def test_erase_lists_findings_and_failing_rows_that_may_hold_the_key(root: Path, said: str, key: str) -> None:
    coordinator(root).refuse("attempt", "validation refused it", (f"state 'total': {said}",))
    coordinator(root).refuse("other", "validation refused it", ("state 'total': somebody else",))
    storage_of(root).create(f"{paths.failing('attempt', 'check')}rows.parquet", b"rows")
    places = [(p["what"], p["where"].partition(f"/{NAME}/")[2]) for p in forget(root, key=key)["places"]]
    assert [place for place in places if "validation" in place[0] or "expectation" in place[0]] == [
        ("findings of a validation", paths.refused("attempt")),
        ("rows that failed an expectation", "failing/attempt"),
        ("Data Docs of validations", ""),
    ]


def take_savepoint_of(root: Path, to: Path) -> None:
    from tests.support.savepoints import take

    log = read_log(storage_of(root))
    assert log.newest is not None
    take(str(root / NAME), log.newest, to, "native")


def clean(root: Path, tmp_path: Path) -> bool:
    """Return True if the pipeline's own folder has no byte of the key, and its files are whole."""
    left = files_with(root, NEEDLE)
    assert cairn(root, "check").exit_code == 0
    return not any(path.startswith(f"{NAME}/") for path in left)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as refused:
        act()
    return str(refused.value)


@pytest.mark.long("half a second", runs_in="ci")
def test_operations_that_could_restore_an_erased_key_are_refused(root: Path, tmp_path: Path) -> None:
    """A re-run, a range from the start, a rewind, a fork, a trial, and a savepoint of before; each says what to do instead."""
    take_savepoint_of(root, tmp_path / "saved")
    forget(root)
    before = bytes_of(root / NAME)
    again = refusal(lambda: run(PIPELINE, root, [2], reprocess="all"))
    assert "checkpoint 2, which is older, may still hold the key" in again
    assert "cairn erase --pipeline counting --on-rerun filter JSON" in again
    first = refusal(lambda: run(PIPELINE, root, [0], reprocess="all"))
    assert "rows of before 2024-01-06T00:00:00Z may bring the key back" in first
    target = refusal(lambda: rewind(coordinator(root).at, 3, run=RUN, attempt="back"))
    assert "checkpoint 3 may hold a key" in target and "Take one of 6." in target
    into = Coordinator(LocalStorage(root / "fork"), "fork")
    assert "may hold a key" in refusal(lambda: fork(storage_of(root), 3, into.at, run=RUN, attempt="fork"))
    assert "may bring the key back" in refusal(lambda: try_days(PIPELINE, root, [0, 1], trial="tried"))
    saved = read_savepoint(LocalStorage(tmp_path / "saved")).content
    begin = coordinator(root).begin_restore
    restored = refusal(lambda: begin(saved, pipeline_start_ms=saved.pipeline_start_ms))
    assert "restore it under another name, and run `cairn erase` there" in restored
    assert bytes_of(root / NAME) == before
    # What starts from the state without the key goes on: a rewind, a fork, a trial, the next interval.
    rewind(coordinator(root).at, 6, run=RUN, attempt="to the forget")
    fork(storage_of(root), 6, into.at, run=RUN, attempt="fork")
    try_days(PIPELINE, root, [5], trial="later")
    run(PIPELINE, root, [5])
    assert newest(root).content.kind == "interval"


@pytest.mark.long("half a second", runs_in="ci")
def test_the_commands_that_are_printed_forget_the_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal names the command that filters; the list of places names the one for a pipeline with the same key."""
    fork(storage_of(root), 5, Coordinator(LocalStorage(root / "twin"), "twin").at, run=RUN, attempt="fork")
    said = forget(root)
    (twin,) = [place["then"] for place in said["places"] if place["what"] == "pipeline with the same key"]
    done = CliRunner().invoke(app, [*shlex.split(twin)[1:], KEY, "--yes"])
    assert done.exit_code == 0 and done.stdout.startswith(
        f"checkpoint 2 of {day(4)} has the state of checkpoint 1 without the key\n15 entries removed"
    )
    refused = refusal(lambda: run(PIPELINE, root, [4], reprocess="all"))
    command = refused.partition("once more: ")[2].replace("JSON", shlex.quote(KEY))
    monkeypatch.setenv("CAIRN_ROOT", str(root))
    assert CliRunner().invoke(app, [*shlex.split(command)[1:], "--yes"]).exit_code == 0
    run(PIPELINE, root, [4], reprocess="all")


@pytest.mark.long("half a second", runs_in="ci")
def test_a_fork_and_a_savepoint_record_which_keys_were_erased(root: Path, tmp_path: Path) -> None:
    """Their logs begin with what was forgotten, so that an earlier savepoint can't bring the key back there either."""
    take_savepoint_of(root, tmp_path / "before")
    forget(root)
    into = Coordinator(LocalStorage(root / "fork"), "fork")
    fork(storage_of(root), 6, into.at, run=RUN, attempt="fork")
    (of_fork,) = into.log().summary.forgotten
    (of_root,) = coordinator(root).log().summary.forgotten
    assert of_fork.key == of_root.key and of_fork.id == 1
    with mock.patch("cairn.operations.savepoints.take_savepoint.run_on_shards", run_here):
        take_savepoint(SESSION, PIPELINE, str(root / NAME), newest(root), str(tmp_path / "after"))
    after, before = (read_savepoint(LocalStorage(tmp_path / name)).content for name in ("after", "before"))
    begin = coordinator(root).begin_restore
    begin(after, pipeline_start_ms=after.pipeline_start_ms)
    with pytest.raises(UsageError, match="may hold a key"):
        begin(before, pipeline_start_ms=after.pipeline_start_ms)


@pytest.mark.parametrize("mode", ["incremental", "changelog", "full"])
@pytest.mark.long("seconds", runs_in="ci")
def test_a_filtered_re_run_is_as_if_the_user_had_never_come(root: Path, tmp_path: Path, mode: Any) -> None:
    """All days are run again: state, output and digest of a pipeline that never saw the user, and no byte of the key."""
    forget(root, "--on-rerun", "filter", "--drop-checkpoints", "--rewrite-output")
    run(PIPELINE, root, range(5), reprocess="all", mode=mode)
    made = newest(root).content
    for rows in DAYS.values():
        rows[:] = [row for row in rows if row[0] != SECRET]
    run(PIPELINE, tmp_path / "never", range(5), mode=mode)
    never = newest(tmp_path / "never").content
    assert made.digest == never.digest and made.totals.entries == never.totals.entries
    assert made.totals.input_rows == never.totals.input_rows + 2 and len(made.filtered) == 1
    assert clean(root, tmp_path)


@pytest.mark.long("seconds", runs_in="ci")
def test_a_filtered_re_run_of_one_day_removes_the_key_from_an_older_base(root: Path, tmp_path: Path) -> None:
    """Day 4 again, from checkpoint 4, which holds the key: entries go, rows are left out; the same again is reproduced."""
    forget(root, "--on-rerun", "filter")
    forgotten = newest(root)
    run(PIPELINE, root, [4], reprocess="all", mode="changelog")
    again = newest(root)
    assert (again.content.base_id, again.content.digest) == (4, forgotten.content.digest)
    assert again.reproduces == forgotten.id
    assert SECRET not in users_of(root, tmp_path)
    said = forget(root, "--on-rerun", "filter", "--drop-checkpoints", "--rewrite-output")
    assert said["dropped"] == [2, 3, 4, 5] and clean(root, tmp_path)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_trial_from_before_the_erase_is_refused_even_if_re_runs_are_filtered(root: Path) -> None:
    """Its root has a log of its own, which knows of nothing that was forgotten."""
    forget(root, "--on-rerun", "filter")
    for first in (0, 3):
        said = refusal(lambda first=first: try_days(PIPELINE, root, [first], trial="tried"))  # type: ignore[misc]
        assert f"a trial from 2024-01-0{first + 1}" in said and "Begin the trial at the end of a checkpoint" in said
    run(PIPELINE, root, range(5), reprocess="all")
    try_days(PIPELINE, root, [3], trial="tried")
    own = coordinator_of(PIPELINE, root_of_trial(str(root), NAME, "tried")).log()
    assert own.newest is not None and len(own.newest.content.filtered) == 1


def test_a_dry_run_and_a_call_without_agreement_change_nothing(root: Path) -> None:
    before = bytes_of(root / NAME)
    dry = cairn(root, "erase", KEY, "--drop-checkpoints", "--rewrite-output", "--dry-run")
    assert dry.exit_code == 0
    lines = dry.stdout.splitlines()
    assert (
        lines[0]
        == "15 entries would be removed: 8 in amounts, 4 in items, 1 in seen_at, 1 in timers, 1 in total; 1 shards would be rewritten"
    )
    assert lines[1:3] == [
        "checkpoints would be dropped: 2, 3, 4, 5",
        "output files would be rewritten: 4, 4 rows of the key",
    ]
    asked = cairn(root, "erase", KEY)
    assert asked.exit_code == 2 and "Nothing was done. To agree, run the same command with --yes" in asked.stderr
    assert bytes_of(root / NAME) == before


@pytest.mark.long("seconds", runs_in="ci")
def test_a_quarantined_erase_must_be_repeated_before_the_next_interval(root: Path, tmp_path: Path) -> None:
    """The state before it is the newest then, and holds the key: it may not be gone on from, and the same call mends that."""
    forget(root)
    coordinator(root).quarantine(6, "a test says so")
    assert "checkpoint 5, which is older, may still hold the key" in refusal(lambda: run(PIPELINE, root, [5]))
    other = cairn(root, "erase", '{"user": "user-1"}', "--yes")
    assert other.exit_code == 2 and "forgot another key\nName that key too" in other.stderr
    said = forget(root, '{"user": "user-1"}')
    assert said["checkpoint"] == 7 and newest(root).content.base_id == 5
    assert not {SECRET, "user-1"} & users_of(root, tmp_path)
    run(PIPELINE, root, [5])
    assert newest(root).content.base_id == 7


def test_a_damaged_quarantined_checkpoint_may_hold_any_key_and_stops_no_erase(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(ref: Any, storage: Any, was: Any = erase_keys.needed_manifest) -> Any:
        if ref in coordinator(root).record(5).content.shards:
            raise CorruptFile("the manifest is missing")
        return was(ref, storage)

    coordinator(root).quarantine(5, "damaged")
    run(PIPELINE, root, [4])
    monkeypatch.setattr(erase_keys, "needed_manifest", damaged)
    assert forget(root, "--drop-checkpoints")["checkpoint"] == 7 and 5 not in coordinator(root).log().retained


@pytest.mark.long("half a second", runs_in="ci")
def test_a_second_call_has_nothing_to_commit(root: Path) -> None:
    first = forget(root, "--drop-checkpoints", "--rewrite-output")
    before = bytes_of(root / NAME)
    second = forget(root, "--drop-checkpoints", "--rewrite-output")
    assert (second["checkpoint"], second["dropped"]) == (first["checkpoint"], first["dropped"])
    assert bytes_of(root / NAME) == before
    other = forget(root, "--on-rerun", "filter")  # another policy is a record of its own
    assert other["checkpoint"] == first["checkpoint"] + 1
    (known,) = coordinator(root).log().summary.forgotten
    assert (known.id, known.key.on_rerun) == (other["checkpoint"], "filter")


@pytest.mark.long("half a second", runs_in="ci")
def test_the_record_says_a_hash_and_not_the_key(root: Path) -> None:
    forget(root)
    (key,) = newest(root).content.forget.keys  # type: ignore[union-attr]
    encoded = KeyCodec(parse_struct(newest(root).content.key_schema)).encode((SECRET,))
    assert is_key(key, encoded) and not is_key(key, encoded + b"x")
    assert key.key_hash == hashlib.sha256(bytes.fromhex(key.salt) + encoded).hexdigest()
    shown = cairn(root, "checkpoints")
    listed = shown.stdout.splitlines()
    assert [line.split()[4] for line in listed[1:3]] == ["forget", "interval"]
    assert "replaced by 6" in listed[2]
    assert cairn(root, "status").exit_code == 0 == shown.exit_code and SECRET not in shown.stdout


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ('{"user": 1}', "1 is no text; write it in quotes"),
        ('{"name": "u1"}', 'does not name the key\'s columns; expected {"user": string}'),
        ("u1", "is not JSON"),
    ],
)
def test_a_key_that_does_not_fit_is_refused(root: Path, key: str, says: str) -> None:
    done = cairn(root, "erase", key, "--yes")
    assert done.exit_code == 2 and says in done.stderr


def test_a_user_who_is_not_there_is_forgotten_too(root: Path) -> None:
    """Nothing is removed, and the promise for re-runs holds."""
    said = forget(root, key='{"user": "nobody"}').items()
    assert said >= {"checkpoint": 6, "entries": {}, "output_files": 0}.items()
    assert newest(root).content.digest == coordinator(root).log().whole(5).content.digest


def test_the_error_names_a_missing_output_file(root: Path) -> None:
    min(root.glob(f"{NAME}/output/20240103*/*/*")).unlink()
    done = cairn(root, "erase", KEY, "--yes", "--rewrite-output")
    assert done.exit_code == 3 and "NotFound: can't download 'output/20240103" in done.stderr


@pytest.mark.long("seconds", runs_in="ci")
def test_shards_that_a_split_left_the_key_in_are_rewritten(root: Path, tmp_path: Path) -> None:
    """After a change of the parallelism a file may lie in several shards; each of them that has it writes its own."""
    run(replace(PIPELINE, parallelism=5), root, [5])
    assert forget(root, "--on-rerun", "filter")["shards"] > 1
    # The day again, split once more from a checkpoint with the key.
    run(replace(PIPELINE, parallelism=5), root, [5], reprocess="all")
    said = forget(root, "--on-rerun", "filter", "--drop-checkpoints", "--rewrite-output")
    assert said["dropped"] == [2, 3, 4, 5, 6]
    assert clean(root, tmp_path)


@pytest.mark.long("half a second", runs_in="ci")
def test_an_erase_while_intervals_wait_for_a_re_run_requires_the_filter_policy(root: Path) -> None:
    rewind(coordinator(root).at, 2, run=RUN, attempt="back")
    refused = cairn(root, "erase", KEY, "--yes")
    assert refused.exit_code == 2 and "add --on-rerun filter" in refused.stderr
    forget(root, "--on-rerun", "filter")
    run(PIPELINE, root, range(2, 5))
    assert len(newest(root).content.filtered) == 1


class Latest(StatefulProcessor):
    """Per user: the number of rows, and an event-time timer."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "rows long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        total = (self._count.get() or (0,))[0] + len(list(rows))
        self._count.update((total,))
        self._handle.registerTimer(timerValues.getCurrentWatermarkInMs() + 86_400_000)
        yield Row(user=key[0], rows=total)


def no_source(spark: Any, interval: Any) -> Any:
    raise AssertionError("the tester never reads the source")


@pytest.mark.long("seconds", runs_in="ci")
def test_late_rows_of_the_erased_key_are_removed_and_filtered_from_a_re_run(tmp_path: Path) -> None:
    """Of event time: a late row of the user lies in a file of its own."""
    declared = Pipeline(
        name=NAME,
        start=day(0).start,
        source=no_source,
        key=["user"],
        processor=Latest,
        output_schema="user string, rows long",
        time_mode="event",
        event_time="at",
        watermark_delay=timedelta(0),
        watermark="interval",
        parallelism=2,
    )
    root = tmp_path / "state"
    tester = PipelineTester(declared, input_schema="user string, at timestamp", root=str(root), every=timedelta(days=1))

    def rows(n: int) -> list[tuple[str, datetime]]:
        now = day(n).start.replace(tzinfo=None) + timedelta(hours=6)
        return [("ann", now), (SECRET, now), (SECRET, now - timedelta(days=1)), ("ann", now - timedelta(days=1))]

    for n in (0, 1):
        made = tester.run(rows(n))
    assert sorted(row["user"] for row in made.late) == ["ann", SECRET]
    said = forget(root, "--drop-checkpoints", "--rewrite-output", "--on-rerun", "filter")
    assert said["output_files"] == 3 and said["output_rows"] == 3
    assert clean(root, tmp_path)
    kept = [row for files in coordinator_of(declared, str(root)).log().current_outputs().values() for row in files[1]]
    assert sorted((file.rows, file.late) for file in kept) == [(1, False), (1, False), (1, True)]
    for n in (0, 1):
        again = tester.run(rows(n), day(n))
    assert [row["user"] for row in again.late] == ["ann"] and again.input_rows == 4
    assert clean(root, tmp_path)


@pytest.mark.long("seconds", runs_in="ci")
def test_output_whose_record_is_a_tombstone_is_rewritten_too(tmp_path: Path) -> None:
    """Of all days but the last two only tombstones are there. A settled file that is lost later is written anew with the new files."""
    short, root = replace(PIPELINE, retention=KeepLast(2)), tmp_path / "state"
    run(short, root, range(5))
    said = forget(root, "--drop-checkpoints", "--rewrite-output")
    assert said["output_files"] == 4 and clean(root, tmp_path)
    before = coordinator(root).log().current_outputs()
    settled = root / NAME / paths.settled(day(1), 2, "interval")
    settled.unlink()
    assert cairn(root, "sweep").exit_code == 0
    assert coordinator(root).log().current_outputs() == before and settled.exists()
    assert clean(root, tmp_path)


@pytest.mark.parametrize("exchanged", [0, 1, 2, 3], ids="{} names exchanged".format)
def test_the_clean_up_completes_an_exchange_that_stopped_before_the_erase_is_dropped(
    root: Path, tmp_path: Path, exchanged: int
) -> None:
    def stop(*of: Any) -> None:
        if next(calls) == exchanged:
            raise StopHere
        exchange(*of)

    calls, exchange = count(), exchange_names._exchange
    with mock.patch.object(exchange_names, "_exchange", stop), suppress(StopHere):
        cairn(root, "erase", KEY, "--yes", "--on-rerun", "filter", "--rewrite-output")
    for n, keeps in ((5, lambda _, found: {*range(1, 6), found[-1].id}), (6, lambda _, found: {found[-1].id})):
        with mock.patch.object(KeepLast, "keep", keeps):  # at first, the checkpoint of the erase is dropped alone
            run(replace(PIPELINE, retention=KeepLast(1)), root, [n])
        sweep(storage_of(root), NAME, now_ms=4_102_444_800_000, min_age=timedelta(hours=1))
    assert len(coordinator(root).log().current_outputs()) == 7
    assert cairn(root, "check").exit_code == 0
    own = {path.split("/")[2] for path in files_with(root, NEEDLE) if path.startswith(f"{NAME}/{paths.OUTPUT}")}
    assert own == {paths.interval_name(day(n)) for n in (5, 6)}, "only later rows have the key"


@pytest.mark.long("half a second", runs_in="ci")
def test_several_keys_are_one_commit(root: Path, tmp_path: Path) -> None:
    said = forget(root, '{"user": "user-1"}', '{"user": "user-2"}')
    assert said["checkpoint"] == 6
    keys = newest(root).content.forget.keys  # type: ignore[union-attr]
    assert len(keys) == 3 and len({key.salt for key in keys}) == 1
    assert not {SECRET, "user-1", "user-2"} & users_of(root, tmp_path)


class Rows(Counting):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self._total.update((n := len([*rows]), n))
        yield Row(**{"kind" if key[0] == "seen" else "user": key[0], "n": n})


SALES = trials.pipeline_of()
SAME = trials.pipeline_of(
    name="same", source=upstream("counting"), processor=Rows, output_schema="user string, n long", order_by=[]
)
KINDS = replace(SAME, name="kinds", key=["kind"], output_schema="kind string, n long")
JOINED = replace(SAME, name="joined", source=upstreams(lambda spark, interval, up: up, up=upstream("counting")))
WITH_KEY, READERS = {day(n) for n in (1, 2)}, {"same", "kinds", "joined"}


def frame_of_files(spark: Any, reader: Any, pinned: Any, _: Any) -> LocalRows:
    storage = locate(reader.root, pinned[0].edge.pipeline).storage
    found = read_log(storage).current_outputs(pinned[0].span).values()
    tables = [pq.read_table(pa.BufferReader(storage.read(f.handle.path))) for _, files in found for f in files]
    rows = [tuple(row.values()) for table in tables for row in table.to_pylist()]
    return LocalRows(rows, parse_ddl_locally(OUTPUT_SCHEMA), zone_of("UTC"))


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[str]:
    DAYS.clear()
    DAYS.update({day(n).start: [("ann", "pear", n), *([(SECRET, "fig", n)] if n else [])] for n in range(6)})
    reading = "cairn.operations.intervals.read_upstreams"
    with mock.patch(f"{reading}._frame", frame_of_files), mock.patch(f"{reading}.register_data_sources"):
        for pipeline in (SALES, SAME, KINDS, JOINED):
            run(pipeline, tmp_path, range(3))
        yield f"file://{tmp_path}"


def erase(root: str, name: str, *options: str, key: str = KEY) -> dict[str, Any]:
    return forget(root, "--on-rerun", "filter", *options, key=key, name=name)


def stale(root: str, pipeline: str) -> set[Interval]:
    judged = Chains().judged(root, pipeline).items()
    assert all("`cairn erase` removed rows there" in verdict.why for _, verdict in judged if verdict.kind == "stale")
    return {interval for interval, verdict in judged if verdict.kind == "stale"}


def test_downstream_pipelines_are_listed_and_stale_until_they_erase_the_key_or_run_again(chain: str) -> None:
    assert not any(stale(chain, one) for one in READERS)
    run(replace(JOINED, source=trials.read), chain, [3])  # older results have read the upstream
    said = erase(chain, "counting", "--rewrite-output")["places"]
    then = {one["where"].rpartition("/")[2]: one["then"] for one in said if "reads this one" in one["what"]}
    assert then.keys() == READERS and all(stale(chain, one) == WITH_KEY for one in READERS)
    assert then["kinds"].endswith(f"cairn status --root {chain} --pipeline kinds")
    command = [*shlex.split(then["same"])[1:], KEY, "--yes", "--on-rerun", "filter"]
    assert [CliRunner().invoke(app, command).exit_code for _ in range(2)] == [0, 0]
    assert read_log(locate(chain, "same").storage).head_id == 4  # the second call had nothing to do
    erase(chain, "joined", "--rewrite-output")
    run(SALES, chain, [3])
    run(SAME, chain, [3])
    run(KINDS, chain, [1, 2], reprocess="none")
    # A function may have made rows of other keys of the key's rows.
    assert [stale(chain, one) for one in ("same", "kinds", "joined")] == [set(), set(), WITH_KEY]
    content = newest_content(locate(chain, "joined"))
    own = Followed(pipeline="joined", root=None, log="own")
    with mock.patch("state_backend.inspection.places_of_keys._newest", lambda _: replace(content, followed=(own,))):
        said = erase(chain, "joined", "--rewrite-output")["places"]
    assert f"{chain}/joined" in {one["where"] for one in said if one["what"] == "pipeline that reads this one"}


def test_a_marker_of_a_group_from_before_the_erasure_is_refused(chain: str) -> None:
    run(replace(SALES, group="board"), chain, [3])
    run(replace(SAME, group="board"), chain, [2], reprocess="all")
    marker = group_marker(chain, "board")
    assert len(output_files(chain, "counting", group=marker)) == 3
    erase(chain, "counting", "--rewrite-output")
    with pytest.raises(StorageUnavailable, match="Make a new marker"):
        output_files(chain, "counting", group=marker)


def test_a_reader_stays_stale_until_its_erase_rewrites_output_after_the_upstream_erase(chain: str) -> None:
    erase(chain, "same", "--rewrite-output")
    with mock.patch("cairn.operations.erase_keys.exchange_outputs"):
        erase(chain, "counting", "--rewrite-output")
    run(JOINED, chain, [1, 2], reprocess="all")
    assert not stale(chain, "same") | stale(chain, "joined")  # `joined` read files that will be exchanged
    erase(chain, "same", "--rewrite-output")  # `same` could read these files after it too
    erase(chain, "counting", "--rewrite-output")
    erase(chain, "same")
    assert stale(chain, "same") == stale(chain, "joined") == WITH_KEY  # the output of `same` may have the key
    erase(chain, "same", "--rewrite-output")
    assert not stale(chain, "same")
    erase(chain, "counting", "--rewrite-output", key=ANN)
    erase(chain, "same", "--rewrite-output")
    assert stale(chain, "same") == {day(0), *WITH_KEY}  # that was another key
    run(replace(SALES, retention=KeepLast(1)), chain, [3, 4, 5])
    assert isinstance(read_log(locate(chain, "counting").storage).entries[5], Tombstone)
    assert stale(chain, "same") == {day(0), *WITH_KEY} and stale(chain, "kinds")
    with mock.patch("cairn.operations.erase_keys.exchange_outputs"):
        erase(chain, "same", "--rewrite-output", key=ANN)
    assert stale(chain, "same") == {day(0), *WITH_KEY}  # stopped before its own output was exchanged
    erase(chain, "same", "--rewrite-output", key=ANN)
    assert not stale(chain, "same")


@pytest.mark.parametrize("again", [True, False], ids=["erase again", "the first call goes on"])
def test_an_interval_run_before_the_output_is_replaced_does_not_hide_the_replacement(chain: str, again: bool) -> None:
    with mock.patch("cairn.operations.erase_keys.exchange_outputs"):
        erase(chain, "counting", "--rewrite-output")
    for pipeline in (SALES, JOINED):
        run(pipeline, chain, [3])
    storage = locate(chain, "counting").storage
    erase(chain, "counting", "--rewrite-output") if again else exchange_outputs(storage, read_log(storage))
    assert stale(chain, "joined") >= WITH_KEY


def test_readers_stay_stale_until_they_erase_every_key_of_a_dropped_upstream_erase(chain: str) -> None:
    erase(chain, "counting", "--rewrite-output", ANN)
    forget(chain, "--on-rerun", "refuse", key=ANN)
    run(replace(SALES, retention=KeepLast(1)), chain, [3, 4, 5])
    erase(chain, "same", "--rewrite-output")
    assert stale(chain, "same") == {day(0), *WITH_KEY}
    erase(chain, "same", "--rewrite-output", ANN)
    assert not stale(chain, "same")


# --- killed ----------------------------------------------------------------------------------------------------------------------

WRITES = ("create", "replace", "upload", "delete")
EVERYTHING = Erase(root="", pipeline="", key=(), drop_checkpoints=True, rewrite_output=True, on_rerun="filter")


def forget_over(storage: Storage) -> None:
    """Forget the secret user as one process that sees this storage."""
    numbers, schema = count(), parse_struct(newest_content(Coordinator(storage, NAME).at).key_schema)
    forget_keys(
        Coordinator(storage, NAME).at,
        [KeyCodec(schema).encode((SECRET,))],
        EVERYTHING,
        EngineOptions(cache_dir=None),
        new_attempt=lambda: f"{uuid4()}-{next(numbers)}",
        new_salt=lambda: "5a" * 16,
    )


def calls_of_a_forget(production: Path, work: Path) -> list[tuple[str, str]]:
    counting = FaultyStorage(LocalStorage(Path(shutil.copytree(production, work)) / NAME), {})
    forget_over(counting)
    return counting.calls


def killed(production: Path, work: Path, at: int, when: Literal["before", "after"]) -> bool:
    """Kill a forget at one call, and forget again. Return True if the dead process had committed."""
    root = Path(shutil.copytree(production, work / "state"))
    with suppress(StopHere):
        forget_over(FaultyStorage(storage_of(root), stop_at(at, when)))
    state = newest(root).content
    committed = state.kind == "forget"
    assert cairn(root, "check").exit_code == 0, "what the dead process left is whole"
    outputs = read_log(storage_of(root)).outputs_near(Interval(day(0).start, day(4).end))
    assert {i for i, _ in outputs} == {*map(day, range(5))}
    forget_over(storage_of(root))
    log = read_log(storage_of(root))
    assert log.head_id == 6 and sorted(log.retained) == [1, 6]
    sweep(storage_of(root), NAME, now_ms=4_102_444_800_000, min_age=timedelta(hours=1))
    assert clean(root, work)
    return committed


def killed_at_some(production: Path, work: Path, step: int, only: Collection[str]) -> list[bool]:
    calls, ends = calls_of_a_forget(production, work / "counted"), []
    for at in [n for n, (method, _) in enumerate(calls) if method in only][::step]:
        for when in ("before", "after"):
            (place := work / f"{at}-{when}").mkdir()
            ends.append(killed(production, place, at, when))  # type: ignore[arg-type]
            shutil.rmtree(place)
    return ends


@pytest.mark.long("seconds", runs_in="ci")
def test_an_erase_killed_at_any_write_is_completed_by_the_next_call(production: Path, tmp_path: Path) -> None:
    """Every fifth or twentieth write; `python -m tests.unit.test_erase` kills at all calls. State, output and records are whole all the
    while."""
    ends = killed_at_some(production, tmp_path, at_tier(fast=20, ci=20, all=5), WRITES)
    assert {*ends} == {False, True}


def main() -> None:
    """Kill a forget at each of its calls, and print how many there were."""
    with tempfile.TemporaryDirectory() as folder:
        put_days(ROWS)
        run(PIPELINE, Path(folder, "production"), range(3))
        run(PIPELINE, Path(folder, "production"), range(3, 5), mode="changelog")
        (work := Path(folder, "work")).mkdir()
        ends = killed_at_some(Path(folder, "production"), work, 1, [*WRITES, "read", "stat", "list", "download"])
        print(f"killed {len(ends)} times: {ends.count(True)} had committed, {ends.count(False)} had not")


if __name__ == "__main__":
    main()
