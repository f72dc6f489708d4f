"""`cairn key --history`: the checkpoints that changed a key, and what is known of those that count no longer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from typer.testing import CliRunner, Result

from cairn.command.cli import app
from cairn.pipeline import Interval
from cairn.testing import PipelineTester
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.rewind import fork, rewind
from state_backend.formats import paths
from state_backend.inspection import history_of_key
from state_backend.inspection.describe import plain
from state_backend.inspection.key_versions import KeyVersions
from state_backend.values.retention import AnyOf, KeepLast, KeepPerDay
from tests.support.accounts import DAYS, SCHEMA, accounts, at, read_only
from tests.support.checkpoints import DAY, START, day
from tests.support.coordinator import coordinator_of
from tests.unit import test_replay_cases as cases


def history(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["key", *arguments, "--history", "--root", f"file://{folder}", "--pipeline", "accounts"]
    )


def steps(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(history(folder, *arguments, "--json").stdout)["checkpoints"]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    made = cases.History(folder)
    for n in DAYS:
        made.run(n)
    return folder


def test_a_checkpoint_is_listed_if_it_changed_the_key(root: Path) -> None:
    assert [step["checkpoint"] for step in steps(root, "ann")] == [1, 2, 4]
    assert [step["checkpoint"] for step in steps(root, "bob")] == [1, 3, 5]
    assert [step["checkpoint"] for step in steps(root, "carl")] == [1, 3]
    nobody = history(root, "dora")
    assert nobody.exit_code == 1
    assert nobody.stdout == 'key {"account": "dora"} of \'accounts\': 0 of 5 retained checkpoints changed it\n'


def test_a_checkpoint_shows_fields_timers_rows_code_and_run(root: Path) -> None:
    result = history(root, "ann")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == 'key {"account": "ann"} of \'accounts\': 3 of 5 retained checkpoints changed it'
    second = lines.index(next(line for line in lines if line.startswith("checkpoint 2 ")))
    assert lines[second].startswith("checkpoint 2 [2024-01-02T00:00:00Z, 2024-01-03T00:00:00Z), code ")
    assert ", attempt " in lines[second] and ", run tester__" in lines[second] and lines[second].endswith(" try 1")
    assert lines[second + 1 : second + 8] == [
        "  ~ balance: total 5 -> 16, due_ms 1704326400000 -> 1704412800000",
        "  + amounts [1]: amount=1",
        "  + amounts [2]: amount=10",
        '  + days day="2024-01-02": rows=2',
        "  timer set: 2024-01-05T00:00:00Z",
        "  timer deleted: 2024-01-04T00:00:00Z",
        "  1 row emitted",
    ]


def test_a_due_timer_is_listed_as_fired_and_not_as_deleted(root: Path) -> None:
    carl = steps(root, "carl")[-1]
    assert (carl["timers_fired"], carl["timers_deleted"]) == (["2024-01-04T00:00:00Z"], [])
    assert carl["output"] == [{"account": "carl", "kind": "idle", "balance": 1, "rows": 0}]
    row = '    {"account": "carl", "kind": "idle", "balance": 1, "rows": 0}'
    assert row in history(root, "carl", "--all").stdout.splitlines()


def test_key_groups_with_an_equal_digest_are_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = history_of_key._Steps._entries_of

    def counting(self: Any, checkpoint_id: int) -> Any:
        read.append(checkpoint_id)
        return whole(self, checkpoint_id)

    monkeypatch.setattr(history_of_key._Steps, "_entries_of", counting)
    assert [step["checkpoint"] for step in steps(root, "carl")] == [1, 3]
    # 1 against nothing, 3 against 2: each state is read once, and no other.
    assert sorted(read) == [1, 2, 3]


def test_many_checkpoints_are_read_part_by_part(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {key: steps(root, key, "--all") for key in ("ann", "bob", "carl")}
    most, whole = set[int](), history_of_key._Steps.steps
    monkeypatch.setattr(history_of_key._Steps, "steps", lambda *args: (most.add(len(args[1])), whole(*args))[1])
    monkeypatch.setattr(history_of_key, "_AT_ONCE", 1)
    assert ({key: steps(root, key, "--all") for key in wanted}, most) == (wanted, {1})


def late(history: cases.History) -> None:
    history.run(1, [("ann", 1, at(1)), ("bob", 1, at(1))])
    history.run(2, [("ann", 1, at(3))])
    history.run(3, [("ann", 1, at(3)), ("ann", 4, at(4))])
    history.run(4, [("ann", 1, at(1)), ("ann", 5, at(5))])


def dropped(history: cases.History) -> None:
    history.deploy(retention=KeepLast(2))
    for n in (1, 2, 3, 4):
        history.run(n, [("ann", n, at(n))])


def quarantined(history: cases.History) -> None:
    history.run(1)
    history.run(2)
    coordinator_of(history.pipeline, history.root).quarantine(2, "by hand")


def restored(history: cases.History) -> None:
    for n in (1, 2, 3):
        history.run(n, [("ann", n, at(n))])
    rewind(coordinator_of(history.pipeline, history.root).at, 2, run=cases.RUN, attempt="back")
    history.run(3, [("ann", 5, at(3))])


def forked(history: cases.History) -> None:
    other = replace(history.pipeline, name="other")
    PipelineTester(other, input_schema=SCHEMA, root=history.root).run(DAYS[1], day(1))
    source = open_storage(f"{history.root}/other")
    fork(source, 1, coordinator_of(history.pipeline, history.root).at, run=cases.RUN, attempt="fork")
    history.run(2)


def dropped_between(history: cases.History) -> None:
    """Of two intervals a day, only the second is kept."""
    half = DAY / 2
    history.deploy(schedule=half, retention=AnyOf((KeepLast(1), KeepPerDay(9))))
    for n in range(4):
        interval = Interval(START + n * half, START + (n + 1) * half)
        history.tester.run([("ann", 1, interval.start)], interval)


TABLE: dict[str, tuple[Callable[[cases.History], None], dict[str, Any], list[dict[str, Any]]]] = {
    "late rows": (
        late,
        {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(hours=1)},
        [{"checkpoint": 1}, {"checkpoint": 2}, {"checkpoint": 3, "late": 0}, {"checkpoint": 4, "late": 1}],
    ),
    "a replaced result and its stale successor": (
        cases.rerun,
        {},
        [
            {"checkpoint": 1, "status": "replaced by 3"},
            {"checkpoint": 2, "status": "stale by 3", "since": 1},
            {"checkpoint": 3, "status": "completed", "since": None, "unknown": None},
        ],
    ),
    "dropped checkpoints": (
        dropped,
        {},
        [
            {"checkpoint": 3, "since": None, "unknown": "the base, checkpoint 2, is dropped"},
            {"checkpoint": 4, "since": 3, "unknown": None},
        ],
    ),
    "a restored checkpoint": (
        restored,
        {},
        [
            {"checkpoint": 1},
            {"checkpoint": 2, "status": "replaced by 4"},
            {"checkpoint": 3, "status": "replaced by 5"},
            {"checkpoint": 4, "since": None, "unknown": "the state was restored from checkpoint 2"},
            {"checkpoint": 5, "since": 4, "changed": ["balance"]},
        ],
    ),
    "a forked pipeline": (
        forked,
        {},
        [
            {"checkpoint": 1, "unknown": "the state was restored from another pipeline"},
            {"checkpoint": 2, "since": 1, "unknown": None, "changed": ["balance"]},
        ],
    ),
    "a dropped checkpoint between two": (
        dropped_between,
        {},
        [
            {"checkpoint": 2, "unknown": "the base, checkpoint 1, is dropped"},
            {"checkpoint": 4, "since": 2, "dropped_between": 1, "changed": ["balance"]},
        ],
    ),
    "another schema": (
        cases.new_schema,
        {},
        [{"checkpoint": 1}, {"checkpoint": 2, "since": 1, "unknown": None, "changed": ["balance"]}],
    ),
    "other shards": (cases.rescaled, {}, [{"checkpoint": 1}, {"checkpoint": 2, "since": 1, "changed": ["balance"]}]),
    "a quarantined checkpoint": (
        quarantined,
        {},
        [{"checkpoint": 1, "status": "completed"}, {"checkpoint": 2, "status": "quarantined"}],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_each_step_shows_status_and_unknown_base(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, settings, wanted = TABLE[case]
    act(cases.History(tmp_path, **settings))
    found = steps(tmp_path, "ann")
    with monkeypatch.context() as only_rocksdb:
        only_rocksdb.setattr(KeyVersions, "files_of", lambda *_: None)
        assert steps(tmp_path, "ann") == found
    assert len(found) == len(wanted)
    for step, expected in zip(found, wanted, strict=True):
        for name, value in expected.items():
            match name:
                case "late":
                    assert len(step["late"]) == value
                case "changed":
                    assert [c["state"] for c in step["changes"] if c["change"] == "changed"] == value
                case _:
                    assert step[name] == value, (name, step)
    printed = history(tmp_path, "ann")
    assert printed.exit_code == 0
    for step in found:
        assert step["unknown"] is None or f"  the state before is unknown: {step['unknown']}" in printed.stdout
        between = f"  changes since checkpoint {step['since']}, with those of 1 dropped checkpoint:"
        assert (between in printed.stdout) == (step["dropped_between"] == 1) or not step["dropped_between"]


@pytest.mark.long("half a second", runs_in="ci")
def test_option_all_lists_the_output_of_dropped_checkpoints(tmp_path: Path) -> None:
    dropped(cases.History(tmp_path))
    found = steps(tmp_path, "ann", "--all")
    assert [(s["checkpoint"], s["status"], len(s["output"])) for s in found] == [
        (1, "dropped", 1),
        (2, "dropped", 1),
        (3, "completed", 1),
        (4, "completed", 1),
    ]
    assert (
        "  the state before is unknown: the checkpoint is dropped: its rows are known, its state is not"
        in history(tmp_path, "ann", "--all").stdout.splitlines()
    )


def test_an_output_without_key_columns_is_reported(tmp_path: Path) -> None:
    cases.History(tmp_path, processor=cases.Anonymous, output_schema="balance long").run(1)
    assert steps(tmp_path, "ann")[0]["output"] is None
    assert "  the output has no key columns, so rows of the key can't be told apart" in history(tmp_path, "ann").stdout


@pytest.mark.long("half a second", runs_in="ci")
def test_nothing_is_written_below_the_root_or_to_a_log(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with read_only(root), caplog.at_level(logging.DEBUG):
        assert history(root, "ann", "--all").exit_code == 0
    assert "ann" not in caplog.text


def test_a_pipeline_without_checkpoints_is_refused(tmp_path: Path) -> None:
    assert "no pipeline at" in history(tmp_path, "ann").stderr
    (tmp_path / "accounts" / "shared").mkdir(parents=True)
    (tmp_path / "accounts" / "shared" / "left").touch()
    assert "pipeline 'accounts' has no checkpoint yet; run an interval first" in history(tmp_path, "ann").stderr


def test_the_error_for_a_damaged_record_names_its_file(tmp_path: Path) -> None:
    cases.rerun(cases.History(tmp_path))
    (tmp_path / "accounts" / paths.record(1)).write_bytes(b"{}")
    assert f"{paths.record(1)}: " in history(tmp_path, "ann").stderr


def test_the_error_for_a_missing_output_file_names_it(tmp_path: Path) -> None:
    cases.History(tmp_path).run(1)
    (file,) = (tmp_path / "accounts" / paths.OUTPUT).rglob("*.parquet")
    file.unlink()
    assert f"{file.name} of file://{tmp_path}/accounts can't be read: " in history(tmp_path, "ann").stderr


INSTANT, WALL = datetime(2024, 7, 1, 0, 30, tzinfo=UTC), datetime(2024, 7, 1, 2, 30)
ZONED, NAIVE = "2024-07-01T00:30:00+00:00", "2024-07-01T02:30:00"
# Type, value, and how it is printed. The commands that print changes write a map as an object.
TIMES: list[tuple[str, Any, Any]] = [
    ("timestamp", INSTANT, ZONED),
    ("timestamp_ntz", WALL, NAIVE),
    ("struct<i: timestamp, w: timestamp_ntz>", (INSTANT, WALL), {"i": ZONED, "w": NAIVE}),
    ("array<struct<i: timestamp, w: timestamp_ntz>>", [(INSTANT, WALL), None], [{"i": ZONED, "w": NAIVE}, None]),
    ("map<timestamp, array<timestamp_ntz>>", {INSTANT: [WALL]}, {ZONED: [NAIVE]}),
    ("map<timestamp_ntz, struct<i: timestamp>>", {WALL: (INSTANT,)}, {NAIVE: {"i": ZONED}}),
    ("map<struct<i: timestamp, w: timestamp_ntz>, timestamp>", {(INSTANT, WALL): None}, {f"{[ZONED, NAIVE]}": None}),
    ("timestamp", None, None),
]
TIMES_SCHEMA = ", ".join(f"c{n} {data_type}" for n, (data_type, _, _) in enumerate(TIMES))
TIMES_KEY = "i timestamp, w timestamp_ntz, p struct<i: timestamp, w: timestamp_ntz>, d decimal(5,2), f float"


class KeepsTimes(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._handle = handle
        self._value = handle.getValueState("value", TIMES_SCHEMA)
        self._list = handle.getListState("list", TIMES_SCHEMA)
        self._map = handle.getMapState("map", "i timestamp, w timestamp_ntz", TIMES_SCHEMA)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        times = tuple(value for _, value, _ in TIMES)
        self._value.update(times)
        self._list.appendValue(times)
        self._map.updateValue((INSTANT, WALL), times)
        self._handle.registerTimer(round(INSTANT.timestamp() * 1000))
        assert (self._value.get()[0], self._value.get()[1]) == (INSTANT.replace(tzinfo=None), WALL)
        yield from ()


def test_an_instant_is_printed_with_its_zone_and_wall_time_without(tmp_path: Path) -> None:
    """In states of all kinds, in keys and timers, and by `get`, `history`, `diff` and the entries of a test alike."""
    pipeline = accounts(processor=KeepsTimes(), key=["i", "w", "p", "d", "f"], output_schema="n long", order_by=["i"])
    tester = PipelineTester(pipeline, input_schema=TIMES_KEY, root=f"file://{tmp_path}")
    tester.run([], day(1))
    tester.run([(INSTANT, WALL, (INSTANT, WALL), Decimal("1.5"), 0.1)], day(2))
    key = {"i": ZONED, "w": NAIVE, "p": {"i": ZONED, "w": NAIVE}, "d": "1.50", "f": 0.10000000149011612}
    value = {f"c{n}": printed for n, (_, _, printed) in enumerate(TIMES)}
    rest: dict[str, dict[str, Any]] = {"value": {}, "list": {"pos": 0}, "map": {"user_key": {"i": ZONED, "w": NAIVE}}}
    added = [{"state": s, "change": "added", "key": key, **place, "after": value} for s, place in rest.items()]

    def run(*command: str) -> Any:
        result = CliRunner().invoke(
            app, [*command, "--root", f"file://{tmp_path}", "--pipeline", "accounts", "--json"], catch_exceptions=False
        )
        assert result.exit_code == 0
        return json.loads(result.stdout)

    written = json.dumps({**key, "d": 1.5, "f": 0.1})
    told = run("key", written, "--history")
    assert (told["key"], [step["changes"] for step in told["checkpoints"]]) == (key, [added])
    assert told["checkpoints"][0]["timers_set"] == ["2024-07-01T00:30:00Z"]
    changes = run("diff", "1", "2")["changes"]
    assert [c for c in changes if c["state"] != "$timers"] == added
    assert [c["key"] for c in changes if c["state"] == "$timers"] == [key]
    assert f'i="{ZONED}", w="{NAIVE}"' in history(tmp_path, written).stdout
    found = run("key", written)
    maps = [f"c{n}" for n, (data_type, _, _) in enumerate(TIMES) if data_type.startswith("map")]
    assert found["key"] == key
    assert found["states"].pop("$timers") == [{"expires_at": "2024-07-01T00:30:00Z"}]
    for state, place in rest.items():
        (entry,) = found["states"][state]
        assert {**entry, "value": _without(entry["value"], maps)} == {**place, "value": _without(value, maps)}
    with_zones = {"i": INSTANT, "w": WALL, "p": {"i": INSTANT, "w": WALL}, "d": Decimal("1.5"), "f": 0.1}
    (kept,) = tester.replay(with_zones, day(2), rows=[tuple(with_zones.values())]).state["value"]
    assert plain(kept) == value


def _without(value: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: of for name, of in value.items() if name not in names}
