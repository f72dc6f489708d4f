"""The FastAPI application with the pages about checkpoints. It writes nothing to the storage or to Airflow's database.

Each route checks the user's rights, reads logs, builds the page's values and renders a template.

    /                              all pipelines that the user may read
    /dag/<dag>                     the pipelines of a DAG; if the DAG has one pipeline, its overview
    /run/<dag>/<run>               the checkpoints that a run restored and committed
    /task/<dag>/<task>/<run>       the same, as a tab of a task instance
    /p/<key>/…                     pages of the pipeline with this `PipelineRef.key`: overview, history, lineage,
                                   trends, compare, trials, trials/<name>, checkpoint/<id>, docs/<path>
    /static/<file>                 the style sheet and the script
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from cairn_operators.data_docs import URL_PREFIX as DOCS_PREFIX
from cairn_operators.data_docs import docs_root, page_in
from cairn_ui import airflow_database as airflow_side
from cairn_ui import (
    airflow_runs,
    lineage,
    next_steps,
    pipeline_overview,
    read_runs,
    run_bars,
    trends,
    trials,
)
from cairn_ui import checkpoint_list as history
from cairn_ui import data_docs as docs
from cairn_ui.access import Rights
from cairn_ui.airflow_values import Run, Schedule
from cairn_ui.checkpoint_detail import comparison_of, detail_of, manifests_of
from cairn_ui.error_pages import NotInPipeline, add_error_pages
from cairn_ui.find_pipelines import PipelineRef
from cairn_ui.page_rights import PAGE, Asks
from cairn_ui.read_logs import NotAnswered, Reader
from cairn_ui.render_template import CONTENT_TYPES, HEADERS, STATIC, render
from cairn_ui.run_timeline import timeline_of
from cairn_ui.values import Look, Reading
from state_backend.adapters.open_storage import join_url
from state_backend.checkpoint.lineage import plan_base
from state_backend.checkpoint.log import Log, read_log
from state_backend.checkpoint.trials import intervals_of_trial, root_of_trial, trials_in, trials_url
from state_backend.inspection.compare_logs import IntervalDifference, compare_intervals
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError
from state_backend.values.intervals import Interval
from state_backend.values.records import Permissions, Record, Trial

URL_PREFIX = "/cairn/checkpoints"
T = TypeVar("T")

reader = Reader(airflow_side.open_folder)
dags = airflow_side.DagsInDatabase()
reasons = airflow_runs.Reasons()
readers = read_runs.Readers(logs_of_pipelines=reader, logs_of_tries=reasons)

# Static files hold no data, so anyone may read them. All other routes need a logged-in user.
app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


def _base(request: Request) -> str:
    """Return the path at which Airflow serves this application, including the prefix of a proxy."""
    return str(request.scope.get("root_path", "")).rstrip("/")


add_error_pages(app, _base)


@app.get("/static/{name}", response_model=None)
def static(name: str) -> Response:
    """Serve a style sheet or a script."""
    file = STATIC / name
    if "/" in name or file.suffix not in CONTENT_TYPES or not file.is_file():
        raise HTTPException(404, "This file does not exist")
    kept = {"Cache-Control": "public, max-age=86400", "X-Content-Type-Options": "nosniff"}
    return FileResponse(file, media_type=CONTENT_TYPES[file.suffix], headers=kept)


# --- pipelines -------------------------------------------------------------------------------------------------------------------


@app.get("/", **PAGE)
def pipelines(request: Request, rights: Asks) -> Response:
    """Show all pipelines that the user may read."""
    return _list(request, rights.readable(dags.pipelines()), None)


@app.get("/dag/{dag_id}", **PAGE)
def of_dag(request: Request, rights: Asks, dag_id: str) -> Response:
    """Show the pipelines that a DAG commits or restores. If there is only one, redirect to its overview."""
    refs = [r for r in rights.readable(dags.pipelines()) if dag_id == r.dag_id or dag_id in r.restore_dags]
    if len(refs) == 1:
        return RedirectResponse(f"{_base(request)}/p/{quote(refs[0].key)}/", headers=HEADERS)
    return _list(request, refs, dag_id)


def _list(request: Request, refs: list[PipelineRef], dag_id: str | None) -> Response:
    now = datetime.now(UTC)
    looks = reader.look_at_all(refs)
    dag_ids = {r.dag_id for r in refs if r.dag_id is not None}
    schedules, runs = airflow_side.schedules_of(dag_ids), airflow_runs.last_runs(dag_ids, run_bars.MOST)
    rows = [_row(ref, looks[ref.key], schedules.get(ref.dag_id or ""), runs.get(ref.dag_id or ""), now) for ref in refs]
    running = any(s.running for s in schedules.values()) or any(row.read is None and row.problem for row in rows)
    return _page(
        request,
        "pipelines.html",
        rows=pipeline_overview.worst_first(rows),
        dag_id=dag_id,
        next=next_steps.without_pipeline(dag_id),
        running=running,
        now=now,
    )


def _row(
    ref: PipelineRef, look: Look, schedule: Schedule | None, runs: Sequence[Run] | None, now: datetime
) -> pipeline_overview.OverviewRow:
    stored, reading = reader.stored(ref), look.reading
    if reading is None:
        return pipeline_overview.overview_row(ref, look, schedule, stored, None, now)

    def row(_: Storage) -> pipeline_overview.OverviewRow:
        last, written = pipeline_overview.furthest(reading), None
        if last is not None and look.problem is None:
            written = _written(ref, reading.log, [last.id]).get(last.id)
        bars = None if runs is None else read_runs.bars(reading.log, runs, now)
        return pipeline_overview.overview_row(ref, look, schedule, stored, written, now, bars)

    try:  # The row may need reads of earlier records, so they run in a thread with a time limit.
        return _asked(ref, "overview row", row)
    except (CairnError, NotAnswered) as error:
        return pipeline_overview.OverviewRow(ref=ref, problem=str(error), read=None)


# --- one pipeline ----------------------------------------------------------------------------------------------------------------


@app.get("/p/{key}/", **PAGE)
def of_overview(request: Request, rights: Asks, key: str) -> Response:
    """Show the problems of a pipeline, its latest checkpoints, and whether its next interval can start."""
    ref, look = _look(rights, key)
    schedule = _schedule(ref)

    def view(reading: Reading) -> pipeline_overview.Overview:
        savepoint = None
        if ref.dag_id is not None and ref.savepoint is not None:
            savepoint = airflow_side.last_savepoint(ref.dag_id, ref.savepoint)
        pages = docs.of_checkpoints(docs_root(), ref.name)

        def read(_: Storage) -> pipeline_overview.Overview:
            best = pipeline_overview.furthest(reading)
            written = _written(ref, reading.log, [best.id] if best is not None else [])
            return pipeline_overview.overview(
                ref, reading, schedule, savepoint, written, pages, datetime.now(UTC), _airflow(request)
            )

        return replace(
            _asked(ref, "overview", read),
            runs=read_runs.pipeline_runs_of(ref, reading, schedule, rights, readers, _airflow(request)),
        )

    return _of_pipeline(request, ref, look, "overview.html", view, schedule=schedule, stored=reader.stored(ref))


@app.get("/p/{key}/history", **PAGE)
def of_history(request: Request, rights: Asks, key: str, before: Annotated[int | None, Query(ge=1)] = None) -> Response:
    """Show checkpoints, newest first."""
    ref, look = _look(rights, key)

    def view(reading: Reading) -> history.Page:
        ids = history.ids_of_page(reading.log.head_id, before)
        page = _asked(
            ref,
            f"history {before}",
            lambda _: history.page_of(
                reading, before, _written(ref, reading.log, ids), docs.of_checkpoints(docs_root(), ref.name)
            ),
        )
        return replace(page, rows=_with_runs(ref, page.rows))

    return _of_pipeline(request, ref, look, "history.html", view)


@app.get("/p/{key}/lineage", **PAGE)
def of_lineage(request: Request, rights: Asks, key: str, before: Annotated[int | None, Query(ge=1)] = None) -> Response:
    """Show checkpoints and their bases as a graph, newest first."""
    ref, look = _look(rights, key)
    return _of_pipeline(
        request,
        ref,
        look,
        "lineage.html",
        lambda reading: _asked(ref, f"lineage {before}", lambda _: lineage.graph_of(reading, before)),
    )


@app.get("/p/{key}/trends", **PAGE)
def of_trends(
    request: Request,
    rights: Asks,
    key: str,
    first: Annotated[int | None, Query(ge=1)] = None,
    last: Annotated[int | None, Query(ge=1)] = None,
) -> Response:
    """Show charts of the retained checkpoints."""
    ref, look = _look(rights, key)
    return _of_pipeline(
        request,
        ref,
        look,
        "trends.html",
        lambda reading: trends.trends_of(reading, first, last),
        first=first,
        last=last,
    )


@app.get("/p/{key}/checkpoint/{number}", **PAGE)
def of_checkpoint(request: Request, rights: Asks, key: str, number: int) -> Response:
    """Show one checkpoint.

    A sweep adds a record without a checkpoint to the log, with a number of the same series. The page of a sweep or of a
    dropped checkpoint shows only what its row in the history shows.
    """
    ref, look = _look(rights, key)

    def view(reading: Reading) -> Any:
        if not 1 <= number <= reading.log.head_id:
            raise NotInPipeline(ref, f"Checkpoint {number} does not exist; the newest one is {reading.log.head_id}")

        def read(storage: Storage) -> Any:
            reading.log.entry(number)
            pipeline_overview.prefetch(reading.log, [number])
            record = reading.log.entry(number)
            if not isinstance(record, Record) or number not in reading.log.retained:
                return _with_runs(ref, [history.row_of(reading, number)])[0]
            page = docs.of_checkpoints(docs_root(), ref.name).get(number)
            written = _written(ref, reading.log, [number]).get(number)
            found = detail_of(ref, reading, record, manifests_of(record, storage), written, page, _airflow(request))
            return replace(found, row=_with_runs(ref, [found.row])[0])

        return _asked(ref, f"checkpoint {number}", read)

    return _of_pipeline(request, ref, look, "checkpoint.html", view, number=number)


@app.get("/p/{key}/compare", **PAGE)
def compare(
    request: Request,
    rights: Asks,
    key: str,
    first: Annotated[int | None, Query(ge=1)] = None,
    second: Annotated[int | None, Query(ge=1)] = None,
) -> Response:
    """Show the difference between two checkpoints. Without two ids, show a form to choose them."""
    ref, look = _look(rights, key)

    def view(reading: Reading) -> Any:
        if first is None or second is None:
            return None
        pair = [reading.log.entry(n) if n in reading.log.retained else None for n in (first, second)]
        if not all(isinstance(record, Record) for record in pair):
            gone = ", ".join(str(n) for n, r in zip((first, second), pair, strict=True) if not isinstance(r, Record))
            raise NotInPipeline(ref, f"Checkpoint {gone} is not retained. Only retained checkpoints can be compared")
        one, other = pair

        def read(storage: Storage) -> Any:
            assert isinstance(one, Record) and isinstance(other, Record)
            return comparison_of(ref, one, manifests_of(one, storage), other, manifests_of(other, storage))

        return _asked(ref, f"compare {first} {second}", read)

    kept = sorted(look.reading.log.retained, reverse=True) if look.reading is not None else []
    chosen = {
        "first": first or (kept[1] if len(kept) > 1 else None),
        "second": second or (kept[0] if kept else None),
    }
    return _of_pipeline(request, ref, look, "compare.html", view, kept=kept, chosen=chosen)


@app.get("/p/{key}/trials", **PAGE)
def of_trials(request: Request, rights: Asks, key: str) -> Response:
    """Show the list of the pipeline's trials."""
    ref, look = _look(rights, key)

    def read(_: Storage) -> list[trials.TrialRow]:
        return [trials.row_of(trial, datetime.now(UTC)) for trial in _trials(ref)]

    newest = look.reading.newest if look.reading is not None and look.reading.log.head_id else None
    step = next_steps.without_trial(ref, newest.content.interval if newest is not None else None)
    return _of_pipeline(request, ref, look, "trials.html", lambda _: _asked(ref, "trials", read), without_trial=step)


@app.get("/p/{key}/trials/{name}", **PAGE)
def of_trial(request: Request, rights: Asks, key: str, name: str) -> Response:
    """Show, for each interval of a trial, whether its result equals production's."""
    ref, look = _look(rights, key)

    def view(reading: Reading) -> trials.TrialPage:
        trial, found = _tried(ref, reading, name)
        return trials.page_of(ref, trial, found, datetime.now(UTC))

    return _of_pipeline(request, ref, look, "trial.html", view)


@app.get("/p/{key}/docs/{path:path}", **PAGE)
def of_docs(request: Request, rights: Asks, key: str, path: str) -> Response:
    """Show a page of Data Docs below the heading and the tabs of its pipeline."""
    ref = _ref(rights, key)
    page = docs.page_at(path) if rights.may_read_docs(ref.name, dags.pipelines()) else None
    if page is None or page.pipeline != ref.name or page_in(docs_root(), path) is None:
        raise HTTPException(404, "This page of Data Docs does not exist")
    return _of_pipeline(request, ref, Look(reading=None), "docs.html", page=page, docs_prefix=DOCS_PREFIX)


# --- runs ------------------------------------------------------------------------------------------------------------------------


@app.get("/run/{dag_id}/{run_id:path}", **PAGE)
def of_run(request: Request, rights: Asks, dag_id: str, run_id: str) -> Response:
    """Show the checkpoints that a run of a DAG restored and committed."""
    return _run(request, rights, dag_id, run_id, None)


@app.get("/task/{dag_id}/{task_id}/{run_id:path}", **PAGE)
def of_task(request: Request, rights: Asks, dag_id: str, task_id: str, run_id: str) -> Response:
    """Show the checkpoints that the run of a task instance restored and committed, as a tab of the task instance."""
    return _run(request, rights, dag_id, run_id, task_id)


def _run(request: Request, rights: Rights, dag_id: str, run_id: str, task_id: str | None) -> Response:
    if not rights.may_read_dag(dag_id):
        raise HTTPException(403, "You may not read this DAG")
    run = airflow_runs.run_of(dag_id, run_id)
    if run is None:
        raise HTTPException(404, "Airflow has no such run of this DAG")
    refs = [r for r in dags.pipelines() if dag_id == r.dag_id or dag_id in r.restore_dags]
    refs = rights.readable(refs)
    looks = reader.look_at_all(refs)
    interval = run.interval
    parts = []
    for ref in refs:
        look, commits, would = looks[ref.key], [], None
        if (reading := look.reading) is not None:
            try:
                commits = _asked(ref, f"run {run_id}", lambda _, r=reading: _commits_of(r, run_id, interval))  # type: ignore[misc]
                if not commits and interval is not None and ref.dag_id == dag_id:
                    would = _asked(ref, f"base {run_id}", lambda _, r=reading, p=ref: _would(r.log, p.name, interval))  # type: ignore[misc]
            except (CairnError, NotAnswered) as error:
                look = Look(reading=reading, problem=str(error))
        step = next_steps.after_failed_read(ref)
        parts.append({"ref": ref, "look": look, "commits": commits, "would": would, "next": step})
    now, tries = datetime.now(UTC), airflow_runs.tries_of(dag_id, run_id)
    own = next((ref for ref in refs if ref.dag_id == dag_id), None)
    return _page(
        request,
        "run.html",
        dag_id=dag_id,
        run=run,
        task_id=task_id,
        timeline=timeline_of(run, tries, now),
        failed=() if own is None else read_runs.failed_tries(own, run_id, rights, readers, tries),
        parts=parts,
        next=next_steps.without_pipeline(dag_id),
        running=run.unfinished,
        now=now,
    )


def _commits_of(reading: Reading, run_id: str, interval: Interval | None) -> list[dict[str, Any]]:
    log, found = reading.log, []
    for n in reversed(history.ids_of_run(log, run_id, interval)):
        row = history.row_of(reading, n)
        base = log.entry(row.base) if row.base is not None else None
        found.append(
            {
                "row": row,
                "record": log.entry(n) if row.whole else None,
                "base": history.row_of(reading, row.base) if base is not None and row.base is not None else None,
                "source": lineage.source(log, n),
            }
        )
    return found


def _would(log: Log, name: str, interval: Interval) -> dict[str, Any]:
    """Return what would happen if the interval ran now."""
    done = log.completed()
    if not done:
        return {"base": None, "problem": None}
    try:
        base = plan_base(log, name, interval, Permissions(), done[-1].content.pipeline_start_ms)
    except CairnError as error:
        return {"base": None, "problem": str(error)}
    return {"base": base.id if base is not None else None, "problem": None}


# --- what they share ---------------------------------------------------------------------------------------------------------------


def _ref(rights: Rights, key: str) -> PipelineRef:
    """Return the pipeline that a URL names."""
    ref = next((r for r in dags.pipelines() if r.key == key), None)
    if ref is None or not rights.may_read(ref):
        raise HTTPException(404, "This pipeline does not exist, or you may not read its DAG")
    return ref


def _look(rights: Rights, key: str) -> tuple[PipelineRef, Look]:
    ref = _ref(rights, key)
    look = reader.look(ref)
    newest = look.reading.log.newest if look.reading is not None else None
    return ref if ref.code or newest is None else replace(ref, code=newest.content.code), look


def _schedule(ref: PipelineRef) -> Schedule | None:
    return airflow_side.schedules_of({ref.dag_id}).get(ref.dag_id) if ref.dag_id is not None else None


def _trials(ref: PipelineRef) -> list[Trial]:
    return trials_in(airflow_side.open_url(ref, trials_url(ref.root, ref.name)))


def _tried(ref: PipelineRef, reading: Reading, name: str) -> tuple[Trial, list[IntervalDifference]]:
    """Return a trial's record, and for each of its intervals the difference from production."""

    def read(_: Storage) -> tuple[Trial, list[IntervalDifference]] | None:
        trial = next((trial for trial in _trials(ref) if trial.name == name), None)
        if trial is None:
            return None
        log = read_log(airflow_side.open_url(ref, join_url(root_of_trial(ref.root, ref.name, name), ref.name)))
        return trial, compare_intervals(reading.log, log, intervals_of_trial(trial))

    found = _asked(ref, f"trial {name}", read)
    if found is None:
        raise HTTPException(404, "This trial does not exist. It may have been removed")
    return found


def _asked(ref: PipelineRef, what: str, work: Callable[[Storage], T]) -> T:
    return reader.ask(ref, what, work)


def _written(ref: PipelineRef, log: Log, ids: Collection[int]) -> dict[int, int]:
    """Return commit times in ms since the epoch, by checkpoint id.

    If the storage fails or does not answer in time, the result is empty. The page then shows everything but the times.
    """
    try:
        return reader.written(ref, log, ids)
    except (CairnError, NotAnswered):
        return {}


def _of_pipeline(
    request: Request,
    ref: PipelineRef,
    look: Look,
    template: str,
    make: Callable[[Reading], Any] | None = None,
    *,
    schedule: Schedule | None = None,
    **values: Any,
) -> Response:
    """Render a page of one pipeline."""
    view, problem = None, look.problem
    if make is not None and look.reading is not None:
        try:
            view = make(look.reading)
        except (CairnError, NotAnswered) as error:
            problem = str(error)
    if schedule is None:
        schedule = _schedule(ref)
    running = bool(schedule is not None and schedule.running) or problem is not None
    read = None if look.reading is None else datetime.fromtimestamp(look.reading.read_s, UTC)
    return _page(
        request,
        template,
        ref=ref,
        look=look,
        view=view,
        problem=problem,
        read=read,
        schedule=schedule,
        after_failed_read=next_steps.after_failed_read(ref),
        without_checkpoint=next_steps.without_checkpoint(ref, schedule),
        running=running,
        now=datetime.now(UTC),
        **values,
    )


def _page(request: Request, template: str, **values: Any) -> Response:
    html = render(template, base=_base(request), ui=airflow_side.ui_prefix(), **values)
    return HTMLResponse(html, headers=HEADERS)


def _with_runs(ref: PipelineRef, rows: Sequence[history.Row]) -> tuple[history.Row, ...]:
    """Set `in_airflow` on the rows whose run Airflow still has.

    Only these rows link to their run, since a link to a deleted run would show an error.
    """
    there = airflow_runs.runs_there(ref.dag_id, {row.run.run_id for row in rows if row.run is not None})
    return tuple(replace(row, in_airflow=row.run is not None and row.run.run_id in there) for row in rows)


def _airflow(request: Request) -> str:
    return airflow_side.airflow_url(str(request.base_url.replace(path="")))
