"""Wrong arguments, and damaged or foreign files, are refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import StructType
from typer.testing import CliRunner

from cairn.command import prepare_spark as preparing
from cairn.command.cli import app
from cairn.command.key_history import show_history
from cairn.operations.export_state import export_state
from cairn.operations.intervals.read_upstreams import read_upstreams
from cairn.range_sources import range_source
from cairn.sinks.bigquery import _with_fields
from cairn.spark.session import _refuse_artifacts
from cairn.upstream_sources import upstream, upstreams
from state_backend.chains.judge_inputs import Chains
from state_backend.chains.pin_inputs import Reader
from state_backend.checkpoint import exchange_names, trials
from state_backend.checkpoint.fresh_listing import note_names
from state_backend.checkpoint.log import read_log
from state_backend.checkpoint.newest_state import checkpoint_named
from state_backend.checkpoint.storage_clock import storage_now_ms
from state_backend.formats import paths
from state_backend.formats.record_codec import decode, encode
from state_backend.formats.rocksdb_manifest import mentions
from state_backend.inspection.publication_group import end_within_group, group_of
from state_backend.values.errors import (
    AlreadyExists,
    CairnError,
    CorruptFile,
    CorruptRecord,
    PreconditionFailed,
    Rerun,
    SourceError,
    StorageUnavailable,
    UsageError,
)
from state_backend.values.marks import Head
from state_backend.values.records import Permissions, RewrittenOutput
from state_backend.values.schedule import Every
from tests.support.checkpoints import Folder, day, trial_of
from tests.support.faulty_storage import FaultyStorage

AT = datetime(2024, 1, 1, tzinfo=UTC)
SPARK: Any = None
FREE: Any = SimpleNamespace(dataSource=SimpleNamespace(register=print))
READER = Reader(root="memory://none", pipeline="p", interval=day(1), schedule=Every(86_400_000), start=AT)


def struct(field: str) -> Any:
    return SimpleNamespace(name="s", field_type="RECORD", fields=[SimpleNamespace(name=field, field_type="STRING")])


def ranged(answer: Any) -> Any:
    return range_source(lambda spark, intervals: answer).read(SPARK, [day(1)])


def rows(**types: str) -> Any:
    schema = StructType()
    for name, kind in types.items():
        schema.add(name, kind)
    return SimpleNamespace(schema=schema)


ARGUMENTS: list[tuple[Callable[[], Any], type[CairnError], str]] = [
    (lambda: Rerun(first=day(2).start, last=AT), UsageError, "the first interval to run, 2024-01-02T.* is later than"),
    (lambda: upstream("sales", back=-1), UsageError, r"upstream\('sales'\): back is -1; give the number of intervals"),
    (lambda: upstream("sales", mapping="some"), UsageError, "mapping='some' is not one of within, all"),  # type: ignore[arg-type]
    (lambda: upstream("sales", state="price", late=True), UsageError, "leave out late and mapping"),
    (lambda: upstream("sales")(SPARK, day(1)), UsageError, r"a source of upstream\(\) is read by Cairn"),
    (lambda: upstreams(max), UsageError, r"give each source a name, as in sales=upstream\('sales'\)"),  # type: ignore[arg-type]
    (lambda: ranged(None), SourceError, "must return a DataFrame and a list with the position of each interval"),
    (lambda: ranged((rows(a="integer"), [])), SourceError, "returned 0 positions for 1 intervals"),
    (lambda: ranged((rows(a="integer"), [{}])), SourceError, "need the column cairn_interval, .*; found no such column"),
    (lambda: ranged((rows(cairn_interval="date"), [{}])), SourceError, "need the column cairn_interval, .*; found date"),
    (lambda: Permissions.from_texts({"allow_gaps": True}), UsageError, "allow_gaps is not a permission; expected some"),
    (lambda: checkpoint_named(Folder(days=1).coordinator.log(), "newest"), UsageError, "'newest' is neither 'latest', nor"),
    (lambda: show_history("k", None, "p", whole=False, as_json=False), UsageError, "a savepoint has no history"),
    (lambda: mentions(b"\x01" * 40, "MANIFEST-5", b"k"), CorruptFile, "MANIFEST-5: not a MANIFEST that can be followed: "),
    (lambda: decode(b'{"cairn": "head", "format": 0}', "HEAD.json", Head), CorruptRecord, "its format is 0, expected"),
    (lambda: decode(b'{"cairn": "head", "format": 1, "release": 5}', "HEAD.json", Head), CorruptRecord, "its release is 5"),
    (lambda: _with_fields(struct("Name"), struct("name")), UsageError, "a field 'Name' in the table and 'name' in the output"),
    (lambda: export_state(SimpleNamespace(url="memory://p"), "memory://to", jobs=0), UsageError, "jobs must be at least 1, not 0"),  # type: ignore[arg-type]
    (lambda: read_upstreams(FREE, upstream("p", back=1), READER, None, Chains()), UsageError, "p.*: a pipeline that reads its own output needs output_schema"),
    (_refuse_artifacts, UsageError, "(?s)which would see its artifacts too\nTo give each session Python workers of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ARGUMENTS, ids=[message for _, _, message in ARGUMENTS])
def test_a_wrong_argument_is_refused(call: Callable[[], Any], kind: type[CairnError], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["publish"], "--pipeline is missing: name the pipeline, or a group with --group"),
        (["publish", "--group", "g", "--check"], "--group takes no intervals, --skip, --check or --rebuild"),
        (["check", "--pipeline", "p", "--checksums"], "--checksums goes with --fast"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(tmp_path: Path, command: list[str], says: str) -> None:
    told = CliRunner().invoke(app, [command[0], "--root", str(tmp_path), *command[1:]], env={"CAIRN_PIPELINE": None})
    assert told.exit_code == 2 and says in told.output, told.output


@pytest.mark.parametrize(
    ("name", "instead", "kind", "says"),
    [
        ("archive_path", lambda: None, UsageError, "PySpark is not installed here"),
        (
            "folder_for_new",
            lambda path: Path("/none/such").read_bytes(),
            UsageError,
            r"can't write .*\nThe command needs 220 MiB",
        ),
        (
            "server_command",
            lambda *_: [sys.executable, "-c", "print('no port')"],
            StorageUnavailable,
            "start:\nno port",
        ),
        ("__name__", "json.tool", StorageUnavailable, "(?s)failed on the Spark server:\n.*No such file or"),
        ("__name__", "this", StorageUnavailable, "(?s)the Spark server wrote no archive of its classes:\n.*Zen of"),
        ("_PATIENCE_S", 0.01, StorageUnavailable, "Spark took more than 0 s:\n"),
    ],
)
def test_an_archive_of_spark_that_can_not_be_made_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, instead: Any, kind: type[CairnError], says: str
) -> None:
    monkeypatch.setattr(preparing, "require_java", print)
    monkeypatch.setattr(preparing, "archive_path", lambda: tmp_path / "classes.jsa")
    monkeypatch.setattr(preparing, "server_command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(preparing, "answers", lambda _: name != "server_command")
    monkeypatch.setattr(preparing, name, instead)
    with pytest.raises(kind, match=says):
        preparing.prepare_spark()


def test_a_group_that_no_pipeline_names_and_a_pipeline_that_a_group_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no pipeline below .* is in a group 'sales'"):
        group_of(str(tmp_path), "sales")
    marker = '{"heads": {"orders": 1}, "until": "2024-01-01T00:00:00Z"}'
    with pytest.raises(UsageError, match="pipeline 'sales' is not in the group; its members are orders"):
        end_within_group(marker, str(tmp_path), "sales", Folder(days=1).coordinator.log(), None)


@pytest.mark.parametrize(
    ("swap", "ask", "message"),
    [
        (
            lambda folder: (paths.prepared("a2"), paths.prepared("a3")),
            lambda folder: folder.coordinator.load_prepared("a3"),
            "belongs to another attempt, a2\nRun the interval again",
        ),
        (
            lambda folder: folder.coordinator.quarantine(1, "bad") or (paths.quarantine(1), paths.quarantine(9)),
            lambda folder: read_log(folder.storage),
            "contains the mark of another checkpoint, 1",
        ),
    ],
)
def test_a_file_that_was_copied_to_another_name_is_refused(
    swap: Callable[[Folder], tuple[str, str]], ask: Callable[[Folder], Any], message: str
) -> None:
    folder = Folder(days=1)
    folder.prepare(day(2), "a2")
    original, copy = swap(folder)
    folder.storage.create(copy, folder.storage.read(original))
    with pytest.raises(CorruptRecord, match=message):
        ask(folder)


class Contended(FaultyStorage):
    """Others write each file first."""

    loses: tuple[str, ...] = ("create", "replace")

    def create(self, path: str, data: bytes) -> Any:
        if "create" in self.loses:
            raise AlreadyExists(path)
        return super().create(path, data)

    def replace(self, path: str, data: bytes, *, generation: int) -> Any:
        if "replace" in self.loses:
            raise PreconditionFailed(path)
        return super().replace(path, data, generation=generation)


def release(folder: Folder, contended: Contended, *loses: str) -> None:
    folder.coordinator.quarantine(1, "bad")
    contended.loses, contended.lists_what_is_there = loses, True
    folder.over(contended).release(1)


def renew(folder: Folder, contended: Contended, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(day(1), ends_ms=0)
    folder.storage.create(paths.trial(trial.name), encode(trial))
    monkeypatch.setattr(trials, "open_storage", lambda url: contended)
    trials.renew_trial("/trials", trial)


def exchange(folder: Folder, contended: Contended, _: Any) -> None:
    folder.run(day(2), "a2")  # Only the next commit settles this one.
    _, files = folder.coordinator.log().current_outputs()[day(1)]
    replaces = tuple(file.handle.path for file in files)
    rewritten = RewrittenOutput(id=1, interval=day(1), outputs=(), replaces=replaces)
    commit: Any = SimpleNamespace(forget=SimpleNamespace(rewritten=[rewritten]))
    list(exchange_names.exchange(contended, commit))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda folder, busy, _: storage_now_ms(busy), "other processes wrote .* times in a row; try again"),
        (lambda folder, busy, _: note_names(busy, paths.LEASES, ["x"]), "rewrote settled/names/.* times in a row"),
        (lambda folder, busy, _: release(folder, busy, "replace"), f"rewrote {paths.quarantine(1)} 10 times in a row"),
        (lambda folder, busy, _: release(folder, busy, "create"), "other commits were faster .* times in a row; try again"),
        (renew, "rewrote .*trial.* times in a row; try again"),
        (exchange, "settled/.*: other processes rewrote the file 20 times meanwhile; repeat cairn erase"),
    ],
    ids=["clock", "names", "mark of a release", "record of a release", "trial", "settled file"],
)  # fmt: skip
def test_a_process_that_always_comes_second_gives_up(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Folder, Contended, Any], None], says: str
) -> None:
    folder = Folder(days=1)
    with pytest.raises(StorageUnavailable, match=says):
        call(folder, Contended(folder.storage, {}, late=True), monkeypatch)
