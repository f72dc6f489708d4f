"""What the pages in Airflow's UI show, as values: sizes, lateness, health, history, lineage, trends, detail, and the templates over them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cairn_ui import data_docs as docs
from cairn_ui import lineage_graph, pipeline_overview, trends
from cairn_ui import pipelines_of_dags as found
from cairn_ui import render_template as pages
from cairn_ui.checkpoint_actions import Action, actions_of
from cairn_ui.log_pages import ids_of_page, ids_of_run
from cairn_ui.next_steps import after_error
from cairn_ui.phases import phases_of
from cairn_ui.pipeline_overview import FromAirflow
from cairn_ui.pipelines_of_dags import PipelineRef
from cairn_ui.read_logs import Look, NotAnswered, Reader, Reading
from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.formats import paths
from state_backend.inspection.describe import describe_log, origin_of
from state_backend.ports.storage import Storage
from state_backend.values import human_units as words
from state_backend.values.airflow_commands import backfill_command, repair_command
from state_backend.values.errors import Rerun, StaleStateError, StorageUnavailable
from tests.support.checkpoints import day, record
from tests.support.shown_pipelines import ShownFolder, eventful, plan, run_id, steady

NOW = datetime(2024, 1, 10, 0, 30, tzinfo=UTC)
RIDES = PipelineRef(name="rides", root="memory://ui", dag_id="rides", code="m:RIDES", restore_dags=("rides_restore",))


def read(storage: Storage, ref: PipelineRef = RIDES) -> Reading:
    look = Reader(lambda _: storage).look(ref)
    assert look.problem is None and look.reading is not None
    return look.reading


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    folder = MemoryStorage("memory://ui/rides")
    eventful(folder)
    yield folder


@pytest.fixture(scope="module")
def rides(storage: Storage) -> Reading:
    return read(storage)


def test_a_size_is_told_in_the_unit_that_fits() -> None:
    said = {None: "–", 0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 10_200: "10 KiB", 1024**2 - 1: "1.0 MiB"}
    said |= {3 << 30: "3.0 GiB"}
    assert {count: words.size(count) for count in said} == said


def test_a_span_is_told_in_the_unit_that_fits() -> None:
    said = {None: "–", 0.0: "0 ms", 0.42: "420 ms", 3.21: "3.2 s", 59.96: "1 min", 61: "1 min 1 s", 3600: "1 h"}
    said |= {7500: "2 h 5 min", 86_400 * 3 + 4 * 3600 + 59: "3 d 4 h", -5: "−5.0 s"}
    assert {seconds: words.span(seconds) for seconds in said} == said


# --- which pipelines ---------------------------------------------------------------------------------------------------------------


def operator(task_id: str, fields: str, **values: Any) -> dict[str, Any]:
    return {"__type": "operator", "__var": {"task_id": task_id, "template_fields": fields.split(), **values}}


def a_dag(root: str = "file:///state", name: str = "rides") -> dict[str, Any]:
    where = {"root": root, "code": "m:RIDES"}
    tasks = [
        operator("process", "code root pipeline mode permissions", pipeline=name, **where),
        operator(
            "checkpoint",
            "pipeline root attempt sink_of storage_conn_id",
            pipeline=name,
            root=root,
            storage_conn_id="google",
        ),
        operator("validate", "code root checkpoint attempt savepoint docs", **where),
        operator("savepoint", "code root checkpoint folder", **where),
        operator("mail", "to subject"),
    ]
    return {"dag": {"tasks": tasks}}


def test_pipelines_are_found_by_the_operators_of_dags() -> None:
    restore = {
        "dag": {"tasks": [operator("r", "pipeline root target fork_as", pipeline="rides", root="file:///state/")]}
    }
    (ref,) = found.all_pipelines([("rides", a_dag()), ("back", restore), ("other", {})], "")
    assert ref == PipelineRef(
        name="rides",
        root="file:///state",
        dag_id="rides",
        storage_conn_id="google",
        code="m:RIDES",
        process="process",
        savepoint="savepoint",
        restore_dags=("back",),
    )


def test_the_pipelines_setting_adds_folders_and_fills_in_templated_roots() -> None:
    setting = "file:///state/rides google@gs://bucket/state/clicks/ file:///other/rides"
    mine, other, clicks = (
        ref
        for ref in sorted(
            found.all_pipelines([("rides", a_dag())], setting), key=lambda r: (r.name != "rides", r.dag_id is None)
        )
    )
    assert mine.dag_id == "rides" and other.dag_id is None and other.folder == "file:///other/rides"
    assert (clicks.name, clicks.root, clicks.storage_conn_id) == ("clicks", "gs://bucket/state", "google")
    (filled,) = found.all_pipelines([("rides", a_dag(root="{{ var.value.root }}"))], "gs://bucket/rides")
    assert filled.folder == "gs://bucket/rides" and filled.dag_id == "rides" and filled.unreadable is None
    (open_,) = found.all_pipelines([("rides", a_dag(root="{{ var.value.root }}"))], "")
    assert "CAIRN_UI_PIPELINES" in str(open_.unreadable)
    assert Reader(lambda _: pytest.fail("opened")).look(open_).problem == open_.unreadable


def test_pipeline_keys_are_unique_and_safe_in_a_url() -> None:
    refs = [PipelineRef(name=n, root=r, dag_id=d) for n in ("a", "<b>/") for r in ("x", "y") for d in ("d", None)]
    assert len({ref.key for ref in refs}) == 8
    assert all(ref.key.isascii() and not set(ref.key) & set("<>/ ?#&") for ref in refs)


def overview_of(reading: Reading, airflow: FromAirflow | None = None) -> pipeline_overview.Overview:
    facts = pipeline_overview.facts_of(Look(reading=reading), airflow or FromAirflow(), NOW)
    return pipeline_overview.overview(RIDES, Look(reading=reading), facts, (), None, {}, {})


# --- the first look ------------------------------------------------------------------------------------------------------------------


@pytest.mark.long("half a second", runs_in="ci")
def test_the_list_and_the_overview_agree(rides: Reading) -> None:
    """Day 9 is quarantined: the list counted its checkpoint and said "on time", the overview said "late"."""
    airflow = FromAirflow(schedule=plan())
    looked = pipeline_overview.overview_row(RIDES, Look(reading=rides), airflow, None, None, NOW)
    shown = overview_of(rides, airflow)
    assert looked.health == shown.health and "late by 30 min" in [one.text for one in shown.health]
    assert shown.last is not None and shown.last.id == 13


def test_health_tells_the_worst_first(rides: Reading) -> None:
    assert [c.text for c in overview_of(rides).health] == [
        "next interval can't start",
        "1 quarantined",
        "1 stale",
        "1 not validated",
    ]
    folder = MemoryStorage("memory://ui/clicks")
    steady(folder, 3)
    assert [c.text for c in overview_of(read(folder)).health] == ["no problems"]


def test_the_overview_shows_why_the_next_interval_cant_start_and_the_repair_command(rides: Reading) -> None:
    savepoint = {"checkpoint": 3, "savepoint": "file:///s/3"}
    facts = pipeline_overview.facts_of(Look(reading=rides), FromAirflow(schedule=plan()), NOW)
    written = {13: round(NOW.timestamp() * 1000) - 90_000}
    shown = pipeline_overview.overview(RIDES, Look(reading=rides), facts, (), savepoint, written, {14: "d.html"})
    assert "its base, checkpoint 12, is stale" in shown.status["problem"].partition("\n")[0]
    assert shown.status["command"].startswith(f"cairn heal --root {RIDES.root} --pipeline rides --to 2024-")
    assert [(p.title, p.checkpoint, p.note) for p in shown.pointers] == [
        ("Latest completed", 13, "committed 1 min 30 s ago"),
        ("Latest validated", 11, "fast and full validation"),
        ("Last restored", 13, "went back to checkpoint 11"),
        ("Last savepoint", 3, "file:///s/3"),
    ]
    assert [one["id"] for one in shown.status["quarantined"]] == [14] and shown.docs == {14: "d.html"}
    assert shown.broken is not None and shown.affected == 1  # the output of the quarantined day 9
    assert dict(shown.counts) == {"completed": 8, "stale": 1, "replaced": 4, "quarantined": 1}


def test_pipelines_with_problems_are_listed_first(rides: Reading) -> None:
    folder = MemoryStorage("memory://ui/clicks")
    steady(folder, 3)
    looks = {"well": Look(reading=read(folder)), "bad": Look(reading=rides), "away": Look(reading=None, problem="away")}
    looks["a-template"] = Look(reading=None, problem="a template")
    refs = {name: PipelineRef(name=name, root="{{ x }}" if name == "a-template" else "memory://ui") for name in looks}
    rows = [
        pipeline_overview.overview_row(refs[name], look, FromAirflow(), None, None, NOW) for name, look in looks.items()
    ]
    assert [row.ref.name for row in pipeline_overview.worst_first(rows)] == ["away", "bad", "a-template", "well"]


def test_a_healthy_next_interval_names_its_base() -> None:
    folder = MemoryStorage("memory://ui/clicks")
    steady(folder, 3)
    shown = overview_of(read(folder)).status
    assert (shown["base"], shown["problem"], shown["command"]) == (3, None, None)


def test_the_history_is_paged_by_descending_checkpoint_ids() -> None:
    said: dict[Any, list[int]] = {(0, None): [], (3, None): [3, 2, 1], (9, None): [9, 8, 7, 6], (9, 6): [5, 4, 3, 2]}
    said |= {(9, 2): [1], (9, 1): [], (9, 99): [9, 8, 7, 6]}
    assert {asked: [*ids_of_page(*asked, 4).ids] for asked in said} == said


def test_the_history_shows_state_run_phases_and_origin_of_each_checkpoint(rides: Reading) -> None:
    page = ids_of_page(rides.log.head_id, None, 6)
    assert (page.newer, page.older) == (None, 9) and ids_of_page(rides.log.head_id, 9, 6).newer == 15
    rows = describe_log(rides.log, page.ids, {14: 1000}, now_ms=3000)
    assert [row["id"] for row in rows] == [14, 13, 12, 11, 10, 9]
    assert [row["state"] for row in rows[:4]] == ["quarantined", "completed", "stale by 13", "replaced by 13"]
    top, restored = rows[:2]
    ran = top["run"]
    assert (ran["run_id"], ran["clear_number"], top["base"], top["mode"]) == (run_id(9), 1, 13, "incremental")
    assert (top["totals"]["uploaded_files"], top["files"], top["age_s"]) == (5, 16, 2)
    phases = phases_of(top["durations_us"])
    assert [p.name for p in phases] == ["restore", "process", "upload"]
    assert sum(p.share for p in phases) == pytest.approx(1)
    assert sum(p.seconds for p in phases) == pytest.approx(0.381 + 2.94 + 0.5)
    assert top["committed"] == "1970-01-01T00:00:01Z"
    assert (restored["kind"], restored["mode"], restored["origin"], phases_of(restored["durations_us"])) == (
        *("restore", None, "went back to checkpoint 11", []),
    )
    assert top["code"] == top["code_hash"][:8] and restored["code"] == top["code"]


def test_a_run_is_found_by_its_id(rides: Reading) -> None:
    assert ids_of_run(rides.log, run_id(4), day(4)) == [4, 7]
    assert ids_of_run(rides.log, run_id(9), None) == [12, 14]
    assert ids_of_run(rides.log, "another", day(4)) == []


@pytest.mark.parametrize(
    ("edges", "lanes"),
    [
        ([], {}),
        ([(3, 2), (2, 1), (1, None)], {3: 0, 2: 0, 1: 0}),
        # 5 and 4 were both made from 3: the older result is beside the newer one.
        ([(5, 3), (4, 3), (3, None)], {5: 0, 4: 1, 3: 0}),
        # The lane of a branch that ended is used again.
        ([(6, 4), (5, 4), (4, 2), (3, 2), (2, None)], {6: 0, 5: 1, 4: 0, 3: 1, 2: 0}),
        # A root in the middle of the page, and one that goes on below it.
        ([(4, 1), (3, None), (2, 1)], {4: 0, 3: 1, 2: 1}),
    ],
)
def test_each_branch_of_the_lineage_has_a_lane(edges: list[tuple[int, int | None]], lanes: dict[int, int]) -> None:
    placed, widest = lineage_graph.place(edges)
    assert {p.id: p.lane for p in placed} == lanes
    assert widest == max(lanes.values(), default=-1) + 1
    # What leaves a row below is what comes in above the next.
    for upper, lower in itertools.pairwise(placed):
        assert {line.x2 for line in upper.lines if line.y2 == 1} == {line.x1 for line in lower.lines if line.y1 == 0}


def test_the_lineage_shows_branches_and_restores(rides: Reading) -> None:
    rows = describe_log(rides.log, range(1, 15), {}, now_ms=0)
    placed, widest = lineage_graph.place((row["id"], row["base"]) for row in rows)
    lanes = {one.id: one.lane for one in placed}
    assert lanes[12] != lanes[11] == lanes[13] and lanes[4] != lanes[7]
    assert [row["origin"] for row in rows if row["origin"]] == ["went back to checkpoint 11"]
    assert widest == 2


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (1, {}, None),
        (1, {"reproduces": 1}, "same result as checkpoint 1"),
        (1, {"kind": "consolidate", "reproduces": 1}, "checkpoint 1, consolidated"),
        (1, {"kind": "forget"}, "checkpoint 1 without forgotten keys"),
        (1, {"kind": "restore"}, "went back to checkpoint 1"),
        (None, {"kind": "restore", "restored_from": "sp-7"}, "restored from savepoint sp-7"),
        (None, {"kind": "restore"}, "forked from another pipeline"),
    ],
)
def test_a_checkpoints_origin_is_put_into_words(base: int | None, changes: dict[str, Any], words: str | None) -> None:
    assert origin_of(record(2, day(1), base, **changes)) == words


def test_trends_draw_within_their_columns_and_say_the_figures(rides: Reading) -> None:
    shown = trends.trends_of(rides)
    # Of each interval, the newest checkpoint is drawn: days 4 to 8 have two, day 9 also.
    assert [n for n, _ in shown.points] == [1, 2, 3, 7, 8, 9, 10, 13, 14] and shown.replaced == 5
    columns = [shown.figures.columns[n] for n, _ in shown.points]
    for rows in zip(*(column.rows for column in columns), strict=True):
        assert all(bar.y >= 0 and bar.y + bar.height <= 100.1 for row in rows for bar in row)
        assert max(sum(bar.height for bar in row) for row in rows) >= 99.9  # one scale for all columns
    assert "state: 42 MiB, new: 718 KiB\n" in columns[1].text and "rows: 43,400 in, 10,850 out" in columns[1].text
    assert shown.heading[:2] == ("full", "new") and shown.table[0][:2] == ("41 MiB", "709 KiB")
    zoomed = trends.trends_of(rides, 3, 5)
    assert [n for n, _ in zoomed.points] == [3, 4, 5]


def test_trends_mark_code_changes_and_accept_empty_figures(rides: Reading) -> None:
    one, two, three = rides.log.completed()[:3]
    other = replace(two, content=replace(two.content, code_hash="0" * 64))
    columns = trends.figures_of([one, other, three]).columns
    assert [column.changed for column in columns.values()] == [False, True, True]
    assert columns[other.id].text.endswith("\nthe code changed here")
    none = replace(one.content, totals=replace(one.content.totals, input_rows=0, output_rows=0), durations_us={})
    assert {bar.height for bar in trends.figures_of([replace(one, content=none)]).columns[one.id].rows[2]} == {0.0}
    assert trends.figures_of([]).columns == {}


# --- detail and difference -----------------------------------------------------------------------------------------------------------------


def actions(reading: Reading, checkpoint: int, ref: PipelineRef = RIDES, airflow: str | None = None) -> list[Action]:
    return [*actions_of(ref, reading.log, reading.log.whole(checkpoint), airflow)]


def test_a_checkpoint_offers_restore_savepoint_validate_and_quarantine_commands(rides: Reading) -> None:
    back, keep, _, _, _, again, refuse = actions(rides, 11)
    assert back.command == 'airflow dags trigger rides_restore --conf \'{"target": "11"}\''
    assert keep.command == "cairn savepoint 11 --root memory://ui --code m:RIDES --folder DESTINATION"
    assert again.command == "cairn validate 11 --root memory://ui --code m:RIDES"
    assert refuse.command == "cairn quarantine 11 --root memory://ui --pipeline rides --dry-run"


def test_a_stale_checkpoint_offers_heal_and_no_restore_or_savepoint(rides: Reading) -> None:
    shown = actions(rides, 12, PipelineRef(name="rides", root="memory://ui", dag_id="rides"))
    assert [a.command.partition(" --")[0] for a in shown] == [
        "cairn heal",
        "cairn key KEY 12",
        "cairn key KEY",
        "cairn quarantine 12",
    ]


def test_a_stale_checkpoint_on_a_stale_base_is_repaired_by_its_command() -> None:
    """The command was for the checkpoint's own interval, which is refused as long as its base is stale too."""
    storage = MemoryStorage("memory://ui/rides")
    made = ShownFolder(storage)
    for number in range(1, 6):
        made.day(number)
    made.day(2, "another result")
    ref = PipelineRef(name="rides", root="memory://ui", dag_id="rides")
    first, *_ = actions(read(storage), 5, ref, "http://127.0.0.1:8081")
    assert first.command == (
        "cairn heal --root memory://ui --pipeline rides --to 2024-01-05T00:00:00Z --dag rides --airflow http://127.0.0.1:8081"
    )
    with pytest.raises(StaleStateError):
        made.day(5, "alone")
    for number in (3, 4, 5):
        made.day(number, f"day {number} again")
    assert read(storage).status.problem is None


def test_the_overview_of_a_pipeline_without_a_dag_has_a_command_too(rides: Reading) -> None:
    ref = PipelineRef(name="rides", root="memory://ui")
    command = "cairn heal --root memory://ui --pipeline rides --to 2024-01-09T00:00:00Z --code module:NAME"
    assert pipeline_overview.command_of(ref, rides) == command


def test_a_pipeline_without_a_dag_has_a_command_for_overlapping_output() -> None:
    """The page offered none."""
    again = Rerun(first=day(2).start, last=day(3).start, replace_overlapping=True)
    ref = PipelineRef(name="rides", root="memory://ui", code="jobs.rides:RIDES")
    folder = MemoryStorage("memory://ui/rides")
    steady(folder, 3)
    reading = read(folder)
    reading = replace(reading, status=replace(reading.status, problem="overlaps", rerun=again))
    command = pipeline_overview.command_of(ref, reading)
    assert command == repair_command("memory://ui", "rides", again, code="jobs.rides:RIDES")
    assert command.endswith("--reprocess all --replace-overlapping")


@pytest.mark.parametrize(
    ("airflow", "option"),
    [
        (None, ""),
        ("http://127.0.0.1:8080", ""),
        ("http://localhost:8080/", ""),
        ("http://127.0.0.1:8081", " --airflow http://127.0.0.1:8081"),
        ("https://air.example/team", " --airflow https://air.example/team"),
    ],
)
def test_a_repair_command_names_an_airflow_at_another_address(airflow: str | None, option: str) -> None:
    again = Rerun(first=day(1).start, last=day(2).start)
    command = "cairn backfill --dag rides --from 2024-01-01T00:00:00Z --to 2024-01-02T00:00:00Z"
    assert backfill_command("rides", again, airflow) == command + option


def test_nested_types_in_short_words() -> None:
    nested = {"type": "array", "elementType": {"type": "struct", "fields": [{"name": "x", "type": "long"}]}}
    fields = [
        {"name": "a", "type": nested},
        {"name": "m", "type": {"type": "map", "keyType": "string", "valueType": "date"}},
    ]
    assert pages.type_of({"type": "struct", "fields": fields}) == "a array<struct<x: long>>, m map<string, date>"


# --- reading ---------------------------------------------------------------------------------------------------------------------------------


class Stuck(MemoryStorage):
    """Answers once it is let go."""

    def __init__(self) -> None:
        super().__init__("memory://ui/stuck")
        self.go = threading.Event()
        self.go.set()

    def read(self, path: str, *, offset: int = 0) -> bytes:
        self.go.wait(30)
        return super().read(path, offset=offset)


def test_an_unresponsive_root_times_out_and_does_not_hide_other_pipelines() -> None:
    stuck, well, now_s = Stuck(), MemoryStorage("memory://ui/well"), [0.0]
    for folder in (stuck, well):
        steady(folder, 2)
    stuck.go.clear()
    folders = {"stuck": stuck, "well": well}
    refs = [PipelineRef(name=name, root="memory://ui") for name in folders]
    reader = Reader(lambda ref: folders[ref.name], clock=lambda: now_s[0])
    began_s = time.monotonic()
    looks = reader.look_at_all(refs, 0.3)
    assert time.monotonic() - began_s < 5
    assert "did not answer within" in str(looks[refs[0].key].problem) and looks[refs[0].key].reading is None
    assert looks[refs[1].key].problem is None and looks[refs[1].key].reading is not None
    with pytest.raises(NotAnswered):
        reader.ask(refs[0], "x", lambda storage: storage.read("HEAD.json"), 0.05)
    for _ in range(5):  # a look that waits for the same read begins no other
        reader.look(refs[0], 0.01)
    assert sum(t.name.startswith("cairn-ui stuck log") for t in threading.enumerate()) == 1
    stuck.go.set()
    assert reader.look(refs[0]).reading is not None
    # Once it was read, what is shown when it hangs is what it was, and says so.
    now_s[0] = 100.0
    stuck.go.clear()
    again = reader.look(refs[0], 0.05)
    assert again.reading is not None and again.reading.read_s == 0.0 and again.problem is not None
    stuck.go.set()


def test_two_requests_at_once_share_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            time.sleep(0.1)  # meanwhile the other request looks
            return found

    storage, reads = MemoryStorage("memory://ui/shared"), []
    reader = Reader(lambda ref: storage)
    monkeypatch.setattr(reader, "_calls", Slow())
    ref = PipelineRef(name="shared", root="memory://ui")
    both = threading.Barrier(2)

    def ask(_: int) -> object:
        both.wait(10)
        return reader.ask(ref, "x", lambda storage: time.sleep(0.5) or reads.append(1), 10)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ask, range(2))] == [None, None] and reads == [1]


def test_a_log_read_stays_fresh_while_another_pipelines_storage_times_out() -> None:
    """The list of all pipelines waits 2.5 s for a silent storage. Readings were too old after 2 s, and read again with 0 s left."""
    stuck, well, now_s = Stuck(), Stuck(), [0.0]
    steady(well, 2)
    stuck.go.clear()
    folders = {"a": stuck, "b": well}
    refs = [PipelineRef(name=name, root="memory://ui") for name in folders]
    reader = Reader(lambda ref: folders[ref.name], clock=lambda: now_s[0])
    assert reader.look(refs[1]).problem is None

    def pass_time() -> None:
        now_s[0] = 2.5
        well.go.clear()  # Another read of this pipeline would not end in time.

    now_s[0] = 1.0
    threading.Timer(0.2, pass_time).start()
    looks = reader.look_at_all(refs, 0.5)
    assert now_s[0] == 2.5 and looks[refs[0].key].reading is None and looks[refs[1].key].problem is None
    stuck.go.set()
    well.go.set()


def refuse(_: Any) -> Any:
    raise StorageUnavailable("the storage is away")


def test_a_storage_error_is_shown_as_the_pipelines_problem() -> None:
    assert Reader(refuse).look(RIDES) == Look(reading=None, problem="the storage is away")


def test_after_a_failed_read_the_storage_is_opened_with_the_connection_as_it_is_now(storage: Storage) -> None:
    opened, now_s = list[PipelineRef](), [0.0]
    reader = Reader(lambda ref: opened.append(ref) or storage, clock=lambda: now_s[0])
    first = reader.look(RIDES).reading
    with pytest.raises(StorageUnavailable):
        reader.ask(RIDES, "x", refuse)
    now_s[0] = 10.0
    second, other = reader.look(RIDES).reading, replace(RIDES, storage_conn_id="other")
    assert first is not None and second is not None and second.log.entries is not first.log.entries
    assert reader.ask(other, "x", str) and opened == [RIDES, RIDES, other]


class Counted(MemoryStorage):
    calls = 0

    def read(self, path: str, *, offset: int = 0) -> bytes:
        self.calls += 1
        return super().read(path, offset=offset)


@pytest.mark.long("half a second", runs_in="ci")
def test_a_second_look_reads_the_end_of_the_log_only() -> None:
    folder, now_s = Counted("memory://ui/rides"), [0.0]
    shown = steady(folder, 20)
    reader = Reader(lambda _: folder, clock=lambda: now_s[0])
    first = reader.look(RIDES).reading
    folder.calls = 0
    assert reader.look(RIDES).reading is first and folder.calls == 0
    now_s[0] = 10.0
    second = reader.look(RIDES).reading
    assert folder.calls <= 3 and first is not None and second is not None and second.log is first.log
    shown.day(21)
    now_s[0], folder.calls = 20.0, 0
    third = reader.look(RIDES).reading
    assert third is not None and third.newest is not None and third.newest.id == 21 and folder.calls <= 5


@pytest.mark.long("half a second", runs_in="ci")
def test_a_folder_that_began_anew_is_read_anew() -> None:
    folders, now_s = [MemoryStorage("memory://ui/a"), MemoryStorage("memory://ui/b")], [0.0]
    steady(folders[0], 4).day(5, "another result")
    eventful(folders[1])
    reader = Reader(lambda _: _Either(folders), clock=lambda: now_s[0])
    for head_id in (5, 14):
        reading, info = reader.look(RIDES).reading, folders[0].stat(paths.record(4))
        assert reading is not None and info is not None and reading.log.head_id == head_id
        assert reader.written(RIDES, reading.log, [4]) == {4: info.modified_ms}
        folders.pop(0)
        now_s[0] = 10.0


class _Either:
    """The first of some storages, whichever that is at the time."""

    def __init__(self, folders: list[MemoryStorage]) -> None:
        self._folders = folders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folders[0], name)


def test_docs_are_found_by_checkpoint(tmp_path: Path) -> None:
    for n, at in ((3, "1"), (3, "2"), (4, "1")):
        page = tmp_path / f"rides/validations/rides/total/checkpoint {n} a_b/{at}/h.html"
        page.parent.mkdir(parents=True)
        page.write_text("")
    (tmp_path / "rides/index.html").write_text("")
    own = tmp_path / "rides/checks/checkpoint 4 a_b.html"
    own.parent.mkdir()
    own.write_text("")
    os.utime(own, (0, 0))  # The page with all checks comes first, also if it is older.
    found = docs.of_checkpoints(tmp_path, "rides")
    assert found.keys() == {3, 4} and found[4] == "rides/checks/checkpoint 4 a_b.html"
    assert docs.of_checkpoints(tmp_path, "other") == docs.of_checkpoints(tmp_path, "../rides") == {}
    page = docs.page_at("rides/validations/rides/<b>/checkpoint 3 a_b/1/h.html")
    assert page is not None and (page.of, page.table, page.checkpoint) == ("checkpoint 3", "<b>", 3)
    whole = docs.page_at(found[4])
    assert whole is not None and (whole.of, whole.table, whole.checkpoint) == ("checkpoint 4", None, 4)
    for path in ("rides/index.html", "rides/checks/x.css", "rides/checks/deeper/x.html"):
        assert docs.page_at(path) is None
    listed = docs.pages_in(tmp_path)
    assert (len(listed), listed[-1].table, listed[-1].at) == (4, None, datetime(1970, 1, 1, tzinfo=UTC))


def test_every_template_loads_and_escapes_html() -> None:
    env = pages.environment()
    assert env.autoescape is True
    for name in env.list_templates():
        source = (Path(pages.__file__).parent / "templates" / name).read_text()
        assert "|safe" not in source.replace(" ", "") and "style=" not in source and "onclick" not in source, name
        env.get_template(name)
    html = pages.render(
        "error.html", base="", ui="", status=404, detail="<script>", refusal=after_error(404), running=False, now=NOW
    )
    assert "&lt;script&gt;" in html and "<script>" not in html.partition("</head>")[2]
